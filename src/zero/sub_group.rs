//! This rank's share of the model, sub-group by sub-group: what the optimizer works through.
//!
//! A sub-group is a run of parameters whose shares lie one after the other in flat buffers, one buffer per kind of
//! state. The optimizer step, and whatever brings states in and out of memory, goes from sub-group to sub-group.
//!
//! | | stage 0 | stages 1, 2 | stage 3 |
//! |---|---|---|---|
//! | owned | the whole parameter | its shard | its shard |
//! | `weights` | - (in the tensors) | - (in the tensors) | shards in the model's dtype |
//! | `master` | 16-bit only | 16-bit only | 16-bit only |
//! | `grads`, `moments` | whole | shards | shards |
//!
//! Gradients have a buffer per parameter: the one that a large gradient was reduced in.

use crate::layout::{SubGroups, shard_len};
use crate::memory::{Kind, Ledger, Tracked};
use crate::param::ParamId;
use crate::param::registry::Holding;
use crate::precision::{Flat, FlatRef};
use candle_core::DType;
use std::ops::Range;

/// Where the owned part of one parameter lies in its sub-group.
#[derive(Debug, Clone)]
pub(crate) struct Slot {
    pub param: ParamId,
    /// Elements of the whole parameter that this rank owns.
    pub owned: Range<usize>,
    /// Offset of the first of them in the sub-group's buffers.
    pub at: usize,
}

impl Slot {
    /// The owned elements in the sub-group's buffers, without padding.
    pub fn range(&self) -> Range<usize> {
        self.at..self.at + self.owned.len()
    }
}

/// One sub-group of this rank's share.
#[derive(Debug)]
pub(crate) struct SubGroup {
    pub slots: Vec<Slot>,
    /// Elements in each buffer, padding included.
    pub len: usize,
    pub weights: Option<Tracked>,
    pub master: Option<Tracked>,
    /// Per slot; `None` where no gradient has arrived since the buffer was given back.
    pub grads: Vec<Option<Tracked>>,
    pub moments: Vec<Tracked>,
}

/// Lays out sub-groups while parameters are registered.
pub(crate) struct SubGroupBuilder {
    rule: SubGroups,
    world_size: usize,
    dtype: DType,
    params_sharded: bool,
    optim_sharded: bool,
    ledger: Ledger,
    done: Vec<SubGroup>,
    open: Option<SubGroup>,
}

impl SubGroupBuilder {
    pub fn new(holding: &Holding, ledger: Ledger) -> Self {
        Self {
            rule: SubGroups::new(holding.sub_group_size),
            world_size: holding.world_size,
            dtype: holding.dtype,
            params_sharded: holding.placement.params.is_sharded(),
            optim_sharded: holding.placement.optim.is_sharded(),
            ledger,
            done: Vec::new(),
            open: None,
        }
    }

    /// Adds a parameter of `numel` elements of which this rank owns `owned`, with those elements' initial values.
    pub fn push(&mut self, param: ParamId, numel: usize, owned: Range<usize>, values: FlatRef<'_>) {
        let len = if self.optim_sharded { shard_len(numel, self.world_size) } else { numel };
        let padding = len - owned.len();
        let buffer = |present: bool, kind, dtype| {
            present.then(|| Tracked::new(&self.ledger, kind, Flat::with_capacity(dtype, 0)))
        };
        let group = self.open.get_or_insert_with(|| SubGroup {
            slots: Vec::new(),
            len: 0,
            weights: buffer(self.params_sharded, Kind::Parameters, self.dtype),
            master: buffer(self.dtype != DType::F32, Kind::MasterWeights, DType::F32),
            grads: Vec::new(),
            moments: Vec::new(),
        });
        for buffer in [&mut group.weights, &mut group.master].into_iter().flatten() {
            // Exact: a large buffer grows in place (the allocator remaps its pages), and spare room would be waste.
            buffer.resize(|flat| {
                flat.reserve_exact(len);
                flat.extend_cast(values);
                flat.extend_zeros(padding);
            });
        }
        group.slots.push(Slot { param, owned, at: group.len });
        group.grads.push(None);
        group.len += len;
        // The rule counts shares at every stage, so that groups are the same at every stage.
        if self.rule.push(shard_len(numel, self.world_size)) {
            self.close();
        }
    }

    fn close(&mut self) {
        self.done.extend(self.open.take());
    }

    pub fn finish(&mut self) -> Vec<SubGroup> {
        self.close();
        std::mem::take(&mut self.done)
    }
}

impl SubGroup {
    /// Allocates `count` zeroed optimizer states.
    pub fn allocate_moments(&mut self, ledger: &Ledger, count: usize) {
        let zeros = || Tracked::new(ledger, Kind::Moments, Flat::zeros(DType::F32, self.len));
        self.moments = (0..count).map(|_| zeros()).collect();
    }

    /// Elements of a slot, padding included.
    pub fn slot_len(&self, slot: usize) -> usize {
        self.slots.get(slot + 1).map_or(self.len, |next| next.at) - self.slots[slot].at
    }

    /// The gradient buffer of a slot (its owned elements and padding), zeroed where there was none.
    pub fn grads(&mut self, slot: usize, ledger: &Ledger, dtype: DType) -> &mut Tracked {
        let len = self.slot_len(slot);
        let zeros = || Tracked::new(ledger, Kind::Gradients, Flat::zeros(dtype, len));
        self.grads[slot].get_or_insert_with(zeros)
    }
}
