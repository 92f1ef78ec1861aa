//! This library's own work on a GPU: flat buffers in its memory, and the kernels that compute with them.
//!
//! ```text
//!   kernels/*.cu --(build.rs, nvcc)--> PTX inside of the library --(load.rs, once a device)--> functions --(launch)--> stream
//! ```
//!
//! Everything runs on the stream of Candle's device, in the order of the calls, so that a buffer is written before the next
//! operation of the model reads it. Numbers are computed in f32 and rounded once, as on the host: what works element by
//! element gives the host's bits. A file of kernels that sums says in which order.

pub(crate) mod activation;
mod array;
pub(crate) mod attention;
mod flat;
mod launch;
mod load;
mod sum;

pub(crate) use array::{elements, elements_mut, written, zeros};
pub(crate) use flat::{DeviceFlat, DeviceMut, DeviceRef};
pub(crate) use load::Module;
pub(crate) use sum::{add, copy};
