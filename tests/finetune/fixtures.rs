//! The models and records in tests/fixtures, which were created with transformers, and the code that tests share to
//! compare with them.

use crate::support::processes::repository;
use candle_core::{DType, Device, Tensor};
use candle_zero::models::{Decoder, DecoderConfig, Session};
use candle_zero::{Engine, Result};
use candle_zero_finetune::{Adapter, BaseModel};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// The names of all models in tests/fixtures/finetune.
pub const MODELS: [&str; 9] = ["gpt2", "llama", "llama32", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3"];

/// A folder in tests/fixtures with models and the values that were recorded for them.
#[derive(Clone, Copy)]
pub struct Records(pub &'static str);

const FINETUNE: Records = Records("finetune");

impl Records {
    pub fn path(self, name: impl AsRef<Path>) -> PathBuf {
        repository().join("tests/fixtures").join(self.0).join(name)
    }

    pub fn json(self, name: impl AsRef<Path>) -> Value {
        serde_json::from_slice(&std::fs::read(self.path(name)).unwrap()).unwrap()
    }

    pub fn tensors(self, name: impl AsRef<Path>) -> HashMap<String, Tensor> {
        candle_core::safetensors::load(self.path(name), &Device::Cpu).unwrap()
    }

    pub fn base(self, model: &str) -> BaseModel {
        BaseModel::open(self.path("models").join(model)).unwrap()
    }

    /// Returns a copy of a model's folder with a different file as `config.json`.
    pub fn copy_with(self, model: &str, config: &str) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let from = self.path("models").join(model);
        std::fs::copy(from.join("model.safetensors"), folder.path().join("model.safetensors")).unwrap();
        std::fs::copy(from.join(config), folder.path().join("config.json")).unwrap();
        folder
    }

    /// Returns the rows of token ids of each step of the recorded training.
    pub fn batches(self) -> Vec<Tensor> {
        let steps = self.json("trajectories/batches.json");
        steps["input_ids"].as_array().unwrap().iter().map(ids).collect()
    }
}

pub fn path(name: impl AsRef<Path>) -> PathBuf {
    FINETUNE.path(name)
}

pub fn json(name: impl AsRef<Path>) -> Value {
    FINETUNE.json(name)
}

pub fn tensors(name: impl AsRef<Path>) -> HashMap<String, Tensor> {
    FINETUNE.tensors(name)
}

pub fn base(model: &str) -> BaseModel {
    FINETUNE.base(model)
}

pub fn batches() -> Vec<Tensor> {
    FINETUNE.batches()
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
pub fn max_difference(a: &Tensor, b: &Tensor) -> f32 {
    assert_eq!(a.dims(), b.dims());
    values(a).iter().zip(values(b)).fold(0f32, |most, (a, b)| most.max((a - b).abs()))
}

/// Returns the targets of complete rows: the token after each token, and none for the last one. transformers gives the
/// last token to the model too, which changes rotary positions that depend on the length.
pub fn next_tokens(rows: &Tensor) -> Tensor {
    let (batch, time) = rows.dims2().unwrap();
    let next = rows.narrow(1, 1, time - 1).unwrap().to_dtype(DType::I64).unwrap();
    let none = Tensor::full(-100i64, (batch, 1), &Device::Cpu).unwrap();
    Tensor::cat(&[next, none], 1).unwrap()
}

/// Returns the inputs and targets of a rank's rows in a batch: all tokens but the last one of each row, and the tokens
/// after them.
pub fn rank_batch(batch: &Tensor, world: usize, rank: usize) -> (Tensor, Tensor) {
    let (rows, time) = batch.dims2().unwrap();
    let rows = batch.narrow(0, rank * rows / world, rows / world).unwrap();
    let of = |from| rows.narrow(1, from, time - 1).unwrap().contiguous().unwrap();
    (of(0), of(1))
}

/// Returns the configuration of the recorded training. All parameters are sharded, however small they are.
pub fn adamw(lr: f64, stage: u8) -> Value {
    json!({
        "train_batch_size": 4,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": lr, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    })
}

/// Returns the mean of a number over all ranks.
pub fn mean<M>(engine: &mut Engine<M>, own: &Tensor) -> Result<f64> {
    let all = engine.gather_f64(&[f64::from(own.to_scalar::<f32>()?)])?;
    Ok(all.iter().map(|own| own[0]).sum::<f64>() / all.len() as f64)
}

/// Trains one step, and returns the mean loss of all ranks and the gradient norm.
pub fn step<M>(engine: &mut Engine<M>, loss: impl FnMut(&M) -> candle_core::Result<Tensor>) -> Result<(f64, f64)> {
    let loss = engine.forward(loss)?;
    engine.backward(&loss)?;
    engine.step()?;
    Ok((mean(engine, &loss)?, engine.global_grad_norm().unwrap()))
}

/// Returns the configuration of `base` with an adapter.
pub fn adapted(base: &BaseModel, adapter: &Adapter) -> DecoderConfig {
    DecoderConfig { lora: Some(adapter.config.clone()), ..base.config().clone() }
}

/// Checks that `model`, given the tokens of a text one by one, computes the logits of the complete text.
pub fn check_session(name: &str, model: &Decoder, text: &[u32], tolerance: f32) {
    let complete = model.forward(&Tensor::new(vec![text.to_vec()], &Device::Cpu).unwrap()).unwrap();
    let mut session = Session::new();
    for (at, id) in text.iter().enumerate() {
        let found = Tensor::new(model.extend(&mut session, &[*id]).unwrap(), &Device::Cpu).unwrap();
        let expected = complete.narrow(1, at, 1).unwrap().flatten_all().unwrap();
        let difference = max_difference(&found, &expected);
        assert!(difference <= tolerance, "{name}: token {at} differs by {difference}");
    }
}

/// The tolerances of recorded elements of weights.
pub struct ProbeTolerances {
    /// The tolerance that at most one element in 200 may exceed.
    pub typical: f64,
    pub outlier: f64,
    /// The tolerance for biases of keys, whose gradients are only rounding errors.
    pub key_biases: f64,
}

/// Compares the recorded elements of every tensor with those of exported weights. `name_of` returns the name of a
/// recorded tensor in these weights, or `None` if the tensor is not compared.
pub fn check_probes(
    what: &str,
    recorded: &Value,
    weights: &[u8],
    tolerances: &ProbeTolerances,
    name_of: impl Fn(&str) -> Option<String>,
) {
    let found: HashMap<String, Tensor> = candle_core::safetensors::load_buffer(weights, &Device::Cpu).unwrap();
    let (mut worst, mut outliers, mut count) = (0f64, 0, 0);
    let recorded: Vec<(String, &Value)> =
        recorded.as_object().unwrap().iter().filter_map(|(name, list)| Some((name_of(name)?, list))).collect();
    assert_eq!(recorded.len(), found.len(), "{what}");
    for (name, list) in recorded {
        let Some(tensor) = found.get(&name) else { panic!("{what} has no tensor {name}") };
        for (found, want) in probe_values(&values(tensor)).iter().zip(numbers(list)) {
            let difference = (f64::from(*found) - want).abs();
            if name.ends_with("k_proj.bias") {
                assert!(difference <= tolerances.key_biases, "{what}: {name} differs by {difference}");
                continue;
            }
            count += 1;
            outliers += usize::from(difference > tolerances.typical);
            worst = worst.max(difference);
        }
    }
    let is_near = outliers * 200 <= count && worst <= tolerances.outlier;
    assert!(is_near, "{what}: {outliers} of {count} differ, by up to {worst}");
}

/// Returns the elements of a tensor that are recorded. A position halfway between two elements is rounded to the even
/// one.
pub fn probe_values(values: &[f32]) -> [f32; 8] {
    let last = (values.len() - 1) as f64;
    [0, 1, 2, 3, 4, 5, 6, 7].map(|i| values[(f64::from(i) * last / 7.0).round_ties_even() as usize])
}
