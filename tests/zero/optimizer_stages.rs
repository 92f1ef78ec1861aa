//! The guarantee of equal bits holds for every optimizer: stages 0 to 3, in memory and in files, give the same losses,
//! gradient norms and parameters; and, except for rounding, so do 1, 2 and 3 ranks.

use crate::support::tiny::{Outcome, Shape, config, train};
use candle_core::{Device, Tensor};
use candle_nn::{Init, VarBuilder};
use candle_zero::Engine;
use candle_zero::comm::threads;
use serde_json::{Value, json};

const STEPS: usize = 6;
const SHAPE: Shape = Shape { layers: 2, units: true, checkpointed: false };

/// Returns optimizers that stage_equality.rs, small_states.rs and tests/offload/stages.rs do not use.
fn optimizers() -> [Value; 8] {
    [
        json!({"type": "Lion", "params": {"lr": 1e-3, "betas": [0.9, 0.99], "weight_decay": 0.1}}),
        json!({"type": "Adagrad", "params": {"lr": 0.02, "weight_decay": 0.01}}),
        json!({"type": "Muon", "params": {"muon_lr": 0.02, "adam_lr": 5e-3, "eps": 1e-4, "weight_decay": 0.01}}),
        json!({"type": "LARS", "params": {"lr": 5.0, "weight_decay": 0.01}}),
        // The gradient of the keys' bias is only rounding error; eps keeps it from being scaled up.
        json!({"type": "Adafactor", "params": {"eps": [1e-8, 1e-3], "weight_decay": 0.01}}),
        json!({"type": "Adafactor", "params": {
            "lr": 0.02, "relative_step": false, "eps": [1e-8, 1e-3], "beta1": 0.9, "scale_parameter": false}}),
        json!({"type": "AdamWScheduleFree", "params": {
            "lr": 0.02, "eps": 1e-4, "weight_decay": 0.01, "warmup_steps": 3}}),
        // Here, eps also keeps rounding errors from being scaled up in the norms that Lamb computes.
        json!({"type": "Lamb", "params": {"lr": 0.02, "eps": 1e-4, "weight_decay": 0.01}}),
    ]
}

/// Returns the configuration's keys outside the ZeRO section: those of the optimizer and its schedule, and `more`.
fn with(optimizer: &Value, more: Value) -> Value {
    let schedule = json!({"type": "WarmupLR", "params": {"warmup_num_steps": 2, "warmup_min_lr": 1e-3}});
    // These optimizers determine their rate themselves.
    let is_relative = optimizer["type"] == "Adafactor" && optimizer["params"]["lr"].is_null();
    let has_own_rate = is_relative || optimizer["type"] == "AdamWScheduleFree";
    let schedule = if has_own_rate { Value::Null } else { schedule };
    let mut keys = json!({"optimizer": optimizer, "zero_allow_untested_optimizer": true, "scheduler": schedule});
    keys.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    keys
}

fn assert_same(a: &[Outcome], b: &[Outcome], what: &str) {
    for (rank, (a, b)) in a.iter().zip(b).enumerate() {
        assert_eq!(a.losses, b.losses, "losses of rank {rank}: {what}");
        assert_eq!(a.norms, b.norms, "norms of rank {rank}: {what}");
        assert!(a.exported == b.exported, "parameters: {what}");
    }
}

fn all_stages_agree(world: usize, accumulation: usize, more: Value) {
    all_stages_agree_with(&optimizers(), world, accumulation, &more);
}

fn all_stages_agree_with(optimizers: &[Value], world: usize, accumulation: usize, more: &Value) {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for optimizer in optimizers {
        let more = with(optimizer, more.clone());
        let reference = train(world, SHAPE, &config(0, accumulation, json!({}), more.clone()), STEPS);
        for stage in 0..4u8 {
            for sub_group in [100, 1_000_000_000] {
                for files in [false, true] {
                    let mut zero = json!({
                        "sub_group_size": sub_group, "reduce_bucket_size": 700, "stage3_max_reuse_distance": 0,
                        "stage3_param_persistence_threshold": 0,
                    });
                    if files && stage > 0 {
                        let pipelined = sub_group == 100;
                        let file = json!({"device": "nvme", "nvme_path": folder.path()});
                        zero["offload_optimizer"] = file.clone();
                        zero["offload_optimizer"]["pipeline_read"] = json!(pipelined);
                        zero["offload_optimizer"]["pipeline_write"] = json!(pipelined);
                        if stage == 3 {
                            zero["offload_param"] = file;
                            zero["offload_param"]["max_in_cpu"] = json!(0);
                        }
                    }
                    let run = train(world, SHAPE, &config(stage, accumulation, zero.clone(), more.clone()), STEPS);
                    assert_same(&reference, &run, &format!("stage {stage}, world {world}, {zero}, {more}"));
                }
            }
        }
    }
}

