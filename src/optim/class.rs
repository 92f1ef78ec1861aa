//! What is kept of a parameter, by which sub-groups are divided.

use super::Role;
use crate::precision::{Nf4Scales, Packing};

/// What the parameters of a sub-group have in common: which half of the optimizer trains them, if any does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Class {
    /// Parameters with gradients, master weights and the moments of their half of the optimizer.
    Trained(Role),
    /// Weights and nothing else.
    Frozen,
    /// Weights that are packed at rest and on the wire, and nothing else.
    Packed(Packing),
}

impl Class {
    /// Number of classes.
    pub const COUNT: usize = 6;

    /// That of a parameter which is trained by the half `role`, or frozen and perhaps packed.
    pub fn of(role: Role, is_trained: bool, packing: Option<Packing>) -> Self {
        match packing {
            _ if is_trained => Self::Trained(role),
            Some(packing) => Self::Packed(packing),
            None => Self::Frozen,
        }
    }

    /// Its number, from 0.
    pub fn index(self) -> usize {
        match self {
            Self::Trained(role) => role as usize,
            Self::Frozen => 2,
            Self::Packed(Packing::Int8) => 3,
            Self::Packed(Packing::Nf4(Nf4Scales::Bf16)) => 4,
            Self::Packed(Packing::Nf4(Nf4Scales::DoubleQuantized)) => 5,
        }
    }

    /// The half of the optimizer that trains its parameters.
    pub fn role(self) -> Option<Role> {
        match self {
            Self::Trained(role) => Some(role),
            Self::Frozen | Self::Packed(_) => None,
        }
    }

    /// How its weights are packed.
    pub fn packing(self) -> Option<Packing> {
        match self {
            Self::Packed(packing) => Some(packing),
            Self::Trained(_) | Self::Frozen => None,
        }
    }

    pub fn is_trained(self) -> bool {
        self.role().is_some()
    }
}
