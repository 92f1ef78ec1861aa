//! Stochastic gradient descent as in PyTorch.

use super::elementwise_kernel::{ElementwiseKernel, StepSlices};
use super::{Optimizer, StepContext};
use crate::config::SgdConfig;
#[cfg(feature = "cuda")]
use crate::cuda::ElementwiseUpdate;
use crate::precision::{FlatMut, FlatRef};

/// SGD with momentum, dampening, Nesterov's variant and L2 decay.
///
/// `g` is the scaled gradient:
///
/// ```text
/// g += wd * p
/// b  = g at the first step, then mu * b + (1 - dampening) * g
/// p -= lr * (g + mu * b  with nesterov, otherwise b)
/// ```
///
/// Without momentum, there is no buffer, and `p -= lr * g`.
#[derive(Debug)]
pub(super) struct Sgd {
    config: SgdConfig,
}

impl Sgd {
    pub(super) fn new(config: SgdConfig) -> Self {
        Self { config }
    }

    fn constants(&self, ctx: &StepContext) -> SgdConstants {
        assert!(ctx.step > 0, "optimizer steps are counted from 1");
        let weight_decay = ctx.weight_decay.unwrap_or(self.config.weight_decay);
        let (lr, scale, l2) = (ctx.lr as f32, ctx.grad_scale, weight_decay as f32);
        let momentum = self.config.momentum as f32;
        if momentum == 0.0 {
            return SgdConstants::Plain(PlainSgdConstants { lr, scale, l2 });
        }
        // The first step uses the full gradient, whatever the dampening.
        let (keep, take) = if ctx.step == 1 { (0.0, 1.0) } else { (momentum, (1.0 - self.config.dampening) as f32) };
        // The direction is a sum of two products, so that one loop serves both variants.
        let (grad_factor, buffer_factor) = if self.config.nesterov { (1.0, momentum) } else { (0.0, 1.0) };
        SgdConstants::Momentum(MomentumSgdConstants { lr, scale, l2, keep, take, grad_factor, buffer_factor })
    }
}

impl Optimizer for Sgd {
    fn name(&self) -> &str {
        "SGD"
    }

    fn lr(&self) -> f64 {
        self.config.lr
    }

    fn momentum(&self) -> super::Momentum {
        super::Momentum::Factor(self.config.momentum)
    }

    fn state_names(&self) -> &'static [&'static str] {
        if self.config.momentum == 0.0 { &[] } else { &["momentum_buffer"] }
    }

    fn update(
        &self,
        ctx: &StepContext,
        param: &mut [f32],
        grad: FlatRef<'_>,
        state: &mut [&mut [f32]],
        half: Option<FlatMut<'_>>,
    ) {
        match self.constants(ctx) {
            SgdConstants::Plain(kernel) => StepSlices::new(param, grad, state, half).update_with(&kernel),
            SgdConstants::Momentum(kernel) => StepSlices::new(param, grad, state, half).update_with(&kernel),
        }
    }

    fn has_kernel(&self) -> bool {
        true
    }

    #[cfg(feature = "cuda")]
    fn elementwise(&self, ctx: &StepContext) -> Option<ElementwiseUpdate> {
        Some(match self.constants(ctx) {
            SgdConstants::Plain(s) => ElementwiseUpdate::Sgd([s.lr, s.scale, s.l2]),
            SgdConstants::Momentum(s) => {
                ElementwiseUpdate::SgdMomentum([s.lr, s.scale, s.l2, s.keep, s.take, s.grad_factor, s.buffer_factor])
            }
        })
    }
}

/// The constants of a step, the same for all elements.
#[derive(Debug, Clone, Copy)]
enum SgdConstants {
    Plain(PlainSgdConstants),
    Momentum(MomentumSgdConstants),
}

/// The constants of SGD without momentum.
#[derive(Debug, Clone, Copy)]
struct PlainSgdConstants {
    lr: f32,
    scale: f32,
    l2: f32,
}

impl ElementwiseKernel<0> for PlainSgdConstants {
    #[inline(always)]
    fn update(&self, param: &mut [f32], grad: &[f32], []: [&mut [f32]; 0]) {
        for (p, g) in param.iter_mut().zip(grad) {
            *p -= self.lr * (*g * self.scale + self.l2 * *p);
        }
    }
}

/// The constants of SGD with momentum, in either variant.
#[derive(Debug, Clone, Copy)]
struct MomentumSgdConstants {
    lr: f32,
    scale: f32,
    l2: f32,
    keep: f32,
    take: f32,
    grad_factor: f32,
    buffer_factor: f32,
}

impl ElementwiseKernel<1> for MomentumSgdConstants {
    #[inline(always)]
    fn update(&self, param: &mut [f32], grad: &[f32], [buffer]: [&mut [f32]; 1]) {
        for ((p, g), b) in param.iter_mut().zip(grad).zip(buffer) {
            let g = *g * self.scale + self.l2 * *p;
            *b = self.keep * *b + self.take * g;
            *p -= self.lr * (self.grad_factor * g + self.buffer_factor * *b);
        }
    }
}
