//! The layout of shards or gradients that share one flat buffer and one collective, and the assembly of whole
//! parameters from it.
//!
//! If a parameter has its own collective, the concatenated chunks of all ranks are the parameter, which takes over the
//! buffer. Small parameters share a buffer, and are copied out of it piece by piece.

use crate::comm::WireFormat;
use crate::error::Result;
use crate::layout::{ExpertPlacement, PACKED_BELOW, ShardCut, ShardMesh, chunk_offsets};
use crate::optim::WeightFormat;
use crate::param::{Param, ParamId};
use crate::precision::ElementBuffer;
use crate::zero::share::packed_weight_shards;
use crate::zero::step_executor::StepExecutor;
use candle_core::DType;
use std::collections::BTreeMap;

/// The layout of the shards or gradients of some parameters in one flat buffer.
pub(crate) struct CoalescedLayout {
    pub params: Vec<ParamId>,
    /// The offset of each parameter's shard, or piece, in a rank's chunk. Gaps between them are zeros.
    pub offsets: Vec<usize>,
    /// The number of elements of a rank's chunk.
    pub chunk: usize,
    /// The mesh of the ranks that hold the parameters.
    pub mesh: ShardMesh,
    /// The format of the weights, if the layout carries weights. The elements of packed weights are words.
    weights: WeightFormat,
}

impl CoalescedLayout {
    /// Creates a separate layout for each large parameter, and a common one for all small parameters that have the same
    /// weight format and are on the same ranks. Here and in the other functions, `mesh` is the mesh of all ranks.
    pub fn split(params: &[ParamId], all: &[Param], mesh: ShardMesh, wire: WireFormat) -> Vec<Self> {
        let (large, small): (Vec<ParamId>, Vec<ParamId>) = params.iter().partition(|p| all[**p].numel >= PACKED_BELOW);
        let separate = large.into_iter().map(|p| vec![p]);
        separate
            .chain(Self::group_by_format(small, all))
            .map(|params| Self::of_weights(params, all, mesh, wire))
            .collect()
    }

    /// Groups parameters whose weights have the same format and are on the same ranks, so that each group can share a
    /// collective.
    pub fn group_by_format(params: Vec<ParamId>, all: &[Param]) -> impl Iterator<Item = Vec<ParamId>> + use<> {
        let mut groups: BTreeMap<(WeightFormat, Option<ExpertPlacement>), Vec<ParamId>> = BTreeMap::new();
        params.into_iter().for_each(|p| groups.entry((all[p].weights, all[p].expert)).or_default().push(p));
        groups.into_values()
    }

    /// Creates a layout of weights, all in the same format, for a collective. The weights may already be packed.
    pub fn of_weights(params: Vec<ParamId>, all: &[Param], mesh: ShardMesh, wire: WireFormat) -> Self {
        let weights = params.first().map_or(WeightFormat::Model, |p| all[*p].weights);
        let Some(packing) = weights.packing() else {
            return Self { weights, ..Self::new(params, all, mesh, wire) };
        };
        let mesh = params.first().map_or(mesh, |p| mesh.of(all[*p].cut()));
        let mut chunk = 0;
        let offset = |p: &ParamId| {
            let offset = chunk;
            chunk += packed_weight_shards::word_count(packing, all[*p].shard_len(mesh));
            offset
        };
        let offsets = params.iter().map(offset).collect();
        Self { params, offsets, chunk, mesh, weights }
    }

    /// Returns the dtype of the layout's elements, for weights in `dtype`.
    pub fn dtype(&self, dtype: DType) -> DType {
        self.weights.packing().map_or(self.weights.dtype(dtype), |_| DType::F32)
    }

    /// Returns whether the layout carries packed weights, which are on the host.
    pub fn is_packed(&self) -> bool {
        self.weights.packing().is_some()
    }

    /// Returns `wire`, or the exact format if the weights are packed, because packed weights are already quantized.
    pub fn wire(&self, wire: WireFormat) -> WireFormat {
        self.weights.packing().map_or(wire, |_| WireFormat::Exact)
    }

    /// Creates a layout. Parameters that are sent quantized have separate quantization blocks, which do not depend on
    /// the other parameters of the collective.
    pub fn new(params: Vec<ParamId>, all: &[Param], mesh: ShardMesh, wire: WireFormat) -> Self {
        let cuts: Vec<ShardCut> = params.iter().map(|p| all[*p].cut()).collect();
        debug_assert!(cuts.windows(2).all(|pair| pair[0].expert == pair[1].expert), "all must be on the same ranks");
        let mesh = cuts.first().map_or(mesh, |cut| mesh.of(*cut));
        let (offsets, chunk) = chunk_offsets(&cuts, mesh, wire.alignment());
        Self { params, offsets, chunk, mesh, weights: WeightFormat::Model }
    }

    /// Passes each whole parameter to `install`. `chunks` contains the chunks of all shards, in order.
    pub fn unpack<R: StepExecutor>(
        &self,
        rank: &R,
        mut chunks: R::Buffer,
        mut install: impl FnMut(&Param, R::Buffer) -> Result<()>,
    ) -> Result<()> {
        if let Some(packing) = self.weights.packing() {
            for (p, offset) in self.params.iter().zip(&self.offsets) {
                let param = &rank.params()[*p];
                let at = (self.chunk, *offset);
                // The words are on the host.
                let values = packed_weight_shards::assemble(packing, param, &chunks, at, rank.dtype(), self.mesh)?;
                install(param, values.move_to(rank.model_location())?)?;
            }
            return Ok(());
        }
        if let [param] = &self.params[..] {
            let param = &rank.params()[*param];
            // The rest is padding.
            chunks.truncate(param.numel);
            return install(param, chunks);
        }
        let mesh = self.mesh;
        for (p, offset) in self.params.iter().zip(&self.offsets) {
            let param = &rank.params()[*p];
            let mut values = R::Buffer::with_capacity(rank.model_location(), self.dtype(rank.dtype()), param.numel)?;
            for shard in 0..mesh.shards() {
                let start = shard * self.chunk + offset;
                values.extend_from(&chunks, start..start + param.shard(mesh, shard).len())?;
            }
            install(param, values)?;
        }
        Ok(())
    }
}
