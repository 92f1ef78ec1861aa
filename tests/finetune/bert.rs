//! A BERT that classifies sequences matches transformers, and padding does not change the result.

use crate::fixtures::{json as record, max_difference, path, tensors, values};
use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_zero::comm::threads;
use candle_zero::models::{Encoder, EncoderConfig};
use candle_zero::{Engine, Result};
use serde_json::{Value, json};

const LENGTHS: [usize; 4] = [24, 17, 9, 1];

fn config() -> EncoderConfig {
    EncoderConfig::read(path("bert/model/config.json")).unwrap()
}

fn model() -> Encoder {
    let weights = candle_core::safetensors::load(path("bert/model/model.safetensors"), &Device::Cpu).unwrap();
    Encoder::new(&config(), VarBuilder::from_tensors(weights, DType::F32, &Device::Cpu)).unwrap()
}

#[test]
fn logits_and_states_are_those_of_transformers() {
    let (model, record) = (model(), tensors("bert/forward.safetensors"));
    let [ids, kinds] = ["input_ids", "token_type_ids"].map(|name| record[name].to_dtype(DType::U32).unwrap());
    let mask = record["attention_mask"].to_dtype(DType::U32).unwrap().sum(1).unwrap().to_vec1::<u32>().unwrap();
    assert_eq!(mask, LENGTHS.map(|length| length as u32));
    let logits = model.forward(&ids, Some(&kinds), &LENGTHS).unwrap();
    let difference = max_difference(&logits, &record["logits"]);
    assert!(difference <= 1e-4, "logits differ by {difference}");
    let states = model.states(&ids, Some(&kinds), &LENGTHS).unwrap();
    for (row, length) in LENGTHS.into_iter().enumerate() {
        let unpadded = |t: &Tensor| t.get(row).unwrap().narrow(0, 0, length).unwrap();
        let difference = max_difference(&unpadded(&states), &unpadded(&record["last_hidden_state"]));
        assert!(difference <= 1e-4, "states of row {row} differ by {difference}");
    }
}

/// Returns the bits of the loss of one row, and the gradients of all parameters.
fn run_row(ids: &[u32], kinds: &[u32], length: usize) -> (u32, Vec<Vec<f32>>) {
    let runs = threads::run(1, |comm| {
        let settings = json!({"train_batch_size": 1, "optimizer": {"type": "AdamW"}});
        let builder = Engine::builder().communicator(comm).device(Device::Cpu);
        let builder = builder.init_from(path("bert/model/model.safetensors"));
        let mut engine = builder.initialize(|vb| Encoder::new(&config(), vb), settings)?;
        let [ids, kinds] = [ids, kinds].map(|row| Tensor::new(row, &Device::Cpu).unwrap().unsqueeze(0).unwrap());
        let label = Tensor::new(&[2u32], &Device::Cpu)?;
        let loss = engine.forward(|model| model.loss(&ids, Some(&kinds), &[length], &label, None))?;
        engine.backward(&loss)?;
        let names = engine.trainable_parameters();
        let gradient = |engine: &mut Engine<Encoder>, name: &str| -> Result<Vec<f32>> {
            let gradient = engine.safe_get_full_grad(name)?.unwrap();
            Ok(values(&gradient))
        };
        let gradients = names.iter().map(|name| gradient(&mut engine, name)).collect::<Result<_>>()?;
        Ok((loss.to_scalar::<f32>()?.to_bits(), gradients))
    });
    runs.unwrap().remove(0).unwrap()
}

#[test]
fn padding_changes_no_bit_of_the_loss() {
    let record = tensors("bert/forward.safetensors");
    let rows = |name: &str| record[name].to_dtype(DType::U32).unwrap().to_vec2::<u32>().unwrap();
    let (ids, kinds) = (rows("input_ids"), rows("token_type_ids"));
    for (row, length) in LENGTHS.into_iter().enumerate().skip(1) {
        let (loss, _) = run_row(&ids[row][..length], &kinds[row][..length], length);
        for more in [1, 5, 24 - length] {
            for filler in [3u32, 17] {
                let mut padded = ids[row][..length].to_vec();
                padded.resize(length + more, filler);
                let mut zeros = kinds[row][..length].to_vec();
                zeros.resize(length + more, filler % 2);
                assert_eq!(run_row(&padded, &zeros, length).0, loss, "row {row} with {more} more of {filler}");
            }
        }
    }
    // The gradients of all parameters are also independent of the padding's content.
    let fill = |filler: u32| {
        let mut padded = ids[1][..17].to_vec();
        padded.resize(24, filler);
        run_row(&padded, &[0; 24], 17).1
    };
    assert_eq!(fill(3), fill(99));
}

