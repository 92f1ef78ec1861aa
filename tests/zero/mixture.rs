//! A mixture of experts, top 2 of 4, trains with the same bits at every stage: ranks route to different experts, and a
//! rank may route to no expert. If the mixture is not a leaf and ranks diverge, the error explains the cause.

use crate::support::tiny::config;
use candle_core::{D, DType, Device, Result, Tensor};
use candle_nn::ops::softmax;
use candle_nn::{Linear, Module, VarBuilder, linear};
use candle_zero::comm::threads;
use candle_zero::error::{EngineError, Error, ParamError};
use candle_zero::zero::{Unit, unit};
use candle_zero::{Engine, EngineBuilder};
use serde_json::{Value, json};
use std::cell::Cell;

const WIDTH: usize = 6;
const EXPERTS: usize = 4;
const TOKENS: usize = 5;
const STEPS: usize = 5;

thread_local! {
    /// Whether this rank's tokens go to no expert.
    static TO_NOBODY: Cell<bool> = const { Cell::new(false) };
}

struct Expert {
    up: Linear,
    down: Linear,
}

impl Module for Expert {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.down.forward(&self.up.forward(x)?.tanh()?)
    }
}

/// A router, and experts that see only the tokens that are routed to them.
struct Mixture {
    router: Linear,
    experts: Vec<Unit<Expert>>,
}

impl Mixture {
    fn new(vb: VarBuilder<'_>) -> Result<Self> {
        let expert = |i: usize| {
            unit(vb.pp(format!("expert.{i}")), |vb| {
                Ok(Expert { up: linear(WIDTH, 9, vb.pp("up"))?, down: linear(9, WIDTH, vb.pp("down"))? })
            })
        };
        let experts = (0..EXPERTS).map(expert).collect::<Result<_>>()?;
        Ok(Self { router: linear(WIDTH, EXPERTS, vb.pp("router"))?, experts })
    }
}

impl Module for Mixture {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let mut y = x.zeros_like()?;
        if TO_NOBODY.get() {
            return Ok(y);
        }
        let weights = softmax(&self.router.forward(x)?, D::Minus1)?;
        let values = weights.detach().to_vec2::<f32>()?;
        let chosen = |token: &Vec<f32>| {
            let mut order: Vec<usize> = (0..EXPERTS).collect();
            order.sort_by(|a, b| token[*b].total_cmp(&token[*a]));
            [order[0], order[1]]
        };
        let chosen: Vec<[usize; 2]> = values.iter().map(chosen).collect();
        for (i, expert) in self.experts.iter().enumerate() {
            let tokens: Vec<u32> = (0..chosen.len() as u32).filter(|t| chosen[*t as usize].contains(&i)).collect();
            if tokens.is_empty() {
                continue;
            }
            let tokens = Tensor::new(tokens, x.device())?;
            let weight = weights.narrow(1, i, 1)?.contiguous()?.index_select(&tokens, 0)?;
            let part = expert.forward(&x.index_select(&tokens, 0)?)?.broadcast_mul(&weight)?;
            y = y.index_add(&tokens, &part, 0)?;
        }
        Ok(y)
    }
}

/// The way in which the model is built.
#[derive(Debug, Clone, Copy)]
struct Build {
    /// Whether mixtures are marked as leaves in the model.
    leaf: bool,
    recompute: bool,
    /// Whether the result of a mixture is added to its input. Otherwise, only the result is passed on.
    residual: bool,
}

const LEAF: Build = Build { leaf: true, recompute: false, residual: true };

/// A layer, two mixtures and another layer.
struct Model {
    first: Linear,
    mixtures: Vec<Unit<Mixture>>,
    last: Unit<Linear>,
    residual: bool,
}

impl Model {
    fn new(Build { leaf, recompute, residual }: Build, vb: VarBuilder<'_>) -> Result<Self> {
        let mixture = |i: usize| {
            let mixture = unit(vb.pp(format!("layer.{i}.moe")), Mixture::new)?.checkpointed(recompute);
            Ok(if leaf { mixture.leaf() } else { mixture })
        };
        let first = linear(WIDTH, WIDTH, vb.pp("first"))?;
        let mixtures = (0..2).map(mixture).collect::<Result<_>>()?;
        Ok(Self { first, mixtures, last: unit(vb.pp("last"), |vb| linear(WIDTH, 1, vb))?, residual })
    }

    fn loss(&self, x: &Tensor) -> Result<Tensor> {
        let mut x = self.first.forward(x)?.tanh()?;
        for mixture in &self.mixtures {
            let y = mixture.forward(&x)?;
            x = if self.residual { (x + y)? } else { y };
        }
        (self.last.forward(&x)? - 0.5)?.sqr()?.mean_all()
    }
}

