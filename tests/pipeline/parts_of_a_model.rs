//! Weight files, parameter groups, frozen parts and stages without parameters work when a model's parts are on
//! different ranks. Models that cannot be divided, and configurations that do not fit a pipeline, are refused.

use super::same_bits::{Batch, LAYERS, Model, batch, config, loss, module, parameters, residual};
use candle_core::{DType, Device, Tensor};
use candle_nn::Activation;
use candle_zero::comm::{Communicator, SoloCommunicator, threads};
use candle_zero::engine::{EngineBuilder, PipelineEngine};
use candle_zero::nn::Linear;
use candle_zero::optim::{LrSchedule, ParameterGroup};
use candle_zero::pipeline::PipelineModule;
use candle_zero::{Engine, Result};
use serde_json::{Value, json};
use std::sync::Arc;

type Weights = Vec<(String, Vec<f32>)>;

fn builder(comm: Arc<dyn Communicator>) -> EngineBuilder {
    Engine::builder().communicator(comm).device(Device::Cpu).gradient_check(false)
}

/// Trains for two steps of four micro batches, and returns the weights of all ranks, sorted by name.
fn piped(
    ranks: usize,
    module: fn() -> PipelineModule<Batch>,
    config: &Value,
    options: impl Fn(EngineBuilder) -> EngineBuilder + Sync,
) -> Weights {
    let run = |comm| {
        let mut engine = options(builder(comm)).initialize_pipeline(module(), config.clone())?;
        (0..2).try_for_each(|step| engine.train_batch(|at| Ok(batch(step, at, 0))).map(drop))?;
        parameters(&mut engine)
    };
    let mut all: Weights = threads::run(ranks, run).unwrap().into_iter().flat_map(|rank| rank.unwrap()).collect();
    all.sort_by(|a, b| a.0.cmp(&b.0));
    all
}

/// Returns the weights after the same training on one rank without a pipeline, sorted by name.
fn plain(config: &Value, options: impl Fn(EngineBuilder) -> EngineBuilder) -> Weights {
    let builder = options(builder(Arc::new(SoloCommunicator::default())));
    let mut engine = builder.initialize(Model::new, config.clone()).unwrap();
    for step in 0..2 {
        for micro_batch in 0..4 {
            let batch = batch(step, micro_batch, 0);
            let loss = engine.forward(|model| model.loss(&batch)).unwrap();
            engine.backward(&loss).unwrap();
            engine.step().unwrap();
        }
    }
    let mut names = engine.parameter_names();
    names.sort();
    let values = |engine: &mut Engine<Model>, name: String| {
        let values = engine.safe_get_full_fp32_param(&name).unwrap().flatten_all().unwrap().to_vec1().unwrap();
        (name, values)
    };
    names.into_iter().map(|name| values(&mut engine, name)).collect()
}

#[test]
fn weights_are_read_from_a_file_of_the_complete_model() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let mut engine =
        builder(Arc::new(SoloCommunicator::default())).seed(77).initialize(Model::new, config(4, 0)).unwrap();
    engine.save_16bit_model(folder.path(), "model.safetensors").unwrap();
    assert!(path.exists());
    let options = |builder: EngineBuilder| builder.init_from(&path);
    assert!(plain(&config(4, 0), options) == piped(2, module, &config(4, 0), options));
    // The file does not contain this parameter.
    let other = || module().layer("more", |vb| Linear::new(3, 3, vb));
    let run = |comm| options(builder(comm)).initialize_pipeline(other(), config(4, 0)).map(drop);
    let error = threads::run(2, run).unwrap().into_iter().find_map(std::result::Result::err).unwrap();
    assert!(error.to_string().contains("more.weight"), "{error}");
}

/// A schedule with a different rate for each group.
#[derive(Debug)]
struct Rates;

impl LrSchedule for Rates {
    fn lr(&self, _: u64) -> f64 {
        1e-2
    }

    fn lr_of_group(&self, _: u64, group: usize) -> f64 {
        1e-2 / (1.0 + group as f64)
    }
}

#[test]
fn param_groups_have_the_same_numbers_on_all_ranks() {
    let groups = [vec!["head.*"], vec!["layer.0.*", "layer.4.*"]];
    let options = |builder: EngineBuilder| {
        let groups = groups.iter().map(|names| ParameterGroup::default().names(names.clone()));
        builder.parameter_groups(groups.collect::<Vec<_>>()).schedule(Rates)
    };
    assert!(plain(&config(4, 0), options) == piped(3, module, &config(4, 0), options));
    // The frozen parameters are on one rank only.
    let options = |builder: EngineBuilder| {
        builder.parameter_groups(vec![ParameterGroup::default().names(["layer.0.*"]).frozen()])
    };
    assert!(plain(&config(4, 0), options) == piped(4, module, &config(4, 0), options));
}

