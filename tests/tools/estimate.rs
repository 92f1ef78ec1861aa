//! An estimate before a run equals what the engine then counts, to the byte.

use candle_core::{Device, Tensor};
use candle_zero::comm::{CollectiveKind as Collective, CommReport, threads};
use candle_zero::config::Config;
use candle_zero::error::{Error, ParamError};
use candle_zero::estimate::deepspeed::{Machines, MemoryNeeds, Zero3Offload, zero2, zero3};
use candle_zero::estimate::{CollectiveCounts, Estimate, EstimateOptions, Shapes, UnitRule};
use candle_zero::memory::{MemoryKind, MemoryReport};
use candle_zero::models::{Architecture, GptConfig, GptLayers, LanguageModel, LlamaConfig, LlamaLayers};
use candle_zero::offload::{DiskAccess, OffloadReport};
use candle_zero::precision::{Nf4Scales, WeightPacking};
use candle_zero::{Engine, EngineBuilder};
use serde_json::{Value, json};
use std::path::Path;

/// The counts of a rank.
struct Counted {
    memory: MemoryReport,
    /// The counts after `STEPS[0]` steps, and after `STEPS[1]` more.
    comm: [CommReport; 2],
    disk: [OffloadReport; 2],
}

/// The numbers of steps before the first count and between the two counts.
const STEPS: [usize; 2] = [3, 2];

fn train<A: Architecture<Config: Sync>>(
    world: usize,
    sizes: &A::Config,
    config: &Value,
    access: Option<DiskAccess>,
) -> Vec<Counted> {
    train_with::<A>(world, sizes, config, access, |builder| builder)
}

fn train_with<A: Architecture<Config: Sync>>(
    world: usize,
    sizes: &A::Config,
    config: &Value,
    access: Option<DiskAccess>,
    options: impl Fn(EngineBuilder) -> EngineBuilder + Sync,
) -> Vec<Counted> {
    let ranks = threads::run(world, |comm| {
        let builder = options(Engine::builder().communicator(comm).device(Device::Cpu));
        let builder = match access {
            Some(access) => builder.disk_access(access),
            None => builder,
        };
        let mut engine = builder.initialize(|vb| LanguageModel::<A>::new(sizes, vb), config.clone())?;
        let accumulation = engine.config().batch.gradient_accumulation_steps;
        let ids = Tensor::from_iter((0..8u32).map(|i| (i * 31) % 200), &Device::Cpu)?.reshape((1, 8))?;
        let mut counts = vec![];
        for steps in STEPS {
            for _ in 0..steps * accumulation {
                let loss = engine.forward(|model| model.loss(&ids, &ids))?;
                engine.backward(&loss)?;
                engine.step()?;
            }
            counts.push((engine.comm_report(), engine.offload_report()));
        }
        let memory = engine.memory_report();
        let [first, second] = <[_; 2]>::try_from(counts).unwrap();
        Ok(Counted { memory, comm: [first.0, second.0], disk: [first.1, second.1] })
    });
    ranks.unwrap().into_iter().map(|rank| rank.unwrap()).collect()
}

fn config(accumulation: usize, zero: Value, more: Value) -> Value {
    let mut config = json!({
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_allow_untested_optimizer": true,
        // An estimate describes the steps after the first.
        "gradient_check": false,
        "zero_optimization": zero,
    });
    config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    config
}

/// Compares all rows and the bytes that a step transfers. Gradients that are being written to a file stay in memory
/// until the disk is done: the estimate gives their maximum.
fn compare(estimate: &Estimate, ranks: &[Counted], what: &str) {
    for counted in ranks {
        let (expected, found) = (&estimate.memory, &counted.memory);
        let message = format!("{what}\nestimate: {expected}\ncounted: {found}");
        assert_eq!((expected.stage, expected.parameters), (found.stage, found.parameters), "{message}");
        for (expected, found) in expected.rows.iter().zip(&found.rows) {
            if expected.kind == MemoryKind::Gradients && expected.file.held > 0 {
                assert!(found.bytes.peak > 0 && found.bytes.peak <= expected.bytes.peak, "{message}");
                assert_eq!((expected.bytes.held, expected.file), (found.bytes.held, found.file), "{message}");
            } else {
                assert_eq!(expected, found, "{message}");
            }
        }
        for kind in Collective::ALL {
            let (early, late) = (counted.comm[0].kind(kind), counted.comm[1].kind(kind));
            let per_step = |late: u64, early: u64| (late - early) / STEPS[1] as u64;
            let found = CollectiveCounts {
                calls: per_step(late.calls, early.calls),
                elements: per_step(late.elements, early.elements),
                wire_bytes: per_step(late.wire_bytes, early.wire_bytes),
            };
            assert_eq!(estimate.step.kind(kind), found, "{}: {message}", kind.name());
        }
        let disk = counted.disk[1].since(&counted.disk[0]);
        let moved = (disk.bytes_read, disk.bytes_written);
        let steps = STEPS[1] as u64;
        assert_eq!((estimate.step.bytes_read * steps, estimate.step.bytes_written * steps), moved, "{message}");
    }
}

