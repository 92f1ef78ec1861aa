//! Inference in a pipeline: the outputs and the tokens are those of one rank.

use super::models::{batch, builder, config, gpt2, llama};
use super::same_bits::{self, Batch, Model};
use candle_core::{DType, Device, Tensor};
use candle_nn::Module;
use candle_zero::comm::{Communicator, SoloCommunicator, threads};
use candle_zero::engine::PipelineEngine;
use candle_zero::models::{Decoder, DecoderBatch, DecoderConfig, decoder_pipeline};
use candle_zero::nn::Linear;
use candle_zero::pipeline::PipelineModule;
use candle_zero::{Engine, Result};
use serde_json::{Value, json};
use std::sync::Arc;

const MICRO_BATCHES: usize = 4;
const CTX: usize = 12;

fn values(tensor: &Tensor) -> (Vec<usize>, Vec<f32>) {
    let values = tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap();
    (tensor.dims().to_vec(), values)
}

/// Returns the `pipeline` sections of the configurations under test, each with the number of ranks.
fn pipelines() -> [(usize, Value); 5] {
    [
        (1, json!({})),
        (2, json!({})),
        (4, json!({})),
        (2, json!({"schedule": "interleaved", "chunks": 2})),
        (2, json!({"schedule": "zbv", "chunks": 2})),
    ]
}

/// Trains a decoder for a step on one rank, and calls `run` with the engine.
fn on_one_rank<T>(model: &DecoderConfig, run: impl FnOnce(&mut Engine<Decoder>) -> Result<T>) -> T {
    let builder = builder(Arc::new(SoloCommunicator::default()), |builder| builder);
    let mut engine = builder.initialize(|vb| Decoder::new(model, vb), config(MICRO_BATCHES)).unwrap();
    for micro_batch in 0..MICRO_BATCHES {
        let DecoderBatch { ids, targets, .. } = batch(0, micro_batch);
        let loss = engine.forward(|model| model.loss(&ids, &targets)).unwrap();
        engine.backward(&loss).unwrap();
        engine.step().unwrap();
    }
    run(&mut engine).unwrap()
}

/// Trains a decoder for a step on the ranks of a pipeline, and calls `run` with the engine of each rank.
fn in_pipeline<T: Send>(
    model: &DecoderConfig,
    (ranks, section): &(usize, Value),
    run: impl Fn(&mut PipelineEngine<DecoderBatch>) -> Result<T> + Sync,
) -> Vec<T> {
    let mut config = config(MICRO_BATCHES);
    config["pipeline"] = section.clone();
    let on_rank = |comm: Arc<dyn Communicator>| {
        let mut engine =
            builder(comm, |builder| builder).initialize_pipeline(decoder_pipeline(model)?, config.clone())?;
        engine.train_batch(|micro_batch| Ok(batch(0, micro_batch)))?;
        run(&mut engine)
    };
    threads::run(*ranks, on_rank).unwrap().into_iter().map(Result::unwrap).collect()
}

#[test]
fn every_rank_gets_the_logits_of_one_rank_and_training_goes_on_with_the_same_bits() {
    // Dropout is off in inference.
    for model in [llama(false), gpt2(0.0), gpt2(0.5)] {
        let has_dropout = model.dropout > 0.0;
        let logits = |engine: &mut Engine<Decoder>| {
            (0..3)
                .map(|at| Ok(values(&engine.eval(|model| model.forward(&batch(7, at).ids))?)))
                .collect::<Result<Vec<_>>>()
        };
        let expected = on_one_rank(&model, logits);
        for shape in pipelines() {
            let found = in_pipeline(&model, &shape, |engine| {
                let next = |at| Ok(DecoderBatch::for_inference(batch(7, at).ids));
                let outputs = engine.infer_batch(3, next)?;
                let on_last = engine.infer_batch_on_last_stage(3, next)?;
                let is_last =
                    engine.parameter_names().iter().any(|name| name.contains("ln_f") || name == "model.norm.weight");
                assert_eq!(on_last.is_some(), is_last);
                let outputs: Vec<_> = outputs.iter().map(values).collect();
                assert!(on_last.is_none_or(|on_last| on_last.iter().map(values).collect::<Vec<_>>() == outputs));
                Ok((outputs, engine.train_batch(|micro_batch| Ok(batch(1, micro_batch)))?))
            });
            // A pipeline draws the random numbers of dropout as one rank does.
            let next_loss = in_pipeline(&model, &(1, json!({})), |engine| {
                engine.train_batch(|micro_batch| Ok(batch(1, micro_batch)))
            });
            for (outputs, loss) in found {
                assert!(outputs == expected, "{shape:?}, dropout: {has_dropout}");
                assert_eq!(loss, next_loss[0], "{shape:?}");
            }
        }
    }
}

