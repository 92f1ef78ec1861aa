//! Complete configurations: the bundled ones, notes, translations, and the conversion back to JSON.

use crate::support::processes::repository;
use candle_core::DType;
use candle_zero::config::{
    AdagradConfig, AdamConfig, Aio, BatchConfig, Config, GradientOp, LambConfig, LionConfig, LogLevel,
    OffloadOptimizer, OffloadParam, OffloadTo, OneCycleConfig, OptimizerConfig, Precision, RunValues, SchedulerConfig,
    SgdConfig, WarmupType,
};
use candle_zero::error::{ConfigError, Error};
use candle_zero::layout::ZeroStage;
use proptest::prelude::*;
use serde_json::{Value, json};
use std::path::PathBuf;

fn bundled(name: &str) -> PathBuf {
    repository().join("ds_configs").join(name)
}

fn load(value: Value) -> Config {
    Config::load(value, 1).unwrap_or_else(|e| panic!("{e}"))
}

/// Returns a complete configuration that contains the keys in `more`.
fn with(more: Value) -> Value {
    let mut value = json!({"train_batch_size": 8});
    value.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    value
}

fn notes(config: &Config) -> String {
    config.notes.iter().map(|note| format!("{}: {}", note.path, note.message)).collect::<Vec<_>>().join("\n")
}

/// Returns the paths of the problems in a configuration.
fn refused(more: Value) -> Vec<String> {
    match Config::load(with(more.clone()), 2) {
        Err(Error::Config(ConfigError::Problems { problems, .. })) => {
            problems.into_iter().map(|problem| problem.path).collect()
        }
        other => panic!("{more}: {other:?}"),
    }
}

#[test]
fn every_bundled_configuration_loads_without_notes_under_1_2_and_4_ranks() {
    let table = [
        ("zero0.json", ZeroStage::Zero, "f32", 4, (1e-3, 20)),
        ("zero1.json", ZeroStage::One, "f32", 4, (1e-3, 20)),
        ("zero2.json", ZeroStage::Two, "f32", 4, (1e-3, 20)),
        ("zero3.json", ZeroStage::Three, "f32", 4, (1e-3, 20)),
        ("zero3_bf16.json", ZeroStage::Three, "bf16", 4, (1e-3, 20)),
        ("zero2_fp16.json", ZeroStage::Two, "fp16", 4, (1e-3, 20)),
        ("zero2_cpu_offload.json", ZeroStage::Two, "f32", 4, (1e-3, 20)),
        ("zero3_nvme.json", ZeroStage::Three, "f32", 4, (1e-3, 20)),
        ("infinity.json", ZeroStage::Three, "bf16", 1, (3e-4, 5)),
        ("pipeline.json", ZeroStage::One, "f32", 1, (1e-3, 20)),
        ("local_steps.json", ZeroStage::One, "f32", 4, (1e-3, 20)),
    ];
    for (name, stage, format, micro, (lr, warmup_num_steps)) in table {
        for world_size in [1, 2, 4] {
            let config = Config::load(bundled(name), world_size).unwrap_or_else(|e| panic!("{e}"));
            assert_eq!(config.zero.stage, stage, "{name}");
            // A pipeline has several micro batches in flight.
            let accumulation = if name == "pipeline.json" { 8 } else { 1 };
            assert_eq!(config.batch.train_batch_size, micro * accumulation * world_size);
            let batch = (config.batch.train_micro_batch_size_per_gpu, config.batch.gradient_accumulation_steps);
            assert_eq!(batch, (micro, accumulation));
            let found = match config.precision {
                Precision::F32 => "f32",
                Precision::Bf16 { .. } => "bf16",
                Precision::Fp16(_) => "fp16",
                other => panic!("{other:?}"),
            };
            assert_eq!((found, notes(&config).as_str()), (format, ""), "{name}");
            let adam = AdamConfig {
                lr,
                betas: (0.9, 0.95),
                eps: 1e-8,
                weight_decay: 0.1,
                bias_correction: true,
                decoupled: true,
            };
            assert_eq!(config.optimizer, Some(OptimizerConfig::Adam(adam)), "{name}");
            assert_eq!(
                config.scheduler,
                Some(SchedulerConfig::WarmupLr {
                    warmup_min_lr: 0.0.into(),
                    warmup_max_lr: Some(lr.into()),
                    warmup_num_steps,
                    warmup_type: WarmupType::Linear,
                })
            );
        }
    }
    assert_eq!(std::fs::read_dir(bundled("")).unwrap().count(), table.len(), "a bundled file is not in the table");
}

#[test]
fn the_smallest_configuration_gets_deepspeeds_defaults() {
    let config = load(json!({"train_batch_size": 8}));
    assert_eq!(
        config.batch,
        BatchConfig { train_batch_size: 8, train_micro_batch_size_per_gpu: 8, gradient_accumulation_steps: 1 }
    );
    assert_eq!((config.gradient_clipping, config.gradient_predivide_factor), (1.0, 1.0));
    assert_eq!((config.precision, config.gradient_allreduce_op), (Precision::F32, GradientOp::Mean));
    assert_eq!((config.communication_data_type, config.grad_accum_dtype), (None, None));
    assert_eq!((config.optimizer, config.scheduler, config.steps_per_print), (None, None, None));
    assert_eq!((config.seed, config.wall_clock_breakdown, config.activation_checkpointing), (42, false, false));
    assert!(config.notes.is_empty());
    let zero = &config.zero;
    assert_eq!((zero.stage, zero.overlap_comm, zero.reduce_scatter), (ZeroStage::Zero, false, true));
    assert_eq!((zero.reduce_bucket_size, zero.allgather_bucket_size), (500_000_000, 500_000_000));
    assert_eq!((zero.sub_group_size, zero.prefetch_bucket_size), (1_000_000_000, 50_000_000));
    assert_eq!((zero.param_persistence_threshold, zero.max_live_parameters), (100_000, 1_000_000_000));
    assert_eq!(zero.model_persistence_threshold, i64::MAX as usize);
    assert_eq!(zero.max_reuse_distance, 1_000_000_000);
}

#[test]
fn honoured_keys_reach_the_resolved_configuration() {
    let config = load(with(json!({
        "gradient_clipping": 0, "prescale_gradients": true, "gradient_predivide_factor": 2, "seed": 7,
        "gradient_allreduce_op": "SUM", "communication_data_type": "BF16", "steps_per_print": 1e5,
        "wall_clock_breakdown": true, "data_types": {"grad_accum_dtype": "fp32"},
        "activation_checkpointing": {"number_checkpoints": 4},
        "fp16": {"enabled": "true", "loss_scale": 0, "initial_scale_power": 12, "loss_scale_window": 500,
                 "hysteresis": 3, "consecutive_hysteresis": true, "min_loss_scale": 2},
        "zero_optimization": {"stage": 1, "overlap_comm": true, "reduce_scatter": false, "sub_group_size": 1e12},
    })));
    assert_eq!((config.gradient_clipping, config.gradient_predivide_factor, config.seed), (0.0, 2.0, 7));
    assert_eq!((config.prescale_gradients, config.gradient_allreduce_op), (true, GradientOp::Sum));
    assert_eq!((config.communication_data_type, config.grad_accum_dtype), (Some(DType::BF16), Some(DType::F32)));
    assert_eq!((config.steps_per_print, config.wall_clock_breakdown), (Some(100_000), true));
    assert!(config.activation_checkpointing && config.zero.overlap_comm && !config.zero.reduce_scatter);
    assert_eq!(config.zero.sub_group_size, 1_000_000_000_000);
    let Precision::Fp16(fp16) = config.precision else { panic!("fp16 is on") };
    assert_eq!((fp16.loss_scale, fp16.initial_scale_power, fp16.loss_scale_window), (0.0, 12, 500));
    assert_eq!((fp16.hysteresis, fp16.consecutive_hysteresis, fp16.min_loss_scale), (3, true, 2.0));
}

