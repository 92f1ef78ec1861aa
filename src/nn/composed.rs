//! The layers' functions composed of Candle's differentiable ops: what runs on devices other than the CPU, and what
//! the CPU ops are tested against (also in f64, which these functions support).
//!
//! 16-bit inputs are widened to f32 where sums or exponentials are taken. Candle sums in the storage dtype otherwise.

use super::WeightLayout;
use candle_core::{D, DType, Result, Tensor};

/// f32 for 16-bit tensors, themselves for others.
fn wide(x: &Tensor) -> Result<Tensor> {
    if matches!(x.dtype(), DType::BF16 | DType::F16) { x.to_dtype(DType::F32) } else { Ok(x.clone()) }
}

/// See [`crate::nn::linear()`]. The product's sums are the device's: f32 for 16-bit operands on CUDA.
pub fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, layout: WeightLayout) -> Result<Tensor> {
    let mut dims = x.dims().to_vec();
    let inputs = dims.pop().unwrap_or(0);
    let rows = dims.iter().product::<usize>();
    // Two dimensions: Candle's batched product misreads some broadcast or transposed operands.
    let x = x.reshape((rows, inputs))?;
    let (y, outputs) = match layout {
        WeightLayout::OutIn => (x.matmul(&weight.t()?)?, weight.dim(0)?),
        WeightLayout::InOut => (x.matmul(weight)?, weight.dim(1)?),
    };
    let y = match bias {
        Some(bias) => y.broadcast_add(bias)?,
        None => y,
    };
    dims.push(outputs);
    y.reshape(dims)
}

/// See [`crate::nn::embedding()`]; ids must be valid.
pub fn embedding(ids: &Tensor, table: &Tensor) -> Result<Tensor> {
    let mut dims = ids.dims().to_vec();
    dims.push(table.dim(1)?);
    table.index_select(&ids.flatten_all()?, 0)?.reshape(dims)
}

/// See [`crate::nn::layer_norm()`].
pub fn layer_norm(x: &Tensor, weight: &Tensor, bias: &Tensor, eps: f64) -> Result<Tensor> {
    let h = wide(x)?;
    let h = h.broadcast_sub(&h.mean_keepdim(D::Minus1)?)?;
    let variance = h.sqr()?.mean_keepdim(D::Minus1)?;
    let h = h.broadcast_div(&(variance + eps)?.sqrt()?)?;
    h.broadcast_mul(&wide(weight)?)?.broadcast_add(&wide(bias)?)?.to_dtype(x.dtype())
}

/// See [`crate::nn::gelu_tanh()`].
pub fn gelu_tanh(x: &Tensor) -> Result<Tensor> {
    // Not Candle's `gelu`: its backward has constants of six digits.
    let h = wide(x)?;
    let cube = (h.sqr()? * &h)?;
    let inner = ((&h + (cube * f64::from(super::gelu::CUBIC))?)? * f64::from(super::gelu::SCALE))?;
    ((h * 0.5)? * (inner.tanh()? + 1.0)?)?.to_dtype(x.dtype())
}

/// See [`crate::nn::causal_attention()`].
pub fn causal_attention(qkv: &Tensor, n_head: usize) -> Result<Tensor> {
    let (batch, time, fused) = qkv.dims3()?;
    let (width, head) = (fused / 3, fused / 3 / n_head);
    let part = |i: usize| {
        let x = wide(&qkv.narrow(2, i * width, width)?)?;
        x.reshape((batch, time, n_head, head))?.transpose(1, 2)?.contiguous()
    };
    let (q, k, v) = (part(0)?, part(1)?, part(2)?);
    let hidden = (0..time).flat_map(|i| (0..time).map(move |j| if j > i { f32::NEG_INFINITY } else { 0.0 }));
    let mask = Tensor::from_iter(hidden, qkv.device())?.reshape((time, time))?.to_dtype(q.dtype())?;
    let scores = (q.matmul(&k.t()?.contiguous()?)? / (head as f64).sqrt())?.broadcast_add(&mask)?;
    let y = candle_nn::ops::softmax(&scores, D::Minus1)?.matmul(&v)?;
    y.transpose(1, 2)?.contiguous()?.reshape((batch, time, width))?.to_dtype(qkv.dtype())
}

/// See [`crate::nn::cross_entropy()`]; targets must be valid. f64 logits give a f64 loss.
pub fn cross_entropy(logits: &Tensor, targets: &Tensor) -> Result<Tensor> {
    let classes = logits.dim(D::Minus1)?;
    let logits = wide(&logits.reshape(((), classes))?)?;
    let picked = candle_nn::ops::log_softmax(&logits, D::Minus1)?.gather(&targets.reshape(((), 1))?, 1)?;
    picked.mean_all()?.neg()
}
