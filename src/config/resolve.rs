//! Turns a walked file into a [`Config`]: typed values, and the rules between keys.

use super::json_node::{JsonNode, JsonValue};
use super::note::printable;
use super::walk::ConfigWalk;
use super::{
    Config, ConfigNote, ConfigProblem, ConfigRule, Fp16, GradientOp, LeafModule, LocalStepsConfig, PipelineConfig,
    Precision, RunValues, StatePrecision, TagValidation, ZeroConfig, batch, expert_parallel, local_steps, monitoring,
    offload, optim, pipeline, scheduler, value_conversion,
};
use crate::layout::ZeroStage;
use crate::util::counted;
use candle_core::DType;
use serde_json::Value;

/// The problems of a tree, in file order, and the notes about it.
pub(super) struct ConfigRejection {
    pub problems: Vec<ConfigProblem>,
    pub notes: Vec<ConfigNote>,
}

/// Returns the `pipeline` section of a configuration that may have problems.
pub(super) fn pipeline_section(root: &JsonNode, run: &RunValues) -> PipelineConfig {
    match &root.value {
        JsonValue::Object(entries) => pipeline::resolve(&mut ConfigWalk::new(entries, run)),
        _ => PipelineConfig::default(),
    }
}

/// Resolves a complete tree.
pub(super) fn resolve(root: &JsonNode, world_size: usize, run: &RunValues) -> Result<Config, ConfigRejection> {
    let JsonValue::Object(entries) = &root.value else {
        let message = format!("expected an object `{{...}}`, found {}", value_conversion::describe_value(root));
        let problem = ConfigProblem { rule: ConfigRule::Type, path: "(top)".into(), position: root.position, message };
        return Err(ConfigRejection { problems: vec![problem], notes: Vec::new() });
    };
    let mut walk = ConfigWalk::new(entries, run);
    let walk_ref = &mut walk;
    let local_steps = local_steps::resolve(walk_ref);
    let world_size = LocalStepsConfig::world_size(local_steps.as_ref(), world_size);
    let batch = batch::resolve(walk_ref, world_size);
    let mut zero = zero(walk_ref);
    let precision = precision(walk_ref);
    let autocast = autocast(walk_ref, precision);
    let states = states(walk_ref, zero.stage, precision);
    let optimizer = optim::optimizer(walk_ref, zero.stage);
    let scheduler = scheduler::scheduler(walk_ref, optimizer.as_ref());
    check_gradients(walk_ref, zero.stage, precision);
    check_zero(walk_ref, zero.stage);
    check_compression(walk_ref, &zero);
    zero.mics_shard_size = mics_shard_size(walk_ref, &zero, world_size);
    let expert_parallel_size = expert_parallel::resolve(walk_ref, &zero, world_size, local_steps.is_some());
    check_data_types(walk_ref, zero.stage, precision);
    let keep_in_fp32_modules = fp32_modules(walk_ref, precision);
    check_data_efficiency(walk_ref);
    check_vocabulary(walk_ref);
    zero.offload_optimizer = offload::optimizer(walk_ref, zero.stage, optimizer.as_ref());
    zero.offload_param = offload::param(walk_ref, zero.stage);
    let activation_checkpointing = activation_checkpointing(walk_ref);
    let pipeline = pipeline::resolve(walk_ref);
    optim::check_averaging(walk_ref, optimizer.as_ref(), states, local_steps.is_some());
    if walk.bool("flops_profiler.enabled") {
        walk.set("wall_clock_breakdown", true.into());
    }
    let monitoring = monitoring::resolve(&mut walk);
    let Some(batch) = batch.filter(|_| walk.problems.is_empty()) else {
        // Problems without a position go last.
        walk.problems.sort_by_key(|problem| problem.position.map_or((true, None), |position| (false, Some(position))));
        // A refused key was not accepted, so it gets no note.
        walk.notes.retain(|note| walk.problems.iter().all(|problem| problem.path != note.path));
        return Err(ConfigRejection { problems: walk.problems, notes: walk.notes });
    };
    Ok(Config {
        world_size,
        batch,
        precision,
        autocast,
        states,
        gradient_clipping: walk.float("gradient_clipping"),
        prescale_gradients: walk.bool("prescale_gradients"),
        gradient_predivide_factor: walk.float("gradient_predivide_factor"),
        gradient_allreduce_op: gradient_op(&walk),
        communication_data_type: dtype(walk.str("communication_data_type")),
        grad_accum_dtype: dtype(walk.str("data_types.grad_accum_dtype")),
        buffer_dtype: dtype(walk.str("data_types.buffer_dtype")),
        keep_in_fp32_modules,
        zero,
        optimizer,
        gradient_check: walk.bool("gradient_check"),
        pipeline,
        expert_parallel_size,
        local_steps,
        allows_untested_optimizer: walk.bool("zero_allow_untested_optimizer"),
        scheduler,
        steps_per_print: walk.int("steps_per_print").and_then(|n| u64::try_from(n).ok()),
        wall_clock_breakdown: walk.bool("wall_clock_breakdown"),
        monitoring,
        seed: walk.count("seed"),
        activation_checkpointing,
        cpu_checkpointing: walk.bool("activation_checkpointing.cpu_checkpointing"),
        tag_validation: tag_validation(&walk),
        upload_checkpoints_to: walk.str("checkpoint.upload_to").map(str::to_owned),
        use_node_local_storage: walk.bool("checkpoint.use_node_local_storage"),
        // The section may be absent.
        saves_in_background: walk.get("checkpoint.writer.decoupled") == Some(&true.into()),
        shows_save_statistics: walk.get("checkpoint.writer.show_statistics") == Some(&true.into()),
        aio: offload::aio(&walk),
        notes: walk.notes,
        all_keys: walk.tree,
    })
}

