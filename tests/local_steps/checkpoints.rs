//! A run that resumes has the same bits as one that never stopped; with a different number of islands, it begins with
//! the weights that all islands share.

use super::{config, engine, on_ranks, train, weights};
use candle_zero::checkpoint::LoadOptions;
use candle_zero::comm::Communicator;
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;

fn section() -> Value {
    json!({"steps": 4, "fragments": 2, "fragment_delay": 2, "fragment_alpha": 0.25})
}

/// Trains up to step `last` after loading the checkpoint in `dir`. Returns the first step after the checkpoint, and
/// the weights at the end.
fn resumed(
    comm: Arc<dyn Communicator>,
    config: Value,
    dir: &Path,
    last: usize,
) -> candle_zero::Result<(usize, Vec<Vec<f32>>)> {
    let mut engine = engine(comm, config)?;
    engine.load_checkpoint(dir, None, &LoadOptions::default())?.unwrap();
    let first = usize::try_from(engine.global_steps()).unwrap() + 1;
    train(&mut engine, first..=last)?;
    Ok((first, weights(&mut engine)))
}

#[test]
fn a_run_that_resumes_within_a_window_has_the_bits_of_one_that_never_stopped() {
    // The run is saved with nothing in flight, with one fragment in flight, and with the other fragment in flight.
    for saved_after in [1, 3, 5] {
        let dir = tempfile::tempdir().unwrap();
        let expected = on_ranks(4, |comm| {
            let mut engine = engine(comm, config(&section(), 2, 2))?;
            train(&mut engine, 1..=saved_after)?;
            engine.save_checkpoint(dir.path(), None, Value::Null)?;
            train(&mut engine, saved_after + 1..=11)?;
            Ok(weights(&mut engine))
        });
        let without_saving = on_ranks(4, |comm| {
            let mut engine = engine(comm, config(&section(), 2, 2))?;
            train(&mut engine, 1..=11)?;
            Ok(weights(&mut engine))
        });
        assert!(expected == without_saving, "saving changes nothing");
        // At any stage, the resumed run has the same bits.
        for (ranks, stage) in [(4, 2), (4, 3), (4, 0)] {
            let found = on_ranks(ranks, |comm| resumed(comm, config(&section(), stage, 2), dir.path(), 11));
            for (rank, (first, weights)) in found.iter().enumerate() {
                assert_eq!(*first, saved_after + 1);
                assert!(*weights == expected[rank], "saved after {saved_after}, stage {stage}, rank {rank}");
            }
        }
        // With one rank per island, the loaded weights are the same.
        let of_one_rank_each = on_ranks(2, |comm| resumed(comm, config(&section(), 1, 2), dir.path(), saved_after));
        let before = on_ranks(4, |comm| resumed(comm, config(&section(), 1, 2), dir.path(), saved_after));
        assert!(of_one_rank_each[0] == before[0] && of_one_rank_each[1] == before[2]);
    }
}

#[test]
fn another_number_of_islands_begins_with_the_weights_of_the_last_exchange() {
    let dir = tempfile::tempdir().unwrap();
    let section = json!({"steps": 4});
    let at_exchange = on_ranks(2, |comm| {
        let mut engine = engine(comm, config(&section, 1, 2))?;
        train(&mut engine, 1..=4)?;
        let at_exchange = weights(&mut engine);
        train(&mut engine, 5..=6)?;
        engine.save_checkpoint(dir.path(), None, Value::Null)?;
        assert_ne!(weights(&mut engine), at_exchange);
        Ok(at_exchange)
    });
    for islands in [3, 4] {
        let found = on_ranks(islands, |comm| resumed(comm, config(&section, 1, islands), dir.path(), 6));
        assert!(found.iter().all(|(_, weights)| *weights == at_exchange[0]));
    }
    // A run without islands loads the checkpoint of the first island.
    let of_first = on_ranks(1, |comm| resumed(comm, without_islands(1), dir.path(), 6));
    assert_ne!(of_first[0].1, at_exchange[0]);
}

fn without_islands(ranks: usize) -> Value {
    let mut config = config(&json!({}), 1, ranks);
    config.as_object_mut().unwrap().remove("local_steps");
    config
}

#[test]
fn islands_begin_with_a_checkpoint_of_a_run_without_islands() {
    let dir = tempfile::tempdir().unwrap();
    let saved = on_ranks(2, |comm| {
        let mut engine = engine(comm, without_islands(1))?;
        train(&mut engine, 1..=3)?;
        engine.save_checkpoint(dir.path(), None, Value::Null)?;
        Ok(weights(&mut engine))
    });
    // The first exchange of the new run starts from the loaded weights, so averaging two equal islands changes nothing.
    let section = json!({"steps": 1, "outer_lr": 1.0, "outer_momentum": 0.0});
    let found = on_ranks(2, |comm| {
        let mut engine = engine(comm, config(&section, 1, 2))?;
        engine.load_checkpoint(dir.path(), None, &LoadOptions::default())?.unwrap();
        engine.synchronize_islands()?;
        Ok(weights(&mut engine))
    });
    assert!(found.iter().all(|weights| *weights == saved[0]));
}

#[test]
fn an_old_checkpoint_of_each_island_stays_until_all_have_a_newer_one() {
    let dir = tempfile::tempdir().unwrap();
    on_ranks(2, |comm| {
        let mut engine = engine(comm, config(&json!({"steps": 2}), 1, 2))?;
        let options = candle_zero::checkpoint::SaveOptions { keep: Some(1), ..Default::default() };
        for step in 1..=3 {
            train(&mut engine, step..=step)?;
            engine.save_checkpoint_with(dir.path(), None, Value::Null, &options)?;
        }
        Ok(())
    });
    let tags = |folder: &Path| {
        let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut tags: Vec<String> = entries.filter(|name| name.starts_with("global_step")).collect();
        tags.sort();
        tags
    };
    assert_eq!(tags(dir.path()), ["global_step3"]);
    assert_eq!(tags(&dir.path().join("island_1")), ["global_step2", "global_step3"]);
}
