//! Tests of the product with every method that this machine supports.

use super::*;
use crate::kernels::simd::InstructionSet;
use crate::kernels::{case_step, math};
use crate::util::counted;
use half::{bf16, f16};

fn numbers<E: Element>(n: usize, seed: u32) -> Vec<E> {
    let wide: Vec<f32> = (0..n as u32)
        .map(|i| {
            let x = i.wrapping_add(seed.wrapping_mul(0x85EB_CA77)).wrapping_mul(2_654_435_761);
            let x = (x ^ (x >> 15)).wrapping_mul(0x2C1B_3C6D);
            ((x ^ (x >> 13)) >> 8) as f32 / (1 << 24) as f32 - 0.5
        })
        .collect();
    let mut out = vec![E::default(); n];
    E::narrow(&wide, &mut out);
    out
}

fn wide<E: Element>(values: &[E]) -> Vec<f32> {
    let mut out = vec![0.0; values.len()];
    E::widen(values, &mut out);
    out
}

#[test]
fn each_level_has_a_method_of_its_own() {
    let mut methods: Vec<SimdMethod> = InstructionSet::available().map(SimdMethod::of::<f32>).collect();
    assert_eq!(methods.last(), Some(&SimdMethod::Portable));
    methods.dedup();
    assert_eq!(methods.len(), InstructionSet::available().count());
}

/// Returns the relative distance between neighbouring numbers.
fn epsilon<E: Element>() -> f64 {
    match E::KIND {
        crate::kernels::element::ElementDtype::F32 => 1.2e-7,
        crate::kernels::element::ElementDtype::BF16 => 1.0 / 128.0,
        crate::kernels::element::ElementDtype::F16 => 1.0 / 1024.0,
    }
}

/// A matrix of random numbers, dense or with a gap after each row, stored directly or transposed.
struct TestMatrix<E> {
    data: Vec<E>,
    rows: usize,
    cols: usize,
    gap: usize,
    transposed: bool,
}

impl<E: Element> TestMatrix<E> {
    fn new(rows: usize, cols: usize, gap: usize, transposed: bool, seed: u32) -> Self {
        let (r, c) = if transposed { (cols, rows) } else { (rows, cols) };
        Self { data: numbers(r * (c + gap), seed), rows, cols, gap, transposed }
    }

    fn view(&self) -> Matrix<'_, E> {
        if self.transposed {
            Matrix::strided(&self.data, self.cols, self.rows, self.rows + self.gap).t()
        } else {
            Matrix::strided(&self.data, self.rows, self.cols, self.cols + self.gap)
        }
    }
}

fn reference<E: Element>(a: Matrix<'_, E>, b: Matrix<'_, E>) -> Vec<f64> {
    let (m, n, k) = (a.rows(), b.cols(), a.cols());
    let dense = |x: Matrix<'_, E>| {
        let mut all = Vec::new();
        for i in 0..x.rows() {
            all.extend((0..x.cols()).map(|j| x.at(i, j)));
        }
        wide(&all)
    };
    let (a, b) = (dense(a), dense(b));
    let mut out = vec![0.0; m * n];
    for i in 0..m {
        for l in 0..k {
            for j in 0..n {
                out[i * n + j] += f64::from(a[i * k + l]) * f64::from(b[l * n + j]);
            }
        }
    }
    out
}

const SHAPES: [(usize, usize, usize); 20] = [
    (1, 1, 1),
    (1, 300, 7),
    (3, 5, 2),
    (130, 3, 4),
    (2, 2, 600),
    (5, 3, 2),
    (7, 64, 33),
    (9, 65, 31),
    (15, 47, 16),
    (17, 49, 17),
    (129, 257, 513),
    (33, 80, 1100),
    (20, 40, 2049),
    (20, 9, 2300),
    (8, 48, 9001),
    (32, 70, 2100),
    (46, 67, 600),
    (0, 3, 4),
    (3, 0, 4),
    (5, 7, 0),
];

