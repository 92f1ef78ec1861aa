//! Tools: what `zerorun` does besides starting scripts. The first word of the command line names one.
//!
//! A script of the same name is started as `./NAME`.

use super::args::Refused;
use super::bench;
use super::check;
use super::consolidate;
use super::estimate;
use super::import;
use super::inspect;
use super::machine;
use super::schedule;
use super::schema;
use super::tune;
use super::verify;
use crate::Error;
use crate::monitor::Progress;
use std::ffi::{OsStr, OsString};
use std::fmt::Display;
use std::io::Write as _;
use std::process::ExitCode;

/// Something that `zerorun NAME ...` does.
pub(super) struct Tool {
    pub(super) name: &'static str,
    /// One line for `zerorun --help`.
    about: &'static str,
    /// Gets the command line from the name on.
    pub(super) run: fn(Vec<OsString>) -> Result<ExitCode, Refused>,
}

/// All of them, in the order of the help.
const ALL: [Tool; 11] = [
    Tool { name: "bench", about: "How fast a folder for offloaded state is", run: bench::run },
    Tool { name: "check", about: "A configuration, without a job: all that is wrong with it", run: check::run },
    Tool { name: "consolidate", about: "A checkpoint's parameters as Hugging Face's files", run: consolidate::run },
    Tool { name: "estimate", about: "What a training run needs, before it runs", run: estimate::run },
    Tool { name: "import", about: "A checkpoint of DeepSpeed as one of this library's", run: import::run },
    Tool { name: "inspect", about: "A folder's checkpoints, and whether one is whole", run: inspect::run },
    Tool { name: "report", about: "What this machine has, and what that means for training", run: machine::run },
    Tool { name: "schedule", about: "Learning rate and momentum by step, without training", run: schedule::run },
    Tool { name: "schema", about: "A JSON Schema of the configuration, for editors", run: schema::run },
    Tool { name: "tune", about: "The fastest configuration of a script, by short runs", run: tune::run },
    Tool { name: "verify", about: "Whether all stages and offload give the same bits here", run: verify::run },
];

/// The tool of that name.
pub(super) fn named(word: &OsStr) -> Option<&'static Tool> {
    ALL.iter().find(|tool| word == tool.name)
}

/// The part of the help that lists them.
pub(super) fn help() -> String {
    let lines = ALL.iter().map(|Tool { name, about, .. }| format!("  {name:13}{about}: see `zerorun {name} --help`\n"));
    format!(
        "Tools, in the place of SCRIPT (a script of such a name is started as ./NAME):\n{}",
        lines.collect::<String>()
    )
}

/// Says why a tool did nothing, or not all, and gives its exit code.
pub(super) fn refused(error: &Error, code: u8) -> ExitCode {
    super::say(&format!("zerorun: {error}"));
    ExitCode::from(code)
}

/// Whether standard output took a tool's words.
pub(super) fn print(text: impl Display) -> bool {
    writeln!(std::io::stdout(), "{text}").is_ok()
}

/// Progress over bytes, shown in MiB from the first report on.
#[derive(Default)]
pub(super) struct ByteProgress(Option<(Progress, u64)>);

impl ByteProgress {
    /// Reports that `done` of `total` bytes are done.
    pub(super) fn tell(&mut self, done: u64, total: u64) {
        let (done, total) = (done.div_ceil(1 << 20), total.div_ceil(1 << 20));
        let (progress, shown) = self.0.get_or_insert_with(|| (Progress::new(total, None), 0));
        // Once for each MiB: the last line shows again and again else.
        if done > *shown {
            *shown = done;
            progress.step(done, || "MiB".to_string());
        }
    }

    /// Frees the line below.
    pub(super) fn finish(self) {
        if let Some((progress, _)) = self.0 {
            progress.finish();
        }
    }
}
