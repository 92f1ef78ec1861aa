//! The identity of a run: everything that determines its result. It is stored in the run's checkpoints. A run with
//! different settings may resume from them only if the user allows it; otherwise, it is refused with a list of the
//! differences.
//!
//! The identity excludes everything that, by design, does not change the result: the number of ranks, stage and
//! offload, the micro batch, where and how often checkpoints are saved, and, without local steps, how often the model
//! is validated.

use crate::error::FinetuneError;
use crate::error::Result;
use candle_zero::checkpoint;
use candle_zero::engine::InitialValues;
use rayon::prelude::*;
use serde_json::Value;
use std::collections::BTreeMap;
use std::hash::Hasher as _;
use std::path::{Path, PathBuf};
use twox_hash::XxHash3_64;

/// The key of the identity in a checkpoint's client state.
pub(crate) const KEY: &str = "identity";

/// The settings of a run by name, with fingerprints of inputs that are too large to store.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct RunIdentity(BTreeMap<String, Value>);

/// The run recorded in the newest checkpoint in a folder.
#[derive(Debug)]
pub(super) struct SavedRun {
    /// The checkpoint.
    pub path: PathBuf,
    /// The number of steps completed.
    pub steps: u64,
    /// The identity, or `None` in checkpoints of earlier versions.
    identity: Option<RunIdentity>,
}

impl SavedRun {
    /// Reads the newest checkpoint in `dir`, if there is one. Problems with a checkpoint are reported when it is
    /// loaded.
    pub fn newest(dir: &Path) -> Option<Self> {
        let (_, path, manifest) = checkpoint::newest_island_checkpoint(dir)?;
        Some(Self::of(path, manifest.global_steps, &manifest.client_state))
    }

    /// Reads the run from a checkpoint's client state.
    pub fn of(path: PathBuf, steps: u64, client_state: &Value) -> Self {
        Self { path, steps, identity: RunIdentity::of_json(&client_state[KEY]) }
    }

    /// Returns the number of rows in a step, across all ranks.
    pub fn batch(&self) -> Option<usize> {
        self.identity.as_ref()?.0.get("batch")?.as_u64().and_then(|rows| usize::try_from(rows).ok())
    }

    /// Checks that the run `now`, of `total` steps, may continue from this checkpoint. Returns a message if it
    /// continues with different settings because `anyway` allows it, or if the settings could not be compared.
    ///
    /// # Errors
    /// [`FinetuneError::CheckpointBeyondEnd`], [`FinetuneError::OtherRun`].
    pub fn check(&self, now: &RunIdentity, total: u64, anyway: bool) -> Result<Option<String>> {
        let checkpoint = || self.path.clone();
        if self.steps > total {
            let (checkpoint, steps) = (checkpoint(), self.steps);
            return Err(FinetuneError::CheckpointBeyondEnd { checkpoint, steps, total }.into());
        }
        let Some(saved) = &self.identity else {
            return Ok(Some(format!(
                "{} was saved by an earlier version, without the settings of its run: they could not be compared with \
                 those of this run",
                self.path.display()
            )));
        };
        let differences = saved.differences(now);
        match (differences.is_empty(), anyway) {
            (true, _) => Ok(None),
            (false, true) => Ok(Some(format!(
                "{} was saved by a run with different settings, and this run continues from it as requested: {}",
                self.path.display(),
                differences.join("; ")
            ))),
            (false, false) => {
                let differences = differences.join("; ");
                Err(FinetuneError::OtherRun { checkpoint: checkpoint(), differences }.into())
            }
        }
    }
}

impl RunIdentity {
    /// Creates an identity with these settings.
    pub fn new(settings: BTreeMap<String, Value>) -> Self {
        Self(settings)
    }

    /// Returns the identity in the form stored in checkpoints.
    pub fn to_json(&self) -> Value {
        Value::Object(self.0.clone().into_iter().collect())
    }

    fn of_json(found: &Value) -> Option<Self> {
        Some(Self(found.as_object()?.clone().into_iter().collect()))
    }

