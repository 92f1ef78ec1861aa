//! The keys of `optimizer` and `scheduler`.

use super::shorthand::*;

#[rustfmt::skip]
pub(super) static SECTIONS: &[ConfigSection] = &[
    ConfigSection::new("optimizer", false, OPTIMIZER),
    ConfigSection::new("optimizer.params", false, ADAM).types(&["Adam", "AdamW"]),
    ConfigSection::new("optimizer.params", false, SGD).types(&["SGD"]),
    ConfigSection::new("optimizer.params", false, LION).types(&["Lion"]),
    ConfigSection::new("optimizer.params", false, ADAGRAD).types(&["Adagrad"]),
    ConfigSection::new("optimizer.params", false, LAMB).types(&["Lamb"]),
    ConfigSection::new("optimizer.params", false, MUON).types(&["Muon"]),
    ConfigSection::new("optimizer.params", false, ADAM_8BIT).types(&["Adam8bit"]),
    ConfigSection::new("optimizer.params", false, ADAMW_8BIT).types(&["AdamW8bit"]),
    ConfigSection::new("optimizer.params", false, LION_8BIT).types(&["Lion8bit"]),
    ConfigSection::new("scheduler", false, SCHEDULER),
    ConfigSection::new("scheduler.params", false, WARMUP_LR).types(&["WarmupLR"]),
    ConfigSection::new("scheduler.params", false, WARMUP_DECAY_LR).types(&["WarmupDecayLR"]),
    ConfigSection::new("scheduler.params", false, WARMUP_COSINE_LR).types(&["WarmupCosineLR"]),
    ConfigSection::new("scheduler.params", false, ONE_CYCLE).types(&["OneCycle"]),
    ConfigSection::new("scheduler.params", false, LR_RANGE_TEST).types(&["LRRangeTest"]),
];

const OPTIMIZER: &[super::ConfigKey] = keys! {
    "type": Str, "-", H, "Adam, AdamW, SGD, Lion, Adagrad, Lamb, Muon, or bitsandbytes' Adam8bit, AdamW8bit or Lion8bit, in any letter case. Other names of DeepSpeed and PyTorch are refused.";
    "params": Object, "{}", H, "Its parameters.";
    "legacy_fusion": Bool, "false", none("it is a matter of CUDA kernels"), "Older fused wrapper.";
};

const PYTORCH: &str = "it is a matter of PyTorch's kernels";

const ADAM: &[super::ConfigKey] = keys! {
    "lr": NOT_NEGATIVE, "0.001", H, "Learning rate.";
    "betas": Betas, "[0.9,0.999]", H, "Decays of the two moments, each at least 0 and below 1.";
    "eps": NOT_NEGATIVE, "1e-8", H, "Added to the root of the second moment.";
    "weight_decay": NOT_NEGATIVE, "0.0", H, "Weight decay.";
    "bias_correction": Bool, "true", H, "Divide the moments by 1 - beta^t.";
    "adam_w_mode": Bool, "true", H, "Decoupled decay; false with Adam: added to the gradient. AdamW is always decoupled.";
    "torch_adam": Bool, "false", H, "PyTorch's Adam: the same arithmetic; with decoupled decay the default weight_decay is 0.01.";
    "amsgrad": Bool, "false", refuse("DeepSpeed's Adam refuses it too"), "The largest second moment.";
    "fp32_optimizer_states": Bool, "true", refuse("moments are f32 here; bf16.bf16_optimizer_states keeps them in bf16, and Adam8bit and its like in eight bits"), "Moments in f32.";
    "fused": Bool, "null", none(PYTORCH), "PyTorch: fused kernel.";
    "foreach": Bool, "null", none(PYTORCH), "PyTorch: many tensors at once.";
};

const SGD: &[super::ConfigKey] = keys! {
    "lr": NOT_NEGATIVE, "0.001", H, "Learning rate.";
    "momentum": NOT_NEGATIVE, "0.0", H, "Momentum; 0 keeps no buffer.";
    "dampening": FLOAT, "0.0", H, "The gradient enters the momentum times 1 - dampening.";
    "weight_decay": NOT_NEGATIVE, "0.0", H, "Added to the gradient.";
    "nesterov": Bool, "false", H, "Nesterov momentum; needs momentum > 0 and dampening 0.";
    "maximize": Bool, "false", refuse("the loss is always minimized"), "Maximize the loss.";
    "fused": Bool, "null", none(PYTORCH), "PyTorch: fused kernel.";
    "foreach": Bool, "null", none(PYTORCH), "PyTorch: many tensors at once.";
    "differentiable": Bool, "false", refuse("the step has no gradient"), "PyTorch: differentiate the step.";
};

