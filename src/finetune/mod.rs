//! Fine-tuning of published models.
//!
//! ```text
//! conversation -> rendered text with spans -> ids with targets
//! ```
//!
//! | step | type |
//! |---|---|
//! | tokenizer.json and the special tokens of a model's folder | [`Tokenizer`] |
//! | the model's chat template, and where the assistant speaks in its text | [`Template`], [`Conversation`] |
//! | ids, and which of them are to be predicted | [`Sample`] |
//! | low-rank adapters in PEFT's files | [`Adapter`] |
//! | preference optimization | [`dpo_loss`] |
//! | a model's folder or GGUF file: its description, and its weights by name | [`Base`] |
//! | initial values of adapters beside a base's weights | [`AdaptedValues`] |
//! | the model that leaves: merged, as a Hugging Face folder or GGUF | [`Merged`] |

mod adapted_values;
mod adapter;
mod base;
mod conversation;
mod dpo;
pub(crate) mod error;
mod gguf;
mod gguf_config;
mod gguf_file;
mod gguf_model;
mod gguf_vocabulary;
mod merge;
mod out;
mod peft_config;
mod python;
mod sample;
mod spans;
mod strftime;
mod template;
mod tokenizer;

pub use adapted_values::AdaptedValues;
pub use adapter::{Adapter, AdapterTensor};
pub use base::Base;
pub use conversation::Conversation;
pub use dpo::{Dpo, dpo_loss};
pub use gguf_model::GgufFormat;
pub use merge::Merged;
pub use sample::Sample;
pub use spans::Rendered;
pub use template::Template;
pub use tokenizer::{Encoded, SpecialTokens, TextStream, Tokenizer};
