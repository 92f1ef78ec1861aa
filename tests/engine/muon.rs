//! Muon with ZeRO: recorded values on one or more ranks, one optimizer state for matrices, groups for Muon and for
//! Adam, and checkpoints.
//! (tests/zero/optimizer_stages.rs tests that all stages give the same bits.)

use crate::support::tiny::{Shape, Tiny, batch, config, train};
use candle_core::{Device, Tensor};
use candle_nn::VarBuilder;
use candle_zero::checkpoint::{Checkpoint, LoadOptions};
use candle_zero::comm::threads;
use candle_zero::memory::MemoryKind;
use candle_zero::optim::{Momentum, ParameterGroup};
use candle_zero::{Engine, EngineBuilder, Result};
use serde_json::{Value, json};
use std::path::Path;

const SHAPE: Shape = Shape { layers: 2, units: true, checkpointed: false };

/// The number of elements of the tiny model's matrices, without the embedding.
const MATRICES: usize = 2 * (12 * 36 + 12 * 12) + 12 * 37;

/// Returns an initial value, by the formula in the recorded file.
fn initial(k: i64, i: i64) -> f32 {
    (2 * ((2741 * (i + 1) + 877 * (k + 1) + 13 * i * i) % 2001) - 2001) as f32 / 16384.0
}

/// Returns a gradient, by the formula in the recorded file.
fn gradient(s: i64, k: i64, i: i64) -> f32 {
    let numerator = 2 * ((1103 * (i + 1) + 389 * s * (i + 3) + 617 * (k + 1) * s + 71 * i * i) % 1001) - 1001;
    numerator as f32 / 4096.0 * 2.0f32.powi(-3 * (i % 4) as i32)
}

#[test]
fn recorded_weights_are_met_over_any_number_of_ranks_at_every_stage() {
    let file: Value = serde_json::from_str(include_str!("../fixtures/optimizers_small.json")).unwrap();
    let shapes = [vec![7], vec![5, 3]];
    let tensor = |k: usize, value: &dyn Fn(i64, i64) -> f32| {
        let numel: usize = shapes[k].iter().product();
        let values: Vec<f32> = (0..numel as i64).map(|i| value(k as i64, i)).collect();
        Tensor::from_vec(values, shapes[k].clone(), &Device::Cpu).unwrap()
    };
    let folder = tempfile::tempdir().unwrap();
    let init = folder.path().join("init.safetensors");
    let tensors = ["a", "b"].iter().enumerate().map(|(k, name)| (*name, tensor(k, &initial))).collect();
    candle_core::safetensors::save(&tensors, &init).unwrap();
    for case in file["cases"].as_array().unwrap().iter().filter(|c| c["name"] == "Muon") {
        let (hyper, aux) = (&case["hyper"], &case["hyper"]["aux_adam"]);
        // Muon and Adam share one key for the weight decay. In the second case, their values differ, so a group sets
        // Adam's.
        let groups = vec![ParameterGroup::new().dims(1..=1).weight_decay(aux["weight_decay"].as_f64().unwrap())];
        let params = json!({"muon_lr": hyper["lr"], "adam_lr": aux["lr"], "momentum": hyper["momentum"],
            "weight_decay": hyper["weight_decay"], "ns_method": hyper["ns_method"], "betas": aux["betas"],
            "eps": aux["eps"]});
        for (world, stage) in [(1, 0), (2, 0), (2, 1), (3, 2), (3, 3)] {
            let config = json!({"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0,
                "optimizer": {"type": "Muon", "params": params}, "zero_optimization": {"stage": stage}});
            let export = folder.path().join("model.safetensors");
            let ranks = threads::run(world, |comm| {
                let build = |vb: VarBuilder<'_>| Ok([vb.get(7, "a")?, vb.get((5, 3), "b")?]);
                let builder = Engine::builder().communicator(comm).device(Device::Cpu);
                let builder = builder.init_from(&init).parameter_groups(groups.clone());
                let mut engine = builder.initialize(build, config.clone())?;
                for step in 1..=10i64 {
                    let grads = [0, 1].map(|k| tensor(k, &|k, i| gradient(step, k, i)));
                    let loss = engine.forward(|[a, b]| grads[0].mul(a)?.sum_all()? + grads[1].mul(b)?.sum_all()?)?;
                    engine.backward(&loss)?;
                    engine.step()?;
                }
                engine.export_safetensors(&export)
            });
            ranks.unwrap().into_iter().for_each(|rank| rank.unwrap());
            let found = candle_core::safetensors::load(&export, &Device::Cpu).unwrap();
            for name in ["a", "b"] {
                let found = found[name].flatten_all().unwrap().to_vec1::<f32>().unwrap();
                let expected = case["after_step"]["10"][name]["param"].as_array().unwrap();
                let expected: Vec<f32> = expected.iter().map(|x| x.as_f64().unwrap() as f32).collect();
                let largest = expected.iter().fold(0f32, |m, x| m.max(x.abs()));
                let error = found.iter().zip(&expected).fold(0f32, |m, (a, b)| m.max((a - b).abs())) / largest;
                let tolerance = match () {
                    () if hyper["ns_method"] == "standard" && name == "b" => 2e-2,
                    // The mean of three equal gradients is rounded.
                    () if world == 3 => 1.2e-6,
                    () => 1e-6,
                };
                assert!(error <= tolerance, "{name} at stage {stage} with world size {world}: {error:e}, {hyper}");
            }
        }
    }
}

