//! A stage is a value: what is sharded and what every rank holds whole.

use std::fmt;

/// Whether every rank holds the whole of something or only its share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sharding {
    /// Every rank holds the whole.
    Replicated,
    /// Every rank holds its share.
    Sharded,
}

/// ZeRO stage, `zero_optimization.stage`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum ZeroStage {
    /// Nothing is sharded: plain data parallel training.
    #[default]
    Zero,
    /// Optimizer states are sharded.
    One,
    /// Optimizer states and gradients are sharded.
    Two,
    /// Optimizer states, gradients and parameters are sharded.
    Three,
}

/// The parts of the state that a stage shards.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Placement {
    /// Parameters in the model's dtype.
    pub params: Sharding,
    /// Gradients between their backward and the optimizer step.
    pub grads: Sharding,
    /// Master weights and moments.
    pub optim: Sharding,
}

impl Sharding {
    /// Whether each rank holds only its share.
    pub fn is_sharded(self) -> bool {
        self == Self::Sharded
    }
}

impl ZeroStage {
    /// All stages, in order.
    pub const ALL: [Self; 4] = [Self::Zero, Self::One, Self::Two, Self::Three];

    /// The stage of that number, if there is one.
    pub fn from_number(n: u64) -> Option<Self> {
        usize::try_from(n).ok().and_then(|n| Self::ALL.get(n).copied())
    }

    /// The number in the configuration.
    pub fn number(self) -> u8 {
        self as u8
    }

    /// The one table of stages (ZeRO, arXiv 1910.02054, section 5).
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