/// Returns the tokens of a sample; every rank has different samples.
fn tokens(sample: usize) -> Tensor {
    let values = (0..TOKENS * WIDTH).map(|i| ((i * 7 + sample * 5 + i * i * sample) % 17) as f32 / 4.0 - 2.0);
    Tensor::from_iter(values, &Device::Cpu).unwrap().reshape((TOKENS, WIDTH)).unwrap()
}

/// A function that returns whether a rank routes to no expert in a micro step. That may happen in the first optimizer
/// step, too.
type ToNobody = fn(micro: usize, rank: usize) -> bool;

fn nobody(_: usize, _: usize) -> bool {
    false
}

fn one_rank_in_turn(micro: usize, rank: usize) -> bool {
    micro % 3 == rank
}

/// The bits of the losses and gradient norms of every rank, and the exported model.
type Trained = (Vec<(Vec<u32>, Vec<u64>)>, Vec<u8>);

fn train_with(
    world: usize,
    build: Build,
    config: &Value,
    to_nobody: ToNobody,
    more: impl Fn(EngineBuilder) -> EngineBuilder + Sync,
) -> candle_zero::Result<Trained> {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.safetensors");
    let ranks = threads::run(world, |comm| {
        let rank = comm.rank();
        let builder = more(Engine::builder().communicator(comm));
        let mut engine = builder.initialize(|vb| Model::new(build, vb), config.clone())?;
        let accumulation = engine.config().batch.gradient_accumulation_steps;
        let (mut losses, mut norms) = (vec![], vec![]);
        for micro in 0..STEPS * accumulation {
            TO_NOBODY.set(to_nobody(micro, rank));
            let loss = engine.forward(|model| model.loss(&tokens(micro * world + rank)))?;
            losses.push(loss.to_dtype(DType::F32)?.to_scalar::<f32>()?.to_bits());
            engine.backward(&loss)?;
            let updates = engine.is_gradient_accumulation_boundary();
            engine.step()?;
            if updates {
                norms.push(engine.global_grad_norm().unwrap().to_bits());
            }
        }
        engine.export_safetensors(&file)?;
        Ok((losses, norms))
    });
    let ranks = ranks.unwrap().into_iter().collect::<candle_zero::Result<_>>()?;
    Ok((ranks, std::fs::read(&file).unwrap()))
}

fn train(world: usize, build: Build, config: &Value, to_nobody: ToNobody) -> Trained {
    train_with(world, build, config, to_nobody, |builder| builder).unwrap()
}

