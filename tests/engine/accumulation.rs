//! Gradient accumulation: `no_sync`, `zero_grad`, and batch sizes and learning rates that change on a running engine.

use crate::support::tiny::{Shape, Tiny, batch, config};
use candle_core::{Device, Tensor};
use candle_nn::{Init, VarBuilder};
use candle_zero::Engine;
use candle_zero::checkpoint::{LoadOptions, SaveOptions};
use candle_zero::comm::{CollectiveKind as Collective, Communicator, threads};
use candle_zero::error::{EngineError, Error};
use candle_zero::memory::MemoryKind;
use candle_zero::optim::ParameterGroup;
use serde_json::{Value, json};
use std::sync::Arc;

fn on_ranks<T: Send>(world: usize, rank: impl Fn(Arc<dyn Communicator>) -> candle_zero::Result<T> + Sync) -> Vec<T> {
    threads::run(world, rank).unwrap().into_iter().map(|r| r.unwrap()).collect()
}

const SHAPE: Shape = Shape { units: true, checkpointed: false, layers: 2 };

fn tiny(comm: Arc<dyn Communicator>, config: &Value) -> candle_zero::Result<Engine<Tiny>> {
    Engine::builder().communicator(comm).device(Device::Cpu).initialize(|vb| Tiny::new(SHAPE, vb), config.clone())
}

fn forward(engine: &mut Engine<Tiny>, sample: usize) -> candle_zero::Result<Tensor> {
    let (ids, targets) = batch(sample);
    engine.forward(|model| model.loss(&ids, &targets))
}

/// Runs the forward and the backward pass.
fn pass(engine: &mut Engine<Tiny>, sample: usize) -> candle_zero::Result<()> {
    let loss = forward(engine, sample)?;
    engine.backward(&loss)
}

/// Returns the norm of the last step and the loss of a sample, as bits.
fn state(engine: &mut Engine<Tiny>) -> candle_zero::Result<[u64; 2]> {
    let (ids, targets) = batch(99);
    let loss = engine.eval(|model| model.loss(&ids, &targets))?.to_scalar::<f32>()?;
    Ok([engine.global_grad_norm().unwrap_or(-1.0).to_bits(), u64::from(loss.to_bits())])
}

// ---- no_sync ---------------------------------------------------------------------------------------------------

/// The point at which gradients are reduced in an accumulation of four micro steps.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Reduce {
    Always,
    /// In the last backward pass.
    Last,
    /// In the step.
    InStep,
    /// In the second and the last backward pass.
    Twice,
    /// In the last backward pass; `step` is not called in the micro steps before it.
    WithoutSteps,
}

/// Returns the trained weights of two parameters whose gradients are their factors in the loss: small integers, so that
/// no sum is rounded.
fn weights_after(world: usize, stage: u8, dtype: &str, reduce: Reduce) -> Vec<Vec<f32>> {
    let accumulation = if reduce == Reduce::WithoutSteps { 1 } else { 4 };
    let mut config = json!({
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": accumulation,
        "zero_allow_untested_optimizer": true, "gradient_clipping": 0, "gradient_allreduce_op": "sum",
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}}, "zero_optimization": {"stage": stage},
    });
    if dtype != "f32" {
        config[dtype] = json!({"enabled": true});
    }
    on_ranks(world, |comm| {
        let build = |vb: VarBuilder<'_>| {
            Ok([vb.get_with_hints(7, "a", Init::Const(0.0))?, vb.get_with_hints((70, 50), "b", Init::Const(0.0))?])
        };
        let mut engine = Engine::builder().communicator(comm).initialize(build, config.clone())?;
        let rank = engine.rank();
        let dtype = engine.dtype();
        for micro in 0..8usize {
            let pass = |engine: &mut Engine<[Tensor; 2]>| {
                let loss = engine.forward(|[a, b]| {
                    let factor = (4 * (1 + rank + micro % 3)) as f64;
                    let scaled_sum =
                        |t: &Tensor| (t.ones_like()? * factor)?.mul(t)?.to_dtype(candle_core::DType::F32)?.sum_all();
                    scaled_sum(a)? + scaled_sum(b)?
                })?;
                // With an accumulation of one, the loss is not divided.
                engine.backward(&(loss * (accumulation as f64 / 4.0))?)
            };
            let synchronizes = match reduce {
                Reduce::Always => true,
                Reduce::Last | Reduce::WithoutSteps => micro % 4 == 3,
                Reduce::InStep => false,
                Reduce::Twice => micro % 2 == 1,
            };
            if synchronizes { pass(&mut engine) } else { engine.no_sync(pass) }?;
            if reduce != Reduce::WithoutSteps || synchronizes {
                engine.step()?;
            }
        }
        assert_eq!(engine.global_steps(), 2);
        let value = engine.eval(|[a, b]| Tensor::cat(&[a.flatten_all()?, b.flatten_all()?], 0))?;
        assert_eq!(value.dtype(), dtype);
        value.to_dtype(candle_core::DType::F32)?.to_vec1::<f32>().map_err(Error::from)
    })
}

