//! Lion (arXiv 2302.06675).

use super::elementwise_kernel::{ElementwiseKernel, StepSlices};
use super::{Momentum, Optimizer, StepContext};
use crate::config::LionConfig;
#[cfg(feature = "cuda")]
use crate::cuda::ElementwiseUpdate;
use crate::precision::{FlatMut, FlatRef};

/// The Lion optimizer: each weight moves by the learning rate in the direction that a sign gives, with decoupled weight
/// decay.
///
/// `g` is the scaled gradient:
///
/// ```text
/// c  = b1 * m + (1 - b1) * g
/// p  = p * (1 - lr * wd) - lr * sign(c)
/// m  = b2 * m + (1 - b2) * g
/// ```
///
/// As in DeepSpeed's CPU kernel, the betas are first rounded to f32, and the sign is taken from the sign bit: if `c` is
/// +0, as in an embedding row that no batch has used yet, the weight changes by -lr.
#[derive(Debug)]
pub(super) struct Lion {
    config: LionConfig,
}

impl Lion {
    pub(super) fn new(config: LionConfig) -> Self {
        Self { config }
    }

    fn constants(&self, ctx: &StepContext) -> LionConstants {
        assert!(ctx.step > 0, "optimizer steps are counted from 1");
        let LionConfig { lr: _, betas, weight_decay } = self.config;
        let (betas, weight_decay) = (ctx.betas.unwrap_or(betas), ctx.weight_decay.unwrap_or(weight_decay));
        let (beta1, beta2) = (betas.0 as f32, betas.1 as f32);
        LionConstants {
            grad_scale: ctx.grad_scale,
            beta1,
            beta2,
            one_minus_beta1: 1.0 - beta1,
            one_minus_beta2: 1.0 - beta2,
            keep: (1.0 - ctx.lr * weight_decay) as f32,
            lr: ctx.lr as f32,
        }
    }
}

impl Optimizer for Lion {
    fn name(&self) -> &str {
        "Lion"
    }

    fn lr(&self) -> f64 {
        self.config.lr
    }

    fn momentum(&self) -> Momentum {
        Momentum::Betas(self.config.betas.0, self.config.betas.1)
    }

    fn state_names(&self) -> &'static [&'static str] {
        &["exp_avg"]
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
        Some(ElementwiseUpdate::Lion([
            s.grad_scale,
            s.beta1,
            s.beta2,
            s.one_minus_beta1,
            s.one_minus_beta2,
            s.keep,
            s.lr,
        ]))
    }
}

/// The constants of a step, the same for all elements.
#[derive(Debug, Clone, Copy)]
struct LionConstants {
    grad_scale: f32,
    beta1: f32,
    beta2: f32,
    one_minus_beta1: f32,
    one_minus_beta2: f32,
    /// The factor by which the parameter is multiplied, 1 - lr x decay.
    keep: f32,
    lr: f32,
}

impl ElementwiseKernel<1> for LionConstants {
    #[inline(always)]
    fn update(&self, param: &mut [f32], grad: &[f32], [exp_avg]: [&mut [f32]; 1]) {
        let s = *self;
        for ((p, g), m) in param.iter_mut().zip(grad).zip(exp_avg) {
            let g = *g * s.grad_scale;
            let direction = s.beta1 * *m + s.one_minus_beta1 * g;
            *p = s.keep * *p - s.lr.copysign(direction);
            *m = s.beta2 * *m + s.one_minus_beta2 * g;
        }
    }
}
