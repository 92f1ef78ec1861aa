//! Recorded behaviour of DeepSpeed's engine, apart from its training runs (`training.rs`): reduction of gradients,
//! counters, exact values at stage 3, and which configurations train with which optimizer.

use crate::support::processes::{as_program, stdout};
use crate::support::recorded::is_left_out;
use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{Init, VarBuilder};
use candle_zero::Engine;
use candle_zero::comm::threads;
use candle_zero::config::{Config, OptimizerConfig};
use candle_zero::error::{ConfigError, EngineError, Error};
use candle_zero::layout::shard_len;
use candle_zero::memory::MemoryKind;
use candle_zero::optim::Schedule;
use candle_zero::zero::{Unit, unit};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};
use std::path::Path;
use std::process::Command;

/// Returns the cases of an area that are not left out.
fn cases(area: &str) -> Vec<Value> {
    let all: Vec<Value> = serde_json::from_str(include_str!("../fixtures/conformance_training.json")).unwrap();
    all.into_iter().filter(|case| case["area"] == area && !is_left_out(case)).collect()
}

fn int(value: &Value) -> usize {
    value.as_u64().unwrap() as usize
}

/// Returns the numbers of a list; nested lists are flattened.
fn floats(value: &Value) -> Vec<f32> {
    match value {
        Value::Array(values) => values.iter().flat_map(floats).collect(),
        value => vec![value.as_f64().unwrap() as f32],
    }
}

