//! How far a rank's collectives reach.

use super::collectives;
use super::counters::Taken;
use super::encoding::Wire;
use super::exchange::{Exchange, Runner};
use super::mpi::Tiers;
use crate::error::CommError;
use crate::precision::Flat;

type Result<T> = std::result::Result<T, CommError>;

/// The means to run collectives among all ranks.
pub(super) enum Reach {
    /// All are on this host.
    Host(Exchange),
    /// They are on several hosts.
    Hosts(Tiers),
}

impl Reach {
    /// Who runs the next collective.
    pub(super) fn run_by(&mut self, runner: Runner) {
        match self {
            Self::Host(exchange) => exchange.run_by(runner),
            Self::Hosts(tiers) => tiers.run_by(runner),
        }
    }

    /// The coming collectives were launched in `call`.
    pub(super) fn called_in(&mut self, call: u64) {
        match self {
            Self::Host(exchange) => exchange.called_in(call),
            Self::Hosts(tiers) => tiers.called_in(call),
        }
    }

    /// Bytes from other ranks in the present collective.
    pub(super) fn bytes(&self) -> Taken {
        match self {
            Self::Host(exchange) => exchange.bytes(),
            Self::Hosts(tiers) => tiers.bytes(),
        }
    }

    pub(super) fn all_reduce(&mut self, wire: Wire, input: Flat, tag: u64) -> Result<Flat> {
        match self {
            Self::Host(exchange) => collectives::all_reduce(exchange, wire, input, tag),
            Self::Hosts(tiers) => tiers.run(|tiers| tiers.all_reduce(wire, input, tag)),
        }
    }

    pub(super) fn reduce_scatter(&mut self, wire: Wire, input: Flat, tag: u64) -> Result<Flat> {
        match self {
            Self::Host(exchange) => collectives::reduce_scatter(exchange, wire, input, tag),
            Self::Hosts(tiers) => tiers.run(|tiers| tiers.reduce_scatter(wire, input, tag)),
        }
    }

    pub(super) fn all_gather(&mut self, wire: Wire, shard: Flat, tag: u64) -> Result<Flat> {
        match self {
            Self::Host(exchange) => collectives::all_gather(exchange, wire, shard, tag),
            Self::Hosts(tiers) => tiers.run(|tiers| tiers.all_gather(wire, shard, tag)),
        }
    }

    pub(super) fn all_gather_within(&mut self, wire: Wire, ranks: usize, shard: Flat, tag: u64) -> Result<Flat> {
        match self {
            Self::Host(exchange) => collectives::all_gather_within(exchange, wire, ranks, shard, tag),
            Self::Hosts(tiers) => tiers.run(|tiers| tiers.all_gather_within(wire, ranks, shard, tag)),
        }
    }

    pub(super) fn reduce_to_groups(&mut self, wire: Wire, ranks: usize, input: Flat, tag: u64) -> Result<Flat> {
        match self {
            Self::Host(exchange) => collectives::reduce_to_groups(exchange, wire, ranks, input, tag),
            Self::Hosts(tiers) => tiers.run(|tiers| tiers.reduce_to_groups(wire, ranks, input, tag)),
        }
    }

    pub(super) fn gather_bytes(&mut self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        match self {
            Self::Host(exchange) => collectives::gather_bytes(exchange, bytes),
            Self::Hosts(tiers) => tiers.run(|tiers| tiers.gather_bytes(bytes)),
        }
    }

    pub(super) fn barrier(&mut self) -> Result<()> {
        match self {
            Self::Host(exchange) => collectives::barrier(exchange),
            Self::Hosts(tiers) => tiers.run(Tiers::barrier),
        }
    }
}