fn check_shapes<E: Element, C: Element>() {
    for method in SimdMethod::available::<E>() {
        // Miri takes minutes for the others.
        let shapes = SHAPES.into_iter().filter(|(m, n, k)| !cfg!(miri) || m * n * k <= 30);
        for (index, (m, n, k)) in shapes.enumerate() {
            let step = if cfg!(miri) { 3 } else { case_step() };
            for layout in (index % step..8).step_by(step) {
                let (ta, tb, gap) = (layout & 1 > 0, layout & 2 > 0, if layout & 4 > 0 { 3 } else { 0 });
                let a = TestMatrix::<E>::new(m, k, gap, ta, 1);
                let b = TestMatrix::<E>::new(k, n, gap, tb, 2);
                let want = reference(a.view(), b.view());
                let mut got = numbers::<C>(m * (n + gap), 9);
                let before = wide(&got);
                let c = MatrixMut::strided(&mut got, m, n, n + gap);
                gemm_by(method, c, a.view(), b.view(), Epilogue::default());
                let got = wide(&got);
                for (i, (row, before)) in
                    got.chunks_exact((n + gap).max(1)).zip(before.chunks_exact((n + gap).max(1))).enumerate()
                {
                    for j in 0..n {
                        let (got, want) = (f64::from(row[j]), want[i * n + j]);
                        let tolerance = 2e-6 * (1.0 + k as f64).sqrt() + epsilon::<C>() * want.abs();
                        assert!(
                            (got - want).abs() <= tolerance,
                            "{method:?} {m}x{n}x{k} {layout} at {i},{j}: {got} {want}"
                        );
                    }
                    assert_eq!(row[n..], before[n..], "the gaps between rows are unchanged");
                }
            }
        }
    }
}

#[test]
fn products_of_all_shapes_and_orientations_are_right() {
    check_shapes::<f32, f32>();
    check_shapes::<bf16, bf16>();
    check_shapes::<f16, f16>();
}

#[test]
fn half_operands_may_have_a_result_in_f32() {
    check_shapes::<bf16, f32>();
    check_shapes::<f16, f32>();
}

#[test]
fn operands_that_are_packed_in_several_regions_give_the_right_product() {
    let (m, n, k) = (700, 5, 2048);
    let (a, b) = (TestMatrix::<f32>::new(m, k, 0, true, 1), TestMatrix::<f32>::new(k, n, 0, false, 2));
    let want = reference(a.view(), b.view());
    for method in SimdMethod::available::<f32>() {
        let mut got = vec![0f32; m * n];
        gemm_by(method, MatrixMut::new(&mut got, m, n), a.view(), b.view(), Epilogue::default());
        assert!(got.iter().zip(&want).all(|(got, want)| (f64::from(*got) - want).abs() < 1e-4), "{method:?}");
    }
}

/// Returns the f32 sums of a product, computed by a loop over the inner dimension. The loop is divided into the fewest
/// equal blocks of at most 512 steps, rounded to full vectors.
fn sums_in_order<E: Element>(
    a: Matrix<'_, E>,
    b: Matrix<'_, E>,
    lanes: usize,
    multiply_add: fn(f32, f32, f32) -> f32,
) -> Vec<f32> {
    let (m, n, k) = (a.rows(), b.cols(), a.cols());
    let at = |x: Matrix<'_, E>, i, j| wide(&[x.at(i, j)])[0];
    let vectors = k.div_ceil(lanes);
    let blocks = vectors.div_ceil(512 / lanes);
    let bound = |block: usize| k.min(vectors * block / blocks * lanes);
    let element = |i: usize, j: usize| {
        (0..blocks).fold(0.0, |sum, block| {
            let block = bound(block)..bound(block + 1);
            sum + block.fold(0.0, |sum, l| multiply_add(at(a, i, l), at(b, l, j), sum))
        })
    };
    (0..m * n).map(|at| element(at / n, at % n)).collect()
}

