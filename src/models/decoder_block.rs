//! One block of a decoder: attention, then an MLP or a mixture of experts, each adding to the residual stream.

use super::block_parameter_names::BlockParameterNames;
use super::decoder_mixture::Mixture;
use super::decoder_mlp::Mlp;
use super::{BlockConfig, BlockMlp, DecoderConfig, NormKind, NormPlacement, ParameterNaming, QueryKeyNorms};
use crate::nn::{
    AttentionOptions, Dropout, KeyValueCache, LayerNorm, LayerNormOptions, LinearEpilogue, Projection,
    ProjectionOptions, RmsNorm, RmsNormOptions, Rotary, Sequences, WeightLayout, add, attention, attention_with_sinks,
    clamp, columns, fused_attention, join_columns, normal, scale_in_f32,
};
use candle_core::{Result, Tensor};
use candle_nn::{Module, VarBuilder};

/// One transformer block: attention and an MLP or a mixture of experts, which add to the residual stream, with norms
/// placed according to a [`NormPlacement`].
#[derive(Debug, Clone)]
pub struct DecoderBlock {
    before_attention: Option<BlockNorm>,
    attention: BlockAttention,
    after_attention: Option<BlockNorm>,
    /// The norm of the MLP's input, if this input has a separate norm.
    before_mlp: Option<BlockNorm>,
    mlp: MlpOrMixture,
    after_mlp: Option<BlockNorm>,
    is_parallel: bool,
    residual_scale: Option<f64>,
    drop: Option<Dropout>,
}

/// The layers that follow attention in a block.
#[derive(Debug, Clone)]
enum MlpOrMixture {
    Mlp(Box<Mlp>),
    Mixture(Box<Mixture>),
}

/// The inputs of a block besides its hidden states.
#[derive(Default)]
pub(super) struct BlockContext<'a> {
    /// The starts of packed sequences.
    pub sequences: Option<&'a Sequences>,
    /// The keys and values of the positions before the input.
    pub cache: Option<&'a mut KeyValueCache>,
    /// Whether a sparse block returns its router's logits as further columns of its result.
    pub with_router_logits: bool,
}

impl DecoderBlock {
    /// Builds a block of `config` with the settings in `block`. `rotary` rotates queries and keys. Initial weights of
    /// projections onto the residual stream are smaller by a factor of sqrt(2 num_hidden_layers).
    pub(super) fn new(
        config: &DecoderConfig,
        block: &BlockConfig,
        rotary: Option<[Rotary; 2]>,
        vb: VarBuilder<'_>,
    ) -> Result<Self> {
        let names = BlockParameterNames::of(config);
        let placement = config.norm_placement;
        let norm = |is_present: bool, name: &str| is_present.then(|| BlockNorm::new(config, vb.pp(name))).transpose();
        let has_input_norms = placement != NormPlacement::After;
        Ok(Self {
            before_attention: norm(has_input_norms, names.before_attention)?,
            attention: BlockAttention::new(config, block, rotary, &vb.pp(names.attention))?,
            after_attention: norm(placement.is_after(), names.after_attention)?,
            before_mlp: norm(has_input_norms && placement != NormPlacement::Parallel, names.before_mlp)?,
            mlp: match block.mlp {
                BlockMlp::Dense => {
                    MlpOrMixture::Mlp(Box::new(Mlp::new(config, config.intermediate_size, &vb.pp("mlp"))?))
                }
                BlockMlp::Mixture => MlpOrMixture::Mixture(Box::new(Mixture::new(config, &vb)?)),
            },
            after_mlp: norm(placement.is_after(), names.after_mlp)?,
            is_parallel: placement == NormPlacement::Parallel,
            residual_scale: config.residual_scale,
            drop: config.dropout(),
        })
    }

