//! Builds a tokenizer.json, a tokenizer_config.json and a chat template from the metadata of a GGUF file, following the
//! conventions of llama.cpp's converter.
//!
//! | `tokenizer.ggml.model` | tokenizer.json |
//! |---|---|
//! | `gpt2` | byte-level BPE; `tokenizer.ggml.pre` names the pre-tokenizer |
//! | `llama` | SentencePiece's BPE: pieces with scores, from which the merges are derived |

use super::weight_reader::{GgufFile, bad_gguf};
use super::writer::GgufValue;
use crate::chat::tokenizer_files::TokenizerFiles;
use crate::error::Result;
use candle_core::quantized::gguf_file::Value;
use candle_zero::util::counted;
use serde_json::{Map, Value as Json, json};
use std::collections::HashMap;

/// Token types, with llama.cpp's numbers.
pub(super) const NORMAL: i32 = 1;
pub(super) const UNKNOWN: i32 = 2;
pub(super) const CONTROL: i32 = 3;
pub(super) const USER_DEFINED: i32 = 4;
pub(super) const UNUSED: i32 = 5;
pub(super) const BYTE: i32 = 6;

/// The maximum number of tokens in a file.
const MAX_TOKENS: usize = 1 << 22;

/// SentencePiece's symbol for a space.
pub(super) const SPACE: &str = "\u{2581}";

/// The way in which byte-level BPE splits texts, selected by llama.cpp's name for it: with GPT-2's pattern, with a step
/// before that pattern, or with other patterns.
enum PreTokenizerPattern {
    /// GPT-2's pattern.
    Gpt2,
    /// Every digit separately, then GPT-2's pattern.
    DigitsThenGpt2,
    /// These patterns, one after another.
    Patterns(&'static [&'static str]),
}

pub(super) const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
pub(super) const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
pub(super) const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
pub(super) const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const DEEPSEEK_V3: [&str; 3] = [
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\x22#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
];
const DEEPSEEK_CODER: [&str; 5] = [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}"];

/// The best-known of the supported names of pre-tokenizers, for error messages.
const SUPPORTED_PRE_TOKENIZERS: &str = "gpt-2, smollm, starcoder, refact, command-r, llama-bpe, smaug-bpe, dbrx, falcon3, pixtral, qwen2, stablelm2, \
                     deepseek-r1-qwen, megrez, tekken, gpt-4o, deepseek-v3 and deepseek-coder";

impl PreTokenizerPattern {
    fn of(name: &str) -> Option<Self> {
        Some(match name {
            "gpt-2" | "phi-2" | "mpt" | "olmo" | "jais" | "trillion" | "jina-es" | "jina-de" | "roberta-bpe" => {
                Self::Gpt2
            }
            "smollm" | "starcoder" | "refact" | "command-r" | "codeshell" | "exaone" | "minerva-7b" => {
                Self::DigitsThenGpt2
            }
            "llama3" | "llama-v3" | "llama-bpe" | "smaug-bpe" | "dbrx" | "falcon3" | "pixtral" | "chatglm-bpe" => {
                Self::Patterns(&[LLAMA3])
            }
            "qwen2" | "stablelm2" | "deepseek-r1-qwen" | "megrez" | "hunyuan" => Self::Patterns(&[QWEN2]),
            "tekken" => Self::Patterns(&[TEKKEN]),
            "gpt-4o" => Self::Patterns(&[GPT4O]),
            "deepseek-v3" | "hunyuan-dense" => Self::Patterns(&DEEPSEEK_V3),
            "deepseek-coder" => Self::Patterns(&DEEPSEEK_CODER),
            _ => return None,
        })
    }

    /// Returns the pattern as the `pre_tokenizer` of tokenizer.json.
    fn json(&self) -> Json {
        let bytes = |use_regex: bool| byte_level(use_regex);
        let steps = match self {
            Self::Gpt2 => return bytes(true),
            Self::DigitsThenGpt2 => vec![json!({"type": "Digits", "individual_digits": true}), bytes(true)],
            Self::Patterns(patterns) => {
                let split = |pattern: &&str| json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
                patterns.iter().map(split).chain([bytes(false)]).collect()
            }
        };
        json!({"type": "Sequence", "pretokenizers": steps})
    }
}

fn byte_level(use_regex: bool) -> Json {
    json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": use_regex})
}

