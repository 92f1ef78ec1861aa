//! Llama: comparisons with two references, Candle's own ops and the model of candle-transformers, and the parameters
//! that candle-zero's Llama requests.

use candle_core::{DType, Device, Result, Shape, Tensor, Var};
use candle_nn::{Init, VarBuilder, var_builder::SimpleBackend};
use candle_transformers::models::llama as reference;
use candle_zero::models::{Llama, LlamaConfig};
use candle_zero::nn::{WeightLayout, composed};
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

pub type Vars = Vec<(String, Var)>;

/// The parameters that a model requested: (name, shape, hint), in order.
pub type RequestedParameters = Arc<Mutex<Vec<(String, Shape, Init)>>>;

/// A backend that creates a variable for every parameter, and records what is requested.
struct Backend {
    requested: RequestedParameters,
    vars: Arc<Mutex<Vars>>,
    dtype: DType,
}

impl SimpleBackend for Backend {
    fn get(&self, shape: Shape, name: &str, init: Init, _dtype: DType, _device: &Device) -> Result<Tensor> {
        let mut requested = self.requested.lock().unwrap();
        // The norms' weights differ from 1, so that they matter; all weights are large enough to make softmax uneven.
        let (base, scale) = if name.contains("norm") { (1.0, 0.2) } else { (0.0, 0.1) };
        let number =
            |i: usize| ((i + 1).wrapping_mul(2_654_435_761).wrapping_add(requested.len() * 97) % 65_537) as f32;
        let values = (0..shape.elem_count()).map(|i| base + scale * (number(i) / 32_768.0 - 1.0));
        let tensor = Tensor::from_iter(values, &Device::Cpu)?.reshape(&shape)?.to_dtype(self.dtype)?;
        let var = Var::from_tensor(&tensor)?;
        requested.push((name.to_string(), shape, init));
        self.vars.lock().unwrap().push((name.to_string(), var.clone()));
        Ok(var.as_tensor().clone())
    }

    fn get_unchecked(&self, name: &str, _dtype: DType, _device: &Device) -> Result<Tensor> {
        panic!("{name} was requested without a shape")
    }

    fn contains_tensor(&self, _name: &str) -> bool {
        true
    }
}

pub fn model(config: &LlamaConfig, dtype: DType) -> (Llama, Vars, RequestedParameters) {
    let (requested, vars) = (RequestedParameters::default(), Arc::<Mutex<Vars>>::default());
    let backend = Backend { requested: requested.clone(), vars: vars.clone(), dtype };
    let llama = Llama::new(config, VarBuilder::from_backend(Box::new(backend), dtype, Device::Cpu)).unwrap();
    let vars = vars.lock().unwrap().clone();
    (llama, vars, requested)
}

/// Returns sizes with six query heads and two key heads; no dimension of a tensor is a power of two.
pub fn odd() -> LlamaConfig {
    LlamaConfig {
        hidden_size: 60,
        intermediate_size: 100,
        num_hidden_layers: 2,
        num_attention_heads: 6,
        ctx: 40,
        vocab: 77,
        ..LlamaConfig::preset("llama-nano").unwrap()
    }
}

fn ids(batch: usize, time: usize, vocab: u32, shift: u32) -> Tensor {
    let ids = (0..(batch * time) as u32).map(|i| (i * i + 3 * i + shift) % vocab);
    Tensor::from_iter(ids, &Device::Cpu).unwrap().reshape((batch, time)).unwrap()
}

fn numbers(t: &Tensor) -> Vec<f64> {
    t.flatten_all().unwrap().to_dtype(DType::F64).unwrap().to_vec1().unwrap()
}

/// Returns the largest difference, relative to the largest value in `want`.
fn relative_error(got: &Tensor, want: &Tensor) -> f64 {
    assert_eq!(got.dims(), want.dims());
    let (got, want) = (numbers(got), numbers(want));
    let largest = want.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
    assert!(largest > 0.0);
    got.iter().zip(&want).fold(0.0, |most: f64, (a, b)| most.max((a - b).abs())) / largest
}

