//! `zerorun tune`: short runs with different settings, and the fastest configuration.

use crate::support::processes::{example, program, stderr, stdout, zerorun};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::Output;
use std::time::SystemTime;

/// A folder that contains a configuration and a script.
struct Folder(tempfile::TempDir);

/// A script whose speed and memory depend on its configuration, and which fails at stage 1. It records its runs.
const SCRIPT: &str = r#"
while [ $# -gt 0 ]; do
    case "$1" in
        --ds_config) config=$2; shift;;
        --metrics) metrics=$2; shift;;
        --steps) steps=$2; shift;;
        --batch) batch=$2; shift;;
    esac
    shift
done
has() { grep -Eq "\"$1\": $2,?\$" "$config"; }
echo "$batch" >> "$(dirname "$0")/runs"
if has stage 1; then echo "starting"; echo "error: no memory is left" >&2; echo "goodbye"; exit 3; fi
speed=1000; memory=1000
if has stage 2; then speed=1500; fi
if has train_micro_batch_size_per_gpu 2; then speed=$((speed * 2)); memory=3000; fi
if has train_micro_batch_size_per_gpu 4; then speed=$((speed * 3)); memory=9000000; fi
if has reduce_bucket_size 1000000000; then speed=$((speed + 7)); fi
if has overlap_comm true; then speed=$((speed + 1)); fi
if has slow true; then sleep ${SLOW:-60}; fi
if has csv_monitor "\\{" || [ -n "$CANDLE_ZERO_TIMELINE$CANDLE_ZERO_PROMETHEUS" ]; then echo "error: monitored"; exit 1; fi
step=0
while [ $step -lt $steps ]; do
    printf '{"step":%d,"tokens_per_s":%d,"forward_ms":1,"backward_ms":1,"step_ms":1,"rss_peak_bytes":%d}\n' \
        $step $speed $memory >> "$metrics"
    speed=$((speed + step)); step=$((step + 1))
done
"#;

