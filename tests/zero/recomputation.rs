//! A recomputing unit gives the same result both times, or an error says why it does not.

use crate::support::tiny::config;
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{Module, VarBuilder};
use candle_zero::comm::threads;
use candle_zero::error::{EngineError, Error};
use candle_zero::zero::{Unit, unit};
use candle_zero::{Engine, nn};
use serde_json::{Value, json};
use std::sync::atomic::{AtomicUsize, Ordering};

/// A product `x * w`, to which something random is then applied.
struct Noisy {
    w: Tensor,
    noise: fn(&Tensor) -> Result<Tensor>,
}

impl Module for Noisy {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        (self.noise)(&x.broadcast_mul(&self.w)?)
    }
}

struct Model {
    scale: Tensor,
    unit: Unit<Noisy>,
}

fn build(noise: fn(&Tensor) -> Result<Tensor>, recompute: bool) -> impl Fn(VarBuilder<'_>) -> Result<Model> {
    move |vb| {
        let one = candle_nn::Init::Const(1.0);
        let noisy = |vb: VarBuilder<'_>| Ok(Noisy { w: vb.get_with_hints(64, "w", one)?, noise });
        Ok(Model {
            scale: vb.get_with_hints((1, 64), "scale", one)?,
            unit: unit(vb.pp("block.0"), noisy)?.checkpointed(recompute),
        })
    }
}

type Noise = fn(&Tensor) -> Result<Tensor>;

const NOISES: [(&str, Noise); 3] = [
    ("dropout", |x| candle_nn::ops::dropout(x, 0.5)),
    ("uniform noise", |x| x + Tensor::rand(0f32, 1f32, x.shape(), x.device())?),
    ("a tenth of one element", |x| {
        let mut values = x.flatten_all()?.to_vec1::<f32>()?;
        static CALLS: AtomicUsize = AtomicUsize::new(0);
        values[63] += 0.1 * CALLS.fetch_add(1, Ordering::Relaxed) as f32;
        x + (Tensor::from_vec(values, x.shape(), x.device())? - x.detach())?
    }),
];

