//! Frozen parameters: the same bits at every stage and wherever states are stored; no gradients, master weights,
//! moments or reductions for them; and freezing and thawing between steps.

use crate::support::tiny::{Outcome, Shape, Tiny, batch, config, train_with};
use candle_core::{DType, Device, Tensor};
use candle_nn::{Linear, Module, VarBuilder, linear};
use candle_zero::checkpoint::{LoadOptions, SaveOptions};
use candle_zero::comm::{CollectiveKind as Collective, threads};
use candle_zero::error::{EngineError, Error, ParamError};
use candle_zero::memory::MemoryKind;
use candle_zero::optim::ParameterGroup;
use candle_zero::zero::{Unit, unit};
use candle_zero::{Engine, Result};
use serde_json::{Value, json};
use std::path::Path;

const STEPS: usize = 6;

/// Returns whether a parameter is trained. Half of the model is frozen: the embedding, one complete block, and the qkv
/// product of another.
fn trains(name: &str, _: &[usize]) -> bool {
    !(name.starts_with("embed") || name.starts_with("layer.0") || name.starts_with("layer.1.qkv"))
}

fn shape(units: bool) -> Shape {
    Shape { units, layers: 3, ..Shape::default() }
}

fn released() -> Value {
    json!({"stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 0})
}

fn offloaded(device: &str, folder: &Path) -> Value {
    let mut zero = released();
    zero["offload_optimizer"] = json!({"device": device, "nvme_path": folder});
    zero["offload_param"] = json!({"device": device, "nvme_path": folder});
    zero
}

fn run(world: usize, shape: Shape, config: &Value) -> Vec<Outcome> {
    train_with(world, shape, config, STEPS, |builder| builder.trainable(trains))
}

fn assert_same(a: &[Outcome], b: &[Outcome], what: &str) {
    for (rank, (a, b)) in a.iter().zip(b).enumerate() {
        assert_eq!(a.losses, b.losses, "losses of rank {rank}: {what}");
        assert_eq!(a.norms, b.norms, "norms of rank {rank}: {what}");
        assert!(a.exported == b.exported, "parameters: {what}");
    }
}

fn initial(world: usize) -> Vec<u8> {
    let all = train_with(world, shape(true), &config(0, 1, json!({}), json!({})), 0, |builder| builder);
    all[0].exported.clone()
}

#[test]
fn a_half_frozen_model_gives_the_same_bits_at_every_stage_and_place() {
    let folder = tempfile::tempdir().unwrap();
    for more in [json!({}), json!({"bf16": {"enabled": true}})] {
        for world in [1, 2, 3] {
            let reference = run(world, shape(false), &config(0, 2, json!({}), more.clone()));
            for stage in 0..4u8 {
                for units in [false, true] {
                    let what = format!("stage {stage}, world {world}, units {units}, {more}");
                    let plain = run(world, shape(units), &config(stage, 2, released(), more.clone()));
                    assert_same(&reference, &plain, &what);
                }
            }
            for (stage, device) in [(1, "cpu"), (3, "cpu"), (3, "nvme")] {
                let zero = offloaded(device, folder.path());
                let outcomes = run(world, shape(true), &config(stage, 2, zero, more.clone()));
                assert_same(&reference, &outcomes, &format!("stage {stage}, world {world}, {device}, {more}"));
            }
            let recomputed = Shape { checkpointed: true, ..shape(true) };
            let outcomes = run(world, recomputed, &config(3, 2, released(), more.clone()));
            assert_same(&reference, &outcomes, &format!("recomputed, world {world}, {more}"));
        }
    }
}

#[test]
fn frozen_parameters_stay_and_the_others_learn() {
    let trained = run(2, shape(true), &config(3, 1, released(), json!({})));
    let (before, after) = (initial(2), &trained[0].exported);
    let (before, after) = (tensors(&before), tensors(after));
    for (name, values) in &before {
        let stays = after[name] == *values;
        assert_eq!(stays, !trains(name, &[]), "{name}");
    }
    assert!(before.keys().any(|name| trains(name, &[])) && before.keys().any(|name| !trains(name, &[])));
}

fn tensors(file: &[u8]) -> std::collections::BTreeMap<String, Vec<u8>> {
    let file = safetensors::SafeTensors::deserialize(file).unwrap();
    file.tensors().into_iter().map(|(name, view)| (name, view.data().to_vec())).collect()
}

#[test]
fn a_frozen_parameter_has_weights_and_nothing_else_on_any_rank_or_wire() {
    for more in [json!({}), json!({"bf16": {"enabled": true}})] {
        for world in [1, 2, 3] {
            for stage in 0..4u8 {
                let config = config(stage, 1, released(), more.clone());
                let half = run(world, shape(true), &config);
                for half in &half {
                    let what = format!("stage {stage}, world {world}, {more}\n{}", half.memory);
                    let (psi, frozen) = (half.memory.parameters as f64, half.memory.frozen as f64);
                    assert!(frozen > 0.3 * psi, "{what}");
                    let size = if more == json!({}) { [4.0, 4.0, 0.0, 8.0] } else { [2.0, 2.0, 4.0, 8.0] };
                    let kinds =
                        [MemoryKind::Parameters, MemoryKind::Gradients, MemoryKind::MasterWeights, MemoryKind::Moments];
                    for (i, (kind, size)) in kinds.into_iter().zip(size).enumerate() {
                        let row = half.memory.row(kind);
                        let elements = if i == 0 { psi } else { psi - frozen };
                        let sharded = [stage == 3, stage >= 2, stage >= 1, stage >= 1][i];
                        let formula = elements * size / if sharded { world as f64 } else { 1.0 };
                        assert!((row.formula.unwrap() - formula).abs() < 1e-6, "{}: {what}", kind.name());
                        assert_eq!(
                            row.bytes.peak as f64,
                            row.formula.unwrap() + row.padding,
                            "{}: {what}",
                            kind.name()
                        );
                    }
                    // In each step, the gradient of every trained parameter is sent once, padded to equal shards;
                    // nothing is sent for frozen parameters.
                    let report = |kind| half.comm.kind(kind).elements;
                    let travelled = report(Collective::AllReduce) + report(Collective::ReduceScatter);
                    let file = safetensors::SafeTensors::deserialize(&half.exported).unwrap();
                    let numels = file.tensors().into_iter().filter(|(name, _)| trains(name, &[]));
                    let numels = numels.map(|(_, view)| view.shape().iter().product::<usize>());
                    let padded: usize = numels.map(|numel| numel.div_ceil(world) * world).sum();
                    assert_eq!(travelled, (STEPS * padded) as u64, "{what}");
                }
            }
        }
    }
}

/// Four units that consist of Candle's own layers. Each test freezes some of the units.
struct Stack(Vec<Unit<Linear>>);

impl Stack {
    fn new(vb: VarBuilder<'_>) -> candle_core::Result<Self> {
        Ok(Self((0..4).map(|i| unit(vb.pp(i), |vb| linear(8, 8, vb))).collect::<candle_core::Result<_>>()?))
    }

    fn loss(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.0.iter().try_fold(x.clone(), |x, unit| unit.forward(&x)?.tanh())?.sqr()?.mean_all()
    }
}

fn plain(stage: u8) -> Value {
    json!({"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, "stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 0,
            "overlap_comm": false}})
}

fn input(step: usize, rank: usize) -> candle_core::Result<Tensor> {
    let value = |i: usize| ((i * 7 + step * 31 + rank * 3) % 13) as f32 / 6.0 - 1.0;
    Tensor::from_iter((0..16).map(value), &Device::Cpu)?.reshape((2, 8))
}

#[test]
fn a_frozen_unit_is_gathered_in_backward_only_where_something_below_it_is_trained() {
    let gathers = |rule: fn(&str, &[usize]) -> bool| {
        let ranks = threads::run(2, |comm| {
            let rank = comm.rank();
            let builder = Engine::builder().communicator(comm).device(Device::Cpu).trainable(rule);
            // The gradient check's own forward passes gather too.
            let builder = builder.gradient_check(false);
            let mut engine = builder.initialize(Stack::new, plain(3))?;
            for step in 0..3 {
                let x = input(step, rank)?;
                let loss = engine.forward(|model| model.loss(&x))?;
                engine.backward(&loss)?;
                engine.step()?;
            }
            assert_eq!(engine.memory_report().row(MemoryKind::Gathered).bytes.held, 0);
            // The maximum number of bytes that were gathered at one time: those of two units.
            let peak = engine.memory_report().row(MemoryKind::Gathered).bytes.peak;
            Ok((engine.comm_report().kind(Collective::AllGather).elements / (3 * 36), peak))
        });
        ranks.unwrap().remove(0).unwrap()
    };
    let (all, unit_peak) = gathers(|_, _| true);
    assert_eq!(all, 8, "four units, forward and backward");
    let (top, peak) = gathers(|name, _| name.starts_with('3'));
    assert_eq!((top, peak), (5, unit_peak), "frozen units below everything that is trained run forward only");
    let (third, peak) = gathers(|name, _| name.starts_with('2'));
    assert_eq!((third, peak), (6, unit_peak), "a frozen unit above passes gradients on, and is then released");
    let (lowest, peak) = gathers(|name, _| name.starts_with('0'));
    assert_eq!((lowest, peak), (8, unit_peak));
}

#[test]
fn frozen_layers_of_candle_pass_gradients_on_at_every_stage() {
    let train = |stage, world| {
        let ranks = threads::run(world, |comm| {
            let rank = comm.rank();
            let rule = |name: &str, _: &[usize]| name.starts_with('1');
            let builder = Engine::builder().communicator(comm).device(Device::Cpu).trainable(rule);
            let mut engine = builder.initialize(Stack::new, plain(stage))?;
            let mut losses = vec![];
            for step in 0..5 {
                let x = input(step, rank)?;
                let loss = engine.forward(|model| model.loss(&x))?;
                engine.backward(&loss)?;
                engine.step()?;
                losses.push((loss.to_scalar::<f32>()?.to_bits(), engine.global_grad_norm().unwrap().to_bits()));
            }
            Ok(losses)
        });
        ranks.unwrap().into_iter().map(Result::unwrap).collect::<Vec<_>>()
    };
    for world in [1, 2] {
        let reference = train(0, world);
        assert!(f64::from_bits(reference[0][4].1) > 0.0);
        (1..4).for_each(|stage| assert_eq!(train(stage, world), reference, "stage {stage}, world {world}"));
    }
}

/// Trains the tiny model with these rules, one after another, for 3 steps each, and saves to `save` at the end.
fn gradually(world: usize, config: &Value, rules: &[fn(&str, &[usize]) -> bool], save: Option<&Path>) -> Vec<Outcome> {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.safetensors");
    let ranks = threads::run(world, |comm| {
        let rank = comm.rank();
        let builder = Engine::builder().communicator(comm).device(Device::Cpu).trainable(rules[0]);
        let mut engine = builder.initialize(|vb| Tiny::new(shape(true), vb), config.clone())?;
        let accumulation = engine.config().batch.gradient_accumulation_steps;
        let (mut losses, mut norms, mut micro) = (vec![], vec![], 0);
        for rule in rules {
            engine.set_trainable(rule)?;
            for _ in 0..3 * accumulation {
                let (ids, targets) = batch(micro * world + rank);
                micro += 1;
                let loss = engine.forward(|model| model.loss(&ids, &targets))?;
                losses.push(loss.to_dtype(DType::F32)?.to_scalar::<f32>()?.to_bits());
                engine.backward(&loss)?;
                engine.step()?;
            }
            norms.push(engine.global_grad_norm().unwrap().to_bits());
        }
        if let Some(save) = save {
            engine.save_checkpoint(save, Some("end"), Value::Null)?;
        }
        engine.export_safetensors(&file)?;
        Ok((losses, norms, engine.memory_report(), engine.comm_report()))
    });
    let exported = std::fs::read(&file).unwrap();
    let outcome = |rank: Result<_>| {
        let (losses, norms, memory, comm) = rank.unwrap();
        Outcome { losses, norms, memory, comm, exported: exported.clone() }
    };
    ranks.unwrap().into_iter().map(outcome).collect()
}

const HEAD: fn(&str, &[usize]) -> bool = |name, _| name.starts_with("head");
const TOP: fn(&str, &[usize]) -> bool = |name, _| name.starts_with("head") || name.starts_with("layer.2");
const ALL: fn(&str, &[usize]) -> bool = |_, _| true;
const RULES: [fn(&str, &[usize]) -> bool; 4] = [HEAD, TOP, ALL, HEAD];

#[test]
fn gradual_unfreezing_gives_the_same_bits_at_every_stage_and_place() {
    let folder = tempfile::tempdir().unwrap();
    for more in [json!({}), json!({"bf16": {"enabled": true}})] {
        for world in [1, 3] {
            let reference = gradually(world, &config(0, 2, json!({}), more.clone()), &RULES, None);
            for stage in 1..4u8 {
                let outcome = gradually(world, &config(stage, 2, released(), more.clone()), &RULES, None);
                assert_same(&reference, &outcome, &format!("stage {stage}, world {world}, {more}"));
            }
            for stage in [1, 3] {
                let mut zero = offloaded("nvme", folder.path());
                zero["sub_group_size"] = json!(300);
                let outcome = gradually(world, &config(stage, 2, zero, more.clone()), &RULES, None);
                assert_same(&reference, &outcome, &format!("nvme, stage {stage}, world {world}, {more}"));
                let files: usize = outcome[0].memory.rows.iter().map(|row| row.file.held).sum();
                let anew =
                    gradually(world, &config(stage, 2, offloaded("nvme", folder.path()), more.clone()), &[HEAD], None);
                let expected: usize = anew[0].memory.rows.iter().map(|row| row.file.held).sum();
                assert!(files <= expected + 4096 * 64, "old files are gone: {files}, {expected}");
            }
        }
    }
}

#[test]
fn a_thawed_parameter_begins_as_one_of_a_new_engine() {
    // Both engines start from the weights of a run that trained only the head. One is built to train only the head, and
    // then thaws the rest; the other trains everything from the start.
    let first = gradually(2, &config(2, 1, json!({}), json!({})), &[HEAD], None);
    let folder = tempfile::tempdir().unwrap();
    let weights = folder.path().join("head.safetensors");
    std::fs::write(&weights, &first[0].exported).unwrap();
    let update = |thaws: bool| {
        let config = config(2, 1, json!({}), json!({"gradient_clipping": 0.0, "scheduler": null}));
        let ranks = threads::run(2, |comm| {
            let rank = comm.rank();
            let builder = Engine::builder().communicator(comm).device(Device::Cpu).init_from(&weights);
            let builder = if thaws { builder.trainable(HEAD) } else { builder };
            let mut engine = builder.initialize(|vb| Tiny::new(shape(true), vb), config.clone())?;
            if thaws {
                engine.set_trainable(ALL)?;
            }
            let (ids, targets) = batch(rank);
            let loss = engine.forward(|model| model.loss(&ids, &targets))?;
            engine.backward(&loss)?;
            engine.step()?;
            let file = folder.path().join(format!("{thaws}"));
            engine.export_safetensors(&file)?;
            Ok(std::fs::read(&file).unwrap())
        });
        ranks.unwrap().remove(0).unwrap()
    };
    assert!(update(true) == update(false));
}

#[test]
fn a_thawed_parameter_is_saved_with_its_own_count_of_updates_and_goes_on_to_the_bit() {
    let folder = tempfile::tempdir().unwrap();
    let config = config(2, 1, json!({}), json!({}));
    let whole = gradually(2, &config, &[HEAD, ALL, ALL], None);
    gradually(2, &config, &[HEAD, ALL], Some(folder.path()));
    for (world, stage) in [(2, 3), (2, 0)] {
        let mut config = config.clone();
        config["zero_optimization"] = json!({"stage": stage});
        let ranks = threads::run(world, |comm| {
            let rank = comm.rank();
            let builder = Engine::builder().communicator(comm).device(Device::Cpu);
            let mut engine = builder.initialize(|vb| Tiny::new(shape(true), vb), config.clone())?;
            engine.load_checkpoint(folder.path(), Some("end"), &LoadOptions::default())?.unwrap();
            let mut losses = vec![];
            for micro in 6..9 {
                let (ids, targets) = batch(micro * world + rank);
                let loss = engine.forward(|model| model.loss(&ids, &targets))?;
                losses.push(loss.to_scalar::<f32>()?.to_bits());
                engine.backward(&loss)?;
                engine.step()?;
            }
            Ok(losses)
        });
        for (rank, losses) in ranks.unwrap().into_iter().enumerate() {
            assert_eq!(losses.unwrap(), whole[rank].losses[6..], "rank {rank}, stage {stage}");
        }
    }
}

fn one<T>(run: impl Fn(candle_zero::EngineBuilder) -> Result<T> + Sync) -> Result<T>
where
    T: Send,
{
    threads::run(1, |comm| run(Engine::builder().communicator(comm).device(Device::Cpu))).unwrap().remove(0)
}

fn pair(vb: VarBuilder<'_>) -> candle_core::Result<[Linear; 2]> {
    Ok([linear(4, 4, vb.pp("base"))?, linear(4, 1, vb.pp("head"))?])
}

const HEAD_ONLY: fn(&str, &[usize]) -> bool = |name, _| name.starts_with("head");

#[test]
fn frozen_parameters_may_be_left_out_of_a_checkpoint_and_stay_as_they_are_then() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("weights.safetensors");
    for stage in [0, 1, 3] {
        let save = folder.path().join(format!("stage{stage}"));
        one(|builder| {
            let mut engine = builder.trainable(HEAD_ONLY).initialize(pair, plain(stage))?;
            let options = SaveOptions { exclude_frozen_parameters: true, ..SaveOptions::default() };
            engine.save_checkpoint_with(&save, Some("adapter"), Value::Null, &options)?;
            engine.export_safetensors(&file)
        })
        .unwrap();
        let checkpoint = candle_zero::checkpoint::Checkpoint::open(&save, None).unwrap().unwrap();
        let saved = checkpoint.manifest().parameters.iter().filter(|p| p.has("fp32")).map(|p| p.name.as_str());
        assert_eq!(saved.collect::<Vec<_>>(), ["head.weight", "head.bias"]);
        one(|builder| {
            // The seed differs, which shows that the base comes from the engine and not from the checkpoint.
            let mut engine = builder.seed(7).trainable(HEAD_ONLY).initialize(pair, plain(stage))?;
            let own = folder.path().join("own.safetensors");
            engine.export_safetensors(&own)?;
            engine.load_checkpoint(&save, None, &LoadOptions::default())?.unwrap();
            let loaded = folder.path().join("loaded.safetensors");
            engine.export_safetensors(&loaded)?;
            let read = |path: &Path| tensors(&std::fs::read(path).unwrap());
            let (own, loaded, saved) = (read(&own), read(&loaded), read(&file));
            assert!(loaded["base.weight"] == own["base.weight"] && loaded["base.weight"] != saved["base.weight"]);
            assert!(loaded["head.weight"] == saved["head.weight"] && loaded["head.weight"] != own["head.weight"]);
            Ok(())
        })
        .unwrap();
        let trains_the_base = one(|builder| {
            let mut engine = builder.initialize(pair, plain(stage))?;
            engine.load_checkpoint(&save, None, &LoadOptions::default())
        });
        let text = trains_the_base.unwrap_err().to_string();
        assert!(text.contains("base.weight was not saved in the checkpoint but is trained here"), "{text}");
    }
}

