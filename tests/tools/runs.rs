//! `zerorun runs`, and the records that programs leave: finished, killed, restarted, resumed, and several at once.

use crate::support::processes::{as_program, send, stderr, stdout, wait_for, zerorun};
use candle_core::{DType, Tensor};
use candle_nn::Module as _;
use candle_zero::Engine;
use candle_zero::checkpoint::LoadOptions;
use candle_zero::monitor::MonitorEvent;
use candle_zero::runs::{RUN, RUNS_DIR};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::path::Path;
use std::process::{Child, Command, Output};

/// The variables of the program below.
const STEPS: &str = "TEST_STEPS";
const CRASH_AT: &str = "TEST_CRASH_AT";
const SAVE: &str = "TEST_SAVE";
const LR: &str = "TEST_LR";

fn number<T: std::str::FromStr>(name: &str) -> Option<T> {
    std::env::var(name).ok()?.parse().ok()
}

#[test]
#[ignore = "a program that other tests start"]
fn trains() {
    let lr: f64 = number(LR).unwrap_or(0.01);
    let config = json!({"train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": lr}}});
    let builder = Engine::builder().run("tiny").gradient_check(false);
    let mut engine = builder.initialize(|vb| candle_nn::linear(4, 1, vb), config).unwrap();
    let save = std::env::var_os(SAVE);
    if let Some(dir) = &save {
        std::fs::create_dir_all(dir).unwrap();
        engine.load_checkpoint(Path::new(dir), None, &LoadOptions::default()).unwrap();
    }
    let is_first_start = number::<u32>("ZERORUN_RESTART").unwrap_or(0) == 0;
    let micro = 2 / engine.world_size();
    let x = Tensor::ones((micro, 4), DType::F32, engine.device()).unwrap();
    while engine.global_steps() < number(STEPS).unwrap_or(u64::MAX) {
        let step = engine.global_steps();
        if number(CRASH_AT) == Some(step) && is_first_start {
            std::process::abort();
        }
        let loss = engine.forward(|model| model.forward(&x)?.sqr()?.mean_all()).unwrap();
        engine.backward(&loss).unwrap();
        engine.step().unwrap();
        let samples = engine.global_samples();
        if step % 2 == 1 {
            engine.write_events(&[MonitorEvent::new("Validation/loss", 1.0 / samples as f64, samples)]);
        }
        if let (Some(dir), 1) = (&save, step % 2) {
            engine.save_checkpoint(Path::new(dir), None, Value::Null).unwrap();
        }
    }
    engine.record_sample("2 + 2 =", "4\u{1b}[31m");
}

/// Returns a command that trains in a separate process.
fn program(runs: &Path, variables: &[(&str, &str)]) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(as_program(module_path!(), "trains")).env(RUNS_DIR, runs).env_remove(RUN);
    command.envs(variables.iter().copied()).stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null());
    command
}

/// Trains to the end.
fn train(runs: &Path, variables: &[(&str, &str)]) {
    assert!(program(runs, variables).status().unwrap().success());
}

/// Starts a training run that does not end, and waits until steps are recorded.
fn start(runs: &Path) -> Child {
    let before = listed(runs, &[]).len();
    let child = program(runs, &[]).spawn().unwrap();
    wait_for("a recorded step", || {
        let all = listed(runs, &[]);
        (all.len() > before && all.iter().all(|run| run["steps"].as_u64() > Some(0))).then_some(())
    });
    child
}

fn kill(mut child: Child) {
    send(Signal::KILL, &child);
    child.wait().unwrap();
}

fn runs_tool(runs: &Path, words: &[&str]) -> Output {
    let mut command = zerorun();
    command.arg("runs").args(words).env(RUNS_DIR, runs);
    command.output().unwrap()
}

/// Returns the output of the tool, with a placeholder for the folder.
fn printed(runs: &Path, words: &[&str]) -> String {
    let output = runs_tool(runs, words);
    format!("{}{}", stdout(&output), stderr(&output)).replace(runs.to_str().unwrap(), "RUNS")
}

/// Returns the list as JSON. A folder that does not exist yet has no runs.
fn listed(runs: &Path, words: &[&str]) -> Vec<Value> {
    let output = runs_tool(runs, &[words, &["--json"]].concat());
    serde_json::from_slice(&output.stdout).unwrap_or_default()
}

