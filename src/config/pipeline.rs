//! Reads `pipeline`: how many ranks form a pipeline, and how layers are divided among its stages.

use super::ConfigRule;
use super::walk::ConfigWalk;
use crate::pipeline::{PartitionMethod, PipelineScheduleKind};

/// The `pipeline` section.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct PipelineConfig {
    /// `stages`: the number of ranks along the pipeline; `None`: all ranks.
    pub stages: Option<usize>,
    /// `partition`: how layers are divided among stages.
    pub partition: PartitionMethod,
    /// `schedule`: the order of forward and backward passes.
    pub schedule: PipelineScheduleKind,
    /// `chunks`: the number of chunks of the model per rank. Default 1.
    pub chunks: usize,
}

impl Default for PipelineConfig {
    fn default() -> Self {
        Self {
            stages: None,
            partition: PartitionMethod::default(),
            schedule: PipelineScheduleKind::default(),
            chunks: 1,
        }
    }
}

const PARTITION: &str = "pipeline.partition";

/// Reads the section. Problems are collected in `walk`.
pub(super) fn resolve(walk: &mut ConfigWalk<'_>) -> PipelineConfig {
    let stages = walk.int("pipeline.stages").and_then(|stages| usize::try_from(stages).ok());
    let name = walk.str("pipeline.schedule").unwrap_or_default();
    let schedule = PipelineScheduleKind::ALL.into_iter().find(|kind| kind.name() == name).unwrap_or_default();
    let chunks = walk.int("pipeline.chunks").and_then(|chunks| usize::try_from(chunks).ok()).unwrap_or(1);
    let partition = match walk.str("pipeline.partition").unwrap_or("best").to_string().as_str() {
        "best" | "parameters" => PartitionMethod::Parameters,
        "uniform" => PartitionMethod::Uniform,
        "time" => PartitionMethod::Time,
        other => match other.strip_prefix("type:").filter(|expression| !expression.is_empty()) {
            Some(expression) => {
                if let Err(error) = PartitionMethod::kind_pattern(expression) {
                    let why = error.to_string();
                    let why = why.lines().last().unwrap_or_default().trim_start_matches("error: ");
                    let message = format!(
                        "expected a regular expression after type:, found {expression:?}: {why}; put a backslash before \
                         each special character that is meant literally"
                    );
                    walk.problem(ConfigRule::Range, PARTITION, walk.position(PARTITION), message);
                }
                PartitionMethod::LayerKind(expression.to_string())
            }
            None => {
                let message = format!("expected best, parameters, uniform, time or type:REGEX, found {other:?}");
                walk.problem(ConfigRule::Range, PARTITION, walk.position(PARTITION), message);
                PartitionMethod::default()
            }
        },
    };
    PipelineConfig { stages, partition, schedule, chunks }
}
