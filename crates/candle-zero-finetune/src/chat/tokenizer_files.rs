//! Finds a model's tokenizer in the files of its folder or in its GGUF file.
//!
//! | files | tokenizer |
//! |---|---|
//! | `tokenizer.json` | this tokenizer, with `tokenizer_config.json` and `special_tokens_map.json` |
//! | `vocab.txt` | BERT's WordPiece over its lines |
//! | `vocab.json` and `merges.txt` of a GPT-2 model | GPT-2's byte-level BPE |
//! | a GGUF file | the tokenizer in its metadata |

use crate::error::{Error, FinetuneError, Result};
use crate::gguf::weight_reader::{GgufFile, gguf_files};
use candle_zero::checkpoint::create;
use candle_zero::files;
use serde_json::{Map, Value, json};
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};

/// The maximum size of a tokenizer file in bytes. The largest vocabularies need 35 MiB.
const MAX_TOKENIZER_BYTES: u64 = 128 << 20;

/// The content of a tokenizer's files.
#[derive(Debug, Clone)]
pub(crate) struct TokenizerFiles {
    /// The file that the tokenizer was read from.
    pub path: PathBuf,
    /// The content of tokenizer.json.
    pub tokenizer: Vec<u8>,
    /// The content of tokenizer_config.json.
    pub config: Map<String, Value>,
    /// The content of special_tokens_map.json.
    pub special: Map<String, Value>,
}

pub(crate) const TOKENIZER: &str = "tokenizer.json";
const CONFIG: &str = "tokenizer_config.json";

impl TokenizerFiles {
    /// Reads the files in a folder, or the tokenizer of a GGUF file. Files in a folder take precedence over the content
    /// of a GGUF file.
    ///
    /// # Errors
    /// [`FinetuneError::NoTokenizer`]; [`Error::Io`]; a file that cannot be used.
    pub fn read(path: &Path) -> Result<Self> {
        if let Some(gguf) = gguf_with_tokenizer(path)? {
            return GgufFile::open(&gguf)?.tokenizer_files();
        }
        let (tokenizer, vocabulary) = (path.join(TOKENIZER), path.join("vocab.txt"));
        let config = object(&path.join(CONFIG))?;
        let special = object(&path.join("special_tokens_map.json"))?;
        match read(&tokenizer)? {
            Some(bytes) => Ok(Self { path: tokenizer, tokenizer: bytes, config, special }),
            None => match read(&vocabulary)? {
                Some(lines) => {
                    let lines = String::from_utf8(lines).map_err(|_| FinetuneError::TokenizerFile {
                        path: vocabulary.clone(),
                        reason: "it is not UTF-8".into(),
                    })?;
                    let mut config = config;
                    for (name, text) in WORD_PIECE {
                        let named = special.get(name).cloned();
                        config.entry(name).or_insert_with(|| named.unwrap_or_else(|| text.into()));
                    }
                    let tokenizer = word_piece(&lines, &config).to_string().into_bytes();
                    Ok(Self { path: vocabulary, tokenizer, config, special })
                }
                None => Self::of_gpt2(path, config, special),
            },
        }
    }

    /// Writes the tokenizer from a GGUF file to a folder that has no tokenizer files.
    ///
    /// # Errors
    /// Fails if a file cannot be written.
    pub fn write(&self, folder: &Path) -> Result<()> {
        let config = Value::Object(self.config.clone()).to_string().into_bytes();
        for (name, bytes) in [(TOKENIZER, &self.tokenizer), (CONFIG, &config)] {
            create(folder, name, |file| {
                let wrong = |source| Error::Io { action: "write", path: folder.join(name), source };
                file.write_all(bytes).map_err(wrong)
            })?;
        }
        Ok(())
    }

    /// Builds the tokenizer from vocab.json and merges.txt.
    fn of_gpt2(folder: &Path, mut config: Map<String, Value>, special: Map<String, Value>) -> Result<Self> {
        let path = folder.join("vocab.json");
        let model = object(&folder.join("config.json"))?;
        let is_gpt2 = model.get("model_type").is_some_and(|kind| kind == "gpt2");
        let (Some(vocab), Some(merges), true) = (read(&path)?, read(&folder.join("merges.txt"))?, is_gpt2) else {
            return Err(no_tokenizer(folder));
        };
        let wrong = |reason: String| FinetuneError::TokenizerFile { path: path.clone(), reason };
        let vocab: Map<String, Value> = serde_json::from_slice(&vocab).map_err(|e| wrong(e.to_string()))?;
        let merges = String::from_utf8_lossy(&merges);
        let merges: Vec<&str> =
            merges.lines().filter(|line| !line.starts_with("#version") && !line.trim().is_empty()).collect();
        const END_OF_TEXT: &str = "<|endoftext|>";
        let added = vocab.get(END_OF_TEXT).map(|id| added(id.clone(), END_OF_TEXT));
        let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": true});
        let tokenizer = json!({
            "version": "1.0",
            "added_tokens": added.into_iter().collect::<Vec<_>>(),
            "pre_tokenizer": bytes, "post_processor": bytes, "decoder": bytes,
            "model": {"type": "BPE", "vocab": vocab, "merges": merges},
        });
        for name in ["bos_token", "eos_token", "unk_token"] {
            config.entry(name).or_insert(END_OF_TEXT.into());
        }
        Ok(Self { path, tokenizer: tokenizer.to_string().into_bytes(), config, special })
    }
}

