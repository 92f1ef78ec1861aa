//! Rotary positions.

use super::supported_device;
use crate::cuda::rotary::{RotaryAngles, RotaryPositions, rotate};
use crate::graph::{Grad, OpInputs};
use crate::kernels::rope;
use crate::nn::row_positions::RowPositions;
use crate::tensor::device_elements::with_each;
use crate::util::lock;
use candle_core::cuda_backend::WrapErr;
use candle_core::{CudaDevice, Result, Tensor};
use std::sync::{Arc, Mutex};

const NAME: &str = "rotary";

/// The angles of the positions used so far, on the GPUs that use them. Earlier tables are kept, because a kernel of
/// another thread may still read them. The number of positions of a table is rounded up to a power of two, so there are
/// few tables.
#[derive(Debug, Default)]
pub(in crate::nn) struct AngleTables(Mutex<Vec<Arc<RotaryAngles>>>);

impl AngleTables {
    /// Returns the angles of at least `positions` positions.
    fn on_device(&self, device: &CudaDevice, host: &rope::RotaryTable, positions: usize) -> Result<Arc<RotaryAngles>> {
        let mut tables = lock(&self.0);
        if let Some(angles) = tables.iter().rev().find(|angles| angles.are_on(device, positions)) {
            return Ok(angles.clone());
        }
        let (layout, half, [cos, sin]) = host.tables();
        let len = positions.max(1).next_power_of_two().saturating_mul(half).min(cos.len());
        let angles = Arc::new(RotaryAngles::new(device, layout, half, [&cos[..len], &sin[..len]])?);
        // The streams of other threads do not wait for this thread's stream.
        device.cuda_stream().synchronize().w()?;
        tables.push(angles.clone());
        Ok(angles)
    }
}

/// Rotates `x` `[batch, time, width]`. Its shape and positions have been checked.
pub(in crate::nn) fn rotary(
    x: &Tensor,
    tables: &AngleTables,
    host: &rope::RotaryTable,
    rows: &RowPositions,
) -> Result<Option<Tensor>> {
    let Some(device) = supported_device(&[x]) else { return Ok(None) };
    let (_, time, width) = x.dims3()?;
    let x = x.contiguous()?;
    let inputs = OpInputs::of([Some(&x)])?;
    let (end, first, positions) = match rows {
        RowPositions::From(first) => (first + time, *first, None),
        RowPositions::Of(sequences) => {
            let positions = sequences.positions();
            let on_device = (!positions.is_empty()).then(|| device.clone_htod(positions)).transpose()?;
            (sequences.longest(), 0, on_device)
        }
    };
    let angles = tables.on_device(&device, host, end)?;
    let rotated = move |x: &Tensor, direction: f32| {
        let positions = match &positions {
            Some(positions) => RotaryPositions::PerRow(positions, end),
            None => RotaryPositions::From { first, time },
        };
        with_each([x], NAME, |[x]| rotate(&device, &angles, x, width, &positions, direction))
    };
    let y = rotated(&x, 1.0)?;
    let gpu = x.device().clone();
    let y = inputs.result(NAME, y, x.shape().clone(), move |grad, [to_x]| {
        let len = grad.len();
        if !to_x.is_wanted() {
            return Ok(());
        }
        let dy = grad.into_tensor(&len.into(), &gpu)?.contiguous()?;
        to_x.deliver(Grad::of_storage(rotated(&dy, -1.0)?, len))
    })?;
    Ok(Some(y))
}
