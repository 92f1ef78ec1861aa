//! A GGUF file is a complete model: its tokenizer and template give the same results as those in the model's
//! folder.

use crate::fixtures::copy;
use crate::support::processes::{stderr, stdout, zerorun};
use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};
use candle_zero_finetune::{BaseModel, Conversation, GgufFormat, MergedModel, Template, Tokenizer};
use proptest::prelude::*;
use serde_json::{Value as Json, json};
use std::collections::HashMap;
use std::path::{Path, PathBuf};

const TEXTS: [&str; 9] = [
    "hello there",
    "  two  spaces 12345 and 7\n\n\ttabs",
    "It's he'll they'RE don't",
    "<|im_start|>user\nhi<|im_end|><|endoftext|>",
    "naïve café 漢字かな 🙂 e\u{301}",
    "[PAD511] <|pad|>",
    "",
    " ",
    "a1b22c333d4444 ... !!! ???",
];

/// Returns a copy of the tiny Llama's folder with a changed tokenizer, and its GGUF file in a separate folder.
fn folder_and_file(change: impl FnOnce(&mut Json)) -> (tempfile::TempDir, tempfile::TempDir, PathBuf) {
    let (folder, file_folder) = (copy("llama"), tempfile::tempdir().unwrap());
    let tokenizer = folder.path().join("tokenizer.json");
    let mut json: Json = serde_json::from_slice(&std::fs::read(&tokenizer).unwrap()).unwrap();
    change(&mut json);
    std::fs::write(&tokenizer, json.to_string()).unwrap();
    let file = file_folder.path().join("model.gguf");
    let base = BaseModel::open(folder.path()).unwrap();
    MergedModel::new(&base, None).unwrap().write_gguf(&file, GgufFormat::F16).unwrap();
    (folder, file_folder, file)
}

fn bytes(use_regex: bool) -> Json {
    json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex})
}

#[test]
fn the_tokens_of_a_gguf_file_are_those_of_the_folder_that_it_was_made_of() {
    let digits = json!({"type": "Digits", "individual_digits": true});
    let pattern = |digits: &str| {
        format!(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        )
    };
    let by = |pattern: String| json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
    let split = |digits| by(pattern(digits));
    // The pattern of gpt-oss and Phi-4-mini (o200k), and that of Mistral's models since Nemo.
    let cased = |ending: &str, digits: &str| {
        let word = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]";
        let lower = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]";
        let rest = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
        by(format!(r"{word}*{lower}+{ending}|{word}+{lower}*{ending}|\p{{N}}{digits}|{rest}"))
    };
    let pre_tokenizers = [
        (vec![bytes(true)], Json::Null, false),
        (vec![digits, bytes(true)], Json::Null, false),
        (vec![split("{1,3}"), bytes(false)], Json::Null, false),
        (vec![split(""), bytes(false)], Json::Null, false),
        (vec![cased("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "{1,3}"), bytes(false)], Json::Null, false),
        (vec![cased("", ""), bytes(false)], Json::Null, true),
        // As in Qwen's tokenizer.
        (vec![split(""), bytes(false)], json!({"type": "NFC"}), false),
    ];
    for (steps, normalizer, ignores_merges) in pre_tokenizers {
        let (folder, _file_folder, file) = folder_and_file(|json| {
            json["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": steps});
            json["normalizer"] = normalizer.clone();
            json["model"]["ignore_merges"] = ignores_merges.into();
        });
        let (original, found) = (Tokenizer::open(folder.path()).unwrap(), Tokenizer::open(&file).unwrap());
        for text in TEXTS {
            let ids = original.encode(text).unwrap().ids;
            assert_eq!(found.encode(text).unwrap().ids, ids, "{text:?} with {steps:?}");
            assert_eq!(found.decode(&ids, false).unwrap(), original.decode(&ids, false).unwrap());
            assert_eq!(found.decode(&ids, true).unwrap(), original.decode(&ids, true).unwrap());
        }
        let special_ids =
            |tokenizer: &Tokenizer| ["bos_token", "eos_token", "pad_token"].map(|name| tokenizer.special_id(name));
        assert_eq!(special_ids(&found), special_ids(&original));
        assert_eq!(found.prefix_and_suffix(), original.prefix_and_suffix());
        let chat = Conversation::new([("user", "hello"), ("assistant", "you too"), ("user", "and now?")]);
        let text = |place: &Path, tokenizer: &Tokenizer| {
            Template::open(place, tokenizer).unwrap().render(&chat, true).unwrap()
        };
        assert_eq!(text(&file, &found), text(folder.path(), &original));
        // A folder that contains only the file gives the same result.
        assert_eq!(Tokenizer::open(file.parent().unwrap()).unwrap().fingerprint(), found.fingerprint());
        let base = BaseModel::open(&file).unwrap();
        assert_eq!(base.tokenizer_path(), file);
        // Tokenizer files next to the GGUF file take precedence over it.
        for name in ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"] {
            std::fs::copy(folder.path().join(name), file.with_file_name(name)).unwrap();
        }
        assert_eq!(BaseModel::open(&file).unwrap().tokenizer_path(), file.parent().unwrap());
        assert_eq!(Tokenizer::open(file.parent().unwrap()).unwrap().fingerprint(), original.fingerprint());
    }
}

