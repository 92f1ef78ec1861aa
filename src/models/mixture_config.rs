//! The mixture of experts of a decoder's sparse blocks.

use super::config_checks::{MAX_BLOCKS, invalid_field, require_sizes};
use crate::Result;
use crate::nn::{ExpertActivation, RouterOptions};

/// A mixture of experts, which takes the place of the MLP in sparse blocks: a router chooses a few of many MLPs for
/// each token. All sparse blocks of a model have the same sizes.
#[derive(Debug, Clone, PartialEq)]
pub struct MixtureConfig {
    /// The naming and storage of the parameters.
    pub naming: MixtureNaming,
    /// The number of experts.
    pub experts: usize,
    /// The number of experts that the router chooses for each token, and how it weights them.
    pub router: RouterOptions,
    /// The width of an expert's intermediate layer.
    pub expert_width: usize,
    /// The gated activation of the experts.
    pub gate: ExpertActivation,
    /// The width of the intermediate layer of an MLP through which every token passes, if there is one (Qwen2-MoE). Its
    /// output is multiplied by a gate of one logit per token.
    pub shared_width: Option<usize>,
    /// The factor of the load-balancing loss in the training loss, or `None` if the training loss does not contain it.
    pub balance_coefficient: Option<f64>,
}

/// The naming and storage of the parameters of a mixture in Hugging Face's files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum MixtureNaming {
    /// Names such as `block_sparse_moe.experts.0.w1.weight`, one tensor for each expert and projection.
    Mixtral,
    /// Names such as `mlp.experts.0.gate_proj.weight`, one tensor for each expert and projection (Qwen, OLMoE).
    Qwen,
    /// Names such as `mlp.experts.gate_up_proj`, one tensor `[experts, in, out]` for all experts, with biases. The
    /// columns of gate and up alternate.
    GptOss,
}

/// The maximum number of experts in a block.
pub(super) const MAX_EXPERTS: usize = 1 << 14;

impl MixtureNaming {
    /// Returns the path of the module with the router and the experts, within a block.
    pub(super) fn module(self) -> &'static str {
        match self {
            Self::Mixtral => "block_sparse_moe",
            Self::Qwen | Self::GptOss => "mlp",
        }
    }

    /// Returns the name of the router in the module.
    pub(super) fn router(self) -> &'static str {
        match self {
            Self::Mixtral | Self::Qwen => "gate",
            Self::GptOss => "router",
        }
    }

    /// Returns whether router and experts have biases.
    pub(super) fn has_biases(self) -> bool {
        self == Self::GptOss
    }

    /// Returns the names of an expert's projections to gate and up, and from their product to the output, if each
    /// expert has its own tensors.
    pub(super) fn expert_tensor_names(self) -> Option<[&'static str; 3]> {
        match self {
            Self::Mixtral => Some(["w1", "w3", "w2"]),
            Self::Qwen => Some(["gate_proj", "up_proj", "down_proj"]),
            Self::GptOss => None,
        }
    }
}

impl MixtureConfig {
    /// Checks that the values describe a valid mixture for a model of `blocks` blocks.
    pub(super) fn validate(&self, blocks: usize) -> Result<()> {
        require_sizes(&[
            ("num_experts", self.experts),
            ("num_experts_per_tok", self.router.experts_per_row),
            ("moe_intermediate_size", self.expert_width),
            ("shared_expert_intermediate_size", self.shared_width.unwrap_or(1)),
        ])?;
        if self.experts > MAX_EXPERTS || self.experts * blocks > 64 * MAX_BLOCKS {
            let allowed = format!("at most {MAX_EXPERTS}, and at most {} in all blocks", 64 * MAX_BLOCKS);
            return Err(invalid_field("num_experts", self.experts, &allowed));
        }
        if self.router.experts_per_row > self.experts {
            let allowed = format!("at most the number of experts ({})", self.experts);
            return Err(invalid_field("num_experts_per_tok", self.router.experts_per_row, &allowed));
        }
        if let ExpertActivation::Clamped { alpha, limit } = self.gate {
            let positive = |x: f32| x > 0.0 && x.is_finite();
            for (key, value) in [("swiglu_alpha", alpha), ("swiglu_limit", limit)] {
                if !positive(value) {
                    return Err(invalid_field(key, value, "a positive finite number"));
                }
            }
        }
        match self.balance_coefficient {
            Some(factor) if !(factor >= 0.0 && factor.is_finite()) => {
                Err(invalid_field("router_aux_loss_coef", factor, "a finite number of at least 0"))
            }
            _ => Ok(()),
        }
    }

    /// Returns the width of an MLP that has as many intermediate values per token as a sparse block: those of the
    /// chosen experts and of the shared expert, and the outputs of the experts before they are added. The outputs are
    /// divided by 3, because a gated MLP keeps three values per unit of its width. `hidden` is the width of the model.
    pub(super) fn intermediate(&self, hidden: usize) -> usize {
        let k = self.router.experts_per_row;
        k * self.expert_width + self.shared_width.unwrap_or(0) + (k * hidden).div_ceil(3)
    }

    /// Returns the number of elements of the parameters that a sparse block has in place of an MLP. `hidden` is the
    /// width of the model.
    pub(super) fn elements(&self, hidden: u128) -> u128 {
        let wide = |size: usize| size as u128;
        let (experts, width) = (wide(self.experts), wide(self.expert_width));
        let (mut router, mut expert) = (hidden, (3 * width).saturating_mul(hidden));
        if self.naming.has_biases() {
            router += 1;
            expert = expert.saturating_add(2 * width + hidden);
        }
        let shared =
            self.shared_width.map_or(0, |width| (3 * wide(width)).saturating_mul(hidden).saturating_add(hidden));
        experts.saturating_mul(router.saturating_add(expert)).saturating_add(shared)
    }
}
