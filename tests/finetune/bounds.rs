//! Malicious files that would hang, flood or kill a program: they lead to an error within seconds, and never to an
//! abort.

use crate::support::processes::{repository, stderr, zerorun, zerorun_within};
use candle_zero_finetune::{Template, Tokenizer};
use serde_json::{Value, json};
use std::process::Output;
use tempfile::TempDir;

/// Creates a folder with the tiny model's tokenizer, in `model`, and a conversation.
fn test_folder() -> TempDir {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (from, to) = (repository().join("tests/fixtures/finetune/models/llama"), folder.path().join("model"));
    std::fs::create_dir(&to).unwrap();
    for name in ["config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"] {
        std::fs::write(to.join(name), std::fs::read(from.join(name)).unwrap()).unwrap();
    }
    let chat =
        r#"{"messages": [{"role": "user", "content": "a banana"}, {"role": "assistant", "content": "Answer a"}]}"#;
    std::fs::write(folder.path().join("chats.jsonl"), chat).unwrap();
    folder
}

/// Runs `zerorun data show` on a data file in the folder.
fn show(folder: &TempDir, data: &str) -> Output {
    let mut command = zerorun();
    command.current_dir(folder.path()).env("XDG_CACHE_HOME", folder.path().join("home"));
    command.args(["data", "show", "model", data, "--ctx", "64"]).output().unwrap()
}

/// Returns the error of a run that failed but exited normally.
fn refused(folder: &TempDir, data: &str) -> String {
    let output = show(folder, data);
    let text = stderr(&output).to_string();
    assert!(matches!(output.status.code(), Some(1 | 2)), "{text}");
    assert!(!text.contains("panicked") && !text.contains("memory allocation of"), "{text}");
    text
}

fn with_template(source: &str) -> TempDir {
    let folder = test_folder();
    std::fs::write(folder.path().join("model/chat_template.jinja"), source).unwrap();
    folder
}

/// Creates the folder of [`test_folder`] with a changed tokenizer.json.
fn with_tokenizer(change: impl FnOnce(&mut Value)) -> TempDir {
    let folder = test_folder();
    let path = folder.path().join("model/tokenizer.json");
    let mut json: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    change(&mut json);
    std::fs::write(&path, json.to_string()).unwrap();
    folder
}

#[test]
fn a_template_without_an_end_is_named_with_its_file_and_line() {
    let endless = [
        "\n{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "\n{% for i in range(100000) %}{{ 'x' * 100000 }}{% endfor %}",
        "\n{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "\n{{ '%1000000000d'|format(1) }}",
        "\n{{ ('a' * 100000).replace('a', 'b' * 100000)|length }}",
        "\n{{ messages|batch(10000000000, 'x')|list }}",
        "\n{% set ns = namespace(s=1) %}{% for i in range(64) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s }}",
    ];
    for source in endless {
        let folder = with_template(source);
        let model = folder.path().join("model");
        let error = Template::open(&model, &Tokenizer::open(&model).unwrap()).unwrap_err().to_string();
        let error = error.replace(model.to_str().unwrap(), "DIR");
        assert_eq!(
            error,
            "the chat template of DIR/chat_template.jinja does not terminate, or writes more text than any \
             conversation needs (line 2 of the template); use another template, such as the model's published one",
            "{source}"
        );
    }
}

#[test]
fn a_template_that_holds_itself_or_nests_without_end_is_no_abort() {
    let chat = "{% for m in messages %}{{ m.content }}{% endfor %}";
    let cycle = "{% set a = namespace() %}{% set b = namespace() %}{% set a.x = b %}{% set b.x = a %}";
    for (hostile, expected) in [
        (format!("{{{{ {}1 }}}}", "not ".repeat(100_000)), "is nested too deeply"),
        (format!("{{{{ {}1 }}}}", "-".repeat(100_000)), "is nested too deeply"),
        (format!("{cycle}{{{{ a == b }}}}"), "is nested too deeply"),
        (format!("{cycle}{{{{ a ~ b }}}}"), "is nested too deeply"),
        (format!("{cycle}{{{{ a }}}}"), "a value with more than 256 nested lists or objects"),
        (format!("{cycle}{{{{ [a]|tojson }}}}"), "a value with more than 256 nested lists or objects"),
    ] {
        let error = refused(&with_template(&(hostile + chat)), "chats.jsonl");
        assert!(error.contains(expected), "{error}");
    }
    let error = refused(&with_template("{{ (['x' * 1000000] * 10000)|join }}"), "chats.jsonl");
    assert!(error.contains("too much memory") || error.contains("does not terminate"), "{error}");
}

