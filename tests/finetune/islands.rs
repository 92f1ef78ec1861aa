//! Fine-tuning with local steps: islands of one job, and islands that meet at a server, join and die.

use crate::fixtures::path;
use crate::runs::{chats, finetune, write};
use crate::support::processes::{descendants, stderr, stdout, wait_up_to};
use candle_zero::Result;
use candle_zero::comm::{Communicator, threads};
use candle_zero::island_server::{IslandServer, IslandServerOptions};
use candle_zero::serde_json::{Value, from_str, json};
use candle_zero_finetune::{
    CheckpointOptions, FineTune, LocalStepsOptions, Options, PreparedRun, Source, TrainingLength, TuningMethod,
    ValidationData, WarmupLength,
};
use rustix::process::{Pid, Signal, kill_process};
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::sync::Arc;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(200);

fn options(folder: &Path, data: &str, out: &str) -> Options {
    Options {
        data: vec![Source::parse(data).unwrap()],
        method: TuningMethod::Lora("r=4,dropout=0.1".parse().unwrap()),
        length: TrainingLength::Steps(7),
        lr: Some(5e-3),
        batch: Some(8),
        ctx: Some(48),
        warmup: WarmupLength::Steps(1),
        validation: Some(ValidationData::Fraction(0.2)),
        eval_every: Some(4),
        cache: Some(folder.join("cache")),
        local_steps: LocalStepsOptions { steps: Some(3), islands: Some(2), server: None },
        ..Options::new(path("models/llama"), folder.join(out))
    }
}

fn at_server(options: &Options, server: &IslandServer, out: &str) -> Options {
    let local_steps = LocalStepsOptions { server: Some(server.address().to_string()), ..options.local_steps.clone() };
    Options { local_steps, out: options.out.with_file_name(out), ..options.clone() }
}

/// Trains to the end on one rank. Returns the loss of each validation.
fn train_rank(options: &Options, comm: Arc<dyn Communicator>) -> Result<Vec<f64>> {
    let mut run = FineTune::start(PreparedRun::new(options.clone(), &mut |_| ())?, comm)?;
    assert_eq!(run.engine().island().map(|(_, islands)| islands), options.local_steps.islands);
    assert_eq!(run.engine().world_size(), 4);
    let mut validations = vec![];
    while let Some(step) = run.step()? {
        validations.extend(step.val_loss);
    }
    run.finish()?;
    Ok(validations)
}

/// Trains on `world` ranks. Returns the loss of each validation, which is the same on all ranks.
fn train(options: &Options, world: usize) -> Vec<f64> {
    let ranks = threads::run(world, |comm| train_rank(options, comm)).unwrap();
    let mut ranks: Vec<_> = ranks.into_iter().map(Result::unwrap).collect();
    assert!(ranks.iter().all(|rank| *rank == ranks[0]), "{ranks:?}");
    ranks.remove(0)
}

/// Returns the bytes of the result and of the best adapter.
fn adapters(options: &Options) -> [Vec<u8>; 2] {
    [options.out.clone(), options.best()].map(|folder| std::fs::read(folder.join("adapter_model.safetensors")).unwrap())
}

#[test]
fn islands_at_a_server_and_islands_of_one_job_write_the_same_adapter() {
    let folder = tempfile::tempdir().unwrap();
    let data = chats(folder.path(), 40);
    let together = options(folder.path(), &data, "together");
    let validations = train(&together, 4);
    assert!(validations.len() == 2 && validations[1] < validations[0], "{validations:?}");
    let without = Options {
        local_steps: LocalStepsOptions::default(),
        out: folder.path().join("without"),
        ..options(folder.path(), &data, "")
    };
    let plain = threads::run(4, |comm| -> Result<()> {
        let mut run = FineTune::start(PreparedRun::new(without.clone(), &mut |_| ())?, comm)?;
        while run.step()?.is_some() {}
        run.finish()
    });
    plain.unwrap().into_iter().for_each(Result::unwrap);
    assert!(adapters(&together) != adapters(&without), "local steps have an effect");

    let server = IslandServer::start(&IslandServerOptions::default()).unwrap();
    let islands = ["a", "b"].map(|out| at_server(&together, &server, out));
    let of_islands = std::thread::scope(|scope| {
        islands.each_ref().map(|island| scope.spawn(|| train(island, 2))).map(|island| island.join().unwrap())
    });
    // Each island validates on all of the data.
    for found in of_islands {
        let pairs = found.iter().zip(&validations);
        assert!(found.len() == 2 && pairs.into_iter().all(|(a, b)| (a - b).abs() < 1e-9), "{found:?} {validations:?}");
    }
    for island in &islands {
        assert!(adapters(island) == adapters(&together), "{}", island.out.display());
    }
}

