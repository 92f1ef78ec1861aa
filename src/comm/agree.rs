//! Agreement between ranks: whether all succeeded, whether all hold the same value, and which value each of them holds.

use super::Communicator;
use super::default_collectives::of_equal_length;
use crate::error::{Error, Result};
use crate::util::fnv1a;

/// The failure of an operation that all ranks perform together.
#[derive(Debug)]
pub(crate) enum JointOperationFailure {
    /// Communication failed, or only this rank gave up: the ranks are out of step.
    OutOfStep(Error),
    /// One rank failed, and all ranks have been notified: they are in step and can continue.
    InStep(Error),
}

impl From<Error> for JointOperationFailure {
    fn from(error: Error) -> Self {
        Self::OutOfStep(error)
    }
}

const FAILED_ON_THAT_RANK: &str = " failed; see its error for the cause";

/// Returns the error text for a rank that succeeded while `rank` failed.
pub(crate) fn rank_failed(rank: usize) -> String {
    format!("rank {rank}{FAILED_ON_THAT_RANK}")
}

/// Returns the rank that a message created by [`rank_failed`] names.
#[doc(hidden)]
pub fn rank_pointed_at(message: &str) -> Option<usize> {
    let (before, _) = message.split_once(FAILED_ON_THAT_RANK)?;
    before.rsplit_once("rank ")?.1.parse().ok()
}

/// Collective: returns the value of `own` if all ranks have one. If this rank has one and another rank does not,
/// `elsewhere` creates the error, given the job-wide number of the first such rank.
///
/// # Errors
/// Fails with [`JointOperationFailure::InStep`] on all ranks if one has no value, or with
/// [`JointOperationFailure::OutOfStep`] if the collective failed.
pub(crate) fn agree<T>(
    comm: &dyn Communicator,
    own: Result<T>,
    elsewhere: impl FnOnce(usize) -> Error,
) -> Result<T, JointOperationFailure> {
    let failed = comm.gather_bytes(vec![u8::from(own.is_err())]).wait()?;
    match (own, failed.iter().position(|flag| *flag != [0])) {
        (Ok(_), Some(rank)) => Err(JointOperationFailure::InStep(elsewhere(comm.in_job(rank)))),
        (own, _) => own.map_err(JointOperationFailure::InStep),
    }
}

/// Collective: returns the first rank whose `text` differs from that of rank 0. Texts are compared by hash.
///
/// # Errors
/// Fails if the collective fails.
pub(crate) fn first_to_differ(comm: &dyn Communicator, text: &str) -> Result<Option<usize>> {
    let all = gather_u64(comm, &[fnv1a(text.as_bytes())])?;
    Ok(all.iter().position(|other| *other != all[0]))
}

/// Collective: returns the `text` of rank 0. Texts may differ in length.
///
/// # Errors
/// Fails if a collective fails.
pub(crate) fn text_of_rank_0(comm: &dyn Communicator, text: &str) -> Result<String> {
    Ok(texts(comm, if comm.rank() == 0 { text } else { "" })?.swap_remove(0))
}

/// Collective: returns the `text` of every rank, in rank order. Texts may differ in length.
///
/// # Errors
/// Fails if a collective fails.
pub(crate) fn texts(comm: &dyn Communicator, text: &str) -> Result<Vec<String>> {
    let all = byte_strings(comm, text.as_bytes().to_vec())?;
    Ok(all.iter().map(|bytes| String::from_utf8_lossy(bytes).into()).collect())
}

/// Collective: returns the `bytes` of every rank, in rank order. They may differ in length.
///
/// # Errors
/// Fails if a collective fails.
pub(crate) fn byte_strings(comm: &dyn Communicator, mut bytes: Vec<u8>) -> Result<Vec<Vec<u8>>> {
    let lengths = gather_u64(comm, &[bytes.len() as u64])?;
    let longest = lengths.iter().map(|length| length[0]).max().unwrap_or(0);
    bytes.resize(longest as usize, 0);
    let mut all = gather(comm, bytes)?;
    all.iter_mut().zip(&lengths).for_each(|(bytes, length)| bytes.truncate(length[0] as usize));
    Ok(all)
}

