//! One candidate: a short run of the script by the launcher, and what its metrics say.

use crate::launch::estimate::binary;
use crate::launch::signals::die_with_parent;
use crate::param::fnv1a;
use crate::{Error, Result};
use rustix::process::Signal;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::ffi::OsString;
use std::fmt;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// How often the end of a run is looked for.
const TICK: Duration = Duration::from_millis(20);

/// What became of a candidate.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "outcome")]
pub(super) enum Outcome {
    /// It ran to its end.
    Ran {
        /// Of the measured steps together.
        throughput: f64,
        /// What is counted: tokens or samples.
        unit: String,
        /// A step on average.
        step_ms: f64,
        /// Of the rank that used most, at its peak.
        memory_bytes: Option<u64>,
    },
    /// It ran to its end with more memory than allowed.
    OverLimit { memory_bytes: u64 },
    /// It did not.
    Failed { reason: String },
    /// It need not be run.
    NotRun { reason: String },
}

impl Outcome {
    /// The same under a limit of memory.
    pub(super) fn within(self, limit: u64) -> Self {
        match self {
            Self::Ran { memory_bytes: Some(memory_bytes), .. } if memory_bytes > limit => {
                Self::OverLimit { memory_bytes }
            }
            other => other,
        }
    }

    pub(super) fn is_well(&self) -> bool {
        matches!(self, Self::Ran { .. })
    }

    pub(super) fn has_run(&self) -> bool {
        !matches!(self, Self::NotRun { .. })
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ran { throughput, unit, step_ms, memory_bytes } => {
                write!(f, "{throughput:.0} {unit}/s, {step_ms:.1} ms a step")?;
                memory_bytes.map_or(Ok(()), |bytes| write!(f, ", {}", binary(bytes)))
            }
            Self::OverLimit { memory_bytes } => write!(f, "over the limit: it used {}", binary(*memory_bytes)),
            Self::Failed { reason } => write!(f, "failed: {reason}"),
            Self::NotRun { reason } => write!(f, "not run: {reason}"),
        }
    }
}

/// How candidates are run.
#[derive(Debug)]
pub(super) struct Trial {
    pub(super) program: PathBuf,
    /// The script's arguments, without those that a trial gives.
    pub(super) args: Vec<OsString>,
    /// Where among them the trial's come.
    pub(super) at: usize,
    pub(super) ranks: usize,
    /// A folder for each experiment.
    pub(super) folder: PathBuf,
    pub(super) first_measured: u64,
    pub(super) steps: u64,
    pub(super) mappings: Vec<(String, String)>,
    pub(super) limit: Duration,
}

/// Takes a flag and its value (`--flag value`, `--flag=value`) out of arguments, and says where it stood.
pub(super) fn take(args: &mut Vec<OsString>, names: &[&str]) -> Option<(usize, OsString)> {
    let end = args.iter().position(|arg| arg == "--").unwrap_or(args.len());
    for at in 0..end {
        if names.iter().any(|name| args[at] == *name) && at + 1 < args.len() {
            args.remove(at);
            return Some((at, args.remove(at)));
        }
        let joined = args[at].to_str().and_then(|arg| arg.split_once('='));
        if let Some((_, value)) = joined.filter(|(name, _)| names.contains(name)) {
            let value = OsString::from(value);
            args.remove(at);
            return Some((at, value));
        }
    }
    None
}

/// Takes the configuration file out of the script's arguments, and what the trials give instead of the user.
pub(super) fn take_config(args: &mut Vec<OsString>) -> Result<(usize, PathBuf)> {
    let wrong = |problem: &str| Error::TuneScript { problem: problem.into() };
    for name in ["--save", "--export"] {
        if take(&mut args.clone(), &[name]).is_some() {
            let why = "short runs would write over what is there; leave it out";
            return Err(wrong(&format!("{name} is among the script's arguments, and {why}")));
        }
    }
    while take(args, &["--steps"]).is_some() || take(args, &["--metrics"]).is_some() {}
    let (at, file) = take(args, &["--ds_config", "--deepspeed_config", "--ds-config"]).ok_or_else(|| {
        wrong("there is no --ds_config FILE among the script's arguments; give the one to start from")
    })?;
    Ok((at, file.into()))
}

