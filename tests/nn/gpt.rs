//! GPT-2 on plain Candle autograd: a comparison with recorded runs of DeepSpeed on PyTorch, and tests of the model's
//! own guarantees.

use crate::support::processes::repository;
use crate::support::synth;
use candle_core::{CpuStorage, CustomOp1, DType, Device, Layout, Result, Shape, Tensor, Var};
use candle_nn::{Init, VarBuilder, var_builder::SimpleBackend};
use candle_zero::models::{Gpt, GptConfig};
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

/// The parameters that a model requested: (name, shape, hint), in order.
pub type RequestedParameters = Arc<Mutex<Vec<(String, Vec<usize>, Init)>>>;

/// A backend with variables by name, which records the parameters that are requested.
struct Vars {
    vars: HashMap<String, Var>,
    requested: RequestedParameters,
}

impl SimpleBackend for Vars {
    fn get(&self, shape: Shape, name: &str, init: Init, _dtype: DType, _device: &Device) -> Result<Tensor> {
        self.requested.lock().unwrap().push((name.to_string(), shape.dims().to_vec(), init));
        let var = self.vars.get(name).unwrap_or_else(|| panic!("no parameter {name}"));
        assert_eq!(var.shape(), &shape, "{name}");
        Ok(var.as_tensor().clone())
    }

    fn get_unchecked(&self, name: &str, _dtype: DType, _device: &Device) -> Result<Tensor> {
        Ok(self.vars[name].as_tensor().clone())
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.vars.contains_key(name)
    }
}

