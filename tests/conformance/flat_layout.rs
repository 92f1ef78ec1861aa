//! DeepSpeed's flat layout of stages 1 and 2: arithmetic that the recorded cases describe and the engine does not
//! use.
//!
//! All parameters are stored consecutively in one flat buffer, padded at its end to a multiple of twice the world
//! size; rank r owns the r-th equal part of it. A parameter may straddle parts. (This engine shards parameter by
//! parameter at stages 1 to 3; see `candle_zero::layout::shard_range`.)

use std::ops::Range;

/// DeepSpeed's layout of the parameters of one group at stage 1 or 2.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FlatLayout {
    /// The indices of the parameters in flat order.
    pub order: Vec<usize>,
    /// The elements of the flat buffer that each parameter occupies, in flat order.
    pub ranges: Vec<Range<usize>>,
    /// The number of elements of the padded flat buffer.
    pub padded_total: usize,
    /// The number of elements that each rank owns.
    pub partition_size: usize,
}

impl FlatLayout {
    /// The number of elements per rank to which the flat buffer's length is aligned (4 bytes in 16-bit formats).
    const ALIGNMENT: usize = 2;

    /// Creates the layout of parameters with `numels` elements; `round_robin` is the key `round_robin_gradients`.
    pub fn new(numels: &[usize], world_size: usize, round_robin: bool) -> Self {
        let order: Vec<usize> = if round_robin {
            (0..world_size).flat_map(|r| (r..numels.len()).step_by(world_size)).collect()
        } else {
            (0..numels.len()).collect()
        };
        let mut end = 0;
        let ranges = order
            .iter()
            .map(|i| {
                let start = end;
                end += numels[*i];
                start..end
            })
            .collect();
        let padded_total = end.next_multiple_of(Self::ALIGNMENT * world_size);
        Self { order, ranges, padded_total, partition_size: padded_total / world_size }
    }

    /// Returns the part of the flat buffer that `rank` owns.
    pub fn partition(&self, rank: usize) -> Range<usize> {
        rank * self.partition_size..(rank + 1) * self.partition_size
    }

    /// Returns the number of padding elements in the part of `rank`.
    pub fn padding(&self, rank: usize) -> usize {
        let used = self.ranges.last().map_or(0, |r| r.end);
        let part = self.partition(rank);
        part.end - used.clamp(part.start, part.end)
    }

    /// Returns the parameters of which `rank` owns at least one element, in flat order.
    pub fn params_of(&self, rank: usize) -> Vec<usize> {
        let part = self.partition(rank);
        let touches = |r: &Range<usize>| r.start.max(part.start) < r.end.min(part.end);
        self.order.iter().zip(&self.ranges).filter(|(_, r)| touches(r)).map(|(i, _)| *i).collect()
    }
}
