//! The options of routers and of experts' activations.

pub use crate::kernels::gate_up_activation::{ExpertActivation, GateUpOrder};

/// The order of a router's operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RouterOrder {
    /// A softmax over all experts, whose largest values are chosen: Mixtral, Qwen, OLMoE.
    SoftmaxThenTop {
        /// Whether the weights of a row are divided by their sum. Mixtral always does so; in other families this is
        /// the key `norm_topk_prob`.
        renormalize: bool,
    },
    /// The largest logits are chosen, and the weights are the softmax over these only: gpt-oss.
    TopThenSoftmax,
}

/// The options of a router.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RouterOptions {
    /// The number of experts that each row chooses.
    pub experts_per_row: usize,
    /// The order of operations.
    pub order: RouterOrder,
    /// Whether the weights remain in f32 in a 16-bit model, as in Mixtral. Otherwise, they are rounded to the logits'
    /// dtype.
    pub keep_f32: bool,
}
