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
    ConfigSection::new("optimizer.params", false, LARS).types(&["LARS"]),
    ConfigSection::new("optimizer.params", false, ADAFACTOR).types(&["Adafactor"]),
    ConfigSection::new("optimizer.params", false, SCHEDULE_FREE).types(&["AdamWScheduleFree"]),
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
    "type": Str, "-", H, "Adam, AdamW, SGD, Lion, Adagrad, Lamb, Muon, LARS, Adafactor, AdamWScheduleFree, or bitsandbytes' Adam8bit, AdamW8bit or Lion8bit, case-insensitive. Other optimizers of DeepSpeed and PyTorch are refused.";
    "params": Object, "{}", H, "The parameters of this type.";
    "legacy_fusion": Bool, "false", none("it applies only to CUDA kernels"), "Older fused wrapper.";
};

const PYTORCH: &str = "it applies only to PyTorch's kernels";

const ADAM: &[super::ConfigKey] = keys! {
    "lr": NOT_NEGATIVE, "0.001", H, "Learning rate.";
    "betas": Betas, "[0.9,0.999]", H, "Decay rates of the two moments, each at least 0 and below 1.";
    "eps": NOT_NEGATIVE, "1e-8", H, "Added to the square root of the second moment.";
    "weight_decay": NOT_NEGATIVE, "0.0", H, "Weight decay.";
    "bias_correction": Bool, "true", H, "Divide the moments by 1 - beta^t.";
    "adam_w_mode": Bool, "true", H, "Decoupled weight decay; false with Adam: added to the gradient. AdamW always decouples it.";
    "torch_adam": Bool, "false", H, "PyTorch's Adam: the same arithmetic; with decoupled weight decay, the default weight_decay is 0.01.";
    "amsgrad": Bool, "false", refuse("DeepSpeed's Adam refuses it too"), "Use the largest second moment so far.";
    "fp32_optimizer_states": Bool, "true", refuse("moments are f32; bf16.bf16_optimizer_states stores them in bf16, and Adam8bit and similar optimizers in eight bits"), "Moments in f32.";
    "fused": Bool, "null", none(PYTORCH), "PyTorch: fused kernel.";
    "foreach": Bool, "null", none(PYTORCH), "PyTorch: update many tensors in one call.";
};

const SGD: &[super::ConfigKey] = keys! {
    "lr": NOT_NEGATIVE, "0.001", H, "Learning rate.";
    "momentum": NOT_NEGATIVE, "0.0", H, "Momentum; 0: no buffer.";
    "dampening": FLOAT, "0.0", H, "The gradient is multiplied by 1 - dampening before it is added to the momentum.";
    "weight_decay": NOT_NEGATIVE, "0.0", H, "Added to the gradient.";
    "nesterov": Bool, "false", H, "Nesterov momentum; needs momentum > 0 and dampening 0.";
    "maximize": Bool, "false", refuse("the loss is always minimized"), "Maximize the loss.";
    "fused": Bool, "null", none(PYTORCH), "PyTorch: fused kernel.";
    "foreach": Bool, "null", none(PYTORCH), "PyTorch: update many tensors in one call.";
    "differentiable": Bool, "false", refuse("the step is not differentiable"), "PyTorch: make the step differentiable.";
};

const LION: &[super::ConfigKey] = keys! {
    "lr": NOT_NEGATIVE, "0.001", H, "Learning rate: each step changes every weight by this much.";
    "betas": Betas, "[0.9,0.999]", H, "Weight of the momentum in the update direction, and decay rate of the momentum, each at least 0 and below 1.";
    "weight_decay": NOT_NEGATIVE, "0.0", H, "Decoupled weight decay.";
};

