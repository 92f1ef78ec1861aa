//! Configuration keys that change which messages are printed, the format of buffers, how a checkpoint is loaded, and
//! the format of matrix products.

use crate::support::processes::{as_program, stderr};
use crate::support::tiny::{Shape, Tiny, batch, config, train};
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{Module, VarBuilder};
use candle_zero::nn::{WeightLayout, linear};
use candle_zero::optim::ParameterGroup;
use candle_zero::zero::{Unit, unit};
use candle_zero::{Engine, comm::threads, error::Result};
use serde_json::{Value, json};
use std::process::{Command, Output};

/// Runs a test from this file as a separate process; its messages go to standard error.
fn process(test: &str, case: &Value) -> Output {
    let mut command = Command::new(std::env::current_exe().unwrap());
    let output = command.args(as_program(module_path!(), test)).env("TEST_CASE", case.to_string()).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    output
}

fn case() -> Value {
    serde_json::from_str(&std::env::var("TEST_CASE").unwrap()).unwrap()
}

#[test]
#[ignore = "started by the_level_of_messages_is_that_of_the_file in a separate process"]
fn one_step() {
    let mut engine = Engine::builder().initialize(|vb| Tiny::new(Shape::default(), vb), case()).unwrap();
    let (ids, targets) = batch(0);
    let loss = engine.forward(|model| model.loss(&ids, &targets)).unwrap();
    engine.backward(&loss).unwrap();
    engine.step().unwrap();
}

#[test]
fn the_level_of_messages_is_that_of_the_file() {
    for (level, prints) in [(None, true), (Some("INFO"), true), (Some("warning"), false), (Some("critical"), false)] {
        let more = json!({"steps_per_print": 1, "fp16": {"auto_cast": true}, "log_level": level});
        let text = stderr(&process("one_step", &config(1, 1, json!({}), more)));
        assert_eq!(text.contains("step=1, skipped=0"), prints, "{level:?}: {text}");
        assert_eq!(text.contains("fp16.auto_cast: accepted, but has no effect"), prints, "{level:?}: {text}");
    }
}

#[test]
#[ignore = "started by a_groups_own_rate_that_the_schedule_replaces_is_said in a separate process"]
fn group_with_a_rate() {
    let group = ParameterGroup::new().names(["head.*"]).lr(5e-5);
    let builder = Engine::builder().parameter_groups(vec![group]);
    builder.initialize(|vb| Tiny::new(Shape::default(), vb), case()).unwrap();
}

#[test]
fn a_groups_own_rate_that_the_schedule_replaces_is_said() {
    let constant = |lr: Value| json!({"type": "WarmupLR", "params": {"warmup_min_lr": lr, "warmup_max_lr": lr}});
    for (scheduler, prints) in
        [(constant(json!(1e-2)), true), (constant(json!([5e-5, 1e-2])), false), (Value::Null, false)]
    {
        let text = stderr(&process("group_with_a_rate", &config(1, 1, json!({}), json!({"scheduler": scheduler}))));
        let note = "parameter group 0 (counted from 0): its learning rate has no effect because the schedule sets 1e-2 \
                    in the first step";
        assert_eq!(text.contains(note), prints, "{scheduler}: {text}");
    }
}

/// Two units, used in an order that the input determines.
struct Ordered([Unit<candle_nn::Linear>; 2]);

impl Ordered {
    fn new(vb: VarBuilder<'_>) -> candle_core::Result<Self> {
        let layer = |name: &str| unit(vb.pp(name), |vb| candle_nn::linear(4, 4, vb));
        Ok(Self([layer("a")?, layer("b")?]))
    }

    fn loss(&self, order: [usize; 2]) -> candle_core::Result<Tensor> {
        let mut x = Tensor::ones((2, 4), DType::F32, &Device::Cpu)?;
        for unit in order {
            x = self.0[unit].forward(&x)?;
        }
        x.sqr()?.mean_all()
    }
}

#[test]
#[ignore = "started by a_changed_order_of_units_is_said_where_the_file_asks in a separate process"]
fn four_steps_in_two_orders() {
    let mut engine = Engine::builder().initialize(Ordered::new, case()).unwrap();
    for order in [[0, 1], [0, 1], [1, 0], [1, 0]] {
        let loss = engine.forward(|model| model.loss(order)).unwrap();
        engine.backward(&loss).unwrap();
        engine.step().unwrap();
    }
}

#[test]
fn a_changed_order_of_units_is_said_where_the_file_asks() {
    for is_enabled in [true, false] {
        let zero = json!({"log_trace_cache_warnings": is_enabled, "stage3_param_persistence_threshold": 0});
        let text = stderr(&process("four_steps_in_two_orders", &config(3, 1, zero, json!({}))));
        let warnings: Vec<&str> = text.lines().filter(|line| line.contains("in a different order")).collect();
        assert_eq!(warnings.len(), usize::from(is_enabled), "{text}");
        assert!(warnings.iter().all(|line| line.contains("step 3: ")), "{text}");
    }
}

