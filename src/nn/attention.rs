//! Multi-head attention, including grouped heads.

use crate::graph::{Grad, OpInputs, SavedResult};
use crate::kernels::attention::{self, AttentionRule, AttentionShape, MultiHeadRows, MultiHeadRowsMut};
use crate::kernels::buffer;
use crate::nn::f32_weight_linear::with_f32_values;
#[cfg(feature = "cuda")]
use crate::nn::on_gpu;
use crate::nn::{AttentionOptions, Sequences, composed};
use crate::tensor::element::{TensorElement, with_all, with_element};
use crate::util::counted;
use candle_core::{Result, Tensor, bail};

/// Computes softmax(q k^T / sqrt(head width), causal) v for `n_head` heads.
///
/// `qkv` `[batch, time, 3 width]` contains queries, keys and values side by side, each split into `n_head` equal heads,
/// as in the output of GPT-2's c_attn; the result is `[batch, time, width]`. Position t sees positions 0 to t.
/// Sums and the softmax are in f32 for every dtype. The work is done in tiles, without memory that is quadratic in the
/// number of positions, and without work for positions that are not seen.
///
/// # Errors
/// An input with a different number of dimensions, or a last dimension that is not divisible by `3 * n_head`.
pub fn causal_attention(qkv: &Tensor, n_head: usize) -> Result<Tensor> {
    fused_attention(qkv, n_head, &AttentionOptions::default(), None)
}

/// Computes [`causal_attention`] with options, and for packed rows. Each sequence gives the same bits as if it were
/// computed separately.
///
/// # Errors
/// The errors of [`causal_attention`]; options that are not positive and finite; sequences that do not match the batch.
pub fn fused_attention(
    qkv: &Tensor,
    n_head: usize,
    options: &AttentionOptions,
    sequences: Option<&Sequences>,
) -> Result<Tensor> {
    let heads = fused_heads(qkv, n_head)?;
    let (batch, time, width) = (heads.batch, heads.time, n_head * heads.head);
    let rule = options.rule(heads.head, sequences)?;
    sequences.map_or(Ok(()), |sequences| sequences.check(NAME, batch, time))?;
    #[cfg(feature = "cuda")]
    if let Some(y) = on_gpu::attention::attention(NAME, heads, [qkv], options, sequences)? {
        return Ok(y);
    }
    if !qkv.device().is_cpu() {
        return composed::fused_attention(qkv, n_head, options, sequences);
    }
    let fused = 3 * width;
    let qkv = qkv.contiguous()?;
    let inputs = OpInputs::of([Some(&qkv)])?;
    with_element!(qkv.dtype(), NAME, E => {
        let (mut y, mut lse) = (buffer::<E>(batch * time * width), vec![0f32; batch * n_head * time]);
        with_all([Some(&qkv)], NAME, |[x]| {
            if !y.is_empty() {
                attention::forward(&heads, &rule, fused_parts::<E>(x.unwrap_or_default(), width), &mut y, &mut lse);
            }
            Ok(())
        })?;
        let saved = SavedResult::default();
        let (result, options, sequences) = (saved.clone(), *options, sequences.cloned());
        let y = inputs.result(NAME, E::storage(y), (batch, time, width), move |grad, [to_qkv]| {
            let rule = options.rule(heads.head, sequences.as_ref())?;
            to_qkv.make::<E>(qkv.elem_count(), |dqkv| {
                if dqkv.is_empty() {
                    return Ok(());
                }
                let columns = [0..width, width..2 * width, 2 * width..fused];
                let gradients = MultiHeadRowsMut::columns(dqkv, fused, columns);
                with_all([Some(&qkv), Some(result.get()?)], NAME, |[x, y]| {
                    let qkv = fused_parts::<E>(x.unwrap_or_default(), width);
                    grad.read::<E, _>(NAME, |dy| {
                        attention::backward(&heads, &rule, qkv, (y.unwrap_or_default(), &lse, dy), gradients);
                        Ok(())
                    })
                })
            })
        })?;
        Ok(saved.save(y))
    })
}

