//! Parameter groups: their settings and schedules, and the layout of the state, which they do not change.

use crate::support::tiny::{Shape, config, train_with};
use candle_core::{Device, Tensor};
use candle_nn::{Init, VarBuilder};
use candle_zero::checkpoint::LoadOptions;
use candle_zero::comm::threads;
use candle_zero::error::{EngineError, Error, Result};
use candle_zero::optim::{LrSchedule, Momentum, ParameterGroup};
use candle_zero::{Engine, EngineBuilder};
use serde_json::{Value, json};
use std::collections::HashMap;

const SHAPE: Shape = Shape { layers: 2, units: true, checkpointed: false };

fn exported(file: &[u8]) -> HashMap<String, (Vec<usize>, Vec<f32>)> {
    let tensors = candle_core::safetensors::load_buffer(file, &Device::Cpu).unwrap();
    let values = |t: Tensor| (t.dims().to_vec(), t.flatten_all().unwrap().to_vec1().unwrap());
    tensors.into_iter().map(|(name, tensor)| (name, values(tensor))).collect()
}

fn adamw(weight_decay: f64) -> Value {
    json!({"scheduler": null,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": weight_decay}}})
}

/// Returns the weights after `steps` steps.
fn after(steps: usize, more: Value, groups: &[ParameterGroup]) -> HashMap<String, (Vec<usize>, Vec<f32>)> {
    let groups = |builder: EngineBuilder| builder.parameter_groups(groups.to_vec());
    exported(&train_with(2, SHAPE, &config(2, 1, json!({}), more), steps, groups)[0].exported)
}

#[test]
fn norms_and_biases_are_spared_from_decay_and_nothing_else() {
    // In the first step, all runs have the same gradients.
    let (with, without) = (after(1, adamw(0.5), &[]), after(1, adamw(0.0), &[]));
    let spared = after(1, adamw(0.5), &[ParameterGroup::no_decay()]);
    let mut counts = [0, 0];
    for (name, (dims, values)) in &spared {
        let expected = if dims.len() == 1 { &without[name].1 } else { &with[name].1 };
        assert!(values == expected, "{name}");
        counts[dims.len() - 1] += 1;
    }
    assert_eq!(counts, [9, 6]);
    assert!(with.iter().any(|(name, (dims, values))| dims.len() == 1 && *values != without[name].1));
}

#[test]
fn the_first_group_that_selects_a_parameter_has_it_with_all_its_numbers() {
    let groups = [
        ParameterGroup::new().names(["layer.0.*", "head.*"]).lr(0.0).weight_decay(0.0),
        ParameterGroup::new().names(["*.qkv.weight"]).betas(0.5, 0.6).eps(1e-3).lr(2e-2),
        ParameterGroup::new().dims(1..=1).lr(3e-2),
    ];
    let (start, of_all) = (after(0, adamw(0.1), &[]), after(1, adamw(0.1), &[]));
    let grouped = after(1, adamw(0.1), &groups);
    let params = json!({"lr": 2e-2, "betas": [0.5, 0.6], "eps": 1e-3, "weight_decay": 0.1});
    let of_second = after(1, json!({"scheduler": null, "optimizer": {"type": "AdamW", "params": params}}), &[]);
    let params = json!({"lr": 3e-2, "betas": [0.9, 0.95], "weight_decay": 0.1});
    let of_third = after(1, json!({"scheduler": null, "optimizer": {"type": "AdamW", "params": params}}), &[]);
    for (name, (dims, values)) in &grouped {
        let expected = match name.as_str() {
            name if name.starts_with("layer.0.") || name.starts_with("head.") => &start,
            "layer.1.qkv.weight" => &of_second,
            _ if dims.len() == 1 => &of_third,
            _ => &of_all,
        };
        assert!(*values == expected[name].1, "{name}");
    }
}

#[test]
fn every_stage_gives_the_same_bits_in_memory_and_in_files() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let groups = vec![ParameterGroup::no_decay().lr(5e-3), ParameterGroup::new().names(["embed*"]).betas(0.8, 0.9)];
    let with = |builder: EngineBuilder| builder.parameter_groups(groups.clone());
    for optimizer in ["AdamW", "Lamb"] {
        let optimizer = json!({"type": optimizer, "params": {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.1}});
        let more = json!({"optimizer": optimizer, "zero_allow_untested_optimizer": true});
        let reference = train_with(3, SHAPE, &config(0, 1, json!({}), more.clone()), 4, with);
        for stage in 1..4u8 {
            for files in [false, true] {
                let mut zero = json!({"sub_group_size": 300, "stage3_param_persistence_threshold": 0});
                if files {
                    zero["offload_optimizer"] = json!({"device": "nvme", "nvme_path": folder.path()});
                }
                let run = train_with(3, SHAPE, &config(stage, 1, zero, more.clone()), 4, with);
                for (run, reference) in run.iter().zip(&reference) {
                    assert_eq!(run.losses, reference.losses, "stage {stage}, files {files}");
                    assert_eq!(run.norms, reference.norms, "stage {stage}, files {files}");
                    assert!(run.exported == reference.exported, "stage {stage}, files {files}");
                }
            }
        }
    }
}

/// Starts a model with two parameters, `a` and `b`.
fn start(builder: EngineBuilder, config: Value) -> Result<Engine<[Tensor; 2]>> {
    let param = |vb: &VarBuilder<'_>, name| vb.get_with_hints(3, name, Init::Const(1.0));
    builder.device(Device::Cpu).initialize(|vb| Ok([param(&vb, "a")?, param(&vb, "b")?]), config)
}

fn step(engine: &mut Engine<[Tensor; 2]>) -> Result<()> {
    let loss = engine.forward(|[a, b]| (a.sqr()? + b.sqr()?)?.sum_all())?;
    engine.backward(&loss)?;
    engine.step()
}

fn of_two_groups(scheduler: &Value, lrs: [f64; 2]) -> (EngineBuilder, Value) {
    let group = ParameterGroup::new().names(["a"]).lr(lrs[0]);
    let config = json!({"train_batch_size": 1, "scheduler": scheduler, "gradient_clipping": 0,
        "optimizer": {"type": "Adam", "params": {"lr": lrs[1]}}});
    (Engine::builder().parameter_groups(vec![group]), config)
}

#[test]
fn rates_of_each_group_are_those_that_deepspeed_recorded() {
    let file: Value = serde_json::from_str(include_str!("../fixtures/schedules.json")).unwrap();
    let of_two = |case: &&Value| case["group_lrs"].as_array().unwrap().len() == 2;
    let cases: Vec<&Value> = file["cases"].as_array().unwrap().iter().filter(of_two).collect();
    assert!(cases.len() >= 4, "{}", cases.len());
    for case in cases {
        let lrs = [0, 1].map(|group| case["group_lrs"][group].as_f64().unwrap());
        let (builder, config) = of_two_groups(&json!({"type": case["type"], "params": case["params"]}), lrs);
        let mut engine = start(builder, config).unwrap();
        for n in 0..case["lr"][0].as_array().unwrap().len() {
            let found = engine.lr();
            assert_eq!(found.len(), 2);
            for (group, found) in found.into_iter().enumerate() {
                let expected = case["lr"][group][n].as_f64().unwrap();
                assert!((found - expected).abs() <= 1e-9 * expected, "{} group {group} step {n}", case["type"]);
                if let Some(betas) = case["betas"].as_array() {
                    let [beta1, beta2] = [0, 1].map(|i| betas[n][i].as_f64().unwrap());
                    let Momentum::Betas(found1, found2) = engine.momentum()[group] else { panic!("Adam has betas") };
                    assert!((found1 - beta1).abs() < 1e-9 && (found2 - beta2).abs() < 1e-9, "{found1} {beta1}");
                }
            }
            step(&mut engine).unwrap();
        }
    }
}

#[test]
fn lists_need_a_number_for_each_group() {
    let refused = |scheduler: Value| {
        let (builder, config) = of_two_groups(&scheduler, [0.1, 0.2]);
        start(builder, config).map(|_| ()).unwrap_err().to_string()
    };
    let warmup = |params: Value| json!({"type": "WarmupLR", "params": params});
    insta::assert_snapshot!(refused(warmup(json!({"warmup_max_lr": [1, 2, 3]}))), @"scheduler.params.warmup_max_lr is a list of 3, but the number of parameter groups is 2 (allowed: a number, or a list with one number for each group); correct the list, or the parameter groups given to the engine's builder");
    let cycle = json!({"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": [1, 2, 3, 4]}});
    assert!(
        refused(cycle)
            .starts_with("scheduler.params.cycle_max_lr is a list of 4, but the number of parameter groups is 2")
    );
    // Only groups that have parameters count.
    let config = json!({"train_batch_size": 1, "optimizer": {"type": "Adam", "params": {"lr": 0.5}},
        "scheduler": warmup(json!({"warmup_max_lr": [1, 2]}))});
    let groups = vec![ParameterGroup::new().names(["none"]), ParameterGroup::new().names(["b"]).lr(3.0)];
    let engine = start(Engine::builder().parameter_groups(groups.clone()), config).unwrap();
    assert_eq!(engine.lr(), [0.0, 0.0]);
    let config = json!({"train_batch_size": 1, "optimizer": {"type": "Adam", "params": {"lr": 0.5}}});
    assert_eq!(start(Engine::builder().parameter_groups(groups), config).unwrap().lr(), [3.0, 0.5]);
}

