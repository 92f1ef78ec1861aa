//! The keys of the sections that have no separate file. Some sections have an effect, some are recorded with a note that
//! they have none, and some are refused if they are on.

use super::shorthand::*;

const OFF: &str = "is off, so it is ignored; this library does not support it";

#[rustfmt::skip]
pub(super) static SECTIONS: &[ConfigSection] = &[
    ConfigSection::new("aio", false, AIO),
    ConfigSection::new("checkpoint", false, CHECKPOINT),
    ConfigSection::new("checkpoint.parallel_write", false, PARALLEL_WRITE),
    ConfigSection::new("checkpoint.writer", false, WRITER),
    ConfigSection::new("flops_profiler", false, FLOPS_PROFILER).switch("enabled"),
    ConfigSection::new("timers", false, TIMERS),
    ConfigSection::new("timers.throughput", true, THROUGHPUT),
    ConfigSection::new("comms_logger", true, COMMS_LOGGER).switch("enabled"),
    ConfigSection::new("tensorboard", true, TENSORBOARD).switch("enabled"),
    ConfigSection::new("csv_monitor", true, CSV_MONITOR).switch("enabled"),
    ConfigSection::new("run", false, RUN),
    ConfigSection::new("wandb", true, WANDB).switch("enabled"),
    ConfigSection::new("comet", true, COMET).status(none("nothing is written for Comet; tensorboard, csv_monitor and wandb write the same values to files")).switch("enabled").unchecked(),
    ConfigSection::new("autotuning", false, AUTOTUNING).status(none("a run does not search for settings; `zerorun tune` uses this section"))
        .when_off("accepted, but has no effect here: a run does not search for settings; `zerorun tune` uses this section").unchecked(),
    ConfigSection::new("compile", true, COMPILE).status(none("Rust is already compiled"))
        .when_off("accepted, but has no effect here: Rust is already compiled").unchecked(),
    ConfigSection::new("pipeline", false, PIPELINE),
    ConfigSection::new("local_steps", false, LOCAL_STEPS),
    ConfigSection::new("tensor_parallel", true, TENSOR_PARALLEL).when_off(OFF),
    ConfigSection::new("tensor_parallel.tensor_parallel", true, TP),
    ConfigSection::new("expert_parallel", false, EXPERT_PARALLEL).switch("enabled"),
    ConfigSection::new("hybrid_engine", true, HYBRID_ENGINE).status(none("a model generates text with its own `generate`, without this section")).switch("enabled"),
    ConfigSection::new("weight_quantization", true, WEIGHT_QUANTIZATION).status(none("it applies only to inference")).switch("enabled"),
    ConfigSection::new("data_efficiency", false, DATA_EFFICIENCY).when_off(OFF),
    ConfigSection::new("data_efficiency.data_sampling", false, DATA_SAMPLING),
    ConfigSection::new("data_efficiency.data_sampling.curriculum_learning", false, CURRICULUM_LEARNING),
    ConfigSection::new("data_efficiency.data_sampling.dynamic_batching", false, DYNAMIC_BATCHING),
    ConfigSection::new("data_efficiency.data_routing", false, DATA_ROUTING),
    ConfigSection::new("data_efficiency.data_routing.random_ltd", false, RANDOM_LTD),
];

const ONE_WRITER: &str = "every rank writes one file, bypassing the page cache if possible";

const AIO: &[super::ConfigKey] = keys! {
    "block_size": POSITIVE, "1048576", H, "Bytes per request, rounded down to a multiple of the page size 4096; limited to the range from 4096 bytes to 16 MiB.";
    "queue_depth": POSITIVE, "8", H, "Requests in flight per unit of intra_op_parallelism.";
    "intra_op_parallelism": POSITIVE, "1", H, "Multiplies queue_depth; at most 64 requests are in flight.";
    "thread_count": POSITIVE, "-", none("DeepSpeed ignores it too, and reads intra_op_parallelism instead"), "Old key.";
    "single_submit": Bool, "false", none("every request is a separate system call"), "One request per submit call.";
    "overlap_events": Bool, "true", none("threads take requests as they arrive and never wait for each other"), "Overlap submission and completion.";
    "use_gds": Bool, "false", none("the step for offloaded states runs on the CPU, so files are read into host memory"), "GPUDirect storage.";
};

