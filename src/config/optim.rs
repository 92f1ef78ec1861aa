//! Reads `optimizer`. The table of its parameters depends on its type.

use super::keys::typed_section;
use super::note::printable;
use super::walk::{ConfigWalk, defaults};
use super::{
    AdafactorConfig, AdagradConfig, AdamConfig, ConfigRule, EightBit, EightBitConfig, LambConfig, LarsConfig,
    LionConfig, MuonConfig, NsMethod, OptimizerConfig, ScheduleFreeConfig, SgdConfig, StatePrecision,
};
use crate::layout::ZeroStage;
use serde_json::Value;

/// The optimizers, as messages and checkpoints name them.
const OPTIMIZERS: [&str; 13] = [
    "Adam",
    "AdamW",
    "SGD",
    "Lion",
    "Adagrad",
    "Lamb",
    "Muon",
    "LARS",
    "Adafactor",
    "AdamWScheduleFree",
    "Adam8bit",
    "AdamW8bit",
    "Lion8bit",
];

/// Optimizers that exist in DeepSpeed or PyTorch but not in candle-zero.
const OTHER_OPTIMIZERS: [&str; 14] = [
    "MuAdam",
    "MuAdamW",
    "MuSGD",
    "OneBitAdam",
    "ZeroOneAdam",
    "OneBitLamb",
    "Adadelta",
    "Adamax",
    "ASGD",
    "LBFGS",
    "NAdam",
    "RAdam",
    "RMSprop",
    "SparseAdam",
];

/// Optimizers that DeepSpeed treats as untested with ZeRO.
const UNTESTED: [&str; 3] = ["SGD", "Lamb", "Adafactor"];

/// The default `weight_decay` of torch.optim.AdamW.
const TORCH_ADAMW_DECAY: f64 = 0.01;

const OPTIMIZER: &str = "optimizer";

/// Reads the file's optimizer. Problems are added to the walk.
pub(super) fn optimizer(walk: &mut ConfigWalk<'_>, stage: ZeroStage) -> Option<OptimizerConfig> {
    if !walk.given.contains_key(OPTIMIZER) || walk.get(OPTIMIZER) == Some(&Value::Null) {
        untested(walk, None, stage);
        return None;
    }
    // DeepSpeed's names match in any letter case; in candle-zero, all names do.
    let found = walk.str("optimizer.type").map(str::to_string);
    let name = found.and_then(|found| {
        let name = OPTIMIZERS.into_iter().find(|name| name.eq_ignore_ascii_case(&found));
        if name.is_none() {
            unknown_type(walk, "optimizer.type", &found, &OPTIMIZERS, &OTHER_OPTIMIZERS, true);
        }
        name
    });
    let Some(name) = name else {
        needs_type(walk, OPTIMIZER, &OPTIMIZERS);
        return None;
    };
    parameters(walk, OPTIMIZER, name)?;
    untested(walk, Some(name), stage);
    Some(match name {
        "SGD" => OptimizerConfig::Sgd(sgd(walk)),
        "Lion" => OptimizerConfig::Lion(lion(walk)),
        "Adagrad" => OptimizerConfig::Adagrad(AdagradConfig {
            lr: walk.float(&param("lr")),
            eps: walk.float(&param("eps")),
            weight_decay: walk.float(&param("weight_decay")),
        }),
        "Lamb" => OptimizerConfig::Lamb(lamb(walk)),
        "Muon" => OptimizerConfig::Muon(muon(walk)),
        "LARS" => OptimizerConfig::Lars(lars(walk)),
        "Adafactor" => OptimizerConfig::Adafactor(adafactor(walk)),
        "AdamWScheduleFree" => OptimizerConfig::ScheduleFree(schedule_free(walk)),
        "Adam8bit" => eight_bit(walk, EightBit::Adam(adam_8bit(walk))),
        "AdamW8bit" => eight_bit(walk, EightBit::AdamW(adam_8bit(walk))),
        "Lion8bit" => eight_bit(walk, EightBit::Lion(lion(walk))),
        name => OptimizerConfig::Adam(adam(walk, name == "AdamW")),
    })
}

/// Returns the path of an optimizer parameter.
fn param(key: &str) -> String {
    format!("optimizer.params.{key}")
}

fn betas(walk: &ConfigWalk<'_>) -> (f64, f64) {
    pair(walk, "betas")
}

/// Returns a parameter that is a list of two numbers.
fn pair(walk: &ConfigWalk<'_>, key: &str) -> (f64, f64) {
    let numbers = walk.get(&param(key)).and_then(Value::as_array).map(Vec::as_slice);
    let Some([a, b]) = numbers else { panic!("the table of keys guarantees that {key} has two numbers") };
    (a.as_f64().unwrap_or_default(), b.as_f64().unwrap_or_default())
}

