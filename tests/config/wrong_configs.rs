//! The output of `zerorun check` for invalid configurations: the position, the value found, the allowed values and the
//! fix.
//!
//! There is one snapshot for each kind of mistake (snapshots/config__wrong_configs__*.snap). For every configuration,
//! exactly the given number of problems is reported, and the exit code is 2.

use crate::support::processes::{stderr, stdout, zerorun};
use std::fmt::Write as _;

/// Returns the output for configurations that each have the given number of problems.
fn check_outputs(world_size: usize, configs: &[(&str, usize)]) -> String {
    let folder = tempfile::tempdir().unwrap();
    let mut all = String::new();
    for (text, problems) in configs {
        std::fs::write(folder.path().join("ds.json"), text).unwrap();
        let world = world_size.to_string();
        let output = zerorun().current_dir(folder.path()).args(["check", "ds.json", "--world_size", &world]).output();
        let output = output.unwrap();
        let report = stdout(&output);
        assert_eq!((output.status.code(), stderr(&output).as_str()), (Some(2), ""), "{text}\n{report}");
        assert_eq!(report.matches("error: ").count(), *problems, "{text}\n{report}");
        writeln!(all, "---- {}\n{}", text.replace('\n', "\n     "), report.trim_end()).unwrap();
    }
    all
}

