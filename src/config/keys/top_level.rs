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

const GONE: &str = "DeepSpeed 0.19.8 refuses the whole file for it, on or off: remove it";
const GONE_ON: &str =
    "not offered, and DeepSpeed 0.19.8 refuses the whole file for it: remove it, or set its `enabled` to false";

const ROOT: &[super::ConfigKey] = keys! {
    "train_batch_size": INT, "null", H, "Samples per optimizer step over all ranks = micro batch x accumulation x ranks.";
    "train_micro_batch_size_per_gpu": INT, "null", H, "Samples per rank and forward.";
    "gradient_accumulation_steps": INT, "null", H, "Micro batches per optimizer step.";
    "optimizer": Object, "null", H, "The optimizer; training needs one.";
    "scheduler": Object, "null", H, "The learning-rate schedule; without one the optimizer's lr holds.";
    "zero_optimization": Object, "{}", H, "What is sharded over ranks. Bare true (deprecated) is stage 1, bare false stage 0.";
    "fp16": Object, "{}", H, "Half precision with a scaled loss.";
    "bf16" | "bfloat16": Object, "{}", H, "bfloat16.";
    "data_types": Object, "{}", H, "Number formats beside the model's.";
    "gradient_clipping": NOT_NEGATIVE, "1.0", H, "Largest global L2 norm of the gradients; 0 switches clipping off.";
    "prescale_gradients": Bool, "false", H, "Divide gradients by the number of ranks before the reduction, not after.";
    "gradient_predivide_factor": NOT_NEGATIVE, "1.0", H, "The part of the division that comes before the reduction.";
    "gradient_allreduce_op": OneOfAnyCase(&["mean", "sum"]), "\"mean\"", H, "Average or sum over ranks.";
    "communication_data_type": DTYPE, "null", H, "Format that gradients and their sums are rounded to on their way; null: the model's. Sums are formed in f32.";
    "steps_per_print": POSITIVE, "null", H, "Log every N optimizer steps; null: never.";
    "wall_clock_breakdown": Bool, "false", H, "Log how long each phase of a step took.";
    "gradient_check": Bool, "true", H, "In the first step the gradient is compared with how the loss changes when the weights are moved a little, which costs two forwards once. A key of this engine, not of DeepSpeed.";
    "seed": COUNT, "42", H, "Seed of the initial weights. A key of this engine, not of DeepSpeed.";
    "activation_checkpointing": Object, "{}", S, "Recompute activations in backward.";
    "zero_allow_untested_optimizer": Bool, "false", H, "Allow SGD, Lamb and an optimizer of one's own under stage 1 to 3. The others are always allowed.";
    "zero_force_ds_cpu_optimizer": Bool, "true", none("there is one optimizer for memory and files, and of what is offloaded it runs on the CPU"), "Offload needs DeepSpeed's CPU optimizer.";
    "allgather_size": POSITIVE, "-", moved("zero_optimization.allgather_bucket_size"), "All-gather bucket of the deprecated zero_optimization: true.";
    "managed_gradient_accumulation": Bool, "true", refuse("the engine decides by gradient_accumulation_steps where a step ends; Engine::set_train_batch_size changes that while it runs"), "The engine decides the accumulation boundary.";
    "seq_parallel_communication_data_type": DTYPE, "\"fp32\"", none("there is no sequence parallelism"), "Format of sequence-parallel gradients.";
    "sequence_parallel_size": POSITIVE, "null", above1("sequence parallelism is not offered"), "Ranks that share one sequence.";
    "data_parallel_size": POSITIVE, "null", none("every rank is data parallel: it is the number of ranks"), "Data axis of the rank mesh.";
    "use_data_before_expert_parallelism": Bool, "false", none("there is no expert parallelism: a mixture's experts are parameters like others, sharded over all ranks"), "Order of ranks for mixtures of experts.";
    "disable_allgather": Bool, "false", none("it has none in DeepSpeed 0.19.8 either"), "Historic switch.";
    "dataloader_drop_last": Bool, "false", none("there is no short batch: data::Loader is endless and goes on into the next pass, and a loader of one's own decides for itself"), "Drop the short last batch.";
    "vocabulary_size": POSITIVE, "null", H, "A size that is no multiple of 8 is noted; it has no other effect.";
    "memory_breakdown": Bool, "false", H, "Print memory at the edges of forward, backward and step, in the rhythm of steps_per_print.";
    "dump_state": Bool, "false", H, "Print the configuration and the engine's state at the start.";
    "disable_python_gc": Bool, "false", none("there is no Python"), "Switch Python's garbage collector off.";
    "log_level": OneOfAnyCase(&["debug", "info", "warning", "error", "critical"]), "null", H, "What is said, on standard error or to a subscriber of tracing: warning leaves out progress and notes, error and critical also what goes wrong while training continues; null: everything.";
    "torch_autocast": Object, "{}", S, "Products of an f32 model in a lower format.";
    "aio": Object, "{}", H, "How the files of nvme are accessed.";
    "checkpoint": Object, "{}", H, "How checkpoints are written.";
    "datastates_ckpt": Any, "false", none("checkpoint.writer.decoupled saves in the background"), "Third-party lazy checkpointing.";
    "flops_profiler": Object, "{}", H, "Counts operations; switches wall_clock_breakdown on.";
    "timers": Object, "{}", H, "Throughput logging.";
    "comms_logger": Object, "null", H, "Logs collectives. Its mere presence switches it on, as in DeepSpeed.";
    "tensorboard": Object, "{}", H, "Event files.";
    "csv_monitor": Object, "{}", H, "CSV files.";
    "wandb": Object, "{}", S, "Weights & Biases.";
    "comet": Object, "{}", S, "Comet.";
    "autotuning": Object, "{}", S, "Search for good settings.";
    "compile": Object, "{}", S, "PyTorch's compiler.";
    "pipeline": Object, "{}", S, "Pipeline parallelism.";
    "tensor_parallel": Object, "{}", S, "Tensor parallelism.";
    "expert_parallel": Object, "{}", S, "Expert parallelism.";
    "hybrid_engine": Object, "{}", S, "Generation inside training.";
    "weight_quantization": Object, "null", S, "Quantized inference.";
    "data_efficiency": Object, "{}", S, "Curriculum learning and token dropping.";
    "amp": Any, "-", gone_unless_off(GONE_ON), "Apex mixed precision. Use bf16 or fp16.";
    "nebula": Any, "-", gone(GONE), "Azure checkpoint service.";
    "compression_training": Any, "-", gone(GONE), "Pruning and quantization.";
    "quantize_training": Any, "-", gone(GONE), "Mixture of quantization.";
    "sparse_gradients": Any, "-", gone(GONE), "Sparse embedding gradients.";
    "sparse_attention": Any, "-", gone(GONE), "Sparse attention kernels.";
    "eigenvalue": Any, "-", gone_unless_off(GONE_ON), "Eigenvalues for quantization.";
    "elasticity": Any, "-", gone_unless_off(GONE_ON), "Elastic batch sizes. Give the batch keys.";
    "graph_harvesting": Any, "-", gone(GONE), "CUDA graphs.";
    "curriculum_learning": Any, "-", gone_unless_off(GONE_ON), "Legacy curriculum learning.";
    "progressive_layer_drop": Any, "-", gone_unless_off(GONE_ON), "Layer dropping.";
};

