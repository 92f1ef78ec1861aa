//! A parameter's gradients count only in the backward pass of the engine that owns it. Any other backward pass through
//! its model (Candle's own `loss.backward()`, another engine's) changes nothing in the engine, at any stage, and gives
//! its caller the correct gradients.

use crate::support::tiny::{Shape, Tiny, batch, config};
use candle_core::{CpuStorage, CustomOp1, DType, Device, Layout, Result, Tensor, Var};
use candle_nn::{Module, VarBuilder, VarMap, linear, linear_no_bias};
use candle_zero::Engine;
use candle_zero::comm::{Communicator, threads};
use candle_zero::memory::MemoryKind;
use candle_zero::nn::{Conv1D, LayerNorm, gelu_tanh};
use candle_zero::zero::{Unit, unit};
use serde_json::{Value, json};
use std::sync::Arc;

const WIDTH: usize = 6;

/// A model, as a function of its input.
type Model = Box<dyn Fn(&Tensor) -> Result<Tensor> + Send>;
type Build = fn(VarBuilder<'_>) -> Result<Model>;

fn input(sample: usize) -> Tensor {
    let values = (0..3 * WIDTH).map(|i| ((i * 7 + sample * 11) % 13) as f32 / 6.0 - 1.0);
    Tensor::from_iter(values, &Device::Cpu).unwrap().reshape((3, WIDTH)).unwrap()
}

/// Returns a model with a layer, three units, and a head that belongs to the root, all made of Candle's own operations.
fn of_candle(vb: VarBuilder<'_>) -> Result<Model> {
    of_candle_recomputing(vb, false)
}

fn of_candle_that_recomputes(vb: VarBuilder<'_>) -> Result<Model> {
    of_candle_recomputing(vb, true)
}

fn of_candle_recomputing(vb: VarBuilder<'_>, recompute: bool) -> Result<Model> {
    let first = linear(WIDTH, WIDTH, vb.pp("first"))?;
    let layer = |i| Ok(unit(vb.pp(format!("h.{i}")), |vb| linear(WIDTH, WIDTH, vb))?.checkpointed(recompute));
    let units: Vec<Unit<_>> = (0..3).map(layer).collect::<Result<_>>()?;
    let head = linear_no_bias(WIDTH, 2, vb.pp("head"))?;
    Ok(Box::new(move |x| {
        let x = units.iter().try_fold(first.forward(x)?, |x, unit| unit.forward(&x)?.tanh())?;
        head.forward(&x)
    }))
}

/// Returns a model of the same structure with candle-zero's layers.
fn of_own_layers(vb: VarBuilder<'_>) -> Result<Model> {
    own_layers(vb, false)
}

fn of_own_layers_that_recompute(vb: VarBuilder<'_>) -> Result<Model> {
    own_layers(vb, true)
}

struct Block(LayerNorm, Conv1D);

impl Module for Block {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        gelu_tanh(&self.1.forward(&self.0.forward(x)?)?)
    }
}

fn own_layers(vb: VarBuilder<'_>, recompute: bool) -> Result<Model> {
    let block = |vb: VarBuilder<'_>| {
        Ok(Block(LayerNorm::new(WIDTH, 1e-5, vb.pp("norm"))?, Conv1D::new(WIDTH, WIDTH, 0.4, vb.pp("proj"))?))
    };
    let first = Conv1D::new(WIDTH, WIDTH, 0.4, vb.pp("first"))?;
    let layer = |i| Ok(unit(vb.pp(format!("h.{i}")), block)?.checkpointed(recompute));
    let units: Vec<Unit<_>> = (0..3).map(layer).collect::<Result<_>>()?;
    let head = Conv1D::new(WIDTH, 2, 0.4, vb.pp("head"))?;
    Ok(Box::new(move |x| {
        let x = units.iter().try_fold(first.forward(x)?, |x, unit| unit.forward(&x))?;
        head.forward(&x)
    }))
}

const MODELS: [(&str, Build); 4] = [
    ("of Candle's layers", of_candle),
    ("of Candle's layers, recomputing", of_candle_that_recomputes),
    ("of candle-zero's layers", of_own_layers),
    ("of candle-zero's layers, recomputing", of_own_layers_that_recompute),
];

