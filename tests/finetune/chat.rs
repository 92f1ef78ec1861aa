//! Conversations rendered with the chat templates of five models: the text matches that of transformers byte for byte,
//! and the ids and targets match token for token.

use crate::support::processes::repository;
use crate::support::skips;
use candle_zero_finetune::{Conversation, Sample, SpecialTokens, Template, Tokenizer};
use serde_json::Value;
use std::path::{Path, PathBuf};

const NAMES: [&str; 5] = ["tiny", "smollm2", "qwen3", "llama3", "gemma3"];

fn fixtures() -> PathBuf {
    repository().join("tests/fixtures/finetune")
}

fn recorded(name: &str) -> Value {
    let text = std::fs::read_to_string(fixtures().join(format!("chat/{name}.json"))).unwrap();
    serde_json::from_str(&text).unwrap()
}

/// Returns the special tokens that the template of a model writes, and the texts of all special tokens.
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

/// Converts ranges of code points to ranges of bytes.
fn byte_spans(conversation: &Value) -> Vec<std::ops::Range<usize>> {
    let text = conversation["text"].as_str().unwrap();
    let offsets: Vec<usize> = text.char_indices().map(|(at, _)| at).chain([text.len()]).collect();
    let spans = conversation["target_chars"].as_array().unwrap().iter();
    spans.map(|span| offsets[span[0].as_u64().unwrap() as usize]..offsets[span[1].as_u64().unwrap() as usize]).collect()
}

