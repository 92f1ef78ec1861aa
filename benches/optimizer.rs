//! The optimizer's pass over memory. Items are elements; bytes are what a step must at least move: weights and two
//! moments read and written, the gradient read, the bf16 copy written.
//!
//!     cargo bench --bench optimizer

use candle_zero::config::{AdamConfig, OptimizerConfig};
use candle_zero::optim::{StepContext, from_config};
use candle_zero::precision::Flat;
use divan::Bencher;
use divan::counter::{BytesCount, ItemsCount};
use half::bf16;

/// In the second-level cache, and far beyond any cache.
const ELEMENTS: [usize; 2] = [1 << 15, 1 << 24];

fn main() {
    divan::main();
}

fn adamw(bencher: Bencher<'_, '_>, elements: usize, grad: Flat, mut copy: Option<Flat>) {
    let config = AdamConfig {
        lr: 1e-3,
        betas: (0.9, 0.95),
        eps: 1e-8,
        weight_decay: 0.1,
        bias_correction: true,
        decoupled: true,
    };
    let optimizer = from_config(&OptimizerConfig::Adam(config));
    let mut weights = vec![0.5f32; elements];
    let mut moments = [vec![0.01f32; elements], vec![0.01f32; elements]];
    let per_element = 3 * 8 + grad.dtype().size_in_bytes() + copy.as_ref().map_or(0, |c| c.dtype().size_in_bytes());
    let mut step = 0;
    bencher.counter(BytesCount::new(elements * per_element)).counter(ItemsCount::new(elements)).bench_local(|| {
        step += 1;
        let ctx = StepContext { lr: 1e-3, step, grad_scale: 1.0 };
        let mut state = moments.each_mut().map(Vec::as_mut_slice);
        optimizer.update(&ctx, &mut weights, grad.as_ref(), &mut state, copy.as_mut().map(Flat::as_mut));
    });
}

#[divan::bench(args = ELEMENTS, sample_count = 30)]
fn adamw_f32(bencher: Bencher<'_, '_>, elements: usize) {
    adamw(bencher, elements, Flat::F32(vec![0.01; elements]), None);
}

#[divan::bench(args = ELEMENTS, sample_count = 30)]
fn adamw_bf16_copy(bencher: Bencher<'_, '_>, elements: usize) {
    let filled = |x| Flat::BF16(vec![bf16::from_f32(x); elements]);
    adamw(bencher, elements, filled(0.01), Some(filled(0.5)));
}
