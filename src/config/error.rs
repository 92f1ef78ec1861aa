//! The problems of a configuration, and their positions.

use crate::util::counted;
use std::fmt;
use std::path::PathBuf;

/// An error in a configuration.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The configuration file could not be read.
    #[error(
        "cannot read the configuration {}: {source}; give the path of a DeepSpeed JSON file, or JSON text that starts \
         with `{{`",
        path.display()
    )]
    File {
        /// The path that was tried.
        path: PathBuf,
        /// The error of the operating system.
        source: std::io::Error,
    },
    /// The text of a configuration is not Hjson (JSON with comments and other additions, as in DeepSpeed).
    #[error("{origin}: {position}: expected {expected}, found {found}")]
    Syntax {
        /// The file, or "the configuration given as text".
        origin: String,
        /// The position of the error.
        position: TextPosition,
        /// The text that is allowed at this position.
        expected: String,
        /// The text found.
        found: String,
    },
    /// A key occurs twice in one object.
    #[error("{origin}: duplicate key: `{path}` is given twice, at {first} and at {second}; remove one of them")]
    DuplicateKey {
        /// The file, or "the configuration given as text".
        origin: String,
        /// The path of the key.
        path: String,
        /// The position of its first occurrence.
        first: TextPosition,
        /// The position of its second occurrence.
        second: TextPosition,
    },
    /// A configuration can be read but breaks rules. All problems are listed, in file order.
    #[error("{origin}{}", ProblemList(problems))]
    Problems {
        /// The file, "the configuration given as text" or "the configuration given as a value".
        origin: String,
        /// The problems; at least one.
        problems: Vec<ConfigProblem>,
    },
    /// The world size is 0.
    #[error("the world size is 0; a run has at least 1 rank")]
    NoRanks,
    /// A resolved [`Config`](crate::Config) was used with a different number of ranks.
    #[error(
        "the Config was resolved for {}, but the run has {world_size}; load it again from its file or \
         text: the batch keys depend on the number of ranks",
        counted(*resolved, "rank")
    )]
    WorldSize {
        /// The number of ranks that the Config was resolved for.
        resolved: usize,
        /// The number of ranks of this run.
        world_size: usize,
    },
    /// A new batch size does not fit (DeepSpeed's `set_train_batch_size`).
    #[error(
        "train_batch_size {train_batch_size} does not fit train_micro_batch_size_per_gpu {micro_batch} on \
         {}; a positive multiple of {micro_batch} * {world_size} is needed",
        counted(*world_size, "rank")
    )]
    BatchSize {
        /// The requested size.
        train_batch_size: usize,
        /// The number of samples per rank and forward pass.
        micro_batch: usize,
        /// The number of ranks.
        world_size: usize,
    },
    /// The arguments of a script do not give its configuration: `--ds_config` is missing, has no file, or is given
    /// twice.
    #[error("{problem}; run: {program} --ds_config FILE")]
    Argument {
        /// The problem with the arguments.
        problem: String,
        /// The program as it was started.
        program: String,
    },
}

/// A position in a text, counted from 1. Columns count characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TextPosition {
    /// The line, counted from 1.
    pub line: usize,
    /// The column in characters, counted from 1.
    pub column: usize,
}

impl fmt::Display for TextPosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}, column {}", self.line, self.column)
    }
}

/// The kind of rule that a [`ConfigProblem`] breaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ConfigRule {
    /// DeepSpeed has no such key, or not at this path.
    UnknownKey,
    /// A DeepSpeed key is in the wrong section.
    MisplacedKey,
    /// A value has the wrong type.
    Type,
    /// A value is out of bounds, or not one of the allowed words.
    Range,
    /// DeepSpeed's rule for the three batch keys is broken.
    Batch,
    /// A value is `"auto"` where an explicit value is needed.
    Auto,
    /// Two settings exclude each other, or one requires another.
    Conflict,
    /// DeepSpeed 0.19.8 refuses this feature too.
    Removed,
    /// A DeepSpeed feature is not offered by candle-zero, and ignoring it would change training.
    Unsupported,
}

impl ConfigRule {
    /// Returns the kind of rule in words.
    pub fn name(self) -> &'static str {
        match self {
            Self::UnknownKey => "unknown key",
            Self::MisplacedKey => "misplaced key",
            Self::Type => "type",
            Self::Range => "range",
            Self::Batch => "batch",
            Self::Auto => "auto",
            Self::Conflict => "conflict",
            Self::Removed => "removed feature",
            Self::Unsupported => "unsupported",
        }
    }
}

/// One problem of a configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ConfigProblem {
    /// The kind of rule that is broken.
    pub rule: ConfigRule,
    /// The path of the key as written in the file, such as `zero_optimization.stage`.
    pub path: String,
    /// The position of the key or its value; `None` if the key is absent or the source is not text.
    pub position: Option<TextPosition>,
    /// The value found, the allowed values, and the remedy.
    pub message: String,
}

impl fmt::Display for ConfigProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.position {
            Some(position) => write!(f, "{position}: `{}`: {}", self.path, self.message),
            None => write!(f, "`{}`: {}", self.path, self.message),
        }
    }
}

/// The problems of one configuration as a message: a single line for one problem, a list for several.
struct ProblemList<'a>(&'a [ConfigProblem]);

impl fmt::Display for ProblemList<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            [one] => write!(f, ": {one}"),
            more => {
                write!(f, " has {} problems:", more.len())?;
                more.iter().try_for_each(|problem| write!(f, "\n  {problem}"))
            }
        }
    }
}
