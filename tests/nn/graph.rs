//! Layers of candle-zero and Candle's operations in one graph: gradients reach everything exactly once.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{Init, Module, VarBuilder};
use candle_zero::Engine;
use candle_zero::comm::threads;
use candle_zero::nn::{self, Activation, LayerNorm, Linear, LinearEpilogue, WeightLayout, composed};
use candle_zero::zero::{Unit, unit};
use serde_json::json;

fn tensor(shape: &[usize], seed: usize) -> Tensor {
    let n: usize = shape.iter().product();
    Tensor::from_iter((0..n).map(|i| (((i * 7 + seed * 13) * 2741 % 2003) as f32 / 1001.0) - 1.0), &Device::Cpu)
        .unwrap()
        .reshape(shape)
        .unwrap()
}

fn values(t: &Tensor) -> Vec<f32> {
    t.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

fn close(got: &Tensor, want: &Tensor, what: &str) {
    for (got, want) in values(got).iter().zip(values(want)) {
        assert!((got - want).abs() <= 2e-5 * (1.0 + want.abs()), "{what}: {got} instead of {want}");
    }
}

/// Combines all kinds of use: `x` goes into two layers and into Candle's product, `w` into two layers, into Candle's
/// square and, transposed, into a third layer; results of layers pass through Candle's operations into other layers.
fn mixed(x: &Tensor, w: &Tensor, b: &Tensor, fused: bool) -> Result<Tensor> {
    let gelu = |residual| LinearEpilogue { activation: Some(Activation::GeluTanh), residual: Some(residual) };
    let linear_with_epilogue = if fused { nn::linear_with_epilogue } else { composed::linear_with_epilogue };
    let layer_norm = if fused { nn::layer_norm } else { composed::layer_norm };
    let h = linear_with_epilogue(x, w, Some(b), WeightLayout::InOut, gelu(x))?;
    let h = layer_norm(&(&h.relu()? + (x * 0.5)?)?, b, b, 1e-5)?;
    let y = linear_with_epilogue(&h, &w.t()?, None, WeightLayout::OutIn, gelu(&h))?;
    let y = linear_with_epilogue(&y, w, None, WeightLayout::InOut, gelu(x))?;
    y.sqr()?.mean_all()? + (w.sqr()?.sum_all()? * 0.01)?
}

fn gradients(fused: bool, backwards: usize) -> Vec<Vec<Tensor>> {
    let vars = [tensor(&[5, 6], 1), tensor(&[6, 6], 2), tensor(&[6], 3)].map(|t| Var::from_tensor(&t).unwrap());
    let loss = mixed(&vars[0], &vars[1], &vars[2], fused).unwrap();
    (0..backwards)
        .map(|_| {
            let grads = loss.backward().unwrap();
            vars.iter().map(|v| grads.get(v).unwrap().clone()).collect()
        })
        .collect()
}

#[test]
fn layers_and_candles_operations_share_inputs_and_parameters() {
    let (fused, composed) = (gradients(true, 1), gradients(false, 1));
    for (i, (fused, composed)) in fused[0].iter().zip(&composed[0]).enumerate() {
        close(fused, composed, &format!("gradient {i}"));
    }
}

#[test]
fn without_an_engine_a_graph_can_be_differentiated_again() {
    let twice = gradients(true, 2);
    for (first, second) in twice[0].iter().zip(&twice[1]) {
        assert_eq!(values(first), values(second));
    }
}

/// A unit whose last operation is that of a layer. It uses one weight twice, and applies Candle's operations to
/// activations and to that weight.
struct Block {
    norm: LayerNorm,
    up: Linear,
    down: Linear,
}

impl Module for Block {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let h = self.up.forward(&self.norm.forward(x)?)?.relu()?;
        let scale = self.up.weight().sqr()?.mean_all()?.sqrt()?;
        self.down.forward_with_epilogue(
            &h.broadcast_mul(&scale)?,
            LinearEpilogue { residual: Some(x), ..LinearEpilogue::default() },
        )
    }
}

struct Model {
    table: nn::Embedding,
    blocks: Vec<Unit<Block>>,
}

impl Model {
    fn new(vb: VarBuilder<'_>) -> Result<Self> {
        let block = |vb: VarBuilder<'_>| {
            let weight = Init::Randn { mean: 0.0, stdev: 0.2 };
            Ok(Block {
                norm: LayerNorm::new(8, 1e-5, vb.pp("norm"))?,
                up: Linear::with_init(8, 12, true, weight, vb.pp("up"))?,
                down: Linear::with_init(12, 8, false, weight, vb.pp("down"))?,
            })
        };
        let blocks = (0..3).map(|i| unit(vb.pp(format!("block.{i}")), block)).collect::<Result<_>>()?;
        Ok(Self { table: nn::Embedding::new(11, 8, vb.pp("table"))?, blocks })
    }

    fn loss(&self, ids: &Tensor) -> Result<Tensor> {
        let x = self.blocks.iter().try_fold(self.table.forward(ids)?, |x, block| block.forward(&x))?;
        let loss = nn::linear_cross_entropy(&x, self.table.weight(), WeightLayout::OutIn, ids)?;
        // The embedding table is used a third time, by one of Candle's operations.
        loss + (self.table.weight().to_dtype(DType::F32)?.sqr()?.sum_all()? * 1e-3)?
    }
}

fn train(stage: u8, bf16: bool, extra: serde_json::Value) -> Vec<f32> {
    let mut config = json!({
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "bf16": {"enabled": bf16},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0},
    });
    for (key, value) in extra.as_object().unwrap() {
        config[key] = value.clone();
    }
    let config = &config;
    let ranks = threads::run(2, move |comm| -> candle_zero::Result<Vec<f32>> {
        let rank = comm.rank() as u32;
        let builder = Engine::builder().communicator(comm).device(Device::Cpu);
        let mut engine = builder.initialize(Model::new, config.clone())?;
        let mut losses = Vec::new();
        for step in 0..12u32 {
            let ids = Tensor::from_iter((0..7).map(|i| (i * i + step + rank) % 11), &Device::Cpu)?.reshape((1, 7))?;
            let loss = engine.forward(|model| model.loss(&ids))?;
            engine.backward(&loss)?;
            engine.step()?;
            losses.push(loss.to_scalar::<f32>()?);
        }
        Ok(losses)
    });
    ranks.unwrap().into_iter().next().unwrap().unwrap()
}

#[test]
fn parameters_used_both_ways_train_to_the_same_bits_at_every_stage() {
    for bf16 in [false, true] {
        let reference = train(0, bf16, json!({}));
        assert!(reference[11] < reference[0], "{reference:?}");
        for stage in 1..=3 {
            assert_eq!(train(stage, bf16, json!({})), reference, "bf16 {bf16}, stage {stage}");
        }
    }
    let recomputed = json!({"activation_checkpointing": {"number_checkpoints": 3}});
    assert_eq!(train(3, false, recomputed), train(0, false, json!({})));
}

#[test]
fn what_an_engine_has_differentiated_cannot_be_differentiated_again() {
    let config = json!({
        "train_batch_size": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    });
    let mut engine = Engine::builder().device(Device::Cpu).initialize(Model::new, config).unwrap();
    let ids = Tensor::new(&[[1u32, 2, 3]], &Device::Cpu).unwrap();
    let loss = engine.forward(|model| model.loss(&ids)).unwrap();
    engine.backward(&loss).unwrap();
    let text = loss.backward().unwrap_err().to_string();
    insta::assert_snapshot!(text.lines().next().unwrap(), @"cross_entropy: this graph was already differentiated, and its saved values are gone; run forward again");
}
