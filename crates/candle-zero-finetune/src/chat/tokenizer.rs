//! A model's tokenizer.json, with the special tokens of its configuration.

use super::encode_cache::{EncodedText, SafeSplitter};
use super::tokenizer_files::TokenizerFiles;
use crate::error::FinetuneError;
use crate::error::Result;
use candle_zero::untrusted_work::{SandboxSubject, run_sandboxed};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::path::Path;
use tokenizers::{AddedToken, NormalizedString, Normalizer as _, PostProcessorWrapper};

/// The maximum length in bytes of a text that cannot be cut anywhere. A tokenizer needs about a hundred bytes of memory
/// for each byte of text.
const MAX_TEXT_BYTES: usize = 6 << 20;

/// The tokenizer of a model.
///
/// Text is encoded without added tokens, because a chat template has already written them. As in transformers, the text
/// of a special token becomes that token wherever it occurs.
#[derive(Debug, Clone)]
pub struct Tokenizer {
    /// The tokenizer without the steps that follow encoding: truncating, padding, adding tokens, and trimming white
    /// space from offsets.
    inner: tokenizers::Tokenizer,
    tokens: SpecialTokens,
    splitter: Option<SafeSplitter>,
    /// The tokens that the tokenizer itself adds before and after a text: BOS, or `[CLS]` and `[SEP]`.
    prefix_and_suffix: (Vec<u32>, Vec<u32>),
    fingerprint: u64,
    /// The tokenizer's file, as the sandbox names it in errors.
    subject: SandboxSubject,
}

/// The names and texts of the special tokens in tokenizer_config.json and special_tokens_map.json (`bos_token`, ...).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SpecialTokens {
    named: Vec<(String, String)>,
}

impl SpecialTokens {
    /// Collects the tokens that a tokenizer_config.json or special_tokens_map.json names. The first object that
    /// contains a name takes precedence.
    fn of(objects: &[&Map<String, Value>]) -> Self {
        let mut named: Vec<(String, String)> = vec![];
        for (key, value) in objects.iter().flat_map(|object| object.iter()) {
            let is_new = || named.iter().all(|(name, _)| name != key);
            let text = value.as_str().or_else(|| value.get("content")?.as_str());
            if let Some(text) = text.filter(|_| key.ends_with("_token") && is_new()) {
                named.push((key.clone(), text.into()));
            }
        }
        named.sort();
        Self { named }
    }

    /// Collects tokens by their names (`bos_token`, ...).
    pub fn new<N: Into<String>, T: Into<String>>(named: impl IntoIterator<Item = (N, T)>) -> Self {
        Self { named: named.into_iter().map(|(name, text)| (name.into(), text.into())).collect() }
    }

    /// Returns the text of the token `name`.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.named.iter().find(|(key, _)| key == name).map(|(_, text)| text.as_str())
    }

    /// Iterates over all tokens. Those from files are sorted by name; those passed to [`Self::new`] keep their order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.named.iter().map(|(name, text)| (name.as_str(), text.as_str()))
    }
}

