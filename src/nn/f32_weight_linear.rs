//! Linear layers with f32 parameters and 16-bit activations (`keep_in_fp32_modules`, `ParameterGroup::keep_f32`).
//!
//! ```text
//!   x in 16 bits -> f32 \
//!                        product and bias in f32 -> rounded once to x's format
//!   weight in f32 ------/
//! ```
//!
//! The backward pass receives the gradient of the result in x's format and widens it. Each operand's gradient is summed
//! in f32 and converted to that operand's format.

use super::activation::apply_activation;
use super::linear_product::LinearSizes;
use super::{LinearEpilogue, WeightLayout, add, composed};
use crate::graph::{OpInputs, SavedTensor};
use crate::kernels::buffer;
use crate::kernels::element::Element as _;
use crate::kernels::gemm::{Epilogue, Matrix, column_sums};
use crate::tensor::element::{TensorElement, with_element, with_elements};
use candle_core::{DType, Result, Tensor};
use std::sync::Arc;

/// Returns whether a parameter is wider than the activations.
pub(super) fn is_wider(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> bool {
    let is_f32 = |t: &Tensor| t.dtype() == DType::F32;
    matches!(x.dtype(), DType::BF16 | DType::F16) && (is_f32(weight) || bias.is_some_and(is_f32))
}

/// Computes [`linear_with_epilogue`](super::linear_with_epilogue) with the product in f32; the epilogue takes the
/// result in x's format.
pub(super) fn linear_with_epilogue(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    layout: WeightLayout,
    epilogue: LinearEpilogue<'_>,
) -> Result<Tensor> {
    let y = if x.device().is_cpu() {
        with_element!(x.dtype(), NAME, E => linear::<E>(x, weight, bias, layout))?
    } else {
        let wide = |t: &Tensor| t.to_dtype(DType::F32);
        let bias = bias.map(wide).transpose()?;
        composed::linear(&wide(x)?, &wide(weight)?, bias.as_ref(), layout)?.to_dtype(x.dtype())?
    };
    apply_epilogue(y, epilogue)
}

/// Applies the epilogue to an existing product, in separate passes.
pub(super) fn apply_epilogue(y: Tensor, epilogue: LinearEpilogue<'_>) -> Result<Tensor> {
    let y = match epilogue.activation {
        Some(function) => apply_activation(function, &y)?,
        None => y,
    };
    epilogue.residual.map_or(Ok(y.clone()), |residual| add(residual, &y))
}

const NAME: &str = "linear (f32 weight)";

fn linear<E: TensorElement>(
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
    let mut y = buffer::<f32>(shape.elem_count());
    with_f32_values(&x, |x| {
        with_f32_values(&weight, |w| {
            let mut product = |bias: Option<&[f32]>| {
                let epilogue = Epilogue { bias, ..Epilogue::default() };
                s.product(x, w, &mut y, epilogue);
                Ok(())
            };
            match &bias {
                Some(bias) => with_f32_values(bias, |bias| product(Some(bias))),
                None => product(None),
            }
        })
    })?;
    let mut low = buffer::<E>(y.len());
    E::narrow(&y, &mut low);
    drop(y);
    let (kept_x, dtypes) = (Arc::new(SavedTensor::of(&x)), (weight.dtype(), bias.as_ref().map(Tensor::dtype)));
    inputs.result(NAME, E::storage(low), shape, move |grad, [to_x, to_weight, to_bias]| {
        let mut wide = buffer::<f32>(grad.len());
        grad.read::<E, _>(NAME, |dy| {
            E::widen(dy, &mut wide);
            Ok(())
        })?;
        let g = Matrix::new(&wide[..], s.rows, s.outputs);
        if let (true, Some(dtype)) = (to_bias.is_wanted(), dtypes.1) {
            let mut sums = vec![0f32; s.outputs];
            column_sums(g, &mut sums);
            with_element!(dtype, NAME, P => to_bias.deliver_sums::<P>(&sums))?;
        }
        let (kept_x, kept_bytes) = (kept_x.clone(), s.rows * s.inputs * size_of::<E>());
        to_weight.deliver_or_defer(&wide, kept_bytes, move |g, to_weight| {
            let product = |dw: &mut [f32], add: bool| {
                let epilogue = Epilogue { accumulate: add, ..Epilogue::default() };
                with_f32_values(&kept_x.get()?, |x| {
                    s.weight_gradient(x, Matrix::new(g, s.rows, s.outputs), dw, epilogue);
                    Ok(())
                })
            };
            if dtypes.0 == DType::F32 {
                return to_weight.accumulate::<f32>(s.inputs * s.outputs, product);
            }
            let mut sums = buffer::<f32>(s.inputs * s.outputs);
            product(&mut sums, false)?;
            with_element!(dtypes.0, NAME, P => to_weight.deliver_sums::<P>(&sums))
        })?;
        if to_x.is_wanted() {
            let mut sums = buffer::<f32>(s.rows * s.inputs);
            with_f32_values(&weight, |w| {
                s.input_gradient(g, w, &mut sums, Epilogue::default());
                Ok(())
            })?;
            to_x.deliver_sums::<E>(&sums)?;
        }
        Ok(())
    })
}

/// Calls `look` with a tensor's values in f32, without copying them if they are already f32.
pub(super) fn with_f32_values<R>(tensor: &Tensor, look: impl FnOnce(&[f32]) -> Result<R>) -> Result<R> {
    if tensor.dtype() == DType::F32 {
        return with_elements::<f32, _>(tensor, NAME, look);
    }
    with_element!(tensor.dtype(), NAME, P => with_elements::<P, _>(tensor, NAME, |values| {
        let mut wide = buffer::<f32>(values.len());
        P::widen(values, &mut wide);
        look(&wide)
    }))
}