const LION: &[super::ConfigKey] = keys! {
    "lr": NOT_NEGATIVE, "0.001", H, "Learning rate: every weight moves by it.";
    "betas": Betas, "[0.9,0.999]", H, "Share of the momentum in the direction, and decay of the momentum, each at least 0 and below 1.";
    "weight_decay": NOT_NEGATIVE, "0.0", H, "Decoupled weight decay.";
};

const ADAGRAD: &[super::ConfigKey] = keys! {
    "lr": NOT_NEGATIVE, "0.01", H, "Learning rate.";
    "eps": NOT_NEGATIVE, "1e-10", H, "Added to the root of the sum of squares.";
    "weight_decay": NOT_NEGATIVE, "0.0", H, "Added to the gradient.";
    "lr_decay": NOT_NEGATIVE, "0.0", refuse("the scheduler section changes the learning rate"), "PyTorch: the learning rate falls with the steps.";
    "initial_accumulator_value": NOT_NEGATIVE, "0.0", refuse("states start with zeros"), "PyTorch: where the sum of squares starts.";
    "amsgrad": Bool, "false", refuse("there is none in Adagrad"), "The largest second moment.";
    "maximize": Bool, "false", refuse("the loss is always minimized"), "Maximize the loss.";
    "fused": Bool, "null", none(PYTORCH), "PyTorch: fused kernel.";
    "foreach": Bool, "null", none(PYTORCH), "PyTorch: many tensors at once.";
    "differentiable": Bool, "false", refuse("the step has no gradient"), "PyTorch: differentiate the step.";
};

const LAMB: &[super::ConfigKey] = keys! {
    "lr": NOT_NEGATIVE, "0.001", H, "Learning rate, multiplied by each parameter's trust ratio.";
    "betas": Betas, "[0.9,0.999]", H, "Decays of the two moments, each at least 0 and below 1.";
    "eps": NOT_NEGATIVE, "1e-8", H, "Added to the root of the second moment.";
    "eps_inside_sqrt": Bool, "false", H, "Add eps to the second moment rather than to its root.";
    "weight_decay": NOT_NEGATIVE, "0.0", H, "Weight decay, part of the update whose norm enters the trust ratio.";
    "bias_correction": Bool, "true", H, "Divide the moments by 1 - beta^t, outside of the trust ratio.";
    "max_coeff": NOT_NEGATIVE, "10.0", H, "Largest trust ratio: norm of a parameter over norm of its update.";
    "min_coeff": NOT_NEGATIVE, "0.01", H, "Smallest trust ratio; at most max_coeff.";
    "amsgrad": Bool, "false", refuse("DeepSpeed's Lamb refuses it too"), "The largest second moment.";
};

const MUON: &[super::ConfigKey] = keys! {
    "lr": NOT_NEGATIVE, "null", H, "Learning rate of both halves, where muon_lr or adam_lr does not say otherwise.";
    "muon_lr": NOT_NEGATIVE, "null", H, "Learning rate of matrices; null: lr, without it 0.02. Embeddings and the output projection (embed or lm_head in the name) are not trained as matrices.";
    "adam_lr": NOT_NEGATIVE, "null", H, "Learning rate of all other parameters, which AdamW trains; null: lr, without it 0.0003.";
    "momentum": SHARE, "0.95", H, "Momentum of matrices, in a Nesterov blend; below 1.";
    "weight_decay": NOT_NEGATIVE, "0.0", H, "Decoupled weight decay of both halves.";
    "ns_method": ConfigValueKind::OneOf(&["gram", "standard"]), "\"gram\"", H, "How matrices are orthogonalized: Newton-Schulz on the Gram matrix in f32, or standard, as it stands in bf16.";
    "betas": Betas, "[0.9,0.95]", H, "AdamW: decays of the two moments, each at least 0 and below 1.";
    "eps": NOT_NEGATIVE, "1e-10", H, "AdamW: added to the root of the second moment.";
    "adam_w_mode": Bool, "true", H, "AdamW: decoupled decay; false: added to the gradient.";
    "torch_adam": Bool, "false", H, "PyTorch's Adam for AdamW: the same arithmetic.";
    "fp32_optimizer_states": Bool, "true", refuse("moments are f32 here; bf16.bf16_optimizer_states keeps them in bf16, and Adam8bit and its like in eight bits"), "Moments in f32.";
    "foreach": Bool, "null", none(PYTORCH), "PyTorch: many tensors at once.";
    "per_head_muon": Bool, "false", refuse("matrices are orthogonalized whole"), "Orthogonalize each attention head by itself.";
};

