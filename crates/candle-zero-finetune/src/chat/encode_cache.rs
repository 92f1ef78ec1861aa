//! Encodes text in cached pieces.
//!
//! A general tokenizer spends most of its time encoding the same words again and again. If a text can be cut so that no
//! token crosses a cut, and the tokens of a piece do not depend on the other pieces, the tokens of a known piece can be
//! looked up. Texts are cut:
//!
//! - before a space between a visible ASCII character and an ASCII letter, and after the end of a line between
//!   characters of the same kinds;
//! - before and after special tokens in angle brackets, which are taken out of a text first.
//!
//! A cut is used only if the tokenizer's parts prove that it changes nothing:
//!
//! - No added token can be found across the cut: none contains the two characters around the cut next to each other,
//!   not even at its beginning or end, and none strips white space there or examines its neighbours.
//! - The normalizer treats each side as it would treat that side alone.
//! - Either the pre-tokenizer also cuts there, with a known regular expression, so that the vocabulary cannot join the
//!   two sides, or it leaves both sides unchanged. The latter suffices only if no token of the vocabulary contains the
//!   two characters in sequence, complete words are not looked up, and no unknown character is joined with its
//!   neighbour.
//!
//! A piece that occurs for the first time is cut further at places where the pre-tokenizer is known to cut: at the end
//! of a run of ASCII letters, digits or punctuation. Few of these smaller pieces are distinct.
//!
//! If any of this is unknown for a tokenizer, texts are not cut.

use serde_json::Value;
use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasherDefault, Hasher};
use tokenizers::ModelWrapper;
use tokenizers::models::bpe::BPE;

/// The ids of a text, and the bytes that each of them represents.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct EncodedText {
    /// The ids of the tokens.
    pub ids: Vec<u32>,
    /// The start and end of each token in bytes of the original text, even if a normalizer changes it.
    pub offsets: Vec<(usize, usize)>,
}

/// The maximum number of pieces that a thread caches, and their maximum length in bytes.
const MAX_PIECES: usize = 1 << 16;
const MAX_PIECE_BYTES: usize = 96;

/// The regular expressions of pre-tokenizers that cut before a space and a letter, and after the end of a line: those
/// of cl100k, Llama 3, Qwen 2 and 3, o200k, and GPT-2 (if the expression is written out in full).
pub(crate) const CACHEABLE_PATTERNS: [&str; 5] = [
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
];

/// The places at which a tokenizer's texts may be cut.
#[derive(Debug, Clone)]
pub(super) struct SafeSplitter {
    cuts: SafeCuts,
    /// Special tokens in angle brackets.
    special: HashSet<String>,
    longest_special: usize,
    /// Whether pieces may be cut at the ends of runs.
    cuts_runs: bool,
    /// The number that identifies the tokenizer in the threads' caches.
    key: u64,
}

/// The kinds of cuts that are safe.
#[derive(Debug, Clone, Copy)]
struct SafeCuts {
    /// Before a space, between a visible ASCII character and an ASCII letter.
    before_spaces: bool,
    /// After the end of a line, between characters of the same kinds.
    after_lines: bool,
}