impl GgufFile {
    /// Returns the equivalent of a model folder's tokenizer files.
    ///
    /// # Errors
    /// A file without a tokenizer, or with one that is not supported.
    pub fn tokenizer_files(&self) -> Result<TokenizerFiles> {
        let kind = self.text("tokenizer.ggml.model")?.ok_or_else(|| {
            bad_gguf(
                &self.path,
                "it has no tokenizer (tokenizer.ggml.model); put the model's tokenizer.json next to it",
            )
        })?;
        let vocabulary = GgufVocabulary::of(self)?;
        let (tokenizer, adds_bos) = match kind {
            "gpt2" => vocabulary.byte_level()?,
            "llama" => vocabulary.sentence_piece()?,
            other => {
                let allowed =
                    "gpt2 or llama: others are not supported; put the model's tokenizer.json next to the file";
                return Err(self.refuse("tokenizer.ggml.model", format!("{other:?}"), allowed));
            }
        };
        let mut config = Map::new();
        let default_id = |role: &str| match (kind, role) {
            // llama.cpp's defaults for files that do not specify these ids.
            ("llama", "unknown") => Some(0),
            ("llama", "bos") => Some(1),
            ("llama", "eos") => Some(2),
            _ => None,
        };
        for (name, role) in [("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")] {
            let key = format!("tokenizer.ggml.{role}_token_id");
            let id = self.number(&key)?.or_else(|| default_id(role));
            let text = id.and_then(|id| vocabulary.tokens.get(usize::try_from(id).ok()?));
            if let Some((text, _)) = text.filter(|(_, kind)| *kind != UNUSED) {
                config.insert(format!("{name}_token"), Json::from(*text));
            }
        }
        let flag = |key: &str| match self.header.metadata.get(key) {
            Some(Value::Bool(flag)) => Some(*flag),
            _ => None,
        };
        config.insert("add_bos_token".into(), flag("tokenizer.ggml.add_bos_token").unwrap_or(adds_bos).into());
        config.insert("add_eos_token".into(), flag("tokenizer.ggml.add_eos_token").unwrap_or(false).into());
        let template = self.chat_template("")?;
        config.extend(template.map(|template| ("chat_template".to_owned(), Json::from(template))));
        Ok(TokenizerFiles {
            path: self.path.clone(),
            tokenizer: tokenizer.to_string().into_bytes(),
            config,
            special: Map::new(),
        })
    }

    /// Returns the tokenizer keys unchanged, for writing them to another file.
    pub(super) fn tokenizer_keys(&self) -> Vec<(String, GgufValue)> {
        let entries = self.header.metadata.iter().filter(|(key, _)| key.starts_with("tokenizer."));
        let mut keys: Vec<_> = entries.filter_map(|(key, value)| Some((key.clone(), to_gguf_value(value)?))).collect();
        keys.sort_by(|(a, _), (b, _)| a.cmp(b));
        keys
    }

    /// Returns a chat template, if the file has it. `name` is empty for the default template; otherwise, it is a suffix
    /// with a dot (`.tool_use`).
    ///
    /// # Errors
    /// A value that is not text.
    pub fn chat_template(&self, name: &str) -> Result<Option<&str>> {
        self.text(&format!("tokenizer.chat_template{name}"))
    }

    fn text(&self, key: &str) -> Result<Option<&str>> {
        match self.header.metadata.get(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(_) => Err(self.refuse(key, "not a string", "a string")),
        }
    }

    fn number(&self, key: &str) -> Result<Option<u64>> {
        match self.header.metadata.get(key) {
            None => Ok(None),
            Some(value) => match integer(value) {
                Some(number) => Ok(u64::try_from(number).ok()),
                None => Err(self.refuse(key, "not a whole number", "a whole number")),
            },
        }
    }

    fn array(&self, key: &str) -> Result<Option<&[Value]>> {
        match self.header.metadata.get(key) {
            None => Ok(None),
            Some(Value::Array(values)) => Ok(Some(values)),
            Some(_) => Err(self.refuse(key, "not a list", "a list")),
        }
    }
}

/// Returns a value in the form in which it is written, or `None` for an empty list, a number that is too large, or a
/// type that no tokenizer key has.
fn to_gguf_value(value: &Value) -> Option<GgufValue> {
    Some(match value {
        Value::Bool(flag) => GgufValue::Bool(*flag),
        Value::String(text) => GgufValue::String(text.clone()),
        Value::F32(number) => GgufValue::F32(*number),
        Value::Array(values) => match values.first()? {
            Value::String(_) => {
                let text = |value: &Value| if let Value::String(text) = value { Some(text.clone()) } else { None };
                GgufValue::Strings(values.iter().map(text).collect::<Option<_>>()?)
            }
            Value::F32(_) => {
                let number = |value: &Value| if let Value::F32(number) = value { Some(*number) } else { None };
                GgufValue::F32s(values.iter().map(number).collect::<Option<_>>()?)
            }
            _ => {
                GgufValue::I32s(values.iter().map(|value| i32::try_from(integer(value)?).ok()).collect::<Option<_>>()?)
            }
        },
        value => GgufValue::U32(u32::try_from(integer(value)?).ok()?),
    })
}

