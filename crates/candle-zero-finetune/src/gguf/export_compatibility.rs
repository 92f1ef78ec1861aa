//! Compares a model with llama.cpp's assumptions about its architecture.

use super::architectures::{GPT_OSS, GgufArchitecture, MultiplierRule, PositionRule, Presence, Tying, WindowRule};
use candle_zero::models::{DecoderConfig, RotaryConfig, RotaryScaling};
use candle_zero::nn::{Activation, ExpertActivation, RouterOrder};
use candle_zero::util::counted;

impl GgufArchitecture {
    /// Returns the reason why llama.cpp would compute different results with a model, or `None` if it would not.
    pub fn problem(&self, config: &DecoderConfig) -> Option<String> {
        self.mixture_problem(config)
            .or_else(|| self.layout_problem(config))
            .or_else(|| self.scale_problem(config))
            .or_else(|| self.window_problem(config))
            .or_else(|| self.position_problem(config))
    }

    /// Returns the text for a key with a value other than the one that llama.cpp assumes.
    fn assumes(&self, key: &str, found: impl std::fmt::Display, assumed: impl std::fmt::Display) -> String {
        format!("its {key} is {found}, but architecture {} of llama.cpp assumes {assumed}", self.name)
    }

    fn has_no_key(&self, key: &str, found: impl std::fmt::Display) -> String {
        format!("its {key} is {found}, for which architecture {} of llama.cpp has no key", self.name)
    }

    fn mixture_problem(&self, config: &DecoderConfig) -> Option<String> {
        let name = self.name;
        let (rule, mixture) = match (&self.mixture, &config.mixture) {
            (None, None) => return None,
            (None, Some(_)) => return Some(format!("it has experts, but architecture {name} of llama.cpp has none")),
            (Some(_), None) => {
                return Some(format!(
                    "it has no experts, but architecture {name} of llama.cpp has only blocks with experts"
                ));
            }
            (Some(rule), Some(mixture)) => (rule, mixture),
        };
        if config.sparse_blocks().count() != config.blocks.len() {
            return Some(format!(
                "some of its blocks are dense, but architecture {name} of llama.cpp has only blocks with experts"
            ));
        }
        if mixture.router.order != rule.order {
            let assumed = rule.order == RouterOrder::SoftmaxThenTop { renormalize: true };
            return Some(self.assumes("norm_topk_prob", !assumed, assumed));
        }
        match (mixture.gate, rule.gate) {
            (ExpertActivation::Clamped { alpha, .. }, ExpertActivation::Clamped { alpha: assumed, .. })
                if alpha != assumed =>
            {
                return Some(self.assumes("swiglu_alpha", alpha, assumed));
            }
            (ExpertActivation::Clamped { limit, .. }, ExpertActivation::Clamped { limit: assumed, .. })
                if limit != assumed =>
            {
                return Some(self.assumes("swiglu_limit", limit, assumed));
            }
            _ => (),
        }
        config.clip_qkv.map(|clip| self.has_no_key("clip_qkv", clip))
    }

    /// Checks the parameters that a model has, and its activation.
    fn layout_problem(&self, config: &DecoderConfig) -> Option<String> {
        let tied = config.tie_word_embeddings;
        match self.tying {
            Tying::Always if !tied => return Some(self.assumes("tie_word_embeddings", tied, true)),
            Tying::Never if tied => return Some(self.assumes("tie_word_embeddings", tied, false)),
            _ => (),
        }
        let model_biases = [config.qkv_bias, config.output_bias, config.mlp_bias];
        let target = ["queries, keys and values", "the attention output", "the MLP"];
        for ((rule, has_bias), target) in self.biases.iter().zip(model_biases).zip(target) {
            let problem = match (rule, has_bias) {
                (Presence::Never, true) => format!("has biases for {target}"),
                (Presence::Always, false) => format!("has no biases for {target}"),
                _ => continue,
            };
            let assumed = if has_bias { "has none" } else { "requires them" };
            return Some(format!(
                "it {problem} ({}), but architecture {} of llama.cpp {assumed}",
                bias_key(self.model_types[0], target),
                self.name
            ));
        }
        if config.activation != self.activation {
            let [found, assumed] = [config.activation, self.activation].map(activation_name);
            return Some(self.assumes("activation", found, assumed));
        }
        let (head, default_head) = (config.head_dim, config.hidden_size / config.num_attention_heads);
        let is_default = head * config.num_attention_heads == config.hidden_size;
        if !self.has_free_head && !is_default {
            return Some(self.assumes("head_dim", head, format!("hidden_size / num_attention_heads ({default_head})")));
        }
        None
    }

