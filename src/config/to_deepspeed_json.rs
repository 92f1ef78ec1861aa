//! Converts the resolved configuration to JSON with DeepSpeed's names.

use super::walk::{defaults, set};
use super::{
    Config, EightBit, EightBitConfig, GradientOp, NsMethod, OptimizerConfig, PerGroup, Precision, SchedulerConfig,
    TagValidation, WarmupType, keys, offload,
};
use candle_core::DType;
use serde_json::{Map, Value, json};

impl Config {
    /// Returns every key of DeepSpeed with its resolved value, including keys that have no effect in candle-zero.
    ///
    /// Loading the returned value gives this configuration again (for the same number of ranks).
    pub fn to_deepspeed_json(&self) -> Value {
        let mut tree = self.all_keys.clone();
        for (path, value) in self.fields() {
            set(&mut tree, path, value);
        }
        // Not a key of DeepSpeed.
        if !self.gradient_check {
            set(&mut tree, "gradient_check", json!(false));
        }
        match &self.optimizer {
            Some(optimizer) => set(&mut tree, "optimizer", optimizer_json(optimizer)),
            None => set(&mut tree, "optimizer", Value::Null),
        }
        set(&mut tree, "scheduler", self.scheduler.as_ref().map_or(Value::Null, scheduler_json));
        self.precision_json(&mut tree);
        set(&mut tree, "torch_autocast.enabled", json!(self.autocast.is_some()));
        if let Some(dtype) = self.autocast {
            set(&mut tree, "torch_autocast.dtype", dtype_json(Some(dtype)));
        }
        self.checkpointing_json(&mut tree);
        // If the section is absent, the value is false.
        let has_writer = tree.get("checkpoint").is_some_and(|section| section["writer"].is_object());
        for (key, value) in [("decoupled", self.saves_in_background), ("show_statistics", self.shows_save_statistics)] {
            if value || has_writer {
                set(&mut tree, &format!("checkpoint.writer.{key}"), json!(value));
            }
        }
        self.offload_json(&mut tree);
        self.monitoring.print(&mut tree);
        Value::Object(tree)
    }

    /// Returns the honoured keys that the other methods and functions in this file do not print.
    fn fields(&self) -> impl Iterator<Item = (&'static str, Value)> {
        let (batch, zero) = (self.batch, &self.zero);
        let op = match self.gradient_allreduce_op {
            GradientOp::Mean => "mean",
            GradientOp::Sum => "sum",
        };
        let tags = match self.tag_validation {
            TagValidation::Ignore => "Ignore",
            TagValidation::Warn => "Warn",
            TagValidation::Fail => "Fail",
        };
        [
            ("train_batch_size", json!(batch.train_batch_size)),
            ("train_micro_batch_size_per_gpu", json!(batch.train_micro_batch_size_per_gpu)),
            ("gradient_accumulation_steps", json!(batch.gradient_accumulation_steps)),
            ("gradient_clipping", json!(self.gradient_clipping)),
            ("prescale_gradients", json!(self.prescale_gradients)),
            ("gradient_predivide_factor", json!(self.gradient_predivide_factor)),
            ("gradient_allreduce_op", json!(op)),
            ("communication_data_type", dtype_json(self.communication_data_type)),
            ("data_types.grad_accum_dtype", dtype_json(self.grad_accum_dtype)),
            ("data_types.buffer_dtype", dtype_json(self.buffer_dtype)),
            ("steps_per_print", json!(self.steps_per_print)),
            ("wall_clock_breakdown", json!(self.wall_clock_breakdown)),
            ("seed", json!(self.seed)),
            ("zero_optimization.stage", json!(zero.stage.number())),
            ("zero_optimization.reduce_bucket_size", json!(zero.reduce_bucket_size)),
            ("zero_optimization.allgather_bucket_size", json!(zero.allgather_bucket_size)),
            ("zero_optimization.overlap_comm", json!(zero.overlap_comm)),
            ("zero_optimization.load_from_fp32_weights", json!(zero.load_from_fp32_weights)),
            ("zero_optimization.log_trace_cache_warnings", json!(zero.log_trace_cache_warnings)),
            ("zero_optimization.contiguous_gradients", json!(zero.contiguous_gradients)),
            ("zero_optimization.reduce_scatter", json!(zero.reduce_scatter)),
            ("zero_optimization.sub_group_size", json!(zero.sub_group_size)),
            ("zero_optimization.stage3_prefetch_bucket_size", json!(zero.prefetch_bucket_size)),
            ("zero_optimization.stage3_param_persistence_threshold", json!(zero.param_persistence_threshold)),
            ("zero_optimization.stage3_model_persistence_threshold", json!(zero.model_persistence_threshold)),
            ("zero_optimization.stage3_max_live_parameters", json!(zero.max_live_parameters)),
            ("zero_optimization.stage3_max_reuse_distance", json!(zero.max_reuse_distance)),
            ("zero_optimization.ignore_unused_parameters", json!(zero.ignore_unused_parameters)),
            ("zero_optimization.zero_hpz_partition_size", json!(zero.hpz_partition_size)),
            ("zero_optimization.mics_shard_size", json!(zero.mics_shard_size.map_or(-1, |ranks| ranks as i64))),
            ("zero_optimization.zero_quantized_weights", json!(zero.quantized_weights)),
            ("zero_optimization.zero_quantized_nontrainable_weights", json!(zero.quantized_nontrainable_weights)),
            ("zero_optimization.zero_quantized_gradients", json!(zero.quantized_gradients)),
            ("zero_optimization.compress_between_hosts_only", json!(zero.compress_between_hosts_only)),
            ("checkpoint.tag_validation", json!(tags)),
            ("checkpoint.upload_to", json!(self.upload_checkpoints_to)),
            ("checkpoint.use_node_local_storage", json!(self.use_node_local_storage)),
            ("aio.block_size", json!(self.aio.block_size)),
            ("aio.queue_depth", json!(self.aio.queue_depth)),
            ("aio.intra_op_parallelism", json!(self.aio.intra_op_parallelism)),
        ]
        .into_iter()
    }

