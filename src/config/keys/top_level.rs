//! The keys at the top level, and those of the number formats and of activation checkpointing.

use super::shorthand::*;

#[rustfmt::skip]
pub(super) static SECTIONS: &[ConfigSection] = &[
    ConfigSection::new("", false, ROOT),
    ConfigSection::new("fp16", true, FP16),
    ConfigSection::new("bf16", true, BF16),
    ConfigSection::new("data_types", false, DATA_TYPES),
    ConfigSection::new("activation_checkpointing", false, ACTIVATION_CHECKPOINTING),
    ConfigSection::new("torch_autocast", false, TORCH_AUTOCAST),
];

const REMOVED_KEY: &str = "DeepSpeed 0.19.8 refuses every file with this key, even if it is off; remove it";
const REMOVED_UNLESS_OFF: &str = "not supported, and DeepSpeed 0.19.8 refuses the whole file because of it; remove it, or set \
                       its `enabled` to false";

const ROOT: &[super::ConfigKey] = keys! {
    "train_batch_size": INT, "null", H, "Samples per optimizer step over all ranks = micro batch x accumulation x ranks (in a pipeline, x pipelines).";
    "train_micro_batch_size_per_gpu": INT, "null", H, "Samples per rank and forward pass.";
    "gradient_accumulation_steps": INT, "null", H, "Micro batches per optimizer step.";
    "optimizer": Object, "null", H, "The optimizer; training needs one.";
    "scheduler": Object, "null", H, "The learning-rate schedule; without one, the optimizer's lr applies.";
    "zero_optimization": Object, "{}", H, "Sharding over ranks. A bare true (deprecated) is stage 1, a bare false stage 0.";
    "fp16": Object, "{}", H, "Half precision with loss scaling.";
    "bf16" | "bfloat16": Object, "{}", H, "bfloat16.";
    "data_types": Object, "{}", H, "Number formats other than the model's.";
    "gradient_clipping": NOT_NEGATIVE, "1.0", H, "Maximum global L2 norm of the gradients; 0 disables clipping.";
    "prescale_gradients": Bool, "false", H, "Divide gradients by the number of ranks before the reduction, whatever gradient_predivide_factor is; not possible at stages 2 and 3 with reduce_scatter.";
    "gradient_predivide_factor": NOT_NEGATIVE, "1.0", H, "Divide gradients by this factor (above 0) before the reduction, and by (number of ranks / factor) after it; 1: divide by the number of ranks before the reduction. Other values are not possible at stages 2 and 3 with reduce_scatter.";
    "gradient_allreduce_op": OneOfAnyCase(&["mean", "sum"]), "\"mean\"", H, "Average or sum over ranks; sum is not possible at stage 3.";
    "communication_data_type": DTYPE, "null", H, "Format to which gradients and their sums are rounded for communication; null: the model's. Sums are computed in f32.";
    "steps_per_print": POSITIVE, "null", H, "Log every N optimizer steps; null: never.";
    "wall_clock_breakdown": Bool, "false", H, "Log how long each phase of a step took, every steps_per_print steps (null: in every step).";
    "gradient_check": Bool, "true", H, "The first step compares the gradient with the change in the loss when the weights move slightly, at the cost of two forward passes. Specific to candle-zero.";
    "seed": COUNT, "42", H, "Seed for the initial weights. Specific to candle-zero.";
    "activation_checkpointing": Object, "{}", S, "Recompute activations in the backward pass.";
    "zero_allow_untested_optimizer": Bool, "false", H, "Allow SGD, Lamb, Adafactor and custom optimizers at stages 1 to 3. The others are always allowed.";
    "zero_force_ds_cpu_optimizer": Bool, "true", none("the same optimizer updates states in memory and in files, and it runs on the CPU for offloaded states"), "Offload needs DeepSpeed's CPU optimizer.";
    "allgather_size": POSITIVE, "-", moved("zero_optimization.allgather_bucket_size"), "All-gather bucket of the deprecated zero_optimization: true.";
    "managed_gradient_accumulation": Bool, "true", refuse("gradient_accumulation_steps determines where a step ends; Engine::set_train_batch_size changes it during a run"), "The engine decides the accumulation boundary.";
    "seq_parallel_communication_data_type": DTYPE, "\"fp32\"", none("there is no sequence parallelism"), "Format of sequence-parallel gradients.";
    "sequence_parallel_size": POSITIVE, "null", refused_above_one("sequence parallelism is not implemented"), "Ranks that share one sequence.";
    "data_parallel_size": POSITIVE, "null", none("this size is derived: the number of ranks or, with a pipeline, the number of pipelines"), "Data axis of the rank mesh.";
    "use_data_before_expert_parallelism": Bool, "false", none("the ranks among which experts are divided are neighbours"), "Order of ranks for mixtures of experts.";
    "disable_allgather": Bool, "false", none("it has no effect in DeepSpeed 0.19.8 either"), "Legacy switch.";
    "dataloader_drop_last": Bool, "false", none("there is no short batch, because data::Loader is endless and continues with the next pass; a custom loader decides for itself"), "Drop the incomplete last batch.";
    "vocabulary_size": POSITIVE, "null", H, "A size that is not a multiple of 8 is noted; the key has no other effect.";
    "memory_breakdown": Bool, "false", H, "Print memory use before and after each forward pass, and after each backward pass and step, every steps_per_print steps (null: in every step).";
    "dump_state": Bool, "false", H, "Print the configuration and the state of the engine at the start.";
    "disable_python_gc": Bool, "false", none("there is no Python"), "Disable Python's garbage collector.";
    "log_level": OneOfAnyCase(&["debug", "info", "warning", "error", "critical"]), "null", H, "Messages written to standard error or sent to a tracing subscriber: warning omits progress and notes; error and critical also omit problems that do not stop training; null: all messages.";
    "torch_autocast": Object, "{}", S, "Matrix products of an f32 model in a lower-precision format.";
    "aio": Object, "{}", H, "Access to the files of device nvme.";
    "checkpoint": Object, "{}", H, "Writing of checkpoints.";
    "datastates_ckpt": Any, "false", none("checkpoint.writer.decoupled saves in the background"), "Third-party lazy checkpointing.";
    "flops_profiler": Object, "{}", H, "Counts operations; also enables wall_clock_breakdown.";
    "timers": Object, "{}", H, "Throughput logging.";
    "comms_logger": Object, "null", H, "Logs collectives. The presence of the section enables it, as in DeepSpeed.";
    "tensorboard": Object, "{}", H, "Event files.";
    "csv_monitor": Object, "{}", H, "CSV files.";
    "run": Object, "null", H, "A record of the run, which `zerorun runs` reads. The presence of the section enables it. Specific to candle-zero.";
    "wandb": Object, "{}", S, "Weights & Biases.";
    "comet": Object, "{}", S, "Comet.";
    "autotuning": Object, "{}", S, "Search for good settings.";
    "compile": Object, "{}", S, "PyTorch's compiler.";
    "pipeline": Object, "{}", H, "Pipeline parallelism: ranks hold consecutive layers.";
    "local_steps": Object, "null", H, "Islands of ranks exchange the changes in their weights only after many steps (DiLoCo); off by default. Specific to candle-zero.";
    "tensor_parallel": Object, "{}", S, "Tensor parallelism.";
    "expert_parallel": Object, "{}", S, "Expert parallelism.";
    "hybrid_engine": Object, "{}", S, "Generation during training.";
    "weight_quantization": Object, "null", S, "Quantized inference.";
    "data_efficiency": Object, "{}", S, "Curriculum learning and token dropping.";
    "amp": Any, "-", removed_unless_off(REMOVED_UNLESS_OFF), "Apex mixed precision. Use bf16 or fp16.";
    "nebula": Any, "-", removed(REMOVED_KEY), "Azure checkpoint service.";
    "compression_training": Any, "-", removed(REMOVED_KEY), "Pruning and quantization.";
    "quantize_training": Any, "-", removed(REMOVED_KEY), "Mixture of quantization.";
    "sparse_gradients": Any, "-", removed(REMOVED_KEY), "Sparse embedding gradients.";
    "sparse_attention": Any, "-", removed(REMOVED_KEY), "Sparse attention kernels.";
    "eigenvalue": Any, "-", removed_unless_off(REMOVED_UNLESS_OFF), "Eigenvalues for quantization.";
    "elasticity": Any, "-", removed_unless_off(REMOVED_UNLESS_OFF), "Elastic batch sizes. Set the batch-size keys instead.";
    "graph_harvesting": Any, "-", removed(REMOVED_KEY), "CUDA graphs.";
    "curriculum_learning": Any, "-", removed_unless_off(REMOVED_UNLESS_OFF), "Legacy curriculum learning.";
    "progressive_layer_drop": Any, "-", removed_unless_off(REMOVED_UNLESS_OFF), "Layer dropping.";
};

