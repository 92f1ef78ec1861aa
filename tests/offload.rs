//! Offload to files changes no bit: losses, norms and parameters are those of a run in memory, wherever states lie and
//! however they travel.
#![allow(clippy::unwrap_used)]

mod common;

use candle_zero::offload::DiskAccess;
use common::{Outcome, Shape, config, train, train_with};
use serde_json::{Value, json};
use std::path::Path;

const STEPS: usize = 20;

fn assert_same(a: &[Outcome], b: &[Outcome], what: &str) {
    for (rank, (a, b)) in a.iter().zip(b).enumerate() {
        assert_eq!(a.losses, b.losses, "losses of rank {rank}: {what}");
        assert_eq!(a.norms, b.norms, "norms of rank {rank}: {what}");
        assert!(a.exported == b.exported, "parameters: {what}");
    }
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// `zero` with the optimizer's states, the parameters or both in files of `folder`.
fn offloaded(zero: &Value, folder: &Path, optimizer: Value, param: Value) -> Value {
    let mut zero = zero.clone();
    for (key, section) in [("offload_optimizer", optimizer), ("offload_param", param)] {
        if section.is_object() {
            zero[key] = section;
            zero[key]["nvme_path"] = folder.to_str().unwrap().into();
        }
    }
    zero
}

fn nvme(more: Value) -> Value {
    let mut section = json!({"device": "nvme"});
    section.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    section
}

fn offload_gives_the_same_bits(world: usize, accumulation: usize) {
    let folder = folder();
    let shape = Shape { layers: 3, units: true, ..Shape::default() };
    let zero = json!({
        "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 1500,
        "sub_group_size": 700,
    });
    let reference = train(world, shape, &config(3, accumulation, zero.clone(), json!({})), STEPS);
    let file = |more| nvme(more);
    let none = || json!(null);
    let all = || nvme(json!({"max_in_cpu": 0}));
    let cases = [
        (1, json!({"device": "cpu"}), none()),
        (3, json!({"device": "cpu"}), json!({"device": "cpu"})),
        (1, file(json!({})), none()),
        (2, file(json!({"pipeline_read": true, "pipeline_write": true})), none()),
        (3, file(json!({})), none()),
        (3, none(), all()),
        (3, none(), nvme(json!({"max_in_cpu": 9000}))),
        (3, file(json!({})), all()),
        (3, file(json!({"pipeline_read": true})), all()),
        (3, file(json!({"pipeline_write": true})), all()),
        (3, file(json!({"pipeline_read": true, "pipeline_write": true})), all()),
        (
            3,
            file(json!({"pipeline_read": true, "pipeline_write": true, "ratio": 0.5})),
            nvme(json!({"max_in_cpu": 9000})),
        ),
    ];
    for (stage, optimizer, param) in cases {
        let what = format!("stage {stage}, world {world}, accumulation {accumulation}, {optimizer}, {param}");
        let zero = offloaded(&zero, folder.path(), optimizer, param);
        assert_same(&reference, &train(world, shape, &config(stage, accumulation, zero, json!({})), STEPS), &what);
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "files are left over");
}

#[test]
fn offload_gives_the_same_bits_on_1_rank() {
    offload_gives_the_same_bits(1, 1);
}

#[test]
fn offload_gives_the_same_bits_on_1_rank_with_accumulation() {
    offload_gives_the_same_bits(1, 3);
}

#[test]
fn offload_gives_the_same_bits_on_2_ranks() {
    offload_gives_the_same_bits(2, 1);
}

#[test]
fn offload_gives_the_same_bits_on_2_ranks_with_accumulation() {
    offload_gives_the_same_bits(2, 3);
}

#[test]
fn every_access_to_files_gives_the_same_bits_in_every_precision() {
    let folder = folder();
    let shape = Shape { layers: 2, units: true, ..Shape::default() };
    // Windows smaller than parameters, and parameters smaller than windows.
    let zero =
        json!({"stage3_param_persistence_threshold": 300, "stage3_max_reuse_distance": 0, "sub_group_size": 5000});
    for more in [json!({}), json!({"bf16": {"enabled": true}}), json!({"fp16": {"enabled": true}})] {
        let reference = train(2, shape, &config(3, 2, zero.clone(), more.clone()), STEPS);
        for access in [DiskAccess::Direct, DiskAccess::Cached, DiskAccess::Mapped] {
            let both = json!({"pipeline_read": true, "pipeline_write": true});
            let mut more = more.clone();
            more["aio"] = json!({"block_size": 4096, "queue_depth": 3, "intra_op_parallelism": 2});
            more["activation_checkpointing"] = json!({"cpu_checkpointing": access == DiskAccess::Cached});
            let zero = offloaded(&zero, folder.path(), nvme(both), nvme(json!({"max_in_cpu": 0})));
            let run = train_with(2, shape, &config(3, 2, zero, more.clone()), STEPS, |b| b.disk_access(access));
            assert_same(&reference, &run, &format!("{access:?} {more}"));
        }
    }
}
