//! A ZeRO stage as a value: the state that is sharded and the state that every rank holds in full.

use std::fmt;

/// Whether every rank holds a kind of state in full or only its share of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Sharding {
    /// Every rank holds all of it.
    Replicated,
    /// Every rank holds only its share.
    Sharded,
}

/// The ZeRO stage, `zero_optimization.stage`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum ZeroStage {
    /// Nothing is sharded: plain data-parallel training.
    #[default]
    Zero,
    /// Optimizer states are sharded.
    One,
    /// Optimizer states and gradients are sharded.
    Two,
    /// Optimizer states, gradients and parameters are sharded.
    Three,
}

/// The placement of each part of the state at a stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Placement {
    /// Parameters in the model's dtype.
    pub params: Sharding,
    /// Gradients between their backward pass and the optimizer step.
    pub grads: Sharding,
    /// Master weights and optimizer states.
    pub optim: Sharding,
}

impl Sharding {
    /// Returns whether each rank holds only its share.
    pub fn is_sharded(self) -> bool {
        self == Self::Sharded
    }
}

impl ZeroStage {
    /// All stages, in order.
    pub const ALL: [Self; 4] = [Self::Zero, Self::One, Self::Two, Self::Three];

    /// Returns the stage with that number, if there is one.
    pub fn from_number(n: u64) -> Option<Self> {
        usize::try_from(n).ok().and_then(|n| Self::ALL.get(n).copied())
    }

    /// Returns the number in the configuration.
    pub fn number(self) -> u8 {
        self as u8
    }

    /// Returns the placement of a stage as defined in the ZeRO paper (arXiv 1910.02054, section 5).
    pub fn placement(self) -> Placement {
        use Sharding::{Replicated, Sharded};
        let (params, grads, optim) = match self {
            Self::Zero => (Replicated, Replicated, Replicated),
            Self::One => (Replicated, Replicated, Sharded),
            Self::Two => (Replicated, Sharded, Sharded),
            Self::Three => (Sharded, Sharded, Sharded),
        };
        Placement { params, grads, optim }
    }
}

impl fmt::Display for ZeroStage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.number())
    }
}
