//! Random numbers drawn in an engine's forward passes.

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{Module, VarBuilder};
use candle_zero::comm::threads;
use candle_zero::nn::Dropout;
use candle_zero::zero::{Unit, unit};
use candle_zero::{Engine, EngineBuilder};
use serde_json::{Value, json};

fn config(more: Value) -> Value {
    let mut config = json!({
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "gradient_clipping": 0.0,
    });
    for (key, value) in more.as_object().unwrap() {
        config[key] = value.clone();
    }
    config
}

fn on_cpu() -> EngineBuilder {
    Engine::builder().device(Device::Cpu)
}

/// A layer that computes `x * w`, with dropout.
struct Scaled {
    w: Tensor,
    dropout: Dropout,
}

impl Scaled {
    fn new(vb: VarBuilder<'_>) -> Result<Self> {
        Ok(Self { w: vb.get_with_hints(64, "w", candle_nn::Init::Const(1.0))?, dropout: Dropout::new(0.5, 7) })
    }
}

impl Module for Scaled {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.dropout.forward(&x.broadcast_mul(&self.w)?)
    }
}

fn ones() -> Tensor {
    Tensor::ones((1, 64), DType::F32, &Device::Cpu).unwrap()
}

fn values(y: &Tensor) -> Result<Vec<f32>> {
    y.flatten_all()?.to_vec1()
}

#[test]
fn each_forward_of_a_micro_step_draws_its_own_masks() {
    let mut engine = on_cpu().initialize(Scaled::new, config(json!({}))).unwrap();
    let x = ones();
    let mut forward = || values(&engine.forward(|m| m.forward(&x)).unwrap()).unwrap();
    let masks = [forward(), forward(), forward()];
    assert!(masks[0] != masks[1] && masks[1] != masks[2] && masks[0] != masks[2]);
}

#[test]
fn the_masks_of_a_second_forward_are_those_of_its_gradients_also_where_they_are_recomputed() {
    let build = |recompute: bool| {
        move |vb: VarBuilder<'_>| -> Result<Unit<Scaled>> { Ok(unit(vb.pp("u"), Scaled::new)?.checkpointed(recompute)) }
    };
    for recompute in [false, true] {
        let mut engine = on_cpu().initialize(build(recompute), config(json!({}))).unwrap();
        let x = candle_core::Var::from_tensor(&ones()).unwrap();
        let outputs = [(); 2].map(|()| engine.forward(|m| m.forward(&x)).unwrap());
        let loss = outputs.iter().map(|y| y.sum_all().unwrap()).reduce(|a, b| (a + b).unwrap()).unwrap();
        engine.backward(&loss).unwrap();
        engine.step().unwrap();
        // One step of SGD at a learning rate of 1 subtracts the sum of both masks, which are 2 where an element was
        // kept.
        let after = engine.eval(|m| m.forward(&ones())).unwrap();
        let expected: Vec<f32> =
            values(&outputs[0]).unwrap().iter().zip(values(&outputs[1]).unwrap()).map(|(a, b)| 1.0 - a - b).collect();
        assert_eq!(values(&after).unwrap(), expected, "recompute: {recompute}");
    }
}

#[test]
fn the_first_forward_of_every_micro_step_draws_what_it_always_drew() {
    for second in [false, true] {
        let masks = threads::run(2, |comm| {
            // The weights stay unchanged, so an element that is zero was dropped.
            let config = config(json!({"optimizer": {"type": "SGD", "params": {"lr": 0.0}}}));
            let mut engine = on_cpu().communicator(comm).initialize(Scaled::new, config)?;
            let mut masks = vec![];
            for _ in 0..4 {
                let y = engine.forward(|m| m.forward(&ones()))?;
                masks.push(values(&y)?.iter().enumerate().map(|(i, v)| u64::from(*v != 0.0) << i).sum::<u64>());
                let mut loss = y.sum_all()?;
                if second {
                    loss = (loss * 0.0)?.add(&engine.forward(|m| m.forward(&ones()))?.sum_all()?)?;
                }
                engine.backward(&loss)?;
                engine.step()?;
            }
            Ok(masks)
        });
        let masks: Vec<Vec<u64>> = masks.unwrap().into_iter().map(|masks| masks.unwrap()).collect();
        assert_eq!(masks, RECORDED, "a second forward: {second}");
    }
}

