//! One parallel pass over parameter, gradient, states and 16-bit copy.
//!
//! A slice is divided into chunks for the threads, and each chunk into blocks that fit in the first-level cache. A
//! block's gradient is widened, its elements are updated, and the 16-bit copy is written while all of the block is
//! still in that cache. The step therefore reads and writes each buffer in memory only once.

use crate::kernels::parallel;
use crate::kernels::simd::{self, SimdLoop, level};
use crate::precision::{FlatMut, FlatRef, cast};

/// The number of elements that one thread processes at a time.
const CHUNK: usize = 64 * 1024;

/// The number of elements that are widened, updated and narrowed together: 4 KiB for each f32 buffer (the parameter,
/// the widened gradient, and up to two states).
const BLOCK: usize = 1024;

/// The number of elements passed to a kernel at a time, small enough to unroll the loop over them.
const STRIP: usize = 64;

/// The distance in elements at which weights and states are prefetched ahead of the update.
const PREFETCH_ELEMENTS: usize = 512;

/// The number of f32 elements in a cache line.
const LINE: usize = 16;

/// The arithmetic of an optimizer.
pub(super) trait ElementwiseKernel<const N: usize>: Sync {
    /// Updates `param` and `state` (buffers of the same length as `param`) with `grad`. The function must treat every
    /// element alike, and be marked `#[inline(always)]`, because it becomes part of a [`SimdLoop`].
    fn update(&self, param: &mut [f32], grad: &[f32], state: [&mut [f32]; N]);
}

/// The buffers of one slice; `N` is the number of optimizer states.
pub(super) struct StepSlices<'a, const N: usize> {
    param: &'a mut [f32],
    grad: FlatRef<'a>,
    state: [&'a mut [f32]; N],
    half: Option<FlatMut<'a>>,
}

impl<'a, const N: usize> StepSlices<'a, N> {
    /// Collects the buffers of one update and checks that they fit together.
    pub(super) fn new(
        param: &'a mut [f32],
        grad: FlatRef<'a>,
        state: &'a mut [&mut [f32]],
        half: Option<FlatMut<'a>>,
    ) -> Self {
        let len = param.len();
        assert_eq!(grad.len(), len, "the gradient is not as long as the parameter");
        assert_eq!(state.len(), N, "wrong number of optimizer state buffers");
        assert!(state.iter().all(|s| s.len() == len), "an optimizer state is not as long as the parameter");
        if let Some(half) = &half {
            assert_eq!(half.len(), len, "the 16-bit copy is not as long as the parameter");
        }
        let mut buffers = state.iter_mut();
        let state = std::array::from_fn(|_| buffers.next().map(|s| &mut **s).unwrap_or_default());
        Self { param, grad, state, half }
    }

    /// Runs `kernel` over all elements.
    pub(super) fn update_with<K: ElementwiseKernel<N>>(self, kernel: &K) {
        let len = self.param.len();
        if len <= CHUNK {
            return level().run(ChunkPass { slices: self, kernel });
        }
        let (front, back) = self.split_at((len / 2).next_multiple_of(CHUNK));
        parallel::join(|| front.update_with(kernel), || back.update_with(kernel));
    }

    fn split_at(self, mid: usize) -> (Self, Self) {
        let len = self.param.len();
        let (param, param_back) = self.param.split_at_mut(mid);
        let mut state_back = [const { None }; N];
        let mut back = state_back.iter_mut();
        let state = self.state.map(|s| {
            let (head, tail) = s.split_at_mut(mid);
            if let Some(slot) = back.next() {
                *slot = Some(tail);
            }
            head
        });
        let (half, half_back) = self.half.map(|h| h.split_at(mid)).unzip();
        let front = Self { param, grad: self.grad.slice(0..mid), state, half };
        let back = Self {
            param: param_back,
            grad: self.grad.slice(mid..len),
            state: state_back.map(Option::unwrap_or_default),
            half: half_back,
        };
        (front, back)
    }
}

