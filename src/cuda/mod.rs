//! This library's code for GPUs: flat buffers in their memory, and the kernels that compute with them.
//!
//! ```text
//!   kernels/*.cu --(build.rs, nvcc)--> PTX in the library --(kernel_module.rs, once per device)--> functions
//!   functions --(kernel_launch.rs)--> stream
//! ```
//!
//! | file | contents | kernels |
//! | --- | --- | --- |
//! | `kernel_module.rs`, `kernel_launch.rs` | kernels by name, their arguments and threads | `vectorized_access.cuh` |
//! | `tensor_storage.rs` | tensor memory: allocation of results, access to elements | `element_types.cuh` |
//! | `flat_view.rs` | views of elements | |
//! | `device_flat.rs`, `array_ops.rs` | flat buffers; casts, sums and products | `array_ops.cu` |
//! | `copy_queue.rs` | concurrent copies between GPU and host | |
//! | `event.rs` | times of GPU events | |
//! | `memory_pool.rs` | memory that the driver keeps for later allocations | |
//! | `square_sums.rs` | sums of squares of many arrays in one launch | `square_sums.cu` |
//! | `optimizer.rs` | optimizer steps of many arrays per launch | `optimizer.cu` |
//! | `activation.rs` | GELU, SiLU and their gated forms | `activation.cu`, `activations.cuh` |
//! | `norm.rs` | layer and root-mean-square normalization | `norm.cu`, `row_reductions.cuh`, `column_sums.cuh` |
//! | `linear_epilogue.rs` | the epilogue of a linear layer's product | `linear_epilogue.cu`, `activations.cuh` |
//! | `attention.rs`, `attention/` | attention in tiles, forward and backward | `attention*.cu`, `attention*.cuh` |
//! | `column_sums.rs` | sums over many rows | `column_sums.cu`, `column_sums.cuh` |
//! | `rotary.rs` | rotary positions | `rotary.cu` |
//! | `embedding.rs` | lookup of rows, sums of their gradients | `embedding.cu` |
//! | `dropout.rs` | dropout | `dropout.cu` |
//! | `cross_entropy.rs` | losses of rows of logits and their gradients | `cross_entropy.cu`, `row_reductions.cuh` |
//! | `block_quantization.rs` | blocks of integers with a scale | `block_quantization.cu` |
//! | `nccl.rs`, `nccl/` | collectives between GPUs | `nccl_sum.cu` |
//!
//! `kernel_bandwidth.rs` measures the kernels. This module works on slices; the layers that use it are in `nn::on_gpu`.
//! The formulas are those of the host, in [`crate::kernels`].
//!
//! All work runs on the stream of Candle's device, in the order of the calls, so a buffer is written before the
//! next operation of the model reads it. Collectives, and copies to and from the host that are concurrent with the
//! model's work, have separate streams. `nccl.rs` and `copy_queue.rs` order these with Candle's stream. Numbers are
//! computed in f32 and rounded once, as on the host: elementwise operations produce the host's bits. Each file with
//! summing kernels documents the order of its sums.

pub(crate) mod activation;
mod array_ops;
pub(crate) mod attention;
mod block_quantization;
pub(crate) mod column_sums;
mod copy_queue;
pub(crate) mod cross_entropy;
mod device_flat;
pub(crate) mod dropout;
pub(crate) mod embedding;
mod event;
mod flat_view;
#[cfg(test)]
mod kernel_bandwidth;
mod kernel_launch;
mod kernel_module;
pub(crate) mod linear_epilogue;
pub(crate) mod memory_pool;
pub(crate) mod nccl;
pub(crate) mod norm;
pub(crate) mod optimizer;
pub(crate) mod rotary;
mod square_sums;
mod tensor_storage;

pub(crate) use array_ops::{add, copy};
pub(crate) use copy_queue::{CopyQueue, PendingCopy};
pub(crate) use device_flat::DeviceFlat;
pub(crate) use event::TimedEvent;
pub(crate) use flat_view::{DeviceFlatMut, DeviceFlatRef};
pub(crate) use kernel_module::KernelModule;
pub use optimizer::ElementwiseUpdate;
pub(crate) use square_sums::sums_of_squares;
pub(crate) use tensor_storage::{alloc_and_write, elements, elements_mut, storage_of, zeros};
