//! A decoder as one configuration, with the options in which the model families differ.

use super::MixtureConfig;
use super::config_checks::{
    MAX_HEAD_DIM, MAX_POSITIONS, invalid_field, require_blocks, require_parameters, require_sizes,
};
use super::rotary_config::RotaryConfig;
use crate::Result;
use crate::nn::{Activation, LoraConfig, RotaryPairs};

/// The shape of a decoder: a stack of blocks, each of which adds the output of causal attention and the output of an
/// MLP or a mixture of experts to the residual stream.
///
/// It is read from the `config.json` of a Hugging Face model ([`DecoderConfig::read`]). The sizes have the names
/// that such a file uses.
#[derive(Debug, Clone, PartialEq)]
pub struct DecoderConfig {
    /// The naming and storage of parameters.
    pub naming: ParameterNaming,
    /// The prefix of all names except that of a separate output projection: `"model."`, `"model.language_model."`,
    /// `"transformer."` or empty.
    pub prefix: &'static str,
    /// The vocabulary size; token ids are 0 to `vocab - 1`.
    pub vocab: usize,
    /// The maximum length of an input, in tokens.
    pub ctx: usize,
    /// The width of the residual stream.
    pub hidden_size: usize,
    /// The width of the intermediate layer of dense blocks' MLPs.
    pub intermediate_size: usize,
    /// The number of query heads per block.
    pub num_attention_heads: usize,
    /// The number of key and value heads per block; divides `num_attention_heads`.
    pub num_key_value_heads: usize,
    /// The number of elements in a head.
    pub head_dim: usize,
    /// The settings that differ between the blocks, one entry per block.
    pub blocks: Vec<BlockConfig>,
    /// The number of rows in a table of learned positions; without one, positions are rotary.
    pub learned_positions: Option<usize>,
    /// The kind of all norms on the residual stream.
    pub norm: NormKind,
    /// The number added to the variance or the mean square in norms.
    pub norm_eps: f64,
    /// The places of the norms in a block.
    pub norm_placement: NormPlacement,
    /// The norms of queries and keys before they are rotated.
    pub query_key_norms: QueryKeyNorms,
    /// The elements of a head that are rotated together.
    pub rotary_pairs: RotaryPairs,
    /// Whether the projections to queries, keys and values have biases.
    pub qkv_bias: bool,
    /// Whether attention's output projection has a bias.
    pub output_bias: bool,
    /// Whether the MLP's projections have biases.
    pub mlp_bias: bool,
    /// Whether the MLP multiplies the activation of one projection by another projection (SwiGLU, GeGLU).
    pub gated: bool,
    /// The MLP's activation.
    pub activation: Activation,
    /// The mixture of experts of sparse blocks, if there are any.
    pub mixture: Option<Box<MixtureConfig>>,
    /// The limit on the elements of values, and of queries and keys before they are rotated: a number c limits them to
    /// the range from -c to c (OLMoE).
    pub clip_qkv: Option<f64>,
    /// Whether each query head has a sink: a key without a value, whose score is a parameter (gpt-oss).
    pub attention_sinks: bool,
    /// The factor applied to attention scores, or `None` for `1 / sqrt(head_dim)`.
    pub query_scale: Option<f64>,
    /// The cap on attention scores: they are mapped to `cap * tanh(score / cap)`.
    pub attention_soft_cap: Option<f64>,
    /// The cap on logits: they are mapped to `cap * tanh(logit / cap)`.
    pub logit_soft_cap: Option<f64>,
    /// The factor applied to the rows of the token embedding.
    pub embedding_scale: Option<f64>,
    /// The factor applied to the output of each attention and each MLP before it is added to the residual stream
    /// (Granite).
    pub residual_scale: Option<f64>,
    /// The factor applied to logits (Cohere, Granite).
    pub logit_scale: Option<f64>,
    /// The padding token, as transformers calls it. Its lookups add nothing to the embedding's gradient.
    pub padding: Option<u32>,
    /// Whether the output projection is the token embedding.
    pub tie_word_embeddings: bool,
    /// Whether each block keeps only its input in the forward pass and runs again in the backward pass.
    pub checkpoint_activations: bool,
    /// The probability with which training drops elements of the sum of the embeddings, and of the output that each
    /// attention and each MLP adds to the residual stream. Attention weights are never dropped.
    pub dropout: f32,
    /// The adapters of projections, which are selected by their names in the files.
    pub lora: Option<LoraConfig>,
}

