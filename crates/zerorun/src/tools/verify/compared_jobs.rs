//! The compared jobs, each of which is a row of the table that `zerorun verify` prints, and their configurations.

use super::compare::{FirstDifference, RankResults};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;

/// A job: where its model state is, or how a pipeline divides the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ComparedJob {
    /// All states are in memory, at this ZeRO stage.
    Stage(u8),
    /// Stage 3, with parameters and optimizer states in host memory.
    Cpu,
    /// Stage 3, with parameters and optimizer states in files.
    Nvme,
    /// One rank, which accumulates the gradients of all micro batches.
    OneRank,
    /// Each rank has the blocks of its pipeline stage; the schedule has this name.
    Pipeline(&'static str),
}

/// The rows of data-parallel ranks. The first one is the reference for the others.
const DATA_PARALLEL: [ComparedJob; 6] = [
    ComparedJob::Stage(0),
    ComparedJob::Stage(1),
    ComparedJob::Stage(2),
    ComparedJob::Stage(3),
    ComparedJob::Cpu,
    ComparedJob::Nvme,
];

/// The row that pipelines are compared with, and the rows of the pipelines.
const PIPELINES: [ComparedJob; 3] =
    [ComparedJob::OneRank, ComparedJob::Pipeline("1f1b"), ComparedJob::Pipeline("zero_bubble")];

/// Returns the rows for a number of ranks. `layers` is the number of layers that can be divided among the ranks of a
/// pipeline.
pub(super) fn job_rows(ranks: usize, layers: usize) -> Vec<ComparedJob> {
    let pipelines: &[ComparedJob] = if (2..=layers).contains(&ranks) { &PIPELINES } else { &[] };
    DATA_PARALLEL.iter().chain(pipelines).copied().collect()
}

/// The dtype of the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum VerifyDtype {
    F32,
    Bf16,
    Fp16,
}

impl VerifyDtype {
    pub const ALL: [Self; 3] = [Self::F32, Self::Bf16, Self::Fp16];

    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::Fp16 => "fp16",
        }
    }
}

impl ComparedJob {
    pub fn name(self) -> String {
        match self {
            Self::Stage(stage) => format!("stage {stage}"),
            Self::Cpu => "stage 3 + cpu".to_string(),
            Self::Nvme => "stage 3 + nvme".to_string(),
            Self::OneRank => "one rank".to_string(),
            Self::Pipeline(schedule) => format!("pipeline {schedule}"),
        }
    }

    /// Returns whether the following rows are compared with this one.
    pub fn is_reference(self) -> bool {
        matches!(self, Self::Stage(0) | Self::OneRank)
    }

    /// Returns the name of the row that this one is compared with.
    pub fn reference(self) -> &'static str {
        match self {
            Self::Stage(_) | Self::Cpu | Self::Nvme => "stage 0",
            Self::OneRank | Self::Pipeline(_) => "one rank",
        }
    }

    /// Returns the number of ranks of this row's job, if jobs have `ranks` ranks.
    pub fn ranks(self, ranks: usize) -> usize {
        match self {
            Self::OneRank => 1,
            _ => ranks,
        }
    }

    /// Returns the schedule of a pipeline.
    pub fn schedule(self) -> Option<&'static str> {
        match self {
            Self::Pipeline(schedule) => Some(schedule),
            _ => None,
        }
    }

    fn stage(self) -> u8 {
        match self {
            Self::Stage(stage) => stage,
            Self::Cpu | Self::Nvme => 3,
            Self::OneRank | Self::Pipeline(_) => 0,
        }
    }

    /// Returns the offload device, or `None` if nothing is offloaded.
    fn device(self) -> Option<&'static str> {
        match self {
            Self::Stage(_) | Self::OneRank | Self::Pipeline(_) => None,
            Self::Cpu => Some("cpu"),
            Self::Nvme => Some("nvme"),
        }
    }
}

