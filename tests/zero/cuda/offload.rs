//! Offload with a GPU: where states are stored, and copies that run at the same time as other work.

use super::{backward, forward, gpu_answers, offloaded, zero};
use crate::support::device::gpu;
use crate::support::tiny::{Outcome, Shape, Tiny, config, train_on};
use candle_core::{DType, Tensor};
use candle_zero::Engine;
use candle_zero::checkpoint::LoadOptions;
use candle_zero::comm::threads;
use candle_zero::memory::{MemoryKind, MemoryRow};
use serde_json::{Value, json};

fn shape() -> Shape {
    Shape { layers: 2, units: true, ..Shape::default() }
}

fn same_bits(a: &[Outcome], b: &[Outcome], what: &str) {
    for (a, b) in a.iter().zip(b) {
        assert_eq!(a.losses, b.losses, "{what}");
        assert_eq!(a.norms, b.norms, "{what}");
        assert!(a.exported == b.exported, "parameters: {what}");
    }
}

#[test]
fn windows_are_page_locked_where_pin_memory_says_so_and_change_no_bit() {
    if !gpu_answers(windows_are_page_locked_where_pin_memory_says_so_and_change_no_bit) {
        return;
    }
    let run = |optimizer: bool, param: bool| {
        let mut zero = offloaded(3);
        zero["offload_optimizer"]["pin_memory"] = json!(optimizer);
        zero["offload_param"]["pin_memory"] = json!(param);
        train_on(gpu, 2, shape(), &config(3, 2, zero, json!({"bf16": {"enabled": true}})), 3)
    };
    let reference = run(true, true);
    // There are two windows of 4 MiB for gradients, and two for shards. Updated weights stay on the host.
    let windows = 8 << 20;
    let locked = |run: &[Outcome]| {
        let MemoryRow { pinned, host, .. } = run[0].memory.row(MemoryKind::Staging);
        (pinned.held / windows, host.held / windows)
    };
    assert_eq!(locked(&reference), (2, 0));
    for (optimizer, param, expected) in [(true, false, (1, 1)), (false, true, (1, 1)), (false, false, (0, 2))] {
        let other = run(optimizer, param);
        assert_eq!(locked(&other), expected, "pin_memory {optimizer}, {param}");
        same_bits(&reference, &other, &format!("pin_memory {optimizer}, {param}"));
    }
}

#[test]
fn shards_of_weights_stay_on_the_gpu_where_only_the_optimizer_is_offloaded() {
    if !gpu_answers(shards_of_weights_stay_on_the_gpu_where_only_the_optimizer_is_offloaded) {
        return;
    }
    for format in [json!({}), json!({"bf16": {"enabled": true}}), json!({"fp16": {"enabled": true}})] {
        let run = |zero: Value| train_on(gpu, 2, shape(), &config(3, 1, zero, format.clone()), 3);
        let reference = run(zero());
        let mut optimizer = zero();
        optimizer["offload_optimizer"] = json!({"device": "cpu"});
        let other = run(optimizer);
        same_bits(&reference, &other, &format.to_string());
        let row = |kind| other[0].memory.row(kind);
        let weights = row(MemoryKind::Parameters);
        assert_eq!((weights.device.held as f64, weights.host.held), (weights.formula.unwrap() + weights.padding, 0));
        assert_eq!((row(MemoryKind::Moments).device.held, row(MemoryKind::MasterWeights).device.held), (0, 0));
        assert_eq!(row(MemoryKind::Gradients).device.peak, 0, "gradients are kept on the host");
    }
}

#[test]
fn gradients_leave_while_backward_runs_and_weights_come_back_while_the_next_are_updated() {
    if !gpu_answers(gradients_leave_while_backward_runs_and_weights_come_back_while_the_next_are_updated) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("trace.json");
    let mut config = config(2, 1, offloaded(2), json!({"bf16": {"enabled": true}}));
    config["zero_optimization"]["reduce_bucket_size"] = json!(100);
    threads::run(1, |comm| {
        let builder = Engine::builder().communicator(comm).device(gpu(0)?).timeline(&trace);
        let mut engine = builder.initialize(|vb| Tiny::new(shape(), vb), config.clone())?;
        for _ in 0..2 {
            backward(&mut engine, 1)?;
            engine.step()?;
        }
        Ok(())
    })
    .unwrap()
    .into_iter()
    .collect::<Result<(), _>>()
    .unwrap();
    let events: Value = serde_json::from_slice(&std::fs::read(&trace).unwrap()).unwrap();
    let times = |name: &str| -> Vec<(f64, f64)> {
        let all = events["traceEvents"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|e| e["ph"] == "X" && e["name"].as_str().unwrap().starts_with(name));
        let number = |event: &Value, key: &str| event[key].as_f64().unwrap();
        all.map(|event| (number(event, "ts"), number(event, "ts") + number(event, "dur"))).collect()
    };
    // Counts the copies named `copy` that began while work named `work` was running.
    let overlapping = |copy: &str, work: &str| {
        let work = times(work);
        times(copy).iter().filter(|copy| work.iter().any(|work| work.0 < copy.0 && copy.0 < work.1)).count()
    };
    assert!(overlapping("to the host", "backward") > 0, "{events}");
    assert!(overlapping("to the GPU", "sub-group") > 0, "{events}");
}

