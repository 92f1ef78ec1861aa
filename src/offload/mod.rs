//! Offload to files: model state that lies on disk and passes through memory piece by piece.
//!
//! ```text
//!   optimizer step            window k+1        window k          window k-1
//!     master weights, moments   read   ------>  update  ------->  write
//!     gradients                 read   ------>  used              (written in backward)
//!     parameter shards                          made    ------->  write
//!
//!   forward, backward (stage 3)   unit i+1: read its shards | unit i: all-gather, compute, release
//!   backward                      a reduced gradient share -> its file, while backward goes on
//! ```
//!
//! Every kind of state has one file per rank, an arena (`arena.rs`), in which sub-groups lie one after the other:
//! a step passes once through each file, from its beginning to its end. In memory are only the windows of that
//! pipeline, the units in use, and what is on its way.
//!
//! | file | what |
//! | --- | --- |
//! | `folder.rs` | the folder of `nvme_path`: checked, locked, measured |
//! | `arena.rs` | one file: space reserved first, then read and written in blocks |
//! | `access.rs` | around the page cache, through it, or through a mapping |
//! | `available.rs` | memory that is left, within the limits of control groups |
//! | `io.rs` | threads that carry out requests; transfers that own their buffers |
//! | `buffer.rs` | memory that a transfer owns |
//! | `files.rs` | what the step asks of files; a rehearsal answers by counting |
//! | `aligned.rs` | memory that files are read into without a copy |
//! | `pipeline.rs` | windows of the optimizer step: read ahead, updated, written behind |
//! | `spill.rs` | what recomputing units keep, in a file until backward |
//! | `report.rs` | bytes and seconds |
//! | `bench.rs` | how fast all that is on a given folder |

mod access;
mod aligned;
mod arena;
mod available;
#[cfg(feature = "cli")]
pub(crate) mod bench;
mod buffer;
pub(crate) mod error;
mod files;
mod folder;
mod io;
mod pipeline;
mod report;
mod spill;
mod store;

pub use access::DiskAccess;
pub use report::OffloadReport;

pub(crate) use aligned::{ALIGN, Aligned};
pub(crate) use arena::{Extent, open_direct};
pub(crate) use available::available_memory;
#[cfg(feature = "cli")]
pub(crate) use available::group_limit;
pub(crate) use files::Files;
pub(crate) use folder::{free as free_space, is_memory};
pub(crate) use io::{Io, Transfer, UNWRITTEN, block_size, threads};
pub(crate) use pipeline::{Pipeline, Plan, STEP, Staged, Stream, Window, Windows};
pub(crate) use spill::SpilledTensor;
pub(crate) use store::{Content, Offload};
