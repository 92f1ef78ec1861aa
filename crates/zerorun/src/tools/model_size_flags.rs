//! The flags for the size of a model: a preset, and changes to it. The flags have the same names as those of
//! `train_gpt`.

use crate::error::{ModelError, Result};
use candle_zero::estimate::Shapes;
use candle_zero::models::{DecoderBatch, Gpt, GptConfig, Llama, LlamaConfig, decoder_pipeline, preset_named};
use candle_zero::pipeline::PipelineModule;
use clap::Args;

/// Changes to a preset.
#[derive(Debug, Clone, Default, PartialEq, Args)]
pub(super) struct ModelSizeFlags {
    /// Number of blocks [default: that of the model]
    #[arg(long = "n_layer", alias = "n-layer", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10000))]
    n_layer: Option<u32>,

    /// Number of attention heads per block [default: that of the model]
    #[arg(long = "n_head", alias = "n-head", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65536))]
    n_head: Option<u32>,

    /// Number of key and value heads per block; Llama only [default: that of the model]
    #[arg(long = "n_kv_head", alias = "n-kv-head", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65536))]
    n_kv_head: Option<u32>,

    /// Hidden size [default: that of the model]
    #[arg(long = "n_embd", alias = "n-embd", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1048576))]
    n_embd: Option<u32>,

    /// Hidden size of the MLP; Llama only [default: that of the model]
    #[arg(long = "n_inner", alias = "n-inner", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1048576))]
    n_inner: Option<u32>,

    /// Context length in tokens [default: that of the model]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=16777216))]
    ctx: Option<u32>,

    /// Vocabulary size [default: that of the model]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=16777216))]
    vocab: Option<u32>,
}

/// Returns the value given on the command line, or that of the preset.
fn or_preset(flag: Option<u32>, preset_value: usize) -> usize {
    flag.map_or(preset_value, |n| n as usize)
}

impl ModelSizeFlags {
    /// Returns the width given on the command line, or that of the preset `name`, if it exists.
    pub(super) fn width(&self, name: Option<&str>) -> Option<u64> {
        let of_llama = |name: &str| LlamaConfig::preset(name).map(|preset| preset.hidden_size).ok();
        let of_gpt = |name: &str| GptConfig::preset(name).map(|preset| preset.n_embd).ok();
        let of_preset = |name: &str| of_llama(name).or_else(|| of_gpt(name));
        match self.n_embd {
            Some(flag) => Some(flag.into()),
            None => name.and_then(of_preset).map(|width| width as u64),
        }
    }

    /// Returns the preset `name` with the changes applied.
    ///
    /// # Errors
    /// Fails if the name is unknown or the sizes do not form a model.
    pub(super) fn preset(&self, name: &str) -> Result<SizedPreset> {
        let name = preset_named(name)?;
        if LlamaConfig::preset_names().any(|known| known == name) {
            let preset = LlamaConfig::preset(name)?;
            let config = LlamaConfig {
                hidden_size: or_preset(self.n_embd, preset.hidden_size),
                intermediate_size: or_preset(self.n_inner, preset.intermediate_size),
                num_hidden_layers: or_preset(self.n_layer, preset.num_hidden_layers),
                num_attention_heads: or_preset(self.n_head, preset.num_attention_heads),
                num_key_value_heads: or_preset(self.n_kv_head, preset.num_key_value_heads),
                ctx: or_preset(self.ctx, preset.ctx),
                vocab: or_preset(self.vocab, preset.vocab),
                ..preset
            };
            config.validate()?;
            return Ok(SizedPreset::Llama(name, config));
        }
        let preset = GptConfig::preset(name)?;
        if let Some(key) = [("n_kv_head", self.n_kv_head), ("n_inner", self.n_inner)].iter().find(|(_, n)| n.is_some())
        {
            let allowed = "absent: a GPT-2 has none".to_string();
            return Err(ModelError::Config { key: key.0, found: key.1.unwrap_or(0).to_string(), allowed }.into());
        }
        let config = GptConfig {
            n_layer: or_preset(self.n_layer, preset.n_layer),
            n_head: or_preset(self.n_head, preset.n_head),
            n_embd: or_preset(self.n_embd, preset.n_embd),
            ctx: or_preset(self.ctx, preset.ctx),
            vocab: or_preset(self.vocab, preset.vocab),
            ..preset
        };
        config.validate()?;
        Ok(SizedPreset::Gpt(name, config))
    }
}

/// A preset, with its name and sizes.
pub(super) enum SizedPreset {
    Gpt(&'static str, GptConfig),
    Llama(&'static str, LlamaConfig),
}

impl SizedPreset {
    /// Returns the name of the preset.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Gpt(name, _) | Self::Llama(name, _) => name,
        }
    }

    /// Returns the context length.
    pub(super) fn ctx(&self) -> usize {
        match self {
            Self::Gpt(_, config) => config.ctx,
            Self::Llama(_, config) => config.ctx,
        }
    }

    /// Returns the names and shapes of the parameters.
    pub(super) fn shapes(&self) -> Result<Shapes> {
        match self {
            Self::Gpt(name, config) => Shapes::of(name, |vb| Gpt::new(config, vb)),
            Self::Llama(name, config) => {
                let config = with_one_position(config);
                Shapes::of(name, |vb| Llama::new(&config, vb))
            }
        }
    }

    /// Returns the layers that the ranks of a pipeline divide among themselves.
    pub(super) fn layers(&self) -> Result<PipelineModule<DecoderBatch>> {
        match self {
            Self::Gpt(_, config) => decoder_pipeline(config),
            Self::Llama(_, config) => decoder_pipeline(&with_one_position(config)),
        }
    }

    /// Returns the number of elements of an activation of `sequences` sequences of full length.
    pub(super) fn activation(&self, sequences: usize) -> usize {
        let (ctx, width) = match self {
            Self::Gpt(_, config) => (config.ctx, config.n_embd),
            Self::Llama(_, config) => (config.ctx, config.hidden_size),
        };
        sequences.saturating_mul(ctx).saturating_mul(width)
    }
}

/// Returns the same sizes with a context of one position: rotary positions are not parameters, so a short table
/// suffices.
fn with_one_position(config: &LlamaConfig) -> LlamaConfig {
    LlamaConfig { ctx: 1, ..config.clone() }
}
