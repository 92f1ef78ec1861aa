//! Errors concerning the records of runs.

use std::path::PathBuf;

/// The rule for names of runs, for messages.
pub(super) const NAME_RULE: &str =
    "give 1 to 100 bytes of letters, digits, inner spaces or . _ - + = @, and begin with a letter or digit";

/// Errors concerning the records of runs.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RunError {
    /// The folder of runs does not exist.
    #[error(
        "there is no folder of runs {}; run the command where training was started, or name the folder with --runs DIR \
         or CANDLE_ZERO_RUNS_DIR",
        folder.display()
    )]
    NoFolder {
        /// The folder.
        folder: PathBuf,
    },
    /// No run has this name.
    #[error("no run in {} is named `{name}`{}", folder.display(), hint.as_ref().map_or(String::from("; `zerorun runs` lists all runs"), |hint| format!("; {hint}")))]
    NoRun {
        /// The name.
        name: String,
        /// The folder of runs.
        folder: PathBuf,
        /// The nearest names, if there are similar ones.
        hint: Option<String>,
    },
    /// Several runs have names with this prefix.
    #[error("`{name}` is a prefix of {count} names: {names}; give more of the name")]
    Ambiguous {
        /// The prefix.
        name: String,
        /// The number of runs.
        count: usize,
        /// The names of these runs.
        names: String,
    },
    /// A file of a run cannot be understood.
    #[error("the record {} is damaged: {problem}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The problem.
        problem: String,
    },
    /// A newer version of this library wrote the run.
    #[error(
        "the record {} has format {found}, but this version reads formats up to {newest}; use a newer zerorun",
        path.display()
    )]
    Newer {
        /// The file.
        path: PathBuf,
        /// The format of the run.
        found: u64,
        /// The newest format that this version reads.
        newest: u64,
    },
    /// A name that cannot be that of a run.
    #[error("{source_name} is `{}`, which cannot be the name of a run; {}", name.escape_debug(), NAME_RULE)]
    Name {
        /// The flag, key or variable that gives the name.
        source_name: &'static str,
        /// The name.
        name: String,
    },
    /// The run is still being recorded.
    #[error(
        "run {name} is still running{}; stop it first, or give --force to remove its record anyway",
        pid.map_or(String::new(), |pid| format!(" (process {pid})"))
    )]
    Running {
        /// The name of the run.
        name: String,
        /// The process that records it, if it is known.
        pid: Option<u32>,
    },
}
