//! The common parts of language models: logits, loss and generation over a stack of blocks.

use super::{Session, TokenRng, next_token};
use crate::error::ModelError;
use crate::graph::without_gradients;
use crate::nn::{
    KeyValueCache, LossOptions, Sequences, WeightLayout, linear, linear_cross_entropy_with, linear_log_probabilities,
    refuse,
};
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
    /// time of at most the context. Each row is one text, or the texts that `sequences` says.
    fn states(&self, ids: &Tensor, sequences: Option<&Sequences>) -> Result<Tensor>;

    /// The number of blocks, each of which computes keys and values.
    fn blocks(&self) -> usize;

    /// The states of ids that follow others of the same sequences. `caches`, one for each block, hold the keys and values of
    /// those, as many in each, and receive these ids' own. In all there are at most as many as the context has. For
    /// evaluation: nothing is recorded for a backward.
    ///
    /// With a cache that is empty the states are those of [`Architecture::states`], to the bit.
    ///
    /// # Errors
    /// As [`Architecture::states`]. Then some of the caches may hold these ids' keys and values, and others not.
    fn states_after(&self, ids: &Tensor, caches: &mut [KeyValueCache]) -> Result<Tensor>;

    /// The output projection, `[vocab, width]`.
    fn output(&self) -> &Tensor;

    /// The cap of the logits: they go through `cap * tanh(logit / cap)`.
    fn logit_soft_cap(&self) -> Option<f64> {
        None
    }
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
    fn states(&self, ids: &Tensor, sequences: Option<&Sequences>) -> Result<Tensor> {
        let (length, context) = (ids.dims2()?.1, A::ctx(&self.config));
        if length > context {
            return Err(refuse(ModelError::SequenceTooLong { length, context }.into()));
        }
        self.layers.states(ids, sequences)
    }

    /// The logits of states.
    fn project(&self, states: &Tensor) -> Result<Tensor> {
        let logits = linear(states, self.layers.output(), None, WeightLayout::OutIn)?;
        match self.layers.logit_soft_cap() {
            Some(cap) => (logits / cap)?.tanh()? * cap,
            None => Ok(logits),
        }
    }

    /// Logits `[batch, time, vocab]`, in the parameters' dtype, of ids `[batch, time]` (u32).
    ///
    /// # Errors
    /// More tokens in a sequence than the context has, an id outside the vocabulary.
    pub fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        self.forward_packed(ids, None)
    }

    /// [`LanguageModel::forward`] of rows that hold several texts each, as `sequences` says: none of them sees another, and the
    /// positions of each begin at 0.
    ///
    /// # Errors
    /// As [`LanguageModel::forward`], and sequences of other rows than those of `ids`.
    pub fn forward_packed(&self, ids: &Tensor, sequences: Option<&Sequences>) -> Result<Tensor> {
        self.project(&self.states(ids, sequences)?)
    }

    /// The mean cross entropy, a scalar of f32, of `targets` `[batch, time]` (u32): each the token after its input.
    ///
    /// # Errors
    /// As [`LanguageModel::forward`], and targets outside the vocabulary.
    pub fn loss(&self, ids: &Tensor, targets: &Tensor) -> Result<Tensor> {
        self.loss_packed(ids, targets, None, None)
    }

    /// The cross entropy of [`LanguageModel::forward_packed`]'s logits, a scalar of f32: the sum over `targets` `[batch, time]`
    /// (u32, or i64 in which -100 does not count) divided by `divisor`, or by the number of targets that count.
    ///
    /// # Errors
    /// As [`LanguageModel::forward_packed`], and targets outside the vocabulary; none that counts and no divisor.
    pub fn loss_packed(
        &self,
        ids: &Tensor,
        targets: &Tensor,
        sequences: Option<&Sequences>,
        divisor: Option<f64>,
    ) -> Result<Tensor> {
        let options = LossOptions { soft_cap: self.layers.logit_soft_cap(), divisor };
        let states = self.states(ids, sequences)?;
        linear_cross_entropy_with(&states, self.layers.output(), WeightLayout::OutIn, targets, options)
    }

    /// The logarithm of each target's probability, f32 `[batch, time]`: 0 for targets that do not count, as in
    /// [`LanguageModel::loss_packed`]. Each may have a gradient of its own.
    ///
    /// # Errors
    /// As [`LanguageModel::forward_packed`], and targets outside the vocabulary.
    pub fn log_probabilities(&self, ids: &Tensor, targets: &Tensor, sequences: Option<&Sequences>) -> Result<Tensor> {
        let (states, cap) = (self.states(ids, sequences)?, self.layers.logit_soft_cap());
        linear_log_probabilities(&states, self.layers.output(), WeightLayout::OutIn, targets, cap)
    }

    /// The logits `[vocab]`, widened to f32, of the token after `tokens`; of more than the context holds the last ones
    /// count. Nothing is recorded for a backward, and no dropout drops anything.
    ///
    /// # Errors
    /// No tokens, or an id outside the vocabulary.
    pub fn last_logits(&self, tokens: &[u32]) -> Result<Vec<f32>> {
        self.logits_after(&tokens[tokens.len().saturating_sub(A::ctx(&self.config))..], |ids| self.states(ids, None))
    }

    /// The logits of the token after `tokens`, whose states `states` gives.
    fn logits_after(&self, tokens: &[u32], states: impl FnOnce(&Tensor) -> Result<Tensor>) -> Result<Vec<f32>> {
        require_tokens(tokens)?;
        let ids = Tensor::new(tokens, self.layers.output().device())?.unsqueeze(0)?;
        let logits = without_gradients(|| {
            let states = states(&ids)?.detach();
            self.project(&states.narrow(1, tokens.len() - 1, 1)?)
        })?;
        logits.flatten_all()?.to_dtype(DType::F32)?.to_vec1()
    }

    /// Adds `tokens` to the text of `session`; the logits `[vocab]`, widened to f32, of the token after it. Only what the
    /// session has not seen yet is computed.
    ///
    /// The logits are those that [`LanguageModel::last_logits`] gives of the whole text: the same bits for the first
    /// tokens of a session, and for further ones the same up to rounding, as attention takes its sums in another order.
    /// As there, of a text longer than the context the last tokens count. They are all at other positions then with each
    /// token that is added, so what was kept of them is of no use: beyond its context a model computes all of them for
    /// each token, and the session keeps the tokens alone. To go on at a token's cost, begin another session with fewer of
    /// the last tokens.
    ///
    /// On several ranks of a model whose parameters are sharded, all of them do the same with sessions of their own.
    ///
    /// # Errors
    /// No tokens, an id outside the vocabulary, a session that another model began. The session is then as it was.
    pub fn extend(&self, session: &mut Session, tokens: &[u32]) -> Result<Vec<f32>> {
        require_tokens(tokens)?;
        let text = [session.tokens(), tokens].concat();
        if text.len() > A::ctx(&self.config) {
            let logits = self.last_logits(&text)?;
            session.saw_without_keeping(text);
            return Ok(logits);
        }
        let (seen, caches) = session.caches(self.layers.blocks(), A::ctx(&self.config))?;
        let logits = self.logits_after(&text[seen..], |ids| self.layers.states_after(ids, caches))?;
        session.saw(text);
        Ok(logits)
    }

    /// `n` tokens that continue `prompt`: the most likely ones at temperature 0, else drawn with `seed`. Keys and values of
    /// the text are kept while it lasts ([`LanguageModel::extend`]).
    ///
    /// # Errors
    /// As [`LanguageModel::last_logits`].
    pub fn generate(&self, prompt: &[u32], n: usize, temperature: f64, seed: u64) -> Result<Vec<u32>> {
        let (mut rng, mut session) = (TokenRng::new(seed), Session::new());
        session.reserve(prompt.len().saturating_add(n));
        let mut tokens: Vec<u32> = Vec::new();
        for _ in 0..n {
            let logits = self.extend(&mut session, tokens.last().map_or(prompt, std::slice::from_ref))?;
            tokens.push(next_token(&logits, temperature, &mut rng));
        }
        Ok(tokens)
    }
}

/// Refuses to continue nothing.
fn require_tokens(tokens: &[u32]) -> Result<()> {
    if tokens.is_empty() {
        candle_core::bail!("the model continues a text of at least one token, and none was given")
    }
    Ok(())
}