fn engine(comm: &Arc<dyn Communicator>, build: Build, config: &Value) -> candle_zero::Result<Engine<Model>> {
    Engine::builder().communicator(comm.clone()).device(Device::Cpu).initialize(build, config.clone())
}

fn loss_of(y: &Tensor) -> Result<Tensor> {
    y.sqr()?.mean_all()
}

fn bits(tensor: &Tensor) -> Result<Vec<u32>> {
    Ok(tensor.flatten_all()?.to_vec1::<f32>()?.iter().map(|v| v.to_bits()).collect())
}

/// Returns the gradient of the mean square of the model's output with respect to the input, computed by Candle's own
/// backward pass.
fn saliency(engine: &mut Engine<Model>, x: &Tensor) -> candle_zero::Result<Vec<u32>> {
    let x = Var::from_tensor(x)?;
    let y = engine.forward(|model| model(&x))?;
    let gradients = loss_of(&y)?.backward()?;
    Ok(bits(gradients.get(&x).unwrap())?)
}

/// Returns the configurations of a stage: at stage 3, with and without settings that keep or prefetch parameters.
fn stage_configs(stage: u8) -> Vec<Value> {
    let zero = match stage {
        3 => vec![
            json!({"stage3_param_persistence_threshold": 0}),
            json!({"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}),
            json!({}),
        ],
        _ => vec![json!({})],
    };
    zero.into_iter().map(|zero| config(stage, 1, zero, json!({}))).collect()
}

/// The results of a training run on a rank: losses, gradient norms, and the gradients of plain backward passes in
/// between.
type RankResults = (Vec<u32>, Vec<u64>, Vec<Vec<u32>>);

/// Trains, and returns the results of all ranks and the exported file. If `disturbed` is set, plain backward passes run
/// through the model at many points of a micro step.
fn train(world: usize, build: Build, config: &Value, disturbed: bool) -> (Vec<RankResults>, Vec<u8>) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.safetensors");
    let ranks = threads::run(world, |comm| {
        let mut engine = engine(&comm, build, config)?;
        let mut seen: RankResults = Default::default();
        for micro in 0..4 {
            let x = input(micro * world + comm.rank());
            if disturbed {
                seen.2.push(saliency(&mut engine, &x)?);
            }
            let y = engine.forward(|model| model(&x))?;
            let loss = loss_of(&y)?;
            let other = Var::from_tensor(&x)?;
            let late = if disturbed {
                // Plain backward passes on the very graph that the engine differentiates next; Candle allows several.
                loss.backward()?;
                loss.backward()?;
                Some(loss_of(&engine.forward(|model| model(&other))?)?)
            } else {
                None
            };
            seen.0.push(loss.to_scalar::<f32>()?.to_bits());
            engine.backward(&loss)?;
            if let Some(late) = late {
                seen.2.push(bits(late.backward()?.get(&other).unwrap())?);
            }
            engine.step()?;
            seen.1.push(engine.global_grad_norm().unwrap().to_bits());
        }
        engine.export_safetensors(&file)?;
        Ok(seen)
    });
    let ranks = ranks.unwrap().into_iter().map(|rank| rank.unwrap()).collect();
    (ranks, std::fs::read(&file).unwrap())
}

#[test]
fn a_plain_backward_through_the_model_changes_nothing_in_the_engine() {
    for (name, build) in MODELS {
        for world in [1, 2] {
            let (plain, exported) = train(world, build, &stage_configs(0)[0], false);
            assert_ne!(plain[0].0[0], plain[0].0[3], "{name}: it trains");
            let mut gradients = None;
            for (stage, config) in (0..4).flat_map(|stage| stage_configs(stage).into_iter().map(move |c| (stage, c))) {
                let what = format!("a model {name}, stage {stage}, world {world}, {config}");
                let (disturbed, also_exported) = train(world, build, &config, true);
                for (plain, disturbed) in plain.iter().zip(&disturbed) {
                    assert_eq!((&plain.0, &plain.1), (&disturbed.0, &disturbed.1), "{what}");
                }
                assert!(exported == also_exported, "{what}");
                let of_ranks: Vec<_> = disturbed.into_iter().map(|rank| rank.2).collect();
                assert_eq!(&of_ranks, gradients.get_or_insert_with(|| of_ranks.clone()), "{what}");
            }
        }
    }
}

#[test]
fn a_plain_backward_gives_an_input_the_gradient_that_candle_gives_without_an_engine() {
    for (name, build) in MODELS {
        for stage in [0, 3] {
            let folder = tempfile::tempdir().unwrap();
            let file = folder.path().join("model.safetensors");
            let got = threads::run(1, |comm| {
                let mut engine = engine(&comm, build, &stage_configs(stage)[0])?;
                engine.export_safetensors(&file)?;
                saliency(&mut engine, &input(3))
            });
            let got = got.unwrap().remove(0).unwrap();
            let mut vars = VarMap::new();
            let model = build(VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu)).unwrap();
            vars.load(&file).unwrap();
            let x = Var::from_tensor(&input(3)).unwrap();
            let gradients = loss_of(&model(&x).unwrap()).unwrap().backward().unwrap();
            assert_eq!(got, bits(gradients.get(&x).unwrap()).unwrap(), "{name}, stage {stage}");
        }
    }
}

