//! Layer normalization (Ba et al. 2016) and root-mean-square normalization (Zhang and Sennrich 2019) over the last
//! dimension.

use crate::graph::{Inputs, can_remake};
use crate::kernels::{buffer, norm};
use crate::nn::composed;
use crate::tensor::element::{Element, with_all, with_element};
use candle_core::{Result, Tensor, bail};
use candle_nn::{Module, VarBuilder, init};

/// (x - mean) / sqrt(variance + eps) * weight + bias over the last dimension of x `[.., width]`; weight and bias
/// `[width]`, of x's dtype. The variance is the biased one. Statistics are in f32 and kept for backward, results are
/// rounded once.
///
/// # Errors
/// A weight or bias of another length.
pub fn layer_norm(x: &Tensor, weight: &Tensor, bias: &Tensor, eps: f64) -> Result<Tensor> {
    let width = width_of(LAYER_NORM, x, &[("weight", weight), ("bias", bias)])?;
    if !x.device().is_cpu() {
        return composed::layer_norm(x, weight, bias, eps);
    }
    let (x, weight, bias) = (x.contiguous()?, weight.contiguous()?, bias.contiguous()?);
    let inputs = Inputs::of([Some(&x), Some(&weight), Some(&bias)])?;
    let shape = x.shape().clone();
    with_element!(x.dtype(), LAYER_NORM, E => {
        let (mut y, mut stats) = (buffer::<E>(x.elem_count()), vec![[0f32; 2]; x.elem_count() / width]);
        with_all([Some(&x), Some(&weight), Some(&bias)], LAYER_NORM, |[x, weight, bias]| {
            let [x, weight, bias] = [x, weight, bias].map(Option::unwrap_or_default);
            norm::layer_norm(x, weight, bias, eps as f32, &mut y, &mut stats);
            Ok(())
        })?;
        let again = remade(&inputs, [&x, &weight, &bias])?;
        let y = inputs.result(LAYER_NORM, E::storage(y), shape, move |grad, [to_x, to_weight, to_bias]| {
            let (mut dweight, mut dbias) = (vec![0f32; width], vec![0f32; width]);
            to_x.accumulate_if_wanted::<E>(grad.len(), |dx| {
                with_all([Some(&x), Some(&weight)], LAYER_NORM, |[x, weight]| {
                    let (x, weight) = (x.unwrap_or_default(), weight.unwrap_or_default());
                    grad.read::<E, _>(LAYER_NORM, |dy| {
                        let (dweight, dbias) = (Some(&mut dweight[..]), Some(&mut dbias[..]));
                        norm::layer_norm_backward(x, weight, &stats, dy, dx, dweight, dbias);
                        Ok(())
                    })
                })
            })?;
            to_weight.give_sums::<E>(&dweight)?;
            to_bias.give_sums::<E>(&dbias)
        })?;
        if let Some([x, weight, bias]) = again {
            can_remake(&y, move || layer_norm(&x, &weight, &bias, eps));
        }
        Ok(y)
    })
}

/// x / sqrt(mean(x^2) + eps) * weight over the last dimension of x `[.., width]`; weight `[width]`, of x's dtype.
/// Statistics are in f32 and kept for backward, results are rounded once.
///
/// # Errors
/// A weight of another length.
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    let width = width_of(RMS_NORM, x, &[("weight", weight)])?;
    if !x.device().is_cpu() {
        return composed::rms_norm(x, weight, eps);
    }
    let (x, weight) = (x.contiguous()?, weight.contiguous()?);
    let inputs = Inputs::of([Some(&x), Some(&weight)])?;
    let shape = x.shape().clone();
    with_element!(x.dtype(), RMS_NORM, E => {
        let (mut y, mut stats) = (buffer::<E>(x.elem_count()), vec![0f32; x.elem_count() / width]);
        with_all([Some(&x), Some(&weight)], RMS_NORM, |[x, weight]| {
            norm::rms_norm(x.unwrap_or_default(), weight.unwrap_or_default(), eps as f32, &mut y, &mut stats);
            Ok(())
        })?;
        let again = remade(&inputs, [&x, &weight])?;
        let y = inputs.result(RMS_NORM, E::storage(y), shape, move |grad, [to_x, to_weight]| {
            let mut dweight = vec![0f32; width];
            to_x.accumulate_if_wanted::<E>(grad.len(), |dx| {
                with_all([Some(&x), Some(&weight)], RMS_NORM, |[x, weight]| {
                    let (x, weight) = (x.unwrap_or_default(), weight.unwrap_or_default());
                    grad.read::<E, _>(RMS_NORM, |dy| {
                        norm::rms_norm_backward(x, weight, &stats, dy, dx, Some(&mut dweight));
                        Ok(())
                    })
                })
            })?;
            to_weight.give_sums::<E>(&dweight)
        })?;
        if let Some([x, weight]) = again {
            can_remake(&y, move || rms_norm(&x, &weight, eps));
        }
        Ok(y)
    })
}

/// The inputs from which a result is computed again: the input, and copies of the parameters, which may have left
/// memory by then. Nothing where no backward will ask for it.
fn remade<const N: usize>(inputs: &Inputs<N>, operands: [&Tensor; N]) -> Result<Option<[Tensor; N]>> {
    if !inputs.are_wanted() {
        return Ok(None);
    }
    let mut kept = operands.map(Tensor::detach);
    for parameter in &mut kept[1..] {
        *parameter = parameter.copy()?.detach();
    }
    Ok(Some(kept))
}

const LAYER_NORM: &str = "layer_norm";
const RMS_NORM: &str = "rms_norm";

/// The length of the last dimension, which the parameters must have.
fn width_of(op: &str, x: &Tensor, params: &[(&str, &Tensor)]) -> Result<usize> {
    let width = x.dims().last().copied().unwrap_or(0);
    if x.rank() == 0 || width == 0 || params.iter().any(|(_, p)| p.dims() != [width]) {
        let found: Vec<String> = params.iter().map(|(name, p)| format!("{name} {:?}", p.dims())).collect();
        bail!("{op}: {} must have the length of the input's last dimension, {:?}", found.join(" and "), x.dims())
    }
    Ok(width)
}

/// Layer normalization with "weight" (starts at 1) and "bias" (starts at 0).
#[derive(Debug, Clone)]
pub struct LayerNorm {
    weight: Tensor,
    bias: Tensor,
    eps: f64,
}

impl LayerNorm {
    /// A layer over a last dimension of `width` elements.
    pub fn new(width: usize, eps: f64, vb: VarBuilder<'_>) -> Result<Self> {
        let weight = vb.get_with_hints(width, "weight", init::ONE)?;
        let bias = vb.get_with_hints(width, "bias", init::ZERO)?;
        Ok(Self { weight, bias, eps })
    }
}

impl Module for LayerNorm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        layer_norm(x, &self.weight, &self.bias, self.eps)
    }
}

/// Root-mean-square normalization with "weight" (starts at 1).
#[derive(Debug, Clone)]
pub struct RmsNorm {
    weight: Tensor,
    eps: f64,
}

impl RmsNorm {
    /// A layer over a last dimension of `width` elements.
    pub fn new(width: usize, eps: f64, vb: VarBuilder<'_>) -> Result<Self> {
        Ok(Self { weight: vb.get_with_hints(width, "weight", init::ONE)?, eps })
    }
}

impl Module for RmsNorm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        rms_norm(x, &self.weight, self.eps)
    }
}