/// A layer, and a statistic that is a buffer.
struct WithBuffer {
    layer: candle_nn::Linear,
    running_mean: Tensor,
}

#[test]
fn buffers_of_floats_have_the_format_of_the_file() {
    use DType::{BF16, F16, F32};
    let bf16 = json!({"enabled": true});
    for (section, buffer_dtype, expected) in [
        (json!({}), None, F32),
        (json!({}), Some("bf16"), BF16),
        (json!({}), Some("fp16"), F16),
        (bf16.clone(), None, F32),
        (bf16.clone(), Some("BF16"), BF16),
        (bf16, Some("fp32"), F32),
    ] {
        let config = config(1, 1, json!({}), json!({"bf16": section, "data_types": {"buffer_dtype": buffer_dtype}}));
        let build = |vb: VarBuilder<'_>| {
            let running_mean = vb.get_with_hints(4, "running_mean", candle_nn::init::ONE)?;
            Ok(WithBuffer { layer: candle_nn::linear(4, 4, vb)?, running_mean })
        };
        let engine = Engine::builder().device(Device::Cpu).initialize(build, config).unwrap();
        let model = engine.model();
        assert_eq!(model.running_mean.dtype(), expected, "{buffer_dtype:?}");
        assert_eq!(model.running_mean.to_dtype(F32).unwrap().to_vec1::<f32>().unwrap(), [1.0; 4]);
        assert_eq!(model.layer.weight().dtype(), engine.dtype());
    }
}

/// Returns the f32 values of every parameter after loading a checkpoint with or without `load_from_fp32_weights`.
fn loaded(stage: u8, world: usize, from_f32: bool) -> Vec<(String, Vec<f32>)> {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let file = folder.path().join("model.safetensors");
    let ranks = threads::run(world, |comm| {
        let zero = json!({"load_from_fp32_weights": from_f32});
        let config = config(stage, 1, zero, json!({"bf16": {"enabled": true}}));
        let build = |vb: VarBuilder<'_>| Tiny::new(Shape { units: true, layers: 1, ..Shape::default() }, vb);
        let start = |comm| Engine::builder().communicator(comm).device(Device::Cpu).initialize(build, config.clone());
        let mut engine = start(comm.clone())?;
        for step in 0..2 {
            let (ids, targets) = batch(step);
            let loss = engine.forward(|model| model.loss(&ids, &targets))?;
            engine.backward(&loss)?;
            engine.step()?;
        }
        engine.save_checkpoint(folder.path().join("saved"), Some("t"), json!({}))?;
        drop(engine);
        let mut engine = start(comm)?;
        engine.load_checkpoint(folder.path().join("saved"), None, &Default::default())?;
        engine.export_safetensors(&file)?;
        Result::Ok(())
    });
    ranks.unwrap().into_iter().for_each(|rank| rank.unwrap());
    let tensors = candle_core::safetensors::load(&file, &Device::Cpu).unwrap();
    let mut all: Vec<(String, Vec<f32>)> = tensors
        .into_iter()
        .map(|(name, tensor)| (name, tensor.flatten_all().unwrap().to_dtype(DType::F32).unwrap().to_vec1().unwrap()))
        .collect();
    all.sort_by(|a, b| a.0.cmp(&b.0));
    all
}

#[test]
fn a_load_that_is_not_from_f32_weights_rounds_master_weights() {
    let bf16 = |x: &f32| half::bf16::from_f32(*x).to_f32().to_bits();
    for (stage, world) in [(0, 1), (1, 2), (3, 2)] {
        let (exact, rounded) = (loaded(stage, world, true), loaded(stage, world, false));
        let mut differ = 0;
        for ((name, exact), (_, rounded)) in exact.iter().zip(&rounded) {
            let expected: Vec<u32> = exact.iter().map(bf16).collect();
            assert_eq!(rounded.iter().map(|x| x.to_bits()).collect::<Vec<_>>(), expected, "{name} at stage {stage}");
            differ += exact.iter().zip(rounded).filter(|(a, b)| a != b).count();
        }
        assert!(differ > 100, "{differ} at stage {stage}");
    }
}

/// A linear layer whose loss weights its outputs by `c`.
struct Weighted {
    weight: Tensor,
    bias: Tensor,
}

