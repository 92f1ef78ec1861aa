//! Rotary position embedding (Su et al. 2021).

use crate::graph::Inputs;
use crate::kernels::{buffer, rope};
use crate::nn::composed;
use crate::tensor::element::{Element, with_element, with_elements};
use candle_core::{Result, Tensor, bail};
use std::sync::Arc;

/// Rotates the heads of a tensor by their positions; its tables are made once.
#[derive(Debug, Clone)]
pub struct Rotary {
    head: usize,
    ctx: usize,
    theta: f64,
    tables: Arc<rope::Rotary>,
}

impl Rotary {
    /// For heads of `head` elements, an even number, at positions below `ctx`; the slowest frequency follows from
    /// `theta` (10000 in most models). Hugging Face's convention: an element is paired with the one half a head away.
    ///
    /// # Errors
    /// An odd head.
    pub fn new(head: usize, ctx: usize, theta: f64) -> Result<Self> {
        if head == 0 || !head.is_multiple_of(2) {
            bail!("rotary: heads have {head} elements; an even number is needed, for they are rotated in pairs")
        }
        Ok(Self { head, ctx, theta, tables: Arc::new(rope::Rotary::new(ctx, head, theta)) })
    }

    /// `x` `[batch, time, heads * head]` with the heads at position t rotated by t times each pair's frequency.
    ///
    /// # Errors
    /// Another shape, or more positions than the tables have.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.forward_from(x, 0)
    }

    /// [`Rotary::forward`] of what continues `first` positions: the heads at position t are rotated as those at
    /// `first + t`.
    ///
    /// # Errors
    /// As [`Rotary::forward`].
    pub fn forward_from(&self, x: &Tensor, first: usize) -> Result<Tensor> {
        const NAME: &str = "rotary";
        let most = self.ctx.saturating_sub(first);
        let (time, width) = match *x.dims() {
            [_, time, width] if width > 0 && width % self.head == 0 && time <= most => (time, width),
            ref dims => bail!(
                "rotary: the input has shape {dims:?}; [batch, time, heads * {}] with a time of at most {most}, after \
                 {first} positions, is needed",
                self.head,
            ),
        };
        let at = first..first + time;
        if !x.device().is_cpu() {
            return composed::rotary_from(x, self.head, self.theta, first);
        }
        let x = x.contiguous()?;
        let inputs = Inputs::of([Some(&x)])?;
        let shape = x.shape().clone();
        let tables = self.tables.clone();
        with_element!(x.dtype(), NAME, E => {
            let mut y = buffer::<E>(x.elem_count());
            with_elements::<E, _>(&x, NAME, |x| {
                tables.forward(x, at.clone(), width, &mut y);
                Ok(())
            })?;
            inputs.result(NAME, E::storage(y), shape.clone(), move |grad, [to_x]| {
                to_x.make::<E>(grad.len(), |dx| {
                    grad.read::<E, _>(NAME, |dy| {
                        tables.backward(dy, at.clone(), width, dx);
                        Ok(())
                    })
                })
            })
        })
    }
}