fn check_order<E: Element>(level: InstructionSet, lanes: usize, multiply_add: fn(f32, f32, f32) -> f32) {
    for (m, n, k) in [(1, 1, 1), (1, 300, 7), (3, 5, 2), (7, 64, 33), (65, 129, 513), (20, 40, 1049)] {
        for (ta, tb) in [(false, false), (false, true), (true, false), (true, true)] {
            let (a, b) = (TestMatrix::<E>::new(m, k, 0, ta, 1), TestMatrix::<E>::new(k, n, 0, tb, 2));
            let mut got = vec![0f32; m * n];
            let c = MatrixMut::new(&mut got, m, n);
            gemm_by(SimdMethod::of::<E>(level), c, a.view(), b.view(), Epilogue::default());
            let want = sums_in_order(a.view(), b.view(), lanes, multiply_add);
            let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert!(bits(&got) == bits(&want), "{level:?} {m}x{n}x{k}, transposed: {ta} {tb}");
        }
    }
}

#[test]
fn portable_products_have_the_bits_of_a_plain_loop_and_so_the_same_on_every_machine() {
    check_order::<f32>(InstructionSet::Portable, 4, |a, b, sum| a * b + sum);
    check_order::<bf16>(InstructionSet::Portable, 4, |a, b, sum| a * b + sum);
    check_order::<f16>(InstructionSet::Portable, 4, |a, b, sum| a * b + sum);
}

#[cfg(target_arch = "x86_64")]
#[test]
fn products_with_avx2_have_the_bits_of_a_fused_loop_whatever_else_the_processor_has() {
    if InstructionSet::available().any(|level| level == InstructionSet::Avx2) {
        check_order::<f32>(InstructionSet::Avx2, 8, f32::mul_add);
        check_order::<bf16>(InstructionSet::Avx2, 8, f32::mul_add);
        check_order::<f16>(InstructionSet::Avx2, 8, f32::mul_add);
    }
}

#[cfg(target_arch = "aarch64")]
#[test]
fn products_with_neon_have_the_bits_of_a_fused_loop() {
    check_order::<f32>(InstructionSet::Neon, 4, f32::mul_add);
    check_order::<bf16>(InstructionSet::Neon, 4, f32::mul_add);
    check_order::<f16>(InstructionSet::Neon, 4, f32::mul_add);
}

#[test]
fn what_a_thread_keeps_for_the_next_product_is_bounded() {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().expect("a pool");
    for method in SimdMethod::available::<f32>() {
        for (m, n, k) in [(300, 300, 300), (1500, 700, 900), (700, 300, 2049)] {
            let (a, b) = (TestMatrix::<f32>::new(m, k, 0, true, 1), TestMatrix::<f32>::new(k, n, 0, true, 2));
            let mut c = vec![0f32; m * n];
            let kept = pool.install(|| {
                gemm_by(method, MatrixMut::new(&mut c, m, n), a.view(), b.view(), Epilogue::default());
                scratch::bytes_kept()
            });
            // With AVX-512, a thread keeps up to 4 MiB of `a`, 512 KiB of `b` and some rows of sums; other levels keep
            // less.
            assert!(kept > 0 && kept < 8 << 20, "{method:?} {m}x{n}x{k}: {kept} bytes");
        }
    }
}

