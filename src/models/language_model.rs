//! The common parts of language models: logits, loss and generation over a stack of blocks.

use super::{TokenRng, next_token};
use crate::error::ModelError;
use crate::graph::without_gradients;
use crate::nn::{WeightLayout, linear, linear_cross_entropy, refuse};
use candle_core::{DType, Result, Tensor};
use candle_nn::VarBuilder;

/// The part that differs between architectures: from token ids to the states that the output projection takes.
pub trait Architecture: Sized {
    /// The sizes.
    type Config: Clone;

    /// Builds the layers over the parameters that `vb` gives.
    ///
    /// # Errors
    /// Sizes that make no model, and whatever the builder says about a parameter.
    fn new(config: &Self::Config, vb: VarBuilder<'_>) -> Result<Self>;

    /// The longest input, in tokens.
    fn ctx(config: &Self::Config) -> usize;

    /// The states after the last block and the last norm, `[batch, time, width]`, of ids `[batch, time]` (u32), with a
    /// time of at most the context.
    fn states(&self, ids: &Tensor) -> Result<Tensor>;

    /// The output projection, `[vocab, width]`.
    fn output(&self) -> &Tensor;
}

/// A model that says which token comes next; [`Gpt`](super::Gpt) and [`Llama`](super::Llama) are two of them.
#[derive(Debug, Clone)]
pub struct LanguageModel<A: Architecture> {
    config: A::Config,
    layers: A,
}

impl<A: Architecture> LanguageModel<A> {
    /// Builds the model over the parameters that `vb` gives.
    ///
    /// # Errors
    /// Sizes that make no model, and whatever the builder says about a parameter.
    pub fn new(config: &A::Config, vb: VarBuilder<'_>) -> Result<Self> {
        Ok(Self { config: config.clone(), layers: A::new(config, vb)? })
    }

    /// The sizes the model was built with.
    pub fn config(&self) -> &A::Config {
        &self.config
    }

    /// The input of the output projection, for ids that fit into the context.
    fn states(&self, ids: &Tensor) -> Result<Tensor> {
        let (length, context) = (ids.dims2()?.1, A::ctx(&self.config));
        if length > context {
            return Err(refuse(ModelError::SequenceTooLong { length, context }.into()));
        }
        self.layers.states(ids)
    }

    /// The logits of states.
    fn project(&self, states: &Tensor) -> Result<Tensor> {
        linear(states, self.layers.output(), None, WeightLayout::OutIn)
    }

    /// Logits `[batch, time, vocab]`, in the parameters' dtype, of ids `[batch, time]` (u32).
    ///
    /// # Errors
    /// More tokens in a sequence than the context has, an id outside the vocabulary.
    pub fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        self.project(&self.states(ids)?)
    }

    /// The mean cross entropy, a scalar of f32, of `targets` `[batch, time]` (u32): each the token after its input.
    ///
    /// # Errors
    /// As [`LanguageModel::forward`], and targets outside the vocabulary.
    pub fn loss(&self, ids: &Tensor, targets: &Tensor) -> Result<Tensor> {
        linear_cross_entropy(&self.states(ids)?, self.layers.output(), WeightLayout::OutIn, targets)
    }

    /// The logits `[vocab]`, widened to f32, of the token after `tokens`; of more than the context holds the last ones
    /// count. Nothing is recorded for a backward, and no dropout drops anything.
    ///
    /// # Errors
    /// No tokens, or an id outside the vocabulary.
    pub fn last_logits(&self, tokens: &[u32]) -> Result<Vec<f32>> {
        if tokens.is_empty() {
            candle_core::bail!("the model continues a text of at least one token, and none was given")
        }
        let seen = &tokens[tokens.len().saturating_sub(A::ctx(&self.config))..];
        let ids = Tensor::new(seen, self.layers.output().device())?.unsqueeze(0)?;
        let logits = without_gradients(|| {
            let states = self.states(&ids)?.detach();
            self.project(&states.narrow(1, seen.len() - 1, 1)?)
        })?;
        logits.flatten_all()?.to_dtype(DType::F32)?.to_vec1()
    }

    /// `n` tokens that continue `prompt`: the most likely ones at temperature 0, else drawn with `seed`.
    ///
    /// # Errors
    /// As [`LanguageModel::last_logits`].
    pub fn generate(&self, prompt: &[u32], n: usize, temperature: f64, seed: u64) -> Result<Vec<u32>> {
        let mut rng = TokenRng::new(seed);
        let mut tokens = prompt.to_vec();
        for _ in 0..n {
            tokens.push(next_token(&self.last_logits(&tokens)?, temperature, &mut rng));
        }
        Ok(tokens.split_off(prompt.len()))
    }
}