/// Returns settings of stage 3 with which parameters are gathered in different ways.
fn gathering() -> [Value; 4] {
    [
        json!({"stage3_param_persistence_threshold": 0}),
        json!({"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}),
        json!({"stage3_param_persistence_threshold": 8, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0, "reduce_bucket_size": 1}),
        json!({"stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 300, "reduce_bucket_size": 100, "sub_group_size": 50}),
    ]
}

fn stages_agree(world: usize, residual: bool, to_nobody: ToNobody) {
    // A recomputing unit adds up the gradients of its input separately, which changes the rounding. Therefore,
    // runs with and without recomputation have separate references.
    for (accumulation, recompute) in [(1, false), (1, true), (2, false), (2, true)] {
        let build = Build { residual, recompute, ..LEAF };
        let reference = train(world, build, &config(0, accumulation, json!({}), json!({})), to_nobody);
        let losses = &reference.0[world - 1].0;
        assert_ne!(losses[0], losses[losses.len() - 1]);
        for stage in 0..4 {
            // Below stage 3, forward and backward passes gather nothing, so the last case, which has small buckets, is
            // enough.
            let ways = if stage == 3 { &gathering()[..] } else { &gathering()[3..] };
            for zero in ways {
                let config = config(stage, accumulation, zero.clone(), json!({}));
                let got = train(world, build, &config, to_nobody);
                let what = format!("stage {stage}, world {world}, x{accumulation}, recompute {recompute}, {zero}");
                assert_eq!(got.0, reference.0, "{what}");
                assert!(got.1 == reference.1, "{what}");
            }
        }
    }
}

#[test]
fn a_mixture_of_experts_trains_with_the_same_bits_at_every_stage() {
    for world in [1, 2, 4] {
        stages_agree(world, true, nobody);
    }
}

#[test]
fn a_rank_that_routes_to_nobody_does_not_hold_up_the_others() {
    for world in [1, 2, 4] {
        stages_agree(world, true, one_rank_in_turn);
    }
}

#[test]
fn a_rank_whose_mixture_makes_nothing_of_its_input_does_not_hold_up_the_others() {
    for world in [2, 4] {
        stages_agree(world, false, one_rank_in_turn);
    }
}

#[test]
fn a_mixture_of_experts_may_lie_in_files_and_recompute_by_the_configuration() {
    for (world, residual) in [(2, false), (4, true)] {
        let build = Build { residual, ..LEAF };
        let reference = train(world, build, &config(0, 2, json!({}), json!({})), one_rank_in_turn);
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let files = json!({
            "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0, "sub_group_size": 100,
            "offload_param": {"device": "nvme", "nvme_path": folder.path(), "max_in_cpu": 0},
            "offload_optimizer": {"device": "nvme", "nvme_path": folder.path(), "pipeline_read": true},
        });
        assert!(train(world, build, &config(3, 2, files.clone(), json!({})), one_rank_in_turn) == reference);
        let recompute = json!({"activation_checkpointing": {"number_checkpoints": 2}});
        let reference = train(world, build, &config(0, 2, json!({}), recompute.clone()), one_rank_in_turn);
        assert!(train(world, build, &config(3, 2, files, recompute.clone()), one_rank_in_turn) == reference);
        assert!(train(world, build, &config(1, 2, json!({}), recompute), one_rank_in_turn) == reference);
    }
}

#[test]
fn experts_that_are_no_leaves_train_alike_below_stage_3_where_unused_parameters_are_ignored() {
    let build = Build { leaf: false, ..LEAF };
    let reference = train(2, LEAF, &config(0, 2, json!({}), json!({})), nobody);
    for stage in 0..3 {
        let ignoring = config(stage, 2, json!({"ignore_unused_parameters": true}), json!({}));
        assert!(train(2, build, &ignoring, nobody) == reference, "stage {stage}");
    }
}

#[test]
fn leaves_are_marked_in_the_model_by_the_builder_or_in_the_file() {
    let zero = |more: Value| {
        let mut zero = gathering()[1].clone();
        zero.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        config(3, 1, zero, json!({}))
    };
    let reference = train(2, LEAF, &zero(json!({})), one_rank_in_turn);
    let unmarked = Build { leaf: false, ..LEAF };
    let by_file = [
        json!({"leaf_module": {"names": ["layer.0.moe", "layer.1.moe"]}}),
        json!({"leaf_module": {"name_suffixes": ".moe"}}),
        json!({"leaf_module": {"names": "layer.1.moe", "name_suffixes": ["0.moe", "no.such.module"]}}),
    ];
    for more in by_file {
        assert!(train(2, unmarked, &zero(more.clone()), one_rank_in_turn) == reference, "{more}");
    }
    for names in [&["layer.0.moe", "layer.1.moe"][..], &["*.moe"], &["*"]] {
        let marked = |builder: EngineBuilder| builder.leaf_units(names.iter().copied());
        let got = train_with(2, unmarked, &zero(json!({})), one_rank_in_turn, marked).unwrap();
        assert!(got == reference, "{names:?}");
    }
    let error = train_with(1, unmarked, &zero(json!({})), nobody, |b| b.leaf_units(["*.moe", "*.mot"])).unwrap_err();
    assert!(matches!(error, Error::Param(ParamError::NoSuchUnit { .. })), "{error}");
    insta::assert_snapshot!(error, @"EngineBuilder::leaf_units names *.mot, but no unit of the model has that name; its units are layer.0.moe, layer.0.moe.expert.0, layer.0.moe.expert.1, layer.0.moe.expert.2, layer.0.moe.expert.3, layer.1.moe, layer.1.moe.expert.0, layer.1.moe.expert.1 and 3 more (a name is the prefix of the VarBuilder from which the unit was built)");
}

#[test]
fn ranks_that_run_different_units_are_told_which_and_what_to_do() {
    for ignoring in [false, true] {
        for mut zero in gathering() {
            zero["ignore_unused_parameters"] = json!(ignoring);
            let config = config(3, 1, zero, json!({}));
            let ranks = threads::run(2, |comm| {
                let builder = Engine::builder().communicator(comm);
                let mut engine =
                    builder.initialize(|vb| Model::new(Build { leaf: false, ..LEAF }, vb), config.clone())?;
                let step = |engine: &mut Engine<Model>, sample: usize| {
                    let loss = engine.forward(|model| model.loss(&tokens(sample)))?;
                    engine.backward(&loss)?;
                    engine.step()
                };
                TO_NOBODY.set(engine.rank() == 1);
                Ok(step(&mut engine, 0).unwrap_err())
            });
            let errors: Vec<Error> = ranks.unwrap().into_iter().map(|error| error.unwrap()).collect();
            let diverged = errors.iter().find(|e| matches!(e, Error::Engine(EngineError::UnitsDiverged { .. })));
            let text = diverged.unwrap_or_else(|| panic!("{errors:?}")).to_string();
            for words in
                ["gather of unit layer.0.moe.expert.", "gather of unit layer.1.moe,", "Unit::leaf", "every rank"]
            {
                assert!(text.contains(words), "{text}");
            }
        }
    }
}