#[test]
fn what_a_plain_backward_gathered_is_gone_after_the_engines_next_call() {
    let gathered = |engine: &Engine<Model>| engine.memory_report().row(MemoryKind::Gathered).bytes.held;
    for (name, build) in MODELS {
        threads::run(2, |comm| {
            let mut engine = engine(&comm, build, &stage_configs(3)[1])?;
            let half = |y: &Tensor| y.narrow(0, 0, 1)?.sum_all();
            let loss = half(&engine.forward(|model| model(&input(1)))?)?;
            loss.backward()?;
            let after = gathered(&engine);
            let (ids, other) = (input(2), Var::from_tensor(&input(3))?);
            let loss = engine.forward(|model| model(&ids))?.sum_all()?;
            engine.backward(&loss)?;
            engine.step()?;
            assert_eq!(gathered(&engine), 0, "{name}");
            // A plain backward pass between `backward` and `step`, when the weights are about to change.
            let first = loss_of(&engine.forward(|model| model(&ids))?)?;
            let late = loss_of(&engine.forward(|model| model(&other))?)?;
            engine.backward(&first)?;
            late.backward()?;
            engine.step()?;
            assert_eq!(gathered(&engine), 0, "{name}");
            // In the first pass, units released their parameters one by one; the root kept those of its parameters
            // that recomputing units might still have needed.
            assert!(after == 0 || name.contains("recomputing"), "{name}: {after} bytes");
            Ok(())
        })
        .unwrap()
        .into_iter()
        .for_each(|rank| rank.unwrap());
    }
}

/// An identity operation that Candle cannot differentiate.
struct WithoutBackward;

impl CustomOp1 for WithoutBackward {
    fn name(&self) -> &'static str {
        "without-backward"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, candle_core::Shape)> {
        Ok((storage.clone(), layout.shape().clone()))
    }
}

#[test]
fn a_plain_backward_that_fails_half_way_leaves_nothing_behind() {
    let norm = |disturbed: bool| {
        let norms = threads::run(1, |comm| {
            let mut engine = engine(&comm, of_own_layers, &stage_configs(0)[0])?;
            let y = engine.forward(|model| model(&input(1)))?;
            let loss = gelu_tanh(&y)?.sum_all()?;
            if disturbed {
                // The right operand comes first and has passed its gradient on when the left one fails.
                let broken = (y.apply_op1(WithoutBackward)?.sum_all()? + &loss)?;
                let error = broken.backward().unwrap_err().to_string();
                assert!(error.contains("without-backward"), "{error}");
            }
            engine.backward(&loss)?;
            engine.step()?;
            Ok(engine.global_grad_norm())
        });
        norms.unwrap().remove(0).unwrap()
    };
    assert_eq!(norm(true), norm(false));
}

