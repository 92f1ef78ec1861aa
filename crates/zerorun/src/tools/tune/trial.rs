//! One trial of a candidate: a short run of the script by the launcher, and its metrics.

use super::trial_outcome::TrialOutcome;
use crate::error::{Error, LaunchError, Result, ToolError};
use crate::tools::config_values::get;
use crate::tools::failure_reason::failure_reason;
use crate::tools::script_arguments::{DS_CONFIG, take};
use crate::tools::trial_subprocess::{configure_trial, write_atomically};
use candle_zero::config::Config;
use candle_zero::util::fnv1a;
use rustix::process::Signal;
use serde_json::Value;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// The interval at which the tool checks whether a run has ended.
const TICK: Duration = Duration::from_millis(20);
/// The time between a run's SIGTERM and its SIGKILL.
const SIGKILL_DELAY: Duration = Duration::from_secs(5);

/// The settings for running candidates.
#[derive(Debug)]
pub(super) struct TrialRunner {
    pub(super) program: PathBuf,
    /// The script's arguments, without those that a trial adds.
    pub(super) args: Vec<OsString>,
    /// The index at which the trial's arguments are inserted.
    pub(super) insert_index: usize,
    pub(super) ranks: usize,
    /// The folder in which each experiment gets a subfolder.
    pub(super) folder: PathBuf,
    pub(super) first_measured: u64,
    pub(super) steps: u64,
    pub(super) mappings: Vec<(String, String)>,
    pub(super) limit: Duration,
}

/// Removes the configuration file, and the flags that trials set instead of the user, from the script's arguments.
/// Returns the index and the path of the file.
pub(super) fn take_config(args: &mut Vec<OsString>) -> Result<(usize, PathBuf)> {
    let wrong = |problem: &str| Error::from(ToolError::Tune { problem: problem.into() });
    for name in ["--save", "--export"] {
        if take(&mut args.clone(), &[name]).is_some() {
            let why = "short runs would overwrite existing results; leave it out";
            return Err(wrong(&format!("{name} is among the script's arguments, and {why}")));
        }
    }
    while take(args, &["--steps"]).is_some() || take(args, &["--metrics"]).is_some() {}
    let (at, file) = take(args, &DS_CONFIG).ok_or_else(|| {
        wrong("there is no --ds_config FILE among the script's arguments; give the configuration to start from")
    })?;
    Ok((at, file.into()))
}

impl TrialRunner {
    /// Returns a unique name for the run of `config`.
    pub(super) fn id(&self, config: &Value) -> String {
        let Self { program, args, ranks, first_measured, steps, mappings, .. } = self;
        // A rebuilt script counts as a different script.
        let built = std::fs::metadata(program).ok().map(|m| (m.len(), m.modified().ok()));
        let all = format!("{program:?} {built:?} {args:?} {ranks} {first_measured} {steps} {mappings:?} {config}");
        format!("{:016x}", fnv1a(all.as_bytes()))
    }

    /// Runs the script with `config`, whose resolved form is `resolved`. A failed run is returned as an outcome; an
    /// error means that the run could not begin.
    pub(super) fn run(&self, id: &str, config: &Value, resolved: &Config) -> Result<TrialOutcome> {
        let folder = self.folder.join(id);
        let io = |action, path: &Path| {
            let path = path.to_owned();
            move |source| Error::Io { action, path, source }
        };
        std::fs::create_dir_all(&folder).map_err(io("create", &folder))?;
        // The script may run in another folder.
        let folder = std::fs::canonicalize(&folder).map_err(io("find", &folder))?;
        let [file, metrics, log] = ["ds_config.json", "metrics.jsonl", "log.txt"].map(|name| folder.join(name));
        write_atomically(&file, &format!("{:#}\n", without_reporting(config)))?;
        // A stopped run may have left this file.
        _ = std::fs::remove_file(&metrics);
        let launcher = std::env::current_exe()
            .map_err(|source| LaunchError::Setup { what: "finding the launcher itself", source })?;
        let mut command = Command::new(launcher);
        // Trials are recorded by this tool.
        command.args(["--num_ranks", &self.ranks.to_string(), "--runs", "off"]).arg(&self.program);
        command.args(self.arguments(&resolved.to_deepspeed_json(), &file, &metrics));
        command.stdin(Stdio::null());
        configure_trial(&mut command, &log)?;
        let Some(status) = self.wait(&mut command)? else {
            return Ok(TrialOutcome::TimedOut { seconds: self.limit.as_secs() });
        };
        if !status.success() {
            return Ok(failure_outcome(status, failure_reason(&log)));
        }
        Ok(measured_outcome(&metrics, self.first_measured, resolved.batch.train_batch_size).unwrap_or_else(|| {
            let reason =
                "its metrics contain no measured step; the script must write a line per step to --metrics".into();
            TrialOutcome::Failed { reason }
        }))
    }

