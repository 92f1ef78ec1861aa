//! Errors between islands and their server.

use std::path::PathBuf;

/// Errors between islands and their server.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum IslandError {
    /// The server cannot be reached.
    #[error(
        "cannot reach the island server at {address}: {why}; start it with `zerorun island-server`, or correct \
         local_steps.server (zerorun --island_server)"
    )]
    Unreachable {
        /// The address, as it was given.
        address: String,
        /// The system's reason.
        why: String,
    },
    /// The program at the server's address is not an island server.
    #[error(
        "the program at {address} is not an island server: {why}; correct local_steps.server (zerorun \
         --island_server)"
    )]
    NoServer {
        /// The address, as it was given.
        address: String,
        /// The evidence.
        why: String,
    },
    /// The connection to the server is lost.
    #[error(
        "lost the island server at {address}: {why}; with zerorun --max_restarts, the island resumes from its \
         checkpoint when the server runs again"
    )]
    Lost {
        /// The address, as it was given.
        address: String,
        /// The evidence.
        why: String,
    },
    /// The server has removed this island from the run, or does not admit it.
    #[error("the island server at {address} refuses this island: {why}")]
    Refused {
        /// The address, as it was given.
        address: String,
        /// The server's reason, and what to do.
        why: String,
    },
    /// The server cannot listen.
    #[error("cannot listen on {address}: {why}; give another --bind or --port")]
    Listen {
        /// The address.
        address: String,
        /// The system's reason.
        why: String,
    },
    /// The record of a run cannot be written or read.
    #[error("the record {} cannot be used: {why}", path.display())]
    Record {
        /// The file.
        path: PathBuf,
        /// The problem, and what to do.
        why: String,
    },
}