#[test]
fn twelve_steps_follow_pytorch_at_all_stages() {
    let record = record("bert/trajectory.json");
    let steps = record["steps"].as_array().unwrap();
    let final_weights = tensors("bert/final.safetensors");
    for world in [1, 2] {
        let mut first: Option<Vec<u8>> = None;
        for stage in [0, 1, 2, 3] {
            let context = format!("stage {stage}, world size {world}");
            let (found, file) = train(&record["batches"], world, stage);
            assert_eq!((found.len(), steps.len()), (12, 12));
            for (i, ((loss, norm), want)) in found.iter().zip(steps).enumerate() {
                let [want_loss, want_norm] = ["loss", "grad_norm"].map(|key| want[key].as_f64().unwrap());
                assert!((loss - want_loss).abs() <= 1e-4, "{context}, step {i}: loss {loss}, {want_loss}");
                assert!((norm / want_norm - 1.0).abs() <= 1e-4, "{context}, step {i}: norm {norm}, {want_norm}");
            }
            let first = first.get_or_insert_with(|| file.clone());
            assert!(*first == file, "{context}: bits differ from those of stage 0");
            let weights = candle_core::safetensors::load_buffer(&file, &Device::Cpu).unwrap();
            assert_eq!(weights.len(), final_weights.len());
            for (name, want) in &final_weights {
                // The gradients of the keys' biases consist only of rounding errors.
                if !name.ends_with("self.key.bias") {
                    let difference = max_difference(&weights[name], want);
                    assert!(difference <= 5e-5, "{context}: {name} differs by {difference}");
                }
            }
        }
    }
}

/// Returns the losses and gradient norms of all steps, and the exported file.
fn train(batches: &Value, world: usize, stage: u8) -> (Vec<(f64, f64)>, Vec<u8>) {
    let settings = json!({
        "train_batch_size": 6,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    });
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.safetensors");
    let runs = threads::run(world, |comm| -> Result<_> {
        let part = comm.rank() * 6 / world..(comm.rank() + 1) * 6 / world;
        let builder = Engine::builder().communicator(comm).device(Device::Cpu);
        let builder = builder.init_from(path("bert/model/model.safetensors"));
        let mut engine = builder.initialize(|vb| Encoder::new(&config(), vb), settings.clone())?;
        let mut steps = vec![];
        for batch in batches.as_array().unwrap() {
            let rows = |key: &str| -> Tensor {
                let rows: Vec<Vec<u32>> = serde_json::from_value(batch[key].clone()).unwrap();
                Tensor::new(rows[part.clone()].to_vec(), &Device::Cpu).unwrap()
            };
            let list = |key: &str| -> Vec<u32> { serde_json::from_value(batch[key].clone()).unwrap() };
            let lengths: Vec<usize> = list("lengths")[part.clone()].iter().map(|length| *length as usize).collect();
            let labels = Tensor::new(&list("labels")[part.clone()], &Device::Cpu)?;
            let (ids, kinds) = (rows("input_ids"), rows("token_type_ids"));
            let loss = engine.forward(|model| model.loss(&ids, Some(&kinds), &lengths, &labels, None))?;
            engine.backward(&loss)?;
            engine.step()?;
            let all = engine.gather_f64(&[f64::from(loss.to_scalar::<f32>()?)])?;
            let mean = all.iter().map(|values| values[0]).sum::<f64>() / world as f64;
            steps.push((mean, engine.global_grad_norm().unwrap()));
        }
        engine.export_safetensors(&file)?;
        Ok(steps)
    });
    (runs.unwrap().remove(0).unwrap(), std::fs::read(&file).unwrap())
}
