//! The layers' functions composed of Candle's differentiable ops. They run where this library has no kernels (other
//! devices, f64), and its kernels are tested against them.
//!
//! 16-bit inputs are widened to f32 before sums or exponentials, because Candle sums in the storage dtype.

mod convolution_and_pooling;
mod experts;

pub(super) use convolution_and_pooling::{avg_pool2d, max_pool2d, resample, scatter, scatter_add};
pub use convolution_and_pooling::{conv_transpose1d, conv1d, matmul};
pub use experts::{
    add_gated, combine_experts, expert_projection, expert_rows, gated_activation, load_balancing_loss, routing_weights,
};

use super::{
    Activation, AttentionOptions, LinearEpilogue, RmsNormOptions, RotaryLayout, RotaryPairs, Sequences, WeightLayout,
    frequencies,
};
use candle_core::{D, DType, Result, Tensor};

/// Returns a 16-bit tensor in f32, and any other tensor unchanged.
fn wide(x: &Tensor) -> Result<Tensor> {
    if matches!(x.dtype(), DType::BF16 | DType::F16) { x.to_dtype(DType::F32) } else { Ok(x.clone()) }
}

/// See [`crate::nn::linear()`]. Sums are computed as the device computes them: in f32 for 16-bit operands on CUDA.
pub fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, layout: WeightLayout) -> Result<Tensor> {
    let mut dims = x.dims().to_vec();
    let inputs = dims.pop().unwrap_or(0);
    let rows = dims.iter().product::<usize>();
    // Two dimensions are used because Candle's batched product misreads some broadcast or transposed operands.
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

/// See [`crate::nn::linear_with_epilogue`].
pub fn linear_with_epilogue(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    layout: WeightLayout,
    epilogue: LinearEpilogue<'_>,
) -> Result<Tensor> {
    let y = linear(x, weight, bias, layout)?;
    let y = match epilogue.activation {
        Some(Activation::GeluTanh) => gelu_tanh(&y)?,
        Some(Activation::Gelu) => gelu(&y)?,
        Some(Activation::Silu) => silu(&y)?,
        Some(Activation::ReluSquared) => relu_squared(&y)?,
        None => y,
    };
    epilogue.residual.map_or(Ok(y.clone()), |residual| residual + y)
}

/// See [`crate::nn::embedding()`]; ids must be valid.
pub fn embedding(ids: &Tensor, table: &Tensor) -> Result<Tensor> {
    let mut dims = ids.dims().to_vec();
    dims.push(table.dim(1)?);
    table.index_select(&ids.flatten_all()?, 0)?.reshape(dims)
}

/// See [`crate::nn::Embedding::padding`].
pub fn padded_embedding(ids: &Tensor, table: &Tensor, padding: u32) -> Result<Tensor> {
    let rows = embedding(ids, table)?;
    let is_padding = ids.eq(padding)?.unsqueeze(D::Minus1)?.broadcast_as(rows.shape())?;
    is_padding.where_cond(&rows.detach(), &rows)
}

/// See [`crate::nn::layer_norm()`].
pub fn layer_norm(x: &Tensor, weight: &Tensor, bias: &Tensor, eps: f64) -> Result<Tensor> {
    let h = wide(x)?;
    let h = h.broadcast_sub(&h.mean_keepdim(D::Minus1)?)?;
    let variance = h.sqr()?.mean_keepdim(D::Minus1)?;
    let h = h.broadcast_div(&(variance + eps)?.sqrt()?)?;
    h.broadcast_mul(&wide(weight)?)?.broadcast_add(&wide(bias)?)?.to_dtype(x.dtype())
}

/// See [`crate::nn::rms_norm()`].
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    rms_norm_with(x, weight, RmsNormOptions { eps, ..RmsNormOptions::default() })
}

/// See [`crate::nn::rms_norm_with()`].
pub fn rms_norm_with(x: &Tensor, weight: &Tensor, options: RmsNormOptions) -> Result<Tensor> {
    let h = wide(&x.reshape(((), weight.elem_count()))?)?;
    let square = h.sqr()?.mean_keepdim(D::Minus1)?;
    let h = h.broadcast_div(&(square + options.eps)?.sqrt()?)?;
    let one = if options.plus_one { 1.0 } else { 0.0 };
    h.broadcast_mul(&(wide(weight)? + one)?)?.reshape(x.shape())?.to_dtype(x.dtype())
}

