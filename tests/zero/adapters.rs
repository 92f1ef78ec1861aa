//! Low-rank adapters over a frozen base: the same bits at every stage and wherever states are stored, whatever
//! the format of the base.

use crate::support::tiny::{VOCAB, WIDTH, batch, config};
use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{Module, VarBuilder};
use candle_zero::comm::threads;
use candle_zero::nn::{
    Activation, Embedding, LayerNorm, LinearEpilogue, LoraConfig, Projection, ProjectionOptions, WeightLayout,
    causal_attention, cross_entropy, is_adapter, without_adapters,
};
use candle_zero::optim::ParameterGroup;
use candle_zero::precision::{Nf4Scales, WeightPacking};
use candle_zero::zero::{Unit, unit};
use candle_zero::{Engine, EngineBuilder};
use serde_json::{Value, json};
use std::collections::BTreeMap;

const STEPS: usize = 4;

struct Block {
    norm: LayerNorm,
    qkv: Projection,
    up: Projection,
    down: Projection,
}

impl Block {
    fn new(lora: Option<&LoraConfig>, vb: VarBuilder<'_>) -> Result<Self> {
        let projection = |name: &str, inputs, outputs, layout| {
            let options = ProjectionOptions { layout, bias: true, std: 0.2, lora };
            Projection::new(inputs, outputs, options, vb.pp(name))
        };
        Ok(Self {
            norm: LayerNorm::new(WIDTH, 1e-5, vb.pp("norm"))?,
            qkv: projection("qkv", WIDTH, 3 * WIDTH, WeightLayout::InOut)?,
            up: projection("mlp.up", WIDTH, 20, WeightLayout::OutIn)?,
            down: projection("mlp.down", 20, WIDTH, WeightLayout::OutIn)?,
        })
    }
}

impl Module for Block {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let y = causal_attention(&self.qkv.forward(&self.norm.forward(x)?)?, 2)?;
        let gelu = LinearEpilogue { activation: Some(Activation::GeluTanh), ..LinearEpilogue::default() };
        let h = self.up.forward_with_epilogue(&y, gelu)?;
        self.down.forward_with_epilogue(&h, LinearEpilogue { residual: Some(x), ..LinearEpilogue::default() })
    }
}

struct Model {
    embed: Embedding,
    blocks: Vec<Unit<Block>>,
    head: Projection,
}

impl Model {
    fn new(lora: Option<&LoraConfig>, recompute: bool, vb: VarBuilder<'_>) -> Result<Self> {
        let block = |i| Ok(unit(vb.pp(format!("layer.{i}")), |vb| Block::new(lora, vb))?.checkpointed(recompute));
        let head = ProjectionOptions { layout: WeightLayout::OutIn, bias: false, std: 0.2, lora: None };
        Ok(Self {
            embed: Embedding::new(VOCAB, WIDTH, vb.pp("embed"))?,
            blocks: (0..3).map(block).collect::<Result<_>>()?,
            head: Projection::new(WIDTH, VOCAB, head, vb.pp("head"))?,
        })
    }

    fn loss(&self, ids: &Tensor, targets: &Tensor) -> Result<Tensor> {
        let x = self.blocks.iter().try_fold(self.embed.forward(ids)?, |x, block| block.forward(&x))?;
        cross_entropy(&self.head.forward(&x)?, targets)
    }
}

type Losses = Vec<u32>;

/// Trains the adapters. Returns the losses of rank 0 and the exported file.
fn train(
    world: usize,
    lora: &str,
    recompute: bool,
    config: &Value,
    more: impl Fn(EngineBuilder) -> EngineBuilder + Sync,
) -> (Losses, BTreeMap<String, Vec<u8>>) {
    let lora: LoraConfig = lora.parse().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.safetensors");
    let losses = threads::run(world, |comm| {
        let rank = comm.rank();
        let keep = ParameterGroup::default().names(["*.lora_*"]).keep_f32();
        let builder = Engine::builder().communicator(comm).device(Device::Cpu).parameter_groups(vec![keep]);
        let builder = more(builder.trainable(|name, _| is_adapter(name)));
        let mut engine = builder.initialize(|vb| Model::new(Some(&lora), recompute, vb), config.clone())?;
        let mut losses = vec![];
        for micro in 0..STEPS * 2 {
            let (ids, targets) = batch(micro * world + rank);
            let loss = engine.forward(|model| model.loss(&ids, &targets))?;
            losses.push(loss.to_dtype(DType::F32)?.to_scalar::<f32>()?.to_bits());
            engine.backward(&loss)?;
            engine.step()?;
        }
        engine.export_safetensors(&file)?;
        Ok(losses)
    });
    let losses = losses.unwrap().remove(0).unwrap();
    let bytes = std::fs::read(&file).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    (losses, tensors.tensors().into_iter().map(|(name, view)| (name, view.data().to_vec())).collect())
}