#[test]
fn a_gguf_file_alone_answers_trains_and_is_merged() {
    let (folder, file_folder, file) = folder_and_file(|_| ());
    let run = |words: &[&str]| {
        let output = zerorun().args(words).output().unwrap();
        assert!(output.status.success(), "{words:?}: {}", stderr(&output));
        stdout(&output)
    };
    let text = |path: &Path| path.to_str().unwrap().to_owned();
    let (file, path_of) = (text(&file), |name: &str| text(&file_folder.path().join(name)));
    let few = ["--prompt", "hello there", "--max_tokens", "12"];
    let answer = |model: &str, more: &[&str]| run(&[&["generate", model], &few[..], more].concat());
    // The file has f16 weights and the folder has f32 weights, so the two need to agree only in the token ids of the
    // data. Answers need to agree only if the weights are equal.
    let data = path_of("chats.jsonl");
    let chat = json!({"messages": [{"role": "user", "content": "1 and 2?"}, {"role": "assistant", "content": "3"}]});
    std::fs::write(&data, format!("{chat}\n").repeat(4)).unwrap();
    let (original, cache) = (text(folder.path()), path_of("cache"));
    let show = |model: &str| run(&["data", "show", model, &data, "--cache", &cache]);
    assert_eq!(show(&file), show(&original));
    let adapter = path_of("adapter");
    run(&["finetune", &file, "--data", &data, "--out", &adapter, "--steps", "2", "--ctx", "48", "--cache", &cache]);
    let with_adapter = answer(&file, &["--adapter", &adapter]);
    // The merged model is a folder with a tokenizer. A GGUF file that is converted again keeps its tokenizer.
    let (merged, again) = (path_of("merged"), path_of("again.gguf"));
    run(&["merge", &file, &adapter, "--out", &merged, "--dtype", "f32"]);
    assert_eq!(answer(&merged, &[]), with_adapter);
    run(&["merge", &file, "--out", &again]);
    assert_eq!(answer(&again, &[]), answer(&file, &[]));
    let (first, second) = (Tokenizer::open(&file).unwrap(), Tokenizer::open(&again).unwrap());
    assert_eq!(first.fingerprint(), second.fingerprint());
    assert_eq!(Tokenizer::open(&merged).unwrap().fingerprint(), first.fingerprint());
}

/// Writes a GGUF file with these keys, and a tensor.
fn gguf(path: &Path, keys: &[(&str, Value)]) {
    let tensor =
        QTensor::quantize(&Tensor::zeros((2, 32), candle_core::DType::F32, &Device::Cpu).unwrap(), GgmlDType::F32);
    let keys: Vec<(&str, &Value)> = keys.iter().map(|(key, value)| (*key, value)).collect();
    let mut file = std::fs::File::create(path).unwrap();
    gguf_file::write(&mut file, &keys, &[("token_embd.weight", &tensor.unwrap())]).unwrap();
}

