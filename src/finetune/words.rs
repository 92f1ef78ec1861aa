//! Encoding by pieces that are remembered.
//!
//! A general tokenizer spends most of its time on the same words again and again. Where a text can be cut so that no token
//! crosses the cut, and no piece's tokens depend on the others, the tokens of a piece are looked up. Cuts are:
//!
//! - before a space that stands between a printed ASCII character and an ASCII letter, and after the end of a line
//!   between the same: the pre-tokenizers that are allowed here cut there too, or do not cut at all, and then no token of the
//!   vocabulary has these characters in this order, so that no merge joins them;
//! - before and after special tokens in angle brackets, which are taken out of a text before all else.
//!
//! A piece that is met for the first time is cut further where the pre-tokenizer is known to cut: where a run of ASCII
//! letters, digits or punctuation ends. Of these smaller pieces there are few.
//!
//! A tokenizer of which this is not known encodes whole texts.

use serde_json::Value;
use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasherDefault, Hasher};
use tokenizers::ModelWrapper;

/// The ids of a text, and the bytes that each stands for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Encoded {
    /// The tokens.
    pub ids: Vec<u32>,
    /// Start and end of each token in the bytes of the text as it was given, also under a normalizer.
    pub offsets: Vec<(usize, usize)>,
}

/// Pieces that a thread remembers, and their longest.
const MOST_PIECES: usize = 1 << 16;
const LONGEST: usize = 96;

/// Regular expressions of pre-tokenizers that cut before a space and a letter, and after the end of a line: those of
/// cl100k, Llama 3, Qwen 2 and 3, o200k, and GPT-2 where it is spelled out.
const KNOWN: [&str; 5] = [
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
];

/// Where texts of a tokenizer may be cut.
#[derive(Debug, Clone)]
pub(super) struct Words {
    /// Special tokens in angle brackets.
    special: HashSet<String>,
    longest_special: usize,
    /// Whether pieces may be cut where runs end.
    cuts_runs: bool,
    /// Which tokenizer it is, for what threads remember.
    key: u64,
}

impl Words {
    /// The cuts of a tokenizer, where they are known.
    pub(super) fn of(inner: &tokenizers::Tokenizer, key: u64) -> Option<Self> {
        let ModelWrapper::BPE(model) = inner.get_model() else { return None };
        let is_set = |affix: &Option<String>| affix.as_ref().is_some_and(|affix| !affix.is_empty());
        if model.dropout.is_some() || is_set(&model.continuing_subword_prefix) || is_set(&model.end_of_word_suffix) {
            return None;
        }
        let normalizer = serde_json::to_value(inner.get_normalizer()).ok()?;
        let pre_tokenizer = serde_json::to_value(inner.get_pre_tokenizer()).ok()?;
        if !normalizes_alone(&normalizer) || !cuts(&pre_tokenizer, leaves_no_space(&normalizer)) {
            return None;
        }
        let mut special = HashSet::new();
        let added = inner.get_added_tokens_decoder();
        for token in added.values() {
            let text = token.content.as_str();
            let at_ends = (text.as_bytes().first(), text.as_bytes().last());
            let (Some(first), Some(last)) = at_ends else { return None };
            // One that takes white space with it, or looks at what stands beside it, where a text may be cut.
            if token.lstrip && first.is_ascii_alphabetic()
                || token.rstrip && last.is_ascii_graphic()
                || token.single_word
            {
                return None;
            }
            if (1..text.len()).any(|at| is_cut(text.as_bytes(), at)) {
                return None;
            }
            let bracketed = text.len() > 2 && *first == b'<' && *last == b'>' && text.is_ascii();
            if bracketed && !token.normalized && !token.lstrip {
                special.insert(text.to_string());
            }
        }
        // No added token may begin within one of these, or be longer.
        if added.values().any(|token| token.content.bytes().skip(1).any(|byte| byte == b'<')) {
            special.clear();
        }
        let ends_early = |text: &str| text.find('>').is_some_and(|at| at + 1 < text.len());
        if added.values().any(|token| ends_early(&token.content)) {
            special.clear();
        }
        if model.get_vocab().keys().any(|token| joins(token)) {
            return None;
        }
        let longest_special = special.iter().map(String::len).max().unwrap_or(0);
        // Added tokens are found before the text between them is cut.
        let whole = |text: &str| special.contains(text) || run_end(text.as_bytes(), 0) == text.len();
        let cuts_runs = cuts_all_runs(&pre_tokenizer) && added.values().all(|token| whole(&token.content));
        Some(Self { special, longest_special, cuts_runs, key })
    }