/// The settings that differ between the blocks of a decoder.
#[derive(Debug, Clone, PartialEq)]
pub struct BlockConfig {
    /// The number of positions that a position attends to, including itself. `None` means all positions up to its own.
    pub window: Option<usize>,
    /// The rotary positions, or `None` for a block without positions. They are not used with learned positions.
    pub rotary: Option<RotaryConfig>,
    /// The layers that follow attention.
    pub mlp: BlockMlp,
}

impl Default for BlockConfig {
    /// Returns a dense block (with an MLP) in which each position sees all positions up to its own. Positions are
    /// rotary.
    fn default() -> Self {
        Self { window: None, rotary: Some(RotaryConfig::default()), mlp: BlockMlp::Dense }
    }
}

/// The layers that follow attention in a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockMlp {
    /// An MLP.
    Dense,
    /// A mixture of experts ([`DecoderConfig::mixture`]).
    Mixture,
}

/// The naming and storage of a decoder's parameters in Hugging Face's files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ParameterNaming {
    /// Names such as `layers.0.self_attn.q_proj.weight`, as in Llama's files and most others.
    Llama,
    /// Names as in Phi-3's files: Llama's, but with queries, keys and values in one `qkv_proj`, and the MLP's first two
    /// projections in one `gate_up_proj`.
    Phi3,
    /// Names as in GLM's files: Llama's, but with the MLP's first two projections in one `gate_up_proj`.
    Glm,
    /// Names as in StarCoder 2's files: Llama's, but with `c_fc` and `c_proj` in the MLP.
    StarCoder2,
    /// Names such as `h.0.attn.c_attn.weight`, as in GPT-2's files, with queries, keys and values in one projection,
    /// and weights `[in, out]`.
    Gpt2,
}

/// A kind of norm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum NormKind {
    /// Division by the root mean square, times a weight.
    Rms,
    /// Division by the root mean square, times 1 + weight (Gemma).
    RmsPlusOne,
    /// Layer norm with weight and bias.
    Layer,
    /// Layer norm with weight and without bias (Cohere).
    LayerWithoutBias,
    /// Layer norm times 1 + weight, with bias (Nemotron).
    LayerPlusOne,
}

/// The places of the norms on the residual stream in a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum NormPlacement {
    /// Attention and the MLP normalize their inputs: y = x + attention(norm(x)), then y + mlp(norm(y)).
    Before,
    /// The outputs of attention and the MLP are normalized before they are added (OLMo 2): y = x + norm(attention(x)),
    /// then y + norm(mlp(y)).
    After,
    /// Both inputs and outputs are normalized (Gemma 2 and 3, GLM-4).
    BeforeAndAfter,
    /// Attention and the MLP have the same normalized input (Cohere): x + attention(n) + mlp(n), where n = norm(x).
    Parallel,
}

impl NormPlacement {
    /// Returns the number of norms in a block.
    pub(super) fn count(self) -> usize {
        match self {
            Self::Parallel => 1,
            Self::Before | Self::After => 2,
            Self::BeforeAndAfter => 4,
        }
    }

    /// Returns whether the outputs of attention and the MLP are normalized.
    pub(super) fn is_after(self) -> bool {
        matches!(self, Self::After | Self::BeforeAndAfter)
    }
}

/// The norms of queries and keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum QueryKeyNorms {
    /// There are none.
    None,
    /// Each head is normalized, with the same weight for all heads (Qwen 3, Gemma 3).
    PerHead,
    /// All heads of a position are normalized together (OLMo 2).
    AllHeads,
}

