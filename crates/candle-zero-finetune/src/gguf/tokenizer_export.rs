//! Builds, from Hugging Face's tokenizer files, the keys that describe a tokenizer in a GGUF file.

use super::sentence_piece_export::{adds_space, is_sentence_piece, scores, set_types};
use super::tokenizer_import::{CONTROL, GPT4O, LLAMA3, NORMAL, QWEN2, TEKKEN, UNUSED, USER_DEFINED};
use super::writer::GgufValue;
use crate::chat::template_files::named_templates;
use crate::chat::tokenizer::Tokenizer;
use crate::error::{Error, FinetuneError, Result};
use candle_zero::files;
use candle_zero::util::counted;
use serde_json::Value as Json;
use std::collections::BTreeMap;
use std::path::Path;

const MAX_FILE_BYTES: u64 = 1 << 28;

/// Returns the keys for the tokenizer in `folder` and an embedding with `rows` rows.
///
/// # Errors
/// Files that cannot be read; a tokenizer other than byte-level BPE and SentencePiece's BPE; a pre-tokenizer without a
/// known llama.cpp name; more tokens than rows.
pub(crate) fn keys(folder: &Path, config: &Json, rows: usize) -> Result<Vec<(String, GgufValue)>> {
    let path = folder.join("tokenizer.json");
    let tokenizer = read_json(&path)?;
    let settings = folder.join("tokenizer_config.json");
    let settings = if settings.is_file() { read_json(&settings)? } else { Json::Null };
    let wrong = |problem: String| Error::from(FinetuneError::Gguf { path: path.clone(), problem });
    let model = &tokenizer["model"];
    if model["type"] != "BPE" {
        return Err(wrong(format!(
            "its model is {}; only byte-level BPE and SentencePiece's BPE can be written as GGUF",
            model["type"]
        )));
    }
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
        let rows = counted(rows, "row");
        return Err(wrong(format!("it has token {last}, but the model's embedding has only {rows}")));
    }
    let merge_of = |merge: &'_ Json| -> Result<(String, String)> {
        let pair = match merge {
            Json::String(merge) => merge.split_once(' '),
            Json::Array(pair) => match &pair[..] {
                [a, b] => a.as_str().zip(b.as_str()),
                _ => None,
            },
            _ => None,
        };
        let (a, b) = pair.ok_or_else(|| wrong(format!("the merge {merge} is not a pair")))?;
        Ok((a.to_owned(), b.to_owned()))
    };
    let merges = model["merges"].as_array().into_iter().flatten().map(merge_of).collect::<Result<Vec<_>>>()?;
    let mut keys = match is_sentence_piece(model) {
        true => {
            set_types(&mut ids, model["unk_token"].as_str()).map_err(wrong)?;
            let merges: Vec<(&str, &str)> = merges.iter().map(|(a, b)| (a.as_str(), b.as_str())).collect();
            let adds_space = adds_space(&tokenizer).map_err(wrong)?;
            vec![
                ("tokenizer.ggml.model".to_owned(), GgufValue::String("llama".into())),
                ("tokenizer.ggml.pre".to_owned(), GgufValue::String("default".into())),
                ("tokenizer.ggml.scores".into(), GgufValue::F32s(scores(&ids, &merges, rows).map_err(wrong)?)),
                ("tokenizer.ggml.add_space_prefix".into(), GgufValue::Bool(adds_space)),
            ]
        }
        false => {
            let pre = byte_level_name(&tokenizer).map_err(wrong)?;
            let merges = merges.into_iter().map(|(a, b)| format!("{a} {b}")).collect();
            vec![
                ("tokenizer.ggml.model".to_owned(), GgufValue::String("gpt2".into())),
                ("tokenizer.ggml.pre".to_owned(), GgufValue::String(pre.into())),
                ("tokenizer.ggml.merges".into(), GgufValue::Strings(merges)),
            ]
        }
    };
    let token = |id: usize| ids.get(&id).map_or_else(|| (format!("[PAD{id}]"), UNUSED), |(t, k)| ((*t).to_owned(), *k));
    let (tokens, kinds): (Vec<String>, Vec<i32>) = (0..rows).map(token).unzip();
    for (kind, role) in [("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")] {
        if let Some(id) = special(kind, &settings, config, &ids).and_then(|id| u32::try_from(id).ok()) {
            keys.push((format!("tokenizer.ggml.{role}_token_id"), GgufValue::U32(id)));
        }
    }
    // Whether BOS and EOS are added is written explicitly, so that readers need not guess it from the tokenizer type.
    let loaded = Tokenizer::open(folder)?;
    let (before, after) = loaded.prefix_and_suffix();
    for (kind, added) in [("bos", before), ("eos", after)] {
        if let Some(id) = loaded.special_id(&format!("{kind}_token")) {
            keys.push((format!("tokenizer.ggml.add_{kind}_token"), GgufValue::Bool(added.contains(&id))));
        }
    }
    keys.extend(template_keys(named_templates(folder)?).map_err(wrong)?);
    keys.push(("tokenizer.ggml.tokens".into(), GgufValue::Strings(tokens)));
    keys.push(("tokenizer.ggml.token_type".into(), GgufValue::I32s(kinds)));
    Ok(keys)
}

