//! Sends updated weights from the rank that owns their shard to all ranks, if parameters are not sharded.

use crate::comm::WireFormat;
use crate::error::Result;
use crate::memory::{MemoryKind, MemoryLedgerEntry};
use crate::param::ParamId;
use crate::precision::ElementBuffer;
use crate::timeline;
use crate::zero::gather::coalesced_layout::CoalescedLayout;
use crate::zero::reduce::bucket_queue::{BucketQueues, IN_FLIGHT};
use crate::zero::step_executor::StepExecutor;

/// A publisher that sends every rank's updated shards to all ranks, `allgather_bucket_size` elements at a time.
pub(crate) struct WeightPublisher<R: StepExecutor> {
    buckets: BucketQueues<ParamId, PendingPublication<R>>,
}

/// A pending all-gather of updated shards.
struct PendingPublication<R: StepExecutor> {
    layout: CoalescedLayout,
    pending: R::Pending,
    held: MemoryLedgerEntry,
}

impl<R: StepExecutor> WeightPublisher<R> {
    pub fn new(bucket_size: usize) -> Self {
        Self { buckets: BucketQueues::new(bucket_size) }
    }

    /// Reports that this rank's shard of a parameter is up to date.
    pub fn push(&mut self, core: &R, param: ParamId) -> Result<()> {
        // At stage 0, every rank has updated the whole parameter. At stage 3, a parameter is gathered when it is
        // needed.
        let placement = core.placement();
        if !placement.optim.is_sharded() || placement.params.is_sharded() || !core.holds(param) {
            return Ok(());
        }
        match self.buckets.push(param, &core.params()[param]) {
            Some(batch) => self.launch(core, batch),
            None => Ok(()),
        }
    }

    /// Ends the publication, once all shards are up to date: sends the remaining shards, and waits for all pending
    /// publications.
    pub fn finish(mut self, core: &R) -> Result<()> {
        for batch in self.buckets.take_rest() {
            self.launch(core, batch)?;
        }
        self.install(core, 0)
    }

    fn launch(&mut self, core: &R, batch: Vec<ParamId>) -> Result<()> {
        CoalescedLayout::group_by_format(batch, core.params()).try_for_each(|params| self.launch_group(core, params))
    }

    fn launch_group(&mut self, core: &R, params: Vec<ParamId>) -> Result<()> {
        let layout = CoalescedLayout::of_weights(params, core.params(), core.mesh(), WireFormat::Exact);
        let _subject = timeline::set_subject(|| core.names(&layout.params));
        let (mesh, number) = (layout.mesh, core.rank_among(&layout.params));
        // The chunks of the other ranks arrive in the same buffer.
        let room = layout.chunk * mesh.shards();
        let mut shards = R::Buffer::with_capacity(core.model_location(), layout.dtype(core.dtype()), room)?;
        for param in layout.params.iter().map(|p| &core.params()[*p]) {
            let shard = param.shard(mesh, mesh.shard_of(number));
            let padding = param.shard_len(mesh) - shard.len();
            core.copy(param, shard, &mut shards)?;
            shards.extend_zeros(padding)?;
        }
        let held = core.hold(MemoryKind::Buckets, &shards);
        let pending = core.gather(WireFormat::Exact, shards, &layout.params)?;
        let first = &core.params()[layout.params[0]];
        self.buckets.push_pending(PendingPublication { layout, pending, held }, first);
        self.install(core, IN_FLIGHT - 1)
    }

    /// Waits for the oldest publications until at most `max_pending` are pending, and puts their weights into the
    /// tensors.
    fn install(&mut self, core: &R, max_pending: usize) -> Result<()> {
        while let Some(PendingPublication { layout, pending, held }) = self.buckets.due(max_pending) {
            let chunks = core.wait(pending)?;
            drop(held);
            // Putting the weights into the tensors does not change the ledger: the tensors have as many elements as
            // before.
            layout.unpack(core, chunks, |param, values| core.put(param, values))?;
        }
        Ok(())
    }
}