impl Tokenizer {
    /// Reads the tokenizer at `path`. In a folder, this is tokenizer.json, with tokenizer_config.json and
    /// special_tokens_map.json if they exist; without a tokenizer.json, it is the vocab.txt of a BERT model, or the
    /// vocab.json and merges.txt of a GPT-2 model. For a GGUF file, and for a folder that contains exactly one
    /// but no tokenizer, it is the tokenizer in the GGUF file.
    ///
    /// # Errors
    /// [`FinetuneError::NoTokenizer`]; [`Error::Io`](candle_zero::Error::Io); [`FinetuneError::TokenizerFile`];
    /// [`FinetuneError::UnknownSpecialToken`] for a BOS, EOS or padding token that the tokenizer does not have; an
    /// unknown kind of tokenizer in a GGUF file.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let TokenizerFiles { path, tokenizer: bytes, config, special: map } = TokenizerFiles::read(path.as_ref())?;
        let wrong = |reason: String| FinetuneError::TokenizerFile { path: path.clone(), reason };
        let subject = SandboxSubject::new(path.display().to_string());
        let load = || -> tokenizers::Result<_> {
            let mut inner = tokenizers::Tokenizer::from_bytes(&bytes)?;
            inner.with_padding(None).with_truncation(None)?;
            if let Some(problem) = problem_of_added_tokens(&inner)? {
                return Err(problem.into());
            }
            let prefix_and_suffix = added_prefix_and_suffix(&inner)?;
            inner.with_post_processor(None::<PostProcessorWrapper>);
            Ok((inner, prefix_and_suffix))
        };
        let loaded = run_sandboxed(&subject, bytes.len() / 8, load)
            .map_err(|panic| wrong(format!("it is damaged ({panic})")))?;
        let (inner, mut prefix_and_suffix) = loaded.map_err(|e| wrong(e.to_string()))?;
        let tokens = SpecialTokens::of(&[&config, &map]);
        for name in ["bos_token", "eos_token", "pad_token"] {
            if let Some(token) = tokens.get(name).filter(|token| inner.token_to_id(token).is_none()) {
                return Err(FinetuneError::UnknownSpecialToken { name: name.into(), token: token.into() }.into());
            }
        }
        let id = |name: &str| tokens.get(name).and_then(|token| inner.token_to_id(token));
        let flag = |key: &str| config.get(key).and_then(Value::as_bool);
        prefix_and_suffix.0 = with_token(prefix_and_suffix.0, id("bos_token"), flag("add_bos_token"));
        prefix_and_suffix.1 = with_token(prefix_and_suffix.1, id("eos_token"), flag("add_eos_token"));
        let file_hash = twox_hash::XxHash3_64::oneshot(&bytes);
        let splitter = SafeSplitter::of(&inner, file_hash);
        let hashed = format!("{file_hash:x} {tokens:?} {prefix_and_suffix:?}");
        let fingerprint = twox_hash::XxHash3_64::oneshot(hashed.as_bytes());
        Ok(Self { inner, splitter, tokens, prefix_and_suffix, fingerprint, subject })
    }

    /// Returns whether texts are encoded in pieces.
    #[cfg(test)]
    pub(super) fn is_cut(&self) -> bool {
        self.splitter.is_some()
    }

    /// Returns the ids of `text` and the bytes that they represent, without added tokens.
    ///
    /// # Errors
    /// [`FinetuneError::Encode`].
    pub fn encode(&self, text: &str) -> Result<EncodedText> {
        match &self.splitter {
            Some(splitter) => splitter.encode(text, |piece| self.encode_uncut(piece)),
            None => self.encode_uncut(text),
        }
    }

    /// Encodes the text as one piece.
    fn encode_uncut(&self, text: &str) -> Result<EncodedText> {
        let wrong = |reason: String| FinetuneError::Encode { bytes: text.len(), reason };
        if text.len() > MAX_TEXT_BYTES {
            let reason =
                format!("a text that cannot be split may have at most {MAX_TEXT_BYTES} bytes; shorten the record");
            return Err(wrong(reason).into());
        }
        let encoded = run_sandboxed(&self.subject, text.len(), || self.inner.encode(text, false)).map_err(wrong)?;
        let encoding = encoded.map_err(|e| wrong(e.to_string()))?;
        Ok(EncodedText { ids: encoding.get_ids().to_vec(), offsets: encoding.get_offsets().to_vec() })
    }

    /// Returns the text of `ids`.
    ///
    /// # Errors
    /// [`FinetuneError::Decode`].
    pub fn decode(&self, ids: &[u32], skip_special_tokens: bool) -> Result<String> {
        let wrong = |reason: String| FinetuneError::Decode { reason };
        let decode = || self.inner.decode(ids, skip_special_tokens);
        let decoded = run_sandboxed(&self.subject, ids.len(), decode).map_err(wrong)?;
        Ok(decoded.map_err(|e| wrong(e.to_string()))?)
    }

    /// Returns a decoder that takes one token at a time.
    pub fn stream(&self, skip_special_tokens: bool) -> TextStream<'_> {
        TextStream { tokenizer: self, skip_special_tokens, ids: vec![], printed: 0 }
    }

    /// Returns the named special tokens.
    pub fn special_tokens(&self) -> &SpecialTokens {
        &self.tokens
    }

    /// Returns the id of the special token `name` (`eos_token`, ...).
    pub fn special_id(&self, name: &str) -> Option<u32> {
        self.tokens.get(name).and_then(|token| self.id(token))
    }

    /// Returns the id of a token, given its text.
    pub fn id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Returns the tokens that the tokenizer itself adds before and after a text that no chat template has written.
    pub fn prefix_and_suffix(&self) -> (&[u32], &[u32]) {
        (&self.prefix_and_suffix.0, &self.prefix_and_suffix.1)
    }

    /// Returns the largest id plus one. The ids of the base vocabulary are assumed to have no gaps.
    pub fn vocab_size(&self) -> usize {
        let added = self.inner.get_added_tokens_decoder().into_keys().max().map_or(0, |id| id as usize + 1);
        added.max(self.inner.get_vocab_size(false))
    }

    /// Returns the texts of all tokens that are marked as special and of the named special tokens, sorted.
    pub(crate) fn special_texts(&self) -> Vec<String> {
        let added = self.inner.get_added_tokens_decoder().into_values();
        let mut texts: Vec<String> = added.filter(|token| token.special).map(|token| token.content).collect();
        texts.extend(self.tokens.iter().map(|(_, text)| text.to_string()));
        texts.sort();
        texts.dedup();
        texts
    }

    /// Returns a number that changes with tokenizer.json, the named special tokens, and the tokens added around a text.
    pub fn fingerprint(&self) -> u64 {
        self.fingerprint
    }
}

