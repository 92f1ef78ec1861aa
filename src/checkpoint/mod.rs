//! Checkpoints: saved at any stage and number of ranks, loaded at any other.
//!
//! ```text
//!   DIR/latest                            the tag of the newest checkpoint
//!   DIR/TAG/manifest.json                 what it holds, with a checksum of every file and of itself
//!   DIR/TAG/rank_00000_of_00002.safetensors
//!   DIR/TAG/rank_00001_of_00002.safetensors
//!   DIR/TAG/buffers.safetensors           of a model with buffers, in their own types; rank 0 writes it
//!
//!   save   every rank writes its shards, syncs -> rank 0 writes the manifest, renames the folder, writes `latest`
//!   load   every rank checks what it needs -> all agree that it is whole -> every rank reads what it needs
//! ```
//!
//! The files hold f32: parameters with all digits of the master weights, and the optimizer's states. A 16-bit model
//! gets its parameters by rounding them, as after every step, so that a run which goes on has the bits of one that
//! never stopped. [`crate::Engine::save_checkpoint`] and [`crate::Engine::load_checkpoint`] are the way in.

mod agreement;
mod buffers;
mod consolidate;
pub mod deepspeed;
mod disk;
pub(crate) mod error;
mod examine;
mod fetch;
mod folder;
mod hosts;
mod hugging_face;
mod import;
mod layout;
mod line;
mod load;
mod locate;
mod manifest;
mod model_files;
mod progress;
mod rank_file;
mod save;
pub(crate) mod store;

pub(crate) use agreement::failed_elsewhere;
pub(crate) use buffers::SavedBuffer;
pub(crate) use consolidate::absent_or_empty;
pub use consolidate::{ConsolidateSettings, Consolidated, ConsolidatedDtype, consolidate};
pub(crate) use examine::{Examination, Listing, examine, find, has_any, newest, place};
pub use import::import;
pub(crate) use import::new_place;
pub(crate) use line::{HeldFolders, Place};
pub(crate) use load::load;
pub use load::{Checkpoint, LoadOptions, Loaded};
pub use manifest::{BufferFile, FileEntry, Manifest, Parameter};
pub(crate) use model_files::{Entry, create, write_json, write_model_files};
pub(crate) use progress::Progress;
pub use save::SaveOptions;
pub(crate) use save::{SaveJob, SaveRequest, check_dir, keep_newest, manifest};