const ANY_I64: super::ConfigValueKind = super::ConfigValueKind::IntNoBool(i64::MIN, i64::MAX);

const FP16: &[super::ConfigKey] = keys! {
    "enabled": Bool, "false", H, "Train in half precision with f32 master weights. Excludes bf16.";
    "auto_cast": Bool, "false", none("the engine has no access to the inputs; the closure passed to forward creates them in Engine::dtype"), "Cast inputs to half precision.";
    "loss_scale": NOT_NEGATIVE, "0.0", H, "0: dynamic; larger values: a static scale.";
    "initial_scale_power": INT, "16", H, "The first dynamic scale is 2 to the power of this number (0 to 127).";
    "loss_scale_window": ANY_I64, "1000", H, "Steps without overflow before the scale doubles; > 0 if dynamic.";
    "hysteresis": INT, "2", H, "Number of overflows needed to halve the scale; > 0 if dynamic.";
    "consecutive_hysteresis": Bool, "false", H, "Restore the hysteresis after each step without overflow.";
    "min_loss_scale": ANY_I64, "1", H, "Lower bound of the dynamic scale; > 0 if dynamic.";
    "fp16_master_weights_and_grads": Bool, "false", H, "No f32 master weights: the f16 weights are updated in f32 and rounded. Stages 1 to 3.";
};