impl Trial {
    /// A name for the run of `config` that no other run has.
    pub(super) fn id(&self, config: &Value) -> String {
        let Self { program, args, ranks, first_measured, steps, mappings, .. } = self;
        // A script that has been built anew is another one.
        let built = std::fs::metadata(program).ok().map(|m| (m.len(), m.modified().ok()));
        let all = format!("{program:?} {built:?} {args:?} {ranks} {first_measured} {steps} {mappings:?} {config}");
        format!("{:016x}", fnv1a(all.as_bytes()))
    }

    /// Runs the script with `config`. What goes wrong in the run is an outcome; an error is what keeps it from beginning.
    pub(super) fn run(&self, id: &str, config: &Value) -> Result<Outcome> {
        let folder = self.folder.join(id);
        let io = |action, path: &Path| {
            let path = path.to_owned();
            move |source| Error::Io { action, path, source }
        };
        std::fs::create_dir_all(&folder).map_err(io("create", &folder))?;
        // The script may run in another folder.
        let folder = std::fs::canonicalize(&folder).map_err(io("find", &folder))?;
        let [file, metrics, log] = ["ds_config.json", "metrics.jsonl", "log.txt"].map(|name| folder.join(name));
        super::write_whole(&file, &format!("{config:#}\n"))?;
        // Of a run that was stopped.
        _ = std::fs::remove_file(&metrics);
        let out = File::create(&log).map_err(io("create", &log))?;
        let err = out.try_clone().map_err(io("open", &log))?;
        let launcher = std::env::current_exe()
            .map_err(|source| Error::LauncherSetup { what: "finding the launcher itself", source })?;
        let mut command = Command::new(launcher);
        command.args(["--num_ranks", &self.ranks.to_string()]).arg(&self.program);
        command.args(self.arguments(config, &file, &metrics));
        command.stdin(Stdio::null()).stdout(out).stderr(err);
        die_with_parent(&mut command, Signal::TERM);
        let Some(status) = self.wait(&mut command)? else {
            let reason = format!("it took longer than {} s", self.limit.as_secs());
            return Ok(Outcome::Failed { reason });
        };
        if !status.success() {
            return Ok(Outcome::Failed { reason: last_words(&log) });
        }
        Ok(measured(&metrics, self.first_measured, config, self.ranks).unwrap_or_else(|| {
            let reason = "its metrics have no measured step; a script writes a line for each step to --metrics".into();
            Outcome::Failed { reason }
        }))
    }

    /// The script's arguments.
    fn arguments(&self, config: &Value, file: &Path, metrics: &Path) -> Vec<OsString> {
        let mut args = self.args.clone();
        let mut own: Vec<OsString> = vec!["--ds_config".into(), file.into(), "--metrics".into(), metrics.into()];
        own.extend(["--steps".into(), self.steps.to_string().into()]);
        let mut at = self.at.min(args.len());
        for (key, flag) in &self.mappings {
            let value = key.split('.').fold(config, |value, key| &value[key]);
            if value.is_null() {
                continue;
            }
            let before = args.len();
            if take(&mut args, &[flag]).is_some_and(|(place, _)| place < at) {
                at -= before - args.len();
            }
            let text = value.as_str().map_or_else(|| value.to_string(), str::to_string);
            own.extend([flag.into(), text.into()]);
        }
        args.splice(at..at, own);
        args
    }

