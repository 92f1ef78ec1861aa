//! Softmax and its cross entropy against one target per row.

use super::element::Element;
use super::f32_access::{map, vectorized, widen};
use super::math::{exp_below_0, tanh};
use super::parallel::{ParallelChunks, for_each_part};
use super::row_reduce::{maximum, reduce};

/// The number of elements that one task processes, rounded to full rows.
const TASK: usize = 16 * 1024;

/// The target of an ignored row: its loss and its gradients are 0.
pub(crate) const IGNORED: u32 = u32::MAX;

/// Computes the losses `-log softmax(row)[target]` of dense rows of `classes` logits. If there is a `cap`, logits are
/// first replaced with cap * tanh(logit / cap).
pub(crate) fn losses<E: Element>(logits: &[E], classes: usize, targets: &[u32], cap: Option<f32>, losses: &mut [f32]) {
    check(logits.len(), classes, targets, losses.len());
    let rows = rows_per_task(classes);
    for_each_part(targets.len().div_ceil(rows), ParallelChunks::new(losses, rows), |task, losses| {
        let mut row = vec![0f32; classes];
        let first = task * rows;
        for (i, loss) in losses.iter_mut().enumerate() {
            if targets[first + i] == IGNORED {
                *loss = 0.0;
                continue;
            }
            let logits = &logits[(first + i) * classes..][..classes];
            *loss = vectorized!({
                widen(logits, &mut row);
                if let Some(cap) = cap {
                    apply_cap(&mut row, cap);
                }
                softmax(&mut row, targets[first + i]).0
            });
        }
    });
}

/// Computes the same losses as [`losses`], and replaces the logits with their gradients: (softmax - 1 at the target) *
/// the derivative of the cap * `scale` of the row.
pub(crate) fn gradients<E: Element>(
    logits: &mut [E],
    classes: usize,
    targets: &[u32],
    cap: Option<f32>,
    scale: impl Fn(usize) -> f32 + Sync,
    losses: &mut [f32],
) {
    check(logits.len(), classes, targets, losses.len());
    let rows = rows_per_task(classes);
    let parts = (ParallelChunks::new(logits, rows * classes), ParallelChunks::new(losses, rows));
    for_each_part(targets.len().div_ceil(rows), parts, |task, (logits, losses)| {
        let mut row = vec![0f32; classes];
        let mut slopes = vec![0f32; if cap.is_some() { classes } else { 0 }];
        let first = task * rows;
        for (i, (logits, loss)) in logits.chunks_exact_mut(classes).zip(losses).enumerate() {
            let target = targets[first + i];
            if target == IGNORED {
                *loss = 0.0;
                logits.fill(E::default());
                continue;
            }
            let scale = scale(first + i);
            vectorized!({
                widen(logits, &mut row);
                if let Some(cap) = cap {
                    apply_cap(&mut row, cap);
                    for (slope, x) in slopes.iter_mut().zip(&row) {
                        *slope = 1.0 - (x / cap) * (x / cap);
                    }
                }
                let (row_loss, total) = softmax(&mut row, target);
                *loss = row_loss;
                row[target as usize] -= total;
                let factor = scale / total;
                if cap.is_some() {
                    row.iter_mut().zip(&slopes).for_each(|(x, slope)| *x *= slope);
                }
                map(
                    [&row[..]],
                    logits,
                    #[inline(always)]
                    |[x]| x * factor,
                );
            });
        }
    });
}

fn check(logits: usize, classes: usize, targets: &[u32], losses: usize) {
    assert_eq!(logits, classes * targets.len(), "there must be one target per row of logits");
    assert_eq!(losses, targets.len(), "there must be one loss per row");
    assert!(targets.iter().all(|t| (*t as usize) < classes || *t == IGNORED), "every target must be a class");
}

fn rows_per_task(classes: usize) -> usize {
    (TASK / classes.max(1)).max(1)
}

