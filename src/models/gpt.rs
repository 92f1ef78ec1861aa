//! GPT-2 (Radford et al. 2019) with the parameter names and orientations of Hugging Face's files.

use super::{TokenRng, next_token};
use crate::Error;
use crate::nn::{
    Activation, Conv1D, Embedding, LayerNorm, Then, WeightLayout, add, causal_attention, linear, linear_cross_entropy,
    refuse,
};
use crate::zero::{Unit, unit};
use candle_core::{D, DType, Device, Result, Tensor};
use candle_nn::{Module, VarBuilder};

pub use super::config::GptConfig;

/// Standard deviation of the weights at the start.
const STD: f64 = 0.02;

/// One transformer block: x + attention(ln_1(x)), then that + mlp(ln_2(that)).
#[derive(Debug, Clone)]
pub struct Block {
    n_head: usize,
    ln_1: LayerNorm,
    c_attn: Conv1D,
    attn_proj: Conv1D,
    ln_2: LayerNorm,
    c_fc: Conv1D,
    mlp_proj: Conv1D,
}

impl Block {
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
        })
    }
}

impl Module for Block {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let onto = |x| Then { residual: Some(x), ..Then::default() };
        let gelu = Then { activation: Some(Activation::GeluTanh), ..Then::default() };
        let attended = causal_attention(&self.c_attn.forward(&self.ln_1.forward(x)?)?, self.n_head)?;
        let x = &self.attn_proj.forward_then(&attended, onto(x))?;
        let h = self.c_fc.forward_then(&self.ln_2.forward(x)?, gelu)?;
        self.mlp_proj.forward_then(&h, onto(x))
    }
}

/// GPT-2: learned positions, layer norms before attention and MLP, the output projection tied to the token embedding.
///
/// Parameters, in this order: wte.weight `[vocab, n_embd]`, wpe.weight `[ctx, n_embd]`, per block N h.N.ln_1.{weight,
/// bias}, h.N.attn.c_attn.{weight `[in, out]`, bias}, h.N.attn.c_proj.{..}, h.N.ln_2.{..}, h.N.mlp.c_fc.{..},
/// h.N.mlp.c_proj.{..}, and ln_f.{weight, bias}. Each block is a unit ([`crate::zero::unit()`]).
#[derive(Debug, Clone)]
pub struct Gpt {
    config: GptConfig,
    wte: Embedding,
    wpe: Embedding,
    blocks: Vec<Unit<Block>>,
    ln_f: LayerNorm,
}

impl Gpt {
    /// Builds the model over the parameters that `vb` gives.
    ///
    /// Errors: sizes that make no model, and whatever the builder says about a parameter.
    pub fn new(config: &GptConfig, vb: VarBuilder<'_>) -> Result<Self> {
        config.validate().map_err(refuse)?;
        let d = config.n_embd;
        let wte = Embedding::new(config.vocab, d, vb.pp("wte"))?;
        let wpe = Embedding::new(config.ctx, d, vb.pp("wpe"))?;
        let blocks = (0..config.n_layer)
            .map(|i| {
                let block = unit(vb.pp(format!("h.{i}")), |vb| Block::new(config, vb))?;
                Ok(block.checkpointed(config.checkpoint_activations))
            })
            .collect::<Result<Vec<_>>>()?;
        let ln_f = LayerNorm::new(d, config.eps, vb.pp("ln_f"))?;
        Ok(Self { config: config.clone(), wte, wpe, blocks, ln_f })
    }

    /// The sizes the model was built with.
    pub fn config(&self) -> &GptConfig {
        &self.config
    }

    /// The residual stream after the last block, `[batch, time, n_embd]`.
    fn hidden(&self, ids: &Tensor) -> Result<Tensor> {
        let (batch, time) = ids.dims2()?;
        if time > self.config.ctx {
            return Err(refuse(Error::SequenceTooLong { length: time, context: self.config.ctx }));
        }
        // Positions for every sequence rather than one row broadcast over the batch: the lookup's backward sums the
        // batch in f32, a broadcast's backward sums it in the storage dtype.
        let positions: Vec<u32> = (0..batch).flat_map(|_| 0..time as u32).collect();
        let positions = Tensor::from_vec(positions, (batch, time), ids.device())?;
        let mut x = add(&self.wte.forward(ids)?, &self.wpe.forward(&positions)?)?;
        for block in &self.blocks {
            x = block.forward(&x)?;
        }
        Ok(x)
    }

    /// The logits of hidden states.
    fn head(&self, hidden: &Tensor) -> Result<Tensor> {
        linear(&self.ln_f.forward(hidden)?, self.wte.weight(), None, WeightLayout::OutIn)
    }

    /// Logits `[batch, time, vocab]`, in the parameters' dtype, of ids `[batch, time]` (u32).
    ///
    /// Errors: more than `ctx` tokens in a sequence, an id outside the vocabulary.
    pub fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        self.head(&self.hidden(ids)?)
    }

    /// The mean cross entropy, a scalar of f32, of `targets` `[batch, time]` (u32): each the token after its input.
    ///
    /// Errors: as [`Gpt::forward`], and targets outside the vocabulary.
    pub fn loss(&self, ids: &Tensor, targets: &Tensor) -> Result<Tensor> {
        linear_cross_entropy(&self.ln_f.forward(&self.hidden(ids)?)?, self.wte.weight(), WeightLayout::OutIn, targets)
    }

    /// The logits `[vocab]`, widened to f32, of the token after `tokens`; of more than `ctx` the last `ctx` count.
    ///
    /// Errors: no tokens, or an id outside the vocabulary.
    pub fn last_logits(&self, tokens: &[u32]) -> Result<Vec<f32>> {
        if tokens.is_empty() {
            candle_core::bail!("the model continues a text of at least one token, and none was given")
        }
        let seen = &tokens[tokens.len().saturating_sub(self.config.ctx)..];
        let device: &Device = self.wte.weight().device();
        let hidden = self.hidden(&Tensor::new(seen, device)?.unsqueeze(0)?)?.detach();
        let last = hidden.narrow(1, seen.len() - 1, 1)?;
        let logits = self.head(&last)?.squeeze(0)?.squeeze(0)?;
        debug_assert_eq!(logits.dim(D::Minus1)?, self.config.vocab);
        logits.to_dtype(DType::F32)?.to_vec1()
    }

    /// `n` tokens that continue `prompt`: the most likely ones at temperature 0, else drawn with `seed`.
    ///
    /// Errors: as [`Gpt::last_logits`].
    pub fn generate(&self, prompt: &[u32], n: usize, temperature: f64, seed: u64) -> Result<Vec<u32>> {
        let mut rng = TokenRng::new(seed);
        let mut tokens = prompt.to_vec();
        for _ in 0..n {
            tokens.push(next_token(&self.last_logits(&tokens)?, temperature, &mut rng));
        }
        Ok(tokens.split_off(prompt.len()))
    }
}
