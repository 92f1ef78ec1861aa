//! Models by their names at the Hugging Face Hub, fetched into the cache that all of Hugging Face's programs share.
//!
//! ```text
//! org/name@revision -> listing: commit, names -> files that are wanted -> each: where it is, its bytes -> snapshot folder
//! ```
//!
//! hf-hub has the addresses, the listing and the folders of the cache. Its downloads neither check lengths nor end where
//! nothing comes any more, so files are fetched here: a file appears under its name when all of it has come, and what was
//! interrupted goes on where it ended.
//!
//! `HF_HOME`, `HF_HUB_CACHE`, `HF_TOKEN`, `HF_TOKEN_PATH`, `HF_ENDPOINT`, `HF_HUB_OFFLINE` and `SSL_CERT_FILE` mean what they
//! mean to huggingface_hub. Without feature `hub` names are only told from paths.

#[cfg(feature = "hub")]
mod client;
#[cfg(feature = "hub")]
mod download;
#[cfg(feature = "hub")]
pub(crate) mod error;
#[cfg(feature = "hub")]
mod fetch;
mod repository;
#[cfg(feature = "hub")]
mod settings;
#[cfg(feature = "hub")]
mod snapshot;

#[cfg(feature = "hub")]
pub use fetch::FetchProgress;
pub use repository::{FileSelection, Repository};
