//! The error type of the library. Each module has a small enum of its own beside the code that raises it; [`Error`]
//! joins them.
//!
//! Every message says what was found, what is allowed and how to fix it, without a full stop at its end.
//!
//! A caller matches on the kind that matters to it:
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
pub use crate::files::error::OutputError;
pub use crate::finetune::error::FinetuneError;
#[cfg(feature = "hub")]
pub use crate::hub::error::HubError;
pub use crate::kernels::error::KernelError;
#[cfg(feature = "cli")]
pub use crate::launch::error::LaunchError;
#[cfg(feature = "cli")]
pub use crate::launch::hosts::error::HostsError;
pub use crate::models::error::ModelError;
pub use crate::monitor::error::MonitorError;
pub use crate::nn::error::LoraError;
pub use crate::offload::error::OffloadError;
pub use crate::optim::error::OptimError;
pub use crate::param::error::ParamError;
#[cfg(feature = "cli")]
pub use crate::tools::error::ToolError;
use std::path::PathBuf;

/// Result with [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything that a user can meet. Broken invariants are assertions, not values of this type.
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
        /// The system's reason.
        source: std::io::Error,
    },
    /// A place that something is to be written to.
    #[error(transparent)]
    Output(#[from] OutputError),
    /// Candle refused an operation.
    #[error(transparent)]
    Candle(candle_core::Error),
    /// A collective failed, or the memory that carries it.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// The environment does not tell this process its rank.
    #[error(transparent)]
    RankEnv(#[from] RankEnvError),
    /// A configuration that cannot be read or used.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A parameter that the model asks for, or the file that it begins with.
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
    /// An estimate, of several hosts.
    #[error(transparent)]
    Estimate(#[from] EstimateError),
    /// Fine-tuning: a model's folder, its tokenizer and template, data.
    #[error(transparent)]
    Finetune(#[from] FinetuneError),
    /// A model from the Hugging Face Hub.
    #[cfg(feature = "hub")]
    #[error(transparent)]
    Hub(#[from] HubError),
    /// The kernels cannot run as the environment says.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// A checkpoint, of this library or of DeepSpeed.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// Training data.
    #[error(transparent)]
    Data(#[from] DataError),
    /// A monitor or the timeline.
    #[error(transparent)]
    Monitor(#[from] MonitorError),
    /// The launcher.
    #[cfg(feature = "cli")]
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// A command of zerorun.
    #[cfg(feature = "cli")]
    #[error(transparent)]
    Tool(#[from] ToolError),
}

#[cfg(feature = "cli")]
impl From<HostsError> for Error {
    fn from(error: HostsError) -> Self {
        Self::Launch(LaunchError::Hosts(error))
    }
}

/// Whether a line is the first frame of a backtrace. Candle appends one to its messages where RUST_BACKTRACE is set.
pub(crate) fn begins_backtrace(line: &str) -> bool {
    line.strip_prefix("   ").is_some_and(|frame| frame.trim_start().starts_with("0: "))
}

/// A message without the backtrace that may follow it.
pub(crate) fn without_backtrace(message: &str) -> String {
    let lines: Vec<&str> = message.lines().take_while(|line| !begins_backtrace(line)).collect();
    lines.join("\n")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::path::{Path, PathBuf};

    /// Every `error.rs` of `folder` and below.
    fn files_of_errors(folder: &Path) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        let found = entries.flat_map(|path| match path.is_dir() {
            true => files_of_errors(&path),
            false => vec![path],
        });
        found.filter(|path| path.ends_with("error.rs")).collect()
    }

    /// The texts between the quotes of `#[error("...")]`.
    fn messages(source: &str) -> Vec<&str> {
        let attributes = source.split("\n    #[error(").skip(1);
        let quoted = attributes.filter_map(|rest| rest.trim_start().strip_prefix('"'));
        let end = |text: &str| (1..text.len()).find(|i| text[*i..].starts_with('"') && !text[..*i].ends_with('\\'));
        quoted.map(|text| &text[..end(text).unwrap()]).collect()
    }

    #[test]
    fn messages_are_one_sentence_without_a_full_stop_or_a_gap() {
        let files = files_of_errors(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"));
        let sources: Vec<String> = files.iter().map(|file| std::fs::read_to_string(file).unwrap()).collect();
        let messages: Vec<&str> = sources.iter().flat_map(|source| messages(source)).collect();
        assert!(messages.len() > 70, "{}", messages.len());
        let wrong: Vec<_> = messages.iter().filter(|text| text.ends_with('.') || text.contains(". ")).collect();
        assert!(wrong.is_empty(), "{wrong:?}");
        // Where a line goes on in the next one, a backslash stands at its end.
        let has_gap = |line: &&str| line.trim_start().contains("  ");
        let gaps: Vec<_> = messages.iter().flat_map(|text| text.lines()).filter(has_gap).collect();
        assert!(gaps.is_empty(), "{gaps:?}");
    }
}
