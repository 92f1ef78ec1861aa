//! Number formats: flat buffers of one dtype, casts, blocks of small integers, packed weights, eight-bit states, loss
//! scaling, overflow, norms.

mod blocks;
pub(crate) mod cast;
pub(crate) mod dynamic;
mod elements;
mod flat;
mod nf4;
mod norm;
mod packing;
mod pages;
mod scaler;
pub(crate) mod stochastic;

pub use blocks::{BLOCK, Ints};
pub(crate) use elements::Elements;
pub use flat::{Flat, FlatMut, FlatRef};
pub use nf4::Nf4Scales;
#[cfg(feature = "cuda")]
pub(crate) use norm::CHUNK as SQUARES_CHUNK;
pub(crate) use norm::{LANES, add_squares};
pub use norm::{gradient_multiplier, has_non_finite, sum_of_squares};
pub use packing::Packing;
pub(crate) use pages::prefer_huge;
pub(crate) use scaler::LossScaler;
pub use scaler::ScalerState;
