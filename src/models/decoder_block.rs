//! One block of a decoder: attention, then an MLP, each adding to the residual stream.

use super::{BlockConfig, DecoderConfig, NormKind, ParameterNaming};
use crate::nn::{
    Activation, AttentionOptions, Dropout, KeyValueCache, LayerNorm, LinearEpilogue, Projection, ProjectionOptions,
    RmsNorm, RmsNormOptions, Rotary, Sequences, WeightLayout, add, attention, columns, fused_attention, gelu_gated,
    swiglu,
};
use candle_core::{Result, Tensor};
use candle_nn::{Module, VarBuilder};

/// One transformer block: y = x + attention(norm(x)), then y + mlp(norm(y)). The added terms may be normalized too.
#[derive(Debug, Clone)]
pub struct DecoderBlock {
    before_attention: BlockNorm,
    attention: BlockAttention,
    after_attention: Option<BlockNorm>,
    before_mlp: BlockNorm,
    mlp: Mlp,
    after_mlp: Option<BlockNorm>,
    drop: Option<Dropout>,
}

/// The inputs of a block besides its hidden states.
#[derive(Default)]
pub(super) struct BlockContext<'a> {
    /// The starts of packed sequences.
    pub sequences: Option<&'a Sequences>,
    /// The keys and values of the positions before the input.
    pub cache: Option<&'a mut KeyValueCache>,
}

impl DecoderBlock {
    /// Builds a block of `config` with the settings in `rule` and the tables in `rotary`. Initial weights of
    /// projections onto the residual stream are smaller by a factor of sqrt(2 num_hidden_layers).
    pub(super) fn new(
        config: &DecoderConfig,
        rule: &BlockConfig,
        rotary: Option<Rotary>,
        vb: VarBuilder<'_>,
    ) -> Result<Self> {
        let names = BlockNames::of(config);
        let norm = |name: &str| BlockNorm::new(config, vb.pp(name));
        let after = |name: &str| config.norms_after.then(|| norm(name)).transpose();
        Ok(Self {
            before_attention: norm(names.before_attention)?,
            attention: BlockAttention::new(config, rule, rotary, &vb.pp(names.attention))?,
            after_attention: after("post_attention_layernorm")?,
            before_mlp: norm(names.before_mlp)?,
            mlp: Mlp::new(config, &vb.pp("mlp"))?,
            after_mlp: after("post_feedforward_layernorm")?,
            drop: config.dropout(),
        })
    }

    /// Applies the block to `x` `[batch, time, hidden_size]`.
    pub(super) fn run(&self, x: &Tensor, around: BlockContext<'_>) -> Result<Tensor> {
        let attended = self.attention.forward(&self.before_attention.forward(x)?, around)?;
        let x = &self.add_projected(x, &self.attention.output, &attended, self.after_attention.as_ref())?;
        let h = self.mlp.down_input(&self.before_mlp.forward(x)?)?;
        self.add_projected(x, &self.mlp.down, &h, self.after_mlp.as_ref())
    }

    /// Returns x + dropout(norm(projection(h))).
    fn add_projected(
        &self,
        x: &Tensor,
        projection: &Projection,
        h: &Tensor,
        norm: Option<&BlockNorm>,
    ) -> Result<Tensor> {
        if norm.is_none() && self.drop.is_none() {
            return projection.forward_then(h, LinearEpilogue { residual: Some(x), ..LinearEpilogue::default() });
        }
        let mut y = projection.forward(h)?;
        if let Some(norm) = norm {
            y = norm.forward(&y)?;
        }
        if let Some(drop) = &self.drop {
            y = drop.forward(&y)?;
        }
        add(x, &y)
    }
}

impl Module for DecoderBlock {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.run(x, BlockContext::default())
    }
}

impl DecoderConfig {
    /// Returns the configured dropout layer. All layers can share a seed, because each use draws new random
    /// numbers ([`Dropout`]).
    pub(super) fn dropout(&self) -> Option<Dropout> {
        (self.dropout > 0.0).then(|| Dropout::new(self.dropout, 0))
    }

    /// Builds the projection `name` of a block. `is_residual` states whether its output is added to the residual
    /// stream.
    fn projection(
        &self,
        name: &str,
        [inputs, outputs]: [usize; 2],
        bias: bool,
        is_residual: bool,
        vb: &VarBuilder<'_>,
    ) -> Result<Projection> {
        let layout = if self.naming == ParameterNaming::Gpt2 { WeightLayout::InOut } else { WeightLayout::OutIn };
        let std = if is_residual { INITIAL_STD / (2.0 * self.blocks.len() as f64).sqrt() } else { INITIAL_STD };
        let options = ProjectionOptions { layout, bias, std, lora: self.lora.as_ref() };
        Projection::new(inputs, outputs, options, vb.pp(name))
    }
}