#[test]
fn gradients_of_no_sync_are_reduced_with_those_after_it() {
    for world in 1..=3 {
        // Both parameters end at minus the sum of their gradients over two steps of four micro steps each and over all
        // ranks.
        let micro_steps = [0, 1, 2, 0, 1, 2, 0, 1].map(|micro| 1 + micro);
        let sum: usize = (0..world).map(|rank| micro_steps.iter().map(|micro| micro + rank).sum::<usize>()).sum();
        for stage in 0..2 {
            for dtype in ["f32", "bf16"] {
                for reduce in [Reduce::Always, Reduce::Last, Reduce::InStep, Reduce::Twice, Reduce::WithoutSteps] {
                    let case = format!("world {world}, stage {stage}, {dtype}, {reduce:?}");
                    for weights in weights_after(world, stage, dtype, reduce) {
                        assert_eq!(weights, vec![-(sum as f32); 7 + 3500], "{case}");
                    }
                }
            }
        }
    }
}

#[test]
fn no_sync_reduces_nothing_holds_whole_gradients_and_gives_the_same_bits_at_stages_0_and_1() {
    for world in 1..=3 {
        let train = |stage, in_no_sync: bool| {
            let config = config(stage, 3, json!({}), json!({}));
            on_ranks(world, |comm| {
                let mut engine = tiny(comm, &config)?;
                let elements = engine.memory_report().parameters;
                let sums = |engine: &Engine<Tiny>| {
                    let report = engine.comm_report();
                    report.kind(Collective::AllReduce).calls + report.kind(Collective::ReduceScatter).calls
                };
                let mut states = vec![];
                for step in 0..2 {
                    for micro in 0..3 {
                        let sample = (3 * step + micro) * world + engine.rank();
                        let before = sums(&engine);
                        if in_no_sync && micro < 2 {
                            engine.no_sync(|engine| pass(engine, sample))?;
                            assert_eq!(sums(&engine), before);
                            let held = engine.memory_report().row(MemoryKind::Gradients).bytes.held;
                            assert_eq!(held, 4 * elements);
                        } else {
                            pass(&mut engine, sample)?;
                            assert!(sums(&engine) > before);
                        }
                        engine.step()?;
                    }
                    assert_eq!(engine.memory_report().row(MemoryKind::Gradients).bytes.held, 0);
                    states.push(state(&mut engine)?);
                }
                Ok(states)
            })
        };
        let held = train(0, true);
        assert_eq!(held, train(1, true), "world {world}");
        // With one rank, there is only one order of summation.
        assert_eq!(held == train(0, false), world == 1, "world {world}");
    }
}