/// Finds added tokens with which the tokenizers crate cannot encode reliably. A token that the normalizer reduces to
/// nothing is found everywhere, and the search never ends. If the normalizer makes two tokens equal, the crate finds
/// one of them at random, differently in each process.
fn problem_of_added_tokens(inner: &tokenizers::Tokenizer) -> tokenizers::Result<Option<String>> {
    let Some(normalizer) = inner.get_normalizer() else { return Ok(None) };
    let added = inner.get_added_tokens_decoder().into_iter().filter(|(_, token)| token.normalized);
    let mut ids_by_text: BTreeMap<String, (u32, String)> = BTreeMap::new();
    for (id, AddedToken { content, .. }) in added.collect::<BTreeMap<_, _>>() {
        let mut text = NormalizedString::from(content.as_str());
        normalizer.normalize(&mut text)?;
        if text.is_empty() {
            return Ok(Some(format!(
                "its added token {content:?} is empty after normalization and would match endlessly"
            )));
        }
        if let Some((first, other)) = ids_by_text.insert(text.get().to_string(), (id, content.clone())) {
            return Ok(Some(format!(
                "its added tokens {other:?} ({first}) and {content:?} ({id}) are equal after normalization, so which \
                 one matches is random; set \"normalized\": false for one of them, or remove it"
            )));
        }
    }
    Ok(None)
}

/// Returns the tokens that a tokenizer adds before and after a text.
fn added_prefix_and_suffix(inner: &tokenizers::Tokenizer) -> tokenizers::Result<(Vec<u32>, Vec<u32>)> {
    let (bare, complete) = (inner.encode("a", false)?, inner.encode("a", true)?);
    let (bare, complete) = (bare.get_ids(), complete.get_ids());
    let at = (0..complete.len()).find(|at| !bare.is_empty() && complete[*at..].starts_with(bare));
    Ok(at.map_or((vec![], vec![]), |at| (complete[..at].to_vec(), complete[at + bare.len()..].to_vec())))
}

/// Returns only `token` if the configuration requests it and `tokens` lacks it, `tokens` without it if the
/// configuration excludes it, and otherwise `tokens` unchanged.
fn with_token(tokens: Vec<u32>, token: Option<u32>, requested: Option<bool>) -> Vec<u32> {
    match (token, requested) {
        (Some(token), Some(true)) if !tokens.contains(&token) => vec![token],
        (Some(token), Some(false)) => tokens.into_iter().filter(|id| *id != token).collect(),
        _ => tokens,
    }
}