const ADAGRAD: &[super::ConfigKey] = keys! {
    "lr": NOT_NEGATIVE, "0.01", H, "Learning rate.";
    "eps": NOT_NEGATIVE, "1e-10", H, "Added to the square root of the sum of squares.";
    "weight_decay": NOT_NEGATIVE, "0.0", H, "Added to the gradient.";
    "lr_decay": NOT_NEGATIVE, "0.0", refuse("the scheduler section changes the learning rate"), "PyTorch: decay of the learning rate over the steps.";
    "initial_accumulator_value": NOT_NEGATIVE, "0.0", refuse("states start at zero"), "PyTorch: initial value of the sum of squares.";
    "amsgrad": Bool, "false", refuse("Adagrad has no such variant"), "Use the largest second moment so far.";
    "maximize": Bool, "false", refuse("the loss is always minimized"), "Maximize the loss.";
    "fused": Bool, "null", none(PYTORCH), "PyTorch: fused kernel.";
    "foreach": Bool, "null", none(PYTORCH), "PyTorch: update many tensors in one call.";
    "differentiable": Bool, "false", refuse("the step is not differentiable"), "PyTorch: make the step differentiable.";
};

const LAMB: &[super::ConfigKey] = keys! {
    "lr": NOT_NEGATIVE, "0.001", H, "Learning rate, multiplied by each parameter's trust ratio.";
    "betas": Betas, "[0.9,0.999]", H, "Decay rates of the two moments, each at least 0 and below 1.";
    "eps": NOT_NEGATIVE, "1e-8", H, "Added to the square root of the second moment.";
    "eps_inside_sqrt": Bool, "false", H, "Add eps to the second moment rather than to its square root.";
    "weight_decay": NOT_NEGATIVE, "0.0", H, "Weight decay; it is part of the update whose norm enters the trust ratio.";
    "bias_correction": Bool, "true", H, "Divide the moments by 1 - beta^t, outside the trust ratio.";
    "max_coeff": NOT_NEGATIVE, "10.0", H, "Largest trust ratio (norm of a parameter divided by the norm of its update).";
    "min_coeff": NOT_NEGATIVE, "0.01", H, "Smallest trust ratio; at most max_coeff.";
    "amsgrad": Bool, "false", refuse("DeepSpeed's Lamb refuses it too"), "Use the largest second moment so far.";
};

const MUON: &[super::ConfigKey] = keys! {
    "lr": NOT_NEGATIVE, "null", H, "Learning rate of Muon and AdamW unless muon_lr or adam_lr is set.";
    "muon_lr": NOT_NEGATIVE, "null", H, "Learning rate of matrices; null: lr, or 0.02 if lr is not set. Embeddings and the output projection (embed or lm_head in the name) are not trained as matrices.";
    "adam_lr": NOT_NEGATIVE, "null", H, "Learning rate of all other parameters, which AdamW trains; null: lr, or 0.0003 if lr is not set.";
    "momentum": SHARE, "0.95", H, "Nesterov momentum of matrices; below 1.";
    "weight_decay": NOT_NEGATIVE, "0.0", H, "Decoupled weight decay of Muon and AdamW.";
    "ns_method": ConfigValueKind::OneOf(&["gram", "standard"]), "\"gram\"", H, "Method of orthogonalizing matrices: gram is Newton-Schulz on the Gram matrix in f32, standard is Newton-Schulz on the matrix itself in bf16.";
    "betas": Betas, "[0.9,0.95]", H, "AdamW: decay rates of the two moments, each at least 0 and below 1.";
    "eps": NOT_NEGATIVE, "1e-10", H, "AdamW: added to the square root of the second moment.";
    "adam_w_mode": Bool, "true", H, "AdamW: decoupled weight decay; false: added to the gradient.";
    "torch_adam": Bool, "false", H, "PyTorch's Adam for AdamW: the same arithmetic.";
    "fp32_optimizer_states": Bool, "true", refuse("moments are f32; bf16.bf16_optimizer_states stores them in bf16, and Adam8bit and similar optimizers in eight bits"), "Moments in f32.";
    "foreach": Bool, "null", none(PYTORCH), "PyTorch: update many tensors in one call.";
    "per_head_muon": Bool, "false", refuse("complete matrices are orthogonalized"), "Orthogonalize each attention head separately.";
};

