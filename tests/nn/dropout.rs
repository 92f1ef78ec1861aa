//! Dropout: which elements it drops, whether its backward pass drops the same ones, and when it draws again.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{Linear, Module, VarBuilder, linear};
use candle_zero::Engine;
use candle_zero::comm::threads;
use candle_zero::models::{Gpt, GptConfig};
use candle_zero::nn::{self, Dropout};
use serde_json::{Value, json};

const WORLD: usize = 2;

fn bits(t: &Tensor) -> Vec<f32> {
    t.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

fn ones(shape: &[usize]) -> Tensor {
    Tensor::ones(shape, DType::F32, &Device::Cpu).unwrap()
}

#[test]
fn the_share_of_p_is_dropped_and_the_mean_stays() {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        for p in [0.1f32, 0.5, 0.75] {
            let y = bits(&nn::dropout(&ones(&[300, 1000]).to_dtype(dtype).unwrap(), p, 7, 3).unwrap());
            let dropped = y.iter().filter(|y| **y == 0.0).count() as f64 / y.len() as f64;
            let mean = y.iter().map(|y| f64::from(*y)).sum::<f64>() / y.len() as f64;
            let p = f64::from(p);
            // The tolerance is four standard deviations of the dropped share. In addition, the kept value is rounded to
            // the dtype.
            let spread = 4.0 * (p * (1.0 - p) / y.len() as f64).sqrt();
            assert!((dropped - p).abs() < spread, "{dtype:?} {p}: {dropped}");
            assert!((mean - 1.0).abs() < spread / (1.0 - p) + 4e-3, "{dtype:?} {p}: {mean}");
        }
    }
}

#[test]
fn the_gradient_is_dropped_and_scaled_as_the_result() {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let x = Var::from_tensor(&ones(&[37, 53]).to_dtype(dtype).unwrap()).unwrap();
        let y = nn::dropout(&x, 0.3, 11, 5).unwrap();
        let grads = y.sum_all().unwrap().backward().unwrap();
        assert_eq!(bits(grads.get(&x).unwrap()), bits(&y));
    }
}

#[test]
fn no_probability_drops_nothing_and_one_outside_of_its_range_is_refused() {
    let x = ones(&[4]);
    assert_eq!(bits(&nn::dropout(&x, 0.0, 1, 1).unwrap()), [1.0; 4]);
    for p in [-0.1, 1.0, 1.5, f32::NAN] {
        let text = nn::dropout(&x, p, 1, 1).unwrap_err().to_string();
        let text = text.lines().next().unwrap();
        assert_eq!(text, format!("dropout: the probability is {p}; it must be at least 0 and below 1"));
        Dropout::new(p, 1).forward(&x).unwrap_err();
        let config = GptConfig { dropout: p, ..GptConfig::preset("nano").unwrap() };
        assert!(Gpt::new(&config, VarBuilder::zeros(DType::F32, &Device::Cpu)).is_err());
    }
}

fn config(stage: u8) -> Value {
    json!({
        "train_batch_size": 4 * WORLD,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0},
    })
}

fn gpt(dropout: f32, checkpoint_activations: bool) -> GptConfig {
    let (n_layer, n_head, n_embd, ctx) = (3, 2, 32, 16);
    GptConfig { n_layer, n_head, n_embd, ctx, dropout, checkpoint_activations, ..GptConfig::preset("nano").unwrap() }
}

fn ids(rank: usize, shift: u32) -> Tensor {
    let ids = (0..32).map(|i| (i * i + 7 * rank as u32 + shift) % 256);
    Tensor::from_iter(ids, &Device::Cpu).unwrap().reshape((2, 16)).unwrap()
}

/// Returns every rank's losses in ten micro steps, and the logits of its evaluations halfway and at the end.
fn train(stage: u8, gpt: &GptConfig) -> Vec<(Vec<f32>, Vec<f32>)> {
    let results = threads::run(WORLD, |comm| {
        let rank = comm.rank();
        let mut engine = Engine::builder().communicator(comm).initialize(|vb| Gpt::new(gpt, vb), config(stage))?;
        let (mut losses, mut logits) = (vec![], vec![]);
        for step in 0..10 {
            let loss = engine.forward(|gpt| gpt.loss(&ids(rank, 0), &ids(rank, 1)))?;
            losses.extend(bits(&loss));
            engine.backward(&loss)?;
            engine.step()?;
            if step % 5 == 4 {
                let evaluated = engine.eval(|gpt| gpt.forward(&ids(0, 0)))?;
                assert_eq!(bits(&evaluated), bits(&engine.eval(|gpt| gpt.forward(&ids(0, 0)))?));
                logits.extend(bits(&evaluated));
            }
        }
        Ok((losses, logits))
    });
    results.unwrap().into_iter().map(|r| r.unwrap()).collect()
}

