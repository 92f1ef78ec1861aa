//! The bundled example `train_gpt` as a user runs it: through `zerorun`, with all its outputs.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use crate::support::processes::{example, repository, stderr, stdout, zerorun};
use crate::support::skips::skipped;
use serde_json::{Value, json};

const SMALL: [&str; 8] = ["--n_layer", "2", "--n_head", "2", "--n_embd", "32", "--ctx", "32"];

fn train_gpt() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| example("train_gpt"))
}

/// A folder that contains a configuration.
pub struct Folder(tempfile::TempDir);

impl Folder {
    pub fn new(stage: u8) -> Self {
        let folder = Self(tempfile::tempdir().unwrap());
        let config = json!({
            "train_batch_size": 8,
            "train_micro_batch_size_per_gpu": 2,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.1}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 100},
        });
        std::fs::write(folder.path("ds_config.json"), config.to_string()).unwrap();
        folder
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Returns the command `zerorun -n RANKS train_gpt` with a small model and `args`. Metrics are written to a file.
    pub fn command(&self, ranks: usize, args: &[&str]) -> Command {
        let mut command = zerorun();
        command.current_dir(self.0.path()).args(["-n", &ranks.to_string()]).arg(train_gpt());
        command.args(SMALL).args(["--metrics", "metrics.jsonl"]).args(args);
        command
    }

    fn run(&self, ranks: usize, args: &[&str]) -> Run {
        let with_config = [&["--ds_config", "ds_config.json"], args].concat();
        self.finish(&mut self.command(ranks, &with_config))
    }

    fn finish(&self, command: &mut Command) -> Run {
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        let metrics = std::fs::read_to_string(self.path("metrics.jsonl")).unwrap();
        let mut lines: Vec<Value> = metrics.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let summary = lines.pop().unwrap();
        Run { steps: lines, summary, output }
    }
}

/// The results of a run.
struct Run {
    steps: Vec<Value>,
    summary: Value,
    output: Output,
}

impl Run {
    fn losses(&self) -> Vec<f64> {
        self.steps.iter().map(|step| step["loss"].as_f64().unwrap()).collect()
    }

    /// Returns the computed values of each step, without times and memory.
    fn arithmetic(&self) -> Vec<[&Value; 5]> {
        let keys = ["loss", "grad_norm", "lr", "loss_scale", "skipped"];
        self.steps.iter().map(|step| keys.map(|key| &step[key])).collect()
    }
}

fn keys(object: &Value) -> Vec<&str> {
    object.as_object().unwrap().keys().map(String::as_str).collect()
}

const STEP_KEYS: [&str; 16] = [
    "backward_ms",
    "comm_ms",
    "disk_bytes_per_s",
    "disk_ms",
    "disk_read_bytes",
    "disk_written_bytes",
    "forward_ms",
    "grad_norm",
    "loss",
    "loss_scale",
    "lr",
    "rss_peak_bytes",
    "skipped",
    "step",
    "step_ms",
    "tokens_per_s",
];
const SUMMARY_KEYS: [&str; 8] =
    ["comm", "memory", "offload", "seconds", "skipped_steps", "steps", "summary", "world_size"];

#[test]
fn metrics_have_a_line_for_each_step_and_a_summary_and_the_global_batch_decides_the_losses() {
    let folder = Folder::new(2);
    let mut losses_of_one_rank = vec![];
    for ranks in [1, 2, 4] {
        let run = folder.run(ranks, &["--steps", "6", "--order", "sequential", "--sample", "0"]);
        assert_eq!(run.steps.len(), 6);
        for (number, step) in run.steps.iter().enumerate() {
            assert_eq!(keys(step), STEP_KEYS);
            assert_eq!(step["step"], number);
            assert_eq!(
                (&step["lr"], &step["loss_scale"], &step["skipped"]),
                (&json!(3e-3), &json!(1.0), &json!(false))
            );
            let positive =
                ["loss", "grad_norm", "tokens_per_s", "forward_ms", "backward_ms", "step_ms", "rss_peak_bytes"];
            assert!(positive.iter().all(|key| step[key].as_f64().unwrap() > 0.0), "{step}");
            assert!(step["comm_ms"].as_f64().unwrap() >= 0.0, "{step}");
        }
        assert_eq!(keys(&run.summary), SUMMARY_KEYS);
        let summary = ["summary", "world_size", "steps", "skipped_steps"].map(|key| &run.summary[key]);
        assert_eq!(summary, [&json!(true), &json!(ranks), &json!(6), &json!(0)]);
        assert!(run.summary["memory"].is_object() && run.summary["comm"]["kinds"].is_object(), "{}", run.summary);

        let losses = run.losses();
        assert!((losses[0] - 256f64.ln()).abs() < 0.2 && losses[5] < losses[0] - 0.2, "{losses:?}");
        if ranks == 1 {
            losses_of_one_rank = losses;
        } else {
            // A step has the same samples for any number of ranks. Only the order of summation differs.
            let mismatch = losses_of_one_rank.iter().zip(&losses).find(|(a, b)| (*a - *b).abs() > 1e-4);
            assert_eq!(mismatch, None, "world size {ranks}");
        }
    }
}