#[test]
fn text_that_is_not_json() {
    insta::assert_snapshot!(check_outputs(
        1,
        &[
            ("", 1),
            ("{", 1),
            (r#"{"train_batch_size": 8"#, 1),
            (r#"{"train_batch_size": 08}"#, 1),
            (r#"{"train_batch_size": 8} {"train_batch_size": 8}"#, 1),
            (r#"{"train_batch_size" 8}"#, 1),
            ("{\n  \"train_batch_size\": 8 \"steps_per_print\": 1\n}", 1),
            ("{\n  train_batch_size: 8\n  optimizer: { type: AdamW }\n}", 1),
            ("{\n  \"train_batch_size\": 8,\n  \"bf16\": {\"enabled\": true\n}", 1),
            (r#"{"optimizer": {"type": "Adam}}"#, 1),
            (r#"{"train_batch_size": 8, /* a comment"#, 1),
            (r#""train_batch_size""#, 1),
            (r#"{"steps_per_print": 1e999, "train_batch_size": 8}"#, 1),
        ]
    ));
}

#[test]
fn batch_sizes_that_do_not_fit() {
    insta::assert_snapshot!(check_outputs(
        4,
        &[
            ("{}", 1),
            (r#"{"gradient_accumulation_steps": 2}"#, 1),
            (r#"{"train_batch_size": 30}"#, 1),
            (r#"{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 5}"#, 1),
            (r#"{"train_batch_size": 0}"#, 1),
            (r#"{"train_batch_size": -8}"#, 1),
            (r#"{"train_micro_batch_size_per_gpu": 2.5}"#, 1),
            (r#"{"train_batch_size": "16"}"#, 1),
            (
                r#"{"train_micro_batch_size_per_gpu": 9007199254740993, "gradient_accumulation_steps": 9007199254740993}"#,
                1
            ),
        ]
    ));
}

#[test]
fn keys_that_do_not_exist() {
    insta::assert_snapshot!(check_outputs(
        1,
        &[
            (r#"{"train_batch_size": 8, "gradient_cliping": 1.0}"#, 1),
            (r#"{"train_batch_size": 8, "Zero_Optimization": {"stage": 3}}"#, 1),
            (r#"{"train_batch_size": 8, "stage": 3}"#, 1),
            (r#"{"train_batch_size": 8, "zero_optimization": {"reduce_buckt_size": 5e8}}"#, 1),
            (r#"{"train_batch_size": 8, "zero_optimization": {"offload_optimizer": {"devise": "cpu"}}}"#, 1),
            (r#"{"train_batch_size": 8, "fp16": {"enabled": true, "loss_scale_windows": 100}}"#, 1),
            (r#"{"train_batch_size": 8, "optimizer": {"type": "AdamW", "lr": 1e-3}}"#, 1),
            (r#"{"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"learning_rate": 1e-3}}}"#, 1),
            (r#"{"train_batch_size": 8, "scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 10}}}"#, 1),
            (r#"{"train_batch_size": 8, "nonsense": 1, "zero_optimization": {"nonsense": 2}}"#, 2),
        ]
    ));
}

#[test]
fn values_of_the_wrong_kind_or_size() {
    insta::assert_snapshot!(check_outputs(
        1,
        &[
            (r#"{"train_batch_size": 8, "zero_optimization": {"stage": 4}}"#, 1),
            (r#"{"train_batch_size": 8, "zero_optimization": {"stage": "two"}}"#, 1),
            (r#"{"train_batch_size": 8, "zero_optimization": 3}"#, 1),
            (r#"{"train_batch_size": 8, "zero_optimization": {"overlap_comm": "sometimes"}}"#, 1),
            (r#"{"train_batch_size": 8, "zero_optimization": {"stage": 2, "reduce_bucket_size": -1}}"#, 1),
            (r#"{"train_batch_size": 8, "zero_optimization": {"stage": 3, "sub_group_size": [1]}}"#, 1),
            (r#"{"train_batch_size": 8, "fp16": true}"#, 1),
            (r#"{"train_batch_size": 8, "fp16": {"enabled": true, "loss_scale": -1}}"#, 1),
            (r#"{"train_batch_size": 8, "fp16": {"enabled": true, "loss_scale_window": 0}}"#, 1),
            (r#"{"train_batch_size": 8, "fp16": {"enabled": true, "min_loss_scale": -2}}"#, 1),
            (r#"{"train_batch_size": 8, "gradient_clipping": "none"}"#, 1),
            (r#"{"train_batch_size": 8, "gradient_clipping": -1}"#, 1),
            (r#"{"train_batch_size": 8, "steps_per_print": 0.5}"#, 1),
            (r#"{"train_batch_size": 8, "communication_data_type": "fp8"}"#, 1),
            (r#"{"train_batch_size": 8, "wall_clock_breakdown": "yes"}"#, 1),
            (r#"{"train_batch_size": 8, "data_types": {"grad_accum_dtype": "int8"}}"#, 1),
            (r#"{"train_batch_size": 8, "checkpoint": {"tag_validation": "never"}}"#, 1),
            (r#"{"train_batch_size": 8, "aio": {"block_size": 0}}"#, 1),
        ]
    ));
}

#[test]
fn settings_that_contradict_each_other() {
    insta::assert_snapshot!(check_outputs(
        2,
        &[
            (r#"{"train_batch_size": 8, "fp16": {"enabled": true}, "bf16": {"enabled": true}}"#, 1),
            ("{\"train_batch_size\": 8,\n \"train_batch_size\": 16}", 1),
            (r#"{"train_batch_size": 8, "bf16": {"enabled": true}, "data_types": {"param_dtype": "fp16"}}"#, 1),
            (
                r#"{"train_batch_size": 8, "zero_optimization": {"stage": 3, "max_live_parameters": 10, "stage3_max_live_parameters": 10}}"#,
                1
            ),
            (
                r#"{"train_batch_size": 8, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/tmp", "ratio": 0.5}}}"#,
                1
            ),
            (
                r#"{"train_batch_size": 8, "zero_optimization": {"stage": 1, "cpu_offload": true, "offload_optimizer": {"device": "cpu"}}}"#,
                1
            ),
            (
                r#"{"train_batch_size": 8, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}"#,
                1
            ),
            (r#"{"train_batch_size": 8, "prescale_gradients": true, "zero_optimization": {"stage": 2}}"#, 1),
            (r#"{"train_batch_size": 8, "gradient_predivide_factor": 0, "prescale_gradients": true}"#, 1),
            (r#"{"train_batch_size": 8, "gradient_allreduce_op": "sum", "zero_optimization": {"stage": 3}}"#, 1),
            (
                r#"{"train_batch_size": 8, "zero_optimization": {"stage": 2, "compute_grad_norm": false}, "gradient_clipping": 1.0}"#,
                1
            ),
            (r#"{"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1, "nesterov": true}}}"#, 1),
            (
                r#"{"train_batch_size": 8, "optimizer": {"type": "Lamb", "params": {"lr": 0.1, "min_coeff": 2, "max_coeff": 1}}}"#,
                1
            ),
            (
                r#"{"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_optimization": {"stage": 2}}"#,
                1
            ),
        ]
    ));
}

#[test]
fn optimizers_and_schedules_that_are_not_there_or_incomplete() {
    insta::assert_snapshot!(check_outputs(
        1,
        &[
            (r#"{"train_batch_size": 8, "optimizer": {"params": {"lr": 1e-3}}}"#, 1),
            (r#"{"train_batch_size": 8, "optimizer": {"type": "Adan"}}"#, 1),
            (r#"{"train_batch_size": 8, "optimizer": {"type": "OneBitAdam"}}"#, 1),
            (r#"{"train_batch_size": 8, "optimizer": {"type": "RMSprop"}}"#, 1),
            (r#"{"train_batch_size": 8, "optimizer": {"type": "Adam", "params": {"lr": -1e-3}}}"#, 1),
            (r#"{"train_batch_size": 8, "optimizer": {"type": "Adam", "params": {"betas": [0.9]}}}"#, 1),
            (r#"{"train_batch_size": 8, "optimizer": {"type": "Adam", "params": {"betas": [0.9, 1.0]}}}"#, 1),
            (r#"{"train_batch_size": 8, "optimizer": {"type": "Adam", "params": {"amsgrad": true}}}"#, 1),
            (r#"{"train_batch_size": 8, "optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.0}}}"#, 1),
            (r#"{"train_batch_size": 8, "scheduler": {"type": "warmuplr"}}"#, 1),
            (r#"{"train_batch_size": 8, "scheduler": {"type": "CosineAnnealingLR"}}"#, 1),
            (
                r#"{"train_batch_size": 8, "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10}}}"#,
                1
            ),
            (r#"{"train_batch_size": 8, "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.1}}}"#, 1),
            (
                r#"{"train_batch_size": 8, "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "cycle_first_step_size": 0}}}"#,
                1
            ),
            (r#"{"train_batch_size": 8, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}}"#, 1),
        ]
    ));
}

#[test]
fn what_deepspeed_removed_and_what_is_not_offered() {
    insta::assert_snapshot!(check_outputs(
        1,
        &[
            (r#"{"train_batch_size": 8, "amp": {"enabled": true, "opt_level": "O1"}}"#, 1),
            (r#"{"train_batch_size": 8, "sparse_gradients": true}"#, 1),
            (r#"{"train_batch_size": 8, "elasticity": {"enabled": true}}"#, 1),
            (r#"{"train_batch_size": 8, "sequence_parallel_size": 2}"#, 1),
            (r#"{"train_batch_size": 8, "zero_optimization": {"stage": 3, "zeropp_loco_param": {}}}"#, 1),
            (r#"{"train_batch_size": 8, "zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}}}"#, 1),
            (r#"{"train_batch_size": 8, "torch_autocast": {"enabled": true, "dtype": "fp16"}}"#, 1),
            (r#"{"train_batch_size": 8, "torch_autocast": {"enabled": true, "dtype": "int8"}}"#, 1),
            (
                r#"{"train_batch_size": 8, "torch_autocast": {"enabled": true, "lower_precision_safe_modules": ["torch.nn.Linear", "my.Expert"]}}"#,
                1,
            ),
            (
                r#"{"train_batch_size": 8, "bf16": {"enabled": true}, "data_types": {"keep_in_fp32_modules": ["ln_f", "."]}}"#,
                1
            ),
            (
                r#"{"train_batch_size": 8, "bf16": {"enabled": true}, "data_types": {"keep_in_fp32_modules": "ln_f"}}"#,
                1
            ),
            (r#"{"train_batch_size": 8, "fp16": {"enabled": true, "fp16_master_weights_and_grads": true}}"#, 1),
            (r#"{"train_batch_size": 8, "bf16": {"enabled": true, "bf16_master_weights_and_grads": true}}"#, 1),
        ]
    ));
}
