//! A custom optimizer: sharded, offloaded, checkpointed and scheduled like the built-in ones.

use crate::support::tiny::{Shape, Tiny, batch, config, train, train_with};
use candle_core::Device;
use candle_zero::Engine;
use candle_zero::checkpoint::LoadOptions;
use candle_zero::comm::threads;
use candle_zero::error::{EngineError, Error, Result};
use candle_zero::optim::{Momentum, Optimizer, ParameterGroup, StepContext};
use candle_zero::precision::{FlatMut, FlatRef};
use serde_json::{Value, json};

const SHAPE: Shape = Shape { layers: 2, units: true, checkpointed: false };
const STEPS: usize = 5;
const LR: f64 = 0.05;

/// SGD with momentum and weight decay, with the same order of operations as the built-in one; it also counts its steps.
struct CustomSgd {
    names: &'static [&'static str],
}

impl CustomSgd {
    fn new() -> Self {
        Self { names: &["momentum_buffer", "steps"] }
    }
}

impl Optimizer for CustomSgd {
    fn name(&self) -> &str {
        "own"
    }

    fn lr(&self) -> f64 {
        LR
    }

    fn momentum(&self) -> Momentum {
        Momentum::Factor(0.9)
    }

    fn state_names(&self) -> &'static [&'static str] {
        self.names
    }

    fn update(
        &self,
        ctx: &StepContext,
        param: &mut [f32],
        grad: FlatRef<'_>,
        state: &mut [&mut [f32]],
        half: Option<FlatMut<'_>>,
    ) {
        let (decay, lr) = (ctx.weight_decay.unwrap_or(0.01) as f32, ctx.lr as f32);
        let [buffer, steps] = state else { panic!("two states") };
        for (i, p) in param.iter_mut().enumerate() {
            let g = grad.get(i) * ctx.grad_scale + decay * *p;
            buffer[i] = 0.9 * buffer[i] + g;
            *p -= lr * buffer[i];
            steps[i] += 1.0;
            assert_eq!(steps[i], ctx.step as f32, "the state of the previous steps");
        }
        if let Some(half) = half {
            half.copy_cast(FlatRef::F32(param));
        }
    }
}

fn keys() -> Value {
    json!({"optimizer": null, "scheduler": null, "zero_allow_untested_optimizer": true})
}

#[test]
fn it_gives_the_same_bits_at_all_stages_and_in_files_as_the_built_in_one() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let sgd = json!({"type": "SGD", "params": {"lr": LR, "momentum": 0.9, "weight_decay": 0.01}});
    for (world, more) in [(1, json!({})), (2, json!({})), (3, json!({})), (2, json!({"bf16": {"enabled": true}}))] {
        let with = |optimizer: Value| {
            let mut keys = keys();
            keys.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            keys["optimizer"] = optimizer;
            keys
        };
        let reference = train(world, SHAPE, &config(0, 1, json!({}), with(sgd.clone())), STEPS);
        for stage in 0..4u8 {
            for files in [false, true] {
                let mut zero = json!({"sub_group_size": 500, "stage3_param_persistence_threshold": 0});
                if files && stage > 0 {
                    zero["offload_optimizer"] = json!({"device": "nvme", "nvme_path": folder.path()});
                }
                let config = config(stage, 1, zero, with(Value::Null));
                let custom = train_with(world, SHAPE, &config, STEPS, |builder| builder.optimizer(CustomSgd::new()));
                for (custom, reference) in custom.iter().zip(&reference) {
                    let case = format!("stage {stage}, world {world}, files {files}, {more}");
                    assert_eq!((&custom.losses, &custom.norms), (&reference.losses, &reference.norms), "{case}");
                    assert!(custom.exported == reference.exported, "{case}");
                }
            }
        }
    }
}

/// Starts the tiny model on a rank with a custom optimizer.
fn start(
    comm: std::sync::Arc<dyn candle_zero::comm::Communicator>,
    stage: u8,
    optimizer: CustomSgd,
) -> Result<Engine<Tiny>> {
    let builder = Engine::builder().communicator(comm).device(Device::Cpu).optimizer(optimizer);
    builder.initialize(|vb| Tiny::new(SHAPE, vb), config(stage, 1, json!({}), keys()))
}

fn step(engine: &mut Engine<Tiny>) -> Result<u32> {
    let (ids, targets) = batch(engine.global_steps() as usize);
    let loss = engine.forward(|model| model.loss(&ids, &targets))?;
    engine.backward(&loss)?;
    engine.step()?;
    Ok(loss.to_scalar::<f32>()?.to_bits())
}

