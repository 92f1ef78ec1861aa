//! Layer normalization and root-mean-square normalization.

use super::supported_device;
use crate::cuda::norm::{self as kernel, NormStatistics};
use crate::graph::{Grad, InputGradSink, OpInputs, register_recompute};
use crate::nn::RmsNormOptions;
use crate::nn::saved_inputs::saved_inputs;
use crate::tensor::device_elements::with_each;
use candle_core::{CudaDevice, DType, Result, Tensor, bail};

const LAYER_NORM: &str = "layer_norm";
const RMS_NORM: &str = "rms_norm";

/// Computes [`crate::nn::layer_norm()`]. Shapes and dtypes have been checked.
pub(in crate::nn) fn layer_norm(x: &Tensor, weight: &Tensor, bias: &Tensor, eps: f64) -> Result<Option<Tensor>> {
    let Some(device) = supported_device(&[x, weight, bias]) else { return Ok(None) };
    let (x, weight, bias) = (x.contiguous()?, weight.contiguous()?, bias.contiguous()?);
    let inputs = OpInputs::of([Some(&x), Some(&weight), Some(&bias)])?;
    let (shape, bias_dtype) = (x.shape().clone(), bias.dtype());
    let (y, statistics) = with_each([&x, &weight, &bias], LAYER_NORM, |[x, weight, bias]| {
        kernel::layer_norm(&device, x, [weight, bias], eps as f32)
    })?;
    let saved_inputs = saved_inputs(&inputs, [&x, &weight, &bias])?;
    let saved = GpuNormBackward { device, name: LAYER_NORM, x, weight, offset: 0.0, statistics };
    let y = inputs.result(LAYER_NORM, y, shape, move |grad, [to_x, to_weight, to_bias]| {
        saved.backward(grad, to_x, to_weight, Some((to_bias, bias_dtype)))
    })?;
    if let Some([x, weight, bias]) = saved_inputs {
        register_recompute(&y, move || require_support(layer_norm(&x, &weight, &bias, eps)?));
    }
    Ok(Some(y))
}

/// Computes [`crate::nn::rms_norm_with()`]. Shapes and dtypes have been checked.
pub(in crate::nn) fn rms_norm(x: &Tensor, weight: &Tensor, options: RmsNormOptions) -> Result<Option<Tensor>> {
    let Some(device) = supported_device(&[x, weight]) else { return Ok(None) };
    let offset = if options.plus_one { 1.0 } else { 0.0 };
    let (x, weight) = (x.contiguous()?, weight.contiguous()?);
    let inputs = OpInputs::of([Some(&x), Some(&weight)])?;
    let shape = x.shape().clone();
    let (y, statistics) =
        with_each([&x, &weight], RMS_NORM, |operands| kernel::rms_norm(&device, operands, offset, options.eps as f32))?;
    let saved_inputs = saved_inputs(&inputs, [&x, &weight])?;
    let saved = GpuNormBackward { device, name: RMS_NORM, x, weight, offset, statistics };
    let y = inputs
        .result(RMS_NORM, y, shape, move |grad, [to_x, to_weight]| saved.backward(grad, to_x, to_weight, None))?;
    if let Some([x, weight]) = saved_inputs {
        register_recompute(&y, move || require_support(rms_norm(&x, &weight, options)?));
    }
    Ok(Some(y))
}

/// Returns the result of a computation that is repeated with operands that the kernels supported the first time.
fn require_support(y: Option<Tensor>) -> Result<Tensor> {
    match y {
        Some(y) => Ok(y),
        None => bail!("norm: kernels accepted these operands earlier, but not now"),
    }
}

/// The values that the backward pass needs.
struct GpuNormBackward {
    device: CudaDevice,
    name: &'static str,
    x: Tensor,
    weight: Tensor,
    offset: f32,
    statistics: NormStatistics,
}

impl GpuNormBackward {
    fn backward(
        &self,
        grad: Grad,
        to_x: &InputGradSink,
        to_weight: &InputGradSink,
        bias: Option<(&InputGradSink, DType)>,
    ) -> Result<()> {
        let Self { device, name, x, weight, offset, statistics } = self;
        let dy = grad.on_device(device)?;
        to_x.accumulate_on(device, x.dtype(), x.elem_count(), |dx, add| {
            with_each([x, weight, &dy], name, |operands| {
                kernel::input_gradient(device, statistics, operands, *offset, dx, add)
            })
        })?;
        if !to_weight.is_wanted() && !bias.is_some_and(|(sink, _)| sink.is_wanted()) {
            return Ok(());
        }
        let (weight_sums, bias_sums) =
            with_each([x, weight, &dy], name, |operands| kernel::parameter_gradients(device, statistics, operands))?;
        let width = weight.elem_count();
        to_weight.accumulate_on(device, weight.dtype(), width, |grad, add| weight_sums.put(device, grad, add))?;
        match (bias, bias_sums) {
            (Some((sink, dtype)), Some(sums)) => {
                sink.accumulate_on(device, dtype, width, |grad, add| sums.put(device, grad, add))
            }
            _ => Ok(()),
        }
    }
}