fn check<A: Architecture<Config: Sync>>(
    name: &str,
    sizes: &A::Config,
    world: usize,
    config: &Value,
    access: Option<DiskAccess>,
) {
    let shapes = Shapes::of(name, |vb| LanguageModel::<A>::new(sizes, vb)).unwrap();
    let loaded = Config::load(config.clone(), world).unwrap();
    let options = EstimateOptions { disk_access: access, ..EstimateOptions::default() };
    let estimate = Estimate::with(&shapes, &loaded, options).unwrap();
    compare(&estimate, &train::<A>(world, sizes, config, access), &format!("{name}, world size {world}, {config}"));
}

fn nano() -> GptConfig {
    GptConfig::preset("nano").unwrap()
}

fn bf16() -> Value {
    json!({"bf16": {"enabled": true}})
}

#[test]
fn stages_in_memory_are_counted_to_the_byte() {
    for (stage, world, accumulation, more) in [
        (0, 1, 1, json!({})),
        (0, 2, 2, bf16()),
        (1, 2, 1, bf16()),
        (1, 4, 2, json!({"communication_data_type": "fp32", "bf16": {"enabled": true}})),
        (2, 4, 1, json!({})),
        (2, 2, 5, bf16()),
        (3, 4, 2, bf16()),
        (3, 2, 1, json!({})),
        (3, 1, 1, json!({})),
        // Sizes that are not divisible by three: shards are padded.
        (1, 3, 1, bf16()),
        (3, 3, 1, json!({})),
    ] {
        let mut zero = json!({"stage": stage});
        check::<GptLayers>("nano", &nano(), world, &config(accumulation, zero.clone(), more.clone()), None);
        // Small buckets, everything released that can be released, and other options with non-default values.
        zero.as_object_mut().unwrap().extend(
            json!({
                "reduce_bucket_size": 20_000, "allgather_bucket_size": 30_000, "sub_group_size": 100_000,
                "overlap_comm": stage != 3, "reduce_scatter": stage != 2,
                "stage3_param_persistence_threshold": 400, "stage3_max_reuse_distance": 0,
                "stage3_prefetch_bucket_size": 250_000, "stage3_max_live_parameters": 500_000,
            })
            .as_object()
            .unwrap()
            .clone(),
        );
        check::<GptLayers>("nano", &nano(), world, &config(accumulation, zero, more), None);
    }
}

#[test]
fn leaves_and_gradients_that_may_be_missing_are_counted_to_the_byte() {
    for (stage, world) in [(0, 2), (1, 2), (2, 2), (3, 2), (3, 3)] {
        for (more, run) in [
            (json!({"leaf_module": {"name_suffixes": ["h.1", "h.2"]}}), bf16()),
            (json!({"ignore_unused_parameters": true}), json!({})),
            (
                json!({"leaf_module": {"names": "h.3"}, "stage3_max_live_parameters": 400_000, "stage3_max_reuse_distance": 0}),
                json!({"activation_checkpointing": {"partition_activations": true}}),
            ),
        ] {
            let mut zero =
                json!({"stage": stage, "reduce_bucket_size": 20_000, "stage3_param_persistence_threshold": 400});
            zero.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            check::<GptLayers>("nano", &nano(), world, &config(2, zero, run), None);
        }
    }
}

