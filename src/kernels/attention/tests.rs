//! Compares attention with the formulas in f64, with every [`SimdMethod`] that this machine has.

use super::*;
use crate::kernels::case_step;
use crate::kernels::f32_access::{get, put};
use half::{bf16, f16};

fn numbers<E: Element>(n: usize, seed: u32, range: f32) -> Vec<E> {
    let mix = |i: u32| (i ^ seed.wrapping_mul(0x9e37_79b9)).wrapping_mul(2_654_435_761).rotate_left(13);
    let unit = |i: u32| (mix(mix(i)).wrapping_mul(2_246_822_519) >> 8) as f32 / (1 << 23) as f32 - 1.0;
    (0..n as u32).map(|i| put(unit(i) * range)).collect()
}

/// A fused projection and the gradient of the result.
struct Case<E> {
    h: AttentionShape,
    rule: AttentionRule<'static>,
    starts: Option<Vec<Vec<usize>>>,
    qkv: Vec<E>,
    dout: Vec<E>,
}

impl<E: Element> Case<E> {
    fn new(h: AttentionShape) -> Self {
        let rows = h.batch * h.time;
        // One element of each row is not part of any head.
        let stride = (h.heads + 2 * h.kv_heads) * h.head + 1;
        let (qkv, dout) = (numbers(rows * stride, 1, 2.0), numbers(rows * h.heads * h.head, 2, 1.0));
        Self { h, rule: AttentionRule::causal(h.head), starts: None, qkv, dout }
    }

    fn with_rule(h: AttentionShape, rule: AttentionRule<'static>, starts: Option<Vec<Vec<usize>>>) -> Self {
        Self { rule, starts, ..Self::new(h) }
    }

