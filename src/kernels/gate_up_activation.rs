//! The gated activation of experts, whose gate and up values are the columns of one matrix.

use crate::kernels::element::Element;
use crate::kernels::f32_access::{as_f32, get, narrow, vectorized, widen};
use crate::kernels::math;
use crate::kernels::parallel::{ParallelChunks, for_each_part};

/// The number of elements that one task computes.
const ELEMENTS_PER_TASK: usize = 1 << 14;

fn rows_per_task(width: usize) -> usize {
    (ELEMENTS_PER_TASK / width.max(1)).max(1)
}

/// The gated activation of an expert.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ExpertActivation {
    /// silu(gate) * up.
    Silu,
    /// (up + 1) * gate * sigmoid(alpha * gate), after the gate is clamped to at most `limit`, and `up` to the range
    /// from -`limit` to `limit`.
    Clamped { alpha: f32, limit: f32 },
}

/// The positions of gate and up in a row that contains both.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GateUpOrder {
    /// The gate is the first half of the row, and up is the second.
    Halves,
    /// The even columns are the gate, and the odd ones are up.
    Interleaved,
}

impl ExpertActivation {
    #[inline(always)]
    fn value(self, gate: f32, up: f32) -> f32 {
        match self {
            Self::Silu => math::silu(gate) * up,
            Self::Clamped { alpha, limit } => {
                let (gate, up) = (at_most(gate, limit), at_least(at_most(up, limit), -limit));
                (up + 1.0) * (gate * math::sigmoid(alpha * gate))
            }
        }
    }

    /// Returns the derivatives with respect to gate and up. At the limit itself, the derivative of a clamped number is
    /// 1, as in PyTorch.
    #[inline(always)]
    fn slopes(self, gate: f32, up: f32) -> (f32, f32) {
        match self {
            Self::Silu => (math::silu_slope(gate) * up, math::silu(gate)),
            Self::Clamped { alpha, limit } => {
                let (g, u) = (at_most(gate, limit), at_least(at_most(up, limit), -limit));
                let s = math::sigmoid(alpha * g);
                let gate_slope = (u + 1.0) * (s + alpha * g * s * (1.0 - s));
                let up_slope = g * s;
                (if gate > limit { 0.0 } else { gate_slope }, if up > limit || up < -limit { 0.0 } else { up_slope })
            }
        }
    }
}

/// Returns the smaller number, or NaN if `x` is NaN.
#[inline(always)]
fn at_most(x: f32, limit: f32) -> f32 {
    if x > limit { limit } else { x }
}

/// Returns the larger number, or NaN if `x` is NaN.
#[inline(always)]
fn at_least(x: f32, limit: f32) -> f32 {
    if x < limit { limit } else { x }
}

/// Computes the activation of each row of `x`, whose `2 * width` elements are gate and up. Each result is rounded once.
pub fn gated<E: Element>(gate: ExpertActivation, order: GateUpOrder, x: &[E], width: usize, y: &mut [E]) {
    assert_eq!(x.len(), 2 * y.len(), "gate and up must have twice as many elements as the result");
    let per_task = rows_per_task(width);
    for_each_part(y.len().div_ceil(per_task * width.max(1)), ParallelChunks::new(y, per_task * width), |task, y| {
        let mut scratch = vec![0f32; 3 * width];
        let [gates, ups, values] = thirds(&mut scratch, width);
        let x = &x[2 * task * per_task * width..][..2 * y.len()];
        vectorized!(for (x, y) in x.chunks_exact(2 * width.max(1)).zip(y.chunks_exact_mut(width.max(1))) {
            split(order, x, gates, ups);
            for ((value, g), up) in values.iter_mut().zip(&*gates).zip(&*ups) {
                *value = gate.value(*g, *up);
            }
            narrow(values, y);
        });
    });
}

/// Computes the gradient of [`gated`] from that of its result, `dy`.
pub fn gated_backward<E: Element>(
    gate: ExpertActivation,
    order: GateUpOrder,
    (x, dy): (&[E], &[E]),
    width: usize,
    dx: &mut [E],
) {
    assert_eq!([x.len(), dx.len()], [2 * dy.len(); 2], "gate and up must have twice as many elements as the result");
    let per_task = rows_per_task(width);
    let tasks = dy.len().div_ceil(per_task * width.max(1));
    for_each_part(tasks, ParallelChunks::new(dx, 2 * per_task * width), |task, dx| {
        let (mut scratch, mut grads) = (vec![0f32; 3 * width], vec![0f32; 2 * width]);
        let [gates, ups, dy_scratch] = thirds(&mut scratch, width);
        let start = 2 * task * per_task * width;
        let (x, dy) = (&x[start..][..dx.len()], &dy[start / 2..][..dx.len() / 2]);
        let rows = x.chunks_exact(2 * width.max(1)).zip(dy.chunks_exact(width.max(1)));
        vectorized!(for ((x, dy), dx) in rows.zip(dx.chunks_exact_mut(2 * width.max(1))) {
            split(order, x, gates, ups);
            let dy = as_f32(dy, dy_scratch);
            for i in 0..width {
                let (gate_slope, up_slope) = gate.slopes(gates[i], ups[i]);
                (gates[i], ups[i]) = (dy[i] * gate_slope, dy[i] * up_slope);
            }
            match order {
                GateUpOrder::Halves => {
                    narrow(gates, &mut dx[..width]);
                    narrow(ups, &mut dx[width..]);
                }
                GateUpOrder::Interleaved => {
                    for (pair, (gate, up)) in grads.chunks_exact_mut(2).zip(gates.iter().zip(&*ups)) {
                        (pair[0], pair[1]) = (*gate, *up);
                    }
                    narrow(&grads, dx);
                }
            }
        });
    });
}

/// Divides a row into its gate and up values, in f32.
#[inline(always)]
fn split<E: Element>(order: GateUpOrder, row: &[E], gates: &mut [f32], ups: &mut [f32]) {
    let width = gates.len();
    match order {
        GateUpOrder::Halves => {
            widen(&row[..width], gates);
            widen(&row[width..], ups);
        }
        GateUpOrder::Interleaved => {
            for ((pair, gate), up) in row.chunks_exact(2).zip(gates).zip(ups) {
                (*gate, *up) = (get(pair[0]), get(pair[1]));
            }
        }
    }
}

fn thirds(scratch: &mut [f32], width: usize) -> [&mut [f32]; 3] {
    let (a, rest) = scratch.split_at_mut(width);
    let (b, c) = rest.split_at_mut(width);
    [a, b, c]
}
