//! Measures the optimizer's pass over memory and the passes before it. Bytes are the minimum that a pass must move.
//!
//!     cargo bench --bench optimizer
//!
//! `triad` is the yardstick: a plain streaming loop that reads and writes the same buffers as AdamW in f32
//! (gradient read; weights and two moments read and written). Two threads get twice the bandwidth of one only if the
//! memory provides it.

use candle_core::DType;
use candle_zero::config::{
    AdagradConfig, AdamConfig, LambConfig, LionConfig, MuonConfig, NsMethod, OptimizerConfig, SgdConfig,
};
use candle_zero::optim::{OptimizerNeeds, SquareSums, StepContext, from_config};
use candle_zero::precision::{Flat, has_non_finite, sum_of_squares};
use divan::Bencher;
use divan::counter::{BytesCount, ItemsCount};
use rayon::prelude::*;

/// The number of elements: far more than fit into any cache.
const ELEMENTS: usize = 100_000_000;
const THREADS: [usize; 2] = [1, 2];

fn main() {
    divan::main();
}

/// Times `pass`, which moves `bytes` bytes per element, on a pool of `threads` threads.
fn measure(bencher: Bencher<'_, '_>, threads: usize, bytes: usize, pass: impl FnMut() + Send + Sync) {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool");
    let bencher = bencher.counter(BytesCount::new(ELEMENTS * bytes)).counter(ItemsCount::new(ELEMENTS));
    let mut pass = pass;
    bencher.bench_local(move || pool.install(&mut pass));
}

fn filled(dtype: DType, value: f32) -> Flat {
    let mut flat = Flat::with_capacity(dtype, ELEMENTS);
    let block = Flat::from_f32(vec![value; 1 << 20], dtype);
    while flat.len() < ELEMENTS {
        flat.extend_cast(block.slice(0..block.len().min(ELEMENTS - flat.len())));
    }
    flat
}

fn f32s(flat: &mut Flat) -> &mut [f32] {
    match flat {
        Flat::F32(v) => v,
        other => panic!("{:?}", other.dtype()),
    }
}

fn optimizer(bencher: Bencher<'_, '_>, threads: usize, config: &OptimizerConfig, grad: DType, copy: Option<DType>) {
    let optimizer = from_config(config);
    let mut weights = filled(DType::F32, 0.5);
    let mut states: Vec<Flat> = optimizer.state_names().iter().map(|_| filled(DType::F32, 0.01)).collect();
    let grad = filled(grad, 0.01);
    let mut copy = copy.map(|dtype| filled(dtype, 0.5));
    let element_size = |flat: Option<&Flat>| flat.map_or(0, |flat| flat.dtype().size_in_bytes());
    let bytes = 8 * (1 + states.len()) + element_size(Some(&grad)) + element_size(copy.as_ref());
    let mut step = 0;
    measure(bencher, threads, bytes, move || {
        step += 1;
        let ctx = StepContext { grad_scale: 0.7, ..StepContext::new(1e-3, step) };
        let mut states: Vec<_> = states.iter_mut().map(f32s).collect();
        let copy = copy.as_mut().map(Flat::as_mut);
        optimizer.update(&ctx, f32s(&mut weights), grad.as_ref(), &mut states, copy);
    });
}

fn adamw() -> OptimizerConfig {
    OptimizerConfig::Adam(AdamConfig {
        lr: 1e-3,
        betas: (0.9, 0.95),
        eps: 1e-8,
        weight_decay: 0.1,
        bias_correction: true,
        decoupled: true,
    })
}

#[divan::bench(args = THREADS, sample_count = 20, sample_size = 1)]
fn triad(bencher: Bencher<'_, '_>, threads: usize) {
    let mut written = [0.5, 0.01, 0.01].map(|value| filled(DType::F32, value));
    let mut read = filled(DType::F32, 0.01);
    measure(bencher, threads, 28, move || {
        let [a, b, c] = written.each_mut().map(f32s);
        let chunk_len = ELEMENTS / threads;
        let chunks = |v| <[f32]>::par_chunks_mut(v, chunk_len);
        chunks(a).zip(chunks(b)).zip(chunks(c)).zip(chunks(f32s(&mut read))).for_each(|(((a, b), c), x)| {
            for (((a, b), c), x) in a.iter_mut().zip(b).zip(c).zip(x) {
                *a += 0.5 * *x;
                *b += 0.25 * *x;
                *c += 0.125 * *x;
            }
        });
    });
}

#[divan::bench(args = THREADS, sample_count = 20, sample_size = 1)]
fn adamw_f32(bencher: Bencher<'_, '_>, threads: usize) {
    optimizer(bencher, threads, &adamw(), DType::F32, None);
}