fn dtype(name: Option<&str>) -> Option<DType> {
    Some(match name? {
        "fp16" => DType::F16,
        "bf16" => DType::BF16,
        _ => DType::F32,
    })
}

fn gradient_op(walk: &ConfigWalk<'_>) -> GradientOp {
    if walk.str("gradient_allreduce_op") == Some("sum") { GradientOp::Sum } else { GradientOp::Mean }
}

fn tag_validation(walk: &ConfigWalk<'_>) -> TagValidation {
    match walk.str("checkpoint.tag_validation").map(str::to_lowercase).as_deref() {
        Some("ignore") => TagValidation::Ignore,
        Some("fail") => TagValidation::Fail,
        _ => TagValidation::Warn,
    }
}

fn zero(walk: &mut ConfigWalk<'_>) -> ZeroConfig {
    let stage = ZeroStage::from_number(walk.count("zero_optimization.stage")).unwrap_or_default();
    let count = |key: &str| {
        // Counts are below 2^63. A count that exceeds usize (on 32 bits) is the same as "all".
        usize::try_from(walk.count(&format!("zero_optimization.{key}"))).unwrap_or(usize::MAX)
    };
    let sequential = walk.bool("zero_optimization.stage3_allgather_sequential");
    let overlap_comm = walk.get("zero_optimization.overlap_comm").and_then(Value::as_bool);
    ZeroConfig {
        stage,
        reduce_bucket_size: count("reduce_bucket_size"),
        allgather_bucket_size: count("allgather_bucket_size"),
        overlap_comm: overlap_comm.unwrap_or(stage == ZeroStage::Three),
        load_from_fp32_weights: walk.bool("zero_optimization.load_from_fp32_weights"),
        log_trace_cache_warnings: walk.bool("zero_optimization.log_trace_cache_warnings"),
        contiguous_gradients: walk.bool("zero_optimization.contiguous_gradients"),
        reduce_scatter: walk.bool("zero_optimization.reduce_scatter"),
        sub_group_size: count("sub_group_size"),
        prefetch_bucket_size: if sequential { 1 } else { count("stage3_prefetch_bucket_size") },
        param_persistence_threshold: count("stage3_param_persistence_threshold"),
        model_persistence_threshold: count("stage3_model_persistence_threshold"),
        max_live_parameters: count("stage3_max_live_parameters"),
        max_reuse_distance: count("stage3_max_reuse_distance"),
        hpz_partition_size: count("zero_hpz_partition_size").max(1),
        // Resolved once the rules between keys have been checked.
        mics_shard_size: None,
        quantized_weights: walk.bool("zero_optimization.zero_quantized_weights"),
        quantized_nontrainable_weights: walk.bool("zero_optimization.zero_quantized_nontrainable_weights"),
        quantized_gradients: walk.bool("zero_optimization.zero_quantized_gradients"),
        compress_between_hosts_only: walk.bool("zero_optimization.compress_between_hosts_only"),
        ignore_unused_parameters: walk.bool("zero_optimization.ignore_unused_parameters"),
        leaf_module: LeafModule {
            names: walk.strings("zero_optimization.leaf_module.names"),
            name_suffixes: walk.strings("zero_optimization.leaf_module.name_suffixes"),
        },
        // Resolved once stage and optimizer are known.
        offload_optimizer: None,
        offload_param: None,
    }
}