#[test]
fn islands_resume_from_their_own_checkpoints_with_the_same_bits() {
    let folder = tempfile::tempdir().unwrap();
    let data = chats(folder.path(), 40);
    let complete = options(folder.path(), &data, "whole");
    train(&complete, 4);
    let saving = |resume| CheckpointOptions { dir: folder.path().join("saves"), every: Some(2), keep: Some(2), resume };
    let out = folder.path().join("parts");
    let part = |resume| Options { saving: Some(saving(resume)), out: out.clone(), ..complete.clone() };
    let begun = threads::run(4, |comm| -> Result<()> {
        let mut run = FineTune::start(PreparedRun::new(part(false), &mut |_| ())?, comm)?;
        while run.step()?.is_some_and(|step| step.step < 4) {}
        Ok(())
    });
    begun.unwrap().into_iter().for_each(Result::unwrap);
    for island in ["saves", "saves/island_1"] {
        assert!(folder.path().join(island).join("latest").exists(), "{island}");
    }
    train(&part(true), 4);
    assert!(adapters(&part(true)) == adapters(&complete));
    let other =
        Options { local_steps: LocalStepsOptions { steps: Some(2), ..complete.local_steps.clone() }, ..part(true) };
    let text = error(&other, 4);
    assert!(text.contains("local_steps.steps: 3 -> 2"), "{text}");
}

/// Returns the first error of `world` ranks.
fn error(options: &Options, world: usize) -> String {
    let ranks =
        threads::run(world, |comm| FineTune::start(PreparedRun::new(options.clone(), &mut |_| ())?, comm).map(drop));
    ranks.unwrap().into_iter().find_map(Result::err).unwrap().to_string()
}

#[test]
fn settings_of_local_steps_that_contradict_others_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let data = chats(folder.path(), 40);
    let config = |name: &str, section: Value| {
        Some(PathBuf::from(write(folder.path(), name, &json!({ "local_steps": section }).to_string())))
    };
    let base_options = || options(folder.path(), &data, "out");
    let islands = |islands, steps| LocalStepsOptions { islands, steps, server: None };
    let from = |ds_config, local_steps| Options { ds_config, local_steps, ..base_options() };
    let other_steps = from(config("steps.json", json!({"steps": 10})), islands(Some(2), Some(3)));
    insta::assert_snapshot!(error(&other_steps, 4), @"--local_steps is 3, but the DeepSpeed configuration has local_steps.steps: 10; give only one of them, or \"auto\" there");
    let other_islands = from(config("islands.json", json!({"islands": 4})), islands(Some(2), None));
    insta::assert_snapshot!(error(&other_islands, 4), @"--islands is 2, but the DeepSpeed configuration has local_steps.islands: 4; give only one of them, or \"auto\" there");
    let in_pipeline = Options { pipeline: Some("2".parse().unwrap()), ..base_options() };
    insta::assert_snapshot!(error(&in_pipeline, 4), @"--pipeline cannot be combined with local_steps; remove one of the two");
    let text = error(&Options { local_steps: islands(Some(3), None), batch: Some(12), ..base_options() }, 4);
    assert!(text.contains("cannot be divided") || text.contains("islands"), "{text}");
    let server = LocalStepsOptions { server: Some("127.0.0.1:1".into()), ..LocalStepsOptions::default() };
    let text = error(&Options { local_steps: server, ..base_options() }, 2);
    assert!(text.contains("local_steps.islands") && text.contains("number of slots"), "{text}");
}

