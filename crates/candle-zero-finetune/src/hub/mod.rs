//! Fetches models by name from the Hugging Face Hub, into the cache that all Hugging Face programs share.
//!
//! ```text
//! org/name@revision -> listing (commit, names) -> wanted files -> each: location, bytes -> snapshot folder
//! ```
//!
//! hf-hub provides the addresses, the listing and the folders of the cache. Its downloads neither check lengths nor
//! stop when no more bytes arrive, so this module fetches the files itself: a file gets its final name only when it is
//! complete, and an interrupted download resumes where it stopped.
//!
//! `HF_HOME`, `HF_HUB_CACHE`, `HF_TOKEN`, `HF_TOKEN_PATH`, `HF_ENDPOINT`, `HF_HUB_OFFLINE` and `SSL_CERT_FILE` have the
//! same meaning as in huggingface_hub. Without the feature `hub`, this module only distinguishes names from paths.

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