fn check_epilogues<E: Element>() {
    for method in SimdMethod::available::<E>() {
        let shapes = [(5, 70, 33), (13, 48, 1200), (32, 66, 40), (46, 65, 36), (9, 17, 40)];
        for (m, n, k) in shapes.into_iter().skip(if cfg!(miri) { 4 } else { 0 }) {
            for case in (0..64usize).step_by(if cfg!(miri) { 63 } else { 1 }) {
                let flag = |bit: usize| case >> bit & 1 > 0;
                let activations = [Activation::GeluTanh, Activation::Silu, Activation::Gelu, Activation::ReluSquared];
                let activation = (case / 16).checked_sub(1).map(|i| activations[i]);
                let (a, b) = (TestMatrix::<E>::new(m, k, 0, false, 1), TestMatrix::<E>::new(k, n, 0, true, 2));
                let (bias, residual) = (numbers::<E>(n, 3), TestMatrix::<E>::new(m, n, 5, false, 4));
                let mut got = numbers::<E>(m * n, 5);
                let initial = wide(&got);
                let mut before = vec![E::default(); m * n];
                let epilogue = Epilogue {
                    accumulate: flag(0),
                    scale: if flag(1) { 0.25 } else { 1.0 },
                    bias: flag(2).then_some(&bias[..]),
                    residual: flag(3).then(|| residual.view()),
                    activation: activation.map(|f| (f, flag(0).then(|| MatrixMut::new(&mut before, m, n)))),
                };
                gemm_by(method, MatrixMut::new(&mut got, m, n), a.view(), b.view(), epilogue);
                let (sums, got, before) = (reference(a.view(), b.view()), wide(&got), wide(&before));
                let (bias, residual) = (wide(&bias), residual.view());
                for (i, sum) in sums.iter().enumerate() {
                    let mut x = sum * if flag(1) { 0.25 } else { 1.0 };
                    x += if flag(2) { f64::from(bias[i % n]) } else { 0.0 };
                    if let Some(f) = activation {
                        if flag(0) {
                            let error = (f64::from(before[i]) - x).abs();
                            assert!(
                                error < 1e-4 + epsilon::<E>() * x.abs(),
                                "{method:?} case {case}: {} {x}",
                                before[i]
                            );
                            // The activation is computed from the rounded value.
                            x = f64::from(before[i]);
                        }
                        x = f64::from(match f {
                            Activation::GeluTanh => math::gelu_tanh(x as f32),
                            Activation::Gelu => math::gelu(x as f32),
                            Activation::Silu => math::silu(x as f32),
                            Activation::ReluSquared => math::relu_squared(x as f32),
                        });
                    }
                    x += if flag(3) { f64::from(wide(&[residual.at(i / n, i % n)])[0]) } else { 0.0 };
                    x += if flag(0) { f64::from(initial[i]) } else { 0.0 };
                    let error = (f64::from(got[i]) - x).abs();
                    let slack = if activation.is_some() { 2.0 } else { 1.0 } * epsilon::<E>() * (x.abs() + 0.5);
                    assert!(error < 1e-4 + slack, "{method:?} case {case} at {i}: {} {x}", got[i]);
                }
            }
        }
    }
}

#[test]
fn the_epilogue_is_applied_to_the_sums_in_f32() {
    check_epilogues::<f32>();
    check_epilogues::<bf16>();
    check_epilogues::<f16>();
}

fn check_rows<E: Element>() {
    for method in SimdMethod::available::<E>() {
        let shapes = [(1, 700), (5, 40), (64, 64), (70, 4200), (256, 768), (300, 1025), (300, 1026)];
        for (index, (n, k)) in shapes.into_iter().enumerate() {
            let a = numbers::<E>(200 * k, 3);
            for transposed in [false, true] {
                let b = TestMatrix::<E>::new(k, n, 0, transposed, 4);
                let product = |rows: usize| {
                    let mut c = vec![E::default(); rows * n];
                    let a = Matrix::new(&a[..rows * k], rows, k);
                    gemm_by(method, MatrixMut::new(&mut c, rows, n), a, b.view(), Epilogue::default());
                    wide(&c)
                };
                let all = product(200);
                let (counts, step) = ([1, 2, 3, 4, 5, 16, 17, 24, 31, 32, 48, 65, 90, 96, 129], case_step());
                for rows in counts.into_iter().skip((index + usize::from(transposed)) % step).step_by(step) {
                    assert!(
                        product(rows) == all[..rows * n],
                        "{method:?}: {}, {}, inner {k}",
                        counted(rows, "row"),
                        counted(n, "column")
                    );
                }
            }
        }
    }
}

#[test]
fn a_row_has_the_same_bits_whatever_the_number_of_rows() {
    check_rows::<f32>();
    check_rows::<bf16>();
    check_rows::<f16>();
}