const LARS: &[super::ConfigKey] = keys! {
    "lr": NOT_NEGATIVE, "0.1", H, "Learning rate, multiplied by each parameter's trust ratio.";
    "momentum": SHARE, "0.9", H, "Momentum of the updates; below 1.";
    "weight_decay": NOT_NEGATIVE, "0.0", H, "Weight decay, added to the gradient; it also enters the denominator of the trust ratio.";
    "trust_coefficient": NOT_NEGATIVE, "0.001", H, "Factor of the trust ratio: trust_coefficient x norm of the parameter / (norm of the gradient + weight_decay x norm of the parameter + eps).";
    "eps": NOT_NEGATIVE, "1e-8", H, "Added to the denominator of the trust ratio.";
};

const ADAFACTOR: &[super::ConfigKey] = keys! {
    "lr": NOT_NEGATIVE, "null", H, "Learning rate; needs relative_step false. null: 0.001 with relative_step false.";
    "relative_step": Bool, "null", H, "Use the smaller of 0.01 and 1 / sqrt(step) as the learning rate; no scheduler is then allowed. null: true if neither lr nor a scheduler is given.";
    "warmup_init": Bool, "false", H, "Use 0.000001 x step in place of the 0.01 of relative_step; needs relative_step.";
    "scale_parameter": Bool, "true", H, "Multiply the learning rate by the root mean square of each parameter, at least eps[1].";
    "eps": Betas, "[1e-30,0.001]", H, "Two numbers: the first is added to the squared gradient; the second is the minimum of a parameter's root mean square in scale_parameter.";
    "clip_threshold": FLOAT, "1.0", H, "Root mean square above which an update is scaled down; above 0.";
    "decay_rate": FLOAT, "-0.8", H, "Exponent in the decay rate of the second moment, 1 - step^decay_rate; at least -1 and below 0.";
    "beta1": SHARE, "null", H, "Decay rate of a first moment, below 1; null: no first moment.";
    "weight_decay": NOT_NEGATIVE, "0.0", H, "Decoupled weight decay, multiplied by the learning rate, including the parameter's scale.";
};

const SCHEDULE_FREE: &[super::ConfigKey] = keys! {
    "lr": NOT_NEGATIVE, "0.0025", H, "Learning rate. There is no schedule: averaging takes its place, so a scheduler section is refused.";
    "betas": Betas, "[0.9,0.999]", H, "Share of the average in the trained weights, and decay rate of the second moment, each at least 0 and below 1.";
    "eps": NOT_NEGATIVE, "1e-8", H, "Added to the square root of the second moment.";
    "weight_decay": NOT_NEGATIVE, "0.0", H, "Decoupled weight decay of the trained weights.";
    "warmup_steps": COUNT, "0", H, "Number of steps over which the learning rate grows linearly to lr.";
    "r": NOT_NEGATIVE, "0.0", H, "A step's weight in the average is proportional to this power of its number.";
    "weight_lr_power": NOT_NEGATIVE, "2.0", H, "During the warm-up, a step's weight in the average is also proportional to this power of its learning rate.";
    "foreach": Bool, "null", none(PYTORCH), "PyTorch: update many tensors in one call.";
};

const ADAM_8BIT: &[super::ConfigKey] = keys! {
    "lr": NOT_NEGATIVE, "0.001", H, "Learning rate.";
    "betas": Betas, "[0.9,0.999]", H, "Decay rates of the two moments, each at least 0 and below 1.";
    "eps": NOT_NEGATIVE, "1e-8", H, "Added to the square root of the second moment.";
    "weight_decay": NOT_NEGATIVE, "0.0", H, "Decoupled weight decay.";
    "amsgrad": Bool, "false", refuse("bitsandbytes refuses it too"), "Use the largest second moment so far.";
    "min_8bit_size": COUNT, "4096", H, "Parameters with fewer elements have f32 moments.";
    "block_wise": Bool, "true", refuse("eight-bit moments have a scale for each block of 256"), "A scale for each block of 256 elements.";
    "percentile_clipping": INT, "100", refuse("use gradient_clipping at the top level"), "Clip by a percentile of recent gradient norms; 100: off.";
    "optim_bits": INT, "32", none("the type implies 8 bits"), "Bits of the moments.";
    "args": Any, "null", none("there are no other settings"), "bitsandbytes: an object with the same settings.";
    "is_paged": Bool, "false", none("offload_optimizer determines the location of moments"), "bitsandbytes: moments in paged memory.";
};