#[test]
fn stages_reruns_and_recomputing_blocks_give_the_same_bits() {
    let reference = train(0, &gpt(0.2, false));
    assert!(reference[0].0.iter().chain(&reference[1].0).all(|loss| loss.is_finite()));
    assert!(reference[0].0[9] < reference[0].0[0], "{:?}", reference[0].0);
    assert!(reference == train(0, &gpt(0.2, false)), "a second run");
    for stage in [0, 2, 3] {
        assert!(reference == train(stage, &gpt(0.2, false)), "stage {stage}");
        assert!(reference == train(stage, &gpt(0.2, true)), "recomputing at stage {stage}");
    }
    // The comparison detects different runs.
    assert!(reference != train(0, &gpt(0.1, false)));
}

#[test]
fn evaluation_drops_nothing() {
    let logits = |dropout| {
        let mut engine = Engine::initialize(|vb| Gpt::new(&gpt(dropout, false), vb), config(0)).unwrap();
        bits(&engine.eval(|gpt| gpt.forward(&ids(0, 0))).unwrap())
    };
    assert!(logits(0.5) == logits(0.0));
    // Generation without an engine drops nothing, either, although training does.
    let model = |dropout| {
        let backend = candle_nn::VarMap::new();
        let gpt = Gpt::new(&gpt(dropout, false), VarBuilder::from_varmap(&backend, DType::F32, &Device::Cpu)).unwrap();
        // Every weight is the same function of its position, so both models are equal.
        for (name, var) in backend.data().lock().unwrap().iter() {
            let value = |i: usize| ((i + name.len()) % 13) as f32 / 100.0;
            let values = Tensor::from_iter((0..var.elem_count()).map(value), &Device::Cpu).unwrap();
            var.set(&values.reshape(var.shape()).unwrap()).unwrap();
        }
        gpt
    };
    let (dropping, plain) = (model(0.5), model(0.0));
    assert!(dropping.last_logits(&[1, 2, 3]).unwrap() == plain.last_logits(&[1, 2, 3]).unwrap());
    let training = |gpt: &Gpt| bits(&gpt.forward(&ids(0, 0)).unwrap());
    assert!(training(&plain) == training(&plain));
    assert!(training(&dropping) != training(&dropping), "each use draws again");
}

/// Two layers of dropout, and a linear layer, because an engine needs at least one parameter.
struct Masks {
    first: Dropout,
    second: Dropout,
    weight: Linear,
}

impl Masks {
    fn new(vb: VarBuilder<'_>) -> Result<Self> {
        Ok(Self { first: Dropout::new(0.5, 9), second: Dropout::new(0.5, 9), weight: linear(64, 1, vb)? })
    }

    /// Returns the results of the two layers for an input of ones, and a loss.
    fn run(&self) -> Result<[Tensor; 3]> {
        let (first, second) = (self.first.forward(&ones(&[1, 64]))?, self.second.forward(&ones(&[1, 64]))?);
        let loss = self.weight.forward(&(&first + &second)?)?.sqr()?.mean_all()?;
        Ok([first, second, loss])
    }
}

#[test]
fn every_layer_micro_step_and_rank_draws_its_own_mask_and_a_rerun_the_same() {
    let run = || {
        let results = threads::run(WORLD, |comm| {
            let mut engine = Engine::builder().communicator(comm).initialize(Masks::new, config(1))?;
            let mut masks = vec![];
            for _ in 0..4 {
                let mut drawn = None;
                let loss = engine.forward(|model| {
                    let [first, second, loss] = model.run()?;
                    drawn = Some([bits(&first), bits(&second)]);
                    Ok(loss)
                })?;
                masks.extend(drawn.into_iter().flatten());
                engine.backward(&loss)?;
                engine.step()?;
            }
            Ok(masks)
        });
        results.unwrap().into_iter().flat_map(|r| r.unwrap()).collect::<Vec<_>>()
    };
    let masks = run();
    assert_eq!(masks.len(), WORLD * 4 * 2);
    for (i, mask) in masks.iter().enumerate() {
        assert!(mask.iter().all(|x| *x == 0.0 || *x == 2.0));
        // Each mask consists of 64 fair draws, so two masks do not agree by chance.
        assert!(masks[..i].iter().all(|other| other != mask), "mask {i} was drawn twice");
    }
    assert!(masks == run());
}