#[test]
fn the_bits_do_not_depend_on_the_number_of_threads() {
    let pool = |threads| rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool");
    for method in SimdMethod::available::<bf16>() {
        let (m, n, k) = (300, 1500, 1201);
        let (a, b) = (TestMatrix::<bf16>::new(m, k, 0, true, 1), TestMatrix::<bf16>::new(k, n, 0, true, 2));
        let product = |threads| {
            let mut c = vec![0f32; m * n];
            pool(threads).install(|| {
                gemm_by(method, MatrixMut::new(&mut c, m, n), a.view(), b.view(), Epilogue::default());
            });
            c
        };
        let one = product(1);
        for threads in [3, 2, 5].into_iter().step_by(case_step()) {
            assert!(product(threads) == one, "{method:?} {threads} threads");
        }
    }
}

/// The numbers of rows of several products, some of which are empty, small or large.
const GROUPS: [usize; 11] = [3, 0, 70, 1, 32, 16, 17, 0, 33, 48, 66];

/// Returns the results of one product for each of [`GROUPS`], computed in one pass or one by one.
fn grouped<E: Element, C: Element>(
    method: SimdMethod,
    layout: usize,
    (n, k): (usize, usize),
    in_one_pass: bool,
) -> Vec<f32> {
    let (ta, tb, accumulate) = (layout & 1 > 0, layout & 2 > 0, layout & 4 > 0);
    let gap = if layout & 8 > 0 { 5 } else { 0 };
    let groups = GROUPS.iter().filter(|rows| !cfg!(miri) || **rows < 4);
    let operands: Vec<_> = (1..)
        .zip(groups)
        .map(|(seed, rows)| {
            let a = TestMatrix::<E>::new(*rows, k, gap, ta, seed);
            let b = TestMatrix::<E>::new(k, n, gap, tb, 100 + seed);
            (a, b, numbers::<C>(n, 200 + seed), numbers::<C>(rows * (n + gap), 300 + seed))
        })
        .collect();
    let mut results: Vec<Vec<C>> = operands.iter().map(|(.., result)| result.clone()).collect();
    let products = operands.iter().zip(&mut results).map(|((a, b, bias, _), result)| {
        let bias = Some(&bias[..]).filter(|_| accumulate);
        let epilogue = Epilogue { accumulate, scale: if accumulate { 0.75 } else { 1.0 }, bias, ..Epilogue::default() };
        Product { result: MatrixMut::strided(result, a.rows, n, n + gap), a: a.view(), b: b.view(), epilogue }
    });
    if in_one_pass {
        gemm_grouped_by(method, products.collect());
    } else {
        products.for_each(|product| gemm_by(method, product.result, product.a, product.b, product.epilogue));
    }
    results.iter().flat_map(|result| wide(result)).collect()
}

fn check_grouped<E: Element, C: Element>(layouts: &[usize]) {
    let pool = |threads| rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool");
    // The shape with an inner dimension of 2300 has several spans.
    let shapes = if cfg!(miri) { vec![(2, 3)] } else { vec![(1, 1), (65, 40), (130, 70), (9, 2300), (5, 0)] };
    for method in SimdMethod::available::<E>() {
        for (n, k) in shapes.clone() {
            for layout in layouts.iter().step_by(if cfg!(miri) { 5 } else { 1 }) {
                let want = grouped::<E, C>(method, *layout, (n, k), false);
                for threads in [1, 3] {
                    let got = pool(threads).install(|| grouped::<E, C>(method, *layout, (n, k), true));
                    assert!(got == want, "{method:?} {n}x{k} {layout}, {}", counted(threads, "thread"));
                }
            }
        }
    }
}

#[test]
fn products_in_one_pass_have_the_bits_of_separate_products() {
    check_grouped::<f32, f32>(&[0, 3, 6, 9, 12, 15]);
    check_grouped::<bf16, bf16>(&[1, 6, 10]);
    check_grouped::<f16, f16>(&[2, 13]);
    check_grouped::<bf16, f32>(&[4]);
}

