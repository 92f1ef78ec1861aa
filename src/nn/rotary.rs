//! Rotary position embedding (Su et al. 2021).

use crate::graph::OpInputs;
use crate::kernels::{buffer, rope};
#[cfg(feature = "cuda")]
use crate::nn::on_gpu;
use crate::nn::row_positions::RowPositions;
use crate::nn::{Sequences, composed, frequencies};
use crate::tensor::element::{TensorElement, with_element, with_elements};
use candle_core::{Result, Tensor, bail};
use std::sync::Arc;

/// A rotation of the heads of a tensor by their positions, with tables that are computed once.
#[derive(Debug, Clone)]
pub struct Rotary {
    ctx: usize,
    frequencies: Arc<[f64]>,
    tables: Arc<rope::RotaryTable>,
    #[cfg(feature = "cuda")]
    on_gpu: Arc<on_gpu::rotary::AngleTables>,
}

impl Rotary {
    /// Creates the tables for heads of `head` elements, an even number, at positions below `ctx`. The slowest frequency
    /// follows from `theta` (10000 in most models). As in Hugging Face's models, an element is paired with the element
    /// half a head away.
    ///
    /// # Errors
    /// An odd head size, or a theta that is not above 0.
    pub fn new(head: usize, ctx: usize, theta: f64) -> Result<Self> {
        Self::from_frequencies(ctx, frequencies::default(head, theta)?)
    }

    /// Creates the tables for heads of twice as many elements as there are `frequencies` ([`crate::nn::frequencies`]),
    /// at positions below `ctx`.
    ///
    /// # Errors
    /// No frequencies, or a frequency that is NaN or infinite.
    pub fn from_frequencies(ctx: usize, frequencies: Vec<f64>) -> Result<Self> {
        if frequencies.is_empty() || frequencies.iter().any(|frequency| !frequency.is_finite()) {
            bail!(
                "rotary: the frequencies are {frequencies:?}; each pair of elements of a head needs a finite frequency"
            )
        }
        let tables = Arc::new(rope::RotaryTable::new(ctx, &frequencies));
        Ok(Self {
            ctx,
            frequencies: frequencies.into(),
            tables,
            #[cfg(feature = "cuda")]
            on_gpu: Arc::default(),
        })
    }

    /// Returns `x` `[batch, time, heads * head]` with the heads at position t rotated by t times each pair's frequency.
    ///
    /// # Errors
    /// An input of a different shape, or more positions than the tables have.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.forward_from(x, 0)
    }

    /// Computes [`Rotary::forward`] for an input that follows `first` positions: the heads at position t are rotated
    /// like those at `first + t`.
    ///
    /// # Errors
    /// The errors of [`Rotary::forward`].
    pub fn forward_from(&self, x: &Tensor, first: usize) -> Result<Tensor> {
        self.turn(x, RowPositions::From(first), self.ctx.saturating_sub(first), first)
    }

    /// Computes [`Rotary::forward`] for packed rows: positions begin at 0 in each sequence.
    ///
    /// # Errors
    /// The errors of [`Rotary::forward`] for the longest sequence; sequences that do not match the batch.
    pub fn forward_in(&self, x: &Tensor, sequences: &Sequences) -> Result<Tensor> {
        let longest = sequences.longest();
        if longest > self.ctx {
            bail!("rotary: a sequence has {longest} positions, but there are angles for only {}", self.ctx)
        }
        if let [batch, time, _] = *x.dims() {
            sequences.check(NAME, batch, time)?;
        }
        self.turn(x, RowPositions::Of(sequences.clone()), usize::MAX, 0)
    }

    fn turn(&self, x: &Tensor, positions: RowPositions, most: usize, first: usize) -> Result<Tensor> {
        let head = 2 * self.frequencies.len();
        let (batch, time, width) = match *x.dims() {
            [batch, time, width] if width > 0 && width % head == 0 && time <= most => (batch, time, width),
            ref dims => bail!(
                "rotary: the input has shape {dims:?}; it must be [batch, time, heads * {head}], where time is at most \
                 {most} (the input follows {first} positions)"
            ),
        };
        #[cfg(feature = "cuda")]
        if let Some(y) = on_gpu::rotary::rotary(x, &self.on_gpu, &self.tables, &positions)? {
            return Ok(y);
        }
        if !x.device().is_cpu() {
            let positions: Vec<usize> = (0..batch * time).map(|row| positions.at(row, time)).collect();
            return composed::rotary_at(x, &self.frequencies, &positions);
        }
        let x = x.contiguous()?;
        let inputs = OpInputs::of([Some(&x)])?;
        let shape = x.shape().clone();
        let tables = self.tables.clone();
        with_element!(x.dtype(), NAME, E => {
            let mut y = buffer::<E>(x.elem_count());
            with_elements::<E, _>(&x, NAME, |x| {
                tables.forward(x, |row| positions.at(row, time), width, &mut y);
                Ok(())
            })?;
            inputs.result(NAME, E::storage(y), shape.clone(), move |grad, [to_x]| {
                to_x.make::<E>(grad.len(), |dx| {
                    grad.read::<E, _>(NAME, |dy| {
                        tables.backward(dy, |row| positions.at(row, time), width, dx);
                        Ok(())
                    })
                })
            })
        })
    }
}

const NAME: &str = "rotary";