#[test]
fn a_tokenizer_without_an_end_is_named_and_a_damaged_one_is_no_panic() {
    let doubling = json!({"type": "Replace", "pattern": {"String": "a"}, "content": "aa"});
    let folder =
        with_tokenizer(|json| json["normalizer"] = json!({"type": "Sequence", "normalizers": vec![doubling; 60]}));
    let error = refused(&folder, "chats.jsonl");
    assert!(error.starts_with("error: model/tokenizer.json ") && error.contains(" too "), "{error}");
    let folder = with_tokenizer(|json| {
        json["normalizer"] = json!({"type": "Strip", "strip_left": true, "strip_right": true});
        json["added_tokens"][3]["content"] = json!("\t");
        json["added_tokens"][3]["normalized"] = json!(true);
    });
    let error = refused(&folder, "chats.jsonl");
    assert!(error.contains("its added token \"\\t\" is empty after normalization"), "{error}");
    // The tokens that the tokenizers library returns would differ from one process to the next.
    let folder = with_tokenizer(|json| {
        json["normalizer"] = json!({"type": "Lowercase"});
        for (token, content) in [(2, "<Quick>"), (3, "<quick>")] {
            json["added_tokens"][token]["content"] = json!(content);
            json["added_tokens"][token]["normalized"] = json!(true);
        }
    });
    let error = refused(&folder, "chats.jsonl");
    assert!(error.contains("\"<Quick>\"") && error.contains("are equal after normalization"), "{error}");
    let folder = test_folder();
    let path = folder.path().join("model/tokenizer.json");
    let text = std::fs::read_to_string(&path).unwrap();
    let pos = text.find("\"decoder\"").unwrap();
    std::fs::write(&path, text[..pos].to_string() + &text[pos..].replacen("\"type\": \"", "\"type\": ", 1)).unwrap();
    let error = refused(&folder, "chats.jsonl");
    assert!(error.contains("model/tokenizer.json cannot be used: it is damaged (Helper: "), "{error}");
}

#[test]
fn a_record_has_a_bound() {
    let folder = test_folder();
    for (name, head) in [("a.jsonl", "\n{\"text\": \""), ("b.json", "[\n\""), ("c.csv", "text\n\""), ("d.txt", "a\n")] {
        let file = std::fs::File::create(folder.path().join(name)).unwrap();
        std::io::Write::write_all(&mut &file, head.as_bytes()).unwrap();
        file.set_len(64 << 30).unwrap();
        let error = refused(&folder, name);
        assert!(error.contains("the record on line 2 is larger than 64 MiB"), "{name}: {error}");
    }
}

#[test]
fn a_limit_of_memory_is_named_where_it_is_too_low() {
    let folder = test_folder();
    let weights = repository().join("tests/fixtures/finetune/models/llama/model.safetensors");
    std::fs::copy(weights, folder.path().join("model/model.safetensors")).unwrap();
    let chat = std::fs::read_to_string(folder.path().join("chats.jsonl")).unwrap();
    std::fs::write(folder.path().join("chats.jsonl"), format!("{chat}\n").repeat(4)).unwrap();
    // Limits on the address space and on the data segment, in kilobytes. Even the lowest limit allows the program to be
    // mapped.
    let limits = ["-v 90000", "-v 150000", "-v 300000", "-v 600000", "-d 5000", "-d 10000", "-d 40000", "-d 80000"];
    for limit in limits {
        let mut command = zerorun_within(limit);
        command
            .args(["finetune", "model", "--data", "chats.jsonl", "--steps", "1", "--out"])
            .arg(format!("out{limit}"));
        command.current_dir(folder.path()).env("XDG_CACHE_HOME", folder.path().join("home")).env("RUST_BACKTRACE", "1");
        let output = command.output().unwrap();
        let text = stderr(&output);
        assert!(matches!(output.status.code(), Some(0..=2)), "{limit}: {} {text}", output.status);
        assert!(output.status.success() || text.contains("memory"), "{limit}: {text}");
        for word in ["panicked", "left:", "stack backtrace", "memory allocation of"] {
            assert!(!text.contains(word), "{limit}: {text}");
        }
    }
}

#[test]
fn an_added_token_that_ends_with_a_space_is_found_before_a_letter() {
    let folder = with_tokenizer(|json| json["added_tokens"][0]["content"] = json!("Response: "));
    let path = folder.path().join("model/tokenizer.json");
    std::fs::remove_file(folder.path().join("model/tokenizer_config.json")).unwrap();
    std::fs::remove_file(folder.path().join("model/special_tokens_map.json")).unwrap();
    let ours = Tokenizer::open(folder.path().join("model")).unwrap();
    let theirs = tokenizers::Tokenizer::from_file(path).unwrap();
    // The id differs from the one in the file, because the vocabulary has a different token at that id.
    let id = theirs.token_to_id("Response: ").unwrap();
    for text in ["Say hi\nResponse: hi there", "the Response: a", "Response: Response: x"] {
        assert_eq!(ours.encode(text).unwrap().ids, theirs.encode(text, false).unwrap().get_ids(), "{text}");
        assert!(ours.encode(text).unwrap().ids.contains(&id), "{text}");
    }
}
