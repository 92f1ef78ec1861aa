#![allow(clippy::unwrap_used)]
//! Compares attention on a GPU with the host's kernels.

use super::tile_sizes::AttentionTileSizes;
use super::*;
use crate::kernels::attention as host;
use crate::kernels::element::Element;
use crate::kernels::f32_access::{get, put};
use candle_core::backend::BackendDevice;
use candle_core::cuda_backend::cudarc::driver::ValidAsZeroBits;
use half::{bf16, f16};
use std::ops::Range;

fn gpu() -> Option<CudaDevice> {
    CudaDevice::new(0).ok()
}

fn numbers<E: Element>(n: usize, seed: u32, range: f32) -> Vec<E> {
    let mix = |i: u32| (i ^ seed.wrapping_mul(0x9e37_79b9)).wrapping_mul(2_654_435_761).rotate_left(13);
    let unit = |i: u32| (mix(mix(i)).wrapping_mul(2_246_822_519) >> 8) as f32 / (1 << 23) as f32 - 1.0;
    (0..n as u32).map(|i| put(unit(i) * range)).collect()
}

fn widened<E: Element>(values: &[E]) -> Vec<f32> {
    values.iter().map(|x| get(*x)).collect()
}

/// A fused projection and the gradient of the result.
struct Case<E> {
    h: AttentionShape,
    rule: AttentionRule<'static>,
    starts: Option<Vec<Vec<usize>>>,
    qkv: Vec<E>,
    dout: Vec<E>,
}

/// The result, the log-sum-exp to base 2, and the gradient of the projection.
type Outcome<E> = (Vec<E>, Vec<f32>, Vec<E>);

impl<E: Element + AttentionElement + ValidAsZeroBits> Case<E> {
    fn new(h: AttentionShape, rule: AttentionRule<'static>, starts: Option<Vec<Vec<usize>>>) -> Self {
        let stride = (h.heads + 2 * h.kv_heads) * h.head;
        let rows = h.batch * h.time;
        let (qkv, dout) = (numbers(rows * stride, 1, 2.0), numbers(rows * h.heads * h.head, 2, 1.0));
        Self { h, rule, starts, qkv, dout }
    }

    fn rule(&self) -> AttentionRule<'_> {
        AttentionRule { starts: self.starts.as_deref(), ..self.rule }
    }

    fn columns(&self) -> [Range<usize>; 3] {
        let (q, k) = (self.h.heads * self.h.head, self.h.kv_heads * self.h.head);
        [0..q, q..q + k, q + k..q + 2 * k]
    }

    fn stride(&self) -> usize {
        self.columns()[2].end
    }

    /// Runs on the GPU, in one buffer.
    fn run(&self, device: &CudaDevice) -> Outcome<E> {
        let (h, rule) = (&self.h, &self.rule());
        let qkv = device.clone_htod(&self.qkv).unwrap();
        let dout = device.clone_htod(&self.dout).unwrap();
        let rows = || self.columns().map(|c| DeviceHeadRows { values: qkv.slice(c.start..), stride: self.stride() });
        let (out, lse) = forward_of(device, (h, rule), rows()).unwrap();
        let mut grad = device.alloc_zeros::<E>(self.qkv.len()).unwrap();
        let forward_results = (out.slice(..), &lse, dout.slice(..));
        backward_of(device, (h, rule), rows(), forward_results, QkvGradients::Fused(&mut grad)).unwrap();
        (device.clone_dtoh(&out).unwrap(), device.clone_dtoh(&lse).unwrap(), device.clone_dtoh(&grad).unwrap())
    }

    /// Runs on the GPU, with a separate buffer for each part.
    fn run_separate(&self, device: &CudaDevice) -> Outcome<E> {
        let (h, rule) = (&self.h, &self.rule());
        let part = |c: &Range<usize>| -> Vec<E> {
            self.qkv.chunks_exact(self.stride()).flat_map(|row| row[c.clone()].to_vec()).collect()
        };
        let qkv = self.columns().map(|c| device.clone_htod(&part(&c)).unwrap());
        let dout = device.clone_htod(&self.dout).unwrap();
        let rows = || [0, 1, 2].map(|i| DeviceHeadRows { values: qkv[i].slice(..), stride: self.columns()[i].len() });
        let (out, lse) = forward_of(device, (h, rule), rows()).unwrap();
        let mut grads = [0, 1, 2].map(|i| device.alloc_zeros::<E>(qkv[i].len()).unwrap());
        let forward_results = (out.slice(..), &lse, dout.slice(..));
        backward_of(device, (h, rule), rows(), forward_results, QkvGradients::Separate(grads.each_mut())).unwrap();
        let grads = grads.map(|grad| device.clone_dtoh(&grad).unwrap());
        let row = |t: usize| {
            self.columns().into_iter().zip(&grads).flat_map(move |(c, grad)| grad[t * c.len()..][..c.len()].to_vec())
        };
        let grad = (0..h.batch * h.time).flat_map(row).collect();
        (device.clone_dtoh(&out).unwrap(), device.clone_dtoh(&lse).unwrap(), grad)
    }

    /// Runs on the host, in f32.
    fn reference(&self) -> Outcome<f32> {
        let (h, rule) = (&self.h, &self.rule());
        let (qkv, dout) = (widened(&self.qkv), widened(&self.dout));
        let rows = || self.columns().map(|c| host::MultiHeadRows::new(&qkv[c.start..], self.stride()));
        let mut out = vec![0f32; dout.len()];
        let mut lse = vec![0f32; h.batch * h.heads * h.time];
        host::forward(h, rule, rows(), &mut out, &mut lse);
        let mut grad = vec![0f32; qkv.len()];
        let gradients = host::MultiHeadRowsMut::columns(&mut grad, self.stride(), self.columns());
        host::backward(h, rule, rows(), (&out, &lse, &dout), gradients);
        lse.iter_mut().for_each(|lse| *lse *= std::f32::consts::LOG2_E);
        (out, lse, grad)
    }
}

