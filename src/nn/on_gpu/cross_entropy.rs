//! The cross entropy with target classes, computed from logits or from hidden states and an output projection.
//!
//! ```text
//!   hidden states --(rows that count)--> chunk --(product)--> logits
//!   logits --(kernel)--> losses, and the gradient of the logits, in the logits' memory
//!   gradient of the logits --(products)--> gradient of the chunk, and a part of the weight's gradient
//! ```
//!
//! Products are computed by Candle with cuBLAS: each is rounded to the operands' dtype. The parts of the weight's
//! gradient are summed in f32.

use super::supported_device;
use crate::cuda::cross_entropy::{self as kernel, CrossEntropyArguments, DeviceTargets, LossGradientScale};
use crate::cuda::embedding::{NO_ROW, look_up};
use crate::cuda::{add, alloc_and_write, copy, zeros};
use crate::graph::{Grad, OpInputs, is_single_backward};
use crate::nn::WeightLayout;
use crate::tensor::device_elements::{change, tensor_of, with_each};
use crate::util::lock;
use candle_core::cuda_backend::cudarc::driver::CudaSlice;
use candle_core::{CudaDevice, DType, Result, Tensor, bail};
use std::sync::Mutex;

/// The approximate maximum number of bytes of logits that exist at a time. Tests use several chunks of few rows.
const CHUNK_BYTES: usize = if cfg!(test) { 1 } else { 256 << 20 };

/// Allocates memory for losses: for at least one, because some drivers refuse to allocate zero bytes.
fn allocate_losses(device: &CudaDevice, count: usize) -> Result<CudaSlice<f32>> {
    device.alloc_zeros(count.max(1))
}

/// Returns the sum of the losses of logits `[.., classes]`, divided by `divisor`.
pub(in crate::nn) fn of_logits(
    logits: &Tensor,
    targets: &[u32],
    cap: Option<f32>,
    divisor: f64,
) -> Result<Option<Tensor>> {
    const NAME: &str = "cross_entropy";
    let Some(device) = supported_device(&[logits]) else { return Ok(None) };
    let (logits, rows) = (logits.contiguous()?, targets.len());
    let classes = logits.dims().last().copied().unwrap_or(1);
    let inputs = OpInputs::of([Some(&logits)])?;
    let targets = DeviceTargets::new(&device, targets, classes)?;
    let mut losses = allocate_losses(&device, rows)?;
    let arguments = CrossEntropyArguments { classes, targets: &targets, first: 0, rows, cap };
    with_each([&logits], NAME, |[logits]| kernel::losses(&device, &arguments, logits, 1.0, &mut losses))?;
    let loss = kernel::mean(&device, &losses, rows, divisor)?;
    let loss = inputs.result(NAME, loss, (), move |grad, [to_logits]| {
        let grad = grad.on_device(&device)?;
        let arguments = CrossEntropyArguments { classes, targets: &targets, first: 0, rows, cap };
        to_logits.make_on(&device, logits.dtype(), logits.elem_count(), |d| {
            with_each([&logits, &grad], NAME, |[logits, grad]| {
                let scale = LossGradientScale::All(grad, divisor as f32);
                kernel::gradients(&device, &arguments, Some(logits), &scale, d, None)
            })
        })
    })?;
    Ok(Some(loss))
}

/// An output projection and the rows of hidden states that count.
pub(in crate::nn) struct GpuLossHead {
    device: CudaDevice,
    targets: DeviceTargets,
    /// The rows that count, if not all rows do.
    selection: Option<SelectedRows>,
    count: usize,
    total_rows: usize,
    cap: Option<f32>,
    classes: usize,
    width: usize,
    layout: WeightLayout,
}

/// A selection of rows.
struct SelectedRows {
    rows: Vec<u32>,
    /// For every row of the tensor, its index within the selection.
    indices: Vec<u32>,
}

