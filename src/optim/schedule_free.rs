//! Schedule-Free AdamW (arXiv 2405.15682), named as in facebookresearch/schedule_free.

use super::elementwise_kernel::{ElementwiseKernel, StepSlices};
use super::{Momentum, Optimizer, RateRule, StepContext, WeightAveraging};
use crate::config::ScheduleFreeConfig;
use crate::kernels::parallel::{ParallelChunks, for_each_part};
use crate::kernels::simd::{SimdLoop, level};
use crate::precision::{FlatMut, FlatRef, cast};
use crate::util::lock;
use std::sync::Mutex;

/// Schedule-Free AdamW: AdamW that averages the weights instead of lowering the learning rate by a schedule.
///
/// There are three sequences of weights: `z`, to which steps are applied; `x`, the average of `z`, for evaluation and
/// export; and `y` between them, with which the model computes gradients. `g` is the scaled gradient at `y`, and `t` is
/// the number of the step:
///
/// ```text
/// lr_t = lr * min(1, t / warmup_steps)
/// v    = b2 * v + (1 - b2) * g * g
/// z   -= lr_t * (g / (sqrt(v / (1 - b2^t)) + eps) + wd * y)
/// x    = (1 - c) * x + c * z                    c = w_t / (w_1 + ... + w_t),  w_t = t^r * lr_t^weight_lr_power
/// y    = (1 - b1) * z + b1 * x
/// ```
///
/// The original keeps `y` and `z` and computes `x` when it is needed. Here, the states are `x` (the master weights) and
/// `z`, and `y` exists only in the model's tensors, computed from them. `x` and `y` can thus replace each other in the
/// model without any rounding, and a checkpoint contains `x`.
///
/// Because the learning rate is constant except during the warm-up, it cancels in `c`, which depends only on the number
/// of the step. A rate that is set during training (`Engine::set_lr`) changes steps but not their weights in the
/// average, which in the original grow with the largest rate so far.
#[derive(Debug)]
pub(super) struct AdamWScheduleFree {
    config: ScheduleFreeConfig,
    weights: AveragingCoefficients,
}

impl AdamWScheduleFree {
    pub(super) fn new(config: ScheduleFreeConfig) -> Self {
        Self { config, weights: AveragingCoefficients::new(config) }
    }

    fn constants(&self, ctx: &StepContext) -> ScheduleFreeConstants {
        assert!(ctx.step > 0, "optimizer steps are counted from 1");
        let ScheduleFreeConfig { betas, eps, weight_decay, .. } = self.config;
        let (beta1, beta2) = ctx.betas.unwrap_or(betas);
        let (eps, weight_decay) = (ctx.eps.unwrap_or(eps), ctx.weight_decay.unwrap_or(weight_decay));
        let share = self.weights.share(ctx.step);
        ScheduleFreeConstants {
            grad_scale: ctx.grad_scale,
            is_first: ctx.step == 1,
            mix: Mix::new(beta1),
            beta2: beta2 as f32,
            one_minus_beta2: (1.0 - beta2) as f32,
            root_scale: (1.0 / (1.0 - beta2.powf(ctx.step as f64)).sqrt()) as f32,
            eps: eps as f32,
            decay: weight_decay as f32,
            lr: (ctx.lr * self.weights.warmup(ctx.step)) as f32,
            share: share as f32,
        }
    }
}

impl Optimizer for AdamWScheduleFree {
    fn name(&self) -> &str {
        "AdamWScheduleFree"
    }

    fn lr(&self) -> f64 {
        self.config.lr
    }

    fn momentum(&self) -> Momentum {
        Momentum::Betas(self.config.betas.0, self.config.betas.1)
    }

    fn state_names(&self) -> &'static [&'static str] {
        &["z", "exp_avg_sq"]
    }

    fn update(
        &self,
        ctx: &StepContext,
        param: &mut [f32],
        grad: FlatRef<'_>,
        state: &mut [&mut [f32]],
        half: Option<FlatMut<'_>>,
    ) {
        StepSlices::new(param, grad, state, None).update_with(&self.constants(ctx));
        if let Some(half) = half {
            self.trained_weights(ctx, param, state, half);
        }
    }

    fn rate_rule(&self) -> RateRule {
        RateRule::Constant
    }

    fn averaging(&self) -> Option<&dyn WeightAveraging> {
        Some(self)
    }
}

impl WeightAveraging for AdamWScheduleFree {
    fn trained_weights(&self, ctx: &StepContext, average: &[f32], state: &[&mut [f32]], trained: FlatMut<'_>) {
        let [z, _] = state else { panic!("wrong number of optimizer state buffers") };
        let len = average.len();
        assert!(z.len() == len && trained.len() == len, "a buffer is not as long as the parameter");
        // Before the first step, z equals the average.
        let z: &[f32] = if ctx.step == 0 { average } else { z };
        let mix = Mix::new(ctx.betas.unwrap_or(self.config.betas).0);
        match trained {
            FlatMut::F32(trained) => mix.write(average, z, trained, FlatMut::F32),
            FlatMut::BF16(trained) => mix.write(average, z, trained, FlatMut::BF16),
            FlatMut::F16(trained) => mix.write(average, z, trained, FlatMut::F16),
        }
    }
}

