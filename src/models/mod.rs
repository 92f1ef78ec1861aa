//! Models built on [`candle_nn::VarBuilder`] and [`crate::nn`], trainable with or without an engine, and text
//! generation with them ([`LanguageModel::generate`], or token by token with [`Session`]).

mod activation_bytes;
mod block_parameter_names;
mod config_checks;
mod decoder;
mod decoder_block;
mod decoder_classifier;
mod decoder_config;
mod decoder_mixture;
mod decoder_mlp;
mod decoder_pipeline;
mod encoder;
mod encoder_block;
mod encoder_config;
pub(crate) mod error;
mod expert_parameters;
mod gpt;
mod gpt_config;
mod hugging_face_decoder_config;
mod hugging_face_encoder_config;
mod hugging_face_mixture;
mod hugging_face_rotary;
mod json_object_reader;
mod language_model;
mod llama;
mod llama_config;
mod mixture_config;
mod mixture_families;
mod model_families;
mod parameter_shapes;
mod rotary_config;
mod routed_loss;
mod router_report;
mod sampling;
mod sequence_classifier;
mod session;
mod unpadded_batch;

pub use activation_bytes::ActivationBytesOptions;
pub use decoder::{Decoder, DecoderLayers, IntoDecoderConfig};
pub use decoder_block::DecoderBlock;
#[doc(hidden)]
pub use decoder_classifier::SCORE;
pub use decoder_classifier::{DecoderClassifier, DecoderClassifierConfig};
pub use decoder_config::{
    BlockConfig, BlockMlp, DecoderConfig, NormKind, NormPlacement, ParameterNaming, QueryKeyNorms,
};
pub use decoder_pipeline::{DecoderBatch, decoder_pipeline};
pub use encoder::Encoder;
pub use encoder_block::EncoderBlock;
pub use encoder_config::{
    EncoderBlockConfig, EncoderConfig, EncoderDropout, EncoderHead, EncoderNaming, EncoderPooling, EncoderPositions,
    HeadActivation,
};
#[doc(hidden)]
pub use expert_parameters::ExpertPart;
pub use gpt::{Gpt, GptLayers};
pub use gpt_config::GptConfig;
#[doc(hidden)]
pub use hugging_face_encoder_config::{ENCODER_TYPES, class_names};
#[doc(hidden)]
pub use json_object_reader::shortened;
pub(crate) use language_model::require_tokens;
pub use language_model::{Architecture, LanguageModel};
pub use llama::{Llama, LlamaLayers};
pub use llama_config::LlamaConfig;
pub use mixture_config::{MixtureConfig, MixtureNaming};
pub use rotary_config::{LongRopeScaling, QueryGrowth, RotaryConfig, RotaryScaling, YarnScaling};
pub use router_report::{BalanceLossOptions, ExpertLoad, RoutedStates, RouterReport};
pub use sampling::{TokenRng, keep_likeliest, next_token};
pub use sequence_classifier::SequenceClassifier;
pub use session::Session;

/// Returns `name` if it is a preset of any architecture.
///
/// # Errors
/// Returns an error that lists the known names if `name` is not one of them.
#[doc(hidden)]
pub fn preset_named(name: &str) -> crate::Result<&'static str> {
    let names: Vec<&str> = GptConfig::preset_names().chain(LlamaConfig::preset_names()).collect();
    config_checks::find_preset(&names, |known| known, name).copied()
}
