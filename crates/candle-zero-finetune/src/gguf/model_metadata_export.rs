//! The metadata keys that describe a model.

use super::architectures::{GgufArchitecture, MultiplierRule, PositionRule, WindowRule};
use super::mixture_keys::metadata as mixture_metadata;
use super::writer::GgufValue;
use candle_zero::models::{DecoderConfig, NormKind, NormPlacement, RotaryConfig, RotaryScaling, YarnScaling};

/// Returns the attention factor according to the YaRN paper.
pub(super) fn usual_attention_factor(factor: f64) -> f64 {
    1.0 + 0.1 * factor.max(1.0).ln()
}

impl GgufArchitecture {
    /// Returns the keys that describe a model of this architecture.
    pub fn keys(&self, config: &DecoderConfig) -> Vec<(String, GgufValue)> {
        let mut keys: Vec<(&str, GgufValue)> = self.sizes(config);
        let rotary = self.rotary(config);
        if self.positions != PositionRule::Learned {
            let rotated = rotary.or(config.blocks.first().and_then(|block| block.rotary.as_ref()));
            let width = rotated.map_or(config.head_dim, |rotary| rotary.width(config.head_dim));
            keys.extend([
                ("attention.head_count_kv", GgufValue::size(config.num_key_value_heads)),
                ("attention.key_length", GgufValue::size(config.head_dim)),
                ("attention.value_length", GgufValue::size(config.head_dim)),
                ("rope.dimension_count", GgufValue::size(width)),
                ("vocab_size", GgufValue::size(config.vocab)),
            ]);
        }
        keys.extend(self.window_keys(config));
        keys.extend(self.scale_keys(config));
        if self.name == "stablelm" {
            let is_parallel = config.norm_placement == NormPlacement::Parallel;
            keys.push(("use_parallel_residual", GgufValue::Bool(is_parallel)));
        }
        if let (Some(rule), Some(mixture)) = (self.mixture, &config.mixture) {
            keys.extend(mixture_metadata(mixture, rule));
        }
        keys.extend(rotary.into_iter().flat_map(|rotary| self.rotary_keys(rotary)));
        keys.into_iter().map(|(key, value)| (format!("{}.{key}", self.name), value)).collect()
    }

    fn sizes(&self, config: &DecoderConfig) -> Vec<(&'static str, GgufValue)> {
        // If llama.cpp ignores an architecture's windows, its blocks also attend to positions outside the model's
        // windows, so the context ends at the smallest window.
        let windows = config.blocks.iter().filter_map(|block| block.window);
        let ctx = match self.windows {
            WindowRule::Pattern { .. } => config.ctx,
            WindowRule::None | WindowRule::Unused => windows.fold(config.ctx, usize::min),
        };
        let eps = match config.norm {
            NormKind::Layer | NormKind::LayerWithoutBias | NormKind::LayerPlusOne => "attention.layer_norm_epsilon",
            _ => "attention.layer_norm_rms_epsilon",
        };
        vec![
            ("block_count", GgufValue::size(config.blocks.len())),
            ("context_length", GgufValue::size(ctx)),
            ("embedding_length", GgufValue::size(config.hidden_size)),
            ("feed_forward_length", GgufValue::size(config.intermediate_size)),
            ("attention.head_count", GgufValue::size(config.num_attention_heads)),
            (eps, GgufValue::F32(config.norm_eps as f32)),
        ]
    }

    fn window_keys(&self, config: &DecoderConfig) -> Vec<(&'static str, GgufValue)> {
        let window = config.blocks.iter().find_map(|block| block.window);
        let (Some(window), false) = (window, self.windows == WindowRule::None) else { return Vec::new() };
        let mut keys = vec![("attention.sliding_window", GgufValue::size(window))];
        if matches!(self.windows, WindowRule::Pattern { is_optional: true, .. }) {
            let of_block = config.blocks.iter().map(|block| block.window.is_some());
            keys.push(("attention.sliding_window_pattern", GgufValue::Bools(of_block.collect())));
        }
        keys
    }

