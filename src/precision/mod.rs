//! Number formats: flat buffers of one dtype, casts, blocks of small integers, loss scaling, overflow, norms.

mod blocks;
pub(crate) mod cast;
mod elements;
mod flat;
mod norm;
mod pages;
mod scaler;

pub use blocks::{BLOCK, Ints};
pub(crate) use elements::Elements;
pub use flat::{Flat, FlatMut, FlatRef};
pub(crate) use norm::{LANES, add_squares};
pub use norm::{gradient_multiplier, has_non_finite, sum_of_squares};
pub(crate) use pages::prefer_huge;
pub(crate) use scaler::LossScaler;
pub use scaler::ScalerState;