/// Returns the GGUF file whose tokenizer a model uses: the path itself if it is a file, or the only GGUF file in a
/// folder without a tokenizer.
pub(super) fn gguf_with_tokenizer(path: &Path) -> Result<Option<PathBuf>> {
    if path.is_file() {
        return Ok(Some(path.to_owned()));
    }
    if !path.is_dir() || has_tokenizer(path) || ["vocab.txt", "vocab.json"].iter().any(|name| path.join(name).is_file())
    {
        return Ok(None);
    }
    Ok(match &gguf_files(path)?[..] {
        [file] => Some(file.clone()),
        _ => None,
    })
}

/// Returns whether a folder has a tokenizer.json, which takes precedence over the content of a GGUF file.
pub(crate) fn has_tokenizer(folder: &Path) -> bool {
    folder.join(TOKENIZER).is_file()
}

/// Returns the error for a folder without a tokenizer, depending on its files.
fn no_tokenizer(folder: &Path) -> Error {
    let has = |name: &str| folder.join(name).is_file();
    let found = match () {
        () if !folder.is_dir() => "there is no such folder",
        () if has("tokenizer.model") => "it has only tokenizer.model, which is not supported",
        () if has("vocab.json") => "it has vocab.json, which is read only together with merges.txt, for GPT-2",
        () => "it has neither tokenizer.json nor vocab.txt nor exactly one GGUF file",
    };
    FinetuneError::NoTokenizer { folder: folder.to_owned(), found: found.into() }.into()
}

/// BERT's special tokens, used if neither tokenizer_config.json nor special_tokens_map.json names others.
const WORD_PIECE: [(&str, &str); 5] = [
    ("unk_token", "[UNK]"),
    ("sep_token", "[SEP]"),
    ("pad_token", "[PAD]"),
    ("cls_token", "[CLS]"),
    ("mask_token", "[MASK]"),
];

fn added(id: Value, content: &str) -> Value {
    json!({
        "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true,
    })
}

/// Builds the tokenizer.json that transformers would build from a vocab.txt.
fn word_piece(lines: &str, config: &Map<String, Value>) -> Value {
    let lines = lines.strip_suffix('\n').unwrap_or(lines);
    let token = |line: &str| line.strip_suffix('\r').unwrap_or(line).to_owned();
    let vocab: Map<String, Value> = lines.split('\n').enumerate().map(|(id, line)| (token(line), id.into())).collect();
    let flag = |key: &str, default: bool| config.get(key).and_then(Value::as_bool).unwrap_or(default);
    let text = |name: &str, default: &'static str| {
        let value = config.get(name);
        value.and_then(|value| value.as_str().or_else(|| value.get("content")?.as_str())).unwrap_or(default).to_owned()
    };
    let special = WORD_PIECE.map(|(name, default)| text(name, default));
    let mut special_ids: Vec<(u64, &String)> =
        special.iter().filter_map(|token| Some((vocab.get(token)?.as_u64()?, token))).collect();
    special_ids.sort_unstable();
    special_ids.dedup();
    let pair = |name: &str, default| {
        let token = text(name, default);
        let id = vocab.get(&token).cloned().unwrap_or(0.into());
        json!([token, id])
    };
    json!({
        "version": "1.0",
        "added_tokens": special_ids.iter().map(|(id, token)| added((*id).into(), token)).collect::<Vec<_>>(),
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": true,
            "handle_chinese_chars": flag("tokenize_chinese_chars", true),
            "strip_accents": config.get("strip_accents").cloned().unwrap_or(Value::Null),
            "lowercase": flag("do_lower_case", true),
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {
            "type": "BertProcessing", "sep": pair("sep_token", "[SEP]"), "cls": pair("cls_token", "[CLS]"),
        },
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": true},
        "model": {
            "type": "WordPiece", "unk_token": text("unk_token", "[UNK]"), "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100, "vocab": vocab,
        },
    })
}

/// Returns a file's bytes, or `None` if the file does not exist.
fn read(path: &Path) -> Result<Option<Vec<u8>>> {
    match files::read(path, MAX_TOKENIZER_BYTES) {
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
        read => read.map(Some).map_err(|source| Error::Io { action: "read", path: path.to_owned(), source }),
    }
}

/// Reads a JSON object. Returns an empty one if the file does not exist.
pub(crate) fn object(path: &Path) -> Result<Map<String, Value>> {
    let Some(bytes) = read(path)? else { return Ok(Map::new()) };
    let wrong = |e: serde_json::Error| FinetuneError::TokenizerFile { path: path.into(), reason: e.to_string() };
    let bytes = bytes.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(&bytes);
    Ok(serde_json::from_slice(bytes).map_err(wrong)?)
}