fn lion(walk: &ConfigWalk<'_>) -> LionConfig {
    LionConfig { lr: walk.float(&param("lr")), betas: betas(walk), weight_decay: walk.float(&param("weight_decay")) }
}

/// Reads the parameters of an 8-bit Adam. Both of bitsandbytes' Adams use decoupled decay.
fn adam_8bit(walk: &ConfigWalk<'_>) -> AdamConfig {
    AdamConfig {
        lr: walk.float(&param("lr")),
        betas: betas(walk),
        eps: walk.float(&param("eps")),
        weight_decay: walk.float(&param("weight_decay")),
        bias_correction: true,
        decoupled: true,
    }
}

fn eight_bit(walk: &ConfigWalk<'_>, kind: EightBit) -> OptimizerConfig {
    let min_8bit_size = usize::try_from(walk.count(&param("min_8bit_size"))).unwrap_or(usize::MAX);
    OptimizerConfig::EightBit(EightBitConfig { kind, min_8bit_size })
}

fn sgd(walk: &mut ConfigWalk<'_>) -> SgdConfig {
    let sgd = SgdConfig {
        lr: walk.float(&param("lr")),
        momentum: walk.float(&param("momentum")),
        dampening: walk.float(&param("dampening")),
        weight_decay: walk.float(&param("weight_decay")),
        nesterov: walk.bool(&param("nesterov")),
    };
    if sgd.nesterov && (sgd.momentum == 0.0 || sgd.dampening != 0.0) {
        let position = walk.position(&param("nesterov"));
        walk.problem(ConfigRule::Conflict, &param("nesterov"), position, "needs momentum > 0 and dampening 0");
    }
    sgd
}

fn lamb(walk: &mut ConfigWalk<'_>) -> LambConfig {
    let lamb = LambConfig {
        lr: walk.float(&param("lr")),
        betas: betas(walk),
        eps: walk.float(&param("eps")),
        weight_decay: walk.float(&param("weight_decay")),
        bias_correction: walk.bool(&param("bias_correction")),
        eps_inside_sqrt: walk.bool(&param("eps_inside_sqrt")),
        max_coeff: walk.float(&param("max_coeff")),
        min_coeff: walk.float(&param("min_coeff")),
    };
    if lamb.min_coeff > lamb.max_coeff {
        // The problem is reported at the bound that the file gives, or at the lower bound if it gives both.
        let key = if walk.given.contains_key(&param("min_coeff")) { "min_coeff" } else { "max_coeff" };
        let position = walk.position(&param(key));
        let text =
            format!("min_coeff {} is above max_coeff {}; give a smaller min_coeff", lamb.min_coeff, lamb.max_coeff);
        walk.problem(ConfigRule::Conflict, &param(key), position, text);
    }
    lamb
}

/// Reports a factor that must be below 1 but is 1.
fn below_one(walk: &mut ConfigWalk<'_>, key: &str) {
    if walk.get(&param(key)).and_then(Value::as_f64) == Some(1.0) {
        let position = walk.position(&param(key));
        walk.problem(ConfigRule::Range, &param(key), position, "expected a number of at least 0 and below 1, found 1");
    }
}

fn lars(walk: &mut ConfigWalk<'_>) -> LarsConfig {
    below_one(walk, "momentum");
    LarsConfig {
        lr: walk.float(&param("lr")),
        momentum: walk.float(&param("momentum")),
        weight_decay: walk.float(&param("weight_decay")),
        trust_coefficient: walk.float(&param("trust_coefficient")),
        eps: walk.float(&param("eps")),
    }
}

