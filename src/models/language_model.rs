//! The parts that all language models share: logits, loss and generation on top of a stack of blocks.

use super::{BalanceLossOptions, RoutedStates, Session, TokenRng, next_token};
use crate::error::ModelError;
use crate::graph::without_gradients;
use crate::nn::{
    KeyValueCache, LossOptions, Sequences, WeightLayout, linear, linear_cross_entropy_with, linear_log_probabilities,
    refuse,
};
use candle_core::{DType, Result, Tensor};
use candle_nn::VarBuilder;

/// The part that differs between architectures: the layers from token ids to the states that the output projection
/// takes.
pub trait Architecture: Sized {
    /// The type of the model's sizes.
    type Config: Clone;

    /// Builds the layers with parameters from `vb`.
    ///
    /// # Errors
    /// Invalid sizes, and any error of the builder about a parameter.
    fn new(config: &Self::Config, vb: VarBuilder<'_>) -> Result<Self>;

    /// Returns the maximum length of an input, in tokens.
    fn ctx(config: &Self::Config) -> usize;

    /// Returns the states after the last block and the last norm, `[batch, time, width]`, for ids `[batch, time]`
    /// (u32). `time` is at most the context length. Each row is one text, or contains the texts given by `sequences`.
    fn states(&self, ids: &Tensor, sequences: Option<&Sequences>) -> Result<Tensor>;

    /// Returns the states, and the choices of the routers of sparse blocks. The gradient of the routers' logits reaches
    /// their parameters, even in blocks that recompute.
    ///
    /// # Errors
    /// The errors of [`Architecture::states`].
    fn routed_states(&self, ids: &Tensor, sequences: Option<&Sequences>) -> Result<RoutedStates> {
        Ok(RoutedStates { states: self.states(ids, sequences)?, routings: Vec::new() })
    }

    /// Returns the load-balancing loss of the routers and its coefficient, if the model is trained with it.
    fn balance_loss(&self) -> Option<BalanceLossOptions<'_>> {
        None
    }

    /// Returns the number of blocks, each of which computes keys and values.
    fn blocks(&self) -> usize;

    /// Returns the states of ids that continue earlier ones in the same sequences. `caches`, one for each block, hold
    /// the keys and values of the earlier ids, the same number in each, and receive those of the new ids. The total is
    /// at most the context length. This is for evaluation: nothing is recorded for a backward pass.
    ///
    /// With empty caches, the states are bit-identical to those of [`Architecture::states`].
    ///
    /// # Errors
    /// The errors of [`Architecture::states`]. After an error, some of the caches may hold the keys and values of these
    /// ids, and others may not.
    fn states_after(&self, ids: &Tensor, caches: &mut [KeyValueCache]) -> Result<Tensor>;

    /// Returns the output projection, `[vocab, width]`.
    fn output(&self) -> &Tensor;

    /// Returns the cap of the logits: they are mapped to `cap * tanh(logit / cap)`.
    fn logit_soft_cap(&self) -> Option<f64> {
        None
    }
}

/// A model that predicts the next token, such as [`Gpt`](super::Gpt) and [`Llama`](super::Llama).
#[derive(Debug, Clone)]
pub struct LanguageModel<A: Architecture> {
    config: A::Config,
    layers: A,
}

impl<A: Architecture> LanguageModel<A> {
    /// Builds the model with parameters from `vb`.
    ///
    /// # Errors
    /// Invalid sizes, and any error of the builder about a parameter.
    pub fn new(config: &A::Config, vb: VarBuilder<'_>) -> Result<Self> {
        Ok(Self { config: config.clone(), layers: A::new(config, vb)? })
    }

    /// Returns the sizes that the model was built with.
    pub fn config(&self) -> &A::Config {
        &self.config
    }

    /// Returns the layers.
    pub(super) fn layers(&self) -> &A {
        &self.layers
    }

    /// Checks that ids fit into the context.
    pub(super) fn check_length(&self, ids: &Tensor) -> Result<()> {
        let (length, context) = (ids.dims2()?.1, A::ctx(&self.config));
        match length > context {
            true => Err(refuse(ModelError::SequenceTooLong { length, context }.into())),
            false => Ok(()),
        }
    }

    /// Returns the input of the output projection, for ids that fit into the context.
    fn states(&self, ids: &Tensor, sequences: Option<&Sequences>) -> Result<Tensor> {
        self.check_length(ids)?;
        self.layers.states(ids, sequences)
    }

    /// Returns the logits for the given states.
    fn project(&self, states: &Tensor) -> Result<Tensor> {
        logits(states, self.layers.output(), self.layers.logit_soft_cap())
    }