fn integer(value: &Value) -> Option<i64> {
    match value {
        Value::I8(number) => Some((*number).into()),
        Value::I16(number) => Some((*number).into()),
        Value::I32(number) => Some((*number).into()),
        Value::I64(number) => Some(*number),
        value => value.to_u64().ok().and_then(|number| i64::try_from(number).ok()),
    }
}

/// The tokens of a file.
struct GgufVocabulary<'a> {
    gguf: &'a GgufFile,
    /// The text and the type of each token.
    tokens: Vec<(&'a str, i32)>,
}

impl<'a> GgufVocabulary<'a> {
    fn of(gguf: &'a GgufFile) -> Result<Self> {
        const TOKENS: &str = "tokenizer.ggml.tokens";
        let texts = gguf.array(TOKENS)?.ok_or_else(|| gguf.refuse(TOKENS, "absent", "a list of strings"))?;
        if texts.is_empty() || texts.len() > MAX_TOKENS {
            return Err(gguf.refuse(
                TOKENS,
                format!("a list of length {}", texts.len()),
                format!("1 to {MAX_TOKENS} strings"),
            ));
        }
        let kinds = gguf.array("tokenizer.ggml.token_type")?;
        if let Some(kinds) = kinds.filter(|kinds| kinds.len() != texts.len()) {
            let found = format!("a list of length {}", kinds.len());
            return Err(gguf.refuse(
                "tokenizer.ggml.token_type",
                found,
                format!("{}, one per token", counted(texts.len(), "number")),
            ));
        }
        let token = |(id, text): (usize, &'a Value)| match text {
            Value::String(text) => {
                let kind = kinds.and_then(|kinds| i32::try_from(integer(&kinds[id])?).ok()).unwrap_or(NORMAL);
                Ok((text.as_str(), kind))
            }
            _ => Err(gguf.refuse(TOKENS, format!("a list whose entry {id} is not a string"), "a list of strings")),
        };
        Ok(Self { gguf, tokens: texts.iter().enumerate().map(token).collect::<Result<_>>()? })
    }

    /// Returns the ids by text, without the tokens that pad the embedding. Of two equal tokens, the first one counts.
    fn vocab(&self) -> Map<String, Json> {
        let mut vocab = Map::new();
        for (id, (text, _)) in self.tokens.iter().enumerate().filter(|(_, (_, kind))| *kind != UNUSED) {
            if !vocab.contains_key(*text) {
                vocab.insert((*text).to_owned(), id.into());
            }
        }
        vocab
    }

    /// Returns the tokens that match their text wherever it occurs.
    fn added(&self) -> Vec<Json> {
        let is_added = |kind: i32| [CONTROL, USER_DEFINED, UNKNOWN].contains(&kind);
        let added = self.tokens.iter().enumerate().filter(|(_, (text, kind))| is_added(*kind) && !text.is_empty());
        let added = added.map(|(id, (text, kind))| {
            json!({
                "id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
                "special": *kind != USER_DEFINED,
            })
        });
        added.collect()
    }

    /// Returns the byte-level BPE tokenizer, and whether texts begin with BOS if the file does not specify this.
    fn byte_level(&self) -> Result<(Json, bool)> {
        const PRE: &str = "tokenizer.ggml.pre";
        let allowed = || {
            format!(
                "one of {SUPPORTED_PRE_TOKENIZERS}; for any other pre-tokenizer, put the model's tokenizer.json next to \
                 the file"
            )
        };
        let name = self.gguf.text(PRE)?.ok_or_else(|| self.gguf.refuse(PRE, "absent", allowed()))?;
        let pattern =
            PreTokenizerPattern::of(name).ok_or_else(|| self.gguf.refuse(PRE, format!("{name:?}"), allowed()))?;
        const MERGES: &str = "tokenizer.ggml.merges";
        let merges = self.gguf.array(MERGES)?.ok_or_else(|| self.gguf.refuse(MERGES, "absent", "a list of pairs"))?;
        let vocab = self.vocab();
        let merge = |(at, merge): (usize, &Value)| match merge {
            Value::String(text) => match text.split_once(' ') {
                Some((a, b)) if vocab.contains_key(a) && vocab.contains_key(b) => Ok(json!([a, b])),
                _ => Err(self.gguf.refuse(
                    &format!("entry {at} of {MERGES}"),
                    format!("{text:?}"),
                    "two tokens with a space between them",
                )),
            },
            _ => Err(self.gguf.refuse(MERGES, format!("a list whose entry {at} is not a string"), "a list of strings")),
        };
        let merges = merges.iter().enumerate().map(merge).collect::<Result<Vec<_>>>()?;
        let is_llama3 = matches!(name, "llama3" | "llama-v3" | "llama-bpe");
        let ignores_merges = is_llama3 || matches!(name, "falcon3" | "pixtral" | "tekken");
        let tokenizer = json!({
            "version": "1.0",
            "added_tokens": self.added(),
            // Qwen's own files contain this normalizer. llama.cpp omits it.
            "normalizer": if name == "qwen2" { json!({"type": "NFC"}) } else { Json::Null },
            "pre_tokenizer": pattern.json(),
            "post_processor": byte_level(true),
            "decoder": byte_level(true),
            "model": {"type": "BPE", "vocab": vocab, "merges": merges, "ignore_merges": ignores_merges},
        });
        Ok((tokenizer, is_llama3 || name == "tekken"))
    }