#[test]
fn plain_backwards_on_another_thread_do_not_count_while_the_engine_differentiates() {
    let norms = |disturbed: bool| {
        let norms = threads::run(1, |comm| {
            let mut engine = engine(&comm, of_own_layers, &stage_configs(0)[0])?;
            let mut norms = vec![];
            for micro in 0..20 {
                let other = loss_of(&engine.forward(|model| model(&input(40 + micro)))?)?;
                let loss = loss_of(&engine.forward(|model| model(&input(micro)))?)?;
                std::thread::scope(|scope| {
                    if disturbed {
                        scope.spawn(move || (0..5).for_each(|_| drop(other.backward().unwrap())));
                    }
                    engine.backward(&loss)
                })?;
                engine.step()?;
                norms.push(engine.global_grad_norm().unwrap().to_bits());
            }
            Ok(norms)
        });
        norms.unwrap().remove(0).unwrap()
    };
    assert_eq!(norms(true), norms(false));
}

#[test]
fn a_plain_backward_inside_of_a_forward_may_use_the_model() {
    // Fast gradient sign (Goodfellow et al. 2014): the loss of an input that was computed with the model's own
    // gradient.
    let run = |config: &Value| {
        let losses = threads::run(2, |comm| {
            let mut engine = engine(&comm, of_candle, config)?;
            let mut losses = vec![];
            for micro in 0..3 {
                let x = Var::from_tensor(&input(micro * 2 + comm.rank()))?;
                let loss = engine.forward(|model| {
                    let loss = loss_of(&model(&x)?)?;
                    let sign = loss.backward()?.get(&x).unwrap().sign()?;
                    loss_of(&model(&(x.detach() + (sign * 0.1)?)?)?)
                })?;
                losses.push(loss.to_scalar::<f32>()?.to_bits());
                engine.backward(&loss)?;
                engine.step()?;
            }
            Ok(losses)
        });
        losses.unwrap().into_iter().map(|losses| losses.unwrap()).collect::<Vec<_>>()
    };
    let reference = run(&stage_configs(0)[0]);
    for (stage, config) in (1..4).flat_map(|stage| stage_configs(stage).into_iter().map(move |c| (stage, c))) {
        assert_eq!(run(&config), reference, "stage {stage}, {config}");
    }
}

/// Trains a discriminator and, if `with_generator` is set, a generator, each in its own engine, one step of each in
/// turn. Returns the gradient norms of both engines, and their exported files.
fn gan(world: usize, build: Build, config: &Value, with_generator: bool) -> (Vec<[u64; 2]>, [Vec<u8>; 2]) {
    let folder = tempfile::tempdir().unwrap();
    let files = ["g", "d"].map(|name| folder.path().join(format!("{name}.safetensors")));
    let norms = threads::run(world, |comm| {
        let mut generator = engine(&comm, |vb| Ok(Box::new(as_function(linear(WIDTH, WIDTH, vb.pp("g"))?))), config)?;
        let mut discriminator = engine(&comm, build, config)?;
        let fake = generator.eval(|g| g(&input(0)))?;
        let mut norms = vec![];
        for micro in 0..4 {
            let (noise, real) = (input(micro * world + comm.rank()), input(50 + micro * world + comm.rank()));
            if with_generator {
                let fake = generator.forward(|g| g(&noise))?;
                let judged = discriminator.forward(|d| d(&fake))?;
                generator.backward(&(judged.mean_all()? * -1.0)?)?;
                generator.step()?;
            }
            let of_real = discriminator.forward(|d| d(&real))?;
            // The fake samples are the same in both runs, so the discriminator is trained in the same way.
            let of_fake = discriminator.forward(|d| d(&fake))?;
            discriminator.backward(&(of_fake.sqr()?.mean_all()? - of_real.mean_all()?)?)?;
            discriminator.step()?;
            let norm = |engine: &Engine<Model>| engine.global_grad_norm().map_or(0, f64::to_bits);
            norms.push([norm(&generator), norm(&discriminator)]);
        }
        generator.export_safetensors(&files[0])?;
        discriminator.export_safetensors(&files[1])?;
        Ok(norms)
    });
    let norms: Vec<Vec<[u64; 2]>> = norms.unwrap().into_iter().map(|norms| norms.unwrap()).collect();
    assert!(norms.iter().all(|of_rank| *of_rank == norms[0]), "{config}");
    (norms[0].clone(), files.map(|file| std::fs::read(file).unwrap()))
}

