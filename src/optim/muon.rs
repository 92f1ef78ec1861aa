//! Muon: orthogonalized momentum for matrices, and AdamW for vectors and for matrices whose names contain `embed` or
//! `lm_head`.

use super::adam::Adam;
use super::elementwise_kernel::{ElementwiseKernel, StepSlices};
use super::newton_schulz::{orthogonalize, workspace};
use super::{Momentum, Optimizer, OptimizerNeeds, StepContext, WholeParameterOptimizer};
use crate::config::MuonConfig;
use crate::precision::{FlatMut, FlatRef};

/// Words in the names of parameters that are not trained as matrices, in any letter case, as in DeepSpeed.
const NO_MATRICES: [&str; 2] = ["embed", "lm_head"];

/// The Muon optimizer. `g` is the scaled gradient of a matrix with `r` rows and `c` columns:
///
/// ```text
/// m  = m + (1 - mu) * (g - m)
/// u  = g + mu * (m - g)
/// u  = orthogonalized u * sqrt(r / c)           (the root only if r > c)
/// p  = p * (1 - lr * wd) - lr * u
/// ```
///
/// A tensor with four dimensions, such as a convolution's weight, is a matrix with its first dimension as rows, but the
/// root is taken of the ratio of its last two dimensions, as in DeepSpeed. Other tensors with more than two dimensions
/// are batches of separate matrices in the last two dimensions.
#[derive(Debug)]
pub(super) struct Muon {
    config: MuonConfig,
    adam: Adam,
}

/// A parameter as a batch of matrices.
#[derive(Debug, Clone, Copy)]
struct MatrixBatch {
    rows: usize,
    cols: usize,
    count: usize,
    /// The factor by which an orthogonalized direction is multiplied.
    scale: f32,
}

impl MatrixBatch {
    fn of(shape: &[usize]) -> Self {
        let (leading, [a, b]) = match shape {
            [leading @ .., a, b] => (leading, [*a, *b]),
            _ => unreachable!("Muon takes no vectors"),
        };
        let (rows, cols, count) = match leading {
            [first, second] => (*first, second * a * b, 1),
            leading => (a, b, leading.iter().product()),
        };
        Self { rows, cols, count, scale: if a > b { (a as f64 / b as f64).sqrt() as f32 } else { 1.0 } }
    }
}

impl Muon {
    pub(super) fn new(config: MuonConfig) -> Self {
        Self { config, adam: Adam::new(config.adam) }
    }
}

impl Optimizer for Muon {
    fn name(&self) -> &str {
        "Muon"
    }

    fn lr(&self) -> f64 {
        self.config.lr
    }

    fn momentum(&self) -> Momentum {
        Momentum::Factor(self.config.momentum)
    }

    fn state_names(&self) -> &'static [&'static str] {
        &["momentum_buffer"]
    }

    fn update(
        &self,
        ctx: &StepContext,
        param: &mut [f32],
        direction: FlatRef<'_>,
        state: &mut [&mut [f32]],
        half: Option<FlatMut<'_>>,
    ) {
        let weight_decay = ctx.weight_decay.unwrap_or(self.config.weight_decay);
        let kernel = MuonUpdateKernel { keep: (1.0 - ctx.lr * weight_decay) as f32, lr: ctx.lr as f32 };
        StepSlices::new(param, direction, state, half).update_with(&kernel);
    }

    fn needs(&self) -> OptimizerNeeds<'_> {
        OptimizerNeeds::WholeParameter(self)
    }

    fn trains(&self, name: &str, shape: &[usize]) -> bool {
        let name = name.to_lowercase();
        shape.len() >= 2 && !shape.contains(&0) && !NO_MATRICES.iter().any(|word| name.contains(word))
    }

    fn auxiliary(&self) -> Option<&dyn Optimizer> {
        Some(&self.adam)
    }
}

impl WholeParameterOptimizer for Muon {
    fn momentum(&self, ctx: &StepContext, grad: FlatRef<'_>, state: &mut [&mut [f32]], direction: &mut [f32]) {
        let (keep, take) = (self.config.momentum as f32, (1.0 - self.config.momentum) as f32);
        let kernel = MuonMomentumKernel { grad_scale: ctx.grad_scale, keep, take };
        StepSlices::new(direction, grad, state, None).update_with(&kernel);
    }

    fn finish(&self, direction: &mut [f32], shape: &[usize]) {
        let MatrixBatch { rows, cols, scale, .. } = MatrixBatch::of(shape);
        for matrix in direction.chunks_exact_mut(rows * cols) {
            orthogonalize(matrix, rows, cols, self.config.ns_method);
            if scale != 1.0 {
                matrix.iter_mut().for_each(|x| *x *= scale);
            }
        }
    }

    fn workspace(&self, shape: &[usize]) -> usize {
        let MatrixBatch { rows, cols, .. } = MatrixBatch::of(shape);
        workspace(rows, cols, self.config.ns_method)
    }

    fn cost(&self, shape: &[usize]) -> u128 {
        let MatrixBatch { rows, cols, count, .. } = MatrixBatch::of(shape);
        (rows * cols * count) as u128 * rows.min(cols) as u128
    }
}

/// The kernel that updates the momentum and computes the rough direction.
struct MuonMomentumKernel {
    grad_scale: f32,
    keep: f32,
    take: f32,
}

impl ElementwiseKernel<1> for MuonMomentumKernel {
    #[inline(always)]
    fn update(&self, direction: &mut [f32], grad: &[f32], [momentum]: [&mut [f32]; 1]) {
        for ((u, g), m) in direction.iter_mut().zip(grad).zip(momentum) {
            let g = *g * self.grad_scale;
            *m += self.take * (g - *m);
            *u = g + self.keep * (*m - g);
        }
    }
}

/// The kernel that applies weight decay and the finished direction.
struct MuonUpdateKernel {
    keep: f32,
    lr: f32,
}

impl ElementwiseKernel<0> for MuonUpdateKernel {
    #[inline(always)]
    fn update(&self, param: &mut [f32], direction: &[f32], []: [&mut [f32]; 0]) {
        for (p, u) in param.iter_mut().zip(direction) {
            *p = self.keep * *p - self.lr * u;
        }
    }
}