/// The computation of `y`.
#[derive(Debug, Clone, Copy)]
struct Mix {
    /// The share of `z`.
    z_share: f32,
}

/// The number of elements of `y` that one thread computes at a time.
const CHUNK: usize = 64 * 1024;

/// The number of elements of `y` that are computed before they are rounded.
const BLOCK: usize = 1024;

impl Mix {
    fn new(beta1: f64) -> Self {
        Self { z_share: (1.0 - beta1) as f32 }
    }

    /// Returns an element of `y`.
    #[inline(always)]
    fn interpolate(self, average: f32, z: f32) -> f32 {
        // If both numbers are equal, this form returns exactly that number.
        average + self.z_share * (z - average)
    }

    /// Writes `y` to `trained`, which `flat` converts to a flat slice.
    fn write<'t, T: Send>(
        self,
        average: &[f32],
        z: &[f32],
        trained: &'t mut [T],
        flat: impl Fn(&'t mut [T]) -> FlatMut<'t> + Sync,
    ) {
        let chunks = average.len().div_ceil(CHUNK);
        for_each_part(chunks, ParallelChunks::new(trained, CHUNK), |i, trained| {
            let range = i * CHUNK..i * CHUNK + trained.len();
            level().run(MixChunk { mix: self, average: &average[range.clone()], z: &z[range], trained: flat(trained) });
        });
    }
}

struct MixChunk<'a> {
    mix: Mix,
    average: &'a [f32],
    z: &'a [f32],
    trained: FlatMut<'a>,
}

impl SimdLoop for MixChunk<'_> {
    type Output = ();

    #[inline(always)]
    fn run(mut self) {
        let mut mixed = [0.0f32; BLOCK];
        for start in (0..self.average.len()).step_by(BLOCK) {
            let range = start..self.average.len().min(start + BLOCK);
            let mixed = &mut mixed[..range.len()];
            for ((y, x), z) in mixed.iter_mut().zip(&self.average[range.clone()]).zip(&self.z[range.clone()]) {
                *y = self.mix.interpolate(*x, *z);
            }
            cast::narrow(self.trained.reborrow().slice(range), mixed);
        }
    }
}

/// The constants of a step, the same for all elements, computed in f64 and rounded once.
#[derive(Debug, Clone, Copy)]
struct ScheduleFreeConstants {
    grad_scale: f32,
    /// Whether `z` begins at `x` in this step.
    is_first: bool,
    mix: Mix,
    beta2: f32,
    one_minus_beta2: f32,
    /// The factor by which the square root of the second moment is multiplied, 1 / sqrt(1 - b2^t).
    root_scale: f32,
    eps: f32,
    decay: f32,
    /// The learning rate, with the warm-up.
    lr: f32,
    /// The share of the new `z` in the average.
    share: f32,
}

impl ElementwiseKernel<2> for ScheduleFreeConstants {
    #[inline(always)]
    fn update(&self, param: &mut [f32], grad: &[f32], [z, exp_avg_sq]: [&mut [f32]; 2]) {
        let s = *self;
        if s.is_first {
            z.copy_from_slice(param);
        }
        for (((x, g), z), v) in param.iter_mut().zip(grad).zip(z).zip(exp_avg_sq) {
            let g = *g * s.grad_scale;
            let y = s.mix.interpolate(*x, *z);
            *v = s.beta2 * *v + s.one_minus_beta2 * (g * g);
            *z -= s.lr * (g / (v.sqrt() * s.root_scale + s.eps) + s.decay * y);
            *x += s.share * (*z - *x);
        }
    }
}

/// The weights of the steps in the average.
#[derive(Debug)]
struct AveragingCoefficients {
    warmup_steps: u64,
    r: f64,
    power: f64,
    sums: Mutex<CoefficientSums>,
}

/// Sums of weights, each beginning with the first step and always added in order.
#[derive(Debug, Default)]
struct CoefficientSums {
    /// The sums over the first [`STRIDE`] steps, the first 2 [`STRIDE`] steps, and so on.
    at_strides: Vec<f64>,
    /// The number of steps of the sum that was requested last, and that sum.
    last: (u64, f64),
}

/// The number of steps between two sums that are kept.
const STRIDE: u64 = 4096;

impl AveragingCoefficients {
    fn new(ScheduleFreeConfig { warmup_steps, r, weight_lr_power, .. }: ScheduleFreeConfig) -> Self {
        Self { warmup_steps, r, power: weight_lr_power, sums: Mutex::default() }
    }

    /// Returns the factor of the learning rate in step `step`.
    fn warmup(&self, step: u64) -> f64 {
        if step < self.warmup_steps { step as f64 / self.warmup_steps as f64 } else { 1.0 }
    }

    fn weight(&self, step: u64) -> f64 {
        (step as f64).powf(self.r) * self.warmup(step).powf(self.power)
    }