const CHECKPOINT: &[super::ConfigKey] = keys! {
    "tag_validation": OneOfAnyCase(&["Ignore", "Warn", "Fail"]), "\"Warn\"", H, "If ranks save under different tags, Ignore and Warn use rank 0's tag, silently or with a warning, respectively; Fail returns an error.";
    "load_universal": Bool, "false", none("every checkpoint loads at any number of ranks"), "Load the universal layout.";
    "use_node_local_storage": Bool, "false", H, "The ranks of each host save to a folder on that host's local disk, and hosts exchange the data that they need when a checkpoint is loaded.";
    "upload_to": Str, "null", H, "Address of an object store, `s3://BUCKET/PREFIX` or `file:///FOLDER`, to which each checkpoint is uploaded once it is on disk, while training continues. Needs the s3 feature. Specific to candle-zero.";
    "parallel_write": Object, "{}", S, "How writing is divided.";
    "checkpoint_serialization": Bool, "true", none("files are safetensors"), "PyTorch's zip format.";
    "writer": Object, "null", S, "Checkpoint writer.";
};

const PARALLEL_WRITE: &[super::ConfigKey] = keys! {
    "pipeline_stage": Bool, "false", none("every rank writes its own parts"), "Pipeline stages write their layers.";
};

const WRITER: &[super::ConfigKey] = keys! {
    "type": OneOfAnyCase(&["mock", "python", "fast"]), "\"fast\"", none(ONE_WRITER), "Writer engine.";
    "decoupled": Bool, "false", H, "Training continues while a checkpoint is written: `Engine::save_checkpoint` saves in the background.";
    "io_buffer_size": POSITIVE, "67108864", none("the size is fixed at two buffers of 33 MiB, because files are written in large pieces anyway"), "Bytes of the staging buffer.";
    "io_buffer_double": Bool, "true", none("there are always two, so that one is filled while the other is written"), "Two staging buffers.";
    "show_statistics": Bool, "false", H, "Rank 0 prints for every checkpoint how many bytes all ranks wrote and how long it took.";
    "data_parallel": OneOf(&["replica", "socket", "machine"]), "null", none("every rank writes its own shard"), "Split writing over ranks.";
    "io_multiplier": POSITIVE, "1", none(ONE_WRITER), "Writers per unit.";
};

const FLOPS_PROFILER: &[super::ConfigKey] = keys! {
    "enabled": Bool, "false", H, "Count the operations of matrix products and attention in one step, per unit; also enables wall_clock_breakdown.";
    "recompute_fwd_factor": FLOAT, "0.0", none("recomputation is counted when it runs"), "Extra share of forward operations due to recomputation.";
    "profile_step": COUNT, "1", H, "Number of optimizer steps before the profiled one.";
    "module_depth": super::ConfigValueKind::Int(-1, i64::MAX), "-1", H, "Number of leading components of a unit's name by which units are grouped; -1: all.";
    "top_modules": COUNT, "1", H, "Number of rows in the ranking at each depth.";
    "detailed": Bool, "true", H, "Print a row for each module.";
    "output_file": Str, "null", H, "File for the profile; null: print it.";
};

const TIMERS: &[super::ConfigKey] = keys! {
    "throughput": Object, "{}", S, "Throughput logging.";
};

const THROUGHPUT: &[super::ConfigKey] = keys! {
    "enabled": Bool, "true", H, "With steps_per_print, print samples per second: those of the step, and the average from the third step on.";
    "synchronized": Bool, "true", none("the clock is read when the work is done"), "Synchronize the device before reading the clock.";
};

const COMMS_LOGGER: &[super::ConfigKey] = keys! {
    "enabled": Bool, "false", H, "Log collectives; true if the section is present.";
    "prof_all": Bool, "true", H, "Log all operations.";
    "prof_ops": Strings, "[]", H, "Log only these operations, if prof_all is false.";
    "verbose": Bool, "false", H, "Log a line per operation.";
    "debug": Bool, "false", none("the caller is always the engine"), "Name the caller.";
};

