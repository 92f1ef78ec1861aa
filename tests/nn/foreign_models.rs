//! Models written without candle-zero: they train unchanged or, if Candle cuts their graph, are refused with an error
//! that names the parameters.

use candle_core::{DType, Device, Tensor};
use candle_nn::{Activation, LayerNorm, Linear, Module, VarBuilder, layer_norm, linear};
use candle_transformers::models::stable_diffusion::unet_2d_blocks::{UNetMidBlock2D, UNetMidBlock2DConfig};
use candle_transformers::models::stable_diffusion::vae::{AutoEncoderKL, AutoEncoderKLConfig};
use candle_transformers::models::{mamba, qwen2};
use candle_zero::Engine;
use candle_zero::comm::threads;
use candle_zero::error::{EngineError, Error};
use serde_json::{Value, json};
use std::cell::RefCell;

const WORLD: usize = 2;

fn config(stage: u8) -> Value {
    json!({
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
        "zero_optimization": {
            "stage": stage, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0,
        },
    })
}

/// Returns an image of `channels` x 8 x 8 with a pattern that is different for each rank.
fn image(channels: usize, rank: usize) -> Tensor {
    let pixel = |i: usize| ((i * (7 + rank)) % 16) as f32 / 8.0 - 1.0;
    Tensor::from_iter((0..channels * 64).map(pixel), &Device::Cpu).unwrap().reshape((1, channels, 8, 8)).unwrap()
}

/// Returns the losses of every rank over some steps.
fn train<M>(
    stage: u8,
    build: impl Fn(VarBuilder<'_>) -> candle_core::Result<M> + Sync,
    loss: impl Fn(&M, usize) -> candle_core::Result<Tensor> + Sync,
) -> Vec<Vec<f32>> {
    let results = threads::run(WORLD, |comm| {
        let rank = comm.rank();
        let mut engine = Engine::builder().communicator(comm).initialize(&build, config(stage))?;
        let mut losses = vec![];
        for _ in 0..12 {
            let value = engine.forward(|model| loss(model, rank))?;
            losses.push(value.to_dtype(DType::F32)?.to_scalar::<f32>()?);
            engine.backward(&value)?;
            engine.step()?;
        }
        Ok(losses)
    });
    results.unwrap().into_iter().map(|r| r.unwrap()).collect()
}

#[test]
fn the_autoencoder_of_stable_diffusion_trains_at_every_stage() {
    let sizes = || AutoEncoderKLConfig {
        block_out_channels: vec![8, 16],
        layers_per_block: 1,
        latent_channels: 4,
        norm_num_groups: 4,
        use_quant_conv: true,
        use_post_quant_conv: true,
    };
    for stage in 0..4 {
        let losses = train(
            stage,
            |vb| AutoEncoderKL::new(vb, 3, 3, sizes()),
            // The model draws its latent sample from an unseeded generator, so bits cannot be compared here.
            |model, rank| {
                let x = image(3, rank);
                (model.decode(&model.encode(&x)?.sample()?)? - x)?.sqr()?.mean_all()
            },
        );
        for losses in losses {
            let (first, last) = (losses[0], losses[losses.len() - 1]);
            assert!(last < first * 0.9, "stage {stage}: {losses:?}");
        }
    }
}

#[test]
fn residual_and_attention_blocks_of_a_unet_give_the_same_bits_at_every_stage() {
    let run = |stage| {
        let sizes =
            UNetMidBlock2DConfig { resnet_groups: Some(4), attn_num_head_channels: Some(8), ..Default::default() };
        train(
            stage,
            move |vb| UNetMidBlock2D::new(vb, 16, None, sizes),
            |model, rank| {
                let x = image(16, rank);
                (model.forward(&x, None)? - x.roll(1, 3)?)?.sqr()?.mean_all()
            },
        )
    };
    let reference = run(0);
    assert!(reference[0][11] < reference[0][0] * 0.9, "{reference:?}");
    for stage in 1..4 {
        assert_eq!(run(stage), reference, "stage {stage}");
    }
}

/// A model as people write it: candle-nn's LayerNorm runs as a fused operation without a backward pass.
struct Cut {
    l1: Linear,
    norm: LayerNorm,
    l2: Linear,
}

#[test]
fn a_model_whose_graph_is_cut_is_refused_with_the_names_of_its_parameters() {
    let build = |vb: VarBuilder<'_>| {
        Ok(Cut {
            l1: linear(6, 6, vb.pp("l1"))?,
            norm: layer_norm(6, 1e-5, vb.pp("norm"))?,
            l2: linear(6, 1, vb.pp("l2"))?,
        })
    };
    for stage in 0..4 {
        let results = threads::run(WORLD, |comm| {
            let mut engine = Engine::builder().communicator(comm).initialize(build, config(stage))?;
            let x = Tensor::ones((2, 6), DType::F32, &Device::Cpu)?;
            let run = |m: &Cut| m.l2.forward(&m.norm.forward(&m.l1.forward(&x)?)?)?.sqr()?.mean_all();
            let loss = engine.forward(run)?;
            engine.backward(&loss)?;
            let error = engine.step().unwrap_err();
            // The engine does not continue after this.
            assert!(matches!(engine.forward(run), Err(Error::Engine(EngineError::Stopped(_)))));
            Ok(error.to_string())
        });
        for error in results.unwrap() {
            insta::allow_duplicates! {
                insta::assert_snapshot!(error.unwrap(), @"4 trainable parameters received no gradient in the first optimizer step: l1.weight, l1.bias, norm.weight, norm.bias; either an operation without a backward pass cuts the graph between them and the loss, as candle_nn's LayerNorm, RmsNorm, softmax_last_dim, rope and sdpa do: replace the operation with a layer of candle_zero::nn, or with layer_norm_slow, rms_norm_slow, softmax(D::Minus1), rope_slow (freezing these parameters would leave the graph cut, and other parameters would be trained with an incomplete gradient); or the model does not use them: if that is intended, set zero_optimization.ignore_unused_parameters to true, or call EngineBuilder::ignore_unused_parameters");
            }
        }
    }
}

