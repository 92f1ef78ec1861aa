//! The part of the section `autotuning` that `zerorun tune` supports.

use super::trial_outcome::TrialOutcome;
use crate::error::{Error, Result, ToolError};
use serde_json::Value;
use std::cmp::Ordering;
use std::path::PathBuf;

/// The criterion of the search.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TuneMetric {
    /// The highest throughput in samples or tokens per second. DeepSpeed's `flops` orders the runs of one model in the
    /// same way.
    Throughput,
    /// The shortest step.
    Latency,
}

impl TuneMetric {
    /// Returns the speed by which a successful outcome is judged: samples or tokens per second, or steps per second.
    pub(super) fn speed(self, outcome: &TrialOutcome) -> Option<f64> {
        match (self, outcome) {
            (Self::Throughput, TrialOutcome::Ran { throughput, .. }) => Some(*throughput),
            (Self::Latency, TrialOutcome::Ran { step_ms, .. }) => Some(1e3 / step_ms),
            _ => None,
        }
    }

    /// Orders better outcomes first, and unsuccessful ones last.
    pub(super) fn order(self, a: &TrialOutcome, b: &TrialOutcome) -> Ordering {
        let cost = |outcome: &TrialOutcome| self.speed(outcome).map_or(f64::INFINITY, |speed| -speed);
        cost(a).total_cmp(&cost(b))
    }
}

/// The settings of a search.
#[derive(Debug, Clone)]
pub(super) struct TuneSettings {
    pub(super) fast: bool,
    pub(super) results_dir: PathBuf,
    pub(super) exps_dir: Option<PathBuf>,
    /// The first step that is measured, counted from 1.
    pub(super) first_measured: u64,
    pub(super) steps: u64,
    pub(super) metric: TuneMetric,
    /// Keys of the configuration, and the script's flags that also receive their values.
    pub(super) mappings: Vec<(String, String)>,
    pub(super) early_stopping: Option<usize>,
    pub(super) trials: usize,
    /// The minimum and the maximum number of samples per step.
    pub(super) batch: (usize, usize),
    /// The minimum (if given) and the maximum number of samples in a micro batch.
    pub(super) micro_batch: (Option<usize>, usize),
    pub(super) micro_batches: usize,
    /// The notes about keys that have no effect.
    pub(super) unused_key_notes: Vec<String>,
}

impl TuneSettings {
    /// Reads the section of `config`. Values from the command line take precedence.
    pub(super) fn read(config: &Value, steps: Option<u64>, fast: bool) -> Result<Self> {
        let section = AutotuningSection(&config["autotuning"]);
        let steps = match steps {
            Some(steps) => steps,
            None => section.number("end_profile_step")?.unwrap_or(5).clamp(2, 100_000) as u64,
        };
        // If a run ends before `start_profile_step`, its last step is measured.
        let first_measured = (section.number("start_profile_step")?.unwrap_or(3).max(1) as u64).min(steps);
        let count = |key| Ok::<_, Error>(section.number(key)?.filter(|n| *n > 0));
        Ok(Self {
            fast: fast || section.switch("fast")?.unwrap_or(false),
            results_dir: section.text("results_dir")?.unwrap_or_else(|| "autotuning_results".into()).into(),
            exps_dir: section.text("exps_dir")?.map(PathBuf::from),
            first_measured,
            steps,
            metric: match section.text("metric")?.as_deref() {
                None | Some("throughput" | "flops") => TuneMetric::Throughput,
                Some("latency") => TuneMetric::Latency,
                Some(other) => return Err(section.wrong("metric", other, "throughput, latency or flops")),
            },
            mappings: section.mappings()?,
            early_stopping: count("tuner_early_stopping")?,
            trials: count("tuner_num_trials")?.unwrap_or(50),
            batch: (count("min_train_batch_size")?.unwrap_or(1), count("max_train_batch_size")?.unwrap_or(usize::MAX)),
            micro_batch: (
                count("min_train_micro_batch_size_per_gpu")?,
                count("max_train_micro_batch_size_per_gpu")?.unwrap_or(1024),
            ),
            micro_batches: count("num_tuning_micro_batch_sizes")?.unwrap_or(3),
            unused_key_notes: section.unused_key_notes(),
        })
    }
}

