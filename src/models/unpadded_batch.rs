//! The texts of a batch without their padding, one after the other.

use crate::error::ModelError;
use crate::nn::{Sequences, embedding, refuse};
use crate::util::counted;
use candle_core::{Result, Tensor, bail};

/// The texts of a batch, one after the other in a single row. Padding is left out: it costs no time, and does not
/// change a single bit of a result or a gradient.
#[derive(Debug, Clone)]
pub(super) struct UnpaddedBatch {
    /// The token ids, `[1, tokens]`.
    pub ids: Tensor,
    /// The positions of the texts' tokens in the flattened batch.
    positions: Tensor,
    lengths: Vec<usize>,
    /// The division of the row into texts.
    pub sequences: Sequences,
}

impl UnpaddedBatch {
    /// Joins the texts in ids `[batch, time]` (u32). The rows contain texts of the given lengths, each at least 1 and
    /// at most `context`, followed by arbitrary ids.
    ///
    /// # Errors
    /// A text that is too long, or lengths that do not match the tokens.
    pub fn new(ids: &Tensor, lengths: &[usize], context: usize) -> Result<Self> {
        let (batch, time) = ids.dims2()?;
        // This also checks the lengths.
        let padded = Sequences::padded(lengths, time)?;
        if padded.batch() != batch {
            bail!(
                "a batch of {} has {}; give one for each row",
                counted(batch, "row"),
                counted(lengths.len(), "length")
            )
        }
        if let Some(length) = lengths.iter().copied().max().filter(|length| *length > context) {
            return Err(refuse(ModelError::SequenceTooLong { length, context }.into()));
        }
        let tokens = lengths.iter().sum();
        let positions = lengths.iter().enumerate().flat_map(|(row, length)| row * time..row * time + length);
        let positions: Vec<u32> = positions.map(|position| position as u32).collect();
        let positions = Tensor::from_vec(positions, tokens, ids.device())?;
        let sequences = Sequences::from_lengths(&[lengths.to_vec()], tokens)?;
        let ids = gather(ids, &positions)?;
        Ok(Self { ids, positions, lengths: lengths.to_vec(), sequences })
    }

    /// Joins other values `[batch, time]` in the same way.
    pub fn join(&self, values: &Tensor) -> Result<Tensor> {
        gather(values, &self.positions)
    }

    /// Returns the number of tokens in each text.
    pub fn lengths(&self) -> &[usize] {
        &self.lengths
    }

    /// Returns the start of each text.
    pub fn starts(&self) -> Vec<usize> {
        let next = |end: &mut usize, length: &usize| Some(std::mem::replace(end, *end + length));
        self.lengths.iter().scan(0, next).collect()
    }

    /// Returns the ids of each text.
    pub fn texts(&self) -> Result<Vec<Vec<u32>>> {
        let ids: Vec<u32> = self.ids.flatten_all()?.to_vec1()?;
        Ok(self.starts().into_iter().zip(&self.lengths).map(|(start, len)| ids[start..start + len].to_vec()).collect())
    }
}

/// Returns the values at `positions` of the flattened batch, `[1, tokens]`.
fn gather(values: &Tensor, positions: &Tensor) -> Result<Tensor> {
    values.flatten_all()?.index_select(positions, 0)?.unsqueeze(0)
}

/// Returns the rows of `x` at `positions`.
pub(super) fn rows(x: &Tensor, positions: impl Iterator<Item = usize>) -> Result<Tensor> {
    let positions: Vec<u32> = positions.map(|position| position as u32).collect();
    embedding(&Tensor::new(positions, x.device())?, x)
}