/// Returns the error of the first step of a model in which only some parameters are trained. Users may freeze the
/// others because an earlier error named them as parameters without a gradient, although a cut graph is the cause.
fn first_error<M>(
    stage: u8,
    build: impl Fn(VarBuilder<'_>) -> candle_core::Result<M> + Sync,
    trained: fn(&str) -> bool,
    loss: impl Fn(&M, usize) -> candle_core::Result<Tensor> + Sync,
) -> Error {
    let results = threads::run(WORLD, |comm| {
        let rank = comm.rank();
        let builder = Engine::builder().communicator(comm).trainable(move |name, _| trained(name)).gradient_check(true);
        let mut engine = builder.initialize(&build, config(stage))?;
        let value = engine.forward(|model| loss(model, rank))?;
        engine.backward(&value)?;
        engine.step()?;
        Ok(engine.gradient_report().map(ToString::to_string))
    });
    results.unwrap().remove(0).unwrap_err()
}

fn texts(rank: usize) -> Tensor {
    let ids = (0..16).map(|i| ((i * 7 + rank * 5 + 3) % 60) as u32);
    Tensor::from_iter(ids, &Device::Cpu).unwrap().reshape((2, 8)).unwrap()
}

#[test]
fn language_models_whose_frozen_norms_cut_the_graph_end_the_first_step() {
    let qwen = |vb: VarBuilder<'_>| {
        let sizes = qwen2::Config {
            vocab_size: 64,
            hidden_size: 32,
            intermediate_size: 64,
            num_hidden_layers: 2,
            num_attention_heads: 4,
            num_key_value_heads: 2,
            max_position_embeddings: 64,
            sliding_window: 64,
            max_window_layers: 2,
            tie_word_embeddings: true,
            rope_theta: 1e4,
            rms_norm_eps: 1e-6,
            use_sliding_window: false,
            hidden_act: Activation::Silu,
        };
        qwen2::ModelForCausalLM::new(&sizes, vb).map(RefCell::new)
    };
    let loss_of_qwen = |model: &RefCell<qwen2::ModelForCausalLM>, rank: usize| {
        let mut model = model.borrow_mut();
        model.clear_kv_cache();
        let logits = model.forward(&texts(rank), 0)?.squeeze(1)?;
        candle_nn::loss::cross_entropy(&logits, &texts(rank + 1).narrow(1, 0, 1)?.squeeze(1)?.contiguous()?)
    };
    let sizes = || mamba::Config { d_model: 32, n_layer: 2, vocab_size: 64, pad_vocab_size_multiple: 8 };
    let loss_of_mamba = |model: &mamba::Model, rank: usize| {
        // The batch has a single text, because Candle's Mamba cannot process more.
        let mut state = mamba::State::new(1, &sizes(), DType::F32, &Device::Cpu)?;
        let ids = texts(rank).narrow(0, 0, 1)?;
        let logits = (0..7).map(|i| model.forward(&ids.narrow(1, i, 1)?.squeeze(1)?, &mut state));
        let logits = Tensor::cat(&logits.collect::<candle_core::Result<Vec<_>>>()?, 0)?;
        let targets = (1..8).map(|i| ids.narrow(1, i, 1)?.squeeze(1)).collect::<candle_core::Result<Vec<_>>>()?;
        candle_nn::loss::cross_entropy(&logits, &Tensor::cat(&targets, 0)?)
    };
    for stage in [0, 3] {
        let errors = [
            ("Qwen2", first_error(stage, qwen, |name| name == "model.embed_tokens.weight", loss_of_qwen)),
            (
                "Mamba",
                first_error(
                    stage,
                    |vb| mamba::Model::new(&sizes(), vb),
                    |name| name.starts_with("embedding"),
                    loss_of_mamba,
                ),
            ),
        ];
        for (name, error) in errors {
            assert!(
                matches!(error, Error::Engine(EngineError::WrongGradient { .. })),
                "{name}, stage {stage}: {error}"
            );
        }
    }
}
