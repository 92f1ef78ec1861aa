//! Number formats: flat buffers of one dtype, casts, loss scaling, overflow, norms.

pub(crate) mod cast;
mod flat;
mod norm;
mod pages;
pub(crate) mod par;
mod scaler;
pub(crate) mod simd;

pub use flat::{Flat, FlatMut, FlatRef};
pub use norm::{clip_factor, gradient_multiplier, has_non_finite, sum_of_squares};
pub use scaler::{DynamicScale, LossScaler};
