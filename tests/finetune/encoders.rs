//! The encoders other than BERT match transformers: logits, states, and training at stages 0 and 3.

use crate::fixtures::{max_difference, values};
use crate::support::processes::repository;
use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_zero::comm::threads;
use candle_zero::models::{Encoder, EncoderConfig};
use candle_zero::{Engine, Result};
use candle_zero_finetune::ClassifierBase;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::path::PathBuf;

const ENCODERS: [&str; 6] = ["roberta", "xlm_roberta", "distilbert", "electra", "modernbert", "modernbert_mean"];
const LENGTHS: [usize; 4] = [32, 21, 9, 1];

fn path(encoder: &str, file: &str) -> PathBuf {
    repository().join("tests/fixtures/encoders").join(encoder).join(file)
}

fn tensors(encoder: &str, file: &str) -> HashMap<String, Tensor> {
    candle_core::safetensors::load(path(encoder, file), &Device::Cpu).unwrap()
}

fn record(encoder: &str, file: &str) -> Value {
    serde_json::from_slice(&std::fs::read(path(encoder, file)).unwrap()).unwrap()
}

fn config(encoder: &str) -> EncoderConfig {
    EncoderConfig::read(path(encoder, "config.json")).unwrap()
}

fn model(encoder: &str) -> Encoder {
    let weights = tensors(encoder, "model.safetensors");
    Encoder::new(&config(encoder), VarBuilder::from_tensors(weights, DType::F32, &Device::Cpu)).unwrap()
}

/// Returns the token ids of the recorded forward pass, and the token types if there are any.
fn inputs(record: &HashMap<String, Tensor>) -> (Tensor, Option<Tensor>) {
    let ids = |name: &str| record.get(name).map(|ids| ids.to_dtype(DType::U32).unwrap());
    (ids("input_ids").unwrap(), ids("token_type_ids"))
}

#[test]
fn both_styles_of_a_config_describe_the_same_encoder() {
    for encoder in ENCODERS {
        let old = EncoderConfig::read(path(encoder, "config.v4.json")).unwrap();
        assert_eq!(old, config(encoder), "{encoder}");
    }
}

#[test]
fn the_parameters_of_an_encoder_are_those_in_its_file() {
    for encoder in ENCODERS {
        let mut parameters = config(encoder).parameters().unwrap();
        parameters.sort_unstable();
        let file = tensors(encoder, "model.safetensors").into_iter();
        let mut file: Vec<_> = file.map(|(name, tensor)| (name, tensor.dims().to_vec())).collect();
        file.sort_unstable();
        assert_eq!(parameters, file, "{encoder}");
    }
}

#[test]
fn logits_states_and_losses_of_all_encoders_are_those_of_transformers() {
    for encoder in ENCODERS {
        let (model, forward) = (model(encoder), tensors(encoder, "forward.safetensors"));
        let (ids, kinds) = inputs(&forward);
        let mask = forward["attention_mask"].to_dtype(DType::U32).unwrap().sum(1).unwrap().to_vec1::<u32>().unwrap();
        assert_eq!(mask, LENGTHS.map(|length| length as u32));
        let error = max_difference(&model.forward(&ids, kinds.as_ref(), &LENGTHS).unwrap(), &forward["logits"]);
        assert!(error <= 1e-4, "{encoder}: logits differ by {error}");
        let states = model.states(&ids, kinds.as_ref(), &LENGTHS).unwrap();
        for (row, length) in LENGTHS.into_iter().enumerate() {
            let unpadded = |t: &Tensor| t.get(row).unwrap().narrow(0, 0, length).unwrap();
            let error = max_difference(&unpadded(&states), &unpadded(&forward["last_hidden_state"]));
            assert!(error <= 5e-5, "{encoder}: states of row {row} differ by {error}");
            let mean = unpadded(&states).mean(0).unwrap();
            let norm = mean.sqr().unwrap().sum_all().unwrap().sqrt().unwrap();
            let error = max_difference(
                &mean.broadcast_div(&norm).unwrap(),
                &forward["mean_pooled_normalized"].get(row).unwrap(),
            );
            assert!(error <= 1e-5, "{encoder}: embedding of row {row} differs by {error}");
        }
        let loss = model.loss(&ids, kinds.as_ref(), &LENGTHS, &forward["labels"], None).unwrap();
        let want = record(encoder, "forward.json")["loss"].as_f64().unwrap();
        assert!((f64::from(loss.to_scalar::<f32>().unwrap()) - want).abs() <= 2e-5, "{encoder}: {loss} {want}");
    }
}

