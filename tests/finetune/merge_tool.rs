//! `zerorun merge`: models that answer like the base with the adapter. They are written completely or not at all.

use crate::fixtures::{copy, path};
use crate::support::processes::{stderr, stdout, zerorun};
use candle_core::DType;
use candle_zero_finetune::BaseModel;
use std::path::Path;
use std::process::Output;

const ADAPTER: &str = "lora/llama.all_r4_rslora/final";

fn merge(words: &[&str]) -> Output {
    zerorun().arg("merge").args(words).output().unwrap()
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn answer(model: &Path, more: &[&str]) -> String {
    let words = ["--prompt", "hello there", "--max_tokens", "24"];
    let output = zerorun().arg("generate").arg(model).args(words).args(more).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    stdout(&output)
}

#[test]
fn a_merged_model_answers_as_the_base_with_the_adapter_does() {
    let (llama, adapter, folder) = (path("models/llama"), path(ADAPTER), tempfile::tempdir().unwrap());
    let out = folder.path().join("merged");
    let output = merge(&[text(&llama), text(&adapter), "--out", text(&out)]);
    assert!(output.status.success(), "{}", stderr(&output));
    let count = BaseModel::open(&llama).unwrap().config().parameters().unwrap().len();
    assert_eq!(stdout(&output), format!("{}: {count} tensors, 21 of them with the adapter\n", out.display()));
    let expected = answer(&llama, &["--adapter", text(&adapter)]);
    assert_eq!(answer(&out, &[]), expected);
    assert_ne!(answer(&llama, &[]), expected);

    // The file name selects the GGUF format. A GGUF file with a tokenizer next to it is also a model.
    let gguf = copy("llama");
    std::fs::remove_file(gguf.path().join("config.json")).unwrap();
    std::fs::remove_file(gguf.path().join("model.safetensors")).unwrap();
    let file = gguf.path().join("model.gguf");
    let output = merge(&[text(&llama), text(&adapter), "--out", text(&file)]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(answer(&file, &[]), expected);
    assert_eq!(answer(gguf.path(), &[]), expected);
}

#[test]
fn the_precision_and_the_format_are_those_that_are_asked_for() {
    let (llama, folder) = (path("models/llama"), tempfile::tempdir().unwrap());
    let out = |name: &str| folder.path().join(name);
    let run = |name: &str, more: &[&str]| {
        let output = merge(&[&[text(&llama), "--out", text(&out(name))], more].concat());
        assert!(output.status.success(), "{}", stderr(&output));
        stdout(&output)
    };
    assert!(run("half", &["--dtype", "bf16"]).ends_with(" tensors\n"));
    let tensors = candle_core::safetensors::load(out("half").join("model.safetensors"), &candle_core::Device::Cpu);
    assert!(tensors.unwrap().values().all(|tensor| tensor.dtype() == DType::BF16));
    run("model.gguf", &[]);
    run("whole", &["--format", "gguf-f16"]);
    run("small", &["--format", "gguf-q8_0"]);
    let bytes = |name: &str| std::fs::read(out(name)).unwrap();
    assert_eq!(bytes("whole"), bytes("model.gguf"));
    assert!(bytes("small").len() < bytes("whole").len());
}

#[test]
fn wrong_command_lines_models_and_places_end_with_code_2_and_write_nothing() {
    let (llama, gemma, folder) = (path("models/llama"), path("models/gemma2"), tempfile::tempdir().unwrap());
    std::fs::write(folder.path().join("mine"), "x").unwrap();
    let out = |name: &str| folder.path().join(name);
    let wrong = |words: &[&str]| {
        let output = merge(words);
        assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
        assert!(stdout(&output).is_empty());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
        let text = stderr(&output).replace(folder.path().to_str().unwrap(), "DIR");
        text.replace(path("").to_str().unwrap(), "").trim_end().to_owned()
    };
    let (new, other) = (out("new"), path("lora/qwen3.attn_r8/final"));
    insta::assert_snapshot!(wrong(&[text(&llama), "--out", text(folder.path())]), @"zerorun: cannot write to DIR: the output must be a new or empty folder, but this folder is not empty; give another path");
    insta::assert_snapshot!(wrong(&[text(&llama), "--out", text(&out("mine"))]), @"zerorun: cannot write to DIR/mine: the output must be a new or empty folder, but this is a file; give another path");
    insta::assert_snapshot!(wrong(&[text(&llama), "--out", text(&out("mine")), "--format", "gguf-f16"]), @"zerorun: cannot write to DIR/mine: a file or folder of that name already exists; give another path");
    insta::assert_snapshot!(wrong(&[text(&llama), text(&other), "--out", text(&new)]), @"zerorun: the adapter lora/qwen3.attn_r8/final (trained on qwen3) does not fit this model: layers.0.self_attn.q_proj.lora_A.weight: it has shape [8, 40], but the model needs [8, 48]; use the model that it was trained on");
    insta::assert_snapshot!(wrong(&[text(&llama), text(&llama), "--out", text(&new)]), @"zerorun: cannot read models/llama/adapter_config.json: No such file or directory (os error 2)");
    insta::assert_snapshot!(wrong(&[text(&gemma), "--out", text(&out("x.gguf"))]), @"zerorun: models/gemma2 cannot be written as GGUF: its query_pre_attn_scalar is 12, but architecture gemma2 of llama.cpp assumes 16 for a model with 2 blocks");
    insta::assert_snapshot!(wrong(&["/no/such", "--out", text(&new)]), @"zerorun: /no/such is not a model: there is no such file or folder; give a folder in Hugging Face format (config.json and safetensors files) or a GGUF file");
    let clash = wrong(&[text(&llama), "--out", text(&out("x.gguf")), "--dtype", "f16"]);
    assert!(
        clash.starts_with("zerorun: --dtype is the precision of a Hugging Face folder; for a GGUF file, use --format"),
        "{clash}"
    );
    assert!(wrong(&[text(&llama)]).contains("--out"));
    assert!(wrong(&[text(&llama), "--out", text(&new), "--format", "onnx"]).contains("hf, gguf-f16, gguf-q8_0"));
}