#[test]
fn products_of_several_waves_have_the_bits_of_separate_products() {
    if cfg!(miri) {
        return;
    }
    // Three products, each with 1.3 million words of `a`, which must be packed: together, they exceed what a wave may
    // hold.
    let (m, n, k) = (640, 7, 2100);
    let operands: Vec<_> = (0..3)
        .map(|i| (TestMatrix::<f32>::new(m, k, 0, true, i), TestMatrix::<f32>::new(k, n, 0, false, 9 + i)))
        .collect();
    for method in SimdMethod::available::<f32>() {
        let (mut want, mut got) = (vec![vec![0f32; m * n]; 3], vec![vec![0f32; m * n]; 3]);
        for ((a, b), want) in operands.iter().zip(&mut want) {
            gemm_by(method, MatrixMut::new(want, m, n), a.view(), b.view(), Epilogue::default());
        }
        let products = operands.iter().zip(&mut got).map(|((a, b), got)| Product {
            result: MatrixMut::new(got, m, n),
            a: a.view(),
            b: b.view(),
            epilogue: Epilogue::default(),
        });
        gemm_grouped_by(method, products.collect());
        assert!(got == want, "{method:?}");
    }
}

#[test]
fn products_may_write_different_columns_of_one_matrix() {
    let (m, n, k) = (20, 30, 7);
    let (a, b) = (TestMatrix::<f32>::new(m, k, 0, false, 1), TestMatrix::<f32>::new(k, n, 0, false, 2));
    let (mut want, mut got) = (vec![0f32; m * n], vec![0f32; m * n]);
    let product = |result, b| Product { result, a: a.view(), b, epilogue: Epilogue::default() };
    gemm_grouped(vec![product(MatrixMut::new(&mut want, m, n), b.view())]);
    let (first, second) = MatrixMut::new(&mut got, m, n).split_columns(11);
    let columns = |from: usize, n: usize| Matrix::strided(&b.data[from..], k, n, b.cols);
    gemm_grouped(vec![product(second, columns(11, n - 11)), product(first, columns(0, 11))]);
    assert!(got == want);
}

#[test]
fn products_inside_of_parallel_tasks_are_right() {
    let (m, n, k) = (40, 200, 300);
    let (a, b) = (TestMatrix::<f32>::new(m, k, 0, false, 1), TestMatrix::<f32>::new(k, n, 0, true, 2));
    let mut want = vec![0f32; m * n];
    gemm(MatrixMut::new(&mut want, m, n), a.view(), b.view(), Epilogue::default());
    let pool = rayon::ThreadPoolBuilder::new().num_threads(4).build().expect("a pool");
    pool.install(|| {
        crate::kernels::parallel::for_each(50, |_| {
            let mut got = vec![0f32; m * n];
            gemm(MatrixMut::new(&mut got, m, n), a.view(), b.view(), Epilogue::default());
            assert!(got == want);
        });
    });
}

#[test]
fn column_sums_are_in_f32() {
    let rows = if cfg!(miri) { 40 } else { 4096 };
    let ones = vec![bf16::ONE; rows * 3];
    let mut sums = [7.0; 3];
    column_sums(Matrix::new(&ones, rows, 3), &mut sums);
    assert_eq!(sums, [rows as f32; 3]);
    check_column_sums::<f32>();
    check_column_sums::<bf16>();
    check_column_sums::<f16>();
}

fn check_column_sums<E: Element>() {
    let rows = if cfg!(miri) { 2 } else { 333 };
    let data = numbers::<E>(rows * 300, 1);
    let mut sums = vec![0.0; 290];
    column_sums(Matrix::strided(&data, rows, 290, 300), &mut sums);
    let data = wide(&data);
    for (j, sum) in sums.iter().enumerate() {
        let want: f64 = (0..rows).map(|i| f64::from(data[i * 300 + j])).sum();
        assert!((f64::from(*sum) - want).abs() < 1e-5);
    }
}
