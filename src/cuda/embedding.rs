//! Lookup of rows, and sums of the rows' gradients: `kernels/embedding.cu`.

use super::flat_view::{DeviceFlatMut, DeviceFlatRef};
use super::kernel_launch::arguments;
use super::kernel_module::{KernelModule, launch_over, module, suffix};
use super::tensor_storage::alloc_and_write;
use crate::util::counted;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, LaunchConfig};
use candle_core::{CudaDevice, CudaStorage, DType, Result, bail};

const KERNELS: KernelModule = module!("embedding");

/// The maximum number of threads that sum a row.
const THREADS: usize = 128;
/// The number of columns per thread: a pack of 16-bit elements.
const COLUMNS_PER_THREAD: usize = 8;
/// The id that stands for no row; its result is zeros.
pub(crate) const NO_ROW: u32 = u32::MAX;

/// Copies words to a device.
fn upload(device: &CudaDevice, words: &[u32]) -> Result<CudaSlice<u32>> {
    // Some drivers do not allocate zero bytes.
    if words.is_empty() { device.alloc_zeros(1) } else { device.clone_htod(words) }
}

/// Returns the table's rows with these ids, of `width` elements, in `dtype`, and zeros for [`NO_ROW`].
pub(crate) fn look_up(
    device: &CudaDevice,
    ids: &[u32],
    table: &DeviceFlatRef<'_>,
    width: usize,
    dtype: DType,
) -> Result<CudaStorage> {
    let (rows, count) = (table.len().checked_div(width).unwrap_or(0), ids.len() * width);
    if let Some(id) = ids.iter().find(|id| **id != NO_ROW && **id as usize >= rows) {
        bail!("embedding: row {id} was requested, but the table has {}", counted(rows, "row"))
    }
    alloc_and_write(device, dtype, count, |y| {
        if count == 0 {
            return Ok(());
        }
        let name = format!("look_up_{}_{}", suffix(dtype), suffix(table.dtype()));
        let (function, ids) = (KERNELS.function(device, &name)?, upload(device, ids)?);
        // SAFETY: the kernel takes ids of rows that the table has, of this width, and a result of `count` elements.
        unsafe { function.run(launch_over(count), arguments![count, width, &ids, table, y]) }
    })
}

/// The rows of the result's gradient that belong to each row of the table.
#[derive(Debug)]
pub(crate) struct EmbeddingRowUses {
    /// The used rows of the table. The positions of `ids[r]` start at index `starts[r]` of `positions`.
    ids: Vec<u32>,
    starts: Vec<u32>,
    positions: Vec<u32>,
    /// The number of rows of the result's gradient.
    count: usize,
}

impl EmbeddingRowUses {
    /// Collects the uses of `ids`, except those of `padding`, sorted by id and then by position.
    pub fn new(ids: &[u32], padding: Option<u32>) -> Self {
        let mut order: Vec<(u32, u32)> = ids.iter().copied().zip(0..).filter(|(id, _)| Some(*id) != padding).collect();
        order.sort_unstable();
        let mut uses = Self { ids: Vec::new(), starts: Vec::new(), positions: Vec::new(), count: ids.len() };
        for group in order.chunk_by(|a, b| a.0 == b.0) {
            uses.ids.push(group[0].0);
            uses.starts.push(uses.positions.len() as u32);
            uses.positions.extend(group.iter().map(|(_, position)| *position));
        }
        uses.starts.push(uses.positions.len() as u32);
        uses
    }
}

/// Adds the rows of `dy`, of `width` elements, to the rows of the table's gradient that their ids select.
///
/// Rows of `dy` with the same id are summed in f32, in the order of their positions; the sum is added to the row of the
/// gradient and rounded once. Other rows of the gradient are not touched.
pub(crate) fn add_rows(
    device: &CudaDevice,
    uses: &EmbeddingRowUses,
    dy: &DeviceFlatRef<'_>,
    width: usize,
    grad: DeviceFlatMut<'_>,
) -> Result<()> {
    let last = uses.ids.last().map_or(0, |id| *id as usize + 1);
    if dy.len() != uses.count * width || grad.len() < last * width {
        let (count, rows) = (dy.len(), uses.count);
        bail!(
            "embedding: {} {} not match {} of {width} and a gradient of {}",
            counted(count, "element"),
            if count == 1 { "does" } else { "do" },
            counted(rows, "row"),
            grad.len()
        )
    }
    if uses.ids.is_empty() || width == 0 {
        return Ok(());
    }
    let name = format!("add_rows_{}_{}", suffix(grad.dtype()), suffix(dy.dtype()));
    let function = KERNELS.function(device, &name)?;
    let launch = LaunchConfig {
        grid_dim: (uses.ids.len() as u32, width.div_ceil(THREADS * COLUMNS_PER_THREAD) as u32, 1),
        block_dim: (THREADS.min(width.div_ceil(COLUMNS_PER_THREAD).next_multiple_of(32)) as u32, 1, 1),
        shared_mem_bytes: 0,
    };
    let [ids, starts, positions] = [&uses.ids, &uses.starts, &uses.positions].map(|words| upload(device, words));
    let (ids, starts, positions) = (ids?, starts?, positions?);
    // SAFETY: the kernel takes any number of blocks for each used row, rows of dy that exist, and a gradient that
    // contains all used rows.
    unsafe { function.run(launch, arguments![width, &ids, &starts, &positions, dy, grad]) }
}