fn id(run: &Value) -> &str {
    run["id"].as_str().unwrap()
}

#[test]
fn a_finished_run_is_listed_shown_exported_and_removed() {
    let dir = tempfile::tempdir().unwrap();
    let runs = dir.path().join("runs");
    train(&runs, &[(STEPS, "4")]);
    let all = listed(&runs, &[]);
    let [run] = &all[..] else { panic!("{all:?}") };
    assert_eq!((&run["state"], &run["steps"], &run["name"]), (&json!("finished"), &json!(4), &json!("tiny")));
    assert_eq!(run["val_loss"], json!({"step": 4, "value": 0.125}));
    let table = printed(&runs, &[]);
    assert!(table.starts_with("NAME ") && table.contains("finished") && table.contains("0.1250"), "{table}");
    let shown = printed(&runs, &["show", "tiny"]);
    for part in ["finished after step 4", "optimizer.params.lr = 0.01", "\"2 + 2 =\": \"4\\u{1b}[31m\"", "machine  "] {
        assert!(shown.contains(part), "{part} in {shown}");
    }
    let csv = printed(&runs, &["export", "tiny", "--csv"]);
    assert!(csv.starts_with("step,time,Validation/loss,") && csv.lines().count() == 5, "{csv}");
    let lines = printed(&runs, &["export", "tiny", "--jsonl"]);
    let losses: Vec<f64> =
        lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["loss"].as_f64().unwrap()).collect();
    assert!(losses.len() == 4 && losses[3] < losses[0]);
    assert_eq!(runs_tool(&runs, &["rm", "tiny"]).status.code(), Some(2), "there is no terminal");
    assert_eq!(listed(&runs, &[]).len(), 1);
    assert!(runs_tool(&runs, &["rm", "tiny", "--yes"]).status.success());
    assert_eq!(std::fs::read_dir(&runs).unwrap().count(), 0);
}