    /// Returns the script's arguments. Mapped flags get values from the `resolved` configuration, never `"auto"`.
    fn arguments(&self, resolved: &Value, file: &Path, metrics: &Path) -> Vec<OsString> {
        let mut args = self.args.clone();
        let mut trial_args: Vec<OsString> = vec!["--ds_config".into(), file.into(), "--metrics".into(), metrics.into()];
        trial_args.extend(["--steps".into(), self.steps.to_string().into()]);
        let mut at = self.insert_index.min(args.len());
        for (key, flag) in &self.mappings {
            let value = get(resolved, key);
            let old_len = args.len();
            // The user's flag is removed in any case, because it belongs to another configuration.
            if take(&mut args, &[flag]).is_some_and(|(place, _)| place < at) {
                at -= old_len - args.len();
            }
            if value.is_null() {
                continue;
            }
            let text = value.as_str().map_or_else(|| value.to_string(), str::to_string);
            trial_args.extend([flag.into(), text.into()]);
        }
        args.splice(at..at, trial_args);
        args
    }

    /// Waits for a run to end. Returns `None` if it took too long and was stopped.
    fn wait(&self, command: &mut Command) -> Result<Option<ExitStatus>> {
        let failed = |source| Error::from(LaunchError::Setup { what: "running an experiment", source });
        let mut child = command.spawn().map_err(failed)?;
        let start = Instant::now();
        // The launcher ends its ranks; if it is killed, they end with it.
        let mut signals =
            [(self.limit, Signal::TERM), (self.limit + SIGKILL_DELAY, Signal::KILL)].into_iter().peekable();
        let mut is_signaled = false;
        loop {
            if let Some(status) = child.try_wait().map_err(failed)? {
                return Ok((!is_signaled).then_some(status));
            }
            if let Some((_, signal)) = signals.next_if(|(after, _)| start.elapsed() > *after) {
                let pid = rustix::process::Pid::from_child(&child);
                _ = rustix::process::kill_process(pid, signal);
                is_signaled = true;
            }
            std::thread::sleep(TICK);
        }
    }
}

/// Returns a configuration for a short run, which neither logs nor writes to the user's monitoring files.
fn without_reporting(config: &Value) -> Value {
    const REPORTING_KEYS: [&str; 10] = [
        "tensorboard",
        "csv_monitor",
        "wandb",
        "comms_logger",
        "flops_profiler",
        "wall_clock_breakdown",
        "memory_breakdown",
        "dump_state",
        "steps_per_print",
        "timers",
    ];
    let mut config = config.clone();
    if let Some(map) = config.as_object_mut() {
        REPORTING_KEYS.iter().for_each(|key| _ = map.remove(*key));
    }
    config
}

/// Returns the outcome of a run that ended with an error.
fn failure_outcome(status: ExitStatus, reason: String) -> TrialOutcome {
    // The launcher and shells report this code for a process killed by SIGKILL. In this case, the kernel has usually
    // killed the process for lack of memory.
    const EXIT_KILLED: i32 = 128 + 9;
    let lower_case = reason.to_lowercase();
    match status.code() == Some(EXIT_KILLED) || lower_case.contains("memory") || lower_case.contains("alloc") {
        true => TrialOutcome::OutOfMemory { reason },
        false => TrialOutcome::Failed { reason },
    }
}