/// See [`crate::nn::silu()`].
pub fn silu(x: &Tensor) -> Result<Tensor> {
    let h = wide(x)?;
    (&h / (h.neg()?.exp()? + 1.0)?)?.to_dtype(x.dtype())
}

/// See [`crate::nn::scale_in_f32`].
pub fn scale(x: &Tensor, factor: f64) -> Result<Tensor> {
    (wide(x)? * factor)?.to_dtype(x.dtype())
}

/// See [`crate::nn::relu_squared()`].
pub fn relu_squared(x: &Tensor) -> Result<Tensor> {
    wide(x)?.relu()?.sqr()?.to_dtype(x.dtype())
}

/// See [`crate::nn::swiglu()`].
pub fn swiglu(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    let h = wide(gate)?;
    ((&h / (h.neg()?.exp()? + 1.0)?)? * wide(up)?)?.to_dtype(gate.dtype())
}

/// See [`crate::nn::gelu_gated()`].
pub fn gelu_gated(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    (gelu_tanh(&wide(gate)?)? * wide(up)?)?.to_dtype(gate.dtype())
}

/// See [`crate::nn::exact_gelu_gated()`].
pub fn exact_gelu_gated(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    (gelu(&wide(gate)?)? * wide(up)?)?.to_dtype(gate.dtype())
}

/// See [`crate::nn::Rotary`].
pub fn rotary(x: &Tensor, head: usize, theta: f64) -> Result<Tensor> {
    rotary_from(x, head, theta, 0)
}

/// See [`crate::nn::Rotary::forward_from`].
pub fn rotary_from(x: &Tensor, head: usize, theta: f64, first: usize) -> Result<Tensor> {
    let (batch, time, _) = x.dims3()?;
    let positions: Vec<usize> = (0..batch).flat_map(|_| first..first + time).collect();
    rotary_at(x, &frequencies::default(head, theta)?, &positions)
}

/// See [`crate::nn::Rotary::forward_in`]; there is one position per row of `x`.
pub fn rotary_at(x: &Tensor, frequencies: &[f64], positions: &[usize]) -> Result<Tensor> {
    let layout = RotaryLayout::of_complete_heads(frequencies.len());
    rotary_with(x, layout, frequencies, positions, |_| 1.0)
}

/// See [`crate::nn::Rotary::with`]: rotates the first pairs of each head, with cosines and sines multiplied by a factor
/// that depends on the position.
pub fn rotary_with(
    x: &Tensor,
    layout: RotaryLayout,
    frequencies: &[f64],
    positions: &[usize],
    factor: impl Fn(usize) -> f64,
) -> Result<Tensor> {
    let (batch, time, width) = x.dims3()?;
    let (half, head) = (frequencies.len(), layout.head);
    let h = wide(&x.reshape((batch, time, width / head, head))?)?;
    let table = |f: fn(f64) -> f64| {
        let row_of = |t: usize| (frequencies.iter().map(move |frequency| f(t as f64 * frequency)), factor(t));
        let rows = positions.iter().map(|t| row_of(*t));
        let values = rows.flat_map(|(row, factor)| row.map(move |value| factor * value));
        Tensor::from_iter(values, x.device())?.reshape((batch, time, 1, half))?.to_dtype(h.dtype())
    };
    let (cos, sin) = (table(f64::cos)?, table(f64::sin)?);
    let (a, b) = match layout.pairs {
        RotaryPairs::Halves => (h.narrow(3, 0, half)?, h.narrow(3, half, half)?),
        RotaryPairs::Adjacent => {
            let pairs = h.narrow(3, 0, 2 * half)?.contiguous()?.reshape((batch, time, width / head, half, 2))?;
            (pairs.narrow(4, 0, 1)?.squeeze(4)?, pairs.narrow(4, 1, 1)?.squeeze(4)?)
        }
    };
    let first = (a.broadcast_mul(&cos)? - b.broadcast_mul(&sin)?)?;
    let second = (b.broadcast_mul(&cos)? + a.broadcast_mul(&sin)?)?;
    let rotated = match layout.pairs {
        RotaryPairs::Halves => Tensor::cat(&[first, second], 3)?,
        RotaryPairs::Adjacent => Tensor::stack(&[first, second], 4)?.reshape((batch, time, width / head, 2 * half))?,
    };
    let rest = h.narrow(3, 2 * half, head - 2 * half)?;
    let joined = if head == 2 * half { rotated } else { Tensor::cat(&[rotated, rest], 3)? };
    joined.reshape((batch, time, width))?.to_dtype(x.dtype())
}

