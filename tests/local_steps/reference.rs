//! The outer step matches a reference recorded with PyTorch (scripts/record_local_steps.py). With settings for which
//! local steps are equivalent to stage 0, it matches stage 0.

use super::{BATCH, Model, batch, config, engine, on_ranks, train, weights};
use candle_core::Device;
use candle_zero::Engine;
use serde_json::{Value, json};

#[derive(serde::Deserialize)]
struct Reference {
    steps: usize,
    cases: Vec<Case>,
}

#[derive(serde::Deserialize)]
struct Case {
    settings: Value,
    /// The weights at the last exchange, and those of island 0, after each window.
    windows: Vec<[Vec<Vec<f32>>; 2]>,
}

fn reference() -> Reference {
    serde_json::from_str(include_str!("../fixtures/local_steps.json")).unwrap()
}

fn largest_difference(found: &[Vec<f32>], expected: &[Vec<f32>]) -> f32 {
    let pairs = found.iter().flatten().zip(expected.iter().flatten());
    pairs.map(|(found, expected)| (found - expected).abs()).fold(0.0, f32::max)
}

#[test]
fn windows_follow_pytorch_for_any_ranks_per_island_and_stage() {
    let Reference { steps, cases } = reference();
    assert!(cases.len() >= 5 && cases.iter().all(|case| case.windows.len() == 5));
    for case in &cases {
        let islands = case.settings["islands"].as_u64().unwrap() as usize;
        for (ranks, stage) in [(1, 0), (1, 3), (2, 0), (2, 1), (2, 2), (2, 3)] {
            let mut settings = case.settings.clone();
            settings["steps"] = json!(steps);
            let of_ranks = on_ranks(islands * ranks, |comm| {
                let mut engine = engine(comm, config(&settings, stage, islands))?;
                let mut windows = Vec::new();
                for window in 0..case.windows.len() {
                    train(&mut engine, window * steps + 1..=(window + 1) * steps)?;
                    windows.push(weights(&mut engine));
                }
                Ok(windows)
            });
            for (window, [outer, local]) in case.windows.iter().enumerate() {
                let difference = largest_difference(&of_ranks[0][window], local);
                assert!(difference < 1e-6, "{settings}, {ranks} x stage {stage}, window {window}: {difference}");
                // With an alpha of 0 and a single fragment, all islands have the outer weights.
                if settings["fragment_alpha"] == 0.0 && settings["fragments"] == 1 {
                    assert!(of_ranks.iter().all(|windows| windows[window] == of_ranks[0][window]));
                    assert!(largest_difference(&of_ranks[0][window], outer) < 1e-6);
                }
            }
        }
    }
}

#[test]
fn averaging_after_every_step_of_sgd_is_stage_0_up_to_rounding() {
    let sgd = |mut config: Value| {
        config["optimizer"] = json!({"type": "SGD", "params": {"lr": 0.1}});
        config["zero_allow_untested_optimizer"] = json!(true);
        config
    };
    let averaging = json!({"steps": 1, "outer_lr": 1.0, "outer_momentum": 0.0});
    for islands in [2, 4] {
        let found = on_ranks(islands, |comm| {
            let mut engine = engine(comm, sgd(config(&averaging, 1, islands)))?;
            train(&mut engine, 1..=10)?;
            Ok(weights(&mut engine))
        });
        let expected = on_ranks(islands, |comm| {
            let rank = comm.rank();
            let mut config = sgd(config(&averaging, 0, islands));
            config.as_object_mut().unwrap().remove("local_steps");
            let builder = Engine::builder().communicator(comm).device(Device::Cpu);
            let mut engine =
                builder.initial_values(std::sync::Arc::new(super::Start)).initialize(Model::new, config)?;
            for step in 1..=10 {
                let batch = batch(step, rank, (0, 1));
                let loss = engine.forward(|model| model.loss(&batch))?;
                engine.backward(&loss)?;
                engine.step()?;
            }
            assert_eq!(engine.config().batch.train_batch_size, BATCH * islands);
            Ok(weights(&mut engine))
        });
        assert!(largest_difference(&found[0], &expected[0]) < 1e-6);
        assert!(found.iter().all(|weights| *weights == found[0]));
    }
}