const TENSORBOARD: &[super::ConfigKey] = keys! {
    "enabled": Bool, "false", H, "Write event files, from rank 0.";
    "output_path": Str, "\"\"", H, "Folder; empty: the current folder.";
    "job_name": Str, "\"DeepSpeedJobName\"", H, "Subfolder for the run.";
};

const CSV_MONITOR: &[super::ConfigKey] = keys! {
    "enabled": Bool, "false", H, "Write a CSV file per tag, from rank 0.";
    "output_path": Str, "\"\"", H, "Folder; empty: the current folder.";
    "job_name": Str, "\"DeepSpeedJobName\"", H, "Subfolder for the run.";
};

const RUN: &[super::ConfigKey] = keys! {
    "enabled": Bool, "true", H, "Keep a record; false: keep none, even if the program requests one. --run, CANDLE_ZERO_RUN and --dashboard take precedence.";
    "name": Str, "null", H, "Name of the run; null: the one that the program gives. CANDLE_ZERO_RUN takes precedence.";
    "folder": Str, "null", H, "Folder of runs; null: the one that the program gives, or `runs`. CANDLE_ZERO_RUNS_DIR takes precedence.";
};

const WANDB: &[super::ConfigKey] = keys! {
    "enabled": Bool, "false", H, "Write a Weights & Biases run, from rank 0, into the folder `wandb`. Nothing is sent: `wandb sync` uploads the run.";
    "group": Str, "null", H, "Group of the run.";
    "team": Str, "null", H, "Team to which the run is uploaded; null: the user's default.";
    "project": Str, "\"deepspeed\"", H, "Project of the run.";
};

const COMET: &[super::ConfigKey] = keys! {
    "enabled": Bool, "false", S, "Send metrics.";
    "samples_log_interval": POSITIVE, "100", S, "Samples between two records.";
    "project": Str, "null", S, "Project.";
    "workspace": Str, "null", S, "Workspace.";
    "api_key": Str, "null", S, "API key.";
    "experiment_name": Str, "null", S, "Name of the run.";
    "experiment_key": Str, "null", S, "Key of the run.";
    "online": Bool, "null", S, "Send immediately.";
    "mode": Str, "null", S, "Create or continue a run.";
};

const AUTOTUNING: &[super::ConfigKey] = keys! {
    "enabled": Bool, "false", S, "Has no effect: only `zerorun tune` searches; a run does not.";
    "fast": Bool, "false", H, "`zerorun tune`: search only stages, offload and micro batches, not bucket sizes, overlap_comm or reduce_scatter.";
    "results_dir": Str, "\"autotuning_results\"", H, "`zerorun tune`: folder for the results.";
    "exps_dir": Str, "null", H, "`zerorun tune`: folder for the runs; null: `experiments` in the results folder.";
    "overwrite": Bool, "true", none("finished runs are kept; remove the results folder to start over"), "Overwrite results.";
    "start_profile_step": INT, "3", H, "`zerorun tune`: the first measured step, counted from 1.";
    "end_profile_step": INT, "5", H, "`zerorun tune`: number of steps of each run.";
    "metric": OneOf(&["throughput", "latency", "flops"]), "\"throughput\"", H, "`zerorun tune`: the criterion; flops is treated as throughput.";
    "metric_path": Str, "null", none("the metric comes from the script's --metrics"), "File of the metric.";
    "tuner_type": OneOf(&["gridsearch", "random", "model_based"]), "\"gridsearch\"", none("the search goes through all candidates in order"), "Order of the search.";
    "tuner_early_stopping": INT, "null", H, "`zerorun tune`: number of runs without improvement before the search ends; null or 0: no early stopping.";
    "tuner_num_trials": INT, "50", H, "`zerorun tune`: maximum number of runs; 0 means 50.";
    "arg_mappings": Any, "null", H, "`zerorun tune`: map from key paths to script flags that are set to the same values.";
    "model_info": Any, "null", none("the model itself is inspected"), "Facts about the model.";
    "model_info_path": Str, "null", none("the model itself is inspected"), "File with facts about the model.";
    "mp_size": INT, "1", none("there is no tensor parallelism"), "Model-parallel ranks.";
    "max_train_batch_size": INT, "null", H, "`zerorun tune`: maximum number of samples per step; null or 0: unlimited.";
    "min_train_batch_size": INT, "1", H, "`zerorun tune`: minimum number of samples per step.";
    "max_train_micro_batch_size_per_gpu": INT, "1024", H, "`zerorun tune`: largest micro batch.";
    "min_train_micro_batch_size_per_gpu": INT, "null", H, "`zerorun tune`: first micro batch; null or 0: the configuration's.";
    "num_tuning_micro_batch_sizes": INT, "3", H, "`zerorun tune`: number of micro batches tried, each twice the previous one.";
};