#[test]
fn frozen_and_packed_parameters_are_counted_to_the_byte() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let nvme = json!({"device": "nvme", "nvme_path": folder.path(), "max_in_cpu": 150_000});
    let offload = json!({"device": "nvme", "nvme_path": folder.path(), "pipeline_read": true});
    // Patterns, and the same selection as a rule: all but the final norm, every other unit, and the weights in units.
    let base: (&[&str], fn(&str) -> bool) = (&["w*", "h.*"], |name| name.starts_with('w') || name.starts_with("h."));
    let others: (&[&str], fn(&str) -> bool) =
        (&["h.0.*", "h.2.*"], |name| name.starts_with("h.0.") || name.starts_with("h.2."));
    let matrices: (&[&str], fn(&str) -> bool) =
        (&["h.*.weight"], |name| name.starts_with("h.") && name.ends_with(".weight"));
    let nf4 = Some(WeightPacking::Nf4(Nf4Scales::Bf16));
    let kept = json!({"bf16": {"enabled": true}, "data_types": {"keep_in_fp32_modules": ["ln_*"]}});
    for ((patterns, is_frozen), packing, zero, world, more) in [
        (base, None, json!({"stage": 0}), 2, bf16()),
        (base, None, json!({"stage": 1}), 2, bf16()),
        (others, nf4, json!({"stage": 2}), 3, json!({})),
        (base, nf4, json!({"stage": 3}), 2, bf16()),
        (base, Some(WeightPacking::Int8), json!({"stage": 3, "stage3_param_persistence_threshold": 400}), 3, json!({})),
        (
            others,
            Some(WeightPacking::Nf4(Nf4Scales::DoubleQuantized)),
            json!({"stage": 3, "stage3_max_reuse_distance": 0}),
            2,
            bf16(),
        ),
        (matrices, None, json!({"stage": 3, "zero_quantized_nontrainable_weights": true}), 1, json!({})),
        (matrices, nf4, json!({"stage": 3, "offload_param": nvme, "offload_optimizer": offload}), 2, bf16()),
        (others, nf4, json!({"stage": 3}), 2, kept),
    ] {
        let config = config(2, zero, more);
        let shapes = Shapes::preset("nano").unwrap().frozen(patterns).unwrap();
        let shapes = packing.into_iter().fold(shapes, Shapes::quantized);
        let options = EstimateOptions { disk_access: Some(DiskAccess::Cached), ..EstimateOptions::default() };
        let estimate = Estimate::with(&shapes, &Config::load(config.clone(), world).unwrap(), options).unwrap();
        let counted = train_with::<GptLayers>(world, &nano(), &config, options.disk_access, |builder| {
            let builder = builder.trainable(move |name, _| !is_frozen(name));
            match packing {
                Some(packing) => builder.quantized(packing, move |name, shape| shape.len() >= 2 && is_frozen(name)),
                None => builder,
            }
        });
        compare(&estimate, &counted, &format!("{patterns:?} {packing:?}, world size {world}, {config}"));
    }
}

#[test]
fn patterns_that_freeze_nothing_or_everything_are_errors_with_the_pattern() {
    let freeze = |patterns: &[&str]| Shapes::preset("nano").unwrap().frozen(patterns).unwrap_err().to_string();
    let nothing = freeze(&["h.*", "model.layers.*"]);
    assert!(
        nothing.starts_with("the pattern `model.layers.*` selects no parameter") && nothing.contains("h.0."),
        "{nothing}"
    );
    let all = freeze(&["h.*", "w*", "ln_f.*"]);
    assert!(all.starts_with("all 52 parameters match h.* w* ln_f.* and are frozen"), "{all}");
}

#[test]
fn the_states_and_exchanges_of_islands_are_counted_to_the_byte() {
    // The exchange is not in the counted steps: it is not part of every step.
    for (stage, world, section, more) in [
        (0, 4, json!({"steps": 3, "islands": 2}), json!({})),
        (1, 4, json!({"steps": 3, "islands": 2, "wire_dtype": "bf16"}), bf16()),
        (2, 3, json!({"steps": 3, "islands": 3, "wire_dtype": "int4", "outer_momentum": 0.0}), bf16()),
        (3, 4, json!({"steps": 3, "islands": 2, "fragments": 3}), json!({})),
        (3, 2, json!({"steps": 3, "islands": 2, "wire_dtype": "int8"}), bf16()),
    ] {
        let mut config = config(1, json!({"stage": stage}), more);
        config["local_steps"] = section;
        check::<GptLayers>("nano", &nano(), world, &config, None);
    }
}