#[test]
fn a_stage_may_have_no_parameters_or_none_that_are_trained() {
    let expected = plain(&config(4, 0), |builder| builder);
    let mut uniform = config(4, 0);
    // Each stage has one layer, so the stage with the activation has no parameters.
    uniform["pipeline"] = json!({"partition": "uniform"});
    assert!(piped(LAYERS + 2, module, &uniform, |builder| builder) == expected);
    let head = |builder: EngineBuilder| builder.trainable(|name, _| name.starts_with("head"));
    assert!(piped(2, module, &config(4, 0), head) == plain(&config(4, 0), head));
}

fn refused(ranks: usize, module: fn() -> PipelineModule<Batch>, config: impl Fn(usize) -> Value + Sync) -> String {
    let run = |comm: Arc<dyn Communicator>| {
        let config = config(comm.rank());
        let mut engine = builder(comm).initialize_pipeline(module(), config)?;
        engine.train_batch(|at| Ok(batch(0, at, 0))).map(drop)
    };
    threads::run(ranks, run).unwrap().into_iter().find_map(Result::err).unwrap().to_string()
}

#[test]
fn what_a_pipeline_cannot_have_is_refused_in_words() {
    let section = |section: Value| {
        move |_: usize| {
            let mut config = config(4, 0);
            config["pipeline"] = section.clone();
            config
        }
    };
    insta::assert_snapshot!(refused(2, module, section(json!({"partition": "type:transformer"}))), @"cannot train in a pipeline: pipeline.partition is type:transformer, and each of the 2 stages must have a layer whose type name matches, but 0 layers have such a name; the types are Activation, Linear, Residual");
    insta::assert_snapshot!(refused(2, module, section(json!({"partition": "type:(residual"}))), @r#"the configuration given as a value: `pipeline.partition`: expected a regular expression after type:, found "(residual": unclosed group; put a backslash before each special character that is meant literally"#);
    insta::assert_snapshot!(refused(2, module, section(json!({"partition": "time"}))), @"cannot train in a pipeline: pipeline.partition is time, but the layers cannot be measured without a micro batch; set one with PipelineModule::example, or use another pipeline.partition");
    let of_first = |rank: usize| {
        let mut config = config(4, 0);
        config["pipeline"] = json!({"partition": if rank == 0 { "uniform" } else { "time" }});
        config
    };
    insta::assert_snapshot!(refused(3, module, of_first), @"cannot train in a pipeline: ranks 0 and 1 have different values of pipeline.partition; give all ranks the same configuration");
    insta::assert_snapshot!(refused(2, module, section(json!({"partition": "type:"}))), @r#"the configuration given as a value: `pipeline.partition`: expected best, parameters, uniform, time or type:REGEX, found "type:""#);
    insta::assert_snapshot!(refused(3, module, section(json!({"partition": "type:^(linear|activation)$"}))), @"cannot train in a pipeline: pipeline.partition is type:^(linear|activation)$, and each of the 3 stages must have a layer whose type name matches, but 2 layers have such a name; the types are Activation, Linear, Residual");
    insta::assert_snapshot!(refused(2, module, section(json!({"chunks": 1u64 << 40, "schedule": "interleaved"}))), @"cannot train in a pipeline: 2 ranks along the pipeline (pipeline.stages; auto: all ranks) with 1099511627776 chunks each (pipeline.chunks) need more stages than the model's 8 layers can fill; use fewer ranks or chunks");
    insta::assert_snapshot!(refused(2, module, section(json!({"schedule": "interleaved", "chunks": 1}))), @"cannot train in a pipeline: pipeline.chunks is 1, but pipeline.schedule interleaved needs 2 or more chunks per rank; use 1f1b for 1");
    insta::assert_snapshot!(refused(2, module, section(json!({"schedule": "eager"}))), @r#"the configuration given as a value: `pipeline.schedule`: expected one of "1f1b", "interleaved", "zero_bubble", "zbv", found the string "eager""#);
    insta::assert_snapshot!(
        refused(2, module, |_| {
            let mut config = config(5, 0);
            config["pipeline"] = json!({"schedule": "interleaved", "chunks": 2});
            config
        }),
        @"cannot train in a pipeline: there are 5 micro batches per step (gradient_accumulation_steps), which pipeline.schedule interleaved on 2 ranks cannot divide into 2 rounds of equal length; use a multiple of 2"
    );
    let divided = |_| {
        let mut config = config(4, 1);
        config["pipeline"]["stages"] = json!(2);
        config["expert_parallel"] = json!({"enabled": true, "autoep_size": 2});
        config
    };
    insta::assert_snapshot!(refused(4, module, divided), @"cannot divide experts among ranks: expert_parallel.autoep_size is 2, but the model is a pipeline, whose stages hold complete blocks; remove one of the two");
    insta::assert_snapshot!(refused(2, module, |_| config(4, 2)), @"cannot train in a pipeline: zero_optimization.stage is 2, but gradients and parameters of a pipeline's stages are not sharded; use stage 0 or 1");
}

#[test]
fn ranks_with_different_configurations_or_models_are_told_before_they_train() {
    let rate = |rank: usize| {
        let mut config = config(4, 0);
        config["optimizer"]["params"]["lr"] = json!(1e-2 / (1.0 + rank as f64));
        config
    };
    let error = refused(2, module, rate);
    assert!(error.contains("optimizer.params.lr"), "{error}");
    let micro_batches = |rank: usize| config(4 + rank, 0);
    let error = refused(2, module, micro_batches);
    assert!(error.contains("gradient_accumulation_steps"), "{error}");
    let run = |comm: Arc<dyn Communicator>| {
        let module = if comm.rank() == 0 { module().layer("more", residual) } else { module() };
        builder(comm).initialize_pipeline(module, config(4, 0)).map(drop)
    };
    let error = threads::run(2, run).unwrap().swap_remove(0).unwrap_err().to_string();
    assert!(error.contains("rank 0 and rank 1 have different models"), "{error}");
}

#[test]
fn integers_between_stages_are_refused_on_one_rank_and_on_two() {
    struct Ids;
    impl candle_nn::Module for Ids {
        fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
            x.to_dtype(DType::U32)
        }
    }
    let module = || {
        let module = PipelineModule::new(|(x, _): &Batch| Ok(x.clone()), |y, (_, target)| loss(y, target));
        module
            .layer("ids", |_| Ok(Ids))
            .layer("head", |vb| Linear::new(24, 3, vb))
            .layer("act", |_| Ok(Activation::Gelu))
    };
    let three_chunks = |_: usize| {
        let mut config = config(2, 0);
        config["pipeline"] = json!({"schedule": "interleaved", "chunks": 3});
        config
    };
    let on_one = refused(1, module, three_chunks);
    insta::assert_snapshot!(on_one, @"cannot train in a pipeline: the output of stage 0 has the dtype U32, but only f32, bf16 and f16 are supported; merge this stage's last layer and the next layer into one layer, or choose another pipeline.partition");
    let on_two = refused(3, module, |_| config(3, 0));
    assert!(on_two.contains("the dtype U32"), "{on_two}");
}

#[test]
fn an_engine_whose_batch_has_failed_is_out_of_step() {
    let results = threads::run(2, |comm| {
        let rank = comm.rank();
        let mut engine: PipelineEngine<Batch> = builder(comm).initialize_pipeline(module(), config(4, 0))?;
        let missing = || candle_core::Error::Msg("no file".into());
        let next = |at| if (rank, at) == (1, 2) { Err(missing().into()) } else { Ok(batch(0, at, 0)) };
        let first = engine.train_batch(next).unwrap_err().to_string();
        let second = engine.train_batch(|at| Ok(batch(0, at, 0))).unwrap_err().to_string();
        Ok((first, second))
    });
    let [peer, failed] = [0, 1].map(|rank| results.as_ref().unwrap()[rank].as_ref().unwrap().clone());
    assert!(failed.0.contains("no file") && peer.0.contains("rank 1 stopped"), "{failed:?} {peer:?}");
    assert!(failed.1.contains("no file") && peer.1.contains("rank 1"), "{failed:?} {peer:?}");
}

#[test]
fn layers_are_counted_whose_type_matches_a_regular_expression() {
    let layers = |expression: &str| {
        let mut config = config(4, 0);
        config["pipeline"] = json!({"partition": format!("type:{expression}")});
        let parameters_of = |comm| {
            let engine = builder(comm).initialize_pipeline(module(), config.clone())?;
            Ok(engine.parameter_names().len())
        };
        threads::run(2, parameters_of).unwrap().into_iter().map(Result::unwrap).collect::<Vec<_>>()
    };
    // A residual layer has four parameters, and the head, a linear layer, has two; the activation has none.
    assert_eq!(layers("^RESID.*l$"), [3 * 4, 3 * 4 + 2]);
    assert_eq!(layers("linear|activation"), [6 * 4, 2]);
    assert_eq!(layers("residual|Linear"), [4 * 4, 2 * 4 + 2]);
}

#[test]
fn a_model_of_ones_own_is_divided_by_measured_time_and_has_the_same_bits() {
    let with_example = || module().example(|_, _| Ok(batch(0, 0, 0)));
    let expected = plain(&config(4, 0), |builder| builder);
    for (ranks, section) in [
        (1, json!({"partition": "time"})),
        (3, json!({"partition": "time"})),
        (2, json!({"partition": "time", "schedule": "zbv", "chunks": 2})),
    ] {
        let mut config = config(4, 0);
        config["pipeline"] = section;
        // The ranks would refuse to start if they did not all divide the layers at the same places.
        assert!(piped(ranks, with_example, &config, |builder| builder) == expected, "{ranks} ranks, {config}");
    }
}

#[test]
fn each_rank_knows_which_data_it_trains() {
    let mut two_stages = config(4, 0);
    two_stages["pipeline"] = json!({"stages": 2});
    let positions = threads::run(4, |comm| {
        let engine = builder(comm).initialize_pipeline(module(), two_stages.clone())?;
        Ok((engine.position(), engine.data_position()))
    });
    let positions: Vec<_> = positions.unwrap().into_iter().map(|rank| rank.unwrap()).collect();
    assert_eq!(positions, [((0, 2), (0, 2)), ((1, 2), (0, 2)), ((0, 2), (1, 2)), ((1, 2), (1, 2))]);
}
