//! Folders of mixtures: MXFP4 is read, merged models are written, and errors about invalid files and descriptions name
//! the file, tensor and key.

use crate::fixtures::ids;
use crate::moe::MOE;
use candle_core::{DType, Device, Tensor};
use candle_zero::checkpoint::ConsolidatedDtype;
use candle_zero::models::Decoder;
use candle_zero_finetune::{BaseModel, MergedModel};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde_json::{Value, json};
use std::path::Path;

/// A tensor in a file that a test changes.
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
        std::fs::copy(MOE.path("models").join(name).join(file), folder.path().join(file)).unwrap();
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

/// Removes the last `by` elements of a tensor's first dimension.
fn shorten(tensors: &mut [RawTensor], name: &str, by: usize) {
    let tensor = tensors.iter_mut().find(|tensor| tensor.name == name).unwrap();
    let each = tensor.bytes.len() / tensor.shape[0];
    tensor.shape[0] -= by;
    tensor.bytes.truncate(tensor.shape[0] * each);
}

#[test]
fn experts_that_are_missing_or_have_other_sizes_are_named() {
    let expert = "model.layers.1.block_sparse_moe.experts.3.w2.weight";
    insta::assert_snapshot!(with_tensors("mixtral", |all| all.retain(|tensor| tensor.name != expert)), @"DIR/model.safetensors has no tensor model.layers.1.block_sparse_moe.experts.3.w2.weight of shape [32, 40], which the model needs; the file must hold exactly the model's tensors; it has lm_head.weight, model.embed_tokens.weight, model.layers.0.block_sparse_moe.experts.0.w1.weight and 37 more");
    insta::assert_snapshot!(with_tensors("mixtral", |all| shorten(all, expert, 1)), @"tensor model.layers.1.block_sparse_moe.experts.3.w2.weight in DIR/model.safetensors has shape [31, 40], but DIR/config.json describes shape [32, 40]; take both files from the same model");
    insta::assert_snapshot!(with_tensors("mixtral", |all| shorten(all, "model.layers.0.block_sparse_moe.gate.weight", 1)), @"tensor model.layers.0.block_sparse_moe.gate.weight in DIR/model.safetensors has shape [3, 32], but DIR/config.json describes shape [4, 32]; take both files from the same model");
    insta::assert_snapshot!(with_tensors("gpt_oss", |all| shorten(all, "model.layers.0.mlp.experts.down_proj", 1)), @"tensor model.layers.0.mlp.experts.down_proj in DIR/model.safetensors has shape [3, 32, 32], but DIR/config.json describes shape [4, 32, 32]; take both files from the same model");
    // The file has one more expert than the description.
    insta::assert_snapshot!(with("mixtral", "num_local_experts", json!(3)), @"tensor model.layers.0.block_sparse_moe.gate.weight in DIR/model.safetensors has shape [4, 32], but DIR/config.json describes shape [3, 32]; take both files from the same model");
    insta::assert_snapshot!(with("qwen3_moe", "mlp_only_layers", json!([])), @"DIR/model.safetensors has no tensor model.layers.1.mlp.gate.weight of shape [6, 40], which the model needs; the file must hold exactly the model's tensors; it has lm_head.weight, model.embed_tokens.weight, model.layers.0.input_layernorm.weight and 38 more");
}

