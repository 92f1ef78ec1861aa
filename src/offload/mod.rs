//! Offload to files: model state that is on disk and passes through memory piece by piece.
//!
//! ```text
//!   optimizer step             window k+1        window k          window k-1
//!     master weights, states     read   ------>  update  ------->  write
//!     gradients                  read   ------>  use               (written in the backward pass)
//!     parameter shards                           compute ------->  write
//!
//!   forward, backward (stage 3)   unit i+1: read its shards | unit i: all-gather, compute, release
//!   backward                      a reduced gradient shard -> its file, while the pass continues
//! ```
//!
//! Every kind of state has a file on each rank (or one for each class of parameters): an arena (`file_arena.rs`), in
//! which sub-groups are stored one after the other. A step passes once through each file, from beginning to end. Only
//! the windows of the optimizer step, the units in use, and pending transfers are in memory.
//!
//! | file | contents |
//! | --- | --- |
//! | `offload_folder.rs` | the folder that `nvme_path` names: checked, locked, measured |
//! | `file_arena.rs` | one file: its space is reserved first, and it is then read and written in blocks |
//! | `disk_access.rs` | access without the page cache, through it, or through a mapping |
//! | `available_memory.rs` | the available memory, within the limits of control groups |
//! | `file_io.rs` | threads that carry out requests; transfers that own their buffers |
//! | `transfer_buffer.rs` | memory that a transfer owns |
//! | `state_files.rs` | the file operations of the step; a rehearsal implements them by counting |
//! | `aligned_buffer.rs` | memory that files are read into without a copy |
//! | `window_pipeline.rs` | windows of the optimizer step: read ahead, updated, written behind |
//! | `spill_file.rs` | inputs that recomputing units keep in a file until the backward pass |
//! | `offload_store.rs` | the files of one rank, and the settings for a sweep through them |
//! | `offload_report.rs` | bytes and seconds of file access |
//! | `disk_bench.rs` | measures the speed of these operations in a given folder |

mod aligned_buffer;
#[doc(hidden)]
pub mod available_memory;
mod disk_access;
#[doc(hidden)]
pub mod disk_bench;
pub(crate) mod error;
mod file_arena;
mod file_io;
mod offload_folder;
mod offload_report;
mod offload_store;
mod spill_file;
mod state_files;
mod transfer_buffer;
mod window_pipeline;

pub use disk_access::DiskAccess;
pub use offload_report::OffloadReport;

pub(crate) use aligned_buffer::{ALIGN, AlignedBuffer};
#[doc(hidden)]
pub use available_memory::{available_memory, group_limit};
pub(crate) use file_arena::FileExtent;
#[doc(hidden)]
pub use file_arena::open_direct;
pub(crate) use file_io::{FileIo, FileTransfer, MAX_UNWRITTEN_BYTES, block_size, threads};
#[doc(hidden)]
pub use offload_folder::{free as free_space, is_memory};
pub(crate) use offload_store::{OffloadStore, StateFileKey};
pub(crate) use spill_file::SpilledTensor;
pub(crate) use state_files::StateFiles;
pub(crate) use window_pipeline::{
    PlannedWindow, STEP, StagedState, StateStream, StateWindow, WindowPipeline, WindowSettings,
};