fn precision(walk: &mut ConfigWalk<'_>) -> Precision {
    match (walk.bool("fp16.enabled"), walk.bool("bf16.enabled")) {
        (false, false) => Precision::F32,
        (false, true) => Precision::Bf16 { check_grad_overflow: walk.bool("bf16.check_grad_overflow") },
        (true, true) => {
            let position = walk.position("bf16.enabled");
            let text =
                "bf16 (bfloat16) and fp16 are both enabled, but they are mutually exclusive; disable one of them";
            walk.problem(ConfigRule::Conflict, "bf16.enabled", position, text);
            Precision::F32
        }
        (true, false) => fp16(walk),
    }
}

/// Resolves the dtypes of master weights and optimizer moments according to DeepSpeed's rules.
fn states(walk: &mut ConfigWalk<'_>, stage: ZeroStage, precision: Precision) -> StatePrecision {
    let keys =
        ["fp16.fp16_master_weights_and_grads", "bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states"];
    let [fp16_master, bf16_master, bf16_moments] = keys.map(|key| walk.bool(key));
    for key in keys.into_iter().filter(|key| walk.bool(key)).collect::<Vec<_>>() {
        let section = if key.starts_with("fp16") { "fp16" } else { "bf16" };
        let is_on = precision.dtype() == if section == "fp16" { DType::F16 } else { DType::BF16 };
        let text = if stage == ZeroStage::Zero {
            "true needs stage 1, 2 or 3, as in DeepSpeed".to_owned()
        } else if key == keys[2] && !bf16_master {
            "true needs bf16_master_weights_and_grads too, as in DeepSpeed".to_owned()
        } else if !is_on {
            format!("true needs {section}; set {section}.enabled to true")
        } else {
            continue;
        };
        let position = walk.position(key);
        walk.problem(ConfigRule::Conflict, key, position, text);
    }
    StatePrecision { master_weights: !fp16_master && !bf16_master, bf16_moments }
}

fn fp16(walk: &mut ConfigWalk<'_>) -> Precision {
    /// 2^127 is the largest power of two in f32, the dtype in which the loss is scaled.
    const MAX_LOSS_SCALE_POWER: i64 = 127;
    let loss_scale = walk.float("fp16.loss_scale");
    let dynamic = loss_scale == 0.0;
    let int = |key: &str| walk.int(&format!("fp16.{key}")).unwrap_or_default();
    let [power, window, hysteresis, min] =
        ["initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale"].map(int);
    let rules = [
        ("initial_scale_power", power, (0..=MAX_LOSS_SCALE_POWER).contains(&power), "0 to 127"),
        ("loss_scale_window", window, window > 0, "1 or more"),
        ("hysteresis", hysteresis, (1..=i64::from(u32::MAX)).contains(&hysteresis), "1 to 4294967295"),
        ("min_loss_scale", min, min > 0, "1 or more"),
    ];
    for (key, value, is_valid, allowed) in rules {
        if dynamic && !is_valid {
            let path = format!("fp16.{key}");
            let position = walk.position(&path);
            walk.problem(
                ConfigRule::Range,
                &path,
                position,
                format!("expected {allowed} with a dynamic loss scale, found {value}"),
            );
        }
    }
    Precision::Fp16(Fp16 {
        loss_scale,
        // A static scale does not use these values, so their bounds do not matter.
        initial_scale_power: u32::try_from(power).unwrap_or_default(),
        loss_scale_window: u64::try_from(window).unwrap_or_default(),
        hysteresis: u32::try_from(hysteresis).unwrap_or_default(),
        consecutive_hysteresis: walk.bool("fp16.consecutive_hysteresis"),
        min_loss_scale: min as f64,
    })
}

