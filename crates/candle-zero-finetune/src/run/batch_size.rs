//! How many rows a step has and how full rows are, where that is not said: so that an epoch has some tens of steps, if the
//! data have as many samples.
//!
//! ```text
//!   many rows       8 rows a step
//!   some            a part of the rows a step: 4, 2 or 1, so that an epoch has 30 steps or more
//!   few             1 row a step, and rows that hold fewer samples than would fit
//!   few samples     1 row a step, of one sample each
//! ```

use crate::data::batches::{Batches, RowOrder, SequencePacking};
use crate::data::dataset::Dataset;

/// Steps of an epoch, if there are enough samples; a run of fewer steps learns little.
pub(super) const STEPS: usize = 30;

/// Rows of a step at most.
const ROWS: usize = 8;

/// The rows of a step, and whether samples are packed into them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct BatchSizing {
    /// Rows of a step of all ranks, or groups of samples that belong together.
    pub rows: usize,
    pub packing: SequencePacking,
}

impl BatchSizing {
    /// For ranks that together compute `unit` rows at once, or a multiple of them. `packing` is how full rows may be; `remembered`
    /// are the rows of a step of the run that goes on, if it does.
    ///
    /// The rows of a step are a power of two, as far as `unit` allows it: then they do not depend on the number of ranks.
    pub fn new(
        data: &Dataset,
        packing: SequencePacking,
        order: RowOrder,
        unit: usize,
        remembered: Option<usize>,
    ) -> Self {
        let groups = data.len() / data.group();
        let full = Batches::count_rows(data, packing, order);
        let rows = (full / STEPS).clamp(1, ROWS);
        // The largest power of two that is no more.
        let rows = (1usize << rows.ilog2()).next_multiple_of(unit);
        let rows = remembered.filter(|rows| rows.is_multiple_of(unit)).unwrap_or(rows);
        let wanted = groups.min(rows.saturating_mul(STEPS));
        let SequencePacking::Packed { ctx } = packing else { return Self { rows, packing } };
        if full >= wanted {
            return Self { rows, packing };
        }
        // The fullest rows of which there are enough. Rows without room for two samples are as many as samples.
        let (mut enough, mut too_few) = (0, ctx);
        while too_few - enough > 1 {
            let middle = enough + (too_few - enough) / 2;
            match Batches::count_rows(data, SequencePacking::Packed { ctx: middle }, order) >= wanted {
                true => enough = middle,
                false => too_few = middle,
            }
        }
        Self { rows, packing: SequencePacking::Packed { ctx: enough } }
    }
}

/// Times through the data, where that is not said: three, and up to fifteen with few samples, until 1,200 were seen.
pub(super) fn epochs_for(samples: usize) -> f64 {
    const SEEN: usize = 1200;
    SEEN.div_ceil(samples.max(1)).clamp(3, 15) as f64
}