/// The losses and gradients of the rows that count.
struct LossAndGradients {
    losses: CudaSlice<f32>,
    dh: Option<Tensor>,
    dweight: Option<Tensor>,
}

impl GpuLossHead {
    /// Creates a head for these operands, if kernels support them. Of the `total_rows` rows, those with the indices
    /// `rows` count, and have these targets.
    pub fn new(
        h: &Tensor,
        weight: &Tensor,
        (rows, targets, total_rows): (&[usize], &[u32], usize),
        cap: Option<f32>,
        layout: WeightLayout,
    ) -> Result<Option<Self>> {
        let Some(device) = supported_device(&[h, weight]).filter(|_| h.dtype() == weight.dtype()) else {
            return Ok(None);
        };
        let (rows_of, columns) = weight.dims2()?;
        let (classes, width) = if layout == WeightLayout::OutIn { (rows_of, columns) } else { (columns, rows_of) };
        let selection = (rows.len() < total_rows).then(|| {
            let mut indices = vec![NO_ROW; total_rows];
            (0..).zip(rows).for_each(|(index, row)| indices[*row] = index);
            SelectedRows { rows: rows.iter().map(|row| *row as u32).collect(), indices }
        });
        let targets = DeviceTargets::new(&device, targets, classes)?;
        Ok(Some(Self { device, targets, selection, count: rows.len(), total_rows, cap, classes, width, layout }))
    }

    /// Selects the rows of `x` `[total rows, width]` that count.
    fn select(&self, op: &'static str, x: &Tensor, width: usize) -> Result<Tensor> {
        let x = x.detach().reshape((self.total_rows, width))?;
        let Some(selection) = &self.selection else { return Ok(x) };
        let rows = with_each([&x], op, |[values]| look_up(&self.device, &selection.rows, values, width, x.dtype()))?;
        Ok(tensor_of(rows, (self.count, width)))
    }

    /// Expands the rows that count to all rows, with zeros for the others.
    fn expand(&self, op: &'static str, some_rows: Tensor, width: usize) -> Result<Tensor> {
        let Some(selection) = &self.selection else { return Ok(some_rows) };
        let dtype = some_rows.dtype();
        let all = with_each([&some_rows], op, |[rows]| look_up(&self.device, &selection.indices, rows, width, dtype))?;
        Ok(tensor_of(all, (self.total_rows, width)))
    }

    /// Returns the losses of the rows that count, and the gradients that are wanted: those of the sum of these losses,
    /// in which each loss is multiplied by its `scale`. If no gradient is wanted, the returned losses are multiplied by
    /// `sign`. `h` contains only the rows that count.
    fn run(
        &self,
        op: &'static str,
        h: &Tensor,
        weight: &Tensor,
        [wants_h, wants_weight]: [bool; 2],
        sign: f32,
        scale: &LossGradientScale<'_>,
    ) -> Result<LossAndGradients> {
        // If the weight is absent, this call returns an error that names the weight.
        with_each([weight], op, |_| Ok(()))?;
        let weight = weight.detach();
        let to_classes = if self.layout == WeightLayout::OutIn { weight.t()? } else { weight.clone() };
        let mut losses = allocate_losses(&self.device, self.count)?;
        let (mut dh, mut dweight) = (Vec::new(), None);
        let max_rows = CHUNK_BYTES / h.dtype().size_in_bytes() / self.classes.max(1);
        let step = (max_rows / 64 * 64).max(64);
        for first in (0..self.count).step_by(step) {
            let rows = step.min(self.count - first);
            let chunk = h.narrow(0, first, rows)?;
            let args =
                CrossEntropyArguments { classes: self.classes, targets: &self.targets, first, rows, cap: self.cap };
            let logits = chunk.matmul(&to_classes)?;
            if !wants_h && !wants_weight {
                with_each([&logits], op, |[logits]| kernel::losses(&self.device, &args, logits, sign, &mut losses))?;
                continue;
            }
            change(&logits, |d| kernel::gradients(&self.device, &args, None, scale, d, Some(&mut losses)))?;
            if wants_h {
                dh.push(logits.matmul(&to_classes.t()?)?);
            }
            if wants_weight {
                let product = match self.layout {
                    WeightLayout::OutIn => logits.t()?.matmul(&chunk)?,
                    WeightLayout::InOut => chunk.t()?.matmul(&logits)?,
                };
                dweight = Some(self.accumulate(op, dweight, product)?);
            }
        }
        let zeros = |shape: &[usize]| -> Result<Tensor> {
            let len = shape.iter().product();
            Ok(tensor_of(zeros(&self.device, h.dtype(), len)?, shape))
        };
        let dh = match &dh[..] {
            _ if !wants_h => None,
            [] => Some(zeros(h.dims())?),
            [one] => Some(one.clone()),
            parts => Some(Tensor::cat(parts, 0)?),
        };
        let dweight = match dweight {
            None if wants_weight => Some(zeros(weight.dims())?),
            sum => sum,
        };
        Ok(LossAndGradients { losses, dh, dweight })
    }