/// Returns the largest difference, relative to the largest number. It is NaN if any number is NaN.
fn difference<E: Element>(got: &[E], want: &[f32]) -> f32 {
    assert_eq!(got.len(), want.len());
    let largest = want.iter().fold(1e-30f32, |m, x| m.max(x.abs()));
    got.iter()
        .zip(want)
        .map(|(got, want)| (get(*got) - want).abs())
        .fold(0.0, |m, e| if e > m || e.is_nan() { e } else { m })
        / largest
}

fn heads((batch, time, heads, kv_heads, head): (usize, usize, usize, usize, usize)) -> AttentionShape {
    AttentionShape { batch, time, heads, kv_heads, head }
}

/// Returns sizes for every width of the kernels, with and without vector access.
fn sizes() -> Vec<AttentionShape> {
    [
        (1, 1, 1, 1, 1),
        (2, 5, 2, 2, 8),
        (1, 17, 1, 1, 7),
        (1, 70, 2, 1, 32),
        (2, 65, 3, 1, 33),
        (1, 97, 2, 2, 80),
        (1, 67, 2, 1, 128),
        (1, 35, 2, 1, 160),
    ]
    .map(heads)
    .to_vec()
}

fn rules(h: &AttentionShape) -> Vec<(AttentionRule<'static>, Option<Vec<Vec<usize>>>)> {
    let usual = AttentionRule::causal(h.head);
    let window = |window| AttentionRule { window: Some(window), ..usual };
    let capped = AttentionRule { scale: 1.3 * usual.scale, soft_cap: Some(0.7), ..usual };
    let both_ways = AttentionRule { bidirectional: true, ..usual };
    let starts = |row: usize| (0..h.time).filter(|t| *t == 0 || [3, 4, 60 + row].contains(t)).collect();
    let packed: Vec<Vec<usize>> = (0..h.batch).map(starts).collect();
    let windowed_cap = AttentionRule { window: Some(20), ..capped };
    vec![
        (usual, None),
        (AttentionRule { bidirectional: true, ..capped }, None),
        (window(1), None),
        (window(12), None),
        (window(64), None),
        (usual, Some(packed.clone())),
        (both_ways, Some(packed.clone())),
        (windowed_cap, Some(packed)),
    ]
}

fn results_and_gradients_are_those_of_the_host<E: Element + AttentionElement + ValidAsZeroBits>(accuracy: [f32; 3]) {
    let Some(device) = gpu() else { return };
    let mut worst = [0f32; 3];
    for (n, h) in sizes().into_iter().enumerate() {
        for (r, (rule, starts)) in rules(&h).into_iter().enumerate() {
            let case = Case::<E>::new(h, rule, starts);
            let got = if (n + r) % 2 == 0 { case.run(&device) } else { case.run_separate(&device) };
            let want = case.reference();
            let errors = [difference(&got.0, &want.0), difference(&got.1, &want.1), difference(&got.2, &want.2)];
            let bounded = errors.iter().zip(accuracy).all(|(error, bound)| *error <= bound);
            assert!(bounded, "{h:?} {:?}: {errors:?}", case.rule());
            worst = [0, 1, 2].map(|i| worst[i].max(errors[i]));
        }
    }
    println!("{worst:?}");
}

#[test]
fn results_and_gradients_are_those_of_the_host_in_f32() {
    results_and_gradients_are_those_of_the_host::<f32>([1e-6, 1e-6, 2e-6]);
}

#[test]
fn results_and_gradients_are_those_of_the_host_in_bf16() {
    results_and_gradients_are_those_of_the_host::<bf16>([8e-3, 1e-5, 1e-2]);
}

#[test]
fn results_and_gradients_are_those_of_the_host_in_f16() {
    results_and_gradients_are_those_of_the_host::<f16>([1e-3, 1e-5, 2e-3]);
}

