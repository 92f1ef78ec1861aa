#![allow(clippy::unwrap_used)]
//! Measures what share of a GPU's bandwidth each kernel reaches. `scripts/gpu_check.sh` runs this measurement. It can
//! also be run with this command:
//!
//!     cargo test --release --features cuda --lib cuda::kernel_bandwidth -- --ignored --nocapture
//!
//! A kernel's bandwidth is the minimum number of bytes that it must move divided by its time on the GPU, averaged over
//! many launches. The reference is the driver's own copy within the GPU's memory, in the same run. Attention, which is
//! limited by arithmetic, is shown alongside a matrix product of cuBLAS and has no minimum.

use super::cross_entropy::{self, CrossEntropyArguments, DeviceTargets, LossGradientScale};
use super::embedding::{self, EmbeddingRowUses};
use super::optimizer::MultiTensorStep;
use super::rotary::{RotaryAngles, RotaryPositions, rotate};
use super::*;
use crate::kernels::attention::{AttentionRule, AttentionShape};
use crate::kernels::gemm::Activation;
use crate::kernels::rope::RotaryLayout;
use crate::precision::Flat;
use candle_core::backend::BackendDevice;
use candle_core::cuda_backend::cudarc::driver::CudaSlice;
use candle_core::cuda_backend::cudarc::driver::sys::CUevent_flags;
use candle_core::{CudaDevice, CudaStorage, DType, Device, Tensor};

/// The minimum share of the copy's bandwidth for kernels that process arrays element by element.
const MIN_STREAMING_SHARE: f64 = 0.6;
/// The minimum share for kernels that sum rows or columns, look them up, or generate random numbers.
const MIN_SUMMING_SHARE: f64 = 0.4;

/// The number of elements of the largest arrays, far beyond any cache. `CANDLE_ZERO_TEST_ELEMENTS` sets a smaller
/// number, and then no minimum is checked.
const ELEMENTS: usize = 1 << 26;
/// The number of elements of a row.
const WIDTH: usize = 2048;
const CLASSES: usize = 1 << 15;

struct KernelBench {
    device: CudaDevice,
    elements: usize,
    checks_minimum: bool,
    /// The reference in bytes per second.
    copy: f64,
    slow_kernels: Vec<String>,
}

impl KernelBench {
    /// Returns the seconds that one `run` takes on the GPU.
    fn seconds(&self, mut run: impl FnMut()) -> f64 {
        let (warm_up, times) = if self.checks_minimum { (3, 20) } else { (1, 1) };
        let stream = self.device.cuda_stream();
        let event = || stream.record_event(Some(CUevent_flags::CU_EVENT_DEFAULT)).unwrap();
        // No wait separates the runs, so the memory of earlier results stays available for later ones.
        (0..warm_up).for_each(|_| run());
        let begin = event();
        (0..times).for_each(|_| run());
        let end = event();
        f64::from(begin.elapsed_ms(&end).unwrap()) / 1e3 / f64::from(times)
    }

    /// Measures `run`, which moves `bytes`, and prints a row.
    fn row(&mut self, name: &str, bytes: usize, floor: f64, run: impl FnMut()) {
        let bandwidth = bytes as f64 / self.seconds(run);
        let share = bandwidth / self.copy;
        let verdict = match (self.checks_minimum, share >= floor) {
            (false, _) => "-   ",
            (true, true) => "PASS",
            (true, false) => "FAIL",
        };
        println!(
            "{verdict}  {name}: {:.0} GB/s, {:.0} % of a copy (at least {:.0} %)",
            bandwidth / 1e9,
            share * 100.0,
            floor * 100.0
        );
        if verdict == "FAIL" {
            self.slow_kernels.push(name.into());
        }
    }

    /// Returns numbers with magnitudes from 1/8 to 1. If `signed` is set, about half of them are negative. Zeros would
    /// take exceptional paths, such as that of a division whose numerator is 0.
    fn numbers(&self, dtype: DType, len: usize, signed: bool) -> DeviceFlat {
        let number = |i: usize| {
            let bits = crate::util::mix(i as u64);
            let value = 0.125 + (bits >> 40) as f32 / (1 << 24) as f32 * 0.875;
            if signed && bits & 1 == 1 { -value } else { value }
        };
        let pattern = Flat::from_f32((0..len.min(1 << 20)).map(number).collect(), dtype);
        let pattern = DeviceFlat::of(&self.device, pattern.as_ref()).unwrap();
        let mut flat = DeviceFlat::zeros(&self.device, dtype, len).unwrap();
        for start in (0..len).step_by(pattern.len()) {
            let part = start..len.min(start + pattern.len());
            let source = pattern.slice(0..part.len()).unwrap();
            copy(&self.device, flat.slice_mut(part).unwrap(), &source).unwrap();
        }
        flat
    }

