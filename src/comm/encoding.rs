//! How elements are encoded on the way between ranks.

use crate::precision::{BLOCK, Ints};

/// How elements travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Wire {
    /// As they are in memory.
    #[default]
    Exact,
    /// As integers with a scale per [`BLOCK`] elements: ZeRO++.
    Blocks(Ints),
}

impl Wire {
    /// Elements that are coded together. What begins at a multiple of it in a rank's chunk has blocks of its own.
    pub fn alignment(self) -> usize {
        match self {
            Self::Exact => 1,
            Self::Blocks(_) => BLOCK,
        }
    }
}