impl DecoderConfig {
    /// Returns the configuration of the published GPT-2 with the given sizes: vocabulary, context, width, heads and
    /// blocks. It has no dropout, and its parameter names have no prefix.
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
            norm_placement: NormPlacement::Before,
            query_key_norms: QueryKeyNorms::None,
            rotary_pairs: RotaryPairs::Halves,
            qkv_bias: true,
            output_bias: true,
            mlp_bias: true,
            gated: false,
            activation: Activation::GeluTanh,
            mixture: None,
            clip_qkv: None,
            attention_sinks: false,
            query_scale: None,
            attention_soft_cap: None,
            logit_soft_cap: None,
            embedding_scale: None,
            residual_scale: None,
            logit_scale: None,
            // In transformers, GPT-2 looks up its padding token like any other.
            padding: None,
            tie_word_embeddings: true,
            checkpoint_activations: false,
            dropout: 0.0,
            lora: None,
        }
    }

    /// Checks that the sizes describe a valid model.
    ///
    /// # Errors
    /// A size of 0 or beyond the limits, a number of key and value heads that does not divide the number of query
    /// heads, another value out of its range, or options that cannot be combined.
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
        require_blocks("num_hidden_layers", self.blocks.len())?;
        if self.head_dim > MAX_HEAD_DIM {
            return Err(invalid_field("head_dim", self.head_dim, &format!("at most {MAX_HEAD_DIM}")));
        }
        let (heads, kv_heads) = (self.num_attention_heads, self.num_key_value_heads);
        if !heads.is_multiple_of(kv_heads) {
            let allowed = format!(
                "a divisor of num_attention_heads ({heads}), so that each key and value head serves the same number of \
                 query heads"
            );
            return Err(invalid_field("num_key_value_heads", kv_heads, &allowed));
        }
        require_parameters(self.elements())?;
        self.check_mixture()?;
        match self.learned_positions {
            Some(rows) if rows < self.ctx => {
                return Err(invalid_field(
                    "max_position_embeddings",
                    self.ctx,
                    &format!("at most {rows}, the number of learned positions"),
                ));
            }
            Some(_) => (),
            None if self.ctx > MAX_POSITIONS => {
                let allowed = format!("at most {MAX_POSITIONS}: positions are counted in f32");
                return Err(invalid_field("max_position_embeddings", self.ctx, &allowed));
            }
            None if !self.head_dim.is_multiple_of(2) => {
                return Err(invalid_field(
                    "head_dim",
                    self.head_dim,
                    "even: rotary positions rotate pairs of elements",
                ));
            }
            None => self.check_rotary()?,
        }
        let biases = self.qkv_bias && self.output_bias && self.mlp_bias;
        let is_plain =
            self.norm_placement == NormPlacement::Before && self.query_key_norms == QueryKeyNorms::None && !self.gated;
        if self.naming == ParameterNaming::Gpt2 && !(is_plain && biases) {
            let allowed =
                "a different one for gates, additional norms or projections without bias: GPT-2 has no names for them";
            return Err(invalid_field("naming", "that of GPT-2", allowed));
        }
        if self.gated && !matches!(self.activation, Activation::Silu | Activation::GeluTanh) {
            let found = if self.activation == Activation::Gelu { "gelu" } else { "relu2" };
            return Err(invalid_field("activation", found, "silu or gelu_pytorch_tanh in an MLP with a gate"));
        }
        if !self.gated && self.naming == ParameterNaming::Glm {
            return Err(invalid_field("gated", false, "true: GLM has no names for an MLP without a gate"));
        }
        if self.gated && self.naming == ParameterNaming::StarCoder2 {
            return Err(invalid_field("gated", true, "false: StarCoder 2 has no names for an MLP with a gate"));
        }
        if self.blocks.iter().any(|block| block.window == Some(0)) {
            return Err(invalid_field("sliding_window", 0, "at least 1"));
        }
        if let Some(padding) = self.padding.filter(|padding| *padding as usize >= self.vocab) {
            return Err(invalid_field("pad_token_id", padding, &format!("below vocab_size ({})", self.vocab)));
        }
        let positive = [
            ("norm_eps", Some(self.norm_eps)),
            ("clip_qkv", self.clip_qkv),
            ("query_scale", self.query_scale),
            ("attention_soft_cap", self.attention_soft_cap),
            ("logit_soft_cap", self.logit_soft_cap),
            ("embedding_scale", self.embedding_scale),
            ("residual_scale", self.residual_scale),
            ("logit_scale", self.logit_scale),
        ];
        for (key, value) in positive {
            if let Some(value) = value.filter(|value| !(*value > 0.0 && value.is_finite())) {
                return Err(invalid_field(key, value, "a positive finite number"));
            }
        }
        if !(0.0..1.0).contains(&self.dropout) {
            return Err(invalid_field("dropout", self.dropout, "at least 0 and below 1"));
        }
        self.lora.as_ref().map_or(Ok(()), LoraConfig::validate)
    }

    /// Checks the mixture of experts, and that sparse blocks have one.
    fn check_mixture(&self) -> Result<()> {
        let sparse = self.sparse_blocks().count();
        let Some(mixture) = &self.mixture else {
            return match sparse {
                0 => Ok(()),
                _ => Err(invalid_field("mixture", "absent", "present, because there are sparse blocks")),
            };
        };
        mixture.validate(self.blocks.len())?;
        let is_plain = self.gated && self.activation == Activation::Silu && !self.mlp_bias;
        if self.naming != ParameterNaming::Llama || !is_plain {
            let allowed = "absent: only blocks with Llama's names and an MLP gated with SiLU, without biases, can have \
                           a mixture";
            return Err(invalid_field("mixture", "present", allowed));
        }
        Ok(())
    }

    /// Returns the numbers of the blocks with a mixture of experts.
    pub fn sparse_blocks(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.blocks.len()).filter(|block| self.blocks[*block].mlp == BlockMlp::Mixture)
    }

    /// Checks the rotary positions of all blocks.
    fn check_rotary(&self) -> Result<()> {
        let rotaries = || self.blocks.iter().map(|block| &block.rotary);
        // Most blocks have the same settings as the block before them, so only changes are checked.
        let pairs = rotaries().zip(std::iter::once(&None).chain(rotaries()));
        let changes = pairs.filter(|(rotary, previous)| rotary != previous);
        changes.filter_map(|(rotary, _)| rotary.as_ref()).try_for_each(|rotary| rotary.check(self.head_dim, self.ctx))
    }

    /// Returns the number of elements of all parameters except those of adapters. A tied output projection counts once.
    pub fn num_parameters(&self) -> usize {
        usize::try_from(self.elements()).unwrap_or(usize::MAX)
    }

    /// Returns the number of elements in a position's queries.
    pub(super) fn query_width(&self) -> usize {
        self.num_attention_heads * self.head_dim
    }

    /// Returns the number of elements in a position's keys, which is also that of its values.
    pub(super) fn kv_width(&self) -> usize {
        self.num_key_value_heads * self.head_dim
    }

    /// Returns the number of elements of all parameters, for sizes that have not been validated.
    fn elements(&self) -> u128 {
        let wide = |size: usize| size as u128;
        let [d, inner, head, vocab] = [self.hidden_size, self.intermediate_size, self.head_dim, self.vocab].map(wide);
        let (q, kv) = (wide(self.num_attention_heads) * head, wide(self.num_key_value_heads) * head);
        let count_if = |condition: bool, elements: u128| if condition { elements } else { 0 };
        let ups = if self.gated { 2 } else { 1 };
        let norm = d * if matches!(self.norm, NormKind::Layer | NormKind::LayerPlusOne) { 2 } else { 1 };
        let query_key_norms = match self.query_key_norms {
            QueryKeyNorms::None => 0,
            QueryKeyNorms::PerHead => 2 * head,
            QueryKeyNorms::AllHeads => q + kv,
        };
        let attention = (2 * q).saturating_add(2 * kv).saturating_mul(d);
        let other_elements = count_if(self.qkv_bias, q + 2 * kv)
            + count_if(self.output_bias, d)
            + count_if(self.attention_sinks, wide(self.num_attention_heads))
            + query_key_norms
            + norm * self.norm_placement.count() as u128;
        let mlp = ((ups + 1) * inner).saturating_mul(d).saturating_add(count_if(self.mlp_bias, ups * inner + d));
        let sparse = self.sparse_blocks().count();
        let mixtures = self.mixture.as_ref().map_or(0, |mixture| mixture.elements(d)).saturating_mul(wide(sparse));
        let mlps = mlp.saturating_mul(wide(self.blocks.len() - sparse));
        let rows = count_if(!self.tie_word_embeddings, vocab) + vocab + wide(self.learned_positions.unwrap_or(0));
        let blocks = wide(self.blocks.len()).saturating_mul(attention.saturating_add(other_elements));
        let blocks = blocks.saturating_add(mlps).saturating_add(mixtures);
        blocks.saturating_add(rows.saturating_mul(d)).saturating_add(norm)
    }
}