#[test]
fn a_schedule_of_ones_own_may_tell_groups_apart() {
    struct PerGroup;
    impl LrSchedule for PerGroup {
        fn lr(&self, applied: u64) -> f64 {
            (applied + 1) as f64
        }
        fn lr_of_group(&self, applied: u64, group: usize) -> f64 {
            self.lr(applied) * 10f64.powi(group as i32)
        }
    }
    let (builder, config) = of_two_groups(&Value::Null, [0.1, 0.2]);
    let mut engine = start(builder.schedule(PerGroup), config.clone()).unwrap();
    step(&mut engine).unwrap();
    assert_eq!(engine.lr(), [2.0, 20.0]);
    let engine = start(of_two_groups(&Value::Null, [0.1, 0.2]).0.schedule(|_| 0.5), config).unwrap();
    assert_eq!(engine.lr(), [0.5, 0.5]);
}

#[test]
fn numbers_that_no_optimizer_takes_are_refused_with_the_group() {
    let refused = |group: ParameterGroup| {
        let config = json!({"train_batch_size": 1, "optimizer": {"type": "Adam"}});
        let groups = vec![ParameterGroup::new().names(["a"]), group];
        start(Engine::builder().parameter_groups(groups), config).map(|_| ()).unwrap_err().to_string()
    };
    insta::assert_snapshot!(refused(ParameterGroup::new().lr(-1.0)), @"parameter group 1 (counted from 0): lr is -1; it must be a finite number of at least 0");
    insta::assert_snapshot!(refused(ParameterGroup::new().weight_decay(f64::NAN)), @"parameter group 1 (counted from 0): weight_decay is NaN; it must be a finite number of at least 0");
    insta::assert_snapshot!(refused(ParameterGroup::new().betas(0.9, 1.0)), @"parameter group 1 (counted from 0): the betas are 0.9, 1; each must be at least 0 and below 1");
}