/// The standard deviation of initial weights.
pub(super) const INITIAL_STD: f64 = 0.02;

/// The parameter names within a block that differ between models.
struct BlockNames {
    before_attention: &'static str,
    before_mlp: &'static str,
    attention: &'static str,
    qkv: &'static str,
    attention_output: &'static str,
    up: &'static str,
    down: &'static str,
}

const LLAMA: BlockNames = BlockNames {
    before_attention: "input_layernorm",
    before_mlp: "pre_feedforward_layernorm",
    attention: "self_attn",
    qkv: "qkv_proj",
    attention_output: "o_proj",
    up: "up_proj",
    down: "down_proj",
};

const GPT2: BlockNames = BlockNames {
    before_attention: "ln_1",
    before_mlp: "ln_2",
    attention: "attn",
    qkv: "c_attn",
    attention_output: "c_proj",
    up: "c_fc",
    down: "c_proj",
};

impl BlockNames {
    fn of(config: &DecoderConfig) -> Self {
        match config.naming {
            ParameterNaming::Gpt2 => GPT2,
            // In models with two norms, the second one is named for its position after attention.
            _ if !config.norms_after => Self { before_mlp: "post_attention_layernorm", ..LLAMA },
            _ => LLAMA,
        }
    }
}

/// A norm on the residual stream.
#[derive(Debug, Clone)]
pub(super) enum BlockNorm {
    Rms(RmsNorm),
    Layer(LayerNorm),
}

impl BlockNorm {
    pub fn new(config: &DecoderConfig, vb: VarBuilder<'_>) -> Result<Self> {
        let (width, eps) = (config.hidden_size, config.norm_eps);
        match config.norm {
            NormKind::Layer => LayerNorm::new(width, eps, vb).map(Self::Layer),
            NormKind::Rms | NormKind::RmsPlusOne => rms_norm(config, width, false, vb).map(Self::Rms),
        }
    }
}

/// Builds a root-mean-square norm of the configured kind. With `by_head`, it normalizes each group of `width`
/// elements in the last dimension.
fn rms_norm(config: &DecoderConfig, width: usize, by_head: bool, vb: VarBuilder<'_>) -> Result<RmsNorm> {
    let plus_one = config.norm == NormKind::RmsPlusOne;
    RmsNorm::with(width, RmsNormOptions { eps: config.norm_eps, plus_one, by_head }, vb)
}

impl Module for BlockNorm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::Rms(norm) => norm.forward(x),
            Self::Layer(norm) => norm.forward(x),
        }
    }
}

/// Causal attention and its projections.
#[derive(Debug, Clone)]
struct BlockAttention {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    input: QkvProjections,
    /// The per-head norms of queries and keys.
    head_norms: Option<[RmsNorm; 2]>,
    rotary: Option<Rotary>,
    options: AttentionOptions,
    output: Projection,
}

/// The projections to queries, keys and values.
#[derive(Debug, Clone)]
enum QkvProjections {
    Apart([Projection; 3]),
    /// One projection with queries, keys and values side by side.
    Fused(Projection),
}

impl BlockAttention {
    fn new(config: &DecoderConfig, rule: &BlockConfig, rotary: Option<Rotary>, vb: &VarBuilder<'_>) -> Result<Self> {
        let (d, q, kv) = (config.hidden_size, config.query_width(), config.kv_width());
        let names = BlockNames::of(config);
        let projection = |name: &str, outputs| config.projection(name, [d, outputs], config.qkv_bias, false, vb);
        let input = match config.naming {
            ParameterNaming::Llama => {
                QkvProjections::Apart([projection("q_proj", q)?, projection("k_proj", kv)?, projection("v_proj", kv)?])
            }
            ParameterNaming::Phi3 | ParameterNaming::Gpt2 => QkvProjections::Fused(projection(names.qkv, q + 2 * kv)?),
        };
        let output = config.projection(names.attention_output, [q, d], config.output_bias, true, vb)?;
        let head_norm = |name: &str| rms_norm(config, config.head_dim, true, vb.pp(name));
        let head_norms = match config.query_key_norms {
            true => Some([head_norm("q_norm")?, head_norm("k_norm")?]),
            false => None,
        };
        Ok(Self {
            heads: config.num_attention_heads,
            kv_heads: config.num_key_value_heads,
            head_dim: config.head_dim,
            input,
            head_norms,
            rotary,
            options: AttentionOptions {
                scale: config.query_scale,
                soft_cap: config.attention_soft_cap,
                window: rule.window,
                ..AttentionOptions::default()
            },
            output,
        })
    }