    /// Checks factors and caps.
    fn scale_problem(&self, config: &DecoderConfig) -> Option<String> {
        let mut without_key = vec![];
        let caps =
            [("attn_logit_softcapping", config.attention_soft_cap), ("final_logit_softcapping", config.logit_soft_cap)];
        let scales = [
            ("attention_multiplier", config.query_scale),
            ("embedding_multiplier", config.embedding_scale),
            ("residual_multiplier", config.residual_scale),
        ];
        match self.scales {
            MultiplierRule::None => {
                without_key.extend(caps);
                without_key.extend(scales);
                without_key.push(("logit_scale", config.logit_scale));
            }
            MultiplierRule::Granite => without_key.extend(caps),
            MultiplierRule::Logits => {
                without_key.extend(caps);
                without_key.extend(scales);
            }
            MultiplierRule::Gemma { largest, has_caps } => {
                let quotient = config.hidden_size as f64 / config.num_attention_heads as f64;
                let is_largest = config.blocks.len() == largest;
                let assumed = if is_largest { quotient.floor() } else { config.head_dim as f64 };
                let scalar = config.query_scale.map_or(config.head_dim as f64, |scale| scale.powi(-2));
                if (scalar / assumed - 1.0).abs() > 1e-6 {
                    let scalar = (scalar * 1e6).round() / 1e6;
                    let assumption = format!("{assumed} for a model with {}", counted(config.blocks.len(), "block"));
                    return Some(self.assumes("query_pre_attn_scalar", scalar, assumption));
                }
                match has_caps {
                    true => {
                        let absent = caps.iter().find(|(_, cap)| cap.is_none());
                        if let Some((key, _)) = absent {
                            return Some(self.assumes(key, "null", "a number"));
                        }
                    }
                    false => without_key.extend(caps),
                }
            }
        }
        without_key.into_iter().find_map(|(key, value)| value.map(|value| self.has_no_key(key, value)))
    }

    fn window_problem(&self, config: &DecoderConfig) -> Option<String> {
        let WindowRule::Pattern { period, windowed, is_optional } = self.windows else { return None };
        let blocks = &config.blocks;
        if is_optional && blocks.iter().all(|block| block.window.is_none()) {
            return None;
        }
        let differs = |at: &usize| blocks[*at].window.is_some() != (at % period < windowed);
        let at = (0..blocks.len()).find(differs)?;
        let [found, assumed] = match blocks[at].window {
            Some(_) => ["sliding_attention", "full_attention"],
            None => ["full_attention", "sliding_attention"],
        };
        Some(self.assumes(&format!("layer_types[{at}]"), found, assumed))
    }

    fn position_problem(&self, config: &DecoderConfig) -> Option<String> {
        if self.positions == PositionRule::Learned {
            return None;
        }
        let of_block = |at: usize| {
            let [found, assumed] = [config.blocks[at].rotary.clone(), self.rotary_of(config, at)];
            self.position_difference(at, found.as_ref(), assumed.as_ref())
        };
        let all = config.blocks.iter().filter_map(|block| block.rotary.as_ref());
        all.clone()
            .find_map(|rotary| self.rotary_problem(config, rotary))
            .or_else(|| (0..config.blocks.len()).find_map(of_block))
    }