#[test]
fn ranks_with_different_groups_are_an_error() {
    let ranks = threads::run(2, |comm| {
        let lr = [0.1, 0.2][comm.rank()];
        let (builder, config) = of_two_groups(&Value::Null, [lr, 0.3]);
        let mut config = config;
        config["train_batch_size"] = json!(2);
        start(builder.communicator(comm), config).map(|_| ())
    });
    for rank in ranks.unwrap() {
        assert!(matches!(rank, Err(Error::Engine(EngineError::ConfigsDiffer { .. }))), "{rank:?}");
    }
}

#[test]
fn a_checkpoint_goes_on_with_the_groups_of_the_new_run() {
    let folder = tempfile::tempdir().unwrap();
    let run = |groups: [f64; 2], steps: usize, resume: bool| {
        let (builder, config) = of_two_groups(&Value::Null, groups);
        let mut engine = start(builder, config).unwrap();
        if resume {
            engine.load_checkpoint(folder.path(), Some("two"), &LoadOptions::default()).unwrap().unwrap();
        }
        for _ in 0..steps {
            step(&mut engine).unwrap();
        }
        if !resume {
            engine.save_checkpoint(folder.path(), Some("two"), json!({})).unwrap();
        }
        let weights = engine.eval(|[a, b]| Tensor::cat(&[a, b], 0)).unwrap().to_vec1::<f32>().unwrap();
        (engine.lr(), weights)
    };
    let (_, saved) = run([0.1, 0.2], 2, false);
    let (lr, resumed) = run([0.0, 0.2], 2, true);
    assert_eq!(lr, [0.0, 0.2]);
    // The optimizer states exist regardless of the groups; here the first group has a rate of 0, so its weights do not
    // change.
    assert_eq!(resumed[..3], saved[..3]);
    let (_, uninterrupted) = run([0.1, 0.2], 4, false);
    assert_eq!(resumed[3..], uninterrupted[3..]);
}