/// See [`crate::nn::gelu()`].
pub fn gelu(x: &Tensor) -> Result<Tensor> {
    let h = wide(x)?;
    let erf_plus_one = ((&h * std::f64::consts::FRAC_1_SQRT_2)?.erf()? + 1.0)?;
    ((h * 0.5)? * erf_plus_one)?.to_dtype(x.dtype())
}

/// See [`crate::nn::gelu_tanh()`].
pub fn gelu_tanh(x: &Tensor) -> Result<Tensor> {
    // Candle's `gelu` is not used, because its backward pass uses constants with only six digits.
    let h = wide(x)?;
    let cube = (h.sqr()? * &h)?;
    let inner =
        ((&h + (cube * f64::from(crate::kernels::math::GELU_CUBIC))?)? * f64::from(crate::kernels::math::GELU_SCALE))?;
    ((h * 0.5)? * (inner.tanh()? + 1.0)?)?.to_dtype(x.dtype())
}

/// See [`crate::nn::causal_attention()`].
pub fn causal_attention(qkv: &Tensor, n_head: usize) -> Result<Tensor> {
    fused_attention(qkv, n_head, &AttentionOptions::default(), None)
}

/// See [`crate::nn::fused_attention()`].
pub fn fused_attention(
    qkv: &Tensor,
    n_head: usize,
    options: &AttentionOptions,
    sequences: Option<&Sequences>,
) -> Result<Tensor> {
    let width = qkv.dim(D::Minus1)? / 3;
    let part = |i: usize| qkv.narrow(D::Minus1, i * width, width);
    attention(&part(0)?, &part(1)?, &part(2)?, n_head, n_head, options, sequences)
}

/// See [`crate::nn::grouped_attention()`]. If there are more keys than queries, the queries occupy the last of the
/// keys' positions.
pub fn grouped_attention(q: &Tensor, k: &Tensor, v: &Tensor, n_head: usize, n_kv_head: usize) -> Result<Tensor> {
    attention(q, k, v, n_head, n_kv_head, &AttentionOptions::default(), None)
}

/// See [`crate::nn::attention()`]. Without sequences, there may be more keys than queries, as in [`grouped_attention`].
pub fn attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    n_head: usize,
    n_kv_head: usize,
    options: &AttentionOptions,
    sequences: Option<&Sequences>,
) -> Result<Tensor> {
    attention_with_optional_sinks([q, k, v], None, (n_head, n_kv_head), options, sequences)
}

/// See [`crate::nn::attention_with_sinks()`]. There may be more keys than queries, as in [`grouped_attention`].
pub fn attention_with_sinks(
    qkv: [&Tensor; 3],
    sinks: &Tensor,
    n_head: usize,
    n_kv_head: usize,
    options: &AttentionOptions,
    sequences: Option<&Sequences>,
) -> Result<Tensor> {
    attention_with_optional_sinks(qkv, Some(sinks), (n_head, n_kv_head), options, sequences)
}

