//! `zerorun generate`: the same text as through the API, for prompts of every kind, and the error messages.

use crate::fixtures::{copy, path};
use crate::support::processes::{stderr, stdout, zerorun};
use candle_core::{DType, Device};
use candle_zero::models::Decoder;
use candle_zero_finetune::{BaseModel, Generator, Tokenizer};
use serde_json::json;
use std::io::Write as _;
use std::path::Path;
use std::process::{Output, Stdio};

fn generate(model: &Path, more: &[&str]) -> Output {
    zerorun().arg("generate").arg(model).args(more).output().unwrap()
}

/// Returns the standard output of a successful run.
fn answer(model: &Path, more: &[&str]) -> String {
    let output = generate(model, more);
    assert!(output.status.success(), "{}", stderr(&output));
    stdout(&output)
}

const FEW: [&str; 2] = ["--max_tokens", "12"];

#[test]
fn the_likeliest_tokens_are_those_of_the_library_each_time() {
    let llama = path("models/llama");
    let output = generate(&llama, &["--raw", "--prompt", "one two", "--max_tokens", "12"]);
    let (base, tokenizer) = (BaseModel::open(&llama).unwrap(), Tokenizer::open(&llama).unwrap());
    let model = Decoder::new(base.config(), base.var_builder(DType::F32, &Device::Cpu)).unwrap();
    let generator = Generator::new(&base, &tokenizer, None).unwrap();
    let prompt = generator.encode_text("one two").unwrap();
    let want = model.generate(&prompt, 12, 0.0, 0).unwrap();
    assert!(want.iter().all(|id| !generator.stop_token_ids().contains(id)));
    assert_eq!(stdout(&output), format!("{}\n", tokenizer.decode(&want, true).unwrap()));
    let log = stderr(&output);
    assert!(log.contains(" prompt token") && log.contains(", 11 generated tokens after the first at "), "{log}");
    assert!(log.contains("the answer was cut off at 12 tokens by --max_tokens"), "{log}");
}