impl Folder {
    fn new(more: &Value) -> Self {
        let folder = Self(tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap());
        let mut config = json!({
            "train_micro_batch_size_per_gpu": 1,
            "seed": 7,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": 0, "sub_group_size": 12345},
        });
        config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let text = format!("// A comment.\n{config:#}");
        std::fs::write(folder.path("ds_config.json"), text).unwrap();
        program(folder.0.path(), "script", SCRIPT);
        folder
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn tune(&self, args: &[&str], script: &Path, script_args: &[&str]) -> Output {
        let mut command = zerorun();
        command.current_dir(self.0.path()).args(["tune", "--repeats", "0"]).args(args).arg(script);
        command.args(["--ds_config", "ds_config.json"]).args(script_args).output().unwrap()
    }

    fn tune_script(&self, args: &[&str]) -> Output {
        self.tune(args, &self.path("script"), &[])
    }

    fn runs(&self) -> usize {
        std::fs::read_to_string(self.path("runs")).unwrap_or_default().lines().count()
    }

    fn results(&self) -> Vec<Value> {
        let text = std::fs::read_to_string(self.path("autotuning_results/results.jsonl")).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    fn best(&self) -> Value {
        serde_json::from_str(&std::fs::read_to_string(self.path("autotuning_results/best.json")).unwrap()).unwrap()
    }
}

#[test]
fn the_fastest_within_the_limit_is_written_and_failures_are_rows() {
    let folder = Folder::new(&json!({}));
    let output = folder.tune_script(&["--memory_limit", "1MiB", "--stages", "0,1,2"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let text = stdout(&output);
    let rows: Vec<&str> = text.lines().take_while(|line| !line.is_empty()).collect();
    // The rows are sorted by speed. Steps 3 to 5 count, and each of them is faster than the step before.
    assert!(rows[0].starts_with("stage 2, micro batch 2, overlap_comm true, reduce_bucket_size 1000000000"), "{text}");
    assert!(rows[0].contains("3011 tokens/s, 3.0 ms a step, 2.9 KiB"), "{text}");
    let find = |start: &str| *rows.iter().find(|row| row.starts_with(start)).unwrap();
    assert!(find("stage 2, micro batch 4").contains("over the limit: it used 8.6 MiB"), "{text}");
    assert!(find("stage 1, micro batch 1").contains("failed: error: no memory is left"), "{text}");
    // If a micro batch fails, larger ones are not tried.
    assert!(!text.contains("stage 1, micro batch 2"), "{text}");
    // There are 3 + 1 + 3 runs for the micro batches, then 2 other sizes of each kind of bucket, and the other value of
    // two switches.
    assert_eq!((folder.runs(), folder.results().len(), rows.len()), (13, 13, 13), "{text}");
    assert_eq!(
        folder.best(),
        json!({
            "train_micro_batch_size_per_gpu": 2, "seed": 7, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {
                "stage": 2, "sub_group_size": 12345, "reduce_bucket_size": 1_000_000_000, "overlap_comm": true,
            },
        })
    );
}

#[test]
fn those_close_to_the_fastest_are_measured_again_and_noise_is_told() {
    let folder = Folder::new(&json!({}));
    // The runs are alternately faster and slower, so that after one run each, the wrong configuration is the fastest.
    let script = std::fs::read_to_string(folder.path("script")).unwrap();
    let noise = "runs=$(wc -l < \"$(dirname \"$0\")/runs\")\n\
                 case $runs in 1) speed=960;; 2) speed=1010;; 3|5) speed=970;; *) speed=1020;; esac\nstep=0\n";
    std::fs::write(folder.path("script"), script.replacen("step=0\n", noise, 1)).unwrap();
    let mut command = zerorun();
    command.current_dir(folder.0.path()).args(["tune", "--stages", "0,2", "--micro_batches", "1", "--fast", "script"]);
    let output = command.args(["--ds_config", "ds_config.json"]).output().unwrap();
    let text = stdout(&output);
    assert!(output.status.success(), "{text}{}", stderr(&output));
    assert_eq!((folder.runs(), folder.results().len()), (6, 6), "{text}{}", stderr(&output));
    assert!(text.starts_with("stage 0, micro batch 1  1023 tokens/s"), "{text}");
    assert!(text.contains(", 3 runs within "), "{text}");
    assert!(text.contains("\nalso within the noise of these runs: stage 2, micro batch 1\n"), "{text}");
    assert_eq!(folder.best()["zero_optimization"]["stage"], 0);
}

#[test]
fn a_search_that_was_stopped_goes_on() {
    let folder = Folder::new(&json!({}));
    let args = ["--memory_limit", "1MiB", "--stages", "0,2", "--micro_batches", "1,2", "--fast"];
    let first = folder.tune_script(&args);
    assert_eq!(folder.runs(), 4);
    let best = folder.best();
    // This is the state after a search that was stopped during the third experiment, when the end of a line was lost.
    let path = folder.path("autotuning_results/results.jsonl");
    let text = std::fs::read_to_string(&path).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    std::fs::write(&path, format!("{}\n{}\n{}", lines[0], lines[1], &lines[2][..20])).unwrap();
    std::fs::remove_file(folder.path("autotuning_results/best.json")).unwrap();
    let second = folder.tune_script(&args);
    assert_eq!((folder.runs(), folder.results().len()), (6, 4), "{}", stderr(&second));
    assert_eq!((stdout(&second), folder.best()), (stdout(&first), best));
    // Nothing is left to do. If the settings of the runs change, everything is run again.
    folder.tune_script(&args);
    assert_eq!(folder.runs(), 6);
    folder.tune_script(&[&args[..], &["--steps", "4"]].concat());
    assert_eq!(folder.runs(), 10);
}

#[test]
fn the_section_of_the_configuration_counts() {
    let folder = Folder::new(&json!({"autotuning": {
        "enabled": true, "fast": true, "metric": "latency", "results_dir": "found", "exps_dir": "tried",
        "end_profile_step": 3, "num_tuning_micro_batch_sizes": 2, "min_train_micro_batch_size_per_gpu": 2,
        "max_train_micro_batch_size_per_gpu": 3, "tuner_type": "random",
        "arg_mappings": {"train_micro_batch_size_per_gpu": "--batch"},
    }}));
    let output = folder.tune(&["--stages", "0,2"], &folder.path("script"), &["--batch", "99", "--steps", "1000"]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(stderr(&output).contains("autotuning.tuner_type: has no effect here"), "{}", stderr(&output));
    // A micro batch of 2 is tried; 4 exceeds the maximum.
    assert_eq!(std::fs::read_to_string(folder.path("runs")).unwrap(), "2\n2\n");
    let tried: Vec<_> = std::fs::read_dir(folder.path("tried")).unwrap().map(|e| e.unwrap().path()).collect();
    assert_eq!(tried.len(), 2);
    let metrics = std::fs::read_to_string(tried[0].join("metrics.jsonl")).unwrap();
    assert_eq!(metrics.lines().count(), 3);
    let best: Value = serde_json::from_str(&std::fs::read_to_string(folder.path("found/best.json")).unwrap()).unwrap();
    assert_eq!(best["autotuning"]["tuner_type"], "random");
}

#[test]
fn a_run_that_hangs_is_ended_and_is_a_row() {
    let folder = Folder::new(&json!({"comet": {"enabled": false, "slow": true}}));
    let output = folder.tune_script(&["--stages", "0", "--run_limit", "1"]);
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    assert!(stdout(&output).contains("stage 0, micro batch 1  failed: it took longer than 1 s"), "{}", stdout(&output));
    assert!(stderr(&output).contains("nothing was written"), "{}", stderr(&output));
    assert!(!folder.path("autotuning_results/best.json").exists());
    // A larger micro batch need not take longer, so it is tried too. Failed runs are tried again.
    assert_eq!(folder.runs(), 3);
    let mut command = zerorun();
    command.current_dir(folder.0.path()).args(["tune", "--stages", "0", "--micro_batches", "1", "--fast", "script"]);
    let output = command.args(["--ds_config", "ds_config.json"]).env("SLOW", "0").output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!((folder.runs(), folder.results().len()), (4, 3));
}

#[test]
fn a_bare_zero_and_files_of_monitoring_do_not_stop_the_search() {
    let monitor = json!({"enabled": true});
    let mapped = json!({"arg_mappings": {"train_micro_batch_size_per_gpu": "--batch"}});
    let folder = Folder::new(&json!({"zero_optimization": true, "csv_monitor": monitor, "autotuning": mapped}));
    let args = ["tune", "--stages", "0,2", "--micro_batches", "1,2", "--fast", "script", "--batch", "auto"];
    let mut command = zerorun();
    command.current_dir(folder.0.path()).args(args).args(["--ds_config", "ds_config.json"]);
    let output = command.env("CANDLE_ZERO_TIMELINE", "t.json").env("CANDLE_ZERO_PROMETHEUS", "0").output().unwrap();
    let text = stdout(&output);
    assert!(output.status.success(), "{text}{}", stderr(&output));
    assert!(text.starts_with("stage 2, micro batch 2  "), "{text}");
    assert!(text.lines().next().unwrap().ends_with(", train batch 2"), "{text}");
    assert!(text.contains("train batch 2, originally 1: the learning rate may need to change"), "{text}");
    // The last four are two more runs of each of the two fastest configurations, both with a micro batch of 2.
    assert_eq!(std::fs::read_to_string(folder.path("runs")).unwrap(), "1\n2\n1\n2\n2\n2\n2\n2\n");
    assert_eq!((&folder.best()["zero_optimization"]["stage"], &folder.best()["csv_monitor"]), (&json!(2), &monitor));
}

#[test]
fn early_stopping_counts_runs_since_the_first_that_went_well() {
    let folder = Folder::new(&json!({"autotuning": {"tuner_early_stopping": 2}}));
    // Stage 1 fails, then stage 2 with the largest batch is best, and stage 0 brings no gain.
    let args = ["--stages", "1,2,0", "--micro_batches", "1,4"];
    let output = folder.tune_script(&args);
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(stderr(&output).contains("experiments without a gain: 2"), "{}", stderr(&output));
    // After that, the other keys of the best experiment are not searched.
    assert_eq!(folder.runs(), 5, "{}", stdout(&output));
}

#[test]
fn a_search_that_is_under_way_keeps_others_out() {
    let folder = Folder::new(&json!({}));
    std::fs::create_dir(folder.path("autotuning_results")).unwrap();
    let held = std::fs::File::open(folder.path("autotuning_results")).unwrap();
    held.lock().unwrap();
    let output = folder.tune_script(&[]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("another search is running in autotuning_results"), "{}", stderr(&output));
}

#[test]
fn the_bundled_example_is_tuned_within_a_limit_and_resumed() {
    let folder = Folder::new(&json!({}));
    let train_gpt = example("train_gpt");
    let small =
        ["--model", "nano", "--n_layer", "1", "--n_head", "2", "--n_embd", "32", "--ctx", "32", "--sample", "0"];
    let args = ["-n", "2", "--stages", "0,3", "--micro_batches", "1,2", "--fast", "--steps", "4"];
    let output = folder.tune(&args, &train_gpt, &small);
    assert!(output.status.success(), "{}\n{}", stdout(&output), stderr(&output));
    let results = folder.results();
    assert_eq!(results.len(), 4);
    assert!(results.iter().all(|line| line["outcome"] == "ran" && line["unit"] == "tokens"), "{results:?}");
    let throughput = |line: &Value| line["throughput"].as_f64().unwrap();
    let fastest = results.iter().max_by(|a, b| throughput(a).total_cmp(&throughput(b))).unwrap();
    let best = folder.best();
    assert_eq!(best["zero_optimization"]["stage"], fastest["changes"]["zero_optimization.stage"]);
    assert_eq!(best["train_micro_batch_size_per_gpu"], fastest["changes"]["train_micro_batch_size_per_gpu"]);
    assert_eq!(best["seed"], 7);

    // One experiment is removed from the results, so only that one is run again.
    let path = folder.path("autotuning_results/results.jsonl");
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text.lines().take(3).map(|line| format!("{line}\n")).collect::<String>()).unwrap();
    let times = || -> Vec<SystemTime> {
        let of = |line: &Value| {
            let id = line["id"].as_str().unwrap();
            let path = folder.path("autotuning_results/experiments").join(id).join("metrics.jsonl");
            std::fs::metadata(path).unwrap().modified().unwrap()
        };
        results.iter().map(of).collect()
    };
    let before = times();
    assert!(folder.tune(&args, &train_gpt, &small).status.success());
    let after = times();
    assert_eq!((&before[..3], before[3] != after[3]), (&after[..3], true));

    // According to the estimate, a state of 16 bytes per parameter is too large, so nothing is run.
    let args = ["--memory_limit", "1MiB", "--stages", "0", "--micro_batches", "1", "--results_dir", "other"];
    let output = folder.tune(&args, &train_gpt, &["--model", "nano", "--sample", "0"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        stdout(&output).contains("not run: according to the estimate, the model's state alone needs 12.9 MiB"),
        "{}",
        stdout(&output)
    );
    // The state of a smaller model fits, but the complete process does not.
    let output = folder.tune(&args, &train_gpt, &small);
    assert!(stdout(&output).contains("stage 0, micro batch 1  over the limit: it used "), "{}", stdout(&output));
}

#[test]
fn what_is_wrong_ends_with_code_2_and_its_name() {
    let folder = Folder::new(&json!({"train_batch_size": 4, "train_micro_batch_size_per_gpu": null}));
    let script = folder.path("script");
    for (args, more, words) in [
        (vec!["--micro_batches", "3"], vec![], "train_batch_size"),
        (vec![], vec!["--save", "there"], "--save is among the script's arguments"),
        (vec!["--stages", "4"], vec![], "--stages"),
        (vec!["--memory_limit", "much"], vec![], "--memory_limit"),
        (vec!["--stage", "3"], vec![], "--stage"),
        (vec!["--out", "nowhere/best.json"], vec![], "nowhere, the folder of --out, does not exist"),
    ] {
        let output = folder.tune(&args, &script, &more);
        assert_eq!(output.status.code(), Some(2), "{words}: {}", stderr(&output));
        assert!(stderr(&output).contains(words), "{words}: {}", stderr(&output));
    }
    let without = |script: &Path| zerorun().arg("tune").arg(script).output().unwrap();
    assert!(stderr(&without(&script)).contains("there is no --ds_config FILE"));
    let output = folder.tune(&[], Path::new("no_such_script.rs"), &[]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("no_such_script.rs"), "{}", stderr(&output));
    assert_eq!(folder.runs(), 0);
}
