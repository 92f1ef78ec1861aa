//! The tools: everything that `zerorun` does besides starting scripts. The first word of the command line names the
//! tool.
//!
//! Each tool has a file or folder named after it (`check` has `check_config`, and `report` has `environment_report`).
//! `config_diagnostic` belongs to `check`; `hosts_forecast`, `pipeline_report` and `gpu_capacity` to `estimate`;
//! `model_size_flags` to `estimate`, `tune` and `bench`; `own_job_launcher` to `verify` and `bench`; `dataset_flags` to
//! `data` and `finetune`; `config_values`, `failure_reason`, `script_arguments` and `trial_subprocess` to `sweep` and
//! `tune`; `resolve_model` to `data`, `finetune`, `generate` and `merge`; and `byte_progress` to all tools that show
//! their progress through files. A script with the same name as a tool is started as `./NAME`.

mod bench;
mod byte_progress;
mod cache;
mod check_config;
mod classify;
mod config_diagnostic;
mod config_values;
mod consolidate;
mod dash;
mod data;
mod dataset_flags;
mod deploy;
mod environment_report;
pub(crate) mod error;
mod estimate;
mod failure_reason;
mod finetune;
mod generate;
mod gpu_capacity;
mod hosts_forecast;
mod import;
mod inspect;
mod island_server;
mod merge;
mod model_size_flags;
mod own_job_launcher;
mod pipeline_report;
mod resolve_model;
mod runs;
mod schedule;
mod schema;
mod script_arguments;
mod sweep;
mod trial_subprocess;
mod tune;
mod verify;

use crate::launch::console::CommandLineError;
use std::ffi::{OsStr, OsString};
use std::process::ExitCode;

/// A tool, run by `zerorun NAME ...`.
pub(crate) struct ZerorunTool {
    pub(crate) name: &'static str,
    /// The line about the tool in `zerorun --help`.
    about: &'static str,
    /// The function that runs the tool. Its argument is the command line, starting with the tool's name.
    pub(crate) run: fn(Vec<OsString>) -> Result<ExitCode, CommandLineError>,
    /// The function that returns the definition of the tool's command line, for shell completions and manual pages.
    command: fn() -> clap::Command,
}

/// All tools, in the order of the help.
const ALL: [ZerorunTool; 22] = [
    ZerorunTool {
        name: "bench",
        about: "Measure the speed of a disk, of the network, or of training on several ranks",
        run: bench::run,
        command: bench::command,
    },
    ZerorunTool {
        name: "cache",
        about: "Show the disk space that script builds use, and free it",
        run: cache::run,
        command: cache::command,
    },
    ZerorunTool {
        name: "check",
        about: "Check a configuration and list every problem",
        run: check_config::run,
        command: check_config::command,
    },
    ZerorunTool {
        name: "classify",
        about: "Predict labels of texts with a fine-tuned classifier",
        run: classify::run,
        command: classify::command,
    },
    ZerorunTool {
        name: "consolidate",
        about: "Write a checkpoint's parameters as Hugging Face files",
        run: consolidate::run,
        command: consolidate::command,
    },
    ZerorunTool {
        name: "dash",
        about: "Watch and compare runs on a page in the browser",
        run: dash::run,
        command: dash::command,
    },
    ZerorunTool {
        name: "data",
        about: "Show how fine-tuning reads data files",
        run: data::run,
        command: data::command,
    },
    ZerorunTool {
        name: "deploy",
        about: "Print a manifest or batch script for Kubernetes or Slurm",
        run: deploy::run,
        command: deploy::command,
    },
    ZerorunTool {
        name: "estimate",
        about: "Compute memory and traffic before training",
        run: estimate::run,
        command: estimate::command,
    },
    ZerorunTool {
        name: "finetune",
        about: "Fine-tune a Hugging Face model or a GGUF file",
        run: finetune::run,
        command: finetune::command,
    },
    ZerorunTool {
        name: "generate",
        about: "Answer prompts with a model and, optionally, an adapter",
        run: generate::run,
        command: generate::command,
    },
    ZerorunTool { name: "import", about: "Convert a DeepSpeed checkpoint", run: import::run, command: import::command },
    ZerorunTool {
        name: "inspect",
        about: "Show the checkpoints in a folder",
        run: inspect::run,
        command: inspect::command,
    },
    ZerorunTool {
        name: "island-server",
        about: "Run the server through which islands join, leave and exchange changes",
        run: island_server::run,
        command: island_server::command,
    },
    ZerorunTool {
        name: "merge",
        about: "Merge an adapter into a model, and write a folder or a GGUF file",
        run: merge::run,
        command: merge::command,
    },
    ZerorunTool {
        name: "report",
        about: "Describe this machine and what it can train",
        run: environment_report::run,
        command: environment_report::command,
    },
    ZerorunTool {
        name: "runs",
        about: "List and compare recorded training runs",
        run: runs::run,
        command: runs::command,
    },
    ZerorunTool {
        name: "schedule",
        about: "Show the learning rate and momentum of each step",
        run: schedule::run,
        command: schedule::command,
    },
    ZerorunTool {
        name: "schema",
        about: "Print a JSON Schema of the configuration, for editors",
        run: schema::run,
        command: schema::command,
    },
    ZerorunTool {
        name: "sweep",
        about: "Search for the best settings of a training run",
        run: sweep::run,
        command: sweep::command,
    },
    ZerorunTool {
        name: "tune",
        about: "Find a script's fastest configuration with short runs",
        run: tune::run,
        command: tune::command,
    },
    ZerorunTool {
        name: "verify",
        about: "Check that all stages give the same bits on this machine",
        run: verify::run,
        command: verify::command,
    },
];

/// Returns the tool with that name.
pub(crate) fn named(word: &OsStr) -> Option<&'static ZerorunTool> {
    ALL.iter().find(|tool| word == tool.name)
}

/// Returns the name of the tool that a mistyped word resembles most, if any.
pub(crate) fn nearest(word: &str) -> Option<&'static str> {
    /// The minimum similarity, from 0 to 1.
    const MIN_SIMILARITY: f64 = 0.6;
    let similarity = |tool: &ZerorunTool| strsim::normalized_damerau_levenshtein(&word.to_lowercase(), tool.name);
    let nearest = ALL.iter().max_by(|a, b| similarity(a).total_cmp(&similarity(b)))?;
    Some(nearest.name).filter(|_| similarity(nearest) >= MIN_SIMILARITY)
}

/// The commands that describe the complete command line, each with its line in the help.
pub(crate) const COMMAND_LINE_DOCS: [(&str, &str); 2] =
    [("completions", "Print completions for a shell"), ("man", "Print the manual page of a command")];

/// Returns the part of the help that lists the commands.
pub(crate) fn help() -> String {
    let mut lines: Vec<(&str, &str)> =
        ALL.iter().map(|tool| (tool.name, tool.about)).chain(COMMAND_LINE_DOCS).collect();
    lines.sort();
    let lines: String = lines.iter().map(|(name, about)| format!("  {name:15}{about}\n")).collect();
    format!("Commands (`zerorun COMMAND --help` describes a command):\n{lines}")
}

/// Returns the definitions of all tools' command lines.
pub(crate) fn commands() -> impl Iterator<Item = clap::Command> {
    ALL.iter().map(|tool| (tool.command)().name(tool.name).bin_name(format!("zerorun {}", tool.name)))
}
