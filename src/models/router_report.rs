//! The states of a model with routers, and a report of the routers' choices.

use crate::nn::{Routing, SyncBalanceLoss, add, scale_in_f32};
use candle_core::{Result, Tensor};

/// The states of a forward pass, with the choices of the routers.
#[derive(Debug, Clone)]
pub struct RoutedStates {
    /// The states after the last block and the last norm.
    pub states: Tensor,
    /// The number of each sparse block, and the choices of its router.
    pub routings: Vec<(usize, Routing)>,
}

/// The load-balancing loss of a model.
#[derive(Debug, Clone, Copy)]
pub struct BalanceLossOptions<'a> {
    /// The loss.
    pub loss: &'a SyncBalanceLoss,
    /// The factor by which the loss is multiplied in the training loss.
    pub coefficient: f64,
}

/// The loads of a block's experts: how often the block's router chose each of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpertLoad {
    /// The number of the block.
    pub block: usize,
    /// The number of tokens that were routed to each expert.
    pub choices: Vec<u64>,
}

/// A report of the routers' choices in a forward pass. It is empty for a model without mixtures.
#[derive(Debug, Clone, Default)]
pub struct RouterReport {
    /// The loads of the experts of each sparse block. Padding is left out.
    pub loads: Vec<ExpertLoad>,
    /// The load-balancing loss of all blocks, an f32 scalar, if the model is trained with it. In an engine, the
    /// value is this rank's part, and the mean over ranks is the loss ([`SyncBalanceLoss`]).
    pub balance: Option<Tensor>,
    pub(super) coefficient: f64,
}

impl RouterReport {
    /// Returns `loss` plus the load-balancing loss times its factor, if the model is trained with it.
    ///
    /// # Errors
    /// A loss that is not an f32 scalar.
    pub fn add_to(&self, loss: &Tensor) -> Result<Tensor> {
        match &self.balance {
            Some(balance) if self.coefficient != 0.0 => add(loss, &scale_in_f32(balance, self.coefficient)?),
            _ => Ok(loss.clone()),
        }
    }
}