fn muon() -> Value {
    json!({"scheduler": null, "optimizer": {"type": "Muon", "params": {"lr": 0.02, "adam_lr": 1e-3}}})
}

#[test]
fn matrices_have_one_moment_and_whole_ones_are_on_one_rank_at_a_time() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for world in [1, 2, 3] {
        for (stage, files) in [(0, false), (1, false), (2, false), (3, false), (1, true), (3, true)] {
            let mut zero = json!({"stage3_param_persistence_threshold": 0});
            if files {
                zero["offload_optimizer"] = json!({"device": "nvme", "nvme_path": folder.path()});
            }
            for outcome in train(world, SHAPE, &config(stage, 1, zero, muon()), 2) {
                let report = &outcome.memory;
                let row = report.row(MemoryKind::Moments);
                let all = (4 * MATRICES + 8 * (report.parameters - MATRICES)) as f64;
                let expected = if stage == 0 { all } else { all / world as f64 };
                assert_eq!(row.formula, Some(expected), "{report}");
                let held = if files { row.file.held } else { row.bytes.held };
                assert_eq!(held as f64, expected + row.padding, "{report}");
                // Each of the 15 parameters has padding: less than one element per rank or, in files, up to the
                // alignment of requests.
                let max_padding = 15.0 * 8.0 * if files { 2048.0 } else { world as f64 };
                assert!((0.0..=max_padding).contains(&row.padding), "{report}");
                // At their peak, the buckets hold two full matrices of 12 x 37 and the products of one of them, or a
                // bucket of gradients.
                let buckets = report.row(MemoryKind::Buckets).bytes;
                assert_eq!(buckets.held, 0, "{report}");
                assert!(buckets.peak > 2 * 4 * 12 * 37 || stage == 0, "{report}");
            }
        }
    }
}

fn start(builder: EngineBuilder, stage: u8) -> Result<Engine<Tiny>> {
    builder.device(Device::Cpu).initialize(|vb| Tiny::new(SHAPE, vb), config(stage, 1, json!({}), muon()))
}

