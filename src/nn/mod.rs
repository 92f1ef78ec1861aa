//! Layers with a correct backward pass, for training.
//!
//! Candle's own fast layers cannot be trained. In Candle 0.11, the following go through ops **without a backward pass
//! and cut the graph silently**, so everything before them gets no gradient, and no error reports it:
//!
//! - `candle_nn::ops::{softmax_last_dim, rms_norm, layer_norm, sdpa}`;
//! - `candle_nn::rotary_emb::{rope, rope_i, rope_thd}`;
//! - the modules built on them: `candle_nn::LayerNorm` (contiguous input, with bias and mean) and `candle_nn::RmsNorm`,
//!   and hence most models of candle-transformers.
//!
//! Others have a backward pass that fails or is wrong, always or for some settings: `conv1d`, `conv_transpose1d`,
//! pooling, upsampling, `scatter`, `scatter_add`, and `matmul` of some views. The versions in this module are correct,
//! with the same names and settings (docs/vision.md lists them).
//!
//! In candle-nn, `Linear`, `Embedding`, `ops::{softmax, log_softmax, layer_norm_slow, rms_norm_slow}`,
//! `rotary_emb::{rope_slow, rope_i_slow}` and `loss::cross_entropy` are differentiable. On the CPU, they sum 16-bit
//! numbers in 16 bits.
//!
//! The layers in this module work on f32, bf16 and f16 storage with f32 arithmetic inside; each result is rounded once.
//! In a 16-bit model, their parameters may also be f32 (`data_types.keep_in_fp32_modules`,
//! [`ParameterGroup::keep_f32`](crate::optim::ParameterGroup::keep_f32)), while activations between layers remain in 16
//! bits. Layers of candle-nn reject operands of different formats; cast their inputs and results. The layers in this
//! module return the same bits for any number of threads, and a row of a result does not depend on the number of rows.
//! On the CPU, each layer is one op with a hand-written backward pass, and so are most layers with CUDA; elsewhere, the
//! same functions are composed of Candle's differentiable ops ([`composed`]).
//!
//! [`ExpertMlp`] is the MLP of a mixture of experts, with its router ([`route`]), adapters ([`ExpertAdapter`]) and
//! auxiliary loss ([`load_balancing_loss`]).
//!
//! Gradients between these layers, and those of an engine's parameters, do not pass through Candle's graph, which would
//! first add each of them to zeros: the graph only determines when the backward pass of a layer runs (`graph` in the
//! sources). Parameter values are read at the time of use, so they may be released between the forward and the
//! backward pass. An engine's backward pass frees the values that a layer kept as soon as the layer has been
//! differentiated.

mod activation;
mod add;
mod attention;
mod attention_options;
mod autocast;
mod batch_norm;
mod clamp;
mod columns;
pub mod composed;
mod convolution;
mod cross_entropy;
mod dpo;
mod dropout;
mod embedding;
pub(crate) mod error;
mod experts;
mod f32_weight_linear;
pub mod frequencies;
mod in_f32;
mod key_value_cache;
mod linear;
mod linear_options;
mod linear_product;
mod lora;
mod lora_config;
#[doc(hidden)]
pub mod low_rank_update;
mod matmul;
mod norm;
mod norm_options;
#[cfg(feature = "cuda")]
mod on_gpu;
mod pooling;
mod projection;
mod rotary;
mod row_positions;
mod saved_inputs;
mod scatter;
mod sequences;
mod upsampling;

pub use activation::{exact_gelu_gated, gelu, gelu_gated, gelu_tanh, relu_squared, scale, scale_in_f32, silu, swiglu};
pub use add::add;
pub use attention::{attention, attention_with_sinks, causal_attention, fused_attention, grouped_attention};
pub use attention_options::AttentionOptions;
pub use batch_norm::{SyncBatchNorm, sync_batch_norm};
pub use clamp::clamp;
pub use columns::columns;
pub(crate) use columns::join_columns;
pub use convolution::{Conv1d, ConvTranspose1d, conv_transpose1d, conv_transpose1d_no_bias, conv1d, conv1d_no_bias};
pub(crate) use cross_entropy::MAX_LOGITS_BYTES;
pub use cross_entropy::{
    LossOptions, cross_entropy, cross_entropy_with, linear_cross_entropy, linear_cross_entropy_with,
    linear_log_probabilities,
};
pub use dpo::{DpoLoss, Rewards, dpo_loss};
pub use dropout::{Dropout, dropout};
pub use embedding::{Embedding, embedding, embedding_in};
pub(crate) use experts::GradientCheckedRouter;
pub use experts::{
    ExpertActivation, ExpertAdapter, ExpertAssignment, ExpertMlp, ExpertProjection, ExpertTensors, GateUpOrder,
    RouterOptions, RouterOrder, Routing, SyncBalanceLoss, add_gated, combine_experts, expert_rows, gated_activation,
    load_balancing_loss, route,
};
pub use key_value_cache::KeyValueCache;
pub use linear::{Conv1D, Linear, linear, linear_with_epilogue};
#[doc(inline)]
pub use linear_options::{Activation, LinearEpilogue, WeightLayout};
pub use lora::without_adapters;
#[doc(hidden)]
pub use lora_config::adapted_module;
pub use lora_config::{LoraConfig, LoraTargets, is_adapter};
pub use matmul::matmul;
pub use norm::{LayerNorm, RmsNorm, layer_norm, rms_norm, rms_norm_with};
pub use norm_options::{LayerNormOptions, RmsNormOptions};
pub use pooling::{
    Pooling, avg_pool2d, avg_pool2d_with, avg_pool2d_with_stride, max_pool2d, max_pool2d_with, max_pool2d_with_stride,
};
pub use projection::{Projection, ProjectionOptions};
pub use rotary::{FrequenciesOfLength, Rotary, RotaryLayout, RotaryPairs};
pub use scatter::{scatter, scatter_add};
pub use sequences::Sequences;
pub use upsampling::{upsample_bilinear2d, upsample_nearest1d, upsample_nearest2d};

/// Returns whether this thread is running a model for an engine that is training: true in the engine's forward pass,
/// and when a unit runs again in the backward pass; false in the engine's `eval`, and without an engine. Use this
/// function for layers that behave differently in training and in evaluation, inside modules whose own `forward` has no
/// such argument: `norm.forward_t(x, in_training())`.
pub fn in_training() -> bool {
    crate::graph::rng_position().in_training
}

/// Returns an init hint: a normal distribution with mean 0.
pub(crate) fn normal(std: f64) -> candle_nn::Init {
    candle_nn::Init::Randn { mean: 0.0, stdev: std }
}

/// Converts a user error to Candle's error type, which models and layers return. Candle's backtrace is left out,
/// because the message describes the problem with the input, not a position in the program.
#[doc(hidden)]
pub fn refuse(error: crate::Error) -> candle_core::Error {
    candle_core::Error::Wrapped(Box::new(error))
}