impl SafeSplitter {
    /// Returns the cuts of a tokenizer that are known to be safe, or `None` if there are none.
    pub(super) fn of(inner: &tokenizers::Tokenizer, key: u64) -> Option<Self> {
        let ModelWrapper::BPE(model) = inner.get_model() else { return None };
        let is_set = |affix: &Option<String>| affix.as_ref().is_some_and(|affix| !affix.is_empty());
        if model.dropout.is_some() || is_set(&model.continuing_subword_prefix) || is_set(&model.end_of_word_suffix) {
            return None;
        }
        let normalizer = serde_json::to_value(inner.get_normalizer()).ok()?;
        if !normalizes_locally(&normalizer) {
            return None;
        }
        let mut effects =
            PreTokenizerEffects { space: if replaces_spaces(&normalizer) { '\u{2581}' } else { ' ' }, is_cut: false };
        if !effects.apply(&serde_json::to_value(inner.get_pre_tokenizer()).ok()?) {
            return None;
        }
        let mut cuts = if effects.is_cut {
            SafeCuts { before_spaces: true, after_lines: true }
        } else {
            cuts_in_words(model, effects)?
        };
        let added = inner.get_added_tokens_decoder();
        let texts = || added.values().map(|token| token.content.as_str());
        let mut special = HashSet::new();
        for token in added.values() {
            let text = token.content.as_str();
            let (Some(first), Some(last)) = (text.chars().next(), text.chars().next_back()) else { return None };
            // This token examines its neighbours.
            if token.single_word {
                return None;
            }
            // A token that strips white space also strips characters that the normalizer turns into white space.
            cuts.after_lines &= !(token.lstrip && may_be_alphabetic(first));
            cuts.before_spaces &= !token.rstrip || is_blank(last);
            let (spaces, lines) = contains_cuts(text, |c| !is_blank(c));
            cuts.before_spaces &= !spaces;
            cuts.after_lines &= !lines;
            let is_bracketed = text.len() > 2 && first == '<' && last == '>' && text.is_ascii();
            if is_bracketed && !token.normalized && !token.lstrip && !token.rstrip {
                special.insert(text.to_string());
            }
        }
        // No added token may begin within a special token or extend beyond it.
        let ends_early = |text: &str| text.find('>').is_some_and(|at| at + 1 < text.len());
        if texts().any(|text| text.bytes().skip(1).any(|byte| byte == b'<') || ends_early(text)) {
            special.clear();
        }
        if !cuts.before_spaces && !cuts.after_lines && special.is_empty() {
            return None;
        }
        let longest_special = special.iter().map(String::len).max().unwrap_or(0);
        // Added tokens are found before the text between them is cut.
        let is_whole =
            |text: &str| special.contains(text) || text.is_ascii() && run_end(text.as_bytes(), 0) == text.len();
        let takes_spaces = added.values().any(|token| token.rstrip && !token.content.ends_with(is_blank));
        let cuts_runs = effects.is_cut && !takes_spaces && texts().all(is_whole);
        Some(Self { cuts, special, longest_special, cuts_runs, key })
    }

    /// Returns the tokens of `text`. `encode` encodes new pieces.
    pub(super) fn encode<E>(
        &self,
        text: &str,
        encode: impl Fn(&str) -> Result<EncodedText, E>,
    ) -> Result<EncodedText, E> {
        let mut cache = PIECE_CACHE.take();
        if cache.key != self.key {
            cache = PieceCache { key: self.key, ..PieceCache::default() };
        }
        let tokens = text.len() / 4;
        let mut encoded = EncodedText { ids: Vec::with_capacity(tokens), offsets: Vec::with_capacity(tokens) };
        let mut start = 0;
        while start < text.len() {
            let special = self.special_at(text, start);
            let end = special.unwrap_or_else(|| self.next_cut(text, start));
            let cuts_runs = self.cuts_runs && special.is_none();
            cache.encode(&text[start..end], start, cuts_runs, &mut encoded, &encode)?;
            start = end;
        }
        PIECE_CACHE.set(cache);
        Ok(encoded)
    }

    /// Returns the end of the piece that begins at `start` and is not a special token.
    fn next_cut(&self, text: &str, start: usize) -> usize {
        let bytes = text.as_bytes();
        let is_end =
            |at: &usize| self.cuts.at(bytes, *at) || bytes[*at] == b'<' && self.special_at(text, *at).is_some();
        (start + 1..bytes.len()).find(is_end).unwrap_or(bytes.len())
    }

