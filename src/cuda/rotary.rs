//! Rotary positions: `kernels/rotary.cu`.

use super::flat_view::DeviceFlatRef;
use super::kernel_launch::arguments;
use super::kernel_module::{KernelModule, launch_over, module, suffix};
use super::tensor_storage::alloc_and_write;
use crate::kernels::rope::{RotaryLayout, RotaryPairs};
use crate::util::counted;
use candle_core::cuda_backend::DeviceId;
use candle_core::cuda_backend::cudarc::driver::CudaSlice;
use candle_core::{CudaDevice, CudaStorage, Result, bail};

const KERNELS: KernelModule = module!("rotary");

/// The cosines and sines of the angles of positions, `[positions, half]`.
#[derive(Debug)]
pub(crate) struct RotaryAngles {
    layout: RotaryLayout,
    half: usize,
    positions: usize,
    cos: CudaSlice<f32>,
    sin: CudaSlice<f32>,
    device: DeviceId,
}

impl RotaryAngles {
    /// Copies the angles to the device: `half` pairs per position, for heads with this layout.
    pub fn new(device: &CudaDevice, layout: RotaryLayout, half: usize, [cos, sin]: [&[f32]; 2]) -> Result<Self> {
        if half == 0
            || 2 * half > layout.head
            || !layout.head.is_multiple_of(2)
            || cos.len() != sin.len()
            || cos.is_empty()
            || !cos.len().is_multiple_of(half)
        {
            bail!(
                "rotary: {} and {} do not form positions of {}",
                counted(cos.len(), "cosine"),
                counted(sin.len(), "sine"),
                counted(half, "pair")
            )
        }
        let (positions, cos, sin) = (cos.len() / half, device.clone_htod(cos)?, device.clone_htod(sin)?);
        Ok(Self { layout, half, positions, cos, sin, device: device.id() })
    }

    /// Returns whether the angles are on this device and cover `positions`.
    pub fn are_on(&self, device: &CudaDevice, positions: usize) -> bool {
        self.device == device.id() && self.positions >= positions
    }
}

/// The positions of rows.
pub(crate) enum RotaryPositions<'a> {
    /// Row r is at position `first + r % time`.
    From { first: usize, time: usize },
    /// A position for each row. All are below the second value.
    PerRow(&'a CudaSlice<u32>, usize),
}

/// Rotates the rows of `x`, each of `width` elements, by their angles times `direction`.
pub(crate) fn rotate(
    device: &CudaDevice,
    angles: &RotaryAngles,
    x: &DeviceFlatRef<'_>,
    width: usize,
    positions: &RotaryPositions<'_>,
    direction: f32,
) -> Result<CudaStorage> {
    let (half, RotaryLayout { head, pairs: pair_layout }, pairs) = (angles.half, angles.layout, x.len() / 2);
    let adjacent = usize::from(pair_layout == RotaryPairs::Adjacent);
    let (end, time, first, row_positions) = match *positions {
        RotaryPositions::From { first, time } => (first + time, time, first, None),
        RotaryPositions::PerRow(rows, end) => (end, 1, 0, Some(rows)),
    };
    let rows_fit = row_positions.is_none_or(|rows| rows.len() >= x.len() / width.max(1));
    if width == 0 || !width.is_multiple_of(head) || !x.len().is_multiple_of(width) || !rows_fit {
        bail!(
            "rotary: {} {} not match the positions, rows of {width} and heads of {head}",
            counted(x.len(), "element"),
            if x.len() == 1 { "does" } else { "do" }
        )
    }
    if end > angles.positions {
        bail!("rotary: {end} positions are needed, but the table has angles for only {}", angles.positions)
    }
    alloc_and_write(device, x.dtype(), x.len(), |y| {
        if pairs == 0 {
            return Ok(());
        }
        let function = KERNELS.function(device, &format!("turn_{}", suffix(x.dtype())))?;
        let RotaryAngles { cos, sin, .. } = angles;
        let arguments =
            arguments![pairs, half, head, adjacent, width, time, first, row_positions, cos, sin, direction, x, y];
        // SAFETY: the rows of `x` consist of full heads, the angles cover their positions, and the result has as many
        // elements as `x`.
        unsafe { function.run(launch_over(pairs), arguments) }
    })
}
