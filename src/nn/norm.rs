//! Layer normalization (Ba et al. 2016) and root-mean-square normalization (Zhang and Sennrich 2019) over the last
//! dimension.

use crate::graph::{OpInputs, register_recompute};
use crate::kernels::element::Element as _;
use crate::kernels::{buffer, norm};
#[cfg(feature = "cuda")]
use crate::nn::on_gpu;
use crate::nn::saved_inputs::saved_inputs;
use crate::nn::{LayerNormOptions, RmsNormOptions, composed};
use crate::tensor::element::{TensorElement, with_element, with_elements};
use candle_core::{DType, Error, Result, Tensor, bail};
use candle_nn::{Module, VarBuilder, init};

/// Computes (x - mean) / sqrt(variance + eps) * weight + bias over the last dimension of x `[.., width]`. The weight
/// and the bias are `[width]`, each of x's dtype or in f32. The variance is the biased one. Statistics are in f32 and
/// kept for the backward pass. Results are rounded once, to x's dtype. A gradient has the dtype of its operand.
///
/// # Errors
/// A weight or bias of a different length, or of a dtype that is neither that of x nor f32; on the CPU, an x that is
/// not f32, bf16 or f16.
pub fn layer_norm(x: &Tensor, weight: &Tensor, bias: &Tensor, eps: f64) -> Result<Tensor> {
    let width = width_of(LAYER_NORM, x, &[("weight", weight), ("bias", bias)])?;
    #[cfg(feature = "cuda")]
    if let Some(y) = on_gpu::norm::layer_norm(x, weight, bias, eps)? {
        return Ok(y);
    }
    if !x.device().is_cpu() {
        return composed::layer_norm(x, weight, bias, eps);
    }
    let (x, weight, bias) = (x.contiguous()?, weight.contiguous()?, bias.contiguous()?);
    let inputs = OpInputs::of([Some(&x), Some(&weight), Some(&bias)])?;
    let shape = x.shape().clone();
    with_element!(x.dtype(), LAYER_NORM, E => {
        let (mut y, mut stats) = (buffer::<E>(x.elem_count()), vec![[0f32; 2]; x.elem_count() / width]);
        let (wide_weight, wide_bias) = (widened(&weight, LAYER_NORM)?, widened(&bias, LAYER_NORM)?);
        with_elements(&x, LAYER_NORM, |x| {
            norm::layer_norm::<E>(x, &wide_weight, &wide_bias, eps as f32, &mut y, &mut stats);
            Ok(())
        })?;
        let saved_inputs = saved_inputs(&inputs, [&x, &weight, &bias])?;
        let y = inputs.result(LAYER_NORM, E::storage(y), shape, move |grad, [to_x, to_weight, to_bias]| {
            let (mut dweight, mut dbias) = (vec![0f32; width], vec![0f32; width]);
            to_x.accumulate_if_wanted::<E>(grad.len(), |dx| {
                let wide_weight = widened(&weight, LAYER_NORM)?;
                with_elements(&x, LAYER_NORM, |x| {
                    grad.read::<E, _>(LAYER_NORM, |dy| {
                        let (dweight, dbias) = (Some(&mut dweight[..]), Some(&mut dbias[..]));
                        norm::layer_norm_backward(x, &wide_weight, &stats, dy, dx, dweight, dbias);
                        Ok(())
                    })
                })
            })?;
            with_element!(weight.dtype(), LAYER_NORM, P => to_weight.deliver_sums::<P>(&dweight))?;
            with_element!(bias.dtype(), LAYER_NORM, P => to_bias.deliver_sums::<P>(&dbias))
        })?;
        if let Some([x, weight, bias]) = saved_inputs {
            register_recompute(&y, move || layer_norm(&x, &weight, &bias, eps));
        }
        Ok(y)
    })
}

