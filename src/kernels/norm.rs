//! Layer normalization (Ba et al. 2016) and root-mean-square normalization (Zhang and Sennrich 2019) of rows.
//!
//! Weights, biases and statistics are in f32, and results are rounded once. The forward pass keeps the statistics of
//! each row for the backward pass. The gradients of weight and bias are sums over rows: first over a fixed number of
//! rows at a time, then over these sums in order.

use crate::kernels::element::Element;
use crate::kernels::f32_access::{as_f32, map, update, vectorized};
use crate::kernels::parallel::{ParallelChunks, for_each_part};
use crate::kernels::row_reduce::reduce;
use crate::util::counted;

/// The number of rows that one task computes. It is constant because the summation order of the parameters' gradients
/// depends on it.
const ROWS_PER_TASK: usize = 64;

/// Computes y = (x - mean) / sqrt(variance + eps) * weight + bias for rows of `weight.len()` elements, with the biased
/// variance. `stats` receives the mean and 1 / sqrt(variance + eps) of each row.
///
/// Like all functions in this module, it panics if the lengths of the slices do not match.
pub fn layer_norm<E: Element>(x: &[E], weight: &[f32], bias: &[f32], eps: f32, y: &mut [E], stats: &mut [[f32; 2]]) {
    let width = check(x.len(), weight.len(), stats.len());
    assert_eq!([y.len(), bias.len()], [x.len(), width], "the slice lengths of a layer norm do not match");
    let parts = (ParallelChunks::new(y, ROWS_PER_TASK * width), ParallelChunks::new(stats, ROWS_PER_TASK));
    for_each_part(task_count(x.len(), width), parts, |task, (y, stats)| {
        let x = &x[task * ROWS_PER_TASK * width..][..y.len()];
        let mut scratch = vec![0f32; width];
        vectorized!({
            for ((x, y), stats) in x.chunks_exact(width).zip(y.chunks_exact_mut(width)).zip(stats) {
                let row = as_f32(x, &mut scratch);
                let n = width as f32;
                let mean = reduce(
                    row,
                    row,
                    #[inline(always)]
                    |x, _| x,
                ) / n;
                let variance = reduce(
                    row,
                    row,
                    #[inline(always)]
                    |x, _| (x - mean) * (x - mean),
                ) / n;
                let factor = 1.0 / (variance + eps).sqrt();
                map(
                    [row, weight, bias],
                    y,
                    #[inline(always)]
                    |[x, w, b]| (x - mean) * factor * w + b,
                );
                *stats = [mean, factor];
            }
        });
    });
}

/// Computes the requested gradients of [`layer_norm`]'s input, weight and bias.
///
/// `dx` is overwritten, or added to if its flag is set, and rounded once. `dweight` and `dbias` are overwritten.
///
/// With h the normalized row, s its factor and d = dy * weight: dx = s (d - mean(d) - h mean(d h)).
pub fn layer_norm_backward<E: Element>(
    x: &[E],
    weight: &[f32],
    stats: &[[f32; 2]],
    dy: &[E],
    dx: Option<(&mut [E], bool)>,
    dweight: Option<&mut [f32]>,
    dbias: Option<&mut [f32]>,
) {
    let width = check(x.len(), weight.len(), stats.len());
    normalized_backward(x, weight, dy, dx, dweight, dbias, |row| RowNormStatistics {
        mean: stats[row][0],
        factor: stats[row][1],
        mean_factor: 1.0 / width as f32,
    });
}