/// Returns the measurements in the metrics file from step `first` (counted from 1) on. The memory is the maximum over
/// all steps. A step has `samples` samples.
fn measured_outcome(path: &Path, first: u64, samples: usize) -> Option<TrialOutcome> {
    let text = std::fs::read_to_string(path).ok()?;
    let lines: Vec<Value> = text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let steps: Vec<&Value> =
        lines.iter().filter(|line| line["step"].as_u64().is_some_and(|s| s + 1 >= first)).collect();
    let count = steps.len() as f64;
    let sum = |of: &dyn Fn(&Value) -> Option<f64>| steps.iter().map(|line| of(line)).sum::<Option<f64>>();
    let phases = ["forward_ms", "backward_ms", "step_ms"];
    let phase_sum = sum(&|line| phases.iter().map(|key| line[*key].as_f64()).sum());
    let memory_bytes = lines.iter().filter_map(|line| line["rss_peak_bytes"].as_u64()).max();
    if count == 0.0 {
        return None;
    }
    let step_ms = phase_sum? / count;
    // Every step has the same number of tokens.
    let seconds_per_token = sum(&|line| line["tokens_per_s"].as_f64().filter(|n| *n > 0.0).map(f64::recip));
    let (throughput, unit) = match seconds_per_token {
        Some(seconds) => (count / seconds, "tokens"),
        None => (samples as f64 * 1e3 / step_ms, "samples"),
    };
    (throughput.is_finite() && step_ms.is_finite()).then(|| TrialOutcome::Ran {
        throughput,
        unit: unit.into(),
        step_ms,
        memory_bytes,
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use serde_json::json;

    fn words(text: &str) -> Vec<OsString> {
        text.split_whitespace().map(OsString::from).collect()
    }

    #[test]
    fn the_trials_own_arguments_take_the_place_of_the_users() {
        let mut args = words("train --steps=7 --ds_config a.json --lr 3 --no 1 --metrics x -- --steps 1");
        assert_eq!(take_config(&mut args).unwrap(), (1, "a.json".into()));
        assert_eq!(args, words("train --lr 3 --no 1 -- --steps 1"));
        let trial = TrialRunner {
            program: "/p".into(),
            args,
            insert_index: 1,
            ranks: 1,
            folder: "/f".into(),
            first_measured: 2,
            steps: 4,
            mappings: vec![("optimizer.params.lr".into(), "--lr".into()), ("absent".into(), "--no".into())],
            limit: TICK,
        };
        let config = json!({"optimizer": {"params": {"lr": 0.5}}});
        let all = trial.arguments(&config, "c.json".as_ref(), "m.jsonl".as_ref());
        assert_eq!(all, words("train --ds_config c.json --metrics m.jsonl --steps 4 --lr 0.5 -- --steps 1"));
        assert_ne!(trial.id(&config), trial.id(&json!({})));
        assert!(take_config(&mut words("--ds_config a --export x")).is_err());
        assert!(take_config(&mut words("--steps 3")).is_err());
    }

    #[test]
    fn a_short_run_writes_no_files_of_monitoring() {
        let config = json!({"seed": 1, "csv_monitor": {"enabled": true}, "tensorboard": {"enabled": true}, "wandb": {"enabled": true},
                            "wall_clock_breakdown": true, "comms_logger": {}, "flops_profiler": {"enabled": true}});
        assert_eq!(without_reporting(&config), json!({"seed": 1}));
    }

    #[test]
    fn a_run_that_was_killed_or_found_no_memory_says_so() {
        use std::os::unix::process::ExitStatusExt as _;
        let is_too_large =
            |code: i32, text: &str| failure_outcome(ExitStatus::from_raw(code << 8), text.into()).is_too_large();
        assert!(is_too_large(137, "killed") && is_too_large(1, "CUDA out of memory"));
        assert!(!is_too_large(1, "error: no such file"));
        assert!(!TrialOutcome::TimedOut { seconds: 1 }.is_too_large());
    }

    #[test]
    fn the_measured_steps_count_and_the_largest_memory() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.jsonl");
        let line = |step, tokens: Option<f64>| {
            json!({"step": step, "tokens_per_s": tokens, "forward_ms": 1.0, "backward_ms": 2.0, "step_ms": 1.0,
                   "rss_peak_bytes": 100 + step})
        };
        let write = |lines: &[Value]| {
            std::fs::write(&path, lines.iter().map(|l| format!("{l}\n")).collect::<String>() + "{\"cut").unwrap();
        };
        write(&[line(0, Some(1.0)), line(1, Some(100.0)), line(2, Some(300.0)), json!({"summary": true})]);
        let outcome = measured_outcome(&path, 2, 8).unwrap();
        let ran = |throughput, unit: &str| TrialOutcome::Ran {
            throughput,
            unit: unit.into(),
            step_ms: 4.0,
            memory_bytes: Some(102),
        };
        // Two steps with the same number of tokens, one in a third of the time.
        let TrialOutcome::Ran { throughput, .. } = outcome else { panic!() };
        assert!((throughput - 150.0).abs() < 1e-9, "{throughput}");
        write(&[line(1, None), line(2, None)]);
        assert_eq!(measured_outcome(&path, 1, 8), Some(ran(2000.0, "samples")));
        assert_eq!(measured_outcome(&path, 9, 8), None);
        assert_eq!(ran(1.0, "tokens").apply_memory_limit(101), TrialOutcome::OverLimit { memory_bytes: 102 });
    }
}