const ANY_I64: super::ConfigValueKind = super::ConfigValueKind::IntNoBool(i64::MIN, i64::MAX);

const FP16: &[super::ConfigKey] = keys! {
    "enabled": Bool, "false", H, "Train in half precision with f32 master weights. Not with bf16.";
    "auto_cast": Bool, "false", none("the engine does not see the inputs: the closure given to forward makes them, in Engine::dtype"), "Cast inputs to half precision.";
    "loss_scale": NOT_NEGATIVE, "0.0", H, "0 is dynamic, more is that static scale.";
    "initial_scale_power": INT, "16", H, "The first dynamic scale is 2 to this power (0 to 127).";
    "loss_scale_window": ANY_I64, "1000", H, "Clean steps before the scale doubles; > 0 when dynamic.";
    "hysteresis": INT, "2", H, "Overflows tolerated before the scale halves; > 0 when dynamic.";
    "consecutive_hysteresis": Bool, "false", H, "Refill the hysteresis after each clean step.";
    "min_loss_scale": ANY_I64, "1", H, "Floor of the dynamic scale; > 0 when dynamic.";
    "fp16_master_weights_and_grads": Bool, "false", H, "No f32 master weights: the f16 weights are updated, in f32, and rounded. Stage 1 to 3.";
};

const BF16: &[super::ConfigKey] = keys! {
    "enabled": Bool, "false", H, "Train in bfloat16 with f32 master weights. Not with fp16.";
    "check_grad_overflow": Bool, "true", H, "Skip a step with an infinite or undefined gradient.";
    "immediate_grad_update": Bool, "false", none("gradients are always accumulated as they come"), "Accumulate in hooks.";
    "bf16_master_weights_and_grads": Bool, "false", H, "No f32 master weights: the bf16 weights are updated, in f32, and rounded (EngineBuilder::stochastic_rounding: by chance). Stage 1 to 3.";
    "bf16_optimizer_states": Bool, "false", H, "Moments in bfloat16 too; needs bf16_master_weights_and_grads.";
};