#[test]
fn overlap_is_on_by_default_at_stage_3_only() {
    for stage in 0..4 {
        assert_eq!(load(with(json!({"zero_optimization": {"stage": stage}}))).zero.overlap_comm, stage == 3);
    }
    assert!(!load(with(json!({"zero_optimization": {"stage": 3, "overlap_comm": false}}))).zero.overlap_comm);
}

#[test]
fn adam_means_decoupled_decay_unless_told_otherwise() {
    for (name, params, decoupled) in [
        ("Adam", json!({}), true),
        ("adam", json!({"adam_w_mode": false}), false),
        ("ADAM", json!({"torch_adam": true, "adam_w_mode": false}), false),
        ("Adam", json!({"torch_adam": true, "adam_w_mode": true}), true),
        ("AdamW", json!({"adam_w_mode": false}), true),
        ("adamw", json!({"torch_adam": true}), true),
    ] {
        let config = load(with(json!({"optimizer": {"type": name, "params": params}})));
        let Some(OptimizerConfig::Adam(adam)) = config.optimizer else { panic!("{name}") };
        assert_eq!(adam.decoupled, decoupled, "{name}");
    }
}

#[test]
fn torch_adam_with_decoupled_decay_has_pytorchs_default_decay() {
    for (name, params, decay) in [
        ("AdamW", json!({}), 0.0),
        ("AdamW", json!({"torch_adam": true}), 0.01),
        ("AdamW", json!({"torch_adam": true, "adam_w_mode": false}), 0.01),
        ("AdamW", json!({"torch_adam": true, "weight_decay": 0}), 0.0),
        ("Adam", json!({"torch_adam": true}), 0.01),
        ("Adam", json!({"torch_adam": true, "weight_decay": 0.1}), 0.1),
        ("Adam", json!({"torch_adam": true, "adam_w_mode": false}), 0.0),
    ] {
        let config = load(with(json!({"optimizer": {"type": name, "params": params}})));
        let Some(OptimizerConfig::Adam(adam)) = config.optimizer else { panic!("{name}") };
        assert_eq!(adam.weight_decay, decay, "{name} {params}");
    }
}

#[test]
fn lion_adagrad_and_lamb_resolve() {
    let optimizer = |kind: &str, params: Value| {
        load(with(json!({"optimizer": {"type": kind, "params": params}}))).optimizer.unwrap()
    };
    let lion = LionConfig { lr: 1e-3, betas: (0.9, 0.999), weight_decay: 0.0 };
    assert_eq!(optimizer("lion", json!({})), OptimizerConfig::Lion(lion));
    let lion = LionConfig { lr: 1e-4, betas: (0.95, 0.98), weight_decay: 0.1 };
    let params = json!({"lr": 1e-4, "betas": [0.95, 0.98], "weight_decay": 0.1});
    assert_eq!(optimizer("Lion", params), OptimizerConfig::Lion(lion));
    let adagrad = AdagradConfig { lr: 1e-2, eps: 1e-10, weight_decay: 0.0 };
    assert_eq!(optimizer("adagrad", json!({})), OptimizerConfig::Adagrad(adagrad));
    let adagrad = AdagradConfig { lr: 0.1, eps: 1e-3, weight_decay: 0.05 };
    let params = json!({"lr": 0.1, "eps": 1e-3, "weight_decay": 0.05, "lr_decay": 0});
    assert_eq!(optimizer("Adagrad", params), OptimizerConfig::Adagrad(adagrad));
    let lamb = LambConfig {
        lr: 1e-3,
        betas: (0.9, 0.999),
        eps: 1e-8,
        weight_decay: 0.0,
        bias_correction: true,
        eps_inside_sqrt: false,
        max_coeff: 10.0,
        min_coeff: 0.01,
    };
    assert_eq!(optimizer("LAMB", json!({})), OptimizerConfig::Lamb(lamb));
    let lamb = LambConfig {
        lr: 0.1,
        betas: (0.8, 0.95),
        eps: 1e-4,
        weight_decay: 0.1,
        bias_correction: false,
        eps_inside_sqrt: true,
        max_coeff: 0.3,
        min_coeff: 0.1,
    };
    let params = json!({"lr": 0.1, "betas": [0.8, 0.95], "eps": 1e-4, "weight_decay": 0.1, "bias_correction": false,
        "eps_inside_sqrt": true, "max_coeff": 0.3, "min_coeff": 0.1});
    assert_eq!(optimizer("Lamb", params), OptimizerConfig::Lamb(lamb));
}

