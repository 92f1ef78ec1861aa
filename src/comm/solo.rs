//! A world of one rank: every collective is the identity. Nothing is sent, so nothing is rounded.

use super::stats::counters::{CommCounters, ReceivedBytes};
use super::{CollectiveKind, CommReport, Communicator, Pending, WireFormat};
use crate::precision::Flat;
use std::time::Duration;

/// The communicator of a job of one rank.
#[derive(Debug, Default)]
pub struct SoloCommunicator {
    counters: CommCounters,
}

impl SoloCommunicator {
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

    fn abort(&self, _why: &str) {}

    fn report(&self) -> CommReport {
        self.counters.report()
    }
}