#[test]
fn no_sync_is_refused_where_gradients_are_sharded_inside_of_itself_and_around_a_step() {
    for stage in 2..4 {
        on_ranks(2, |comm| {
            let mut engine = tiny(comm, &config(stage, 2, json!({}), json!({})))?;
            let error = engine.no_sync(|_| -> candle_zero::Result<()> { panic!("the closure runs") }).unwrap_err();
            let text = format!("no_sync is possible at stages 0 and 1, but this engine is at stage {stage}, ");
            assert!(error.to_string().starts_with(&text), "{error}");
            pass(&mut engine, 0)?;
            engine.step()
        });
    }
    on_ranks(2, |comm| {
        let mut engine = tiny(comm, &config(1, 1, json!({}), json!({})))?;
        let nested = engine.no_sync(|engine| engine.no_sync(|_| Ok(()))).unwrap_err();
        insta::allow_duplicates! {
            insta::assert_snapshot!(nested, @"no_sync was called inside no_sync; remove the inner call: nothing is reduced until the outer one ends");
        }
        engine.no_sync(|engine| {
            pass(engine, 0)?;
            insta::allow_duplicates! {
                insta::assert_snapshot!(engine.step().unwrap_err(), @"step was called inside no_sync; the order of calls in a micro step is forward, backward, step");
            }
            Ok(())
        })?;
        // The refused calls did not end anything: a step outside no_sync still works.
        engine.step()?;
        assert!(engine.was_step_applied());
        Ok(())
    });
}

// ---- zero_grad -------------------------------------------------------------------------------------------------

#[test]
fn zero_grad_drops_what_the_accumulation_has_and_nothing_else() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let nvme = json!({"offload_optimizer": {"device": "nvme", "nvme_path": folder.path()}});
    for (stage, zero) in [(0, json!({})), (1, json!({})), (2, json!({})), (3, json!({})), (2, nvme.clone()), (3, nvme)]
    {
        let config = config(stage, 2, zero, json!({}));
        let train = |dropped: bool| {
            on_ranks(2, |comm| {
                let mut engine = tiny(comm, &config)?;
                for micro in 0..4 {
                    let sample = 2 * micro + engine.rank();
                    if dropped {
                        // In one run, each micro step begins with an unrelated backward pass, which is dropped.
                        pass(&mut engine, sample + 50)?;
                        engine.zero_grad()?;
                        let error = engine.step().unwrap_err();
                        assert!(error.to_string().starts_with("step was called before backward"), "{error}");
                    }
                    // In the other run, the first backward pass of each accumulation is dropped and repeated.
                    if dropped || micro % 2 == 1 {
                        pass(&mut engine, sample)?;
                    } else {
                        pass(&mut engine, sample)?;
                        engine.zero_grad()?;
                        pass(&mut engine, sample)?;
                    }
                    engine.step()?;
                    if micro % 2 == 0 {
                        engine.zero_grad()?;
                    }
                    assert_eq!(
                        (engine.micro_steps(), engine.global_steps()),
                        (micro as u64 + 1, (micro as u64).div_ceil(2))
                    );
                }
                Ok((state(&mut engine)?, engine.skipped_steps()))
            })
        };
        assert_eq!(train(true), train(false), "{config}");
    }
}

#[test]
fn zero_grad_drops_what_no_sync_holds() {
    let train = |dropped: bool| {
        on_ranks(2, |comm| {
            let mut engine = tiny(comm, &config(1, 1, json!({}), json!({})))?;
            if dropped {
                engine.no_sync(|engine| pass(engine, 7))?;
                engine.zero_grad()?;
                assert_eq!(engine.memory_report().row(MemoryKind::Gradients).bytes.held, 0);
            }
            pass(&mut engine, 1)?;
            engine.step()?;
            state(&mut engine)
        })
    };
    assert_eq!(train(true), train(false));
}

// ---- batch sizes -----------------------------------------------------------------------------------------------