    /// Returns the settings in which the run `now` differs, each with the saved and the new value.
    fn differences(&self, now: &Self) -> Vec<String> {
        let mut names: Vec<&String> = self.0.keys().chain(now.0.keys()).collect();
        names.sort_unstable();
        names.dedup();
        let value = |identity: &Self, name: &String| identity.0.get(name).cloned().unwrap_or(Value::Null);
        let differ = names.into_iter().map(|name| (name, value(self, name), value(now, name)));
        let text = |value: &Value| match value {
            Value::Null => "none".to_owned(),
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        differ.filter(|(_, a, b)| a != b).map(|(name, a, b)| format!("{name}: {} -> {}", text(&a), text(&b))).collect()
    }
}

/// Returns a number that changes with any weight. All weights are read, piece by piece on all cores. The number depends
/// only on names, shapes and values, not on the files, the shards or the precision in which they store the weights.
pub(crate) fn fingerprint(values: &dyn InitialValues, parameters: &[(String, Vec<usize>)]) -> Result<u64> {
    const CHUNK_ELEMENTS: usize = 1 << 20;
    let pieces: Vec<(&str, &[usize], usize)> = parameters
        .iter()
        .filter(|(name, _)| values.has(name))
        .flat_map(|(name, shape)| {
            let numel: usize = shape.iter().product();
            (0..numel).step_by(CHUNK_ELEMENTS).map(move |first| (name.as_str(), shape.as_slice(), first))
        })
        .collect();
    let hash_piece = |(name, shape, first): &(&str, &[usize], usize)| -> Result<u64> {
        let end = shape.iter().product::<usize>().min(first + CHUNK_ELEMENTS);
        let mut hash = XxHash3_64::new();
        hash.write(format!("{name} {shape:?} {first} ").as_bytes());
        hash.write(bytemuck::cast_slice(&values.values(name, shape, *first..end)?));
        Ok(hash.finish())
    };
    let hashes: Vec<u64> = pieces.par_iter().map(hash_piece).collect::<Result<_>>()?;
    Ok(XxHash3_64::oneshot(bytemuck::cast_slice(&hashes)))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use serde_json::json;

    fn identity(settings: Value) -> RunIdentity {
        RunIdentity::of_json(&settings).unwrap()
    }

    fn saved(identity: &RunIdentity, steps: u64) -> SavedRun {
        SavedRun::of("saves/step4".into(), steps, &json!({ KEY: identity.to_json() }))
    }

    #[test]
    fn a_run_with_other_settings_is_refused_with_all_of_them_or_said_where_that_is_asked_for() {
        let before = identity(json!({"r": 4, "alpha": 8.0, "lr": 1e-3, "targets": "q_proj"}));
        let now = identity(json!({"r": 4, "alpha": 800.0, "lr": 2e-3, "delayed_update_after": 3, "targets": "q_proj"}));
        let saved = saved(&before, 4);
        assert_eq!(saved.check(&before, 6, false).unwrap(), None);
        insta::assert_snapshot!(saved.check(&now, 6, false).unwrap_err(), @"checkpoint saves/step4 was saved by a run with different settings: alpha: 8.0 -> 800.0; delayed_update_after: none -> 3; lr: 0.001 -> 0.002 (saved -> now); continuing would mix the two runs; give the saved settings, or another folder for --save to start over, or continue anyway with --resume_anyway");
        insta::assert_snapshot!(saved.check(&now, 6, true).unwrap().unwrap(), @"saves/step4 was saved by a run with different settings, and this run continues from it as requested: alpha: 8.0 -> 800.0; delayed_update_after: none -> 3; lr: 0.001 -> 0.002");
    }

    #[test]
    fn fewer_steps_than_were_made_are_refused_whatever_is_asked_for() {
        let identity = identity(json!({"lr": 1.0}));
        let saved = saved(&identity, 4);
        assert_eq!(saved.check(&identity, 4, false).unwrap(), None);
        insta::assert_snapshot!(saved.check(&identity, 3, true).unwrap_err(), @"checkpoint saves/step4 is at step 4, but this run ends at step 3, and the checkpoint cannot produce a result with fewer steps; give at least as many steps, or another folder for --save to start over");
    }

    #[test]
    fn a_checkpoint_without_settings_may_be_continued_and_that_is_said() {
        let saved = SavedRun::of("saves/step4".into(), 4, &json!({"finetune": {}}));
        insta::assert_snapshot!(saved.check(&identity(json!({})), 6, false).unwrap().unwrap(), @"saves/step4 was saved by an earlier version, without the settings of its run: they could not be compared with those of this run");
    }

    /// The weights of one parameter.
    #[derive(Debug)]
    struct Weights(Vec<f32>);

    impl InitialValues for Weights {
        fn has(&self, name: &str) -> bool {
            name == "w"
        }

        fn values(&self, _: &str, _: &[usize], range: std::ops::Range<usize>) -> Result<Vec<f32>> {
            Ok(self.0[range].to_vec())
        }

        fn fingerprint(&self) -> u64 {
            0
        }
    }

    #[test]
    fn the_fingerprint_of_weights_changes_with_any_of_them() {
        let count = (1 << 20) + 3;
        let of = |values: Vec<f32>| {
            let parameters = [("w".to_owned(), vec![values.len()]), ("random".to_owned(), vec![5])];
            fingerprint(&Weights(values), &parameters).unwrap()
        };
        let zeros = of(vec![0.0; count]);
        assert_eq!(of(vec![0.0; count]), zeros);
        for position in [0, 12_345, 1 << 20, count - 1] {
            let mut values = vec![0.0; count];
            values[position] = 1e-30;
            assert_ne!(of(values), zeros, "{position}");
        }
        assert_ne!(of(vec![0.0; count - 1]), zeros);
    }
}
