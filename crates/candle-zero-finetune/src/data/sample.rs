//! Token ids, and which of them are to be predicted.

use crate::chat::conversation::Conversation;
use crate::chat::encode_cache::EncodedText;
use crate::chat::template::Template;
use crate::chat::tokenizer::Tokenizer;
use crate::error::Result;
use std::ops::Range;

/// A sequence of tokens to learn from.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Sample {
    /// The tokens.
    pub ids: Vec<u32>,
    /// Whether each token is to be predicted from those before it.
    pub targets: Vec<bool>,
}

impl Sample {
    /// Encodes a conversation, in which the assistant's text is to be predicted.
    ///
    /// # Errors
    /// Errors of [`Template::render_with_targets`] and [`Tokenizer::encode`].
    pub fn of_conversation(tokenizer: &Tokenizer, template: &Template, conversation: &Conversation) -> Result<Self> {
        let rendered = template.render_with_targets(conversation)?;
        Ok(Self::of_spans(tokenizer.encode(&rendered.text)?, &rendered.targets))
    }

    /// Returns a sample of the encoded tokens. A token is to be predicted if at least one of its bytes is in one of
    /// `spans`, which are in order and do not overlap.
    pub(super) fn of_spans(encoded: EncodedText, spans: &[Range<usize>]) -> Self {
        let mut spans = spans.iter().peekable();
        let in_span = |(start, end): &(usize, usize)| {
            while spans.next_if(|span| span.end <= *start).is_some() {}
            spans.peek().is_some_and(|span| span.start < *end.max(&(start + 1)))
        };
        Self { targets: encoded.offsets.iter().map(in_span).collect(), ids: encoded.ids }
    }
}
