//! The names of the parameters of decoders' blocks in Hugging Face's files.

use super::{DecoderConfig, NormPlacement, ParameterNaming};

/// The parameter names within a block that differ between models.
pub(super) struct BlockParameterNames {
    pub before_attention: &'static str,
    pub after_attention: &'static str,
    pub before_mlp: &'static str,
    pub after_mlp: &'static str,
    pub attention: &'static str,
    pub qkv: &'static str,
    pub attention_output: &'static str,
    pub up: &'static str,
    pub down: &'static str,
}

const LLAMA: BlockParameterNames = BlockParameterNames {
    before_attention: "input_layernorm",
    after_attention: "post_attention_layernorm",
    before_mlp: "pre_feedforward_layernorm",
    after_mlp: "post_feedforward_layernorm",
    attention: "self_attn",
    qkv: "qkv_proj",
    attention_output: "o_proj",
    up: "up_proj",
    down: "down_proj",
};

const GPT2: BlockParameterNames = BlockParameterNames {
    before_attention: "ln_1",
    before_mlp: "ln_2",
    attention: "attn",
    qkv: "c_attn",
    attention_output: "c_proj",
    up: "c_fc",
    down: "c_proj",
    ..LLAMA
};

impl BlockParameterNames {
    /// Returns the names of the parameters in the blocks of `config`.
    pub fn of(config: &DecoderConfig) -> Self {
        match config.naming {
            ParameterNaming::Gpt2 => GPT2,
            ParameterNaming::Glm if config.norm_placement == NormPlacement::BeforeAndAfter => Self {
                after_attention: "post_self_attn_layernorm",
                before_mlp: "post_attention_layernorm",
                after_mlp: "post_mlp_layernorm",
                ..LLAMA
            },
            _ if config.norm_placement == NormPlacement::BeforeAndAfter => LLAMA,
            ParameterNaming::StarCoder2 => {
                Self { before_mlp: "post_attention_layernorm", up: "c_fc", down: "c_proj", ..LLAMA }
            }
            // In models with two norms, the second one is named for its position after attention.
            _ => Self { before_mlp: "post_attention_layernorm", ..LLAMA },
        }
    }
}
