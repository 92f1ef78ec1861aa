//! The output of a run: the sections of monitors, loggers and profilers.

use super::walk::{ConfigWalk, set};
use crate::notice::LogLevel;
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};

/// The sections and keys that choose the output of a job while it trains. None of them changes training.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Monitoring {
    /// `tensorboard`, where it is enabled: rank 0 writes event files.
    pub tensorboard: Option<MonitorFolder>,
    /// `csv_monitor`, where it is enabled: rank 0 writes a CSV file per tag.
    pub csv_monitor: Option<MonitorFolder>,
    /// `timers.throughput.enabled` (default true): with `steps_per_print`, lines of samples per second.
    pub throughput: bool,
    /// `memory_breakdown`: lines of memory at the edges of forward, backward and step, in the rhythm of
    /// `steps_per_print`.
    pub memory_breakdown: bool,
    /// `dump_state`: the configuration and the engine's state are printed at the start.
    pub dump_state: bool,
    /// `log_level`: what is below it is not said in this process; `None`: it stays as it is.
    pub log_level: Option<LogLevel>,
    /// `comms_logger`; its presence alone switches it on, as in DeepSpeed.
    pub comms_logger: Option<CommsLogger>,
    /// `flops_profiler`, where it is enabled.
    pub flops_profiler: Option<FlopsProfiler>,
}

const LEVELS: [(&str, LogLevel); 5] = [
    ("debug", LogLevel::Debug),
    ("info", LogLevel::Info),
    ("warning", LogLevel::Warning),
    ("error", LogLevel::Error),
    ("critical", LogLevel::Critical),
];

/// Where a monitor writes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MonitorFolder {
    /// `output_path`; empty: the current folder.
    pub output_path: PathBuf,
    /// `job_name`: the folder in it. Default `DeepSpeedJobName`.
    pub job_name: String,
}

impl MonitorFolder {
    /// `output_path/job_name`.
    pub fn folder(&self) -> PathBuf {
        let folder = self.output_path.join(&self.job_name);
        if folder.as_os_str().is_empty() { Path::new(".").into() } else { folder }
    }
}

/// `comms_logger`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommsLogger {
    /// `prof_all` (default true): every kind of collective.
    pub prof_all: bool,
    /// `prof_ops`: with `prof_all` false, only these.
    pub prof_ops: Vec<String>,
    /// `verbose`: a line per collective.
    pub verbose: bool,
}

/// `flops_profiler`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FlopsProfiler {
    /// `profile_step`: the number of optimizer steps before the one that is profiled. Default 1.
    pub profile_step: u64,
    /// `module_depth`: components of a unit's name that are told apart; `None` (-1): all.
    pub module_depth: Option<usize>,
    /// `top_modules`: rows of the ranking at each depth. Default 1.
    pub top_modules: usize,
    /// `detailed` (default true): a row per module.
    pub detailed: bool,
    /// `output_file`: where the profile is written instead of being printed.
    pub output_file: Option<PathBuf>,
}

impl Default for FlopsProfiler {
    fn default() -> Self {
        Self { profile_step: 1, module_depth: None, top_modules: 1, detailed: true, output_file: None }
    }
}

/// Reads the sections, which the walk has checked key by key.
pub(super) fn resolve(walk: &ConfigWalk<'_>) -> Monitoring {
    let folder = |section: &str| {
        walk.bool(&format!("{section}.enabled")).then(|| MonitorFolder {
            output_path: walk.str(&format!("{section}.output_path")).unwrap_or_default().into(),
            job_name: walk.str(&format!("{section}.job_name")).unwrap_or_default().into(),
        })
    };
    Monitoring {
        tensorboard: folder("tensorboard"),
        csv_monitor: folder("csv_monitor"),
        throughput: walk.bool("timers.throughput.enabled"),
        memory_breakdown: walk.bool("memory_breakdown"),
        dump_state: walk.bool("dump_state"),
        log_level: walk.str("log_level").and_then(|name| LEVELS.iter().find(|(own, _)| *own == name)).map(|own| own.1),
        comms_logger: comms_logger(walk),
        flops_profiler: flops_profiler(walk),
    }
}

fn comms_logger(walk: &ConfigWalk<'_>) -> Option<CommsLogger> {
    walk.get("comms_logger")?.as_object()?;
    let ops = walk.get("comms_logger.prof_ops").and_then(Value::as_array).into_iter().flatten();
    Some(CommsLogger {
        prof_all: walk.bool("comms_logger.prof_all"),
        prof_ops: ops.filter_map(Value::as_str).map(str::to_string).collect(),
        verbose: walk.bool("comms_logger.verbose"),
    })
}

fn flops_profiler(walk: &ConfigWalk<'_>) -> Option<FlopsProfiler> {
    let size = |key: &str| usize::try_from(walk.int(&format!("flops_profiler.{key}")).unwrap_or(-1)).ok();
    walk.bool("flops_profiler.enabled").then(|| FlopsProfiler {
        profile_step: walk.count("flops_profiler.profile_step"),
        module_depth: size("module_depth"),
        top_modules: size("top_modules").unwrap_or_default(),
        detailed: walk.bool("flops_profiler.detailed"),
        output_file: walk.str("flops_profiler.output_file").map(PathBuf::from),
    })
}

impl Monitoring {
    /// The sections under DeepSpeed's names. What is off keeps its recorded keys.
    pub(super) fn print(&self, tree: &mut Map<String, Value>) {
        for (section, folder) in [("tensorboard", &self.tensorboard), ("csv_monitor", &self.csv_monitor)] {
            set(tree, &format!("{section}.enabled"), json!(folder.is_some()));
            if let Some(MonitorFolder { output_path, job_name }) = folder {
                set(tree, &format!("{section}.output_path"), json!(output_path.to_string_lossy()));
                set(tree, &format!("{section}.job_name"), json!(job_name));
            }
        }
        set(tree, "timers.throughput.enabled", json!(self.throughput));
        set(tree, "memory_breakdown", json!(self.memory_breakdown));
        set(tree, "dump_state", json!(self.dump_state));
        let name = self.log_level.and_then(|level| LEVELS.iter().find(|(_, own)| *own == level)).map(|own| own.0);
        set(tree, "log_level", json!(name));
        match &self.comms_logger {
            // Its presence would switch it on.
            None => set(tree, "comms_logger", Value::Null),
            Some(CommsLogger { prof_all, prof_ops, verbose }) => {
                set(tree, "comms_logger.enabled", json!(true));
                set(tree, "comms_logger.prof_all", json!(prof_all));
                set(tree, "comms_logger.prof_ops", json!(prof_ops));
                set(tree, "comms_logger.verbose", json!(verbose));
            }
        }
        set(tree, "flops_profiler.enabled", json!(self.flops_profiler.is_some()));
        if let Some(profiler) = &self.flops_profiler {
            let file = profiler.output_file.as_ref().map(|file| file.to_string_lossy());
            let depth = profiler.module_depth.map_or(json!(-1), |depth| json!(depth));
            set(tree, "flops_profiler.profile_step", json!(profiler.profile_step));
            set(tree, "flops_profiler.module_depth", depth);
            set(tree, "flops_profiler.top_modules", json!(profiler.top_modules));
            set(tree, "flops_profiler.detailed", json!(profiler.detailed));
            set(tree, "flops_profiler.output_file", json!(file));
        }
    }
}