    /// Returns the share of step `step` in the average of all steps up to it.
    fn share(&self, step: u64) -> f64 {
        // Without a warm-up, and with `r` = 0, all steps have the same weight, so no sum is needed.
        if self.r == 0.0 && self.warmup_steps <= 1 {
            return 1.0 / step as f64;
        }
        let (weight, sum) = (self.weight(step), self.sum(step));
        // At a high power, the first weights of a long warm-up are too small for f64.
        if sum > 0.0 { weight / sum } else { 1.0 }
    }

    /// Returns the sum of the weights of the first `count` steps. Its bits do not depend on the sums that were
    /// requested before.
    fn sum(&self, count: u64) -> f64 {
        let mut sums = lock(&self.sums);
        if sums.last.0 == count {
            return sums.last.1;
        }
        let (mut step, mut sum) = sums.last;
        let stored = (sums.at_strides.len() as u64).min(count / STRIDE);
        if step > count || stored * STRIDE > step {
            step = stored * STRIDE;
            sum = stored.checked_sub(1).and_then(|i| sums.at_strides.get(i as usize)).copied().unwrap_or(0.0);
        }
        while step < count {
            step += 1;
            sum += self.weight(step);
            if step == (sums.at_strides.len() as u64 + 1) * STRIDE {
                sums.at_strides.push(sum);
            }
        }
        sums.last = (step, sum);
        sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(warmup_steps: u64, r: f64) -> ScheduleFreeConfig {
        ScheduleFreeConfig {
            lr: 0.01,
            betas: (0.9, 0.999),
            eps: 1e-8,
            weight_decay: 0.1,
            warmup_steps,
            r,
            weight_lr_power: 2.0,
        }
    }

    #[test]
    fn sums_of_weights_have_the_same_bits_in_any_order_of_steps() {
        let bits_of = |steps: &[u64]| {
            let weights = AveragingCoefficients::new(config(5000, 0.5));
            steps.iter().map(|step| weights.sum(*step).to_bits()).collect::<Vec<_>>()
        };
        let steps = [1, 2, 4095, 4096, 4097, 8191, 8192, 10_000];
        let ascending = bits_of(&steps);
        let mut reversed = bits_of(&steps.iter().rev().copied().collect::<Vec<_>>());
        reversed.reverse();
        assert_eq!(ascending, reversed);
        for (i, step) in steps.iter().enumerate() {
            assert_eq!(bits_of(&[10_000, *step])[1], ascending[i], "{step} after a later step");
            assert_eq!(bits_of(&[*step])[0], ascending[i], "{step} first");
        }
    }

    #[test]
    fn without_warm_up_every_step_has_the_same_weight() {
        let weights = AveragingCoefficients::new(config(0, 0.0));
        assert_eq!([1, 2, 5].map(|step| weights.share(step)), [1.0, 0.5, 0.2]);
        let ramp = AveragingCoefficients::new(config(4, 0.0));
        // The weights are 1/16, 4/16, 9/16, 1, 1.
        assert!((ramp.share(3) - 9.0 / 14.0).abs() < 1e-15);
        assert!((ramp.share(5) - 16.0 / 46.0).abs() < 1e-15);
    }

    #[test]
    fn trained_weights_are_those_that_an_update_writes_in_any_dtype() {
        let optimizer = AdamWScheduleFree::new(config(2, 0.0));
        let len = CHUNK + 777;
        let mut x: Vec<f32> = (0..len).map(|i| (i as f32 * 0.37).sin()).collect();
        let grad: Vec<f32> = (0..len).map(|i| (i as f32 * 0.11).cos()).collect();
        let (mut z, mut v) = (vec![0.0; len], vec![0.0; len]);
        for step in 1..4 {
            let ctx = StepContext::new(0.01, step);
            let mut y = vec![half::bf16::ZERO; len];
            let mut states = [z.as_mut_slice(), v.as_mut_slice()];
            optimizer.update(&ctx, &mut x, FlatRef::F32(&grad), &mut states, Some(FlatMut::BF16(&mut y)));
            let mut recomputed = vec![half::bf16::ZERO; len];
            optimizer.trained_weights(&ctx, &x, &states, FlatMut::BF16(&mut recomputed));
            let mut in_f32 = vec![0.0; len];
            optimizer.trained_weights(&ctx, &x, &states, FlatMut::F32(&mut in_f32));
            assert!(y == recomputed);
            assert!(y.iter().zip(&in_f32).all(|(y, in_f32)| *y == half::bf16::from_f32(*in_f32)));
            assert!(in_f32.iter().zip(&x).zip(&z).all(|((y, x), z)| (y - (0.1 * z + 0.9 * x)).abs() <= 1e-6));
        }
        // Before the first step, all three are the same.
        let mut y = vec![0.0; len];
        optimizer.trained_weights(&StepContext::new(0.01, 0), &x, &[&mut z, &mut v], FlatMut::F32(&mut y));
        assert!(y == x);
    }
}