    fn scale_keys(&self, config: &DecoderConfig) -> Vec<(&'static str, GgufValue)> {
        let number = |value: f64| GgufValue::F32(value as f32);
        match self.scales {
            MultiplierRule::None => Vec::new(),
            MultiplierRule::Granite => vec![
                ("attention.scale", number(config.query_scale.unwrap_or(1.0 / (config.head_dim as f64).sqrt()))),
                ("embedding_scale", number(config.embedding_scale.unwrap_or(1.0))),
                ("residual_scale", number(config.residual_scale.unwrap_or(1.0))),
                // llama.cpp divides logits by this number.
                ("logit_scale", number(1.0 / config.logit_scale.unwrap_or(1.0))),
            ],
            MultiplierRule::Logits => vec![("logit_scale", number(config.logit_scale.unwrap_or(1.0)))],
            MultiplierRule::Gemma { .. } => [
                ("attn_logit_softcapping", config.attention_soft_cap),
                ("final_logit_softcapping", config.logit_soft_cap),
            ]
            .into_iter()
            .filter_map(|(key, cap)| Some((key, number(cap?))))
            .collect(),
        }
    }

    fn rotary_keys(&self, rotary: &RotaryConfig) -> Vec<(&'static str, GgufValue)> {
        let number = |value: f64| GgufValue::F32(value as f32);
        let kind = |kind: &str| ("rope.scaling.type", GgufValue::String(kind.into()));
        let mut keys = vec![("rope.freq_base", number(rotary.theta))];
        match &rotary.scaling {
            RotaryScaling::None if self.scales == MultiplierRule::Logits => keys.push(kind("none")),
            RotaryScaling::Linear { factor } => keys.extend([kind("linear"), ("rope.scaling.factor", number(*factor))]),
            RotaryScaling::Yarn(YarnScaling { frequencies, attention_factor }) => {
                // llama.cpp multiplies the usual factor by the one in the file.
                let usual = usual_attention_factor(frequencies.factor);
                let original = frequencies.original_max_position_embeddings;
                keys.extend([
                    kind("yarn"),
                    ("rope.scaling.factor", number(frequencies.factor)),
                    ("rope.scaling.original_context_length", GgufValue::size(original)),
                    ("rope.scaling.attn_factor", number(attention_factor / usual)),
                    ("rope.scaling.yarn_beta_fast", number(frequencies.beta_fast)),
                    ("rope.scaling.yarn_beta_slow", number(frequencies.beta_slow)),
                ]);
            }
            RotaryScaling::LongRope(scaling) => {
                // Phi-3's architecture finds the tensors without this key.
                keys.extend((self.windows != WindowRule::Unused).then(|| kind("longrope")));
                keys.extend([
                    ("rope.scaling.original_context_length", GgufValue::size(scaling.original)),
                    ("rope.scaling.attn_factor", number(scaling.attention_factor)),
                ]);
            }
            _ => (),
        }
        keys
    }

    /// Returns the names and values of the tensors that hold the divisors of the rotary frequencies.
    pub fn rotary_factors(&self, config: &DecoderConfig) -> Vec<(&'static str, Vec<f32>)> {
        let Some(rotary) = self.rotary(config) else { return Vec::new() };
        let to_f32 = |factors: &[f64]| factors.iter().map(|factor| *factor as f32).collect();
        match &rotary.scaling {
            RotaryScaling::Llama3(_) => {
                let head = config.head_dim;
                let plain = RotaryConfig { scaling: RotaryScaling::None, ..rotary.clone() };
                let (Ok(plain), Ok(scaled)) = (plain.frequencies(head, 1), rotary.frequencies(head, 1)) else {
                    return Vec::new();
                };
                let factors = plain.iter().zip(scaled).map(|(plain, scaled)| (plain / scaled) as f32);
                vec![("rope_freqs.weight", factors.collect())]
            }
            RotaryScaling::LongRope(scaling) => vec![
                ("rope_factors_long.weight", to_f32(&scaling.long)),
                ("rope_factors_short.weight", to_f32(&scaling.short)),
            ],
            _ => Vec::new(),
        }
    }
}
