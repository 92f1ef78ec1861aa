//! Fine-tuning: from a model's folder and data to an adapter.
//!
//! | step | type |
//! |---|---|
//! | low-rank adapters in PEFT's files | [`Adapter`] |
//! | preference optimization | [`dpo_loss`] |

mod adapter;
mod dpo;
pub(crate) mod error;
mod peft_config;

pub use adapter::{Adapter, AdapterTensor};
pub use dpo::{Dpo, dpo_loss};
