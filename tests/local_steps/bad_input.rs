//! Configurations, models and calls that do not fit local steps lead to errors that name the remedy.

use super::{Model, config, engine, on_ranks, train};
use candle_core::Device;
use candle_nn::VarBuilder;
use candle_zero::Engine;
use candle_zero::comm::{Communicator, threads};
use candle_zero::config::Config;
use candle_zero::nn::Linear;
use candle_zero::pipeline::PipelineModule;
use serde_json::{Value, json};
use std::sync::Arc;

/// Runs `rank` on `ranks` ranks, and returns the first error.
fn error<T: Send>(ranks: usize, rank: impl Fn(Arc<dyn Communicator>) -> candle_zero::Result<T> + Sync) -> String {
    let results = threads::run(ranks, rank).unwrap();
    let error = results.into_iter().find_map(Result::err).expect("an error");
    error.to_string()
}

#[test]
fn numbers_that_do_not_fit_each_other_are_named_with_their_place() {
    let problems = |section: Value| {
        let config = json!({"train_batch_size": 4, "local_steps": section});
        Config::load(config, 2).unwrap_err().to_string()
    };
    insta::assert_snapshot!(problems(json!({"steps": 0})), @"the configuration given as a value: `local_steps.steps`: expected 1 or more, found 0");
    insta::assert_snapshot!(problems(json!({"steps": 4, "fragments": 5})), @"the configuration given as a value: `local_steps.fragments`: expected at most 4 (local_steps.steps), because each fragment is exchanged once in this many steps; found 5");
    insta::assert_snapshot!(problems(json!({"steps": 4, "fragment_delay": 4})), @"the configuration given as a value: `local_steps.fragment_delay`: expected less than 4 (local_steps.steps), because a fragment must take effect before it is sent again; found 4");
    insta::assert_snapshot!(problems(json!({"outer_momentum": 1.5, "wire_dtype": "int2"})), @r#"
    the configuration given as a value has 2 problems:
      `local_steps.outer_momentum`: expected 0 to 1, found 1.5
      `local_steps.wire_dtype`: expected one of "fp32", "bf16", "int8", "int4", found the string "int2"
    "#);
    insta::assert_snapshot!(problems(json!({"outer_lr": 0, "outer_momentum": 1, "fragment_alpha": 1})), @"
    the configuration given as a value has 3 problems:
      `local_steps.outer_lr`: expected more than 0, found 0: the training of the islands would have no effect
      `local_steps.outer_momentum`: expected less than 1, found 1: the weights would diverge
      `local_steps.fragment_alpha`: expected less than 1, found 1: no exchange would have an effect
    ");
    insta::assert_snapshot!(problems(json!({"step": 4})), @"the configuration given as a value: `local_steps.step`: not a key of `local_steps`; did you mean `local_steps.steps`?");
}

#[test]
fn ranks_that_cannot_be_divided_into_islands_are_named() {
    let run = |ranks, islands: usize, mut config: Value| {
        config["local_steps"]["islands"] = json!(islands);
        error(ranks, move |comm| engine(comm, config.clone()))
    };
    insta::assert_snapshot!(run(4, 3, config(&json!({}), 1, 3)), @"cannot take local steps: local_steps.islands is 3, but 4 ranks cannot be divided into that many islands of equal size; use a divisor of 4, or start a different number of ranks");
    let mut groups = config(&json!({}), 3, 2);
    groups["zero_optimization"]["mics_shard_size"] = json!(4);
    insta::assert_snapshot!(run(4, 2, groups), @"cannot take local steps: zero_optimization.mics_shard_size is 4, but an island has 2 ranks; use a divisor of that number");
}

#[test]
fn more_fragments_than_parameters_are_refused() {
    let section = json!({"steps": 1_000_000_000_000u64, "fragments": 1_000_000_000_000u64});
    let refused = error(2, |comm| engine(comm, config(&section, 1, 2)));
    insta::assert_snapshot!(refused, @"cannot take local steps: local_steps.fragments is 1000000000000, but the model has 4 trained parameters; use at most that many fragments");
}

#[test]
fn islands_with_different_models_or_configurations_are_named() {
    let models = error(2, |comm| {
        let width = 8 + comm.rank();
        let build =
            move |vb: VarBuilder<'_>| Ok(Model(Linear::new(6, width, vb.pp("a"))?, Linear::new(width, 3, vb.pp("b"))?));
        Engine::builder().communicator(comm).device(Device::Cpu).initialize(build, config(&json!({}), 1, 2))
    });
    insta::assert_snapshot!(models, @"cannot take local steps: island 0 and island 1 have different models; start the same program with the same files on all ranks");
    let configurations = error(2, |comm| {
        let steps = 5 + comm.rank();
        engine(comm, config(&json!({"steps": steps}), 1, 2))
    });
    insta::assert_snapshot!(configurations, @"cannot take local steps: island 0 and island 1 have different configurations or data; start the same program with the same files on all ranks");
    let weights = error(2, |comm| {
        let seed = comm.rank() as u64;
        Engine::builder()
            .communicator(comm)
            .device(Device::Cpu)
            .seed(seed)
            .initialize(Model::new, config(&json!({}), 1, 2))
    });
    insta::assert_snapshot!(weights, @"cannot take local steps: island 0 and island 1 have different initial weights; start the same program with the same files on all ranks");
}

#[test]
fn what_local_steps_exclude_is_refused_and_the_engine_continues() {
    let pipeline = error(2, |comm| {
        let module = PipelineModule::new(|x: &candle_core::Tensor| Ok(x.clone()), |y, _| y.mean_all())
            .layer("a", |vb| Linear::new(3, 3, vb))
            .layer("b", |vb| Linear::new(3, 3, vb));
        let builder = Engine::builder().communicator(comm).device(Device::Cpu);
        builder.initialize_pipeline(module, config(&json!({}), 1, 2)).map(drop)
    });
    insta::assert_snapshot!(pipeline, @"cannot take local steps: the stages of a pipeline cannot be islands; remove local_steps or the pipeline");
    let refused = on_ranks(2, |comm| {
        let mut engine = engine(comm, config(&json!({"steps": 2}), 1, 2))?;
        train(&mut engine, 1..=1)?;
        let zeros = candle_core::Tensor::zeros((8, 6), candle_core::DType::F32, &Device::Cpu)?;
        let refused = [
            engine.set_trainable(|_, _| true).unwrap_err(),
            engine.safe_set_full_fp32_param("first.weight", &zeros).unwrap_err(),
            engine.safe_set_local_fp32_param("first.weight", &zeros).unwrap_err(),
            engine.gathered_mut(&["first.weight"], 0, |_| Ok(())).unwrap_err(),
        ];
        let refused = refused.map(|error| error.to_string()).join("\n");
        train(&mut engine, 2..=3)?;
        Ok(refused)
    });
    insta::assert_snapshot!(refused[0], @"
    cannot take local steps: set_trainable would change what islands exchange; call it in a run without local_steps, save a checkpoint, and load that checkpoint
    cannot take local steps: safe_set_full_fp32_param would change what islands exchange; call it in a run without local_steps, save a checkpoint, and load that checkpoint
    cannot take local steps: safe_set_local_fp32_param would change what islands exchange; call it in a run without local_steps, save a checkpoint, and load that checkpoint
    cannot take local steps: gathered_mut would change what islands exchange; call it in a run without local_steps, save a checkpoint, and load that checkpoint
    ");
}