const ADAM_8BIT: &[super::ConfigKey] = keys! {
    "lr": NOT_NEGATIVE, "0.001", H, "Learning rate.";
    "betas": Betas, "[0.9,0.999]", H, "Decays of the two moments, each at least 0 and below 1.";
    "eps": NOT_NEGATIVE, "1e-8", H, "Added to the root of the second moment.";
    "weight_decay": NOT_NEGATIVE, "0.0", H, "Decoupled weight decay.";
    "amsgrad": Bool, "false", refuse("bitsandbytes refuses it too"), "The largest second moment.";
    "min_8bit_size": COUNT, "4096", H, "Parameters of fewer elements keep f32 moments.";
    "block_wise": Bool, "true", refuse("moments of eight bits have a scale for each block of 256"), "A scale for each block of 256 elements.";
    "percentile_clipping": INT, "100", refuse("use gradient_clipping at the top level"), "Clip by a percentile of the last norms; 100: do not.";
    "optim_bits": INT, "32", none("the name says it: 8"), "Bits of the moments.";
    "args": Any, "null", none("these keys are all that there are"), "bitsandbytes: an object with the same settings.";
    "is_paged": Bool, "false", none("offload_optimizer says where moments are"), "bitsandbytes: moments in paged memory.";
};

const ADAMW_8BIT: &[super::ConfigKey] = keys! {
    "lr": NOT_NEGATIVE, "0.001", H, "Learning rate.";
    "betas": Betas, "[0.9,0.999]", H, "Decays of the two moments, each at least 0 and below 1.";
    "eps": NOT_NEGATIVE, "1e-8", H, "Added to the root of the second moment.";
    "weight_decay": NOT_NEGATIVE, "0.01", H, "Decoupled weight decay.";
    "amsgrad": Bool, "false", refuse("bitsandbytes refuses it too"), "The largest second moment.";
    "min_8bit_size": COUNT, "4096", H, "Parameters of fewer elements keep f32 moments.";
    "block_wise": Bool, "true", refuse("moments of eight bits have a scale for each block of 256"), "A scale for each block of 256 elements.";
    "percentile_clipping": INT, "100", refuse("use gradient_clipping at the top level"), "Clip by a percentile of the last norms; 100: do not.";
    "optim_bits": INT, "32", none("the name says it: 8"), "Bits of the moments.";
    "args": Any, "null", none("these keys are all that there are"), "bitsandbytes: an object with the same settings.";
    "is_paged": Bool, "false", none("offload_optimizer says where moments are"), "bitsandbytes: moments in paged memory.";
};

const LION_8BIT: &[super::ConfigKey] = keys! {
    "lr": NOT_NEGATIVE, "0.0001", H, "Learning rate: every weight moves by it.";
    "betas": Betas, "[0.9,0.99]", H, "Share of the momentum in the direction, and decay of the momentum, each at least 0 and below 1.";
    "weight_decay": NOT_NEGATIVE, "0.0", H, "Decoupled weight decay.";
    "min_8bit_size": COUNT, "4096", H, "Parameters of fewer elements keep f32 moments.";
    "block_wise": Bool, "true", refuse("moments of eight bits have a scale for each block of 256"), "A scale for each block of 256 elements.";
    "percentile_clipping": INT, "100", refuse("use gradient_clipping at the top level"), "Clip by a percentile of the last norms; 100: do not.";
    "optim_bits": INT, "32", none("the name says it: 8"), "Bits of the moments.";
    "args": Any, "null", none("these keys are all that there are"), "bitsandbytes: an object with the same settings.";
    "is_paged": Bool, "false", none("offload_optimizer says where moments are"), "bitsandbytes: moments in paged memory.";
};

const SCHEDULER: &[super::ConfigKey] = keys! {
    "type": Str, "-", H, "WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle or LRRangeTest, in exact letter case. PyTorch's schedules are refused.";
    "params": Object, "{}", H, "Its parameters.";
};

const FROM_START: &str = "schedules start at the beginning";