/// Returns the losses on one batch, and the file that is exported after the last step.
fn on_one_batch(ranks: usize, zero: Value, format: &Value, stage: u8, steps: usize) -> (Vec<f32>, Vec<u8>) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.safetensors");
    let losses = threads::run(ranks, |comm| {
        let builder = Engine::builder().device(gpu(comm.rank())?).communicator(comm);
        let mut engine =
            builder.initialize(|vb| Tiny::new(shape(), vb), config(stage, 1, zero.clone(), format.clone()))?;
        let mut losses = Vec::new();
        for _ in 0..steps {
            losses.push(backward(&mut engine, 1)?.to_dtype(DType::F32)?.to_scalar::<f32>()?);
            engine.step()?;
        }
        engine.export_safetensors(&file)?;
        Ok(losses)
    });
    (losses.unwrap().remove(0).unwrap(), std::fs::read(&file).unwrap())
}

#[test]
fn a_delayed_update_is_that_of_the_weights_before_it_and_is_there_one_step_later() {
    if !gpu_answers(a_delayed_update_is_that_of_the_weights_before_it_and_is_there_one_step_later) {
        return;
    }
    // From the first step on, the rate is large enough for a step to be visible in bf16.
    let scheduler = json!({"type": "WarmupLR", "params": {"warmup_min_lr": 1e-2, "warmup_max_lr": 2e-2}});
    let bf16 = json!({"bf16": {"enabled": true}, "scheduler": scheduler});
    for (stage, format) in [(1, bf16.clone()), (2, json!({"scheduler": scheduler})), (3, bf16)] {
        let run = |after: Option<u64>, steps| {
            let mut zero = offloaded(stage);
            if let Some(after) = after {
                zero["offload_optimizer"]["delayed_update"] = json!(true);
                zero["offload_optimizer"]["delayed_update_after"] = json!(after);
            }
            on_one_batch(2, zero, &format, stage, steps)
        };
        let what = format!("stage {stage}, {format}");
        let (at_once, _) = run(None, 4);
        let (delayed, _) = run(Some(0), 4);
        // The second step computes with the first weights again, and the third with those after one update.
        assert_eq!((delayed[0], delayed[1], delayed[2]), (at_once[0], at_once[0], at_once[1]), "{what}");
        assert!(delayed[3] < delayed[2], "{what}: {delayed:?}");
        // The export contains the update that has begun.
        assert!(run(Some(0), 1).1 == run(None, 1).1, "{what}");
        let (later, _) = run(Some(2), 4);
        assert_eq!(later[..3], at_once[..3], "{what}");
        assert_eq!(later[3], later[2], "{what}: the third update is not there yet");
        assert!(run(Some(4), 4) == run(None, 4), "{what}: none is delayed");
    }
}

#[test]
fn stages_agree_where_updates_are_delayed_and_a_checkpoint_has_the_update_that_has_begun() {
    if !gpu_answers(stages_agree_where_updates_are_delayed_and_a_checkpoint_has_the_update_that_has_begun) {
        return;
    }
    let format = json!({"bf16": {"enabled": true}, "optimizer": {"type": "AdamW", "params": {"lr": 2e-2}}});
    let delayed = |stage| {
        let mut zero = offloaded(stage);
        zero["offload_optimizer"]["delayed_update"] = json!(true);
        zero["offload_optimizer"]["delayed_update_after"] = json!(1);
        config(stage, 2, zero, format.clone())
    };
    let reference = train_on(gpu, 2, shape(), &delayed(1), 5);
    for stage in [2, 3] {
        same_bits(&reference, &train_on(gpu, 2, shape(), &delayed(stage), 5), &format!("stage {stage}"));
    }
    let folder = tempfile::tempdir().unwrap();
    let run = |load: bool| {
        threads::run(2, |comm| {
            let builder = Engine::builder().device(gpu(comm.rank())?).communicator(comm);
            let mut engine = builder.initialize(|vb| Tiny::new(shape(), vb), delayed(3))?;
            if load {
                engine.load_checkpoint(folder.path(), None, &LoadOptions::default())?;
            }
            let mut losses = Vec::new();
            for micro in 0..12 {
                if !load && micro == 6 {
                    losses.clear();
                    engine.save_checkpoint(folder.path(), None, json!(null))?;
                }
                if load && micro >= 6 {
                    break;
                }
                losses.push(backward(&mut engine, 1)?.to_dtype(DType::F32)?.to_scalar::<f32>()?);
                engine.step()?;
            }
            Ok(losses)
        })
    };
    let losses = |load| run(load).unwrap().into_iter().map(Result::unwrap).collect::<Vec<_>>();
    assert_eq!(losses(false), losses(true), "training continues as it would have");
}