fn texts(texts: &[&str]) -> Value {
    Value::Array(texts.iter().map(|text| Value::String((*text).into())).collect())
}

/// Returns pieces with their scores and types, after `<unk>`, `<s>`, `</s>`, a user-defined token and all bytes.
fn pieces() -> Vec<(String, f32, i32)> {
    let mut all =
        vec![("<unk>".into(), 0.0, 2), ("<s>".into(), 0.0, 3), ("</s>".into(), 0.0, 3), ("<user>".into(), 0.0, 4)];
    all.extend((0..=255).map(|byte| (format!("<0x{byte:02X}>"), 0.0, 6)));
    let words = ["▁a", "ab", "▁ab", "bc", "abc", "▁abc", "ca", "▁▁", "cab", "▁cab", "aa", "bb", "aab", "▁b"];
    all.extend(words.iter().enumerate().map(|(i, word)| ((*word).into(), -((i * 5 % 14) as f32) - 1.0, 1)));
    all.extend(["▁", "a", "b", "c"].map(|letter| (letter.into(), -100.0, 1)));
    all
}

fn sentence_piece_file(path: &Path, space: bool) {
    let pieces = pieces();
    let kinds = pieces.iter().map(|(.., kind)| Value::I32(*kind)).collect();
    let scores = pieces.iter().map(|(_, score, _)| Value::F32(*score)).collect();
    let tokens: Vec<&str> = pieces.iter().map(|(text, ..)| text.as_str()).collect();
    let keys = [
        ("general.architecture", Value::String("llama".into())),
        ("tokenizer.ggml.model", Value::String("llama".into())),
        ("tokenizer.ggml.tokens", texts(&tokens)),
        ("tokenizer.ggml.token_type", Value::Array(kinds)),
        ("tokenizer.ggml.scores", Value::Array(scores)),
        ("tokenizer.ggml.add_space_prefix", Value::Bool(space)),
    ];
    gguf(path, &keys);
}

/// Encodes by SentencePiece's rule: of all adjacent pairs that form a piece, the one with the highest score is merged,
/// or the first such pair if several have that score. Characters that are not pieces are replaced by their bytes.
fn sentence_piece(text: &str, space: bool) -> Vec<u32> {
    let pieces = pieces();
    let ids: HashMap<&str, usize> = pieces.iter().enumerate().map(|(id, (text, ..))| (text.as_str(), id)).collect();
    let prefix = if space && !text.is_empty() { "▁" } else { "" };
    let text = format!("{prefix}{}", text.replace(' ', "▁"));
    let mut symbols: Vec<String> = text.chars().map(String::from).collect();
    loop {
        let score = |at: usize| {
            let id = ids.get(format!("{}{}", symbols[at], symbols[at + 1]).as_str())?;
            Some((at, pieces[*id].1))
        };
        let best = (0..symbols.len().saturating_sub(1)).filter_map(score).reduce(|a, b| if b.1 > a.1 { b } else { a });
        let Some((at, _)) = best else { break };
        let next = symbols.remove(at + 1);
        symbols[at].push_str(&next);
    }
    let of = |symbol: &String| match ids.get(symbol.as_str()) {
        Some(id) => vec![*id as u32],
        None => symbol.bytes().map(|byte| 4 + u32::from(byte)).collect(),
    };
    symbols.iter().flat_map(of).collect()
}

proptest! {
    #[test]
    fn pieces_with_scores_are_merged_as_sentence_piece_does(text in "[abc ]{0,14}[é漢]?[abc ]{0,6}", space in any::<bool>()) {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("model.gguf");
        sentence_piece_file(&file, space);
        let tokenizer = Tokenizer::open(&file).unwrap();
        let ids = tokenizer.encode(&text).unwrap().ids;
        prop_assert_eq!(&ids, &sentence_piece(&text, space));
        prop_assert_eq!(tokenizer.decode(&ids, true).unwrap(), text);
    }
}