fn compare_texts(name: &str, template: &Template, recorded: &Value) -> usize {
    let mut refused = 0;
    for case in recorded["conversations"].as_array().unwrap() {
        let context = format!("{name}: {}", case["name"]);
        let conversation = Conversation::from_json(&case["messages"].to_string()).unwrap();
        if let Some(error) = case.get("error") {
            let reason = template.render(&conversation, false).unwrap_err().to_string();
            assert!(reason.contains("Conversation roles must alternate"), "{context}: {reason}, not {error}");
            refused += 1;
            continue;
        }
        let rendered = template.render_with_targets(&conversation).unwrap_or_else(|e| panic!("{context}: {e}"));
        assert_eq!(rendered.text, case["text"].as_str().unwrap(), "{context}");
        assert_eq!(template.render(&conversation, true).unwrap(), case["text_generation_prompt"], "{context}");
        assert_eq!(rendered.targets, byte_spans(case), "{context}: {:?}", rendered.text);
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

/// Returns the folder of a tokenizer, or `None` if it is not on this machine.
fn tokenizer_folder(name: &str) -> Option<PathBuf> {
    if name == "tiny" {
        return Some(fixtures().join("models/llama"));
    }
    let home = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let home = home.or_else(|| Some(Path::new(&std::env::var_os("HOME")?).join(".cache")))?;
    let folder = home.join("candle-zero/tokenizers").join(name);
    folder.join("tokenizer.json").is_file().then_some(folder)
}

/// Checks that the tokens of a conversation's text equal the recorded ones.
fn compare_tokens(name: &str, folder: &Path) {
    let tokenizer = Tokenizer::open(folder).unwrap();
    let template = Template::open(folder, &tokenizer).unwrap();
    let mut targets = 0;
    for case in recorded(name)["conversations"].as_array().unwrap() {
        if case.get("error").is_some() {
            continue;
        }
        let context = format!("{name}: {}", case["name"]);
        let conversation = Conversation::from_json(&case["messages"].to_string()).unwrap();
        let sample = Sample::of_conversation(&tokenizer, &template, &conversation).unwrap();
        assert_eq!(serde_json::json!(sample.ids), case["input_ids"], "{context}");
        let mask: Vec<u8> = sample.targets.iter().map(|target| u8::from(*target)).collect();
        assert_eq!(serde_json::json!(mask), case["loss_mask"], "{context}");
        targets += mask.iter().filter(|target| **target == 1).count() as u64;
        let prompt = tokenizer.encode(&template.render(&conversation, true).unwrap()).unwrap();
        assert_eq!(serde_json::json!(prompt.ids), case["input_ids_generation_prompt"], "{context}");
        // Decoding token by token yields the text.
        let mut stream = tokenizer.stream(false);
        let mut text: String = prompt.ids.iter().map(|id| stream.push(*id).unwrap()).collect();
        text.push_str(&stream.finish().unwrap());
        assert_eq!(text, tokenizer.decode(&prompt.ids, false).unwrap(), "{context}");
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
    // The text is cut within the bytes of the rocket emoji.
    let mut stream = tokenizer.stream(false);
    let pieces: Vec<String> = ids[..2].iter().map(|id| stream.push(*id).unwrap()).collect();
    assert_eq!(pieces, ["a", ""]);
    assert_eq!(stream.finish().unwrap(), "\u{FFFD}");
}

/// Creates a folder with the tiny tokenizer and files with these names and texts.
fn model_with(files: &[(&str, &str)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(fixtures().join("models/llama").join(name), folder.path().join(name)).unwrap();
    }
    for (name, text) in files {
        std::fs::write(folder.path().join(name), text).unwrap();
    }
    folder
}

#[test]
fn a_template_is_a_file_or_one_of_a_list() {
    let rendered = |files: &[(&str, &str)]| {
        let folder = model_with(files);
        let tokenizer = Tokenizer::open(folder.path()).unwrap();
        let template = Template::open(folder.path(), &tokenizer).unwrap();
        template.render(&Conversation::new([("user", "x")]), false).unwrap()
    };
    let list = r#"{"chat_template": [{"name": "rag", "template": "a"}, {"name": "default", "template": "b"}]}"#;
    assert_eq!(rendered(&[("tokenizer_config.json", list)]), "b");
    assert_eq!(rendered(&[("tokenizer_config.json", list), ("chat_template.jinja", "c{{ tools is none }}")]), "cTrue");
    let special = r#"{"chat_template": "{{ bos_token }}{{ eos_token }}", "bos_token": {"content": "<|im_start|>"}}"#;
    let map = r#"{"bos_token": "<|pad|>", "eos_token": "<|im_end|>"}"#;
    assert_eq!(
        rendered(&[("tokenizer_config.json", special), ("special_tokens_map.json", map)]),
        "<|im_start|><|im_end|>"
    );
}

#[test]
fn values_are_written_as_python_writes_them() {
    let written = |expression: &str, messages: &str| {
        let template = Template::new(&format!("{{{{ {expression} }}}}"), &SpecialTokens::default(), vec![]).unwrap();
        template.render(&Conversation::from_json(messages).unwrap(), false).unwrap()
    };
    let data = r#"[{"role": "tool", "z": [1, 2.0, 1e16, 1e-5, 0.0001, -0.5, null, true], "a": {"ü\n": "it's", "q": "\"'\t"}, "e": [], "o": {}}]"#;
    // Results of json.dumps(x, ensure_ascii=False) and repr(x) in Python 3.11.
    let expected = [
        ("z | tojson", "[1, 2.0, 1e+16, 1e-05, 0.0001, -0.5, null, true]"),
        ("z", "[1, 2.0, 1e+16, 1e-05, 0.0001, -0.5, None, True]"),
        ("a | tojson", r#"{"ü\n": "it's", "q": "\"'\t"}"#),
        ("a | tojson(ensure_ascii=true)", r#"{"\u00fc\n": "it's", "q": "\"'\t"}"#),
        ("a", r#"{'ü\n': "it's", 'q': '"\'\t'}"#),
        ("a | tojson(sort_keys=true, separators=(',', ':'))", r#"{"q":"\"'\t","ü\n":"it's"}"#),
        ("a | tojson(indent=2)", "{\n  \"ü\\n\": \"it's\",\n  \"q\": \"\\\"'\\t\"\n}"),
        ("e | tojson(indent=4)", "[]"),
        ("o | tojson", "{}"),
        ("missing", ""),
    ];
    for (expression, python) in expected {
        assert_eq!(written(&format!("messages[0].{expression}"), data), python, "{expression}");
    }
    assert_eq!(written("messages[::-1][0].role.upper().split('O')[-1] + ' x '.strip()", data), "Lx");
    assert_eq!(written("'<b>' ~ messages | length", data), "<b>1");
    assert_eq!(written("strftime_now('%Y') | length", data), "4");
}

#[test]
fn tools_and_their_calls_are_rendered_and_learned() {
    let recorded = recorded("qwen3");
    let template = template("qwen3", recorded["chat_template"].as_str().unwrap());
    let conversation = Conversation::from_json(
        r#"[{"role": "user", "content": "2+2?"},
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function":
                {"name": "add", "arguments": {"a": 2, "text": "<|im_end|>\n<|im_start|>assistant\n"}}}]},
            {"role": "tool", "content": "4"}, {"role": "assistant", "content": "4."}]"#,
    )
    .unwrap();
    let rendered = template.render_with_targets(&conversation).unwrap();
    let targets: Vec<&str> = rendered.targets.iter().map(|span| &rendered.text[span.clone()]).collect();
    let call = r#"<tool_call>
{"name": "add", "arguments": {"a": 2, "text": "<|im_end|>\n<|im_start|>assistant\n"}}
</tool_call><|im_end|>"#;
    assert_eq!(targets.len(), 2);
    assert!(targets[0].ends_with(call), "{targets:?}");
    assert_eq!(targets[1], "<think>\n\n</think>\n\n4.<|im_end|>");
}

#[test]
fn other_templates_have_their_answers_found() {
    let special: Vec<String> = ["<s>", "</s>", "[INST]", "[/INST]", "<|end|>"].map(String::from).into();
    let targets = |source: &str, turns: &[(&str, &str)]| {
        let tokens = SpecialTokens::new([("bos_token", "<s>"), ("eos_token", "</s>")]);
        let template = Template::new(source, &tokens, special.clone()).unwrap();
        let rendered = template.render_with_targets(&Conversation::new(turns.iter().copied())).unwrap();
        rendered.targets.into_iter().map(|span| rendered.text[span].to_string()).collect::<Vec<_>>()
    };
    let turns = [("user", "a [/INST] b"), ("assistant", " c "), ("user", "d"), ("assistant", "c")];
    // Mistral: the only header of an answer is the end of the question.
    let mistral = "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]\
                   {% elif m.role == 'assistant' %} {{ m.content | trim }}{{ eos_token }}{% endif %}{% endfor %}";
    assert_eq!(targets(mistral, &turns), ["c</s>", "c</s>"]);
    // Phi 3: a separate header; the end-of-text token appears only if no prompt is requested.
    let phi = "{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{% endfor %}\
               {% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}";
    assert_eq!(targets(phi, &turns), [" c <|end|>", "c<|end|>"]);
    // The prompt opens a thinking block, which earlier answers do not have.
    let thinking = "{% for m in messages %}<|{{ m.role }}|>{% if loop.last and m.role == 'assistant' %}<think>{% endif %}\
                    {{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<|assistant|><think>{% endif %}";
    assert_eq!(targets(thinking, &turns), [" c </s>", "c</s>"]);
}

#[test]
fn what_a_template_or_tokenizer_cannot_do_is_said() {
    let template = |source: &str| Template::new(source, &SpecialTokens::default(), vec![]).map_err(|e| e.to_string());
    let conversation = Conversation::new([("user", "a"), ("assistant", "b")]);
    let message = |source: &str| match template(source).map(|template| template.render_with_targets(&conversation)) {
        Ok(rendered) => rendered.unwrap_err().to_string(),
        Err(error) => error,
    };
    let mut all = vec![
        message("{% for m in messages %}{{ m.content | upper }}"),
        message("{{ raise_exception('No talk before noon.') }}"),
        message("{{ messages[0].content.frobnicate() }}"),
        message("{% for m in messages %}{{ m.content | length }}{% endfor %}"),
        message("{% generation %}{% generation %}x{% endgeneration %}{% endgeneration %}"),
        Conversation::from_json("{}").unwrap_err().to_string(),
        Conversation::from_json("[1]").unwrap_err().to_string(),
        Conversation::from_json("[{\"role\": 1}]").unwrap_err().to_string(),
        Conversation::from_json("[").unwrap_err().to_string(),
    ];
    let opened = |files: &[(&str, &str)]| {
        let folder = model_with(files);
        let tokenizer = Tokenizer::open(folder.path()).map_err(|e| e.to_string());
        let opened =
            tokenizer.and_then(|tokenizer| Template::open(folder.path(), &tokenizer).map_err(|e| e.to_string()));
        opened.unwrap_err().replace(folder.path().to_str().unwrap(), "DIR")
    };
    all.push(opened(&[("tokenizer_config.json", "{}")]));
    all.push(opened(&[("tokenizer_config.json", "[]")]));
    all.push(opened(&[("tokenizer.json", "{}")]));
    all.push(opened(&[("tokenizer_config.json", r#"{"eos_token": "</s>"}"#)]));
    insta::assert_snapshot!(all.join("\n"));
}
