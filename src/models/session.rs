//! A text that a model continues token by token.

use crate::nn::KeyValueCache;
use candle_core::{Result, bail};

/// A text that a model continues, with the keys and values of it that the model's blocks have computed: for
/// [`LanguageModel::extend`](super::LanguageModel::extend).
///
/// It belongs to one model and the weights that this has meanwhile: after a training step begin another one. Keys and
/// values have the dtype that the model computes in, and take 2 x blocks x positions x (width of a position's keys)
/// elements, for whole sixteens of positions.
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
    /// The first tokens, whose keys and values all of the caches hold.
    seen: usize,
    /// One for each block.
    caches: Vec<KeyValueCache>,
    /// Tokens that are expected.
    expected: usize,
}

impl Session {
    /// A session without text.
    pub fn new() -> Self {
        Self::default()
    }

    /// The text so far.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Takes memory for a text of so many tokens, or for the model's context if that is less, when the text begins or next
    /// outgrows its memory. Otherwise memory doubles each time.
    pub fn reserve(&mut self, tokens: usize) {
        self.expected = tokens;
    }

    /// Goes back to the first `len` tokens. Memory stays.
    pub fn truncate(&mut self, len: usize) {
        self.tokens.truncate(len);
        self.seen = self.seen.min(len);
    }

    /// Bytes of the memory of keys and values, room for more tokens included.
    pub fn cache_bytes(&self) -> usize {
        self.caches.iter().map(KeyValueCache::size_in_bytes).sum()
    }

    /// The number of first tokens whose keys and values are there, and the caches that hold these and no others.
    pub(super) fn caches(&mut self, blocks: usize, ctx: usize) -> Result<(usize, &mut [KeyValueCache])> {
        if self.caches.is_empty() {
            self.caches = vec![KeyValueCache::new(ctx); blocks];
        }
        if self.caches.len() != blocks {
            bail!(
                "the session was begun by a model of {} blocks, and this one has {blocks}; a session belongs to one model",
                self.caches.len()
            )
        }
        for cache in &mut self.caches {
            cache.truncate(self.seen);
            cache.reserve(self.expected);
        }
        Ok((self.seen, &mut self.caches))
    }

    /// The text is now `tokens`, and the caches hold all of it.
    pub(super) fn saw(&mut self, tokens: Vec<u32>) {
        self.seen = tokens.len();
        self.tokens = tokens;
    }

    /// The text is now `tokens`, of which nothing is kept.
    pub(super) fn saw_without_keeping(&mut self, tokens: Vec<u32>) {
        *self = Self { tokens, expected: self.expected, ..Self::default() };
    }
}
