//! The keys of `zero_optimization`.

use super::shorthand::*;

#[rustfmt::skip]
pub(super) static SECTIONS: &[ConfigSection] = &[
    ConfigSection::new("zero_optimization", true, ZERO),
    ConfigSection::new("zero_optimization.offload_param", true, OFFLOAD_PARAM),
    ConfigSection::new("zero_optimization.offload_optimizer", true, OFFLOAD_OPTIMIZER),
    ConfigSection::new("zero_optimization.leaf_module", true, LEAF_MODULE),
    ConfigSection::new("zero_optimization.zenflow", true, ZENFLOW),
];

const REMOVED_KEY: &str = "DeepSpeed 0.19.8 refuses every file with this key; remove it";

const ZERO: &[super::ConfigKey] = keys! {
    "stage": super::ConfigValueKind::Int(0, 3), "0", H, "0: nothing is sharded; 1: optimizer states; 2: also gradients; 3: also parameters.";
    "reduce_bucket_size": POSITIVE, "500000000", H, "Maximum number of gradient elements that are packed into one reduction; parameters of 65,536 or more elements are reduced individually.";
    "allgather_bucket_size": COUNT, "500000000", H, "Maximum number of elements of updated weights that are packed into one gather; parameters of 65,536 or more elements are gathered individually. Must be even at stages 0 to 2.";
    "overlap_comm": Bool, "null", H, "Communicate while the model computes; null: only at stage 3.";
    "contiguous_gradients": Bool, "true", none("buckets are always contiguous"), "Copy gradients to one buffer as they are produced.";
    "reduce_scatter": Bool, "true", H, "Reduce gradients to their owners; false: to all ranks, each of which keeps its part.";
    "sub_group_size": COUNT, "1000000000", H, "Number of elements of a rank's share that are updated in each part of an optimizer step.";
    "stage3_prefetch_bucket_size" | "prefetch_bucket_size": COUNT, "50000000", H, "Elements gathered in advance; 0, or overlap_comm false, disables prefetching.";
    "stage3_param_persistence_threshold" | "param_persistence_threshold": COUNT, "100000", H, "Parameters with at most this many elements stay gathered, unless they are quantized.";
    "stage3_model_persistence_threshold" | "model_persistence_threshold": COUNT, "9223372036854775807", H, "Cap on the total number of elements of the parameters that stay gathered.";
    "stage3_max_live_parameters" | "max_live_parameters": COUNT, "1000000000", H, "Elements gathered at the same time before prefetching stops.";
    "stage3_max_reuse_distance" | "max_reuse_distance": COUNT, "1000000000", H, "A parameter used again within this many elements is not released.";
    "stage3_allgather_sequential" | "allgather_sequential": Bool, "false", H, "Gather parameters one at a time: a prefetch bucket of 1.";
    "stage3_gather_16bit_weights_on_model_save" | "gather_16bit_weights_on_model_save": Bool, "false", none("Engine::save_16bit_model always gathers"), "Complete 16-bit weights on save.";
    "stage3_gather_fp16_weights_on_model_save" | "gather_fp16_weights_on_model_save": Bool, "-", moved("stage3_gather_16bit_weights_on_model_save"), "Old name.";
    "stage3_module_granularity_threshold" | "module_granularity_threshold": INT, "0", none("the model defines its units"), "Treat fine-grained modules as one.";
    "stage3_use_all_reduce_for_fetch_params" | "use_all_reduce_for_fetch_params": Bool, "false", none("a gather moves half the data of an all-reduce; results are the same"), "Gather by all-reduce.";
    "offload_param": Object, "null", H, "Location of the parameter shards.";
    "offload_optimizer": Object, "null", H, "Location of the optimizer states.";
    "cpu_offload": Bool, "-", moved("offload_optimizer.device"), "Old form of offload_optimizer.";
    "cpu_offload_param": Bool, "-", moved("offload_param.device"), "Old form of offload_param.";
    "cpu_offload_use_pin_memory": Bool, "-", none("DeepSpeed discards it too"), "Old key.";
    "zenflow": Object, "null", refuse("asynchronous updates are not implemented"), "Asynchronous optimizer updates.";
    "use_multi_rank_bucket_allreduce": Bool, "true", none("gradients are reduced to their owners; results are the same"), "One all-reduce per bucket.";
    "allgather_partitions": Bool, "true", none("weights are always all-gathered; a broadcast from each owner would give the same bits"), "All-gather updated weights instead of broadcasting them.";
    "round_robin_gradients": Bool, "false", none("shards are already equal parts"), "Spread parameters over ranks in round-robin order.";
    "parameter_alignment": Bool, "false", none("shards are only padded to equal size; results are the same"), "Pad each parameter to 16 bytes.";
    "compute_grad_norm": Bool, "true", none("the check for infinite gradients, which every step needs, also gives the gradient norm; results are the same"), "False skips the gradient norm; only at stages 1 and 2, with gradient_clipping 0 and without an offloaded optimizer (and, at stage 1 in bf16, without f32 accumulation).";
    "ignore_unused_parameters": Bool, "false", H, "True: a parameter that no backward pass reaches has a gradient of zeros; gradients are then held until the backward pass ends, at every stage. False: the first optimizer step fails with an error that names the parameter (DeepSpeed's default is true).";
    "load_from_fp32_weights": Bool, "true", H, "Load master weights as they were saved; false: rounded to the model's dtype.";
    "elastic_checkpoint": Bool, "false", none("every checkpoint loads at any number of ranks"), "Checkpoints that load at any world size.";
    "pipeline_loading_checkpoint": Bool, "false", none("each rank reads only what it owns; results are the same"), "Overlap the reading of checkpoint files.";
    "zero_hpz_partition_size": COUNT, "1", H, "Stage 3 on several hosts: each group of this many ranks on one host keeps, until the weights change, a second, sharded copy of the parameters that a forward pass has gathered; the backward pass and later micro batches gather from it within the host (ZeRO++ hpZ; same bits). It must divide the number of ranks on each host. On a single host, no copy is kept, because it would be no faster to reach.";
    "zero_quantized_weights": Bool, "false", H, "Gathers of stage 3 carry int8 with a scale per 128 elements (ZeRO++ qwZ); all ranks compute with the received values, and owners keep the exact weights.";
    "zero_quantized_nontrainable_weights": Bool, "false", H, "Frozen matrices are stored and gathered in eight bits with a scale per 128 elements at stage 3; at lower stages, where parameters are not sharded, the model computes with the same values. EngineBuilder::quantized can select another format (NF4) or other parameters.";
    "zero_quantized_gradients": Bool, "false", H, "Gradients are communicated as int4 with a scale per 128 elements (ZeRO++ qgZ) at every stage; they are summed in f32, and at stage 0 the sums are communicated exactly.";
    "compress_between_hosts_only": Bool, "false", H, "Specific to candle-zero. True: zero_quantized_gradients, zero_quantized_weights and a 16-bit communication_data_type apply only between hosts. Within a host, gradients are communicated and summed uncompressed. Only two things are compressed: the sum over a host's ranks, which is sent once to each owner on another host, and the weights gathered from other hosts. The bits then depend on which ranks share a host; on one host they equal those of a run without compression.";
    "leaf_module": Object, "{}", S, "Units gathered together with all units inside them, for modules in which different ranks run different parts.";
    "enable_sanity_checks": Bool, "false", none("the calls of all ranks are always compared"), "Compare ranks at stage 3.";
    "log_trace_cache_warnings": Bool, "false", H, "Rank 0 logs each step that used the units in a different order than before (stage 3: nothing was gathered in advance in that step).";
    "memory_efficient_linear": Bool, "true", none("it applies only to PyTorch's modules"), "Replace the linear operator.";
    "override_module_apply": Bool, "true", none("it applies only to PyTorch's modules"), "Gather parameters in apply.";
    "save_muon_momentum_buffer_in_memory": Bool, "false", none("offload_optimizer determines the location of all optimizer states, including the momentum"), "Placement of Muon's momentum.";
    "legacy_stage1": Bool, "false", refuse("DeepSpeed refuses it too"), "Old stage 1.";
    "mics_shard_size": INT, "-1", H, "Stage 3: everything is sharded within each group of this many neighbouring ranks, and every group has a complete copy; gathers stay within a group, and sums of gradients are sent to the other groups once (MiCS; supported by DeepSpeed up to 0.19.6; same bits in f32, bf16 and fp16). It must equal the number of ranks, or divide both that number and, on several hosts, the number of ranks on each host. 0 or less: across all ranks.";
    "mics_hierarchical_params_gather": Bool, "false", none("a group of mics_shard_size ranks is on one host or contains all ranks; results are the same"), "Gather within a host first (supported by DeepSpeed up to 0.19.6).";
    "zeropp_loco_param": Any, "-", removed(REMOVED_KEY), "Error feedback for quantized gradients.";
};