fn released() -> Value {
    json!({"stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 0})
}

#[test]
fn adapters_give_the_same_bits_at_every_stage_and_place() {
    let folder = tempfile::tempdir().unwrap();
    let lora = ["r=2,targets=qkv+mlp.up", "r=3,alpha=2,dropout=0.25,rslora", "r=2,dora,dropout=0.1"];
    for (i, lora) in lora.into_iter().enumerate() {
        for more in [json!({}), json!({"bf16": {"enabled": true}})] {
            let world = 1 + i % 2;
            let run = |stage, recompute, zero: Value| {
                train(world, lora, recompute, &config(stage, 2, zero, more.clone()), |builder| builder)
            };
            let reference = run(0, false, json!({}));
            for stage in 1..4 {
                assert!(reference == run(stage, false, released()), "{lora}, stage {stage}, {more}");
            }
            // In 16 bits, a recomputing block, which uses its input twice, rounds the gradients of this input at a
            // different point.
            if more == json!({}) {
                assert!(reference == run(3, true, released()), "{lora}, recomputed");
            }
            let mut nvme = released();
            nvme["offload_param"] = json!({"device": "nvme", "nvme_path": folder.path()});
            nvme["offload_optimizer"] = json!({"device": "nvme", "nvme_path": folder.path()});
            assert!(reference == run(3, false, nvme), "{lora}, nvme, {more}");
        }
    }
}

#[test]
fn adapters_over_a_packed_base_give_the_same_bits_at_every_stage() {
    for packing in [WeightPacking::Int8, WeightPacking::Nf4(Nf4Scales::DoubleQuantized)] {
        for more in [json!({}), json!({"bf16": {"enabled": true}})] {
            let run = |stage, zero| {
                let packs = |name: &str, shape: &[usize]| shape.len() == 2 && !is_adapter(name);
                let config = config(stage, 2, zero, more.clone());
                train(2, "r=2,dropout=0.1", false, &config, |builder| builder.quantized(packing, packs))
            };
            let reference = run(0, json!({}));
            assert!(reference == run(3, released()), "{packing:?}, {more}");
        }
    }
}

#[test]
fn training_changes_the_selected_adapters_and_nothing_else() {
    let (_, after) = train(2, "r=2,targets=qkv+mlp.up", false, &config(3, 2, released(), json!({})), |b| b);
    let adapters: Vec<&str> = after.keys().map(String::as_str).filter(|name| is_adapter(name)).collect();
    let want = (0..3).flat_map(|i| {
        ["mlp.up", "qkv"].into_iter().flat_map(move |p| ["A", "B"].map(|m| format!("layer.{i}.{p}.lora_{m}.weight")))
    });
    assert_eq!(adapters, want.collect::<Vec<_>>());
    let (_, other) = train(2, "r=2,targets=mlp.down", false, &config(0, 2, json!({}), json!({})), |b| b);
    for (name, values) in after.iter().filter(|(name, _)| !is_adapter(name)) {
        assert!(other[name] == *values, "{name} belongs to the base");
    }
    assert!(adapters.iter().filter(|name| name.contains("lora_B")).all(|name| after[*name].iter().any(|b| *b != 0)));
}

#[test]
fn a_model_with_its_adapters_off_is_its_base() {
    let config = config(3, 1, released(), json!({}));
    let results = threads::run(2, |comm| {
        let lora: LoraConfig = "r=2,dropout=0.5".parse()?;
        let builder = Engine::builder().communicator(comm).device(Device::Cpu).trainable(|name, _| is_adapter(name));
        let mut engine = builder.initialize(|vb| Model::new(Some(&lora), false, vb), config.clone())?;
        let (ids, targets) = batch(0);
        let value = |loss: Tensor| loss.to_scalar::<f32>();
        let before = engine.eval(|model| model.loss(&ids, &targets))?;
        for step in 0..3 {
            let (ids, targets) = batch(step);
            let loss = engine.forward(|model| {
                let base = without_adapters(|| model.loss(&ids, &targets))?;
                assert!(!base.track_op());
                model.loss(&ids, &targets)
            })?;
            engine.backward(&loss)?;
            engine.step()?;
        }
        let off = engine.eval(|model| without_adapters(|| model.loss(&ids, &targets)))?;
        let on = engine.eval(|model| model.loss(&ids, &targets))?;
        Ok((value(before)?, value(off)?, value(on)?))
    });
    for result in results.unwrap() {
        let (before, off, on) = result.unwrap();
        assert_eq!(before.to_bits(), off.to_bits());
        assert!(on < before, "{on} {before}");
    }
}