fn read_f32(path: &Path, name: &str) -> Vec<f32> {
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    file.tensor(name).unwrap().data().as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

// ---- gradient-reduction ----------------------------------------------------------------------------------------

#[test]
fn gradients_are_reduced_as_recorded() {
    let cases = cases("gradient-reduction");
    for case in &cases {
        let (id, input) = (&case["id"], &case["input"]);
        assert_eq!((&input["loss"], &input["optimizer"]), (&json!("sum(param*input)"), &json!("SGD lr 1")));
        let config = json!({
            "train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": true,
            "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
            "gradient_clipping": input["gradient_clipping"],
            "gradient_allreduce_op": input["gradient_allreduce_op"],
            "prescale_gradients": input["prescale_gradients"],
            "gradient_predivide_factor": input["gradient_predivide_factor"],
            "zero_optimization": {
                "stage": input["stage"], "reduce_scatter": input["reduce_scatter"],
                "contiguous_gradients": input["contiguous_gradients"],
            },
        });
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("end");
        let start = input["param"].as_array().unwrap().len();
        assert_eq!(floats(&input["param"]), vec![0.0; start]);
        let ranks = threads::run(int(&input["world_size"]), |comm| {
            let builder = Engine::builder().communicator(comm);
            let param = |vb: VarBuilder<'_>| vb.get_with_hints(start, "param", Init::Const(0.0));
            let mut engine = builder.initialize(param, config.clone())?;
            let x = Tensor::new(floats(&input["input_on_every_rank"]), &Device::Cpu)?;
            let loss = engine.forward(|param| x.mul(param)?.sum_all())?;
            engine.backward(&loss)?;
            engine.step()?;
            engine.export_safetensors(&file)
        });
        ranks.unwrap().into_iter().for_each(|r| r.unwrap());
        assert_eq!(read_f32(&file, "param"), floats(&case["expect"]["param_after_one_step"]), "{id}");
    }
    assert_eq!(cases.len(), 6);
}

// ---- engine-counters -------------------------------------------------------------------------------------------

#[test]
fn counters_and_schedule_count_skipped_steps_as_recorded() {
    let cases = cases("engine-counters");
    for case in &cases {
        let (id, input) = (&case["id"], &case["input"]);
        let accumulation = int(&input["gradient_accumulation_steps"]);
        let overflows: Vec<bool> =
            input["overflow_at_each_optimizer_step"].as_array().unwrap().iter().map(|o| *o == 1).collect();
        for stage in 0..4 {
            let config = json!({
                "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": accumulation,
                "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
                // Only this schedule has a different rate at each of the first steps.
                "scheduler": {"type": "WarmupCosineLR", "params": {
                    "total_num_steps": 100, "warmup_num_steps": 10, "warmup_min_ratio": 0.1, "warmup_type": "linear"}},
                "fp16": {"enabled": true}, "zero_optimization": {"stage": stage},
            });
            // `rates[i]` is the learning rate after i steps of the schedule.
            let resolved = Config::load(config.clone(), 2).unwrap();
            let mut schedule = Schedule::new(resolved.scheduler.as_ref(), resolved.optimizer.as_ref()).unwrap();
            let mut rates = vec![schedule.lr()];
            for _ in &overflows {
                schedule.step();
                assert!(!rates.contains(&schedule.lr()));
                rates.push(schedule.lr());
            }
            let ranks = threads::run(2, |comm| {
                let rank = comm.rank();
                let builder = Engine::builder().communicator(comm);
                let param = |vb: VarBuilder<'_>| vb.get_with_hints(6, "param", Init::Const(0.5));
                let mut engine = builder.initialize(param, config.clone())?;
                let mut after = vec![];
                for overflows in &overflows {
                    for micro in 0..accumulation {
                        // The input of one rank in one micro step is huge: the loss is finite, but its scaled gradient
                        // is not.
                        let huge = *overflows && rank == 1 && micro == 0;
                        let x = Tensor::full(if huge { 6e4f32 } else { 0.1 }, 6, &Device::Cpu)?.to_dtype(DType::F16)?;
                        let loss = engine.forward(|param| x.mul(param)?.to_dtype(DType::F32)?.sum_all())?;
                        assert!(loss.to_scalar::<f32>()?.is_finite());
                        engine.backward(&loss)?;
                        engine.step()?;
                    }
                    assert_eq!(engine.was_step_applied(), !overflows);
                    let scheduler_steps = rates.iter().position(|lr| *lr == engine.lr()[0]);
                    after.push(json!({
                        "global_steps": engine.global_steps(), "skipped_steps": engine.skipped_steps(),
                        "scheduler_steps": scheduler_steps, "micro_steps": engine.micro_steps(),
                    }));
                }
                Ok(after)
            });
            for after in ranks.unwrap() {
                assert_eq!(json!(after.unwrap()), case["expect"]["after_each"], "{id}, stage {stage}");
            }
        }
    }
    assert_eq!(cases.len(), 2);
}

// ---- zero3-exact -----------------------------------------------------------------------------------------------

const SHAPE: (usize, usize) = (3, 5);

/// Elementwise products; each factor is a separate unit.
struct Product(Vec<Unit<Factor>>);

struct Factor(Tensor);

impl candle_nn::Module for Factor {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.mul(&self.0)
    }
}

impl Product {
    fn new(vb: VarBuilder<'_>) -> Result<Self> {
        let factor = |i| unit(vb.pp(format!("w{i}")), |vb| vb.get_with_hints(SHAPE, "w", Init::Const(0.0)).map(Factor));
        (0..3).map(factor).collect::<Result<_>>().map(Self)
    }

    /// Returns hidden1, hidden2, y_hat and the elementwise loss.
    fn run(&self, dtype: DType) -> Result<[Tensor; 4]> {
        use candle_nn::Module;
        let ones = Tensor::ones(SHAPE, dtype, &Device::Cpu)?;
        let hidden1 = self.0[0].forward(&ones)?;
        let hidden2 = self.0[1].forward(&hidden1)?;
        let y_hat = self.0[2].forward(&hidden2)?;
        let loss = (&y_hat - ones)?;
        Ok([hidden1, hidden2, y_hat, loss])
    }
}