    /// Returns which property of a block's rotary positions llama.cpp does not support.
    fn rotary_problem(&self, config: &DecoderConfig, rotary: &RotaryConfig) -> Option<String> {
        let name = self.name;
        if let Some(growth) = rotary.query_growth {
            return Some(self.has_no_key("llama_4_scaling_beta", growth.beta));
        }
        if self.pairs != config.rotary_pairs && rotary.width(config.head_dim) != config.head_dim {
            return Some(self.assumes("partial_rotary_factor", rotary.partial_rotary_factor, 1));
        }
        let is_missing = |kind: &str| Some(self.has_no_key("rope_type", format!("{kind:?}")));
        match &rotary.scaling {
            RotaryScaling::Dynamic { .. } => {
                Some("its rotary scaling is \"dynamic\", for which GGUF has no keys".into())
            }
            RotaryScaling::Llama3(_) if !self.factors.llama3 => is_missing("llama3"),
            RotaryScaling::LongRope(_) if !self.factors.longrope => is_missing("longrope"),
            // llama.cpp always rounds the bounds of YaRN's ramp. All published models of gpt-oss specify bounds that
            // are not rounded, but the models are used in llama.cpp's format nonetheless.
            RotaryScaling::Yarn(yarn) if yarn.frequencies.truncate != (name != GPT_OSS) => {
                Some(self.assumes("rope_parameters.truncate", yarn.frequencies.truncate, name != GPT_OSS))
            }
            _ => None,
        }
    }

    /// Returns how the positions of a block differ from those that llama.cpp assumes.
    fn position_difference(
        &self,
        at: usize,
        found: Option<&RotaryConfig>,
        assumed: Option<&RotaryConfig>,
    ) -> Option<String> {
        let name = self.name;
        let (found, assumed) = match (found, assumed) {
            (None, None) => return None,
            (Some(_), None) => {
                return Some(format!(
                    "its block {at} has rotary positions, but architecture {name} of llama.cpp assumes none there"
                ));
            }
            (None, Some(_)) => {
                return Some(format!(
                    "its block {at} has no rotary positions, but architecture {name} of llama.cpp assumes them there"
                ));
            }
            (Some(found), Some(assumed)) => (found, assumed),
        };
        if found.theta != assumed.theta {
            return Some(self.assumes(&format!("rope_theta in block {at}"), found.theta, assumed.theta));
        }
        if found.partial_rotary_factor != assumed.partial_rotary_factor {
            let key = format!("partial_rotary_factor in block {at}");
            return Some(self.assumes(&key, found.partial_rotary_factor, assumed.partial_rotary_factor));
        }
        (found.scaling != assumed.scaling).then(|| {
            let [found, assumed] = [found, assumed].map(|rotary| scaling_name(&rotary.scaling));
            let same = if found == assumed { " with the parameters of other blocks" } else { "" };
            self.assumes(&format!("rope_type in block {at}"), found, format!("{assumed}{same}"))
        })
    }
}

/// Returns the key that decides whether a model has biases.
fn bias_key(model_type: &str, target: &str) -> &'static str {
    match (model_type, target) {
        ("starcoder2", _) => "use_bias",
        ("stablelm", "queries, keys and values") => "use_qkv_bias",
        ("qwen2_moe", "queries, keys and values") => "qkv_bias",
        (_, "the MLP") => "mlp_bias",
        _ => "attention_bias",
    }
}

fn activation_name(activation: Activation) -> &'static str {
    match activation {
        Activation::Silu => "silu",
        Activation::Gelu => "gelu",
        Activation::GeluTanh => "gelu_pytorch_tanh",
        Activation::ReluSquared => "relu2",
        _ => "another function",
    }
}

fn scaling_name(scaling: &RotaryScaling) -> &'static str {
    match scaling {
        RotaryScaling::None => "default",
        RotaryScaling::Linear { .. } => "linear",
        RotaryScaling::Llama3(_) => "llama3",
        RotaryScaling::Yarn(_) => "yarn",
        RotaryScaling::Dynamic { .. } => "dynamic",
        RotaryScaling::LongRope(_) => "longrope",
        _ => "another type",
    }
}