/// Creates a folder whose tokenizer.json contains the pieces, and the merges that transformers derives from them.
fn sentence_piece_folder(normalizer: &Json, pre_tokenizer: &Json) -> tempfile::TempDir {
    let folder = copy("llama");
    let pieces = pieces();
    let ids: HashMap<&str, usize> = pieces.iter().enumerate().map(|(id, (text, ..))| (text.as_str(), id)).collect();
    let mut by_score: Vec<&(String, f32, i32)> = pieces.iter().filter(|(.., kind)| *kind == 1).collect();
    by_score.sort_by(|a, b| b.1.total_cmp(&a.1));
    let pairs = |(text, ..): &&(String, f32, i32)| {
        let parts = text.char_indices().skip(1).map(|(at, _)| text.split_at(at));
        parts
            .filter(|(a, b)| ids.contains_key(a) && ids.contains_key(b))
            .map(|(a, b)| json!([a, b]))
            .collect::<Vec<_>>()
    };
    let merges: Vec<Json> = by_score.iter().flat_map(pairs).collect();
    let added = pieces.iter().enumerate().filter(|(_, (.., kind))| [2, 3, 4].contains(kind));
    let added = added.map(|(id, (text, _, kind))| {
        json!({
            "id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
            "special": *kind != 4,
        })
    });
    let mut decoders = vec![
        json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "}),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ];
    if normalizer["type"] != "Replace" {
        decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    }
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added.collect::<Vec<_>>(),
        "normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "post_processor": null,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "ignore_merges": false,
            "vocab": ids, "merges": merges,
        },
    });
    let settings = json!({"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": true});
    std::fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    std::fs::write(folder.path().join("tokenizer_config.json"), settings.to_string()).unwrap();
    std::fs::remove_file(folder.path().join("special_tokens_map.json")).unwrap();
    folder
}

#[test]
fn a_written_tokenizer_of_sentence_piece_gives_the_ids_of_its_folder() {
    let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
    let prepend = json!({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace]});
    let metaspace = json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": false});
    let split = json!({"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": false});
    for (normalizer, pre_tokenizer) in [(&prepend, &Json::Null), (&replace, &split), (&Json::Null, &metaspace)] {
        let (folder, file_folder) = (sentence_piece_folder(normalizer, pre_tokenizer), tempfile::tempdir().unwrap());
        let file = file_folder.path().join("model.gguf");
        let base = BaseModel::open(folder.path()).unwrap();
        MergedModel::new(&base, None).unwrap().write_gguf(&file, GgufFormat::F16).unwrap();
        let (original, found) = (Tokenizer::open(folder.path()).unwrap(), Tokenizer::open(&file).unwrap());
        assert_eq!(found.prefix_and_suffix(), (&[1][..], &[][..]));
        assert_eq!(
            ["bos_token", "eos_token", "unk_token"].map(|name| found.special_id(name)),
            [Some(1), Some(2), Some(0)]
        );
        let is_metaspace = normalizer.is_null();
        let mut runner = proptest::test_runner::TestRunner::deterministic();
        let texts = ("[abc ]{0,14}[é漢\n]?[abc ]{0,9}", "(<s>|<user>|</s>|)[abc ]{0,9}");
        let checked = runner.run(&texts, |(first, second)| {
            // llama.cpp always adds a space, even before another space and after special tokens.
            let text = if is_metaspace { first.trim_start().to_owned() } else { first + &second };
            let ids = original.encode(&text).unwrap().ids;
            prop_assert_eq!(&found.encode(&text).unwrap().ids, &ids, "{:?}", text);
            prop_assert_eq!(found.decode(&ids, false).unwrap(), original.decode(&ids, false).unwrap());
            Ok(())
        });
        checked.unwrap();
    }
}