    /// Returns the logits `[batch, time, vocab]`, in the parameters' dtype, for ids `[batch, time]` (u32).
    ///
    /// # Errors
    /// More tokens in a row than fit into the context, or an id outside the vocabulary.
    pub fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        self.forward_packed(ids, None)
    }

    /// Runs [`LanguageModel::forward`] on rows that contain several texts each, as given by `sequences`. Texts do not
    /// attend to one another, and the positions of each begin at 0.
    ///
    /// # Errors
    /// The errors of [`LanguageModel::forward`]; sequences that do not match the rows of `ids`.
    pub fn forward_packed(&self, ids: &Tensor, sequences: Option<&Sequences>) -> Result<Tensor> {
        self.project(&self.states(ids, sequences)?)
    }

    /// Returns the mean cross entropy, an f32 scalar, of `targets` `[batch, time]` (u32). Each target is the token
    /// after its input.
    ///
    /// # Errors
    /// The errors of [`LanguageModel::forward`]; targets outside the vocabulary.
    pub fn loss(&self, ids: &Tensor, targets: &Tensor) -> Result<Tensor> {
        self.loss_packed(ids, targets, None, None)
    }

    /// Returns the cross entropy of [`LanguageModel::forward_packed`]'s logits, an f32 scalar: the sum over `targets`
    /// `[batch, time]` (u32, or i64 with -100 for targets that do not count) divided by `divisor`, or by the number of
    /// targets that count.
    ///
    /// # Errors
    /// The errors of [`LanguageModel::forward_packed`]; targets outside the vocabulary; without a divisor, no target
    /// that counts.
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

    /// Returns the logarithm of each target's probability, f32 `[batch, time]`, or 0 for targets that do not count, as
    /// in [`LanguageModel::loss_packed`]. Each element can have its own gradient.
    ///
    /// # Errors
    /// The errors of [`LanguageModel::forward_packed`]; targets outside the vocabulary.
    pub fn log_probabilities(&self, ids: &Tensor, targets: &Tensor, sequences: Option<&Sequences>) -> Result<Tensor> {
        let (states, cap) = (self.states(ids, sequences)?, self.layers.logit_soft_cap());
        linear_log_probabilities(&states, self.layers.output(), WeightLayout::OutIn, targets, cap)
    }

    /// Returns the logits `[vocab]`, widened to f32, of the token after `tokens`. If there are more tokens than the
    /// context holds, only the last ones count. Nothing is recorded for a backward pass, and dropout is off.
    ///
    /// # Errors
    /// No tokens, or an id outside the vocabulary.
    pub fn last_logits(&self, tokens: &[u32]) -> Result<Vec<f32>> {
        self.logits_after(&tokens[tokens.len().saturating_sub(A::ctx(&self.config))..], |ids| self.states(ids, None))
    }

    /// Returns the logits of the token after `tokens`. `states` computes the states of all tokens.
    fn logits_after(&self, tokens: &[u32], states: impl FnOnce(&Tensor) -> Result<Tensor>) -> Result<Vec<f32>> {
        require_tokens(tokens)?;
        let ids = Tensor::new(tokens, self.layers.output().device())?.unsqueeze(0)?;
        let logits = without_gradients(|| {
            let states = states(&ids)?.detach();
            self.project(&states.narrow(1, tokens.len() - 1, 1)?)
        })?;
        logits.flatten_all()?.to_dtype(DType::F32)?.to_vec1()
    }

    /// Adds `tokens` to the text of `session` and returns the logits `[vocab]`, widened to f32, of the token after it.
    /// Only tokens that the session has not seen yet are computed.
    ///
    /// The logits are those that [`LanguageModel::last_logits`] returns for the full text. They are bit-identical for
    /// the first tokens of a session, and equal up to rounding for later ones, because attention then sums in a
    /// different order. If the text is longer than the context, only the last tokens count, as in `last_logits`. Each
    /// added token then shifts the positions of all others, so their cached keys and values become useless. Beyond its
    /// context length, a model therefore recomputes the full context for each token, and the session keeps only the
    /// tokens. To compute only one token at a time again, start a new session with only the last tokens.
    ///
    /// If the model's parameters are sharded over several ranks, all ranks must make the same calls, each with its own
    /// session.
    ///
    /// # Errors
    /// No tokens, an id outside the vocabulary, or a session that was started by a model of a different shape. The
    /// session is then unchanged.
    pub fn extend(&self, session: &mut Session, tokens: &[u32]) -> Result<Vec<f32>> {
        require_tokens(tokens)?;
        let text = [session.tokens(), tokens].concat();
        if text.len() > A::ctx(&self.config) {
            let logits = self.last_logits(&text)?;
            session.record_uncached(text);
            return Ok(logits);
        }
        let (cached, caches) = session.caches(self.layers.blocks(), A::ctx(&self.config))?;
        let logits = self.logits_after(&text[cached..], |ids| self.layers.states_after(ids, caches))?;
        session.record_cached(text);
        Ok(logits)
    }

    /// Returns `n` tokens that continue `prompt`: the most likely ones at temperature 0, otherwise sampled with `seed`.
    /// Until the method returns, the keys and values of the text are cached ([`LanguageModel::extend`]).
    ///
    /// # Errors
    /// The errors of [`LanguageModel::last_logits`].
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

/// Returns the logits for the given states.
pub(super) fn logits(states: &Tensor, weight: &Tensor, soft_cap: Option<f64>) -> Result<Tensor> {
    let logits = linear(states, weight, None, WeightLayout::OutIn)?;
    match soft_cap {
        Some(cap) => (logits / cap)?.tanh()? * cap,
        None => Ok(logits),
    }
}

/// Returns an error if there are no tokens to continue.
pub(crate) fn require_tokens(tokens: &[u32]) -> Result<()> {
    if tokens.is_empty() {
        candle_core::bail!("the model continues a text of at least one token, but none was given")
    }
    Ok(())
}