/// Computes x / sqrt(mean(x^2) + eps) * weight over the last dimension of x `[.., width]`. The weight is `[width]`, of
/// x's dtype or in f32. Statistics are in f32 and kept for the backward pass. Results are rounded once, to x's dtype. A
/// gradient has the dtype of its operand.
///
/// # Errors
/// A weight of a different length, or of a dtype that is neither that of x nor f32; on the CPU, an x that is not f32,
/// bf16 or f16.
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    rms_norm_with(x, weight, RmsNormOptions { eps, ..RmsNormOptions::default() })
}

/// Computes [`rms_norm`] with options.
///
/// # Errors
/// The errors of [`rms_norm`]; with `by_head`, a last dimension that is not a multiple of the weight's length.
pub fn rms_norm_with(x: &Tensor, weight: &Tensor, options: RmsNormOptions) -> Result<Tensor> {
    let width = if options.by_head { head_of(x, weight)? } else { width_of(RMS_NORM, x, &[("weight", weight)])? };
    let (eps, offset) = (options.eps, if options.plus_one { 1.0 } else { 0.0 });
    #[cfg(feature = "cuda")]
    if let Some(y) = on_gpu::norm::rms_norm(x, weight, options)? {
        return Ok(y);
    }
    if !x.device().is_cpu() {
        return composed::rms_norm_with(x, weight, options);
    }
    let (x, weight) = (x.contiguous()?, weight.contiguous()?);
    let inputs = OpInputs::of([Some(&x), Some(&weight)])?;
    let shape = x.shape().clone();
    with_element!(x.dtype(), RMS_NORM, E => {
        let (mut y, mut stats) = (buffer::<E>(x.elem_count()), vec![0f32; x.elem_count() / width]);
        let wide_weight = plus(widened(&weight, RMS_NORM)?, offset);
        with_elements(&x, RMS_NORM, |x| {
            norm::rms_norm::<E>(x, &wide_weight, eps as f32, &mut y, &mut stats);
            Ok(())
        })?;
        let saved_inputs = saved_inputs(&inputs, [&x, &weight])?;
        let y = inputs.result(RMS_NORM, E::storage(y), shape, move |grad, [to_x, to_weight]| {
            let mut dweight = vec![0f32; width];
            to_x.accumulate_if_wanted::<E>(grad.len(), |dx| {
                let wide_weight = plus(widened(&weight, RMS_NORM)?, offset);
                with_elements(&x, RMS_NORM, |x| {
                    grad.read::<E, _>(RMS_NORM, |dy| {
                        norm::rms_norm_backward(x, &wide_weight, &stats, dy, dx, Some(&mut dweight));
                        Ok(())
                    })
                })
            })?;
            with_element!(weight.dtype(), RMS_NORM, P => to_weight.deliver_sums::<P>(&dweight))
        })?;
        if let Some([x, weight]) = saved_inputs {
            register_recompute(&y, move || rms_norm_with(&x, &weight, options));
        }
        Ok(y)
    })
}

/// Adds `offset` to each value.
fn plus(mut values: Vec<f32>, offset: f32) -> Vec<f32> {
    values.iter_mut().for_each(|value| *value += offset);
    values
}

/// Returns the length of the weight, which must divide the input's last dimension.
fn head_of(x: &Tensor, weight: &Tensor) -> Result<usize> {
    let (dims, last) = (weight.dims(), x.dims().last().copied().unwrap_or(0));
    match *dims {
        [head] if head > 0 && last > 0 && last.is_multiple_of(head) => {
            check_format(RMS_NORM, x, weight)?;
            Ok(head)
        }
        _ => bail!(
            "{RMS_NORM}: the weight has shape {dims:?}, but must be a vector whose length divides the last dimension \
             of the input, which has shape {:?}",
            x.dims()
        ),
    }
}

/// Returns the values of a parameter in f32.
pub(super) fn widened(parameter: &Tensor, op: &'static str) -> Result<Vec<f32>> {
    with_element!(parameter.dtype(), op, P => with_elements::<P, _>(parameter, op, |values| {
        let mut wide = vec![0f32; values.len()];
        P::widen(values, &mut wide);
        Ok(wide)
    }))
}

