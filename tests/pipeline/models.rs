//! Language models in a pipeline: untied and tied embeddings, adapters, quantized bases, dropout, recomputation.

use candle_core::{Device, Tensor};
use candle_nn::VarBuilder;
use candle_zero::comm::{Communicator, SoloCommunicator, threads};
use candle_zero::models::{
    Decoder, DecoderBatch, DecoderConfig, GptConfig, IntoDecoderConfig, LlamaConfig, decoder_pipeline,
};
use candle_zero::nn::LoraConfig;
use candle_zero::precision::{Nf4Scales, WeightPacking};
use candle_zero::{Engine, EngineBuilder};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;

const CTX: usize = 12;
const VOCAB: usize = 40;
const STEPS: usize = 10;

pub(super) fn llama(tied: bool) -> DecoderConfig {
    let sizes = LlamaConfig {
        hidden_size: 16,
        intermediate_size: 40,
        num_hidden_layers: 4,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        ctx: CTX,
        vocab: VOCAB,
        tie_word_embeddings: tied,
        ..LlamaConfig::preset("llama-nano").unwrap()
    };
    sizes.decoder().unwrap()
}

pub(super) fn gpt2(dropout: f32) -> DecoderConfig {
    let sizes = GptConfig {
        n_layer: 4,
        n_head: 2,
        n_embd: 16,
        ctx: CTX,
        vocab: VOCAB,
        dropout,
        ..GptConfig::preset("nano").unwrap()
    };
    sizes.decoder().unwrap()
}

pub(super) fn config(micro_batches: usize) -> Value {
    json!({
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": micro_batches, "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}, "zero_optimization": {"stage": 0},
    })
}

/// Returns a micro batch in which tokens repeat, so that the gradients of the embedding's rows are sums of several
/// terms.
pub(super) fn batch(step: usize, micro_batch: usize) -> DecoderBatch {
    let token = |i: usize| ((i * i + 3 * i + step * 5 + micro_batch * 11) % (VOCAB / 2)) as u32;
    let tokens = |from: usize| Tensor::from_iter((from..from + 2 * CTX).map(token), &Device::Cpu).unwrap();
    let shaped = |from| tokens(from).reshape((2, CTX)).unwrap();
    DecoderBatch::new(shaped(0), shaped(1))
}

/// The result of a run: the loss and the gradient norm of each step, and the final weights by name.
#[derive(Debug, Clone, PartialEq, Default)]
struct Outcome {
    steps: Vec<(f64, Option<f64>)>,
    weights: BTreeMap<String, Vec<f32>>,
}

fn weights<M>(engine: &mut Engine<M>, names: &[String]) -> BTreeMap<String, Vec<f32>> {
    let values = |engine: &mut Engine<M>, name: &str| {
        Some(engine.safe_get_full_fp32_param(name).ok()?.flatten_all().unwrap().to_vec1().unwrap())
    };
    names.iter().filter_map(|name| Some((name.clone(), values(engine, name)?))).collect()
}

/// Returns the names of a model's parameters.
fn names(config: &DecoderConfig) -> Vec<String> {
    let vars = candle_nn::VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, candle_core::DType::F32, &Device::Cpu);
    Decoder::new(config, vb).unwrap();
    vars.data().lock().unwrap().keys().cloned().collect()
}

pub(super) type Options = fn(EngineBuilder) -> EngineBuilder;

pub(super) fn builder(comm: Arc<dyn Communicator>, options: Options) -> EngineBuilder {
    options(Engine::builder().communicator(comm).device(Device::Cpu).seed(3).gradient_check(false))
}

fn plain(model: &DecoderConfig, micro_batches: usize, options: Options) -> Outcome {
    let builder = builder(Arc::new(SoloCommunicator::default()), options);
    let mut engine = builder.initialize(|vb| Decoder::new(model, vb), config(micro_batches)).unwrap();
    let mut outcome = Outcome::default();
    for step in 0..STEPS {
        let mut sum = 0.0;
        for micro_batch in 0..micro_batches {
            let DecoderBatch { ids, targets, .. } = batch(step, micro_batch);
            let loss = engine.forward(|model| model.loss(&ids, &targets)).unwrap();
            sum += f64::from(loss.to_scalar::<f32>().unwrap());
            engine.backward(&loss).unwrap();
            engine.step().unwrap();
        }
        outcome.steps.push((sum / micro_batches as f64, engine.global_grad_norm()));
    }
    outcome.weights = weights(&mut engine, &names(model));
    outcome
}

fn piped(
    model: &DecoderConfig,
    ranks: usize,
    (kind, chunks): (&str, usize),
    micro_batches: usize,
    options: Options,
) -> Outcome {
    let run = |comm: Arc<dyn Communicator>| {
        let mut config = config(micro_batches);
        config["pipeline"] = json!({"stages": ranks, "schedule": kind, "chunks": chunks});
        let mut engine = builder(comm, options).initialize_pipeline(decoder_pipeline(model)?, config)?;
        let mut outcome = Outcome::default();
        for step in 0..STEPS {
            let loss = engine.train_batch(|micro_batch| Ok(batch(step, micro_batch)))?;
            outcome.steps.push((loss, engine.global_grad_norm()));
        }
        for name in engine.parameter_names() {
            let values = engine.parameter(&name)?.unwrap().flatten_all()?.to_vec1()?;
            outcome.weights.insert(name, values);
        }
        Ok(outcome)
    };
    let outcomes: Vec<Outcome> = threads::run(ranks, run).unwrap().into_iter().map(|r| r.unwrap()).collect();
    let mut all = outcomes[0].clone();
    for outcome in outcomes {
        assert_eq!(outcome.steps, all.steps);
        for (name, values) in outcome.weights {
            // A tied weight is on two ranks.
            let existing = all.weights.entry(name.clone()).or_insert_with(|| values.clone());
            assert!(*existing == values, "{name} differs between ranks");
        }
    }
    all
}

