//! Tools: what `zerorun` does besides starting scripts. The first word of the command line names one.
//!
//! A tool has a file, or a folder, of its own name. `picture` belongs to `check`, `sizes` to `estimate` and `tune`.
//! A script of the same name is started as `./NAME`.

mod bench;
mod check;
mod consolidate;
mod estimate;
mod import;
mod inspect;
mod picture;
mod progress;
mod report;
mod schedule;
mod schema;
mod sizes;
mod tune;
mod verify;

use crate::launch::console::Refused;
use std::ffi::{OsStr, OsString};
use std::process::ExitCode;

/// Something that `zerorun NAME ...` does.
pub(crate) struct Tool {
    pub(crate) name: &'static str,
    /// One line for `zerorun --help`.
    about: &'static str,
    /// Gets the command line from the name on.
    pub(crate) run: fn(Vec<OsString>) -> Result<ExitCode, Refused>,
}

/// All of them, in the order of the help.
const ALL: [Tool; 11] = [
    Tool { name: "bench", about: "How fast a folder for offloaded state is", run: bench::run },
    Tool { name: "check", about: "A configuration, without a job: all that is wrong with it", run: check::run },
    Tool { name: "consolidate", about: "A checkpoint's parameters as Hugging Face's files", run: consolidate::run },
    Tool { name: "estimate", about: "What a training run needs, before it runs", run: estimate::run },
    Tool { name: "import", about: "A checkpoint of DeepSpeed as one of this library's", run: import::run },
    Tool { name: "inspect", about: "A folder's checkpoints, and whether one is whole", run: inspect::run },
    Tool { name: "report", about: "What this machine has, and what that means for training", run: report::run },
    Tool { name: "schedule", about: "Learning rate and momentum by step, without training", run: schedule::run },
    Tool { name: "schema", about: "A JSON Schema of the configuration, for editors", run: schema::run },
    Tool { name: "tune", about: "The fastest configuration of a script, by short runs", run: tune::run },
    Tool { name: "verify", about: "Whether all stages and offload give the same bits here", run: verify::run },
];

/// The tool of that name.
pub(crate) fn named(word: &OsStr) -> Option<&'static Tool> {
    ALL.iter().find(|tool| word == tool.name)
}

/// The part of the help that lists them.
pub(crate) fn help() -> String {
    let lines = ALL.iter().map(|Tool { name, about, .. }| format!("  {name:13}{about}: see `zerorun {name} --help`\n"));
    format!(
        "Tools, in the place of SCRIPT (a script of such a name is started as ./NAME):\n{}",
        lines.collect::<String>()
    )
}
