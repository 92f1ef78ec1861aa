//! Logits and losses of all models in tests/fixtures/finetune match transformers, with config.json as transformers 4
//! and 5 write it.

use crate::fixtures::{MODELS, base, copy, ids, json, max_difference, path, tensors};
use candle_core::{DType, Device};
use candle_zero::models::{Decoder, DecoderConfig};
use candle_zero_finetune::BaseModel;

/// The absolute tolerances, from the README next to the records.
const LOGITS: f32 = 1e-4;
const LOSS: f64 = 2e-5;

fn check(base: &BaseModel, name: &str) {
    let model = Decoder::new(base.config(), base.var_builder(DType::F32, &Device::Cpu)).unwrap();
    let (record, recorded) = (json(format!("logits/{name}.json")), tensors(format!("logits/{name}.safetensors")));
    let ids = ids(&record["input_ids"]);
    let difference = max_difference(&model.forward(&ids).unwrap(), &recorded["logits"]);
    assert!(difference <= LOGITS, "{name}: logits differ by {difference}");
    let time = ids.dim(1).unwrap();
    let (inputs, targets) = (ids.narrow(1, 0, time - 1).unwrap(), ids.narrow(1, 1, time - 1).unwrap());
    let loss = |rows: std::ops::Range<usize>| {
        let of = |ids: &candle_core::Tensor| ids.narrow(0, rows.start, rows.len()).unwrap().contiguous().unwrap();
        f64::from(model.loss(&of(&inputs), &of(&targets)).unwrap().to_scalar::<f32>().unwrap())
    };
    let mut worst = (loss(0..2) - record["mean_next_token_loss"].as_f64().unwrap()).abs();
    for row in 0..2 {
        worst = worst.max((loss(row..row + 1) - record["loss_per_sequence"][row].as_f64().unwrap()).abs());
    }
    assert!(worst <= LOSS, "{name}: losses differ by {worst}");
    println!("{name}: logits {difference:.1e}, losses {worst:.1e}");
}

#[test]
fn logits_and_losses_are_those_of_transformers() {
    MODELS.iter().for_each(|name| check(&base(name), name));
}

#[test]
fn a_config_json_of_transformers_4_describes_the_same_model() {
    for name in MODELS {
        let of = |file: &str| DecoderConfig::read(path("models").join(name).join(file)).unwrap();
        assert_eq!(of("config.json"), of("config.v4.json"), "{name}");
        let folder = copy(name);
        std::fs::rename(folder.path().join("config.v4.json"), folder.path().join("config.json")).unwrap();
        check(&BaseModel::open(folder.path()).unwrap(), name);
    }
}

#[test]
fn a_model_has_the_parameters_of_its_file_and_counts_them() {
    for name in MODELS {
        let base = base(name);
        let parameters = base.config().parameters().unwrap();
        let elements: usize = parameters.iter().map(|(_, shape)| shape.iter().product::<usize>()).sum();
        assert_eq!(base.config().num_parameters(), elements, "{name}");
        assert_eq!(json(format!("logits/{name}.json"))["parameters"], elements, "{name}");
    }
}