const COMPILE: &[super::ConfigKey] = keys! {
    "deepcompile": Bool, "false", S, "DeepSpeed's compiler passes.";
    "autoep_non_moe": Bool, "false", S, "Compile the parts that are not experts.";
    "free_activation": Bool, "false", S, "Free activations early.";
    "free_activation_threshold": INT, "10485760", S, "Smallest size in bytes.";
    "offload_activation": Bool, "false", S, "Move activations to the CPU.";
    "offload_activation_pin_memory": Bool, "true", S, "Page-locked memory.";
    "offload_opt_states": Bool, "false", S, "Move optimizer states.";
    "double_buffer": Bool, "true", S, "Two buffers.";
    "symmetric_memory": Bool, "false", S, "Symmetric memory.";
    "debug_log": Bool, "false", S, "Write a log.";
    "offload_parameters": Bool, "false", S, "Move parameters.";
    "sync_before_reduce": Bool, "false", S, "Synchronize.";
    "sync_after_reduce": Bool, "false", S, "Synchronize.";
    "sync_before_allgather": Bool, "false", S, "Synchronize.";
    "sync_after_allgather": Bool, "false", S, "Synchronize.";
    "keep_int_input_tensors": Bool, "true", S, "Keep inputs.";
    "keep_all_input_tensors": Bool, "false", S, "Keep inputs.";
    "passes": Strings, "null", S, "Passes to run: z1, z3, autosp, autotp.";
};

const PIPELINE: &[super::ConfigKey] = keys! {
    "stages": AutoOr(&POSITIVE), "\"auto\"", H, "Number of ranks along the pipeline; auto: all ranks. Values above 1 need a model that is given as layers (EngineBuilder::initialize_pipeline).";
    "partition": Str, "\"best\"", H, "How layers are divided among stages. best and parameters: about the same number of parameters; uniform: the same number of layers; time: the slowest stage is as fast as possible, judging by the time that each layer takes on each rank, which is measured at the start; type:REGEX: the same number of layers whose type name contains a match of the regular expression, ignoring case.";
    "schedule": OneOf(&["1f1b", "interleaved", "zero_bubble", "zbv"]), "\"1f1b\"", H, "Order of forward and backward passes. 1f1b: one forward pass, one backward pass; interleaved: 1F1B with several chunks of the model per rank; zero_bubble: 1F1B with divided backward passes; zbv: divided backward passes with two chunks per rank, in the shape of a V. Specific to candle-zero.";
    "chunks": POSITIVE, "1", H, "Number of chunks of the model per rank: 1 with 1f1b, at least 2 with interleaved, 2 with zbv, any with zero_bubble. Specific to candle-zero.";
    "seed_layers": Bool, "false", refuse("initial weights are derived from the seed and the parameter's name, whichever stage holds the parameter"), "A seed per layer.";
    "activation_checkpoint_interval": COUNT, "0", refuse("recompute blocks with activation_checkpointing or in the model"), "Layers per checkpoint.";
    "pipe_partitioned": Bool, "true", none(ONLY_TP), "Split activations.";
    "grad_partitioned": Bool, "true", none(ONLY_TP), "Split gradients.";
};

