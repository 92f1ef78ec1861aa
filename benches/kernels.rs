//! Measures the layers' kernels at training sizes and, for comparison, the peak performance of the machine.
//!
//!     RAYON_NUM_THREADS=1 cargo bench --bench kernels
//!     RAYON_NUM_THREADS=2 cargo bench --bench kernels -- peak
//!
//! Items are floating-point operations; bytes are the minimum that must be moved. `mini` is a batch of 2048 tokens (8
//! samples of 256) of width 384; `gpt2` is a batch of 512 tokens (one sample) of width 768. A backward pass starts from
//! a gradient of ones and ends with the gradients of the inputs, which are dropped.
#![allow(clippy::unwrap_used)]

mod keep_memory;
mod peak_memory;

use candle_core::{DType, Device, Tensor, WithDType};
use candle_zero::nn::{
    Activation, AttentionOptions, ExpertAssignment, ExpertProjection, ExpertTensors, LinearEpilogue, Sequences,
    WeightLayout, causal_attention, embedding, fused_attention, gelu_tanh, layer_norm, linear, linear_cross_entropy,
    linear_with_epilogue, rms_norm,
};
use candle_zero::param::drop_gradient;
use candle_zero::precision::{Flat, IntFormat, Nf4Scales, WeightPacking};
use divan::Bencher;
use divan::counter::{BytesCount, ItemsCount};
use half::bf16;
use std::hint::black_box;
use std::sync::Arc;

fn main() {
    keep_memory::start_as_a_rank(&[]);
    println!("threads: {}", rayon::current_num_threads());
    divan::main();
}

#[derive(Debug, Clone, Copy)]
enum Model {
    Mini,
    Gpt2,
}
use Model::{Gpt2, Mini};

/// The sizes of a model's batch.
struct Sizes {
    batch: usize,
    time: usize,
    heads: usize,
    width: usize,
    vocab: usize,
}

impl Model {
    fn sizes(self) -> Sizes {
        match self {
            Mini => Sizes { batch: 8, time: 256, heads: 6, width: 384, vocab: 256 },
            Gpt2 => Sizes { batch: 1, time: 512, heads: 12, width: 768, vocab: 50257 },
        }
    }
}

impl Sizes {
    fn tokens(&self) -> usize {
        self.batch * self.time
    }

    /// Returns a tensor with `width` numbers for each token.
    fn hidden<T: WithDType>(&self, width: usize) -> Tensor {
        numbers::<T>(&[self.batch, self.time, width])
    }

    fn ids(&self) -> Tensor {
        let ids = (0..self.tokens()).map(|i| (i as u32).wrapping_mul(2_654_435_761) % self.vocab as u32);
        Tensor::from_iter(ids, &Device::Cpu).unwrap().reshape((self.batch, self.time)).unwrap()
    }
}

/// Returns a tensor of numbers between -0.1 and 0.1.
fn numbers<T: WithDType>(dims: &[usize]) -> Tensor {
    let number = |i: u32| ((i.wrapping_mul(2_654_435_761) >> 8) as f32 / (1 << 24) as f32 - 0.5) * 0.2;
    let values = (0..dims.iter().product::<usize>() as u32).map(number);
    Tensor::from_iter(values, &Device::Cpu).unwrap().reshape(dims).unwrap().to_dtype(T::DTYPE).unwrap()
}

/// Measures `run` on `inputs`: only its forward pass, or also a backward pass to all inputs.
fn measure<const N: usize>(
    bencher: Bencher<'_, '_>,
    with_backward: bool,
    inputs: [Tensor; N],
    run: impl Fn(&[Tensor; N]) -> candle_core::Result<Tensor>,
) {
    let inputs = inputs.map(|input| if with_backward { drop_gradient(&input).unwrap() } else { input });
    let once = || {
        let y = run(&inputs).unwrap();
        if with_backward {
            black_box(y.backward().unwrap());
        }
    };
    // Allocates the buffers that later calls reuse.
    once();
    bencher.bench_local(once);
}