    fn rule(&self) -> AttentionRule<'_> {
        AttentionRule { starts: self.starts.as_deref(), ..self.rule }
    }

    /// Returns the start of the sequence that position `t` of row `b` belongs to.
    fn start(&self, b: usize, t: usize) -> usize {
        self.starts.as_ref().map_or(0, |rows| rows[b].iter().copied().filter(|start| *start <= t).max().unwrap_or(0))
    }

    /// Returns whether position `t` of row `b` sees position `s`.
    fn sees(&self, b: usize, t: usize, s: usize) -> bool {
        let is_in_window = t.abs_diff(s) < self.rule.window.unwrap_or(usize::MAX);
        self.start(b, t) == self.start(b, s) && is_in_window && (s <= t || self.rule.bidirectional)
    }

    fn stride(&self) -> usize {
        self.qkv.len() / (self.h.batch * self.h.time)
    }

    /// Returns the columns of q, k and v.
    fn columns(&self) -> [std::ops::Range<usize>; 3] {
        let (q, k) = (self.h.heads * self.h.head, self.h.kv_heads * self.h.head);
        [0..q, q..q + k, q + k..q + 2 * k]
    }

    fn run(&self, path: SimdMethod) -> (Vec<E>, Vec<f32>, Vec<E>) {
        let sequences = self.rule().spans(&self.h).len();
        self.run_with(path, whole_group_task_count(&self.h, sequences, rayon::current_num_threads()))
    }

    /// Runs both passes. The backward passes of the first `group_tasks` key heads are one task each.
    fn run_with(&self, path: SimdMethod, group_tasks: usize) -> (Vec<E>, Vec<f32>, Vec<E>) {
        let (h, rule) = (&self.h, &self.rule());
        let qkv = || self.columns().map(|c| MultiHeadRows::new(&self.qkv[c.start..], self.stride()));
        let mut out = vec![E::default(); self.dout.len()];
        let mut lse = vec![0f32; h.batch * h.heads * h.time];
        forward_on(path, (h, rule), qkv(), &mut out, &mut lse);
        let mut grad = vec![put(0.5); self.qkv.len()];
        let [q, k, v] = qkv();
        let inputs = BackwardInputs { q, k, v, out: &out, lse: &lse, dout: &self.dout };
        let parts = (&rule.spans(h)[..], group_tasks);
        backward_on(
            path,
            (h, rule),
            &inputs,
            parts,
            MultiHeadRowsMut::columns(&mut grad, self.stride(), self.columns()),
        );
        (out, lse, grad)
    }

    /// Returns the result, the log-sum-exp and the gradients according to the formulas.
    fn reference(&self) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
        let AttentionShape { batch, time, heads, head, .. } = self.h;
        let scale = f64::from(self.rule.scale);
        let columns = self.columns();
        let mut out = vec![0f64; self.dout.len()];
        let mut lse = vec![0f64; batch * heads * time];
        let mut grad = vec![0f64; self.qkv.len()];
        for (b, hq) in (0..batch).flat_map(|b| (0..heads).map(move |hq| (b, hq))) {
            let hk = hq / (heads / self.h.kv_heads);
            let at = |part: usize, t: usize| {
                let head_index = if part == 0 { hq } else { hk };
                (b * time + t) * self.stride() + columns[part].start + head_index * head
            };
            let x = |part: usize, t: usize, i: usize| f64::from(get(self.qkv[at(part, t) + i]));
            for t in 0..time {
                let row = (b * time + t) * heads * head + hq * head;
                let dy = |i: usize| f64::from(get(self.dout[row + i]));
                let dot = |f: &dyn Fn(usize) -> f64| (0..head).map(f).sum::<f64>();
                let seen: Vec<usize> = (0..time).filter(|s| self.sees(b, t, *s)).collect();
                let products = seen.iter().map(|&s| dot(&|i| x(0, t, i) * x(1, s, i)) * scale);
                // Returns the score of a product, and the derivative of the score.
                let score = |x: f64| match self.rule.soft_cap.map(f64::from) {
                    Some(cap) => (cap * (x / cap).tanh(), 1.0 - (x / cap).tanh().powi(2)),
                    None => (x, 1.0),
                };
                let (scores, slopes): (Vec<f64>, Vec<f64>) = products.map(score).unzip();
                let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum();
                lse[(b * time + t) * heads + hq] = max + sum.ln();
                let p: Vec<f64> = scores.iter().map(|s| (s - max).exp() / sum).collect();
                let g: Vec<f64> = seen.iter().map(|&s| dot(&|i| dy(i) * x(2, s, i))).collect();
                let weighted_sum: f64 = p.iter().zip(&g).map(|(p, g)| p * g).sum();
                for (n, &s) in seen.iter().enumerate() {
                    let d = p[n] * (g[n] - weighted_sum) * slopes[n] * scale;
                    for i in 0..head {
                        out[row + i] += p[n] * x(2, s, i);
                        grad[at(0, t) + i] += d * x(1, s, i);
                        grad[at(1, s) + i] += d * x(0, t, i);
                        grad[at(2, s) + i] += p[n] * dy(i);
                    }
                }
            }
        }
        // Elements that are not part of any head stay unchanged.
        grad.iter_mut().skip(self.stride() - 1).step_by(self.stride()).for_each(|g| *g = 0.5);
        (out, lse, grad)
    }
}

/// Returns the largest difference, relative to the largest number.
fn difference<E: Element>(got: &[E], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    let largest = want.iter().fold(0f64, |m, x| m.max(x.abs()));
    let errors = got.iter().zip(want).map(|(got, want)| (f64::from(get(*got)) - want).abs());
    errors.fold(0f64, |m, e| if e > m || e.is_nan() { e } else { m }) / largest
}

fn sizes() -> Vec<AttentionShape> {
    [
        (1, 1, 1, 1, 1),
        (2, 5, 2, 2, 8),
        (1, 64, 1, 1, 64),
        (2, 65, 3, 1, 32),
        (1, 200, 4, 2, 80),
        (1, 130, 2, 2, 128),
        (1, 97, 2, 1, 7),
        (1, 33, 1, 1, 160),
        (1, 300, 2, 2, 64),
    ]
    .map(|(batch, time, heads, kv_heads, head)| AttentionShape { batch, time, heads, kv_heads, head })
    .into_iter()
    // Miri takes minutes for the others.
    .filter(|h| !cfg!(miri) || h.time == 1)
    .collect()
}