#[test]
fn the_batch_size_of_a_running_engine_changes_the_accumulation_at_its_boundary() {
    on_ranks(2, |comm| {
        let mut engine = tiny(comm, &config(2, 3, json!({}), json!({})))?;
        let accumulate = |engine: &mut Engine<Tiny>, micro_steps: usize| -> candle_zero::Result<()> {
            for micro in 1..=micro_steps {
                assert!(engine.is_between_accumulations() == (micro == 1));
                assert_eq!(engine.is_gradient_accumulation_boundary(), micro == micro_steps);
                pass(engine, micro)?;
                assert!(!engine.is_between_accumulations());
                engine.step()?;
            }
            Ok(())
        };
        accumulate(&mut engine, 3)?;
        assert_eq!((engine.global_steps(), engine.global_samples()), (1, 12));
        // Four micro steps come after three. DeepSpeed would end this accumulation too early, because there, an
        // accumulation ends when the count of all micro steps is divisible by the number of micro steps per update.
        engine.set_train_batch_size(16)?;
        accumulate(&mut engine, 4)?;
        assert_eq!((engine.global_steps(), engine.global_samples()), (2, 28));
        let batch = engine.config().batch;
        assert_eq!((batch.train_batch_size, batch.gradient_accumulation_steps), (16, 4));
        insta::allow_duplicates! {
            insta::assert_snapshot!(engine.set_train_batch_size(10).unwrap_err(), @"a train_batch_size of 10 is not possible: it must be a positive multiple of train_micro_batch_size_per_gpu x ranks = 2 x 2; give such a number");
        }
        assert!(engine.set_train_batch_size(0).is_err());
        insta::allow_duplicates! {
            insta::assert_snapshot!(engine.set_train_micro_batch_size(0).unwrap_err(), @"a train_micro_batch_size_per_gpu of 0 is not possible with 4 accumulation steps on 2 ranks; give a number from 1 to 2305843009213693951");
        }
        pass(&mut engine, 0)?;
        insta::allow_duplicates! {
            insta::assert_snapshot!(engine.set_train_batch_size(8).unwrap_err(), @"set_train_batch_size was called in the middle of an accumulation: after backward 1 of 4, before the step that updates the weights; the accumulated gradients would be lost; call set_train_batch_size when is_between_accumulations() is true");
        }
        engine.step()?;
        (1..4).try_for_each(|micro| pass(&mut engine, micro).and_then(|()| engine.step()))?;
        engine.set_train_micro_batch_size(3)?;
        let batch = engine.config().batch;
        assert_eq!((batch.train_batch_size, batch.gradient_accumulation_steps), (24, 4));
        Ok(())
    });
}

#[test]
fn an_engine_whose_batch_size_was_set_trains_as_one_that_was_configured_so() {
    let train = |configured: usize, set: Option<usize>| {
        on_ranks(2, |comm| {
            let mut engine = tiny(comm, &config(1, configured, json!({}), json!({})))?;
            set.map_or(Ok(()), |size| engine.set_train_batch_size(size))?;
            for micro in 0..4 {
                let sample = 2 * micro + engine.rank();
                pass(&mut engine, sample)?;
                engine.step()?;
            }
            state(&mut engine)
        })
    };
    assert_eq!(train(1, Some(8)), train(2, None));
}

#[test]
fn ranks_that_set_different_values_are_told_and_nothing_changes() {
    on_ranks(3, |comm| {
        let mut engine = tiny(comm, &config(1, 1, json!({}), json!({})))?;
        let (rank, lr) = (engine.rank(), engine.lr());
        let differ = |result: candle_zero::Result<()>, name: &str| match result {
            Err(Error::Engine(EngineError::ArgumentsDiffer { call, .. })) => assert_eq!(call, name),
            other => panic!("{other:?}"),
        };
        differ(engine.set_lr(if rank == 1 { 0.5 } else { 0.25 }), "set_lr");
        differ(engine.set_train_batch_size(if rank == 2 { 12 } else { 6 }), "set_train_batch_size");
        assert_eq!((engine.lr(), engine.config().batch.train_batch_size), (lr, 6));
        pass(&mut engine, rank)?;
        engine.step()
    });
}

// ---- set_lr ----------------------------------------------------------------------------------------------------

