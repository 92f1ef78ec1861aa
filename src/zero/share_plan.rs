//! How parameters are shared among ranks, and where a rank keeps its share.

use crate::config::Config;
use crate::layout::Placement;
use crate::optim::Grouping;
use candle_core::DType;
use std::sync::Arc;

/// How parameters are shared among ranks, and where a rank keeps its share.
#[derive(Clone)]
pub(crate) struct SharePlan {
    pub rank: usize,
    pub world_size: usize,
    pub placement: Placement,
    pub dtype: DType,
    pub sub_group_size: usize,
    /// The dtype that gradients are accumulated in.
    pub grad_dtype: DType,
    /// Decides which states a parameter has.
    pub grouping: Arc<Grouping>,
    /// What buffers of floats are cast to (`data_types.buffer_dtype`); `None`: nothing.
    pub buffer_dtype: Option<DType>,
    /// Elements of weights that stay in memory (`max_in_cpu`), where the others lie in files.
    pub weights_in_memory: Option<usize>,
    /// The part of the sub-groups whose optimizer state lies in files (`ratio`), where any does.
    pub states_in_files: Option<f64>,
}

impl SharePlan {
    /// As `config` says, for gradients that are accumulated in `grad_dtype`.
    pub fn new(config: &Config, grad_dtype: DType, rank: usize, grouping: Arc<Grouping>) -> Self {
        let zero = &config.zero;
        Self {
            rank,
            world_size: config.world_size,
            placement: zero.stage.placement(),
            dtype: config.precision.dtype(),
            buffer_dtype: config.buffer_dtype,
            sub_group_size: zero.sub_group_size,
            grad_dtype,
            grouping,
            weights_in_memory: zero.param_files().map(|files| files.max_in_cpu),
            states_in_files: zero.optimizer_files().map(|files| files.ratio),
        }
    }

    /// Some states lie in files.
    pub fn has_files(&self) -> bool {
        self.weights_in_memory.is_some() || self.states_in_files.is_some()
    }
}