/// Returns a model with the recorded runs' initial weights, its variables in file order, and the parameters that it
/// requested.
pub fn model(config: &GptConfig, dtype: DType) -> (Gpt, Vec<(String, Var)>, RequestedParameters) {
    let GptConfig { n_layer, n_embd, ctx, vocab, .. } = *config;
    let vars: Vec<(String, Var)> = synth::weights(synth::Sizes { n_layer, n_embd, ctx, vocab })
        .into_iter()
        .map(|(name, shape, values)| {
            let value = Tensor::from_vec(values, shape, &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
            (name, Var::from_tensor(&value).unwrap())
        })
        .collect();
    let requested = RequestedParameters::default();
    let backend = Vars { vars: vars.iter().cloned().collect(), requested: requested.clone() };
    let vb = VarBuilder::from_backend(Box::new(backend), dtype, Device::Cpu);
    (Gpt::new(config, vb).unwrap(), vars, requested)
}

fn batch(first: usize, samples: usize, ctx: usize) -> (Tensor, Tensor) {
    let (inputs, targets) = synth::samples(&synth::tokens(), ctx, first, samples);
    let tensor = |ids| Tensor::from_vec(ids, (samples, ctx), &Device::Cpu).unwrap();
    (tensor(inputs), tensor(targets))
}

/// Returns every parameter's gradient for the loss of the first `samples` samples, in file order.
fn gradients(config: &GptConfig, samples: usize) -> Vec<Vec<f32>> {
    let (gpt, vars, _) = model(config, DType::F32);
    let (inputs, targets) = batch(0, samples, config.ctx);
    let grads = gpt.loss(&inputs, &targets).unwrap().backward().unwrap();
    let of = |name: &str, var: &Tensor| grads.get(var).unwrap_or_else(|| panic!("{name} has no gradient"));
    vars.iter()
        .map(|(name, var): &(String, Var)| of(name, var.as_tensor()).flatten_all().unwrap().to_vec1().unwrap())
        .collect()
}

/// Returns the loss and the global gradient norm of the first `samples` samples.
fn first_step(dtype: DType, samples: usize) -> (f64, f64) {
    let (gpt, vars, _) = model(&GptConfig::preset("nano").unwrap(), dtype);
    let (inputs, targets) = batch(0, samples, 128);
    let loss = gpt.loss(&inputs, &targets).unwrap();
    assert_eq!((loss.dtype(), loss.rank()), (DType::F32, 0));
    let grads = loss.backward().unwrap();
    let squares: f64 = vars
        .iter()
        .map(|(name, var)| {
            let grad = grads.get(var).unwrap_or_else(|| panic!("{name} has no gradient"));
            assert_eq!(grad.dtype(), dtype);
            let grad = grad.to_dtype(DType::F64).unwrap();
            grad.sqr().unwrap().sum_all().unwrap().to_scalar::<f64>().unwrap()
        })
        .sum();
    (f64::from(loss.to_scalar::<f32>().unwrap()), squares.sqrt())
}

fn relative(got: f64, want: f64) -> f64 {
    ((got - want) / want).abs()
}

#[test]
fn the_generated_weights_and_tokens_are_those_of_the_recorded_runs() {
    let weights = synth::weights(synth::NANO);
    assert_eq!(weights[0].2[..3], [-0.011713417, 0.02644061, -0.0013461805]);
    assert_eq!(synth::tokens()[..12], [41, 130, 63, 76, 141, 210, 43, 232, 153, 14, 87, 196]);
}

#[test]
fn the_first_recorded_loss_and_gradient_norm_are_met_in_f32() {
    let text = std::fs::read_to_string(repository().join("tests/fixtures/trajectories/s0_f32_w1_g1.json")).unwrap();
    let run: serde_json::Value = serde_json::from_str(&text).unwrap();
    let (loss, norm) = first_step(DType::F32, run["micro"].as_u64().unwrap() as usize);
    let want = &run["rows"][0];
    assert!(relative(loss, want["loss"].as_f64().unwrap()) < 2e-5, "loss {loss}");
    assert!(relative(norm, want["grad_norm"].as_f64().unwrap()) < 2e-4, "norm {norm}");
}

#[test]
fn half_models_start_at_nearly_the_same_loss_and_norm() {
    let (loss, norm) = first_step(DType::F32, 2);
    for (dtype, loss_bound, norm_bound) in [(DType::BF16, 2e-3, 2e-2), (DType::F16, 3e-4, 5e-3)] {
        let (half_loss, half_norm) = first_step(dtype, 2);
        assert!(relative(half_loss, loss) < loss_bound, "{dtype:?} loss {half_loss} against {loss}");
        assert!(relative(half_norm, norm) < norm_bound, "{dtype:?} norm {half_norm} against {norm}");
    }
}

#[test]
fn parameters_are_asked_for_in_the_order_of_the_published_files_with_gpt2s_starts() {
    let config = GptConfig::preset("nano").unwrap();
    let (_, vars, requested) = model(&config, DType::F32);
    let requested = requested.lock().unwrap();
    let names: Vec<&String> = requested.iter().map(|(name, ..)| name).collect();
    assert_eq!(names, vars.iter().map(|(name, _)| name).collect::<Vec<_>>());
    assert_eq!(
        requested.iter().map(|(_, shape, _)| shape.iter().product::<usize>()).sum::<usize>(),
        config.num_parameters()
    );
    for (name, _, init) in requested.iter() {
        let residual = name.ends_with("c_proj.weight");
        match init {
            Init::Const(value) if name.ends_with("bias") => assert_eq!(*value, 0.0, "{name}"),
            Init::Const(value) => assert!(name.contains("ln_") && *value == 1.0, "{name}"),
            Init::Randn { mean, stdev } => {
                let want = if residual { 0.02 / 8f64.sqrt() } else { 0.02 };
                assert!(*mean == 0.0 && (stdev - want).abs() < 1e-15, "{name}: {stdev}");
            }
            other => panic!("{name}: {other:?}"),
        }
    }
}

#[test]
fn a_position_sees_no_later_token_and_no_other_sequence() {
    let (gpt, ..) = model(&GptConfig::preset("nano").unwrap(), DType::F32);
    let (inputs, _) = batch(0, 2, 128);
    let logits = gpt.forward(&inputs).unwrap();
    assert_eq!(logits.dims(), [2, 128, 256]);
    let part = gpt.forward(&inputs.narrow(0, 1, 1).unwrap().narrow(1, 0, 70).unwrap()).unwrap();
    let want = logits.narrow(0, 1, 1).unwrap().narrow(1, 0, 70).unwrap();
    let rows = |t: &Tensor| t.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    assert!(rows(&part) == rows(&want), "the same bits, whatever else is in the batch");
}

#[test]
fn outside_an_engine_recomputing_blocks_lose_no_gradient_and_change_no_bit() {
    let nano = GptConfig::preset("nano").unwrap();
    let recomputed = GptConfig { checkpoint_activations: true, ..nano.clone() };
    assert!(gradients(&nano, 2) == gradients(&recomputed, 2));
}

#[test]
fn one_and_two_threads_give_the_same_bits() {
    let nano = GptConfig::preset("nano").unwrap();
    let with = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| gradients(&nano, 2))
    };
    assert!(with(1) == with(2));
}

/// An identity operation that records, in its backward pass, that the gradient of a parameter is complete.
struct GradientProbe {
    name: String,
    arrived: Arc<Mutex<Vec<String>>>,
}