fn as_function(layer: candle_nn::Linear) -> impl Fn(&Tensor) -> Result<Tensor> {
    move |x| layer.forward(x)
}

#[test]
fn the_generators_loss_through_the_discriminators_engine_trains_the_generator_alone() {
    for (name, build) in MODELS {
        for world in [1, 2] {
            let (alone, [untrained, d]) = gan(world, build, &stage_configs(0)[0], false);
            let (first, [trained, _]) = gan(world, build, &stage_configs(0)[0], true);
            assert!(first.iter().all(|[g, _]| f64::from_bits(*g) > 0.0) && trained != untrained, "{name}");
            for (stage, config) in (0..4).flat_map(|stage| stage_configs(stage).into_iter().map(move |c| (stage, c))) {
                let what = format!("{name}, stage {stage}, world {world}, {config}");
                let (both, files) = gan(world, build, &config, true);
                assert_eq!(both, first, "{what}");
                let of_d = |norms: &[[u64; 2]]| norms.iter().map(|n| n[1]).collect::<Vec<_>>();
                assert_eq!(of_d(&both), of_d(&alone), "{what}: the discriminator's norms");
                assert!(files == [trained.clone(), d.clone()], "{what}");
            }
        }
    }
}

#[test]
fn an_engine_of_a_transformer_is_not_disturbed_either() {
    let shape = Shape { units: true, checkpointed: true, layers: 2 };
    let norms = |stage: u8, disturbed: bool| {
        let ranks = threads::run(2, |comm| {
            let config = config(stage, 1, json!({"stage3_param_persistence_threshold": 0}), json!({}));
            let builder = Engine::builder().communicator(comm.clone()).device(Device::Cpu);
            let mut engine = builder.initialize(|vb| Tiny::new(shape, vb), config)?;
            let mut norms = vec![];
            for micro in 0..3 {
                let (ids, targets) = batch(micro * 2 + comm.rank());
                let loss = engine.forward(|model| model.loss(&ids, &targets))?;
                if disturbed {
                    loss.backward()?;
                }
                engine.backward(&loss)?;
                engine.step()?;
                norms.push(engine.global_grad_norm().unwrap().to_bits());
            }
            Ok(norms)
        });
        ranks.unwrap().into_iter().map(|rank| rank.unwrap()).collect::<Vec<_>>()
    };
    let plain = norms(0, false);
    for stage in 0..4 {
        assert_eq!(norms(stage, true), plain, "stage {stage}");
    }
}

#[test]
fn frozen_units_that_a_plain_backward_passes_are_released_on_the_way() {
    for (name, build) in [MODELS[0], MODELS[2], MODELS[3]] {
        let ranks = threads::run(2, |comm| {
            let builder = Engine::builder().communicator(comm.clone()).device(Device::Cpu);
            let builder = builder.trainable(|name, _| !name.starts_with("h."));
            let mut engine = builder.initialize(build, stage_configs(3)[1].clone())?;
            let seen = saliency(&mut engine, &input(1))?;
            let report = engine.memory_report();
            // The norm and the product of one of the three units.
            let unit = 4 * (2 * WIDTH + WIDTH * (WIDTH + 1));
            let held = report.row(MemoryKind::Gathered).bytes.held;
            let of_root = if name.contains("recomputing") { 4 * (WIDTH * (WIDTH + 1) + 2 * (WIDTH + 1)) } else { 0 };
            assert!(held <= unit + of_root, "{name}: {held}");
            assert_eq!(saliency(&mut engine, &input(1))?, seen);
            Ok(())
        });
        ranks.unwrap().into_iter().for_each(|rank| rank.unwrap());
    }
}
