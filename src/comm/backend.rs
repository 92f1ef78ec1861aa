//! The backends that run a rank's collectives: shared memory on one host, MPI between hosts.

use super::mpi::HierarchicalCollectives;
use super::shm::collectives;
use super::shm::exchange::{CollectiveThreadKind, ShmExchange};
use super::stats::counters::ReceivedBytes;
use super::wire::format::WireFormat;
use crate::error::CommError;
use crate::precision::Flat;

type Result<T> = std::result::Result<T, CommError>;

/// The backend that runs collectives among all ranks.
pub(super) enum CollectiveBackend {
    /// All ranks are on this host.
    SingleHost(ShmExchange),
    /// The ranks are on several hosts.
    MultiHost(HierarchicalCollectives),
}

impl CollectiveBackend {
    /// Sets the thread that runs the next collective.
    pub(super) fn set_runner(&mut self, runner: CollectiveThreadKind) {
        match self {
            Self::SingleHost(exchange) => exchange.set_runner(runner),
            Self::MultiHost(hierarchical) => hierarchical.set_runner(runner),
        }
    }

    /// Sets the engine call in which the following collectives were launched.
    pub(super) fn set_engine_call(&mut self, call: u64) {
        match self {
            Self::SingleHost(exchange) => exchange.set_engine_call(call),
            Self::MultiHost(hierarchical) => hierarchical.set_engine_call(call),
        }
    }

    /// Returns the bytes received from other ranks in the current collective.
    pub(super) fn bytes(&self) -> ReceivedBytes {
        match self {
            Self::SingleHost(exchange) => exchange.bytes(),
            Self::MultiHost(hierarchical) => hierarchical.bytes(),
        }
    }

    pub(super) fn all_reduce(&mut self, wire: WireFormat, input: Flat, tag: u64) -> Result<Flat> {
        match self {
            Self::SingleHost(exchange) => collectives::all_reduce(exchange, wire, input, tag),
            Self::MultiHost(hierarchical) => hierarchical.run(|hierarchical| hierarchical.all_reduce(wire, input, tag)),
        }
    }

    pub(super) fn reduce_scatter(&mut self, wire: WireFormat, input: Flat, tag: u64) -> Result<Flat> {
        match self {
            Self::SingleHost(exchange) => collectives::reduce_scatter(exchange, wire, input, tag),
            Self::MultiHost(hierarchical) => {
                hierarchical.run(|hierarchical| hierarchical.reduce_scatter(wire, input, tag))
            }
        }
    }

    pub(super) fn all_gather(&mut self, wire: WireFormat, shard: Flat, tag: u64) -> Result<Flat> {
        match self {
            Self::SingleHost(exchange) => collectives::all_gather(exchange, wire, shard, tag),
            Self::MultiHost(hierarchical) => hierarchical.run(|hierarchical| hierarchical.all_gather(wire, shard, tag)),
        }
    }

    pub(super) fn all_gather_within(&mut self, wire: WireFormat, ranks: usize, shard: Flat, tag: u64) -> Result<Flat> {
        match self {
            Self::SingleHost(exchange) => collectives::all_gather_within(exchange, wire, ranks, shard, tag),
            Self::MultiHost(hierarchical) => {
                hierarchical.run(|hierarchical| hierarchical.all_gather_within(wire, ranks, shard, tag))
            }
        }
    }

    pub(super) fn reduce_to_groups(&mut self, wire: WireFormat, ranks: usize, input: Flat, tag: u64) -> Result<Flat> {
        match self {
            Self::SingleHost(exchange) => collectives::reduce_to_groups(exchange, wire, ranks, input, tag),
            Self::MultiHost(hierarchical) => {
                hierarchical.run(|hierarchical| hierarchical.reduce_to_groups(wire, ranks, input, tag))
            }
        }
    }

    pub(super) fn gather_bytes(&mut self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        match self {
            Self::SingleHost(exchange) => collectives::gather_bytes(exchange, bytes),
            Self::MultiHost(hierarchical) => hierarchical.run(|hierarchical| hierarchical.gather_bytes(bytes)),
        }
    }

    pub(super) fn barrier(&mut self) -> Result<()> {
        match self {
            Self::SingleHost(exchange) => collectives::barrier(exchange),
            Self::MultiHost(hierarchical) => hierarchical.run(HierarchicalCollectives::barrier),
        }
    }
}