/// Collective: returns the number of ranks on each host, in the order of the hosts.
///
/// # Errors
/// Fails if the collective fails.
#[doc(hidden)]
pub fn ranks_per_host(comm: &dyn Communicator) -> Result<Vec<usize>> {
    let firsts = gather_u64(comm, &[comm.ranks_here().start as u64])?;
    Ok(firsts.chunk_by(|a, b| a == b).map(<[_]>::len).collect())
}

/// Collective: returns the `bytes` of every rank, in rank order. All ranks pass the same number of bytes.
///
/// # Errors
/// Fails if the collective fails.
pub(crate) fn gather(comm: &dyn Communicator, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>> {
    Ok(of_equal_length(comm.gather_bytes(bytes).wait()?, comm.size(), comm.rank())?)
}

/// Collective: returns the `numbers` of every rank, in rank order. All ranks pass lists of the same length.
///
/// # Errors
/// Fails if the collective fails.
pub(crate) fn gather_u64(comm: &dyn Communicator, numbers: &[u64]) -> Result<Vec<Vec<u64>>> {
    let bytes = numbers.iter().flat_map(|n| n.to_le_bytes()).collect();
    let all = gather(comm, bytes)?;
    let numbers = |bytes: &Vec<u8>| bytes.as_chunks::<8>().0.iter().map(|n| u64::from_le_bytes(*n)).collect();
    Ok(all.iter().map(numbers).collect())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::comm::threads;
    use crate::error::{EngineError, ParamError};

    fn on_three<T: Send>(rank: impl Fn(&dyn Communicator) -> Result<T> + Sync) -> Vec<T> {
        threads::run(3, |comm| rank(&*comm)).unwrap().into_iter().map(|r| r.unwrap()).collect()
    }

    #[test]
    fn where_one_rank_fails_all_learn_it_and_are_in_step() {
        let results = on_three(|comm| {
            let own = if comm.rank() == 1 { Err(ParamError::NoParameters.into()) } else { Ok(comm.rank()) };
            let agreed = agree(comm, own, |rank| Error::from(EngineError::Stopped(format!("rank {rank}"))));
            comm.barrier().wait()?;
            Ok(match agreed {
                Err(JointOperationFailure::InStep(Error::Param(ParamError::NoParameters))) => "own".to_string(),
                Err(JointOperationFailure::InStep(Error::Engine(EngineError::Stopped(why)))) => why,
                other => panic!("{other:?}"),
            })
        });
        assert_eq!(results, ["rank 1", "own", "rank 1"]);
        assert_eq!(on_three(|comm| Ok(agree(comm, Ok(comm.rank()), |_| unreachable!()).unwrap())), [0, 1, 2]);
    }

    #[test]
    fn a_message_that_points_at_a_rank_is_told_from_others() {
        assert_eq!(rank_pointed_at(&format!("error: cannot write x: {}", rank_failed(12))), Some(12));
        for other in ["rank 3 failed", "rank x failed; see its error for the cause", "error: no space"] {
            assert_eq!(rank_pointed_at(other), None, "{other}");
        }
    }

    #[test]
    fn numbers_arrive_exactly_and_texts_of_any_length() {
        let numbers = |rank: u64| vec![u64::MAX - rank, 1 << 53 | 1];
        for all in on_three(|comm| gather_u64(comm, &numbers(comm.rank() as u64))) {
            assert_eq!(all, [numbers(0), numbers(1), numbers(2)]);
        }
        for texts in [["a", "longer", ""], ["long", "", "a"]] {
            let got = on_three(|comm| text_of_rank_0(comm, texts[comm.rank()]));
            assert_eq!(got, [texts[0]; 3]);
            for all in on_three(|comm| super::texts(comm, texts[comm.rank()])) {
                assert_eq!(all, texts);
            }
        }
        assert_eq!(on_three(|comm| first_to_differ(comm, "same")), [None; 3]);
        let differing = on_three(|comm| first_to_differ(comm, if comm.rank() == 2 { "other" } else { "same" }));
        assert_eq!(differing, [Some(2); 3]);
    }
}