const ADAMW_8BIT: &[super::ConfigKey] = keys! {
    "lr": NOT_NEGATIVE, "0.001", H, "Learning rate.";
    "betas": Betas, "[0.9,0.999]", H, "Decay rates of the two moments, each at least 0 and below 1.";
    "eps": NOT_NEGATIVE, "1e-8", H, "Added to the square root of the second moment.";
    "weight_decay": NOT_NEGATIVE, "0.01", H, "Decoupled weight decay.";
    "amsgrad": Bool, "false", refuse("bitsandbytes refuses it too"), "Use the largest second moment so far.";
    "min_8bit_size": COUNT, "4096", H, "Parameters with fewer elements have f32 moments.";
    "block_wise": Bool, "true", refuse("eight-bit moments have a scale for each block of 256"), "A scale for each block of 256 elements.";
    "percentile_clipping": INT, "100", refuse("use gradient_clipping at the top level"), "Clip by a percentile of recent gradient norms; 100: off.";
    "optim_bits": INT, "32", none("the type implies 8 bits"), "Bits of the moments.";
    "args": Any, "null", none("there are no other settings"), "bitsandbytes: an object with the same settings.";
    "is_paged": Bool, "false", none("offload_optimizer determines the location of moments"), "bitsandbytes: moments in paged memory.";
};

const LION_8BIT: &[super::ConfigKey] = keys! {
    "lr": NOT_NEGATIVE, "0.0001", H, "Learning rate: each step changes every weight by this much.";
    "betas": Betas, "[0.9,0.99]", H, "Weight of the momentum in the update direction, and decay rate of the momentum, each at least 0 and below 1.";
    "weight_decay": NOT_NEGATIVE, "0.0", H, "Decoupled weight decay.";
    "min_8bit_size": COUNT, "4096", H, "Parameters with fewer elements have f32 moments.";
    "block_wise": Bool, "true", refuse("eight-bit moments have a scale for each block of 256"), "A scale for each block of 256 elements.";
    "percentile_clipping": INT, "100", refuse("use gradient_clipping at the top level"), "Clip by a percentile of recent gradient norms; 100: off.";
    "optim_bits": INT, "32", none("the type implies 8 bits"), "Bits of the moments.";
    "args": Any, "null", none("there are no other settings"), "bitsandbytes: an object with the same settings.";
    "is_paged": Bool, "false", none("offload_optimizer determines the location of moments"), "bitsandbytes: moments in paged memory.";
};

const SCHEDULER: &[super::ConfigKey] = keys! {
    "type": Str, "-", H, "WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle or LRRangeTest, case-sensitive. PyTorch's schedules are refused.";
    "params": Object, "{}", H, "The parameters of this type.";
};

const FROM_START: &str = "schedules always start at step 0";

const WARMUP_LR: &[super::ConfigKey] = keys! {
    "warmup_min_lr": RATE_PER_GROUP, "0.0", H, "Learning rate at the start.";
    "warmup_max_lr": RATE_PER_GROUP, "null", H, "Learning rate after the warm-up; null: the optimizer's.";
    "warmup_num_steps": POSITIVE, "1000", H, "Steps of the warm-up.";
    "warmup_type": Str, "\"log\"", H, "Shape of the warm-up: log or linear; any other word is treated as log, as in DeepSpeed, and noted.";
    "last_batch_iteration": INT, "-1", refuse(FROM_START), "Start of the schedule.";
};

const WARMUP_DECAY_LR: &[super::ConfigKey] = keys! {
    "total_num_steps": POSITIVE, "-", H, "Required. After this many steps, the learning rate has fallen to warmup_min_lr.";
    "warmup_min_lr": RATE_PER_GROUP, "0.0", H, "Learning rate at the start and at the end.";
    "warmup_max_lr": RATE_PER_GROUP, "0.001", H, "Learning rate after the warm-up.";
    "warmup_num_steps": POSITIVE, "1000", H, "Steps of the warm-up.";
    "warmup_type": Str, "\"log\"", H, "Shape of the warm-up: log or linear; any other word is treated as log, as in DeepSpeed, and noted.";
    "decay_power": FLOAT, "1.0", H, "Not in DeepSpeed. After the warm-up, the difference between the rate and warmup_min_lr is proportional to this power of the share of steps that remain; the power must be above 0. 1: linear decay, 2: the decay in the LARS paper.";
    "last_batch_iteration": INT, "-1", refuse(FROM_START), "Start of the schedule.";
};