const LOCAL_STEPS: &[super::ConfigKey] = keys! {
    "steps": POSITIVE, "100", H, "Number of steps between two exchanges of a parameter (H).";
    "islands": AutoOr(&POSITIVE), "\"auto\"", H, "Number of islands, each with the same number of consecutive ranks; auto: one per host. With `server`, the number of slots for islands.";
    "server": Str, "null", H, "HOST:PORT of an island server (zerorun island-server): each island is a separate job, and islands join and leave while others train. zerorun --island_server replaces it. null: the islands are parts of one job.";
    "min_islands": POSITIVE, "null", H, "With `server`, the number of islands that must have begun before the first exchange; null: all.";
    "outer_lr": NOT_NEGATIVE, "0.7", H, "Learning rate of the outer optimizer, which is SGD on the mean change in the weights; above 0. With outer_momentum 0, a learning rate of 1 makes the islands' mean the new weights.";
    "outer_momentum": SHARE, "0.9", H, "Momentum of the outer optimizer, below 1; 0: no buffer.";
    "nesterov": Bool, "true", H, "Nesterov momentum.";
    "fragments": POSITIVE, "1", H, "Number of parts of the model that are exchanged in turn, each once every `steps` steps (Streaming DiLoCo); at most `steps`.";
    "fragment_delay": COUNT, "0", H, "Steps between the beginning of an exchange and its effect, during which training continues; below `steps`.";
    "fragment_alpha": SHARE, "null", H, "Share of an island's own weights that is kept when an exchange takes effect, below 1; null: 0, or 0.5 with fragment_delay, because an island continues training during the delay, and the exchange does not contain the resulting changes.";
    "wire_dtype": OneOf(&["fp32", "bf16", "int8", "int4"]), "\"fp32\"", H, "Format in which islands send the changes in their weights.";
};

const NO_TP: &str =
    "tensor parallelism is not implemented, and ignoring the key would change how ranks share the batch";
const ONLY_TP: &str = "there is no tensor parallelism";

const TENSOR_PARALLEL: &[super::ConfigKey] = keys! {
    "autotp_size": COUNT, "0", refused_above_one(NO_TP), "Ranks that share one layer.";
    "dtype": Any, "\"fp16\"", none(ONLY_TP), "Number format.";
    "tp_overlap_comm": Bool, "false", none(ONLY_TP), "Communicate while computing.";
    "vocab_parallel_lm_head": Any, "null", none(ONLY_TP), "Split the last layer.";
    "vocab_parallel_ce_backend": OneOf(&["torch", "liger"]), "\"torch\"", none(ONLY_TP), "Loss over a split vocabulary.";
    "tensor_parallel" | "tp": Object, "{}", S, "Groups of ranks.";
    "injection_policy_tuple": Any, "null", none(ONLY_TP), "Which layers are split.";
    "partition_config": Any, "null", none(ONLY_TP), "Which layers are split.";
    "preset_model": Any, "null", none(ONLY_TP), "Model with built-in settings.";
    "keep_module_on_host": Bool, "false", none(ONLY_TP), "Split on the CPU.";
    "replace_with_kernel_inject" | "kernel_inject": Bool, "false", none(ONLY_TP), "Inference kernels.";
};

const TP: &[super::ConfigKey] = keys! {
    "tp_size": COUNT, "1", refused_above_one(NO_TP), "Ranks that share one layer.";
    "tp_grain_size": COUNT, "1", none(ONLY_TP), "Granularity of the split.";
    "mpu": Any, "null", none(ONLY_TP), "Python object.";
    "tp_group": Any, "null", none(ONLY_TP), "Python object.";
};

const MODEL_HAS_NAMES: &str = "the model's code determines which of its parameters belong to experts";
const MODEL_ROUTES: &str =
    "the model's code or its config.json determines how tokens are routed, and ignoring the key would change training";
const OWN_KERNELS: &str = "experts are computed as grouped products";
const OWN_MESSAGES: &str =
    "tokens travel through the communicator, in messages that are only as long as their rows require";

