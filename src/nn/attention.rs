//! Causal multi-head self-attention over a fused projection.

use crate::nn::composed;
use crate::nn::element::{Element, elements, with_element, with_elements};
use crate::nn::matrix::{Matrix, product};
use crate::nn::rows;
use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor, bail};
use rayon::prelude::*;

/// Query rows whose probabilities are held at a time. Part of the summation order of keys' and values' gradients: a
/// constant.
const QUERIES: usize = 64;

/// softmax(q k^T / sqrt(head width), causal) v for `n_head` heads.
///
/// `qkv` `[batch, time, 3 width]` holds queries, keys and values side by side, each split into `n_head` equal heads, as
/// GPT-2's c_attn gives them; the result is `[batch, time, width]`. Position t sees positions 0 to t. Arithmetic is f32
/// for every dtype. Probabilities are recomputed in backward: no memory quadratic in time outlives the call.
///
/// Errors: another rank, or a width that 3 `n_head` does not divide.
pub fn causal_attention(qkv: &Tensor, n_head: usize) -> Result<Tensor> {
    let sizes = Sizes::new(qkv.shape(), n_head)?;
    if !qkv.device().is_cpu() {
        return composed::causal_attention(qkv, n_head);
    }
    qkv.contiguous()?.apply_op1(AttentionOp { sizes })
}

#[derive(Debug, Clone, Copy)]
struct Sizes {
    batch: usize,
    time: usize,
    heads: usize,
    /// Elements of one head's vector.
    head: usize,
}

impl Sizes {
    fn new(qkv: &Shape, heads: usize) -> Result<Self> {
        match *qkv.dims() {
            [batch, time, fused] if heads > 0 && fused > 0 && fused % (3 * heads) == 0 => {
                Ok(Self { batch, time, heads, head: fused / (3 * heads) })
            }
            ref dims => bail!(
                "causal_attention: the input has shape {dims:?}; [batch, time, 3 * width] with a width that the {heads} \
                 heads divide is needed"
            ),
        }
    }

    fn scale(&self) -> f32 {
        1.0 / (self.head as f32).sqrt()
    }
}

struct AttentionOp {
    sizes: Sizes,
}

const NAME: &str = "causal_attention";

/// One head's vectors of `parts` fused parts, part `part`, in f32: `[time, head]`.
fn one_head<E: Element>(
    data: &[E],
    s: Sizes,
    (batch, head): (usize, usize),
    (part, parts): (usize, usize),
) -> Vec<f32> {
    let mut out = vec![0f32; s.time * s.head];
    for (t, out) in out.chunks_exact_mut(s.head).enumerate() {
        let at = ((batch * s.time + t) * parts + part) * s.heads + head;
        E::widen(&data[at * s.head..][..s.head], out);
    }
    out
}

/// The pieces of a result of `parts` fused parts that belong to each (batch, head), in order of (time, part).
fn pieces_by_head<E>(data: &mut [E], s: Sizes, parts: usize) -> Vec<Vec<&mut [E]>> {
    let mut pieces: Vec<Vec<&mut [E]>> = Vec::new();
    pieces.resize_with(s.batch * s.heads, || Vec::with_capacity(s.time * parts));
    for (i, piece) in data.chunks_exact_mut(s.head).enumerate() {
        let batch = i / (s.time * parts * s.heads);
        pieces[batch * s.heads + i % s.heads].push(piece);
    }
    pieces
}

/// A block of queries against the keys they may see.
struct Block {
    /// First query.
    start: usize,
    queries: usize,
    /// Keys 0..reach; the block's query i sees the first `start + i + 1` of them.
    reach: usize,
}

impl Block {
    fn all(time: usize) -> impl Iterator<Item = Self> {
        (0..time).step_by(QUERIES).map(move |start| {
            let queries = QUERIES.min(time - start);
            Self { start, queries, reach: start + queries }
        })
    }

    /// The block's rows of a `[time, head]` matrix.
    fn rows<'a>(&self, x: &'a [f32], head: usize) -> Matrix<'a, f32> {
        Matrix::new(&x[self.start * head..self.reach * head], self.queries, head)
    }

    /// The rows of a `[time, head]` matrix that the block's queries reach.
    fn reached<'a>(&self, x: &'a [f32], head: usize) -> Matrix<'a, f32> {
        Matrix::new(&x[..self.reach * head], self.reach, head)
    }

    /// Fills `p` with the probabilities `[queries, reach]`, 0 where a query does not see a key.
    fn probabilities(&self, p: &mut Vec<f32>, q: &[f32], k: &[f32], s: Sizes) {
        p.clear();
        p.resize(self.queries * self.reach, 0.0);
        product(p, false, self.rows(q, s.head), self.reached(k, s.head).t());
        for (i, row) in p.chunks_exact_mut(self.reach).enumerate() {
            let (seen, hidden) = row.split_at_mut(self.start + i + 1);
            seen.iter_mut().for_each(|x| *x *= s.scale());
            let (_, sum) = rows::exp_row(seen);
            seen.iter_mut().for_each(|x| *x /= sum);
            hidden.fill(0.0);
        }
    }
}

