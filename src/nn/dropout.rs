//! Dropout (Srivastava et al. 2014) from a counter-based generator.

use crate::graph::{OpInputs, advance_draws, is_without_gradients, rng_position};
use crate::kernels::buffer;
use crate::kernels::dropout as kernel;
#[cfg(feature = "cuda")]
use crate::nn::on_gpu;
use crate::tensor::element::{TensorElement, with_element, with_elements};
use crate::zero::gather::unit::link_under_construction;
use crate::zero::rank_core::EngineLink;
use candle_core::{Result, Tensor, bail};
use candle_nn::Module;

/// Returns x with each element replaced by 0 with probability `p` in [0, 1), and divided by 1 - p otherwise. The choice
/// of elements depends only on `seed`, `draw` and their positions (Philox4x32-10, Salmon et al. 2011), so nothing is
/// kept for the backward pass.
///
/// # Errors
/// A probability outside [0, 1).
pub fn dropout(x: &Tensor, p: f32, seed: u64, draw: u64) -> Result<Tensor> {
    const NAME: &str = "dropout";
    if !(0.0..1.0).contains(&p) {
        bail!("dropout: the probability is {p}; it must be at least 0 and below 1")
    }
    if p == 0.0 {
        return Ok(x.clone());
    }
    let offset = offset_of(draw);
    #[cfg(feature = "cuda")]
    if let Some(y) = on_gpu::dropout::dropout(x, p, seed, offset)? {
        return Ok(y);
    }
    if !x.device().is_cpu() {
        let mut mask = vec![0f32; x.elem_count()];
        kernel::dropout(&vec![1f32; mask.len()], p, seed, offset, &mut mask);
        return x * Tensor::from_vec(mask, x.shape(), x.device())?.to_dtype(x.dtype())?;
    }
    let x = x.contiguous()?;
    let inputs = OpInputs::of([Some(&x)])?;
    let shape = x.shape().clone();
    with_element!(x.dtype(), NAME, E => {
        let mut y = buffer::<E>(x.elem_count());
        with_elements::<E, _>(&x, NAME, |x| {
            kernel::dropout(x, p, seed, offset, &mut y);
            Ok(())
        })?;
        inputs.result(NAME, E::storage(y), shape, move |grad, [to_x]| {
            to_x.make::<E>(grad.len(), |dx| {
                grad.read::<E, _>(NAME, |dy| {
                    kernel::dropout(dy, p, seed, offset, dx);
                    Ok(())
                })
            })
        })
    })
}

/// Returns the offset of a draw's first random number. Draws are further apart than the number of elements in any
/// tensor.
fn offset_of(draw: u64) -> u64 {
    draw << 40
}

/// Dropout as a layer. Within an engine, each forward pass of each rank draws new random numbers, even if there are
/// several in one micro step. A unit that is recomputed repeats the draws of its first run, and evaluation passes
/// everything through. Without an engine, every use draws new random numbers, unless nothing is recorded for a backward
/// pass: then everything passes through.
///
/// Draws belong to the thread that called the engine's `forward`. On other threads (such as those of a model that runs
/// its experts in parallel), the order of draws would not be deterministic. Dropout is therefore an error there while
/// an engine trains; in evaluation it passes everything through.
#[derive(Debug, Clone)]
pub struct Dropout {
    p: f32,
    seed: u64,
    /// The link to the engine of the model that contains the layer.
    link: EngineLink,
}

impl Dropout {
    /// Creates a layer that drops elements with probability `p`.
    pub fn new(p: f32, seed: u64) -> Self {
        Self { p, seed, link: link_under_construction() }
    }
}

/// The mask of one use of a [`Dropout`], which determines the dropped elements.
#[derive(Debug, Clone, Copy)]
pub(super) struct DropoutMask {
    pub p: f32,
    pub seed: u64,
    pub draw: u64,
}

impl DropoutMask {
    /// Applies [`dropout`] to `x`, the part of a tensor that begins with the tensor's element `first`, and writes the
    /// result to `y`.
    pub fn apply<E: TensorElement>(&self, first: usize, x: &[E], y: &mut [E]) {
        kernel::dropout(x, self.p, self.seed, offset_of(self.draw).wrapping_add(first as u64), y);
    }
}

impl Dropout {
    /// Returns the mask of the next use, or `None` if everything passes through.
    pub(super) fn draw(&self) -> Result<Option<DropoutMask>> {
        let draws = rng_position();
        let core = self.link.core();
        if core.as_ref().is_some_and(|core| core.is_evaluating() && !core.is_checking())
            || (is_without_gradients() && !draws.in_training)
        {
            return Ok(None);
        }
        if !draws.in_training && core.is_some_and(|core| core.is_in_forward()) {
            bail!(
                "dropout: it runs on one of the model's own threads, where its random draws cannot be repeated; run \
                 it on the thread that called engine.forward"
            )
        }
        advance_draws();
        let seed = self.seed ^ draws.stream.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        Ok(Some(DropoutMask { p: self.p, seed, draw: draws.next }))
    }
}

impl Module for Dropout {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self.draw()? {
            Some(DropoutMask { p, seed, draw }) => dropout(x, p, seed, draw),
            None => Ok(x.clone()),
        }
    }
}