    fn precision_json(&self, tree: &mut Map<String, Value>) {
        set(tree, "fp16.enabled", json!(matches!(self.precision, Precision::Fp16(_))));
        set(tree, "bf16.enabled", json!(matches!(self.precision, Precision::Bf16 { .. })));
        match self.precision {
            Precision::F32 => {}
            Precision::Bf16 { check_grad_overflow } => {
                set(tree, "bf16.check_grad_overflow", json!(check_grad_overflow));
                set(tree, "bf16.bf16_master_weights_and_grads", json!(!self.states.master_weights));
                set(tree, "bf16.bf16_optimizer_states", json!(self.states.bf16_moments));
            }
            Precision::Fp16(fp16) => {
                set(tree, "fp16.loss_scale", json!(fp16.loss_scale));
                set(tree, "fp16.fp16_master_weights_and_grads", json!(!self.states.master_weights));
                set(tree, "fp16.consecutive_hysteresis", json!(fp16.consecutive_hysteresis));
                // With a static scale, the other keys are only recorded.
                if fp16.loss_scale == 0.0 {
                    set(tree, "fp16.initial_scale_power", json!(fp16.initial_scale_power));
                    set(tree, "fp16.loss_scale_window", json!(fp16.loss_scale_window));
                    set(tree, "fp16.hysteresis", json!(fp16.hysteresis));
                    set(tree, "fp16.min_loss_scale", json!(fp16.min_loss_scale as i64));
                }
            }
        }
    }

    /// Writes `activation_checkpointing` to `tree`. `every_unit` decides, whatever the section's other keys request.
    fn checkpointing_json(&self, tree: &mut Map<String, Value>) {
        set(tree, "activation_checkpointing.every_unit", json!(self.activation_checkpointing));
        set(tree, "activation_checkpointing.cpu_checkpointing", json!(self.cpu_checkpointing));
    }

    /// Writes the offload sections to `tree`. A recorded section that has no effect at this stage stays unchanged.
    fn offload_json(&self, tree: &mut Map<String, Value>) {
        let zero = &self.zero;
        let optimizer = zero.offload_optimizer.as_ref().map(|offload| {
            let mut fields = vec![
                ("buffer_count", json!(offload.buffer_count)),
                ("pipeline_read", json!(offload.pipeline_read)),
                ("pipeline_write", json!(offload.pipeline_write)),
                ("pin_memory", json!(offload.pin_memory)),
                ("ratio", json!(offload.ratio)),
            ];
            // Not a key of DeepSpeed, which refuses unknown keys.
            if let Some(after) = offload.delayed_update_after {
                fields.extend([("delayed_update", json!(true)), ("delayed_update_after", json!(after))]);
            }
            (&offload.device, fields)
        });
        let param = zero.offload_param.as_ref().map(|offload| {
            let fields = vec![
                ("buffer_count", json!(offload.buffer_count)),
                ("buffer_size", json!(offload.buffer_size)),
                ("max_in_cpu", json!(offload.max_in_cpu)),
                ("pin_memory", json!(offload.pin_memory)),
            ];
            (&offload.device, fields)
        });
        for (section, field) in [(offload::OPTIMIZER, optimizer), (offload::PARAM, param)] {
            let mut names = section.path.split('.');
            let first = names.next().and_then(|name| tree.get(name));
            let recorded = names.fold(first, |value, name| value?.get(name)).is_some_and(Value::is_object);
            let mut set = |key: &str, value: Value| set(tree, &format!("{}.{key}", section.path), value);
            match field {
                Some((to, fields)) => {
                    if !recorded {
                        let all = defaults(keys::section(section.path));
                        all.into_iter().for_each(|(key, value)| set(&key, value));
                    }
                    fields.into_iter().for_each(|(key, value)| set(key, value));
                    set("device", json!(if to.nvme_path().is_some() { "nvme" } else { "cpu" }));
                    if let Some(path) = to.nvme_path() {
                        set("nvme_path", json!(path.to_string_lossy()));
                    }
                }
                None if recorded && self.zero.stage >= section.min_stage => set("device", json!("none")),
                None => {}
            }
        }
    }
}

