//! Updated weights: from the shard of the rank that owns them to all ranks, where parameters are whole.

use super::batch::{Batcher, IN_FLIGHT};
use super::parcel::Parcel;
use super::rank::Rank;
use crate::comm::WireFormat;
use crate::error::Result;
use crate::memory::{Held, Kind};
use crate::param::ParamId;
use crate::precision::ElementBuffer;
use crate::timeline;

/// Brings every rank's updated shards to all ranks, `allgather_bucket_size` elements at a time.
pub(super) struct Publisher<R: Rank> {
    batcher: Batcher<ParamId, Publication<R>>,
}

/// A parcel under way.
struct Publication<R: Rank> {
    parcel: Parcel,
    pending: R::Pending,
    held: Held,
}

impl<R: Rank> Publisher<R> {
    pub fn new(bucket_size: usize) -> Self {
        Self { batcher: Batcher::new(bucket_size) }
    }

    /// This rank's shard of a parameter is up to date.
    pub fn push(&mut self, core: &R, param: ParamId) -> Result<()> {
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
    pub fn finish(mut self, core: &R) -> Result<()> {
        if let Some(batch) = self.batcher.rest() {
            self.launch(core, batch)?;
        }
        self.install(core, 0)
    }

    fn launch(&mut self, core: &R, batch: Vec<ParamId>) -> Result<()> {
        Parcel::alike(batch, core.params()).try_for_each(|params| self.launch_alike(core, params))
    }

    fn launch_alike(&mut self, core: &R, params: Vec<ParamId>) -> Result<()> {
        let parcel = Parcel::of_weights(params, core.params(), core.division(), WireFormat::Exact);
        let _about = timeline::about(|| core.names(&parcel.params));
        let division = core.division();
        // The chunks of the other ranks arrive in the same buffer.
        let room = parcel.chunk * division.shards();
        let mut shards = R::Buffer::with_capacity(core.model_place(), parcel.dtype(core.dtype()), room)?;
        for param in parcel.params.iter().map(|p| &core.params()[*p]) {
            let shard = param.shard(division, division.shard_of(core.rank()));
            let padding = param.shard_len(division) - shard.len();
            core.copy(param, shard, &mut shards)?;
            shards.extend_zeros(padding)?;
        }
        let held = core.hold(Kind::Buckets, &shards);
        let pending = core.gather(WireFormat::Exact, shards, &parcel.params)?;
        self.batcher.launched(Publication { parcel, pending, held });
        self.install(core, IN_FLIGHT - 1)
    }

    /// Waits for the oldest publications until at most `left` are under way, and puts what has come into the tensors.
    fn install(&mut self, core: &R, left: usize) -> Result<()> {
        while let Some(Publication { parcel, pending, held }) = self.batcher.due(left) {
            let chunks = core.wait(pending)?;
            drop(held);
            // In the ledger nothing changes: as many elements as before, in another buffer.
            parcel.unpack(core, chunks, |param, whole| core.put(param, whole))?;
        }
        Ok(())
    }
}