#[test]
fn blocks_and_tiles_are_those_that_the_kernels_were_made_for() {
    fn check<E: AttentionElement>(device: &CudaDevice) {
        let mut figures = device.alloc_zeros::<u32>(6 * tile_sizes::WIDTHS.len()).unwrap();
        let name = format!("attention_launches_{}", E::SUFFIX);
        let function = E::KERNELS.function(device, &name).unwrap();
        let mut arguments = function.builder();
        arguments.arg(&mut figures);
        // SAFETY: the kernel writes 6 numbers for each width.
        unsafe { arguments.launch(tile_sizes::one_thread()) }.unwrap();
        let figures = device.clone_dtoh(&figures).unwrap();
        for (width, kernel_figures) in tile_sizes::WIDTHS.into_iter().zip(figures.chunks_exact(6)) {
            let AttentionTileSizes { forward, backward } = AttentionTileSizes::of(width, size_of::<E>());
            let expected = [forward, backward].map(|l| [l.own_rows, l.other_rows, l.bytes]).concat();
            assert_eq!(expected.iter().map(|n| *n as u32).collect::<Vec<_>>(), kernel_figures, "{} {width}", E::SUFFIX);
            assert!(forward.bytes.max(backward.bytes) <= 99 << 10, "{} {width}: {expected:?}", E::SUFFIX);
        }
    }
    let Some(device) = gpu() else { return };
    check::<f32>(&device);
    check::<bf16>(&device);
    check::<f16>(&device);
}

#[test]
fn two_runs_have_the_same_bits_in_one_buffer_and_in_three() {
    fn check<E: Element + AttentionElement + ValidAsZeroBits + PartialEq>(device: &CudaDevice) {
        let h = heads((2, 70, 4, 2, 24));
        for (rule, starts) in rules(&h).into_iter().step_by(3) {
            let case = Case::<E>::new(h, rule, starts);
            let first = case.run(device);
            assert!(first == case.run(device) && first == case.run_separate(device), "{:?}", case.rule());
        }
    }
    let Some(device) = gpu() else { return };
    check::<f32>(&device);
    check::<bf16>(&device);
}

impl<E: Element + AttentionElement + ValidAsZeroBits> Case<E> {
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
    fn check<E: Element + AttentionElement + ValidAsZeroBits + PartialEq>(device: &CudaDevice) {
        let h = heads((2, 90, 2, 1, 24));
        for (rule, starts) in rules(&h).into_iter().filter(|(_, starts)| starts.is_some()) {
            let mut case = Case::<E>::new(h, rule, starts);
            // A sequence of NaNs does not affect the others.
            let stride = case.stride();
            case.qkv[4 * stride..][..10 * stride].fill(put(f32::NAN));
            let all = case.run(device);
            for span in case.rule().spans(&h).into_iter().filter(|span| span.first != 4) {
                let separate = case.part(span.first, span.len).run(device);
                assert!(separate.0.iter().chain(&separate.2).all(|x| get(*x).is_finite()), "{span:?} {rule:?}");
                let span_rows = |data: &[E], width: usize| data[span.first * width..][..span.len * width].to_vec();
                assert!(separate.0 == span_rows(&all.0, 2 * 24), "{span:?} {rule:?}");
                assert!(separate.1 == all.1[span.first * 2..][..span.len * 2], "{span:?} {rule:?}");
                assert!(separate.2 == span_rows(&all.2, stride), "{span:?} {rule:?}");
            }
        }
    }
    let Some(device) = gpu() else { return };
    check::<f32>(&device);
    check::<bf16>(&device);
}

#[test]
fn a_key_that_is_no_number_stays_in_the_rows_that_see_it() {
    let Some(device) = gpu() else { return };
    let h = heads((1, 100, 1, 1, 16));
    for window in [None, Some(8)] {
        let mut case = Case::<f32>::new(h, AttentionRule { window, ..AttentionRule::causal(16) }, None);
        let stride = case.stride();
        case.qkv[40 * stride + 16] = f32::NAN;
        let (out, lse, _) = case.run(&device);
        for t in 0..100 {
            let sees = t >= 40 && window.is_none_or(|window| t < 40 + window);
            assert_eq!((lse[t].is_nan(), out[t * 16].is_nan()), (sees, sees), "{t} {window:?}");
        }
    }
}

#[test]
fn scores_far_apart_neither_overflow_nor_vanish() {
    let Some(device) = gpu() else { return };
    let mut case = Case::<f32>::new(heads((1, 70, 2, 1, 16)), AttentionRule::causal(16), None);
    case.qkv.iter_mut().for_each(|x| *x *= 10.0);
    let (got, want) = (case.run(&device), case.reference());
    let errors = (difference(&got.0, &want.0), difference(&got.1, &want.1), difference(&got.2, &want.2));
    assert!(errors.0 <= 1e-3 && errors.1 <= 1e-6 && errors.2 <= 1e-3, "{errors:?}");
}

#[test]
fn heads_and_sizes_that_the_kernels_do_not_take_are_refused() {
    let Some(device) = gpu() else { return };
    assert!(supports(&device, &heads((1, 1, 1, 1, 256))));
    for h in [(1, 1, 1, 1, 257), (0, 5, 1, 1, 4), (5, 0, 1, 1, 4), (1 << 20, 1 << 12, 1, 1, 4)] {
        assert!(!supports(&device, &heads(h)), "{h:?}");
    }
}