    /// Adds a product to the sum so far. A sum of two or more products is in f32.
    fn accumulate(&self, op: &'static str, sum: Option<Tensor>, product: Tensor) -> Result<Tensor> {
        let (device, len) = (&self.device, product.elem_count());
        let Some(sum) = sum else { return Ok(product) };
        let sum = if sum.dtype() == DType::F32 {
            sum
        } else {
            let wide = alloc_and_write(device, DType::F32, len, |wide| {
                with_each([&sum], op, |[sum]| copy(device, wide, sum))
            })?;
            tensor_of(wide, sum.shape())
        };
        change(&sum, |sum| with_each([&product], op, |[product]| add(device, sum, product)))?;
        Ok(sum)
    }

    /// Returns the sum of the losses of hidden states `[.., width]`, divided by `divisor`.
    pub fn loss(self, h: &Tensor, weight: &Tensor, divisor: f64) -> Result<Tensor> {
        const NAME: &str = "linear_cross_entropy";
        let (h, weight) = (h.contiguous()?, weight.contiguous()?);
        let inputs = OpInputs::of([Some(&h), Some(&weight)])?;
        let (wants, dtype) = ([inputs.wants(0), inputs.wants(1)], h.dtype());
        let rows = self.select(NAME, &h, self.width)?;
        let LossAndGradients { losses, dh, dweight } =
            self.run(NAME, &rows, &weight, wants, 1.0, &LossGradientScale::One)?;
        let loss = kernel::mean(&self.device, &losses, self.count, divisor)?;
        let saved_gradients = Mutex::new(Some((dh, dweight)));
        inputs.result(NAME, loss, (), move |grad, [to_h, to_weight]| {
            let grad = grad.on_device(&self.device)?;
            let mut saved_gradients = lock(&saved_gradients);
            let grads = if is_single_backward() { saved_gradients.take() } else { saved_gradients.clone() };
            let Some((dh, dweight)) = grads else {
                bail!("{NAME}: the gradients of this loss have already been taken")
            };
            let scaled = |values: Tensor| -> Result<Tensor> {
                let scaled = with_each([&values, &grad], NAME, |[values, grad]| {
                    kernel::scaled_by(&self.device, values, grad, divisor as f32, dtype)
                })?;
                Ok(tensor_of(scaled, values.shape()))
            };
            if let Some(dweight) = dweight.filter(|_| to_weight.is_wanted()) {
                to_weight.deliver(Grad::OnDevice(scaled(dweight)?))?;
            }
            match dh.filter(|_| to_h.is_wanted()) {
                Some(dh) => to_h.deliver(Grad::OnDevice(self.expand(NAME, scaled(dh)?, self.width)?)),
                None => Ok(()),
            }
        })
    }