/// Computes y = x / sqrt(mean(x^2) + eps) * weight for rows of `weight.len()` elements. `stats` receives 1 /
/// sqrt(mean(x^2) + eps) of each row.
pub fn rms_norm<E: Element>(x: &[E], weight: &[f32], eps: f32, y: &mut [E], stats: &mut [f32]) {
    let width = check(x.len(), weight.len(), stats.len());
    assert_eq!(y.len(), x.len(), "the slice lengths of a norm differ");
    let parts = (ParallelChunks::new(y, ROWS_PER_TASK * width), ParallelChunks::new(stats, ROWS_PER_TASK));
    for_each_part(task_count(x.len(), width), parts, |task, (y, stats)| {
        let x = &x[task * ROWS_PER_TASK * width..][..y.len()];
        let mut scratch = vec![0f32; width];
        vectorized!({
            for ((x, y), stats) in x.chunks_exact(width).zip(y.chunks_exact_mut(width)).zip(stats) {
                let row = as_f32(x, &mut scratch);
                let square = reduce(
                    row,
                    row,
                    #[inline(always)]
                    |x, _| x * x,
                ) / width as f32;
                let factor = 1.0 / (square + eps).sqrt();
                map(
                    [row, weight],
                    y,
                    #[inline(always)]
                    |[x, w]| x * factor * w,
                );
                *stats = factor;
            }
        });
    });
}

/// Computes the requested gradients of [`rms_norm`]'s input and weight, like [`layer_norm_backward`] but without the
/// means of the row and of d.
pub fn rms_norm_backward<E: Element>(
    x: &[E],
    weight: &[f32],
    stats: &[f32],
    dy: &[E],
    dx: Option<(&mut [E], bool)>,
    dweight: Option<&mut [f32]>,
) {
    check(x.len(), weight.len(), stats.len());
    normalized_backward(x, weight, dy, dx, dweight, None, |row| RowNormStatistics {
        mean: 0.0,
        factor: stats[row],
        mean_factor: 0.0,
    });
}

/// The normalization that the forward pass applied to a row.
struct RowNormStatistics {
    /// The mean that was subtracted from the row.
    mean: f32,
    /// The factor by which the row was then multiplied.
    factor: f32,
    /// The factor of the sum of d: 1 / width if the forward pass subtracted the mean, otherwise 0.
    mean_factor: f32,
}

/// Computes the backward pass of both norms.
fn normalized_backward<E: Element>(
    x: &[E],
    weight: &[f32],
    dy: &[E],
    dx: Option<(&mut [E], bool)>,
    dweight: Option<&mut [f32]>,
    dbias: Option<&mut [f32]>,
    statistics: impl Fn(usize) -> RowNormStatistics + Sync,
) {
    let width = weight.len();
    assert_eq!(dy.len(), x.len(), "the slice lengths of a norm's gradient differ");
    let (dx, accumulate) = dx.unzip();
    let accumulate = accumulate.unwrap_or(false);
    if let Some(dx) = &dx {
        assert_eq!(dx.len(), x.len(), "the slice lengths of a norm's gradient differ");
    }
    let tasks = task_count(x.len(), width);
    let task_elements = ROWS_PER_TASK * width;
    let mut weight_parts = vec![0f32; if dweight.is_some() { tasks * width } else { 0 }];
    let mut bias_parts = vec![0f32; if dbias.is_some() { tasks * width } else { 0 }];
    let parts = (
        dx.map(|dx| ParallelChunks::new(dx, task_elements)),
        (ParallelChunks::new(&mut weight_parts, width), ParallelChunks::new(&mut bias_parts, width)),
    );
    for_each_part(tasks, parts, |task, (mut dx, (dw, db))| {
        let rows = task * task_elements..x.len().min((task + 1) * task_elements);
        let (x, dy) = (&x[rows.clone()], &dy[rows]);
        let [mut h, mut d, mut scratch] = [(); 3].map(|()| vec![0f32; width]);
        vectorized!({
            for (i, (x, dy)) in x.chunks_exact(width).zip(dy.chunks_exact(width)).enumerate() {
                let RowNormStatistics { mean, factor, mean_factor } = statistics(task * ROWS_PER_TASK + i);
                map(
                    [x],
                    &mut h,
                    #[inline(always)]
                    |[x]| (x - mean) * factor,
                );
                let dy = as_f32(dy, &mut scratch);
                for (dw, (dy, h)) in dw.iter_mut().zip(dy.iter().zip(&h)) {
                    *dw += dy * h;
                }
                for (db, dy) in db.iter_mut().zip(dy) {
                    *db += dy;
                }
                let Some(dx) = &mut dx else { continue };
                for (d, (dy, w)) in d.iter_mut().zip(dy.iter().zip(weight)) {
                    *d = dy * w;
                }
                let mean = reduce(
                    &d,
                    &d,
                    #[inline(always)]
                    |d, _| d,
                ) * mean_factor;
                let mean_dh = reduce(
                    &d,
                    &h,
                    #[inline(always)]
                    |d, h| d * h,
                ) / width as f32;
                let dx = &mut dx[i * width..][..width];
                let slopes = [&d[..], &h[..]];
                if accumulate {
                    update(
                        dx,
                        slopes,
                        #[inline(always)]
                        |previous, [d, h]| factor * (d - mean - h * mean_dh) + previous,
                    );
                } else {
                    map(
                        slopes,
                        dx,
                        #[inline(always)]
                        |[d, h]| factor * (d - mean - h * mean_dh),
                    );
                }
            }
        });
    });
    sum_parts(&weight_parts, dweight);
    sum_parts(&bias_parts, dbias);
}