/// Computes attention, with sinks if there are any.
pub(super) fn attention_with_optional_sinks(
    [q, k, v]: [&Tensor; 3],
    sinks: Option<&Tensor>,
    (n_head, n_kv_head): (usize, usize),
    options: &AttentionOptions,
    sequences: Option<&Sequences>,
) -> Result<Tensor> {
    let ((batch, time, width), dtype) = (q.dims3()?, q.dtype());
    let (keys, head, group) = (k.dim(1)?, width / n_head, n_head / n_kv_head);
    let split =
        |x: &Tensor, heads: usize| wide(&x.reshape((batch, x.dim(1)?, heads, head))?)?.transpose(1, 2)?.contiguous();
    // Repeats each key and value head for every query head that uses it.
    let repeat = |x: &Tensor| {
        let x = split(x, n_kv_head)?.unsqueeze(2)?;
        Tensor::cat(&vec![&x; group], 2)?.reshape((batch, n_head, keys, head))
    };
    let (q, k, v) = (split(q, n_head)?, repeat(k)?, repeat(v)?);
    let scores = (q.matmul(&k.t()?.contiguous()?)? * options.scale.unwrap_or(1.0 / (head as f64).sqrt()))?;
    let scores = options.soft_cap.map_or(Ok(scores.clone()), |cap| soft_capped(&scores, cap))?;
    let mask = attention_mask(options, sequences, [time, keys]);
    let mask = Tensor::from_vec(mask, (sequences.map_or(1, Sequences::batch), 1, time, keys), q.device())?;
    let scores = scores.broadcast_add(&mask.to_dtype(q.dtype())?)?;
    let probabilities = match sinks {
        None => candle_nn::ops::softmax(&scores, D::Minus1)?,
        Some(sinks) => {
            let sink_scores = wide(sinks)?.to_dtype(scores.dtype())?.reshape((1, n_head, 1, 1))?;
            let sink_scores = sink_scores.broadcast_as((batch, n_head, time, 1))?.contiguous()?;
            let with_sinks = Tensor::cat(&[scores, sink_scores], D::Minus1)?;
            candle_nn::ops::softmax(&with_sinks, D::Minus1)?.narrow(D::Minus1, 0, keys)?.contiguous()?
        }
    };
    let y = probabilities.matmul(&v)?;
    y.transpose(1, 2)?.contiguous()?.reshape((batch, time, width))?.to_dtype(dtype)
}

/// Computes c tanh(x / c).
fn soft_capped(x: &Tensor, cap: f64) -> Result<Tensor> {
    (x / cap)?.tanh()? * cap
}

/// Returns minus infinity for each key that a query must not see, and 0 for the others: for each row of the sequences,
/// or once for all rows.
fn attention_mask(options: &AttentionOptions, sequences: Option<&Sequences>, [time, keys]: [usize; 2]) -> Vec<f32> {
    let rows = sequences.map_or(1, Sequences::batch);
    let offset = keys.saturating_sub(time);
    let sees = |row: usize, i: usize, j: usize| {
        let first = |t: usize| sequences.map(|sequences| t - sequences.positions()[row * time + t] as usize);
        let in_window = options.window.is_none_or(|window| i.abs_diff(j) < window);
        (options.bidirectional || j <= i) && in_window && (sequences.is_none() || first(i) == first(j))
    };
    let pairs = (0..rows).flat_map(|row| (0..time).flat_map(move |i| (0..keys).map(move |j| (row, offset + i, j))));
    pairs.map(|(row, i, j)| if sees(row, i, j) { 0.0 } else { f32::NEG_INFINITY }).collect()
}

/// See [`crate::nn::cross_entropy()`]; targets must be valid. f64 logits produce an f64 loss.
pub fn cross_entropy(logits: &Tensor, targets: &Tensor) -> Result<Tensor> {
    log_probabilities(logits, targets, None)?.mean_all()?.neg()
}

/// See [`crate::nn::linear_log_probabilities()`]. Takes logits in rows; the targets must be valid.
pub fn log_probabilities(logits: &Tensor, targets: &Tensor, soft_cap: Option<f64>) -> Result<Tensor> {
    let classes = logits.dim(D::Minus1)?;
    let logits = wide(&logits.reshape(((), classes))?)?;
    let logits = soft_cap.map_or(Ok(logits.clone()), |cap| soft_capped(&logits, cap))?;
    let log_softmax = candle_nn::ops::log_softmax(&logits, D::Minus1)?;
    log_softmax.gather(&targets.reshape(((), 1))?, 1)?.flatten_all()
}