const WARMUP_COSINE_LR: &[super::ConfigKey] = keys! {
    "total_num_steps": POSITIVE, "-", H, "Required. Number of steps of the complete schedule.";
    "warmup_min_ratio": NOT_NEGATIVE, "0.0", H, "Learning rate at the start of the warm-up, as a share of the optimizer's lr; in the first step, the rate is 0, as in DeepSpeed.";
    "warmup_num_steps": POSITIVE, "1000", H, "Steps of the warm-up.";
    "cos_min_ratio": NOT_NEGATIVE, "0.0001", H, "Learning rate at the end, as a share of the optimizer's lr.";
    "warmup_type": Str, "\"log\"", H, "Shape of the warm-up: log or linear; any other word is treated as log, as in DeepSpeed, and noted.";
    "last_batch_iteration": INT, "-1", refuse(FROM_START), "Start of the schedule.";
};

const ONE_CYCLE: &[super::ConfigKey] = keys! {
    "cycle_min_lr": RATE_PER_GROUP, "-", H, "Required. Learning rate at both ends of the cycle.";
    "cycle_max_lr": RATE_PER_GROUP, "-", H, "Required. Learning rate at the peak of the cycle.";
    "decay_lr_rate": NOT_NEGATIVE, "0.0", H, "After the cycle, the learning rate is cycle_min_lr / (1 + decay_lr_rate x k), where k is the number of steps since then, divided by decay_step_size.";
    "cycle_first_step_size": NOT_NEGATIVE, "2000.0", H, "Number of steps over which the learning rate rises; above 0.";
    "cycle_second_step_size": NOT_NEGATIVE, "null", H, "Number of steps over which the learning rate falls; null: the same number as for the rise.";
    "cycle_first_stair_count": COUNT, "0", H, "Number of stairs in the rising half of the cycle; 0: a smooth rise.";
    "cycle_second_stair_count": COUNT, "null", H, "Number of stairs in the falling half; null: as many as in the rising half.";
    "decay_step_size": NOT_NEGATIVE, "0.0", H, "Number of steps per unit of decay; 0: no decay.";
    "cycle_momentum": Bool, "true", H, "beta1 falls while the learning rate rises, and rises while the learning rate falls; beta2 is 0.99. An optimizer without betas, such as SGD, keeps its momentum.";
    "cycle_min_mom": SHARE, "0.8", H, "beta1 at the peak of the cycle and, as in DeepSpeed, in the first step; below 1.";
    "cycle_max_mom": SHARE, "0.9", H, "beta1 at both ends of the cycle, except in the first step; below 1.";
    "decay_mom_rate": FLOAT, "0.0", H, "After the cycle, beta1 is cycle_max_mom x (1 + decay_mom_rate x k), with k as for decay_lr_rate. If it reaches 1, training stops with an error.";
    "last_batch_iteration": INT, "-1", refuse(FROM_START), "Start of the schedule.";
};

const LR_RANGE_TEST: &[super::ConfigKey] = keys! {
    "lr_range_test_min_lr": RATE_PER_GROUP, "0.001", H, "Learning rate at the start.";
    "lr_range_test_step_size": POSITIVE, "2000", H, "Number of steps over which the learning rate grows by min_lr times step_rate.";
    "lr_range_test_step_rate": NOT_NEGATIVE, "1.0", H, "Growth rate of the learning rate.";
    "lr_range_test_staircase": Bool, "false", H, "The learning rate grows in one jump after every lr_range_test_step_size steps.";
    "last_batch_iteration": INT, "-1", refuse(FROM_START), "Start of the schedule.";
};
