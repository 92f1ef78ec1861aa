//! The losses and parameters of each rank during training, and the first difference between two jobs.

use candle_zero::files::replace_unsynced;
use candle_zero::memory::MemoryReport;
use candle_zero::{Error, Result};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

/// The losses, parameters, time and memory of one rank.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct RankResults {
    /// The names of the parameters.
    pub names: Vec<String>,
    /// The bits of the losses, as f64: for each step, those of its micro steps; in a pipeline, their mean.
    pub losses: Vec<Vec<u64>>,
    /// For each step, a hash of each complete parameter after the step.
    pub parameters: Vec<Vec<u64>>,
    /// The median time of a step.
    pub ms_per_step: f64,
    /// The peak of parameters, gradients, master weights and optimizer states in memory, counted from allocations.
    pub peak_bytes: usize,
    /// The bytes of model state in files.
    pub file_bytes: usize,
}

/// The first difference between two jobs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct FirstDifference {
    /// The step, counted from 1.
    step: usize,
    rank: usize,
    value: DifferingValue,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum DifferingValue {
    /// A loss. The micro step is counted from 1 within the step.
    Loss { micro_step: usize },
    /// The parameter with this name, after the step.
    Parameter(String),
    /// The number of losses or parameters. It differs if the two jobs did not train in the same way.
    Amount,
}

impl fmt::Display for FirstDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { step, rank, value } = self;
        write!(f, "step {step}, rank {rank}: ")?;
        match value {
            DifferingValue::Loss { micro_step } => write!(f, "the loss of micro step {micro_step}"),
            DifferingValue::Parameter(name) => write!(f, "parameter {name}"),
            DifferingValue::Amount => write!(f, "the number of losses or parameters"),
        }
    }
}

impl FirstDifference {
    pub fn json(&self) -> Value {
        let (micro_step, parameter) = match &self.value {
            DifferingValue::Loss { micro_step } => (Some(micro_step), None),
            DifferingValue::Parameter(name) => (None, Some(name)),
            DifferingValue::Amount => (None, None),
        };
        json!({"step": self.step, "rank": self.rank, "micro_step": micro_step, "parameter": parameter})
    }
}

/// Returns the first difference of `other` from `reference`, step by step. Within a step, losses come before
/// parameters.
pub(super) fn first_difference(reference: &[RankResults], other: &[RankResults]) -> Option<FirstDifference> {
    let steps = reference.iter().chain(other).map(|log| log.losses.len().max(log.parameters.len())).max()?;
    (0..steps).find_map(|step| {
        let ranks = 0..reference.len().max(other.len());
        let difference = |rank: usize, value| FirstDifference { step: step + 1, rank, value };
        let pair = |rank: usize| reference.get(rank).zip(other.get(rank));
        let losses = ranks.clone().find_map(|rank| {
            let Some((a, b)) = pair(rank) else { return Some(difference(rank, DifferingValue::Amount)) };
            let found = first_unequal(a.losses.get(step), b.losses.get(step))?;
            Some(difference(rank, found.map_or(DifferingValue::Amount, |i| DifferingValue::Loss { micro_step: i + 1 })))
        });
        losses.or_else(|| {
            ranks.clone().find_map(|rank| {
                let (a, b) = pair(rank)?;
                let found = first_unequal(a.parameters.get(step), b.parameters.get(step))?;
                let name = found.and_then(|i| a.names.get(i));
                let value = name.map_or(DifferingValue::Amount, |name| DifferingValue::Parameter(name.clone()));
                Some(difference(rank, value))
            })
        })
    })
}

/// Returns the index of the first unequal element: `None` if both are equal, `Some(None)` if their lengths differ or
/// only one exists.
fn first_unequal<T: PartialEq>(a: Option<&Vec<T>>, b: Option<&Vec<T>>) -> Option<Option<usize>> {
    match (a, b) {
        (Some(a), Some(b)) if a.len() == b.len() => a.iter().zip(b).position(|(a, b)| a != b).map(Some),
        (None, None) => None,
        _ => Some(None),
    }
}

/// Returns the first difference of a pipeline from `reference`, the results of one rank. Each rank of the pipeline has
/// some of the parameters. If two stages share a weight, the last one trains it, and the first one has a copy in the
/// dtype of the model. The copy is not compared.
pub(super) fn first_difference_of_pipeline(
    reference: &RankResults,
    pipeline: &[RankResults],
) -> Option<FirstDifference> {
    let has_later = |at: usize, name: &String| pipeline[at + 1..].iter().any(|rank| rank.names.contains(name));
    let stage_results = pipeline.iter().enumerate().map(|(at, rank)| {
        let names: Vec<String> = rank.names.iter().filter(|name| !has_later(at, name)).cloned().collect();
        rank.with_parameters(&names)
    });
    let stage_results: Vec<RankResults> = stage_results.collect();
    let means = reference.with_mean_losses();
    let expected: Vec<RankResults> = stage_results.iter().map(|rank| means.with_parameters(&rank.names)).collect();
    let missing = reference.names.iter().find(|name| !pipeline.iter().any(|rank| rank.names.contains(name)));
    let missing =
        missing.map(|name| FirstDifference { step: 1, rank: 0, value: DifferingValue::Parameter(name.clone()) });
    missing.or_else(|| first_difference(&expected, &stage_results))
}

impl RankResults {
    /// Returns these results with the mean of each step's losses in place of the losses.
    fn with_mean_losses(&self) -> Self {
        let mean = |losses: &Vec<u64>| {
            let sum: f64 = losses.iter().map(|bits| f64::from_bits(*bits)).sum();
            vec![(sum / losses.len() as f64).to_bits()]
        };
        Self { losses: self.losses.iter().map(mean).collect(), ..self.clone() }
    }

