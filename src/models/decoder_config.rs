//! A decoder as one description: the options in which Llama, Mistral, Qwen, Gemma, Phi and GPT-2 differ.

use super::config_checks::{MOST_POSITIONS, refused, require_parameters, require_sizes};
use super::rotary_config::RotaryConfig;
use crate::Result;
use crate::nn::{Activation, LoraConfig};

/// The shape of a decoder: a stack of blocks, each of which adds to the residual stream what causal attention gives of it, and
/// then what an MLP gives of it.
///
/// It is read from the `config.json` of a Hugging Face model ([`DecoderConfig::read`]). The sizes have the names of such a file.
#[derive(Debug, Clone, PartialEq)]
pub struct DecoderConfig {
    /// How parameters are called, and how they are stored.
    pub naming: ParameterNaming,
    /// What stands before all names but that of an output projection of its own: `"model."`, `"transformer."` or nothing.
    pub prefix: &'static str,
    /// Token ids, 0 to `vocab - 1`.
    pub vocab: usize,
    /// The longest input, in tokens.
    pub ctx: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width inside of the MLP.
    pub intermediate_size: usize,
    /// Query heads per block.
    pub num_attention_heads: usize,
    /// Key and value heads per block; divides `num_attention_heads`.
    pub num_key_value_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// What differs between the blocks; one for each of them.
    pub blocks: Vec<BlockConfig>,
    /// Rows of a table of learned positions; without one, positions are rotary.
    pub learned_positions: Option<usize>,
    /// The kind of all norms on the residual stream.
    pub norm: NormKind,
    /// Added to the variance or the mean square in norms.
    pub norm_eps: f64,
    /// Whether what attention and the MLP give is normed too before it is added (Gemma 2 and 3).
    pub norms_after: bool,
    /// Whether the heads of queries and keys are normed before they are rotated (Qwen 3, Gemma 3).
    pub query_key_norms: bool,
    /// Whether the projections to queries, keys and values have biases.
    pub qkv_bias: bool,
    /// Whether attention's output projection has a bias.
    pub output_bias: bool,
    /// Whether the MLP's projections have biases.
    pub mlp_bias: bool,
    /// Whether the MLP multiplies the activation of one projection with another projection (SwiGLU, GeGLU).
    pub gated: bool,
    /// The MLP's activation.
    pub activation: Activation,
    /// The factor of attention's scores; `1 / sqrt(head_dim)` where there is none.
    pub query_scale: Option<f64>,
    /// Attention's scores go through `cap * tanh(score / cap)`.
    pub attention_soft_cap: Option<f64>,
    /// Logits go through `cap * tanh(logit / cap)`.
    pub logit_soft_cap: Option<f64>,
    /// The factor of the token embedding's rows.
    pub embedding_scale: Option<f64>,
    /// Lookups of this token add nothing to the embedding's gradient, as in transformers, which calls it the padding.
    pub padding: Option<u32>,
    /// Whether the output projection is the token embedding.
    pub tie_word_embeddings: bool,
    /// Whether each block keeps only its input in forward and runs again in backward.
    pub checkpoint_activations: bool,
    /// The probability with which training drops elements of the sum of the embeddings, and of what each attention and each
    /// MLP adds to the residual stream. Attention's weights are never dropped.
    pub dropout: f32,
    /// The adapters of projections, which get them by their names in the files.
    pub lora: Option<LoraConfig>,
}

/// What differs between the blocks of a decoder.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct BlockConfig {
    /// A position sees so many positions, itself included; without a number, all before it.
    pub window: Option<usize>,
    /// How positions turn queries and keys. Of no use beside learned positions.
    pub rotary: RotaryConfig,
}

/// How the parameters of a decoder are called in Hugging Face's files, and how they are stored there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ParameterNaming {
    /// `layers.0.self_attn.q_proj.weight`, as in Llama's files and most others.
    Llama,
    /// As in Phi-3's files: the same with queries, keys and values in one `qkv_proj`, and an MLP's two first projections in one
    /// `gate_up_proj`.
    Phi3,
    /// `h.0.attn.c_attn.weight`, as in GPT-2's files: queries, keys and values in one projection, and weights `[in, out]`.
    Gpt2,
}

/// A kind of norm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormKind {
    /// The root mean square, times a weight.
    Rms,
    /// The same times 1 + weight (Gemma).
    RmsPlusOne,
    /// Layer norm with weight and bias.
    Layer,
}

/// The most blocks that a decoder may have.
pub(super) const MOST_BLOCKS: usize = 1 << 14;

impl DecoderConfig {
    /// GPT-2 as published, of other sizes: width, heads and blocks; without dropout, parameters named without a prefix.
    pub(super) fn gpt2(vocab: usize, ctx: usize, [hidden_size, heads, blocks]: [usize; 3]) -> Self {
        Self {
            naming: ParameterNaming::Gpt2,
            prefix: "",
            vocab,
            ctx,
            hidden_size,
            intermediate_size: 4 * hidden_size,
            num_attention_heads: heads,
            num_key_value_heads: heads,
            head_dim: hidden_size / heads,
            blocks: vec![BlockConfig::default(); blocks],
            learned_positions: Some(ctx),
            norm: NormKind::Layer,
            norm_eps: 1e-5,
            norms_after: false,
            query_key_norms: false,
            qkv_bias: true,
            output_bias: true,
            mlp_bias: true,
            gated: false,
            activation: Activation::GeluTanh,
            query_scale: None,
            attention_soft_cap: None,
            logit_soft_cap: None,
            embedding_scale: None,
            // Transformers' GPT-2 looks its padding up as any token.
            padding: None,
            tie_word_embeddings: true,
            checkpoint_activations: false,
            dropout: 0.0,
            lora: None,
        }
    }