const DEVICE: super::ConfigValueKind = OneOf(&["none", "cpu", "nvme"]);
const NOT_SPECULATIVE: &str = "no step is taken before its gradients are checked; results are the same";

const OFFLOAD_PARAM: &[super::ConfigKey] = keys! {
    "device": DEVICE, "\"none\"", H, "Location of the parameter shards at stage 3: cpu is host memory, where they are in any case unless a GPU runs the model; nvme is one file per rank.";
    "nvme_path": Str, "null", H, "Folder for the files, on a fast local disk; required for nvme. A leading `~/` stands for the user's home folder, and a leading `~/.cache/` for `$XDG_CACHE_HOME/` if that variable is an absolute path.";
    "buffer_count": COUNT, "5", H, "With nvme: at most buffer_count x buffer_size elements are read ahead.";
    "buffer_size": COUNT, "100000000", H, "Elements per buffer; nvme needs buffer_count and buffer_size to be 1 or more.";
    "max_in_cpu": COUNT, "1000000000", H, "With nvme: the first elements of a rank's shards, up to this many, stay in memory.";
    "pin_memory": Bool, "true", H, "If a GPU runs the model, shards on the host are copied to it through two page-locked staging buffers of 4 MiB while it computes; false: through ordinary memory, which takes longer.";
};