/// Reads the parameters of Adafactor, with the rules of transformers: a learning rate is either given or relative.
fn adafactor(walk: &mut ConfigWalk<'_>) -> AdafactorConfig {
    /// The learning rate if there is none in the file and it is not relative, as for Adam.
    const DEFAULT_LR: f64 = 1e-3;
    below_one(walk, "beta1");
    let lr = walk.get(&param("lr")).and_then(Value::as_f64);
    let is_scheduled = walk.given.contains_key("scheduler") && walk.get("scheduler") != Some(&Value::Null);
    let relative = walk.get(&param("relative_step")).and_then(Value::as_bool);
    let is_relative = relative.unwrap_or(lr.is_none() && !is_scheduled);
    let warmup_init = walk.bool(&param("warmup_init"));
    let clip_threshold = walk.float(&param("clip_threshold"));
    let decay_rate = walk.float(&param("decay_rate"));
    let mut refuse = |rule: ConfigRule, key: &str, text: String| {
        let position = walk.position(&param(key));
        walk.problem(rule, &param(key), position, text);
    };
    if let (true, Some(lr)) = (is_relative, lr) {
        let text = format!("{lr} contradicts relative_step, which sets the learning rate; leave one of them out");
        refuse(ConfigRule::Conflict, "lr", text);
    }
    if warmup_init && !is_relative {
        refuse(ConfigRule::Conflict, "warmup_init", "true needs relative_step, which excludes lr and scheduler".into());
    }
    if clip_threshold <= 0.0 {
        let text = format!("expected a number above 0, found {clip_threshold}");
        refuse(ConfigRule::Range, "clip_threshold", text);
    }
    if !(-1.0..0.0).contains(&decay_rate) {
        let text = format!("expected a number of at least -1 and below 0, found {decay_rate}");
        refuse(ConfigRule::Range, "decay_rate", text);
    }
    AdafactorConfig {
        lr: (!is_relative).then_some(lr.unwrap_or(DEFAULT_LR)),
        warmup_init,
        eps: pair(walk, "eps"),
        clip_threshold,
        decay_rate,
        beta1: walk.get(&param("beta1")).and_then(Value::as_f64),
        weight_decay: walk.float(&param("weight_decay")),
        scale_parameter: walk.bool(&param("scale_parameter")),
    }
}

fn schedule_free(walk: &ConfigWalk<'_>) -> ScheduleFreeConfig {
    ScheduleFreeConfig {
        lr: walk.float(&param("lr")),
        betas: betas(walk),
        eps: walk.float(&param("eps")),
        weight_decay: walk.float(&param("weight_decay")),
        warmup_steps: walk.count(&param("warmup_steps")),
        r: walk.float(&param("r")),
        weight_lr_power: walk.float(&param("weight_lr_power")),
    }
}

/// Checks the settings that AdamWScheduleFree needs in other sections: the average of the weights is kept in master
/// weights, and only the optimizer may change it.
pub(super) fn check_averaging(
    walk: &mut ConfigWalk<'_>,
    optimizer: Option<&OptimizerConfig>,
    states: StatePrecision,
    has_local_steps: bool,
) {
    let Some(OptimizerConfig::ScheduleFree(_)) = optimizer else { return };
    let mut refuse = |text: &str| {
        let position = walk.position("optimizer.type");
        walk.problem(ConfigRule::Conflict, "optimizer.type", position, text);
    };
    if !states.master_weights {
        refuse(
            "AdamWScheduleFree keeps the average of the weights in f32 master weights; leave \
             bf16_master_weights_and_grads and fp16_master_weights_and_grads out",
        );
    }
    if has_local_steps {
        refuse("AdamWScheduleFree already averages weights; leave local_steps out, or use AdamW");
    }
}

/// Reads the parameters of Muon and of its AdamW part. Each part's own rate takes precedence over the common one.
fn muon(walk: &mut ConfigWalk<'_>) -> MuonConfig {
    below_one(walk, "momentum");
    let momentum = walk.float(&param("momentum"));
    let rate = |key: &str, default: f64| {
        let given = |key: &str| walk.get(&param(key)).and_then(Value::as_f64);
        given(key).or(given("lr")).unwrap_or(default)
    };
    let weight_decay = walk.float(&param("weight_decay"));
    MuonConfig {
        lr: rate("muon_lr", 0.02),
        momentum,
        weight_decay,
        ns_method: if walk.str(&param("ns_method")) == Some("standard") { NsMethod::Standard } else { NsMethod::Gram },
        adam: AdamConfig {
            lr: rate("adam_lr", 3e-4),
            betas: betas(walk),
            eps: walk.float(&param("eps")),
            weight_decay,
            bias_correction: true,
            decoupled: walk.bool(&param("adam_w_mode")),
        },
    }
}

/// Reads the parameters of Adam or AdamW. `always_decoupled` is true for AdamW.
fn adam(walk: &mut ConfigWalk<'_>, always_decoupled: bool) -> AdamConfig {
    let adam_w_mode = walk.bool(&param("adam_w_mode"));
    let decoupled = always_decoupled || adam_w_mode;
    // DeepSpeed passes the parameters to torch.optim.AdamW, whose default decay is not 0.
    if decoupled && walk.bool(&param("torch_adam")) && !walk.given.contains_key(&param("weight_decay")) {
        walk.set(&param("weight_decay"), TORCH_ADAMW_DECAY.into());
        walk.note(&param("weight_decay"), format!("{TORCH_ADAMW_DECAY}, the default of PyTorch's AdamW (torch_adam)"));
    }
    if always_decoupled && !adam_w_mode {
        walk.note(&param("adam_w_mode"), "accepted, but has no effect: AdamW is always decoupled, as in DeepSpeed");
    }
    AdamConfig {
        lr: walk.float(&param("lr")),
        betas: betas(walk),
        eps: walk.float(&param("eps")),
        weight_decay: walk.float(&param("weight_decay")),
        bias_correction: walk.bool(&param("bias_correction")),
        decoupled,
    }
}