#[test]
fn sgd_and_every_schedule_resolve() {
    let config = load(with(json!({"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}})));
    let sgd = SgdConfig { lr: 0.1, momentum: 0.9, dampening: 0.0, weight_decay: 0.0, nesterov: false };
    assert_eq!(config.optimizer, Some(OptimizerConfig::Sgd(sgd)));
    let schedule = |kind: &str, params: Value| {
        load(with(json!({"scheduler": {"type": kind, "params": params}}))).scheduler.unwrap()
    };
    let (warmup_num_steps, warmup_type) = (1000, WarmupType::Log);
    assert_eq!(
        schedule("WarmupLR", json!({})),
        SchedulerConfig::WarmupLr { warmup_min_lr: 0.0.into(), warmup_max_lr: None, warmup_num_steps, warmup_type }
    );
    assert_eq!(
        schedule("WarmupDecayLR", json!({"total_num_steps": 1e4})),
        SchedulerConfig::WarmupDecayLr {
            total_num_steps: 10_000,
            warmup_min_lr: 0.0.into(),
            warmup_max_lr: 0.001.into(),
            warmup_num_steps,
            decay_power: 1.0,
            warmup_type
        }
    );
    assert_eq!(
        schedule("WarmupCosineLR", json!({"total_num_steps": 5000, "warmup_type": "linear"})),
        SchedulerConfig::WarmupCosineLr {
            total_num_steps: 5000,
            warmup_min_ratio: 0.0,
            warmup_num_steps,
            cos_min_ratio: 0.0001,
            warmup_type: WarmupType::Linear
        }
    );
    assert_eq!(
        schedule("OneCycle", json!({"cycle_min_lr": [1e-4], "cycle_max_lr": 1})),
        SchedulerConfig::OneCycle(OneCycleConfig::new(1e-4, 1.0))
    );
    // By default, the falling half of the cycle has the same settings as the rising half.
    assert_eq!(
        schedule(
            "OneCycle",
            json!({"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_first_step_size": 9, "cycle_first_stair_count": 3})
        ),
        SchedulerConfig::OneCycle(OneCycleConfig {
            cycle_first_step_size: 9.0,
            cycle_second_step_size: 9.0,
            cycle_first_stair_count: 3,
            cycle_second_stair_count: 3,
            ..OneCycleConfig::new(0.0, 1.0)
        })
    );
    assert_eq!(
        schedule("LRRangeTest", json!({})),
        SchedulerConfig::LrRangeTest {
            lr_range_test_min_lr: 0.001.into(),
            lr_range_test_step_size: 2000,
            lr_range_test_step_rate: 1.0,
            lr_range_test_staircase: false
        }
    );
}

#[test]
fn keys_without_effect_are_noted_once_each_and_defaults_are_not() {
    let config = load(with(json!({
        "_comment": "hello", "dump_state": true, "memory_breakdown": false, "dataloader_drop_last": true,
        "zero_allow_untested_optimizer": true, "zero_force_ds_cpu_optimizer": false,
        "bfloat16": {"enabled": "auto"},
        "zero_optimization": {
            "stage": 3, "contiguous_gradients": false, "cpu_offload_param": true, "reduce_bucket_size": "auto",
            "offload_optimizer": {"device": "nvme", "nvme_path": "/scratch", "pin_memory": false, "fast_init": true,
                                  "super_offload": true, "cpuadam_cores_perc": 0.5, "pipeline_read": true},
            "stage3_gather_fp16_weights_on_model_save": true, "zero_hpz_partition_size": 8,
        },
        "optimizer": {"type": "AdamW", "params": {"torch_adam": true, "adam_w_mode": false}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 5, "warmup_type": "cubic"}},
        "aio": {"thread_count": 4, "queue_depth": 32, "single_submit": true, "overlap_events": false, "use_gds": true},
        "comet": {"enabled": true, "workspace": 3, "x": null},
        "tensorboard": {"enabled": false, "job_name": "x"}, "comms_logger": {"enabled": false},
        "compile": {"backend": "inductor"}, "tensor_parallel": {"autotp_size": 1},
        "flops_profiler": {"enabled": true}, "checkpoint": {"tag_validation": "fail"},
        "activation_checkpointing": {"partition_activations": true, "profile": false},
    })));
    insta::assert_snapshot!(notes(&config));
    assert!(config.wall_clock_breakdown && config.activation_checkpointing);
}

#[test]
fn the_section_wandb_is_read_and_printed_again_and_its_mistakes_are_errors() {
    let section = json!({"enabled": true, "group": "g", "team": "t"});
    let config = load(with(json!({"wandb": section})));
    let wandb = config.monitoring.wandb.clone().unwrap();
    assert_eq!(
        (wandb.group.as_deref(), wandb.team.as_deref(), wandb.project.as_str()),
        (Some("g"), Some("t"), "deepspeed")
    );
    assert_eq!(load(config.to_deepspeed_json()).monitoring.wandb, Some(wandb));
    let note =
        "wandb.enabled: the run is written into the folder `wandb`, but not uploaded; upload it with `wandb sync`";
    assert_eq!(notes(&config), note);
    assert_eq!(load(with(json!({"wandb": {"enabled": false, "project": "p"}}))).monitoring.wandb, None);
    assert_eq!(refused(json!({"wandb": {"enabled": true, "team": 3, "entity": "x"}})), ["wandb.entity", "wandb.team"]);
}

#[test]
fn quantized_weights_need_stage_3_and_the_keys_are_printed_again() {
    for stage in 0..4 {
        let zero = json!({"stage": stage, "zero_quantized_weights": true, "zero_quantized_gradients": true});
        let config = load(with(json!({"zero_optimization": zero})));
        assert!(config.zero.quantized_weights && config.zero.quantized_gradients);
        let noted = notes(&config);
        assert_eq!(noted.contains("zero_optimization.zero_quantized_weights: accepted, but has no effect"), stage < 3);
        assert!(!noted.contains("zero_quantized_gradients"), "{noted}");
        let printed = config.to_deepspeed_json();
        assert_eq!(printed["zero_optimization"]["zero_quantized_gradients"], true);
        assert_eq!(load(printed).zero, config.zero);
    }
    let config = load(with(json!({"zero_optimization": {"zero_quantized_nontrainable_weights": true}})));
    assert_eq!((config.zero.quantized_nontrainable_weights, notes(&config).as_str()), (true, ""));
}

/// Returns both offload sections with `nvme` and non-default values, and the values to which they resolve.
fn both_on_nvme() -> (Value, OffloadOptimizer, OffloadParam) {
    let optimizer = OffloadOptimizer {
        device: OffloadTo::Nvme { path: "/fast/states".into() },
        buffer_count: 6,
        pipeline_read: true,
        pipeline_write: false,
        ratio: 0.25,
        pin_memory: false,
        delayed_update_after: Some(7),
    };
    let param = OffloadParam {
        device: OffloadTo::Nvme { path: "/fast/params".into() },
        buffer_count: 3,
        buffer_size: 1_000_000,
        max_in_cpu: 0,
        pin_memory: false,
    };
    let zero = json!({
        "offload_optimizer": {"device": "nvme", "nvme_path": "/fast/states", "buffer_count": 6, "pipeline_read": true,
                              "ratio": 0.25, "pin_memory": false,
                              "delayed_update": true, "delayed_update_after": 7},
        "offload_param": {"device": "nvme", "nvme_path": "/fast/params", "buffer_count": 3, "buffer_size": 1e6,
                          "max_in_cpu": 0, "pin_memory": false},
    });
    (zero, optimizer, param)
}

#[test]
fn offload_resolves_with_deepspeeds_defaults() {
    let config = load(with(json!({
        "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}},
    })));
    let cpu = OffloadTo::Cpu;
    let optimizer = OffloadOptimizer {
        device: cpu.clone(),
        buffer_count: 4,
        pipeline_read: false,
        pipeline_write: false,
        ratio: 1.0,
        pin_memory: true,
        delayed_update_after: None,
    };
    let (buffer_count, buffer_size, max_in_cpu) = (5, 100_000_000, 1_000_000_000);
    let param = OffloadParam { device: cpu, buffer_count, buffer_size, max_in_cpu, pin_memory: true };
    assert_eq!((config.zero.offload_optimizer, config.zero.offload_param), (Some(optimizer), Some(param)));
    assert_eq!(config.aio, Aio { block_size: 1 << 20, queue_depth: 8, intra_op_parallelism: 1 });
    assert!(config.notes.is_empty() && !config.cpu_checkpointing);
}

#[test]
fn every_key_of_offload_reaches_the_resolved_configuration_without_a_note() {
    let (mut zero, optimizer, param) = both_on_nvme();
    zero["stage"] = json!(3);
    let config = load(with(json!({
        "zero_optimization": zero, "aio": {"block_size": 4096, "queue_depth": 2, "intra_op_parallelism": 3},
        "activation_checkpointing": {"cpu_checkpointing": true, "every_unit": true},
    })));
    assert_eq!(notes(&config), "");
    assert_eq!((config.zero.offload_optimizer, config.zero.offload_param), (Some(optimizer), Some(param)));
    assert_eq!(config.aio, Aio { block_size: 4096, queue_depth: 2, intra_op_parallelism: 3 });
    assert!(config.cpu_checkpointing && config.activation_checkpointing);
}

#[test]
fn offload_below_its_stage_is_noted_and_resolves_to_none() {
    let notes_at = |stage: u8| {
        let nvme = json!({"device": "nvme"});
        let zero = json!({"stage": stage, "offload_optimizer": {"device": "cpu"}, "offload_param": nvme});
        let config = load(with(json!({ "zero_optimization": zero })));
        assert_eq!(config.zero.offload_optimizer.is_some(), stage > 0);
        assert_eq!(config.zero.offload_param, None);
        notes(&config)
    };
    insta::assert_snapshot!(notes_at(0), @"
    zero_optimization.offload_optimizer: accepted, but has no effect at stage 0, as in DeepSpeed: it needs stage 1, 2 or 3
    zero_optimization.offload_param: accepted, but has no effect at stage 0, as in DeepSpeed: it needs stage 3
    ");
    insta::assert_snapshot!(notes_at(2), @"zero_optimization.offload_param: accepted, but has no effect at stage 2, as in DeepSpeed: it needs stage 3");
    let config = load(with(json!({"zero_optimization": {"stage": 1, "cpu_offload": true}})));
    insta::assert_snapshot!(notes(&config), @r#"zero_optimization.cpu_offload: deprecated: treated as `zero_optimization.offload_optimizer.device` = "cpu""#);
    assert_eq!(config.zero.offload_optimizer.map(|offload| offload.device), Some(OffloadTo::Cpu));
}

#[test]
fn a_file_that_switches_recomputation_on_is_told_so() {
    for (key, value) in [
        ("cpu_checkpointing", json!(true)),
        ("partition_activations", json!(true)),
        ("contiguous_memory_optimization", json!(true)),
        ("number_checkpoints", json!(4)),
    ] {
        let section = json!({key: value});
        let config = load(with(json!({"activation_checkpointing": section})));
        assert!(config.activation_checkpointing, "{key}");
        let noted = notes(&config);
        assert!(noted.starts_with(&format!("activation_checkpointing.{key}: treated as `every_unit`")), "{noted}");
        assert_eq!(config.cpu_checkpointing, key == "cpu_checkpointing");
        // candle-zero's own key takes precedence and needs no note.
        for every_unit in [true, false] {
            let mut section = section.clone();
            section["every_unit"] = json!(every_unit);
            let config = load(with(json!({"activation_checkpointing": section})));
            assert_eq!((config.activation_checkpointing, notes(&config).as_str()), (every_unit, ""), "{key}");
        }
    }
    let off = json!({"number_checkpoints": null, "cpu_checkpointing": false, "partition_activations": false});
    let config = load(with(json!({ "activation_checkpointing": off })));
    assert_eq!((config.activation_checkpointing, notes(&config).as_str()), (false, ""));
}

#[test]
fn the_old_name_of_bf16_loses_to_the_new_one() {
    for text in [
        r#"{"train_batch_size": 8, "bfloat16": {"enabled": true}, "bf16": {"enabled": false}}"#,
        r#"{"train_batch_size": 8, "bf16": {"enabled": false}, "bfloat16": {"enabled": true, "nonsense": 1}}"#,
    ] {
        let config = Config::load(text, 1).unwrap();
        assert_eq!(config.precision, Precision::F32);
        assert!(notes(&config).starts_with("bfloat16: an old name: ignored"), "{}", notes(&config));
    }
    let config = Config::load(r#"{"train_batch_size": 8, "bfloat16": {"enabled": true}}"#, 1).unwrap();
    assert_eq!(config.precision, Precision::Bf16 { check_grad_overflow: true });
}

#[test]
fn a_file_is_read_as_hjson() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ds.hjson");
    for text in [
        "{ train_batch_size: 8, zero_optimization: { stage: 2 } }",
        "# no braces\ntrain_batch_size: 8\nzero_optimization: {\n  stage: 2 // of 3\n}\n",
        "{\n  'train_batch_size': 8\n  \"zero_optimization\": {\"stage\": 2}\n}",
    ] {
        std::fs::write(&path, text).unwrap();
        let config = Config::load(&path, 1).unwrap();
        assert_eq!((config.batch.train_batch_size, config.zero.stage), (8, ZeroStage::Two), "{text}");
    }
    // A comma belongs to an unquoted string: this is not the intended folder.
    std::fs::write(&path, "{train_batch_size: 8\ncsv_monitor: {\n  output_path: out,\n}}").unwrap();
    let config = Config::load(&path, 1).unwrap();
    assert_eq!(
        notes(&config),
        "csv_monitor.output_path: \"out,\" ends with a comma: an unquoted string extends to the end of its line"
    );
    std::fs::write(&path, "train_batch_size: 8\noptimizer: {\n  type: AdamW\n  params: {\n    lr: 1e-3\n  }\n}\n")
        .unwrap();
    assert!(matches!(Config::load(&path, 1).unwrap().optimizer, Some(OptimizerConfig::Adam(_))));
}

#[test]
fn an_auto_warm_up_is_none_unless_the_run_knows_one() {
    let text = json!({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}});
    for (given, steps) in [(None, 1), (Some(0), 1), (Some(30), 30)] {
        let run = RunValues { warmup_num_steps: given, ..RunValues::default() };
        let config = Config::load_for(with(text.clone()), 1, &run).unwrap();
        let Some(SchedulerConfig::WarmupLr { warmup_num_steps, .. }) = config.scheduler else { panic!("WarmupLR") };
        assert_eq!(warmup_num_steps, steps);
        assert_eq!(notes(&config), format!("scheduler.params.warmup_num_steps: \"auto\": taken as {steps}"));
    }
}

#[test]
fn a_warm_up_to_a_lower_rate_is_noted() {
    let notes_for = |params: Value| {
        let config = load(with(json!({
            "optimizer": {"type": "AdamW", "params": {"lr": 0.5}},
            "scheduler": {"type": "WarmupLR", "params": params}})));
        notes(&config)
    };
    insta::assert_snapshot!(notes_for(json!({"warmup_min_lr": 1, "warmup_max_lr": 0.1})), @"scheduler.params.warmup_min_lr: 1 is above warmup_max_lr 0.1: the rate falls during the warm-up, as in DeepSpeed");
    insta::assert_snapshot!(notes_for(json!({"warmup_min_lr": 1})), @"scheduler.params.warmup_min_lr: 1 is above the optimizer's lr 0.5: the rate falls during the warm-up, as in DeepSpeed");
    assert_eq!(notes_for(json!({"warmup_min_lr": 0.1})), "");
}

#[test]
fn compression_between_hosts_only_is_true_or_false_and_noted_where_nothing_is_compressed() {
    let load_zero = |zero: Value, more: Value| {
        let mut value = with(more);
        value["zero_optimization"] = zero;
        load(value)
    };
    let key = "compress_between_hosts_only";
    assert!(!load_zero(json!({"stage": 3}), json!({})).zero.compress_between_hosts_only);
    for (zero, more) in [
        (json!({"stage": 0, "zero_quantized_gradients": true}), json!({})),
        (json!({"stage": 3, "zero_quantized_weights": true}), json!({})),
        (json!({"stage": 1}), json!({"communication_data_type": "bf16"})),
    ] {
        let mut zero = zero;
        zero[key] = true.into();
        let config = load_zero(zero, more);
        assert!(config.zero.compress_between_hosts_only);
        assert_eq!(notes(&config), "");
        assert_eq!(load(config.to_deepspeed_json()).zero, config.zero);
    }
    let idle = load_zero(json!({"stage": 3, key: true}), json!({"communication_data_type": "fp32"}));
    insta::assert_snapshot!(notes(&idle), @"zero_optimization.compress_between_hosts_only: accepted, but has no effect here: it applies to zero_quantized_gradients, zero_quantized_weights at stage 3 and a 16-bit communication_data_type, and none of these is set");
    for value in [json!(2), json!("between"), json!([])] {
        let refused = with(json!({"zero_optimization": {"stage": 3, key: value}}));
        let message = Config::load(refused, 1).unwrap_err().to_string();
        assert!(message.contains(key) && message.contains("true or false"), "{message}");
    }
}

#[test]
fn autocast_is_the_format_of_an_f32_models_products() {
    let resolve = |section: Value, more: Value| {
        let mut value = with(more);
        value["torch_autocast"] = section;
        let config = load(value);
        assert_eq!(load(config.to_deepspeed_json()).autocast, config.autocast);
        (config.autocast, notes(&config))
    };
    for dtype in [json!(null), json!("bf16"), json!("torch.bfloat16")] {
        assert_eq!(resolve(json!({"enabled": true, "dtype": dtype}), json!({})), (Some(DType::BF16), String::new()));
        assert_eq!(resolve(json!({"enabled": false, "dtype": dtype}), json!({})), (None, String::new()));
    }
    assert_eq!(resolve(json!({"enabled": true, "dtype": "float32"}), json!({})), (None, String::new()));
    let (dtype, note) = resolve(json!({"enabled": true}), json!({"bf16": {"enabled": true}}));
    assert_eq!(dtype, None);
    assert!(note.contains("products use that format"), "{note}");
}

#[test]
fn classes_whose_gradients_may_travel_in_low_precision_are_those_that_are_known() {
    let notes_for = |classes: &[&str]| {
        notes(&load(with(json!({"torch_autocast": {"enabled": true, "lower_precision_safe_modules": classes}}))))
    };
    let all = ["torch.nn.Linear", "torch.nn.modules.conv.Conv2d", "candle_zero::nn::Conv1D"];
    insta::assert_snapshot!(notes_for(&all), @"torch_autocast.lower_precision_safe_modules: accepted, but has no effect here: all gradients are communicated in communication_data_type, f32 by default; set it to bf16 for all of them");
    assert_eq!(notes_for(&[]), notes_for(&all));
    // If nothing is rounded, the classes do not matter.
    let off = json!({"torch_autocast": {"enabled": false, "lower_precision_safe_modules": ["x.Y"]}});
    assert_eq!(load(with(off)).autocast, None);
}

#[test]
fn modules_kept_in_f32_are_a_list_of_names_in_a_16_bit_model() {
    let resolve = |precision: &str, modules: Value| {
        let config = load(with(json!({precision: {"enabled": true}, "data_types": {"keep_in_fp32_modules": modules}})));
        assert_eq!(load(config.to_deepspeed_json()).keep_in_fp32_modules, config.keep_in_fp32_modules);
        (config.keep_in_fp32_modules.join(" "), notes(&config))
    };
    for precision in ["bf16", "fp16"] {
        let modules = json!(["ln_f", "mlp.c_proj", "*norm*"]);
        assert_eq!(resolve(precision, modules), ("ln_f mlp.c_proj *norm*".into(), String::new()));
        assert_eq!(resolve(precision, json!("auto")), (String::new(), String::new()));
        assert_eq!(resolve(precision, json!([])), (String::new(), String::new()));
    }
    let f32 = load(with(json!({"data_types": {"keep_in_fp32_modules": ["ln_f"]}})));
    assert!(f32.keep_in_fp32_modules.is_empty());
    insta::assert_snapshot!(notes(&f32), @"data_types.keep_in_fp32_modules: accepted, but has no effect here: the complete model is f32");
}

#[test]
fn a_vocabulary_that_is_no_multiple_of_8_is_noted() {
    let notes_for = |size: u32| notes(&load(with(json!({ "vocabulary_size": size }))));
    insta::assert_snapshot!(notes_for(50257), @"vocabulary_size: 50257 is not a multiple of 8: the matrix units of GPUs work best with a multiple, such as 50264");
    assert_eq!(notes_for(50264), "");
}

#[test]
fn the_level_of_messages_and_the_keys_of_loading_reach_the_resolved_configuration() {
    let config = load(with(json!({"log_level": "Warning", "zero_optimization": {
        "load_from_fp32_weights": false, "log_trace_cache_warnings": true}})));
    assert_eq!((config.monitoring.log_level, notes(&config).as_str()), (Some(LogLevel::Warning), ""));
    assert!(!config.zero.load_from_fp32_weights && config.zero.log_trace_cache_warnings);
    let reloaded = load(config.to_deepspeed_json());
    assert_eq!((reloaded.monitoring.log_level, reloaded.zero), (Some(LogLevel::Warning), config.zero));
    assert_eq!(load(with(json!({}))).monitoring.log_level, None);
    assert_eq!(refused(json!({"log_level": "loud"})), ["log_level"]);
}

#[test]
fn the_norm_may_be_left_out_where_deepspeed_lets_it() {
    let bf16 = |more: Value| {
        let mut value = json!({"bf16": {"enabled": true}, "gradient_clipping": 0,
            "zero_optimization": {"stage": 1, "compute_grad_norm": false}});
        value.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        value
    };
    load(with(bf16(json!({}))));
    load(with(bf16(json!({"data_types": {"grad_accum_dtype": "bf16"}}))));
    assert_eq!(
        refused(bf16(json!({"data_types": {"grad_accum_dtype": "fp32"}}))),
        ["zero_optimization.compute_grad_norm"]
    );
}

#[test]
fn changed_offload_wins_over_what_the_file_said() {
    let (mut zero, optimizer, param) = both_on_nvme();
    zero["stage"] = json!(3);
    let offloading =
        load(with(json!({"zero_optimization": zero, "activation_checkpointing": {"cpu_checkpointing": true}})));
    let plain = load(with(json!({"zero_optimization": {"stage": 3}})));
    let reload = |config: &Config| load(config.to_deepspeed_json());

    let mut config = offloading.clone();
    config.zero.offload_optimizer = None;
    config.zero.offload_param.as_mut().unwrap().device = OffloadTo::Cpu;
    config.cpu_checkpointing = false;
    let printed = reload(&config);
    assert_eq!(printed.zero, config.zero);
    assert!(printed.activation_checkpointing && !printed.cpu_checkpointing);

    let mut config = offloading;
    config.activation_checkpointing = false;
    assert!(!reload(&config).activation_checkpointing);

    let mut config = plain;
    (config.zero.offload_optimizer, config.zero.offload_param) = (Some(optimizer), Some(param));
    (config.activation_checkpointing, config.cpu_checkpointing) = (true, true);
    config.aio.queue_depth = 5;
    let printed = reload(&config);
    assert_eq!((printed.zero, printed.aio), (config.zero, config.aio));
    assert!(printed.cpu_checkpointing);
}

#[test]
fn off_forms_of_unsupported_features_are_accepted() {
    let config = load(with(json!({
        "torch_autocast": {"enabled": false, "dtype": "bfloat16"}, "sequence_parallel_size": 1,
        "data_efficiency": {"enabled": false, "data_routing": {"enabled": true, "random_ltd": {"enabled": true}}},
        "pipeline": {"stages": "auto"}, "expert_parallel": {"enabled": false},
        "zero_optimization": {"zero_quantized_weights": false, "zenflow": null, "offload_param": null},
        "bf16": {"enabled": true, "bf16_master_weights_and_grads": false},
    })));
    insta::assert_snapshot!(notes(&config));
}

#[test]
fn experts_are_divided_among_as_many_ranks_as_requested() {
    let section = json!({"enabled": true, "autoep_size": 2, "preset_model": "mixtral", "use_grouped_mm": false});
    let config = Config::load(with(json!({"expert_parallel": section})), 4).unwrap();
    assert_eq!(config.expert_parallel_size, 2);
    insta::assert_snapshot!(notes(&config), @r#"
    expert_parallel.preset_model: accepted, but has no effect here: the model's code determines which of its parameters belong to experts
    expert_parallel.use_grouped_mm: accepted, but has no effect here: experts are computed as grouped products
    "#);
    for off in
        [json!({"enabled": false, "autoep_size": 2}), json!({"autoep_size": 2, "top_k": 3}), json!({"enabled": true})]
    {
        assert_eq!(Config::load(with(json!({"expert_parallel": off})), 4).unwrap().expert_parallel_size, 1);
    }
    let refused = |section: Value, zero: Value| {
        let more = json!({"expert_parallel": section, "zero_optimization": zero});
        Config::load(with(more), 4).unwrap_err().to_string()
    };
    let two = || json!({"enabled": true, "autoep_size": 2});
    insta::assert_snapshot!(refused(json!({"enabled": true, "autoep_size": 8}), json!({})), @"the configuration given as a value: `expert_parallel.autoep_size`: expected a divisor of the number of ranks, 4 (one of 1, 2, 4), found 8");
    insta::assert_snapshot!(refused(two(), json!({"stage": 3, "zero_hpz_partition_size": 2})), @"the configuration given as a value: `expert_parallel.autoep_size`: 2 cannot be used together with zero_optimization.zero_hpz_partition_size, because experts are not gathered between hosts; remove expert_parallel or zero_optimization.zero_hpz_partition_size");
    insta::assert_snapshot!(refused(two(), json!({"stage": 3, "zero_quantized_weights": true})), @"the configuration given as a value: `expert_parallel.autoep_size`: 2 cannot be used together with zero_optimization.zero_quantized_weights or zero_quantized_gradients, because collectives among the ranks of an expert are not compressed; remove expert_parallel or zero_optimization.zero_quantized_weights or zero_quantized_gradients");
    insta::assert_snapshot!(refused(json!({"enabled": true, "autoep_size": 2, "route_norm": true}), json!({})), @"the configuration given as a value: `expert_parallel.route_norm`: true is not supported: the model's code or its config.json determines how tokens are routed, and ignoring the key would change training");
}

#[test]
fn features_whose_silent_loss_would_change_training_are_refused() {
    for (more, path) in [
        (json!({"torch_autocast": {"enabled": true, "dtype": "float16"}}), "torch_autocast.dtype"),
        (json!({"torch_autocast": {"enabled": true, "dtype": "int4"}}), "torch_autocast.dtype"),
        (json!({"data_efficiency": {"enabled": true}}), "data_efficiency.enabled"),
        (
            json!({"data_efficiency": {"enabled": true,
                   "data_routing": {"enabled": true, "random_ltd": {"enabled": true}}}}),
            "data_efficiency.data_routing.random_ltd",
        ),
        (json!({"tensor_parallel": {"autotp_size": 2}}), "tensor_parallel.autotp_size"),
        (json!({"tensor_parallel": {"tp": {"tp_size": 2}}}), "tensor_parallel.tensor_parallel.tp_size"),
        (json!({"pipeline": {"seed_layers": true}}), "pipeline.seed_layers"),
        (json!({"expert_parallel": {"enabled": true, "autoep_size": 3}}), "expert_parallel.autoep_size"),
        (
            json!({"expert_parallel": {"enabled": true, "expert_tensor_parallel_size": 2}}),
            "expert_parallel.expert_tensor_parallel_size",
        ),
        (json!({"expert_parallel": {"enabled": true, "top_k": 4}}), "expert_parallel.top_k"),
        (json!({"sequence_parallel_size": 2}), "sequence_parallel_size"),
        (json!({"managed_gradient_accumulation": false}), "managed_gradient_accumulation"),
        (json!({"zero_optimization": {"zenflow": {}}}), "zero_optimization.zenflow"),
        (json!({"zero_optimization": {"legacy_stage1": true}}), "zero_optimization.legacy_stage1"),
        (json!({"zero_optimization": {"zeropp_loco_param": {}}}), "zero_optimization.zeropp_loco_param"),
        (json!({"amp": {"enabled": true}}), "amp"),
        (json!({"nebula": {"enabled": false}}), "nebula"),
        (json!({"elasticity": {}}), "elasticity"),
        (json!({"optimizer": {"type": "MuSGD"}}), "optimizer.type"),
        (json!({"optimizer": {"type": "Muon", "params": {"per_head_muon": true}}}), "optimizer.params.per_head_muon"),
        (json!({"optimizer": {"type": "Muon", "params": {"momentum": 1}}}), "optimizer.params.momentum"),
        (json!({"optimizer": {"type": "Muon", "params": {"ns_method": "svd"}}}), "optimizer.params.ns_method"),
        (json!({"optimizer": {"type": "Adam", "params": {"amsgrad": true}}}), "optimizer.params.amsgrad"),
        (json!({"optimizer": {"type": "Lion", "params": {"eps": 0.1}}}), "optimizer.params.eps"),
        (json!({"optimizer": {"type": "Adagrad", "params": {"lr_decay": 0.1}}}), "optimizer.params.lr_decay"),
        (
            json!({"optimizer": {"type": "Adagrad", "params": {"initial_accumulator_value": 1}}}),
            "optimizer.params.initial_accumulator_value",
        ),
        (json!({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 0}}}), "optimizer.params.max_grad_norm"),
        (json!({"optimizer": {"type": "Adam", "params": {"freeze_step": 2}}}), "optimizer.params.freeze_step"),
        (json!({"scheduler": {"type": "OneCycleLR", "params": {"max_lr": 0}}}), "scheduler.type"),
        (json!({"scheduler": {"type": "warmuplr"}}), "scheduler.type"),
        (json!({"scheduler": {"params": {}}}), "scheduler.type"),
        (json!({"optimizer": {}}), "optimizer.type"),
        (
            json!({"torch_autocast": {"enabled": true, "lower_precision_safe_modules": ["torch.nn.LSTM"]}}),
            "torch_autocast.lower_precision_safe_modules",
        ),
    ] {
        assert_eq!(refused(more), [path]);
    }
}

#[test]
fn rules_between_keys_hold() {
    let zero = |stage: u8, more: Value| {
        let mut zero = json!({"stage": stage});
        zero.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        json!({"zero_optimization": zero})
    };
    let sgd = json!({"type": "SGD"});
    let cycle = |more: Value| {
        let mut params = json!({"cycle_min_lr": 0, "cycle_max_lr": 1});
        params.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        json!({"scheduler": {"type": "OneCycle", "params": params}})
    };
    let cases = [
        (zero(2, json!({"allgather_bucket_size": 77})), "zero_optimization.allgather_bucket_size"),
        (zero(1, json!({"offload_optimizer": {"ratio": 0.5}})), "zero_optimization.offload_optimizer.ratio"),
        (zero(3, json!({"compute_grad_norm": false})), "zero_optimization.compute_grad_norm"),
        (zero(3, json!({"mics_shard_size": 3})), "zero_optimization.mics_shard_size"),
        (zero(3, json!({"mics_shard_size": 1, "zero_hpz_partition_size": 2})), "zero_optimization.mics_shard_size"),
        (zero(1, json!({"cpu_offload": true, "offload_optimizer": {}})), "zero_optimization.cpu_offload"),
        (
            zero(3, json!({"max_live_parameters": 1, "stage3_max_live_parameters": 1})),
            "zero_optimization.stage3_max_live_parameters",
        ),
        (json!({"prescale_gradients": true, "zero_optimization": {"stage": 2}}), "prescale_gradients"),
        (json!({"gradient_predivide_factor": 2, "zero_optimization": {"stage": 3}}), "gradient_predivide_factor"),
        (json!({"gradient_predivide_factor": 0}), "gradient_predivide_factor"),
        (json!({"gradient_clipping": -1}), "gradient_clipping"),
        (json!({"optimizer": sgd, "zero_optimization": {"stage": 1}}), "optimizer.type"),
        (json!({"optimizer": {"type": "SGD", "params": {"nesterov": true}}}), "optimizer.params.nesterov"),
        (json!({"optimizer": {"type": "Lamb"}, "zero_optimization": {"stage": 1}}), "optimizer.type"),
        (json!({"optimizer": {"type": "Lamb", "params": {"min_coeff": 11}}}), "optimizer.params.min_coeff"),
        (json!({"optimizer": {"type": "Lamb", "params": {"max_coeff": 0.001}}}), "optimizer.params.max_coeff"),
        (json!({"optimizer": {"type": "Adam", "params": {"betas": [0.9, 1]}}}), "optimizer.params.betas"),
        (json!({"scheduler": {"type": "WarmupDecayLR"}}), "scheduler.params.total_num_steps"),
        (cycle(json!({"cycle_max_lr": null})), "scheduler.params.cycle_max_lr"),
        (cycle(json!({"cycle_max_lr": []})), "scheduler.params.cycle_max_lr"),
        (cycle(json!({"cycle_first_step_size": 0})), "scheduler.params.cycle_first_step_size"),
        (cycle(json!({"cycle_second_step_size": -1})), "scheduler.params.cycle_second_step_size"),
        (cycle(json!({"cycle_max_mom": 1})), "scheduler.params.cycle_max_mom"),
        (cycle(json!({"last_batch_iteration": 3})), "scheduler.params.last_batch_iteration"),
        (
            json!({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}}),
            "scheduler.params.warmup_num_steps",
        ),
        (zero(1, json!({"offload_optimizer": {"device": "nvme"}})), "zero_optimization.offload_optimizer.nvme_path"),
        (
            zero(3, json!({"offload_param": {"device": "nvme", "nvme_path": ""}})),
            "zero_optimization.offload_param.nvme_path",
        ),
        (
            zero(3, json!({"offload_param": {"device": "nvme", "nvme_path": "/x", "buffer_size": 0}})),
            "zero_optimization.offload_param.buffer_size",
        ),
        (json!({"aio": {"block_size": 0}}), "aio.block_size"),
        (json!({"data_types": {"param_dtype": "bf16"}}), "data_types.param_dtype"),
        (json!({"data_types": {"grad_accum_dtype": "bf16"}}), "data_types.grad_accum_dtype"),
        (json!({"fp16": {"enabled": true, "initial_scale_power": 128}}), "fp16.initial_scale_power"),
        (json!({"fp16": {"enabled": true, "hysteresis": 0}}), "fp16.hysteresis"),
        (
            json!({"bf16": {"enabled": true}, "data_types": {"keep_in_fp32_modules": ["ln_f", "mlp..c_fc"]}}),
            "data_types.keep_in_fp32_modules",
        ),
        (json!({"train_batch_size": 0}), "train_batch_size"),
        (json!({"train_batch_size": "8"}), "train_batch_size"),
        (json!({"optimizer": {"type": "auto"}}), "optimizer.type"),
    ];
    for (more, path) in cases {
        assert_eq!(refused(more), [path]);
    }
    // The same keys are accepted without the forbidden values.
    for more in [
        zero(3, json!({"allgather_bucket_size": 77})),
        zero(3, json!({"offload_optimizer": {"ratio": 0.5}})),
        zero(0, json!({"offload_optimizer": {"device": "nvme"}})),
        zero(2, json!({"offload_param": {"device": "nvme", "buffer_count": 0}})),
        zero(3, json!({"offload_optimizer": {"device": "cpu", "buffer_count": 0}})),
        json!({"prescale_gradients": true, "zero_optimization": {"stage": 2, "reduce_scatter": false}}),
        json!({"optimizer": sgd, "zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": true}),
        json!({"optimizer": {"type": "Lion"}, "zero_optimization": {"stage": 1}}),
        json!({"optimizer": {"type": "Adagrad"}, "zero_optimization": {"stage": 1}}),
        json!({"optimizer": {"type": "Lamb", "params": {"min_coeff": 10}}}),
        json!({"gradient_clipping": 0, "zero_optimization": {"stage": 2, "compute_grad_norm": false}}),
        cycle(json!({"cycle_second_step_size": 0, "cycle_max_mom": 1, "cycle_momentum": false})),
        json!({"data_types": {"grad_accum_dtype": "fp32"}, "bf16": {"enabled": true}, "zero_optimization": {"stage": 1}}),
    ] {
        load(with(more));
    }
}

#[test]
fn an_auto_batch_key_follows_from_the_others_and_is_noted() {
    let config = Config::load(
        json!({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": "auto"}),
        2,
    )
    .unwrap();
    assert_eq!((config.batch.train_batch_size, config.batch.gradient_accumulation_steps), (6, 1));
    insta::assert_snapshot!(notes(&config), @r#"
    train_batch_size: "auto": derived as 6 from the other batch keys
    gradient_accumulation_steps: "auto": taken as 1
    "#);
}

#[test]
fn an_auto_of_the_run_has_the_runs_value() {
    let run = RunValues {
        train_micro_batch_size_per_gpu: 3,
        gradient_accumulation_steps: 5,
        lr: 0.25,
        warmup_num_steps: Some(7),
        total_num_steps: Some(70),
        hidden_size: Some(64),
    };
    let text = json!({
        "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
        "zero_optimization": {
            "stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto", "sub_group_size": "auto",
        },
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "scheduler": {"type": "WarmupDecayLR", "params": {
            "warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto",
        }},
    });
    let config = Config::load_for(text.clone(), 2, &run).unwrap();
    assert_eq!((config.batch.train_batch_size, config.batch.gradient_accumulation_steps), (30, 5));
    let zero = &config.zero;
    assert_eq!(
        (zero.reduce_bucket_size, zero.prefetch_bucket_size, zero.param_persistence_threshold, zero.sub_group_size),
        (4096, 3686, 640, 1_000_000_000)
    );
    assert_eq!(
        config.scheduler,
        Some(SchedulerConfig::WarmupDecayLr {
            total_num_steps: 70,
            warmup_min_lr: 0.0.into(),
            warmup_max_lr: 0.25.into(),
            warmup_num_steps: 7,
            decay_power: 1.0,
            warmup_type: WarmupType::Log,
        })
    );
    // A given train batch size takes precedence; values of the run are checked like those of a file.
    let config = Config::load_for(with(text.clone()), 2, &run).unwrap();
    assert_eq!((config.batch.train_micro_batch_size_per_gpu, config.batch.gradient_accumulation_steps), (4, 1));
    let wrong = RunValues { lr: -1.0, train_micro_batch_size_per_gpu: 0, hidden_size: Some(0), ..run };
    let Err(Error::Config(ConfigError::Problems { problems, .. })) = Config::load_for(text, 2, &wrong) else {
        panic!("the wrong values are accepted")
    };
    let paths: Vec<&str> = problems.iter().map(|problem| problem.path.as_str()).collect();
    assert_eq!(
        paths,
        ["zero_optimization.reduce_bucket_size", "train_micro_batch_size_per_gpu", "optimizer.params.lr",]
    );
}

#[test]
fn a_removed_feature_that_is_off_is_noted() {
    for name in ["amp", "elasticity", "eigenvalue", "curriculum_learning", "progressive_layer_drop"] {
        let config = load(with(json!({name: {"enabled": false, "x": 1}})));
        assert_eq!(notes(&config), format!("{name}: is off, so it is ignored; this library does not support it"));
        assert_eq!(refused(json!({name: {"enabled": true}})), [name]);
    }
}

#[test]
fn a_resolved_configuration_is_taken_as_it_is_for_the_same_world_only() {
    let mut config = Config::load(with(json!({})), 2).unwrap();
    config.seed = 99;
    assert_eq!(Config::load(config.clone(), 2).unwrap(), config);
    insta::assert_snapshot!(Config::load(config, 4).unwrap_err(), @"the Config was resolved for 2 ranks, but the run has 4; load it again from its file or text: the batch keys depend on the number of ranks");
}

/// Returns a strategy for configurations that set supported keys to compatible values.
fn any_config() -> impl Strategy<Value = Value> {
    let device = || prop::option::of(prop::sample::select(vec!["none", "cpu", "nvme"]));
    let offload = (device(), device(), 4..9_u32, 1..9_u32, 0.0..=1.0, any::<[bool; 2]>()).prop_map(
        |(optimizer, param, count, size, ratio, [read, write])| {
            let optimizer = optimizer.map(|device| {
                json!({
                    "device": device, "nvme_path": "/a", "buffer_count": count, "pipeline_read": read,
                    "pipeline_write": write, "ratio": ratio,
                })
            });
            let param = param.map(|device| {
                json!({
                    "device": device, "nvme_path": "/b", "buffer_count": count, "buffer_size": size, "max_in_cpu": size,
                })
            });
            (optimizer, param)
        },
    );
    let zero = (0..4_u8, 1_u32..1_000_000, any::<bool>(), prop::option::of(any::<bool>()), 0..3_u32, offload).prop_map(
        |(stage, bucket, scatter, overlap, threshold, (mut optimizer, param))| {
            if let (Some(optimizer), 0..3) = (&mut optimizer, stage) {
                optimizer["ratio"] = json!(1);
            }
            json!({
                "stage": stage, "reduce_bucket_size": bucket, "reduce_scatter": scatter, "overlap_comm": overlap,
                "stage3_param_persistence_threshold": threshold, "allgather_bucket_size": 2 * bucket,
                "offload_optimizer": optimizer, "offload_param": param,
            })
        },
    );
    let optimizer = prop_oneof![
        Just(Value::Null),
        (0.0..1.0, 0.0..0.999, any::<bool>()).prop_map(|(lr, beta, mode)| json!({
            "type": "Adam", "params": {"lr": lr, "betas": [beta, 0.95], "adam_w_mode": mode}})),
        (0.0..1.0, 0.01..0.99, any::<bool>()).prop_map(|(lr, momentum, nesterov)| json!({
            "type": "SGD", "params": {"lr": lr, "momentum": momentum, "nesterov": nesterov}})),
        (0.0..1.0, 0.0..0.999, 0.0..1.0).prop_map(|(lr, beta, decay)| json!({
            "type": "Lion", "params": {"lr": lr, "betas": [beta, 0.95], "weight_decay": decay}})),
        (0.0..1.0, 0.0..1.0, 0.0..1.0).prop_map(|(lr, eps, decay)| json!({
            "type": "Adagrad", "params": {"lr": lr, "eps": eps, "weight_decay": decay}})),
        (0.0..1.0, 0.0..1.0, 1.0..9.0, any::<bool>(), any::<bool>()).prop_map(|(lr, low, high, inside, bias)| json!({
            "type": "Lamb", "params": {"lr": lr, "min_coeff": low, "max_coeff": high, "eps_inside_sqrt": inside,
                                       "bias_correction": bias}})),
    ];
    let scheduler = prop_oneof![
        Just(Value::Null),
        (1..9_u64).prop_map(|steps| json!({"type": "WarmupLR", "params": {"warmup_num_steps": steps}})),
        (9..99_u64, 1..9_u64).prop_map(|(total, steps)| json!({
            "type": "WarmupCosineLR", "params": {"warmup_num_steps": steps, "total_num_steps": total}})),
        (9..99_u64, 1..9_u64).prop_map(|(total, steps)| json!({
            "type": "WarmupDecayLR", "params": {"warmup_num_steps": steps, "total_num_steps": total}})),
        (1..9_u64, prop::option::of(0..9_u64), 0..4_u64, any::<bool>()).prop_map(
            |(up, down, stairs, momentum)| json!({
            "type": "OneCycle", "params": {
                "cycle_min_lr": 0.1, "cycle_max_lr": [1], "cycle_first_step_size": up, "cycle_second_step_size": down,
                "cycle_first_stair_count": stairs, "cycle_momentum": momentum, "decay_step_size": stairs,
                "decay_mom_rate": 0.1}})
        ),
        (1..9_u64, any::<bool>()).prop_map(|(size, stairs)| json!({
            "type": "LRRangeTest", "params": {"lr_range_test_step_size": size, "lr_range_test_staircase": stairs}})),
    ];
    let precision = prop_oneof![
        Just(json!({})),
        any::<bool>().prop_map(|check| json!({"bf16": {"enabled": true, "check_grad_overflow": check}})),
        (0..2_u8, 0..20_u8).prop_map(|(scale, power)| json!({
            "fp16": {"enabled": true, "loss_scale": scale, "initial_scale_power": power}})),
    ];
    let checkpointing = (prop::option::of(1..9_u8), any::<bool>());
    (zero, optimizer, scheduler, precision, 1..64_u32, checkpointing).prop_map(
        |(zero, optimizer, scheduler, precision, micro, (checkpoints, cpu))| {
            let mut value = json!({
                "train_micro_batch_size_per_gpu": micro, "zero_optimization": zero, "optimizer": optimizer,
                "scheduler": scheduler, "zero_allow_untested_optimizer": true, "gradient_clipping": 0.5,
                "activation_checkpointing": {"number_checkpoints": checkpoints, "cpu_checkpointing": cpu},
                "aio": {"block_size": 4096 * micro, "queue_depth": micro},
            });
            value.as_object_mut().unwrap().extend(precision.as_object().unwrap().clone());
            value
        },
    )
}

proptest! {
    #[test]
    fn the_printed_configuration_loads_as_the_same_configuration(value in any_config(), world_size in 1..5_usize) {
        let config = Config::load(value, world_size).unwrap();
        let plain = |mut config: Config| {
            config.notes.clear();
            config.all_keys.clear();
            config
        };
        let reloaded = Config::load(config.to_deepspeed_json(), world_size).unwrap();
        prop_assert_eq!(plain(reloaded), plain(config.clone()));
        // The same holds if it is loaded as text.
        let text = serde_json::to_string_pretty(&config.to_deepspeed_json()).unwrap();
        prop_assert_eq!(plain(Config::load(text, world_size).unwrap()), plain(config));
    }
}

/// Collects every path in a tree, with lists as leaves.
fn paths(tree: &Value, path: &str, into: &mut Vec<String>) {
    for (key, value) in tree.as_object().into_iter().flatten() {
        into.push(format!("{path}/{key}"));
        paths(value, &format!("{path}/{key}"), into);
    }
}

#[test]
fn no_value_of_any_key_makes_loading_panic() {
    let decay = json!({"type": "WarmupDecayLR", "params": {"total_num_steps": 5000}});
    let cycle = json!({"type": "OneCycle", "params": {
        "cycle_min_lr": 0, "cycle_max_lr": 1, "decay_step_size": 1, "decay_mom_rate": 1}});
    for scheduler in [decay, cycle] {
        no_value_makes_loading_panic(&scheduler);
    }
}

fn no_value_makes_loading_panic(scheduler: &Value) {
    let complete = json!({"train_batch_size": 8, "weight_quantization": {}, "checkpoint": {"writer": {}},
        "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/x"},
                              "offload_optimizer": {"device": "nvme", "nvme_path": "/x"}},
        "optimizer": {"type": "Adam"}, "scheduler": scheduler});
    let complete = load(complete).to_deepspeed_json();
    let mut all = Vec::new();
    paths(&complete, "", &mut all);
    assert!(all.len() > 200, "{}", all.len());
    let values = json!([null, true, -1, 0, i64::MAX, 0.5, 1e300, "auto", "x", [0.5, 0.25], {}]);
    for path in all {
        for value in values.as_array().unwrap() {
            let mut config = complete.clone();
            *config.pointer_mut(&path).unwrap() = value.clone();
            // A refused value is an error; a configuration that is accepted can be printed and loaded again.
            if let Ok(config) = Config::load(config, 2) {
                Config::load(config.to_deepspeed_json(), 2).unwrap_or_else(|e| panic!("{path} = {value}: {e}"));
            }
        }
    }
}