    /// Waits for a run to end; nothing if it took too long and was ended.
    fn wait(&self, command: &mut Command) -> Result<Option<ExitStatus>> {
        let failed = |source| Error::LauncherSetup { what: "running an experiment", source };
        let mut child = command.spawn().map_err(failed)?;
        let start = Instant::now();
        let mut asked = false;
        loop {
            if let Some(status) = child.try_wait().map_err(failed)? {
                return Ok((!asked).then_some(status));
            }
            if !asked && start.elapsed() > self.limit {
                // The launcher ends its ranks.
                let pid = rustix::process::Pid::from_child(&child);
                _ = rustix::process::kill_process(pid, Signal::TERM);
                asked = true;
            }
            std::thread::sleep(TICK);
        }
    }
}

/// What a run said last about an error, or last of all.
fn last_words(log: &Path) -> String {
    const LONGEST: usize = 300;
    let text = String::from_utf8_lossy(&std::fs::read(log).unwrap_or_default()).into_owned();
    let mut lines = text.lines().rev().map(str::trim).filter(|line| !line.is_empty());
    let last = lines.clone().next().unwrap_or("it said nothing");
    let line = lines.find(|line| line.to_lowercase().contains("error")).unwrap_or(last);
    line.chars().take(LONGEST).collect()
}

/// What the lines of the metrics file say from step `first` (counted from 1) on.
fn measured(path: &Path, first: u64, config: &Value, ranks: usize) -> Option<Outcome> {
    let text = std::fs::read_to_string(path).ok()?;
    let lines: Vec<Value> = text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let steps: Vec<&Value> =
        lines.iter().filter(|line| line["step"].as_u64().is_some_and(|s| s + 1 >= first)).collect();
    let count = steps.len() as f64;
    let sum = |of: &dyn Fn(&Value) -> Option<f64>| steps.iter().map(|line| of(line)).sum::<Option<f64>>();
    let phases = ["forward_ms", "backward_ms", "step_ms"];
    let of_phases = sum(&|line| phases.iter().map(|key| line[*key].as_f64()).sum());
    let memory_bytes = lines.iter().filter_map(|line| line["rss_peak_bytes"].as_u64()).max();
    if count == 0.0 {
        return None;
    }
    let step_ms = of_phases? / count;
    // Each step has as many tokens as the others.
    let seconds_a_token = sum(&|line| line["tokens_per_s"].as_f64().filter(|n| *n > 0.0).map(f64::recip));
    let (throughput, unit) = match seconds_a_token {
        Some(seconds) => (count / seconds, "tokens"),
        None => {
            let samples = crate::Config::load(config.clone(), ranks).ok()?.batch.train_batch_size;
            (samples as f64 * 1e3 / step_ms, "samples")
        }
    };
    (throughput.is_finite() && step_ms.is_finite()).then(|| Outcome::Ran {
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
        let mut args = words("train --steps=7 --ds_config a.json --lr 3 --metrics x -- --steps 1");
        assert_eq!(take_config(&mut args).unwrap(), (1, "a.json".into()));
        assert_eq!(args, words("train --lr 3 -- --steps 1"));
        let trial = Trial {
            program: "/p".into(),
            args,
            at: 1,
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
        let config = json!({"train_batch_size": 8, "optimizer": {"type": "AdamW"}});
        let found = measured(&path, 2, &config, 1).unwrap();
        let ran = |throughput, unit: &str| Outcome::Ran {
            throughput,
            unit: unit.into(),
            step_ms: 4.0,
            memory_bytes: Some(102),
        };
        // Two steps of the same tokens, one at a third of the time.
        let Outcome::Ran { throughput, .. } = found else { panic!() };
        assert!((throughput - 150.0).abs() < 1e-9, "{throughput}");
        write(&[line(1, None), line(2, None)]);
        assert_eq!(measured(&path, 1, &config, 1), Some(ran(2000.0, "samples")));
        assert_eq!(measured(&path, 9, &config, 1), None);
        assert_eq!(ran(1.0, "tokens").within(101), Outcome::OverLimit { memory_bytes: 102 });
    }
}
