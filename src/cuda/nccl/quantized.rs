//! Collectives between GPUs that transfer elements as codes: small integers with a scale per block.
//!
//! ```text
//!   sum      | codes for each peer | codes of each peer |     kernel -> exchange -> kernel, which adds this rank's elements
//!   gather   | codes of each rank                       |     kernel -> all-gather -> kernel
//!              -------- `room`, of limited size -------
//! ```
//!
//! The bytes and the bits are those of `comm/shm/quantized.rs`. Blocks are counted from the start of each rank's chunk,
//! and a piece of a chunk has full blocks, so the size of `room` does not affect the results.

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
        let (step, apart) = self.pieces(ints, count, 2 * peers);
        let outgoing = launch.room(2 * peers * apart)?;
        let incoming = outgoing + (peers * apart) as CUdeviceptr;
        let offset = |elements: usize| (elements * bytes) as CUdeviceptr;
        for Range { start, end } in pieces(count, step) {
            let parts =
                RankChunkLayout { number: peers, count: end - start, elements_apart: count, bytes_apart: apart };
            // SAFETY: as the caller promises; `room` has `apart` bytes, at least the codes of a piece, for each peer
            // on both sides. The wire stream sums a piece before the next one arrives in its place, and the elements
            // that the sums overwrite have been encoded, or are this rank's.
            unsafe {
                coder.encode(parts, Some(rank), from + offset(start), outgoing)?;
                launch.exchange(op, ints.encoded_len(parts.count), UINT8, |peer| {
                    let slot = if peer < rank { peer } else { peer - 1 };
                    let place = (slot * apart) as CUdeviceptr;
                    (outgoing + place, incoming + place)
                })?;
                let own = from + offset(rank * count + start);
                coder.sum(parts.count, (to + offset(start), own), (incoming, apart), (rank, size))?;
            }
        }
        Ok(())
    }

    /// Fills the places of all ranks in `whole`, `count` elements each, with their quantized and decoded shards. This
    /// includes this rank's shard, which is already in its place.
    ///
    /// # Safety
    /// `whole` has room for the elements of all ranks, used only by this launch.
    pub(super) unsafe fn gather_coded(
        &self,
        launch: &mut NcclLaunch<'_>,
        (ints, dtype): (IntFormat, DType),
        count: usize,
        whole: CUdeviceptr,
    ) -> Result<()> {
        let (rank, size, bytes) = (self.rank(), self.size(), dtype.size_in_bytes());
        if size == 1 {
            return Ok(());
        }
        let coder = self.coder(ints, dtype)?;
        let (step, most) = self.pieces(ints, count, size);
        let codes = launch.room(size * most)?;
        let offset = |elements: usize| (elements * bytes) as CUdeviceptr;
        for Range { start, end } in pieces(count, step) {
            // An all-gather leaves no gaps between the ranks' codes.
            let apart = ints.encoded_len(end - start).next_multiple_of(ALIGNMENT);
            let all = RankChunkLayout { number: size, count: end - start, elements_apart: count, bytes_apart: apart };
            let own = codes + (rank * apart) as CUdeviceptr;
            // SAFETY: as the caller promises; `room` has `apart` bytes, at least the codes of a piece, for each rank.
            unsafe {
                coder.encode(RankChunkLayout { number: 1, ..all }, None, whole + offset(rank * count + start), own)?;
                launch.all_gather(own, codes, apart, UINT8)?;
                coder.decode(all, codes, whole + offset(start))?;
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
        let room = self.0.limits.room / number / ALIGNMENT * ALIGNMENT;
        let step = ints.whole_blocks_in(room).max(BLOCK);
        (step, ints.encoded_len(step.min(count)).next_multiple_of(ALIGNMENT))
    }
}