const WARMUP_LR: &[super::ConfigKey] = keys! {
    "warmup_min_lr": RATE_PER_GROUP, "0.0", H, "Learning rate at the start.";
    "warmup_max_lr": RATE_PER_GROUP, "null", H, "Learning rate after the warm-up; null: the optimizer's.";
    "warmup_num_steps": POSITIVE, "1000", H, "Steps of the warm-up.";
    "warmup_type": Str, "\"log\"", H, "Shape of the warm-up: log or linear; any other word is log, as in DeepSpeed, and noted.";
    "last_batch_iteration": INT, "-1", refuse(FROM_START), "Where the schedule starts.";
};

const WARMUP_DECAY_LR: &[super::ConfigKey] = keys! {
    "total_num_steps": POSITIVE, "-", H, "Required. The learning rate is 0 (warmup_min_lr) after this many steps.";
    "warmup_min_lr": RATE_PER_GROUP, "0.0", H, "Learning rate at the start and at the end.";
    "warmup_max_lr": RATE_PER_GROUP, "0.001", H, "Learning rate after the warm-up.";
    "warmup_num_steps": POSITIVE, "1000", H, "Steps of the warm-up.";
    "warmup_type": Str, "\"log\"", H, "Shape of the warm-up: log or linear; any other word is log, as in DeepSpeed, and noted.";
    "last_batch_iteration": INT, "-1", refuse(FROM_START), "Where the schedule starts.";
};

const WARMUP_COSINE_LR: &[super::ConfigKey] = keys! {
    "total_num_steps": POSITIVE, "-", H, "Required. Steps of the whole schedule.";
    "warmup_min_ratio": NOT_NEGATIVE, "0.0", H, "Share of the optimizer's lr at the start.";
    "warmup_num_steps": POSITIVE, "1000", H, "Steps of the warm-up.";
    "cos_min_ratio": NOT_NEGATIVE, "0.0001", H, "Share of the optimizer's lr at the end.";
    "warmup_type": Str, "\"log\"", H, "Shape of the warm-up: log or linear; any other word is log, as in DeepSpeed, and noted.";
    "last_batch_iteration": INT, "-1", refuse(FROM_START), "Where the schedule starts.";
};

const ONE_CYCLE: &[super::ConfigKey] = keys! {
    "cycle_min_lr": RATE_PER_GROUP, "-", H, "Required. Learning rate at both ends of the cycle.";
    "cycle_max_lr": RATE_PER_GROUP, "-", H, "Required. Learning rate at its top.";
    "decay_lr_rate": NOT_NEGATIVE, "0.0", H, "After the cycle, per decay_step_size: the learning rate is divided by 1 + this.";
    "cycle_first_step_size": NOT_NEGATIVE, "2000.0", H, "Steps of the way up, above 0.";
    "cycle_second_step_size": NOT_NEGATIVE, "null", H, "Steps of the way down; null: as many as up.";
    "cycle_first_stair_count": COUNT, "0", H, "Stairs of the way up; 0: none.";
    "cycle_second_stair_count": COUNT, "null", H, "Stairs of the way down; null: as many as up.";
    "decay_step_size": NOT_NEGATIVE, "0.0", H, "Steps of the unit of the decay; 0: no decay.";
    "cycle_momentum": Bool, "true", H, "beta1 goes down while the learning rate goes up, beta2 is 0.99. SGD keeps its momentum.";
    "cycle_min_mom": SHARE, "0.8", H, "beta1 at the top of the cycle, and at the first step; below 1.";
    "cycle_max_mom": SHARE, "0.9", H, "beta1 at both ends of the cycle; below 1.";
    "decay_mom_rate": FLOAT, "0.0", H, "After the cycle, per decay_step_size: beta1 is multiplied by 1 + this. Where it reaches 1, training stops with an error.";
    "last_batch_iteration": INT, "-1", refuse(FROM_START), "Where the schedule starts.";
};

const LR_RANGE_TEST: &[super::ConfigKey] = keys! {
    "lr_range_test_min_lr": RATE_PER_GROUP, "0.001", H, "Learning rate at the start.";
    "lr_range_test_step_size": POSITIVE, "2000", H, "Steps in which the learning rate grows by min_lr times step_rate.";
    "lr_range_test_step_rate": NOT_NEGATIVE, "1.0", H, "How fast it grows.";
    "lr_range_test_staircase": Bool, "false", H, "It grows in one jump after each lr_range_test_step_size steps.";
    "last_batch_iteration": INT, "-1", refuse(FROM_START), "Where the schedule starts.";
};
