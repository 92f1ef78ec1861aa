//! A world of one rank: every collective is the identity. Nothing is sent, so nothing is rounded.

use super::joined_rank::JoinedRank;
use super::stats::counters::{CommCounters, ReceivedBytes};
use super::{CollectiveKind, CommReport, Communicator, Pending, WireFormat};
use crate::error::{CommError, Result};
use crate::precision::Flat;
use std::sync::Arc;
use std::time::Duration;

/// The communicator of a job of one rank, or of a group of one rank.
#[derive(Default)]
pub struct SoloCommunicator {
    counters: CommCounters,
    /// This rank's membership in a job of several ranks, in which it is the only member of its group.
    job: Option<Arc<JoinedRank>>,
}

impl SoloCommunicator {
    /// Returns the communicator of a group of one rank.
    pub(super) fn in_job(presence: Arc<JoinedRank>) -> Self {
        Self { counters: CommCounters::default(), job: Some(presence) }
    }

    fn count<T: Send + 'static>(&self, kind: CollectiveKind, elements: usize, value: T) -> Pending<T> {
        self.counters.add(kind, elements, ReceivedBytes::default(), Duration::ZERO);
        Pending::ready(value)
    }
}

impl Communicator for SoloCommunicator {
    fn rank(&self) -> usize {
        0
    }

    fn size(&self) -> usize {
        1
    }

    fn all_reduce_as(&self, _wire: WireFormat, input: Flat, _tag: u64) -> Pending<Flat> {
        self.count(CollectiveKind::AllReduce, input.len(), input)
    }

    fn reduce_scatter_as(&self, _wire: WireFormat, input: Flat, _tag: u64) -> Pending<Flat> {
        self.count(CollectiveKind::ReduceScatter, input.len(), input)
    }

    fn all_gather_as(&self, _wire: WireFormat, shard: Flat, _tag: u64) -> Pending<Flat> {
        self.count(CollectiveKind::AllGather, shard.len(), shard)
    }

    fn all_gather_within_as(&self, _wire: WireFormat, _ranks: usize, shard: Flat, _tag: u64) -> Pending<Flat> {
        self.count(CollectiveKind::AllGather, shard.len(), shard)
    }

    fn reduce_to_groups_as(&self, _wire: WireFormat, _ranks: usize, input: Flat, _tag: u64) -> Pending<Flat> {
        self.count(CollectiveKind::ReduceScatter, input.len(), input)
    }

    fn gather_bytes(&self, bytes: Vec<u8>) -> Pending<Vec<Vec<u8>>> {
        self.count(CollectiveKind::Control, CollectiveKind::control_elements(&bytes), vec![bytes])
    }

    fn barrier(&self) -> Pending<()> {
        self.count(CollectiveKind::Barrier, 0, ())
    }

    fn abort(&self, why: &str) {
        self.job.iter().for_each(|presence| presence.abort_signal().abort(why));
    }

    fn in_job(&self, _: usize) -> usize {
        self.job.as_ref().map_or(0, |presence| presence.rank())
    }

    fn group(&self, groups: &[Vec<usize>]) -> Result<Arc<dyn Communicator>> {
        let expected = groups.iter().flatten().eq([&0]);
        let why = || format!("this communicator has one rank; pass [[0]] instead of {groups:?}");
        let group = Self { counters: CommCounters::default(), job: self.job.clone() };
        if expected { Ok(Arc::new(group)) } else { Err(CommError::Groups { rank: self.in_job(0), why: why() }.into()) }
    }

    fn failure(&self) -> Option<CommError> {
        self.job.as_ref()?.failure("an operation outside this communicator")
    }

    fn timeout(&self) -> Duration {
        self.job.as_ref().map_or(Duration::from_secs(600), |presence| presence.timeout())
    }

    fn report(&self) -> CommReport {
        self.counters.report()
    }
}
