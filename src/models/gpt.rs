//! GPT-2 (Radford et al. 2019) with the parameter names and orientations of Hugging Face's files.

use super::{Architecture, GptConfig, LanguageModel};
use crate::nn::{
    Activation, Conv1D, Dropout, Embedding, KeyValueCache, LayerNorm, Then, add, causal_attention, refuse,
};
use crate::zero::{Unit, unit};
use candle_core::{Result, Tensor};
use candle_nn::{Module, VarBuilder};

/// Standard deviation of the weights at the start.
const STD: f64 = 0.02;

/// GPT-2: learned positions, layer norms before attention and MLP, the output projection tied to the token embedding.
///
/// Parameters, in this order: wte.weight `[vocab, n_embd]`, wpe.weight `[ctx, n_embd]`, per block N h.N.ln_1.{weight,
/// bias}, h.N.attn.c_attn.{weight `[in, out]`, bias}, h.N.attn.c_proj.{..}, h.N.ln_2.{..}, h.N.mlp.c_fc.{..},
/// h.N.mlp.c_proj.{..}, and ln_f.{weight, bias}. Each block is a unit ([`crate::zero::unit()`]).
pub type Gpt = LanguageModel<GptLayers>;

/// One transformer block: x + attention(ln_1(x)), then that + mlp(ln_2(that)).
#[derive(Debug, Clone)]
pub struct GptBlock {
    n_head: usize,
    ln_1: LayerNorm,
    c_attn: Conv1D,
    attn_proj: Conv1D,
    ln_2: LayerNorm,
    c_fc: Conv1D,
    mlp_proj: Conv1D,
    drop: Option<Dropout>,
}

impl GptBlock {
    /// A block of `config`'s sizes. Projections onto the residual stream start smaller by sqrt(2 n_layer).
    pub fn new(config: &GptConfig, vb: VarBuilder<'_>) -> Result<Self> {
        let d = config.n_embd;
        let residual_std = STD / (2.0 * config.n_layer as f64).sqrt();
        let (attn, mlp) = (vb.pp("attn"), vb.pp("mlp"));
        Ok(Self {
            n_head: config.n_head,
            ln_1: LayerNorm::new(d, config.eps, vb.pp("ln_1"))?,
            c_attn: Conv1D::new(d, 3 * d, STD, attn.pp("c_attn"))?,
            attn_proj: Conv1D::new(d, d, residual_std, attn.pp("c_proj"))?,
            ln_2: LayerNorm::new(d, config.eps, vb.pp("ln_2"))?,
            c_fc: Conv1D::new(d, 4 * d, STD, mlp.pp("c_fc"))?,
            mlp_proj: Conv1D::new(4 * d, d, residual_std, mlp.pp("c_proj"))?,
            drop: dropout_of(config),
        })
    }

    /// x + dropout(projection(h)).
    fn onto(&self, x: &Tensor, projection: &Conv1D, h: &Tensor) -> Result<Tensor> {
        match &self.drop {
            None => projection.forward_then(h, Then { residual: Some(x), ..Then::default() }),
            Some(drop) => add(x, &drop.forward(&projection.forward(h)?)?),
        }
    }
}

impl GptBlock {
    /// The block, with `attend` in the place of attention: from queries, keys and values side by side.
    fn around(&self, x: &Tensor, attend: impl FnOnce(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
        let gelu = Then { activation: Some(Activation::GeluTanh), ..Then::default() };
        let attended = attend(&self.c_attn.forward(&self.ln_1.forward(x)?)?)?;
        let x = &self.onto(x, &self.attn_proj, &attended)?;
        let h = self.c_fc.forward_then(&self.ln_2.forward(x)?, gelu)?;
        self.onto(x, &self.mlp_proj, &h)
    }
}

impl Module for GptBlock {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.around(x, |qkv| causal_attention(qkv, self.n_head))
    }
}

/// The configured dropout. All layers share a seed, for the draws of a forward are numbered ([`Dropout`]).
fn dropout_of(config: &GptConfig) -> Option<Dropout> {
    (config.dropout > 0.0).then(|| Dropout::new(config.dropout, 0))
}

/// The layers of a [`Gpt`].
#[derive(Debug, Clone)]
pub struct GptLayers {
    wte: Embedding,
    wpe: Embedding,
    drop: Option<Dropout>,
    blocks: Vec<Unit<GptBlock>>,
    ln_f: LayerNorm,
}

impl GptLayers {
    /// The input of the first block, of tokens from position `first` on.
    fn embedded(&self, ids: &Tensor, first: usize) -> Result<Tensor> {
        let (batch, time) = ids.dims2()?;
        // Positions for every sequence rather than one row broadcast over the batch: the lookup's backward sums the
        // batch in f32, a broadcast's backward sums it in the storage dtype.
        let positions: Vec<u32> =
            (0..batch).flat_map(|_| (first..first + time).map(|position| position as u32)).collect();
        let positions = Tensor::from_vec(positions, (batch, time), ids.device())?;
        let x = add(&self.wte.forward(ids)?, &self.wpe.forward(&positions)?)?;
        self.drop.as_ref().map_or(Ok(x.clone()), |drop| drop.forward(&x))
    }
}

impl Architecture for GptLayers {
    type Config = GptConfig;

    fn new(config: &GptConfig, vb: VarBuilder<'_>) -> Result<Self> {
        config.validate().map_err(refuse)?;
        let d = config.n_embd;
        let wte = Embedding::new(config.vocab, d, vb.pp("wte"))?;
        let wpe = Embedding::new(config.ctx, d, vb.pp("wpe"))?;
        let block = |i| {
            let block = unit(vb.pp(format!("h.{i}")), |vb| GptBlock::new(config, vb))?;
            Ok(block.checkpointed(config.checkpoint_activations))
        };
        let blocks = (0..config.n_layer).map(block).collect::<Result<Vec<_>>>()?;
        let ln_f = LayerNorm::new(d, config.eps, vb.pp("ln_f"))?;
        Ok(Self { wte, wpe, drop: dropout_of(config), blocks, ln_f })
    }

    fn ctx(config: &GptConfig) -> usize {
        config.ctx
    }

    fn states(&self, ids: &Tensor) -> Result<Tensor> {
        let mut x = self.embedded(ids, 0)?;
        for block in &self.blocks {
            x = block.forward(&x)?;
        }
        self.ln_f.forward(&x)
    }

    fn blocks(&self) -> usize {
        self.blocks.len()
    }

    fn states_after(&self, ids: &Tensor, caches: &mut [KeyValueCache]) -> Result<Tensor> {
        let mut x = self.embedded(ids, caches.first().map_or(0, KeyValueCache::len))?;
        for (block, cache) in self.blocks.iter().zip(caches) {
            x = block.evaluate(|block| block.around(&x, |qkv| cache.causal_attention(qkv, block.n_head)))?;
        }
        self.ln_f.forward(&x)
    }

    fn output(&self) -> &Tensor {
        self.wte.weight()
    }
}