    /// Returns the end of the special token at `start`.
    fn special_at(&self, text: &str, start: usize) -> Option<usize> {
        let bytes = &text.as_bytes()[start..];
        if bytes[0] != b'<' || self.special.is_empty() {
            return None;
        }
        let max_len = bytes.len().min(self.longest_special);
        let end = start + bytes[..max_len].iter().position(|byte| *byte == b'>')? + 1;
        self.special.contains(&text[start..end]).then_some(end)
    }
}

impl SafeCuts {
    /// Returns whether a text may be cut before byte `at`, which is neither the first byte nor beyond the last one.
    fn at(self, bytes: &[u8], at: usize) -> bool {
        let graphic = |at: usize| bytes[at].is_ascii_graphic();
        match bytes[at] {
            b' ' => self.before_spaces && graphic(at - 1) && bytes.get(at + 1).is_some_and(u8::is_ascii_alphabetic),
            byte => {
                self.after_lines && bytes[at - 1] == b'\n' && at > 1 && graphic(at - 2) && byte.is_ascii_alphabetic()
            }
        }
    }
}

/// Returns the end of the smaller piece that begins at `start`. This end lies between a run of ASCII letters and any
/// ASCII character except an apostrophe (of a contraction), between a run of digits and any ASCII character, or between
/// punctuation and a space or digit.
fn run_end(bytes: &[u8], start: usize) -> usize {
    let is_end = |at: &usize| match (bytes[at - 1], bytes[*at]) {
        (_, 0x80..) => false,
        (before, byte) if before.is_ascii_alphabetic() => !byte.is_ascii_alphabetic() && byte != b'\'',
        (before, byte) if before.is_ascii_digit() => !byte.is_ascii_digit(),
        (before, byte) => before.is_ascii_punctuation() && (byte == b' ' || byte.is_ascii_digit()),
    };
    (start + 1..bytes.len()).find(is_end).unwrap_or(bytes.len())
}

/// Returns whether a token contains the two characters of a cut before a space, and whether it contains those of a cut
/// after the end of a line. Spaces and ends of lines also count in the forms that vocabularies use. `may_be_printed`
/// returns whether a character may be the visible one before a space.
fn contains_cuts(token: &str, may_be_printed: impl Fn(char) -> bool) -> (bool, bool) {
    let is_line = |c: char| matches!(c, '\n' | '\u{10A}');
    let pairs = || token.chars().zip(token.chars().skip(1));
    let spaces = pairs().any(|(before, c)| is_space(c) && may_be_printed(before));
    (spaces, pairs().any(|(before, c)| is_line(before) && may_be_alphabetic(c)))
}

fn is_space(c: char) -> bool {
    matches!(c, ' ' | '\u{120}' | '\u{2581}')
}

/// Returns whether a character is white space or a control character, in any form that a vocabulary may use for it.
fn is_blank(c: char) -> bool {
    is_space(c) || c.is_ascii_whitespace() || c.is_ascii_control() || c == '\u{10A}'
}

/// Returns whether a character is an ASCII letter or may become one through normalization.
fn may_be_alphabetic(c: char) -> bool {
    c.is_ascii_alphabetic() || !c.is_ascii() && !is_blank(c)
}

