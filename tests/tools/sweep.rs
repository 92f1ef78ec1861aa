//! `zerorun sweep`: trials are processes that pause, continue, fail and are killed.

use crate::support::processes::{
    as_program, descendants, program, repository, runs, send, start, stderr, stdout, wait_for, wait_until_gone, zerorun,
};
use candle_core::{DType, Tensor};
use candle_nn::Module as _;
use candle_zero::Engine;
use candle_zero::checkpoint::LoadOptions;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// The endings of the names of the program's variables, `TEST_SWEEP_...`.
const ARGS: [&str; 7] = ["CONFIG", "STEPS", "SAVE", "EXPORT", "WIDTH", "FAIL", "SLOW"];

fn argument<T: std::str::FromStr>(name: &str) -> Option<T> {
    std::env::var(format!("TEST_SWEEP_{name}")).ok()?.parse().ok()
}

#[test]
#[ignore = "a program that other tests start"]
fn trains() {
    let (steps, save): (u64, PathBuf) = (argument("STEPS").unwrap(), argument("SAVE").unwrap());
    let width: usize = argument("WIDTH").unwrap_or(3);
    let config = argument::<PathBuf>("CONFIG").unwrap();
    let builder = Engine::builder().run("tiny").gradient_check(false).seed(7);
    let mut engine = builder.initialize(|vb| candle_nn::linear(4, width, vb), config.as_path()).unwrap();
    std::fs::create_dir_all(&save).unwrap();
    engine.load_checkpoint(&save, None, &LoadOptions::default()).unwrap();
    while engine.global_steps() < steps {
        let stop = engine.stop_requested().unwrap_or_else(|error| {
            eprintln!("error: {error}");
            std::process::exit(1)
        });
        if stop {
            engine.save_checkpoint(&save, None, Value::Null).unwrap();
            std::process::exit(if engine.is_planned_stop() { 0 } else { 1 });
        }
        let step = engine.global_steps();
        if argument("FAIL") == Some(step) {
            eprintln!("error: the data of step {step} are missing");
            std::process::exit(1);
        }
        // The only purpose of the pause is to make kills in the middle of a step more likely.
        std::thread::sleep(std::time::Duration::from_millis(argument("SLOW").unwrap_or(0)));
        let x = Tensor::arange(0f32, 8f32, engine.device()).unwrap().reshape((2, 4)).unwrap();
        let x = (x * (0.1 + (step % 3) as f64 * 0.05)).unwrap();
        let loss = engine.forward(|model| (model.forward(&x)? - 1.0)?.sqr()?.mean_all()).unwrap();
        engine.backward(&loss).unwrap();
        engine.step().unwrap();
        let after = engine.eval(|model| (model.forward(&x)? - 1.0)?.sqr()?.mean_all()).unwrap();
        let after = f64::from(after.to_dtype(DType::F32).unwrap().to_scalar::<f32>().unwrap());
        engine.record_metrics(&[("fit", after)]);
    }
    engine.save_checkpoint(&save, None, Value::Null).unwrap();
    if let Some(file) = argument::<PathBuf>("EXPORT") {
        engine.export_safetensors(file).unwrap();
    }
}

/// A folder with a script that trains, its configuration, and sweeps.
pub struct Folder(pub tempfile::TempDir);

