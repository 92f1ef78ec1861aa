//! The test that guards every change: stages 0 to 3 give the same bits in f32, whatever the buckets, sub-groups and
//! units, for every loss, gradient norm and exported parameter.

use crate::support::tiny::{Outcome, Shape, config, train};
use serde_json::json;

const STEPS: usize = 20;

fn assert_same(a: &[Outcome], b: &[Outcome], what: &str) {
    for (rank, (a, b)) in a.iter().zip(b).enumerate() {
        assert_eq!(a.losses, b.losses, "losses of rank {rank}: {what}");
        assert_eq!(a.norms, b.norms, "norms of rank {rank}: {what}");
        assert!(a.exported == b.exported, "parameters: {what}");
    }
}

fn all_stages_agree(world: usize, accumulation: usize) {
    let plain = Shape { layers: 3, ..Shape::default() };
    let reference = train(world, plain, &config(0, accumulation, json!({}), json!({})), STEPS);
    let losses: Vec<f32> = reference[0].losses.iter().map(|bits| f32::from_bits(*bits)).collect();
    let mean = |losses: &[f32]| losses.iter().sum::<f32>() / losses.len() as f32;
    let (first, last) = (mean(&losses[..5]), mean(&losses[losses.len() - 5..]));
    assert!(last < first - 0.3, "the model learns: {first} -> {last}");
    for stage in 0..4u8 {
        // Buckets that are smaller than most parameters, of a size in between, and larger than the model.
        for bucket in [30, 700, 500_000_000] {
            for sub_group in [100, 1_000_000_000] {
                for units in [false, true] {
                    let zero = json!({
                        "reduce_bucket_size": bucket, "allgather_bucket_size": bucket, "sub_group_size": sub_group,
                        "stage3_param_persistence_threshold": if bucket == 700 { 40 } else { 0 },
                        "stage3_max_reuse_distance": if bucket == 30 { 0 } else { 1000 },
                        "stage3_prefetch_bucket_size": if sub_group == 100 { 0 } else { 1500 },
                        "overlap_comm": sub_group != 100,
                    });
                    let shape = Shape { units, ..plain };
                    let run = train(world, shape, &config(stage, accumulation, zero.clone(), json!({})), STEPS);
                    let what = format!("stage {stage}, world {world}, accumulation {accumulation}, {shape:?}, {zero}");
                    assert_same(&reference, &run, &what);
                }
            }
        }
    }
}

#[test]
fn stages_give_the_same_bits_on_2_ranks() {
    all_stages_agree(2, 1);
}

#[test]
fn stages_give_the_same_bits_on_2_ranks_with_accumulation() {
    all_stages_agree(2, 3);
}

#[test]
fn stages_give_the_same_bits_on_4_ranks() {
    all_stages_agree(4, 1);
}

#[test]
fn stages_give_the_same_bits_on_4_ranks_with_accumulation() {
    all_stages_agree(4, 3);
}

#[test]
fn stages_give_the_same_bits_on_1_and_on_3_ranks_and_in_bf16() {
    let shape = Shape { layers: 2, units: true, ..Shape::default() };
    for (world, more) in [(1, json!({})), (3, json!({})), (2, json!({"bf16": {"enabled": true}}))] {
        let zero = json!({"stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 0});
        let reference = train(world, shape, &config(0, 2, json!({}), more.clone()), STEPS);
        for stage in 1..4 {
            let run = train(world, shape, &config(stage, 2, zero.clone(), more.clone()), STEPS);
            assert_same(&reference, &run, &format!("stage {stage}, world {world}, {more}"));
        }
    }
}

#[test]
fn recomputing_units_give_the_same_bits() {
    let shape = Shape { layers: 2, units: true, ..Shape::default() };
    let reference = train(2, shape, &config(0, 2, json!({}), json!({})), STEPS);
    for stage in 0..4 {
        let zero = json!({"stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 0});
        let recomputing = Shape { checkpointed: true, ..shape };
        assert_same(&reference, &train(2, recomputing, &config(stage, 2, zero.clone(), json!({})), STEPS), "option");
        let key = json!({"activation_checkpointing": {"number_checkpoints": 2}});
        assert_same(&reference, &train(2, shape, &config(stage, 2, zero, key), STEPS), "configuration");
    }
}

#[test]
fn all_reduce_instead_of_reduce_scatter_gives_the_same_bits() {
    let shape = Shape { layers: 2, units: true, ..Shape::default() };
    let reference = train(2, shape, &config(0, 1, json!({}), json!({})), STEPS);
    for stage in 1..4 {
        let run = train(2, shape, &config(stage, 1, json!({"reduce_scatter": false}), json!({})), STEPS);
        assert_same(&reference, &run, &format!("stage {stage}"));
    }
}