/// Returns the complete parameter `i`: every element of rank r's shard is (i + 1) (1 + r).
fn initial(i: usize) -> Vec<f32> {
    let (numel, shard) = (SHAPE.0 * SHAPE.1, shard_len(SHAPE.0 * SHAPE.1, 2));
    (0..numel).map(|e| ((i + 1) * (1 + e / shard)) as f32).collect()
}

fn write_initial(path: &Path) {
    let bytes = |i| initial(i).iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
    let stored: Vec<_> = (0..3).map(|i| (format!("w{i}.w"), bytes(i))).collect();
    let views =
        stored.iter().map(|(name, data)| (name, TensorView::new(Dtype::F32, vec![SHAPE.0, SHAPE.1], data).unwrap()));
    safetensors::serialize_to_file(views, None, path).unwrap();
}

/// Returns the variants named in DeepSpeed's own test: persistence, fp16, contiguous, offload, prefetch,
/// reduce_scatter. In addition to offload to the host, candle-zero's offload to files in `folder` is tested.
fn variants(folder: &Path) -> Vec<Value> {
    let nvme = || json!({"device": "nvme", "nvme_path": folder, "max_in_cpu": 0});
    let pipelined = json!({"device": "nvme", "nvme_path": folder, "pipeline_read": true, "pipeline_write": true});
    let zero = |zero: Value| json!({"zero_optimization": zero});
    let mut all = vec![
        zero(json!({"stage3_param_persistence_threshold": 0})),
        zero(json!({"stage3_param_persistence_threshold": 10})),
        zero(json!({"stage3_param_persistence_threshold": 15})),
        zero(json!({"stage3_param_persistence_threshold": 0, "contiguous_gradients": false})),
        zero(json!({"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0})),
        zero(json!({"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 30})),
        zero(json!({"stage3_param_persistence_threshold": 0, "reduce_scatter": false})),
        zero(json!({"stage3_param_persistence_threshold": 0, "offload_param": {"device": "cpu"}})),
        zero(json!({"stage3_param_persistence_threshold": 0, "offload_param": nvme()})),
        zero(
            json!({"stage3_param_persistence_threshold": 10, "offload_param": nvme(), "offload_optimizer": pipelined}),
        ),
    ];
    let half: Vec<Value> = all
        .iter()
        .map(|v| {
            json!({"zero_optimization": v["zero_optimization"],
        // Gradients of up to 72, scaled by 16, stay far below the largest f16.
        "fp16": {"enabled": true, "loss_scale": 16}})
        })
        .collect();
    all.extend(half);
    all
}

#[test]
fn values_and_gradients_at_stage_3_are_exactly_as_recorded() {
    let (mut forwards, mut gradients) = (0, 0);
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (init, end) = (folder.path().join("init"), folder.path().join("end"));
    write_initial(&init);
    for case in cases("zero3-exact").into_iter().filter(|case| case["input"]["call"] != "empty_partition_cache()") {
        let (id, input, expect) = (&case["id"], &case["input"], &case["expect"]);
        let backwards = input.get("backward_number").map_or(1, int);
        for variant in variants(folder.path()) {
            let mut config = json!({
                "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": backwards,
                "zero_allow_untested_optimizer": true, "gradient_clipping": 0,
                "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
            });
            config.as_object_mut().unwrap().extend(variant.as_object().unwrap().clone());
            config["zero_optimization"]["stage"] = json!(3);
            let ranks = threads::run(2, |comm| {
                let mut engine =
                    Engine::builder().communicator(comm).init_from(&init).initialize(Product::new, config.clone())?;
                let dtype = engine.dtype();
                let in_files = variant.to_string().contains("nvme");
                assert_eq!(engine.memory_report().row(MemoryKind::Parameters).file.held > 0, in_files, "{variant}");
                if input.get("model").is_some() {
                    let all = engine.forward(|model| Tensor::stack(&model.run(dtype)?, 0)?.to_dtype(DType::F32))?;
                    let parts = ["hidden1", "hidden2", "y_hat", "loss"];
                    let recorded: Vec<f32> = parts.iter().flat_map(|part| floats(&expect[part])).collect();
                    assert_eq!(all.flatten_all()?.to_vec1::<f32>()?, recorded, "{id}, {variant}");
                    return Ok(());
                }
                for _ in 0..backwards {
                    let loss = engine.forward(|model| model.run(dtype)?[3].to_dtype(DType::F32)?.sum_all())?;
                    // In the recorded run, the accumulation does not divide by the number of backward passes.
                    engine.backward(&(loss * backwards as f64)?)?;
                    engine.step()?;
                }
                engine.export_safetensors(&end)
            });
            ranks.unwrap().into_iter().for_each(|r| r.unwrap());
            if input.get("model").is_some() {
                assert_eq!(int(&expect["shard_numel"]), shard_len(SHAPE.0 * SHAPE.1, 2));
                forwards += 1;
                continue;
            }
            for i in 0..3 {
                // SGD with a learning rate of 1 has subtracted the gradient.
                let gradient = initial(i).into_iter().zip(read_f32(&end, &format!("w{i}.w"))).map(|(b, a)| b - a);
                let mut recorded: Vec<f32> =
                    ["rank0", "rank1"].iter().flat_map(|rank| floats(&expect[rank][format!("w{i}")])).collect();
                // The last element of rank 1's shard is padding.
                assert_eq!(recorded.pop(), Some(0.0));
                assert_eq!(gradient.collect::<Vec<_>>(), recorded, "{id}, w{i}, {variant}");
            }
            gradients += 1;
        }
    }
    assert_eq!((forwards, gradients), (20, 40));
}

// ---- optimizer-choice, config-engine ---------------------------------------------------------------------------

#[test]
fn the_optimizers_name_and_parameters_choose_the_kind_of_decay() {
    let cases = cases("optimizer-choice");
    for case in &cases {
        let (id, input) = (&case["id"], &case["input"]);
        let mut config = json!({"train_batch_size": 1, "optimizer": {"type": input["type"]}});
        if let Some(params) = input.get("params") {
            config["optimizer"]["params"] = params.clone();
            config["optimizer"]["params"]["weight_decay"] = json!(0.1);
        }
        if input["offload_optimizer"] == true {
            config["zero_optimization"] = json!({"stage": 2, "offload_optimizer": {"device": "cpu"}});
        }
        match Config::load(config, 1) {
            Ok(config) => {
                assert_ne!(case["expect"]["ok"], false, "{id}");
                let adam = match config.optimizer {
                    Some(OptimizerConfig::Adam(adam)) => adam,
                    Some(OptimizerConfig::Adagrad(_)) if input["type"] == "Adagrad" => continue,
                    Some(OptimizerConfig::Lamb(_)) if input["type"] == "Lamb" => continue,
                    other => panic!("{id}: {other:?}"),
                };
                // candle-zero has only one implementation of Adam, so only its kind of weight decay is compared with
                // the record.
                if let Some(decoupled) = case["expect"].get("decoupled_weight_decay") {
                    assert_eq!(adam.decoupled, *decoupled, "{id}");
                }
            }
            Err(error) => {
                assert_eq!(case["expect"]["ok"], false, "{id}: {error}");
                assert!(error.to_string().contains("NoSuch"), "{error}");
            }
        }
    }
    assert_eq!(cases.len(), 11);
}

#[test]
fn configurations_train_or_are_refused_as_recorded() {
    let has_separate_test = |case: &Value| ["call", "env"].iter().any(|key| case["input"].get(key).is_some());
    let cases: Vec<Value> = cases("config-engine").into_iter().filter(|case| !has_separate_test(case)).collect();
    for case in &cases {
        let (id, input) = (&case["id"], &case["input"]);
        let mut config = json!({
            "train_batch_size": 1, "zero_optimization": {"stage": input["stage"]},
            "optimizer": {"type": input["optimizer"].as_str().map(|o| o.trim_start_matches("client torch "))},
        });
        match input.get("model_dtype").and_then(Value::as_str) {
            Some("fp32") | None => {}
            Some(format) => config[format] = json!({"enabled": true}),
        }
        if let Some(format) = input.get("grad_accum_dtype") {
            config["data_types"] = json!({"grad_accum_dtype": format});
        }
        if let Some(device) = input.get("offload_optimizer") {
            config["zero_optimization"]["offload_optimizer"] = json!({"device": device});
        }
        for key in ["zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"] {
            if let Some(value) = input.get(key) {
                config[key] = value.clone();
            }
        }
        if let Some(value) = input.get("ignore_unused_parameters") {
            config["zero_optimization"]["ignore_unused_parameters"] = value.clone();
            config["zero_optimization"]["offload_optimizer"] = json!({"device": "cpu"});
            config["optimizer"]["type"] = json!("AdamW");
        }
        let train = || -> candle_zero::Result<bool> {
            let params = |vb: VarBuilder<'_>| {
                let unused = input.get("model").map(|_| vb.get_with_hints(6, "unused", Init::Const(0.5)));
                Ok((vb.get_with_hints(6, "param", Init::Const(0.5))?, unused.transpose()?))
            };
            let mut engine = Engine::initialize(params, config.clone())?;
            let loss = engine.forward(|(param, _)| param.to_dtype(DType::F32)?.sqr()?.mean_all())?;
            engine.backward(&loss)?;
            engine.step()?;
            Ok(engine.was_step_applied())
        };
        match (train(), case["expect"]["ok"].as_bool().unwrap()) {
            (Ok(applied), true) => assert!(applied, "{id}"),
            (Err(Error::Config(ConfigError::Problems { .. })), false) => {}
            (Err(error @ Error::Engine(EngineError::NoGradient { .. })), false) => {
                let words = case["expect"]["message_mentions"].as_array().unwrap();
                assert!(words.iter().all(|word| error.to_string().contains(word.as_str().unwrap())), "{id}: {error}");
            }
            (result, ok) => panic!("{id}: {result:?}, recorded ok: {ok}"),
        }
    }
    assert_eq!(cases.len(), 19);
}

#[test]
fn no_sync_is_offered_or_refused_as_recorded() {
    let calls_no_sync = |case: &Value| case["input"]["call"].as_str().is_some_and(|call| call.contains("no_sync"));
    let cases: Vec<Value> = cases("config-engine").into_iter().filter(calls_no_sync).collect();
    for case in &cases {
        let (id, input) = (&case["id"], &case["input"]);
        let stage = input.get("stage").cloned().unwrap_or(json!(1));
        let config =
            json!({"train_batch_size": 1, "optimizer": {"type": "Adam"}, "zero_optimization": {"stage": stage}});
        let param = |vb: VarBuilder<'_>| vb.get_with_hints(6, "param", Init::Const(0.5));
        let mut engine = Engine::initialize(param, config).unwrap();
        let result = match input["call"].as_str().unwrap() {
            "no_sync()" => engine.no_sync(|_| Ok(())),
            "no_sync inside no_sync" => engine.no_sync(|engine| engine.no_sync(|_| Ok(()))),
            call => panic!("{id}: {call}"),
        };
        assert_eq!(result.is_ok(), case["expect"]["ok"].as_bool().unwrap(), "{id}: {result:?}");
    }
    assert_eq!(cases.len(), 3);
}

#[test]
#[ignore = "started by the next test in the recorded environment"]
fn as_a_process_of_its_own() {
    let param = |vb: VarBuilder<'_>| vb.get_with_hints(6, "param", Init::Const(0.5));
    let config = json!({"train_batch_size": 1, "optimizer": {"type": "Adam"}, "zero_optimization": {"stage": 3}});
    let engine = Engine::initialize(param, config).unwrap();
    assert_eq!((engine.rank(), engine.world_size()), (0, 1));
    println!("initialized");
}

#[test]
fn a_process_group_of_one_is_the_environments_as_recorded() {
    let cases: Vec<Value> =
        cases("config-engine").into_iter().filter(|case| case["input"].get("env").is_some()).collect();
    for case in &cases {
        let (input, expect) = (&case["input"], &case["expect"]);
        assert_eq!(
            (&input["process_group_size"], &input["explicit_group"], &expect["ok"]),
            (&json!(1), &json!(false), &json!(true))
        );
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(as_program(module_path!(), "as_a_process_of_its_own")).env_remove("RANK").env_remove("LOCAL_RANK");
        for (name, value) in input["env"].as_object().unwrap() {
            command.env(name, value.as_str().unwrap());
        }
        let output = command.output().unwrap();
        assert!(output.status.success() && stdout(&output).contains("initialized"), "{}: {output:?}", case["id"]);
    }
    assert_eq!(cases.len(), 1);
}

#[test]
fn nothing_is_gathered_after_the_cache_was_emptied_as_recorded() {
    let cases: Vec<Value> =
        cases("zero3-exact").into_iter().filter(|case| case["input"]["call"] == "empty_partition_cache()").collect();
    for case in &cases {
        let (input, expect) = (&case["input"], &case["expect"]);
        assert_eq!((&input["all_params_persistent"], &input["stage"]), (&json!(true), &json!(3)));
        let config = json!({"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adam"},
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 1000}});
        let ranks = threads::run(2, |comm| {
            let builder = Engine::builder().communicator(comm);
            let mut engine =
                builder.initialize(|vb| vb.get_with_hints(SHAPE, "param", Init::Const(0.5)), config.clone())?;
            let gathered = |engine: &Engine<Tensor>| {
                let report = engine.memory_report();
                let bytes = [MemoryKind::Gathered, MemoryKind::Persistent].map(|kind| report.row(kind).bytes.held);
                bytes.iter().sum::<usize>() / 4
            };
            let loss = engine.forward(|param| param.sqr()?.mean_all())?;
            engine.backward(&loss)?;
            engine.step()?;
            assert!(gathered(&engine) > 0);
            engine.empty_partition_cache()?;
            Ok(gathered(&engine))
        });
        for after in ranks.unwrap() {
            assert_eq!(after.unwrap(), int(&expect["gathered_elements_after"]));
        }
    }
    assert_eq!(cases.len(), 1);
}

#[test]
fn a_predivide_factor_of_the_world_size_gives_the_plain_mean() {
    let case = cases("quirk").remove(0);
    assert_eq!(case["expect"]["correct"], "plain mean of gradients");
    for world in [2, 3, 4] {
        let config = json!({
            "train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": true, "gradient_clipping": 0,
            "optimizer": {"type": "SGD", "params": {"lr": 1.0}}, "gradient_predivide_factor": world,
            "zero_optimization": {"stage": case["input"]["stage"], "reduce_scatter": case["input"]["reduce_scatter"]},
        });
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("end");
        let ranks = threads::run(world, |comm| {
            // Rank r's gradient is 12 (r + 1) in every element.
            let factor = 12.0 * (comm.rank() + 1) as f64;
            let param = |vb: VarBuilder<'_>| vb.get_with_hints(5, "param", Init::Const(0.0));
            let mut engine = Engine::builder().communicator(comm).initialize(param, config.clone())?;
            let loss = engine.forward(|param| param.sum_all()? * factor)?;
            engine.backward(&loss)?;
            engine.step()?;
            engine.export_safetensors(&file)
        });
        ranks.unwrap().into_iter().for_each(|r| r.unwrap());
        let mean = 12.0 * (world + 1) as f32 / 2.0;
        for got in read_f32(&file, "param") {
            assert!((got + mean).abs() <= 1e-6 * mean, "world {world}: {got}, not {}", -mean);
        }
    }
}
