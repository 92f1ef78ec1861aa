//! The one error type. Every message names what was found, where, what is allowed, and the mend.

use crate::config::{ConfigProblem, Listed, Place};
use std::path::PathBuf;

/// Result with [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything a user can meet, in groups. Broken invariants are assertions, not values of this type.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    // ---- files -------------------------------------------------------------------------------
    /// A file or folder could not be read, written or created.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was attempted, as a verb ("read", "create", ...).
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },

    // ---- configuration -----------------------------------------------------------------------
    /// The configuration file could not be read.
    #[error(
        "cannot read the configuration {}: {source}. Give the path of a DeepSpeed JSON file, or JSON text that starts \
         with `{{`.",
        path.display()
    )]
    ConfigFile {
        /// The path that was tried.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// The text of a configuration is no JSON (comments and trailing commas are allowed, as in DeepSpeed).
    #[error("{origin}: {place}: expected {expected}, found {found}.")]
    ConfigSyntax {
        /// The file, or "the configuration text".
        origin: String,
        /// Where.
        place: Place,
        /// What may stand there.
        expected: String,
        /// What stands there.
        found: String,
    },
    /// A key stands twice in one object.
    #[error("{origin}: duplicate key: `{path}` is given twice: {first} and {second}. Remove one of them.")]
    ConfigDuplicateKey {
        /// The file, or "the configuration text".
        origin: String,
        /// Path of the key.
        path: String,
        /// Its first place.
        first: Place,
        /// Its second place.
        second: Place,
    },
    /// A configuration that can be read, but breaks rules; all of them are listed, in file order.
    #[error("{origin}{}", Listed(problems))]
    Config {
        /// The file, "the configuration text" or "the configuration value".
        origin: String,
        /// What is wrong; at least one.
        problems: Vec<ConfigProblem>,
    },
    /// A run of no ranks was asked for.
    #[error("the world size is 0: a run has at least 1 rank.")]
    ConfigNoRanks,
    /// A resolved [`Config`](crate::Config) was used with another number of ranks.
    #[error(
        "the Config was resolved for {resolved} rank(s), but the run has {world_size}. Load it again from its file or \
         text: the batch keys depend on the number of ranks."
    )]
    ConfigWorldSize {
        /// Ranks that the Config was resolved for.
        resolved: usize,
        /// Ranks of this run.
        world_size: usize,
    },
    /// A new batch size does not fit (DeepSpeed's `set_train_batch_size`).
    #[error(
        "train_batch_size {train_batch_size} does not fit train_micro_batch_size_per_gpu {micro_batch} on \
         {world_size} rank(s): a positive multiple of {micro_batch} * {world_size} is needed."
    )]
    BatchSize {
        /// The size that was asked for.
        train_batch_size: usize,
        /// Samples per rank and forward.
        micro_batch: usize,
        /// Ranks.
        world_size: usize,
    },
    /// A script was started without its configuration.
    #[error("{problem}. Start it as: {program} --ds_config FILE")]
    ConfigArgument {
        /// What is wrong with the arguments.
        problem: String,
        /// The program as it was started.
        program: String,
    },

    // ---- data --------------------------------------------------------------------------------

    // ---- parameters and weights --------------------------------------------------------------

    // ---- training ----------------------------------------------------------------------------

    // ---- optimizer and schedule --------------------------------------------------------------

    // ---- communication -----------------------------------------------------------------------

    // ---- launcher ----------------------------------------------------------------------------

    // ---- below us ----------------------------------------------------------------------------
    /// Candle refused an operation.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}
