//! Adam (arXiv 1412.6980) and AdamW (arXiv 1711.05101).

use super::elementwise_kernel::{ElementwiseKernel, StepSlices};
use super::{Momentum, Optimizer, StepContext};
use crate::config::AdamConfig;
#[cfg(feature = "cuda")]
use crate::cuda::ElementwiseUpdate;
use crate::precision::{FlatMut, FlatRef};

/// Adam with decoupled decay (AdamW) or L2 decay.
///
/// `g` is the scaled gradient, and `t` is the number of the step:
///
/// ```text
/// g += wd * p                                   (L2 only)
/// m  = b1 * m + (1 - b1) * g
/// v  = b2 * v + (1 - b2) * g * g
/// p -= lr * wd * p                              (decoupled only)
/// p -= lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps)
/// ```
///
/// As in DeepSpeed's kernels, the betas are rounded to f32, and everything else is computed from the rounded values:
/// for 0.999, `1 - b2` is 0.000999987, whereas PyTorch uses 0.001. The bias correction cancels this difference in the
/// weights. `exp_avg_sq` has a relative difference of 1.3e-5 from PyTorch's, and equals DeepSpeed's.
#[derive(Debug)]
pub(super) struct Adam {
    config: AdamConfig,
}

/// The constants of a step, the same for all elements, computed in f64 and rounded once.
#[derive(Debug, Clone, Copy)]
struct AdamConstants {
    grad_scale: f32,
    beta1: f32,
    beta2: f32,
    one_minus_beta1: f32,
    one_minus_beta2: f32,
    /// The multiple of the parameter that is added to the gradient. It is 0 with decoupled decay.
    l2: f32,
    /// The multiple of the parameter that is subtracted from the parameter, lr x decay. It is 0 with L2 decay.
    decay: f32,
    /// The step size, lr / (1 - b1^t).
    step_size: f32,
    /// The factor by which the square root of the second moment is multiplied, 1 / sqrt(1 - b2^t).
    root_scale: f32,
    eps: f32,
}

impl Adam {
    pub(super) fn new(config: AdamConfig) -> Self {
        Self { config }
    }

    fn constants(&self, ctx: &StepContext) -> AdamConstants {
        assert!(ctx.step > 0, "optimizer steps are counted from 1");
        let AdamConfig { lr: _, betas, eps, weight_decay, bias_correction, decoupled } = self.config;
        let betas = ctx.betas.unwrap_or(betas);
        let (eps, weight_decay) = (ctx.eps.unwrap_or(eps), ctx.weight_decay.unwrap_or(weight_decay));
        let (beta1, beta2) = (f64::from(betas.0 as f32), f64::from(betas.1 as f32));
        let correction = |beta: f64| if bias_correction { 1.0 - beta.powf(ctx.step as f64) } else { 1.0 };
        let (l2, decay) = if decoupled { (0.0, ctx.lr * weight_decay) } else { (weight_decay, 0.0) };
        AdamConstants {
            grad_scale: ctx.grad_scale,
            beta1: beta1 as f32,
            beta2: beta2 as f32,
            one_minus_beta1: (1.0 - beta1) as f32,
            one_minus_beta2: (1.0 - beta2) as f32,
            l2: l2 as f32,
            decay: decay as f32,
            step_size: (ctx.lr / correction(beta1)) as f32,
            root_scale: (1.0 / correction(beta2).sqrt()) as f32,
            eps: eps as f32,
        }
    }
}

impl Optimizer for Adam {
    fn name(&self) -> &str {
        if self.config.decoupled { "AdamW" } else { "Adam" }
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

    fn has_kernel(&self) -> bool {
        true
    }

    #[cfg(feature = "cuda")]
    fn elementwise(&self, ctx: &StepContext) -> Option<ElementwiseUpdate> {
        let s = self.constants(ctx);
        Some(ElementwiseUpdate::Adam([
            s.grad_scale,
            s.beta1,
            s.beta2,
            s.one_minus_beta1,
            s.one_minus_beta2,
            s.l2,
            s.decay,
            s.step_size,
            s.root_scale,
            s.eps,
        ]))
    }
}

impl ElementwiseKernel<2> for AdamConstants {
    #[inline(always)]
    fn update(&self, param: &mut [f32], grad: &[f32], [exp_avg, exp_avg_sq]: [&mut [f32]; 2]) {
        let s = *self;
        for (((p, g), m), v) in param.iter_mut().zip(grad).zip(exp_avg).zip(exp_avg_sq) {
            // Both decays are computed, one of them with factor 0: adding 0 changes no value, and a loop without
            // branches vectorizes.
            let g = *g * s.grad_scale + s.l2 * *p;
            *m = s.beta1 * *m + s.one_minus_beta1 * g;
            *v = s.beta2 * *v + s.one_minus_beta2 * (g * g);
            let decayed = *p - s.decay * *p;
            *p = decayed - s.step_size * (*m / (v.sqrt() * s.root_scale + s.eps));
        }
    }
}