#[test]
fn autocast_multiplies_in_bf16_and_keeps_the_rest_in_f32() {
    let normal = |shape: &[usize]| Tensor::randn(0f32, 1.0, shape, &Device::Cpu).unwrap();
    let (x, c) = (normal(&[6, 5]), normal(&[6, 3]));
    let more = json!({
        "torch_autocast": {"enabled": true, "dtype": "bfloat16"}, "gradient_clipping": 0, "scheduler": null,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}}, "zero_allow_untested_optimizer": true,
    });
    let build = |vb: VarBuilder<'_>| {
        let weight = vb.get_with_hints((3, 5), "weight", candle_nn::Init::Uniform { lo: -1.0, up: 1.0 })?;
        Ok(Weighted { weight, bias: vb.get_with_hints(3, "bias", candle_nn::Init::Uniform { lo: -1.0, up: 1.0 })? })
    };
    let mut engine = Engine::builder().device(Device::Cpu).initialize(build, config(0, 1, json!({}), more)).unwrap();
    assert_eq!(engine.dtype(), DType::F32);
    let values = |t: &Tensor| t.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    let now = |engine: &Engine<Weighted>| [&engine.model().weight, &engine.model().bias].map(values);
    let before = now(&engine);

    let to_bf16 = |t: &Tensor| t.detach().to_dtype(DType::BF16).unwrap();
    let to_f32 = |t: &Tensor| t.to_dtype(DType::F32).unwrap();
    let [weight, bias] = [&engine.model().weight, &engine.model().bias].map(|t| Var::from_tensor(&to_bf16(t)).unwrap());
    let expected = linear(&to_bf16(&x), &weight, Some(&bias), WeightLayout::OutIn).unwrap();
    let grads = (to_f32(&expected) * &c).unwrap().sum_all().unwrap().backward().unwrap();

    let run = |model: &Weighted| linear(&x, &model.weight, Some(&model.bias), WeightLayout::OutIn);
    assert_eq!(values(&engine.eval(run).unwrap()), values(&to_f32(&expected)));
    let y = engine.forward(run).unwrap();
    assert_eq!((y.dtype(), values(&y)), (DType::F32, values(&to_f32(&expected))));
    engine.backward(&(y * &c).unwrap().sum_all().unwrap()).unwrap();
    engine.step().unwrap();
    // The bias's gradient is a sum in f32, which the bf16 reference rounds.
    let rounded_bias = f32::from(half::bf16::EPSILON);
    for (((before, after), var), off) in before.iter().zip(now(&engine)).zip([&weight, &bias]).zip([1e-6, rounded_bias])
    {
        let grad = values(&to_f32(grads.get(var).unwrap()));
        for ((before, after), grad) in before.iter().zip(&after).zip(&grad) {
            assert!((before - grad - after).abs() <= off * grad.abs().max(1.0), "{before} - {grad}, not {after}");
        }
    }
    // Nothing is rounded outside the engine.
    let exact = run(engine.model()).unwrap();
    let inside = engine.eval(run).unwrap();
    assert_ne!(values(&exact), values(&inside));
}

#[test]
fn autocast_gives_the_same_bits_at_every_stage_and_with_recomputation() {
    let run = |stage: u8, checkpointed: bool, casts: bool| {
        let shape = Shape { units: true, checkpointed, layers: 2 };
        let zero = json!({"stage3_param_persistence_threshold": 0});
        let config = config(stage, 2, zero, json!({"torch_autocast": {"enabled": casts}}));
        let ranks = train(2, shape, &config, 3);
        (ranks.iter().map(|rank| rank.losses.clone()).collect::<Vec<_>>(), ranks[0].exported.clone())
    };
    let reference = run(0, false, true);
    for (stage, checkpointed) in [(1, false), (2, true), (3, false), (3, true)] {
        assert!(run(stage, checkpointed, true) == reference, "stage {stage}");
    }
    let exact = run(0, false, false);
    let losses =
        |run: &(Vec<Vec<u32>>, Vec<u8>)| -> Vec<f32> { run.0[0].iter().map(|bits| f32::from_bits(*bits)).collect() };
    assert_ne!(exact.0, reference.0);
    let difference = losses(&exact).iter().zip(losses(&reference)).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(difference < 0.05, "{difference}");
}

#[test]
fn a_unit_recomputes_with_the_products_of_its_first_forward_in_any_backward() {
    let shape = Shape { units: true, checkpointed: true, layers: 2 };
    for casts in [true, false] {
        let cast = |casts: bool| config(0, 1, json!({}), json!({"torch_autocast": {"enabled": casts}}));
        let mut engine =
            Engine::builder().device(Device::Cpu).initialize(|vb| Tiny::new(shape, vb), cast(casts)).unwrap();
        // Another engine, whose matrix products use the other format, runs its backward pass through this model.
        let builder = Engine::builder().device(Device::Cpu);
        let build = |vb: VarBuilder<'_>| vb.get_with_hints(1, "factor", candle_nn::Init::Const(1.0));
        let mut other = builder.initialize(build, cast(!casts)).unwrap();
        let (ids, targets) = batch(0);
        engine.forward(|model| model.loss(&ids, &targets)).unwrap().backward().unwrap();
        let loss = engine.forward(|model| model.loss(&ids, &targets)).unwrap();
        let scaled = other.forward(|factor| loss.broadcast_mul(factor)?.sum_all()).unwrap();
        other.backward(&scaled).unwrap();
        other.step().unwrap();
    }
}
