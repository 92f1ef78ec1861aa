//! Fine-tuning, from data files to a trained model.
//!
//! ```text
//! files -> records -> conversation -> rendered text with spans -> ids with targets -> cache -> packed rows
//! ```
//!
//! | step | type |
//! |---|---|
//! | tokenizer.json and the special tokens in a model's folder, or those in its GGUF file | [`Tokenizer`] |
//! | the model's chat template, and the assistant's ranges in the rendered text | [`Template`], [`Conversation`] |
//! | token ids, and which of them are to be predicted | [`Sample`] |
//! | data files as samples, tokenized once and mapped | [`Source`], [`Dataset`] |
//! | rows of a batch, packed or padded | [`Batches`] |
//! | low-rank adapters in PEFT's files | [`Adapter`] |
//! | preference optimization | [`dpo_loss`] |
//! | a model's folder or GGUF file: its description, and its weights by name | [`BaseModel`] |
//! | a classifier: its base, its rows, its scores | [`ClassifierBase`], [`ClassificationBatch`], [`ClassificationScores`] |
//! | initial values of adapters and of the base's weights | [`AdapterInitialValues`] |
//! | the stage, offload settings and micro batch size that fit into memory | [`MemoryFitInput`], [`MemoryFit`] |
//! | the weights that QLoRA holds in 4 bits | [`is_quantized`] |
//! | answers of a model, token by token | [`Generator`] |
//! | the resulting model: merged, as a Hugging Face folder or GGUF | [`MergedModel`] |
//! | a run: its options, its inputs, its steps, its engine | [`Options`], [`PreparedRun`], [`FineTune`], [`TrainingEngine`] |

mod chat;
mod data;
pub mod error;
mod gguf;
pub mod hub;
mod model;
mod peft;
mod run;

pub use candle_zero::nn::{DpoLoss, Rewards, dpo_loss};
pub use chat::assistant_mask::RenderedConversation;
pub use chat::conversation::Conversation;
pub use chat::encode_cache::EncodedText;
pub use chat::template::Template;
#[cfg(feature = "hub")]
pub(crate) use chat::template_files::ADDITIONAL_TEMPLATES;
pub use chat::tokenizer::{SpecialTokens, TextStream, Tokenizer};
pub use data::batches::{Batches, NO_TARGET, RowBatch, SequencePacking};
pub use data::class_labels::labels_of;
pub use data::column_mapping::ColumnMapping;
pub use data::data_options::{DataOptions, TrainingTask, Truncation};
pub use data::data_report::{DataReport, RecordLineNumbers};
pub use data::dataset::{Dataset, FileReadProgress};
pub use data::record_parser::RecordFormat;
pub use data::sample::Sample;
pub use data::sample_cache::{SampleRef, default_cache};
pub use data::show_samples::show;
pub use data::source::Source;
pub use gguf::export::GgufFormat;
pub use model::base_model::BaseModel;
pub use model::classifier::{ClassificationOutput, Classifier};
pub use model::classifier_base::ClassifierBase;
pub use model::classifier_config::ClassifierConfig;
pub use model::generator::{GeneratedText, Generator, Sampling};
pub use model::merged_model::MergedModel;
#[cfg(feature = "hub")]
pub(crate) use model::output_dir::COMPANION_FILES;
pub use model::trainable_model::TrainableModel;
pub use peft::adapter::{Adapter, AdapterTensor};
pub use peft::adapter_initial_values::AdapterInitialValues;
pub use peft::qlora_weight_selection::is_quantized;
pub use run::classification_batch::ClassificationBatch;
pub use run::classification_scores::{ClassMetrics, ClassificationScores};
pub use run::expert_loads::ExpertShares;
pub use run::fine_tune::FineTune;
pub use run::memory_fit::{MemoryFit, MemoryFitInput, memory_of_rank};
pub use run::objective::ValidationResult;
pub use run::options::{
    CheckpointOptions, LocalStepsOptions, LrDecay, ModelPrecision, Objective, Options, PipelineStages, TrainingLength,
    TuningMethod, ValidationData, WarmupLength,
};
pub use run::prepare::PreparedRun;
pub use run::step_report::{StepReport, StopReason};
pub use run::training_engine::TrainingEngine;
