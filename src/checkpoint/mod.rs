//! Checkpoints: saved at any stage and with any number of ranks, loaded at any other stage and with any other number.
//!
//! ```text
//!   DIR/latest                            the tag of the newest checkpoint
//!   DIR/TAG/manifest.json                 a description of the content; checksums of headers, buffers and itself
//!   DIR/TAG/rank_00000_of_00002.safetensors
//!   DIR/TAG/rank_00001_of_00002.safetensors
//!   DIR/TAG/buffers.safetensors           if the model has buffers, in their own types; from rank 0
//!
//!   save   every rank writes its shards, syncs -> rank 0 writes the manifest, renames the folder, writes `latest`
//!   load   every rank checks the parts that it needs -> all agree that they are intact -> every rank reads them
//! ```
//!
//! The files contain f32: parameters at the full precision of the master weights, and the optimizer states. The
//! parameters of a 16-bit model are obtained by rounding these f32 values, as after every step, so a run that resumes
//! is bit-identical to one that never stopped. The entry points are [`crate::Engine::save_checkpoint`] and
//! [`crate::Engine::load_checkpoint`].

mod buffers;
mod consolidate;
pub mod deepspeed;
mod disk_writer;
pub(crate) mod error;
mod examine;
mod fetch_from_hosts;
mod folder;
mod hugging_face_config;
mod import_deepspeed;
mod lineage;
mod load;
mod locate;
mod manifest;
mod rank_agreement;
mod rank_file;
mod rank_file_layout;
mod ranks_by_folder;
mod safetensors_writer;
mod save;
pub(crate) mod store;
mod training_progress;

#[doc(hidden)]
pub use buffers::SavedBuffer;
#[doc(hidden)]
pub use consolidate::absent_or_empty;
pub use consolidate::{ConsolidateSettings, Consolidated, ConsolidatedDtype, consolidate};
#[doc(hidden)]
pub use examine::{
    CheckpointExamination, CheckpointListing, examine, has_checkpoints, list_checkpoints, newest_checkpoint,
    newest_island_checkpoint, split_tag,
};
pub use import_deepspeed::import;
#[doc(hidden)]
pub use import_deepspeed::new_checkpoint_path;
pub(crate) use lineage::{LastCheckpoint, LockedFolders};
pub use load::{Checkpoint, LoadOptions, LoadedCheckpoint};
pub(crate) use load::{load, peek, set_counts};
pub use manifest::{BufferFile, FileEntry, IslandProgress, Manifest, Parameter};
pub(crate) use rank_agreement::remote_failure;
#[doc(hidden)]
pub use safetensors_writer::{TensorEntry, create, write_json, write_model_files};
pub use save::SaveOptions;
#[doc(hidden)]
pub use save::keep_newest;
pub(crate) use save::{IslandOfJob, SaveJob, SaveRequest, check_dir, manifest};
pub(crate) use training_progress::TrainingProgress;