/// Returns the cuts that are safe if the pre-tokenizer may leave both sides in one word.
fn cuts_in_words(model: &BPE, effects: PreTokenizerEffects) -> Option<SafeCuts> {
    // The tokens of a word that is looked up as a whole differ from those of its parts.
    if model.ignore_merges {
        return None;
    }
    let vocabulary = model.get_vocab();
    let is_known = |c: char| vocabulary.contains_key(c.encode_utf8(&mut [0; 4]) as &str);
    let is_mapped = effects.space == '\u{120}';
    // The characters that represent the individual bytes.
    let mut mapped = ('!'..='~').chain('\u{A1}'..='\u{AC}').chain('\u{AE}'..='\u{143}');
    let has_byte = |byte: u8| vocabulary.contains_key(&format!("<{byte:#04X}>"));
    let all_known = is_mapped && mapped.all(is_known) || model.byte_fallback && (0..=255).all(has_byte);
    // No cut is known to be safe if a token joins the bytes of a character, or an unknown character, with other
    // characters.
    let holds = |token: &String, part: &str| token.len() > part.len() && token.contains(part);
    let is_of_bytes = |token: &String| token.len() > "<0x00>".len() && token.contains("<0x");
    let is_of_unknown = |token: &String| model.unk_token.as_ref().is_some_and(|unknown| holds(token, unknown));
    if vocabulary.keys().any(|token| model.byte_fallback && is_of_bytes(token) || !all_known && is_of_unknown(token)) {
        return None;
    }
    // An unknown character is written together with the character before or after it, or is omitted so that its
    // neighbours meet. No unknown character may be at a cut.
    let line = if is_mapped { '\u{10A}' } else { '\n' };
    let mut cuts = SafeCuts {
        before_spaces: all_known || ('!'..='~').all(is_known) && is_known(effects.space),
        after_lines: all_known || is_known(line) && model.unk_token.is_some(),
    };
    for token in vocabulary.keys() {
        let (spaces, lines) = contains_cuts(token, |c| c.is_ascii_graphic());
        cuts.before_spaces &= !spaces;
        cuts.after_lines &= !lines;
    }
    Some(cuts)
}

/// Returns whether a normalizer treats a piece as it treats a complete text.
fn normalizes_locally(normalizer: &Value) -> bool {
    match normalizer["type"].as_str() {
        None => normalizer.is_null(),
        Some("NFC") => true,
        Some("Replace") => replaces_spaces(normalizer),
        Some("Sequence") => normalizer["normalizers"].as_array().is_some_and(|all| all.iter().all(normalizes_locally)),
        Some(_) => false,
    }
}

/// Returns whether a normalizer writes spaces as sentencepiece does.
fn replaces_spaces(normalizer: &Value) -> bool {
    let all = normalizer["normalizers"].as_array().map(Vec::as_slice).unwrap_or_default();
    normalizer["pattern"]["String"] == " " && normalizer["content"] == "\u{2581}" || all.iter().any(replaces_spaces)
}

/// The effects on a text of the pre-tokenizers applied so far.
#[derive(Debug, Clone, Copy)]
struct PreTokenizerEffects {
    /// The character that represents a space.
    space: char,
    /// Whether the text is already cut at every place where this module cuts texts and where [`run_end`] cuts.
    is_cut: bool,
}

impl PreTokenizerEffects {
    /// Applies `pre_tokenizer`. Returns false if it is not known to treat each side of a cut as it would treat that
    /// side alone.
    fn apply(&mut self, pre_tokenizer: &Value) -> bool {
        match pre_tokenizer["type"].as_str() {
            None => pre_tokenizer.is_null(),
            Some("ByteLevel") => {
                let uses_regex = pre_tokenizer["use_regex"] != false;
                let is_known = pre_tokenizer["add_prefix_space"] == false && (!uses_regex || self.reads_spaces());
                self.is_cut |= uses_regex;
                self.space = '\u{120}';
                is_known
            }
            Some("Digits") => true,
            Some("Split") if pre_tokenizer["invert"] == false => {
                let pattern = &pre_tokenizer["pattern"];
                // This pre-tokenizer splits at spaces, but none are left.
                if pattern["String"] == " " && self.space != ' ' {
                    return true;
                }
                let has_known_regex =
                    pattern["Regex"].as_str().is_some_and(|regex| CACHEABLE_PATTERNS.contains(&regex));
                let is_known = has_known_regex && pre_tokenizer["behavior"] == "Isolated" && self.reads_spaces();
                self.is_cut = true;
                is_known
            }
            Some("Sequence") => {
                let all = pre_tokenizer["pretokenizers"].as_array();
                all.is_some_and(|all| all.iter().all(|one| self.apply(one)))
            }
            Some(_) => false,
        }
    }

