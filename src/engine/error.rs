//! Errors of training.

/// Errors of training.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// Engine methods out of order.
    #[error("{call} was called {when}; the order of a micro step is forward, backward, step")]
    OutOfOrder {
        /// The method.
        call: &'static str,
        /// The event before it.
        when: &'static str,
    },
    /// `backward` on something that is no scalar.
    #[error("backward needs a loss of one element, and got a tensor of shape {shape:?}; reduce it first (mean_all)")]
    LossShape {
        /// Its shape.
        shape: Vec<usize>,
    },
    /// NaN or infinity in the loss.
    #[error(
        "the loss is {loss} on rank {rank} in optimizer step {step} (micro step {micro_step}); lower the learning \
         rate, clip gradients (gradient_clipping), and look at the data of this step"
    )]
    NonFiniteLoss {
        /// The value.
        loss: f64,
        /// The rank.
        rank: usize,
        /// Optimizer step, from 0.
        step: u64,
        /// Micro step, from 0.
        micro_step: u64,
    },
    /// NaN or infinity in a gradient of f32 training.
    #[error(
        "{where_} in optimizer step {step}; the weights are unchanged; lower the learning rate, clip gradients \
         (gradient_clipping), and look at the data of this step"
    )]
    NonFiniteGradient {
        /// Parameter and rank as far as this rank can see.
        where_: String,
        /// Optimizer step, from 0.
        step: u64,
    },
    /// Gradients overflow although the dynamic loss scale is as small as it may be.
    #[error(
        "a gradient is not finite at optimizer step {step}, and the loss scale cannot fall below {scale} \
         (fp16.min_loss_scale): training diverges; lower the learning rate, look for NaN in data and loss, \
         train in bf16, or lower fp16.min_loss_scale"
    )]
    LossScaleAtMinimum {
        /// The scale, equal to its minimum.
        scale: f64,
        /// Optimizer steps so far, skipped ones and this one included.
        step: u64,
    },
    /// Parameters that the first backward did not reach.
    #[error(
        "{count} trainable parameters received no gradient in the first backward: {names}; either the model does not \
         use them, or an operation without backward cuts the graph before them: candle_nn's LayerNorm, RmsNorm, \
         softmax_last_dim, rope and sdpa do; use candle_zero::nn's layers, or layer_norm_slow, rms_norm_slow, \
         softmax(D::Minus1), rope_slow"
    )]
    NoGradient {
        /// How many.
        count: usize,
        /// The first few.
        names: String,
    },
    /// A unit that recomputes gave another output when backward ran it again.
    #[error(
        "unit {unit} gave another output when backward ran it again: gradients would be those of another function; \
         Candle's own randomness (candle_nn::Dropout, Tensor::rand) cannot be repeated, nor can draws on threads of \
         the model's own: use candle_zero::nn::Dropout, or let the unit keep its activations (checkpointed(false), \
         no activation_checkpointing section)"
    )]
    RecomputationDiffers {
        /// The unit's name.
        unit: String,
    },
    /// Ranks read different configurations, or have different schedules of their own.
    #[error(
        "rank {rank} reads another configuration than rank {other}; every rank must be given the same file or value, \
         and the same schedule"
    )]
    ConfigsDiffer {
        /// This rank.
        rank: usize,
        /// Another rank.
        other: usize,
    },
    /// Ranks built different models.
    #[error(
        "rank {rank} built a model that differs from rank {other}'s: {mine} against {theirs} (with a hash of names, \
         shapes and units); every rank must build the same model"
    )]
    ModelsDiffer {
        /// This rank.
        rank: usize,
        /// Another rank.
        other: usize,
        /// This rank's model.
        mine: String,
        /// The other's.
        theirs: String,
    },
    /// Ranks begin with different weights.
    #[error(
        "rank {rank} begins with other weights than rank {other}: another seed, or another init_from file; every rank \
         must be given the same (unlike DeepSpeed, rank 0's weights are not sent to the others)"
    )]
    WeightsDiffer {
        /// This rank.
        rank: usize,
        /// Another rank.
        other: usize,
    },
    /// An earlier error ended the job.
    #[error("the engine stopped after an earlier error: {0}")]
    Stopped(String),
}