#[test]
fn tokenizers_that_llama_cpp_does_not_have_are_refused() {
    let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
    let error = |change: &dyn Fn(&mut Json)| {
        let folder = sentence_piece_folder(&replace, &Json::Null);
        let tokenizer = folder.path().join("tokenizer.json");
        let mut json: Json = serde_json::from_slice(&std::fs::read(&tokenizer).unwrap()).unwrap();
        change(&mut json);
        std::fs::write(&tokenizer, json.to_string()).unwrap();
        let base = BaseModel::open(folder.path()).unwrap();
        let file = folder.path().join("model.gguf");
        let error = MergedModel::new(&base, None).unwrap().write_gguf(&file, GgufFormat::F16).unwrap_err();
        assert!(!file.exists());
        error.to_string().replace(folder.path().to_str().unwrap(), "DIR")
    };
    // Moves the first of two successive merges that result in the same token to the end of the list.
    let separate_merges = |json: &mut Json| {
        let merges = json["model"]["merges"].as_array_mut().unwrap();
        let result = |merge: &Json| format!("{}{}", merge[0].as_str().unwrap(), merge[1].as_str().unwrap());
        let at = (0..merges.len() - 2).find(|at| result(&merges[*at]) == result(&merges[at + 1])).unwrap();
        let merge = merges.remove(at);
        merges.push(merge);
    };
    let all = [
        error(&|json| json["normalizer"] = json!({"type": "NFKC"})),
        error(&|json| _ = json["model"]["merges"].as_array_mut().unwrap().pop()),
        error(&separate_merges),
        error(&|json| _ = json["model"]["vocab"].as_object_mut().unwrap().remove("<0x41>")),
        error(&|json| json["model"]["byte_fallback"] = false.into()),
        error(&|json| json["model"]["type"] = "Unigram".into()),
    ];
    insta::assert_snapshot!(all.join("\n"));
}

#[test]
fn special_tokens_of_sentence_piece_are_found_and_named() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.gguf");
    sentence_piece_file(&file, true);
    let tokenizer = Tokenizer::open(&file).unwrap();
    let ids = tokenizer.encode("<s>abc<user>").unwrap().ids;
    assert_eq!((ids[0], ids[ids.len() - 1]), (1, 3));
    assert_eq!(
        ["bos_token", "eos_token", "unk_token"].map(|name| tokenizer.special_id(name)),
        [Some(1), Some(2), Some(0)]
    );
    // llama.cpp puts this token at the beginning of a text.
    assert_eq!(tokenizer.prefix_and_suffix(), (&[1][..], &[][..]));
}

