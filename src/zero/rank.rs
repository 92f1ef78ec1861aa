//! One rank, as the decisions of a training step see it.
//!
//! What decides is written once, over [`Rank`]; who carries it out is the engine's [`Core`], or the rehearsal of
//! [`crate::estimate`], which has sizes in the place of values and counts what travels. What either does with values
//! stands, as a trait `Carrier`, beside the decisions: in `gather.rs`, `gradients.rs`, `walk.rs` and `publish.rs`.

use super::core::Core;
use super::sub_group::SubGroup;
use crate::comm::{Kind as Collective, Pending, Wire};
use crate::config::ZeroConfig;
use crate::error::Result;
use crate::layout::Placement;
use crate::memory::{Ledger, Tracked};
use crate::offload::{Files, Io, Windows};
use crate::param::{Param, ParamId, lock};
use crate::precision::{Elements, Flat};
use candle_core::DType;
use std::sync::MutexGuard;

/// A rank that trains, or rehearses it.
pub(crate) trait Rank: Sized {
    /// Elements in memory.
    type Buffer: Elements;
    /// A collective under way.
    type Pending;
    /// Where states lie that are not in memory.
    type Files: Files<Memory = Tracked<Self::Buffer>>;
    /// All parameters.
    fn params(&self) -> &[Param];
    fn zero(&self) -> &ZeroConfig;
    /// The model's dtype.
    fn dtype(&self) -> DType;
    fn world_size(&self) -> usize;
    /// The number of this rank.
    fn rank(&self) -> usize;
    fn ledger(&self) -> &Ledger;
    /// This rank's share.
    fn groups(&self) -> MutexGuard<'_, Vec<SubGroup<Self>>>;
    /// Sub-group and slot of a parameter.
    fn place(&self, param: ParamId) -> (usize, usize);
    fn files(&self) -> Option<&Self::Files>;
    /// How a pass goes through files.
    fn windows(&self) -> Windows;
    /// Begins an all-reduce, a reduce-scatter or an all-gather of what belongs to `params`.
    fn collective(&self, kind: Collective, wire: Wire, buffer: Self::Buffer, params: &[ParamId]) -> Self::Pending;
    /// Waits for its result, which lies in the memory of its argument.
    fn wait(&self, pending: Self::Pending) -> Result<Self::Buffer>;
    /// A few numbers of every rank, in rank order.
    fn gather_f64(&self, values: Vec<f64>) -> Result<Vec<Vec<f64>>>;

    /// What is sharded.
    fn placement(&self) -> Placement {
        self.zero().stage.placement()
    }

    /// Parameters that travel together, for people.
    fn names(&self, params: &[ParamId]) -> String {
        match params {
            [] => String::new(),
            [param] => self.params()[*param].name.clone(),
            [first, rest @ ..] => format!("{} + {}", self.params()[*first].name, rest.len()),
        }
    }
}

/// A place in a file.
pub(crate) type ExtentOf<R> = <<R as Rank>::Files as Files>::Extent;

/// Memory of a window of the optimizer step.
pub(crate) type StagingOf<R> = <<R as Rank>::Files as Files>::Staging;

impl Rank for Core {
    type Buffer = Flat;
    type Pending = Pending<Flat>;
    type Files = Io;

    fn params(&self) -> &[Param] {
        &self.params
    }

    fn zero(&self) -> &ZeroConfig {
        &self.zero
    }

    fn dtype(&self) -> DType {
        self.dtype
    }

    fn world_size(&self) -> usize {
        self.comm.size()
    }

    fn rank(&self) -> usize {
        self.comm.rank()
    }

    fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    fn groups(&self) -> MutexGuard<'_, Vec<SubGroup>> {
        lock(&self.groups)
    }

    fn place(&self, param: ParamId) -> (usize, usize) {
        self.places[param]
    }

    fn files(&self) -> Option<&Io> {
        self.offload.as_ref().map(|offload| &offload.io)
    }

    fn windows(&self) -> Windows {
        self.offload.as_ref().map_or_else(Windows::default, |offload| offload.windows())
    }

    fn collective(&self, kind: Collective, wire: Wire, buffer: Flat, params: &[ParamId]) -> Pending<Flat> {
        let tag = self.tag(params);
        match kind {
            Collective::AllReduce => self.comm.all_reduce_as(wire, buffer, tag),
            Collective::ReduceScatter => self.comm.reduce_scatter_as(wire, buffer, tag),
            Collective::AllGather => self.comm.all_gather_as(wire, buffer, tag),
            Collective::Control | Collective::Barrier => unreachable!("no buffers travel in these"),
        }
    }

    fn wait(&self, pending: Pending<Flat>) -> Result<Flat> {
        pending.wait()
    }

    fn gather_f64(&self, values: Vec<f64>) -> Result<Vec<Vec<f64>>> {
        self.comm.gather_f64(values).wait()
    }
}