#[test]
fn offloaded_state_is_counted_to_the_byte() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let nvme = |more: Value| {
        let mut section = json!({"device": "nvme", "nvme_path": folder.path()});
        section.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        section
    };
    let cached = Some(DiskAccess::Cached);
    for (zero, world, accumulation, more) in [
        (json!({"stage": 1, "offload_optimizer": nvme(json!({}))}), 2, 1, bf16()),
        (json!({"stage": 2, "offload_optimizer": nvme(json!({"pipeline_read": true}))}), 2, 3, json!({})),
        (
            json!({
                "stage": 3, "sub_group_size": 100_000, "stage3_param_persistence_threshold": 200,
                "offload_optimizer": nvme(json!({"pipeline_read": true, "pipeline_write": true, "ratio": 0.6})),
                "offload_param": nvme(json!({"max_in_cpu": 150_000})),
            }),
            2,
            4,
            bf16(),
        ),
        (
            json!({
                "stage": 3, "stage3_max_reuse_distance": 0,
                "offload_param": nvme(json!({"max_in_cpu": 0, "buffer_size": 300_000, "buffer_count": 1})),
            }),
            1,
            1,
            json!({}),
        ),
        (json!({"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}), 2, 1, bf16()),
        (
            json!({"stage": 2, "offload_optimizer": nvme(json!({}))}),
            2,
            1,
            json!({"bf16": {"enabled": true}, "optimizer": {"type": "Lamb", "params": {"lr": 1e-4}}}),
        ),
    ] {
        check::<GptLayers>("nano", &nano(), world, &config(accumulation, zero, more), cached);
    }
}

#[test]
fn around_the_page_cache_the_copies_are_counted_at_their_most() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let section = json!({"device": "nvme", "nvme_path": folder.path(), "max_in_cpu": 0});
    let optimizer = json!({"device": "nvme", "nvme_path": folder.path()});
    let config = config(1, json!({"stage": 3, "offload_optimizer": optimizer, "offload_param": section}), bf16());
    let shapes = Shapes::preset("nano").unwrap();
    let options = EstimateOptions { disk_access: Some(DiskAccess::Direct), ..EstimateOptions::default() };
    let estimate = Estimate::with(&shapes, &Config::load(config.clone(), 2).unwrap(), options).unwrap();
    for counted in train::<GptLayers>(2, &nano(), &config, options.disk_access) {
        let [most, found] =
            [&estimate.memory, &counted.memory].map(|report| report.row(MemoryKind::Staging).bytes.peak);
        assert!(found > 0 && found <= most, "{found} of at most {most}");
        assert_eq!(estimate.memory.row(MemoryKind::Moments), counted.memory.row(MemoryKind::Moments));
    }
}

#[test]
fn other_models_optimizers_and_recomputation_are_counted_to_the_byte() {
    let llama = LlamaConfig::preset("llama-nano").unwrap();
    let untied = LlamaConfig { tie_word_embeddings: false, ..llama.clone() };
    let recomputing = json!({"activation_checkpointing": {"partition_activations": true}});
    for (optimizer, stage) in [
        ("SGD", 1),
        ("Lion", 2),
        ("Adagrad", 3),
        ("Lamb", 3),
        ("LARS", 1),
        ("Adafactor", 2),
        ("Adafactor", 3),
        ("AdamWScheduleFree", 3),
    ] {
        let more = json!({"optimizer": {"type": optimizer, "params": {"lr": 1e-5}}, "bf16": {"enabled": true}});
        let zero = json!({"stage": stage, "stage3_param_persistence_threshold": 1000});
        check::<LlamaLayers>(optimizer, &llama, 2, &config(2, zero, more), None);
    }
    for stage in [1, 2, 3] {
        let zero = json!({
            "stage": stage, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 100_000,
            "stage3_prefetch_bucket_size": 200_000,
        });
        check::<LlamaLayers>("untied", &untied, 2, &config(1, zero.clone(), bf16()), None);
        check::<GptLayers>("recomputing", &nano(), 2, &config(1, zero, recomputing.clone()), None);
    }
}

#[test]
fn muon_is_counted_to_the_byte_as_its_first_rank_has_it() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let nvme = json!({"device": "nvme", "nvme_path": folder.path(), "max_in_cpu": 150_000});
    let optimizer = json!({"device": "nvme", "nvme_path": folder.path(), "pipeline_read": true, "ratio": 0.7});
    let muon = json!({"optimizer": {"type": "Muon", "params": {"lr": 1e-3}}});
    let with = |more: Value| {
        let mut all = muon.clone();
        all.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        all
    };
    for (zero, world, more) in [
        (json!({"stage": 0}), 2, with(bf16())),
        (json!({"stage": 1, "sub_group_size": 100_000}), 3, muon.clone()),
        (json!({"stage": 2}), 2, with(bf16())),
        (json!({"stage": 3, "sub_group_size": 100_000}), 2, with(bf16())),
        (
            json!({"stage": 3, "sub_group_size": 100_000, "offload_optimizer": optimizer, "offload_param": nvme}),
            2,
            muon.clone(),
        ),
    ] {
        let config = config(1, zero, more);
        let shapes = Shapes::preset("nano").unwrap();
        let options = EstimateOptions { disk_access: Some(DiskAccess::Cached), ..EstimateOptions::default() };
        let estimate = Estimate::with(&shapes, &Config::load(config.clone(), world).unwrap(), options).unwrap();
        // In a batch of Muon's matrices, the first rank has the costliest one.
        let ranks = train::<GptLayers>(world, &nano(), &config, options.disk_access);
        compare(&estimate, &ranks[..1], &format!("world size {world}, {config}"));
    }
}