    /// Checks that the sizes make a model.
    ///
    /// # Errors
    /// A size of 0 or beyond all bounds, heads that do not divide what they should, a number that is not positive and finite.
    pub fn validate(&self) -> Result<()> {
        require_sizes(&[
            ("vocab_size", self.vocab),
            ("max_position_embeddings", self.ctx),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_hidden_layers", self.blocks.len()),
            ("num_attention_heads", self.num_attention_heads),
            ("num_key_value_heads", self.num_key_value_heads),
            ("head_dim", self.head_dim),
        ])?;
        if self.blocks.len() > MOST_BLOCKS {
            return Err(refused("num_hidden_layers", self.blocks.len(), &format!("at most {MOST_BLOCKS}")));
        }
        let (heads, kv_heads) = (self.num_attention_heads, self.num_key_value_heads);
        if !heads.is_multiple_of(kv_heads) {
            let allowed = format!("a divisor of num_attention_heads ({heads}), so that each serves as many of them");
            return Err(refused("num_key_value_heads", kv_heads, &allowed));
        }
        require_parameters(self.elements())?;
        match self.learned_positions {
            Some(rows) if rows < self.ctx => {
                return Err(refused(
                    "max_position_embeddings",
                    self.ctx,
                    &format!("at most {rows}, the positions learned"),
                ));
            }
            Some(_) => (),
            None if self.ctx > MOST_POSITIONS => {
                let allowed = format!("at most {MOST_POSITIONS}: positions are counted in f32");
                return Err(refused("max_position_embeddings", self.ctx, &allowed));
            }
            None if !self.head_dim.is_multiple_of(2) => {
                return Err(refused("head_dim", self.head_dim, "even: rotary positions turn pairs of elements"));
            }
            None => self.blocks.iter().try_for_each(|block| block.rotary.frequencies(2).map(drop))?,
        }
        let biases = self.qkv_bias && self.output_bias && self.mlp_bias;
        if self.naming == ParameterNaming::Gpt2 && (self.gated || self.norms_after || self.query_key_norms || !biases) {
            let allowed =
                "another one with a gate, further norms or projections without bias: GPT-2 has no names for them";
            return Err(refused("naming", "that of GPT-2", allowed));
        }
        if self.gated && self.activation == Activation::Gelu {
            return Err(refused("activation", "gelu", "silu or gelu_pytorch_tanh in an MLP with a gate"));
        }
        if self.blocks.iter().any(|block| block.window == Some(0)) {
            return Err(refused("sliding_window", 0, "at least 1"));
        }
        if let Some(padding) = self.padding.filter(|padding| *padding as usize >= self.vocab) {
            return Err(refused("pad_token_id", padding, &format!("below vocab_size ({})", self.vocab)));
        }
        let positive = [
            ("norm_eps", Some(self.norm_eps)),
            ("query_scale", self.query_scale),
            ("attention_soft_cap", self.attention_soft_cap),
            ("logit_soft_cap", self.logit_soft_cap),
            ("embedding_scale", self.embedding_scale),
        ];
        for (key, value) in positive {
            if let Some(value) = value.filter(|value| !(*value > 0.0 && value.is_finite())) {
                return Err(refused(key, value, "a positive finite number"));
            }
        }
        if !(0.0..1.0).contains(&self.dropout) {
            return Err(refused("dropout", self.dropout, "at least 0 and below 1"));
        }
        self.lora.as_ref().map_or(Ok(()), LoraConfig::validate)
    }

    /// Elements of all parameters but those of adapters; an output projection that is the token embedding counts once.
    pub fn num_parameters(&self) -> usize {
        usize::try_from(self.elements()).unwrap_or(usize::MAX)
    }

    /// Elements of a position's queries.
    pub(super) fn query_width(&self) -> usize {
        self.num_attention_heads * self.head_dim
    }

    /// Elements of a position's keys, and of its values.
    pub(super) fn kv_width(&self) -> usize {
        self.num_key_value_heads * self.head_dim
    }

    /// Elements of all parameters, of sizes that were not looked at.
    fn elements(&self) -> u128 {
        let wide = |size: usize| size as u128;
        let [d, inner, head, vocab] = [self.hidden_size, self.intermediate_size, self.head_dim, self.vocab].map(wide);
        let (q, kv) = (wide(self.num_attention_heads) * head, wide(self.num_key_value_heads) * head);
        let if_so = |is_so: bool, elements: u128| if is_so { elements } else { 0 };
        let ups = if self.gated { 2 } else { 1 };
        let norm = d * if self.norm == NormKind::Layer { 2 } else { 1 };
        let weights = (2 * q).saturating_add(2 * kv).saturating_add((ups + 1) * inner).saturating_mul(d);
        let biases = if_so(self.qkv_bias, q + 2 * kv)
            + if_so(self.output_bias, d)
            + if_so(self.mlp_bias, ups * inner + d)
            + if_so(self.query_key_norms, 2 * head);
        let block = weights.saturating_add(biases + norm * if self.norms_after { 4 } else { 2 });
        let rows = if_so(!self.tie_word_embeddings, vocab) + vocab + wide(self.learned_positions.unwrap_or(0));
        wide(self.blocks.len()).saturating_mul(block).saturating_add(rows.saturating_mul(d)).saturating_add(norm)
    }
}