/// Returns rules for sequences of `h.time` positions, and the starts of the sequences in packed rows.
fn rules(h: &AttentionShape) -> Vec<(AttentionRule<'static>, Option<Vec<Vec<usize>>>)> {
    let usual = AttentionRule::causal(h.head);
    let windows = [1, 12, 64, 65, 100].map(|window| AttentionRule { window: Some(window), ..usual });
    let capped = AttentionRule { scale: 1.3 * usual.scale, soft_cap: Some(0.7), ..usual };
    let both_ways = AttentionRule { bidirectional: true, ..usual };
    let unpacked = [
        usual,
        capped,
        both_ways,
        AttentionRule { bidirectional: true, ..capped },
        AttentionRule { window: Some(20), ..capped },
        AttentionRule { window: Some(20), bidirectional: true, ..capped },
    ];
    let windows_both_ways = windows.map(|rule| AttentionRule { bidirectional: true, ..rule });
    // Sequences of one position and of many, different in each row.
    let starts = |row: usize| (0..h.time).filter(|t| *t == 0 || [3, 4, 80 + row, 83].contains(t)).collect();
    let packed: Vec<Vec<usize>> = (0..h.batch).map(starts).collect();
    let packs = [usual, both_ways, windows[1], windows_both_ways[1], AttentionRule { window: Some(20), ..capped }]
        .map(|rule| (rule, Some(packed.clone())));
    let unpacked = unpacked.into_iter().chain(windows).chain(windows_both_ways);
    unpacked.map(|rule| (rule, None)).chain(packs).collect()
}

/// Returns the distance between the rules that are tested.
fn step() -> usize {
    if cfg!(miri) { 13 } else { case_step() }
}

fn results_and_gradients_are_those_of_the_formulas<E: Element>(accuracy: f64) {
    let step = step();
    for (index, h) in sizes().into_iter().enumerate() {
        for (rule, starts) in rules(&h).into_iter().skip(index % step).step_by(step) {
            let case = Case::<E>::with_rule(h, rule, starts);
            let (out, lse, grad) = case.reference();
            for path in SimdMethod::available::<E>() {
                let got = case.run(path);
                let errors = (difference(&got.0, &out), difference(&got.1, &lse), difference(&got.2, &grad));
                let bounded = errors.0 <= accuracy && errors.1 <= 2e-6 && errors.2 <= 2.0 * accuracy;
                assert!(bounded, "{h:?} {:?} {path:?}: {errors:?}", case.rule());
            }
        }
    }
}

#[test]
fn results_and_gradients_are_those_of_the_formulas_in_f32() {
    results_and_gradients_are_those_of_the_formulas::<f32>(2e-6);
}

#[test]
fn results_and_gradients_are_those_of_the_formulas_in_bf16() {
    results_and_gradients_are_those_of_the_formulas::<bf16>(1e-2);
}

#[test]
fn results_and_gradients_are_those_of_the_formulas_in_f16() {
    results_and_gradients_are_those_of_the_formulas::<f16>(1e-3);
}

#[test]
fn results_have_the_same_bits_for_any_number_of_threads() {
    let h = AttentionShape { batch: 2, time: 150, heads: 4, kv_heads: 2, head: 48 };
    for (rule, starts) in rules(&h).into_iter().step_by(step()) {
        let case = Case::<bf16>::with_rule(h, rule, starts);
        for path in SimdMethod::available::<bf16>() {
            let results = [1, 2, 3, 5].map(|threads| {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool");
                pool.install(|| case.run(path))
            });
            assert!(results.iter().all(|r| *r == results[0]), "{path:?}");
        }
    }
}

#[test]
fn a_groups_gradients_have_the_same_bits_in_one_task_and_in_one_for_each_head() {
    fn check<E: Element + PartialEq>() {
        let h = AttentionShape { batch: 2, time: 150, heads: 6, kv_heads: 2, head: 40 };
        for starts in [None, Some(vec![vec![0, 100], vec![0, 1, 20]])] {
            let case = Case::<E>::with_rule(h, AttentionRule::causal(40), starts);
            for path in SimdMethod::available::<E>() {
                let results = [0, 1, 3, 4].map(|group_tasks| case.run_with(path, group_tasks));
                assert!(results.iter().all(|r| r.2 == results[0].2), "{path:?}");
            }
        }
    }
    check::<f32>();
    check::<bf16>();
}

