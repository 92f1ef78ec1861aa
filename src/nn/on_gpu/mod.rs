//! The layers on a GPU, with kernels of this library ([`crate::cuda`]): a forward pass and a hand-written backward
//! pass, as on the CPU.
//!
//! Each function returns `None` if its kernels do not support the operands (f64, another device). The layer is then
//! composed of Candle's operations.

pub(super) mod activation;
pub(super) mod add;
pub(super) mod attention;
pub(super) mod cross_entropy;
pub(super) mod dropout;
pub(super) mod embedding;
pub(super) mod linear;
pub(super) mod norm;
pub(super) mod rotary;

use crate::tensor::device_elements::{gpu_of, is_supported};
use candle_core::{CudaDevice, Tensor};

/// Returns the GPU of the first of these tensors, if kernels support all of them.
fn supported_device(tensors: &[&Tensor]) -> Option<CudaDevice> {
    let device = gpu_of(tensors.first()?)?;
    let is_there = |tensor: &&Tensor| gpu_of(tensor).is_some_and(|gpu| gpu.id() == device.id());
    tensors.iter().all(|tensor| is_supported(tensor.dtype()) && is_there(tensor)).then(|| device.clone())
}
