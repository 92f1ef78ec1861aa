//! Attention on a GPU, for every rule that decides which keys a query sees: values, compared with the same function
//! composed of Candle's operations on the GPU; values and gradients, compared with the formulas in f64 on the CPU; and
//! gradients, compared with finite differences. Any order of blocks and threads must give the same bits. If no GPU
//! answers, each test is skipped; CI runs the tests on the mock in tools/mock_cuda.

use crate::cuda_layers::{Case, Function, case, check, flat, gpu_for, run, tensor};
use crate::support::device::{counted_bytes, gpu};
use crate::support::processes::as_program;
use crate::support::skips::skipped;
use candle_core::DType;
use candle_zero::nn::{self, AttentionOptions, Sequences, composed};
use std::process::Command;

/// `[batch, time, query heads, key heads, elements of a head]`.
type Sizes = [usize; 5];

/// Returns a case with separate queries, keys and values.
fn grouped(
    [batch, time, heads, kv_heads, head]: Sizes,
    attend: AttentionOptions,
    sequences: Option<Sequences>,
) -> Case {
    let (q, kv) = ([batch, time, heads * head], [batch, time, kv_heads * head]);
    let name = format!("attention {q:?} of {heads} on {kv_heads} heads, {attend:?}, {sequences:?}");
    let packed = sequences.clone();
    let layer = move |a: &[candle_core::Tensor]| {
        nn::attention(&a[0], &a[1], &a[2], heads, kv_heads, &attend, sequences.as_ref())
    };
    let reference = move |a: &[candle_core::Tensor]| {
        composed::attention(&a[0], &a[1], &a[2], heads, kv_heads, &attend, packed.as_ref())
    };
    Case { rounds_intermediates: true, ..case(name, &[&q, &kv, &kv], layer, reference) }
}

/// Returns a case with queries, keys and values side by side.
fn fused([batch, time, heads, _, head]: Sizes, attend: AttentionOptions, sequences: Option<Sequences>) -> Case {
    let shape = [batch, time, 3 * heads * head];
    let name = format!("fused attention {shape:?} of {heads} heads, {attend:?}, {sequences:?}");
    let packed = sequences.clone();
    let layer = move |a: &[candle_core::Tensor]| nn::fused_attention(&a[0], heads, &attend, sequences.as_ref());
    let reference = move |a: &[candle_core::Tensor]| composed::fused_attention(&a[0], heads, &attend, packed.as_ref());
    Case { rounds_intermediates: true, ..case(name, &[&shape], layer, reference) }
}

#[test]
fn attention_of_odd_sizes_is_that_of_the_formulas_with_its_slopes() {
    let Some(gpu) = gpu_for(attention_of_odd_sizes_is_that_of_the_formulas_with_its_slopes) else { return };
    let usual = AttentionOptions::default;
    let cases = vec![
        grouped([1, 1, 1, 1, 1], usual(), None),
        fused([2, 1, 2, 2, 5], usual(), None),
        grouped([2, 17, 4, 2, 16], usual(), None),
        fused([1, 17, 1, 1, 7], usual(), None),
        grouped([1, 20, 3, 1, 40], usual(), None),
        fused([1, 18, 1, 1, 100], usual(), None),
        grouped([1, 9, 1, 1, 200], usual(), None),
    ];
    check(&gpu, cases);
}

#[test]
fn attention_with_windows_caps_and_packed_rows_is_that_of_the_formulas_with_its_slopes() {
    let Some(gpu) = gpu_for(attention_with_windows_caps_and_packed_rows_is_that_of_the_formulas_with_its_slopes) else {
        return;
    };
    let packed = || Some(Sequences::from_lengths(&[vec![1, 2, 20], vec![25]], 30).unwrap());
    let window = |window| AttentionOptions { window: Some(window), ..AttentionOptions::default() };
    let capped = AttentionOptions { scale: Some(0.3), soft_cap: Some(1.5), ..AttentionOptions::default() };
    let both_ways = AttentionOptions { bidirectional: true, ..AttentionOptions::default() };
    let cases = vec![
        grouped([1, 80, 2, 1, 8], window(9), None),
        fused([1, 30, 1, 1, 8], window(1), None),
        fused([2, 30, 2, 2, 8], capped, None),
        grouped([2, 30, 2, 1, 8], both_ways, None),
        fused([2, 30, 1, 1, 8], both_ways, packed()),
        grouped([1, 80, 2, 1, 8], AttentionOptions { window: Some(9), ..both_ways }, None),
        grouped([2, 30, 2, 1, 8], AttentionOptions { window: Some(4), ..capped }, packed()),
    ];
    check(&gpu, cases);
}

