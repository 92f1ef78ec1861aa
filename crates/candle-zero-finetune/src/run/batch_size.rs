//! Chooses the number of rows in a step and how full they are, unless the options or the DeepSpeed configuration
//! specify the number of rows. If the data has enough samples, an epoch then has at least 30 steps.
//!
//! ```text
//!   many rows       8 rows a step
//!   some            4, 2 or 1 rows a step, so that an epoch has 30 steps or more
//!   few             1 row a step, and rows that hold fewer samples than would fit
//!   few samples     1 row a step, with one sample
//! ```

use crate::data::batches::{Batches, RowOrder, SequencePacking};
use crate::data::dataset::Dataset;

/// The minimum number of steps in an epoch, if there are enough samples. A run with fewer steps learns little.
pub(super) const MIN_STEPS_PER_EPOCH: usize = 30;

/// The maximum number of rows in a step.
const MAX_ROWS_PER_STEP: usize = 8;

/// The rows of a step, and whether samples are packed into them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct BatchSizing {
    /// The number of rows in a step over all ranks or, if samples form groups, the number of groups.
    pub rows: usize,
    pub packing: SequencePacking,
}

impl BatchSizing {
    /// Chooses the sizes for ranks that together compute `unit` rows at a time. The number of rows in a step is a
    /// multiple of `unit`. `packing` is the fullest allowed packing. If a run is resumed, `remembered` is its number of
    /// rows in a step.
    ///
    /// The chosen number of rows in a step is a power of two, rounded up to a multiple of `unit`. It is therefore the
    /// same for many numbers of ranks.
    pub fn new(
        data: &Dataset,
        packing: SequencePacking,
        order: RowOrder,
        unit: usize,
        remembered: Option<usize>,
    ) -> Self {
        let groups = data.len() / data.group();
        let full = Batches::count_rows(data, packing, order);
        let rows = (full / MIN_STEPS_PER_EPOCH).clamp(1, MAX_ROWS_PER_STEP);
        // The largest power of two that is not greater than `rows`.
        let rows = (1usize << rows.ilog2()).next_multiple_of(unit);
        let rows = remembered.filter(|rows| rows.is_multiple_of(unit)).unwrap_or(rows);
        let min_rows = groups.min(rows.saturating_mul(MIN_STEPS_PER_EPOCH));
        let SequencePacking::Packed { ctx } = packing else { return Self { rows, packing } };
        if full >= min_rows {
            return Self { rows, packing };
        }
        // Finds the fullest rows that are still numerous enough. If a row has no room for two samples, there are as
        // many rows as samples.
        let (mut enough, mut too_few) = (0, ctx);
        while too_few - enough > 1 {
            let middle = enough + (too_few - enough) / 2;
            match Batches::count_rows(data, SequencePacking::Packed { ctx: middle }, order) >= min_rows {
                true => enough = middle,
                false => too_few = middle,
            }
        }
        Self { rows, packing: SequencePacking::Packed { ctx: enough } }
    }
}

/// Returns the default number of epochs: as many as are needed to see 1,200 samples, but at least three and at most
/// fifteen.
pub(super) fn epochs_for(samples: usize) -> f64 {
    const MIN_SAMPLES_SEEN: usize = 1200;
    MIN_SAMPLES_SEEN.div_ceil(samples.max(1)).clamp(3, 15) as f64
}