    /// Applies the block to `x` `[batch, time, hidden_size]`.
    ///
    /// If the router's logits are requested, they are part of the result, so that a loss outside a block that
    /// recomputes can depend on them. The result is then `[batch, time, hidden_size + experts]`.
    pub(super) fn run(&self, x: &Tensor, context: BlockContext<'_>) -> Result<Tensor> {
        let normalized = |norm: &Option<BlockNorm>, x: &Tensor| match norm {
            Some(norm) => norm.forward(x),
            None => Ok(x.clone()),
        };
        let with_router_logits = context.with_router_logits;
        let h = normalized(&self.before_attention, x)?;
        let attended = self.attention.forward(&h, context)?;
        let x = &self.add_projected(x, &self.attention.output, &attended, self.after_attention.as_ref())?;
        let h = if self.is_parallel { h } else { normalized(&self.before_mlp, x)? };
        match &self.mlp {
            MlpOrMixture::Mlp(mlp) => self.add_projected(x, &mlp.down, &mlp.down_input(&h)?, self.after_mlp.as_ref()),
            MlpOrMixture::Mixture(mixture) => {
                let (y, routing) = mixture.forward(&h)?;
                let y = self.add_output(x, y, self.after_mlp.as_ref())?;
                if with_router_logits { join_columns(&y, routing.logits()) } else { Ok(y) }
            }
        }
    }

    /// Returns x + dropout(scale * norm(projection(h))).
    fn add_projected(
        &self,
        x: &Tensor,
        projection: &Projection,
        h: &Tensor,
        norm: Option<&BlockNorm>,
    ) -> Result<Tensor> {
        if norm.is_none() && self.drop.is_none() && self.residual_scale.is_none() {
            return projection
                .forward_with_epilogue(h, LinearEpilogue { residual: Some(x), ..LinearEpilogue::default() });
        }
        self.add_output(x, projection.forward(h)?, norm)
    }

    /// Returns x + dropout(scale * norm(y)).
    fn add_output(&self, x: &Tensor, mut y: Tensor, norm: Option<&BlockNorm>) -> Result<Tensor> {
        if let Some(norm) = norm {
            y = norm.forward(&y)?;
        }
        if let Some(scale) = self.residual_scale {
            y = scale_in_f32(&y, scale)?;
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

    /// Returns the standard deviation of the initial weights of a projection in a block. `is_residual` states whether
    /// its output is added to the residual stream.
    pub(super) fn initial_std(&self, is_residual: bool) -> f64 {
        if is_residual { INITIAL_STD / (2.0 * self.blocks.len() as f64).sqrt() } else { INITIAL_STD }
    }

    /// Builds the projection `name` of a block. `is_residual` states whether its output is added to the residual
    /// stream.
    pub(super) fn projection(
        &self,
        name: &str,
        [inputs, outputs]: [usize; 2],
        bias: bool,
        is_residual: bool,
        vb: &VarBuilder<'_>,
    ) -> Result<Projection> {
        let layout = if self.naming == ParameterNaming::Gpt2 { WeightLayout::InOut } else { WeightLayout::OutIn };
        let options = ProjectionOptions { layout, bias, std: self.initial_std(is_residual), lora: self.lora.as_ref() };
        Projection::new(inputs, outputs, options, vb.pp(name))
    }
}

/// The standard deviation of initial weights.
pub(super) const INITIAL_STD: f64 = 0.02;

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
            NormKind::Layer | NormKind::LayerWithoutBias | NormKind::LayerPlusOne => {
                let (plus_one, bias) =
                    (config.norm == NormKind::LayerPlusOne, config.norm != NormKind::LayerWithoutBias);
                LayerNorm::with(width, LayerNormOptions { eps, plus_one, bias }, vb).map(Self::Layer)
            }
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
    /// The norms of queries and keys.
    query_key_norms: Option<[RmsNorm; 2]>,
    /// The rotations of queries and keys.
    rotary: Option<[Rotary; 2]>,
    /// The limit on the elements of values, and of queries and keys before they are rotated.
    clip: Option<f64>,
    /// The scores of the query heads' sinks.
    sinks: Option<Tensor>,
    options: AttentionOptions,
    output: Projection,
}

/// The projections to queries, keys and values.
#[derive(Debug, Clone)]
enum QkvProjections {
    Split([Projection; 3]),
    /// One projection with queries, keys and values side by side.
    Fused(Projection),
}

impl BlockAttention {
    fn new(
        config: &DecoderConfig,
        block: &BlockConfig,
        rotary: Option<[Rotary; 2]>,
        vb: &VarBuilder<'_>,
    ) -> Result<Self> {
        let (d, q, kv) = (config.hidden_size, config.query_width(), config.kv_width());
        let names = BlockParameterNames::of(config);
        let projection = |name: &str, outputs| config.projection(name, [d, outputs], config.qkv_bias, false, vb);
        let input = match config.naming {
            ParameterNaming::Llama | ParameterNaming::Glm | ParameterNaming::StarCoder2 => {
                QkvProjections::Split([projection("q_proj", q)?, projection("k_proj", kv)?, projection("v_proj", kv)?])
            }
            ParameterNaming::Phi3 | ParameterNaming::Gpt2 => QkvProjections::Fused(projection(names.qkv, q + 2 * kv)?),
        };
        let output = config.projection(names.attention_output, [q, d], config.output_bias, true, vb)?;
        let norms = |widths: [usize; 2], by_head| {
            let [q, k] = widths;
            let norms =
                [rms_norm(config, q, by_head, vb.pp("q_norm"))?, rms_norm(config, k, by_head, vb.pp("k_norm"))?];
            Ok::<_, candle_core::Error>(Some(norms))
        };
        let query_key_norms = match config.query_key_norms {
            QueryKeyNorms::None => None,
            QueryKeyNorms::PerHead => norms([config.head_dim; 2], true)?,
            QueryKeyNorms::AllHeads => norms([q, kv], false)?,
        };
        Ok(Self {
            heads: config.num_attention_heads,
            kv_heads: config.num_key_value_heads,
            head_dim: config.head_dim,
            input,
            query_key_norms,
            rotary,
            clip: config.clip_qkv,
            sinks: match config.attention_sinks {
                true => Some(vb.get_with_hints(config.num_attention_heads, "sinks", normal(INITIAL_STD))?),
                false => None,
            },
            options: AttentionOptions {
                scale: config.query_scale,
                soft_cap: config.attention_soft_cap,
                window: block.window,
                ..AttentionOptions::default()
            },
            output,
        })
    }