/// Returns the configuration of a row, whose files are written to `folder`. The number of samples per step is the same
/// in all rows.
pub(super) fn row_config(row: ComparedJob, precision: VerifyDtype, ranks: usize, folder: &Path) -> Value {
    // Buckets and sub-groups are far smaller than the model, so that several of each are in use.
    let mut zero = json!({
        "stage": row.stage(), "reduce_bucket_size": 100_000, "allgather_bucket_size": 100_000,
        "sub_group_size": 100_000, "stage3_prefetch_bucket_size": 300_000,
        "stage3_param_persistence_threshold": 500, "stage3_max_reuse_distance": 0,
    });
    if let Some(device) = row.device() {
        let mut offload = json!({"device": device});
        if row == ComparedJob::Nvme {
            offload["nvme_path"] = json!(folder);
        }
        (zero["offload_optimizer"], zero["offload_param"]) = (offload.clone(), offload);
    }
    let mut config = json!({
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "zero_optimization": zero,
    });
    if row.reference() == ComparedJob::OneRank.name() {
        config["gradient_accumulation_steps"] = json!(2 * ranks);
    }
    if let Some(schedule) = row.schedule() {
        config["pipeline"] = json!({"schedule": schedule});
    }
    match precision {
        VerifyDtype::F32 => {}
        VerifyDtype::Bf16 => config["bf16"] = json!({"enabled": true}),
        // This scale causes no overflow. Stage 0 would handle an overflow by its own rule, as in DeepSpeed.
        VerifyDtype::Fp16 => config["fp16"] = json!({"enabled": true, "initial_scale_power": 8}),
    }
    config
}

/// The first line of the table.
pub(super) const HEAD: &str = "precision  states in             losses            parameters        ms/step  MiB \
                               memory  MiB files  bits of stage 0 or one rank";

/// Formats a row as a line.
pub(super) fn format_row(
    row: ComparedJob,
    precision: VerifyDtype,
    logs: &[RankResults],
    difference: Option<&FirstDifference>,
) -> String {
    let [losses, parameters] = fingerprints(logs);
    let mib = |bytes: fn(&RankResults) -> usize| max_bytes(logs, bytes) as f64 / f64::from(1 << 20);
    let verdict = match (row.is_reference(), difference) {
        (true, _) => String::new(),
        (_, None) => "same".to_string(),
        (_, Some(difference)) => format!("DIFFERENT at {difference}"),
    };
    let line = format!(
        "{:9}  {:20}  {losses}  {parameters}  {:7.1}  {:10.2}  {:9.2}  {verdict}",
        precision.name(),
        row.name(),
        slowest(logs),
        mib(|log| log.peak_bytes),
        mib(|log| log.file_bytes),
    );
    line.trim_end().to_string()
}

/// Returns a row as part of a JSON object.
pub(super) fn row_json(
    row: ComparedJob,
    precision: VerifyDtype,
    logs: &[RankResults],
    difference: Option<&FirstDifference>,
) -> Value {
    let [losses, parameters] = fingerprints(logs);
    json!({
        "precision": precision.name(), "stage": row.stage(), "offload": row.device(), "pipeline": row.schedule(), "num_ranks": logs.len(),
        "losses": losses, "parameters": parameters, "ms_per_step": slowest(logs),
        "peak_bytes": max_bytes(logs, |log| log.peak_bytes), "file_bytes": max_bytes(logs, |log| log.file_bytes),
        "difference": difference.map(FirstDifference::json),
    })
}

/// Returns fingerprints of all losses of all ranks, and of the final parameters.
fn fingerprints(logs: &[RankResults]) -> [String; 2] {
    let hash = |numbers: Vec<u64>| {
        let bytes: Vec<u8> = numbers.into_iter().flat_map(u64::to_le_bytes).collect();
        format!("{:016x}", twox_hash::XxHash3_64::oneshot(&bytes))
    };
    let losses = logs.iter().flat_map(|log| log.losses.iter().flatten().copied());
    // The ranks of a pipeline have different parameters.
    let hashes = logs.iter().flat_map(|log| log.names.iter().zip(log.parameters.last().into_iter().flatten()));
    let parameters = hashes.collect::<BTreeMap<_, _>>().into_values().copied();
    [hash(losses.collect()), hash(parameters.collect())]
}

/// Returns the largest number of bytes of any rank.
fn max_bytes(logs: &[RankResults], bytes: fn(&RankResults) -> usize) -> usize {
    logs.iter().map(bytes).max().unwrap_or(0)
}

fn slowest(logs: &[RankResults]) -> f64 {
    logs.iter().map(|log| log.ms_per_step).fold(0.0, f64::max)
}
