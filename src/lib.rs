//! ZeRO (Zero Redundancy Optimizer) for Candle.
#![deny(missing_docs)]

pub mod cli;
pub mod comm;
pub mod config;
pub mod data;
mod device;
pub mod engine;
pub mod error;
pub mod launch;
pub mod layout;
pub mod memory;
pub mod models;
pub mod monitor;
pub mod nn;
pub mod optim;
pub mod param;
pub mod precision;
pub mod zero;

pub use config::Config;
pub use engine::{Engine, EngineBuilder, StepTimings};
pub use error::{Error, Result};
