//! What is kept of a parameter, by which sub-groups are divided.

use super::Role;

/// What the parameters of a sub-group have in common: which half of the optimizer trains them, if any does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Class {
    /// Parameters with gradients, master weights and the moments of their half of the optimizer.
    Trained(Role),
    /// Weights and nothing else.
    Frozen,
}

impl Class {
    /// Number of classes.
    pub const COUNT: usize = 3;

    /// Its number, from 0.
    pub fn index(self) -> usize {
        match self {
            Self::Trained(role) => role as usize,
            Self::Frozen => 2,
        }
    }

    /// The half of the optimizer that trains its parameters.
    pub fn role(self) -> Option<Role> {
        match self {
            Self::Trained(role) => Some(role),
            Self::Frozen => None,
        }
    }

    pub fn is_trained(self) -> bool {
        self.role().is_some()
    }
}