#[divan::bench(args = THREADS, sample_count = 20, sample_size = 1)]
fn adamw_bf16_copy(bencher: Bencher<'_, '_>, threads: usize) {
    optimizer(bencher, threads, &adamw(), DType::BF16, Some(DType::BF16));
}

#[divan::bench(args = THREADS, sample_count = 20, sample_size = 1)]
fn sgd_momentum_f32(bencher: Bencher<'_, '_>, threads: usize) {
    let config = SgdConfig { lr: 1e-3, momentum: 0.9, dampening: 0.0, weight_decay: 0.1, nesterov: false };
    optimizer(bencher, threads, &OptimizerConfig::Sgd(config), DType::F32, None);
}

#[divan::bench(args = THREADS, sample_count = 20, sample_size = 1)]
fn lion_f32(bencher: Bencher<'_, '_>, threads: usize) {
    let config = LionConfig { lr: 1e-3, betas: (0.9, 0.99), weight_decay: 0.1 };
    optimizer(bencher, threads, &OptimizerConfig::Lion(config), DType::F32, None);
}

#[divan::bench(args = THREADS, sample_count = 20, sample_size = 1)]
fn adagrad_f32(bencher: Bencher<'_, '_>, threads: usize) {
    let config = AdagradConfig { lr: 1e-3, eps: 1e-10, weight_decay: 0.1 };
    optimizer(bencher, threads, &OptimizerConfig::Adagrad(config), DType::F32, None);
}

fn lamb() -> OptimizerConfig {
    OptimizerConfig::Lamb(LambConfig {
        lr: 1e-3,
        betas: (0.9, 0.95),
        eps: 1e-8,
        weight_decay: 0.1,
        bias_correction: true,
        eps_inside_sqrt: false,
        max_coeff: 10.0,
        min_coeff: 0.01,
    })
}

/// Measures the second of LAMB's two passes.
#[divan::bench(args = THREADS, sample_count = 20, sample_size = 1)]
fn lamb_f32(bencher: Bencher<'_, '_>, threads: usize) {
    optimizer(bencher, threads, &lamb(), DType::F32, None);
}

/// Measures the first of LAMB's two passes, which only reads.
#[divan::bench(args = THREADS, sample_count = 20, sample_size = 1)]
fn lamb_squares_f32(bencher: Bencher<'_, '_>, threads: usize) {
    let optimizer = from_config(&lamb());
    let mut buffers = [0.5, 0.01, 0.01].map(|value| filled(DType::F32, value));
    let grad = filled(DType::F32, 0.01);
    let ctx = StepContext { grad_scale: 0.7, ..StepContext::new(1e-3, 1) };
    measure(bencher, threads, 16, move || {
        let [weights, m, v] = buffers.each_mut().map(f32s);
        let mut squares = SquareSums::default();
        let OptimizerNeeds::Norms(layerwise) = optimizer.needs() else { panic!("LAMB needs norms") };
        layerwise.add_squares(&ctx, weights, grad.as_ref(), &[&*m, &*v], &mut squares);
        divan::black_box(squares);
    });
}

fn muon(ns_method: NsMethod) -> OptimizerConfig {
    let OptimizerConfig::Adam(adam) = adamw() else { panic!("AdamW is a variant of Adam") };
    OptimizerConfig::Muon(MuonConfig { lr: 0.02, momentum: 0.95, weight_decay: 0.1, ns_method, adam })
}

/// Measures the first of Muon's passes: gradient read, momentum read and written, rough direction written.
#[divan::bench(args = THREADS, sample_count = 20, sample_size = 1)]
fn muon_momentum_f32(bencher: Bencher<'_, '_>, threads: usize) {
    let optimizer = from_config(&muon(NsMethod::Gram));
    let mut buffers = [0.01, 0.0].map(|value| filled(DType::F32, value));
    let grad = filled(DType::F32, 0.01);
    let ctx = StepContext { grad_scale: 0.7, ..StepContext::new(1e-3, 1) };
    measure(bencher, threads, 16, move || {
        let [momentum, direction] = buffers.each_mut().map(f32s);
        let OptimizerNeeds::WholeParameter(whole_optimizer) = optimizer.needs() else {
            panic!("Muon needs complete matrices")
        };
        whole_optimizer.momentum(&ctx, grad.as_ref(), &mut [momentum], direction);
    });
}

/// Measures the last of Muon's passes: finished direction read, weights read and written.
#[divan::bench(args = THREADS, sample_count = 20, sample_size = 1)]
fn muon_step_f32(bencher: Bencher<'_, '_>, threads: usize) {
    let optimizer = from_config(&muon(NsMethod::Gram));
    let (mut weights, direction) = (filled(DType::F32, 0.5), filled(DType::F32, 0.01));
    measure(bencher, threads, 12, move || {
        optimizer.update(&StepContext::new(1e-3, 1), f32s(&mut weights), direction.as_ref(), &mut [], None);
    });
}