#[test]
fn its_states_are_saved_and_loaded_at_any_stage() {
    let folder = tempfile::tempdir().unwrap();
    let uninterrupted = threads::run(2, |comm| {
        let mut engine = start(comm, 2, CustomSgd::new())?;
        let mut losses = vec![];
        for n in 0..6 {
            if n == 3 {
                engine.save_checkpoint(folder.path(), None, json!({}))?;
            }
            losses.push(step(&mut engine)?);
        }
        Ok::<_, Error>(losses)
    });
    let uninterrupted = uninterrupted.unwrap().remove(0).unwrap();
    for stage in [0, 1, 3] {
        let resumed = threads::run(2, |comm| {
            let mut engine = start(comm, stage, CustomSgd::new())?;
            engine.load_checkpoint(folder.path(), None, &LoadOptions::default())?.unwrap();
            (3..6).map(|_| step(&mut engine)).collect::<Result<Vec<_>>>()
        });
        assert_eq!(resumed.unwrap().remove(0).unwrap(), uninterrupted[3..], "stage {stage}");
    }
    let other = threads::run(1, |comm| {
        let adam = json!({"optimizer": {"type": "Adam"}});
        let builder = Engine::builder().communicator(comm).device(Device::Cpu);
        let mut engine = builder.initialize(|vb| Tiny::new(SHAPE, vb), config(0, 1, json!({}), adam))?;
        engine.load_checkpoint(folder.path(), None, &LoadOptions::default()).map(|_| ())
    });
    let error = other.unwrap().remove(0).unwrap_err().to_string();
    assert!(
        error.contains("it has the states fp32, momentum_buffer, steps, but this optimizer needs exp_avg"),
        "{error}"
    );
    assert!(error.contains("(own)"), "{error}");
}

#[test]
fn it_wins_over_the_configuration_and_its_rate_is_what_the_schedule_starts_from() {
    let engine = |scheduler: Value| {
        let keys = json!({"scheduler": scheduler, "optimizer": {"type": "Lion", "params": {"lr": 7.0}}});
        let builder = Engine::builder().device(Device::Cpu).optimizer(CustomSgd::new());
        builder.initialize(|vb| Tiny::new(SHAPE, vb), config(0, 1, json!({}), keys)).unwrap()
    };
    assert_eq!(engine(Value::Null).lr(), [LR]);
    assert_eq!(engine(Value::Null).momentum(), [Momentum::Factor(0.9)]);
    let params = json!({"total_num_steps": 10, "warmup_num_steps": 2, "warmup_type": "linear"});
    let mut engine = engine(json!({"type": "WarmupCosineLR", "params": params}));
    let lrs: Vec<f64> = (0..4)
        .map(|_| {
            let lr = engine.lr()[0];
            step(&mut engine).unwrap();
            lr
        })
        .collect();
    assert!(lrs[..2] == [0.0, 0.0] && lrs[2] == LR / 2.0, "{lrs:?}");
}

#[test]
fn what_cannot_work_is_refused_by_name() {
    let refused = |optimizer: CustomSgd, stage: u8, keys: Value, groups: Vec<ParameterGroup>| {
        let builder = Engine::builder().device(Device::Cpu).optimizer(optimizer).parameter_groups(groups);
        match builder.initialize(|vb| Tiny::new(SHAPE, vb), config(stage, 1, json!({}), keys)) {
            Ok(_) => panic!("it must be refused"),
            Err(error) => error.to_string(),
        }
    };
    let plain = json!({"optimizer": null, "scheduler": null});
    insta::assert_snapshot!(refused(CustomSgd::new(), 1, plain, vec![]), @r#"optimizer own counts as untested with ZeRO (stage 1); set "zero_allow_untested_optimizer": true in the configuration, or use stage 0"#);
    let named = |names| refused(CustomSgd { names }, 0, keys(), vec![]);
    insta::assert_snapshot!(named(&["a", "a"]), @"the states of optimizer own are called a, a: two have the same name; give each state a valid and unique name");
    insta::assert_snapshot!(named(&["fp32"]), @"the states of optimizer own are called fp32: checkpoints call the weights fp32; give each state a valid and unique name");
    insta::assert_snapshot!(named(&["a", ""]), @"the states of optimizer own are called a, : one has no name; give each state a valid and unique name");
    let groups = vec![ParameterGroup::new().betas(0.9, 0.99)];
    insta::assert_snapshot!(refused(CustomSgd::new(), 0, keys(), groups), @"parameter group 0 (counted from 0): it has betas, but own has none; leave them out");
}

#[test]
fn ranks_with_different_ones_are_an_error_on_all_of_them() {
    let ranks = threads::run(2, |comm| {
        let names: [&'static [&'static str]; 2] = [&["a", "b"], &["a", "c"]];
        let optimizer = CustomSgd { names: names[comm.rank()] };
        start(comm, 2, optimizer).map(|_| ())
    });
    for rank in ranks.unwrap() {
        assert!(matches!(rank, Err(Error::Engine(EngineError::ConfigsDiffer { .. }))), "{rank:?}");
    }
}
