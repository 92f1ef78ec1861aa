//! Number formats: flat buffers of one dtype, casts, loss scaling, overflow, norms.

mod cast;
mod flat;

pub use flat::{Flat, FlatMut, FlatRef};