    /// Returns the input of the output projection.
    fn forward(&self, h: &Tensor, context: BlockContext<'_>) -> Result<Tensor> {
        let BlockContext { sequences, cache, .. } = context;
        let first = cache.as_ref().map_or(0, |cache| cache.len());
        let [q, k, v] = match &self.input {
            QkvProjections::Split([q, k, v]) => [q.forward(h)?, k.forward(h)?, v.forward(h)?],
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
        let rotated = |x: Tensor, index: usize| {
            let x = match &self.query_key_norms {
                Some(norms) => norms[index].forward(&x)?,
                None => x,
            };
            let x = self.clipped(x)?;
            match (&self.rotary, sequences) {
                (Some(rotary), Some(sequences)) => rotary[index].forward_in(&x, sequences),
                (Some(rotary), None) => rotary[index].forward_from(&x, first),
                (None, _) => Ok(x),
            }
        };
        let (q, k, v) = (rotated(q, 0)?, rotated(k, 1)?, self.clipped(v)?);
        let (heads, kv_heads, options) = (self.heads, self.kv_heads, &self.options);
        match (cache, &self.sinks) {
            (Some(cache), None) => cache.attention(&q, &k, &v, heads, kv_heads, options),
            (Some(cache), Some(sinks)) => cache.attention_with_sinks([&q, &k, &v], sinks, heads, kv_heads, options),
            (None, None) => attention(&q, &k, &v, heads, kv_heads, options, sequences),
            (None, Some(sinks)) => attention_with_sinks([&q, &k, &v], sinks, heads, kv_heads, options, sequences),
        }
    }

    /// Limits the elements of queries, keys or values if a limit is configured.
    fn clipped(&self, x: Tensor) -> Result<Tensor> {
        self.clip.map_or(Ok(x.clone()), |limit| clamp(&x, limit))
    }

    /// Returns whether attention takes queries, keys and values side by side in one tensor.
    fn takes_fused(&self) -> bool {
        let is_plain = self.rotary.is_none() && self.query_key_norms.is_none() && self.clip.is_none();
        is_plain && self.sinks.is_none() && self.heads == self.kv_heads
    }

    /// Splits queries, keys and values that are side by side in one tensor.
    fn split_qkv(&self, qkv: &Tensor) -> Result<[Tensor; 3]> {
        let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        Ok([columns(qkv, 0..q)?, columns(qkv, q..q + kv)?, columns(qkv, q + kv..q + 2 * kv)?])
    }
}