#[test]
fn each_group_has_two_halves_of_which_empty_ones_do_not_count() {
    let rates = |groups: Vec<ParameterGroup>| {
        let engine = start(Engine::builder().parameter_groups(groups), 0).unwrap();
        (engine.lr(), engine.momentum())
    };
    let (sgd, adam) = (Momentum::Factor(0.95), Momentum::Betas(0.9, 0.95));
    assert_eq!(rates(vec![]), (vec![0.02, 1e-3], vec![sgd, adam]));
    assert_eq!(
        rates(vec![ParameterGroup::new().names(["layer.0.*"]).lr(0.5), ParameterGroup::no_decay().lr(0.25)]),
        (vec![0.5, 0.5, 0.25, 0.02, 1e-3], vec![sgd, adam, adam, sgd, adam])
    );
    // The embedding counts as a matrix; everything else uses AdamW.
    let groups = vec![ParameterGroup::new().names(["embed*"]).use_muon(true), ParameterGroup::new().use_muon(false)];
    assert_eq!(rates(groups), (vec![0.02, 1e-3], vec![sgd, adam]));
}

fn step(engine: &mut Engine<Tiny>) -> Result<u32> {
    let (ids, targets) = batch(engine.global_steps() as usize);
    let loss = engine.forward(|model| model.loss(&ids, &targets))?;
    engine.backward(&loss)?;
    engine.step()?;
    Ok(loss.to_scalar::<f32>()?.to_bits())
}

fn run(world: usize, stage: u8, steps: usize, load: Option<&Path>, save: Option<&Path>) -> Vec<u32> {
    let ranks = threads::run(world, |comm| {
        let mut engine = start(Engine::builder().communicator(comm), stage)?;
        if let Some(folder) = load {
            engine.load_checkpoint(folder, None, &LoadOptions::default())?.unwrap();
        }
        let losses = (0..steps).map(|_| step(&mut engine)).collect::<Result<Vec<_>>>()?;
        if let Some(folder) = save {
            engine.save_checkpoint(folder, None, json!({}))?;
        }
        Ok(losses)
    });
    ranks.unwrap().into_iter().map(|rank: Result<_>| rank.unwrap()).next().unwrap()
}

#[test]
fn a_checkpoint_has_of_each_parameter_what_there_is_and_goes_on_at_any_stage() {
    let folder = tempfile::tempdir().unwrap();
    let expected = run(2, 2, 6, None, None);
    run(2, 1, 3, None, Some(folder.path()));
    for stage in 0..4 {
        assert_eq!(run(2, stage, 3, Some(folder.path()), None), expected[3..], "stage {stage}");
    }
    let checkpoint = Checkpoint::open(folder.path(), None).unwrap().unwrap();
    let manifest = checkpoint.manifest();
    assert_eq!(manifest.optimizer.as_deref(), Some("Muon"));
    assert_eq!(manifest.states, ["fp32", "momentum_buffer", "exp_avg", "exp_avg_sq"]);
    let elements = |state: &str| manifest.parameters.iter().filter(|p| p.has(state)).map(|p| p.numel()).sum::<usize>();
    assert_eq!(elements("momentum_buffer"), MATRICES);
    assert_eq!(elements("exp_avg"), elements("fp32") - MATRICES);
    let written: u64 = manifest.files.iter().map(|f| f.bytes - f.header_bytes).sum();
    assert_eq!(written as usize, 4 * (2 * MATRICES + 3 * (elements("fp32") - MATRICES)));
    checkpoint.verify(|_| {}).unwrap();

    // A parameter that Adam now trains lacks Adam's states.
    let groups = vec![ParameterGroup::new().names(["head.weight"]).use_muon(false)];
    let mut engine = start(Engine::builder().parameter_groups(groups), 0).unwrap();
    let error = engine.load_checkpoint(folder.path(), None, &LoadOptions::default()).unwrap_err().to_string();
    let expected = "it has the states fp32, momentum_buffer of head.weight, but this optimizer needs exp_avg; train \
                    with the optimizer that was saved (Muon) and its parameter groups, or load with \
                    load_optimizer_states false";
    assert!(error.contains(expected), "{error}");
}
