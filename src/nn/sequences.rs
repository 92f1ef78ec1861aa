//! The starts of sequences in packed rows.

use crate::util::counted;
use candle_core::{Device, Result, Tensor, bail};
use std::sync::Arc;

/// The division of the rows of a batch `[batch, time]` into consecutive sequences. Positions begin at 0 in each
/// sequence, and attention does not cross from one sequence into another. Padding is a sequence too, but its results
/// are not used.
///
/// ```
/// use candle_zero::nn::Sequences;
///
/// // A row with sequences of 3 and 5 tokens, and a row with 6 tokens and 2 positions of padding.
/// let sequences = Sequences::from_lengths(&[vec![3, 5], vec![6]], 8)?;
/// assert_eq!(sequences.starts(), [[0, 3], [0, 6]]);
/// assert_eq!(sequences.positions()[..8], [0, 1, 2, 0, 1, 2, 3, 4]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sequences {
    time: usize,
    starts: Arc<Vec<Vec<usize>>>,
    positions: Arc<[u32]>,
}

impl Sequences {
    /// Describes rows of `time` positions whose sequences begin at these positions, the first of each row at 0.
    ///
    /// # Errors
    /// Starts of a row that do not begin with 0, do not increase or are not below `time`.
    pub fn from_starts(starts: Vec<Vec<usize>>, time: usize) -> Result<Self> {
        for (row, starts) in starts.iter().enumerate() {
            let increase = starts.windows(2).all(|pair| pair[0] < pair[1]);
            if starts.first() != Some(&0) || !increase || starts.last().is_some_and(|last| *last >= time) {
                bail!(
                    "sequences: row {row} has starts {starts:?}; they must begin with 0, increase, and be less than \
                     {time}, the number of positions in the row"
                )
            }
        }
        let ends = |starts: &[usize]| starts.iter().skip(1).copied().chain([time]).collect::<Vec<_>>();
        let mut positions = Vec::with_capacity(starts.len() * time);
        for row in &starts {
            for (start, end) in row.iter().zip(ends(row)) {
                positions.extend((0..end - start).map(|position| position as u32));
            }
        }
        Ok(Self { time, starts: Arc::new(starts), positions: positions.into() })
    }

    /// Describes rows of `time` positions that contain sequences of these lengths, in order. The rest of a row is
    /// padding.
    ///
    /// # Errors
    /// A length of 0, or lengths in a row that add up to more than `time`.
    pub fn from_lengths(lengths: &[Vec<usize>], time: usize) -> Result<Self> {
        let starts_of_row = |(row, lengths): (usize, &Vec<usize>)| {
            let (mut starts, mut end) = (Vec::with_capacity(lengths.len() + 1), 0usize);
            for length in lengths {
                starts.push(end);
                end = end.saturating_add(*length);
            }
            if lengths.contains(&0) || end > time {
                bail!(
                    "sequences: row {row} has lengths {lengths:?}; they must be above 0 and no more than the row's \
                     {} in total",
                    counted(time, "position")
                )
            }
            if end < time {
                starts.push(end);
            }
            Ok(starts)
        };
        Self::from_starts(lengths.iter().enumerate().map(starts_of_row).collect::<Result<_>>()?, time)
    }

    /// Describes rows of `time` positions, each with one sequence of the given length followed by padding.
    ///
    /// # Errors
    /// The errors of [`Sequences::from_lengths`].
    pub fn padded(lengths: &[usize], time: usize) -> Result<Self> {
        Self::from_lengths(&lengths.iter().map(|length| vec![*length]).collect::<Vec<_>>(), time)
    }

    /// Returns the number of rows.
    pub fn batch(&self) -> usize {
        self.starts.len()
    }

    /// Returns the number of positions in a row.
    pub fn time(&self) -> usize {
        self.time
    }

    /// Returns the starts of the sequences in each row.
    pub fn starts(&self) -> &[Vec<usize>] {
        &self.starts
    }

    /// Returns the position of every token within its sequence, row after row: `batch * time` numbers.
    pub fn positions(&self) -> &[u32] {
        &self.positions
    }

    /// Returns the positions as a tensor `[batch, time]` (u32).
    pub fn positions_on(&self, device: &Device) -> Result<Tensor> {
        Tensor::from_slice(&self.positions, (self.batch(), self.time), device)
    }

    /// Returns the number of positions in the longest sequence; padding counts as a sequence.
    pub fn longest(&self) -> usize {
        self.positions.iter().max().map_or(0, |last| *last as usize + 1)
    }

    /// Returns an error if the sequences do not match the batch.
    pub(super) fn check(&self, op: &'static str, batch: usize, time: usize) -> Result<()> {
        if (batch, time) == (self.batch(), self.time) {
            return Ok(());
        }
        bail!(
            "{op}: the sequences cover [{}, {}] positions, but the input has [{batch}, {time}]",
            self.batch(),
            self.time
        )
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn positions_begin_anew_in_each_sequence() {
        let sequences = Sequences::from_starts(vec![vec![0, 2, 3], vec![0]], 5).unwrap();
        assert_eq!((sequences.batch(), sequences.time(), sequences.longest()), (2, 5, 5));
        assert_eq!(sequences.positions(), [0, 1, 0, 0, 1, 0, 1, 2, 3, 4]);
        assert_eq!(sequences, Sequences::from_lengths(&[vec![2, 1, 2], vec![5]], 5).unwrap());
        assert_eq!(Sequences::padded(&[2, 5], 5).unwrap().starts(), [vec![0, 2], vec![0]]);
        let on_device: Vec<Vec<u32>> = sequences.positions_on(&Device::Cpu).unwrap().to_vec2().unwrap();
        assert_eq!(on_device.concat(), sequences.positions());
    }

    #[test]
    fn starts_and_lengths_that_make_no_rows_are_refused() {
        let text = |result: Result<Sequences>| result.unwrap_err().to_string().lines().next().unwrap().to_string();
        insta::assert_snapshot!(text(Sequences::from_starts(vec![vec![0], vec![1, 2]], 5)), @"sequences: row 1 has starts [1, 2]; they must begin with 0, increase, and be less than 5, the number of positions in the row");
        for wrong in [vec![], vec![0, 3, 3], vec![0, 5]] {
            assert!(Sequences::from_starts(vec![wrong], 5).is_err());
        }
        insta::assert_snapshot!(text(Sequences::from_lengths(&[vec![2, 4]], 5)), @"sequences: row 0 has lengths [2, 4]; they must be above 0 and no more than the row's 5 positions in total");
        for wrong in [vec![2, 0], vec![usize::MAX, 2]] {
            assert!(Sequences::from_lengths(&[wrong], 5).is_err());
        }
    }
}
