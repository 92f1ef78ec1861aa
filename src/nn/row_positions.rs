//! The positions of the rows of a tensor, for rotations.

use crate::nn::Sequences;

/// The positions of the rows of a tensor `[batch, time, width]`.
pub(super) enum RowPositions {
    /// Consecutive positions, beginning with this position.
    From(usize),
    Of(Sequences),
}

impl RowPositions {
    /// Returns the position of row `row`.
    pub fn at(&self, row: usize, time: usize) -> usize {
        match self {
            Self::From(first) => first + row % time,
            Self::Of(sequences) => sequences.positions()[row] as usize,
        }
    }
}