#[test]
fn descriptions_of_mixtures_that_cannot_be_are_refused_by_key() {
    insta::assert_snapshot!(with("mixtral", "num_experts_per_tok", json!(5)), @"DIR/config.json: num_experts_per_tok is 5, but must be at most num_local_experts (4)");
    insta::assert_snapshot!(with("mixtral", "num_experts_per_tok", json!(0)), @"DIR/config.json: num_experts_per_tok is 0, but must be a whole number from 1 to 4294967295");
    insta::assert_snapshot!(with("mixtral", "num_local_experts", json!(-4)), @"DIR/config.json: num_local_experts is -4, but must be a whole number from 1 to 4294967295");
    insta::assert_snapshot!(with("mixtral", "num_local_experts", json!(4_000_000)), @"DIR/config.json: num_local_experts is 4000000, but must be at most 16384");
    insta::assert_snapshot!(with("mixtral", "num_experts", json!(8)), @"DIR/config.json: num_local_experts is 4, but must be equal to num_experts (8), or absent");
    insta::assert_snapshot!(with("mixtral", "router_jitter_noise", json!(0.1)), @"DIR/config.json: router_jitter_noise is 0.1, but must be 0: noise in the router's input is not supported");
    insta::assert_snapshot!(with("mixtral", "router_aux_loss_coef", json!(-1.0)), @"DIR/config.json: router_aux_loss_coef is -1.0, but must be a number of at least 0");
    insta::assert_snapshot!(with("mixtral", "output_router_logits", json!("yes")), @r#"DIR/config.json: output_router_logits is "yes", but must be true or false"#);
    insta::assert_snapshot!(with("mixtral", "hidden_act", json!("gelu_pytorch_tanh")), @r#"DIR/config.json: hidden_act is "gelu_pytorch_tanh", but must be silu or swish in a mixture of experts"#);
    insta::assert_snapshot!(with("mixtral", "quantization_config", json!({"quant_method": "mxfp4"})), @r#"DIR/config.json: quantization_config is {"quant_method":"mxfp4"}, but must be absent: weights are read in f32, bf16 or f16"#);
    insta::assert_snapshot!(with("qwen3_moe", "decoder_sparse_step", json!(0)), @"DIR/config.json: decoder_sparse_step is 0, but must be a whole number from 1 to 4294967295");
    insta::assert_snapshot!(with("qwen3_moe", "mlp_only_layers", json!([2])), @"DIR/config.json: mlp_only_layers is a list that contains 2, but must be a list of numbers below num_hidden_layers (2)");
    insta::assert_snapshot!(with("qwen3_moe", "mlp_only_layers", json!("1")), @r#"DIR/config.json: mlp_only_layers is "1", but must be a list of layer numbers"#);
    insta::assert_snapshot!(with("qwen3_moe", "use_sliding_window", json!(true)), @"DIR/config.json: use_sliding_window is true, but must be false: windows are not supported in this model");
    insta::assert_snapshot!(with("qwen3_moe", "moe_intermediate_size", json!(0)), @"DIR/config.json: moe_intermediate_size is 0, but must be a whole number from 1 to 4294967295");
    insta::assert_snapshot!(with("qwen2_moe", "shared_expert_intermediate_size", json!(0)), @"DIR/config.json: shared_expert_intermediate_size is 0, but must be a whole number from 1 to 4294967295");
    insta::assert_snapshot!(with("olmoe_clip", "clip_qkv", json!(0)), @"DIR/config.json: clip_qkv is 0, but must be a positive number");
    insta::assert_snapshot!(with("gpt_oss", "swiglu_limit", json!(-7)), @"DIR/config.json: swiglu_limit is -7, but must be a positive number");
    insta::assert_snapshot!(with("gpt_oss", "experts_per_token", json!(4)), @"DIR/config.json: experts_per_token is 4, but must be equal to num_experts_per_tok (2)");
    insta::assert_snapshot!(with("gpt_oss", "quantization_config", json!({"quant_method": "fp8"})), @r#"DIR/config.json: quantization_config is {"quant_method":"fp8"}, but must be absent or of quant_method mxfp4"#);
}

#[test]
fn experts_in_mxfp4_that_are_incomplete_or_do_not_match_are_named() {
    let gate_up = "model.layers.0.mlp.experts.gate_up_proj";
    let without = |end: &'static str| {
        let name = format!("{gate_up}_{end}");
        with_tensors("gpt_oss_mxfp4", move |all| all.retain(|tensor| tensor.name != name))
    };
    insta::assert_snapshot!(without("scales"), @"DIR/model.safetensors: tensor model.layers.0.mlp.experts.gate_up_proj_scales is missing, but there is model.layers.0.mlp.experts.gate_up_proj_blocks; MXFP4 needs both, so download the files again");
    insta::assert_snapshot!(without("blocks"), @"DIR/model.safetensors: tensor model.layers.0.mlp.experts.gate_up_proj_blocks is missing, but there is model.layers.0.mlp.experts.gate_up_proj_scales; MXFP4 needs both, so download the files again");
    let scales = format!("{gate_up}_scales");
    insta::assert_snapshot!(with_tensors("gpt_oss_mxfp4", |all| shorten(all, &scales, 1)), @"DIR/model.safetensors: tensor model.layers.0.mlp.experts.gate_up_proj_scales has shape [3, 64, 2] and dtype U8; the experts that config.json describes need [4, 64, 2] and U8");
    insta::assert_snapshot!(with_tensors("gpt_oss_mxfp4", |all| {
        let tensor = all.iter_mut().find(|tensor| tensor.name == scales).unwrap();
        tensor.dtype = Dtype::I8;
    }), @"DIR/model.safetensors: tensor model.layers.0.mlp.experts.gate_up_proj_scales has shape [4, 64, 2] and dtype I8; the experts that config.json describes need [4, 64, 2] and U8");
    insta::assert_snapshot!(with("gpt_oss_mxfp4", "intermediate_size", json!(48)), @"DIR/model.safetensors: tensor model.layers.0.mlp.experts.gate_up_proj_blocks has shape [4, 64, 2, 16] and dtype U8; the experts that config.json describes need [4, 96, 2, 16] and U8");
    // A scale with the code 255 is NaN.
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
    let base = MOE.base("gpt_oss_mxfp4");
    let out = tempfile::tempdir().unwrap();
    let target = out.path().join("merged");
    MergedModel::new(&base, None).unwrap().write_hugging_face(&target, None).unwrap();
    let config: Value = serde_json::from_slice(&std::fs::read(target.join("config.json")).unwrap()).unwrap();
    assert_eq!((&config["quantization_config"], &config["dtype"]), (&Value::Null, &json!("bfloat16")));
    let file = std::fs::read(target.join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&file).unwrap();
    assert!(file.iter().all(|(name, view)| view.dtype() == Dtype::BF16 && !name.ends_with("_blocks")));
    assert_eq!(file.tensor("model.layers.0.mlp.experts.gate_up_proj").unwrap().shape(), [4, 64, 64]);
    let rows = ids(&MOE.json("logits/gpt_oss_mxfp4.json")["input_ids"]);
    let written = BaseModel::open(&target).unwrap();
    assert_eq!(written.config(), base.config());
    assert_eq!(logits(&written, &rows), logits(&base, &rows));
}

#[test]
fn a_written_mixture_is_the_base_with_the_names_on_disk() {
    for name in ["gpt_oss", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "qwen3_moe_step2"] {
        let (base, out) = (MOE.base(name), tempfile::tempdir().unwrap());
        let target = out.path().join("merged");
        let merged = MergedModel::new(&base, None).unwrap();
        merged.write_hugging_face(&target, Some(ConsolidatedDtype::F32)).unwrap();
        let [before, after] = [base.folder(), &target].map(|folder| {
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
    }
}
