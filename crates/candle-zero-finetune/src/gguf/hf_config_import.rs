//! Builds a `config.json` in Hugging Face's format from the metadata of a GGUF file, following the conventions of
//! llama.cpp's converter.

use super::architecture_keys::ArchitectureMetadataReader;
use super::architectures::{GPT_OSS, largest_gemma};
use super::mixture_keys::{config_json as mixture_json, mixture_in_file};
use super::model_metadata_export::usual_attention_factor;
use super::weight_reader::GgufFile;
use crate::error::Result;
use serde_json::{Value as Json, json};

/// The architectures with known conventions. Files of Mistral and Mixtral models use the name llama.
const SUPPORTED_ARCHITECTURES: [&str; 10] =
    ["llama", "qwen2", "qwen2moe", "qwen3", "qwen3moe", "olmoe", "gemma2", "gemma3", "phi3", GPT_OSS];

impl GgufFile {
    /// Returns the equivalent of `config.json`.
    pub fn config_json(&self) -> Result<Json> {
        let keys = ArchitectureMetadataReader { gguf: self, architecture: self.architecture()? };
        let architecture = keys.architecture;
        if !SUPPORTED_ARCHITECTURES.contains(&architecture) {
            return Err(self.refuse(
                "general.architecture",
                architecture,
                format!("one of {}", SUPPORTED_ARCHITECTURES.join(", ")),
            ));
        }
        // Files of architectures without experts may have the key, too, with the value 0.
        let experts = match keys.number("expert_count")? {
            None | Some(0.0) => None,
            Some(_) => keys.size("expert_count")?,
        };
        let mixture = mixture_in_file(architecture, experts);
        if experts.is_some() && mixture.is_none() {
            return Err(keys.refuse("expert_count", format!("0 for architecture {architecture}")));
        }
        let hidden = keys.need_size("embedding_length")?;
        let blocks = keys.need_size("block_count")?;
        let heads = keys.need_size("attention.head_count")?;
        let kv_heads = keys.size("attention.head_count_kv")?.unwrap_or(heads);
        let head = match keys.size("attention.key_length")? {
            Some(head) => head,
            None => hidden / heads,
        };
        for key in ["attention.value_length", "rope.dimension_count"] {
            if keys.size(key)?.is_some_and(|length| length != head) {
                return Err(keys.refuse(key, format!("the width of a head ({head})")));
            }
        }
        let Some(vocab) = self.header.tensors.get("token_embd.weight").and_then(|info| info.shape.first()) else {
            return Err(super::weight_reader::bad_gguf(&self.path, "it has no tensor token_embd.weight"));
        };
        let has = |name: &str| self.header.tensors.contains_key(name);
        let mut config = json!({
            "model_type": architecture,
            "architectures": [class(architecture)],
            "vocab_size": vocab,
            "hidden_size": hidden,
            "intermediate_size": keys.need_size("feed_forward_length")?,
            "num_hidden_layers": blocks,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head,
            "max_position_embeddings": keys.need_size("context_length")?,
            "rms_norm_eps": keys.need_number("attention.layer_norm_rms_epsilon")?,
            "rope_theta": keys.number("rope.freq_base")?.unwrap_or(default_theta(architecture)),
            "rope_scaling": keys.rope_scaling(head)?,
            "tie_word_embeddings": !has("output.weight"),
            "torch_dtype": "float32",
        });
        let sliding = keys.size("attention.sliding_window")?;
        // The metadata does not contain `query_pre_attn_scalar`, which differs in the largest Gemmas. llama.cpp
        // recognizes them by their number of blocks.
        let scalar = if largest_gemma(architecture) == Some(blocks) { hidden / heads } else { head };
        let more = match architecture {
            "llama" => json!({"hidden_act": "silu", "attention_bias": has("blk.0.attn_q.bias")}),
            "qwen2" | "qwen2moe" | "qwen3" | "qwen3moe" => json!({"hidden_act": "silu", "use_sliding_window": false}),
            "olmoe" => json!({"hidden_act": "silu"}),
            "phi3" => json!({"hidden_act": "silu", "sliding_window": sliding}),
            GPT_OSS => json!({"hidden_act": "silu", "attention_bias": true, "sliding_window": sliding.unwrap_or(128)}),
            "gemma2" => json!({
                "hidden_activation": "gelu_pytorch_tanh",
                "sliding_window": sliding.unwrap_or(4096),
                "attn_logit_softcapping": keys.number("attn_logit_softcapping")?.unwrap_or(50.0),
                "final_logit_softcapping": keys.number("final_logit_softcapping")?.unwrap_or(30.0),
                "query_pre_attn_scalar": scalar,
            }),
            _ => json!({
                "model_type": "gemma3_text",
                "hidden_activation": "gelu_pytorch_tanh",
                "sliding_window": sliding.unwrap_or(1024),
                "sliding_window_pattern": 6,
                "rope_local_base_freq": 1e4,
                "query_pre_attn_scalar": scalar,
            }),
        };
        let ids = [("bos", "bos"), ("eos", "eos"), ("pad", "padding")]
            .map(|(name, role)| (name, self.header.metadata.get(&format!("tokenizer.ggml.{role}_token_id"))));
        if let (Some(config), Json::Object(more)) = (config.as_object_mut(), more) {
            config.extend(more);
            if let Some(mixture) = mixture {
                config.extend(mixture_json(mixture, &keys)?);
            }
            for (name, id) in ids {
                let id = id.and_then(|id| id.to_u64().ok());
                config.extend(id.map(|id| (format!("{name}_token_id"), id.into())));
            }
        }
        Ok(config)
    }
}

