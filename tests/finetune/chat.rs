//! Conversations of five models: their text to the byte, ids and targets to the token, as transformers has them.

use crate::support::skips;
use candle_zero::finetune::{Conversation, Sample, SpecialTokens, Template, Tokenizer};
use serde_json::Value;
use std::path::{Path, PathBuf};

const NAMES: [&str; 5] = ["tiny", "smollm2", "qwen3", "llama3", "gemma3"];

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/finetune")
}

fn recorded(name: &str) -> Value {
    let text = std::fs::read_to_string(fixtures().join(format!("chat/{name}.json"))).unwrap();
    serde_json::from_str(&text).unwrap()
}

/// The special tokens that the template of a model writes, and those that may end a turn.
fn special_tokens(name: &str) -> (SpecialTokens, Vec<String>) {
    let (bos, others): (&str, &[&str]) = match name {
        "llama3" => {
            ("<|begin_of_text|>", &["<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|end_of_text|>"])
        }
        "gemma3" => ("<bos>", &["<eos>", "<start_of_turn>", "<end_of_turn>"]),
        _ => ("<|endoftext|>", &["<|im_start|>", "<|im_end|>"]),
    };
    let all = [bos].iter().chain(others).map(ToString::to_string).collect();
    (SpecialTokens::new([("bos_token", bos)]), all)
}

fn template(name: &str, source: &str) -> Template {
    let (tokens, all) = special_tokens(name);
    Template::new(source, &tokens, all).unwrap()
}

/// Spans of code points as spans of bytes.
fn byte_spans(conversation: &Value) -> Vec<std::ops::Range<usize>> {
    let text = conversation["text"].as_str().unwrap();
    let places: Vec<usize> = text.char_indices().map(|(at, _)| at).chain([text.len()]).collect();
    let spans = conversation["target_chars"].as_array().unwrap().iter();
    spans.map(|span| places[span[0].as_u64().unwrap() as usize]..places[span[1].as_u64().unwrap() as usize]).collect()
}

fn compare_texts(name: &str, template: &Template, recorded: &Value) -> usize {
    let mut refused = 0;
    for found in recorded["conversations"].as_array().unwrap() {
        let of = format!("{name}: {}", found["name"]);
        let conversation = Conversation::from_json(&found["messages"].to_string()).unwrap();
        if let Some(error) = found.get("error") {
            let reason = template.render(&conversation, false).unwrap_err().to_string();
            assert!(reason.contains("Conversation roles must alternate"), "{of}: {reason}, not {error}");
            refused += 1;
            continue;
        }
        let rendered = template.render_with_targets(&conversation).unwrap_or_else(|e| panic!("{of}: {e}"));
        assert_eq!(rendered.text, found["text"].as_str().unwrap(), "{of}");
        assert_eq!(template.render(&conversation, true).unwrap(), found["text_generation_prompt"], "{of}");
        assert_eq!(rendered.targets, byte_spans(found), "{of}: {:?}", rendered.text);
    }
    refused
}

#[test]
fn conversations_render_to_the_byte_with_the_targets_of_transformers() {
    for name in NAMES {
        let recorded = recorded(name);
        let template = template(name, recorded["chat_template"].as_str().unwrap());
        let refused = compare_texts(name, &template, &recorded);
        assert_eq!(refused, if name == "gemma3" { 3 } else { 0 });
    }
}

#[test]
fn generation_markers_give_the_same_targets() {
    for name in NAMES {
        let path = fixtures().join(format!("chat/generation_templates/{name}.jinja"));
        let template = template(name, &std::fs::read_to_string(path).unwrap());
        compare_texts(name, &template, &recorded(name));
    }
}

/// The folder of a tokenizer; none where it is not on this machine.
fn tokenizer_folder(name: &str) -> Option<PathBuf> {
    if name == "tiny" {
        return Some(fixtures().join("models/llama"));
    }
    let home = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let home = home.or_else(|| Some(Path::new(&std::env::var_os("HOME")?).join(".cache")))?;
    let folder = home.join("candle-zero/tokenizers").join(name);
    folder.join("tokenizer.json").is_file().then_some(folder)
}

/// The tokens of a conversation's text equal the recorded ones.
fn compare_tokens(name: &str, folder: &Path) {
    let tokenizer = Tokenizer::open(folder).unwrap();
    let template = Template::open(folder, &tokenizer).unwrap();
    let mut targets = 0;
    for found in recorded(name)["conversations"].as_array().unwrap() {
        if found.get("error").is_some() {
            continue;
        }
        let of = format!("{name}: {}", found["name"]);
        let conversation = Conversation::from_json(&found["messages"].to_string()).unwrap();
        let sample = Sample::of_conversation(&tokenizer, &template, &conversation).unwrap();
        assert_eq!(serde_json::json!(sample.ids), found["input_ids"], "{of}");
        let mask: Vec<u8> = sample.targets.iter().map(|target| u8::from(*target)).collect();
        assert_eq!(serde_json::json!(mask), found["loss_mask"], "{of}");
        targets += mask.iter().filter(|target| **target == 1).count() as u64;
        let prompt = tokenizer.encode(&template.render(&conversation, true).unwrap()).unwrap();
        assert_eq!(serde_json::json!(prompt.ids), found["input_ids_generation_prompt"], "{of}");
        // What is decoded token by token is the text.
        let mut stream = tokenizer.stream(false);
        let mut text: String = prompt.ids.iter().map(|id| stream.push(*id).unwrap()).collect();
        text.push_str(&stream.finish().unwrap());
        assert_eq!(text, tokenizer.decode(&prompt.ids, false).unwrap(), "{of}");
    }
    assert!(targets > 500, "{targets}");
}

#[test]
fn ids_and_targets_of_the_tiny_tokenizer_are_those_of_transformers() {
    compare_tokens("tiny", &tokenizer_folder("tiny").unwrap());
}

#[test]
fn ids_and_targets_of_published_tokenizers_are_those_of_transformers() {
    let here = ids_and_targets_of_published_tokenizers_are_those_of_transformers;
    for name in &NAMES[1..] {
        match tokenizer_folder(name) {
            Some(folder) => compare_tokens(name, &folder),
            None => skips::skipped_in_part(here, format!("no tokenizer of {name}: run scripts/fetch_tokenizers.py")),
        }
    }
}

#[test]
fn a_character_is_given_when_its_last_token_has_come() {
    let tokenizer = Tokenizer::open(fixtures().join("models/llama")).unwrap();
    let ids = tokenizer.encode("a🚀é").unwrap().ids;
    let mut stream = tokenizer.stream(false);
    let pieces: Vec<String> = ids.iter().map(|id| stream.push(*id).unwrap()).collect();
    assert_eq!(pieces.concat(), "a🚀é");
    assert!(pieces.iter().all(|piece| !piece.contains(char::REPLACEMENT_CHARACTER)), "{pieces:?}");
    assert_eq!(stream.finish().unwrap(), "");
    // Cut within the rocket.
    let mut stream = tokenizer.stream(false);
    let pieces: Vec<String> = ids[..2].iter().map(|id| stream.push(*id).unwrap()).collect();
    assert_eq!(pieces, ["a", ""]);
    assert_eq!(stream.finish().unwrap(), "\u{FFFD}");
}