#[test]
fn what_was_frozen_when_it_was_saved_is_named_where_it_is_trained() {
    let folder = tempfile::tempdir().unwrap();
    one(|builder| {
        let mut engine = builder.trainable(HEAD_ONLY).initialize(pair, plain(1))?;
        engine.save_checkpoint(folder.path(), None, Value::Null)
    })
    .unwrap();
    let loaded = one(|builder| {
        let mut engine = builder.initialize(pair, plain(1))?;
        engine.load_checkpoint(folder.path(), None, &LoadOptions::default())
    });
    let text = loaded.unwrap_err().to_string();
    assert!(text.contains("base.weight was frozen in the checkpoint but is trained here; freeze it"), "{text}");
    one(|builder| {
        let mut engine = builder.trainable(HEAD_ONLY).initialize(pair, plain(3))?;
        engine.load_checkpoint(folder.path(), None, &LoadOptions::default())?.unwrap();
        engine.set_trainable(|_, _| true)
    })
    .unwrap();
}

#[test]
fn rules_that_freeze_everything_or_nothing_are_errors_and_lose_nothing() {
    let everything = one(|builder| builder.trainable(|_, _| false).initialize(pair, plain(2)).map(drop)).unwrap_err();
    assert!(matches!(everything, Error::Param(ParamError::NothingTrained { count: 4 })), "{everything}");
    let groups =
        vec![ParameterGroup::new().names(["base.*"]).frozen(), ParameterGroup::new().names(["bas.*"]).frozen()];
    let nothing =
        one(|builder| builder.parameter_groups(groups.clone()).initialize(pair, plain(2)).map(drop)).unwrap_err();
    assert!(matches!(nothing, Error::Param(ParamError::NothingFrozen { index: 1 })), "{nothing}");
    one(|builder| {
        let groups = vec![ParameterGroup::new().names(["base.*"]).frozen()];
        let mut engine = builder.parameter_groups(groups).initialize(pair, plain(3))?;
        assert_eq!(engine.trainable_parameters(), ["head.weight", "head.bias"]);
        let error = engine.set_trainable(|_, _| false).unwrap_err();
        assert!(matches!(error, Error::Param(ParamError::NothingTrained { .. })), "{error}");
        assert_eq!(engine.trainable_parameters(), ["head.weight", "head.bias"]);
        Ok(())
    })
    .unwrap();
}

