//! The exchange of rows between the ranks that together hold all experts of a layer.

use super::routed_units::RoutedUnits;
use crate::comm::Communicator;
use crate::error::{CommError, Result};
use crate::precision::Flat;
use crate::util::{counted, fnv1a};
use crate::zero::check::gradient_check_state::count_collective_step;
use crate::zero::rank_core::EngineLink;
use std::ops::Range;

/// The exchange of rows for a layer whose experts are divided among ranks. These ranks call the collective methods of
/// the exchange together.
#[derive(Debug, Clone)]
pub(crate) struct ExpertAllToAll {
    link: EngineLink,
    /// A hash of the layer's name, which reveals ranks that run different layers.
    layer: u64,
    /// The experts of the layer that this rank holds.
    experts: Range<usize>,
    rank: usize,
    ranks: usize,
    trains: bool,
}

/// The kind of a message, which ranks compare.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ExpertMessageKind {
    /// The chosen experts of each row, and their weights.
    Choices,
    /// The rows themselves.
    Rows,
    /// The results of rows.
    Results,
    /// The gradients of results.
    ResultGradients,
    /// The gradients of the weights of the chosen experts.
    WeightGradients,
    /// The gradients of rows.
    RowGradients,
}

impl RoutedUnits {
    /// Returns the exchange of the layer's rows, if its experts are divided among ranks.
    pub(crate) fn exchange(&self) -> Option<ExpertAllToAll> {
        let core = self.link().core()?;
        let group = &core.experts()?.group;
        let (rank, ranks) = (group.rank(), group.size());
        let each = self.len() / ranks;
        let (first, last) = (*self.units().first()?, *self.units().last()?);
        let mut layer_params = core.params().iter().filter(|param| (first..=last).contains(&param.unit));
        let trains = layer_params.any(|param| param.is_trained());
        let layer = fnv1a(core.unit_name(first).as_bytes());
        let experts = rank * each..(rank + 1) * each;
        Some(ExpertAllToAll { link: self.link().clone(), layer, experts, rank, ranks, trains })
    }
}

impl ExpertAllToAll {
    /// Returns the experts that this rank holds.
    pub fn experts(&self) -> Range<usize> {
        self.experts.clone()
    }

    /// Returns the number of ranks in the exchange.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// Returns the number, within the exchange, of the rank that holds an expert.
    pub fn rank_of(&self, expert: usize) -> usize {
        expert / self.experts.len().max(1)
    }

    /// Returns whether any rank trains an expert of the layer.
    pub fn trains(&self) -> bool {
        self.trains
    }

    /// Sends each rank the number of rows that it will receive from this one, and returns the number of rows that come
    /// from each rank. A row has `choices` experts and at most `width` elements in a message. All ranks of the job call
    /// this method together, so that a rank that does not run the layer is detected, whatever it does instead.
    ///
    /// # Errors
    /// A failed collective; a rank that runs a different layer; impossible numbers of rows.
    pub fn counts(&self, sent: &[usize], (choices, width): (usize, usize)) -> candle_core::Result<Vec<usize>> {
        self.with_ranks(|comm, group| {
            let mut message = vec![choices as f64, width as f64];
            message.extend(sent.iter().map(|rows| *rows as f64));
            let all = comm.gather_f64(message).wait()?;
            let ranks = comm.rank() - self.rank..comm.rank() - self.rank + self.ranks;
            let rows = ranks.map(|rank| {
                let numbers = &all[rank];
                if numbers[..2] != [choices as f64, width as f64] {
                    return Err(CommError::other(format!(
                        "rank {rank} sends rows of {} with {} each, but this rank has rows of {} with {}; all ranks \
                         must run the same layer",
                        counted(numbers[1], "element"),
                        counted(numbers[0], "expert"),
                        counted(width, "element"),
                        counted(choices, "expert")
                    )));
                }
                let number = numbers[2 + self.rank];
                let is_possible = number >= 0.0 && number.fract() == 0.0 && number <= f64::from(u32::MAX);
                let impossible =
                    || CommError::other(format!("rank {rank} announces {number} rows, an impossible number"));
                if is_possible { Ok(number as usize) } else { Err(impossible()) }
            });
            let rows = rows.collect::<std::result::Result<Vec<usize>, CommError>>()?;
            let total = rows.iter().try_fold(0usize, |sum, rows| sum.checked_add(*rows));
            let fits = |total: &usize| {
                let (choices, elements) = (total.checked_mul(choices), total.checked_mul(width));
                choices.is_some_and(|n| u32::try_from(n).is_ok())
                    && elements.is_some_and(|n| n <= isize::MAX as usize / 8)
            };
            match total.filter(fits) {
                Some(_) => Ok(rows),
                None => Err(CommError::other(format!(
                    "the ranks of the exchange announce {rows:?} rows for the experts of rank {}, more than can be \
                     sorted; use smaller micro batches",
                    group.in_job(self.rank)
                ))
                .into()),
            }
        })
    }

    /// Sends each rank of the exchange its part of `values`: `sent[r]` rows of `width` elements to rank r. Returns the
    /// rows from all ranks, in rank order, of which there are `received[r]` from rank r.
    ///
    /// # Errors
    /// A failed collective.
    pub fn exchange(
        &self,
        content: ExpertMessageKind,
        values: Flat,
        [sent, received]: [&[usize]; 2],
        width: usize,
    ) -> candle_core::Result<Flat> {
        let elements = |rows: &[usize]| rows.iter().map(|rows| rows * width).collect::<Vec<_>>();
        let tag = self.layer.wrapping_add(content as u64);
        self.with_ranks(|_, group| group.all_to_all(values, &elements(sent), &elements(received), tag).wait())
    }

    /// Returns an error that names the rank of the job from which invalid values came.
    pub fn refuse<T>(&self, from: usize, why: &str) -> candle_core::Result<T> {
        self.with_ranks(|_, group| {
            Err(CommError::other(format!("rank {} sent invalid rows: {why}", group.in_job(from))).into())
        })
    }

    /// Calls `run` with the communicators of all ranks and of those in the exchange.
    fn with_ranks<T>(
        &self,
        run: impl FnOnce(&dyn Communicator, &dyn Communicator) -> Result<T>,
    ) -> candle_core::Result<T> {
        let Some(core) = self.link.core() else {
            candle_core::bail!("experts were used after their engine was dropped; keep the engine")
        };
        let Some(experts) = core.experts() else { unreachable!("the experts of this engine are divided among ranks") };
        count_collective_step();
        run(core.comm(), &*experts.group).map_err(|error| core.stash(error))
    }
}
