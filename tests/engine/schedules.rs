//! Schedules in the engine: the betas that they change, resuming from a checkpoint, and custom schedules.

use candle_core::{Device, Tensor};
use candle_nn::{Init, VarBuilder};
use candle_zero::checkpoint::LoadOptions;
use candle_zero::comm::threads;
use candle_zero::error::{EngineError, Error, Result};
use candle_zero::optim::{LrSchedule, Momentum};
use candle_zero::{Engine, EngineBuilder};
use serde_json::{Value, json};

const SIZE: usize = 7;

/// Returns the gradient of an optimizer step, counted from 0.
fn gradient(step: usize) -> Vec<f32> {
    (0..SIZE).map(|i| ((step * 7 + i * 3) % 11) as f32 / 5.0 - 0.9).collect()
}

fn config(stage: u8, optimizer: Value, scheduler: Value) -> Value {
    json!({
        "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0, "optimizer": optimizer, "scheduler": scheduler,
        "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": true,
    })
}

fn adam() -> Value {
    json!({"type": "Adam", "params": {"lr": 0.01, "betas": [0.9, 0.999]}})
}

fn start(builder: EngineBuilder, config: &Value) -> Result<Engine<Tensor>> {
    let param = |vb: VarBuilder<'_>| vb.get_with_hints(SIZE, "param", Init::Const(0.5));
    builder.device(Device::Cpu).initialize(param, config.clone())
}

/// Takes one optimizer step with that step's gradient.
fn train(engine: &mut Engine<Tensor>) -> Result<()> {
    let x = Tensor::new(gradient(engine.global_steps() as usize), &Device::Cpu)?;
    let loss = engine.forward(|param| x.mul(param)?.sum_all())?;
    engine.backward(&loss)?;
    engine.step()
}

fn weights(engine: &mut Engine<Tensor>) -> Vec<f32> {
    engine.eval(|param| param.affine(1.0, 0.0)).unwrap().to_vec1().unwrap()
}

/// Computes Adam in f64 with the rate and the betas of each step.
fn reference(steps: &[(f64, f64, f64)]) -> Vec<f64> {
    let (mut p, mut m, mut v) = ([0.5; SIZE], [0.0; SIZE], [0.0; SIZE]);
    for (n, (lr, beta1, beta2)) in steps.iter().enumerate() {
        let correction = |beta: f64| 1.0 - beta.powi(n as i32 + 1);
        for (i, g) in gradient(n).into_iter().map(f64::from).enumerate() {
            m[i] = beta1 * m[i] + (1.0 - beta1) * g;
            v[i] = beta2 * v[i] + (1.0 - beta2) * g * g;
            p[i] -= lr / correction(*beta1) * m[i] / ((v[i] / correction(*beta2)).sqrt() + 1e-8);
        }
    }
    p.to_vec()
}

fn distance(found: &[f32], expected: &[f64]) -> f64 {
    found.iter().zip(expected).map(|(a, b)| (f64::from(*a) - b).abs()).fold(0.0, f64::max)
}

#[test]
fn adam_takes_the_betas_that_deepspeed_recorded() {
    let file: Value = serde_json::from_str(include_str!("../fixtures/schedules.json")).unwrap();
    let case = file["cases"].as_array().unwrap().iter().find(|case| case["type"] == "OneCycle").unwrap();
    let float = |value: &Value| value.as_f64().unwrap();
    let steps: Vec<(f64, f64, f64)> =
        (0..60).map(|n| (float(&case["lr"][n]), float(&case["betas"][n][0]), float(&case["betas"][n][1]))).collect();
    let expected = reference(&steps);
    let scheduler = json!({"type": "OneCycle", "params": case["params"]});
    for (world, stage) in [(1, 0), (2, 1), (2, 3)] {
        let config = config(stage, adam(), scheduler.clone());
        let ranks = threads::run(world, |comm| {
            let mut engine = start(Engine::builder().communicator(comm), &config)?;
            for (lr, beta1, beta2) in &steps {
                let is_close = |a: f64, b: f64| (a - b).abs() <= 1e-9 * b;
                assert!(is_close(engine.lr()[0], *lr));
                let [Momentum::Betas(first, second)] = engine.momentum()[..] else { panic!("Adam has betas") };
                assert!(is_close(first, *beta1) && is_close(second, *beta2), "{first} {second}");
                train(&mut engine)?;
            }
            Ok(weights(&mut engine))
        });
        for rank in ranks.unwrap() {
            let difference = distance(&rank.unwrap(), &expected);
            assert!(difference < 2e-6, "{difference}");
        }
    }
    // With the optimizer's own betas, the result differs.
    let constant_betas: Vec<_> = steps.iter().map(|(lr, ..)| (*lr, 0.9, 0.999)).collect();
    let with_constant_betas: Vec<f32> = reference(&constant_betas).into_iter().map(|w| w as f32).collect();
    assert!(distance(&with_constant_betas, &expected) > 1e-3);
}

