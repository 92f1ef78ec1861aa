//! Matrix products of an f32 model in a lower-precision format, like PyTorch's autocast (DeepSpeed's `torch_autocast`).
//!
//! Parameters, activations and gradients are f32. A linear layer rounds its input, its weight and its bias to the lower
//! format, computes the product with the bias in that format, and widens the result. Everything else is computed in f32
//! as usual.

use super::linear_product::LinearSizes;
use super::{LinearEpilogue, WeightLayout, composed, f32_weight_linear};
use crate::graph::{OpInputs, autocast_format};
use crate::kernels::buffer;
use crate::kernels::gemm::{Epilogue, Matrix, column_sums};
use crate::tensor::element::{TensorElement, with_element, with_elements};
use candle_core::{DType, Result, Tensor};
use std::sync::Arc;

/// Returns the lower format for a product of these operands, if autocast is enabled and both operands are f32.
pub(super) fn lower_format(x: &Tensor, weight: &Tensor) -> Option<DType> {
    autocast_format().filter(|_| x.dtype() == DType::F32 && weight.dtype() == DType::F32)
}

/// Computes [`linear_with_epilogue`](super::linear_with_epilogue) with the product in `dtype`; the epilogue is computed
/// in f32.
pub(super) fn linear_with_epilogue(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    layout: WeightLayout,
    epilogue: LinearEpilogue<'_>,
    dtype: DType,
) -> Result<Tensor> {
    let y = if x.device().is_cpu() {
        with_element!(dtype, NAME, L => linear::<L>(x, weight, bias, layout))?
    } else {
        let bias = bias.map(|bias| bias.to_dtype(dtype)).transpose()?;
        composed::linear(&x.to_dtype(dtype)?, &weight.to_dtype(dtype)?, bias.as_ref(), layout)?.to_dtype(DType::F32)?
    };
    f32_weight_linear::apply_epilogue(y, epilogue)
}

const NAME: &str = "linear (autocast)";

/// Computes the product in `L`. The rounded input is kept for the backward pass, which rounds the weight again, because
/// the weight may have left memory in the meantime.
fn linear<L: TensorElement>(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    layout: WeightLayout,
) -> Result<Tensor> {
    let s = LinearSizes::new(x.shape(), weight.shape(), bias.map(Tensor::shape), layout)?;
    let shape = s.result_shape(x.shape());
    let (x, weight) = (x.contiguous()?, weight.contiguous()?);
    let bias = bias.map(Tensor::contiguous).transpose()?;
    let inputs = OpInputs::of([Some(&x), Some(&weight), bias.as_ref()])?;
    let low_x = round_to::<L>(&x)?;
    let mut y = buffer::<L>(shape.elem_count());
    {
        let (w, bias) = (round_to::<L>(&weight)?, bias.as_ref().map(round_to::<L>).transpose()?);
        let epilogue = Epilogue { bias: bias.as_deref(), ..Epilogue::default() };
        s.product(&low_x, &w, &mut y, epilogue);
    }
    let saved_x = Arc::new(if inputs.are_wanted() { low_x } else { Vec::new() });
    inputs.result(NAME, f32::storage(widen(&y)), shape, move |grad, [to_x, to_weight, to_bias]| {
        let mut g = buffer::<L>(grad.len());
        grad.read::<f32, _>(NAME, |dy| {
            L::narrow(dy, &mut g);
            Ok(())
        })?;
        let rows = Matrix::new(&g[..], s.rows, s.outputs);
        if to_bias.is_wanted() {
            let mut sums = vec![0f32; s.outputs];
            column_sums(rows, &mut sums);
            to_bias.deliver_sums::<f32>(&sums)?;
        }
        let saved_x = saved_x.clone();
        to_weight.deliver_or_defer(&g, size_of_val(&saved_x[..]), move |g, to_weight| {
            to_weight.accumulate::<f32>(s.inputs * s.outputs, |dw, add| {
                let mut low = buffer::<L>(dw.len());
                s.weight_gradient(&saved_x, Matrix::new(g, s.rows, s.outputs), &mut low, Epilogue::default());
                write_gradient(&low, dw, add);
                Ok(())
            })
        })?;
        to_x.accumulate::<f32>(s.rows * s.inputs, |dx, add| {
            let w = round_to::<L>(&weight)?;
            let mut low = buffer::<L>(dx.len());
            s.input_gradient(rows, &w, &mut low, Epilogue::default());
            write_gradient(&low, dx, add);
            Ok(())
        })
    })
}

/// Returns the values of an f32 tensor, rounded to `L`.
fn round_to<L: TensorElement>(tensor: &Tensor) -> Result<Vec<L>> {
    with_elements::<f32, _>(tensor, NAME, |values| {
        let mut low = buffer::<L>(values.len());
        L::narrow(values, &mut low);
        Ok(low)
    })
}

fn widen<L: TensorElement>(low: &[L]) -> Vec<f32> {
    let mut wide = vec![0f32; low.len()];
    L::widen(low, &mut wide);
    wide
}

/// Widens a gradient to f32, and writes it to `grad` or, with `add`, adds it to `grad`.
fn write_gradient<L: TensorElement>(low: &[L], grad: &mut [f32], add: bool) {
    if add {
        grad.iter_mut().zip(widen(low)).for_each(|(sum, value)| *sum += value);
    } else {
        L::widen(low, grad);
    }
}
