//! Layer normalization (Ba et al. 2016) over the last dimension.

use crate::nn::composed;
use crate::nn::element::{Element, elements, with_element, with_elements};
use crate::nn::rows;
use candle_core::{CpuStorage, CustomOp3, Layout, Result, Shape, Tensor, bail};
use candle_nn::{Module, VarBuilder, init};
use rayon::prelude::*;

/// Rows that one task computes. Part of the summation order of the parameters' gradients: a constant.
const ROWS_PER_TASK: usize = 64;

/// (x - mean) / sqrt(variance + eps) * weight + bias over the last dimension of x `[.., width]`; weight and bias
/// `[width]`, of x's dtype. The variance is the biased one. Statistics are in f32, results are rounded once.
pub fn layer_norm(x: &Tensor, weight: &Tensor, bias: &Tensor, eps: f64) -> Result<Tensor> {
    let width = x.dims().last().copied().unwrap_or(0);
    if x.rank() == 0 || width == 0 || weight.dims() != [width] || bias.dims() != [width] {
        bail!(
            "layer_norm: weight {:?} and bias {:?} must have the length of the input's last dimension, {:?}",
            weight.dims(),
            bias.dims(),
            x.dims()
        )
    }
    if !x.device().is_cpu() {
        return composed::layer_norm(x, weight, bias, eps);
    }
    x.contiguous()?.apply_op3(&weight.contiguous()?, &bias.contiguous()?, LayerNormOp { eps: eps as f32 })
}

struct LayerNormOp {
    eps: f32,
}

const NAME: &str = "layer_norm";

impl LayerNormOp {
    /// Replaces a row by (x - mean) / sqrt(variance + eps) and returns that factor 1 / sqrt(variance + eps).
    fn normalize(&self, row: &mut [f32]) -> f32 {
        let n = row.len() as f32;
        let mean = rows::sum(row) / n;
        row.iter_mut().for_each(|x| *x -= mean);
        let factor = 1.0 / (rows::dot(row, row) / n + self.eps).sqrt();
        row.iter_mut().for_each(|x| *x *= factor);
        factor
    }

    fn forward<E: Element>(&self, x: &[E], weight: &[E], bias: &[E]) -> Vec<E> {
        let width = weight.len();
        let (weight, bias) = (E::widened(weight), E::widened(bias));
        let mut out = vec![E::default(); x.len()];
        let task = ROWS_PER_TASK * width;
        out.par_chunks_mut(task).zip(x.par_chunks(task)).for_each(|(out, x)| {
            let mut row = vec![0f32; width];
            for (out, x) in out.chunks_exact_mut(width).zip(x.chunks_exact(width)) {
                E::widen(x, &mut row);
                self.normalize(&mut row);
                row.iter_mut().zip(&weight).zip(&bias).for_each(|((x, w), b)| *x = *x * w + b);
                E::narrow(&row, out);
            }
        });
        out
    }

    /// Gradients of input, weight and bias.
    ///
    /// With h the normalized row, s its factor and d = grad * weight: dx = s (d - mean(d) - h mean(d h)).
    fn backward<E: Element>(&self, x: &[E], weight: &[E], grad: &[E]) -> (Vec<E>, Vec<E>, Vec<E>) {
        let width = weight.len();
        let weight = E::widened(weight);
        let n = width as f32;
        let mut dx = vec![E::default(); x.len()];
        let task = ROWS_PER_TASK * width;
        let parts: Vec<(Vec<f32>, Vec<f32>)> = dx
            .par_chunks_mut(task)
            .zip(x.par_chunks(task))
            .zip(grad.par_chunks(task))
            .map(|((dx, x), grad)| {
                let (mut dw, mut db) = (vec![0f32; width], vec![0f32; width]);
                let (mut h, mut g) = (vec![0f32; width], vec![0f32; width]);
                for ((dx, x), grad) in
                    dx.chunks_exact_mut(width).zip(x.chunks_exact(width)).zip(grad.chunks_exact(width))
                {
                    E::widen(x, &mut h);
                    E::widen(grad, &mut g);
                    let factor = self.normalize(&mut h);
                    for i in 0..width {
                        dw[i] += g[i] * h[i];
                        db[i] += g[i];
                        g[i] *= weight[i];
                    }
                    let (mean, along) = (rows::sum(&g) / n, rows::dot(&g, &h) / n);
                    g.iter_mut().zip(&h).for_each(|(g, h)| *g = factor * (*g - mean - h * along));
                    E::narrow(&g, dx);
                }
                (dw, db)
            })
            .collect();
        let (mut dw, mut db) = (vec![0f32; width], vec![0f32; width]);
        for (part_w, part_b) in &parts {
            dw.iter_mut().zip(part_w).for_each(|(t, p)| *t += p);
            db.iter_mut().zip(part_b).for_each(|(t, p)| *t += p);
        }
        (dx, E::narrowed(&dw), E::narrowed(&db))
    }
}

impl CustomOp3 for LayerNormOp {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        xl: &Layout,
        w: &CpuStorage,
        wl: &Layout,
        b: &CpuStorage,
        bl: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        use candle_core::backend::BackendStorage;
        let storage = with_element!(x.dtype(), NAME, E => {
            let (x, w, b) = (elements::<E>(x, xl, NAME)?, elements::<E>(w, wl, NAME)?, elements::<E>(b, bl, NAME)?);
            Ok(E::storage(self.forward(x, w, b)))
        })?;
        Ok((storage, xl.shape().clone()))
    }

    fn bwd(
        &self,
        x: &Tensor,
        w: &Tensor,
        b: &Tensor,
        _y: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let grad = grad.contiguous()?;
        with_element!(x.dtype(), NAME, E => {
            let (dx, dw, db) = with_elements::<E, _>(x, NAME, |x| {
                with_elements::<E, _>(w, NAME, |w| with_elements::<E, _>(&grad, NAME, |g| Ok(self.backward(x, w, g))))
            })?;
            let wanted = |t: &Tensor, data| t.track_op().then(|| Tensor::from_vec(data, t.shape(), t.device())).transpose();
            Ok((wanted(x, dx)?, wanted(w, dw)?, wanted(b, db)?))
        })
    }
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
