//! `flops_profiler`: operations and time of one optimizer step, unit by unit.
//!
//! This counts the multiply-adds of the matrix products and of the causal attention of [`nn`](crate::nn)'s layers on
//! the CPU, as they run: what a unit recomputes counts again, and of attention only what the causal mask leaves. Not
//! counted are elementwise operations, norms, and the operations that a model takes from Candle itself.

mod measured_peak;
mod report;
pub(crate) mod spans;
mod step_timings;

pub(crate) use measured_peak::peak_flops;
pub use report::{FlopsProfile, ModuleProfile};
pub use step_timings::StepTimings;