#[test]
fn a_tokenizer_that_cannot_be_read_is_named_with_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.gguf");
    let text = |keys: &[(&str, Value)]| {
        gguf(&file, &[&[("general.architecture", Value::String("llama".into()))], keys].concat());
        Tokenizer::open(&file).unwrap_err().to_string().replace(folder.path().to_str().unwrap(), "DIR")
    };
    let model = |name: &str| ("tokenizer.ggml.model", Value::String(name.into()));
    let tokens = || ("tokenizer.ggml.tokens", texts(&["a", "b", "ab"]));
    let pre = |name: &str| ("tokenizer.ggml.pre", Value::String(name.into()));
    insta::assert_snapshot!(text(&[]), @"DIR/model.gguf is not a readable GGUF file: it has no tokenizer (tokenizer.ggml.model); put the model's tokenizer.json next to it");
    insta::assert_snapshot!(text(&[model("rwkv"), tokens()]), @r#"DIR/model.gguf: tokenizer.ggml.model is "rwkv", but must be gpt2 or llama: others are not supported; put the model's tokenizer.json next to the file"#);
    insta::assert_snapshot!(text(&[model("gpt2")]), @"DIR/model.gguf: tokenizer.ggml.tokens is absent, but must be a list of strings");
    insta::assert_snapshot!(text(&[model("gpt2"), tokens()]), @"DIR/model.gguf: tokenizer.ggml.pre is absent, but must be one of gpt-2, smollm, starcoder, refact, command-r, llama-bpe, smaug-bpe, dbrx, falcon3, pixtral, qwen2, stablelm2, deepseek-r1-qwen, megrez, tekken, gpt-4o, deepseek-v3 and deepseek-coder; for any other pre-tokenizer, put the model's tokenizer.json next to the file");
    insta::assert_snapshot!(text(&[model("gpt2"), tokens(), pre("viking")]), @r#"DIR/model.gguf: tokenizer.ggml.pre is "viking", but must be one of gpt-2, smollm, starcoder, refact, command-r, llama-bpe, smaug-bpe, dbrx, falcon3, pixtral, qwen2, stablelm2, deepseek-r1-qwen, megrez, tekken, gpt-4o, deepseek-v3 and deepseek-coder; for any other pre-tokenizer, put the model's tokenizer.json next to the file"#);
    insta::assert_snapshot!(text(&[model("gpt2"), tokens(), pre("gpt-2")]), @"DIR/model.gguf: tokenizer.ggml.merges is absent, but must be a list of pairs");
    insta::assert_snapshot!(text(&[model("gpt2"), tokens(), pre("gpt-2"), ("tokenizer.ggml.merges", texts(&["a c"]))]), @r#"DIR/model.gguf: entry 0 of tokenizer.ggml.merges is "a c", but must be two tokens with a space between them"#);
    insta::assert_snapshot!(text(&[model("llama"), tokens()]), @"DIR/model.gguf: tokenizer.ggml.scores is absent, but must be a list of numbers");
    let scores = Value::Array(vec![Value::F32(0.0)]);
    insta::assert_snapshot!(text(&[model("llama"), tokens(), ("tokenizer.ggml.scores", scores)]), @"DIR/model.gguf: tokenizer.ggml.scores is a list of length 1, but must be 3 numbers, one per token");
    let kinds = Value::Array(vec![Value::I32(1)]);
    insta::assert_snapshot!(text(&[model("llama"), tokens(), ("tokenizer.ggml.token_type", kinds)]), @"DIR/model.gguf: tokenizer.ggml.token_type is a list of length 1, but must be 3 numbers, one per token");
    std::fs::remove_file(&file).unwrap();
    let none =
        || Tokenizer::open(folder.path()).unwrap_err().to_string().replace(folder.path().to_str().unwrap(), "DIR");
    insta::assert_snapshot!(none(), @"DIR has no tokenizer: it has neither tokenizer.json nor vocab.txt nor exactly one GGUF file; save a tokenizer there with transformers, AutoTokenizer.from_pretrained(MODEL).save_pretrained(FOLDER), or copy tokenizer.json and tokenizer_config.json from the model's source");
    std::fs::write(folder.path().join("tokenizer.model"), "x").unwrap();
    insta::assert_snapshot!(none(), @"DIR has no tokenizer: it has only tokenizer.model, which is not supported; save a tokenizer there with transformers, AutoTokenizer.from_pretrained(MODEL).save_pretrained(FOLDER), or copy tokenizer.json and tokenizer_config.json from the model's source");
}

#[test]
fn a_gpt2_of_two_files_has_the_tokens_of_one() {
    let folder = copy("llama");
    let original = Tokenizer::open(folder.path()).unwrap();
    let json: Json = serde_json::from_slice(&std::fs::read(folder.path().join("tokenizer.json")).unwrap()).unwrap();
    let write = |name: &str, text: String| std::fs::write(folder.path().join(name), text).unwrap();
    let merge = |merge: &Json| match merge {
        Json::String(text) => text.clone(),
        pair => format!("{} {}", pair[0].as_str().unwrap(), pair[1].as_str().unwrap()),
    };
    let merges: Vec<String> = json["model"]["merges"].as_array().unwrap().iter().map(merge).collect();
    write("vocab.json", json["model"]["vocab"].to_string());
    write("merges.txt", format!("#version: 0.2\n{}\n", merges.join("\n")));
    write("config.json", json!({"model_type": "gpt2"}).to_string());
    std::fs::remove_file(folder.path().join("tokenizer.json")).unwrap();
    for name in ["tokenizer_config.json", "special_tokens_map.json"] {
        std::fs::remove_file(folder.path().join(name)).unwrap();
    }
    let found = Tokenizer::open(folder.path()).unwrap();
    for text in TEXTS.iter().filter(|text| !text.contains("<|")) {
        assert_eq!(found.encode(text).unwrap().ids, original.encode(text).unwrap().ids, "{text:?}");
    }
    assert_eq!(found.special_id("eos_token"), original.id("<|endoftext|>"));
}