#[test]
fn a_run_that_is_killed_was_running_and_keeps_its_steps() {
    let dir = tempfile::tempdir().unwrap();
    let child = start(dir.path());
    let running = listed(dir.path(), &["--state", "running"]);
    assert_eq!(running.len(), 1);
    let refused = runs_tool(dir.path(), &["rm", "tiny", "--yes"]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(stderr(&refused).contains("is still running"), "{}", stderr(&refused));
    kill(child);
    let all = listed(dir.path(), &[]);
    assert_eq!((all.len(), &all[0]["state"]), (1, &json!("killed")));
    assert!(all[0]["steps"].as_u64() >= running[0]["steps"].as_u64());
    let steps = all[0]["steps"].as_u64().unwrap();
    assert_eq!(printed(dir.path(), &["export", "tiny", "--jsonl"]).lines().count() as u64, steps);
}

#[test]
fn two_runs_at_once_have_their_own_folders() {
    let dir = tempfile::tempdir().unwrap();
    let (first, second) = (start(dir.path()), start(dir.path()));
    let all = listed(dir.path(), &["--state", "running"]);
    assert_eq!(all.len(), 2);
    assert_ne!(id(&all[0]), id(&all[1]));
    kill(first);
    kill(second);
    assert_eq!(listed(dir.path(), &["--state", "killed"]).len(), 2);
}

#[test]
fn a_job_that_restarts_continues_its_run_and_repeated_steps_count_once() {
    let dir = tempfile::tempdir().unwrap();
    let [runs, save] = ["runs", "save"].map(|name| dir.path().join(name));
    let mut command = zerorun();
    command.args(["--num_ranks", "2", "--max_restarts", "1"]).arg("--runs").arg(&runs);
    command.arg(std::env::current_exe().unwrap()).args(as_program(module_path!(), "trains"));
    let output = command.envs([(STEPS, "6"), (CRASH_AT, "3")]).env(SAVE, &save).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let all = listed(&runs, &[]);
    let [run] = &all[..] else { panic!("{all:?}") };
    assert_eq!((&run["state"], &run["steps"], &run["restarts"]), (&json!("finished"), &json!(6), &json!(1)));
    let exported = printed(&runs, &["export", "tiny", "--csv"]);
    let steps: Vec<&str> = exported.lines().skip(1).map(|line| line.split(',').next().unwrap()).collect();
    assert_eq!(steps, ["1", "2", "3", "4", "5", "6"]);
    let shown = printed(&runs, &["show", "tiny"]);
    assert!(shown.contains("start (restart 1) after step 2, from ") && shown.contains("2 ranks"), "{shown}");
}

#[test]
fn a_resumed_run_continues_its_record_and_another_name_begins_one() {
    let dir = tempfile::tempdir().unwrap();
    let [runs, save] = ["runs", "save"].map(|name| dir.path().join(name));
    let save = save.to_str().unwrap();
    train(&runs, &[(STEPS, "3"), (SAVE, save)]);
    train(&runs, &[(STEPS, "5"), (SAVE, save)]);
    let all = listed(&runs, &[]);
    assert_eq!((all.len(), &all[0]["steps"], &all[0]["restarts"]), (1, &json!(5), &json!(1)));
    train(&runs, &[(STEPS, "7"), (SAVE, save), (RUN, "other")]);
    let all = listed(&runs, &["--sort", "name"]);
    assert_eq!(all.iter().map(|run| run["name"].as_str().unwrap()).collect::<Vec<_>>(), ["other", "tiny"]);
    assert_eq!(all[1]["steps"], 5);
}

#[test]
fn runs_are_filtered_sorted_and_compared_and_a_damaged_one_is_named() {
    let dir = tempfile::tempdir().unwrap();
    for lr in ["0.003", "0.01", "0.001"] {
        train(dir.path(), &[(STEPS, "4"), (LR, lr), (RUN, &format!("lr={lr}"))]);
    }
    let names = |words: &[&str]| -> Vec<String> {
        listed(dir.path(), words).iter().map(|run| run["name"].as_str().unwrap_or("damaged").to_owned()).collect()
    };
    assert_eq!(names(&["--sort", "best_loss"]), ["lr=0.01", "lr=0.003", "lr=0.001"]);
    assert_eq!(names(&["--sort", "best_loss", "--reverse"]), ["lr=0.001", "lr=0.003", "lr=0.01"]);
    assert_eq!(names(&["--filter", "optimizer.params.lr=1e-2"]), ["lr=0.01"]);
    assert_eq!(names(&["--filter", "name=lr=0.00*", "--filter", "type=AdamW"]).len(), 2);
    assert_eq!(names(&["list", "--since", "1h"]).len(), 3);
    let compared = printed(dir.path(), &["compare", "lr=0.01-", "lr=0.003-"]);
    let row = compared.lines().find(|line| line.starts_with("optimizer.params.lr ")).unwrap();
    assert_eq!(row.split_whitespace().collect::<Vec<_>>(), ["optimizer.params.lr", "0.01", "0.003"]);
    assert!(!compared.contains("optimizer.type") && compared.contains("Validation/loss"), "{compared}");
    let first = listed(dir.path(), &["--filter", "lr=0.01"])[0]["folder"].as_str().unwrap().to_owned();
    std::fs::write(Path::new(&first).join("run.json"), "{").unwrap();
    let output = runs_tool(dir.path(), &[]);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(stdout(&output).lines().count(), 3);
    let text = stderr(&output).replace(&first, "FOLDER");
    insta::assert_snapshot!(text.trim_end(), @"zerorun: the record FOLDER/run.json is damaged: it is not JSON (EOF while parsing an object at line 1 column 1)");
}

#[test]
fn wrong_words_are_refused_with_what_is_allowed() {
    let dir = tempfile::tempdir().unwrap();
    let none = printed(&dir.path().join("none"), &[]).replace(dir.path().to_str().unwrap(), "DIR");
    insta::assert_snapshot!(none.trim_end(), @"zerorun: there is no folder of runs RUNS; run the command where training was started, or name the folder with --runs DIR or CANDLE_ZERO_RUNS_DIR");
    insta::assert_snapshot!(printed(dir.path(), &[]).trim_end(), @"there are no runs in RUNS");
    for name in ["a", "ab"] {
        train(dir.path(), &[(STEPS, "1"), (RUN, name)]);
    }
    let refusal = |words: &[&str]| {
        let output = runs_tool(dir.path(), words);
        assert_eq!(output.status.code(), Some(2), "{words:?}");
        let text = stderr(&output).replace(dir.path().to_str().unwrap(), "RUNS");
        let text = text.split("\n\nUsage").next().unwrap().split("\n\nFor more").next().unwrap().replace('\n', " ");
        // Replaces the times in names.
        let digits = |word: &str| match word.split_once("-20") {
            Some((name, _)) => format!("{name}-TIME"),
            None => word.to_owned(),
        };
        text.split(' ').map(digits).collect::<Vec<_>>().join(" ").trim_end().to_owned()
    };
    insta::assert_snapshot!(refusal(&["show", "x"]), @"zerorun: no run in RUNS is named `x`; `zerorun runs` lists all runs");
    insta::assert_snapshot!(refusal(&["show", ""]), @"zerorun: `` is a prefix of 2 names: a-TIME ab-TIME give more of the name");
    insta::assert_snapshot!(refusal(&["rm", "a", "--yes"]), @"zerorun: `a` is a prefix of 2 names: a-TIME ab-TIME give more of the name");
    insta::assert_snapshot!(refusal(&["rm", "ab", "a-"]), @"zerorun: standard input is not a terminal, so zerorun cannot ask whether to remove a-TIME ab-TIME give --yes to remove without asking");
    insta::assert_snapshot!(refusal(&["compare", "a-"]), @"zerorun: 2 values required by '<RUN> <RUN>...'; only 1 was provided");
    insta::assert_snapshot!(refusal(&["compare", "a-", "a-"]), @"zerorun: run a-TIME is given twice; give different runs");
    insta::assert_snapshot!(refusal(&["export", "a-"]), @"zerorun: the following required arguments were not provided:   <--csv|--jsonl>");
    insta::assert_snapshot!(refusal(&["export", "a-", "--csv", "--jsonl"]), @"zerorun: the argument '--csv' cannot be used with '--jsonl'");
    insta::assert_snapshot!(refusal(&["--filter", "lr"]), @"zerorun: invalid value 'lr' for '--filter <KEY=VALUE>': give a key and a value, such as optimizer.params.lr=0.001 or host=node*");
    insta::assert_snapshot!(refusal(&["--filter", "zzzzzz=1"]), @"zerorun: --filter zzzzzz: no run has this key; `zerorun runs show RUN` lists the settings of a run");
    assert!(refusal(&["--filter", "optimizer.param.lr=1"]).contains("optimizer.params.lr"));
    insta::assert_snapshot!(refusal(&["--state", "done"]), @"zerorun: invalid value 'done' for '--state <STATE>': give one of running, finished, stopped, failed, killed");
    insta::assert_snapshot!(refusal(&["--since", "yesterday"]), @"zerorun: invalid value 'yesterday' for '--since <TIME>': give an age, such as 90m, 12h, 7d or 2w, or a date in UTC, such as 2026-01-31 or 2026-01-31T18:00");
    insta::assert_snapshot!(refusal(&["--sort", "size"]), @"zerorun: invalid value 'size' for '--sort <SORT>'   [possible values: start, name, state, duration, steps, loss, best_loss, val, best_val]");
    insta::assert_snapshot!(refusal(&["delete", "a"]), @"zerorun: unrecognized subcommand 'delete'");
}

#[test]
fn names_and_folders_that_cannot_be_used_are_refused_before_training() {
    let dir = tempfile::tempdir().unwrap();
    let output = zerorun().args(["--run", "a/b", "train.rs"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    insta::assert_snapshot!(stderr(&output).lines().next().unwrap(), @"zerorun: invalid value 'a/b' for '--run <NAME>': give 1 to 100 bytes of letters, digits, inner spaces or . _ - + = @, and begin with a letter or digit");
    std::fs::write(dir.path().join("file"), "").unwrap();
    let mut command = program(&dir.path().join("file"), &[(STEPS, "1")]);
    let output = command.stdout(std::process::Stdio::piped()).output().unwrap();
    assert!(!output.status.success());
    // With `off` as the folder, nothing is recorded.
    let mut command = program(Path::new("off"), &[(STEPS, "1")]);
    assert!(command.current_dir(dir.path()).status().unwrap().success());
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
}
