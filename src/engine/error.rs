//! Errors of training.

use crate::util::counted;

/// Returns advice about non-finite numbers in optimizer step `step`.
fn nonfinite_advice(step: u64) -> &'static str {
    match step {
        0 => "look for non-finite or very large values in the initial weights and in the data of this step",
        _ => "lower the learning rate, clip gradients (gradient_clipping), and check the data of this step",
    }
}

/// Errors of training.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// Engine methods were called out of order.
    #[error("{call} was called {when}; the order of calls in a micro step is forward, backward, step")]
    OutOfOrder {
        /// The method.
        call: &'static str,
        /// The point at which it was called, such as "before backward".
        when: &'static str,
    },
    /// A call that is not possible in the middle of an accumulation: for example, checkpoints do not contain gradients,
    /// and batch sizes cannot change then.
    #[error(
        "{call} was called in the middle of an accumulation: after backward {backwards} of {accumulation_steps}, \
         before the step that updates the weights; the accumulated gradients would be lost; call {call} when \
         is_between_accumulations() is true"
    )]
    MidAccumulation {
        /// The method.
        call: &'static str,
        /// The number of backward passes in this accumulation so far.
        backwards: u64,
        /// The number of micro steps of this accumulation.
        accumulation_steps: u64,
    },
    /// The environment variable that sets the number of optimizer steps after which a job pauses is not a number.
    #[error(
        "environment variable CANDLE_ZERO_STOP_AT is `{found}`; give the number of optimizer steps after which the job \
         pauses, or unset it"
    )]
    PlannedStop {
        /// The value.
        found: String,
    },
    /// `no_sync` was called at a stage that shards gradients.
    #[error(
        "no_sync is possible at stages 0 and 1, but this engine is at stage {stage}, where a gradient is reduced as \
         soon as it is computed, and no rank has memory for complete gradients; remove no_sync, or use stage 1"
    )]
    NoSyncStage {
        /// The stage.
        stage: u8,
    },
    /// `no_sync` was called inside `no_sync`.
    #[error("no_sync was called inside no_sync; remove the inner call: nothing is reduced until the outer one ends")]
    NoSyncInside,
    /// A group of ranks spans several hosts.
    #[error(
        "zero_optimization.{key} is {found}, but one host has ranks {first} to {last}: each group of {found} ranks, \
         counted from rank 0, must be on one host; give a number that divides the number of ranks on each host"
    )]
    GroupAcrossHosts {
        /// The key of `zero_optimization` that defines the groups.
        key: &'static str,
        /// The number of ranks in a group.
        found: usize,
        /// The first rank of this host.
        first: usize,
        /// The last rank of this host.
        last: usize,
    },
    /// A batch size that cannot be divided among the ranks.
    #[error(
        "a train_batch_size of {train_batch_size} is not possible: it must be a positive multiple of \
         train_micro_batch_size_per_gpu x ranks = {micro_batch} x {ranks}; give such a number"
    )]
    BatchSize {
        /// The number of samples per optimizer step.
        train_batch_size: usize,
        /// The number of samples per rank and forward pass.
        micro_batch: usize,
        /// The number of ranks.
        ranks: usize,
    },
    /// A micro batch without samples, or with so many that the samples of a step cannot be counted.
    #[error(
        "a train_micro_batch_size_per_gpu of {micro_batch} is not possible with {} on {}; give a number from 1 to {}",
        counted(*steps, "accumulation step"), counted(*ranks, "rank"), usize::MAX / steps / ranks
    )]
    MicroBatchSize {
        /// The number of samples per rank and forward pass.
        micro_batch: usize,
        /// The number of micro batches per optimizer step.
        steps: usize,
        /// The number of ranks.
        ranks: usize,
    },
    /// A learning rate that is negative or not finite.
    #[error("a learning rate of {lr} is not possible; give a finite number of at least 0")]
    LearningRate {
        /// The rate.
        lr: f64,
    },
    /// The number of learning rates differs from the number of parameter groups.
    #[error(
        "found {} for {}; give one for each group, in get_lr's order",
        crate::util::counted(*found, "learning rate"),
        crate::util::counted(*groups, "parameter group")
    )]
    LearningRates {
        /// The number of learning rates given.
        found: usize,
        /// The number of parameter groups.
        groups: usize,
    },
    /// An attempt to set a gradient that does not exist.
    #[error(
        "parameter {name} has no gradient now: a parameter that is not frozen has one from backward until the step \
         that updates the weights"
    )]
    GradientAbsent {
        /// The parameter's name.
        name: String,
    },
    /// An attempt to set a rank's part of a parameter at stage 0, where parameters have no parts.
    #[error(
        "{call} sets a rank's part of a parameter, but at stage 0 nothing is divided among the ranks; call {full} \
         on all ranks with the same value, or use stage 1, 2 or 3"
    )]
    NotSharded {
        /// The method.
        call: &'static str,
        /// The method for full parameters.
        full: &'static str,
    },
    /// A rank that does not exist.
    #[error("{call} was asked to run on rank {rank}, but the ranks are 0 to {}; give one of them", ranks - 1)]
    NoSuchRank {
        /// The method.
        call: &'static str,
        /// The rank.
        rank: usize,
        /// The number of ranks.
        ranks: usize,
    },
    /// A collective call that failed on another rank.
    #[error("{call} changed nothing: {why}")]
    FailedOnOtherRank {
        /// The method.
        call: &'static str,
        /// The other rank and its reason.
        why: String,
    },
    /// Ranks passed different arguments to a call.
    #[error(
        "rank {rank} called {call} with different arguments from rank {other}; every rank must pass the same arguments"
    )]
    ArgumentsDiffer {
        /// The method.
        call: &'static str,
        /// This rank.
        rank: usize,
        /// Another rank.
        other: usize,
    },
    /// `backward` on a tensor that is not a scalar.
    #[error("backward needs a loss of one element but got a tensor of shape {shape:?}; reduce it first (mean_all)")]
    LossShape {
        /// The tensor's shape.
        shape: Vec<usize>,
    },
    /// `backward` on a loss that depends on no trained parameter.
    #[error(
        "the loss does not depend on any trained parameter: it was computed without one, detached (Tensor::detach, \
         eval), or computed only by operations without a backward pass; compute it from the output of engine.forward"
    )]
    LossReachesNothing,
    /// `backward` on the loss of an older forward pass.
    #[error(
        "the loss comes from an older forward pass, {}; run forward again, call backward on its output, and detach \
         everything that is kept from one step to the next",
        if *.is_old { "before the last update of the weights" } else { "whose backward pass has already run" }
    )]
    OldLoss {
        /// Whether the weights have changed since that forward pass.
        is_old: bool,
    },
    /// The gradient does not match the loss.
    #[error(
        "{subject}: a small change in the weights changes the loss by {by_difference:.4e}, but the gradient from \
         backward predicts {by_gradient:.4e}: training would not minimize this loss; the usual causes are: (1) an \
         operation without a backward pass, which cuts off a part of the graph (candle_nn's LayerNorm, RmsNorm, \
         softmax_last_dim, rope, sdpa): replace the operation with that of candle_zero::nn, or with layer_norm_slow, \
         rms_norm_slow, softmax(D::Minus1), rope_slow; freezing its parameters does not help; (2) an operation whose \
         backward pass is wrong in Candle 0.11 (conv1d, conv_transpose1d, max_pool2d, avg_pool2d whose windows overlap \
         or do not divide the image evenly, upsampling, scatter, scatter_add, matmul with a transposed left and a \
         broadcast right operand): use candle_zero::nn's; (3) a gradient inside the loss (gradient penalty), some \
         terms of which Candle drops unless CANDLE_GRAD_DO_NOT_DETACH=1 is set; (4) a detached part, or a term \
         computed from parameters outside engine.forward; `zerorun verify SCRIPT` lists the parameters whose gradient \
         is wrong; if a part is excluded on purpose, set \"gradient_check\": false, or \
         EngineBuilder::gradient_check(false)"
    )]
    WrongGradient {
        /// The parameters, if they are known.
        subject: String,
        /// The change in the loss along a direction, according to the gradient.
        by_gradient: f64,
        /// The change in the loss along the same direction, measured with forward passes.
        by_difference: f64,
    },
    /// The end of a run whose only purpose was to check gradients.
    #[error("the run ends here: its only purpose was to check gradients (zerorun verify)")]
    GradientsChecked,
    /// The loss is NaN or infinite.
    #[error("the loss is {loss} on rank {rank} in optimizer step {step} (micro step {micro_step}); {}", nonfinite_advice(*step))]
    NonFiniteLoss {
        /// The loss.
        loss: f64,
        /// The rank.
        rank: usize,
        /// The optimizer step, counted from 0.
        step: u64,
        /// The micro step, counted from 0.
        micro_step: u64,
    },
    /// A gradient is NaN or infinite in f32 training.
    #[error(
        "{location} in optimizer step {step}; the weights are unchanged; {}",
        nonfinite_advice(*step)
    )]
    NonFiniteGradient {
        /// The parameter and the rank, if this rank knows them; otherwise, the ranks whose gradients are not finite.
        location: String,
        /// The optimizer step, counted from 0.
        step: u64,
    },
    /// Gradients overflow although the dynamic loss scale is at its minimum.
    #[error(
        "a gradient is not finite at optimizer step {step}, and the loss scale cannot fall below {scale} \
         (fp16.min_loss_scale): training is diverging; lower the learning rate, look for NaN in the data and the loss, \
         train in bf16, or lower fp16.min_loss_scale"
    )]
    LossScaleAtMinimum {
        /// The loss scale, equal to its minimum.
        scale: f64,
        /// The number of optimizer steps so far, including skipped ones and this one.
        step: u64,
    },
    /// Gradients overflowed in many optimizer steps in a row with a constant loss scale.
    #[error(
        "gradients overflowed in {steps} optimizer steps in a row, and the loss scale stays at {scale} \
         (fp16.loss_scale): no weight will ever change; let the scale adapt (fp16.loss_scale 0), set a smaller one, or train in bf16"
    )]
    StaticLossScaleTooLarge {
        /// The loss scale.
        scale: f64,
        /// The number of consecutive skipped steps, including this one.
        steps: u32,
    },
    /// Signal handlers could not be installed.
    #[error("cannot listen for the signals that ask a program to stop: {source}")]
    Signals {
        /// The error of the operating system.
        #[source]
        source: std::io::Error,
    },
    /// No backward pass of the first optimizer step reached these parameters, on any rank.
    #[error(
        "{} received no gradient in the first optimizer step: {names}; either an operation \
         without a backward pass cuts the graph between them and the loss, as candle_nn's LayerNorm, RmsNorm, \
         softmax_last_dim, rope and sdpa do: replace the operation with a layer of candle_zero::nn, or with \
         layer_norm_slow, rms_norm_slow, softmax(D::Minus1), rope_slow (freezing these parameters would leave the \
         graph cut, and other parameters would be trained with an incomplete gradient); or the model does not use \
         them: if that is intended, set zero_optimization.ignore_unused_parameters to true, or call \
         EngineBuilder::ignore_unused_parameters",
        crate::util::counted(*count, "trainable parameter")
    )]
    NoGradient {
        /// The number of parameters.
        count: usize,
        /// The names of the first few parameters.
        names: String,
    },
    /// The experts of the model cannot be divided among ranks as requested.
    #[error("cannot divide experts among ranks: {why}")]
    ExpertParallel {
        /// The problem, and what to do.
        why: String,
    },
    /// The model or the ranks do not form the requested pipeline.
    #[error("cannot train in a pipeline: {why}")]
    Pipeline {
        /// The problem, and what to do.
        why: String,
    },
    /// A pipeline cannot continue a text, or cannot return an output.
    #[error("cannot run inference in a pipeline: {why}")]
    PipelineInference {
        /// The problem, and what to do.
        why: String,
    },
    /// The job, the configuration or a call does not fit local steps.
    #[error("cannot take local steps: {why}")]
    LocalSteps {
        /// The problem, and what to do.
        why: String,
    },
    /// A recomputed unit produced a different output in the backward pass.
    #[error(
        "unit {unit} gave a different output when the backward pass ran it again: gradients would be those of a \
         different function; Candle's random numbers (candle_nn::Dropout, Tensor::rand) cannot be repeated, nor can \
         draws on the model's own threads; use candle_zero::nn::Dropout, or let the unit keep its activations \
         (checkpointed(false), no activation_checkpointing section)"
    )]
    RecomputationDiffers {
        /// The unit's name.
        unit: String,
    },
    /// Ranks train different parameters.
    #[error(
        "rank {rank} and rank {other} train different parameters; every rank must call set_trainable with the same \
         rule"
    )]
    TrainableDiffers {
        /// This rank.
        rank: usize,
        /// Another rank.
        other: usize,
    },
    /// Ranks read different configurations, or have different custom components.
    #[error(
        "rank {rank} has a different configuration from rank {other}: {keys}; every rank must get the same file or \
         value, and the same schedule"
    )]
    ConfigsDiffer {
        /// This rank.
        rank: usize,
        /// Another rank.
        other: usize,
        /// The first keys that differ, with both values if these are short.
        keys: String,
    },
    /// Ranks have different data, or other content that must be the same.
    #[error(
        "the content of {mine} on rank {rank} is not that of {theirs} on rank {other}; every rank must read the same \
         data; copy the files to all hosts, or put them where all hosts can read them"
    )]
    DataDiffer {
        /// This rank.
        rank: usize,
        /// Another rank.
        other: usize,
        /// The name of the content on this rank.
        mine: String,
        /// The name of the content on the other rank.
        theirs: String,
    },
    /// Ranks built different models.
    #[error(
        "rank {rank} built a different model from rank {other}: {mine}, instead of {theirs} (the hash is of the names, \
         shapes and units); every rank must build the same model"
    )]
    ModelsDiffer {
        /// This rank.
        rank: usize,
        /// Another rank.
        other: usize,
        /// This rank's model.
        mine: String,
        /// The other rank's model.
        theirs: String,
    },
    /// Ranks ran different units, or had gradients of different parameters.
    #[error(
        "ranks have diverged: rank {rank} is in {here}, and rank {peer} is in {there}; every rank must run the same units \
         in the same order; run each unit on every rank, or mark as a leaf the unit that contains those among which \
         ranks choose (Unit::leaf, EngineBuilder::leaf_units, zero_optimization.leaf_module); if ranks use different \
         parameters of the same units, set zero_optimization.ignore_unused_parameters to true"
    )]
    UnitsDiverged {
        /// This rank.
        rank: usize,
        /// The unit and the collective that this rank is in.
        here: String,
        /// The other rank.
        peer: usize,
        /// The unit and the collective that the other rank is in.
        there: String,
    },
    /// Ranks start from different weights.
    #[error(
        "the initial weights of rank {rank} differ from those of rank {other}: a different seed or init_from file; every \
         rank must use the same seed and file (unlike in DeepSpeed, rank 0's weights are not sent to the others)"
    )]
    WeightsDiffer {
        /// This rank.
        rank: usize,
        /// Another rank.
        other: usize,
    },
    /// Ranks use different rounding for states that are kept in 16 bits.
    #[error(
        "rank {rank} rounds differently from rank {other}: one rounds to nearest and the other stochastically, or their \
         seeds differ; every rank must use the same EngineBuilder::stochastic_rounding and EngineBuilder::seed"
    )]
    RoundingDiffers {
        /// This rank.
        rank: usize,
        /// Another rank.
        other: usize,
    },
    /// A parameter or buffer starts with different values on different ranks.
    #[error(
        "{subject} starts with different values on rank {rank} than on rank {other}{hint}; initial values may depend \
         on the seed, the name and the shape, but not on the rank"
    )]
    InitialValuesDiffer {
        /// "parameter" or "buffer", and its name.
        subject: String,
        /// This rank.
        rank: usize,
        /// Another rank.
        other: usize,
        /// The initialization that this rank asked for, if it is known.
        hint: String,
    },
    /// A GPU ran out of memory.
    #[error(
        "the GPU of rank {rank} has no memory left; it holds this model's state ({held}), and activations, gradients \
         in progress or other programs use the rest; use a smaller train_micro_batch_size_per_gpu or units that \
         recompute, or, below stage 3, shard parameters (zero_optimization.stage 3)"
    )]
    DeviceMemory {
        /// This rank.
        rank: usize,
        /// The memory use recorded in the ledger, by kind.
        held: String,
    },
    /// A run in which every step was skipped.
    #[error(
        "nothing was learned: {} skipped because gradients were not finite; {}, or train in bf16",
        if *steps == 1 { "the only step was".into() } else { format!("all {steps} steps were") },
        remedy_of_overflow(*adapts)
    )]
    NothingLearned {
        /// The number of steps of the run.
        steps: u64,
        /// Whether the loss scale is dynamic.
        adapts: bool,
    },
    /// An earlier error has ended the job.
    #[error("the engine stopped after an earlier error: {0}")]
    Stopped(String),
}

/// Returns advice for runs in which all gradients overflow.
fn remedy_of_overflow(adapts: bool) -> &'static str {
    match adapts {
        true => {
            "the loss scale was still falling; train for more steps, or start with a smaller scale \
             (fp16.initial_scale_power)"
        }
        false => "let the loss scale adapt (fp16.loss_scale 0), or set a smaller scale",
    }
}

impl EngineError {
    /// Returns the error for a number of islands that does not divide the number of ranks.
    pub(crate) fn indivisible_islands(islands: usize, ranks: usize) -> Self {
        let why = format!(
            "local_steps.islands is {islands}, but {} cannot be divided into that many islands of equal size; use a \
             divisor of {ranks}, or start a different number of ranks",
            counted(ranks, "rank")
        );
        Self::LocalSteps { why }
    }
}