#[test]
fn updates_that_cannot_be_delayed_are_made_at_once() {
    if !gpu_answers(updates_that_cannot_be_delayed_are_made_at_once) {
        return;
    }
    let run = |delay: bool| {
        let mut zero = offloaded(2);
        zero["offload_optimizer"]["delayed_update"] = json!(delay);
        zero["offload_optimizer"]["delayed_update_after"] = json!(0);
        let lamb =
            json!({"optimizer": {"type": "Lamb", "params": {"lr": 1e-2}}, "zero_allow_untested_optimizer": true});
        train_on(gpu, 1, shape(), &config(2, 1, zero, lamb), 3)
    };
    same_bits(&run(false), &run(true), "Lamb");
}

#[test]
fn what_is_read_saved_loaded_or_set_while_an_update_is_delayed_is_of_the_weights_after_it() {
    if !gpu_answers(what_is_read_saved_loaded_or_set_while_an_update_is_delayed_is_of_the_weights_after_it) {
        return;
    }
    const NAME: &str = "head.weight";
    let read = |engine: &mut Engine<Tiny>| -> candle_zero::Result<Vec<f32>> {
        Ok(engine.safe_get_full_fp32_param(NAME)?.flatten_all()?.to_vec1()?)
    };
    let number = |loss: Tensor| loss.to_dtype(DType::F32)?.to_scalar::<f32>();
    let all = LoadOptions::default();
    let scheduler = json!({"type": "WarmupLR", "params": {"warmup_min_lr": 1e-2, "warmup_max_lr": 2e-2}});
    let formats = [json!({"scheduler": scheduler}), json!({"scheduler": scheduler, "bf16": {"enabled": true}})];
    for (stage, format) in [1, 3].into_iter().flat_map(|stage| formats.each_ref().map(|format| (stage, format))) {
        let what = format!("stage {stage}, {format}");
        let config = |delayed: bool| {
            let mut zero = offloaded(stage);
            zero["offload_optimizer"]["delayed_update"] = json!(delayed);
            zero["offload_optimizer"]["delayed_update_after"] = json!(0);
            config(stage, 1, zero, format.clone())
        };
        let on_two = |delayed: bool, run: &(dyn Fn(&mut Engine<Tiny>) -> candle_zero::Result<Vec<f32>> + Sync)| {
            let ranks = threads::run(2, |comm| {
                let builder = Engine::builder().device(gpu(comm.rank())?).communicator(comm);
                run(&mut builder.initialize(|vb| Tiny::new(shape(), vb), config(delayed))?)
            });
            ranks.unwrap().into_iter().map(Result::unwrap).collect::<Vec<_>>()
        };
        let steps = |engine: &mut Engine<Tiny>, steps: usize| -> candle_zero::Result<Vec<f32>> {
            let losses = (0..steps).map(|_| {
                let loss = number(backward(engine, 1)?)?;
                engine.step()?;
                Ok(loss)
            });
            losses.collect()
        };
        let updated = on_two(false, &|engine| {
            steps(engine, 1)?;
            read(engine)
        });
        let folder = tempfile::tempdir().unwrap();
        let continued = on_two(true, &|engine| {
            let updated = &updated[engine.rank()];
            let first = steps(engine, 1)?[0];
            if engine.rank() == 0 {
                // This waits only for this rank's own update.
                engine.memory_report();
                assert!(engine.safe_get_local_fp32_param(NAME)?.elem_count() < updated.len(), "{what}");
            }
            assert!(read(engine)? == *updated, "{what}: before forward");
            let loss = forward(engine, 1)?;
            assert!(read(engine)? == *updated, "{what}: between forward and backward");
            engine.save_checkpoint(folder.path(), Some("between"), json!(null))?;
            assert_eq!(number(loss.clone())?, first, "{what}: the second forward pass uses the first weights");
            engine.backward(&loss)?;
            assert!(read(engine)? == *updated, "{what}: between backward and step");
            let zeros = engine.safe_get_full_fp32_param(NAME)?.zeros_like()?;
            engine.safe_set_full_fp32_param(NAME, &zeros)?;
            engine.step()?;
            let largest = read(engine)?.into_iter().map(f32::abs).fold(0f32, f32::max);
            assert!(largest > 0.0 && largest < 0.05, "{what}: one update away from the set value: {largest}");
            forward(engine, 1)?;
            engine.load_checkpoint(folder.path(), Some("between"), &all)?;
            assert!(read(engine)? == *updated, "{what}: loaded");
            steps(engine, 3)
        });
        let fresh = on_two(true, &|engine| {
            engine.load_checkpoint(folder.path(), None, &all)?;
            steps(engine, 3)
        });
        assert_eq!(continued, fresh, "{what}");
    }
}
