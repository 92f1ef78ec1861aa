//! The smallest program that uses the library: an MLP of candle-nn's layers, trained under ZeRO.
//!
//!     zerorun --num_ranks 2 examples/minimal.rs --ds_config ds_configs/zero2.json

use candle_core::{Result, Tensor};
use candle_nn::{Activation, Module, Sequential, VarBuilder, linear, seq};
use candle_zero::Engine;

fn mlp(vb: VarBuilder) -> Result<Sequential> {
    Ok(seq().add(linear(2, 64, vb.pp("l1"))?).add(Activation::Gelu).add(linear(64, 1, vb.pp("l2"))?))
}

fn main() -> anyhow::Result<()> {
    let mut engine = Engine::initialize(mlp, candle_zero::cli::ds_config_or_exit())?;
    let batch = engine.config().batch;
    let mut number = engine.rank(); // each rank sees different samples
    for step in 0..200 {
        let mut last = 0.0;
        for _ in 0..batch.gradient_accumulation_steps {
            // The points are spread over a square. The model learns the product of their coordinates.
            let mut points: Vec<f32> = vec![];
            for _ in 0..batch.train_micro_batch_size_per_gpu {
                number += engine.world_size();
                points.extend([(number * 37 % 101) as f32 / 50.0 - 1.0, (number * 53 % 97) as f32 / 48.0 - 1.0]);
            }
            let products: Vec<f32> = points.chunks(2).map(|p| p[0] * p[1]).collect();
            let x = Tensor::new(points, engine.device())?.reshape(((), 2))?;
            let y = Tensor::new(products, engine.device())?.unsqueeze(1)?;
            let loss = engine.forward(|model| (model.forward(&x)? - &y)?.sqr()?.mean_all())?;
            engine.backward(&loss)?;
            engine.step()?;
            last = loss.to_scalar::<f32>()?;
        }
        if engine.rank() == 0 && (step + 1) % 50 == 0 {
            println!("step {:3}  loss {last:.5}", step + 1);
        }
    }
    Ok(())
}