#[test]
fn a_run_goes_on_from_a_checkpoint_with_the_rate_and_the_betas_that_it_had() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let scheduler = json!({"type": "OneCycle", "params": {
        "cycle_min_lr": 0.001, "cycle_max_lr": 0.1, "cycle_first_step_size": 4, "cycle_second_step_size": 3,
        "decay_step_size": 2, "decay_lr_rate": 0.5, "decay_mom_rate": 0.001}});
    let config = config(0, adam(), scheduler);
    // Checkpoints are saved at the start, during the rise, during the fall, and during the decay.
    for saved_at in [0, 2, 5, 9] {
        let rates = |engine: &Engine<Tensor>| (engine.lr(), engine.momentum());
        let mut uninterrupted = start(Engine::builder(), &config).unwrap();
        (0..saved_at).for_each(|_| train(&mut uninterrupted).unwrap());
        uninterrupted.save_checkpoint(folder.path(), Some(&format!("at{saved_at}")), Value::Null).unwrap();
        let mut resumed = start(Engine::builder(), &config).unwrap();
        resumed.load_checkpoint(folder.path(), None, &LoadOptions::default()).unwrap().unwrap();
        for _ in 0..4 {
            assert_eq!(rates(&resumed), rates(&uninterrupted), "{saved_at}");
            train(&mut uninterrupted).unwrap();
            train(&mut resumed).unwrap();
            assert_eq!(weights(&mut resumed), weights(&mut uninterrupted), "{saved_at}");
        }
    }
}

/// A rate that rises by a thousandth each step, with its own betas.
struct Rising;

impl LrSchedule for Rising {
    fn lr(&self, applied: u64) -> f64 {
        0.001 * (applied + 1) as f64
    }

    fn betas(&self, applied: u64) -> Option<(f64, f64)> {
        Some((0.5 + 0.01 * applied as f64, 0.95))
    }
}

#[test]
fn a_schedule_of_ones_own_wins_over_the_configuration() {
    let warm_up = json!({"type": "WarmupLR", "params": {"warmup_num_steps": 5}});
    let mut engine = start(Engine::builder().schedule(Rising), &config(0, adam(), warm_up.clone())).unwrap();
    (0..10).for_each(|_| train(&mut engine).unwrap());
    let steps: Vec<_> = (0..10).map(|n| (0.001 * f64::from(n + 1), 0.5 + 0.01 * f64::from(n), 0.95)).collect();
    let difference = distance(&weights(&mut engine), &reference(&steps));
    assert!(difference < 2e-6, "{difference}");
    assert_eq!((engine.lr(), engine.momentum()), (vec![0.001 * 11.0], vec![Momentum::Betas(0.5 + 0.1, 0.95)]));

    // A closure changes only the rate, and SGD has no betas to change.
    let halves = |applied: u64| 0.5f64.powi(applied as i32 + 1);
    let mut engine = start(Engine::builder().schedule(halves), &config(0, adam(), warm_up.clone())).unwrap();
    train(&mut engine).unwrap();
    assert_eq!((engine.lr(), engine.momentum()), (vec![0.25], vec![Momentum::Betas(0.9, 0.999)]));
    let sgd = json!({"type": "SGD", "params": {"lr": 0.01, "momentum": 0.8}});
    let mut engine = start(Engine::builder().schedule(Rising), &config(0, sgd, warm_up)).unwrap();
    train(&mut engine).unwrap();
    assert_eq!((engine.lr(), engine.momentum()), (vec![0.002], vec![Momentum::Factor(0.8)]));
}

#[test]
fn a_schedule_that_comes_to_no_number_or_differs_between_ranks_is_an_error() {
    let overflowing = |applied: u64| if applied < 2 { 0.1 } else { f64::INFINITY };
    let mut engine = start(Engine::builder().schedule(overflowing), &config(0, adam(), Value::Null)).unwrap();
    train(&mut engine).unwrap();
    train(&mut engine).unwrap();
    let before = weights(&mut engine);
    let error = train(&mut engine).unwrap_err();
    insta::assert_snapshot!(error, @"the schedule sets the learning rate to inf in optimizer step 3 (allowed: a finite number of at least 0); correct the schedule (OneCycle: lower decay_mom_rate), or train for fewer steps");
    assert!(before.iter().all(|w| w.is_finite()));

    let ranks = threads::run(2, |comm| {
        let rank = comm.rank();
        let builder = Engine::builder().communicator(comm).schedule(move |_: u64| 0.1 * (rank + 1) as f64);
        start(builder, &config(1, adam(), Value::Null)).map(|_| ())
    });
    for rank in ranks.unwrap() {
        assert!(matches!(rank, Err(Error::Engine(EngineError::ConfigsDiffer { .. }))), "{rank:?}");
    }
}