    /// The tokens of `text`, with those of new pieces from `encode`.
    pub(super) fn encode<E>(&self, text: &str, encode: impl Fn(&str) -> Result<Encoded, E>) -> Result<Encoded, E> {
        let mut known = REMEMBERED.take();
        if known.key != self.key {
            known = Known { key: self.key, ..Known::default() };
        }
        let tokens = text.len() / 4;
        let mut encoded = Encoded { ids: Vec::with_capacity(tokens), offsets: Vec::with_capacity(tokens) };
        let mut start = 0;
        while start < text.len() {
            let special = self.special_at(text, start);
            let end = special.unwrap_or_else(|| self.next_cut(text, start));
            let cuts_runs = self.cuts_runs && special.is_none();
            known.encode(&text[start..end], start, cuts_runs, &mut encoded, &encode)?;
            start = end;
        }
        REMEMBERED.set(known);
        Ok(encoded)
    }

    /// Where the piece that begins at `start`, and is no special token, ends.
    fn next_cut(&self, text: &str, start: usize) -> usize {
        let bytes = text.as_bytes();
        let is_end = |at: &usize| is_cut(bytes, *at) || bytes[*at] == b'<' && self.special_at(text, *at).is_some();
        (start + 1..bytes.len()).find(is_end).unwrap_or(bytes.len())
    }

    /// The end of the special token at `start`.
    fn special_at(&self, text: &str, start: usize) -> Option<usize> {
        let bytes = &text.as_bytes()[start..];
        if bytes[0] != b'<' || self.special.is_empty() {
            return None;
        }
        let most = bytes.len().min(self.longest_special);
        let end = start + bytes[..most].iter().position(|byte| *byte == b'>')? + 1;
        self.special.contains(&text[start..end]).then_some(end)
    }
}

/// Whether a text may be cut before byte `at`, which is neither its first nor beyond its last.
fn is_cut(bytes: &[u8], at: usize) -> bool {
    let graphic = |at: usize| bytes[at].is_ascii_graphic();
    match bytes[at] {
        b' ' => graphic(at - 1) && bytes.get(at + 1).is_some_and(u8::is_ascii_alphabetic),
        byte => bytes[at - 1] == b'\n' && at > 1 && graphic(at - 2) && byte.is_ascii_alphabetic(),
    }
}

/// Where the smaller piece that begins at `start` ends: between a run of ASCII letters and anything ASCII but an apostrophe
/// (of a contraction), a run of digits and anything ASCII, punctuation and a space or digit.
fn run_end(bytes: &[u8], start: usize) -> usize {
    let is_end = |at: &usize| match (bytes[at - 1], bytes[*at]) {
        (_, 0x80..) => false,
        (before, byte) if before.is_ascii_alphabetic() => !byte.is_ascii_alphabetic() && byte != b'\'',
        (before, byte) if before.is_ascii_digit() => !byte.is_ascii_digit(),
        (before, byte) => before.is_ascii_punctuation() && (byte == b' ' || byte.is_ascii_digit()),
    };
    (start + 1..bytes.len()).find(is_end).unwrap_or(bytes.len())
}

/// Whether a token of a vocabulary has a cut in it, with spaces and ends of lines as the vocabulary writes them.
fn joins(token: &str) -> bool {
    let plain: String = token
        .chars()
        .map(|c| match c {
            '\u{120}' | '\u{2581}' => ' ',
            '\u{10A}' => '\n',
            c => c,
        })
        .collect();
    // A cut after the end of a line may begin before the token.
    let lines = |pair: &[u8]| pair[0] == b'\n' && pair[1].is_ascii_alphabetic();
    (1..plain.len()).any(|at| is_cut(plain.as_bytes(), at)) || plain.as_bytes().windows(2).any(lines)
}

