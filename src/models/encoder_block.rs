//! One block of an encoder: attention in both directions, then an MLP, each adding to the residual stream.

use super::{EncoderBlockConfig, EncoderConfig, EncoderNaming};
use crate::nn::{
    Activation, AttentionOptions, Dropout, LayerNorm, LayerNormOptions, LinearEpilogue, Projection, ProjectionOptions,
    Rotary, Sequences, WeightLayout, add, attention, columns, exact_gelu_gated, gelu_gated, swiglu,
};
use candle_core::{Result, Tensor};
use candle_nn::{Module, VarBuilder};

/// One transformer block with bidirectional attention: y = norm(x + attention(x)), then norm(y + mlp(y)); or, with
/// [`EncoderConfig::norms_first`], y = x + attention(norm(x)), then y + mlp(norm(y)).
#[derive(Debug, Clone)]
pub struct EncoderBlock {
    attention: EncoderAttention,
    attention_norm: Option<LayerNorm>,
    mlp: EncoderMlp,
    mlp_norm: LayerNorm,
    norms_first: bool,
    attention_drop: Option<Dropout>,
    mlp_drop: Option<Dropout>,
}

/// Returns the dropout layer, if `p` is above 0. All layers can share a seed, because each use draws new random
/// numbers ([`Dropout`]).
pub(super) fn dropout(p: f32) -> Option<Dropout> {
    (p > 0.0).then(|| Dropout::new(p, 0))
}

impl EncoderConfig {
    /// Builds a norm over `width` elements.
    pub(super) fn norm(&self, width: usize, vb: VarBuilder<'_>) -> Result<LayerNorm> {
        let options = LayerNormOptions { eps: self.norm_eps, bias: self.norm_bias, ..LayerNormOptions::default() };
        LayerNorm::with(width, options, vb)
    }

    /// Builds a projection of a block.
    fn projection(
        &self,
        name: &str,
        [inputs, outputs]: [usize; 2],
        bias: bool,
        vb: &VarBuilder<'_>,
    ) -> Result<Projection> {
        let layout = WeightLayout::OutIn;
        let options = ProjectionOptions { layout, bias, std: self.initializer_range, lora: self.lora.as_ref() };
        Projection::new(inputs, outputs, options, vb.pp(name))
    }
}

/// The parameter names within a block.
struct EncoderBlockParameterNames {
    /// The projections to queries, keys and values, or one projection to all of them.
    qkv: &'static [&'static str],
    attention_output: &'static str,
    attention_norm: &'static str,
    up: &'static str,
    down: &'static str,
    mlp_norm: &'static str,
}

const BERT: EncoderBlockParameterNames = EncoderBlockParameterNames {
    qkv: &["attention.self.query", "attention.self.key", "attention.self.value"],
    attention_output: "attention.output.dense",
    attention_norm: "attention.output.LayerNorm",
    up: "intermediate.dense",
    down: "output.dense",
    mlp_norm: "output.LayerNorm",
};

const DISTILBERT: EncoderBlockParameterNames = EncoderBlockParameterNames {
    qkv: &["attention.q_lin", "attention.k_lin", "attention.v_lin"],
    attention_output: "attention.out_lin",
    attention_norm: "sa_layer_norm",
    up: "ffn.lin1",
    down: "ffn.lin2",
    mlp_norm: "output_layer_norm",
};

const MODERNBERT: EncoderBlockParameterNames = EncoderBlockParameterNames {
    qkv: &["attn.Wqkv"],
    attention_output: "attn.Wo",
    attention_norm: "attn_norm",
    up: "mlp.Wi",
    down: "mlp.Wo",
    mlp_norm: "mlp_norm",
};

impl EncoderBlockParameterNames {
    fn of(naming: EncoderNaming) -> Self {
        match naming {
            EncoderNaming::Bert | EncoderNaming::Roberta | EncoderNaming::Electra => BERT,
            EncoderNaming::DistilBert => DISTILBERT,
            EncoderNaming::ModernBert => MODERNBERT,
        }
    }
}

impl EncoderBlock {
    /// Builds block number `number` of `config`. `rotary` rotates queries and keys.
    pub(super) fn new(
        config: &EncoderConfig,
        number: usize,
        rotary: Option<Rotary>,
        vb: VarBuilder<'_>,
    ) -> Result<Self> {
        let names = EncoderBlockParameterNames::of(config.naming);
        let norm = |name: &str| config.norm(config.hidden_size, vb.pp(name));
        // With norms first, the first block takes the embeddings, which are already normalized.
        let has_attention_norm = !config.norms_first || number > 0;
        Ok(Self {
            attention: EncoderAttention::new(config, &names, &config.blocks[number], rotary, &vb)?,
            attention_norm: has_attention_norm.then(|| norm(names.attention_norm)).transpose()?,
            mlp: EncoderMlp::new(config, &names, &vb)?,
            mlp_norm: norm(names.mlp_norm)?,
            norms_first: config.norms_first,
            attention_drop: dropout(config.dropout.attention),
            mlp_drop: dropout(config.dropout.mlp),
        })
    }