    /// Returns SentencePiece's BPE tokenizer, and whether texts begin with BOS if the file does not specify this.
    fn sentence_piece(&self) -> Result<(Json, bool)> {
        const SCORES: &str = "tokenizer.ggml.scores";
        let scores = self.gguf.array(SCORES)?.ok_or_else(|| self.gguf.refuse(SCORES, "absent", "a list of numbers"))?;
        if scores.len() != self.tokens.len() {
            let allowed = format!("{}, one per token", counted(self.tokens.len(), "number"));
            return Err(self.gguf.refuse(SCORES, format!("a list of length {}", scores.len()), allowed));
        }
        let score = |id: usize| match &scores[id] {
            Value::F32(score) if !score.is_nan() => Ok(*score),
            _ => Err(self.gguf.refuse(SCORES, format!("a list whose entry {id} is not a number"), "a list of numbers")),
        };
        let unknown = self.tokens.iter().find(|(_, kind)| *kind == UNKNOWN).map(|(text, _)| *text);
        let adds_space =
            !matches!(self.gguf.header.metadata.get("tokenizer.ggml.add_space_prefix"), Some(Value::Bool(false)));
        let spaces = json!({"type": "Replace", "pattern": {"String": " "}, "content": SPACE});
        let normalizer = match adds_space {
            true => json!({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": SPACE}, spaces]}),
            false => spaces,
        };
        let mut decoders = vec![
            json!({"type": "Replace", "pattern": {"String": SPACE}, "content": " "}),
            json!({"type": "ByteFallback"}),
            json!({"type": "Fuse"}),
        ];
        if adds_space {
            decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
        }
        let tokenizer = json!({
            "version": "1.0",
            "added_tokens": self.added(),
            "normalizer": normalizer,
            "pre_tokenizer": null,
            "post_processor": null,
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": {
                "type": "BPE", "unk_token": unknown, "fuse_unk": true, "byte_fallback": true,
                "vocab": self.vocab(), "merges": self.merges(score)?, "ignore_merges": false,
            },
        });
        Ok((tokenizer, true))
    }

    /// Returns the merges of two pieces into one. Merges into pieces with higher scores come first, as in
    /// SentencePiece. If SentencePiece itself created the pieces, the order of merges into one piece has no effect.
    fn merges(&self, score: impl Fn(usize) -> Result<f32>) -> Result<Vec<Json>> {
        let is_piece = |kind: i32| kind == NORMAL || kind == USER_DEFINED;
        let pieces = self.tokens.iter().enumerate().filter(|(_, (_, kind))| is_piece(*kind));
        let ids: HashMap<&str, usize> = pieces.clone().map(|(id, (text, _))| (*text, id)).collect();
        let mut merges: Vec<(f32, &str, &str)> = vec![];
        for (id, (text, _)) in pieces {
            let parts = text.char_indices().skip(1).map(|(at, _)| text.split_at(at));
            let parts = parts.filter_map(|(a, b)| Some((*ids.get(a)?, *ids.get(b)?, a, b)));
            let mut parts: Vec<_> = parts.collect();
            parts.sort_unstable_by_key(|(a, b, ..)| (*a, *b));
            let score = score(id)?;
            merges.extend(parts.into_iter().map(|(.., a, b)| (score, a, b)));
        }
        // Among equal scores, merges with longer first parts come first, then those with longer second parts, as in
        // transformers' conversion. Otherwise, the order of the ids is kept, because the sort is stable.
        let chars = |text: &str| text.chars().count();
        merges.sort_by(|x, y| {
            (y.0.total_cmp(&x.0)).then_with(|| chars(y.1).cmp(&chars(x.1))).then_with(|| chars(y.2).cmp(&chars(x.2)))
        });
        Ok(merges.into_iter().map(|(_, a, b)| json!([a, b])).collect())
    }
}
