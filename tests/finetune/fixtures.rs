//! The models and records in tests/fixtures/finetune, which were created with transformers.

use crate::support::processes::repository;
use candle_core::{Device, Tensor};
use candle_zero_finetune::BaseModel;
use serde_json::Value;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// All models.
pub const MODELS: [&str; 9] = ["gpt2", "llama", "llama32", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3"];

pub fn path(name: impl AsRef<Path>) -> PathBuf {
    repository().join("tests/fixtures/finetune").join(name)
}

pub fn json(name: impl AsRef<Path>) -> Value {
    serde_json::from_slice(&std::fs::read(path(name)).unwrap()).unwrap()
}

pub fn tensors(name: impl AsRef<Path>) -> HashMap<String, Tensor> {
    candle_core::safetensors::load(path(name), &Device::Cpu).unwrap()
}

pub fn base(model: &str) -> BaseModel {
    BaseModel::open(path("models").join(model)).unwrap()
}

/// Returns a copy of a model's folder, which a test may change.
pub fn copy(model: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(path("models").join(model)).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
    }
    folder
}

/// Returns rows of token ids as a tensor.
pub fn ids(rows: &Value) -> Tensor {
    let rows: Vec<Vec<u32>> = serde_json::from_value(rows.clone()).unwrap();
    Tensor::new(rows, &Device::Cpu).unwrap()
}

pub fn numbers(list: &Value) -> Vec<f64> {
    serde_json::from_value(list.clone()).unwrap()
}

pub fn values(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

/// Returns the largest difference between elements.
pub fn far(a: &Tensor, b: &Tensor) -> f32 {
    assert_eq!(a.dims(), b.dims());
    values(a).iter().zip(values(b)).fold(0f32, |most, (a, b)| most.max((a - b).abs()))
}
