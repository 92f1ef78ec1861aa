//! Builds, from Hugging Face's tokenizer files, the keys that describe a tokenizer in a GGUF file.

use super::tokenizer::{LLAMA3, QWEN2};
use super::writer::GgufValue;
use crate::chat::template_files::named_templates;
use crate::chat::tokenizer::Tokenizer;
use crate::error::{Error, FinetuneError, Result};
use candle_zero::files;
use serde_json::Value as Json;
use std::collections::BTreeMap;
use std::path::Path;

const MAX_FILE_BYTES: u64 = 1 << 28;

/// Token types, with llama.cpp's numbers.
const NORMAL: i32 = 1;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;

/// Returns the keys for the tokenizer in `folder` and an embedding with `rows` rows.
///
/// # Errors
/// Files that cannot be read; a tokenizer other than byte-level BPE; a pre-tokenizer without a known llama.cpp name;
/// more tokens than rows.
pub(crate) fn keys(folder: &Path, config: &Json, rows: usize) -> Result<Vec<(String, GgufValue)>> {
    let path = folder.join("tokenizer.json");
    let tokenizer = read_json(&path)?;
    let settings = folder.join("tokenizer_config.json");
    let settings = if settings.is_file() { read_json(&settings)? } else { Json::Null };
    let wrong = |problem: String| Error::from(FinetuneError::Gguf { path: path.clone(), problem });
    let model = &tokenizer["model"];
    if model["type"] != "BPE" {
        return Err(wrong(format!("its model is {}; only byte-level BPE can be written as GGUF", model["type"])));
    }
    let pre = match pre_tokenizer_name(&tokenizer["pre_tokenizer"]).map_err(wrong)? {
        // This is llama.cpp's name for the same pattern without normalization.
        "qwen2" if tokenizer["normalizer"]["type"] != "NFC" => "deepseek-r1-qwen",
        pre => pre,
    };
    let mut ids: BTreeMap<usize, (&str, i32)> = BTreeMap::new();
    let number = |id: &Json| id.as_u64().and_then(|id| usize::try_from(id).ok());
    for (token, id) in model["vocab"].as_object().into_iter().flatten() {
        let id = number(id).ok_or_else(|| wrong(format!("the id of token {token:?} is {id}")))?;
        ids.insert(id, (token, NORMAL));
    }
    for token in tokenizer["added_tokens"].as_array().into_iter().flatten() {
        let (Some(id), Some(content)) = (number(&token["id"]), token["content"].as_str()) else {
            return Err(wrong(format!("the added token {token} has no id or no content")));
        };
        ids.insert(id, (content, if token["special"] == true { CONTROL } else { USER_DEFINED }));
    }
    if let Some((last, _)) = ids.last_key_value().filter(|(last, _)| **last >= rows) {
        return Err(wrong(format!("it has token {last}, but the model's embedding has only {rows} rows")));
    }
    let token = |id: usize| ids.get(&id).map_or_else(|| (format!("[PAD{id}]"), UNUSED), |(t, k)| ((*t).to_owned(), *k));
    let (tokens, kinds): (Vec<String>, Vec<i32>) = (0..rows).map(token).unzip();
    let merges = model["merges"].as_array().into_iter().flatten().map(|merge| match merge {
        Json::String(merge) => Ok(merge.clone()),
        Json::Array(pair) => match (&pair[..], pair.iter().all(Json::is_string)) {
            ([a, b], true) => Ok(format!("{} {}", a.as_str().unwrap_or_default(), b.as_str().unwrap_or_default())),
            _ => Err(wrong(format!("the merge {merge} is not a pair"))),
        },
        other => Err(wrong(format!("the merge {other} is not a pair"))),
    });
    let merges = merges.collect::<Result<Vec<String>>>()?;
    let mut keys = vec![
        ("tokenizer.ggml.model".to_owned(), GgufValue::String("gpt2".into())),
        ("tokenizer.ggml.pre".to_owned(), GgufValue::String(pre.into())),
    ];
    for (kind, role) in [("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")] {
        if let Some(id) = special(kind, &settings, config, &ids).and_then(|id| u32::try_from(id).ok()) {
            keys.push((format!("tokenizer.ggml.{role}_token_id"), GgufValue::U32(id)));
        }
    }
    // Whether BOS and EOS are added is written explicitly, so that readers need not guess it from the tokenizer type.
    let opened = Tokenizer::open(folder)?;
    let (before, after) = opened.around();
    for (kind, around) in [("bos", before), ("eos", after)] {
        if let Some(id) = opened.special_id(&format!("{kind}_token")) {
            keys.push((format!("tokenizer.ggml.add_{kind}_token"), GgufValue::Bool(around.contains(&id))));
        }
    }
    keys.extend(template_keys(named_templates(folder)?));
    keys.push(("tokenizer.ggml.tokens".into(), GgufValue::Strings(tokens)));
    keys.push(("tokenizer.ggml.token_type".into(), GgufValue::I32s(kinds)));
    keys.push(("tokenizer.ggml.merges".into(), GgufValue::Strings(merges)));
    Ok(keys)
}