/// Measures the Newton-Schulz iteration, which Muon runs between its first and its last pass, on one matrix. Items are
/// the floating-point operations of its products.
#[divan::bench(args = [[768, 768], [768, 3072], [3072, 768], [1024, 4096]], consts = [false, true], sample_count = 5, sample_size = 1)]
fn muon_newton_schulz<const STANDARD: bool>(bencher: Bencher<'_, '_>, shape: [usize; 2]) {
    let method = if STANDARD { NsMethod::Standard } else { NsMethod::Gram };
    let optimizer = from_config(&muon(method));
    let (all, short) = (shape[0] * shape[1], shape[0].min(shape[1]));
    // The standard method computes the Gram matrix, its square and a product with X, five times. The Gram method, which
    // is not used for square matrices, computes two Gram matrices, two products with X, and 5 + 3 + 2 x 3 products of
    // square matrices.
    let is_plain = STANDARD || shape[0] == shape[1];
    let products = if is_plain { 5 * (2 * all + short * short) } else { 4 * all + 14 * short * short };
    let matrix: Vec<f32> = (0..all).map(|i| ((i * 7919 + i / 3 * 31) % 1009) as f32 / 504.5 - 1.0).collect();
    bencher.counter(ItemsCount::new(2 * products * short)).with_inputs(|| matrix.clone()).bench_local_values(
        |mut matrix| {
            let OptimizerNeeds::WholeParameter(whole_optimizer) = optimizer.needs() else {
                panic!("Muon needs complete matrices")
            };
            whole_optimizer.finish(&mut matrix, &shape);
            matrix
        },
    );
}

#[divan::bench(args = THREADS, consts = [false, true], sample_count = 20, sample_size = 1)]
fn norm<const HALF: bool>(bencher: Bencher<'_, '_>, threads: usize) {
    let dtype = if HALF { DType::BF16 } else { DType::F32 };
    let values = filled(dtype, 0.01);
    measure(bencher, threads, dtype.size_in_bytes(), move || {
        divan::black_box(sum_of_squares(values.as_ref()));
    });
}

#[divan::bench(args = THREADS, consts = [false, true], sample_count = 20, sample_size = 1)]
fn overflow_vote<const HALF: bool>(bencher: Bencher<'_, '_>, threads: usize) {
    let dtype = if HALF { DType::BF16 } else { DType::F32 };
    let values = filled(dtype, 0.01);
    measure(bencher, threads, dtype.size_in_bytes(), move || {
        divan::black_box(has_non_finite(values.as_ref()));
    });
}

#[divan::bench(args = THREADS, sample_count = 20, sample_size = 1)]
fn cast_f32_to_bf16(bencher: Bencher<'_, '_>, threads: usize) {
    let (src, mut dst) = (filled(DType::F32, 0.01), filled(DType::BF16, 0.0));
    measure(bencher, threads, 6, move || dst.as_mut().copy_cast(src.as_ref()));
}

#[divan::bench(args = THREADS, sample_count = 20, sample_size = 1)]
fn cast_bf16_to_f32(bencher: Bencher<'_, '_>, threads: usize) {
    let (src, mut dst) = (filled(DType::BF16, 0.01), filled(DType::F32, 0.0));
    measure(bencher, threads, 6, move || dst.as_mut().copy_cast(src.as_ref()));
}

#[divan::bench(args = THREADS, sample_count = 20, sample_size = 1)]
fn copy_scaled_f32(bencher: Bencher<'_, '_>, threads: usize) {
    let (src, mut dst) = (filled(DType::F32, 0.01), filled(DType::F32, 0.0));
    measure(bencher, threads, 8, move || dst.as_mut().copy_scaled(src.as_ref(), 0.5));
}

#[divan::bench(args = THREADS, sample_count = 20, sample_size = 1)]
fn add_scaled_f32(bencher: Bencher<'_, '_>, threads: usize) {
    let (src, mut dst) = (filled(DType::F32, 0.01), filled(DType::F32, 0.0));
    measure(bencher, threads, 12, move || dst.as_mut().add_scaled(src.as_ref(), 0.5));
}

#[divan::bench(args = THREADS, sample_count = 20, sample_size = 1)]
fn add_scaled_bf16_to_f32(bencher: Bencher<'_, '_>, threads: usize) {
    let (src, mut dst) = (filled(DType::BF16, 0.01), filled(DType::F32, 0.0));
    measure(bencher, threads, 10, move || dst.as_mut().add_scaled(src.as_ref(), 0.5));
}