#[test]
fn compression_is_counted_to_the_byte() {
    for (stage, world, more) in
        [(0, 2, json!({})), (1, 3, bf16()), (2, 2, json!({})), (3, 2, bf16()), (3, 4, json!({}))]
    {
        let zero = json!({
            "stage": stage, "zero_quantized_gradients": true, "zero_quantized_weights": true,
            "reduce_bucket_size": 20_000, "stage3_param_persistence_threshold": 400, "stage3_max_reuse_distance": 0,
        });
        check::<GptLayers>("nano", &nano(), world, &config(2, zero, more), None);
    }
}

#[test]
fn modules_kept_in_f32_are_counted_to_the_byte() {
    let kept = json!({"bf16": {"enabled": true}, "data_types": {"keep_in_fp32_modules": ["ln_*", "wte", "mlp.c_fc"]}});
    for stage in 0..4 {
        let zero = json!({"stage": stage, "stage3_param_persistence_threshold": 100, "reduce_bucket_size": 10_000});
        check::<GptLayers>("nano", &nano(), 2, &config(2, zero, kept.clone()), None);
    }
    let shapes = Shapes::preset("nano").unwrap();
    let mut wrong = config(1, json!({}), kept);
    wrong["data_types"]["keep_in_fp32_modules"] = json!(["ln_*", "mlp.fc"]);
    let error = Estimate::new(&shapes, &Config::load(wrong, 2).unwrap()).unwrap_err();
    assert!(matches!(&error, Error::Param(ParamError::NoSuchModule { name, .. }) if name == "mlp.fc"), "{error}");
}

#[test]
fn a_model_of_any_size_is_estimated_at_once() {
    let start = std::time::Instant::now();
    let llama = LlamaConfig {
        hidden_size: 8192,
        intermediate_size: 28_672,
        num_hidden_layers: 80,
        num_attention_heads: 64,
        num_key_value_heads: 8,
        ..LlamaConfig::preset("llama-2-7b").unwrap()
    };
    let shapes = Shapes::of("llama-2-70b", |vb| LanguageModel::<LlamaLayers>::new(&llama, vb)).unwrap();
    assert_eq!(shapes.num_parameters(), 68_976_648_192);
    let zero = json!({"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"}});
    let config = Config::load(config(1000, zero, bf16()), 64).unwrap();
    let estimate = Estimate::new(&shapes, &config).unwrap();
    let psi = 68_976_648_192.0 / 64.0;
    // Master weights, two moments and gradients; sizes are rounded up to pages.
    let padding = estimate.file_bytes() as f64 / (14.0 * psi) - 1.0;
    assert!((0.0..0.001).contains(&padding), "{padding}");
    assert!(start.elapsed().as_secs_f64() < 5.0, "{:?}", start.elapsed());
}

/// Writes a safetensors file of `tensors` whose data is all zeros.
fn write_safetensors(path: &Path, tensors: &[(String, Vec<usize>)]) {
    let mut header = serde_json::Map::new();
    let mut end = 0;
    for (name, shape) in tensors {
        let bytes = 4 * shape.iter().product::<usize>();
        header.insert(name.clone(), json!({"dtype": "F32", "shape": shape, "data_offsets": [end, end + bytes]}));
        end += bytes;
    }
    let header = Value::Object(header).to_string().into_bytes();
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header);
    std::fs::write(path, bytes).unwrap();
    // The file is sparse: none of the data is on the disk, and none of it may be read.
    let file = std::fs::OpenOptions::new().append(true).open(path).unwrap();
    file.set_len(file.metadata().unwrap().len() + end as u64).unwrap();
}

