//! A text that a model continues token by token.

use crate::nn::KeyValueCache;
use crate::util::counted;
use candle_core::{Result, bail};

/// A text that a model continues, with the keys and values that the model's blocks have computed for it, for use by
/// [`LanguageModel::extend`](super::LanguageModel::extend).
///
/// A session is valid for one model and its current weights; start a new session after a training step. Keys and values
/// have the dtype that the model computes in. They take 2 x blocks x positions x (width of a position's keys) elements,
/// where positions is the number of positions for which memory is allocated, on the CPU a multiple of 16.
///
/// ```
/// use candle_core::{DType, Device};
/// use candle_nn::{VarBuilder, VarMap};
/// use candle_zero::models::{Gpt, GptConfig, Session};
///
/// let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
/// let gpt = Gpt::new(&GptConfig::preset("nano")?, vb)?;
/// let mut session = Session::new();
/// let mut logits = gpt.extend(&mut session, b"ZeRO".map(u32::from).as_slice())?;
/// for _ in 0..3 {
///     let likeliest = (0..256u32).max_by(|a, b| logits[*a as usize].total_cmp(&logits[*b as usize]));
///     logits = gpt.extend(&mut session, likeliest.as_slice())?;
/// }
/// assert_eq!(session.tokens().len(), 7);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct Session {
    tokens: Vec<u32>,
    /// The number of leading tokens whose keys and values are in all caches.
    cached: usize,
    /// The caches, one for each block.
    caches: Vec<KeyValueCache>,
    /// The number of tokens to reserve memory for.
    reserved: usize,
}

impl Session {
    /// Creates a session without text.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the text so far.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Sets the text length, in tokens, for which memory is allocated when the text begins or next outgrows its memory.
    /// The model's context limits this length. Without this call, memory doubles each time the text outgrows it.
    pub fn reserve(&mut self, tokens: usize) {
        self.reserved = tokens;
    }

    /// Truncates the text to the first `len` tokens. Memory is kept.
    pub fn truncate(&mut self, len: usize) {
        self.tokens.truncate(len);
        self.cached = self.cached.min(len);
    }

    /// Returns the number of bytes allocated for keys and values, including room for more tokens.
    pub fn cache_bytes(&self) -> usize {
        self.caches.iter().map(KeyValueCache::size_in_bytes).sum()
    }

    /// Returns the number of leading tokens whose keys and values are cached, and the caches, which hold the keys
    /// and values of exactly these tokens.
    pub(super) fn caches(&mut self, blocks: usize, ctx: usize) -> Result<(usize, &mut [KeyValueCache])> {
        if self.caches.is_empty() {
            self.caches = vec![KeyValueCache::new(ctx); blocks];
        }
        if self.caches.len() != blocks {
            bail!(
                "the session was started by a model of {}, but this one has {blocks}; a session belongs to one model",
                counted(self.caches.len(), "block")
            )
        }
        for cache in &mut self.caches {
            cache.truncate(self.cached);
            cache.reserve(self.reserved);
        }
        Ok((self.cached, &mut self.caches))
    }

    /// Sets the text to `tokens`, all of which the caches hold.
    pub(super) fn record_cached(&mut self, tokens: Vec<u32>) {
        self.cached = tokens.len();
        self.tokens = tokens;
    }

    /// Sets the text to `tokens`, none of which are cached.
    pub(super) fn record_uncached(&mut self, tokens: Vec<u32>) {
        *self = Self { tokens, reserved: self.reserved, ..Self::default() };
    }
}