/// The masks of 64 elements on two ranks in four micro steps, recorded from a version in which all forward passes of a
/// micro step drew the same masks.
const RECORDED: [[u64; 4]; 2] = [
    [17099315733248842395, 9484908114270979124, 2232646871490022952, 8751769305986403341],
    [13666296784663215539, 2918627930665486332, 10080520908486775434, 5828145642783806463],
];

/// Two branches, each on its own thread, with dropout in both.
struct Parallel([Scaled; 2]);

impl Module for Parallel {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let [a, b] = std::thread::scope(|scope| {
            self.0.each_ref().map(|branch| scope.spawn(move || branch.forward(x))).map(|branch| branch.join().unwrap())
        });
        a? + b?
    }
}

fn parallel(vb: VarBuilder<'_>) -> Result<Parallel> {
    Ok(Parallel([Scaled::new(vb.pp("a"))?, Scaled::new(vb.pp("b"))?]))
}

#[test]
fn dropout_on_threads_of_the_models_own_is_off_in_evaluation_and_an_error_in_training() {
    let mut engine = on_cpu().initialize(parallel, config(json!({}))).unwrap();
    let y = engine.eval(|m| m.forward(&ones())).unwrap();
    assert_eq!(values(&y).unwrap(), [2.0; 64]);
    let error = engine.forward(|m| m.forward(&ones())).unwrap_err().to_string();
    assert!(error.contains("on one of the model's own threads") && error.contains("engine.forward"), "{error}");
    // Without an engine, every use draws new numbers, on any thread.
    let plain = parallel(VarBuilder::from_varmap(&candle_nn::VarMap::new(), DType::F32, &Device::Cpu)).unwrap();
    let y = values(&plain.forward(&ones()).unwrap()).unwrap();
    assert!(y.contains(&0.0) || y.contains(&4.0), "{y:?}");
}

#[test]
fn a_seed_has_masks_of_its_own() {
    let masks = |seed| {
        let mut engine = on_cpu().seed(seed).initialize(Scaled::new, config(json!({}))).unwrap();
        values(&engine.forward(|m| m.forward(&ones())).unwrap()).unwrap()
    };
    let (one, two) = (masks(1), masks(2));
    assert_eq!(one, masks(1));
    // Two random masks differ in about half of their 64 elements.
    let differ = one.iter().zip(&two).filter(|(a, b)| a != b).count();
    assert!((16..=48).contains(&differ), "{differ}");
}

#[test]
fn masks_after_a_checkpoint_are_those_of_the_run_left_alone_also_after_the_batch_was_changed() {
    let folder = tempfile::tempdir().unwrap();
    let micro_step = |engine: &mut Engine<Scaled>| {
        let y = engine.forward(|m| m.forward(&ones())).unwrap();
        engine.backward(&y.sum_all().unwrap()).unwrap();
        engine.step().unwrap();
        values(&y).unwrap()
    };
    let mut uninterrupted = on_cpu().initialize(Scaled::new, config(json!({}))).unwrap();
    (0..3).for_each(|_| _ = micro_step(&mut uninterrupted));
    // From here on, a step has two micro steps.
    uninterrupted.set_train_batch_size(2).unwrap();
    (0..2).for_each(|_| _ = micro_step(&mut uninterrupted));
    uninterrupted.save_checkpoint(folder.path(), None, Value::Null).unwrap();
    let mut loaded = on_cpu().initialize(Scaled::new, config(json!({"gradient_accumulation_steps": 2}))).unwrap();
    loaded.load_checkpoint(folder.path(), None, &Default::default()).unwrap().unwrap();
    for _ in 0..4 {
        assert_eq!(micro_step(&mut loaded), micro_step(&mut uninterrupted));
    }
}
