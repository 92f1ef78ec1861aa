//! The errors of zerorun's commands.

use std::path::PathBuf;

/// An error of a zerorun command.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ToolError {
    /// A setting of `autotuning` has a value that is not allowed.
    #[error("autotuning.{key} is {found}, but must be {allowed}")]
    TuneSetting {
        /// The key.
        key: String,
        /// The value found.
        found: String,
        /// The allowed values.
        allowed: String,
    },
    /// A folder contains a model or an adapter instead of a checkpoint.
    #[error("{} contains no checkpoint: it is {what}", dir.display())]
    NoCheckpoints {
        /// The folder.
        dir: PathBuf,
        /// The contents of the folder, and the command that accepts it.
        what: &'static str,
    },
    /// No run has the key of a filter.
    #[error("--filter {key}: no run has this key{}; `zerorun runs show RUN` lists the settings of a run",
            hint.as_ref().map_or(String::new(), |hint| format!("; {hint}")))]
    RunFilter {
        /// The key.
        key: String,
        /// The nearest keys, if there are similar ones.
        hint: Option<String>,
    },
    /// A run would be compared with itself.
    #[error("run {id} is given twice; give different runs")]
    SameRun {
        /// The name of the run.
        id: String,
    },
    /// There is no terminal on which to ask whether runs may be removed.
    #[error(
        "standard input is not a terminal, so zerorun cannot ask whether to remove {what}; give --yes to remove without asking"
    )]
    NotConfirmed {
        /// The names of the runs.
        what: String,
    },
    /// The flags of `zerorun bench scaling` do not fit together.
    #[error("cannot measure: {problem}")]
    Scaling {
        /// The problem and its remedy.
        problem: String,
    },
    /// The settings of a script cannot be tuned.
    #[error("cannot tune: {problem}")]
    Tune {
        /// The problem and its remedy.
        problem: String,
    },
}