/// A decoder that returns text as its tokens arrive. Bytes that are not yet complete UTF-8 are held back.
#[derive(Debug)]
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    skip_special_tokens: bool,
    /// The last tokens whose text was returned, which are the context for decoding the next ones, followed by those
    /// held back.
    ids: Vec<u32>,
    /// The number of tokens in `ids` whose text was returned.
    printed: usize,
}

impl TextStream<'_> {
    /// Returns the text that token `id` completes, which is empty while a character is incomplete.
    ///
    /// # Errors
    /// [`FinetuneError::Decode`].
    pub fn push(&mut self, id: u32) -> Result<String> {
        self.ids.push(id);
        let text = self.unprinted()?;
        if text.is_empty() || text.ends_with(char::REPLACEMENT_CHARACTER) {
            return Ok(String::new());
        }
        self.ids.drain(..self.printed);
        self.printed = self.ids.len();
        Ok(text)
    }

    /// Returns the text that was held back. Characters that never became complete appear as U+FFFD.
    ///
    /// # Errors
    /// [`FinetuneError::Decode`].
    pub fn finish(mut self) -> Result<String> {
        let text = self.unprinted()?;
        self.ids.clear();
        Ok(text)
    }

    fn unprinted(&self) -> Result<String> {
        let before = self.tokenizer.decode(&self.ids[..self.printed], self.skip_special_tokens)?;
        let mut all = self.tokenizer.decode(&self.ids, self.skip_special_tokens)?;
        // Decoders change earlier output only at its end, at an incomplete character.
        let at = before.len().min(all.len());
        let at = (0..=at).rev().find(|at| all.is_char_boundary(*at)).unwrap_or(0);
        Ok(all.split_off(at))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::sync::LazyLock;

    /// The tiny tokenizer, and those in the user's cache.
    static TOKENIZERS: LazyLock<Vec<Tokenizer>> = LazyLock::new(|| {
        let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/finetune/models/llama");
        let home = candle_zero::util::cache_home(std::env::var_os("XDG_CACHE_HOME"), std::env::home_dir());
        let cached = home.map(|home| home.join("candle-zero/tokenizers"));
        let names = ["qwen3", "llama3", "gemma3", "smollm2"];
        let cached = names.iter().filter_map(|name| Some(cached.as_ref()?.join(name))).filter(|path| path.is_dir());
        [tiny].into_iter().chain(cached).map(|folder| Tokenizer::open(folder).unwrap()).collect()
    });

    #[test]
    fn texts_of_these_tokenizers_are_encoded_by_pieces() {
        assert!(TOKENIZERS.iter().all(|tokenizer| tokenizer.splitter.is_some()));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(400))]
        #[test]
        fn pieces_have_the_tokens_of_the_whole_text(
            parts in prop::collection::vec(
                prop_oneof![
                    8 => "[ ]?[a-zA-Z]{1,6}",
                    2 => "[ \\n\\t\\r]{1,3}",
                    2 => "[.,;:'!?()<>|0-9-]{1,3}",
                    1 => "'(s|t|re|ve|LL)",
                    1 => "\\PC{1,3}",
                    1 => "[e\u{301}n\u{303}Å]{1,3}",
                    1 => "[a-zA-Z]{1,3}[.,;:'!?()<>|/0-9_-]{1,3}[a-zA-Z ]?",
                    1 => "<\\|(im_start|im_end|endoftext|eot_id|start_header_id)\\|>",
                    1 => "</?(end_of_turn|start_of_turn|bos|eos|b|h1|think|tool_call|file_sep)>",
                ],
                0..40,
            ),
        ) {
            let text = parts.concat();
            for tokenizer in &*TOKENIZERS {
                prop_assert_eq!(tokenizer.encode(&text).unwrap(), tokenizer.encode_uncut(&text).unwrap());
            }
        }
    }
}