    /// Returns 16-bit arrays with the full number of elements.
    fn halves<const N: usize>(&self) -> [DeviceFlat; N] {
        std::array::from_fn(|_| self.numbers(DType::BF16, self.elements, true))
    }
}

fn all(flat: &DeviceFlat) -> DeviceFlatRef<'_> {
    flat.slice(0..flat.len()).unwrap()
}

fn all_mut(flat: &mut DeviceFlat) -> DeviceFlatMut<'_> {
    let range = 0..flat.len();
    flat.slice_mut(range).unwrap()
}

fn flat(bench: &mut KernelBench) {
    let (device, n) = (bench.device.clone(), bench.elements);
    let (mut wide, other) = (bench.numbers(DType::F32, n, true), bench.numbers(DType::F32, n, true));
    let [mut half, other_half] = bench.halves();
    bench.row("copy, f32", 8 * n, MIN_STREAMING_SHARE, || copy(&device, all_mut(&mut wide), &all(&other)).unwrap());
    bench.row("cast, f32 to bf16", 6 * n, MIN_STREAMING_SHARE, || {
        copy(&device, all_mut(&mut half), &all(&other)).unwrap()
    });
    bench.row("scale, f32", 8 * n, MIN_STREAMING_SHARE, || wide.scale(0.5).unwrap());
    bench.row("add, bf16", 6 * n, MIN_STREAMING_SHARE, || add(&device, all_mut(&mut half), &all(&other_half)).unwrap());
    for (name, array, bytes) in [("f32", all(&other), 4 * n), ("bf16", all(&other_half), 2 * n)] {
        let arrays = [array];
        bench.row(&format!("sum of squares, {name}"), bytes, MIN_SUMMING_SHARE, || {
            drop(square_sums::launch(&device, &arrays).unwrap());
        });
    }
}

/// Measures optimizer steps of arrays that together have all elements, with gradients and copies in bf16.
fn optimizer(bench: &mut KernelBench, name: &str, rule: &ElementwiseUpdate, states: usize, arrays: usize) {
    let (device, n) = (bench.device.clone(), bench.elements);
    let mut wide: Vec<_> = (0..=states).map(|_| bench.numbers(DType::F32, n, false)).collect();
    let [grad, mut copy] = bench.halves();
    let len = n / arrays;
    bench.row(name, n * (8 * (1 + states) + 2 + 2), MIN_STREAMING_SHARE, || {
        let mut steps = MultiTensorStep::new(&device);
        for range in (0..arrays).map(|i| i * len..(i + 1) * len) {
            let mut parts: Vec<_> = wide.iter_mut().map(|flat| flat.slice_mut(range.clone()).unwrap()).collect();
            let (param, copy) = (parts.remove(0), copy.slice_mut(range.clone()).unwrap());
            // SAFETY: the steps run below, while the buffers exist; each has separate elements, used on Candle's
            // stream.
            unsafe { steps.add(rule, param, &grad.slice(range).unwrap(), parts, Some(copy)).unwrap() }
        }
        steps.run().unwrap();
    });
}

fn optimizers(bench: &mut KernelBench) {
    let adam = ElementwiseUpdate::Adam([0.5, 0.9, 0.95, 0.1, 0.05, 0.0, 1e-4, 1e-3, 1.0, 1e-8]);
    optimizer(bench, "Adam", &adam, 2, 1);
    optimizer(bench, "Adam, 1024 parameters", &adam, 2, 1024);
    optimizer(bench, "Lion", &ElementwiseUpdate::Lion([0.5, 0.9, 0.99, 0.1, 0.01, 0.99, 1e-3]), 1, 1);
    optimizer(bench, "Adagrad", &ElementwiseUpdate::Adagrad([0.5, 0.0, 1e-2, 1e-8]), 1, 1);
    optimizer(bench, "SGD", &ElementwiseUpdate::Sgd([1e-2, 0.5, 0.0]), 0, 1);
    optimizer(bench, "SGD with momentum", &ElementwiseUpdate::SgdMomentum([1e-2, 0.5, 0.0, 0.9, 1.0, 0.0, 1.0]), 1, 1);
}

type Forward<'a> = dyn Fn() -> (CudaStorage, norm::NormStatistics) + 'a;