/// Defines benches for a kernel's forward pass and, if floating-point operations are counted, for the forward and
/// backward passes together.
macro_rules! kernel {
    ($name:ident, $forward_and_backward:ident, $run:ident) => {
        #[divan::bench(types = [f32, bf16], args = [Mini, Gpt2], sample_size = 1, max_time = 0.25)]
        fn $name<T: WithDType>(bencher: Bencher<'_, '_>, model: Model) {
            $run::<T>(bencher, model, false);
        }

        #[divan::bench(types = [f32, bf16], args = [Mini, Gpt2], sample_size = 1, max_time = 0.25)]
        fn $forward_and_backward<T: WithDType>(bencher: Bencher<'_, '_>, model: Model) {
            $run::<T>(bencher, model, true);
        }
    };
    ($name:ident, $run:ident) => {
        #[divan::bench(types = [f32, bf16], args = [Mini, Gpt2], sample_size = 1, max_time = 0.25)]
        fn $name<T: WithDType>(bencher: Bencher<'_, '_>, model: Model) {
            $run::<T>(bencher, model);
        }
    };
}

kernel!(linear_qkv, linear_qkv_and_backward, run_qkv);
kernel!(linear_up_gelu, linear_up_gelu_and_backward, run_up);
kernel!(linear_down_residual, linear_down_residual_and_backward, run_down);
kernel!(attention, attention_and_backward, run_attention);
kernel!(head_cross_entropy, head_cross_entropy_and_backward, run_head);
kernel!(norm_layer, run_layer_norm);
kernel!(norm_rms, run_rms_norm);
kernel!(activation_gelu, run_gelu);
kernel!(embedding_rows, run_embedding);

/// Returns the number of floating-point operations in a product with a weight. The backward pass has two more products.
fn product(with_backward: bool, [rows, outputs, inputs]: [usize; 3]) -> ItemsCount {
    ItemsCount::new(2 * rows * outputs * inputs * if with_backward { 3 } else { 1 })
}

fn run_qkv<T: WithDType>(bencher: Bencher<'_, '_>, model: Model, with_backward: bool) {
    let sizes = model.sizes();
    let d = sizes.width;
    let inputs = [sizes.hidden::<T>(d), numbers::<T>(&[d, 3 * d]), numbers::<T>(&[3 * d])];
    let bencher = bencher.counter(product(with_backward, [sizes.tokens(), 3 * d, d]));
    measure(bencher, with_backward, inputs, |[x, w, b]| linear(x, w, Some(b), WeightLayout::InOut));
}

fn run_up<T: WithDType>(bencher: Bencher<'_, '_>, model: Model, with_backward: bool) {
    let sizes = model.sizes();
    let d = sizes.width;
    let inputs = [sizes.hidden::<T>(d), numbers::<T>(&[d, 4 * d]), numbers::<T>(&[4 * d])];
    let bencher = bencher.counter(product(with_backward, [sizes.tokens(), 4 * d, d]));
    measure(bencher, with_backward, inputs, |[x, w, b]| {
        let epilogue = LinearEpilogue { activation: Some(Activation::GeluTanh), ..LinearEpilogue::default() };
        linear_with_epilogue(x, w, Some(b), WeightLayout::InOut, epilogue)
    });
}

fn run_down<T: WithDType>(bencher: Bencher<'_, '_>, model: Model, with_backward: bool) {
    let sizes = model.sizes();
    let d = sizes.width;
    let (x, residual) = (sizes.hidden::<T>(4 * d), sizes.hidden::<T>(d));
    let inputs = [x, numbers::<T>(&[4 * d, d]), numbers::<T>(&[d]), residual];
    let bencher = bencher.counter(product(with_backward, [sizes.tokens(), d, 4 * d]));
    measure(bencher, with_backward, inputs, |[x, w, b, residual]| {
        let epilogue = LinearEpilogue { residual: Some(residual), ..LinearEpilogue::default() };
        linear_with_epilogue(x, w, Some(b), WeightLayout::InOut, epilogue)
    });
}

/// The number of elements that are quantized in each call. The elements and their codes stay in cache.
const PIECE: usize = 32 << 10;

/// Measures quantization. The bytes counted are those of the unquantized elements.
#[divan::bench(types = [f32, bf16], args = [IntFormat::Int8, IntFormat::Int4])]
fn quantize<T: WithDType>(bencher: Bencher<'_, '_>, ints: IntFormat) {
    let (values, mut codes) = piece::<T>(ints);
    let bencher = bencher.counter(BytesCount::new(values.size_in_bytes()));
    bencher.bench_local(|| ints.encode(black_box(values.as_ref()), black_box(&mut codes)));
}