/// Returns the keys of chat templates as llama.cpp's converter writes them: the default template, the others by name,
/// and a list of their names.
fn template_keys(named: BTreeMap<String, String>) -> Vec<(String, GgufValue)> {
    const KEY: &str = "tokenizer.chat_template";
    let clean = |name: &str| name.replace(|c: char| !c.is_ascii_alphanumeric(), "_");
    let (mut keys, mut names) = (vec![], vec![]);
    for (name, template) in named {
        match &*name {
            "default" => keys.push((KEY.to_owned(), GgufValue::String(template))),
            "" => {}
            _ => {
                let name = clean(&name);
                keys.push((format!("{KEY}.{name}"), GgufValue::String(template)));
                names.push(name);
            }
        }
    }
    if !names.is_empty() {
        keys.push((format!("{KEY}s"), GgufValue::Strings(names)));
    }
    keys
}

/// Returns llama.cpp's name for the pre-tokenizer, or why there is none.
fn pre_tokenizer_name(pre_tokenizer: &Json) -> std::result::Result<&'static str, String> {
    let steps: Vec<&Json> = match pre_tokenizer["type"].as_str() {
        Some("Sequence") => pre_tokenizer["pretokenizers"].as_array().into_iter().flatten().collect(),
        _ => vec![pre_tokenizer],
    };
    let Some((bytes, before)) = steps.split_last().filter(|(last, _)| last["type"] == "ByteLevel") else {
        return Err("it is not byte-level; only byte-level BPE can be written as GGUF".into());
    };
    let splits = bytes["use_regex"] != false;
    match before {
        [] if splits => Ok("gpt-2"),
        [digits] if splits && digits["type"] == "Digits" && digits["individual_digits"] == true => Ok("smollm"),
        [split] if !splits && split["type"] == "Split" && split["pattern"]["Regex"] == LLAMA3 => Ok("llama-bpe"),
        [split] if !splits && split["type"] == "Split" && split["pattern"]["Regex"] == QWEN2 => Ok("qwen2"),
        _ => Err(format!(
            "it splits text with {pre_tokenizer}, which is not one of the supported pre-tokenizers: gpt-2, smollm, \
             llama-bpe, qwen2; write a Hugging Face folder and convert it with llama.cpp"
        )),
    }
}

/// Returns the id of a special token, from its text or from the model's configuration. If the configuration lists
/// several, the first one counts.
fn special(kind: &str, settings: &Json, config: &Json, ids: &BTreeMap<usize, (&str, i32)>) -> Option<usize> {
    let named = &settings[format!("{kind}_token")];
    let named = named.as_str().or_else(|| named["content"].as_str());
    let by_name = named.and_then(|name| ids.iter().find(|(_, (token, _))| *token == name)).map(|(id, _)| *id);
    let given = &config[format!("{kind}_token_id")];
    let given = given.as_u64().or_else(|| given.get(0).and_then(Json::as_u64));
    by_name.or_else(|| given.and_then(|id| usize::try_from(id).ok()))
}

fn read_text(path: &Path) -> Result<String> {
    files::read_text(path, MAX_FILE_BYTES).map_err(|source| Error::Io { action: "read", path: path.to_owned(), source })
}

fn read_json(path: &Path) -> Result<Json> {
    serde_json::from_str(&read_text(path)?).map_err(|e| {
        let source = std::io::Error::new(std::io::ErrorKind::InvalidData, e);
        Error::Io { action: "read", path: path.to_owned(), source }
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn ways_of_cutting_texts_have_llama_cpps_names() {
        let bytes = |splits: bool| json!({"type": "ByteLevel", "add_prefix_space": false, "use_regex": splits});
        let after = |step: Json, splits| json!({"type": "Sequence", "pretokenizers": [step, bytes(splits)]});
        let split = |pattern: &str| json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"});
        assert_eq!(pre_tokenizer_name(&bytes(true)), Ok("gpt-2"));
        assert_eq!(
            pre_tokenizer_name(&after(json!({"type": "Digits", "individual_digits": true}), true)),
            Ok("smollm")
        );
        assert_eq!(pre_tokenizer_name(&after(split(LLAMA3), false)), Ok("llama-bpe"));
        assert_eq!(pre_tokenizer_name(&after(split(QWEN2), false)), Ok("qwen2"));
        assert!(
            pre_tokenizer_name(&after(split("x"), false))
                .unwrap_err()
                .contains("not one of the supported pre-tokenizers")
        );
        assert!(pre_tokenizer_name(&json!({"type": "Metaspace"})).unwrap_err().contains("not byte-level"));
        assert!(pre_tokenizer_name(&Json::Null).unwrap_err().contains("not byte-level"));
    }
}
