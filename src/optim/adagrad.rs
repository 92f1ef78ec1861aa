//! Adagrad (Duchi, Hazan, Singer, 2011).

use super::elementwise_kernel::{ElementwiseKernel, StepSlices};
use super::{Optimizer, StepContext};
use crate::config::AdagradConfig;
#[cfg(feature = "cuda")]
use crate::cuda::ElementwiseUpdate;
use crate::precision::{FlatMut, FlatRef};

/// Adagrad with L2 decay.
///
/// `g` is the scaled gradient:
///
/// ```text
/// g += wd * p
/// v += g * g
/// p -= lr * g / (sqrt(v) + eps)
/// ```
///
/// The name of the state `v` is `exp_avg_sq`, as in DeepSpeed's CPU kernel; PyTorch calls it `sum`.
#[derive(Debug)]
pub(super) struct Adagrad {
    config: AdagradConfig,
}

impl Adagrad {
    pub(super) fn new(config: AdagradConfig) -> Self {
        Self { config }
    }

    fn constants(&self, ctx: &StepContext) -> AdagradConstants {
        assert!(ctx.step > 0, "optimizer steps are counted from 1");
        AdagradConstants {
            grad_scale: ctx.grad_scale,
            l2: ctx.weight_decay.unwrap_or(self.config.weight_decay) as f32,
            lr: ctx.lr as f32,
            eps: ctx.eps.unwrap_or(self.config.eps) as f32,
        }
    }
}

impl Optimizer for Adagrad {
    fn name(&self) -> &str {
        "Adagrad"
    }

    fn lr(&self) -> f64 {
        self.config.lr
    }

    fn state_names(&self) -> &'static [&'static str] {
        &["exp_avg_sq"]
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
        Some(ElementwiseUpdate::Adagrad([s.grad_scale, s.l2, s.lr, s.eps]))
    }
}

/// The constants of a step, the same for all elements.
#[derive(Debug, Clone, Copy)]
struct AdagradConstants {
    grad_scale: f32,
    /// The factor by which the parameter is multiplied before it is added to the gradient (weight decay).
    l2: f32,
    lr: f32,
    eps: f32,
}

impl ElementwiseKernel<1> for AdagradConstants {
    #[inline(always)]
    fn update(&self, param: &mut [f32], grad: &[f32], [exp_avg_sq]: [&mut [f32]; 1]) {
        let s = *self;
        for ((p, g), v) in param.iter_mut().zip(grad).zip(exp_avg_sq) {
            let g = *g * s.grad_scale + s.l2 * *p;
            *v += g * g;
            *p -= s.lr * (g / (v.sqrt() + s.eps));
        }
    }
}