/// Returns the logits of a Llama composed of Candle's ops, in the dtype of the weights.
fn composed_logits(config: &LlamaConfig, weights: &HashMap<String, Tensor>, ids: &Tensor) -> Result<Tensor> {
    let (heads, kv_heads) = (config.num_attention_heads, config.num_key_value_heads);
    let rotary = |x: &Tensor| composed::rotary(x, config.hidden_size / heads, config.rope_theta);
    let norm = |x: &Tensor, name: &str| composed::rms_norm(x, &weights[name], config.rms_norm_eps);
    let linear = |x: &Tensor, name: &str| composed::linear(x, &weights[name], None, WeightLayout::OutIn);
    let mut x = composed::embedding(ids, &weights["model.embed_tokens.weight"])?;
    for i in 0..config.num_hidden_layers {
        let name = |part: &str| format!("model.layers.{i}.{part}.weight");
        let h = norm(&x, &name("input_layernorm"))?;
        let [q, k, v] = ["q", "k", "v"].map(|part| linear(&h, &name(&format!("self_attn.{part}_proj"))));
        let h = composed::grouped_attention(&rotary(&q?)?, &rotary(&k?)?, &v?, heads, kv_heads)?;
        x = (x + linear(&h, &name("self_attn.o_proj"))?)?;
        let h = norm(&x, &name("post_attention_layernorm"))?;
        let h = composed::swiglu(&linear(&h, &name("mlp.gate_proj"))?, &linear(&h, &name("mlp.up_proj"))?)?;
        x = (x + linear(&h, &name("mlp.down_proj"))?)?;
    }
    let head = if config.tie_word_embeddings { "model.embed_tokens.weight" } else { "lm_head.weight" };
    linear(&norm(&x, "model.norm.weight")?, head)
}

/// Returns the differences of logits, loss and gradients from those of Candle's ops in f64 on the same weights.
fn from_composed(config: &LlamaConfig, dtype: DType) -> (f64, f64, f64) {
    let (llama, vars, _) = model(config, dtype);
    let wide: Vec<Var> =
        vars.iter().map(|(_, v)| Var::from_tensor(&v.to_dtype(DType::F64).unwrap()).unwrap()).collect();
    let weights = vars.iter().zip(&wide).map(|((name, _), var)| (name.clone(), var.as_tensor().clone())).collect();
    let (inputs, targets) = (ids(2, 33, config.vocab as u32, 5), ids(2, 33, config.vocab as u32, 8));
    let want = composed_logits(config, &weights, &inputs).unwrap();
    let logits = relative_error(&llama.forward(&inputs).unwrap(), &want);
    let want_loss = composed::cross_entropy(&want, &targets).unwrap();
    let loss = llama.loss(&inputs, &targets).unwrap();
    assert_eq!((loss.dtype(), loss.rank()), (DType::F32, 0));
    let (grads, want_grads) = (loss.backward().unwrap(), want_loss.backward().unwrap());
    let worst = vars.iter().zip(&wide).fold(0.0, |most: f64, ((name, var), wide)| {
        let grad = grads.get(var).unwrap_or_else(|| panic!("{name} has no gradient"));
        most.max(relative_error(grad, want_grads.get(wide).unwrap()))
    });
    (logits, relative_error(&loss, &want_loss), worst)
}

#[test]
fn logits_loss_and_gradients_are_those_of_candles_ops_in_f64() {
    let nano = LlamaConfig::preset("llama-nano").unwrap();
    for config in [nano, odd(), LlamaConfig { tie_word_embeddings: false, num_key_value_heads: 6, ..odd() }] {
        for (dtype, bound) in [(DType::F32, 2e-5), (DType::F16, 1e-2), (DType::BF16, 8e-2)] {
            let (logits, loss, grads) = from_composed(&config, dtype);
            println!("{dtype:?}: logits {logits:.1e} loss {loss:.1e} gradients {grads:.1e}");
            assert!(logits < bound && loss < bound && grads < bound, "{dtype:?} {logits} {loss} {grads} {config:?}");
        }
    }
}

#[test]
fn logits_are_those_of_candle_transformers_llama() {
    let nano = LlamaConfig::preset("llama-nano").unwrap();
    let theta = LlamaConfig { rope_theta: 5e5, tie_word_embeddings: false, ..odd() };
    for config in [nano, odd(), theta] {
        let (llama, vars, _) = model(&config, DType::F32);
        let sizes = reference::Config {
            hidden_size: config.hidden_size,
            intermediate_size: config.intermediate_size,
            vocab_size: config.vocab,
            num_hidden_layers: config.num_hidden_layers,
            num_attention_heads: config.num_attention_heads,
            num_key_value_heads: config.num_key_value_heads,
            rms_norm_eps: config.rms_norm_eps,
            rope_theta: config.rope_theta as f32,
            max_position_embeddings: config.ctx,
            tie_word_embeddings: config.tie_word_embeddings,
            ..reference::Config::config_7b_v2(false)
        };
        let tensors = vars.iter().map(|(name, var)| (name.clone(), var.as_tensor().clone())).collect();
        let vb = VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu);
        let theirs = reference::Llama::load(vb, &sizes).unwrap();
        let inputs = ids(2, 40, config.vocab as u32, 1);
        let ours = llama.forward(&inputs).unwrap();
        // The model of candle-transformers returns only the last position's logits.
        for time in [1, 2, 17, 40] {
            let mut cache = reference::Cache::new(false, DType::F32, &sizes, &Device::Cpu).unwrap();
            let want =
                theirs.forward(&inputs.narrow(1, 0, time).unwrap().contiguous().unwrap(), 0, &mut cache).unwrap();
            let got = ours.narrow(1, time - 1, 1).unwrap().squeeze(1).unwrap();
            assert!(relative_error(&got, &want) < 2e-5, "time {time}: {}", relative_error(&got, &want));
        }
    }
}