    /// Returns the input of the output projection.
    fn forward(&self, h: &Tensor, around: BlockContext<'_>) -> Result<Tensor> {
        let BlockContext { sequences, cache } = around;
        let first = cache.as_ref().map_or(0, |cache| cache.len());
        let [q, k, v] = match &self.input {
            QkvProjections::Apart([q, k, v]) => [q.forward(h)?, k.forward(h)?, v.forward(h)?],
            QkvProjections::Fused(qkv) => {
                let qkv = qkv.forward(h)?;
                if self.takes_fused() {
                    return match cache {
                        Some(cache) => cache.fused_attention(&qkv, self.heads, &self.options),
                        None => fused_attention(&qkv, self.heads, &self.options, sequences),
                    };
                }
                self.split_qkv(&qkv)?
            }
        };
        self.attend([q, k, v], first, sequences, cache)
    }

    /// Applies attention to queries, keys and values as returned by the projections.
    fn attend(
        &self,
        [q, k, v]: [Tensor; 3],
        first: usize,
        sequences: Option<&Sequences>,
        cache: Option<&mut KeyValueCache>,
    ) -> Result<Tensor> {
        let turned = |x: Tensor, which: usize| {
            let x = match &self.head_norms {
                Some(norms) => norms[which].forward(&x)?,
                None => x,
            };
            match (&self.rotary, sequences) {
                (Some(rotary), Some(sequences)) => rotary.forward_in(&x, sequences),
                (Some(rotary), None) => rotary.forward_from(&x, first),
                (None, _) => Ok(x),
            }
        };
        let (q, k) = (turned(q, 0)?, turned(k, 1)?);
        match cache {
            Some(cache) => cache.attention(&q, &k, &v, self.heads, self.kv_heads, &self.options),
            None => attention(&q, &k, &v, self.heads, self.kv_heads, &self.options, sequences),
        }
    }

    /// Returns whether attention takes queries, keys and values side by side in one tensor.
    fn takes_fused(&self) -> bool {
        self.rotary.is_none() && self.head_norms.is_none() && self.heads == self.kv_heads
    }

    /// Splits queries, keys and values that are side by side in one tensor.
    fn split_qkv(&self, qkv: &Tensor) -> Result<[Tensor; 3]> {
        let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        Ok([columns(qkv, 0..q)?, columns(qkv, q..q + kv)?, columns(qkv, q + kv..q + 2 * kv)?])
    }
}

/// The MLP of a block.
#[derive(Debug, Clone)]
struct Mlp {
    input: MlpInput,
    activation: Activation,
    down: Projection,
}

/// The first projections of an MLP.
#[derive(Debug, Clone)]
enum MlpInput {
    Plain(Projection),
    /// The gate and the up projection.
    Gated([Projection; 2]),
    /// One projection with gate and up side by side, each with this number of columns.
    FusedGated(Projection, usize),
}

impl Mlp {
    fn new(config: &DecoderConfig, vb: &VarBuilder<'_>) -> Result<Self> {
        let (d, inner, names) = (config.hidden_size, config.intermediate_size, BlockNames::of(config));
        let projection = |name: &str, outputs| config.projection(name, [d, outputs], config.mlp_bias, false, vb);
        let input = match (config.gated, config.naming) {
            (false, _) => MlpInput::Plain(projection(names.up, inner)?),
            (true, ParameterNaming::Phi3) => MlpInput::FusedGated(projection("gate_up_proj", 2 * inner)?, inner),
            (true, _) => MlpInput::Gated([projection("gate_proj", inner)?, projection(names.up, inner)?]),
        };
        let down = config.projection(names.down, [inner, d], config.mlp_bias, true, vb)?;
        Ok(Self { input, activation: config.activation, down })
    }

    /// Returns the input of the down projection.
    fn down_input(&self, x: &Tensor) -> Result<Tensor> {
        match &self.input {
            MlpInput::Plain(up) => {
                up.forward_then(x, LinearEpilogue { activation: Some(self.activation), ..LinearEpilogue::default() })
            }
            MlpInput::Gated([gate, up]) => self.gated(&gate.forward(x)?, &up.forward(x)?),
            MlpInput::FusedGated(gate_up, inner) => {
                let both = gate_up.forward(x)?;
                self.gated(&columns(&both, 0..*inner)?, &columns(&both, *inner..2 * inner)?)
            }
        }
    }

    fn gated(&self, gate: &Tensor, up: &Tensor) -> Result<Tensor> {
        match self.activation {
            Activation::Silu => swiglu(gate, up),
            Activation::GeluTanh => gelu_gated(gate, up),
            Activation::Gelu => candle_core::bail!("a gate with the exact GELU is not supported"),
        }
    }
}