/// Applies the cap to a row.
#[inline(always)]
fn apply_cap(row: &mut [f32], cap: f32) {
    for x in row.iter_mut() {
        *x = cap * tanh(*x / cap);
    }
}

/// Replaces each x in a row with exp(x - the row's maximum), and returns the loss and the sum of the new row.
#[inline(always)]
fn softmax(row: &mut [f32], target: u32) -> (f32, f32) {
    let at_target = row[target as usize];
    let max = maximum(row);
    for x in row.iter_mut() {
        *x = exp_below_0(*x - max);
    }
    let total = reduce(
        row,
        row,
        #[inline(always)]
        |x, _| x,
    );
    (total.ln() + (max - at_target), total)
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};

    fn logits(rows: usize, classes: usize) -> Vec<f32> {
        (0..rows * classes).map(|i| ((i * 2741 + 17) % 1009) as f32 / 100.0 - 5.0).collect()
    }

    fn check_dtype<E: Element>(tolerance: f64) {
        for (rows, classes) in [(1, 1), (3, 5), (7, 256), (2, 50_257)] {
            for cap in [None, Some(3.0f32)] {
                check_rows::<E>(rows, classes, cap, tolerance);
            }
        }
    }

    fn check_rows<E: Element>(rows: usize, classes: usize, cap: Option<f32>, tolerance: f64) {
        let mut values = vec![E::default(); rows * classes];
        E::narrow(&logits(rows, classes), &mut values);
        let targets: Vec<u32> = (0..rows).map(|i| ((i * 31) % classes) as u32).collect();
        let mut wide = vec![0f32; values.len()];
        E::widen(&values, &mut wide);
        let (mut forward_losses, mut backward_losses) = (vec![0f32; rows], vec![0f32; rows]);
        losses(&values, classes, &targets, cap, &mut forward_losses);
        gradients(&mut values, classes, &targets, cap, |row| 0.5 + row as f32, &mut backward_losses);
        assert_eq!(forward_losses, backward_losses);
        let mut got = vec![0f32; values.len()];
        E::widen(&values, &mut got);
        for (row, target) in targets.iter().enumerate() {
            let row_of = |data: &[f32]| data[row * classes..][..classes].to_vec();
            let capped =
                |x: f64| cap.map(f64::from).map_or((x, 1.0), |c| (c * (x / c).tanh(), 1.0 - (x / c).tanh().powi(2)));
            let (x, slopes): (Vec<f64>, Vec<f64>) = row_of(&wide).iter().map(|x| capped(f64::from(*x))).unzip();
            let total: f64 = x.iter().map(|x| x.exp()).sum();
            let loss = total.ln() - x[*target as usize];
            assert!(
                (loss - f64::from(forward_losses[row])).abs() < 1e-5 * (1.0 + loss.abs()),
                "{loss} {}",
                forward_losses[row]
            );
            for (j, got) in row_of(&got).iter().enumerate() {
                let hot = if j == *target as usize { 1.0 } else { 0.0 };
                let want = (0.5 + row as f64) * (x[j].exp() / total - hot) * slopes[j];
                // For large logits, 1 - tanh^2 has lost digits to cancellation.
                let slack = if cap.is_some() { 1e-6 * (0.5 + row as f64) } else { 0.0 };
                assert!((want - f64::from(*got)).abs() <= tolerance * (want.abs() + 1e-4) + slack, "{want} {got}");
            }
        }
    }

    #[test]
    fn losses_and_gradients_are_those_of_the_definition() {
        check_dtype::<f32>(1e-5);
        check_dtype::<bf16>(5e-3);
        check_dtype::<f16>(1e-3);
    }

    #[test]
    fn a_row_with_a_number_that_is_none_gives_none() {
        let mut loss = [0f32];
        losses(&[1.0f32, f32::NAN, 2.0], 3, &[0], None, &mut loss);
        assert!(loss[0].is_nan());
    }
}
