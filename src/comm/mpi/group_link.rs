//! MPI messages among the ranks of the job or of one of its groups. Ranks are counted from 0 within the job or the
//! group.

use super::link::{MessageTag, MpiLink, MpiTransfer};
use crate::error::CommError;
use std::sync::Arc;

/// The link of a rank to the other ranks of its group. Messages of different channels are kept apart.
#[derive(Clone)]
pub(super) struct GroupLink {
    link: Arc<MpiLink>,
    /// The members' numbers in the job, in ascending order; `None` for all ranks.
    members: Option<Arc<[usize]>>,
    channel: usize,
}

impl GroupLink {
    /// Returns the link to all ranks of the job.
    pub(super) fn of_job(link: Arc<MpiLink>) -> Self {
        Self { link, members: None, channel: 0 }
    }

    /// Returns the link to the ranks `members` of the job, which use `channel`.
    pub(super) fn of_group(link: Arc<MpiLink>, members: Arc<[usize]>, channel: usize) -> Self {
        Self { link, members: Some(members), channel }
    }

    /// Returns this rank's position in the group.
    pub(super) fn rank(&self) -> usize {
        let rank = self.link.rank();
        self.members.as_ref().map_or(rank, |members| members.partition_point(|member| *member < rank))
    }

    /// Returns the job-wide number of a rank of the group.
    pub(super) fn in_job(&self, rank: usize) -> usize {
        self.members.as_ref().map_or(rank, |members| members[rank])
    }

    /// Begins to send a message.
    pub(super) fn send(&self, to: usize, tag: MessageTag, bytes: Vec<u8>) -> Result<MpiTransfer, CommError> {
        self.link.send_on(self.channel, self.in_job(to), tag, bytes)
    }

    /// Begins to receive `len` bytes.
    pub(super) fn receive(&self, from: usize, tag: MessageTag, len: usize) -> Result<MpiTransfer, CommError> {
        self.link.receive_on(self.channel, self.in_job(from), tag, len)
    }
}
