//! The values of a run that are available before its configuration is read.

/// The run's values for keys that are `"auto"`; see [`Config::load_for`](super::Config::load_for).
///
/// Any other key that is `"auto"` gets its default.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RunValues {
    /// The value of `train_micro_batch_size_per_gpu`, unless it follows from `train_batch_size`. Default 1.
    pub train_micro_batch_size_per_gpu: usize,
    /// The value of `gradient_accumulation_steps`, unless it follows from `train_batch_size`. Default 1.
    pub gradient_accumulation_steps: usize,
    /// The optimizer's `lr` and, if the file has no optimizer, the schedule's `warmup_max_lr`. Default 5e-5.
    pub lr: f64,
    /// The schedule's `warmup_num_steps`. `None` and 0 mean 1, a schedule's minimum (the Hugging Face Trainer's default
    /// is 0, which DeepSpeed refuses).
    pub warmup_num_steps: Option<u64>,
    /// The schedule's `total_num_steps`. If it is `None`, `"auto"` is an error for that key.
    pub total_num_steps: Option<u64>,
    /// The model's hidden size h: `reduce_bucket_size` becomes h * h, `stage3_prefetch_bucket_size` 0.9 * h * h, and
    /// `stage3_param_persistence_threshold` 10 * h. `None` means the keys' defaults.
    pub hidden_size: Option<u64>,
}

impl Default for RunValues {
    fn default() -> Self {
        Self {
            train_micro_batch_size_per_gpu: 1,
            gradient_accumulation_steps: 1,
            lr: 5e-5,
            warmup_num_steps: None,
            total_num_steps: None,
            hidden_size: None,
        }
    }
}