#[test]
fn a_file_of_weights_gives_what_its_model_gives() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let exported = threads::run(1, |comm| {
        let builder = Engine::builder().communicator(comm).device(Device::Cpu);
        let config = config(1, json!({"stage": 0}), json!({}));
        let mut engine = builder.initialize(|vb| LanguageModel::<GptLayers>::new(&nano(), vb), config)?;
        engine.export_safetensors(&path)
    });
    exported.unwrap().remove(0).unwrap();
    let config = Config::load(config(1, json!({"stage": 3, "stage3_max_reuse_distance": 0}), bf16()), 2).unwrap();
    let of_preset = Estimate::new(&Shapes::preset("nano").unwrap(), &config).unwrap();
    let shapes = Shapes::safetensors(&path, &UnitRule::Numbered).unwrap();
    assert_eq!((shapes.num_units(), shapes.largest_unit()), (4, 198_272));
    let of_file = Estimate::new(&shapes, &config).unwrap();
    assert_eq!(of_file.step, of_preset.step);
    for (file, preset) in of_file.memory.rows.iter().zip(&of_preset.memory.rows) {
        assert_eq!((file.bytes.held, file.formula), (preset.bytes.held, preset.formula), "{}", file.kind.name());
    }
}

#[test]
fn an_index_stands_for_its_files_and_no_data_is_read() {
    let folder = tempfile::tempdir().unwrap();
    // The files contain 40 GB that take no space on the disk.
    let block = |i: usize| (format!("model.layers.{i}.w"), vec![50_000, 10_000]);
    write_safetensors(&folder.path().join("a.safetensors"), &(0..10).map(block).collect::<Vec<_>>());
    write_safetensors(&folder.path().join("b.safetensors"), &(10..20).map(block).collect::<Vec<_>>());
    let file = |i| if i < 10 { "a.safetensors" } else { "b.safetensors" };
    let map: serde_json::Map<_, _> = (0..20).map(|i| (block(i).0, json!(file(i)))).collect();
    let index = folder.path().join("model.safetensors.index.json");
    std::fs::write(&index, json!({"metadata": {}, "weight_map": map}).to_string()).unwrap();
    let shapes = Shapes::safetensors(&index, &UnitRule::Numbered).unwrap();
    assert_eq!((shapes.num_parameters(), shapes.num_units()), (10_000_000_000, 20));
    let one = Shapes::safetensors(&index, &UnitRule::None).unwrap();
    assert_eq!((one.num_units(), one.largest_unit()), (0, 10_000_000_000));

    std::fs::write(&index, "{\"weight_map\": 3}").unwrap();
    let error = Shapes::safetensors(&index, &UnitRule::Numbered).unwrap_err();
    assert!(
        matches!(&error, Error::Param(ParamError::BadWeightFile { why, .. }) if why.contains("weight_map")),
        "{error}"
    );
    let error = Shapes::safetensors(folder.path().join("c.safetensors"), &UnitRule::Numbered).unwrap_err();
    assert!(matches!(&error, Error::Io { .. }), "{error}");
}

#[test]
fn deepspeeds_estimators_give_what_they_gave_there() {
    let file: Value = serde_json::from_str(include_str!("../fixtures/conformance_memory.json")).unwrap();
    let cases = file.as_array().unwrap();
    for case in cases {
        let (input, expect) = (&case["input"], &case["expect"]);
        let number = |key: &str| input[key].as_u64().unwrap();
        let flag = |key: &str| input[key].as_bool().unwrap();
        let machines = Machines::new(number("gpus_per_node"), number("nodes"));
        let needs = if input["stage"] == 2 {
            zero2(number("total_params"), machines, flag("cpu_offload"))
        } else {
            let offloaded = match (flag("cpu_offload"), flag("cpu_offload_params")) {
                (true, true) => Zero3Offload::OptimizerAndParameters,
                (true, false) => Zero3Offload::Optimizer,
                (false, _) => Zero3Offload::Nothing,
            };
            let layer = number("largest_layer_params");
            assert_eq!(expect["largest_layer_bytes"], 4 * layer);
            zero3(number("total_params"), layer, machines, offloaded, flag("zero_init"))
        };
        let [cpu_bytes, gpu_bytes] = ["cpu_bytes", "gpu_bytes"].map(|key| expect[key].as_u64().unwrap());
        assert_eq!(needs, MemoryNeeds { cpu_bytes, gpu_bytes }, "{case}");
    }
    assert_eq!(cases.len(), 14);
}
