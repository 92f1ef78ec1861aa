//! Pipelines whose ranks are processes: `examples/train_pipeline.rs` under zerorun, with ranks that are killed, and
//! with ranks on two hosts.

use crate::mpi::{hosts, with_each};
use crate::support::processes::{descendants, example, runs, start, stderr, wait_up_to, zerorun};
use serde_json::{Value, json};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

const STEPS: usize = 8;

fn command(dir: &Path, ranks: usize, pipeline: &Value, options: &[&str]) -> Command {
    let mut command = zerorun();
    command.args(["-n", &ranks.to_string()]).args(options);
    add_training_program(command, dir, pipeline)
}

/// Adds the program and its arguments to a launcher's command.
fn add_training_program(mut command: Command, dir: &Path, pipeline: &Value) -> Command {
    let config = json!({
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4, "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 1}, "pipeline": pipeline,
    });
    let path = dir.join("config.json");
    std::fs::write(&path, config.to_string()).unwrap();
    command.arg(example("train_pipeline")).arg("--ds_config").arg(path);
    command.args(["--steps", &STEPS.to_string(), "--resume", "--save_every", "2", "--save"]).arg(dir.join("saved"));
    command.args(["--sample", "5", "--metrics"]).arg(dir.join("metrics.jsonl"));
    command
}

/// Returns the weights of the last checkpoint, regardless of which ranks saved it.
fn weights(dir: &Path) -> Vec<u8> {
    let output = zerorun().arg("consolidate").args(["saved", "weights"].map(|name| dir.join(name))).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    std::fs::read(dir.join("weights/model.safetensors")).unwrap()
}

/// The steps, and the content of the files of the last checkpoint.
type Results = (Vec<Value>, Vec<(String, Vec<u8>)>);

/// Returns the results of a job.
fn results(dir: &Path) -> Results {
    let steps = std::fs::read_to_string(dir.join("metrics.jsonl")).unwrap();
    let steps = steps.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let last = dir.join("saved").join(std::fs::read_to_string(dir.join("saved/latest")).unwrap().trim());
    let mut files: Vec<(String, Vec<u8>)> = std::fs::read_dir(last)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "safetensors"))
        .map(|path| (path.file_name().unwrap().to_str().unwrap().into(), std::fs::read(path).unwrap()))
        .collect();
    files.sort();
    (steps, files)
}

fn train(ranks: usize, pipeline: &Value) -> Results {
    train_and_sample(ranks, pipeline).0
}

/// Returns the results of training, and what the job prints: the text that the model generates.
fn train_and_sample(ranks: usize, pipeline: &Value) -> (Results, String) {
    let dir = tempfile::tempdir().unwrap();
    let output = command(dir.path(), ranks, pipeline, &[]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    (results(dir.path()), String::from_utf8_lossy(&output.stdout).into_owned())
}

#[test]
fn a_pipeline_of_processes_has_the_losses_and_norms_of_one() {
    let ((expected, _), text) = train_and_sample(1, &json!({}));
    assert!(text.contains("sample: "), "{text}");
    assert_eq!(expected.len(), STEPS);
    assert!(expected[STEPS - 1]["loss"].as_f64() < expected[0]["loss"].as_f64());
    for pipeline in [
        json!({}),
        json!({"partition": "time"}),
        json!({"schedule": "interleaved", "chunks": 2}),
        json!({"schedule": "zbv", "chunks": 2}),
    ] {
        assert_eq!(train(2, &pipeline).0, expected, "{pipeline}");
    }
    let ((steps, _), same_text) = train_and_sample(3, &json!({"schedule": "zero_bubble"}));
    // With several ranks, lines begin with the rank.
    let sample = |text: &str| text.split_once("sample: ").map(|(_, sample)| sample.to_owned());
    assert_eq!((steps, sample(&same_text)), (expected, sample(&text)));
}

#[test]
fn a_job_whose_ranks_are_killed_ends_with_the_same_bytes() {
    kill_ranks(0..2);
}

#[test]
#[ignore = "takes several minutes: 18 more kills"]
fn a_job_whose_ranks_are_killed_at_many_moments_ends_with_the_same_bytes() {
    kill_ranks(2..20);
}

/// Runs a job for each of `kills`, kills one of its ranks, and compares the job's results with those of a job without
/// kills.
fn kill_ranks(kills: std::ops::Range<u64>) {
    let pipelines = [json!({}), json!({"schedule": "zero_bubble"}), json!({"stages": 2})];
    let expected = pipelines.each_ref().map(|pipeline| train(4, pipeline));
    for kill in kills {
        let index = kill as usize % pipelines.len();
        let dir = tempfile::tempdir().unwrap();
        let job = start(&mut command(dir.path(), 4, &pipelines[index], &["--max_restarts", "2"]));
        // Each kill hits the next rank, at an arbitrary moment of an arbitrary step.
        let step = kill.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        let lines = || std::fs::read_to_string(dir.path().join("metrics.jsonl")).map_or(0, |text| text.lines().count());
        let after = step as usize % (STEPS - 1);
        wait_up_to(Duration::from_secs(120), "the step", || (lines() >= after).then_some(()));
        std::thread::sleep(Duration::from_millis(step % 97));
        let pid = i32::try_from(job.id()).unwrap();
        let ranks: Vec<i32> = descendants(pid).into_iter().filter(|pid| runs(*pid)).collect();
        if let Some(rank) = ranks.get(kill as usize % ranks.len().max(1)) {
            let rank = rustix::process::Pid::from_raw(*rank).unwrap();
            _ = rustix::process::kill_process(rank, rustix::process::Signal::KILL);
        }
        let output = job.wait_with_output().unwrap();
        assert!(output.status.success(), "kill {kill} after step {after}: {}", stderr(&output));
        let (steps, files) = results(dir.path());
        assert_eq!(steps, expected[index].0, "kill {kill} after step {after}");
        assert!(files == expected[index].1, "kill {kill} after step {after}: different bytes in the checkpoint");
    }
}

#[test]
fn a_pipeline_across_two_hosts_has_the_losses_norms_and_weights_of_one_host() {
    let test = a_pipeline_across_two_hosts_has_the_losses_norms_and_weights_of_one_host;
    let Some(hosts) = hosts(test) else { return };
    let expected = [1, 2].map(|ranks| {
        let dir = tempfile::tempdir().unwrap();
        // With one pipeline stage, two ranks form two pipelines, which is ZeRO stage 1 on two ranks.
        let output = command(dir.path(), ranks, &json!({"stages": 1}), &[]).output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        (results(dir.path()).0, weights(dir.path()))
    });
    for (ranks, pipeline) in [
        ([1, 1], json!({})),
        ([1, 1], json!({"schedule": "interleaved", "chunks": 2})),
        ([2, 2], json!({"schedule": "zero_bubble"})),
        ([2, 2], json!({"stages": 2})),
    ] {
        let pipelines = if pipeline.get("stages").is_some() { 2 } else { 1 };
        with_each(test, |mpi| {
            let dir = tempfile::tempdir().unwrap();
            let output =
                add_training_program(hosts.mpirun(mpi, ranks).unwrap(), dir.path(), &pipeline).output().unwrap();
            assert!(output.status.success(), "{mpi:?}, {pipeline}: {}", stderr(&output));
            let (losses, all_weights) = (results(dir.path()).0, weights(dir.path()));
            assert_eq!(losses, expected[pipelines - 1].0, "{mpi:?}, {pipeline}");
            assert!(all_weights == expected[pipelines - 1].1, "{mpi:?}, {pipeline}: different weights");
        });
    }
}