/// Reads `torch_autocast`: the dtype of the products of linear layers in an f32 model.
fn autocast(walk: &mut ConfigWalk<'_>, precision: Precision) -> Option<DType> {
    if !walk.bool("torch_autocast.enabled") {
        return None;
    }
    if precision != Precision::F32 {
        let text = "accepted, but has no effect here: fp16 or bf16 is enabled, and products use that format";
        walk.note("torch_autocast.enabled", text);
        return None;
    }
    check_safe_modules(walk);
    let key = "torch_autocast.dtype";
    // The names are those that DeepSpeed accepts. Without a name, PyTorch's default for the CPU applies.
    let name = walk.str(key).map_or_else(|| "bfloat16".to_string(), str::to_lowercase);
    let (rule, text) = match name.strip_prefix("torch.").unwrap_or(&name) {
        "bf16" | "bfloat16" => return Some(DType::BF16),
        "fp32" | "float32" | "float" => return None,
        "fp16" | "float16" | "half" => (
            ConfigRule::Unsupported,
            "is not supported: its smallest positive number is 6e-8, so gradients of such products need loss scaling, which \
             an f32 model does not have; use \"bfloat16\", or the fp16 section instead of this one",
        ),
        "int8" => (ConfigRule::Unsupported, "is not supported: integer products have no gradient; use \"bfloat16\""),
        _ => (ConfigRule::Range, "is unknown; use \"bfloat16\" or \"float32\""),
    };
    let position = walk.position(key);
    let text = format!("\"{}\" {text}", printable(&name));
    walk.problem(rule, key, position, text);
    None
}

/// Checks `torch_autocast.lower_precision_safe_modules`. Only classes of linear and convolutional layers are accepted.
fn check_safe_modules(walk: &mut ConfigWalk<'_>) {
    const LAYER_CLASSES: [&str; 5] = ["Linear", "Conv1D", "Conv1d", "Conv2d", "Conv3d"];
    let key = "torch_autocast.lower_precision_safe_modules";
    let classes = walk.strings(key);
    let is_layer_class =
        |path: &str| path.rsplit(['.', ':']).next().is_some_and(|class| LAYER_CLASSES.contains(&class));
    let unknown: Vec<String> =
        classes.iter().filter(|path| !is_layer_class(path)).map(|path| printable(path)).collect();
    if !unknown.is_empty() {
        let text = format!(
            "not supported for \"{}\": the supported classes are named {}, and all gradients are communicated in \
             communication_data_type; remove the other classes",
            unknown.join("\", \""),
            LAYER_CLASSES.join(", ")
        );
        let position = walk.position(key);
        walk.problem(ConfigRule::Unsupported, key, position, text);
    }
}

/// Checks the rules between gradient keys and the stage.
fn check_gradients(walk: &mut ConfigWalk<'_>, stage: ZeroStage, precision: Precision) {
    let sum = "gradient_allreduce_op";
    if gradient_op(walk) == GradientOp::Sum && stage == ZeroStage::Three {
        let position = walk.position(sum);
        walk.problem(
            ConfigRule::Conflict,
            sum,
            position,
            "gradient_allreduce_op \"sum\" is not possible with stage 3; use mean",
        );
    }
    let factor = walk.float("gradient_predivide_factor");
    if factor == 0.0 {
        let position = walk.position("gradient_predivide_factor");
        walk.problem(
            ConfigRule::Range,
            "gradient_predivide_factor",
            position,
            "expected a number greater than 0, found 0",
        );
    }
    if stage >= ZeroStage::Two && walk.bool("zero_optimization.reduce_scatter") {
        let text =
            format!("is not possible with stage {stage} and reduce_scatter; set reduce_scatter to false, or remove");
        if factor != 1.0 {
            let position = walk.position("gradient_predivide_factor");
            let text = format!("{factor} {text} gradient_predivide_factor");
            walk.problem(ConfigRule::Conflict, "gradient_predivide_factor", position, text);
        }
        if walk.bool("prescale_gradients") {
            let position = walk.position("prescale_gradients");
            let text = format!("true {text} prescale_gradients");
            walk.problem(ConfigRule::Conflict, "prescale_gradients", position, text);
        }
    }
    let norm = "zero_optimization.compute_grad_norm";
    if !walk.bool(norm) {
        let f32_sums = matches!(precision, Precision::Bf16 { .. })
            && stage == ZeroStage::One
            && walk.str("data_types.grad_accum_dtype") == Some("fp32");
        let offloaded = walk.str("zero_optimization.offload_optimizer.device").is_some_and(|device| device != "none");
        let is_stage_1_or_2 = matches!(stage, ZeroStage::One | ZeroStage::Two);
        if !is_stage_1_or_2 || walk.float("gradient_clipping") != 0.0 || offloaded || f32_sums {
            let position = walk.position(norm);
            let text = "false needs stage 1 or 2, gradient_clipping 0 and no offloaded optimizer, and is not possible at \
                        stage 1 with bf16 and f32 accumulation";
            walk.problem(ConfigRule::Conflict, norm, position, text);
        }
    }
}

