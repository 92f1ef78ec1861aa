//! The problems of a configuration, and their places.

use crate::util::counted;
use std::fmt;
use std::path::PathBuf;

/// Errors of configurations.
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
        /// The system's reason.
        source: std::io::Error,
    },
    /// The text of a configuration is no JSON (comments and trailing commas are allowed, as in DeepSpeed).
    #[error("{origin}: {place}: expected {expected}, found {found}")]
    Syntax {
        /// The file, or "the configuration text".
        origin: String,
        /// Where.
        place: TextPosition,
        /// The allowed values.
        expected: String,
        /// The value found.
        found: String,
    },
    /// A key stands twice in one object.
    #[error("{origin}: duplicate key: `{path}` is given twice: {first} and {second}; remove one of them")]
    DuplicateKey {
        /// The file, or "the configuration text".
        origin: String,
        /// Path of the key.
        path: String,
        /// Its first place.
        first: TextPosition,
        /// Its second place.
        second: TextPosition,
    },
    /// A configuration that can be read, but breaks rules; all of them are listed, in file order.
    #[error("{origin}{}", ProblemList(problems))]
    Problems {
        /// The file, "the configuration text" or "the configuration value".
        origin: String,
        /// The problems; at least one.
        problems: Vec<ConfigProblem>,
    },
    /// A run of no ranks was asked for.
    #[error("the world size is 0; a run has at least 1 rank")]
    NoRanks,
    /// A resolved [`Config`](crate::Config) was used with another number of ranks.
    #[error(
        "the Config was resolved for {}, but the run has {world_size}; load it again from its file or \
         text: the batch keys depend on the number of ranks",
        counted(*resolved, "rank")
    )]
    WorldSize {
        /// Ranks that the Config was resolved for.
        resolved: usize,
        /// Ranks of this run.
        world_size: usize,
    },
    /// A new batch size does not fit (DeepSpeed's `set_train_batch_size`).
    #[error(
        "train_batch_size {train_batch_size} does not fit train_micro_batch_size_per_gpu {micro_batch} on \
         {}; a positive multiple of {micro_batch} * {world_size} is needed",
        counted(*world_size, "rank")
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
    #[error("{problem}; start it as: {program} --ds_config FILE")]
    Argument {
        /// The problem with the arguments.
        problem: String,
        /// The program as it was started.
        program: String,
    },
}

/// A place in a text, counted from 1; columns count characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TextPosition {
    /// Line, from 1.
    pub line: usize,
    /// Column in characters, from 1.
    pub column: usize,
}

impl fmt::Display for TextPosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}, column {}", self.line, self.column)
    }
}

/// Which kind of rule a [`ConfigProblem`] breaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ConfigRule {
    /// DeepSpeed has no such key, or not in this place.
    UnknownKey,
    /// A DeepSpeed key in the wrong section.
    MisplacedKey,
    /// The wrong kind of value.
    Type,
    /// A value outside its bounds, or not among the allowed words.
    Range,
    /// DeepSpeed's rule of the three batch keys.
    Batch,
    /// `"auto"` where a value is needed.
    Auto,
    /// Two settings that exclude one another, or one that needs another.
    Conflict,
    /// A feature that DeepSpeed 0.19.8 refuses too.
    Removed,
    /// A DeepSpeed feature that is not offered here and whose silent loss would change training.
    Unsupported,
}

impl ConfigRule {
    /// The kind of rule in words.
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

/// One thing that is wrong with a configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigProblem {
    /// Which kind of rule is broken.
    pub rule: ConfigRule,
    /// Path of the key as the file has it, such as `zero_optimization.stage`.
    pub path: String,
    /// Where the key or its value is; `None`: the key is absent, or the source is no text.
    pub place: Option<TextPosition>,
    /// The value found, the allowed values, and how to fix it.
    pub message: String,
}

impl fmt::Display for ConfigProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.place {
            Some(place) => write!(f, "{place}: `{}`: {}", self.path, self.message),
            None => write!(f, "`{}`: {}", self.path, self.message),
        }
    }
}

/// The problems of one configuration as a message: one line for one, a list for more.
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
