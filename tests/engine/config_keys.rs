//! Keys of the configuration that change what is said and how a checkpoint is loaded.

use crate::support::processes::{as_program, stderr};
use crate::support::tiny::{Shape, Tiny, batch, config};
use candle_core::{DType, Device, Tensor};
use candle_nn::{Module, VarBuilder};
use candle_zero::zero::{Unit, unit};
use candle_zero::{Engine, comm::threads, error::Result};
use serde_json::{Value, json};
use std::process::{Command, Output};

/// Runs a test of this file as a process of its own: what is said goes to its standard error.
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
#[ignore = "what the_level_of_messages_is_that_of_the_file starts in a process of its own"]
fn one_step() {
    let mut engine = Engine::builder().initialize(|vb| Tiny::new(Shape::default(), vb), case()).unwrap();
    let (ids, targets) = batch(0);
    let loss = engine.forward(|model| model.loss(&ids, &targets)).unwrap();
    engine.backward(&loss).unwrap();
    engine.step().unwrap();
}

#[test]
fn the_level_of_messages_is_that_of_the_file() {
    for (level, is_said) in [(None, true), (Some("INFO"), true), (Some("warning"), false), (Some("critical"), false)] {
        let more = json!({"steps_per_print": 1, "fp16": {"auto_cast": true}, "log_level": level});
        let text = stderr(&process("one_step", &config(1, 1, json!({}), more)));
        assert_eq!(text.contains("step=1, skipped=0"), is_said, "{level:?}: {text}");
        assert_eq!(text.contains("fp16.auto_cast: accepted and has no effect"), is_said, "{level:?}: {text}");
    }
}

/// Two units, used in the order that the input says.
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
#[ignore = "what a_changed_order_of_units_is_said_where_the_file_asks starts in a process of its own"]
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
    for asks in [true, false] {
        let zero = json!({"log_trace_cache_warnings": asks, "stage3_param_persistence_threshold": 0});
        let text = stderr(&process("four_steps_in_two_orders", &config(3, 1, zero, json!({}))));
        let said: Vec<&str> = text.lines().filter(|line| line.contains("in another order")).collect();
        assert_eq!(said.len(), usize::from(asks), "{text}");
        assert!(said.iter().all(|line| line.contains("step 3: ")), "{text}");
    }
}

/// The f32 values of every parameter after a load, with and without `load_from_fp32_weights`.
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
            let wanted: Vec<u32> = exact.iter().map(bf16).collect();
            assert_eq!(rounded.iter().map(|x| x.to_bits()).collect::<Vec<_>>(), wanted, "{name} at stage {stage}");
            differ += exact.iter().zip(rounded).filter(|(a, b)| a != b).count();
        }
        assert!(differ > 100, "{differ} at stage {stage}");
    }
}