const LAYER_NORM: &str = "layer_norm";
const RMS_NORM: &str = "rms_norm";

/// Returns the length of the last dimension, which must also be the length of the parameters.
fn width_of(op: &'static str, x: &Tensor, params: &[(&str, &Tensor)]) -> Result<usize> {
    let width = x.dims().last().copied().unwrap_or(0);
    if x.rank() == 0 || width == 0 || params.iter().any(|(_, p)| p.dims() != [width]) {
        let found: Vec<String> = params.iter().map(|(name, p)| format!("{name} {:?}", p.dims())).collect();
        bail!(
            "{op}: {} must have the length of the last dimension of the input, which has shape {:?}",
            found.join(" and "),
            x.dims()
        )
    }
    params.iter().try_for_each(|(_, parameter)| check_format(op, x, parameter))?;
    Ok(width)
}

/// Checks that a parameter has the input's dtype or is in f32.
pub(super) fn check_format(op: &'static str, x: &Tensor, parameter: &Tensor) -> Result<()> {
    let (lhs, rhs) = (x.dtype(), parameter.dtype());
    if [lhs, DType::F32].contains(&rhs) { Ok(()) } else { Err(Error::DTypeMismatchBinaryOp { lhs, rhs, op }.bt()) }
}

/// Layer normalization with parameters "weight" and, unless the options leave it out, "bias", which starts at 0.
#[derive(Debug, Clone)]
pub struct LayerNorm {
    weight: Tensor,
    /// The bias parameter, or zeros if there is none.
    bias: Tensor,
    options: LayerNormOptions,
}

impl LayerNorm {
    /// Builds a layer over a last dimension of `width` elements.
    pub fn new(width: usize, eps: f64, vb: VarBuilder<'_>) -> Result<Self> {
        Self::with(width, LayerNormOptions { eps, ..LayerNormOptions::default() }, vb)
    }

    /// Builds a layer with options over a last dimension of `width` elements. The weight starts at the value that makes
    /// the factor 1.
    pub fn with(width: usize, options: LayerNormOptions, vb: VarBuilder<'_>) -> Result<Self> {
        let start = if options.plus_one { init::ZERO } else { init::ONE };
        let weight = vb.get_with_hints(width, "weight", start)?;
        let bias = match options.bias {
            true => vb.get_with_hints(width, "bias", init::ZERO)?,
            false => Tensor::zeros(width, weight.dtype(), weight.device())?,
        };
        Ok(Self { weight, bias, options })
    }
}

impl Module for LayerNorm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self.options.plus_one {
            false => layer_norm(x, &self.weight, &self.bias, self.options.eps),
            true => layer_norm(x, &self.weight.affine(1.0, 1.0)?, &self.bias, self.options.eps),
        }
    }
}

/// Root-mean-square normalization with a parameter "weight".
#[derive(Debug, Clone)]
pub struct RmsNorm {
    weight: Tensor,
    options: RmsNormOptions,
}

impl RmsNorm {
    /// Builds a layer over a last dimension of `width` elements. The weight starts at 1.
    pub fn new(width: usize, eps: f64, vb: VarBuilder<'_>) -> Result<Self> {
        Self::with(width, RmsNormOptions { eps, ..RmsNormOptions::default() }, vb)
    }

    /// Builds a layer with options and a weight `[width]`; `width` is the length of the last dimension or of a head.
    /// The weight starts at the value that makes the factor 1.
    pub fn with(width: usize, options: RmsNormOptions, vb: VarBuilder<'_>) -> Result<Self> {
        let start = if options.plus_one { init::ZERO } else { init::ONE };
        Ok(Self { weight: vb.get_with_hints(width, "weight", start)?, options })
    }
}

impl Module for RmsNorm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        rms_norm_with(x, &self.weight, self.options)
    }
}
