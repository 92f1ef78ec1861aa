//! Fine-tuning: from data files to packed samples.
//!
//! ```text
//! files -> records -> conversation -> rendered text with spans -> ids with targets -> cache -> packed rows
//! ```
//!
//! | step | type |
//! |---|---|
//! | tokenizer.json and the special tokens of a model's folder, or those of its GGUF file | [`Tokenizer`] |
//! | the model's chat template, and where the assistant speaks in its text | [`Template`], [`Conversation`] |
//! | ids, and which of them are to be predicted | [`Sample`] |
//! | files as samples, tokenized once and mapped | [`Source`], [`Dataset`] |
//! | rows of a batch, packed or padded | [`Batches`] |
//! | low-rank adapters in PEFT's files | [`Adapter`] |
//! | preference optimization | [`dpo_loss`] |
//! | a model's folder or GGUF file: its description, and its weights by name | [`Base`] |
//! | the encoder that learns to classify, its rows, and how well it tells classes apart | [`EncoderBase`], [`LabelledTexts`], [`Scores`] |
//! | initial values of adapters beside a base's weights | [`AdaptedValues`] |
//! | the stage, the offload and the micro batch that fit into memory | [`Demand`], [`Choice`] |
//! | the weights that QLoRA holds in four bits | [`is_quantized`] |
//! | answers of a model, token by token | [`Generator`] |
//! | the model that leaves: merged, as a Hugging Face folder or GGUF | [`Merged`] |
//! | a whole run: what it is told, what it needs, its steps | [`Options`], [`Prepared`], [`FineTune`] |

mod adapt;
mod adapted_values;
mod adapter;
mod base;
mod cache;
mod card;
mod choose;
mod classifier;
mod classify;
mod columns;
mod conversation;
mod dataset;
mod dpo;
mod encoder;
pub(crate) mod error;
mod fields;
mod fitted;
mod generate;
mod gguf;
mod gguf_config;
mod gguf_file;
mod gguf_model;
mod gguf_tokenizer;
mod gguf_vocabulary;
mod identity;
mod merge;
mod messages;
mod network;
mod objective;
mod options;
mod out;
mod pace;
mod pack;
mod parquet;
mod peft_config;
mod places;
mod plan;
mod prepare;
mod python;
mod python_methods;
mod quantized;
mod rate;
mod raw;
mod record;
mod report;
mod result;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod same_tokens;
mod sample;
mod scores;
mod session;
mod settings;
mod show;
mod source;
mod spans;
mod strftime;
mod table;
mod template;
mod templates;
mod tokenizer;
mod tokenizer_files;
mod words;
mod written;

pub use adapted_values::AdaptedValues;
pub use adapter::{Adapter, AdapterTensor};
pub use base::Base;
pub use cache::{SampleRef, default_cache};
pub use choose::{Choice, Demand, memory_of_rank};
pub use classifier::{Classified, Classifier};
pub use classify::LabelledTexts;
pub use columns::Columns;
pub use conversation::Conversation;
pub use dataset::{DataOptions, DataProgress, Dataset, Overlong, Task, labels_of};
pub use dpo::{Dpo, Rewards, dpo_loss};
pub use encoder::EncoderBase;
pub use generate::{Generated, Generator, Sampling};
pub use gguf_model::GgufFormat;
pub use merge::Merged;
pub use network::Network;
pub use objective::Validation;
pub use options::{Held, Length, Method, Objective, Options, Precision, RateShape, Saving, Warmup};
#[cfg(feature = "hub")]
pub(crate) use out::BESIDE;
pub use pack::{Batches, NO_TARGET, Packing, Rows};
pub use prepare::Prepared;
pub use quantized::is_quantized;
pub use record::Form;
pub use report::{Lines, Report};
pub use sample::Sample;
pub use scores::{ClassScore, Scores};
pub use session::{Ended, FineTune, StepReport};
pub use show::show;
pub use source::Source;
pub use spans::Rendered;
pub use template::Template;
#[cfg(feature = "hub")]
pub(crate) use templates::ADDITIONAL;
pub use tokenizer::{SpecialTokens, TextStream, Tokenizer};
pub use words::Encoded;