/// Checks the rules within `zero_optimization`.
fn check_zero(walk: &mut ConfigWalk<'_>, stage: ZeroStage) {
    let bucket = "zero_optimization.allgather_bucket_size";
    let size = walk.count(bucket);
    // Checked only if the key itself is given: the deprecated `allgather_size` may be odd.
    if stage <= ZeroStage::Two && !size.is_multiple_of(2) && walk.given.contains_key(bucket) {
        let position = walk.position(bucket);
        let text = format!("expected an even number at stages 0 to 2, as in DeepSpeed, found {size}; use {}", size - 1);
        walk.problem(ConfigRule::Range, bucket, position, text);
    }
    let ratio = "zero_optimization.offload_optimizer.ratio";
    if walk.get(ratio).and_then(Value::as_f64).is_some_and(|ratio| ratio < 1.0) && stage < ZeroStage::Three {
        let position = walk.position(ratio);
        walk.problem(
            ConfigRule::Conflict,
            ratio,
            position,
            format!("a share below 1 needs stage 3, not stage {stage}"),
        );
    }
    let weights = "zero_optimization.zero_quantized_weights";
    if walk.bool(weights) && stage < ZeroStage::Three {
        let text =
            format!("accepted, but has no effect at stage {stage}, as in DeepSpeed: only stage 3 gathers weights");
        walk.note(weights, text);
    }
}

/// Notes that `compress_between_hosts_only` has no effect if nothing is compressed.
fn check_compression(walk: &mut ConfigWalk<'_>, zero: &ZeroConfig) {
    let key = "zero_optimization.compress_between_hosts_only";
    if walk.bool(key) && !zero.compresses(dtype(walk.str("communication_data_type"))) {
        let text = "accepted, but has no effect here: it applies to zero_quantized_gradients, zero_quantized_weights at \
                    stage 3 and a 16-bit communication_data_type, and none of these is set";
        walk.note(key, text);
    }
}

/// Returns `mics_shard_size` if it has an effect.
fn mics_shard_size(walk: &mut ConfigWalk<'_>, zero: &ZeroConfig, world_size: usize) -> Option<usize> {
    let key = "zero_optimization.mics_shard_size";
    let found = walk.int(key).filter(|ranks| *ranks > 0)?;
    if zero.stage < ZeroStage::Three {
        let text =
            format!("accepted, but has no effect at stage {}, as in DeepSpeed: it applies to stage 3", zero.stage);
        walk.note(key, text);
        return None;
    }
    let position = walk.position(key);
    let ranks = usize::try_from(found).ok().filter(|ranks| world_size.is_multiple_of(*ranks));
    if ranks.is_none() {
        let divisors: Vec<String> =
            (1..=world_size).filter(|n| world_size.is_multiple_of(*n)).map(|n| n.to_string()).collect();
        let allowed = divisors.join(", ");
        let text = format!("expected a divisor of the number of ranks, {world_size} (one of {allowed}), found {found}");
        walk.problem(ConfigRule::Range, key, position, text);
    }
    if zero.hpz_partition_size > 1 {
        let hpz = zero.hpz_partition_size;
        let text = format!(
            "{found} is given together with zero_hpz_partition_size {hpz}: parameters that are sharded among {} are \
             gathered only from {}, so a second copy would be no faster to reach; remove zero_hpz_partition_size if \
             memory can hold all states of a group, or mics_shard_size if it can hold only the parameters",
            counted(found, "rank"),
            if found == 1 { "this rank" } else { "these ranks" }
        );
        walk.problem(ConfigRule::Conflict, key, position, text);
    }
    ranks
}

