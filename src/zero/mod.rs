//! The ZeRO mechanism.

pub mod unit;

pub use unit::{Unit, unit};