#[divan::bench(types = [f32, bf16], args = [IntFormat::Int8, IntFormat::Int4])]
fn dequantize<T: WithDType>(bencher: Bencher<'_, '_>, ints: IntFormat) {
    let (mut values, mut codes) = piece::<T>(ints);
    ints.encode(values.as_ref(), &mut codes);
    let bencher = bencher.counter(BytesCount::new(values.size_in_bytes()));
    bencher.bench_local(|| ints.decode(black_box(&codes), black_box(values.as_mut())));
}

fn piece<T: WithDType>(ints: IntFormat) -> (Flat, Vec<u8>) {
    let values = numbers::<f32>(&[PIECE]).to_vec1().unwrap();
    (Flat::from_f32(values, T::DTYPE), vec![0; ints.encoded_len(PIECE)])
}

/// The numbers of outputs and inputs of a frozen matrix.
const FROZEN: [usize; 2] = [4096, 1024];

/// Measures unpacking, the cost that a gather adds to products with a packed frozen matrix.
#[divan::bench(types = [f32, bf16], args = [WeightPacking::Int8, WeightPacking::Nf4(Nf4Scales::Bf16), WeightPacking::Nf4(Nf4Scales::DoubleQuantized)])]
fn frozen_unpack<T: WithDType>(bencher: Bencher<'_, '_>, packing: WeightPacking) {
    let values = numbers::<f32>(&FROZEN).flatten_all().unwrap().to_vec1().unwrap();
    let mut values = Flat::from_f32(values, T::DTYPE);
    let mut packed = vec![0; packing.packed_len(values.len())];
    packing.pack(values.as_ref(), &mut packed);
    let bencher = bencher.counter(BytesCount::new(values.size_in_bytes()));
    bencher.bench_local(|| packing.unpack(black_box(&packed), black_box(values.as_mut())));
}

/// Measures one product of `rows` rows with an unpacked matrix of size [`FROZEN`].
#[divan::bench(types = [f32, bf16], args = [1, 16, 128, 512, 2048], sample_size = 1, max_time = 0.25)]
fn frozen_product<T: WithDType>(bencher: Bencher<'_, '_>, rows: usize) {
    let [outputs, inputs] = FROZEN;
    let bencher = bencher.counter(ItemsCount::new(2 * rows * outputs * inputs));
    let operands = [numbers::<T>(&[rows, inputs]), numbers::<T>(&FROZEN)];
    measure(bencher, false, operands, |[x, weight]| linear(x, weight, None, WeightLayout::OutIn));
}

/// The number of experts, and the numbers of outputs (gate and up) and inputs of each: a part of Qwen3-30B-A3B.
const EXPERTS: [usize; 3] = [16, 1536, 2048];

/// The operands of a product whose gradients the backward pass computes.
#[derive(Clone, Copy, PartialEq)]
enum Gradients {
    Neither,
    /// The weights are frozen.
    Rows,
    Both,
}

/// Measures the grouped product of all experts, with `rows` rows per expert on average: half of the experts have three
/// times as many rows as the others.
#[divan::bench(types = [f32, bf16], args = [64, 512], sample_size = 1, max_time = 1)]
fn experts_product<T: WithDType>(bencher: Bencher<'_, '_>, rows: usize) {
    run_experts::<T>(bencher, rows, Gradients::Neither);
}

#[divan::bench(types = [f32, bf16], args = [64, 512], sample_size = 1, max_time = 1)]
fn experts_product_and_backward<T: WithDType>(bencher: Bencher<'_, '_>, rows: usize) {
    run_experts::<T>(bencher, rows, Gradients::Both);
}

#[divan::bench(types = [f32, bf16], args = [64, 512], sample_size = 1, max_time = 1)]
fn experts_product_and_backward_frozen<T: WithDType>(bencher: Bencher<'_, '_>, rows: usize) {
    run_experts::<T>(bencher, rows, Gradients::Rows);
}