const DATA_TYPES: &[super::ConfigKey] = keys! {
    "grad_accum_dtype": DTYPE, "null", H, "Format in which gradients are accumulated; null: the model's.";
    "param_dtype": DTYPE, "null", H, "Must equal the format that fp16 and bf16 choose.";
    "buffer_dtype": DTYPE, "null", H, "Format of the model's buffers of floats; null: what the model asks for, and f32 for running statistics.";
    "keep_in_fp32_modules": AutoOr(&Strings), "\"auto\"", H, "Modules whose parameters stay in f32 under fp16 or bf16, without master weights of their own: whole words of a parameter's name, between dots (\"ln_f\", \"mlp.c_proj\"), in which * stands for any characters; a name that the model does not have is an error. \"auto\": none. Norms, Linear, Conv1D and Embedding of candle_zero::nn take them; candle_nn's layers need a cast around them.";
};

const ACTIVATION_CHECKPOINTING: &[super::ConfigKey] = keys! {
    "every_unit": Bool, "null", H, "Every unit recomputes its forward in backward, and keeps only its inputs; false: those that the model marks. Null: true, with a note, where a key below asks for it. A key of this engine, not of DeepSpeed.";
    "partition_activations": Bool, "false", as_every_unit("nothing is split: what a unit keeps, its inputs, stays whole"), "Split what is kept over model-parallel ranks.";
    "cpu_checkpointing": Bool, "false", H, "The inputs that a recomputing unit keeps go from the GPU to the host, or to a file where something is offloaded to nvme. True also asks for every_unit.";
    "contiguous_memory_optimization": Bool, "false", as_every_unit("each input is kept in its own memory"), "One buffer for all that is kept.";
    "number_checkpoints": POSITIVE, "null", as_every_unit("every unit is one checkpoint, whatever the number"), "Size of that buffer.";
    "synchronize_checkpoint_boundary": Bool, "false", none("an operation on the CPU is over when it returns, and those of a GPU keep their order"), "Synchronize the device at edges.";
    "profile": Bool, "false", none("wall_clock_breakdown times the phases of a step, and a timeline shows the forwards that run again"), "Time each region.";
};

const TORCH_AUTOCAST: &[super::ConfigKey] = keys! {
    "enabled": Bool, "false", H, "An f32 model multiplies in a lower format: Linear and Conv1D of candle_zero::nn round their input and weight, multiply, and widen the result. Parameters, gradients and everything else stay f32 (in PyTorch attention is rounded too).";
    "dtype": Str, "null", H, "Format of the products: bfloat16 (null), or float32 for none. float16 is refused: its smallest number is 6e-8, so gradients of such products need a scaled loss, which the fp16 section has; int8 is refused: it has no gradient.";
    "lower_precision_safe_modules": Strings, "null", none("all gradients travel in communication_data_type, f32 by default: set that to bf16 for all of them"), "Modules whose gradients travel in low precision, by the paths of their classes; another class than a linear or convolutional layer is an error.";
};