impl CustomOp1 for GradientProbe {
    fn name(&self) -> &'static str {
        "gradient-probe"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok((storage.clone(), layout.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        self.arrived.lock().unwrap().push(self.name.clone());
        Ok(Some(grad.clone()))
    }
}

#[test]
fn gradients_arrive_once_and_layer_by_layer_from_the_last() {
    let config = GptConfig::preset("nano").unwrap();
    let arrived = Arc::new(Mutex::new(Vec::new()));
    let tensors = synth::weights(synth::NANO).into_iter().map(|(name, shape, values)| {
        let var = Var::from_vec(values, shape, &Device::Cpu).unwrap();
        let tensor = var.apply_op1(GradientProbe { name: name.clone(), arrived: arrived.clone() }).unwrap();
        (name, tensor)
    });
    let gpt = Gpt::new(&config, VarBuilder::from_tensors(tensors.collect(), DType::F32, &Device::Cpu)).unwrap();
    let (inputs, targets) = batch(0, 1, 128);
    gpt.loss(&inputs, &targets).unwrap().backward().unwrap();
    // Gradients arrive in the order of the backward pass: blocks from last to first, and likewise the layers of a
    // block; in a layer, the bias comes before the weight.
    let mut want: Vec<String> = vec!["ln_f.bias".into(), "ln_f.weight".into()];
    for i in (0..4).rev() {
        for layer in ["mlp.c_proj", "mlp.c_fc", "ln_2", "attn.c_proj", "attn.c_attn", "ln_1"] {
            want.extend(["bias", "weight"].map(|part| format!("h.{i}.{layer}.{part}")));
        }
    }
    want.extend(["wpe.weight", "wte.weight"].map(String::from));
    assert_eq!(*arrived.lock().unwrap(), want);
}

#[test]
fn generation_continues_greedily_and_by_seed() {
    let mut config = GptConfig::preset("nano").unwrap();
    config.ctx = 9;
    let (gpt, ..) = model(&config, DType::F32);
    let prompt = [41, 130, 63];
    let greedy = gpt.generate(&prompt, 12, 0.0, 0).unwrap();
    assert_eq!(greedy.len(), 12);
    let mut text = prompt.to_vec();
    for token in &greedy {
        let seen = &text[text.len().saturating_sub(9)..];
        let logits = gpt.forward(&Tensor::new(seen, &Device::Cpu).unwrap().unsqueeze(0).unwrap()).unwrap();
        let last: Vec<f32> = logits.get(0).unwrap().get(seen.len() - 1).unwrap().to_vec1().unwrap();
        assert_eq!(last, gpt.last_logits(&text).unwrap());
        let best = (0..256).fold(0, |best, i| if last[i] > last[best] { i } else { best });
        assert_eq!(*token as usize, best);
        text.push(*token);
    }
    assert_eq!(gpt.generate(&prompt, 8, 1.0, 5).unwrap(), gpt.generate(&prompt, 8, 1.0, 5).unwrap());
    assert_ne!(gpt.generate(&prompt, 8, 1.0, 5).unwrap(), gpt.generate(&prompt, 8, 1.0, 6).unwrap());
    assert!(gpt.generate(&[], 1, 0.0, 0).is_err());
}

#[test]
fn wrong_inputs_are_refused_by_name() {
    let (gpt, ..) = model(&GptConfig::preset("nano").unwrap(), DType::F32);
    let ids = |row: &[u32]| Tensor::new(row, &Device::Cpu).unwrap().unsqueeze(0).unwrap();
    let text = |r: Result<Tensor>| r.unwrap_err().to_string();
    insta::assert_snapshot!(text(gpt.forward(&ids(&[1, 256]))), @"token id 256 at position 1 (counted over the flattened ids) is outside the embedding's table of 256 rows; ids must be below 256: the tokenizer and the model's vocabulary must agree");
    insta::assert_snapshot!(text(gpt.forward(&ids(&[0; 129]))), @"129 tokens exceed the model's context of 128; shorten the input, or build the model with ctx >= 129");
    insta::assert_snapshot!(text(gpt.loss(&ids(&[1, 2]), &ids(&[3, 999]))), @"target 999 at position 1 (counted over the flattened targets) is outside the logits' 256 classes; targets must be below 256");
    let config = GptConfig { n_head: 5, ..GptConfig::preset("nano").unwrap() };
    let built = Gpt::new(&config, VarBuilder::zeros(DType::F32, &Device::Cpu));
    insta::assert_snapshot!(built.unwrap_err().to_string(), @"model configuration: n_embd is 128, but must be a multiple of n_head (5), so that every head has the same width");
}
