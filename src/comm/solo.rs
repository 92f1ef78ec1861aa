//! A world of one rank: every collective is the identity. Nothing travels, so nothing is rounded for it.

use super::counters::{Counters, Taken};
use super::{CommReport, Communicator, Kind, Pending, Wire};
use crate::precision::Flat;
use std::time::Duration;

/// The communicator of a job of one rank.
#[derive(Debug, Default)]
pub struct Solo {
    counters: Counters,
}

impl Solo {
    fn count<T: Send + 'static>(&self, kind: Kind, elements: usize, value: T) -> Pending<T> {
        self.counters.add(kind, elements, Taken::default(), Duration::ZERO);
        Pending::ready(value)
    }
}

impl Communicator for Solo {
    fn rank(&self) -> usize {
        0
    }

    fn size(&self) -> usize {
        1
    }

    fn all_reduce_as(&self, _wire: Wire, input: Flat, _tag: u64) -> Pending<Flat> {
        self.count(Kind::AllReduce, input.len(), input)
    }

    fn reduce_scatter_as(&self, _wire: Wire, input: Flat, _tag: u64) -> Pending<Flat> {
        self.count(Kind::ReduceScatter, input.len(), input)
    }

    fn all_gather_as(&self, _wire: Wire, shard: Flat, _tag: u64) -> Pending<Flat> {
        self.count(Kind::AllGather, shard.len(), shard)
    }

    fn all_gather_within_as(&self, _wire: Wire, _ranks: usize, shard: Flat, _tag: u64) -> Pending<Flat> {
        self.count(Kind::AllGather, shard.len(), shard)
    }

    fn reduce_to_groups_as(&self, _wire: Wire, _ranks: usize, input: Flat, _tag: u64) -> Pending<Flat> {
        self.count(Kind::ReduceScatter, input.len(), input)
    }

    fn gather_bytes(&self, bytes: Vec<u8>) -> Pending<Vec<Vec<u8>>> {
        self.count(Kind::Control, Kind::words(&bytes), vec![bytes])
    }

    fn barrier(&self) -> Pending<()> {
        self.count(Kind::Barrier, 0, ())
    }

    fn abort(&self, _why: &str) {}

    fn report(&self) -> CommReport {
        self.counters.report()
    }
}