/// Returns the keys of chat templates as llama.cpp's converter writes them: the default template, the others by name,
/// and a list of their names. Fails if two names differ only in characters that keys cannot contain.
fn template_keys(named: BTreeMap<String, String>) -> std::result::Result<Vec<(String, GgufValue)>, String> {
    const KEY: &str = "tokenizer.chat_template";
    let clean = |name: &str| name.replace(|c: char| !c.is_ascii_alphanumeric(), "_");
    let (mut keys, mut names) = (vec![], vec![]);
    for (name, template) in named {
        match &*name {
            "default" => keys.push((KEY.to_owned(), GgufValue::String(template))),
            "" => {}
            _ => {
                let name = clean(&name);
                if names.contains(&name) {
                    return Err(format!("two of its chat templates would be named {name} in a GGUF file; rename one"));
                }
                keys.push((format!("{KEY}.{name}"), GgufValue::String(template)));
                names.push(name);
            }
        }
    }
    if !names.is_empty() {
        keys.push((format!("{KEY}s"), GgufValue::Strings(names)));
    }
    Ok(keys)
}

/// Returns llama.cpp's name for a byte-level BPE tokenizer. The name determines the pattern that splits texts, and
/// whether words that are tokens are also built by merges. llama.cpp has no normalization, so for texts that are not in
/// NFC, a tokenizer with NFC yields different tokens from those of llama.cpp.
fn byte_level_name(tokenizer: &Json) -> std::result::Result<&'static str, String> {
    const REMEDY: &str = "write a Hugging Face folder and convert it with llama.cpp";
    let pre = pre_tokenizer_name(&tokenizer["pre_tokenizer"])?;
    let normalizer = &tokenizer["normalizer"];
    if !normalizer.is_null() && normalizer["type"] != "NFC" {
        return Err(format!("its normalizer is {normalizer}, which llama.cpp does not have; {REMEDY}"));
    }
    let ignores_merges = tokenizer["model"]["ignore_merges"] == true;
    match (pre, ignores_merges) {
        ("qwen2", false) if normalizer.is_null() => Ok("deepseek-r1-qwen"),
        ("llama-bpe", false) => Ok("dbrx"),
        _ if ignores_merges == matches!(pre, "llama-bpe" | "tekken") => Ok(pre),
        _ => Err(format!(
            "its ignore_merges is {ignores_merges}, but llama.cpp assumes {} for the pre-tokenizer {pre}; {REMEDY}",
            !ignores_merges
        )),
    }
}

/// Returns llama.cpp's name for the pre-tokenizer, or why there is none.
fn pre_tokenizer_name(pre_tokenizer: &Json) -> std::result::Result<&'static str, String> {
    let steps: Vec<&Json> = match pre_tokenizer["type"].as_str() {
        Some("Sequence") => pre_tokenizer["pretokenizers"].as_array().into_iter().flatten().collect(),
        _ => vec![pre_tokenizer],
    };
    let Some((bytes, preceding)) = steps.split_last().filter(|(last, _)| last["type"] == "ByteLevel") else {
        return Err("it neither is byte-level nor has byte_fallback; only byte-level BPE and SentencePiece's BPE can \
                    be written as GGUF"
            .into());
    };
    if bytes["add_prefix_space"] == true {
        return Err(
            "it adds a space before texts (add_prefix_space), which llama.cpp's byte-level BPE does not; write \
                    a Hugging Face folder and convert it with llama.cpp"
                .into(),
        );
    }
    let splits = bytes["use_regex"] != false;
    let unknown = || {
        format!(
            "it splits text with {pre_tokenizer}, which is not one of the supported pre-tokenizers: gpt-2, smollm, \
             llama-bpe, dbrx, qwen2, deepseek-r1-qwen, gpt-4o, tekken; write a Hugging Face folder and convert it with \
             llama.cpp"
        )
    };
    match preceding {
        [] if splits => Ok("gpt-2"),
        [digits] if splits && digits["type"] == "Digits" && digits["individual_digits"] == true => Ok("smollm"),
        // Both forms keep the matches of the pattern as words.
        [split]
            if !splits
                && split["type"] == "Split"
                && [("Isolated", false), ("Removed", true)]
                    .contains(&(split["behavior"].as_str().unwrap_or_default(), split["invert"] == true)) =>
        {
            let pattern = &split["pattern"]["Regex"];
            let known = [(LLAMA3, "llama-bpe"), (QWEN2, "qwen2"), (GPT4O, "gpt-4o"), (TEKKEN, "tekken")];
            known.iter().find(|(known, _)| pattern == known).map(|(_, name)| *name).ok_or_else(unknown)
        }
        _ => Err(unknown()),
    }
}