    /// Returns whether a regular expression applied at this point still finds spaces, or the text is already cut.
    fn reads_spaces(&self) -> bool {
        self.space == ' ' || self.is_cut
    }
}

thread_local! {
    static PIECE_CACHE: RefCell<PieceCache> = RefCell::default();
}

/// The pieces that a thread has encoded, with their tokens.
#[derive(Default)]
struct PieceCache {
    key: u64,
    /// The start and end of each piece's tokens in `tokens`.
    token_ranges: HashMap<Box<str>, (u32, u32), BuildHasherDefault<PieceHasher>>,
    /// Ids, each with the start and end of its text in the piece, in bytes.
    tokens: Vec<(u32, u32, u32)>,
}

impl PieceCache {
    /// Appends the tokens of `piece`, which begins at byte `start`.
    fn encode<E>(
        &mut self,
        piece: &str,
        start: usize,
        cuts_runs: bool,
        encoded: &mut EncodedText,
        encode: impl Fn(&str) -> Result<EncodedText, E>,
    ) -> Result<(), E> {
        if self.recall(piece, start, encoded) {
            return Ok(());
        }
        let (first, mut from) = (encoded.ids.len(), 0);
        while from < piece.len() {
            let end = if cuts_runs { run_end(piece.as_bytes(), from) } else { piece.len() };
            let (part, at) = (&piece[from..end], start + from);
            let is_all = part.len() == piece.len();
            if is_all || !self.recall(part, at, encoded) {
                let (before, new) = (encoded.ids.len(), encode(part)?);
                encoded.ids.extend(new.ids);
                encoded.offsets.extend(new.offsets.into_iter().map(|(first, end)| (at + first, at + end)));
                if !is_all {
                    self.remember(part, at, encoded, before);
                }
            }
            from = end;
        }
        self.remember(piece, start, encoded, first);
        Ok(())
    }

    /// Appends the tokens of a cached piece. Returns false if the piece is not cached.
    fn recall(&self, piece: &str, start: usize, encoded: &mut EncodedText) -> bool {
        let Some((from, to)) = self.token_ranges.get(piece) else { return false };
        let tokens = &self.tokens[*from as usize..*to as usize];
        encoded.ids.extend(tokens.iter().map(|(id, ..)| *id));
        encoded.offsets.extend(tokens.iter().map(|(_, first, end)| (start + *first as usize, start + *end as usize)));
        true
    }

    /// Caches the tokens of a piece, which begin at index `first` of `encoded`, unless the piece is too long.
    fn remember(&mut self, piece: &str, start: usize, encoded: &EncodedText, first: usize) {
        if piece.len() > MAX_PIECE_BYTES {
            return;
        }
        if self.token_ranges.len() == MAX_PIECES {
            self.token_ranges.clear();
            self.tokens.clear();
        }
        let from = self.tokens.len() as u32;
        let tokens = encoded.ids[first..].iter().zip(&encoded.offsets[first..]);
        self.tokens.extend(tokens.map(|(id, (first, end))| (*id, (first - start) as u32, (end - start) as u32)));
        self.token_ranges.insert(piece.into(), (from, self.tokens.len() as u32));
    }
}

/// A fast hash function for short texts, which processes 8 bytes at a time.
#[derive(Default)]
struct PieceHasher(u64);

impl Hasher for PieceHasher {
    fn write(&mut self, bytes: &[u8]) {
        let mut add = |word: u64| self.0 = (self.0.rotate_left(5) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let (words, rest) = bytes.as_chunks::<8>();
        words.iter().for_each(|word| add(u64::from_le_bytes(*word)));
        add(rest.iter().fold(rest.len() as u64, |word, byte| word << 8 | u64::from(*byte)));
    }

    fn finish(&self) -> u64 {
        self.0 ^ self.0 >> 32
    }
}
