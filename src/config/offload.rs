//! `zero_optimization.offload_optimizer`, `zero_optimization.offload_param` and `aio`.

use super::walk::Walk;
use super::{Aio, OffloadOptimizer, OffloadParam, OffloadTo, OptimizerConfig};
use crate::layout::ZeroStage;

const OPTIMIZER: &str = "zero_optimization.offload_optimizer";
const PARAM: &str = "zero_optimization.offload_param";

/// Where master weights, moments and gradient shares live.
pub(super) fn optimizer(
    walk: &mut Walk<'_>,
    stage: ZeroStage,
    _optimizer: Option<&OptimizerConfig>,
) -> Option<OffloadOptimizer> {
    let to = to(walk, OPTIMIZER)?;
    (stage >= ZeroStage::One).then(|| OffloadOptimizer {
        to,
        buffer_count: count(walk, OPTIMIZER, "buffer_count"),
        pipeline_read: walk.bool(&format!("{OPTIMIZER}.pipeline_read")),
        pipeline_write: walk.bool(&format!("{OPTIMIZER}.pipeline_write")),
        ratio: walk.float(&format!("{OPTIMIZER}.ratio")),
    })
}

/// Where parameter shards live.
pub(super) fn param(walk: &mut Walk<'_>, stage: ZeroStage) -> Option<OffloadParam> {
    let to = to(walk, PARAM)?;
    (stage == ZeroStage::Three).then(|| OffloadParam {
        to,
        buffer_count: count(walk, PARAM, "buffer_count"),
        buffer_size: count(walk, PARAM, "buffer_size"),
        max_in_cpu: count(walk, PARAM, "max_in_cpu"),
    })
}

/// How files are accessed.
pub(super) fn aio(walk: &Walk<'_>) -> Aio {
    Aio {
        block_size: count(walk, "aio", "block_size"),
        queue_depth: count(walk, "aio", "queue_depth"),
        intra_op_parallelism: count(walk, "aio", "intra_op_parallelism"),
    }
}

fn to(walk: &Walk<'_>, section: &str) -> Option<OffloadTo> {
    match walk.str(&format!("{section}.device"))? {
        "cpu" => Some(OffloadTo::Cpu),
        "nvme" => {
            let path = walk.str(&format!("{section}.nvme_path")).unwrap_or_default();
            Some(OffloadTo::Nvme { path: path.into() })
        }
        _ => None,
    }
}

fn count(walk: &Walk<'_>, section: &str, key: &str) -> usize {
    usize::try_from(walk.count(&format!("{section}.{key}"))).unwrap_or(usize::MAX)
}