    /// Returns these results with only the parameters called `names`, in this order.
    fn with_parameters(&self, names: &[String]) -> Self {
        let select = |parameters: &Vec<u64>| {
            let hashes: BTreeMap<_, _> = self.names.iter().zip(parameters).collect();
            names.iter().filter_map(|name| hashes.get(name).map(|hash| **hash)).collect()
        };
        Self { names: names.to_vec(), parameters: self.parameters.iter().map(select).collect(), ..self.clone() }
    }

    /// Adds the median time of a step, and the memory that the engine counted.
    pub fn complete(&mut self, mut times: Vec<f64>, memory: &MemoryReport) {
        times.sort_by(f64::total_cmp);
        self.ms_per_step = times[times.len() / 2];
        self.peak_bytes = memory.model_state_peak();
        self.file_bytes = memory.rows.iter().map(|row| row.file.peak).sum();
    }

    pub fn write(&self, path: &Path) -> Result<()> {
        let write = || replace_unsynced(path, "rank-", &serde_json::to_vec(self)?);
        write().map_err(|source| Error::Io { action: "write", path: path.into(), source })
    }

    pub fn read(path: &Path) -> Result<Self> {
        let read = || Ok(serde_json::from_slice(&std::fs::read(path)?)?);
        read().map_err(|source| Error::Io { action: "read", path: path.into(), source })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// Returns the results of two ranks: three steps of two micro steps, with two parameters.
    fn job() -> Vec<RankResults> {
        let log = |rank: u64| RankResults {
            names: vec!["wte".to_string(), "h.0".to_string()],
            losses: (0..3).map(|step| vec![100 * rank + step, 7]).collect(),
            parameters: (0..3).map(|step| vec![step, step + 50]).collect(),
            ..RankResults::default()
        };
        vec![log(0), log(1)]
    }

    /// Returns the message about the first difference that `change` makes to a job, if there is one.
    fn message(change: impl FnOnce(&mut Vec<RankResults>)) -> Option<String> {
        let mut other = job();
        change(&mut other);
        first_difference(&job(), &other).map(|difference| difference.to_string())
    }

    #[test]
    fn the_same_bits_are_no_difference_whatever_time_and_memory_say() {
        assert_eq!(message(|_| {}), None);
        assert_eq!(message(|job| (job[1].ms_per_step, job[0].peak_bytes) = (9.0, 9)), None);
    }

    #[test]
    fn the_first_difference_is_named() {
        let bit = |job: &mut Vec<RankResults>| job[1].parameters[1][1] ^= 1;
        assert_eq!(message(bit).unwrap(), "step 2, rank 1: parameter h.0");
        let loss = |job: &mut Vec<RankResults>| {
            bit(job);
            job[0].losses[2][1] ^= 1;
            job[1].losses[2][0] ^= 1;
        };
        assert_eq!(message(loss).unwrap(), "step 2, rank 1: parameter h.0", "earlier steps first");
        let both = |job: &mut Vec<RankResults>| {
            bit(job);
            job[1].losses[1][0] ^= 1;
        };
        assert_eq!(message(both).unwrap(), "step 2, rank 1: the loss of micro step 1", "a loss precedes the update");
        let other = first_difference(&job(), &{
            let mut job = job();
            bit(&mut job);
            job
        })
        .unwrap();
        assert_eq!(other.json(), json!({"step": 2, "rank": 1, "micro_step": null, "parameter": "h.0"}));
    }

    #[test]
    fn another_training_is_a_difference() {
        let amount = "the number of losses or parameters";
        assert_eq!(message(|job| job.truncate(1)).unwrap(), format!("step 1, rank 1: {amount}"));
        assert_eq!(message(|job| job[0].losses.truncate(2)).unwrap(), format!("step 3, rank 0: {amount}"));
        assert_eq!(message(|job| job[0].parameters[0].push(1)).unwrap(), format!("step 1, rank 0: {amount}"));
        assert_eq!(first_difference(&[], &[]), None);
    }

    #[test]
    fn a_pipeline_is_compared_with_one_rank_parameter_by_parameter() {
        let one = RankResults { losses: vec![vec![1.0f64.to_bits(), 4.0f64.to_bits()]; 3], ..job().remove(0) };
        let rank = |at: usize| RankResults {
            names: vec![one.names[at].clone()],
            losses: vec![vec![2.5f64.to_bits()]; 3],
            parameters: one.parameters.iter().map(|hashes| vec![hashes[at]]).collect(),
            ..RankResults::default()
        };
        let mut pipeline = [rank(0), rank(1), rank(0)];
        // The copy of a shared weight on the first stage is not compared.
        pipeline[0].parameters[1][0] ^= 1;
        let message = |pipeline: &[RankResults]| {
            first_difference_of_pipeline(&one, pipeline).map(|difference| difference.to_string())
        };
        assert_eq!(message(&pipeline), None);
        assert_eq!(message(&pipeline[2..]).unwrap(), "step 1, rank 0: parameter h.0");
        pipeline[1].parameters[2][0] ^= 1;
        assert_eq!(message(&pipeline).unwrap(), "step 3, rank 1: parameter h.0");
        pipeline[1].losses[1][0] ^= 1;
        assert_eq!(message(&pipeline).unwrap(), "step 2, rank 1: the loss of micro step 1");
    }

    #[test]
    fn what_a_rank_saw_is_read_as_it_was_written() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rank.json");
        let mut log = job().remove(1);
        (log.parameters[2][0], log.ms_per_step) = (u64::MAX, 0.1);
        log.write(&path).unwrap();
        assert_eq!(RankResults::read(&path).unwrap(), log);
        assert!(RankResults::read(&folder.path().join("none")).is_err());
    }
}
