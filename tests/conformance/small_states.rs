//! With moments in 8 or 16 bits, the nano model reaches nearly the same loss as with moments in f32.

use crate::support::synth;
use crate::trajectories::write_weights;
use candle_core::{Device, Tensor};
use candle_zero::Engine;
use candle_zero::models::{Gpt, GptConfig};
use serde_json::{Value, json};

const STEPS: usize = 300;
const BATCH: usize = 2;

/// Returns the mean loss of the last 20 of 300 steps.
fn last_loss(more: &Value) -> f64 {
    let folder = tempfile::tempdir().unwrap();
    let init = folder.path().join("init.safetensors");
    write_weights(&init);
    let (tokens, model) = (synth::tokens(), GptConfig::preset("nano").unwrap());
    let mut config = json!({
        "train_batch_size": BATCH, "gradient_clipping": 1.0, "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}},
    });
    for (key, value) in more.as_object().unwrap() {
        config[key] = value.clone();
    }
    let builder = Engine::builder().device(Device::Cpu).init_from(&init).stochastic_rounding(true);
    let mut engine = builder.initialize(|vb| Gpt::new(&model, vb), config).unwrap();
    let mut losses = vec![];
    for step in 0..STEPS {
        let (inputs, targets) = synth::samples(&tokens, model.ctx, step * BATCH, BATCH);
        let tensor = |ids| Tensor::from_vec(ids, (BATCH, model.ctx), &Device::Cpu).unwrap();
        let (inputs, targets) = (tensor(inputs), tensor(targets));
        let loss = engine.forward(|gpt| gpt.loss(&inputs, &targets)).unwrap();
        losses.push(f64::from(loss.to_dtype(candle_core::DType::F32).unwrap().to_scalar::<f32>().unwrap()));
        engine.backward(&loss).unwrap();
        engine.step().unwrap();
    }
    losses[STEPS - 20..].iter().sum::<f64>() / 20.0
}

#[test]
fn after_300_steps_small_states_are_within_1_percent_of_f32_moments() {
    let eight = json!({"optimizer": {"type": "AdamW8bit", "params": {"lr": 1e-3, "weight_decay": 0.1}}});
    let bf16 = json!({"bf16": {"enabled": true}});
    let mut bf16_states = bf16.clone();
    bf16_states["bf16"]["bf16_master_weights_and_grads"] = true.into();
    bf16_states["bf16"]["bf16_optimizer_states"] = true.into();
    let [f32_loss, eight, bf16, bf16_states] = [json!({}), eight, bf16, bf16_states].map(|more| last_loss(&more));
    println!("f32 {f32_loss:.4}, eight bits {eight:.4}; bf16 {bf16:.4}, bf16 states {bf16_states:.4}");
    assert!((eight / f32_loss - 1.0).abs() < 0.01, "{eight} with eight bits, {f32_loss} with f32 moments");
    assert!((bf16_states / bf16 - 1.0).abs() < 0.01, "{bf16_states} with states in bf16, {bf16} with f32 ones");
}