#[test]
fn groups_are_whole_unless_threads_would_wait_for_them() {
    let h = |batch, kv_heads| AttentionShape { batch, time: 1, heads: 8, kv_heads, head: 1 };
    assert_eq!(whole_group_task_count(&h(1, 2), 1, 4), 0);
    assert_eq!(whole_group_task_count(&h(3, 2), 3, 4), 4);
    assert_eq!(whole_group_task_count(&h(2, 2), 2, 4), 4);
    assert_eq!(whole_group_task_count(&h(9, 2), 9, 4), 18, "many tasks for each thread");
    assert_eq!(whole_group_task_count(&h(1, 8), 1, 3), 8, "no groups");
    assert_eq!(whole_group_task_count(&h(1, 2), 9, 4), 18, "the sequences of one row are counted, too");
}

#[test]
fn a_rows_result_does_not_depend_on_later_rows_or_other_sequences() {
    let h = AttentionShape { batch: 2, time: 150, heads: 2, kv_heads: 2, head: 40 };
    for (rule, starts) in rules(&h).into_iter().filter(|(rule, starts)| !rule.bidirectional && starts.is_none()) {
        let case = Case::<f32>::with_rule(h, rule, starts);
        for path in SimdMethod::available::<f32>() {
            let full = case.run(path).0;
            for time in [1, 17, 64, 70, 149] {
                assert_eq!(case.part(0, time).run(path).0, full[..time * 80], "{time} {path:?} {rule:?}");
            }
        }
    }
}

impl<E: Element> Case<E> {
    /// Returns `time` positions, starting at `first` (counted over all rows), as a separate sequence.
    fn part(&self, first: usize, time: usize) -> Self {
        let (stride, width) = (self.stride(), self.h.heads * self.h.head);
        Self {
            h: AttentionShape { batch: 1, time, ..self.h },
            rule: self.rule,
            starts: None,
            qkv: self.qkv[first * stride..][..time * stride].to_vec(),
            dout: self.dout[first * width..][..time * width].to_vec(),
        }
    }
}

#[test]
fn a_packed_sequence_has_the_bits_of_the_sequence_alone_whatever_is_beside_it() {
    fn check<E: Element + PartialEq>() {
        let h = AttentionShape { batch: 2, time: 200, heads: 4, kv_heads: 2, head: 24 };
        for (rule, starts) in rules(&h).into_iter().filter(|(_, starts)| starts.is_some()) {
            let mut case = Case::<E>::with_rule(h, rule, starts);
            // A sequence of NaNs does not affect the others.
            let stride = case.stride();
            case.qkv[4 * stride..][..10 * stride].fill(put(f32::NAN));
            for path in SimdMethod::available::<E>() {
                let all = case.run(path);
                for span in case.rule().spans(&h).into_iter().filter(|span| span.first != 4) {
                    let unpacked = case.part(span.first, span.len).run(path);
                    assert!(unpacked.0.iter().chain(&unpacked.2).all(|x| get(*x).is_finite()));
                    let rows_of = |data: &[E], width: usize| data[span.first * width..][..span.len * width].to_vec();
                    assert!(unpacked.0 == rows_of(&all.0, 4 * 24), "{span:?} {path:?} {rule:?}");
                    assert!(unpacked.1 == all.1[span.first * 4..][..span.len * 4], "{span:?} {path:?} {rule:?}");
                    assert!(unpacked.2 == rows_of(&all.2, case.stride()), "{span:?} {path:?} {rule:?}");
                }
            }
        }
    }
    check::<f32>();
    check::<bf16>();
}

