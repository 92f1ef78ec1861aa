//! What is wrong with a configuration, and where.

use std::fmt;

/// A place in a text, counted from 1; columns count characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Place {
    /// Line, from 1.
    pub line: usize,
    /// Column in characters, from 1.
    pub column: usize,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}, column {}", self.line, self.column)
    }
}

/// Which kind of rule a [`ConfigProblem`] breaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Rule {
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

impl Rule {
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
    pub rule: Rule,
    /// Path of the key as the file has it, such as `zero_optimization.stage`.
    pub path: String,
    /// Where the key or its value is; `None`: the key is absent, or the source is no text.
    pub place: Option<Place>,
    /// What was found, what is allowed, and the mend.
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
pub(crate) struct Listed<'a>(pub &'a [ConfigProblem]);

impl fmt::Display for Listed<'_> {
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