/// Computes softmax(q k^T / sqrt(head width), causal) v for separate queries, keys and values with grouped heads.
///
/// `q` is `[batch, time, n_head * head]`, and `k` and `v` are `[batch, time, n_kv_head * head]`. `n_kv_head` divides
/// `n_head`, and each key and value head serves `n_head / n_kv_head` consecutive query heads. The result has the shape
/// of `q`. Everything else is as in [`causal_attention`].
///
/// # Errors
/// Shapes or numbers of heads that do not match.
pub fn grouped_attention(q: &Tensor, k: &Tensor, v: &Tensor, n_head: usize, n_kv_head: usize) -> Result<Tensor> {
    attention(q, k, v, n_head, n_kv_head, &AttentionOptions::default(), None)
}

/// Computes [`grouped_attention`] with options, and for packed rows. Each sequence gives the same bits as if it were
/// computed separately. Tiles in which no query sees a key are skipped, so packed rows and windows cost less than full
/// rows.
///
/// # Errors
/// The errors of [`grouped_attention`]; options that are not positive and finite; sequences that do not match the
/// batch.
pub fn attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    n_head: usize,
    n_kv_head: usize,
    options: &AttentionOptions,
    sequences: Option<&Sequences>,
) -> Result<Tensor> {
    attention_with_optional_sinks(q, k, v, None, (n_head, n_kv_head), options, sequences)
}

/// Computes [`attention()`] with a sink for each query head: a key without a value, which every query sees. `sinks`
/// `[n_head]` are the scores of the sinks (gpt-oss). The probabilities of the other keys then add up to less than 1.
///
/// # Errors
/// The errors of [`attention()`]; a number of sinks other than `n_head`.
pub fn attention_with_sinks(
    [q, k, v]: [&Tensor; 3],
    sinks: &Tensor,
    n_head: usize,
    n_kv_head: usize,
    options: &AttentionOptions,
    sequences: Option<&Sequences>,
) -> Result<Tensor> {
    attention_with_optional_sinks(q, k, v, Some(sinks), (n_head, n_kv_head), options, sequences)
}

/// Computes attention, with sinks if there are any.
pub(super) fn attention_with_optional_sinks(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    sinks: Option<&Tensor>,
    (n_head, n_kv_head): (usize, usize),
    options: &AttentionOptions,
    sequences: Option<&Sequences>,
) -> Result<Tensor> {
    let heads = grouped_heads(q, k, v, n_head, n_kv_head)?;
    check_sinks(sinks, n_head)?;
    let rule = options.rule(heads.head, sequences)?;
    sequences.map_or(Ok(()), |sequences| sequences.check(NAME, heads.batch, heads.time))?;
    #[cfg(feature = "cuda")]
    if sinks.is_none()
        && let Some(y) = on_gpu::attention::attention(NAME, heads, [q, k, v], options, sequences)?
    {
        return Ok(y);
    }
    if !q.device().is_cpu() {
        return composed::attention_with_optional_sinks([q, k, v], sinks, (n_head, n_kv_head), options, sequences);
    }
    let (q, k, v) = (q.contiguous()?, k.contiguous()?, v.contiguous()?);
    let inputs = OpInputs::of([Some(&q), Some(&k), Some(&v), sinks])?;
    let scores = sinks.map(wide_values).transpose()?;
    let (width, kv_width) = (n_head * heads.head, n_kv_head * heads.head);
    let shape = q.shape().clone();
    with_element!(q.dtype(), NAME, E => {
        let (mut y, mut lse) = (buffer::<E>(q.elem_count()), vec![0f32; heads.batch * heads.heads * heads.time]);
        with_all([Some(&q), Some(&k), Some(&v)], NAME, |[q, k, v]| {
            if !y.is_empty() {
                let qkv = [rows::<E>(q, width), rows(k, kv_width), rows(v, kv_width)];
                let rule = AttentionRule { sinks: scores.as_deref(), ..rule };
                attention::forward(&heads, &rule, qkv, &mut y, &mut lse);
            }
            Ok(())
        })?;
        let saved = SavedResult::default();
        let (result, options, sequences) = (saved.clone(), *options, sequences.cloned());
        let sinks_dtype = sinks.map(Tensor::dtype);
        let y = inputs.result(NAME, E::storage(y), shape, move |grad, [to_q, to_k, to_v, to_sinks]| {
            let rule = options.rule(heads.head, sequences.as_ref())?;
            let [mut dq, mut dk, mut dv] = [&q, &k, &v].map(|x| buffer::<E>(x.elem_count()));
            with_all([Some(&q), Some(&k), Some(&v), Some(result.get()?)], NAME, |[q, k, v, y]| {
                let gradient = |x| MultiHeadRowsMut::new(x, kv_width);
                let gradients = [MultiHeadRowsMut::new(&mut dq, width), gradient(&mut dk), gradient(&mut dv)];
                let qkv = [rows(q, width), rows(k, kv_width), rows(v, kv_width)];
                grad.read::<E, _>(NAME, |dy| {
                    let results = (y.unwrap_or_default(), &lse[..], dy);
                    attention::backward(&heads, &rule, qkv, results, gradients);
                    let Some(dtype) = sinks_dtype.filter(|_| to_sinks.is_wanted()) else { return Ok(()) };
                    let mut sums = vec![0f32; heads.heads];
                    let rule = AttentionRule { sinks: scores.as_deref(), ..rule };
                    attention::sink_gradients(&heads, &rule, results, &mut sums);
                    with_element!(dtype, NAME, P => to_sinks.deliver_sums::<P>(&sums))
                })
            })?;
            to_q.deliver(Grad::own(dq))?;
            to_k.deliver(Grad::own(dk))?;
            to_v.deliver(Grad::own(dv))
        })?;
        Ok(saved.save(y))
    })
}

