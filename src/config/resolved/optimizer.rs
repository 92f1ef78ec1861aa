//! `optimizer`: the optimizers and their parameters.

/// `optimizer` with its parameters.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum OptimizerConfig {
    /// `Adam` and `AdamW`.
    Adam(AdamConfig),
    /// `SGD`.
    Sgd(SgdConfig),
    /// `Lion`.
    Lion(LionConfig),
    /// `Adagrad`.
    Adagrad(AdagradConfig),
    /// `Lamb`.
    Lamb(LambConfig),
    /// `Muon`.
    Muon(MuonConfig),
    /// `LARS`.
    Lars(LarsConfig),
    /// `Adafactor`.
    Adafactor(AdafactorConfig),
    /// `AdamWScheduleFree`.
    ScheduleFree(ScheduleFreeConfig),
    /// `Adam8bit`, `AdamW8bit` and `Lion8bit`.
    EightBit(EightBitConfig),
}

impl OptimizerConfig {
    /// Returns whether the optimizer has betas that a schedule can change.
    pub(crate) fn has_betas(&self) -> bool {
        match self {
            Self::Adam(_) | Self::Lion(_) | Self::Lamb(_) | Self::ScheduleFree(_) => true,
            Self::EightBit(_) => true,
            Self::Sgd(_) | Self::Adagrad(_) | Self::Muon(_) | Self::Lars(_) | Self::Adafactor(_) => false,
        }
    }
}

/// The parameters of Adam and AdamW.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamConfig {
    /// The learning rate. Default 1e-3.
    pub lr: f64,
    /// The decay rates of the two moments. Default 0.9, 0.999.
    pub betas: (f64, f64),
    /// The term added to the denominator. Default 1e-8.
    pub eps: f64,
    /// The weight decay. Default 0; with `torch_adam`, 0.01 if the decay is decoupled.
    pub weight_decay: f64,
    /// Whether to divide the moments by 1 - beta^t. Default true.
    pub bias_correction: bool,
    /// Whether the decay is decoupled (AdamW, and Adam unless `adam_w_mode` is false) instead of an L2 term added to
    /// the gradient.
    pub decoupled: bool,
}

/// The parameters of SGD.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SgdConfig {
    /// The learning rate. Default 1e-3.
    pub lr: f64,
    /// The momentum. Default 0: no momentum buffer.
    pub momentum: f64,
    /// The dampening of the momentum. Default 0.
    pub dampening: f64,
    /// The weight decay, added to the gradient. Default 0.
    pub weight_decay: f64,
    /// Whether to use Nesterov momentum. Default false.
    pub nesterov: bool,
}

/// The parameters of Lion.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LionConfig {
    /// The learning rate. Default 1e-3.
    pub lr: f64,
    /// The momentum's share in the update direction, and its decay rate. Default 0.9, 0.999.
    pub betas: (f64, f64),
    /// The decoupled weight decay. Default 0.
    pub weight_decay: f64,
}

/// The parameters of Adagrad.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdagradConfig {
    /// The learning rate. Default 1e-2.
    pub lr: f64,
    /// The term added to the denominator. Default 1e-10.
    pub eps: f64,
    /// The weight decay, added to the gradient. Default 0.
    pub weight_decay: f64,
}

/// The parameters of LAMB.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LambConfig {
    /// The learning rate. Default 1e-3.
    pub lr: f64,
    /// The decay rates of the two moments. Default 0.9, 0.999.
    pub betas: (f64, f64),
    /// The term added to the denominator. Default 1e-8.
    pub eps: f64,
    /// The decoupled weight decay. Default 0.
    pub weight_decay: f64,
    /// Whether to divide the moments by 1 - beta^t. Default true.
    pub bias_correction: bool,
    /// Whether to add `eps` to the second moment rather than to its square root. Default false.
    pub eps_inside_sqrt: bool,
    /// The maximum trust ratio. Default 10.
    pub max_coeff: f64,
    /// The minimum trust ratio. Default 0.01.
    pub min_coeff: f64,
}

