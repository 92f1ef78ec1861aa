//! Number formats: flat buffers of one dtype, casts, stochastic rounding, blocks of small integers, packed weights,
//! 8-bit states, loss scaling, overflow checks and gradient norms.

mod block_quantization;
pub(crate) mod cast;
pub(crate) mod dynamic_map;
mod element_buffer;
mod flat;
mod grad_norm;
mod huge_pages;
mod loss_scaler;
mod nf4;
pub(crate) mod stochastic_rounding;
mod weight_packing;

pub use block_quantization::{BLOCK, IntFormat};
pub(crate) use element_buffer::ElementBuffer;
pub use flat::{Flat, FlatMut, FlatRef};
#[cfg(feature = "cuda")]
pub(crate) use grad_norm::CHUNK as SQUARES_CHUNK;
pub(crate) use grad_norm::{LANES, add_squares};
pub use grad_norm::{gradient_multiplier, has_non_finite, sum_of_squares};
pub(crate) use huge_pages::prefer_huge;
pub(crate) use loss_scaler::LossScaler;
pub use loss_scaler::ScalerState;
pub use nf4::Nf4Scales;
pub use weight_packing::WeightPacking;