/// Whether a normalizer does the same to a piece as to a whole text.
fn normalizes_alone(normalizer: &Value) -> bool {
    match normalizer["type"].as_str() {
        None => normalizer.is_null(),
        Some("NFC") => true,
        Some("Replace") => leaves_no_space(normalizer),
        Some("Sequence") => normalizer["normalizers"].as_array().is_some_and(|all| all.iter().all(normalizes_alone)),
        Some(_) => false,
    }
}

/// Whether a normalizer writes spaces as sentencepiece does.
fn leaves_no_space(normalizer: &Value) -> bool {
    let all = normalizer["normalizers"].as_array().map(Vec::as_slice).unwrap_or_default();
    normalizer["pattern"]["String"] == " " && normalizer["content"] == "\u{2581}" || all.iter().any(leaves_no_space)
}

/// Whether a pre-tokenizer cuts where texts are cut here, or nowhere.
fn cuts(pre_tokenizer: &Value, no_spaces: bool) -> bool {
    match pre_tokenizer["type"].as_str() {
        None => pre_tokenizer.is_null(),
        Some("ByteLevel") => pre_tokenizer["add_prefix_space"] == false,
        Some("Digits") => true,
        Some("Split") => {
            let isolated = pre_tokenizer["behavior"] == "Isolated" && pre_tokenizer["invert"] == false;
            let pattern = &pre_tokenizer["pattern"];
            let known = pattern["Regex"].as_str().is_some_and(|regex| KNOWN.contains(&regex));
            // Of spaces, of which a normalizer left none.
            known && isolated || no_spaces && pattern["String"] == " "
        }
        Some("Sequence") => {
            let all = pre_tokenizer["pretokenizers"].as_array();
            all.is_some_and(|all| all.iter().all(|one| cuts(one, no_spaces)))
        }
        Some(_) => false,
    }
}

/// Whether a pre-tokenizer, of those that [`cuts`] knows, cuts wherever [`run_end`] does: by a regular expression.
fn cuts_all_runs(pre_tokenizer: &Value) -> bool {
    match pre_tokenizer["type"].as_str() {
        Some("ByteLevel") => pre_tokenizer["use_regex"] != false,
        Some("Split") => pre_tokenizer["pattern"]["Regex"].is_string(),
        Some("Sequence") => pre_tokenizer["pretokenizers"].as_array().is_some_and(|all| all.iter().any(cuts_all_runs)),
        _ => false,
    }
}

thread_local! {
    static REMEMBERED: RefCell<Known> = RefCell::default();
}

/// Pieces that a thread has encoded.
#[derive(Default)]
struct Known {
    key: u64,
    /// Where the tokens of a piece lie in `tokens`.
    places: HashMap<Box<str>, (u32, u32), BuildHasherDefault<PieceHasher>>,
    /// Ids, and their first and last bytes in the piece.
    tokens: Vec<(u32, u32, u32)>,
}

impl Known {
    /// Appends the tokens of `piece`, which begins at byte `start`.
    fn encode<E>(
        &mut self,
        piece: &str,
        start: usize,
        cuts_runs: bool,
        encoded: &mut Encoded,
        encode: impl Fn(&str) -> Result<Encoded, E>,
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

    /// Appends the tokens of a piece that is known.
    fn recall(&self, piece: &str, start: usize, encoded: &mut Encoded) -> bool {
        let Some((from, to)) = self.places.get(piece) else { return false };
        let tokens = &self.tokens[*from as usize..*to as usize];
        encoded.ids.extend(tokens.iter().map(|(id, ..)| *id));
        encoded.offsets.extend(tokens.iter().map(|(_, first, end)| (start + *first as usize, start + *end as usize)));
        true
    }

    /// Keeps the tokens of a piece, those from number `first` on.
    fn remember(&mut self, piece: &str, start: usize, encoded: &Encoded, first: usize) {
        if piece.len() > LONGEST {
            return;
        }
        if self.places.len() == MOST_PIECES {
            self.places.clear();
            self.tokens.clear();
        }
        let from = self.tokens.len() as u32;
        let tokens = encoded.ids[first..].iter().zip(&encoded.offsets[first..]);
        self.tokens.extend(tokens.map(|(id, (first, end))| (*id, (first - start) as u32, (end - start) as u32)));
        self.places.insert(piece.into(), (from, self.tokens.len() as u32));
    }
}

/// A fast hash of short texts, of 8 bytes at a time.
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