impl AttentionOp {
    fn forward<E: Element>(&self, qkv: &[E]) -> Vec<E> {
        let s = self.sizes;
        let mut out = vec![E::default(); s.batch * s.time * s.heads * s.head];
        pieces_by_head(&mut out, s, 1).into_par_iter().enumerate().for_each(|(i, mut out)| {
            let at = (i / s.heads, i % s.heads);
            let [q, k, v] = [0, 1, 2].map(|part| one_head(qkv, s, at, (part, 3)));
            let (mut p, mut y) = (Vec::new(), Vec::new());
            for block in Block::all(s.time) {
                block.probabilities(&mut p, &q, &k, s);
                y.resize(block.queries * s.head, 0.0);
                product(&mut y, false, Matrix::new(&p, block.queries, block.reach), block.reached(&v, s.head));
                for (out, y) in out[block.start..block.reach].iter_mut().zip(y.chunks_exact(s.head)) {
                    E::narrow(y, out);
                }
            }
        });
        out
    }

    /// With probabilities p and their gradient g = dy v^T: the scores' gradient is d = p (g - sum(p g)) / sqrt(head),
    /// and dq = d k, dk = d^T q, dv = p^T dy.
    fn backward<E: Element>(&self, qkv: &[E], grad: &[E]) -> Vec<E> {
        let s = self.sizes;
        let mut out = vec![E::default(); qkv.len()];
        pieces_by_head(&mut out, s, 3).into_par_iter().enumerate().for_each(|(i, mut out)| {
            let at = (i / s.heads, i % s.heads);
            let [q, k, v] = [0, 1, 2].map(|part| one_head(qkv, s, at, (part, 3)));
            let dy = one_head(grad, s, at, (0, 1));
            let [mut dq, mut dk, mut dv] = [(); 3].map(|()| vec![0f32; s.time * s.head]);
            let (mut p, mut d) = (Vec::new(), Vec::new());
            for block in Block::all(s.time) {
                block.probabilities(&mut p, &q, &k, s);
                let p_matrix = Matrix::new(&p, block.queries, block.reach);
                product(&mut dv[..block.reach * s.head], true, p_matrix.t(), block.rows(&dy, s.head));
                d.resize(p.len(), 0.0);
                product(&mut d, false, block.rows(&dy, s.head), block.reached(&v, s.head).t());
                for (i, (d, p)) in d.chunks_exact_mut(block.reach).zip(p.chunks_exact(block.reach)).enumerate() {
                    let (seen, hidden) = d.split_at_mut(block.start + i + 1);
                    let p = &p[..seen.len()];
                    let along = rows::dot(p, seen);
                    seen.iter_mut().zip(p).for_each(|(d, p)| *d = p * (*d - along) * s.scale());
                    hidden.fill(0.0);
                }
                let d_matrix = Matrix::new(&d, block.queries, block.reach);
                let dq = &mut dq[block.start * s.head..block.reach * s.head];
                product(dq, false, d_matrix, block.reached(&k, s.head));
                product(&mut dk[..block.reach * s.head], true, d_matrix.t(), block.rows(&q, s.head));
            }
            for (t, out) in out.chunks_exact_mut(3).enumerate() {
                for (out, from) in out.iter_mut().zip([&dq, &dk, &dv]) {
                    E::narrow(&from[t * s.head..][..s.head], out);
                }
            }
        });
        out
    }
}

impl CustomOp1 for AttentionOp {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(&self, qkv: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        use candle_core::backend::BackendStorage;
        let s = self.sizes;
        let storage = with_element!(qkv.dtype(), NAME, E => {
            Ok(E::storage(self.forward(elements::<E>(qkv, layout, NAME)?)))
        })?;
        Ok((storage, Shape::from((s.batch, s.time, s.heads * s.head))))
    }

    fn bwd(&self, qkv: &Tensor, _y: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let grad = grad.contiguous()?;
        with_element!(qkv.dtype(), NAME, E => {
            let data = with_elements::<E, _>(qkv, NAME, |x| {
                with_elements::<E, _>(&grad, NAME, |g| Ok(self.backward(x, g)))
            })?;
            Ok(Some(Tensor::from_vec(data, qkv.shape(), qkv.device())?))
        })
    }
}
