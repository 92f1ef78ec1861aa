//! The sizes of the blocks and tiles of attention's kernels, which must match kernels/attention_f32.cuh and
//! attention_tensor_cores.cuh.

use candle_core::cuda_backend::cudarc::driver::LaunchConfig;

/// The head sizes for which kernels exist. A head of a different size uses the next larger one.
pub(super) const WIDTHS: [usize; 5] = [32, 64, 96, 128, 256];
/// The number of rows per warp.
const STRIP: usize = 16;
const WARP: usize = 32;

/// Returns the kernels' width for heads of `head` elements.
pub(super) fn width(head: usize) -> Option<usize> {
    WIDTHS.into_iter().find(|width| (1..=*width).contains(&head))
}

/// The sizes of a block and of its tiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct BlockAndTileSizes {
    /// The number of rows that belong to the block.
    pub own_rows: usize,
    /// The number of rows of a tile of the other operand.
    pub other_rows: usize,
    /// The number of bytes of shared memory.
    pub bytes: usize,
    /// The number of blocks for each tile and head.
    pub planes: usize,
}

impl BlockAndTileSizes {
    /// Returns a launch with blocks for these tiles, heads and planes.
    pub fn launch_over(&self, [tiles, heads, planes]: [usize; 3]) -> LaunchConfig {
        let threads = self.own_rows / STRIP * WARP;
        LaunchConfig {
            grid_dim: (tiles as u32, heads as u32, planes as u32),
            block_dim: (threads as u32, 1, 1),
            shared_mem_bytes: self.bytes as u32,
        }
    }
}

/// Returns a launch with at least `count` warps.
pub(super) fn warps(count: usize) -> LaunchConfig {
    const WARPS: usize = 8;
    let blocks = count.div_ceil(WARPS).max(1);
    LaunchConfig { grid_dim: (blocks as u32, 1, 1), block_dim: ((WARPS * WARP) as u32, 1, 1), shared_mem_bytes: 0 }
}

/// The sizes of the blocks and tiles of the forward and backward kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct AttentionTileSizes {
    pub forward: BlockAndTileSizes,
    pub backward: BlockAndTileSizes,
}

impl AttentionTileSizes {
    /// Returns the sizes for a width and for elements of `element` bytes.
    pub fn of(width: usize, element: usize) -> Self {
        let (forward, backward) = match (element, width) {
            (4, 256) => ((2, 16), (2, 8)),
            (4, 128) => ((4, 32), (4, 16)),
            (4, _) => ((4, 32), (4, 32)),
            (_, 256) => ((4, 32), (4, 16)),
            _ => ((4, 64), (4, 32)),
        };
        let row = width + 16 / element;
        // 16-bit weights are stored alongside the scores, whereas f32 weights overwrite them.
        let strip = |others: usize| {
            let weights = if element == 4 { 0 } else { others + 8 };
            STRIP * ((others + 4) * size_of::<f32>() + weights * element)
        };
        let launch = |(warps, others): (usize, usize), bytes, planes| BlockAndTileSizes {
            own_rows: warps * STRIP,
            other_rows: others,
            bytes,
            planes,
        };
        let ((warps, others), (back_warps, back_others)) = (forward, backward);
        let forward_bytes = (warps * STRIP + 2 * others) * row * element + warps * strip(others);
        let backward_bytes = 2 * (back_warps * STRIP + back_others) * row * element
            + 2 * back_warps * strip(back_others)
            + 2 * back_others * size_of::<f32>();
        // For wide heads, the sums of two gradients do not fit in a warp's registers.
        let planes = if width <= 128 { 1 } else { 2 };
        Self { forward: launch(forward, forward_bytes, 1), backward: launch(backward, backward_bytes, planes) }
    }
}

/// Returns a launch of one thread.
#[cfg(test)]
pub(super) fn one_thread() -> LaunchConfig {
    LaunchConfig { grid_dim: (1, 1, 1), block_dim: (1, 1, 1), shared_mem_bytes: 0 }
}
