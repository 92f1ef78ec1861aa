//! Packed weights in buffers, files and collectives, which carry them as 32-bit words. A rank's shard of a parameter
//! consists of complete units of its packing, padded to complete words.

use crate::error::Result;
use crate::layout::ShardMesh;
use crate::param::Param;
use crate::precision::{ElementBuffer, Flat, FlatMut, FlatRef, WeightPacking};
use candle_core::DType;

/// Returns the number of words that `elements` elements occupy.
pub(in crate::zero) fn word_count(packing: WeightPacking, elements: usize) -> usize {
    packing.packed_len(elements).div_ceil(size_of::<f32>())
}

/// Returns the words of a shard of `shard_len` elements that begins with `values`, or no words if `values` is empty.
pub(in crate::zero) fn pack(packing: WeightPacking, values: FlatRef<'_>, shard_len: usize) -> Flat {
    if values.is_empty() {
        return Flat::zeros(DType::F32, 0);
    }
    let mut packed = Flat::zeros(DType::F32, word_count(packing, shard_len));
    let bytes = packing.packed_len(values.len());
    packing.pack(values, &mut packed.as_bytes_mut()[..bytes]);
    packed
}

/// Unpacks a shard into `values`, starting at element `first`, which must be the first element of a unit.
pub(in crate::zero) fn unpack(packing: WeightPacking, words: FlatRef<'_>, first: usize, values: FlatMut<'_>) {
    let start = packing.packed_len(first);
    let bytes = packing.packed_len(values.len());
    packing.unpack(&words.as_bytes()[start..start + bytes], values);
}

/// Returns the values after packing and unpacking, in `dtype`.
pub(in crate::zero) fn rounded(packing: WeightPacking, values: FlatRef<'_>, dtype: DType) -> Flat {
    let packed = pack(packing, values, values.len());
    let mut rounded = Flat::zeros(dtype, values.len());
    unpack(packing, packed.as_ref(), 0, rounded.as_mut());
    rounded
}

/// Assembles a whole parameter from the words of all ranks. Each rank's chunk has `chunk` words, in which those of this
/// parameter begin at `offset`.
pub(in crate::zero) fn assemble<B: ElementBuffer>(
    packing: WeightPacking,
    param: &Param,
    gathered_words: &B,
    (chunk, offset): (usize, usize),
    dtype: DType,
    mesh: ShardMesh,
) -> Result<B> {
    let mut assembled = B::zeros(&gathered_words.location(), dtype, param.numel)?;
    if let (Some(mut values), Some(gathered_words)) = (assembled.values_mut(), gathered_words.values()) {
        for number in 0..mesh.shards() {
            let start = number * chunk + offset;
            let shard = param.shard(mesh, number);
            let words = gathered_words.slice(start..start + word_count(packing, shard.len()));
            unpack(packing, words, 0, values.reborrow().slice(shard));
        }
    }
    Ok(assembled)
}
