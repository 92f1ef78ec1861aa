//! A parameter that stage 3 has released cannot be used in a computation unnoticed. (cuda.rs has the same test for a
//! GPU.)

use crate::support::tiny::absent_parameters_are_named;
use candle_core::Device;

#[test]
fn an_absent_parameter_is_an_error_with_its_name() {
    absent_parameters_are_named(|| Ok(Device::Cpu));
}