/// Reads `params` with the table of the type `type_name`. Returns `None` if that type has no table.
pub(super) fn parameters(walk: &mut ConfigWalk<'_>, owner: &str, type_name: &str) -> Option<()> {
    let path = format!("{owner}.params");
    let section = typed_section(&path, type_name)?;
    walk.set(&path, Value::Object(defaults(section)));
    if let Some(entries) = walk.params.get(&path).copied() {
        walk.section(section, entries);
    }
    Some(())
}

/// Reports a missing type, once.
pub(super) fn needs_type(walk: &mut ConfigWalk<'_>, owner: &str, names: &[&str]) {
    let path = format!("{owner}.type");
    if !walk.problems.iter().any(|problem| problem.path.starts_with(owner)) {
        let position = walk.position(owner);
        walk.problem(ConfigRule::Type, &path, position, format!("required: {}", any_of(names)));
    }
}

/// Formats names as a choice: "a, b or c".
fn any_of(names: &[&str]) -> String {
    match names {
        [first @ .., last] if !first.is_empty() => format!("{} or {last}", first.join(", ")),
        _ => names.concat(),
    }
}

/// Reports an unsupported or unknown type.
pub(super) fn unknown_type(
    walk: &mut ConfigWalk<'_>,
    path: &str,
    found: &str,
    names: &[&str],
    others: &[&str],
    any_case: bool,
) {
    const MIN_SIMILARITY: f64 = 0.6;
    /// The maximum length of a compared name: longer names resemble no known name, and comparing very long ones takes
    /// seconds.
    const MAX_COMPARED_CHARS: usize = 100;
    let same = |name: &&&str| if any_case { name.eq_ignore_ascii_case(found) } else { **name == found };
    let position = walk.position(path);
    let choices = any_of(names);
    let shown_name = printable(found);
    if others.iter().any(|name| same(&name)) {
        return walk.problem(
            ConfigRule::Unsupported,
            path,
            position,
            format!("\"{shown_name}\" is not supported; use {choices}"),
        );
    }
    let found: String = found.chars().take(MAX_COMPARED_CHARS).collect();
    let similarity = |name: &str| strsim::normalized_damerau_levenshtein(&name.to_lowercase(), &found.to_lowercase());
    let suggestion = names
        .iter()
        .filter(|name| similarity(name) >= MIN_SIMILARITY)
        .max_by(|a, b| similarity(a).total_cmp(&similarity(b)));
    let suggestion = suggestion.map(|suggestion| format!(" Did you mean \"{suggestion}\"?")).unwrap_or_default();
    walk.problem(ConfigRule::Range, path, position, format!("\"{shown_name}\" is unknown; use {choices}.{suggestion}"));
}

/// Checks `zero_allow_untested_optimizer`, which some optimizers require under ZeRO.
fn untested(walk: &mut ConfigWalk<'_>, name: Option<&str>, stage: ZeroStage) {
    let allowed = walk.bool("zero_allow_untested_optimizer");
    let untested = name.filter(|name| UNTESTED.contains(name) && stage > ZeroStage::Zero);
    if let (Some(name), false) = (untested, allowed) {
        let position = walk.position("optimizer.type");
        let text = format!(
            "{name} counts as untested with ZeRO (stage {stage}); set \"zero_allow_untested_optimizer\": true, or use Adam \
             or AdamW"
        );
        walk.problem(ConfigRule::Conflict, "optimizer.type", position, text);
    } else if untested.is_none() && walk.given.contains_key("zero_allow_untested_optimizer") {
        let text = "accepted, but has no effect on this configuration: only SGD, Lamb, Adafactor and custom optimizers \
                    at stages 1 to 3 need it";
        walk.note("zero_allow_untested_optimizer", text);
    }
    // The walk notes only the value false. True, the default, is noted here, because it requests DeepSpeed's CPU
    // optimizer.
    let key = "zero_force_ds_cpu_optimizer";
    if walk.given.contains_key(key) && walk.bool(key) {
        walk.note(key, "accepted, but has no effect here: the same optimizer updates states in memory and in files");
    }
}