#[test]
fn a_prompt_is_the_same_as_an_argument_a_line_and_a_message() {
    let (llama, folder) = (path("models/llama"), tempfile::tempdir().unwrap());
    let expected = answer(&llama, &[&["--prompt", "hello there", "--system", "be kind"], &FEW[..]].concat());
    let file = folder.path().join("messages.json");
    let messages = json!([{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello there"}]);
    std::fs::write(&file, messages.to_string()).unwrap();
    assert_eq!(answer(&llama, &[&["--messages", file.to_str().unwrap()], &FEW[..]].concat()), expected);
    let text =
        "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nhello there<|im_end|>\n<|im_start|>assistant\n";
    assert_eq!(answer(&llama, &[&["--raw", "--prompt", text], &FEW[..]].concat()), expected);
    let other = answer(&llama, &[&["--prompt", "other"], &FEW[..]].concat());
    assert_ne!(answer(&llama, &[&["--prompt", "hello there"], &FEW[..]].concat()), expected);

    // Each line is a separate prompt, as is each of several arguments. Empty lines are ignored.
    let mut command = zerorun();
    command.arg("generate").arg(&llama).args(FEW).args(["--system", "be kind"]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"hello there\n\nhello there\n").unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(stdout(&output), expected.repeat(2));
    let two = answer(&llama, &[&["--prompt", "other", "--prompt", "other"], &FEW[..]].concat());
    assert_eq!(two, other.repeat(2));
}

#[test]
fn what_is_drawn_follows_from_the_seed() {
    let llama = path("models/llama");
    let drawn = |more: &[&str]| answer(&llama, &[&["--prompt", "a", "--temperature", "1.5"], &FEW[..], more].concat());
    assert_eq!(drawn(&["--seed", "1"]), drawn(&["--seed", "1"]));
    assert_ne!(drawn(&["--seed", "1"]), drawn(&["--seed", "2"]));
    assert_eq!(drawn(&["--top_k", "1"]), answer(&llama, &[&["--prompt", "a"], &FEW[..]].concat()));
    assert_eq!(drawn(&["--top-p", "0.000001"]), answer(&llama, &[&["--prompt", "a"], &FEW[..]].concat()));
}

#[test]
fn an_answer_ends_with_the_context_of_the_model() {
    let gpt2 = copy("gpt2");
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(path("models/llama").join(name), gpt2.path().join(name)).unwrap();
    }
    let gpt2 = gpt2.path();
    let prompt = "word ".repeat(20);
    let output = generate(gpt2, &["--raw", "--prompt", &prompt, "--max_tokens", "1000"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let tokenizer = Tokenizer::open(gpt2).unwrap();
    let room = 128 - tokenizer.encode(&prompt).unwrap().ids.len();
    let log = stderr(&output);
    assert!(log.contains(&format!("the answer was cut off at {room} tokens by the context length")), "{log}");
    let output = generate(gpt2, &["--raw", "--prompt", &"word ".repeat(200)]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains(" tokens, but the model's context of 128 tokens must also hold the answer"));
}

#[test]
fn a_model_computes_in_16_bits_where_that_is_asked_for() {
    let llama = path("models/llama");
    let half = answer(&llama, &[&["--prompt", "hello there", "--dtype", "bf16"], &FEW[..]].concat());
    assert!(half.len() > 5);
}

#[test]
fn a_model_without_a_template_continues_what_stands_there() {
    let folder = copy("llama");
    let path = folder.path().join("tokenizer_config.json");
    let mut config: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    config.as_object_mut().unwrap().remove("chat_template");
    std::fs::write(&path, config.to_string()).unwrap();
    let output = generate(folder.path(), &[&["--prompt", "one two"], &FEW[..]].concat());
    assert!(stderr(&output).contains("no chat template: prompts are continued as they are"), "{}", stderr(&output));
    assert_eq!(stdout(&output), answer(folder.path(), &[&["--raw", "--prompt", "one two"], &FEW[..]].concat()));
    let output = generate(folder.path(), &["--prompt", "one two", "--system", "be kind"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("has no chat template, neither in tokenizer_config.json nor as"));
}

#[test]
fn wrong_command_lines_models_and_prompts_end_with_code_2_and_their_names() {
    let (folder, llama) = (copy("llama"), path("models/llama"));
    let refusal = |model: &Path, more: &[&str]| {
        let output = generate(model, more);
        assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
        assert!(stdout(&output).is_empty());
        let text = stderr(&output).replace(folder.path().to_str().unwrap(), "DIR");
        text.replace(path("").to_str().unwrap(), "").trim_end().to_owned()
    };
    let text = |more: &[&str]| refusal(&llama, more);
    let file = folder.path().join("messages.json");
    std::fs::write(&file, r#"{"role": "user"}"#).unwrap();
    insta::assert_snapshot!(text(&["--messages", file.to_str().unwrap()]), @r#"zerorun: the conversation is not a list of messages with role and content: in DIR/messages.json, found an object instead of a list; write [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]"#);
    insta::assert_snapshot!(text(&["--messages", "/no/such.json"]), @"zerorun: cannot read /no/such.json: No such file or directory (os error 2)");
    insta::assert_snapshot!(text(&["--prompt", "", "--raw"]), @"zerorun: the prompt has no tokens, but at least one is required; give some text");
    insta::assert_snapshot!(text(&["--max_tokens", "0"]), @"zerorun: max_tokens is 0, but must be at least 1");
    insta::assert_snapshot!(text(&["--temperature=-1"]), @"zerorun: temperature is -1, but must be 0 or a positive finite number");
    insta::assert_snapshot!(text(&["--top_p", "2"]), @"zerorun: top_p is 2, but must be above 0 and at most 1");
    insta::assert_snapshot!(text(&["--prompt", "a", "--adapter", "/no/such"]), @"zerorun: cannot read /no/such/adapter_config.json: No such file or directory (os error 2)");
    let other = path("lora/qwen3.attn_r8/final");
    insta::assert_snapshot!(text(&["--prompt", "a", "--adapter", other.to_str().unwrap()]), @"zerorun: the adapter lora/qwen3.attn_r8/final (trained on qwen3) does not fit this model: layers.0.self_attn.q_proj.lora_A.weight: it has shape [8, 40], but the model needs [8, 48]; use the model that it was trained on");
    insta::assert_snapshot!(refusal(Path::new("/no/such"), &["--prompt", "a"]), @"zerorun: /no/such is not a model: there is no such file or folder; give a folder in Hugging Face format (config.json and safetensors files) or a GGUF file");
    for words in [["--raw", "--system", "x"], ["--messages", "x", "--raw"]] {
        assert!(text(&words).contains("cannot be used with"));
    }
    std::fs::remove_file(folder.path().join("tokenizer.json")).unwrap();
    insta::assert_snapshot!(refusal(folder.path(), &["--prompt", "a"]), @"zerorun: DIR has no tokenizer: it has neither tokenizer.json nor vocab.txt nor exactly one GGUF file; save a tokenizer there with transformers, AutoTokenizer.from_pretrained(MODEL).save_pretrained(FOLDER), or copy tokenizer.json and tokenizer_config.json from the model's source");
}