#[test]
fn a_rate_that_was_set_holds_until_the_schedule_goes_on() {
    let step = |engine: &mut Engine<Tiny>| pass(engine, 3).and_then(|()| engine.step());
    on_ranks(2, |comm| {
        // The schedule is WarmupLR.
        let mut engine = tiny(comm, &config(2, 1, json!({}), json!({})))?;
        step(&mut engine)?;
        step(&mut engine)?;
        let scheduled = engine.lr();
        engine.set_lr(0.5)?;
        assert_eq!(engine.lr(), [0.5]);
        step(&mut engine)?;
        assert!(engine.lr()[0] > scheduled[0] && engine.lr()[0] <= 1e-2);
        insta::allow_duplicates! {
            insta::assert_snapshot!(engine.set_lr(-1.0).unwrap_err(), @"a learning rate of -1 is not possible; give a finite number of at least 0");
            insta::assert_snapshot!(engine.set_lr_of_groups(&[0.1, 0.2]).unwrap_err(), @"found 2 learning rates for 1 parameter group; give one for each group, in get_lr's order");
        }
        assert!(engine.set_lr(f64::NAN).is_err());
        Ok(())
    });
}

#[test]
fn without_a_schedule_a_rate_that_was_set_holds_and_is_what_trains() {
    let train = |configured: f64, set: Option<f64>| {
        let optimizer = json!({"type": "AdamW", "params": {"lr": configured, "weight_decay": 0.1}});
        let mut config = config(2, 1, json!({}), json!({"optimizer": optimizer}));
        config.as_object_mut().unwrap().remove("scheduler");
        on_ranks(2, |comm| {
            let mut engine = tiny(comm, &config)?;
            set.map_or(Ok(()), |lr| engine.set_lr(lr))?;
            for sample in 0..3 {
                pass(&mut engine, sample)?;
                engine.step()?;
            }
            assert_eq!(engine.lr(), [set.unwrap_or(configured)]);
            state(&mut engine)
        })
    };
    assert_eq!(train(0.3, Some(0.02)), train(0.02, None));
    assert_ne!(train(0.3, None), train(0.02, None));
}

/// Returns a configuration with a warm-up of 4 steps, or without a schedule.
fn with_rate(stage: u8, lr: f64, scheduled: bool) -> Value {
    let optimizer = json!({"type": "AdamW", "params": {"lr": lr, "weight_decay": 0.1}});
    let mut config = config(stage, 1, json!({}), json!({"optimizer": optimizer}));
    if !scheduled {
        config.as_object_mut().unwrap().remove("scheduler");
    }
    config
}

/// Builds an engine with two parameter groups; the first contains the QKV matrices of attention.
fn in_groups(comm: Arc<dyn Communicator>, config: &Value) -> candle_zero::Result<Engine<Tiny>> {
    let qkv = ParameterGroup::new().names(["*qkv.weight"]);
    let builder = Engine::builder().communicator(comm).device(Device::Cpu).parameter_groups(vec![qkv]);
    builder.initialize(|vb| Tiny::new(SHAPE, vb), config.clone())
}

/// Trains steps `from..to` on two ranks.
fn train(engine: &mut Engine<Tiny>, from: usize, to: usize) -> candle_zero::Result<()> {
    for step in from..to {
        let sample = 2 * step + engine.rank();
        pass(engine, sample)?;
        engine.step()?;
    }
    Ok(())
}

#[test]
fn a_run_that_is_resumed_goes_on_with_the_rates_that_were_set_to_the_bit_and_on_any_number_of_ranks() {
    // The rates must be restored to the last digit.
    let rates = [0.1 + 0.2, 1.0 / 3e3];
    for scheduled in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let uninterrupted = on_ranks(2, |comm| {
            let mut engine = in_groups(comm, &with_rate(2, 0.05, scheduled))?;
            train(&mut engine, 0, 2)?;
            engine.set_lr_of_groups(&rates)?;
            engine.save_checkpoint(folder.path(), None, Value::Null)?;
            train(&mut engine, 2, 5)?;
            Ok((engine.lr(), state(&mut engine)?))
        });
        // The configuration has a different rate here, which must not matter.
        let resumed = on_ranks(2, |comm| {
            let mut engine = in_groups(comm, &with_rate(3, 0.7, scheduled))?;
            engine.load_checkpoint(folder.path(), None, &LoadOptions::default())?.unwrap();
            assert_eq!(engine.lr(), rates);
            train(&mut engine, 2, 5)?;
            Ok((engine.lr(), state(&mut engine)?))
        });
        assert_eq!(resumed, uninterrupted, "scheduled {scheduled}");
        assert_eq!(uninterrupted[0].0 == rates, !scheduled, "a schedule continues by its own rule");
        // Resumes with a different number of ranks, and from there with a third number.
        let through = tempfile::tempdir().unwrap();
        for (world, from, to) in [(3, &folder, Some(&through)), (1, &through, None)] {
            on_ranks(world, |comm| {
                let mut engine = in_groups(comm, &with_rate(0, 0.7, scheduled))?;
                engine.load_checkpoint(from.path(), None, &LoadOptions::default())?.unwrap();
                assert_eq!(engine.lr(), rates, "world {world}");
                to.map_or(Ok(()), |to| engine.save_checkpoint(to.path(), None, Value::Null).map(drop))
            });
        }
    }
}

