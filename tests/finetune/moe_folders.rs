//! Folders of mixtures: MXFP4 in, merged models out, and files and descriptions that cannot be, which are refused by file,
//! tensor and key.

use crate::fixtures::ids;
use crate::moe::{base, path, record};
use candle_core::{DType, Device, Tensor};
use candle_zero::checkpoint::ConsolidatedDtype;
use candle_zero::models::Decoder;
use candle_zero_finetune::{BaseModel, GgufFormat, MergedModel};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde_json::{Value, json};
use std::path::Path;

/// A tensor of a file that a test changes.
#[derive(Clone)]
struct RawTensor {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

fn copy(name: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for file in ["model.safetensors", "config.json"] {
        std::fs::copy(path("models").join(name).join(file), folder.path().join(file)).unwrap();
    }
    folder
}

/// Changes the tensors in a folder.
fn edit(folder: &Path, change: impl FnOnce(&mut Vec<RawTensor>)) {
    let file = folder.join("model.safetensors");
    let bytes = std::fs::read(&file).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let mut all: Vec<RawTensor> = tensors
        .iter()
        .map(|(name, view)| RawTensor {
            name: name.to_owned(),
            dtype: view.dtype(),
            shape: view.shape().to_vec(),
            bytes: view.data().to_vec(),
        })
        .collect();
    all.sort_by(|a, b| a.name.cmp(&b.name));
    change(&mut all);
    let views = all.iter().map(|t| (&t.name, TensorView::new(t.dtype, t.shape.clone(), &t.bytes).unwrap()));
    std::fs::write(&file, safetensors::serialize(views, None).unwrap()).unwrap();
}

fn refused(folder: &Path) -> String {
    let text = BaseModel::open(folder).unwrap_err().to_string();
    text.replace(folder.to_str().unwrap(), "DIR")
}

/// Returns the error about a model with changed tensors.
fn with_tensors(name: &str, change: impl FnOnce(&mut Vec<RawTensor>)) -> String {
    let folder = copy(name);
    edit(folder.path(), change);
    refused(folder.path())
}

/// Returns the error about a model with a changed key in its description.
fn with(name: &str, key: &str, value: Value) -> String {
    let folder = copy(name);
    let file = folder.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    config[key] = value;
    std::fs::write(&file, config.to_string()).unwrap();
    refused(folder.path())
}

/// Takes the first elements of a tensor's first dimension away.
fn shorten(tensors: &mut [RawTensor], name: &str, by: usize) {
    let tensor = tensors.iter_mut().find(|tensor| tensor.name == name).unwrap();
    let each = tensor.bytes.len() / tensor.shape[0];
    tensor.shape[0] -= by;
    tensor.bytes.truncate(tensor.shape[0] * each);
}

#[test]
fn experts_that_are_missing_or_have_other_sizes_are_named() {
    let expert = "model.layers.1.block_sparse_moe.experts.3.w2.weight";
    insta::assert_snapshot!(with_tensors("mixtral", |all| all.retain(|tensor| tensor.name != expert)), @"");
    insta::assert_snapshot!(with_tensors("mixtral", |all| shorten(all, expert, 1)), @"");
    insta::assert_snapshot!(with_tensors("mixtral", |all| shorten(all, "model.layers.0.block_sparse_moe.gate.weight", 1)), @"");
    insta::assert_snapshot!(with_tensors("gpt_oss", |all| shorten(all, "model.layers.0.mlp.experts.down_proj", 1)), @"");
    // One expert more than the description has.
    insta::assert_snapshot!(with("mixtral", "num_local_experts", json!(3)), @"");
    insta::assert_snapshot!(with("qwen3_moe", "mlp_only_layers", json!([])), @"");
}

#[test]
fn descriptions_of_mixtures_that_cannot_be_are_refused_by_key() {
    insta::assert_snapshot!(with("mixtral", "num_experts_per_tok", json!(5)), @"");
    insta::assert_snapshot!(with("mixtral", "num_experts_per_tok", json!(0)), @"");
    insta::assert_snapshot!(with("mixtral", "num_local_experts", json!(-4)), @"");
    insta::assert_snapshot!(with("mixtral", "num_local_experts", json!(4_000_000)), @"");
    insta::assert_snapshot!(with("mixtral", "num_experts", json!(8)), @"");
    insta::assert_snapshot!(with("mixtral", "router_jitter_noise", json!(0.1)), @"");
    insta::assert_snapshot!(with("mixtral", "router_aux_loss_coef", json!(-1.0)), @"");
    insta::assert_snapshot!(with("mixtral", "output_router_logits", json!("yes")), @"");
    insta::assert_snapshot!(with("mixtral", "hidden_act", json!("gelu_pytorch_tanh")), @"");
    insta::assert_snapshot!(with("mixtral", "quantization_config", json!({"quant_method": "mxfp4"})), @"");
    insta::assert_snapshot!(with("qwen3_moe", "decoder_sparse_step", json!(0)), @"");
    insta::assert_snapshot!(with("qwen3_moe", "mlp_only_layers", json!([2])), @"");
    insta::assert_snapshot!(with("qwen3_moe", "mlp_only_layers", json!("1")), @"");
    insta::assert_snapshot!(with("qwen3_moe", "use_sliding_window", json!(true)), @"");
    insta::assert_snapshot!(with("qwen3_moe", "moe_intermediate_size", json!(0)), @"");
    insta::assert_snapshot!(with("qwen2_moe", "shared_expert_intermediate_size", json!(0)), @"");
    insta::assert_snapshot!(with("olmoe_clip", "clip_qkv", json!(0)), @"");
    insta::assert_snapshot!(with("gpt_oss", "swiglu_limit", json!(-7)), @"");
    insta::assert_snapshot!(with("gpt_oss", "experts_per_token", json!(4)), @"");
    insta::assert_snapshot!(with("gpt_oss", "quantization_config", json!({"quant_method": "fp8"})), @"");
}

#[test]
fn experts_in_mxfp4_that_are_incomplete_or_do_not_match_are_named() {
    let gate_up = "model.layers.0.mlp.experts.gate_up_proj";
    let without = |end: &'static str| {
        let name = format!("{gate_up}_{end}");
        with_tensors("gpt_oss_mxfp4", move |all| all.retain(|tensor| tensor.name != name))
    };
    insta::assert_snapshot!(without("scales"), @"");
    insta::assert_snapshot!(without("blocks"), @"");
    let scales = format!("{gate_up}_scales");
    insta::assert_snapshot!(with_tensors("gpt_oss_mxfp4", |all| shorten(all, &scales, 1)), @"");
    insta::assert_snapshot!(with_tensors("gpt_oss_mxfp4", |all| {
        let tensor = all.iter_mut().find(|tensor| tensor.name == scales).unwrap();
        tensor.dtype = Dtype::I8;
    }), @"");
    insta::assert_snapshot!(with("gpt_oss_mxfp4", "intermediate_size", json!(48)), @"");
    // A scale of 255 is not a number.
    let folder = copy("gpt_oss_mxfp4");
    edit(folder.path(), |all| {
        let tensor = all.iter_mut().find(|tensor| tensor.name == scales).unwrap();
        tensor.bytes[3] = 255;
    });
    let base = BaseModel::open(folder.path()).unwrap();
    let error = Decoder::new(base.config(), base.var_builder(DType::F32, &Device::Cpu)).unwrap_err().to_string();
    assert!(error.contains("gate_up_proj_scales") && error.contains("model.safetensors"), "{error}");
}

