//! Sums of columns over many rows: `kernels/column_sums.cuh` and `column_sums.cu`.

use super::flat_view::{DeviceFlatMut, DeviceFlatRef};
use super::kernel_launch::arguments;
use super::kernel_module::{KernelModule, launch_over, module, suffix};
use crate::util::{counted, is_or_are};
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, LaunchConfig};
use candle_core::{CudaDevice, Result, bail};

const KERNELS: KernelModule = module!("column_sums");

/// The minimum number of rows of a chunk: eight for each lane of a block.
const MIN_ROWS: usize = 64;
/// The maximum number of chunks.
const MAX_CHUNKS: usize = 128;
/// The numbers of columns and lanes of a block in column_sums.cuh.
const BLOCK: (u32, u32) = (32, 8);

/// The split of rows into chunks that are summed separately. It depends only on the number of rows.
#[derive(Debug, Clone, Copy)]
pub(super) struct RowChunking {
    pub rows: usize,
    pub width: usize,
    pub per_chunk: usize,
    pub chunks: usize,
}

impl RowChunking {
    pub fn of(rows: usize, width: usize) -> Self {
        let per_chunk = rows.div_ceil(MAX_CHUNKS).max(MIN_ROWS);
        Self { rows, width, per_chunk, chunks: rows.div_ceil(per_chunk) }
    }

    /// Allocates room for the chunks' sums.
    pub fn alloc_sums(&self, device: &CudaDevice) -> Result<CudaSlice<f32>> {
        // SAFETY: the kernel that receives this buffer writes all sums of all chunks.
        unsafe { device.alloc((self.chunks * self.width).max(1)) }
    }

    /// Returns the launch configuration of a kernel that sums rows.
    pub fn launch(&self) -> LaunchConfig {
        let tiles = self.width.div_ceil(BLOCK.0 as usize) as u32;
        LaunchConfig { grid_dim: (tiles, self.chunks as u32, 1), block_dim: (BLOCK.0, BLOCK.1, 1), shared_mem_bytes: 0 }
    }
}

/// Sums of columns within each chunk of rows, not yet added up over the chunks.
#[derive(Debug)]
pub(crate) struct PartialColumnSums {
    pub(super) chunking: RowChunking,
    pub(super) sums: CudaSlice<f32>,
}

impl PartialColumnSums {
    /// Computes the columns' sums over rows of `width` elements.
    pub fn of_columns(device: &CudaDevice, x: &DeviceFlatRef<'_>, width: usize) -> Result<Self> {
        if width == 0 || !x.len().is_multiple_of(width) {
            bail!(
                "column sums: {} {} not form rows of {width}",
                counted(x.len(), "element"),
                if x.len() == 1 { "does" } else { "do" }
            )
        }
        let chunking = RowChunking::of(x.len() / width, width);
        let mut sums = chunking.alloc_sums(device)?;
        if chunking.rows > 0 {
            let function = KERNELS.function(device, &format!("column_sums_{}", suffix(x.dtype())))?;
            let RowChunking { rows, width, per_chunk, .. } = chunking;
            // SAFETY: the kernel takes rows of this width, split this way, and a sum for each column and chunk.
            unsafe { function.run(chunking.launch(), arguments![rows, width, per_chunk, x, &mut sums])? };
        }
        Ok(Self { chunking, sums })
    }

    /// Writes the sums to a gradient, or adds them to it if `add` is set. Each element is rounded once.
    pub fn put(&self, device: &CudaDevice, grad: DeviceFlatMut<'_>, add: bool) -> Result<()> {
        let RowChunking { width, chunks, .. } = self.chunking;
        if grad.len() != width {
            bail!(
                "column sums: the gradient has {}, but there {} {}",
                counted(grad.len(), "element"),
                is_or_are(width),
                counted(width, "column")
            )
        }
        let function = KERNELS.function(device, &format!("sum_parts_{}", suffix(grad.dtype())))?;
        // SAFETY: the kernel takes a width, as many chunks of that width as the second number specifies, and a gradient
        // of that width.
        unsafe { function.run(launch_over(width), arguments![width, chunks, &self.sums, grad, add]) }
    }
}