impl TuneSettings {
    /// Checks that `arg_mappings` names only keys of the `original` configuration, or of its `resolved` form.
    pub(super) fn check_mappings(&self, original: &Value, resolved: &Value) -> Result<()> {
        let is_in = |config: &Value, key: &str| config.pointer(&format!("/{}", key.replace('.', "/"))).is_some();
        let allowed = "an object with keys of the configuration, such as \"train_micro_batch_size_per_gpu\" or \
                       \"optimizer.params.lr\"";
        match self.mappings.iter().find(|(key, _)| !is_in(original, key) && !is_in(resolved, key)) {
            Some((key, _)) => {
                let found = format!("an object with the key {key:?}");
                Err(AutotuningSection(&Value::Null).wrong("arg_mappings", found, allowed))
            }
            None => Ok(()),
        }
    }
}

/// The keys that have an effect, and `enabled`, which is accepted without a note.
const EFFECTIVE_KEYS: [&str; 15] = [
    "enabled",
    "fast",
    "results_dir",
    "exps_dir",
    "start_profile_step",
    "end_profile_step",
    "metric",
    "tuner_early_stopping",
    "tuner_num_trials",
    "arg_mappings",
    "max_train_batch_size",
    "min_train_batch_size",
    "max_train_micro_batch_size_per_gpu",
    "min_train_micro_batch_size_per_gpu",
    "num_tuning_micro_batch_sizes",
];

/// The keys that have no effect, and the reasons.
const INEFFECTIVE_KEYS: [(&str, &str); 6] = [
    ("overwrite", "finished experiments are always kept; remove the results folder to start over"),
    ("metric_path", "the metric comes from the script's --metrics"),
    ("tuner_type", "the search goes through all candidates in order"),
    ("model_info", "the model itself is inspected"),
    ("model_info_path", "the model itself is inspected"),
    ("mp_size", "there is no tensor parallelism"),
];

/// The minimum similarity of two names, from 0 to 1, for one to be suggested for the other.
const MIN_SIMILARITY: f64 = 0.5;

struct AutotuningSection<'a>(&'a Value);

impl AutotuningSection<'_> {
    fn wrong(&self, key: &str, found: impl std::fmt::Display, allowed: &str) -> Error {
        ToolError::TuneSetting { key: key.into(), found: found.to_string(), allowed: allowed.into() }.into()
    }

    fn number(&self, key: &str) -> Result<Option<usize>> {
        match &self.0[key] {
            Value::Null => Ok(None),
            value => match value.as_u64().or_else(|| integer(value)).and_then(|n| usize::try_from(n).ok()) {
                Some(number) => Ok(Some(number)),
                None => Err(self.wrong(key, value, "a whole number, 0 or more")),
            },
        }
    }

    fn switch(&self, key: &str) -> Result<Option<bool>> {
        match &self.0[key] {
            Value::Null => Ok(None),
            Value::Bool(on) => Ok(Some(*on)),
            value => Err(self.wrong(key, value, "true or false")),
        }
    }

    fn text(&self, key: &str) -> Result<Option<String>> {
        match &self.0[key] {
            Value::Null => Ok(None),
            Value::String(text) if !text.is_empty() => Ok(Some(text.clone())),
            value => Err(self.wrong(key, value, "a non-empty string")),
        }
    }

    fn mappings(&self) -> Result<Vec<(String, String)>> {
        let value = &self.0["arg_mappings"];
        let Some(map) = value.as_object() else {
            return if value.is_null() { Ok(Vec::new()) } else { Err(self.wrong("arg_mappings", value, "an object")) };
        };
        let flag = |(key, flag): (&String, &Value)| match flag.as_str() {
            Some(flag) if flag.starts_with('-') => Ok((key.clone(), flag.to_string())),
            _ => {
                Err(self.wrong(&format!("arg_mappings.{key}"), flag, "a flag of the script, such as \"--batch_size\""))
            }
        };
        map.iter().map(flag).collect()
    }

    /// Returns the notes about keys that have no effect.
    fn unused_key_notes(&self) -> Vec<String> {
        let is_set = |key: &str| !matches!(&self.0[key], Value::Null) && self.0[key] != "gridsearch";
        let unused = INEFFECTIVE_KEYS.iter().filter(|(key, _)| is_set(key));
        let known_keys = || EFFECTIVE_KEYS.into_iter().chain(INEFFECTIVE_KEYS.map(|(key, _)| key));
        let given_keys = self.0.as_object().into_iter().flatten().map(|(key, _)| key);
        // A name with the prefix `_` is a comment.
        let unknown = given_keys.filter(|key| !key.starts_with('_') && known_keys().all(|name| name != key.as_str()));
        let advice = |key: &String| {
            let similarity = |name: &&'static str| strsim::normalized_damerau_levenshtein(name, key);
            let nearest = known_keys()
                .max_by(|a, b| similarity(a).total_cmp(&similarity(b)))
                .filter(|name| similarity(name) >= MIN_SIMILARITY);
            match nearest {
                Some(name) => format!("{key}: not a key of the section; did you mean `{name}`?"),
                None => format!("{key}: not a key of the section, and none is similar; remove it"),
            }
        };
        let unused = unused.map(|(key, why)| format!("{key}: has no effect here: {why}"));
        unused.chain(unknown.map(advice)).collect()
    }
}