fn dtype_json(dtype: Option<DType>) -> Value {
    match dtype {
        None => Value::Null,
        Some(DType::F16) => json!("fp16"),
        Some(DType::BF16) => json!("bf16"),
        Some(_) => json!("fp32"),
    }
}

fn optimizer_json(optimizer: &OptimizerConfig) -> Value {
    match optimizer {
        OptimizerConfig::Adam(adam) => json!({
            "type": if adam.decoupled { "AdamW" } else { "Adam" },
            "params": {
                "lr": adam.lr,
                "betas": [adam.betas.0, adam.betas.1],
                "eps": adam.eps,
                "weight_decay": adam.weight_decay,
                "bias_correction": adam.bias_correction,
                "adam_w_mode": adam.decoupled,
            },
        }),
        OptimizerConfig::Sgd(sgd) => json!({
            "type": "SGD",
            "params": {
                "lr": sgd.lr,
                "momentum": sgd.momentum,
                "dampening": sgd.dampening,
                "weight_decay": sgd.weight_decay,
                "nesterov": sgd.nesterov,
            },
        }),
        OptimizerConfig::Lion(lion) => json!({
            "type": "Lion",
            "params": {
                "lr": lion.lr,
                "betas": [lion.betas.0, lion.betas.1],
                "weight_decay": lion.weight_decay,
            },
        }),
        OptimizerConfig::Adagrad(adagrad) => json!({
            "type": "Adagrad",
            "params": {
                "lr": adagrad.lr,
                "eps": adagrad.eps,
                "weight_decay": adagrad.weight_decay,
            },
        }),
        OptimizerConfig::Lamb(lamb) => json!({
            "type": "Lamb",
            "params": {
                "lr": lamb.lr,
                "betas": [lamb.betas.0, lamb.betas.1],
                "eps": lamb.eps,
                "weight_decay": lamb.weight_decay,
                "bias_correction": lamb.bias_correction,
                "eps_inside_sqrt": lamb.eps_inside_sqrt,
                "max_coeff": lamb.max_coeff,
                "min_coeff": lamb.min_coeff,
            },
        }),
        OptimizerConfig::EightBit(EightBitConfig { kind, min_8bit_size }) => {
            let mut params = match kind {
                EightBit::Adam(adam) | EightBit::AdamW(adam) => json!({
                    "lr": adam.lr,
                    "betas": [adam.betas.0, adam.betas.1],
                    "eps": adam.eps,
                    "weight_decay": adam.weight_decay,
                }),
                EightBit::Lion(lion) => json!({
                    "lr": lion.lr,
                    "betas": [lion.betas.0, lion.betas.1],
                    "weight_decay": lion.weight_decay,
                }),
            };
            params["min_8bit_size"] = json!(min_8bit_size);
            json!({ "type": kind.name(), "params": params })
        }
        OptimizerConfig::Lars(lars) => json!({
            "type": "LARS",
            "params": {
                "lr": lars.lr,
                "momentum": lars.momentum,
                "weight_decay": lars.weight_decay,
                "trust_coefficient": lars.trust_coefficient,
                "eps": lars.eps,
            },
        }),
        OptimizerConfig::Adafactor(adafactor) => {
            let mut params = json!({
                "relative_step": adafactor.lr.is_none(),
                "warmup_init": adafactor.warmup_init,
                "scale_parameter": adafactor.scale_parameter,
                "eps": [adafactor.eps.0, adafactor.eps.1],
                "clip_threshold": adafactor.clip_threshold,
                "decay_rate": adafactor.decay_rate,
                "beta1": adafactor.beta1,
                "weight_decay": adafactor.weight_decay,
            });
            if let Some(lr) = adafactor.lr {
                params["lr"] = json!(lr);
            }
            json!({ "type": "Adafactor", "params": params })
        }
        OptimizerConfig::ScheduleFree(schedule_free) => json!({
            "type": "AdamWScheduleFree",
            "params": {
                "lr": schedule_free.lr,
                "betas": [schedule_free.betas.0, schedule_free.betas.1],
                "eps": schedule_free.eps,
                "weight_decay": schedule_free.weight_decay,
                "warmup_steps": schedule_free.warmup_steps,
                "r": schedule_free.r,
                "weight_lr_power": schedule_free.weight_lr_power,
            },
        }),
        OptimizerConfig::Muon(muon) => json!({
            "type": "Muon",
            "params": {
                "muon_lr": muon.lr,
                "adam_lr": muon.adam.lr,
                "momentum": muon.momentum,
                "weight_decay": muon.weight_decay,
                "ns_method": match muon.ns_method {
                    NsMethod::Gram => "gram",
                    NsMethod::Standard => "standard",
                },
                "betas": [muon.adam.betas.0, muon.adam.betas.1],
                "eps": muon.adam.eps,
                "adam_w_mode": muon.adam.decoupled,
            },
        }),
    }
}