#[test]
fn stages_give_the_same_bits_on_1_rank() {
    all_stages_agree(1, 2, json!({}));
}

#[test]
fn stages_give_the_same_bits_on_2_ranks() {
    all_stages_agree(2, 1, json!({}));
}

#[test]
fn stages_give_the_same_bits_on_3_ranks() {
    all_stages_agree(3, 1, json!({}));
}

#[test]
fn stages_give_the_same_bits_on_4_ranks_with_factored_states_and_averages() {
    let [_, _, _, lars, adafactor, .., schedule_free, _] = optimizers();
    all_stages_agree_with(&[lars, adafactor, schedule_free], 4, 1, &json!({}));
}

#[test]
fn stages_give_the_same_bits_in_bf16() {
    all_stages_agree(2, 1, json!({"bf16": {"enabled": true}}));
}

/// Returns the mean loss of every optimizer step over all ranks and micro steps.
fn losses(outcomes: &[Outcome], accumulation: usize) -> Vec<f64> {
    let of_step = |step: usize| {
        let micros = step * accumulation..(step + 1) * accumulation;
        let all = outcomes.iter().flat_map(|o| &o.losses[micros.clone()]);
        all.map(|bits| f64::from(f32::from_bits(*bits))).sum::<f64>() / (outcomes.len() * accumulation) as f64
    };
    (0..STEPS).map(of_step).collect()
}

#[test]
fn any_number_of_ranks_trains_alike_on_the_same_batch() {
    for optimizer in optimizers() {
        let run = |world: usize| {
            let accumulation = 6 / world;
            let more = with(&optimizer, json!({}));
            let zero = json!({"stage3_param_persistence_threshold": 0});
            losses(&train(world, SHAPE, &config(3, accumulation, zero, more), STEPS), accumulation)
        };
        let reference = run(1);
        assert!(reference[STEPS - 1] < reference[0], "{optimizer}: {reference:?}");
        for world in [2, 3] {
            for (step, (loss, expected)) in run(world).iter().zip(&reference).enumerate() {
                let difference = (loss / expected - 1.0).abs();
                assert!(difference <= 1e-6, "{optimizer}, world size {world}, step {step}: {loss} and {expected}");
            }
        }
    }
}

#[test]
fn norms_of_more_parameters_than_one_message_holds_are_those_of_all_ranks() {
    const PARAMS: usize = 4100;
    let [.., lamb] = optimizers();
    let keys = json!({"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0});
    let config = config(1, 1, json!({}), with(&lamb, keys));
    let exported = |world: usize| {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("model.safetensors");
        let ranks = threads::run(world, |comm| {
            // Each parameter has two elements with different values, one for each rank.
            let init = Init::Randn { mean: 0.0, stdev: 1.0 };
            let param = |vb: &VarBuilder<'_>, i: usize| vb.get_with_hints(2, &format!("p{i}"), init);
            let build =
                |vb: VarBuilder<'_>| (0..PARAMS).map(|i| param(&vb, i)).collect::<candle_core::Result<Vec<_>>>();
            let builder = Engine::builder().communicator(comm).device(Device::Cpu);
            let mut engine = builder.initialize(build, config.clone())?;
            for _ in 0..2 {
                let loss = engine.forward(|params| Tensor::cat(params, 0)?.sqr()?.sum_all())?;
                engine.backward(&loss)?;
                engine.step()?;
            }
            engine.export_safetensors(&file)
        });
        ranks.unwrap().into_iter().for_each(|rank| rank.unwrap());
        std::fs::read(&file).unwrap()
    };
    assert!(exported(1) == exported(2));
}