#[test]
fn padding_changes_no_bit_of_an_encoders_logits() {
    for encoder in ENCODERS {
        let (model, forward) = (model(encoder), tensors(encoder, "forward.safetensors"));
        let ids = inputs(&forward).0.to_vec2::<u32>().unwrap();
        let bits = |ids: Vec<u32>, length: usize| -> Vec<u32> {
            let time = ids.len();
            let ids = Tensor::from_vec(ids, (1, time), &Device::Cpu).unwrap();
            values(&model.forward(&ids, None, &[length]).unwrap()).into_iter().map(f32::to_bits).collect()
        };
        for (row, length) in LENGTHS.into_iter().enumerate().skip(1) {
            let expected = bits(ids[row][..length].to_vec(), length);
            for filler in [3, 1, 77] {
                let mut padded = ids[row][..length].to_vec();
                padded.resize(32, filler);
                assert_eq!(bits(padded, length), expected, "{encoder}, row {row}, {filler}");
            }
        }
    }
}

#[test]
fn ten_steps_of_all_encoders_follow_pytorch_at_stages_0_and_3() {
    for encoder in ENCODERS {
        let record = record(encoder, "trajectory.json");
        let steps = record["steps"].as_array().unwrap();
        for world in [1, 2] {
            let mut first: Option<Vec<u8>> = None;
            for stage in [0, 3] {
                let context = format!("{encoder}, stage {stage}, world size {world}");
                let (found, file) = train(encoder, &record["batches"], world, stage);
                assert_eq!((found.len(), steps.len()), (10, 10));
                for (i, ((loss, norm), want)) in found.iter().zip(steps).enumerate() {
                    let [want_loss, want_norm] = ["loss", "grad_norm"].map(|key| want[key].as_f64().unwrap());
                    assert!((loss - want_loss).abs() <= 5e-5, "{context}, step {i}: loss {loss}, {want_loss}");
                    assert!((norm / want_norm - 1.0).abs() <= 1e-4, "{context}, step {i}: norm {norm}, {want_norm}");
                }
                let first = first.get_or_insert_with(|| file.clone());
                assert!(*first == file, "{context}: bits differ from those of stage 0");
            }
            check_final_weights(encoder, &first.unwrap());
        }
    }
}

/// Compares the weights with those that PyTorch has after the last step.
fn check_final_weights(encoder: &str, file: &[u8]) {
    let weights = candle_core::safetensors::load_buffer(file, &Device::Cpu).unwrap();
    let expected = tensors(encoder, "final.safetensors");
    assert_eq!(weights.len(), expected.len());
    let mut outliers = 0;
    for (name, want) in &expected {
        // The gradients of the keys' biases consist only of rounding errors.
        let is_key = ["key.bias", "k_lin.bias"].iter().any(|end| name.ends_with(end));
        let difference = max_difference(&weights[name], want);
        assert!(difference <= if is_key { 1e-2 } else { 5e-4 }, "{encoder}: {name} differs by {difference}");
        let pairs = values(&weights[name]).into_iter().zip(values(want));
        outliers += pairs.filter(|(found, want)| !is_key && (found - want).abs() > 5e-5).count();
    }
    assert!(outliers <= 5, "{encoder}: {outliers} elements differ by more than 5e-5");
}

/// Returns the losses and gradient norms of all steps, and the exported file.
fn train(encoder: &str, batches: &Value, world: usize, stage: u8) -> (Vec<(f64, f64)>, Vec<u8>) {
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
        let builder = builder.init_from(path(encoder, "model.safetensors"));
        let mut engine = builder.initialize(|vb| Encoder::new(&config(encoder), vb), settings.clone())?;
        let mut steps = vec![];
        for batch in batches.as_array().unwrap() {
            let rows = |key: &str| -> Option<Tensor> {
                let rows: Vec<Vec<u32>> = serde_json::from_value(batch.get(key)?.clone()).unwrap();
                Some(Tensor::new(rows[part.clone()].to_vec(), &Device::Cpu).unwrap())
            };
            let list = |key: &str| -> Vec<u32> { serde_json::from_value(batch[key].clone()).unwrap() };
            let lengths: Vec<usize> = list("lengths")[part.clone()].iter().map(|length| *length as usize).collect();
            let labels = Tensor::new(&list("labels")[part.clone()], &Device::Cpu)?;
            let (ids, kinds) = (rows("input_ids").unwrap(), rows("token_type_ids"));
            let loss = engine.forward(|model| model.loss(&ids, kinds.as_ref(), &lengths, &labels, None))?;
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

/// Returns a copy of an encoder's folder with changed weights and description.
fn changed(
    encoder: &str,
    weights: impl Fn(String) -> Option<String>,
    describe: impl FnOnce(&mut Value),
) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let kept: HashMap<String, Tensor> = tensors(encoder, "model.safetensors")
        .into_iter()
        .filter_map(|(name, tensor)| Some((weights(name)?, tensor)))
        .collect();
    candle_core::safetensors::save(&kept, folder.path().join("model.safetensors")).unwrap();
    let mut config = record(encoder, "config.json");
    describe(&mut config);
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    folder
}

fn labels(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| (*name).into()).collect()
}

