//! A parameter that stage 3 has released cannot be computed with unnoticed. (tests/cuda.rs has the same for a GPU.)
#![allow(clippy::unwrap_used)]

mod common;

use candle_core::Device;

#[test]
fn an_absent_parameter_is_an_error_with_its_name() {
    common::absent_parameters_are_named(|| Ok(Device::Cpu));
}
