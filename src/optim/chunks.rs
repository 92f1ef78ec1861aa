//! One pass over parameter, gradient, states and half copy, in parallel.
//!
//! A slice is cut into chunks for the threads and into blocks for the first-level cache. A block's gradient is
//! widened, its elements are updated, and the half copy is written while all of it is still in that cache, so the
//! step reads and writes each buffer in memory once.

use crate::precision::{FlatMut, FlatRef};

/// Elements that one thread takes at a time.
const CHUNK: usize = 64 * 1024;

/// Elements that are widened, updated and narrowed together: 4 KiB for each of the four to six f32 buffers.
const BLOCK: usize = 1024;

/// The buffers of one slice; `N` is the number of optimizer states.
pub(super) struct Slices<'a, const N: usize> {
    param: &'a mut [f32],
    grad: FlatRef<'a>,
    state: [&'a mut [f32]; N],
    half: Option<FlatMut<'a>>,
}

impl<'a, const N: usize> Slices<'a, N> {
    /// Takes the buffers of one update and checks that they fit together.
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
            assert_eq!(half.len(), len, "the half copy is not as long as the parameter");
        }
        let mut buffers = state.iter_mut();
        let state = std::array::from_fn(|_| buffers.next().map(|s| &mut **s).unwrap_or_default());
        Self { param, grad, state, half }
    }

    /// Runs `kernel(param, grad, states)` over all blocks. `kernel` must treat every element alike.
    pub(super) fn for_each_block<K>(self, kernel: &K)
    where
        K: Fn(&mut [f32], &[f32], [&mut [f32]; N]) + Sync,
    {
        let len = self.param.len();
        if len <= CHUNK {
            return self.run(kernel);
        }
        let (front, back) = self.split_at((len / 2).next_multiple_of(CHUNK));
        rayon::join(|| front.for_each_block(kernel), || back.for_each_block(kernel));
    }

    fn run<K>(mut self, kernel: &K)
    where
        K: Fn(&mut [f32], &[f32], [&mut [f32]; N]),
    {
        let mut widened = [0.0f32; BLOCK];
        while !self.param.is_empty() {
            let len = self.param.len().min(BLOCK);
            let (block, rest) = self.split_at(len);
            let grad = match block.grad {
                FlatRef::F32(grad) => grad,
                narrow => {
                    FlatMut::F32(&mut widened[..len]).copy_cast(narrow);
                    &widened[..len]
                }
            };
            kernel(block.param, grad, block.state);
            if let Some(half) = block.half {
                half.copy_cast(FlatRef::F32(block.param));
            }
            self = rest;
        }
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
        let (half, half_back) = self.half.map(|h| split_flat(h, mid)).unzip();
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

fn split_flat(flat: FlatMut<'_>, mid: usize) -> (FlatMut<'_>, FlatMut<'_>) {
    macro_rules! split {
        ($variant:ident, $v:expr) => {{
            let (front, back) = $v.split_at_mut(mid);
            (FlatMut::$variant(front), FlatMut::$variant(back))
        }};
    }
    match flat {
        FlatMut::F32(v) => split!(F32, v),
        FlatMut::BF16(v) => split!(BF16, v),
        FlatMut::F16(v) => split!(F16, v),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_is_visited_once_whatever_the_length() {
        for len in [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK, CHUNK + 1, 2 * CHUNK, 3 * CHUNK + BLOCK + 7] {
            let mut param: Vec<f32> = vec![0.0; len];
            let grad: Vec<f32> = (0..len).map(|i| i as f32).collect();
            let mut state: Vec<f32> = vec![0.0; len];
            let mut half = vec![half::bf16::ZERO; len];
            let mut states = [state.as_mut_slice()];
            let slices: Slices<'_, 1> =
                Slices::new(&mut param, FlatRef::F32(&grad), &mut states, Some(FlatMut::BF16(&mut half)));
            slices.for_each_block(&|param, grad, [state]| {
                for ((p, g), s) in param.iter_mut().zip(grad).zip(state.iter_mut()) {
                    *p += g + 1.0;
                    *s -= g + 1.0;
                }
            });
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
        let _: Slices<'_, 1> = Slices::new(&mut param, FlatRef::F32(&[0.0; 3]), &mut states, None);
    }
}