#[test]
fn islands_with_different_data_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let data = chats(folder.path(), 40);
    let text = std::fs::read_to_string(&data).unwrap().replace("4 and", "5 and");
    let changed = write(folder.path(), "changed.jsonl", &text);
    let server = IslandServer::start(&IslandServerOptions::default()).unwrap();
    let options_of = |data: &str, out: &str| at_server(&options(folder.path(), data, "x"), &server, out);
    let [one, other] = [options_of(&data, "one"), options_of(&changed, "other")];
    let texts = std::thread::scope(|scope| {
        let start = |options: &Options| {
            let ranks = threads::run(2, |comm| -> Result<()> {
                let mut run = FineTune::start(PreparedRun::new(options.clone(), &mut |_| ())?, comm)?;
                while run.step()?.is_some() {}
                Ok(())
            });
            ranks.unwrap().into_iter().find_map(Result::err).map(|error| error.to_string())
        };
        let first = scope.spawn(move || start(&one));
        wait_up_to(LIMIT, "the first island", || (server.status().members.len() == 1).then_some(()));
        let text = start(&other);
        // The first island waits for the second one, which will not come.
        drop(server);
        [text, first.join().unwrap()]
    });
    let refused = texts[0].as_deref().unwrap();
    assert!(refused.contains("different configurations or data"), "{refused}");
}

/// Returns the steps in a file of metrics.
fn steps(metrics: &Path) -> Vec<u64> {
    let text = std::fs::read_to_string(metrics).unwrap_or_default();
    text.lines().filter_map(|line| from_str::<Value>(line).ok()?["step"].as_u64()).collect()
}

#[test]
fn a_killed_island_joins_the_others_again_and_both_write_the_same_adapter() {
    const STEPS: u64 = 40;
    let folder = tempfile::tempdir().unwrap();
    let data = chats(folder.path(), 40);
    let server = IslandServer::start(&IslandServerOptions::default()).unwrap();
    let (address, steps_word) = (server.address().to_string(), STEPS.to_string());
    let at = |name: String| folder.path().join(name);
    let config = write(folder.path(), "fragments.json", &json!({"local_steps": {"fragments": 2}}).to_string());
    let island = |name: &str, slot: &str| {
        let [out, saves, metrics] = ["out", "saves", "metrics"].map(|kind| at(format!("{name}-{kind}")));
        let words = ["--data", &data, "--out", out.to_str().unwrap(), "--batch", "4", "--ctx", "48"];
        let islands = ["--local_steps", "4", "--islands", "2", "--island_server", &address, "--island_slot", slot];
        let length = ["--steps", &steps_word, "--lr", "5e-3", "--metrics", metrics.to_str().unwrap()];
        let saving = ["--save", saves.to_str().unwrap(), "--save_every", "2", "--resume", "--max_restarts", "2"];
        // Islands join at a step after which all others validate.
        let validation = ["--val", "20%", "--eval_every", "4", "--ds_config", &config];
        let words = [words.as_slice(), &islands, &length, &saving, &validation].concat();
        let mut command = finetune(&path("models/llama"), folder.path(), &words);
        (command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap(), metrics)
    };
    let (survivor, _) = island("stays", "0");
    let (killed, metrics) = island("killed", "1");
    wait_up_to(LIMIT, "six steps", || (steps(&metrics).len() >= 6).then_some(()));
    let ranks = |launcher: &std::process::Child| -> Vec<Pid> {
        descendants(launcher.id() as i32).into_iter().filter_map(Pid::from_raw).collect()
    };
    // The other island must not reach the end before this one is back.
    let paused = ranks(&survivor);
    paused.iter().for_each(|rank| kill_process(*rank, Signal::STOP).unwrap());
    for rank in ranks(&killed) {
        kill_process(rank, Signal::KILL).unwrap();
    }
    wait_up_to(LIMIT, "the killed island", || server.status().waiting.contains(&1).then_some(()));
    paused.iter().for_each(|rank| kill_process(*rank, Signal::CONT).unwrap());
    let [survivor, killed] = [survivor, killed].map(|island| island.wait_with_output().unwrap());
    let text = |output: &Output| format!("{}{}", stdout(output), stderr(output));
    for output in [&survivor, &killed] {
        assert!(output.status.success(), "{}", text(output));
    }
    assert!(!text(&survivor).contains("with the state of the other islands"), "{}", text(&survivor));
    assert!(text(&killed).contains("with the state of the other islands"), "{}", text(&killed));
    assert!(text(&killed).contains("in 2 islands (this is island 1), which exchange the changes"), "{}", text(&killed));
    assert_eq!(steps(&metrics).last(), Some(&(STEPS - 1)));
    let [a, b] =
        ["stays", "killed"].map(|name| std::fs::read(at(format!("{name}-out/adapter_model.safetensors"))).unwrap());
    assert!(a == b, "the islands have different adapters");
    let best = |name: &str| std::fs::read(at(format!("{name}-out-best/adapter_model.safetensors"))).unwrap();
    assert!(best("stays") == best("killed"), "the islands have different best adapters");
}
