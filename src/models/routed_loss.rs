//! The losses of language models with routers: cross entropy or log probabilities, together with the routers' choices
//! and their load-balancing loss.

use super::{Architecture, BalanceLossOptions, ExpertLoad, LanguageModel, RoutedStates, RouterReport};
use crate::nn::{LossOptions, Routing, Sequences, WeightLayout, linear_cross_entropy_with, linear_log_probabilities};
use crate::util::{counted, is_or_are};
use candle_core::{Result, Tensor, bail};

impl<A: Architecture> LanguageModel<A> {
    /// Returns the loss of [`LanguageModel::loss_packed`], without the load-balancing loss, and a report of the routers
    /// ([`RouterReport::add_to`] adds the two losses). `mask` has one element for each token; tokens with `false`
    /// (padding) count neither in the loads nor in the load-balancing loss.
    ///
    /// With a load-balancing loss, this is a collective operation in an engine: all ranks must call it.
    ///
    /// # Errors
    /// The errors of [`LanguageModel::loss_packed`]; a length of `mask` that is not the number of tokens; with a
    /// load-balancing loss, no token that counts on any rank, or a failed collective.
    pub fn routed_loss(
        &self,
        ids: &Tensor,
        targets: &Tensor,
        sequences: Option<&Sequences>,
        divisor: Option<f64>,
        mask: Option<&[bool]>,
    ) -> Result<(Tensor, RouterReport)> {
        let (states, report) = self.routed(ids, sequences, mask)?;
        let options = LossOptions { soft_cap: self.layers().logit_soft_cap(), divisor };
        let weight = self.layers().output();
        Ok((linear_cross_entropy_with(&states, weight, WeightLayout::OutIn, targets, options)?, report))
    }

    /// Returns the result of [`LanguageModel::log_probabilities`] and a report of the routers, as in
    /// [`LanguageModel::routed_loss`].
    ///
    /// # Errors
    /// The errors of [`LanguageModel::log_probabilities`], and those of [`LanguageModel::routed_loss`] about `mask` and
    /// the load-balancing loss.
    pub fn routed_log_probabilities(
        &self,
        ids: &Tensor,
        targets: &Tensor,
        sequences: Option<&Sequences>,
        mask: Option<&[bool]>,
    ) -> Result<(Tensor, RouterReport)> {
        let (states, report) = self.routed(ids, sequences, mask)?;
        let (weight, cap) = (self.layers().output(), self.layers().logit_soft_cap());
        Ok((linear_log_probabilities(&states, weight, WeightLayout::OutIn, targets, cap)?, report))
    }

    /// Returns the input of the output projection, and a report of the routers.
    fn routed(
        &self,
        ids: &Tensor,
        sequences: Option<&Sequences>,
        mask: Option<&[bool]>,
    ) -> Result<(Tensor, RouterReport)> {
        self.check_length(ids)?;
        if let Some(mask) = mask.filter(|mask| mask.len() != ids.elem_count()) {
            let tokens = ids.elem_count();
            bail!(
                "the mask has {}; there {} {}",
                counted(mask.len(), "element"),
                is_or_are(tokens),
                counted(tokens, "token")
            )
        }
        let RoutedStates { states, routings } = self.layers().routed_states(ids, sequences)?;
        let loads =
            routings.iter().map(|(block, routing)| ExpertLoad { block: *block, choices: choices(routing, mask) });
        let mut report = RouterReport { loads: loads.collect(), ..RouterReport::default() };
        if let Some(BalanceLossOptions { loss, coefficient }) = self.layers().balance_loss() {
            let routings: Vec<Routing> = routings.into_iter().map(|(_, routing)| routing).collect();
            (report.balance, report.coefficient) = (Some(loss.loss(&routings, mask)?), coefficient);
        }
        Ok((states, report))
    }
}

/// Returns the number of rows that were routed to each expert, among those that count.
fn choices(routing: &Routing, mask: Option<&[bool]>) -> Vec<u64> {
    let mut choices = vec![0; routing.assignment().experts()];
    for (row, chosen) in routing.choices().chunks_exact(routing.experts_per_row()).enumerate() {
        if mask.is_none_or(|mask| mask[row]) {
            chosen.iter().for_each(|expert| choices[*expert as usize] += 1);
        }
    }
    choices
}