fn run_experts<T: WithDType>(bencher: Bencher<'_, '_>, rows: usize, gradients: Gradients) {
    let experts = EXPERTS[0];
    let rows_of = |expert: usize| if expert.is_multiple_of(2) { rows / 2 } else { rows + rows / 2 };
    let choices: Vec<u32> =
        (0..experts).flat_map(|expert| std::iter::repeat_n(expert as u32, rows_of(expert))).collect();
    let assignment = Arc::new(ExpertAssignment::new(&choices, 1, experts).unwrap());
    run_products::<T>(bencher, rows, gradients, &EXPERTS, |x, weights| {
        let weights = vec![ExpertTensors::Fused(weights.clone())];
        ExpertProjection::new(weights, Vec::new(), WeightLayout::OutIn)?.forward(x, &assignment)
    });
}

/// Measures one product with as many rows as all experts of [`experts_product`] have.
#[divan::bench(types = [f32, bf16], args = [64, 512], sample_size = 1, max_time = 1)]
fn experts_dense_product<T: WithDType>(bencher: Bencher<'_, '_>, rows: usize) {
    run_dense::<T>(bencher, rows, Gradients::Neither);
}

#[divan::bench(types = [f32, bf16], args = [64, 512], sample_size = 1, max_time = 1)]
fn experts_dense_product_and_backward<T: WithDType>(bencher: Bencher<'_, '_>, rows: usize) {
    run_dense::<T>(bencher, rows, Gradients::Both);
}

#[divan::bench(types = [f32, bf16], args = [64, 512], sample_size = 1, max_time = 1)]
fn experts_dense_product_and_backward_frozen<T: WithDType>(bencher: Bencher<'_, '_>, rows: usize) {
    run_dense::<T>(bencher, rows, Gradients::Rows);
}

fn run_dense<T: WithDType>(bencher: Bencher<'_, '_>, rows: usize, gradients: Gradients) {
    run_products::<T>(bencher, rows, gradients, &EXPERTS[1..], |x, weight| {
        linear(x, weight, None, WeightLayout::OutIn)
    });
}

/// Measures a product of all rows of the experts with weights of shape `weights`.
fn run_products<T: WithDType>(
    bencher: Bencher<'_, '_>,
    rows: usize,
    gradients: Gradients,
    weights: &[usize],
    run: impl Fn(&Tensor, &Tensor) -> candle_core::Result<Tensor>,
) {
    let [experts, outputs, inputs] = EXPERTS;
    let products = match gradients {
        Gradients::Neither => 1,
        Gradients::Rows => 2,
        Gradients::Both => 3,
    };
    let bencher = bencher.counter(ItemsCount::new(2 * experts * rows * outputs * inputs * products));
    let (x, weights) = (numbers::<T>(&[experts * rows, inputs]), numbers::<T>(weights));
    if gradients == Gradients::Rows {
        measure(bencher, true, [x], |[x]| run(x, &weights));
    } else {
        measure(bencher, gradients == Gradients::Both, [x, weights], |[x, weights]| run(x, weights));
    }
}

fn run_attention<T: WithDType>(bencher: Bencher<'_, '_>, model: Model, with_backward: bool) {
    let sizes = model.sizes();
    // Only half of each `time` x `time` product is needed. The forward pass has two products, the backward pass five
    // (one of them recomputed).
    let product = sizes.tokens() * sizes.time * sizes.width;
    let products = if with_backward { 7 } else { 2 };
    let bencher = bencher.counter(ItemsCount::new(product * products));
    measure(bencher, with_backward, [sizes.hidden::<T>(3 * sizes.width)], |[qkv]| causal_attention(qkv, sizes.heads));
}

/// Measures the forward and backward passes of attention over one row of 2048 positions and four heads of size 64, with
/// different masks and with capped scores.
#[divan::bench(types = [f32, bf16], args = ["all", "capped", "window of 256", "eight sequences"], sample_size = 1, max_time = 0.5)]
fn attention_that_sees<T: WithDType>(bencher: Bencher<'_, '_>, mask: &str) {
    let options = match mask {
        "capped" => AttentionOptions { soft_cap: Some(50.0), ..AttentionOptions::default() },
        "window of 256" => AttentionOptions { window: Some(256), ..AttentionOptions::default() },
        _ => AttentionOptions::default(),
    };
    let packed = Sequences::from_lengths(&[vec![256; 8]], 2048).unwrap();
    let packed = (mask == "eight sequences").then_some(packed);
    let qkv = [numbers::<T>(&[1, 2048, 3 * 256])];
    measure(bencher, true, qkv, |[qkv]| fused_attention(qkv, 4, &options, packed.as_ref()));
}