#[test]
fn heads_of_all_encoders_are_kept_if_they_fit_and_replaced_if_not() {
    for encoder in ENCODERS {
        let model_labels = labels(&["LABEL_0", "LABEL_1", "LABEL_2"]);
        let whole = changed(encoder, Some, |_| ());
        assert_eq!(ClassifierBase::open_trained(&whole).unwrap().notes(), [] as [&str; 0], "{encoder}");
        assert_eq!(ClassifierBase::open(&whole, &model_labels).unwrap().notes(), [] as [&str; 0], "{encoder}");
        // The weights have neither a head nor a prefix, as when a model without a head is saved.
        let prefix = format!("{}.", config(encoder).naming.prefix());
        let bare = changed(encoder, |name| name.strip_prefix(prefix.as_str()).map(str::to_owned), |_| ());
        let base = ClassifierBase::open(&bare, &labels(&["no", "yes"])).unwrap();
        let head = config(encoder).naming.head();
        assert_eq!(
            base.notes(),
            [
                "the classifier is initialized randomly (standard deviation 0.02): the model has none".to_owned(),
                format!("{head} is initialized randomly: the model has none"),
            ],
            "{encoder}"
        );
        let error = ClassifierBase::open_trained(&bare).unwrap_err().to_string();
        assert!(error.contains("is not a trained classifier"), "{error}");
        let out = tempfile::tempdir().unwrap();
        base.write_companion_files(out.path()).unwrap();
        let written: Value = serde_json::from_slice(&std::fs::read(out.path().join("config.json")).unwrap()).unwrap();
        assert_eq!(written["architectures"], record(encoder, "config.json")["architectures"]);
        assert_eq!(written["id2label"], json!({"0": "no", "1": "yes"}));
        assert_eq!(EncoderConfig::from_hugging_face(&written).unwrap().labels, ["no", "yes"]);
    }
}

#[test]
fn files_that_do_not_hold_the_described_encoder_are_refused() {
    let refused = |folder: &tempfile::TempDir| {
        let error = ClassifierBase::open(folder, &labels(&["a", "b"])).unwrap_err();
        error.to_string().replace(folder.path().to_str().unwrap(), "DIR")
    };
    let without = |encoder: &str, lost: &str| refused(&changed(encoder, |name| (name != lost).then_some(name), |_| ()));
    insta::assert_snapshot!(without("modernbert", "model.layers.1.attn_norm.weight"));
    insta::assert_snapshot!(without("roberta", "roberta.embeddings.token_type_embeddings.weight"));
    let with = |encoder: &str, key: &str, value: Value| refused(&changed(encoder, Some, |config| config[key] = value));
    insta::assert_snapshot!(with("electra", "embedding_size", json!(48)));
    insta::assert_snapshot!(with("distilbert", "n_layers", json!(1)));
    insta::assert_snapshot!(with("modernbert", "attention_bias", json!(true)));
    insta::assert_snapshot!(with("roberta", "position_embedding_type", json!("relative_key")));
    // The classifier in the files has three rows, but its description names two labels.
    let two = changed("roberta", Some, |config| config["id2label"] = json!({"0": "a", "1": "b"}));
    insta::assert_snapshot!(ClassifierBase::open(&two, &labels(&["a", "b"])).unwrap().notes().join("\n"));
}

#[test]
fn a_text_longer_than_an_encoders_context_is_refused() {
    let ids = Tensor::full(5u32, (1, 60), &Device::Cpu).unwrap();
    let said = |encoder: &str, length: usize| {
        let error = model(encoder).forward(&ids, None, &[length]).unwrap_err().to_string();
        error.lines().next().unwrap().to_owned()
    };
    model("roberta").forward(&ids, None, &[48]).unwrap();
    insta::assert_snapshot!(said("roberta", 49));
    model("modernbert").forward(&ids, None, &[60]).unwrap();
}