    /// Returns the logarithms of the targets' probabilities as a tensor of `shape`, with 0 for rows that do not count.
    pub fn log_probabilities(self, h: &Tensor, weight: &Tensor, shape: &[usize]) -> Result<Tensor> {
        const NAME: &str = "linear_log_probabilities";
        let (h, weight) = (h.contiguous()?, weight.contiguous()?);
        let inputs = OpInputs::of([Some(&h), Some(&weight)])?;
        let rows = self.select(NAME, &h, self.width)?;
        let LossAndGradients { losses, .. } =
            self.run(NAME, &rows, &weight, [false; 2], -1.0, &LossGradientScale::One)?;
        drop(rows);
        let values = crate::cuda::storage_of(&self.device, losses);
        let values = match &self.selection {
            None => values,
            Some(selection) => {
                let values = tensor_of(values, self.count.max(1));
                with_each([&values], NAME, |[v]| look_up(&self.device, &selection.indices, v, 1, DType::F32))?
            }
        };
        inputs.result(NAME, values, shape, move |grad, [to_h, to_weight]| {
            let grad = self.select(NAME, &grad.on_device(&self.device)?, 1)?;
            let wants = [to_h.is_wanted(), to_weight.is_wanted()];
            let rows = self.select(NAME, &h, self.width)?;
            let LossAndGradients { dh, dweight, .. } = with_each([&grad], NAME, |[grad]| {
                // The gradient of a log probability is minus the gradient of a loss.
                self.run(NAME, &rows, &weight, wants, -1.0, &LossGradientScale::Each(grad, -1.0))
            })?;
            if let Some(dweight) = dweight {
                to_weight.deliver(Grad::OnDevice(dweight.to_dtype(weight.dtype())?))?;
            }
            match dh {
                Some(dh) => to_h.deliver(Grad::OnDevice(self.expand(NAME, dh, self.width)?)),
                None => Ok(()),
            }
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use crate::nn::{self, WeightLayout, composed};
    use candle_core::{DType, Device, Tensor, Var};

    #[test]
    fn chunks_of_rows_give_what_all_rows_give() {
        let Ok(gpu) = Device::new_cuda(0) else { return };
        for (layout, dtype, tolerance) in [
            (WeightLayout::OutIn, DType::F32, 1e-6),
            (WeightLayout::InOut, DType::F32, 1e-6),
            (WeightLayout::OutIn, DType::BF16, 0.02),
        ] {
            let numbers = |rows: usize, columns: usize| {
                let values = (0..rows * columns).map(|i| ((i * 37 + columns) % 101) as f32 / 50.0 - 1.0);
                Tensor::from_iter(values, &gpu).unwrap().reshape((rows, columns)).unwrap().to_dtype(dtype).unwrap()
            };
            // These rows form three chunks.
            let (rows, classes, width) = (150, 37, 8);
            let weight = if layout == WeightLayout::OutIn { numbers(classes, width) } else { numbers(width, classes) };
            let vars = [numbers(rows, width), weight].map(|t| Var::from_tensor(&t).unwrap());
            let targets = Tensor::from_iter((0..rows as u32).map(|i| i * i % classes as u32), &gpu).unwrap();
            let values = |t: &Tensor| t.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
            let run = |loss: Tensor| {
                let grads = loss.backward().unwrap();
                [
                    values(&loss.reshape(1).unwrap()),
                    values(grads.get(&vars[0]).unwrap()),
                    values(grads.get(&vars[1]).unwrap()),
                ]
            };
            let got = run(nn::linear_cross_entropy(&vars[0], &vars[1], layout, &targets).unwrap());
            let logits = composed::linear(&vars[0], &vars[1], None, layout).unwrap();
            let want = run(composed::cross_entropy(&logits, &targets).unwrap());
            for (got, want) in got.iter().flatten().zip(want.iter().flatten()) {
                assert!((got - want).abs() <= tolerance * want.abs().max(1.0), "{layout:?} {dtype:?}: {got} {want}");
            }
        }
    }
}