fn run_head<T: WithDType>(bencher: Bencher<'_, '_>, model: Model, with_backward: bool) {
    let sizes = model.sizes();
    let inputs = [sizes.hidden::<T>(sizes.width), numbers::<T>(&[sizes.vocab, sizes.width])];
    let ids = sizes.ids();
    let bencher = bencher.counter(product(with_backward, [sizes.tokens(), sizes.vocab, sizes.width]));
    measure(bencher, with_backward, inputs, |[h, w]| linear_cross_entropy(h, w, WeightLayout::OutIn, &ids));
}

/// Returns the number of bytes moved if elements are read once and written once.
fn bytes_moved<T: WithDType>(elements: usize) -> BytesCount {
    BytesCount::new(2 * elements * T::DTYPE.size_in_bytes())
}

fn run_layer_norm<T: WithDType>(bencher: Bencher<'_, '_>, model: Model) {
    let sizes = model.sizes();
    let d = sizes.width;
    let inputs = [sizes.hidden::<T>(d), numbers::<T>(&[d]), numbers::<T>(&[d])];
    let bencher = bencher.counter(bytes_moved::<T>(sizes.tokens() * d));
    measure(bencher, false, inputs, |[x, w, b]| layer_norm(x, w, b, 1e-5));
}

fn run_rms_norm<T: WithDType>(bencher: Bencher<'_, '_>, model: Model) {
    let sizes = model.sizes();
    let d = sizes.width;
    let bencher = bencher.counter(bytes_moved::<T>(sizes.tokens() * d));
    measure(bencher, false, [sizes.hidden::<T>(d), numbers::<T>(&[d])], |[x, w]| rms_norm(x, w, 1e-5));
}

fn run_gelu<T: WithDType>(bencher: Bencher<'_, '_>, model: Model) {
    let sizes = model.sizes();
    let bencher = bencher.counter(bytes_moved::<T>(sizes.tokens() * 4 * sizes.width));
    measure(bencher, false, [sizes.hidden::<T>(4 * sizes.width)], |[x]| gelu_tanh(x));
}

fn run_embedding<T: WithDType>(bencher: Bencher<'_, '_>, model: Model) {
    let sizes = model.sizes();
    let ids = sizes.ids();
    let bencher = bencher.counter(bytes_moved::<T>(sizes.tokens() * sizes.width));
    measure(bencher, false, [numbers::<T>(&[sizes.vocab, sizes.width])], |[table]| embedding(&ids, table));
}

/// Measures multiply-adds (f32) or dot products (bf16) on registers only, on every thread, at the SIMD level that the
/// kernels use (see `CANDLE_ZERO_SIMD`). Nothing is measured if that level has no such instruction.
#[divan::bench(types = [f32, bf16], sample_size = 1, max_time = 1)]
fn peak_arithmetic<T: WithDType>(bencher: Bencher<'_, '_>) {
    const ROUNDS: usize = 1_000_000;
    let Some((operations, run)) = registers::loop_of(T::DTYPE) else { return };
    let all = operations * ROUNDS * rayon::current_num_threads();
    bencher.counter(ItemsCount::new(all)).bench_local(|| rayon::broadcast(|_| run(ROUNDS)));
}

/// Loops that access no memory, with enough independent sums to hide an instruction's latency.
#[cfg(target_arch = "x86_64")]
mod registers {
    use super::DType;
    use std::arch::asm;

    /// Returns the number of operations in one round, and the loop.
    pub fn loop_of(dtype: DType) -> Option<(usize, fn(usize))> {
        let level = std::env::var("CANDLE_ZERO_SIMD").unwrap_or_default();
        let may_be_wide = matches!(level.as_str(), "" | "auto" | "avx512") && is_x86_feature_detected!("avx512f");
        let has_fma = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
        match dtype {
            DType::F32 if may_be_wide => Some((20 * 16 * 2, multiply_add)),
            DType::BF16 if may_be_wide && is_x86_feature_detected!("avx512bf16") => Some((20 * 32 * 2, dot)),
            DType::F32 if level != "portable" && has_fma => Some((12 * 8 * 2, multiply_add_8)),
            _ => None,
        }
    }