/// The pass of one thread over one chunk.
struct ChunkPass<'a, 'k, K, const N: usize> {
    slices: StepSlices<'a, N>,
    kernel: &'k K,
}

impl<K: ElementwiseKernel<N>, const N: usize> SimdLoop for ChunkPass<'_, '_, K, N> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let StepSlices { param, grad, mut state, mut half } = self.slices;
        let mut widened = [0.0f32; BLOCK];
        for start in (0..param.len()).step_by(BLOCK) {
            let end = param.len().min(start + BLOCK);
            let block = match grad.slice(start..end) {
                FlatRef::F32(grad) => grad,
                narrow => {
                    cast::widen(&mut widened[..end - start], narrow);
                    &widened[..end - start]
                }
            };
            let mut strips = block.chunks_exact(STRIP);
            let mut at = start;
            for strip in &mut strips {
                prefetch_strip(&param[at..], &state, at);
                let states = state.each_mut().map(|s| &mut s[at..at + STRIP]);
                self.kernel.update(&mut param[at..at + STRIP], strip, states);
                at += STRIP;
            }
            let states = state.each_mut().map(|s| &mut s[at..end]);
            self.kernel.update(&mut param[at..end], strips.remainder(), states);
            if let Some(half) = &mut half {
                cast::narrow(half.reborrow().slice(start..end), &param[start..end]);
            }
        }
    }
}

/// Prefetches the data that the pass will need [`PREFETCH_ELEMENTS`] elements from now. The CPU's own prefetching
/// restarts at every page.
#[inline(always)]
fn prefetch_strip<const N: usize>(param: &[f32], state: &[&mut [f32]; N], at: usize) {
    for line in (PREFETCH_ELEMENTS..PREFETCH_ELEMENTS + STRIP).step_by(LINE) {
        simd::prefetch(param, line);
        for s in state {
            simd::prefetch(&s[at..], line);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Count;

    impl ElementwiseKernel<1> for Count {
        #[inline(always)]
        fn update(&self, param: &mut [f32], grad: &[f32], [state]: [&mut [f32]; 1]) {
            for ((p, g), s) in param.iter_mut().zip(grad).zip(state) {
                *p += g + 1.0;
                *s -= g + 1.0;
            }
        }
    }

    #[test]
    fn every_element_is_visited_once_whatever_the_length() {
        for len in
            [0, 1, STRIP, STRIP + 1, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK, CHUNK + 1, 2 * CHUNK, 3 * CHUNK + BLOCK + 7]
        {
            let mut param: Vec<f32> = vec![0.0; len];
            let grad: Vec<f32> = (0..len).map(|i| i as f32).collect();
            let mut state: Vec<f32> = vec![0.0; len];
            let mut half = vec![half::bf16::ZERO; len];
            let mut states = [state.as_mut_slice()];
            let slices: StepSlices<'_, 1> =
                StepSlices::new(&mut param, FlatRef::F32(&grad), &mut states, Some(FlatMut::BF16(&mut half)));
            slices.update_with(&Count);
            for i in 0..len {
                assert_eq!(param[i], i as f32 + 1.0, "element {i} of {len}");
                assert_eq!(state[i], -(i as f32 + 1.0), "state {i} of {len}");
                assert_eq!(half[i], half::bf16::from_f32(i as f32 + 1.0), "half {i} of {len}");
            }
        }
    }

    #[test]
    #[should_panic(expected = "an optimizer state is not as long as the parameter")]
    fn a_state_of_another_length_is_a_broken_invariant() {
        let (mut param, mut state) = ([0.0; 3], [0.0; 2]);
        let mut states = [state.as_mut_slice()];
        let _: StepSlices<'_, 1> = StepSlices::new(&mut param, FlatRef::F32(&[0.0; 3]), &mut states, None);
    }
}
