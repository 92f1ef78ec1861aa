//! LAMB (arXiv 1904.00962).

use super::elementwise_kernel::{ElementwiseKernel, StepSlices};
use super::{Layerwise, Momentum, Optimizer, OptimizerNeeds, SQUARES_BLOCK, SquareSums, StepContext};
use crate::config::LambConfig;
use crate::kernels::parallel;
use crate::kernels::simd::{SimdLoop, level};
use crate::precision::{FlatMut, FlatRef, LANES, add_squares, cast};

/// The number of elements whose squares one thread sums at a time.
const CHUNK: usize = 64 * SQUARES_BLOCK;

/// LAMB: Adam's direction, scaled to the norm of the parameter.
///
/// `g` is the scaled gradient, `t` is the number of the step, and `|x|` is the L2 norm of the full parameter:
///
/// ```text
/// m  = b1 * m + (1 - b1) * g
/// v  = b2 * v + (1 - b2) * g * g
/// u  = m / (sqrt(v) + eps) + wd * p             (eps_inside_sqrt: m / sqrt(v + eps) + wd * p)
/// c  = |p| / |u|, at most max_coeff and at least min_coeff; 1 if either norm is 0
/// p -= lr * sqrt(1 - b2^t) / (1 - b1^t) * c * u
/// ```
///
/// As in DeepSpeed's kernel, the moments in `u` are not corrected for their bias: the correction is part of the step
/// size, outside `c`, and is left out without `bias_correction`. The betas are first rounded to f32.
///
/// The pass that sums squares changes nothing: it computes `u` from the new moments without storing them, and the
/// update computes `u` again. Moments in files are therefore written only once per step.
#[derive(Debug)]
pub(super) struct Lamb {
    config: LambConfig,
}

impl Lamb {
    pub(super) fn new(config: LambConfig) -> Self {
        Self { config }
    }

    fn constants(&self, ctx: &StepContext) -> LambConstants {
        assert!(ctx.step > 0, "optimizer steps are counted from 1");
        let LambConfig { betas, eps, weight_decay, bias_correction, eps_inside_sqrt, .. } = self.config;
        let betas = ctx.betas.unwrap_or(betas);
        let (eps, weight_decay) = (ctx.eps.unwrap_or(eps), ctx.weight_decay.unwrap_or(weight_decay));
        let (beta1, beta2) = (f64::from(betas.0 as f32), f64::from(betas.1 as f32));
        let correction = |beta: f64| if bias_correction { 1.0 - beta.powf(ctx.step as f64) } else { 1.0 };
        let (eps_inside, eps_outside) = if eps_inside_sqrt { (eps, 0.0) } else { (0.0, eps) };
        LambConstants {
            grad_scale: ctx.grad_scale,
            beta1: beta1 as f32,
            beta2: beta2 as f32,
            one_minus_beta1: (1.0 - beta1) as f32,
            one_minus_beta2: (1.0 - beta2) as f32,
            eps_inside: eps_inside as f32,
            eps_outside: eps_outside as f32,
            decay: weight_decay as f32,
            step_size: (ctx.lr * correction(beta2).sqrt() / correction(beta1)) as f32,
        }
    }
}

impl Optimizer for Lamb {
    fn name(&self) -> &str {
        "Lamb"
    }

    fn lr(&self) -> f64 {
        self.config.lr
    }

    fn momentum(&self) -> Momentum {
        Momentum::Betas(self.config.betas.0, self.config.betas.1)
    }

    fn state_names(&self) -> &'static [&'static str] {
        &["exp_avg", "exp_avg_sq"]
    }

    fn update(
        &self,
        ctx: &StepContext,
        param: &mut [f32],
        grad: FlatRef<'_>,
        state: &mut [&mut [f32]],
        half: Option<FlatMut<'_>>,
    ) {
        StepSlices::new(param, grad, state, half).update_with(&self.constants(ctx));
    }

    fn needs(&self) -> OptimizerNeeds<'_> {
        OptimizerNeeds::Norms(self)
    }
}

