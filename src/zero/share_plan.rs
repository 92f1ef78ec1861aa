//! How parameters are shared among ranks, and where a rank keeps its share.

use crate::layout::Placement;
use crate::offload::Offload;
use crate::optim::Grouping;
use candle_core::{DType, Device};
use std::sync::Arc;

/// How parameters are shared among ranks, and where a rank keeps its share.
#[derive(Clone)]
pub(crate) struct SharePlan {
    pub rank: usize,
    pub world_size: usize,
    pub placement: Placement,
    pub dtype: DType,
    pub device: Device,
    pub sub_group_size: usize,
    /// The dtype that gradients are accumulated in.
    pub grad_dtype: DType,
    /// Decides which states a parameter has.
    pub grouping: Arc<Grouping>,
    /// The files of offloaded state.
    pub offload: Option<Arc<Offload>>,
}