const ONE: (&str, usize) = ("1f1b", 1);
const TWO: (&str, usize) = ("interleaved", 2);
const ZERO_BUBBLE: (&str, usize) = ("zero_bubble", 1);
const V_SHAPED: (&str, usize) = ("zbv", 2);

fn compare(model: &DecoderConfig, options: Options) {
    compare_with(model, 8, &[(2, ONE), (4, ONE), (2, TWO), (2, ZERO_BUBBLE), (4, ZERO_BUBBLE), (2, V_SHAPED)], options);
}

fn compare_with(model: &DecoderConfig, micro_batches: usize, schedules: &[(usize, (&str, usize))], options: Options) {
    let expected = plain(model, micro_batches, options);
    assert!(expected.steps[STEPS - 1].0 < expected.steps[0].0, "{:?}", expected.steps);
    for &(ranks, schedule) in schedules {
        let found = piped(model, ranks, schedule, micro_batches, options);
        assert_eq!(found.steps, expected.steps, "{ranks} ranks, {schedule:?}");
        for (name, values) in &expected.weights {
            assert!(found.weights.get(name) == Some(values), "{name} on {ranks} ranks, {schedule:?}");
        }
        assert_eq!(found.weights.len(), expected.weights.len());
    }
}

#[test]
fn llama_without_a_tied_embedding_has_the_bits_of_one_rank() {
    compare(&llama(false), |builder| builder);
}

#[test]
fn gpt2_with_its_tied_embedding_has_the_bits_of_one_rank() {
    compare(&gpt2(0.0), |builder| builder);
    compare(&llama(true), |builder| builder);
}

#[test]
fn a_tied_weight_waits_for_no_backward_that_the_same_rank_runs_later() {
    // There is one round of 3 micro batches, so the last stage has run all of its backward passes before the first
    // stage on the same rank runs one.
    compare_with(&gpt2(0.0), 3, &[(2, TWO), (2, ("zero_bubble", 2)), (2, V_SHAPED)], |builder| builder);
}

#[test]
fn dropout_draws_the_same_numbers_and_recomputation_changes_no_bit() {
    compare(&gpt2(0.2), |builder| builder);
    compare(&DecoderConfig { checkpoint_activations: true, ..llama(false) }, |builder| builder);
}

#[test]
fn adapters_on_frozen_and_on_quantized_bases_have_the_bits_of_one_rank() {
    let lora = Some(LoraConfig { r: 2, ..LoraConfig::default() });
    for tied in [false, true] {
        let model = DecoderConfig { lora: lora.clone(), ..llama(tied) };
        compare(&model, |builder| builder.trainable(|name, _| name.contains("lora_")));
        compare(&model, |builder| {
            let builder = builder.trainable(|name, _| name.contains("lora_"));
            let packs = |name: &str, shape: &[usize]| shape.len() == 2 && !name.contains("lora_");
            builder.quantized(WeightPacking::Nf4(Nf4Scales::DoubleQuantized), packs)
        });
    }
}

#[test]
fn evaluation_gives_the_mean_loss_of_the_same_weights_on_every_rank() {
    let model = gpt2(0.3);
    let expected = {
        let engine = builder(Arc::new(SoloCommunicator::default()), |builder| builder);
        let mut engine = engine.initialize(|vb| Decoder::new(&model, vb), config(1)).unwrap();
        let losses = (0..3).map(|micro_batch| {
            let DecoderBatch { ids, targets, .. } = batch(0, micro_batch);
            let loss = engine.eval(|model| model.loss(&ids, &targets)).unwrap();
            f64::from(loss.to_scalar::<f32>().unwrap())
        });
        losses.sum::<f64>() / 3.0
    };
    for (ranks, (kind, chunks)) in [(1, ONE), (3, ONE), (2, TWO)] {
        let results = threads::run(ranks, |comm| {
            let mut config = config(ranks);
            config["pipeline"] = json!({"schedule": kind, "chunks": chunks});
            let mut engine = builder(comm, |builder| builder).initialize_pipeline(decoder_pipeline(&model)?, config)?;
            let before = engine.eval_batch(3, |micro_batch| Ok(batch(0, micro_batch)))?;
            engine.train_batch(|micro_batch| Ok(batch(0, micro_batch)))?;
            let after = engine.eval_batch(3, |micro_batch| Ok(batch(0, micro_batch)))?;
            assert!(after < before);
            Ok(before)
        });
        for result in results.unwrap() {
            assert_eq!(result.unwrap(), expected, "{ranks} ranks, {kind}");
        }
    }
}
