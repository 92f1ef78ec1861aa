//! The fuzz targets: functions that read bytes from outside through the entry points that users call.
//!
//! A target returns whether its input was accepted. An error is a correct result for any input; a panic, an abort, a
//! hang or a large amount of memory is a bug. Some targets also compare two ways to get the same result.

mod error;
#[allow(dead_code, reason = "the targets call only some functions of these parts of zerorun")]
mod launch;
pub mod mutator;
pub mod planted;
pub mod random;
pub mod scratch;
pub mod targets;
