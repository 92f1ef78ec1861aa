//! How runs end: signals without checkpoints, the checkpoints that are kept, the report on preferences, the files of a
//! result, and the record of a run.

use crate::fixtures::path;
use crate::runs::{chats, finetune, write};
use crate::support::processes::{stderr, stdout, wait_up_to, zerorun};
use candle_zero::serde_json::{Value, from_str, json};
use candle_zero_finetune::Adapter;
use rustix::process::{Pid, Signal, kill_process};
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

fn lines(metrics: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(metrics).unwrap_or_default();
    text.lines().filter_map(|line| from_str(line).ok()).collect()
}

#[test]
fn a_signal_without_checkpoints_leaves_the_model_of_the_last_step_beside_the_result() {
    let folder = tempfile::tempdir().unwrap();
    let data = chats(folder.path(), 40);
    let [out, metrics] = ["out", "m.jsonl"].map(|name| folder.path().join(name));
    // Two runs are stopped. The second keeps the result of the first.
    for (ranks, stopped) in [("1", "out-stopped"), ("2", "out-stopped-2")] {
        let stopped = folder.path().join(stopped);
        _ = std::fs::remove_file(&metrics);
        let words =
            ["--data", &data, "--out", out.to_str().unwrap(), "--steps", "100000", "--batch", "4", "--ctx", "48"];
        let more = ["-n", ranks, "--metrics", metrics.to_str().unwrap()];
        let mut command = finetune(&path("models/llama"), folder.path(), &[words.as_slice(), &more].concat());
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        wait_up_to(Duration::from_secs(100), "the second step", || (lines(&metrics).len() > 1).then_some(()));
        kill_process(Pid::from_child(&child), Signal::INT).unwrap();
        let output = child.wait_with_output().unwrap();
        let (printed, errors) = (stdout(&output), stderr(&output));
        assert_eq!(output.status.code(), Some(130), "{printed}{errors}");
        assert!(errors.contains("a second signal (Ctrl-C) stops the run immediately"), "{errors}");
        assert!(printed.contains("stopped by a signal after step ") && printed.contains("--resume"), "{printed}");
        assert!(!out.exists());
        Adapter::read(&stopped).unwrap();
    }
}

#[test]
fn the_two_newest_checkpoints_of_an_adapter_stay_unless_others_are_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let data = chats(folder.path(), 20);
    let checkpoints = |name: &str, more: &[&str]| {
        let [out, saves] = [name.to_string(), format!("{name}-saves")].map(|name| folder.path().join(name));
        let words = ["--data", &data, "--out", out.to_str().unwrap(), "--steps", "5", "--batch", "2", "--ctx", "48"];
        let saving = ["--save", saves.to_str().unwrap(), "--save_every", "1"];
        let words = [words.as_slice(), &saving, more].concat();
        let output = finetune(&path("models/llama"), folder.path(), &words).output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        let mut found: Vec<String> = std::fs::read_dir(saves)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|name| name.starts_with("global_step"))
            .collect();
        found.sort();
        found
    };
    assert_eq!(checkpoints("usual", &[]), ["global_step4", "global_step5"]);
    assert_eq!(checkpoints("one", &["--keep", "1"]), ["global_step5"]);
    assert_eq!(checkpoints("all", &["--keep", "all"]).len(), 5);
    assert_eq!(checkpoints("full", &["--full"]).len(), 5);
}

#[test]
fn rewards_of_preferences_are_reported_for_each_step_and_validation() {
    let folder = tempfile::tempdir().unwrap();
    let pair = |i: usize| json!({"prompt": format!("{i}?"), "chosen": "yes yes", "rejected": "no"});
    let text: String = (0..24).map(|i| format!("{}\n", pair(i))).collect();
    let data = write(folder.path(), "pairs.jsonl", &text);
    let metrics = folder.path().join("m.jsonl");
    let out = folder.path().join("out");
    let words = ["--data", &data, "--out", out.to_str().unwrap(), "--dpo", "beta=0.5", "--lr", "2e-2", "--val", "25%"];
    let more = ["--steps", "8", "--batch", "4", "--ctx", "48", "--metrics", metrics.to_str().unwrap(), "-n", "2"];
    let mut command = finetune(&path("models/llama"), folder.path(), &[words.as_slice(), &more].concat());
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let errors = stderr(&output);
    assert!(errors.contains("margin") && errors.contains("accuracy"), "{errors}");
    let lines = lines(&metrics);
    let steps: Vec<&Value> = lines.iter().filter(|line| line["step"].is_u64()).collect();
    let value = |record: &Value, key: &str| record[key].as_f64().unwrap();
    for rewards in steps.iter().map(|step| &step["rewards"]).chain(steps.iter().filter_map(|s| s.get("val_rewards"))) {
        let [chosen, rejected, margin] = ["chosen", "rejected", "margin"].map(|key| value(rewards, key));
        assert!((chosen - rejected - margin).abs() < 1e-4 * (1.0 + margin.abs()), "{rewards}");
        assert!((0.0..=1.0).contains(&value(rewards, "accuracy")), "{rewards}");
    }
    // In the first step, the model equals its reference.
    let first = &steps[0]["rewards"];
    assert!(["chosen", "rejected", "margin", "accuracy"].iter().all(|key| value(first, key) == 0.0), "{first}");
    let last = steps[steps.len() - 1];
    assert!(value(&last["rewards"], "margin") > 0.0 && value(&last["val_rewards"], "accuracy") > 0.5, "{last}");
    assert_eq!(last["val_rewards"]["accuracy"], last["val_accuracy"]);
}