/// The parameters of Muon.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MuonConfig {
    /// `muon_lr`, the learning rate of matrices. Default: `lr`, or 0.02 if `lr` is not set.
    pub lr: f64,
    /// The momentum. Default 0.95.
    pub momentum: f64,
    /// The decoupled weight decay. Default 0.
    pub weight_decay: f64,
    /// The orthogonalization method. Default gram.
    pub ns_method: NsMethod,
    /// The optimizer of all other parameters, including embeddings and the output projection. Its `lr` is `adam_lr`
    /// (default: the common `lr`, or 3e-4 if that is not set). Its default `betas` are 0.9, 0.95, and its default `eps`
    /// is 1e-10.
    pub adam: AdamConfig,
}

/// The parameters of LARS.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LarsConfig {
    /// The learning rate. Default 0.1.
    pub lr: f64,
    /// The momentum. Default 0.9.
    pub momentum: f64,
    /// The weight decay, added to the gradient. Default 0.
    pub weight_decay: f64,
    /// The factor of every trust ratio. Default 0.001.
    pub trust_coefficient: f64,
    /// The term added to the denominator of the trust ratio. Default 1e-8.
    pub eps: f64,
}

/// The parameters of Adafactor.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdafactorConfig {
    /// The learning rate. `None`: relative steps (`relative_step`).
    pub lr: Option<f64>,
    /// Whether the relative learning rate grows from 0 during the first 10,000 steps. Default false.
    pub warmup_init: bool,
    /// The term added to the squared gradient, and the minimum scale of a parameter. Default 1e-30, 1e-3.
    pub eps: (f64, f64),
    /// The root mean square above which an update is scaled down. Default 1.
    pub clip_threshold: f64,
    /// The exponent of the decay rate of the second moment, 1 - step^`decay_rate`. Default -0.8.
    pub decay_rate: f64,
    /// The decay rate of the first moment. Default `None`: no first moment.
    pub beta1: Option<f64>,
    /// The decoupled weight decay. Default 0.
    pub weight_decay: f64,
    /// Whether the learning rate is multiplied by the root mean square of the parameter. Default true.
    pub scale_parameter: bool,
}

/// The parameters of AdamWScheduleFree.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ScheduleFreeConfig {
    /// The learning rate. Default 0.0025.
    pub lr: f64,
    /// The weight of the average in the weights that are trained, and the decay rate of the second moment. Default 0.9,
    /// 0.999.
    pub betas: (f64, f64),
    /// The term added to the denominator. Default 1e-8.
    pub eps: f64,
    /// The decoupled weight decay. Default 0.
    pub weight_decay: f64,
    /// The number of steps during which the learning rate grows. Default 0.
    pub warmup_steps: u64,
    /// The exponent of the step's number in the step's weight in the average. Default 0.
    pub r: f64,
    /// The exponent of the learning rate in the step's weight in the average. Default 2.
    pub weight_lr_power: f64,
}

/// An optimizer with 8-bit states, and its parameters.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum EightBit {
    /// `Adam8bit`. Its decay is decoupled, like that of `AdamW8bit`, as in bitsandbytes.
    Adam(AdamConfig),
    /// `AdamW8bit`. Its default `weight_decay` is 0.01.
    AdamW(AdamConfig),
    /// `Lion8bit`. Its default `lr` is 1e-4, and its default `betas` are 0.9, 0.99.
    Lion(LionConfig),
}

impl EightBit {
    /// Returns bitsandbytes' name.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Adam(_) => "Adam8bit",
            Self::AdamW(_) => "AdamW8bit",
            Self::Lion(_) => "Lion8bit",
        }
    }
}

/// The parameters of Adam8bit, AdamW8bit and Lion8bit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EightBitConfig {
    /// The optimizer.
    pub kind: EightBit,
    /// Parameters with fewer elements keep f32 states. Default 4096.
    pub min_8bit_size: usize,
}

/// The orthogonalization method of Muon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum NsMethod {
    /// Newton-Schulz on the Gram matrix, in f32.
    Gram,
    /// Plain Newton-Schulz, in bf16.
    Standard,
}