impl Folder {
    pub fn new() -> Self {
        let folder = Self(tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap());
        let config = json!({"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.01}}});
        std::fs::write(folder.path("ds_config.json"), config.to_string()).unwrap();
        let cases = ARGS.map(|name| {
            let flag = if name == "CONFIG" { "ds_config".to_owned() } else { name.to_lowercase() };
            format!("    --{flag}) export TEST_SWEEP_{name}=\"$2\"; shift;;\n")
        });
        let words = as_program(module_path!(), "trains").join(" ");
        let exe = std::env::current_exe().unwrap();
        let text = format!(
            "while [ $# -gt 0 ]; do case \"$1\" in\n{}esac; shift; done\nexec {} {words} >/dev/null",
            cases.concat(),
            exe.display()
        );
        program(folder.0.path(), "train", &text);
        folder
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Writes a sweep file with the command, the metric, the number of steps and the seed, followed by the lines of
    /// `more`.
    pub fn sweep_file(&self, name: &str, more: &str) {
        let text = format!(
            "command = [\"./train\", \"--ds_config\", \"ds_config.json\", \"--export\", \"{{trial}}/model.safetensors\"]\n\
             metric = \"fit\"\nsteps = 16\nseed = 3\n{more}\n"
        );
        std::fs::write(self.path(name), text).unwrap();
    }

    pub fn command(&self, words: &[&str]) -> Command {
        let mut command = zerorun();
        command.current_dir(self.0.path()).arg("sweep").args(words);
        command
    }

    pub fn run(&self, words: &[&str]) -> Output {
        self.command(words).output().unwrap()
    }

    pub fn run_successfully(&self, words: &[&str]) -> String {
        let output = self.run(words);
        assert!(output.status.success(), "{words:?}: {}{}", stdout(&output), stderr(&output));
        stdout(&output)
    }

    /// Returns the JSON output of `zerorun sweep show`.
    pub fn show_json(&self, sweep: &str) -> Value {
        serde_json::from_str(&self.run_successfully(&["show", sweep, "--json"])).unwrap()
    }

    pub fn bytes(&self, name: &str) -> Vec<u8> {
        std::fs::read(self.path(name)).unwrap()
    }

    /// Trains the best configuration of a sweep with its script, without the sweep.
    pub fn train_best(&self, sweep: &str, out: &str) {
        let mut command = Command::new("sh");
        let launcher = crate::support::processes::launcher();
        command.current_dir(self.0.path()).arg(self.path(sweep).join("best/run.sh")).arg(out).env("ZERORUN", launcher);
        let output = command.env("CANDLE_ZERO_RUNS_DIR", "off").output().unwrap();
        assert!(output.status.success(), "{}{}", stdout(&output), stderr(&output));
    }
}

const LR: &str = "[parameters]\n\"optimizer.params.lr\" = { log_uniform = [1e-4, 1.0], points = 16 }";

pub fn asha(parallel: usize) -> String {
    format!(
        "searcher = \"grid\"\nscheduler = \"asha\"\nasha = {{ min_steps = 1 }}\nparallel = {parallel}\nretries = 50\n{LR}"
    )
}

#[test]
fn paused_trials_continue_to_the_bit_and_the_best_is_found_with_few_steps() {
    let folder = Folder::new();
    folder.sweep_file("all.toml", &format!("searcher = \"grid\"\nparallel = 2\n{LR}"));
    folder.sweep_file("halved.toml", &asha(2));
    let all = folder.run_successfully(&["all.toml"]);
    assert!(all.starts_with("TRIAL  STATE"), "{all}");
    folder.run_successfully(&["halved.toml", "--out", "halved"]);
    let (all, halved) = (folder.show_json("sweeps/all"), folder.show_json("halved"));
    // The order of a grid is random with this scheduler, so the numbers of the trials differ.
    let best_of = |shown: &Value| shown["best"].as_u64().unwrap() as usize;
    let (best_of_all, best) = (best_of(&all), best_of(&halved));
    assert_eq!(all["trials"][best_of_all - 1]["parameters"], halved["trials"][best - 1]["parameters"]);
    assert_eq!(all["steps_done"], 16 * 16);
    assert!(halved["steps_done"].as_u64().unwrap() * 4 <= 16 * 16, "{halved}");
    // The model of the trial that paused at every rung has the same bits as that of the trial that never paused, and as
    // that of the script.
    assert!(halved["trials"][best - 1]["results"].as_array().unwrap().len() > 2);
    let weights = folder.bytes(&format!("halved/trials/{best:04}/model.safetensors"));
    assert_eq!(weights, folder.bytes(&format!("sweeps/all/trials/{best_of_all:04}/model.safetensors")));
    folder.train_best("halved", "alone");
    assert_eq!(weights, folder.bytes("alone/model.safetensors"));
    let written: Value = serde_json::from_slice(&folder.bytes("halved/best/best.json")).unwrap();
    assert_eq!((&written["trial"], &written["step"]), (&json!(best), &json!(16)));
    assert_eq!(written["configuration"]["optimizer"]["params"]["lr"], written["parameters"]["optimizer.params.lr"]);
    // Nothing is left to do.
    let again = folder.run(&["resume", "halved"]);
    assert!(again.status.success() && !stderr(&again).contains("from step"), "{}", stderr(&again));
    // The records of the trials are runs.
    let runs = zerorun().args(["runs", "--runs"]).arg(folder.path("halved/runs")).arg("--json").output().unwrap();
    let runs: Vec<Value> = serde_json::from_slice(&runs.stdout).unwrap();
    assert_eq!(runs.len(), 16, "a trial that continues adds to its own record");
}

/// Kills the sweep each time its journal has reached one of these numbers of lines. If the number comes with `true`,
/// kills a trial first. Finally, runs the sweep to the end.
fn finished_after_kills(folder: &Folder, kills: &[(usize, bool)]) {
    let lines = || std::fs::read_to_string(folder.path("killed/journal.jsonl")).map_or(0, |text| text.lines().count());
    for (at, kills_trial) in kills {
        let mut sweep = start(&mut folder.command(&["killed.toml", "--out", "killed"]));
        let pid = i32::try_from(sweep.id()).unwrap();
        let reached = || lines() >= *at || sweep_has_ended(pid);
        wait_for("a line of the journal", || reached().then_some(()));
        if *kills_trial {
            // The last descendant is the launcher of a trial, or the rank that this launcher has started.
            if let Some(pid) = descendants(pid).last().and_then(|pid| Pid::from_raw(*pid)) {
                _ = kill_process(pid, Signal::KILL);
            }
            wait_for("another line of the journal", || (lines() > *at || sweep_has_ended(pid)).then_some(()));
        }
        let trials = descendants(pid);
        send(Signal::KILL, &sweep);
        sweep.wait().unwrap();
        if *kills_trial {
            // The trials save a checkpoint and end, although no sweep waits for them.
            wait_until_gone(&trials);
        }
    }
    folder.run_successfully(&["killed.toml", "--out", "killed"]);
}

fn sweep_has_ended(pid: i32) -> bool {
    !runs(pid)
}

fn kills_change_nothing(folder: &Folder, kills: &[(usize, bool)]) {
    finished_after_kills(folder, kills);
    let (whole, killed) = (folder.show_json("whole"), folder.show_json("killed"));
    assert_eq!(whole, killed);
    let best = format!("trials/{:04}/model.safetensors", whole["best"].as_u64().unwrap());
    assert_eq!(folder.bytes(&format!("whole/{best}")), folder.bytes(&format!("killed/{best}")));
}

#[test]
fn a_sweep_whose_processes_are_killed_ends_with_the_same_winner_and_steps() {
    let folder = Folder::new();
    let small = asha(2).replace("points = 16", "points = 6").replace("min_steps = 1", "min_steps = 2, eta = 2");
    folder.sweep_file("killed.toml", &small);
    folder.run_successfully(&["killed.toml", "--out", "whole"]);
    kills_change_nothing(&folder, &[(2, false), (7, true), (15, true), (24, false)]);
}

/// Run by hand: `cargo test -p zerorun --test tools sweep::campaign -- --ignored --nocapture`.
#[test]
#[ignore = "takes several minutes; run it by hand"]
fn campaign() {
    for round in 0..10u64 {
        let folder = Folder::new();
        folder.sweep_file("killed.toml", &asha(2));
        folder.run_successfully(&["killed.toml", "--out", "whole"]);
        let last = std::fs::read_to_string(folder.path("whole/journal.jsonl")).unwrap().lines().count() as u64;
        let drawn = |number: u64| candle_zero::util::mix(round * 1000 + number);
        let mut kills: Vec<(usize, bool)> =
            (0..24).map(|number| ((1 + drawn(number) % last) as usize, drawn(number + 500) % 3 > 0)).collect();
        kills.sort_unstable();
        kills_change_nothing(&folder, &kills);
        println!("round {round}: {last} lines, the same after {} kills", kills.len());
    }
}

#[test]
fn a_branch_of_a_population_equals_a_resume_by_hand() {
    let folder = Folder::new();
    let file = "trials = 4\nscheduler = \"pbt\"\npbt = { every = 8 }\nparallel = 2\n[parameters]\n\
                \"optimizer.params.lr\" = { log_uniform = [1e-4, 0.1] }";
    folder.sweep_file("pbt.toml", file);
    folder.run_successfully(&["pbt.toml", "--out", "pbt"]);
    let shown = folder.show_json("pbt");
    let trials = shown["trials"].as_array().unwrap();
    let branch = trials.iter().find(|trial| trial["branch"].is_object()).unwrap();
    let (number, donor) = (branch["trial"].as_u64().unwrap(), branch["branch"]["trial"].as_u64().unwrap());
    assert_eq!(branch["branch"]["step"], 8);
    assert_eq!(trials[donor as usize - 1]["results"][0]["step"], 8);
    // The donor's checkpoint of step 8 is continued by hand, with the configuration of the branch.
    let saved = folder.path(&format!("pbt/trials/{donor:04}/checkpoints"));
    let tag = "global_step8";
    let hand = folder.path("hand");
    std::fs::create_dir_all(hand.join(tag)).unwrap();
    for entry in std::fs::read_dir(saved.join(tag)).unwrap().map(Result::unwrap) {
        std::fs::copy(entry.path(), hand.join(tag).join(entry.file_name())).unwrap();
    }
    std::fs::write(hand.join("latest"), tag).unwrap();
    let config = format!("pbt/trials/{number:04}/ds_config.json");
    let mut command = zerorun();
    command.current_dir(folder.0.path()).args(["./train", "--steps", "16", "--save", "hand", "--ds_config", &config]);
    let output = command.args(["--export", "hand.safetensors"]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let weights = folder.bytes(&format!("pbt/trials/{number:04}/model.safetensors"));
    assert_eq!(weights, folder.bytes("hand.safetensors"));
    // The script of the best trial repeats the training of its donors, too.
    folder.train_best("pbt", "alone");
    let best = shown["best"].as_u64().unwrap();
    assert_eq!(
        folder.bytes(&format!("pbt/trials/{best:04}/model.safetensors")),
        folder.bytes("alone/model.safetensors")
    );
}

#[test]
fn trials_that_fail_are_recorded_and_too_many_end_the_sweep() {
    let folder = Folder::new();
    let file = "searcher = \"grid\"\nparallel = 1\n[parameters]\n\"--fail\" = [0, 1, 9]\n\"--width\" = [1, 2]";
    folder.sweep_file("fails.toml", file);
    let table = folder.run_successfully(&["fails.toml", "--steps", "2"]);
    assert!(table.contains("trial 1 failed: error: the data of step 0 are missing\n"), "{table}");
    let shown = folder.show_json("sweeps/fails");
    let states: Vec<&str> = shown["trials"].as_array().unwrap().iter().map(|t| t["state"].as_str().unwrap()).collect();
    assert_eq!(states, ["failed", "failed", "failed", "failed", "complete", "complete"]);
    let output = folder.run(&["fails.toml", "--steps", "2", "--max_failures", "2", "--out", "ended"]);
    assert_eq!(output.status.code(), Some(1));
    let messages = stderr(&output);
    insta::assert_snapshot!(messages.lines().last().unwrap(), @"zerorun: the number of failed trials is 3, and max_failures is 2; the last one failed with: error: the data of step 1 are missing; correct the command and begin again with another --out, or continue with a larger --max_failures");
    assert_eq!(folder.show_json("ended")["failures"], 3);
    // With a larger limit, the sweep continues.
    folder.run_successfully(&["resume", "ended", "--max_failures", "9"]);
    assert_eq!(folder.show_json("ended")["trials"], shown["trials"]);
}

#[test]
fn a_sweep_that_is_stopped_saves_its_trials_and_continues() {
    let folder = Folder::new();
    let slow =
        format!("trials = 2\nparallel = 1\n[parameters]\n\"--slow\" = [30]\n{}", LR.replace("[parameters]\n", ""));
    folder.sweep_file(
        "slow.toml",
        &slow.replace("points = 16", "points = 2").replace("trials = 2\n", "searcher = \"grid\"\n"),
    );
    let sweep = start(&mut folder.command(&["slow.toml", "--out", "slow"]));
    let recorded = folder.path("slow/runs");
    wait_for("a recorded step", || {
        std::fs::read_dir(&recorded).is_ok_and(|mut runs| runs.next().is_some()).then_some(())
    });
    send(Signal::TERM, &sweep);
    let output = sweep.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(128 + 15), "{}", stderr(&output));
    assert!(stderr(&output).contains("`zerorun sweep resume"), "{}", stderr(&output));
    assert_eq!(folder.show_json("slow")["trials"][0]["state"], "running");
    let table = folder.run_successfully(&["resume", "slow"]);
    assert!(table.contains("best: trial"), "{table}");
    // A different sweep does not continue in the folder.
    let output = folder.run(&["slow.toml", "--out", "slow", "--seed", "4", "--parallel", "2"]);
    assert_eq!(output.status.code(), Some(2));
    let message = stderr(&output).replace(folder.0.path().to_str().unwrap(), "DIR");
    insta::assert_snapshot!(message.trim_end(), @"zerorun: DIR/slow: the sweep in it was begun with different settings: seed: 3 -> 4; continue it with `zerorun sweep resume DIR/slow`, or give another folder with --out");
}

#[test]
fn a_planned_stop_that_is_no_number_is_refused() {
    let folder = Folder::new();
    let mut command = zerorun();
    command.current_dir(folder.0.path()).args([
        "./train",
        "--steps",
        "1",
        "--save",
        "s",
        "--ds_config",
        "ds_config.json",
    ]);
    let output = command.env("CANDLE_ZERO_STOP_AT", "soon").output().unwrap();
    assert!(!output.status.success());
    assert!(
        stderr(&output).contains("CANDLE_ZERO_STOP_AT is `soon`; give the number of optimizer steps"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn a_metric_that_never_appears_ends_the_sweep_with_the_names_that_do() {
    let folder = Folder::new();
    folder.sweep_file("x.toml", &asha(1).replace("retries", "metric2"));
    let text = std::fs::read_to_string(folder.path("x.toml")).unwrap();
    std::fs::write(folder.path("x.toml"), text.replace("metric2 = 50\n", "").replace("\"fit\"", "\"fitt\"")).unwrap();
    let output = folder.run(&["x.toml"]);
    assert_eq!(output.status.code(), Some(1));
    insta::assert_snapshot!(stderr(&output).lines().last().unwrap(), @"zerorun: metric is fitt, but trial 1 recorded no such value in step 1; the recorded values are backward_ms, comm_ms, fit, forward_ms, grad_norm, loss, lr, samples and 1 more; the nearest is fit");
}

#[test]
fn wrong_sweeps_are_refused_with_what_is_allowed() {
    let folder = Folder::new();
    let refused = |text: &str, words: &[&str]| {
        std::fs::write(folder.path("s.toml"), text).unwrap();
        let output = folder.run(&[&["s.toml"], words].concat());
        assert_eq!(output.status.code(), Some(2), "{text}: {}", stderr(&output));
        assert!(!folder.path("sweeps").exists(), "{text}");
        stderr(&output).trim_end().replace(folder.0.path().to_str().unwrap(), "DIR")
    };
    let good = "command = [\"finetune\", \"m\", \"--data\", \"d.jsonl\"]\nmetric = \"val_loss\"\nsteps = 100\n";
    let lr = "[parameters]\n\"--lr\" = { log_uniform = [1e-5, 1e-3] }\n";
    let with = |more: &str| refused(&format!("{good}{more}\n{lr}"), &[]);
    let parameter = |text: &str| refused(&format!("{good}[parameters]\n{text}\n"), &[]);
    let said = [
        refused("steps = ", &[]),
        refused(&format!("metric = \"loss\"\nsteps = 1\n{lr}"), &[]),
        refused(&good.replace("metric = \"val_loss\"\n", ""), &[]),
        refused(&good.replace("steps = 100\n", ""), &[]),
        refused(good, &[]),
        with("serch = \"grid\""),
        with("searcher = \"bayes\""),
        with("scheduler = \"hyperband\""),
        with("mode = \"maximum\""),
        with("trials = 0"),
        with("seed = -1"),
        with("memory = \"4GB\""),
        with("scheduler = \"asha\""),
        with("scheduler = \"asha\"\nasha = { min_steps = 10, eta = 1 }"),
        with("scheduler = \"asha\"\nasha = { min_steps = 100 }"),
        with("scheduler = \"asha\"\nasha = { min_step = 10 }"),
        with("asha = { min_steps = 10 }"),
        with("scheduler = \"pbt\"\npbt = { every = 10, quantile = 0.9 }"),
        with("scheduler = \"pbt\"\nsearcher = \"tpe\"\npbt = { every = 10 }"),
        with("searcher = \"grid\""),
        parameter("\"--lr\" = []"),
        parameter("\"--lr\" = { uniform = [1.0, 0.5] }"),
        parameter("\"--lr\" = { log_uniform = [0.0, 0.5] }"),
        parameter("\"--lr\" = { loguniform = [0.1, 0.5] }"),
        parameter("\"--lr\" = [1e-3]\n\"--lr\" = [1e-4]"),
        parameter("\"--micro_batch\" = [1]\n\"--micro-batch\" = [2]"),
        parameter("\"--learning_rat\" = [1]"),
        parameter("\"--lr\" = [\"fast\"]"),
        parameter("\"--lora\" = [\"r=8\", \"rank=8\"]"),
        parameter("\"--steps\" = [10, 20]"),
        parameter("\"--ds_config\" = [\"a.json\"]"),
        parameter("\"--data\" = [\"a.jsonl\"]"),
        parameter("lr = [0.1]"),
        parameter("\"optimizer.parms.lr\" = [0.1]"),
        parameter("\"zero_optimization.stage\" = [1, 4]"),
        parameter("\"gradient_clipping\" = [\"none\"]"),
        refused(&format!("{}{lr}", good.replace("\"--data\"", "\"--patience\", \"3\", \"--data\"")), &[]),
        refused(&format!("{}{lr}", good.replace("\"--data\"", "\"--dat\"")), &[]),
        refused(&format!("{}{lr}", good.replace("\"finetune\"", "\"./train\"")), &[]),
        refused(&format!("{good}{lr}"), &["--param", "--lr=choice:1"]),
        refused(&format!("{good}{lr}"), &["--param", "--batch=4"]),
        refused(&format!("{good}{lr}"), &["--eta", "3"]),
        refused(&format!("{good}{lr}"), &["--out", "."]),
    ];
    insta::assert_snapshot!(said.join("\n"));
}

#[test]
fn fine_tuning_trials_pause_and_the_winner_equals_its_own_run() {
    let folder = Folder::new();
    let chat = |i: usize| json!({"messages": [{"role": "user", "content": format!("{i}?")}, {"role": "assistant", "content": "yes"}]});
    let lines: String = (0..12).map(|i| format!("{}\n", chat(i))).collect();
    std::fs::write(folder.path("chats.jsonl"), lines).unwrap();
    let model = repository().join("tests/fixtures/finetune/models/llama");
    let words = [
        "finetune",
        model.to_str().unwrap(),
        "--data",
        "chats.jsonl",
        "--val",
        "chats.jsonl",
        "--eval_every",
        "1",
        "--lora",
        "r=2",
        "--ctx",
        "32",
        "--batch",
        "2",
    ];
    let sweep = "--metric val_loss --steps 3 --searcher grid --scheduler asha --min_steps 1 --eta 2 --parallel 1 --out tuned \
                 --param --lr=log_uniform:1e-4,1e-2,2";
    let sweep: Vec<&str> = sweep.split_whitespace().chain(["--"]).chain(words).collect();
    folder.run_successfully(&sweep);
    let best = folder.show_json("tuned")["best"].as_u64().unwrap();
    folder.train_best("tuned", "alone");
    let weights = "result/adapter_model.safetensors";
    assert_eq!(folder.bytes(&format!("tuned/trials/{best:04}/{weights}")), folder.bytes(&format!("alone/{weights}")));
    assert_eq!(Path::new(&folder.path("tuned/trials")).read_dir().unwrap().count(), 2);
}