/// Takes one step, and returns the error if there is one.
fn step(build: &(impl Fn(VarBuilder<'_>) -> Result<Model> + Sync), config: &Value) -> candle_zero::Result<()> {
    let ranks = threads::run(1, |comm| {
        let builder = Engine::builder().communicator(comm).device(Device::Cpu);
        let mut engine = builder.initialize(build, config.clone())?;
        let loss = engine.forward(|m| m.unit.forward(&m.scale)?.sum_all())?;
        engine.backward(&loss)?;
        engine.step()
    });
    ranks.unwrap().remove(0)
}

/// Returns the two ways to switch recomputation on.
fn ways(stage: u8) -> [(bool, Value); 2] {
    let every = json!({"activation_checkpointing": {"number_checkpoints": 1}});
    [(true, config(stage, 1, json!({}), json!({}))), (false, config(stage, 1, json!({}), every))]
}

#[test]
fn randomness_that_cannot_be_drawn_again_is_an_error_that_names_the_unit_and_the_way_out() {
    for (name, noise) in NOISES {
        for (recompute, config) in [0, 3].into_iter().flat_map(ways) {
            let error = step(&build(noise, recompute), &config).unwrap_err();
            let what = format!("{name}, {config}: {error}");
            let named =
                matches!(&error, Error::Engine(EngineError::RecomputationDiffers { unit }) if unit == "block.0");
            assert!(named, "{what}");
            assert!(error.to_string().contains("candle_zero::nn::Dropout"), "{what}");
        }
        // The gradient check is off, because it compares losses of several forward passes, each of which has different
        // noise.
        let config = config(3, 1, json!({}), json!({"gradient_check": false}));
        step(&build(noise, false), &config).unwrap();
    }
}

#[test]
fn the_error_reaches_a_plain_backward_in_the_same_words() {
    let ranks = threads::run(1, |comm| {
        let builder = Engine::builder().communicator(comm).device(Device::Cpu);
        let mut engine = builder.initialize(build(NOISES[0].1, true), config(0, 1, json!({}), json!({})))?;
        let x = Var::from_tensor(&Tensor::ones((1, 64), DType::F32, &Device::Cpu)?)?;
        let loss = engine.forward(|m| m.unit.forward(&x)?.sum_all())?;
        Ok(loss.backward().map(drop).unwrap_err().to_string())
    });
    let text = ranks.unwrap().remove(0).unwrap();
    assert!(text.contains("block.0") && text.contains("candle_zero::nn::Dropout"), "{text}");
}

#[test]
fn what_can_be_drawn_again_trains() {
    let dropout: Noise = |x| nn::Dropout::new(0.5, 3).forward(x);
    for (recompute, config) in [0, 3].into_iter().flat_map(ways) {
        step(&build(dropout, recompute), &config).unwrap();
    }
}

#[test]
fn inputs_that_do_not_lie_row_by_row_are_recomputed_to_the_bit() {
    // A sum along strided rows is computed in a different order from one along contiguous rows.
    let sum: Noise = |x| x.t()?.sum_keepdim(0)?.broadcast_add(&x.t()?)?.t();
    for (recompute, config) in [0, 3].into_iter().flat_map(ways) {
        let ranks = threads::run(1, |comm| {
            let builder = Engine::builder().communicator(comm).device(Device::Cpu);
            let mut engine = builder.initialize(build(sum, recompute), config.clone())?;
            let x = Tensor::arange(0f32, 64f32 * 64f32, &Device::Cpu)?.reshape((64, 64))?.sin()?;
            let loss = engine.forward(|m| m.unit.forward(&x.broadcast_mul(&m.scale)?.t()?)?.sum_all())?;
            engine.backward(&loss)
        });
        ranks.unwrap().remove(0).unwrap();
    }
}

/// A module that uses its input `inside` times, through operations of Candle or of candle-zero.
struct RepeatedUse {
    w: Tensor,
    inside: usize,
    of_candle: bool,
}

impl RepeatedUse {
    fn term(&self, i: usize, x: &Tensor) -> Result<Tensor> {
        match (i, self.of_candle) {
            (0, true) => x.broadcast_mul(&self.w)?.tanh(),
            (1, true) => x.sin(),
            (_, true) => x.sqr()?.cos(),
            (0, false) => nn::rms_norm(x, &self.w, 1e-5),
            (1, false) => nn::silu(x),
            (_, false) => nn::gelu_tanh(x),
        }
    }
}

impl Module for RepeatedUse {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let terms = (0..self.inside).map(|i| self.term(i, x)).collect::<Result<Vec<_>>>()?;
        let sum = terms.into_iter().reduce(|a, b| (a + b).unwrap());
        Ok(sum.unwrap())
    }
}

struct Wrapper {
    scale: Tensor,
    unit: Unit<RepeatedUse>,
}

/// Returns the bits of the gradients of a model with a unit. The unit uses its input `inside` times, and the rest of
/// the model uses the same input `outside` times.
fn gradients([inside, outside]: [usize; 2], of_candle: bool, config: &Value, recompute: bool) -> Vec<Vec<u32>> {
    let ranks = threads::run(1, |comm| {
        let build = |vb: VarBuilder<'_>| {
            let one = candle_nn::Init::Const(1.0);
            let repeated =
                |vb: VarBuilder<'_>| Ok(RepeatedUse { w: vb.get_with_hints(64, "w", one)?, inside, of_candle });
            let unit = unit(vb.pp("block.0"), repeated)?.checkpointed(recompute);
            Ok(Wrapper { scale: vb.get_with_hints((1, 64), "scale", one)?, unit })
        };
        let mut engine = Engine::builder().communicator(comm).device(Device::Cpu).initialize(build, config.clone())?;
        let x =
            Tensor::arange(0f32, 31f32 * 64f32, &Device::Cpu)?.reshape((31, 64))?.sin()?.to_dtype(engine.dtype())?;
        let loss = engine.forward(|m| {
            let x = x.broadcast_mul(&m.scale)?;
            let mut y = m.unit.forward(&x)?;
            for i in 0..outside {
                y = (y + (&x * (0.3 + i as f64))?)?;
            }
            y.to_dtype(DType::F32)?.sqr()?.sum_all()
        })?;
        engine.backward(&loss)?;
        ["scale", "block.0.w"]
            .into_iter()
            .map(|name| {
                let grad = engine.safe_get_full_grad(name)?.unwrap().flatten_all()?.to_vec1::<f32>()?;
                Ok(grad.into_iter().map(f32::to_bits).collect())
            })
            .collect()
    });
    ranks.unwrap().remove(0).unwrap()
}

#[test]
fn gradients_are_the_same_bits_but_for_an_input_that_is_used_several_times_inside_and_outside_too() {
    for (more, tolerance) in [(json!({}), 1e-5), (json!({"bf16": {"enabled": true}}), 3e-2)] {
        for (stage, of_candle) in [(0, true), (0, false), (3, true), (3, false)] {
            let config = config(stage, 1, json!({}), more.clone());
            for uses in [[1, 0], [2, 0], [3, 0], [1, 1], [1, 2], [2, 1], [3, 2]] {
                let what = format!("{uses:?}, Candle's: {of_candle}, {config}");
                let [stored, rerun] = [false, true].map(|recompute| gradients(uses, of_candle, &config, recompute));
                assert!(stored[1] == rerun[1], "the unit's own parameter: {what}");
                let [inside, outside] = uses;
                if inside == 1 || outside == 0 {
                    assert!(stored[0] == rerun[0], "the parameter before the unit: {what}");
                }
                // Otherwise, the gradient is the same sum, computed in a different order.
                for (a, b) in stored[0].iter().zip(&rerun[0]).map(|(a, b)| (f32::from_bits(*a), f32::from_bits(*b))) {
                    assert!((a - b).abs() <= tolerance * a.abs().max(1.0), "{a} {b}: {what}");
                }
            }
        }
    }
}
