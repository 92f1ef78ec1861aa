//! Errors concerning output paths.

use crate::util::counted;
use std::path::PathBuf;

/// Errors concerning output paths.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OutputError {
    /// The path cannot be written to, or has content that this run may not replace.
    #[error("cannot write to {}: {problem}; give another path", path.display())]
    Refused {
        /// The file or folder.
        path: PathBuf,
        /// The problem.
        problem: String,
    },
    /// An output path collides with an input path.
    #[error("{output} {} {relation} {input} {}, which is an input; give another path", path.display(), other.display())]
    Input {
        /// The output, as the user names it.
        output: Box<str>,
        /// The path of the output.
        path: PathBuf,
        /// The relation of the two: "is", "contains", "is in", "is a file of".
        relation: &'static str,
        /// The input, as the user names it.
        input: Box<str>,
        /// The path of the input.
        other: PathBuf,
    },
    /// Two output paths collide.
    #[error("{output} {} {relation} {second} {}, but both are outputs; give each its own path",
            path.display(), other.display())]
    Collision {
        /// The first output, as the user names it.
        output: Box<str>,
        /// The path of the first output.
        path: PathBuf,
        /// The relation of the two: "is", "is in", "has the name of a checkpoint file of".
        relation: &'static str,
        /// The second output, as the user names it.
        second: Box<str>,
        /// The path of the second output.
        other: PathBuf,
    },
    /// Another job is writing to the same path.
    #[error(
        "cannot write to {}: another running job is writing there{}; wait for it, or give another path",
        path.display(),
        owner.map_or(String::new(), |pid| format!(" (process {pid})"))
    )]
    Busy {
        /// The file or folder.
        path: PathBuf,
        /// The process of the other job, if the system reports it.
        owner: Option<u32>,
    },
    /// The disk has too little space.
    #[error(
        "{} has room for {}, but {} must be written there; free some space, or give another path",
        path.display(),
        counted(*available, "byte"),
        counted(*needed, "byte")
    )]
    NoSpace {
        /// The folder.
        path: PathBuf,
        /// The number of bytes to be written.
        needed: u64,
        /// The number of bytes available.
        available: u64,
    },
    /// A result could not be written to its path, and was written to a different one.
    #[error("cannot write to {}: {problem}; the result is in {} instead", path.display(), saved.display())]
    SavedElsewhere {
        /// The requested path.
        path: PathBuf,
        /// The problem with that path.
        problem: String,
        /// The path of the result.
        saved: PathBuf,
    },
}