#[test]
fn a_pipeline_generates_the_tokens_of_one_rank() {
    let prompts: [&[u32]; 3] = [&[3], &[1, 5, 9, 2, 30], &[4; CTX]];
    // The longest of these texts outgrow the context.
    let settings = [(6, 0.0, 0), (6, 1.0, 11), (6, 0.7, 12), (CTX + 5, 1.3, 13), (0, 1.0, 1)];
    for model in [llama(false), llama(true), gpt2(0.0)] {
        let expected = on_one_rank(&model, |engine| {
            let mut all = Vec::new();
            for (prompt, (n, temperature, seed)) in prompts.iter().flat_map(|p| settings.map(|setting| (p, setting))) {
                let mut tokens = Vec::new();
                engine.eval(|model| {
                    tokens = model.generate(prompt, n, temperature, seed)?;
                    Tensor::zeros(1, DType::F32, &Device::Cpu)
                })?;
                all.push(tokens);
            }
            Ok(all)
        });
        assert!(expected.iter().flatten().collect::<std::collections::BTreeSet<_>>().len() > 5, "the texts vary");
        for shape in pipelines() {
            let found = in_pipeline(&model, &shape, |engine| {
                let all = prompts.iter().flat_map(|p| settings.map(|setting| (p, setting)));
                all.map(|(prompt, (n, temperature, seed))| engine.generate(prompt, n, temperature, seed))
                    .collect::<Result<Vec<_>>>()
            });
            assert!(found.iter().all(|tokens| *tokens == expected), "{shape:?}");
        }
    }
}

#[test]
fn each_of_several_pipelines_continues_its_own_text() {
    let model = llama(false);
    let prompts: [&[u32]; 2] = [&[7, 8], &[1, 2, 3]];
    let expected = prompts
        .map(|prompt| in_pipeline(&model, &(1, json!({})), |engine| engine.generate(prompt, 4, 0.0, 0)).remove(0));
    let found = in_pipeline(&model, &(4, json!({"stages": 2})), |engine| {
        // Both pipelines have trained on the same data.
        let pipeline = engine.data_position().0;
        Ok((pipeline, engine.generate(prompts[pipeline], 4, 0.0, 0)?))
    });
    for (pipeline, tokens) in found {
        assert_eq!(tokens, expected[pipeline]);
    }
}

#[test]
fn a_text_that_cannot_be_continued_is_refused_in_words_and_the_ranks_remain_in_step() {
    let model = llama(false);
    let errors = in_pipeline(&model, &(2, json!({})), |engine| {
        let position = engine.position().0 as u32;
        let errors = [engine.generate(&[], 4, 0.0, 0), engine.generate(&[position], 4, 0.0, 0)];
        assert_eq!(engine.generate(&[1], 2, 0.0, 0)?.len(), 2);
        Ok(errors.map(|result| result.unwrap_err().to_string()))
    });
    assert_eq!(errors[0][1], errors[1][1]);
    assert!(
        errors[0][0].starts_with("the model continues a text of at least one token, but none was given"),
        "{errors:?}"
    );
    insta::assert_snapshot!(errors[0][1], @"cannot run inference in a pipeline: the ranks at positions 0 and 1 continue different prompts, or differ in the number of tokens, the temperature or the seed; pass the same arguments on all ranks of a pipeline");
    let run = |comm: Arc<dyn Communicator>| {
        let module = PipelineModule::new(|batch: &DecoderBatch| batch.ids.to_dtype(DType::F32), |y, _| y.mean_all());
        let module = module.layer("fc", |vb| Linear::new(CTX, CTX, vb));
        builder(comm, |builder| builder).initialize_pipeline(module, config(1))?.generate(&[1], 1, 0.0, 0)
    };
    let error = threads::run(1, run).unwrap().remove(0).unwrap_err();
    insta::assert_snapshot!(error, @"cannot run inference in a pipeline: the model's context length is unknown; build the layers with models::decoder_pipeline");
}

/// A layer that returns the index of the largest element of each row.
struct Largest;

impl Module for Largest {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        x.argmax(1)
    }
}

#[test]
fn outputs_of_any_dtype_stay_on_the_last_stage_and_others_are_sent_to_all_ranks() {
    let classes = || same_bits::module().layer("largest", |_| Ok(Largest));
    for ranks in [1, 3] {
        let run = |comm: Arc<dyn Communicator>| {
            let config = same_bits::config(3, 0);
            let next = |at| Ok(same_bits::batch(0, at, 0));
            let mut engine: PipelineEngine<Batch> =
                builder(comm.clone(), |builder| builder).initialize_pipeline(classes(), config.clone())?;
            let outputs = engine.infer_batch_on_last_stage(2, next)?;
            let outputs = outputs.map(|all| all.iter().map(|y| y.to_vec1::<u32>().unwrap()).collect::<Vec<_>>());
            Ok((outputs, engine.infer_batch(1, next).unwrap_err().to_string()))
        };
        let mut found: Vec<_> = threads::run(ranks, run).unwrap().into_iter().map(Result::unwrap).collect();
        let (outputs, error) = found.pop().unwrap();
        insta::allow_duplicates! {
            insta::assert_snapshot!(error, @"cannot run inference in a pipeline: the output of the last layer has the dtype U32, but only f32, bf16 and f16 are supported; use infer_batch_on_last_stage, which sends it to no other rank");
        }
        assert!(found.iter().all(|(outputs, error)| outputs.is_none() && error.contains("stopped")), "{found:?}");
        let engine = builder(Arc::new(SoloCommunicator::default()), |builder| builder);
        let mut engine = engine.initialize(Model::new, same_bits::config(3, 0)).unwrap();
        let expected = (0..2).map(|at| {
            let y = engine.eval(|model| model.output(&same_bits::batch(0, at, 0).0)).unwrap();
            y.argmax(1).unwrap().to_vec1::<u32>().unwrap()
        });
        assert_eq!(outputs, Some(expected.collect()));
    }
}
