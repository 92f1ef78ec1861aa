//! Errors of places that something is written to.

use std::path::PathBuf;

/// Errors of places that something is written to.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OutputError {
    /// Nothing can be written there, or what is there is not this run's to replace.
    #[error("cannot write to {}: {problem}; give another place", path.display())]
    Refused {
        /// The file or folder.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// An output is where an input is.
    #[error("{output} {} {relation} {input} {}, which is read; give another place", path.display(), other.display())]
    Input {
        /// What is written, as the user names it.
        output: Box<str>,
        /// Where.
        path: PathBuf,
        /// How the two lie: "is", "contains", "lies in".
        relation: &'static str,
        /// What is read, as the user names it.
        input: Box<str>,
        /// Where.
        other: PathBuf,
    },
    /// Two outputs are in each other's way.
    #[error("{output} {} {relation} {second} {}, and both are written; give each a place of its own",
            path.display(), other.display())]
    Collision {
        /// What is written, as the user names it.
        output: Box<str>,
        /// Where.
        path: PathBuf,
        /// How the two lie: "is", "lies in", "has the name of a file of".
        relation: &'static str,
        /// What is written too.
        second: Box<str>,
        /// Where.
        other: PathBuf,
    },
    /// Another job writes there.
    #[error(
        "cannot write to {}: another job that is running writes there{}; let it end, or give another place",
        path.display(),
        owner.map_or(String::new(), |pid| format!(" (process {pid})"))
    )]
    Busy {
        /// The file or folder.
        path: PathBuf,
        /// The other job's process, if the system tells it.
        owner: Option<u32>,
    },
    /// The disk has too little room.
    #[error(
        "{} has room for {available} bytes, and {needed} are written there; free some, or give another place",
        path.display()
    )]
    NoSpace {
        /// The folder.
        path: PathBuf,
        /// Bytes that will be written.
        needed: u64,
        /// Bytes that can be written.
        available: u64,
    },
    /// A result could not be written to its place, and is in another.
    #[error("cannot write to {}: {problem}; so that nothing is lost, the result is in {}", path.display(), saved.display())]
    Elsewhere {
        /// The place that was asked for.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
        /// The place where it is.
        saved: PathBuf,
    },
}
