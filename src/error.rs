//! The error type of this library. Each module has its own enum, next to the code that returns it; [`Error`] combines
//! them.
//!
//! Every message states what was found, what is allowed and how to fix it, without a full stop at its end.
//!
//! A caller matches only on the variants that it handles:
//!
//! ```
//! use candle_zero::error::{EngineError, Error};
//!
//! fn is_divergence(error: &Error) -> bool {
//!     matches!(error, Error::Engine(EngineError::NonFiniteLoss { .. } | EngineError::NonFiniteGradient { .. }))
//! }
//! # assert!(!is_divergence(&EngineError::Stopped("an earlier error".into()).into()));
//! ```

pub use crate::checkpoint::error::CheckpointError;
pub use crate::comm::error::{CommError, RankEnvError};
pub use crate::config::error::ConfigError;
pub use crate::data::error::DataError;
pub use crate::engine::error::EngineError;
pub use crate::estimate::error::EstimateError;
#[doc(inline)]
pub use crate::files::error::OutputError;
pub use crate::island_server::error::IslandError;
#[doc(inline)]
pub use crate::kernels::error::SimdLevelError;
pub use crate::models::error::ModelError;
pub use crate::monitor::error::MonitorError;
pub use crate::nn::error::LoraError;
pub use crate::offload::error::OffloadError;
pub use crate::optim::error::OptimError;
#[doc(inline)]
pub use crate::param::error::ParamError;
pub use crate::runs::error::RunError;
pub use crate::sweep::error::SweepError;
use std::path::PathBuf;

/// A result whose error type is [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Every error that a user can see, by subject. Broken invariants fail assertions; they are not values of this type.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file or folder could not be read, written or created.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// The attempted action, as a verb ("read", "create", ...).
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The error of the operating system.
        source: std::io::Error,
    },
    /// An output path that cannot be used.
    #[error(transparent)]
    Output(#[from] OutputError),
    /// Candle refused an operation.
    #[error(transparent)]
    Candle(candle_core::Error),
    /// A collective, or the memory that it uses.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// The environment does not describe this process's rank correctly.
    #[error(transparent)]
    RankEnv(#[from] RankEnvError),
    /// A configuration that cannot be read or used.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A parameter that the model asks for, or the file with its initial values.
    #[error(transparent)]
    Param(#[from] ParamError),
    /// An optimizer, a parameter group or a schedule.
    #[error(transparent)]
    Optim(#[from] OptimError),
    /// Offloading to files.
    #[error(transparent)]
    Offload(#[from] OffloadError),
    /// A model or one of its layers.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The settings of low-rank adapters.
    #[error(transparent)]
    Lora(#[from] LoraError),
    /// Training.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The connection of an island to its server.
    #[error(transparent)]
    Island(#[from] IslandError),
    /// An estimate for several hosts.
    #[error(transparent)]
    Estimate(#[from] EstimateError),
    /// Kernels that cannot run as the environment requires.
    #[error(transparent)]
    Kernel(#[from] SimdLevelError),
    /// A checkpoint, of this library or of DeepSpeed.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// Training data.
    #[error(transparent)]
    Data(#[from] DataError),
    /// A monitor or the timeline.
    #[error(transparent)]
    Monitor(#[from] MonitorError),
    /// The record of a run.
    #[error(transparent)]
    Run(#[from] RunError),
    /// The settings or the results of a sweep.
    #[error(transparent)]
    Sweep(#[from] SweepError),
    /// An error from a package or program that builds on this one, such as one from a custom communicator or from
    /// custom initial values. [`Error::other`] creates it, and [`Error::downcast_ref`] returns the original error.
    #[error(transparent)]
    Other(Box<dyn std::error::Error + Send + Sync>),
}

impl Error {
    /// Wraps an error from a package or program that builds on this one.
    pub fn other(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self::Other(error.into())
    }

    /// Returns the error that [`Error::other`] wrapped, if it is an `E`.
    ///
    /// # Errors
    /// Returns this error unchanged if it does not wrap an `E`.
    pub fn downcast<E: std::error::Error + 'static>(self) -> Result<E> {
        match self {
            Self::Other(error) => error.downcast().map(|error| *error).map_err(Self::Other),
            other => Err(other),
        }
    }

    /// Returns the error that [`Error::other`] wrapped, if it is an `E`.
    pub fn downcast_ref<E: std::error::Error + 'static>(&self) -> Option<&E> {
        match self {
            Self::Other(error) => error.downcast_ref(),
            _ => None,
        }
    }
}

/// Returns whether a line is the first frame of a backtrace. Candle appends a backtrace to its messages if
/// RUST_BACKTRACE is set.
#[doc(hidden)]
pub fn begins_backtrace(line: &str) -> bool {
    line.strip_prefix("   ").is_some_and(|frame| frame.trim_start().starts_with("0: "))
}

/// Returns a message without the backtrace that may follow it.
#[doc(hidden)]
pub fn without_backtrace(message: &str) -> String {
    let lines: Vec<&str> = message.lines().take_while(|line| !begins_backtrace(line)).collect();
    lines.join("\n")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::path::{Path, PathBuf};

    /// Returns every `error.rs` in `folder` and below.
    fn files_of_errors(folder: &Path) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        let found = entries.flat_map(|path| match path.is_dir() {
            true => files_of_errors(&path),
            false => vec![path],
        });
        found.filter(|path| path.ends_with("error.rs")).collect()
    }

    /// Returns the texts between the quotes of `#[error("...")]`.
    fn messages(source: &str) -> Vec<&str> {
        let attributes = source.split("\n    #[error(").skip(1);
        let quoted = attributes.filter_map(|rest| rest.trim_start().strip_prefix('"'));
        let end = |text: &str| (1..text.len()).find(|i| text[*i..].starts_with('"') && !text[..*i].ends_with('\\'));
        quoted.map(|text| &text[..end(text).unwrap()]).collect()
    }

    #[test]
    fn messages_are_one_sentence_without_a_full_stop_or_a_gap() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let sources = ["src", "crates/candle-zero-finetune/src", "crates/zerorun/src"];
        let files: Vec<PathBuf> = sources.iter().flat_map(|folder| files_of_errors(&root.join(folder))).collect();
        let sources: Vec<String> = files.iter().map(|file| std::fs::read_to_string(file).unwrap()).collect();
        let messages: Vec<&str> = sources.iter().flat_map(|source| messages(source)).collect();
        assert!(messages.len() > 70, "{}", messages.len());
        let wrong: Vec<_> = messages.iter().filter(|text| text.ends_with('.') || text.contains(". ")).collect();
        assert!(wrong.is_empty(), "{wrong:?}");
        // A line that continues on the next line must end with a backslash.
        let has_gap = |line: &&str| line.trim_start().contains("  ");
        let gaps: Vec<_> = messages.iter().flat_map(|text| text.lines()).filter(has_gap).collect();
        assert!(gaps.is_empty(), "{gaps:?}");
    }
}