/// Checks that there is a sink for each query head, if there are sinks.
pub(super) fn check_sinks(sinks: Option<&Tensor>, n_head: usize) -> Result<()> {
    match sinks.filter(|sinks| sinks.dims() != [n_head]) {
        Some(sinks) => {
            bail!(
                "attention: the sinks have shape {:?}; {} {} [{n_head}]",
                sinks.dims(),
                counted(n_head, "query head"),
                if n_head == 1 { "needs" } else { "need" }
            )
        }
        None => Ok(()),
    }
}

/// Returns the values of a parameter in f32.
pub(super) fn wide_values(parameter: &Tensor) -> Result<Vec<f32>> {
    with_f32_values(&parameter.contiguous()?, |values| Ok(values.to_vec()))
}

const NAME: &str = "causal_attention";

/// Returns the sizes of [`fused_attention`]'s input.
pub(super) fn fused_heads(qkv: &Tensor, n_head: usize) -> Result<AttentionShape> {
    match *qkv.dims() {
        [batch, time, fused] if n_head > 0 && fused > 0 && fused % (3 * n_head) == 0 => {
            Ok(AttentionShape { batch, time, heads: n_head, kv_heads: n_head, head: fused / (3 * n_head) })
        }
        ref dims => bail!(
            "causal_attention: the input has shape {dims:?}; it must be [batch, time, 3 * width] with a width \
             divisible by the number of heads, {n_head}"
        ),
    }
}

/// Returns the sizes of [`attention()`]'s inputs.
pub(super) fn grouped_heads(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    n_head: usize,
    n_kv_head: usize,
) -> Result<AttentionShape> {
    match (q.dims(), k.dims()) {
        (&[batch, time, width], &[kv_batch, kv_time, kv_width])
            if n_kv_head > 0
                && n_head > 0
                && n_head.is_multiple_of(n_kv_head)
                && width > 0
                && width.is_multiple_of(n_head)
                && kv_width == width / n_head * n_kv_head
                && (kv_batch, kv_time) == (batch, time)
                && k.dims() == v.dims() =>
        {
            Ok(AttentionShape { batch, time, heads: n_head, kv_heads: n_kv_head, head: width / n_head })
        }
        _ => bail!(
            "grouped_attention: queries {:?}, keys {:?} and values {:?} do not match {n_head} query and {}; \
             they must be [batch, time, heads * width of a head], and the number of query heads must be a multiple of \
             that of key heads",
            q.dims(),
            k.dims(),
            v.dims(),
            counted(n_kv_head, "key head")
        ),
    }
}

/// Returns the queries, keys and values that are side by side in `x`, `width` elements each.
pub(super) fn fused_parts<E: TensorElement>(x: &[E], width: usize) -> [MultiHeadRows<'_, E>; 3] {
    [0, 1, 2].map(|part| MultiHeadRows::new(x.get(part * width..).unwrap_or_default(), 3 * width))
}

pub(super) fn rows<E: TensorElement>(x: Option<&[E]>, width: usize) -> MultiHeadRows<'_, E> {
    MultiHeadRows::new(x.unwrap_or_default(), width)
}