/// Returns the id of a special token, from its text or from the model's configuration. If the configuration lists
/// several, the first one counts.
fn special(kind: &str, settings: &Json, config: &Json, ids: &BTreeMap<usize, (&str, i32)>) -> Option<usize> {
    let text = &settings[format!("{kind}_token")];
    let text = text.as_str().or_else(|| text["content"].as_str());
    let by_text = text.and_then(|name| ids.iter().find(|(_, (token, _))| *token == name)).map(|(id, _)| *id);
    let configured = &config[format!("{kind}_token_id")];
    let configured = configured.as_u64().or_else(|| configured.get(0).and_then(Json::as_u64));
    by_text.or_else(|| configured.and_then(|id| usize::try_from(id).ok()))
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
        assert_eq!(pre_tokenizer_name(&after(split(GPT4O), false)), Ok("gpt-4o"));
        assert_eq!(pre_tokenizer_name(&after(split(TEKKEN), false)), Ok("tekken"));
        assert!(
            pre_tokenizer_name(&after(split("x"), false))
                .unwrap_err()
                .contains("not one of the supported pre-tokenizers")
        );
        assert!(pre_tokenizer_name(&json!({"type": "Metaspace"})).unwrap_err().contains("neither is byte-level"));
        assert!(pre_tokenizer_name(&Json::Null).unwrap_err().contains("neither is byte-level"));
    }

    #[test]
    fn what_a_name_of_llama_cpp_does_not_say_is_refused() {
        let named = |pattern: &str, ignores: bool, change: fn(&mut Json)| {
            let split =
                json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
            let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "use_regex": false});
            let mut tokenizer = json!({
                "model": {"type": "BPE", "ignore_merges": ignores},
                "normalizer": null,
                "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, bytes]},
            });
            change(&mut tokenizer);
            byte_level_name(&tokenizer)
        };
        let unchanged = |_: &mut Json| ();
        assert_eq!(named(LLAMA3, true, unchanged).as_deref(), Ok("llama-bpe"));
        assert_eq!(named(LLAMA3, false, unchanged).as_deref(), Ok("dbrx"));
        assert_eq!(named(TEKKEN, true, unchanged).as_deref(), Ok("tekken"));
        assert_eq!(named(QWEN2, false, unchanged).as_deref(), Ok("deepseek-r1-qwen"));
        assert_eq!(named(QWEN2, false, |all| all["normalizer"] = json!({"type": "NFC"})).as_deref(), Ok("qwen2"));
        let inverted = |all: &mut Json| {
            let split = &mut all["pre_tokenizer"]["pretokenizers"][0];
            (split["behavior"], split["invert"]) = ("Removed".into(), true.into());
        };
        assert_eq!(named(GPT4O, false, inverted).as_deref(), Ok("gpt-4o"));
        let refused = |name: std::result::Result<&str, String>, part: &str| {
            let text = name.unwrap_err();
            assert!(text.contains(part), "{text}");
        };
        refused(named(TEKKEN, false, unchanged), "its ignore_merges is false");
        refused(named(QWEN2, true, unchanged), "its ignore_merges is true");
        refused(named(LLAMA3, true, |all| all["normalizer"] = json!({"type": "Lowercase"})), "Lowercase");
        let spaced = |all: &mut Json| all["pre_tokenizer"]["pretokenizers"][1]["add_prefix_space"] = true.into();
        refused(named(LLAMA3, true, spaced), "add_prefix_space");
        let merged = |all: &mut Json| all["pre_tokenizer"]["pretokenizers"][0]["behavior"] = "MergedWithNext".into();
        refused(named(LLAMA3, true, merged), "not one of the supported pre-tokenizers");
    }

    #[test]
    fn chat_templates_whose_keys_would_be_equal_are_refused() {
        let templates = |names: [&str; 2]| template_keys(names.map(|name| (name.to_owned(), "x".to_owned())).into());
        assert_eq!(templates(["default", "tool_use"]).unwrap().len(), 3);
        assert!(templates(["tool-use", "tool_use"]).unwrap_err().contains("named tool_use"));
    }
}
