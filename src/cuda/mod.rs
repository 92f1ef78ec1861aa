//! This library's own work on a GPU: flat buffers in its memory, and the kernels that compute with them.
//!
//! ```text
//!   kernels/*.cu --(build.rs, nvcc)--> PTX inside of the library --(load.rs, once a device)--> functions --(launch.rs)--> stream
//! ```
//!
//! | file | what it is | kernels |
//! | --- | --- | --- |
//! | `load.rs`, `launch.rs` | kernels by name, their arguments and threads | |
//! | `array.rs` | memory of tensors: room for results, elements to read and to write | `numbers.cuh`: f32, bf16, f16 |
//! | `flat.rs` | views of elements | |
//! | `buffer.rs`, `sum.rs` | flat buffers; casts, sums and products | `flat.cu` |
//! | `copy_queue.rs` | copies between GPU and host beside other work | |
//! | `moment.rs` | when the GPU did something | |
//! | `pool.rs` | memory that the driver keeps for what comes next | |
//! | `squares.rs` | sums of squares of many arrays at once | `squares.cu` |
//! | `optimizer.rs` | the steps of optimizers, of many arrays at once | `optimizer.cu` |
//! | `activation.rs` | GELU, SiLU and what they gate | `activation.cu`, `activations.cuh` |
//! | `norm.rs` | layer and root-mean-square normalization | `norm.cu`, `rows.cuh`, `columns.cuh` |
//! | `linear.rs` | what follows a product | `linear.cu`, `activations.cuh` |
//! | `attention.rs`, `attention/` | attention in tiles, forward and backward | `attention*.cu`, `attention*.cuh` |
//! | `columns.rs` | sums over many rows | `columns.cu`, `columns.cuh` |
//! | `rotary.rs` | rotary positions | `rotary.cu` |
//! | `embedding.rs` | lookup of rows, sums of their gradients | `embedding.cu` |
//! | `dropout.rs` | dropout | `dropout.cu` |
//! | `cross_entropy.rs` | losses of rows of logits and their gradients | `cross_entropy.cu`, `rows.cuh` |
//! | `blocks.rs` | blocks of integers with a scale | `blocks.cu` |
//! | `nccl.rs`, `nccl/` | collectives between GPUs | `nccl_sum.cu` |
//!
//! `bandwidth.rs` measures them. They know slices; the layers that use them are in `nn::on_gpu`. Formulas are the host's, of [`crate::kernels`].
//!
//! Everything runs on the stream of Candle's device, in the order of the calls, so that a buffer is written before the next
//! operation of the model reads it. Collectives, and copies to and from the host beside the model's work, have streams of their own;
//! `nccl.rs` and `copy_queue.rs` keep their order with Candle's.
//! Numbers are computed in f32 and rounded once, as on the host: what works element by element gives the host's bits. A file of
//! kernels that sums says in which order.

pub(crate) mod activation;
mod array;
pub(crate) mod attention;
#[cfg(test)]
mod bandwidth;
mod blocks;
mod buffer;
pub(crate) mod columns;
mod copy_queue;
pub(crate) mod cross_entropy;
pub(crate) mod dropout;
pub(crate) mod embedding;
mod flat;
mod launch;
pub(crate) mod linear;
mod load;
mod moment;
pub(crate) mod nccl;
pub(crate) mod norm;
pub(crate) mod optimizer;
pub(crate) mod pool;
pub(crate) mod rotary;
mod squares;
mod sum;

pub(crate) use array::{elements, elements_mut, storage_of, written, zeros};
pub(crate) use buffer::DeviceFlat;
pub(crate) use copy_queue::{CopyQueue, Copying};
pub(crate) use flat::{DeviceMut, DeviceRef};
pub(crate) use load::Module;
pub(crate) use moment::Moment;
pub use optimizer::Elementwise;
pub(crate) use squares::sums_of_squares;
pub(crate) use sum::{add, copy};
