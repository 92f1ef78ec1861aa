//! The mixtures of experts of the families of decoders, with their defaults for keys that files omit.

use super::mixture_config::MixtureNaming;

/// The mixtures of experts of one class in transformers.
#[derive(Debug, Clone, Copy)]
pub(super) struct MixtureFamily {
    pub naming: MixtureNaming,
    pub experts: usize,
    pub experts_per_token: usize,
    /// The key of an expert's intermediate width, and its default.
    pub expert_width: (&'static str, usize),
    pub weighting: ExpertWeighting,
    /// The default width of the shared expert, if there is one.
    pub shared_width: Option<usize>,
    /// Whether some blocks may be dense (`decoder_sparse_step`, `mlp_only_layers`).
    pub has_dense_blocks: bool,
    pub balance_coefficient: f64,
}

/// The weights of the chosen experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ExpertWeighting {
    /// The probabilities of the chosen experts, divided by their sum.
    Renormalized,
    /// The probabilities, divided by their sum if the key is true. Its default is false.
    Key(&'static str),
    /// A softmax over the logits of the chosen experts.
    OfChosenLogits,
}

/// The mixtures of Qwen 3.
pub(super) const QWEN3_MIXTURE: MixtureFamily = MixtureFamily {
    naming: MixtureNaming::Qwen,
    experts: 128,
    experts_per_token: 8,
    expert_width: ("moe_intermediate_size", 768),
    weighting: ExpertWeighting::Key("norm_topk_prob"),
    shared_width: None,
    has_dense_blocks: true,
    balance_coefficient: 0.001,
};

/// The mixtures of gpt-oss.
pub(super) const GPT_OSS_MIXTURE: MixtureFamily = MixtureFamily {
    naming: MixtureNaming::GptOss,
    experts: 128,
    experts_per_token: 4,
    expert_width: ("intermediate_size", 2880),
    weighting: ExpertWeighting::OfChosenLogits,
    shared_width: None,
    has_dense_blocks: false,
    balance_coefficient: 0.9,
};

/// The mixtures of Mixtral.
pub(super) const MIXTRAL_MIXTURE: MixtureFamily = MixtureFamily {
    naming: MixtureNaming::Mixtral,
    experts: 8,
    experts_per_token: 2,
    expert_width: ("intermediate_size", 14_336),
    weighting: ExpertWeighting::Renormalized,
    shared_width: None,
    has_dense_blocks: false,
    balance_coefficient: 0.001,
};

/// The mixtures of OLMoE.
pub(super) const OLMOE_MIXTURE: MixtureFamily = MixtureFamily {
    experts: 64,
    expert_width: ("intermediate_size", 2048),
    has_dense_blocks: false,
    balance_coefficient: 0.01,
    ..QWEN3_MIXTURE
};

/// The mixtures of Qwen 1.5 and 2.
pub(super) const QWEN2_MIXTURE: MixtureFamily = MixtureFamily {
    experts: 60,
    experts_per_token: 4,
    expert_width: ("moe_intermediate_size", 1408),
    shared_width: Some(5632),
    ..QWEN3_MIXTURE
};
