//! `flops_profiler`: operations and time of one optimizer step, unit by unit.
//!
//! The profiler counts the multiply-adds of the matrix products, convolutions and attention of [`nn`](crate::nn)'s
//! layers on the CPU, as they run. Recomputed operations are counted again, and for attention, only the pairs that the
//! mask allows are counted. Elementwise operations, norms, and operations that a model takes directly from Candle are
//! not counted.

mod peak_flops;
mod report;
pub(crate) mod spans;
mod step_timings;

pub(crate) use peak_flops::peak_flops;
pub use report::{FlopsProfile, ModuleProfile};
pub use step_timings::StepTimings;