fn scheduler_json(scheduler: &SchedulerConfig) -> Value {
    let shape = |warmup_type: WarmupType| match warmup_type {
        WarmupType::Log => "log",
        WarmupType::Linear => "linear",
    };
    let rate = |rate: &PerGroup| match rate {
        PerGroup::All(rate) => json!(rate),
        PerGroup::Each(rates) => json!(rates),
    };
    match scheduler {
        SchedulerConfig::WarmupLr { warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type } => json!({
            "type": "WarmupLR",
            "params": {
                "warmup_min_lr": rate(warmup_min_lr),
                "warmup_max_lr": warmup_max_lr.as_ref().map(rate),
                "warmup_num_steps": warmup_num_steps,
                "warmup_type": shape(*warmup_type),
            },
        }),
        SchedulerConfig::WarmupDecayLr {
            total_num_steps,
            warmup_min_lr,
            warmup_max_lr,
            warmup_num_steps,
            warmup_type,
            decay_power,
        } => {
            let mut params = json!({
                "total_num_steps": total_num_steps,
                "warmup_min_lr": rate(warmup_min_lr),
                "warmup_max_lr": rate(warmup_max_lr),
                "warmup_num_steps": warmup_num_steps,
                "warmup_type": shape(*warmup_type),
            });
            // DeepSpeed, which may read the printed configuration, has no such key.
            if *decay_power != 1.0 {
                params["decay_power"] = json!(decay_power);
            }
            json!({ "type": "WarmupDecayLR", "params": params })
        }
        SchedulerConfig::WarmupCosineLr {
            total_num_steps,
            warmup_min_ratio,
            warmup_num_steps,
            cos_min_ratio,
            warmup_type,
        } => json!({
            "type": "WarmupCosineLR",
            "params": {
                "total_num_steps": total_num_steps,
                "warmup_min_ratio": warmup_min_ratio,
                "warmup_num_steps": warmup_num_steps,
                "cos_min_ratio": cos_min_ratio,
                "warmup_type": shape(*warmup_type),
            },
        }),
        SchedulerConfig::OneCycle(cycle) => json!({
            "type": "OneCycle",
            "params": {
                "cycle_min_lr": rate(&cycle.cycle_min_lr),
                "cycle_max_lr": rate(&cycle.cycle_max_lr),
                "decay_lr_rate": cycle.decay_lr_rate,
                "cycle_first_step_size": cycle.cycle_first_step_size,
                "cycle_second_step_size": cycle.cycle_second_step_size,
                "cycle_first_stair_count": cycle.cycle_first_stair_count,
                "cycle_second_stair_count": cycle.cycle_second_stair_count,
                "decay_step_size": cycle.decay_step_size,
                "cycle_momentum": cycle.cycle_momentum,
                "cycle_min_mom": cycle.cycle_min_mom,
                "cycle_max_mom": cycle.cycle_max_mom,
                "decay_mom_rate": cycle.decay_mom_rate,
            },
        }),
        SchedulerConfig::LrRangeTest {
            lr_range_test_min_lr,
            lr_range_test_step_size,
            lr_range_test_step_rate,
            lr_range_test_staircase,
        } => json!({
            "type": "LRRangeTest",
            "params": {
                "lr_range_test_min_lr": rate(lr_range_test_min_lr),
                "lr_range_test_step_size": lr_range_test_step_size,
                "lr_range_test_step_rate": lr_range_test_step_rate,
                "lr_range_test_staircase": lr_range_test_staircase,
            },
        }),
    }
}