const EXPERT_PARALLEL: &[super::ConfigKey] = keys! {
    "enabled": Bool, "false", H, "Spread experts over ranks.";
    "autoep_size": INT, "1", H, "Number of ranks that share the experts. It must divide the number of ranks and the number of experts of each layer.";
    "expert_tensor_parallel_size": INT, "1", refused_above_one("the tensors of an expert are not split"), "Ranks that share one expert.";
    "validate_folding_routing": Bool, "false", none("the routing is always checked"), "Check routing.";
    "async_split_plan": Bool, "false", none("the numbers of tokens are in host memory"), "On a separate stream, copy to the host the numbers of tokens that ranks exchange.";
    "preset_model": Any, "null", none(MODEL_HAS_NAMES), "Model with built-in settings.";
    "moe_layer_pattern": Any, "null", none(MODEL_HAS_NAMES), "Names of layers.";
    "expert_pattern": Any, "null", none(MODEL_HAS_NAMES), "Names of experts.";
    "router_pattern": Any, "null", none(MODEL_HAS_NAMES), "Names of routers.";
    "use_grouped_mm": Bool, "true", none(OWN_KERNELS), "Grouped products.";
    "disable_triton_grouped_mm": Bool, "false", none(OWN_KERNELS), "Do not use Triton.";
    "route_norm": Any, "null", refuse(MODEL_ROUTES), "Normalize routing weights.";
    "route_scale": FLOAT, "1.0", refuse(MODEL_ROUTES), "Scale of routing weights.";
    "score_apply": Any, "\"auto\"", refuse(MODEL_ROUTES), "Where routing scores are applied.";
    "combine_impl": Any, "\"auto\"", none(OWN_KERNELS), "Kernel.";
    "row_weighting_impl": Any, "\"auto\"", none(OWN_KERNELS), "Kernel.";
    "gate_up_impl": Any, "\"separate\"", none(OWN_KERNELS), "Kernel.";
    "comm_backend": OneOf(&["comm", "deepep"]), "\"comm\"", none(OWN_MESSAGES), "Library that exchanges tokens.";
    "comm_num_sm": INT, "12", none(OWN_MESSAGES), "Number of GPU multiprocessors used for communication.";
    "comm_qp_margin": INT, "4", none(OWN_MESSAGES), "Queue margin.";
    "comm_max_tokens_per_rank": INT, "0", none(OWN_MESSAGES), "Maximum number of tokens per rank.";
    "num_expert_groups": Any, "null", refuse(MODEL_ROUTES), "Groups of experts.";
    "num_limited_groups": Any, "null", refuse(MODEL_ROUTES), "Number of expert groups that a token may use.";
    "score_func": Any, "\"auto\"", refuse(MODEL_ROUTES), "Routing function.";
    "top_k": Any, "\"auto\"", refuse(MODEL_ROUTES), "Experts per token.";
    "load_balance_coeff": Any, "null", refuse(MODEL_ROUTES), "Must be null.";
    "routed_scaling_factor": Any, "\"auto\"", refuse(MODEL_ROUTES), "Scale of expert outputs.";
    "expert_w1": Any, "null", none(MODEL_HAS_NAMES), "Name of a weight.";
    "expert_w2": Any, "null", none(MODEL_HAS_NAMES), "Name of a weight.";
    "expert_w3": Any, "null", none(MODEL_HAS_NAMES), "Name of a weight.";
    "num_experts_attr": Any, "null", none(MODEL_HAS_NAMES), "Name of an attribute.";
    "top_k_attr": Any, "null", none(MODEL_HAS_NAMES), "Name of an attribute.";
    "has_shared_experts": Any, "null", none(MODEL_HAS_NAMES), "Shared experts.";
    "shared_experts_pattern": Any, "null", none(MODEL_HAS_NAMES), "Names of the shared experts.";
    "shared_experts_gate_pattern": Any, "null", none(MODEL_HAS_NAMES), "Names of the shared experts' gates.";
    "expert_activation": Any, "null", refuse("the model's code or its config.json determines the activation"), "Activation.";
};