/// Returns the base of the rotary wavelengths for files that do not specify it.
fn default_theta(architecture: &str) -> f64 {
    if architecture == "gemma3" { 1e6 } else { 1e4 }
}

/// Returns the name of the transformers class of a model without experts.
fn class(architecture: &str) -> &'static str {
    match architecture {
        "qwen2" => "Qwen2ForCausalLM",
        "qwen3" => "Qwen3ForCausalLM",
        "gemma2" => "Gemma2ForCausalLM",
        "gemma3" => "Gemma3ForCausalLM",
        "phi3" => "Phi3ForCausalLM",
        _ => "LlamaForCausalLM",
    }
}

impl ArchitectureMetadataReader<'_> {
    /// Returns the scaling of the rotary frequencies.
    fn rope_scaling(&self, head: usize) -> Result<Json> {
        let infos = &self.gguf.header.tensors;
        if infos.contains_key("rope_factors_long.weight") || infos.contains_key("rope_factors_short.weight") {
            return Err(super::weight_reader::bad_gguf(
                &self.gguf.path,
                "it has rope_factors_long.weight or rope_factors_short.weight: rotary positions of type longrope are \
                 not supported",
            ));
        }
        match self.text("rope.scaling.type")? {
            None | Some("none") => self.llama3(head),
            Some("linear") => {
                let factor = self.need_number("rope.scaling.factor")?;
                Ok(json!({"rope_type": "linear", "factor": factor}))
            }
            Some("yarn") => {
                let factor = self.need_number("rope.scaling.factor")?;
                let original = self.need_number("rope.scaling.original_context_length")?;
                // llama.cpp multiplies the usual factor by this value.
                let more = self.number("rope.scaling.attn_factor")?.unwrap_or(1.0);
                Ok(json!({
                    "rope_type": "yarn",
                    "factor": factor,
                    "original_max_position_embeddings": original as u64,
                    "attention_factor": more * usual_attention_factor(factor),
                    "beta_fast": self.number("rope.scaling.yarn_beta_fast")?.unwrap_or(32.0),
                    "beta_slow": self.number("rope.scaling.yarn_beta_slow")?.unwrap_or(1.0),
                    // The metadata has no key for this. All published models of gpt-oss have `false` in their
                    // config.json.
                    "truncate": self.architecture != GPT_OSS,
                }))
            }
            Some(_) => Err(self.refuse("rope.scaling.type", "none, linear or yarn")),
        }
    }

    /// Returns the scaling of Llama 3.1 and later, for which a file has a factor for each frequency, or null if
    /// the file has no such factors.
    fn llama3(&self, head: usize) -> Result<Json> {
        use candle_zero::models::{RotaryConfig, RotaryScaling};
        use candle_zero::nn::frequencies::Llama3RopeScaling;
        const NAME: &str = "rope_freqs.weight";
        let Some(factors) = self.gguf.dequantized(NAME)? else { return Ok(Json::Null) };
        let theta = self.number("rope.freq_base")?.unwrap_or(1e4);
        let plain = RotaryConfig { theta, ..RotaryConfig::default() }.frequencies(head, 1)?;
        let factor = factors.iter().fold(1f32, |max, factor| max.max(*factor));
        let scaling = Llama3RopeScaling {
            factor: f64::from(factor),
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 8192,
        };
        let scaled = RotaryConfig { theta, scaling: RotaryScaling::Llama3(scaling), ..RotaryConfig::default() }
            .frequencies(head, 1)?;
        let is_llama3 = factors.len() == plain.len()
            && factors
                .iter()
                .zip(plain.iter().zip(&scaled))
                .all(|(factor, (plain, scaled))| (plain / scaled / f64::from(*factor) - 1.0).abs() < 1e-4);
        match is_llama3 {
            true => Ok(json!({
                "rope_type": "llama3",
                "factor": scaling.factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            })),
            false => Err(super::weight_reader::bad_gguf(
                &self.gguf.path,
                "its rope_freqs.weight is not that of Llama 3.1 and later: other rotary positions are not supported",
            )),
        }
    }
}