fn logits(base: &BaseModel, rows: &Tensor) -> Vec<f32> {
    let model = Decoder::new(base.config(), base.var_builder(DType::F32, &Device::Cpu)).unwrap();
    model.forward(rows).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

#[test]
fn experts_in_mxfp4_are_written_in_bf16_without_a_change() {
    let base = base("gpt_oss_mxfp4");
    let out = tempfile::tempdir().unwrap();
    let to = out.path().join("merged");
    MergedModel::new(&base, None).unwrap().write_hugging_face(&to, None).unwrap();
    let config: Value = serde_json::from_slice(&std::fs::read(to.join("config.json")).unwrap()).unwrap();
    assert_eq!((&config["quantization_config"], &config["dtype"]), (&Value::Null, &json!("bfloat16")));
    let file = std::fs::read(to.join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&file).unwrap();
    assert!(file.iter().all(|(name, view)| view.dtype() == Dtype::BF16 && !name.ends_with("_blocks")));
    assert_eq!(file.tensor("model.layers.0.mlp.experts.gate_up_proj").unwrap().shape(), [4, 64, 64]);
    let rows = ids(&record("logits/gpt_oss_mxfp4.json")["input_ids"]);
    let written = BaseModel::open(&to).unwrap();
    assert_eq!(written.config(), base.config());
    assert_eq!(logits(&written, &rows), logits(&base, &rows));
}

#[test]
fn a_written_mixture_is_the_base_with_the_names_on_disk() {
    for name in ["gpt_oss", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "qwen3_moe_step2"] {
        let (base, out) = (base(name), tempfile::tempdir().unwrap());
        let to = out.path().join("merged");
        let merged = MergedModel::new(&base, None).unwrap();
        merged.write_hugging_face(&to, Some(ConsolidatedDtype::F32)).unwrap();
        let [before, after] = [base.folder(), &to].map(|folder| {
            let file = std::fs::read(folder.join("model.safetensors")).unwrap();
            let tensors = SafeTensors::deserialize(&file).unwrap();
            let mut all: Vec<(String, Vec<usize>, Vec<u8>)> = tensors
                .iter()
                .map(|(name, view)| (name.to_owned(), view.shape().to_vec(), view.data().to_vec()))
                .collect();
            all.sort();
            all
        });
        assert!(before == after, "{name}");
        let file = out.path().join("model.gguf");
        let error = merged.write_gguf(&file, GgufFormat::F16).unwrap_err().to_string();
        assert!(error.contains("its type is") && error.contains(name.trim_end_matches("_step2")), "{error}");
        assert!(!file.exists());
    }
}