const HYBRID_ENGINE: &[super::ConfigKey] = keys! {
    "enabled": Bool, "false", S, "Generate during training.";
    "max_out_tokens": POSITIVE, "512", S, "Maximum number of tokens.";
    "inference_tp_size": INT, "1", S, "Tensor parallelism of generation.";
    "release_inference_cache": Bool, "false", S, "Free the cache.";
    "pin_parameters": Bool, "true", S, "Page-locked memory.";
    "tp_gather_partition_size": INT, "8", S, "Layers gathered at a time.";
    "enable_cuda_graph": Bool, "false", S, "CUDA graphs.";
};

const WEIGHT_QUANTIZATION: &[super::ConfigKey] = keys! {
    "enabled": Bool, "true", S, "Quantize.";
    "quantized_initialization": Any, "{}", S, "Quantize while loading.";
    "post_init_quant": Any, "{}", S, "Quantize after initialization.";
    "num_bits": INT, "8", S, "Number of bits.";
    "q_type": Str, "\"symmetric\"", S, "Kind of quantization.";
    "q_groups": INT, "1", S, "Number of groups.";
};

const DATA_EFFICIENCY: &[super::ConfigKey] = keys! {
    "enabled": Bool, "false", R, "Select samples or tokens, which would change the training data.";
    "seed": INT, "1234", R, "Seed for sampling.";
    "data_sampling": Object, "{}", S, "Selection of samples.";
    "data_routing": Object, "{}", S, "Selection of tokens.";
};

const DATA_SAMPLING: &[super::ConfigKey] = keys! {
    "enabled": Bool, "false", R, "Choose samples.";
    "num_epochs": INT, "1000", R, "Maximum number of epochs.";
    "num_workers": INT, "0", R, "Loader processes.";
    "pin_memory": Bool, "false", R, "Page-locked memory.";
    "curriculum_learning": Object, "{}", S, "Easy samples first.";
    "dynamic_batching": Object, "{}", S, "Batches by length.";
};

const CURRICULUM_LEARNING: &[super::ConfigKey] = keys! {
    "enabled": Bool, "false", R, "Easy samples first.";
    "data_cluster_path": Str, "null", R, "Folder of indices.";
    "curriculum_metrics": Any, "null", R, "Difficulty metrics.";
};

const DYNAMIC_BATCHING: &[super::ConfigKey] = keys! {
    "enabled": Bool, "false", R, "Batches by length.";
    "metrics_path": Str, "null", R, "File of sequence lengths.";
    "lr_scaling_method": OneOf(&["linear", "sqrt", "none"]), "\"linear\"", R, "How the learning rate is adapted.";
    "min_batch_size": INT, "1", R, "Smallest batch.";
    "max_batch_size": INT, "null", R, "Largest batch.";
    "sequence_picking_order": OneOf(&["dataloader", "random", "seqlen"]), "\"dataloader\"", R, "Order in which sequences are taken.";
    "max_tokens": INT, "null", R, "Tokens per batch.";
    "verbose": Bool, "false", R, "Log.";
};

const DATA_ROUTING: &[super::ConfigKey] = keys! {
    "enabled": Bool, "false", R, "Choose tokens.";
    "random_ltd": Object, "{}", S, "Drop tokens at random in inner layers.";
};

const RANDOM_LTD: &[super::ConfigKey] = keys! {
    "enabled": Bool, "false", R, "Drop tokens.";
    "layer_token_lr_schedule": Any, "null", R, "Schedule of the learning rate by number of tokens.";
    "total_layer_num": INT, "null", R, "Number of layers.";
    "random_ltd_layer_num": INT, "null", R, "Number of layers that drop tokens.";
    "random_ltd_layer_id": Any, "null", R, "Which layers drop tokens.";
    "model_mask_name": Any, "null", R, "Name of the mask.";
    "model_type": Any, "null", R, "Kind of model.";
    "hidden_state_order": Any, "null", R, "Order of dimensions.";
    "random_ltd_schedule": Any, "null", R, "Number of tokens over time.";
    "micro_batch_size": INT, "null", R, "Samples per forward pass.";
    "global_batch_size": INT, "null", R, "Samples per step.";
};