    /// Applies the block to `x` `[1, tokens, hidden_size]`.
    pub(super) fn run(&self, x: &Tensor, sequences: &Sequences) -> Result<Tensor> {
        let normalized = |x: &Tensor| self.attention_norm.as_ref().map_or(Ok(x.clone()), |norm| norm.forward(x));
        if self.norms_first {
            let attended = self.attention.forward(&normalized(x)?, sequences)?;
            let x = &add_projected(x, &self.attention.output, &attended, self.attention_drop.as_ref())?;
            let h = self.mlp.down_input(&self.mlp_norm.forward(x)?)?;
            return add_projected(x, &self.mlp.down, &h, self.mlp_drop.as_ref());
        }
        let attended = self.attention.forward(x, sequences)?;
        let x = add_projected(x, &self.attention.output, &attended, self.attention_drop.as_ref())?;
        let x = &normalized(&x)?;
        let h = self.mlp.down_input(x)?;
        self.mlp_norm.forward(&add_projected(x, &self.mlp.down, &h, self.mlp_drop.as_ref())?)
    }
}

/// Returns x + dropout(projection(h)).
fn add_projected(x: &Tensor, projection: &Projection, h: &Tensor, drop: Option<&Dropout>) -> Result<Tensor> {
    match drop {
        None => projection.forward_with_epilogue(h, LinearEpilogue { residual: Some(x), ..LinearEpilogue::default() }),
        Some(drop) => add(x, &drop.forward(&projection.forward(h)?)?),
    }
}

/// Bidirectional attention and its projections.
#[derive(Debug, Clone)]
struct EncoderAttention {
    heads: usize,
    input: EncoderQkv,
    rotary: Option<Rotary>,
    options: AttentionOptions,
    output: Projection,
}

/// The projections to queries, keys and values.
#[derive(Debug, Clone)]
enum EncoderQkv {
    Split([Projection; 3]),
    /// One projection with queries, keys and values side by side, each with this number of columns.
    Fused(Projection, usize),
}

impl EncoderAttention {
    fn new(
        config: &EncoderConfig,
        names: &EncoderBlockParameterNames,
        block: &EncoderBlockConfig,
        rotary: Option<Rotary>,
        vb: &VarBuilder<'_>,
    ) -> Result<Self> {
        let (d, bias) = (config.hidden_size, config.attention_bias);
        let projection = |name: &str, outputs| config.projection(name, [d, outputs], bias, vb);
        let input = match *names.qkv {
            [q, k, v] => EncoderQkv::Split([projection(q, d)?, projection(k, d)?, projection(v, d)?]),
            _ => EncoderQkv::Fused(projection(names.qkv[0], 3 * d)?, d),
        };
        let options = AttentionOptions { window: block.window, bidirectional: true, ..AttentionOptions::default() };
        let (heads, output) = (config.num_attention_heads, projection(names.attention_output, d)?);
        Ok(Self { heads, input, rotary, options, output })
    }

    /// Returns the input of the output projection.
    fn forward(&self, h: &Tensor, sequences: &Sequences) -> Result<Tensor> {
        let [q, k, v] = match &self.input {
            EncoderQkv::Split([q, k, v]) => [q.forward(h)?, k.forward(h)?, v.forward(h)?],
            EncoderQkv::Fused(qkv, d) => {
                let qkv = qkv.forward(h)?;
                [columns(&qkv, 0..*d)?, columns(&qkv, *d..2 * d)?, columns(&qkv, 2 * d..3 * d)?]
            }
        };
        let rotated = |x: Tensor| match &self.rotary {
            Some(rotary) => rotary.forward_in(&x, sequences),
            None => Ok(x),
        };
        attention(&rotated(q)?, &rotated(k)?, &v, self.heads, self.heads, &self.options, Some(sequences))
    }
}

/// The MLP of a block.
#[derive(Debug, Clone)]
struct EncoderMlp {
    up: Projection,
    /// The number of columns of each half of the first projection, if one half is the gate of the other.
    gate: Option<usize>,
    activation: Activation,
    drop: Option<Dropout>,
    down: Projection,
}

impl EncoderMlp {
    fn new(config: &EncoderConfig, names: &EncoderBlockParameterNames, vb: &VarBuilder<'_>) -> Result<Self> {
        let (d, inner, bias) = (config.hidden_size, config.intermediate_size, config.mlp_bias);
        let ups = if config.gated { 2 * inner } else { inner };
        Ok(Self {
            up: config.projection(names.up, [d, ups], bias, vb)?,
            gate: config.gated.then_some(inner),
            activation: config.activation,
            drop: dropout(config.dropout.intermediate),
            down: config.projection(names.down, [inner, d], bias, vb)?,
        })
    }

    /// Returns the input of the down projection.
    fn down_input(&self, x: &Tensor) -> Result<Tensor> {
        let h = match self.gate {
            None => {
                let activation = Some(self.activation);
                self.up.forward_with_epilogue(x, LinearEpilogue { activation, ..LinearEpilogue::default() })?
            }
            Some(inner) => {
                let gate_and_up = self.up.forward(x)?;
                let (gate, up) = (columns(&gate_and_up, 0..inner)?, columns(&gate_and_up, inner..2 * inner)?);
                match self.activation {
                    Activation::Silu => swiglu(&gate, &up)?,
                    Activation::GeluTanh => gelu_gated(&gate, &up)?,
                    Activation::Gelu => exact_gelu_gated(&gate, &up)?,
                    Activation::ReluSquared => {
                        candle_core::bail!("a gate with the activation {:?} is not supported", self.activation)
                    }
                }
            }
        };
        self.drop.as_ref().map_or(Ok(h.clone()), |drop| drop.forward(&h))
    }
}