#[test]
fn thawing_in_the_middle_of_an_accumulation_is_an_error_and_training_goes_on() {
    one(|builder| {
        let mut config = plain(3);
        config["gradient_accumulation_steps"] = json!(2);
        let mut engine = builder.trainable(HEAD_ONLY).initialize(pair, config)?;
        let x = Tensor::ones((2, 4), DType::F32, &Device::Cpu)?;
        for micro in 0..4 {
            let loss = engine.forward(|[base, head]| head.forward(&base.forward(&x)?)?.sqr()?.mean_all())?;
            engine.backward(&loss)?;
            let error = engine.set_trainable(|_, _| true).unwrap_err();
            assert!(
                matches!(error, Error::Engine(EngineError::MidAccumulation { call: "set_trainable", .. })),
                "{error}"
            );
            engine.step()?;
            if micro % 2 == 0 {
                let error = engine.set_trainable(|_, _| true).unwrap_err();
                assert!(error.to_string().contains("in the middle of an accumulation"), "{error}");
            }
        }
        engine.set_trainable(|_, _| true)
    })
    .unwrap();
}

#[test]
fn ranks_with_different_rules_are_told() {
    let ranks = threads::run(2, |comm| {
        let rank = comm.rank();
        let mut engine = Engine::builder().communicator(comm).device(Device::Cpu).initialize(pair, plain(3))?;
        let result = engine.set_trainable(move |name, _| rank == 0 || name.starts_with("head"));
        assert_eq!(engine.trainable_parameters().len(), 4);
        Ok(result.unwrap_err().to_string())
    });
    for (rank, text) in ranks.unwrap().into_iter().enumerate() {
        assert_eq!(
            text.unwrap(),
            format!(
                "rank {rank} and rank {} train different parameters; every rank must call set_trainable with the \
                 same rule",
                1 - rank
            )
        );
    }
    // The difference is also reported if one of the rules is itself an error.
    let everything = threads::run(2, |comm| {
        let rank = comm.rank();
        let mut engine = Engine::builder().communicator(comm).device(Device::Cpu).initialize(pair, plain(3))?;
        let result = engine.set_trainable(move |name, _| rank == 0 && name.starts_with("head"));
        Ok(matches!(result, Err(Error::Engine(EngineError::TrainableDiffers { .. }))))
    });
    assert!(everything.unwrap().into_iter().all(|rank| rank.unwrap()));
    let built = threads::run(2, |comm| {
        let rank = comm.rank();
        let builder = Engine::builder().communicator(comm).device(Device::Cpu);
        let built = builder.trainable(move |name, _| rank == 0 || name.starts_with("head")).initialize(pair, plain(0));
        Ok(matches!(built.map(drop), Err(Error::Engine(EngineError::ModelsDiffer { .. }))))
    });
    assert!(built.unwrap().into_iter().any(|rank| rank.unwrap()));
}