#[test]
fn a_rate_that_was_not_set_is_that_of_the_file_after_a_load_and_without_the_optimizer_too() {
    let folder = tempfile::tempdir().unwrap();
    let at = |tag: &'static str| (folder.path(), Some(tag));
    on_ranks(1, |comm| {
        let mut engine = tiny(comm, &with_rate(0, 0.3, false))?;
        let (dir, tag) = at("configured");
        engine.save_checkpoint(dir, tag, Value::Null)?;
        engine.set_lr(0.02)?;
        let (dir, tag) = at("set");
        engine.save_checkpoint(dir, tag, Value::Null)?;
        // A run that loads an earlier checkpoint gets that checkpoint's rate.
        let (dir, tag) = at("configured");
        engine.load_checkpoint(dir, tag, &LoadOptions::default())?;
        assert_eq!(engine.lr(), [0.3]);
        Ok(())
    });
    let rate = |tag, options: LoadOptions| {
        on_ranks(1, |comm| {
            let mut engine = tiny(comm, &with_rate(0, 0.007, false))?;
            let (dir, tag) = at(tag);
            engine.load_checkpoint(dir, tag, &options)?;
            Ok(engine.lr()[0])
        })[0]
    };
    assert_eq!(rate("configured", LoadOptions::default()), 0.007);
    assert_eq!(rate("set", LoadOptions::default()), 0.02);
    assert_eq!(rate("set", LoadOptions { load_optimizer_states: false, ..LoadOptions::default() }), 0.007);
    assert_eq!(rate("set", LoadOptions { load_module_only: true, ..LoadOptions::default() }), 0.007);
}

#[test]
fn rates_that_were_set_for_other_groups_are_an_error_and_nothing_changes() {
    let folder = tempfile::tempdir().unwrap();
    on_ranks(2, |comm| {
        let mut engine = tiny(comm, &with_rate(1, 0.3, false))?;
        engine.set_lr(0.5)?;
        engine.save_checkpoint(folder.path(), None, Value::Null).map(drop)
    });
    on_ranks(2, |comm| {
        let mut engine = in_groups(comm, &with_rate(1, 0.3, false))?;
        train(&mut engine, 0, 1)?;
        let before = state(&mut engine)?;
        let error = engine.load_checkpoint(folder.path(), None, &LoadOptions::default()).unwrap_err().to_string();
        let text = "it has learning rates set with set_lr for 1 parameter group, but this engine has 2; train with the \
                    parameter groups that were saved, or load with load_optimizer_states false";
        assert!(error.ends_with(text), "{error}");
        assert_eq!((engine.lr(), state(&mut engine)?), (vec![0.3, 0.3], before));
        train(&mut engine, 1, 2)
    });
}

// ---- saving ----------------------------------------------------------------------------------------------------

