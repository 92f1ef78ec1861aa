//! Collectives between GPUs that transfer elements as codes: small integers with a scale per block.
//!
//! ```text
//!   sum    | codes for each peer | codes of each peer |  kernel -> exchange -> kernel, which adds this rank's elements
//!   gather | codes of each rank                       |  kernel -> all-gather -> kernel
//!            ------ `scratch`, of limited size ------
//! ```
//!
//! The bytes and the bits are those of `comm/shm/quantized.rs`. Blocks are counted from the start of each rank's chunk,
//! and a piece of a chunk has full blocks, so the size of `scratch` does not affect the results.

use super::library::UINT8;
use super::member::NcclLaunch;
use super::{NcclComm, Result};
use crate::cuda::block_quantization::{BlockQuantizer, RankChunkLayout};
use crate::precision::{BLOCK, IntFormat};
use crate::util::pieces;
use candle_core::DType;
use candle_core::cuda_backend::cudarc::driver::sys::CUdeviceptr;
use std::ops::Range;

/// The alignment in bytes of each rank's codes at which NCCL copies them fastest. Scales need an alignment of only 4.
const ALIGNMENT: usize = 128;

impl NcclComm {
    /// Does the same as [`add_exactly`](Self::add_exactly) with `place(r) = r * count`, but transfers the peers' parts
    /// as integers. This rank's part is added without quantization.
    ///
    /// # Safety
    /// Same as for [`add_exactly`](Self::add_exactly), and `to` is `from` or this rank's place.
    pub(super) unsafe fn add_coded(
        &self,
        (launch, op): (&mut NcclLaunch<'_>, &'static str),
        (ints, dtype): (IntFormat, DType),
        count: usize,
        (from, to): (CUdeviceptr, CUdeviceptr),
    ) -> Result<()> {
        let (rank, size, bytes) = (self.rank(), self.size(), dtype.size_in_bytes());
        if size == 1 {
            return Ok(());
        }
        let coder = self.coder(ints, dtype)?;
        let peers = size - 1;
        let (step, stride) = self.pieces(ints, count, 2 * peers);
        let outgoing = launch.scratch(2 * peers * stride)?;
        let incoming = outgoing + (peers * stride) as CUdeviceptr;
        let offset = |elements: usize| (elements * bytes) as CUdeviceptr;
        for Range { start, end } in pieces(count, step) {
            let layout =
                RankChunkLayout { chunks: peers, count: end - start, element_stride: count, byte_stride: stride };
            // SAFETY: as the caller promises; `scratch` has `stride` bytes, at least the codes of a piece, for each
            // peer on both sides. The wire stream sums a piece before the next one arrives in its place, and the
            // elements that the sums overwrite have been encoded, or are this rank's.
            unsafe {
                coder.encode(layout, Some(rank), from + offset(start), outgoing)?;
                launch.exchange(op, ints.encoded_len(layout.count), UINT8, |peer| {
                    let slot = if peer < rank { peer } else { peer - 1 };
                    let slot_offset = (slot * stride) as CUdeviceptr;
                    (outgoing + slot_offset, incoming + slot_offset)
                })?;
                let own = from + offset(rank * count + start);
                coder.sum(layout.count, (to + offset(start), own), (incoming, stride), (rank, size))?;
            }
        }
        Ok(())
    }

    /// Fills the places of all ranks in `output`, `count` elements each, with their quantized and decoded shards. This
    /// includes this rank's shard, which is already in its place.
    ///
    /// # Safety
    /// `output` has room for the elements of all ranks, used only by this launch.
    pub(super) unsafe fn gather_coded(
        &self,
        launch: &mut NcclLaunch<'_>,
        (ints, dtype): (IntFormat, DType),
        count: usize,
        output: CUdeviceptr,
    ) -> Result<()> {
        let (rank, size, bytes) = (self.rank(), self.size(), dtype.size_in_bytes());
        if size == 1 {
            return Ok(());
        }
        let coder = self.coder(ints, dtype)?;
        let (step, stride) = self.pieces(ints, count, size);
        let codes = launch.scratch(size * stride)?;
        let offset = |elements: usize| (elements * bytes) as CUdeviceptr;
        for Range { start, end } in pieces(count, step) {
            // An all-gather leaves no gaps between the ranks' codes.
            let stride = ints.encoded_len(end - start).next_multiple_of(ALIGNMENT);
            let layout =
                RankChunkLayout { chunks: size, count: end - start, element_stride: count, byte_stride: stride };
            let own = codes + (rank * stride) as CUdeviceptr;
            // SAFETY: as the caller promises; `scratch` has `stride` bytes, at least the codes of a piece, for each
            // rank.
            unsafe {
                coder.encode(
                    RankChunkLayout { chunks: 1, ..layout },
                    None,
                    output + offset(rank * count + start),
                    own,
                )?;
                launch.all_gather(own, codes, stride, UINT8)?;
                coder.decode(layout, codes, output + offset(start))?;
            }
        }
        Ok(())
    }

    /// Loads the kernels before anything is launched, because loading may wait for the device.
    fn coder(&self, ints: IntFormat, dtype: DType) -> Result<BlockQuantizer> {
        Ok(BlockQuantizer::new(&self.0.device, &self.0.wire, ints, dtype)?)
    }

    /// Returns the maximum number of elements in a piece, a multiple of the block size, and, for a chunk of `count`
    /// elements, the distance in bytes between the `number` pieces that are in memory at a time.
    fn pieces(&self, ints: IntFormat, count: usize, number: usize) -> (usize, usize) {
        let limit = self.0.limits.scratch / number / ALIGNMENT * ALIGNMENT;
        let step = ints.whole_blocks_in(limit).max(BLOCK);
        (step, ints.encoded_len(step.min(count)).next_multiple_of(ALIGNMENT))
    }
}
