//! The output of a run: the sections for monitors, loggers and profilers.

use super::walk::{ConfigWalk, set};
use crate::notice::LogLevel;
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};

/// The sections and keys that select a training job's output. None of them changes training.
#[derive(Debug, Clone, Default, PartialEq)]
#[non_exhaustive]
pub struct Monitoring {
    /// `tensorboard`, if enabled: rank 0 writes event files.
    pub tensorboard: Option<MonitorFolder>,
    /// `csv_monitor`, if enabled: rank 0 writes one CSV file per tag.
    pub csv_monitor: Option<MonitorFolder>,
    /// `wandb`, if enabled: rank 0 writes a Weights & Biases run, without using the network.
    pub wandb: Option<WandbConfig>,
    /// `timers.throughput.enabled` (true if absent from the file): log samples per second every `steps_per_print`
    /// steps.
    pub throughput: bool,
    /// `memory_breakdown`: log memory use before and after each forward pass, and after each backward pass and step,
    /// every `steps_per_print` steps.
    pub memory_breakdown: bool,
    /// `dump_state`: print the configuration and the engine's state at the start.
    pub dump_state: bool,
    /// `log_level`: the lowest level that this process logs; `None` leaves the level unchanged.
    pub log_level: Option<LogLevel>,
    /// `comms_logger`. The section's presence switches it on, as in DeepSpeed.
    pub comms_logger: Option<CommsLoggerConfig>,
    /// `flops_profiler`, if enabled.
    pub flops_profiler: Option<FlopsProfilerConfig>,
    /// `run`, if the section is present.
    pub run: Option<RunRecordConfig>,
}

/// The `run` section.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RunRecordConfig {
    /// `enabled` (true if absent from the section): keep a record of the run. False switches off a record that the
    /// program requests.
    pub enabled: bool,
    /// `name`: the name of the run; `None`: the one that the program gives.
    pub name: Option<String>,
    /// `folder`: the folder of runs; `None`: the one that the program gives, or `runs`.
    pub folder: Option<PathBuf>,
}

const LEVELS: [(&str, LogLevel); 5] = [
    ("debug", LogLevel::Debug),
    ("info", LogLevel::Info),
    ("warning", LogLevel::Warning),
    ("error", LogLevel::Error),
    ("critical", LogLevel::Critical),
];

/// The `wandb` section.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct WandbConfig {
    /// `group`: the group of the run.
    pub group: Option<String>,
    /// `team`: the entity to which the run is uploaded; `None`: the user's default.
    pub team: Option<String>,
    /// `project` (`deepspeed` if absent from the section): the project of the run.
    pub project: String,
}

/// The folder that a monitor writes to.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct MonitorFolder {
    /// `output_path`; if empty, the current folder.
    pub output_path: PathBuf,
    /// `job_name` (`DeepSpeedJobName` if absent from the section): the subfolder of `output_path`.
    pub job_name: String,
}

impl MonitorFolder {
    /// Returns `output_path/job_name`.
    pub fn folder(&self) -> PathBuf {
        let folder = self.output_path.join(&self.job_name);
        if folder.as_os_str().is_empty() { Path::new(".").into() } else { folder }
    }
}

/// The `comms_logger` section.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct CommsLoggerConfig {
    /// `prof_all` (true if absent from the section): log every kind of collective.
    pub prof_all: bool,
    /// `prof_ops`: the only collectives that are logged if `prof_all` is false.
    pub prof_ops: Vec<String>,
    /// `verbose`: log one line per collective.
    pub verbose: bool,
}

/// The `flops_profiler` section.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct FlopsProfilerConfig {
    /// `profile_step`: the number of optimizer steps before the profiled one. Default 1.
    pub profile_step: u64,
    /// `module_depth`: the number of components of a unit's name that are distinguished; `None` (-1): all.
    pub module_depth: Option<usize>,
    /// `top_modules`: the number of rows of the ranking at each depth. Default 1.
    pub top_modules: usize,
    /// `detailed` (default true): print one row per module.
    pub detailed: bool,
    /// `output_file`: the file for the profile. Without it, the profile is printed.
    pub output_file: Option<PathBuf>,
}

impl Default for FlopsProfilerConfig {
    fn default() -> Self {
        Self { profile_step: 1, module_depth: None, top_modules: 1, detailed: true, output_file: None }
    }
}

