//! Llama (Touvron et al. 2023) with the parameter names of Hugging Face's files.

use super::{Architecture, LanguageModel, LlamaConfig};
use crate::nn::{Embedding, KeyValueCache, Linear, RmsNorm, Rotary, Then, grouped_attention, normal, refuse, swiglu};
use crate::zero::{Unit, unit};
use candle_core::{Result, Tensor};
use candle_nn::{Module, VarBuilder};

/// Standard deviation of the weights at the start.
const STD: f64 = 0.02;

/// Llama: rotary positions, RMS norms before attention and MLP, grouped key and value heads, a gated MLP, no biases.
///
/// Parameters, in this order: model.embed_tokens.weight `[vocab, hidden_size]`, per block N model.layers.N. with
/// input_layernorm.weight, self_attn.{q_proj, k_proj, v_proj, o_proj}.weight `[out, in]`,
/// post_attention_layernorm.weight and mlp.{gate_proj, up_proj, down_proj}.weight, then model.norm.weight and, unless
/// it is the token embedding, lm_head.weight `[vocab, hidden_size]`. Each block is a unit ([`crate::zero::unit()`]).
pub type Llama = LanguageModel<LlamaLayers>;

/// One transformer block: x + attention(input_layernorm(x)), then that + mlp(post_attention_layernorm(that)).
#[derive(Debug, Clone)]
pub struct LlamaBlock {
    heads: usize,
    kv_heads: usize,
    rotary: Rotary,
    input_layernorm: RmsNorm,
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    o_proj: Linear,
    post_attention_layernorm: RmsNorm,
    gate_proj: Linear,
    up_proj: Linear,
    down_proj: Linear,
}

impl LlamaBlock {
    /// A block of `config`'s sizes that rotates with `rotary`, whose tables the blocks share. Projections onto the
    /// residual stream start smaller by sqrt(2 num_hidden_layers).
    pub fn new(config: &LlamaConfig, rotary: &Rotary, vb: VarBuilder<'_>) -> Result<Self> {
        let (d, inner, kv) = (config.hidden_size, config.intermediate_size, config.kv_width());
        let norm = |name: &str| RmsNorm::new(d, config.rms_norm_eps, vb.pp(name));
        let projection =
            |name: &str, inputs, outputs, std| Linear::with_init(inputs, outputs, false, normal(std), vb.pp(name));
        let residual_std = STD / (2.0 * config.num_hidden_layers as f64).sqrt();
        Ok(Self {
            heads: config.num_attention_heads,
            kv_heads: config.num_key_value_heads,
            rotary: rotary.clone(),
            input_layernorm: norm("input_layernorm")?,
            q_proj: projection("self_attn.q_proj", d, d, STD)?,
            k_proj: projection("self_attn.k_proj", d, kv, STD)?,
            v_proj: projection("self_attn.v_proj", d, kv, STD)?,
            o_proj: projection("self_attn.o_proj", d, d, residual_std)?,
            post_attention_layernorm: norm("post_attention_layernorm")?,
            gate_proj: projection("mlp.gate_proj", d, inner, STD)?,
            up_proj: projection("mlp.up_proj", d, inner, STD)?,
            down_proj: projection("mlp.down_proj", inner, d, residual_std)?,
        })
    }
}

impl LlamaBlock {
    /// The block on tokens from position `first` on, with `attend` in the place of attention: from queries, keys and values.
    fn around(
        &self,
        x: &Tensor,
        first: usize,
        attend: impl FnOnce(&Tensor, &Tensor, &Tensor) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let onto = |x| Then { residual: Some(x), ..Then::default() };
        let h = self.input_layernorm.forward(x)?;
        let q = self.rotary.forward_from(&self.q_proj.forward(&h)?, first)?;
        let k = self.rotary.forward_from(&self.k_proj.forward(&h)?, first)?;
        let attended = attend(&q, &k, &self.v_proj.forward(&h)?)?;
        let x = &self.o_proj.forward_then(&attended, onto(x))?;
        let h = self.post_attention_layernorm.forward(x)?;
        let h = swiglu(&self.gate_proj.forward(&h)?, &self.up_proj.forward(&h)?)?;
        self.down_proj.forward_then(&h, onto(x))
    }
}

impl Module for LlamaBlock {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.around(x, 0, |q, k, v| grouped_attention(q, k, v, self.heads, self.kv_heads))
    }
}

/// The layers of a [`Llama`].
#[derive(Debug, Clone)]
pub struct LlamaLayers {
    embed_tokens: Embedding,
    blocks: Vec<Unit<LlamaBlock>>,
    norm: RmsNorm,
    /// Nothing where the token embedding is the output projection.
    lm_head: Option<Linear>,
}

impl Architecture for LlamaLayers {
    type Config = LlamaConfig;

    fn new(config: &LlamaConfig, vb: VarBuilder<'_>) -> Result<Self> {
        config.validate().map_err(refuse)?;
        let (d, vocab) = (config.hidden_size, config.vocab);
        let rotary = Rotary::new(config.head_width(), config.ctx, config.rope_theta)?;
        let model = vb.pp("model");
        let embed_tokens = Embedding::new(vocab, d, model.pp("embed_tokens"))?;
        let block = |i| {
            let block = unit(model.pp(format!("layers.{i}")), |vb| LlamaBlock::new(config, &rotary, vb))?;
            Ok(block.checkpointed(config.checkpoint_activations))
        };
        let blocks = (0..config.num_hidden_layers).map(block).collect::<Result<Vec<_>>>()?;
        let norm = RmsNorm::new(d, config.rms_norm_eps, model.pp("norm"))?;
        let untied = !config.tie_word_embeddings;
        let lm_head = untied.then(|| Linear::with_init(d, vocab, false, normal(STD), vb.pp("lm_head"))).transpose()?;
        Ok(Self { embed_tokens, blocks, norm, lm_head })
    }

    fn ctx(config: &LlamaConfig) -> usize {
        config.ctx
    }

    fn states(&self, ids: &Tensor) -> Result<Tensor> {
        let mut x = self.embed_tokens.forward(ids)?;
        for block in &self.blocks {
            x = block.forward(&x)?;
        }
        self.norm.forward(&x)
    }

    fn blocks(&self) -> usize {
        self.blocks.len()
    }

    fn states_after(&self, ids: &Tensor, caches: &mut [KeyValueCache]) -> Result<Tensor> {
        let mut x = self.embed_tokens.forward(ids)?;
        for (block, cache) in self.blocks.iter().zip(caches) {
            x = block.evaluate(|block| {
                let first = cache.len();
                block.around(&x, first, |q, k, v| cache.grouped_attention(q, k, v, block.heads, block.kv_heads))
            })?;
        }
        self.norm.forward(&x)
    }

    fn output(&self) -> &Tensor {
        self.lm_head.as_ref().map_or(self.embed_tokens.weight(), Linear::weight)
    }
}