const OFFLOAD_OPTIMIZER: &[super::ConfigKey] = keys! {
    "device": DEVICE, "\"none\"", H, "Location of master weights, moments and gradient shards from stage 1 on: cpu is host memory, where they are in any case unless a GPU runs the model, and the step runs on the CPU; nvme is one file per kind of state and rank (DeepSpeed: only at stage 3).";
    "nvme_path": Str, "null", H, "Folder for the files, on a fast local disk; required for nvme. A leading `~/` stands for the user's home folder, and a leading `~/.cache/` for `$XDG_CACHE_HOME/` if that variable is an absolute path.";
    "buffer_count": COUNT, "4", H, "With nvme: the buffers of a step together hold at most this many times the elements of the largest sub-group, and each buffer (one for each kind of state and window) takes at most 16 MiB; must be at least 2 plus the optimizer's number of states (so 4 for Adam, 3 for SGD with momentum, 2 for SGD).";
    "pin_memory": Bool, "true", H, "If a GPU runs the model, gradients are copied to the host during the backward pass, and updated weights are copied back while the next ones are computed, each through two page-locked staging buffers of 4 MiB; false: through ordinary memory, which takes longer.";
    "delayed_update": Bool, "-", H, "Specific to candle-zero; false if absent. If a GPU runs the model, then after the first `delayed_update_after` updates, each update runs on the CPU while the GPU computes the next step with weights that are one update old (ZeRO-Offload, section 5.2). Only with device cpu.";
    "delayed_update_after": COUNT, "-", H, "Specific to candle-zero; 40 if absent. Number of updates before the first delayed one: weights change fast at the beginning.";
    "pipeline_read": Bool, "false", H, "With nvme: read the next window while the step computes.";
    "pipeline_write": Bool, "false", H, "With nvme: write the finished window while the step computes.";
    "fast_init": Bool, "false", none("states start as reserved file space, so nothing is written at the start"), "Faster initial creation of states.";
    "ratio": SHARE, "1.0", H, "With nvme: share of the sub-groups that is offloaded; the first ones stay in memory (while the model is built, all master weights need space in the file); < 1 needs stage 3.";
    "super_offload": Bool, "false", none(NOT_SPECULATIVE), "Speculative step on the CPU.";
    "cpuadam_cores_perc": SHARE, "0.8", none(NOT_SPECULATIVE), "Share of the cores for super_offload.";
};

const CLASSES: &str = "a unit in Rust has no class path; use names or name_suffixes, or mark it with Unit::leaf";

const LEAF_MODULE: &[super::ConfigKey] = keys! {
    "classes": StringsOrOne, "[\"transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock\",\"transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock\",\"transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock\"]", none(CLASSES), "Class paths of modules gathered as a whole.";
    "names": StringsOrOne, "[]", H, "Names of units: the prefix of the VarBuilder from which each was built. A name that matches no unit is reported once.";
    "name_suffixes": StringsOrOne, "[]", H, "Suffixes of unit names.";
};

const ZENFLOW: &[super::ConfigKey] = keys! {
    "topk_ratio": SHARE, "0.1", R, "Share of gradients applied immediately.";
    "select_strategy": OneOf(&["auto", "step", "epoch"]), "\"auto\"", R, "When the share is selected.";
    "select_interval": AutoOr(&INT), "\"auto\"", R, "How often the share is selected.";
    "update_interval": AutoOr(&POSITIVE), "\"auto\"", R, "How often the rest is updated.";
    "overlap_step": Bool, "false", R, "Step while the model computes.";
    "offload": Bool, "false", R, "Keep the share on the CPU.";
    "auto_ratio": SHARE, "0.99", R, "Threshold of auto.";
    "full_warm_up_rounds": COUNT, "0", R, "Full steps at the start.";
    "pt_reserved_cores_perc": SHARE, "0.5", R, "Share of the cores kept for PyTorch.";
    "steps_per_epoch": INT, "null", R, "Internal.";
};