#[test]
fn stages_0_and_3_and_recomputation_give_the_same_losses_bit_for_bit() {
    let args = ["--steps", "5", "--order", "sequential", "--sample", "0"];
    let (stage_0, stage_3) = (Folder::new(0), Folder::new(3));
    let reference = stage_0.run(2, &args);
    assert_eq!(reference.steps.len(), 5);
    assert_eq!(stage_3.run(2, &args).arithmetic(), reference.arithmetic());
    let recomputed = [&args[..], &["--activation_checkpointing"]].concat();
    assert_eq!(stage_3.run(2, &recomputed).arithmetic(), reference.arithmetic());
    // The comparison detects different runs.
    let other = [&args[..], &["--seed", "5"]].concat();
    assert_ne!(stage_3.run(2, &other).losses(), reference.losses());
}

#[test]
fn a_llama_trains_and_its_losses_do_not_depend_on_the_stage() {
    let (stage_0, stage_3) = (Folder::new(0), Folder::new(3));
    let start = |folder: &Folder, more: &[&str]| {
        let args = ["--ds_config", "ds_config.json", "--arch", "llama", "--model", "llama-nano", "--metrics"];
        let sizes = ["--data", "text.txt", "--ctx", "32", "--order", "sequential", "--sample", "0", "--steps", "8"];
        std::fs::write(folder.path("text.txt"), "to be or not to be, that is the question. ".repeat(20)).unwrap();
        let mut command = zerorun();
        command.current_dir(folder.path(".")).args(["-n", "2"]).arg(train_gpt());
        command.args(args).arg("metrics.jsonl").args(sizes).args(more);
        folder.finish(&mut command)
    };
    let reference = start(&stage_0, &[]);
    let losses = reference.losses();
    assert!((losses[0] - 256f64.ln()).abs() < 0.2 && losses[7] < losses[0] - 1.0, "{losses:?}");
    assert_eq!(start(&stage_3, &[]).arithmetic(), reference.arithmetic());
    assert_eq!(start(&stage_3, &["--activation_checkpointing"]).arithmetic(), reference.arithmetic());
    assert_ne!(start(&stage_3, &["--n_kv_head", "1", "--n_inner", "96"]).losses(), losses);
}