#[test]
fn parameters_have_the_names_of_the_published_files_and_start_as_documented() {
    for tied in [true, false] {
        let config = LlamaConfig { tie_word_embeddings: tied, ..LlamaConfig::preset("llama-nano").unwrap() };
        let (_, _, requested) = model(&config, DType::F32);
        let requested = requested.lock().unwrap();
        let names: Vec<&str> = requested.iter().map(|(name, ..)| name.as_str()).collect();
        let mut want = vec!["model.embed_tokens.weight".to_string()];
        for i in 0..4 {
            let parts = [
                "input_layernorm",
                "self_attn.q_proj",
                "self_attn.k_proj",
                "self_attn.v_proj",
                "self_attn.o_proj",
                "post_attention_layernorm",
                "mlp.gate_proj",
                "mlp.up_proj",
                "mlp.down_proj",
            ];
            want.extend(parts.map(|part| format!("model.layers.{i}.{part}.weight")));
        }
        want.push("model.norm.weight".into());
        want.extend((!tied).then(|| "lm_head.weight".into()));
        assert_eq!(names, want);
        assert_eq!(requested.iter().map(|(_, shape, _)| shape.elem_count()).sum::<usize>(), config.num_parameters());
        assert_eq!(requested[3].1.dims(), [64, 128]);
        for (name, _, init) in requested.iter() {
            let residual = name.contains("o_proj") || name.contains("down_proj");
            match init {
                Init::Const(value) => assert!(name.contains("norm") && *value == 1.0, "{name}"),
                Init::Randn { mean, stdev } => {
                    let want = if residual { 0.02 / 8f64.sqrt() } else { 0.02 };
                    assert!(*mean == 0.0 && (stdev - want).abs() < 1e-15, "{name}: {stdev}");
                }
                other => panic!("{name}: {other:?}"),
            }
        }
    }
}

#[test]
fn a_position_sees_no_later_token_and_no_other_sequence() {
    let (llama, ..) = model(&odd(), DType::F32);
    let inputs = ids(2, 40, 77, 0);
    let logits = llama.forward(&inputs).unwrap();
    assert_eq!(logits.dims(), [2, 40, 77]);
    let part = llama.forward(&inputs.narrow(0, 1, 1).unwrap().narrow(1, 0, 23).unwrap()).unwrap();
    assert!(numbers(&part) == numbers(&logits.narrow(0, 1, 1).unwrap().narrow(1, 0, 23).unwrap()), "the same bits");
}

#[test]
fn generation_continues_by_the_logits_of_the_last_tokens() {
    let (llama, ..) = model(&LlamaConfig { ctx: 9, ..odd() }, DType::F32);
    let greedy = llama.generate(&[41, 13, 63], 12, 0.0, 0).unwrap();
    let mut text = vec![41, 13, 63];
    for token in greedy {
        let seen = &text[text.len().saturating_sub(9)..];
        let logits = llama.forward(&Tensor::new(seen, &Device::Cpu).unwrap().unsqueeze(0).unwrap()).unwrap();
        let last: Vec<f32> = logits.get(0).unwrap().get(seen.len() - 1).unwrap().to_vec1().unwrap();
        assert_eq!(last, llama.last_logits(&text).unwrap());
        assert!(last.iter().all(|x| *x <= last[token as usize]));
        text.push(token);
    }
    assert_eq!(text.len(), 15);
}

#[test]
fn wrong_inputs_are_refused_by_name() {
    let (llama, ..) = model(&odd(), DType::F32);
    let text = |r: Result<Tensor>| r.unwrap_err().to_string();
    insta::assert_snapshot!(text(llama.forward(&ids(1, 41, 77, 0))), @"41 tokens exceed the model's context of 40; shorten the input, or build the model with ctx >= 41");
    insta::assert_snapshot!(text(llama.forward(&ids(1, 9, 1000, 80))), @"token id 80 at position 0 (counted over the flattened ids) is outside the embedding's table of 77 rows; ids must be below 77: the tokenizer and the model's vocabulary must agree");
    let built =
        Llama::new(&LlamaConfig { num_key_value_heads: 4, ..odd() }, VarBuilder::zeros(DType::F32, &Device::Cpu));
    insta::assert_snapshot!(built.unwrap_err().to_string(), @"model configuration: num_key_value_heads is 4, but must be a divisor of num_attention_heads (6), so that each key and value head serves the same number of query heads");
}