/// Returns the integer that a float represents, if any.
fn integer(value: &Value) -> Option<u64> {
    value.as_f64().filter(|n| n.fract() == 0.0 && (0.0..=u64::MAX as f64).contains(n)).map(|n| n as u64)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_section_counts_and_what_is_typed_wins() {
        let section = json!({"autotuning": {
            "enabled": true, "fast": true, "metric": "latency", "start_profile_step": 4, "end_profile_step": 9,
            "tuner_early_stopping": 3, "arg_mappings": {"train_micro_batch_size_per_gpu": "--batch"},
            "max_train_micro_batch_size_per_gpu": 16, "mp_size": 1,
        }});
        let settings = TuneSettings::read(&section, None, false).unwrap();
        assert_eq!((settings.fast, settings.metric), (true, TuneMetric::Latency));
        assert_eq!((settings.first_measured, settings.steps, settings.early_stopping), (4, 9, Some(3)));
        assert_eq!((settings.micro_batch, settings.unused_key_notes.len()), ((None, 16), 1));
        assert_eq!(settings.mappings, [("train_micro_batch_size_per_gpu".to_string(), "--batch".to_string())]);
        let settings = TuneSettings::read(&section, Some(3), false).unwrap();
        assert_eq!((settings.first_measured, settings.steps), (3, 3));
        let settings = TuneSettings::read(&json!({}), None, false).unwrap();
        assert_eq!((settings.first_measured, settings.steps, settings.trials), (3, 5, 50));
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (section, words) in [
            (json!({"metric": "speed"}), "autotuning.metric"),
            (json!({"end_profile_step": "five"}), "autotuning.end_profile_step"),
            (json!({"results_dir": ""}), "autotuning.results_dir"),
            (json!({"arg_mappings": {"a": "b"}}), "autotuning.arg_mappings"),
            (json!({"fast": "no"}), "autotuning.fast is \"no\", but must be true or false"),
            (json!({"tuner_num_trials": -1.0}), "autotuning.tuner_num_trials"),
        ] {
            let error = TuneSettings::read(&json!({"autotuning": section}), None, false).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
    }

    #[test]
    fn whole_floats_count_and_unknown_keys_are_said_with_the_nearest() {
        let section = json!({"autotuning": {"end_profile_step": 7.0, "tuner_early_stoping": 3, "_note": "", "zzz": 1}});
        let settings = TuneSettings::read(&section, None, false).unwrap();
        assert_eq!((settings.steps, settings.early_stopping), (7, None));
        let notes = settings.unused_key_notes;
        assert!(notes[0].contains("did you mean `tuner_early_stopping`?"), "{notes:?}");
        assert!(notes[1].contains("zzz: not a key of the section, and none"), "{notes:?}");
        let section = json!({"autotuning": {"arg_mappings": {"train_micro": "--batch"}}});
        let settings = TuneSettings::read(&section, None, false).unwrap();
        let error = settings.check_mappings(&section, &json!({"train_micro_batch_size_per_gpu": 1})).unwrap_err();
        assert!(error.to_string().contains("\"train_micro\""), "{error}");
    }
}