/// Returns the list of `data_types.keep_in_fp32_modules` if it has an effect.
fn fp32_modules(walk: &mut ConfigWalk<'_>, precision: Precision) -> Vec<String> {
    let key = "data_types.keep_in_fp32_modules";
    if !walk.get(key).is_some_and(Value::is_array) {
        return Vec::new();
    }
    let names = walk.strings(key);
    if names.iter().any(|name| name.is_empty() || name.split('.').any(str::is_empty)) {
        let text = "found an empty name, or a leading, trailing or double dot; a name must consist of complete \
                    dot-separated parts of parameter names, in which * matches any characters (\"ln_f\", \
                    \"mlp.c_proj\", \"ln_*\")";
        let position = walk.position(key);
        walk.problem(ConfigRule::Range, key, position, text);
    }
    if precision == Precision::F32 && !names.is_empty() {
        walk.note(key, "accepted, but has no effect here: the complete model is f32");
        return Vec::new();
    }
    names
}

/// Checks `data_types` against the precision.
fn check_data_types(walk: &mut ConfigWalk<'_>, stage: ZeroStage, precision: Precision) {
    let dtype = match precision {
        Precision::F32 => "fp32",
        Precision::Bf16 { .. } => "bf16",
        Precision::Fp16(_) => "fp16",
    };
    let key = "data_types.param_dtype";
    if let Some(other) = walk.str(key).filter(|name| *name != dtype) {
        let text = format!("\"{other}\" contradicts the fp16 and bf16 sections, which choose \"{dtype}\"");
        let position = walk.position(key);
        walk.problem(ConfigRule::Conflict, key, position, text);
    }
    let key = "data_types.grad_accum_dtype";
    if let Some(other) = walk.str(key).filter(|name| *name != dtype && stage == ZeroStage::Zero) {
        let text =
            format!("\"{other}\" differs from the model's \"{dtype}\": at stage 0 they must be equal, as in DeepSpeed");
        let position = walk.position(key);
        walk.problem(ConfigRule::Conflict, key, position, text);
    }
}

/// Checks `vocabulary_size`. As in DeepSpeed, the key only produces a hint.
fn check_vocabulary(walk: &mut ConfigWalk<'_>) {
    const TILE: i64 = 8;
    if let Some(size) = walk.int("vocabulary_size").filter(|size| size % TILE != 0) {
        let next = size.saturating_add(TILE - size % TILE);
        let text = format!(
            "{size} is not a multiple of {TILE}: the matrix units of GPUs work best with a multiple, such as {next}"
        );
        walk.note("vocabulary_size", text);
    }
}

/// Checks `data_efficiency` and reports each feature that is on.
fn check_data_efficiency(walk: &mut ConfigWalk<'_>) {
    if !walk.bool("data_efficiency.enabled") {
        return;
    }
    const FEATURES: [[&str; 2]; 3] = [
        ["data_sampling", "curriculum_learning"],
        ["data_sampling", "dynamic_batching"],
        ["data_routing", "random_ltd"],
    ];
    let enabled: Vec<String> = FEATURES
        .into_iter()
        .filter(|[outer, inner]| {
            let outer = format!("data_efficiency.{outer}");
            walk.bool(&format!("{outer}.enabled")) && walk.bool(&format!("{outer}.{inner}.enabled"))
        })
        .map(|[outer, inner]| format!("data_efficiency.{outer}.{inner}"))
        .collect();
    let paths = if enabled.is_empty() { vec!["data_efficiency.enabled".to_string()] } else { enabled };
    for path in paths {
        let position = walk.position(&path);
        walk.problem(
            ConfigRule::Unsupported,
            &path,
            position,
            "is on but not supported: it would change training; disable it",
        );
    }
}

/// Returns whether every unit recomputes. If candle-zero's own key is set, it decides; otherwise, any other key that
/// requests recomputation does, with a note.
fn activation_checkpointing(walk: &mut ConfigWalk<'_>) -> bool {
    let path = |key: &str| format!("activation_checkpointing.{key}");
    if let Some(on) = walk.get(&path("every_unit")).and_then(Value::as_bool) {
        return on;
    }
    let requesting_keys = ["partition_activations", "cpu_checkpointing", "contiguous_memory_optimization"];
    let key = requesting_keys.into_iter().find(|key| walk.bool(&path(key)));
    let key = key.or(walk.int(&path("number_checkpoints")).map(|_| "number_checkpoints"));
    if let Some(key) = key {
        let text = "treated as `every_unit`: every unit recomputes its forward pass during the backward pass, which \
                    takes about a third more time and gives the same results except for rounding (in DeepSpeed, only \
                    calls to deepspeed.checkpointing recompute); set `every_unit` of this section to true or false to \
                    choose";
        walk.note(&path(key), text);
    }
    key.is_some()
}