fn norms(bench: &mut KernelBench) {
    let (device, n) = (bench.device.clone(), bench.elements);
    let [x, dy, mut dx] = bench.halves();
    let [weight, bias] = [0; 2].map(|_| bench.numbers(DType::BF16, WIDTH, true));
    let (x, dy, weight, bias) = (&all(&x), &all(&dy), &all(&weight), &all(&bias));
    let layer_norm = || norm::layer_norm(&device, x, [weight, bias], 1e-5).unwrap();
    let rms_norm = || norm::rms_norm(&device, [x, weight], 0.0, 1e-5).unwrap();
    let norm_kinds: [(&str, &Forward<'_>); 2] = [("layer norm", &layer_norm), ("RMS norm", &rms_norm)];
    for (name, forward) in norm_kinds {
        let (_, statistics) = forward();
        bench.row(&format!("{name}, forward"), 4 * n, MIN_SUMMING_SHARE, || drop(forward()));
        bench.row(&format!("{name}, gradient of the input"), 6 * n, MIN_SUMMING_SHARE, || {
            norm::input_gradient(&device, &statistics, [x, weight, dy], 0.0, all_mut(&mut dx), false).unwrap();
        });
        bench.row(&format!("{name}, gradients of parameters"), 4 * n, MIN_SUMMING_SHARE, || {
            drop(norm::parameter_gradients(&device, &statistics, [x, weight, dy]).unwrap());
        });
    }
    bench.row("sums of columns", 2 * n, MIN_SUMMING_SHARE, || {
        drop(column_sums::PartialColumnSums::of_columns(&device, x, WIDTH).unwrap())
    });
}

fn activations(bench: &mut KernelBench) {
    let (device, n) = (bench.device.clone(), bench.elements);
    let [x, other, mut out] = bench.halves();
    let bias = bench.numbers(DType::BF16, WIDTH, true);
    let (x, other, bias) = (&all(&x), &all(&other), &all(&bias));
    for (name, function) in [
        ("GELU (tanh)", Activation::GeluTanh),
        ("GELU", Activation::Gelu),
        ("SiLU", Activation::Silu),
        ("ReLU^2", Activation::ReluSquared),
    ] {
        bench.row(&format!("{name}, forward"), 4 * n, MIN_STREAMING_SHARE, || {
            drop(activation::forward(&device, function, x).unwrap());
        });
        bench.row(&format!("{name}, backward"), 6 * n, MIN_STREAMING_SHARE, || {
            activation::backward(&device, function, [x, other], all_mut(&mut out)).unwrap();
        });
    }
    bench.row("SwiGLU, forward", 6 * n, MIN_STREAMING_SHARE, || {
        drop(activation::gated(&device, Activation::Silu, [x, other]).unwrap());
    });
    bench.row("SwiGLU, backward", 10 * n, MIN_STREAMING_SHARE, || {
        drop(activation::gated_backward(&device, Activation::Silu, [x, other], x).unwrap());
    });
    bench.row("bias and residual of a linear layer", 6 * n, MIN_STREAMING_SHARE, || {
        drop(linear_epilogue::apply(&device, all_mut(&mut out), WIDTH, Some(bias), None, Some(other)).unwrap());
    });
    bench.row("bias and GELU of a linear layer", 6 * n, MIN_STREAMING_SHARE, || {
        let function = Some(Activation::GeluTanh);
        drop(linear_epilogue::apply(&device, all_mut(&mut out), WIDTH, Some(bias), function, None).unwrap());
    });
    bench.row("dropout", 4 * n, MIN_SUMMING_SHARE, || drop(dropout::dropout(&device, x, 0.1, 7, 0).unwrap()));
    let (half, time) = (64, n / WIDTH);
    let angles = vec![0.5; time * half];
    let angles = RotaryAngles::new(&device, RotaryLayout::of_complete_heads(half), half, [&angles, &angles]).unwrap();
    let positions = RotaryPositions::From { first: 0, time: time.min(2048) };
    bench.row("rotary positions", 4 * n, MIN_STREAMING_SHARE, || {
        drop(rotate(&device, &angles, x, WIDTH, &positions, 1.0).unwrap());
    });
}

fn tables(bench: &mut KernelBench) {
    let (device, n) = (bench.device.clone(), bench.elements);
    let [table, dy, mut grad] = bench.halves();
    let (table, dy) = (&all(&table), &all(&dy));
    // The rows are so wide that there are only a few ids, which are copied from the host.
    let width = n.min(8192);
    let rows = n / width;
    // Each row occurs once, in a permuted order. The number of rows is a power of two.
    let ids: Vec<u32> = (0..rows).map(|i| (i * 77 % rows) as u32).collect();
    bench.row("embedding, forward", 4 * n, MIN_SUMMING_SHARE, || {
        drop(embedding::look_up(&device, &ids, table, width, DType::BF16).unwrap());
    });
    let uses = EmbeddingRowUses::new(&ids, None);
    bench.row("embedding, backward", 6 * n, MIN_SUMMING_SHARE, || {
        embedding::add_rows(&device, &uses, dy, width, all_mut(&mut grad)).unwrap();
    });

    let classes = n.min(CLASSES);
    let targets = DeviceTargets::new(&device, &vec![1; n / classes], classes).unwrap();
    let args = CrossEntropyArguments { classes, targets: &targets, first: 0, rows: n / classes, cap: None };
    let mut losses: CudaSlice<f32> = device.alloc_zeros(args.rows).unwrap();
    bench.row("cross entropy, losses", 2 * n, MIN_SUMMING_SHARE, || {
        cross_entropy::losses(&device, &args, table, 1.0, &mut losses).unwrap();
    });
    bench.row("cross entropy, gradients", 4 * n, MIN_SUMMING_SHARE, || {
        cross_entropy::gradients(&device, &args, Some(table), &LossGradientScale::One, all_mut(&mut grad), None)
            .unwrap();
    });
}

/// Measures 16-bit attention in which each query sees the positions up to its own.
fn attentions(bench: &KernelBench) {
    let device = &bench.device;
    let (batch, time, heads) = if bench.checks_minimum { (8, 2048, 16) } else { (1, 64, 2) };
    let side = if bench.checks_minimum { 8192 } else { 64 };
    let square = Tensor::randn(0f32, 1.0, (side, side), &Device::Cuda(device.clone())).unwrap();
    let square = square.to_dtype(DType::BF16).unwrap();
    let matmul_tflops = 2.0 * (side as f64).powi(3) / bench.seconds(|| drop(square.matmul(&square).unwrap())) / 1e12;
    println!("      cuBLAS's product of {side} x {side}, bf16: {matmul_tflops:.1} TFLOPS");
    let show = |name: String, operations: f64, seconds: f64| {
        let speed = operations / seconds / 1e12;
        println!("-     {name}: {speed:.1} TFLOPS, {:.0} % of a product's speed", 100.0 * speed / matmul_tflops);
    };
    for head in [64, 128] {
        let h = AttentionShape { batch, time, heads, kv_heads: heads, head };
        if !attention::supports(device, &h) {
            println!("-     attention, heads of {head}: composed of other operations on this GPU");
            continue;
        }
        let rule =
            AttentionRule { scale: 0.1, soft_cap: None, window: None, bidirectional: false, starts: None, sinks: None };
        let [qkv, dout] = [3, 1].map(|parts| bench.numbers(DType::BF16, parts * batch * time * heads * head, true));
        let (qkv, dout) = ([&all(&qkv)], &all(&dout));
        let forward = || attention::forward(device, (&h, &rule), qkv).unwrap();
        let (out, lse) = forward();
        let out = &elements(&out, 0..dout.len()).unwrap();
        // The forward pass computes two products over half of the pairs of positions, with two operations per element.
        // The backward pass computes five such products.
        let operations = 0.5 * (batch * heads * time * time * head) as f64 * 2.0 * 2.0;
        show(format!("attention, heads of {head}, forward"), operations, bench.seconds(|| drop(forward())));
        let backward = || drop(attention::backward(device, (&h, &rule), qkv, (out, &lse, dout)).unwrap());
        show(format!("attention, heads of {head}, backward"), 2.5 * operations, bench.seconds(backward));
    }
}

#[test]
#[ignore = "measures a GPU, which nothing else may use at the same time"]
fn kernels_reach_a_part_of_the_memorys_bandwidth() {
    let Ok(device) = CudaDevice::new(0) else {
        println!("skipped: the CUDA driver finds no device");
        return;
    };
    let requested = std::env::var("CANDLE_ZERO_TEST_ELEMENTS").ok().map(|n| n.parse::<usize>().unwrap());
    let elements = requested.unwrap_or(ELEMENTS);
    assert!(elements.is_power_of_two() && elements >= 2 * WIDTH, "{elements} elements");
    let mut bench =
        KernelBench { device, elements, checks_minimum: requested.is_none(), copy: 0.0, slow_kernels: Vec::new() };
    {
        let stream = bench.device.cuda_stream();
        let from: CudaSlice<f32> = stream.alloc_zeros(elements).unwrap();
        let mut to: CudaSlice<f32> = stream.alloc_zeros(elements).unwrap();
        bench.copy = (8 * elements) as f64 / bench.seconds(|| stream.memcpy_dtod(&from, &mut to).unwrap());
    }
    println!("      the driver's copy in the GPU's memory, {elements} elements of f32: {:.0} GB/s", bench.copy / 1e9);
    flat(&mut bench);
    optimizers(&mut bench);
    norms(&mut bench);
    activations(&mut bench);
    tables(&mut bench);
    attentions(&bench);
    assert!(bench.slow_kernels.is_empty(), "too slow: {}", bench.slow_kernels.join("; "));
}