#[test]
fn flags_of_the_other_kind_of_model_are_refused() {
    let folder = Folder::new(1);
    let mistake = |args: &[&str]| {
        let output = folder.command(1, &[&["--ds_config", "ds_config.json"], args].concat()).output().unwrap();
        assert!(!output.status.success());
        stderr(&output).lines().find_map(|line| line.strip_prefix("error: ").map(String::from)).unwrap()
    };
    insta::assert_snapshot!(mistake(&["--n_inner", "64"]), @"a GPT-2 has no --n_kv_head and no --n_inner; leave them out, or give --arch llama");
    insta::assert_snapshot!(mistake(&["--arch", "llama", "--dropout", "0.1"]), @"a Llama has no --dropout; leave it out, or give --arch gpt2");
    insta::assert_snapshot!(mistake(&["--arch", "llama", "--model", "nano"]), @r#"there is no model preset "nano"; the presets are llama-nano, llama-mini, tinyllama-1.1b, llama-3.2-1b, llama-3.2-3b, llama-2-7b"#);
    insta::assert_snapshot!(mistake(&["--dropout", "1"]), @"model configuration: dropout is 1, but must be at least 0 and below 1");
}

#[test]
fn auto_stands_for_the_steps_and_the_width_of_the_run() {
    let folder = Folder::new(3);
    let config = json!({
        "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.25}},
        "scheduler": {"type": "WarmupDecayLR", "params": {
            "total_num_steps": "auto", "warmup_num_steps": 2, "warmup_max_lr": "auto", "warmup_type": "linear",
        }},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": "auto"},
    });
    std::fs::write(folder.path("ds_config.json"), config.to_string()).unwrap();
    let run = folder.run(1, &["--steps", "6"]);
    // The learning rate is 0 in the first two steps, rises to that of the optimizer section within two more, and then
    // falls by a quarter of it in each of the remaining steps.
    let rates: Vec<f64> = run.steps.iter().map(|step| step["lr"].as_f64().unwrap()).collect();
    assert_eq!(rates, [0.0, 0.0, 0.125, 0.25, 0.1875, 0.125]);
    let messages = stderr(&run.output);
    assert!(messages.contains("stage3_param_persistence_threshold: \"auto\": taken as 320"), "{messages}");
    assert!(messages.contains("scheduler.params.total_num_steps: \"auto\": taken as 6"), "{messages}");
}

#[test]
fn the_checkpoint_writer_shows_its_statistics_where_the_configuration_asks() {
    let folder = Folder::new(3);
    let mut config: Value = serde_json::from_slice(&std::fs::read(folder.path("ds_config.json")).unwrap()).unwrap();
    for shows in [true, false] {
        config["checkpoint"] = json!({"writer": {"show_statistics": shows}});
        std::fs::write(folder.path("ds_config.json"), config.to_string()).unwrap();
        let messages = stderr(&folder.run(2, &["--steps", "2", "--save", "saved"]).output);
        let checkpoint = folder.path("saved").join("global_step2");
        let files = std::fs::read_dir(checkpoint).unwrap().map(|entry| entry.unwrap());
        let rank_files = files.filter(|file| file.path().extension().is_some_and(|e| e == "safetensors"));
        let bytes: u64 = rank_files.map(|file| file.metadata().unwrap().len()).sum();
        let line = format!("checkpoint global_step2: {bytes} bytes written in ");
        assert_eq!(messages.contains(&line), shows, "{line}\n{messages}");
        std::fs::remove_dir_all(folder.path("saved")).unwrap();
    }
}

#[test]
fn dropout_changes_the_losses_but_not_those_of_a_rerun_or_of_another_stage() {
    let args = ["--steps", "4", "--order", "sequential", "--sample", "0", "--dropout", "0.2"];
    let reference = Folder::new(0).run(2, &args);
    assert_eq!(Folder::new(0).run(2, &args).arithmetic(), reference.arithmetic());
    let recomputed = [&args[..], &["--activation_checkpointing"]].concat();
    assert_eq!(Folder::new(3).run(2, &recomputed).arithmetic(), reference.arithmetic());
    assert_ne!(Folder::new(0).run(2, &args[..6]).losses(), reference.losses());
}

#[test]
fn an_exported_model_begins_where_training_ended() {
    let folder = Folder::new(3);
    // In sequential order, sample i starts at (i x context) mod (tokens - context - 1), so each step sees the same
    // batch.
    let text: String = (0..8 * 32 + 33).map(|i| char::from(b'a' + (i * i % 23) as u8)).collect();
    std::fs::write(folder.path("text.txt"), text).unwrap();
    let args = |more: &[&'static str]| {
        [&["--data", "text.txt", "--order", "sequential", "--sample", "0", "--steps"], more].concat()
    };
    let uninterrupted = folder.run(2, &args(&["4"])).losses();
    let begun = folder.run(2, &args(&["3", "--export", "model.safetensors"])).losses();
    assert_eq!(begun, uninterrupted[..3]);
    assert!(uninterrupted[3] < uninterrupted[2], "{uninterrupted:?}");
    let continued = folder.run(2, &args(&["1", "--init", "model.safetensors"])).losses();
    assert_eq!(continued, uninterrupted[3..]);
}

#[test]
fn a_pipeline_of_the_configuration_has_the_steps_and_the_weights_of_one_rank_and_resumes_without_it() {
    for arch in ["gpt2", "llama"] {
        let folder = Folder::new(1);
        let mut config: Value = serde_json::from_slice(&std::fs::read(folder.path("ds_config.json")).unwrap()).unwrap();
        config["pipeline"] = json!({"stages": "auto", "schedule": "zero_bubble"});
        std::fs::write(folder.path("pipeline.json"), config.to_string()).unwrap();
        let run = |ranks: usize, more: &[&str]| {
            let args = [&["--ds_config", "pipeline.json", "--arch", arch, "--sample", "0"], more].concat();
            folder.finish(&mut folder.command(ranks, &args))
        };
        let one = run(1, &["--steps", "6", "--export", "one.safetensors"]);
        let divided = run(2, &["--steps", "6", "--export", "two.safetensors"]);
        assert_eq!(divided.arithmetic(), one.arithmetic(), "{arch}");
        assert_eq!(divided.summary["world_size"], 2);
        let weights = |name: &str| std::fs::read(folder.path(name)).unwrap();
        assert!(weights("two.safetensors") == weights("one.safetensors"), "{arch}");
        let saving = ["--save", "saves", "--resume"];
        run(4, &[&["--steps", "3"], &saving[..]].concat());
        let resumed = run(1, &[&["--steps", "6", "--export", "resumed.safetensors"], &saving[..]].concat());
        // The metrics of a resumed run contain the earlier steps.
        assert_eq!(resumed.arithmetic(), one.arithmetic(), "{arch}");
        assert!(weights("resumed.safetensors") == weights("one.safetensors"), "{arch}");
    }
}

#[test]
fn a_sample_of_a_pipeline_is_refused_before_it_trains() {
    let folder = Folder::new(1);
    let config = json!({"train_batch_size": 4, "optimizer": {"type": "AdamW"}, "pipeline": {}});
    std::fs::write(folder.path("pipeline.json"), config.to_string()).unwrap();
    let mut command = folder.command(2, &["--ds_config", "pipeline.json", "--steps", "2", "--sample", "8"]);
    let output = command.output().unwrap();
    assert!(!output.status.success());
    let message = stderr(&output);
    assert!(
        message.contains(
            "--sample is not supported in a pipeline, whose ranks have only parts of the model; leave it out"
        ),
        "{message}"
    );
}

#[test]
fn rank_0_prints_a_sample_to_stdout_and_plain_progress_goes_to_stderr() {
    let folder = Folder::new(3);
    std::fs::write(folder.path("text.txt"), "to be or not to be, that is the question. ".repeat(20)).unwrap();
    let run = folder.run(2, &["--data", "text.txt", "--steps", "3", "--sample", "40"]);
    let sample = stdout(&run.output);
    assert!(!sample.contains(|c: char| c.is_control() && c != '\n' && c != '\t'), "{sample:?}");
    let sample: Vec<&str> = sample.lines().collect();
    assert!(sample[0].starts_with("[rank 0] to be or not to "), "{sample:?}");
    assert!(sample.iter().all(|line| line.starts_with("[rank 0] ")), "{sample:?}");
    let characters: usize = sample.iter().map(|line| line.chars().count() - "[rank 0] ".len()).sum();
    // Each byte is a character or a line end, except where several bytes happen to form one UTF-8 character.
    assert!((16 + 40 - 12..=16 + 40).contains(&(characters + sample.len() - 1)), "{sample:?}");

    let progress = stderr(&run.output);
    assert!(!progress.contains(['\r', '\x1b']), "{progress:?}");
    let steps: Vec<&str> = progress.lines().filter_map(|line| line.strip_prefix("[rank 0] step ")).collect();
    assert!(steps[0].starts_with("1/3 loss ") && steps.last().unwrap().starts_with("3/3 loss "), "{progress}");

    let silent = folder.run(1, &["--data", "text.txt", "--steps", "1", "--sample", "0"]);
    assert_eq!(stdout(&silent.output), "");
}

#[test]
fn every_bundled_configuration_trains() {
    let folder = Folder::new(0);
    let bundled = repository().join("ds_configs");
    let mut dtypes = [false; 2];
    for entry in std::fs::read_dir(bundled).unwrap() {
        let path = entry.unwrap().path();
        let config = path.to_str().unwrap();
        let args = ["--ds_config", config, "--steps", "12", "--order", "sequential", "--sample", "0"];
        let run = folder.finish(&mut folder.command(2, &args));
        let losses = run.losses();
        assert!(losses.iter().all(|loss| loss.is_finite()) && losses[11] < losses[0] - 0.05, "{config}: {losses:?}");
        dtypes[0] |= config.ends_with("bf16.json");
        if config.ends_with("fp16.json") {
            dtypes[1] = true;
            assert!(run.steps.iter().all(|step| step["loss_scale"].as_f64().unwrap() > 1.0), "{config}");
        }
    }
    assert_eq!(dtypes, [true; 2], "bf16 and fp16 are among them");
}

#[test]
fn zerorun_builds_the_example_and_a_second_start_compiles_nothing() {
    // Tests without optimization would compile everything a second time here, with optimization.
    if cfg!(debug_assertions) && std::env::var_os("CANDLE_ZERO_SLOW_TESTS").is_none() {
        return skipped(
            zerorun_builds_the_example_and_a_second_start_compiles_nothing,
            "run the tests with --release, or set CANDLE_ZERO_SLOW_TESTS=1, to build the example",
        );
    }
    let folder = Folder::new(1);
    let start = || {
        let mut command = zerorun();
        // The command gets the build settings of this test run, so that the build results are reused.
        for name in ["CARGO_TARGET_DIR", "RUSTFLAGS"] {
            command.envs(std::env::var_os(name).map(|value| (name, value)));
        }
        command.current_dir(repository()).args(["-n", "2", "examples/train_gpt.rs"]).args(SMALL);
        command
            .arg("--ds_config")
            .arg(folder.path("ds_config.json"))
            .arg("--metrics")
            .arg(folder.path("metrics.jsonl"));
        folder.finish(command.args(["--steps", "2", "--sample", "0"]))
    };
    assert_eq!(start().steps.len(), 2);
    let second = start();
    assert_eq!(second.steps.len(), 2);
    let messages = stderr(&second.output);
    assert!(messages.contains("Finished `release`") && !messages.contains("Compiling"), "{messages}");
}
