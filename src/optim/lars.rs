//! LARS (arXiv 1708.03888).

use super::elementwise_kernel::{ElementwiseKernel, StepSlices};
use super::{Layerwise, Momentum, Optimizer, OptimizerNeeds, SQUARES_BLOCK, SquareSums, StepContext};
use crate::config::LarsConfig;
use crate::kernels::parallel;
use crate::kernels::simd::{SimdLoop, level};
use crate::precision::{FlatMut, FlatRef, LANES, add_squares, cast};

/// The number of elements whose squares one thread sums at a time.
const CHUNK: usize = 64 * SQUARES_BLOCK;

/// LARS: SGD with momentum, in which the learning rate of each parameter is scaled by the ratio of the norms of the
/// parameter and its gradient.
///
/// `g` is the scaled gradient, and `|x|` is the L2 norm of the full parameter:
///
/// ```text
/// c  = trust_coefficient * |p| / (|g| + wd * |p| + eps)       1 if |p| or |g| is 0
/// b  = mu * b + lr * c * (g + wd * p)
/// p -= b
/// ```
///
/// As in the paper, the learning rate is part of the momentum: a new rate does not affect the steps already taken.
/// The paper has no `eps`.
#[derive(Debug)]
pub(super) struct Lars {
    config: LarsConfig,
}

impl Lars {
    pub(super) fn new(config: LarsConfig) -> Self {
        Self { config }
    }

    fn weight_decay(&self, ctx: &StepContext) -> f64 {
        ctx.weight_decay.unwrap_or(self.config.weight_decay)
    }
}

impl Optimizer for Lars {
    fn name(&self) -> &str {
        "LARS"
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
        grad: FlatRef<'_>,
        state: &mut [&mut [f32]],
        half: Option<FlatMut<'_>>,
    ) {
        assert!(ctx.step > 0, "optimizer steps are counted from 1");
        let kernel = LarsKernel {
            grad_scale: ctx.grad_scale,
            decay: self.weight_decay(ctx) as f32,
            momentum: self.config.momentum as f32,
            lr: ctx.lr as f32,
        };
        StepSlices::new(param, grad, state, half).update_with(&kernel);
    }

    fn needs(&self) -> OptimizerNeeds<'_> {
        OptimizerNeeds::Norms(self)
    }
}

impl Layerwise for Lars {
    fn add_squares(
        &self,
        ctx: &StepContext,
        param: &[f32],
        grad: FlatRef<'_>,
        state: &[&[f32]],
        squares: &mut SquareSums,
    ) {
        let len = param.len();
        assert_eq!(grad.len(), len, "the gradient is not as long as the parameter");
        assert_eq!(state.len(), 1, "wrong number of optimizer state buffers");
        let chunks = parallel::map(len.div_ceil(CHUNK), |i| {
            let range = i * CHUNK..len.min((i + 1) * CHUNK);
            let (param, grad) = (&param[range.clone()], grad.slice(range));
            level().run(LarsChunkSquares { grad_scale: ctx.grad_scale, param, grad })
        });
        for block in chunks.iter().flatten() {
            squares.weights += block.weights;
            squares.update += block.update;
        }
    }

    fn trust_ratio(&self, ctx: &StepContext, squares: SquareSums) -> f64 {
        if squares.weights == 0.0 || squares.update == 0.0 {
            return 1.0;
        }
        let (weights, grad) = (squares.weights.sqrt(), squares.update.sqrt());
        let eps = ctx.eps.unwrap_or(self.config.eps);
        self.config.trust_coefficient * weights / (grad + self.weight_decay(ctx) * weights + eps)
    }
}

/// The constants of a step, the same for all elements of a parameter.
struct LarsKernel {
    grad_scale: f32,
    decay: f32,
    momentum: f32,
    /// The learning rate times the trust ratio.
    lr: f32,
}

impl ElementwiseKernel<1> for LarsKernel {
    #[inline(always)]
    fn update(&self, param: &mut [f32], grad: &[f32], [buffer]: [&mut [f32]; 1]) {
        for ((p, g), b) in param.iter_mut().zip(grad).zip(buffer) {
            let g = *g * self.grad_scale + self.decay * *p;
            *b = self.momentum * *b + self.lr * g;
            *p -= *b;
        }
    }
}

/// The computation of the squares of one chunk of weights and gradients, block by block.
struct LarsChunkSquares<'a> {
    grad_scale: f32,
    param: &'a [f32],
    grad: FlatRef<'a>,
}

impl SimdLoop for LarsChunkSquares<'_> {
    type Output = Vec<SquareSums>;

    #[inline(always)]
    fn run(self) -> Vec<SquareSums> {
        let mut sums = Vec::with_capacity(self.param.len().div_ceil(SQUARES_BLOCK));
        let mut scaled = [0.0f32; SQUARES_BLOCK];
        for start in (0..self.param.len()).step_by(SQUARES_BLOCK) {
            let range = start..self.param.len().min(start + SQUARES_BLOCK);
            let scaled = &mut scaled[..range.len()];
            cast::widen(scaled, self.grad.slice(range.clone()));
            scaled.iter_mut().for_each(|g| *g *= self.grad_scale);
            let (mut weights, mut update) = ([0.0; LANES], [0.0; LANES]);
            add_squares(&mut weights, &self.param[range]);
            add_squares(&mut update, scaled);
            sums.push(SquareSums { weights: weights.iter().sum(), update: update.iter().sum() });
        }
        sums
    }
}