#[test]
fn a_result_has_the_tokenizer_a_readme_and_a_record_of_the_run_beside_its_weights() {
    let folder = tempfile::tempdir().unwrap();
    let data = chats(folder.path(), 40);
    let run = |out: &str, more: &[&str]| {
        let out = folder.path().join(out);
        let words = ["--data", &data, "--out", out.to_str().unwrap(), "--batch", "4", "--ctx", "48", "--val", "20%"];
        let words = [words.as_slice(), more].concat();
        let output = finetune(&path("models/llama"), folder.path(), &words).output().unwrap();
        (output.status.code(), stderr(&output))
    };
    let text = |out: &str, name: &str| std::fs::read_to_string(folder.path().join(out).join(name)).unwrap();
    assert_eq!(run("whole", &["--steps", "4", "--lr", "5e-3"]).0, Some(0));
    for out in ["whole", "whole-best"] {
        for name in ["tokenizer.json", "tokenizer_config.json"] {
            assert_eq!(
                text(out, name),
                std::fs::read_to_string(path("models/llama").join(name)).unwrap(),
                "{out}/{name}"
            );
        }
        let record: Value = from_str(&text(out, "run.json")).unwrap();
        assert_eq!(record["training_data"]["samples"], 32);
        assert_eq!(record["training_data"]["files"][0]["path"], data);
        assert_eq!((&record["settings"]["r"], &record["settings"]["batch"]), (&json!(16), &json!(4)));
        assert!(record["loss"].as_f64().unwrap() > 0.0 && record["best_validation"]["steps"].is_u64(), "{record}");
        let readme = text(out, "README.md");
        assert!(readme.starts_with("---\nbase_model: \"") && readme.contains("library_name: peft"), "{readme}");
        assert!(readme.contains("r 16, alpha 32") && readme.contains("of 4 steps"), "{readme}");
    }
    // A resumed run writes the same bytes, although the loss of the last step was computed before the run stopped.
    let saves = folder.path().join("saves");
    let saving = ["--lr", "5e-3", "--save", saves.to_str().unwrap(), "--resume", "--steps", "4"];
    assert_eq!(run("resumed", &saving).0, Some(0));
    std::fs::remove_dir_all(folder.path().join("resumed")).unwrap();
    let (code, errors) = run("resumed", &saving);
    assert_eq!(code, Some(0), "{errors}");
    for name in ["run.json", "README.md"] {
        assert_eq!(text("whole", name), text("resumed", name), "{name}");
    }
    // The README of a full fine-tuning run states that all weights were trained.
    assert_eq!(run("full", &["--steps", "2", "--full"]).0, Some(0));
    assert!(text("full", "README.md").contains("All weights were trained"));
    assert!(text("full", "README.md").contains("library_name: transformers"));
}

#[test]
fn a_run_is_recorded_in_the_working_directory_unless_that_is_switched_off() {
    let folder = tempfile::tempdir().unwrap();
    let data = chats(folder.path(), 40);
    let words = ["--data", &data, "--out", "out", "--batch", "4", "--ctx", "48", "--val", "20%", "--steps", "3"];
    let train = |more: &[&str], name: &str| {
        let working_dir = folder.path().join(name);
        std::fs::create_dir(&working_dir).unwrap();
        let mut command = finetune(&path("models/llama"), folder.path(), &[words.as_slice(), more].concat());
        let output = command.env_remove("CANDLE_ZERO_RUNS_DIR").current_dir(&working_dir).output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        working_dir
    };
    let recorded = train(&["--run", "sums"], "recorded");
    let list = zerorun().args(["runs", "--json", "--runs", "runs"]).current_dir(&recorded).output().unwrap();
    let list: Value = candle_zero::serde_json::from_slice(&list.stdout).unwrap();
    let [run] = &list.as_array().unwrap()[..] else { panic!("{list}") };
    assert_eq!((&run["name"], &run["state"], &run["steps"]), (&json!("sums"), &json!("finished"), &json!(3)));
    assert_eq!(run["loss"]["step"], 3);
    assert_eq!(run["val_loss"]["step"], 3);
    let run_folder = recorded.join("runs").join(run["id"].as_str().unwrap());
    let start: Value = from_str(&std::fs::read_to_string(run_folder.join("run.json")).unwrap()).unwrap();
    assert_eq!((&start["settings"]["batch"], &start["total_steps"]), (&json!(4), &json!(3)));
    let unrecorded = train(&["--runs", "off"], "off");
    assert!(!unrecorded.join("runs").exists());
}
