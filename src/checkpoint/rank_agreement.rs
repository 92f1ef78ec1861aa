//! The agreement of ranks before a checkpoint is saved or loaded, and the errors if they do not agree.

use crate::comm::Communicator;
use crate::comm::agree::{JointOperationFailure, first_to_differ, rank_failed};
use crate::error::{CheckpointError, Error, without_backtrace};
use std::path::Path;

/// Returns a function that, given the number of the rank that failed, creates the error about `path` for the ranks that
/// succeeded.
pub(crate) fn remote_failure(path: &Path) -> impl FnOnce(usize) -> Error {
    let path = path.to_owned();
    move |rank| Error::from(CheckpointError::Unusable { path, problem: rank_failed(rank) })
}

/// Returns an error unless `word` is the same on all ranks; `kind` names the kind of word in the plural. Collective.
///
/// # Errors
/// Fails on all ranks if their words differ, or if a collective fails.
pub(super) fn same_on_all_ranks(
    comm: &dyn Communicator,
    kind: &str,
    word: &str,
    path: &Path,
) -> Result<(), JointOperationFailure> {
    let Some(rank) = first_to_differ(comm, word)? else { return Ok(()) };
    let word = without_backtrace(word);
    let problem =
        format!("rank {rank} and rank 0 name different {kind}; this rank names {word}; use the same on all ranks");
    Err(JointOperationFailure::InStep(Error::from(CheckpointError::Unusable { path: path.to_owned(), problem })))
}
