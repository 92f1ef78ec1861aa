//! Updated weights: from the shard of the rank that owns them to all ranks, where parameters are whole.

use super::batch::{Batcher, IN_FLIGHT};
use super::core::Core;
use super::parcel::Parcel;
use super::rank::Rank;
use crate::comm::{Kind as Collective, Wire};
use crate::error::Result;
use crate::layout::{shard_len, shard_range};
use crate::memory::{Held, Kind};
use crate::param::{ParamId, residency};
use crate::precision::{Elements, Flat};
use crate::timeline;

/// What carries out the decisions of a [`Publisher`]: the engine's core, or a rehearsal that only counts.
pub(crate) trait Carrier: Rank {
    /// This rank's shards of a parcel, and room for those of all ranks.
    fn shards(&self, parcel: &Parcel) -> Result<Self::Buffer>;
    /// Puts the whole parameters of a parcel into their tensors. `chunks` are those of all ranks, in their order.
    fn publish(&self, parcel: &Parcel, chunks: Self::Buffer) -> Result<()>;
}

/// Brings every rank's updated shards to all ranks, `allgather_bucket_size` elements at a time.
pub(super) struct Publisher<C: Carrier> {
    batcher: Batcher<ParamId, Publication<C>>,
}

/// A parcel under way.
struct Publication<C: Carrier> {
    parcel: Parcel,
    pending: C::Pending,
    held: Held,
}

impl<C: Carrier> Publisher<C> {
    pub fn new(bucket_size: usize) -> Self {
        Self { batcher: Batcher::new(bucket_size) }
    }

    /// This rank's shard of a parameter is up to date.
    pub fn push(&mut self, core: &C, param: ParamId) -> Result<()> {
        // At stage 0 every rank has updated all of it, and at stage 3 it is gathered when it is needed.
        let placement = core.placement();
        if !placement.optim.is_sharded() || placement.params.is_sharded() {
            return Ok(());
        }
        match self.batcher.push(param, core.params()[param].numel) {
            Some(batch) => self.launch(core, batch),
            None => Ok(()),
        }
    }

    /// All shards are: sends the rest, and waits for everything.
    pub fn finish(mut self, core: &C) -> Result<()> {
        if let Some(batch) = self.batcher.rest() {
            self.launch(core, batch)?;
        }
        self.install(core, 0)
    }

    fn launch(&mut self, core: &C, params: Vec<ParamId>) -> Result<()> {
        let parcel = Parcel::new(params, core.params(), core.world_size(), Wire::Exact);
        let _about = timeline::about(|| core.names(&parcel.params));
        let shards = core.shards(&parcel)?;
        let held = core.ledger().hold(Kind::Buckets, shards.capacity_in_bytes());
        let pending = core.collective(Collective::AllGather, Wire::Exact, shards, &parcel.params);
        self.batcher.launched(Publication { parcel, pending, held });
        self.install(core, IN_FLIGHT - 1)
    }

    /// Waits for the oldest publications until at most `left` are under way, and puts what has come into the tensors.
    fn install(&mut self, core: &C, left: usize) -> Result<()> {
        while let Some(Publication { parcel, pending, held }) = self.batcher.due(left) {
            let chunks = core.wait(pending)?;
            drop(held);
            core.publish(&parcel, chunks)?;
        }
        Ok(())
    }
}

impl Carrier for Core {
    fn shards(&self, parcel: &Parcel) -> Result<Flat> {
        let (world, rank) = (self.comm.size(), self.comm.rank());
        // The chunks of the other ranks arrive in the same buffer.
        let mut shards = Flat::with_capacity(self.dtype, parcel.chunk * world);
        for param in parcel.params.iter().map(|p| &self.params[*p]) {
            let shard = shard_range(param.numel, world, rank);
            let padding = shard_len(param.numel, world) - shard.len();
            residency::with_view(&param.tensor, |whole| shards.extend_cast(whole.slice(shard)))?;
            shards.extend_zeros(padding);
        }
        Ok(shards)
    }

    fn publish(&self, parcel: &Parcel, chunks: Flat) -> Result<()> {
        parcel.unpack(self, chunks, |param, whole| {
            // In the ledger nothing changes: as many elements as before, in another buffer.
            Ok(residency::put(&param.tensor, whole)?)
        })
    }
}