const BF16: &[super::ConfigKey] = keys! {
    "enabled": Bool, "false", H, "Train in bfloat16 with f32 master weights. Excludes fp16.";
    "check_grad_overflow": Bool, "true", H, "Skip a step with an infinite or NaN gradient.";
    "immediate_grad_update": Bool, "false", none("gradients are always accumulated as they are produced"), "Accumulate in hooks.";
    "bf16_master_weights_and_grads": Bool, "false", H, "No f32 master weights: the bf16 weights are updated in f32 and rounded (with EngineBuilder::stochastic_rounding, stochastically). Stages 1 to 3.";
    "bf16_optimizer_states": Bool, "false", H, "Store the moments in bfloat16 too; needs bf16_master_weights_and_grads.";
};

const DATA_TYPES: &[super::ConfigKey] = keys! {
    "grad_accum_dtype": DTYPE, "null", H, "Format in which gradients are accumulated; null: the model's, which is the only one allowed at stage 0.";
    "param_dtype": DTYPE, "null", H, "Must equal the format that fp16 and bf16 select.";
    "buffer_dtype": DTYPE, "null", H, "Format of the model's floating-point buffers; null: the format that the model requests, and f32 for running statistics.";
    "keep_in_fp32_modules": AutoOr(&Strings), "\"auto\"", H, "Modules whose parameters stay in f32 under fp16 or bf16, without separate master weights: complete dot-separated parts of a parameter's name (\"ln_f\", \"mlp.c_proj\"), in which * matches any characters; a name that the model does not have is an error. \"auto\": none. The norms, Linear, Conv1D and Embedding of candle_zero::nn accept such parameters; candle_nn's layers need a cast around them.";
};

const ACTIVATION_CHECKPOINTING: &[super::ConfigKey] = keys! {
    "every_unit": Bool, "null", H, "Every unit recomputes its forward pass during the backward pass and keeps only its inputs; false: only the units that the model marks. Null: true, with a note, if a key below requests it. Specific to candle-zero.";
    "partition_activations": Bool, "false", implies_every_unit("nothing is split: a unit keeps its complete inputs"), "Split the kept activations over model-parallel ranks.";
    "cpu_checkpointing": Bool, "false", H, "Keep the inputs of recomputing units on the host instead of on the GPU, or in a file if anything is offloaded to nvme. True also requests every_unit.";
    "contiguous_memory_optimization": Bool, "false", implies_every_unit("each input is kept in a separate buffer"), "One buffer for all kept activations.";
    "number_checkpoints": POSITIVE, "null", implies_every_unit("every unit is one checkpoint, regardless of the number"), "Number of activations in the contiguous buffer.";
    "synchronize_checkpoint_boundary": Bool, "false", none("an operation on the CPU is complete when it returns, and operations on a GPU keep their order"), "Synchronize the device at the boundaries.";
    "profile": Bool, "false", none("wall_clock_breakdown times the phases of a step, and a timeline shows the recomputed forward passes"), "Time each region.";
};

const TORCH_AUTOCAST: &[super::ConfigKey] = keys! {
    "enabled": Bool, "false", H, "An f32 model multiplies in a lower-precision format: Linear and Conv1D of candle_zero::nn round their input and weight, multiply, and widen the result. Parameters, gradients and everything else stay in f32 (PyTorch also rounds attention).";
    "dtype": Str, "null", H, "Format of the products: bfloat16 (null), or float32 for no rounding. float16 is refused: its smallest positive number is 6e-8, so gradients of such products need loss scaling, which the fp16 section provides; int8 is refused: it has no gradient.";
    "lower_precision_safe_modules": Strings, "null", none("all gradients are communicated in communication_data_type, f32 by default; set it to bf16 for all of them"), "Modules whose gradients are communicated in low precision, by class path; a class other than a linear or convolutional layer is an error.";
};