#[test]
fn a_save_in_the_middle_of_an_accumulation_is_refused_before_anything_is_written() {
    for stage in 0..4 {
        let folder = tempfile::tempdir().unwrap();
        on_ranks(2, |comm| {
            let mut engine = tiny(comm, &config(stage, 3, json!({}), json!({})))?;
            pass(&mut engine, 0)?;
            for _ in 0..2 {
                let error = engine.save_checkpoint(folder.path(), None, Value::Null).unwrap_err();
                insta::allow_duplicates! {
                    insta::assert_snapshot!(error, @"save_checkpoint was called in the middle of an accumulation: after backward 1 of 3, before the step that updates the weights; the accumulated gradients would be lost; call save_checkpoint when is_between_accumulations() is true");
                }
                if !engine.is_between_accumulations() && engine.micro_steps() == 0 {
                    engine.step()?;
                }
            }
            assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
            for sample in 1..3 {
                pass(&mut engine, sample)?;
                engine.step()?;
            }
            // A loss whose backward pass has not run leaves no gradients.
            forward(&mut engine, 5)?;
            engine.save_checkpoint(folder.path(), None, Value::Null).map(drop)
        });
        assert!(folder.path().join("latest").exists());
    }
}

#[test]
fn a_save_or_load_that_would_lose_gradients_is_refused_also_with_offload_and_after_no_sync() {
    let files = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let offload = |device: &str| json!({"offload_optimizer": {"device": device, "nvme_path": files.path()}});
    let mut cases =
        vec![(0, json!({}), true), (1, json!({}), true), (1, offload("cpu"), true), (1, offload("nvme"), true)];
    cases.extend([(2, offload("cpu"), false), (2, offload("nvme"), false), (3, offload("nvme"), false)]);
    for (stage, zero, uses_no_sync) in cases {
        let [saved, refused] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let accumulation = if uses_no_sync { 1 } else { 2 };
        let train = |interrupted: bool| {
            on_ranks(2, |comm| {
                let mut engine = tiny(comm, &config(stage, accumulation, zero.clone(), json!({})))?;
                engine.save_checkpoint(saved.path(), Some("start"), Value::Null)?;
                let refuse = |engine: &mut Engine<Tiny>| {
                    if !interrupted {
                        return;
                    }
                    assert!(!engine.is_between_accumulations());
                    let in_background = SaveOptions { in_background: true, ..SaveOptions::default() };
                    for result in [
                        engine.save_checkpoint(refused.path(), None, Value::Null).map(drop),
                        engine.save_checkpoint_with(refused.path(), None, Value::Null, &in_background).map(drop),
                        engine.load_checkpoint(saved.path(), None, &LoadOptions::default()).map(drop),
                    ] {
                        let is_refused = matches!(result, Err(Error::Engine(EngineError::MidAccumulation { .. })));
                        assert!(is_refused, "stage {stage}, {zero}: {result:?}");
                    }
                    assert_eq!(std::fs::read_dir(refused.path()).unwrap().count(), 0, "stage {stage}, {zero}");
                };
                let rank = engine.rank();
                if uses_no_sync {
                    engine.no_sync(|engine| {
                        pass(engine, rank)?;
                        refuse(engine);
                        Ok(())
                    })?;
                    refuse(&mut engine);
                    // A forward pass in between does not consume the gradients.
                    let loss = forward(&mut engine, 2 + rank)?;
                    refuse(&mut engine);
                    engine.backward(&loss)?;
                    refuse(&mut engine);
                } else {
                    pass(&mut engine, rank)?;
                    refuse(&mut engine);
                    engine.step()?;
                    refuse(&mut engine);
                    pass(&mut engine, 2 + rank)?;
                    refuse(&mut engine);
                }
                engine.step()?;
                assert!(engine.is_between_accumulations());
                engine.save_checkpoint(saved.path(), None, Value::Null)?;
                state(&mut engine)
            })
        };
        assert_eq!(train(true), train(false), "stage {stage}, {zero}");
    }
    // Gradients that zero_grad has dropped do not prevent a save.
    on_ranks(1, |comm| {
        let mut engine = tiny(comm, &config(1, 1, json!({}), json!({})))?;
        engine.no_sync(|engine| pass(engine, 0))?;
        forward(&mut engine, 1)?;
        engine.zero_grad()?;
        engine.save_checkpoint(files.path().join("saved"), None, Value::Null).map(drop)
    });
}
