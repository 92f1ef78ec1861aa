//! How `train_gpt` ends when it does not complete its run, and how other programs use its results.

use std::process::Output;

use super::train_gpt::Folder;
use crate::support::processes::{send, start, stderr, stdout, wait_for, zerorun};
use rustix::process::Signal;
use serde_json::{Value, json};

impl Folder {
    fn train(&self, ranks: usize, args: &[&str]) -> Output {
        let with_config = [&["--ds_config", "ds_config.json", "--sample", "0"], args].concat();
        self.command(ranks, &with_config).output().unwrap()
    }

    fn change(&self, more: &Value) {
        let path = self.path("ds_config.json");
        let mut config: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
        config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        std::fs::write(path, config.to_string()).unwrap();
    }

    fn losses(&self) -> Vec<f64> {
        let text = std::fs::read_to_string(self.path("metrics.jsonl")).unwrap();
        let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        lines.filter_map(|line| line["loss"].as_f64()).collect()
    }
}

#[test]
fn a_run_that_never_trains_is_told_and_is_no_success() {
    let folder = Folder::new(1);
    folder.change(&json!({"fp16": {"enabled": true, "loss_scale": 1e38}}));
    let output = folder.train(2, &["--steps", "3"]);
    let errors = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{errors}");
    let first = "[rank 0] [candle-zero] step 1 is skipped: a gradient is not finite (skipped so far: 1); the loss scale stays at \
                 100000000000000000000000000000000000000 (fp16.loss_scale)\n";
    assert!(errors.contains(first), "{errors}");
    assert!(errors.contains("error: nothing was learned: all 3 steps were skipped"), "{errors}");
    let output = folder.train(2, &["--steps", "40"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        stderr(&output).contains("error: gradients overflowed in 20 optimizer steps in a row"),
        "{}",
        stderr(&output)
    );
    assert_eq!(folder.losses().len(), 19);
    // If the scale is dynamic, its new value is printed.
    folder.change(&json!({"fp16": {"enabled": true, "initial_scale_power": 32, "hysteresis": 1}}));
    let output = folder.train(1, &["--steps", "1"]);
    let errors = stderr(&output);
    assert!(errors.contains("the only step was skipped"), "{errors}");
    assert!(
        errors.contains("the loss scale was still falling; train for more steps, or start with a smaller scale"),
        "{errors}"
    );
    let output = folder.train(1, &["--steps", "30"]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(stderr(&output).contains("; the loss scale falls from 4294967296 to 2147483648"), "{}", stderr(&output));
}

#[test]
fn a_signal_ends_training_after_a_checkpoint_of_one_step_on_all_ranks() {
    let folder = Folder::new(2);
    let args = ["--ds_config", "ds_config.json", "--sample", "0", "--steps", "100000", "--save", "saved"];
    for (signal, ranks) in [(Signal::TERM, 2), (Signal::INT, 2), (Signal::HUP, 2), (Signal::HUP, 1)] {
        let resumed = [&args[..], &["--resume"]].concat();
        let lines = || std::fs::read_to_string(folder.path("metrics.jsonl")).unwrap_or_default().lines().count();
        let before = lines();
        let child = start(&mut folder.command(ranks, &resumed));
        wait_for("two steps of this run", || (lines() >= before + 2).then_some(()));
        send(signal, &child);
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(128 + signal.as_raw()), "{}", stderr(&output));
        let text = stdout(&output);
        let end = text.lines().find(|line| line.contains("stopped by a signal")).unwrap_or_else(|| panic!("{text}"));
        let step: u64 = end.split_once("step ").unwrap().1.split_once(' ').unwrap().0.parse().unwrap();
        let latest = std::fs::read_to_string(folder.path("saved/latest")).unwrap();
        assert_eq!(latest.trim(), format!("global_step{step}"), "{text}");
        assert_eq!(folder.losses().len() as u64, step, "no step is lost or repeated");
    }
    // Each run has continued where the previous one ended.
    assert!(std::fs::read_dir(folder.path("saved")).unwrap().count() >= 3);
}

#[test]
fn a_rank_whose_output_cannot_be_written_ends_with_an_error_and_no_panic() {
    let folder = Folder::new(0);
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let args = ["--ds_config", "ds_config.json", "--sample", "3", "--steps", "1", "--export", "done.safetensors"];
    let output = folder.command(1, &args).stdout(full).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    let message = "error: cannot write to standard output: No space left on device (os error 28)";
    assert!(stderr(&output).contains(message) && !stderr(&output).contains("panicked"), "{}", stderr(&output));
    assert!(folder.path("done.safetensors").is_file(), "the trained weights are written");
}

#[test]
fn consolidated_weights_are_weights_to_start_from() {
    for (arch, sizes) in [("gpt2", &[][..]), ("llama", &["--n_inner", "48", "--n_kv_head", "1"][..])] {
        let folder = Folder::new(2);
        let model = [&["--arch", arch], sizes].concat();
        let first = folder.train(2, &[&model[..], &["--steps", "2", "--save", "saved"]].concat());
        assert!(first.status.success(), "{}", stderr(&first));
        let tool = zerorun().current_dir(folder.path(".")).args(["consolidate", "saved", "out"]).output().unwrap();
        assert!(tool.status.success(), "{}{}", stdout(&tool), stderr(&tool));
        let config: Value =
            serde_json::from_str(&std::fs::read_to_string(folder.path("out/config.json")).unwrap()).unwrap();
        if arch == "llama" {
            assert!(config["rope_theta"].is_number() && config["rms_norm_eps"].is_number(), "{config}");
        }
        // Starts from an exported file, the consolidated folder, or the file in that folder.
        let begin = |init: &str| {
            let output = folder.train(1, &[&model[..], &["--steps", "1", "--init", init]].concat());
            assert!(output.status.success(), "{arch}: {}", stderr(&output));
            folder.losses()
        };
        let exported = folder.train(
            2,
            &[&model[..], &["--steps", "2", "--resume", "--save", "saved", "--export", "e.safetensors"]].concat(),
        );
        assert!(exported.status.success(), "{}", stderr(&exported));
        let losses = begin("e.safetensors");
        assert_eq!(begin("out"), losses, "{arch}");
        assert_eq!(begin("out/model.safetensors"), losses, "{arch}");
    }
}

#[test]
fn text_for_a_vocabulary_of_other_tokens_is_told() {
    let folder = Folder::new(0);
    let output = folder.train(1, &["--steps", "1", "--vocab", "500"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let note = "text is read as bytes, so only 256 different tokens occur; the model has a vocabulary of 500\n";
    assert!(stdout(&output).contains(note), "{}", stdout(&output));
    let output = folder.train(1, &["--steps", "1"]);
    assert!(!stdout(&output).contains("text is read as bytes"), "{}", stdout(&output));
}