/// Reads the sections, whose keys the walk has already checked. A note reports that a Weights & Biases run is
/// not uploaded.
pub(super) fn resolve(walk: &mut ConfigWalk<'_>) -> Monitoring {
    if walk.bool("wandb.enabled") {
        let text = "the run is written into the folder `wandb`, but not uploaded; upload it with `wandb sync`";
        walk.note("wandb.enabled", text);
    }
    let folder = |section: &str| {
        walk.bool(&format!("{section}.enabled")).then(|| MonitorFolder {
            output_path: walk.str(&format!("{section}.output_path")).unwrap_or_default().into(),
            job_name: walk.str(&format!("{section}.job_name")).unwrap_or_default().into(),
        })
    };
    Monitoring {
        tensorboard: folder("tensorboard"),
        csv_monitor: folder("csv_monitor"),
        wandb: walk.bool("wandb.enabled").then(|| WandbConfig {
            group: walk.str("wandb.group").map(str::to_owned),
            team: walk.str("wandb.team").map(str::to_owned),
            project: walk.str("wandb.project").unwrap_or_default().to_owned(),
        }),
        throughput: walk.bool("timers.throughput.enabled"),
        memory_breakdown: walk.bool("memory_breakdown"),
        dump_state: walk.bool("dump_state"),
        log_level: walk.str("log_level").and_then(|name| LEVELS.iter().find(|(n, _)| *n == name)).map(|pair| pair.1),
        comms_logger: comms_logger(walk),
        flops_profiler: flops_profiler(walk),
        run: walk.get("run").filter(|section| section.is_object()).map(|_| RunRecordConfig {
            enabled: walk.bool("run.enabled"),
            name: walk.str("run.name").map(str::to_owned),
            folder: walk.str("run.folder").map(PathBuf::from),
        }),
    }
}

fn comms_logger(walk: &ConfigWalk<'_>) -> Option<CommsLoggerConfig> {
    walk.get("comms_logger")?.as_object()?;
    let ops = walk.get("comms_logger.prof_ops").and_then(Value::as_array).into_iter().flatten();
    Some(CommsLoggerConfig {
        prof_all: walk.bool("comms_logger.prof_all"),
        prof_ops: ops.filter_map(Value::as_str).map(str::to_string).collect(),
        verbose: walk.bool("comms_logger.verbose"),
    })
}

fn flops_profiler(walk: &ConfigWalk<'_>) -> Option<FlopsProfilerConfig> {
    let size = |key: &str| usize::try_from(walk.int(&format!("flops_profiler.{key}")).unwrap_or(-1)).ok();
    walk.bool("flops_profiler.enabled").then(|| FlopsProfilerConfig {
        profile_step: walk.count("flops_profiler.profile_step"),
        module_depth: size("module_depth"),
        top_modules: size("top_modules").unwrap_or_default(),
        detailed: walk.bool("flops_profiler.detailed"),
        output_file: walk.str("flops_profiler.output_file").map(PathBuf::from),
    })
}

impl Monitoring {
    /// Writes the sections to `tree` under DeepSpeed's names. Sections that are off keep the keys that `tree` already
    /// has for them, except `comms_logger` and `run`, which become null.
    pub(super) fn print(&self, tree: &mut Map<String, Value>) {
        for (section, folder) in [("tensorboard", &self.tensorboard), ("csv_monitor", &self.csv_monitor)] {
            set(tree, &format!("{section}.enabled"), json!(folder.is_some()));
            if let Some(MonitorFolder { output_path, job_name }) = folder {
                set(tree, &format!("{section}.output_path"), json!(output_path.to_string_lossy()));
                set(tree, &format!("{section}.job_name"), json!(job_name));
            }
        }
        set(tree, "wandb.enabled", json!(self.wandb.is_some()));
        if let Some(WandbConfig { group, team, project }) = &self.wandb {
            set(tree, "wandb.group", json!(group));
            set(tree, "wandb.team", json!(team));
            set(tree, "wandb.project", json!(project));
        }
        set(tree, "timers.throughput.enabled", json!(self.throughput));
        set(tree, "memory_breakdown", json!(self.memory_breakdown));
        set(tree, "dump_state", json!(self.dump_state));
        let name = self.log_level.and_then(|level| LEVELS.iter().find(|(_, l)| *l == level)).map(|pair| pair.0);
        set(tree, "log_level", json!(name));
        match &self.comms_logger {
            // The section's presence would switch it on.
            None => set(tree, "comms_logger", Value::Null),
            Some(CommsLoggerConfig { prof_all, prof_ops, verbose }) => {
                set(tree, "comms_logger.enabled", json!(true));
                set(tree, "comms_logger.prof_all", json!(prof_all));
                set(tree, "comms_logger.prof_ops", json!(prof_ops));
                set(tree, "comms_logger.verbose", json!(verbose));
            }
        }
        match &self.run {
            None => set(tree, "run", Value::Null),
            Some(RunRecordConfig { enabled, name, folder }) => {
                set(tree, "run.enabled", json!(enabled));
                set(tree, "run.name", json!(name));
                set(tree, "run.folder", json!(folder.as_ref().map(|folder| folder.to_string_lossy())));
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