impl Layerwise for Lamb {
    fn add_squares(
        &self,
        ctx: &StepContext,
        param: &[f32],
        grad: FlatRef<'_>,
        state: &[&[f32]],
        squares: &mut SquareSums,
    ) {
        let &[exp_avg, exp_avg_sq] = state else { panic!("wrong number of optimizer state buffers") };
        let len = param.len();
        assert_eq!(grad.len(), len, "the gradient is not as long as the parameter");
        assert!(state.iter().all(|s| s.len() == len), "an optimizer state is not as long as the parameter");
        let constants = self.constants(ctx);
        let chunks = parallel::map(len.div_ceil(CHUNK), |i| {
            let range = i * CHUNK..len.min((i + 1) * CHUNK);
            level().run(LambChunkSquares {
                constants: &constants,
                param: &param[range.clone()],
                grad: grad.slice(range.clone()),
                exp_avg: &exp_avg[range.clone()],
                exp_avg_sq: &exp_avg_sq[range],
            })
        });
        for block in chunks.iter().flatten() {
            squares.weights += block.weights;
            squares.update += block.update;
        }
    }

    fn trust_ratio(&self, _: &StepContext, squares: SquareSums) -> f64 {
        if squares.weights == 0.0 || squares.update == 0.0 {
            return 1.0;
        }
        (squares.weights.sqrt() / squares.update.sqrt()).min(self.config.max_coeff).max(self.config.min_coeff)
    }
}

/// The constants of a step, the same for all elements, computed in f64 and rounded once.
#[derive(Debug, Clone, Copy)]
struct LambConstants {
    grad_scale: f32,
    beta1: f32,
    beta2: f32,
    one_minus_beta1: f32,
    one_minus_beta2: f32,
    /// The number added to the second moment. It is 0 unless `eps_inside_sqrt` is set.
    eps_inside: f32,
    /// The number added to the square root of the second moment. It is 0 if `eps_inside_sqrt` is set.
    eps_outside: f32,
    decay: f32,
    /// The step size, lr sqrt(1 - b2^t) / (1 - b1^t), or lr without `bias_correction`.
    step_size: f32,
}

impl LambConstants {
    /// Returns both moments after this step, and the direction.
    #[inline(always)]
    fn step(&self, p: f32, g: f32, m: f32, v: f32) -> [f32; 3] {
        let g = g * self.grad_scale;
        let m = self.beta1 * m + self.one_minus_beta1 * g;
        let v = self.beta2 * v + self.one_minus_beta2 * (g * g);
        [m, v, m / ((v + self.eps_inside).sqrt() + self.eps_outside) + self.decay * p]
    }
}

impl ElementwiseKernel<2> for LambConstants {
    #[inline(always)]
    fn update(&self, param: &mut [f32], grad: &[f32], [exp_avg, exp_avg_sq]: [&mut [f32]; 2]) {
        let s = *self;
        for (((p, g), m), v) in param.iter_mut().zip(grad).zip(exp_avg).zip(exp_avg_sq) {
            let direction;
            [*m, *v, direction] = s.step(*p, *g, *m, *v);
            *p -= s.step_size * direction;
        }
    }
}

/// The computation of the squares of one chunk, block by block.
struct LambChunkSquares<'a> {
    constants: &'a LambConstants,
    param: &'a [f32],
    grad: FlatRef<'a>,
    exp_avg: &'a [f32],
    exp_avg_sq: &'a [f32],
}

impl SimdLoop for LambChunkSquares<'_> {
    type Output = Vec<SquareSums>;

    #[inline(always)]
    fn run(self) -> Vec<SquareSums> {
        let s = *self.constants;
        let mut sums = Vec::with_capacity(self.param.len().div_ceil(SQUARES_BLOCK));
        let (mut widened, mut direction) = ([0.0f32; SQUARES_BLOCK], [0.0f32; SQUARES_BLOCK]);
        for start in (0..self.param.len()).step_by(SQUARES_BLOCK) {
            let range = start..self.param.len().min(start + SQUARES_BLOCK);
            let direction = &mut direction[..range.len()];
            let grad = match self.grad.slice(range.clone()) {
                FlatRef::F32(grad) => grad,
                narrow => {
                    cast::widen(&mut widened[..range.len()], narrow);
                    &widened[..range.len()]
                }
            };
            let (param, m, v) = (&self.param[range.clone()], &self.exp_avg[range.clone()], &self.exp_avg_sq[range]);
            for ((((u, p), g), m), v) in direction.iter_mut().zip(param).zip(grad).zip(m).zip(v) {
                [_, _, *u] = s.step(*p, *g, *m, *v);
            }
            let (mut weights, mut update) = ([0.0; LANES], [0.0; LANES]);
            add_squares(&mut weights, param);
            add_squares(&mut update, direction);
            sums.push(SquareSums { weights: weights.iter().sum(), update: update.iter().sum() });
        }
        sums
    }
}