#[test]
fn a_window_as_long_as_the_row_changes_no_bit() {
    let h = AttentionShape { batch: 1, time: 150, heads: 2, kv_heads: 1, head: 40 };
    for path in SimdMethod::available::<f32>() {
        let plain = Case::<f32>::new(h).run(path);
        for window in [150, usize::MAX] {
            let rule = AttentionRule { window: Some(window), ..AttentionRule::causal(40) };
            assert!(Case::<f32>::with_rule(h, rule, None).run(path) == plain, "{path:?}");
        }
    }
}

#[test]
fn nan_before_the_window_is_not_seen() {
    let h = AttentionShape { batch: 1, time: 128, heads: 1, kv_heads: 1, head: 16 };
    let mut case = Case::<f32>::with_rule(h, AttentionRule { window: Some(8), ..AttentionRule::causal(16) }, None);
    let stride = case.stride();
    case.qkv[20 * stride + 16] = f32::NAN;
    for path in SimdMethod::available::<f32>() {
        let (out, lse, _) = case.run(path);
        for t in 0..128 {
            let sees = (20..28).contains(&t);
            assert_eq!(lse[t].is_nan(), sees, "{t} {path:?}");
            assert_eq!(out[t * 16].is_nan(), sees, "{t} {path:?}");
        }
    }
}

#[test]
fn nan_stays_in_the_rows_that_see_it() {
    let mut case = Case::<f32>::new(AttentionShape { batch: 1, time: 128, heads: 1, kv_heads: 1, head: 16 });
    let stride = case.stride();
    case.qkv[64 * stride + 16] = f32::NAN;
    for path in SimdMethod::available::<f32>() {
        let (out, lse, _) = case.run(path);
        assert!(out[..64 * 16].iter().chain(&lse[..64]).all(|x| x.is_finite()), "{path:?}");
        assert!(out[64 * 16..].iter().all(|x| x.is_nan()), "{path:?}");
        assert!(lse[64..].iter().all(|x| x.is_nan()), "{path:?}");
    }
}

#[test]
fn scores_far_apart_neither_overflow_nor_vanish() {
    let mut case = Case::<f32>::new(AttentionShape { batch: 1, time: 100, heads: 2, kv_heads: 1, head: 16 });
    case.qkv.iter_mut().for_each(|x| *x *= 10.0);
    let (out, lse, grad) = case.reference();
    for path in SimdMethod::available::<f32>() {
        let got = case.run(path);
        let errors = (difference(&got.0, &out), difference(&got.1, &lse), difference(&got.2, &grad));
        assert!(errors.0 <= 1e-3 && errors.1 <= 1e-6 && errors.2 <= 1e-3, "{path:?}: {errors:?}");
    }
}

#[test]
fn no_sequences_and_no_positions_are_nothing_to_do() {
    for (batch, time) in [(0, 5), (5, 0)] {
        let h = AttentionShape { batch, time, heads: 2, kv_heads: 1, head: 4 };
        let none = MultiHeadRows::<f32>::new(&[], 8);
        let rule = AttentionRule::causal(4);
        forward(&h, &rule, [none; 3], &mut [], &mut []);
        let gradients = MultiHeadRowsMut::columns(&mut [], 16, [0..8, 8..12, 12..16]);
        backward(&h, &rule, [none; 3], (&[], &[], &[]), gradients);
    }
}

#[test]
#[should_panic(expected = "elements of the result")]
fn a_result_of_another_size_is_refused() {
    let h = AttentionShape { batch: 1, time: 2, heads: 1, kv_heads: 1, head: 4 };
    let x = [0f32; 8];
    let rows = MultiHeadRows::new(&x, 4);
    forward(&h, &AttentionRule::causal(4), [rows; 3], &mut [0.0; 7], &mut [0.0; 2]);
}

#[test]
#[should_panic(expected = "rows of sequences")]
fn sequences_of_another_batch_are_refused() {
    let h = AttentionShape { batch: 1, time: 2, heads: 1, kv_heads: 1, head: 4 };
    let x = [0f32; 8];
    let rule = AttentionRule { starts: Some(&[]), ..AttentionRule::causal(4) };
    forward(&h, &rule, [MultiHeadRows::new(&x, 4); 3], &mut [0.0; 8], &mut [0.0; 2]);
}
