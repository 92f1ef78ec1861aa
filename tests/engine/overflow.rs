//! Gradients that are not finite: skipped steps, the loss scale, and the counters.

use crate::support::tiny::config;
use candle_core::{DType, Device, Tensor};
use candle_nn::{Linear, Module, linear};
use candle_zero::comm::threads;
use candle_zero::{Engine, Result};
use serde_json::{Value, json};

/// Takes a step, with an infinite gradient if `overflows`.
fn step(engine: &mut Engine<Linear>, overflows: bool) -> Result<()> {
    let value = if overflows { f32::INFINITY } else { 0.5 };
    let x = Tensor::full(value, (2, 4), &Device::Cpu)?.to_dtype(engine.dtype())?;
    let loss = engine.forward(|m| m.forward(&x)?.to_dtype(DType::F32)?.mean_all())?;
    engine.backward(&loss)?;
    engine.step()
}

/// Runs `train` on two ranks and returns the result of rank 0.
fn on_two_ranks<T: Send>(config: &Value, train: impl Fn(&mut Engine<Linear>, usize) -> Result<T> + Sync) -> T {
    let results = threads::run(2, |comm| {
        let rank = comm.rank();
        let mut engine = Engine::builder().communicator(comm).initialize(|vb| linear(4, 3, vb), config.clone())?;
        train(&mut engine, rank)
    });
    results.unwrap().into_iter().map(|r| r.unwrap()).next().unwrap()
}

#[test]
fn bf16_skips_and_counts_every_bad_step_and_keeps_the_weights() {
    // This is the conformance case bf16-check in the area loss-scaler: eight bad gradients.
    let folder = tempfile::tempdir().unwrap();
    for stage in 0..4 {
        let config = config(stage, 1, json!({}), json!({"bf16": {"enabled": true}}));
        let (before, after) = (folder.path().join("before"), folder.path().join("after"));
        let skipped = on_two_ranks(&config, |engine, rank| {
            engine.export_safetensors(&before)?;
            let mut skipped = vec![];
            for _ in 0..8 {
                // One rank's overflow affects all ranks.
                step(engine, rank == 1)?;
                assert!(!engine.was_step_applied());
                assert_eq!(engine.global_grad_norm(), Some(f64::INFINITY));
                skipped.push(engine.skipped_steps());
            }
            engine.export_safetensors(&after)?;
            assert_eq!((engine.global_steps(), engine.micro_steps()), (8, 8));
            step(engine, false)?;
            assert!(engine.was_step_applied());
            Ok(skipped)
        });
        assert_eq!(skipped, (1..=8).collect::<Vec<_>>());
        assert_eq!(std::fs::read(&before).unwrap(), std::fs::read(&after).unwrap());
    }
}

#[test]
fn bf16_without_the_check_applies_the_bad_step() {
    let more = json!({"bf16": {"enabled": true, "check_grad_overflow": false}, "gradient_clipping": 0.0});
    on_two_ranks(&config(2, 1, json!({}), more), |engine, _| {
        step(engine, true)?;
        assert!(engine.was_step_applied());
        assert_eq!(engine.skipped_steps(), 0);
        Ok(())
    });
}

#[test]
fn the_schedule_stands_still_while_steps_are_skipped() {
    let more = json!({"fp16": {"enabled": true, "initial_scale_power": 4, "hysteresis": 1}});
    let rows = on_two_ranks(&config(1, 1, json!({}), more), |engine, _| {
        [false, false, true, true, false]
            .into_iter()
            .map(|overflows| {
                step(engine, overflows)?;
                Ok((engine.lr()[0], engine.loss_scale(), engine.skipped_steps()))
            })
            .collect::<Result<Vec<_>>>()
    });
    assert_eq!(rows.iter().map(|r| r.1).collect::<Vec<_>>(), [16.0, 16.0, 8.0, 4.0, 4.0]);
    assert_eq!(rows.iter().map(|r| r.2).collect::<Vec<_>>(), [0, 0, 1, 2, 2]);
    assert_eq!(rows[1].0, rows[3].0, "skipped steps do not move the schedule");
    assert!(rows[4].0 > rows[3].0);
}