    /// Defines a function that repeats an instruction on the registers of kind `$kind` whose numbers are in `$sums`.
    /// The instruction's operands are registers `$a` and `$b`.
    macro_rules! rounds_of {
        ($name:ident, $instruction:literal, $clear:literal, $kind:literal, $all:literal, $sums:literal, $a:literal, $b:literal) => {
            /// Runs the loop. The processor must have the instruction.
            fn $name(rounds: usize) {
                // SAFETY: `loop_of` returns this function only if the processor has the instruction. The registers that
                // it writes are declared, and it accesses no memory.
                unsafe {
                    asm!(
                        concat!(".irp r,", $all),
                        concat!($clear, " ", $kind, "\\r, ", $kind, "\\r, ", $kind, "\\r"),
                        ".endr",
                        "2:",
                        concat!(".irp r,", $sums),
                        concat!($instruction, " ", $kind, "\\r, ", $kind, $a, ", ", $kind, $b),
                        ".endr",
                        "dec {n}",
                        "jnz 2b",
                        n = inout(reg) rounds => _,
                        out("zmm0") _, out("zmm1") _, out("zmm2") _, out("zmm3") _, out("zmm4") _, out("zmm5") _,
                        out("zmm6") _, out("zmm7") _, out("zmm8") _, out("zmm9") _, out("zmm10") _, out("zmm11") _,
                        out("zmm12") _, out("zmm13") _, out("zmm14") _, out("zmm15") _, out("zmm16") _,
                        out("zmm17") _, out("zmm18") _, out("zmm19") _, out("zmm20") _, out("zmm21") _,
                        options(nomem, nostack),
                    );
                }
            }
        };
    }

    macro_rules! rounds_of_16 {
        ($name:ident, $instruction:literal) => {
            rounds_of!(
                $name,
                $instruction,
                "vpxord",
                "zmm",
                "0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21",
                "0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19",
                "20",
                "21"
            );
        };
    }

    rounds_of_16!(multiply_add, "vfmadd231ps");
    rounds_of_16!(dot, "vdpbf16ps");
    rounds_of!(
        multiply_add_8,
        "vfmadd231ps",
        "vpxor",
        "ymm",
        "0,1,2,3,4,5,6,7,8,9,10,11,12,13",
        "0,1,2,3,4,5,6,7,8,9,10,11",
        "12",
        "13"
    );
}

/// The same loops with NEON.
#[cfg(target_arch = "aarch64")]
mod registers {
    use super::DType;
    use std::arch::asm;

    /// Returns the number of operations in one round, and the loop.
    pub fn loop_of(dtype: DType) -> Option<(usize, fn(usize))> {
        let level = std::env::var("CANDLE_ZERO_SIMD").unwrap_or_default();
        (dtype == DType::F32 && level != "portable").then_some((24 * 4 * 2, multiply_add))
    }

    fn multiply_add(rounds: usize) {
        // SAFETY: every AArch64 processor has the instructions. The registers that they write are declared, and they
        // access no memory.
        unsafe {
            asm!(
                ".irp r,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25",
                "movi v\\r\\().4s, #0",
                ".endr",
                "2:",
                ".irp r,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23",
                "fmla v\\r\\().4s, v24.4s, v25.4s",
                ".endr",
                "subs {n}, {n}, #1",
                "b.ne 2b",
                n = inout(reg) rounds => _,
                out("v0") _, out("v1") _, out("v2") _, out("v3") _, out("v4") _, out("v5") _, out("v6") _, out("v7") _,
                out("v8") _, out("v9") _, out("v10") _, out("v11") _, out("v12") _, out("v13") _, out("v14") _,
                out("v15") _, out("v16") _, out("v17") _, out("v18") _, out("v19") _, out("v20") _, out("v21") _,
                out("v22") _, out("v23") _, out("v24") _, out("v25") _,
                options(nomem, nostack),
            );
        }
    }
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
mod registers {
    pub fn loop_of(_: super::DType) -> Option<(usize, fn(usize))> {
        None
    }
}