#[test]
fn attention_over_a_thousand_positions_is_that_of_the_formulas() {
    let Some(gpu) = gpu_for(attention_over_a_thousand_positions_is_that_of_the_formulas) else { return };
    let case = grouped([1, 1000, 1, 1, 4], AttentionOptions::default(), None);
    let inputs = [1, 2, 3].map(|seed| tensor(&[1, 1000, 4], seed, DType::F32));
    let on_gpu = inputs.clone().map(|x| x.to_device(&gpu).unwrap());
    let (y, grads) = run(&case.layer, &on_gpu);
    let (want, want_grads) = run(&case.composed, &inputs.map(|x| x.to_dtype(DType::F64).unwrap()));
    // Gradients are sums over a thousand queries; the errors of scores and weights add up in them.
    let comparisons = [(&y, &want, 1e-6)].into_iter().chain(grads.iter().zip(&want_grads).map(|(g, w)| (g, w, 4e-6)));
    for (got, want, tolerance) in comparisons {
        let want = flat(want);
        let most = want.iter().fold(1.0, |most: f64, x| most.max(x.abs()));
        let error = flat(got).iter().zip(&want).fold(0.0, |most: f64, (g, w)| most.max((g - w).abs()));
        assert!(error <= tolerance * most, "{error} of {most}");
    }
}

#[test]
fn a_view_of_a_tensor_is_attended_to_as_its_copy() {
    let Some(gpu) = gpu_for(a_view_of_a_tensor_is_attended_to_as_its_copy) else { return };
    for dtype in [DType::F32, DType::BF16] {
        let all = tensor(&[3, 10, 24], 1, dtype).to_device(&gpu).unwrap();
        // A part of the batch, a transposed tensor, and rows that start at an odd position.
        for view in [all.narrow(0, 1, 2).unwrap(), all.transpose(0, 1).unwrap(), all.narrow(2, 3, 12).unwrap()] {
            let (y, copied) = (nn::causal_attention(&view, 2), nn::causal_attention(&view.copy().unwrap(), 2));
            assert_eq!(flat(&y.unwrap()), flat(&copied.unwrap()), "{dtype:?} {:?}", view.shape());
        }
    }
}

/// The variable that is set for a child process, which runs the body of a single test.
const ALONE: &str = "CANDLE_ZERO_CUDA_ALONE";

#[test]
fn attention_has_the_same_bits_for_any_order_of_blocks_and_threads() {
    let test = attention_has_the_same_bits_for_any_order_of_blocks_and_threads;
    if counted_bytes(0).is_none() {
        skipped(test, "needs the mock of CUDA, tools/mock_cuda");
        return;
    }
    if std::env::var_os(ALONE).is_some() {
        let gpu = gpu(0).unwrap();
        for dtype in [DType::F32, DType::BF16] {
            let case =
                grouped([1, 70, 4, 2, 8], AttentionOptions { window: Some(50), ..AttentionOptions::default() }, None);
            let args: Vec<_> =
                (0..).zip(&case.shapes).map(|(i, s)| tensor(s, i, dtype).to_device(&gpu).unwrap()).collect();
            let layer: &Function = &case.layer;
            let (y, grads) = run(layer, &args);
            let digest =
                [&y].into_iter().chain(&grads).flat_map(flat).fold(0u64, |d, x| d.rotate_left(5) ^ x.to_bits());
            println!("bits of {dtype:?}: {digest:x}");
        }
        return;
    }
    let bits = |seed: u32| {
        let name = "attention_has_the_same_bits_for_any_order_of_blocks_and_threads";
        let output = Command::new(std::env::current_exe().unwrap())
            .args(as_program(module_path!(), name))
            .env(ALONE, "1")
            .env("MOCK_CUDA_SEED", seed.to_string())
            .output()
            .unwrap();
        assert!(output.status.success(), "seed {seed}: {}", String::from_utf8_lossy(&output.stderr));
        let stdout = String::from_utf8(output.stdout).unwrap();
        stdout.lines().filter_map(|l| l.find("bits of ").map(|at| format!("{}\n", &l[at..]))).collect::<String>()
    };
    let want = bits(0);
    assert_eq!(want.lines().count(), 2, "{want}");
    for seed in 1..=5 {
        assert_eq!(bits(seed), want, "seed {seed}");
    }
}
