//! Values that a run knows before it reads its configuration.

/// The values of `"auto"` where the run decides; see [`Config::load_for`](super::Config::load_for).
///
/// Any other key that says `"auto"` has its default.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RunValues {
    /// `train_micro_batch_size_per_gpu`, unless it follows from `train_batch_size`. Default 1.
    pub train_micro_batch_size_per_gpu: usize,
    /// `gradient_accumulation_steps`, unless it follows from `train_batch_size`. Default 1.
    pub gradient_accumulation_steps: usize,
    /// `lr` of the optimizer. Default 5e-5.
    pub lr: f64,
    /// `warmup_num_steps` of the schedule; `None` or 0: 1, the least that a schedule has (the Hugging Face trainer's
    /// default is 0, which DeepSpeed refuses).
    pub warmup_num_steps: Option<u64>,
    /// `total_num_steps` of the schedule; `None`: `"auto"` is an error there.
    pub total_num_steps: Option<u64>,
    /// Hidden size h of the model: `reduce_bucket_size` is h * h, `stage3_prefetch_bucket_size` 0.9 * h * h,
    /// `stage3_param_persistence_threshold` 10 * h; `None`: the keys' defaults.
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