/// Sums the tasks' parts of a parameter's gradient in order.
fn sum_parts(parts: &[f32], sum: Option<&mut [f32]>) {
    let Some(sum) = sum else { return };
    sum.fill(0.0);
    vectorized!({
        for part in parts.chunks_exact(sum.len().max(1)) {
            for (s, p) in sum.iter_mut().zip(part) {
                *s += p;
            }
        }
    });
}

/// Checks the sizes and returns the width of the rows.
fn check(elements: usize, width: usize, rows: usize) -> usize {
    assert!(width > 0, "rows without elements have no norm");
    assert_eq!(elements, rows * width, "the number of elements does not match {} of {width}", counted(rows, "row"));
    width
}

fn task_count(elements: usize, width: usize) -> usize {
    (elements / width).div_ceil(ROWS_PER_TASK)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::f32_access::{get, put};
    use half::{bf16, f16};

    fn numbers<E: Element>(n: usize, seed: u32) -> Vec<E> {
        let mix = |i: u32| (i ^ seed).wrapping_mul(2_654_435_761).rotate_left(13).wrapping_mul(2_246_822_519);
        (0..n as u32).map(|i| put((mix(i) >> 8) as f32 / (1 << 23) as f32 - 0.9)).collect()
    }

    fn wide<E: Element>(x: &[E]) -> Vec<f32> {
        x.iter().map(|x| get(*x)).collect()
    }

    fn wide_f64<E: Element>(x: &[E]) -> Vec<f64> {
        x.iter().map(|x| f64::from(get(*x))).collect()
    }

    fn assert_close<E: Element>(got: &[E], want: &[f64], accuracy: f64) {
        assert_eq!(got.len(), want.len());
        for (i, (got, want)) in got.iter().zip(want).enumerate() {
            let error = (f64::from(get(*got)) - want).abs();
            assert!(error <= accuracy * (1.0 + want.abs()), "{i}: {} {want}", get(*got));
        }
    }

    /// Returns normalized rows and their factors, according to the formulas in f64.
    fn reference(x: &[f64], width: usize, centered: bool, eps: f64) -> (Vec<f64>, Vec<f64>) {
        let (mut h, mut factors) = (Vec::new(), Vec::new());
        for row in x.chunks_exact(width) {
            let mean = if centered { row.iter().sum::<f64>() / width as f64 } else { 0.0 };
            let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / width as f64;
            factors.push(1.0 / (variance + eps).sqrt());
            h.extend(row.iter().map(|x| (x - mean) * factors[factors.len() - 1]));
        }
        (h, factors)
    }

    fn norms_and_their_gradients_are_those_of_the_formulas<E: Element>(accuracy: f64) {
        for (rows, width) in [(1, 1), (3, 7), (64, 48), (133, 100), (70, 384)] {
            for centered in [true, false] {
                let (x, dy) = (numbers::<E>(rows * width, 1), numbers::<E>(rows * width, 2));
                let (weight, bias) = (numbers::<E>(width, 3), numbers::<E>(width, 4));
                let eps = 1e-5f32;
                let (wx, wdy, ww, wb) = (wide_f64(&x), wide_f64(&dy), wide_f64(&weight), wide_f64(&bias));
                let (h, factors) = reference(&wx, width, centered, f64::from(eps));

                let mut y = vec![E::default(); x.len()];
                let (mut ln_stats, mut rms_stats) = (vec![[0f32; 2]; rows], vec![0f32; rows]);
                if centered {
                    layer_norm(&x, &wide(&weight), &wide(&bias), eps, &mut y, &mut ln_stats);
                } else {
                    rms_norm(&x, &wide(&weight), eps, &mut y, &mut rms_stats);
                }
                let shift = |i: usize| if centered { wb[i % width] } else { 0.0 };
                let want: Vec<f64> = (0..x.len()).map(|i| h[i] * ww[i % width] + shift(i)).collect();
                assert_close(&y, &want, accuracy);

                let (mut want_dw, mut want_db) = (vec![0f64; width], vec![0f64; width]);
                let mut want_dx = Vec::new();
                for (r, factor) in factors.iter().enumerate() {
                    let index = |i: usize| r * width + i;
                    let d: Vec<f64> = (0..width).map(|i| wdy[index(i)] * ww[i]).collect();
                    let mean = if centered { d.iter().sum::<f64>() / width as f64 } else { 0.0 };
                    let mean_dh = (0..width).map(|i| d[i] * h[index(i)]).sum::<f64>() / width as f64;
                    for i in 0..width {
                        want_dx.push(factor * (d[i] - mean - h[index(i)] * mean_dh));
                        want_dw[i] += wdy[index(i)] * h[index(i)];
                        want_db[i] += wdy[index(i)];
                    }
                }
                let before = numbers::<E>(x.len(), 5);
                let (mut dw, mut db) = (vec![7f32; width], vec![7f32; width]);
                for accumulate in [false, true] {
                    let mut dx = before.clone();
                    let dx_arg = Some((&mut dx[..], accumulate));
                    if centered {
                        layer_norm_backward(&x, &wide(&weight), &ln_stats, &dy, dx_arg, Some(&mut dw), Some(&mut db));
                        assert_close(&db, &want_db, 1e-5);
                    } else {
                        rms_norm_backward(&x, &wide(&weight), &rms_stats, &dy, dx_arg, Some(&mut dw));
                    }
                    let base = |i: usize| if accumulate { f64::from(get(before[i])) } else { 0.0 };
                    let want: Vec<f64> = want_dx.iter().enumerate().map(|(i, dx)| dx + base(i)).collect();
                    // With one element, only the rounding error is left, multiplied by a large factor.
                    if width > 1 {
                        assert_close(&dx, &want, accuracy.max(2e-6));
                    }
                    assert_close(&dw, &want_dw, 1e-5);
                }
            }
        }
    }

    #[test]
    fn norms_and_their_gradients_are_those_of_the_formulas_in_every_dtype() {
        norms_and_their_gradients_are_those_of_the_formulas::<f32>(1e-6);
        norms_and_their_gradients_are_those_of_the_formulas::<bf16>(4e-3);
        norms_and_their_gradients_are_those_of_the_formulas::<f16>(5e-4);
    }

    #[test]
    fn gradients_have_the_same_bits_for_any_number_of_threads() {
        let (rows, width) = (500, 96);
        let (x, dy, weight) =
            (numbers::<f32>(rows * width, 1), numbers::<f32>(rows * width, 2), numbers::<f32>(width, 3));
        let results: Vec<_> = [1, 2, 5]
            .map(|threads| {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool");
                pool.install(|| {
                    let (mut y, mut stats) = (vec![0f32; x.len()], vec![[0f32; 2]; rows]);
                    layer_norm(&x, &wide(&weight), &wide(&weight), 1e-5, &mut y, &mut stats);
                    let (mut dx, mut dw, mut db) = (y.clone(), vec![0f32; width], vec![0f32; width]);
                    layer_norm_backward(
                        &x,
                        &wide(&weight),
                        &stats,
                        &dy,
                        Some((&mut dx, true)),
                        Some(&mut dw),
                        Some(&mut db),
                    );
                    [y, dx, dw, db].concat().iter().map(|x| x.to_bits()).collect::<Vec<_>>()
                })
            })
            .into();
        assert!(results.iter().all(|r| *r == results[0]));
    }
}
