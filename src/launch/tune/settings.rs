//! The section `autotuning`, as far as it has a counterpart here.

use super::experiment::Outcome;
use crate::{Error, Result};
use serde_json::Value;
use std::cmp::Ordering;
use std::path::PathBuf;

/// What is best.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Metric {
    /// Most samples or tokens per second. DeepSpeed's `flops` orders runs of one model in the same way.
    Throughput,
    /// The shortest step.
    Latency,
}

impl Metric {
    /// The better one first, those that did not end well last.
    pub(super) fn order(self, a: &Outcome, b: &Outcome) -> Ordering {
        let cost = |outcome: &Outcome| match (self, outcome) {
            (Self::Throughput, Outcome::Ran { throughput, .. }) => -throughput,
            (Self::Latency, Outcome::Ran { step_ms, .. }) => *step_ms,
            _ => f64::INFINITY,
        };
        cost(a).total_cmp(&cost(b))
    }
}

/// How to search.
#[derive(Debug, Clone)]
pub(super) struct Settings {
    pub(super) fast: bool,
    pub(super) results_dir: PathBuf,
    pub(super) exps_dir: Option<PathBuf>,
    /// Number, from 1, of the first step that is measured.
    pub(super) first_measured: u64,
    pub(super) steps: u64,
    pub(super) metric: Metric,
    /// Keys of the configuration, and the flags by which the script wants to hear their values too.
    pub(super) mappings: Vec<(String, String)>,
    pub(super) early_stopping: Option<usize>,
    pub(super) trials: usize,
    /// Least and most samples of a step.
    pub(super) batch: (usize, usize),
    /// Least, where it is given, and most samples of a micro batch.
    pub(super) micro_batch: (Option<usize>, usize),
    pub(super) micro_batches: usize,
    /// What has to be said about keys that have no effect.
    pub(super) unused: Vec<String>,
}

impl Settings {
    /// Reads the section of `config`; what was typed wins.
    pub(super) fn read(config: &Value, steps: Option<u64>, fast: bool) -> Result<Self> {
        let section = Section(&config["autotuning"]);
        let steps = match steps {
            Some(steps) => steps,
            None => section.number("end_profile_step")?.unwrap_or(5).clamp(2, 100_000) as u64,
        };
        // Of a run that is too short for that, the last step counts.
        let first_measured = (section.number("start_profile_step")?.unwrap_or(3).max(1) as u64).min(steps);
        let count = |key| Ok::<_, Error>(section.number(key)?.filter(|n| *n > 0));
        Ok(Self {
            fast: fast || section.0["fast"] == true,
            results_dir: section.text("results_dir")?.unwrap_or_else(|| "autotuning_results".into()).into(),
            exps_dir: section.text("exps_dir")?.map(PathBuf::from),
            first_measured,
            steps,
            metric: match section.text("metric")?.as_deref() {
                None | Some("throughput" | "flops") => Metric::Throughput,
                Some("latency") => Metric::Latency,
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
            unused: section.unused(),
        })
    }
}

struct Section<'a>(&'a Value);

impl Section<'_> {
    fn wrong(&self, key: &str, found: impl std::fmt::Display, allowed: &str) -> Error {
        Error::TuneSetting { key: key.into(), found: found.to_string(), allowed: allowed.into() }
    }

    fn number(&self, key: &str) -> Result<Option<usize>> {
        match &self.0[key] {
            Value::Null => Ok(None),
            value => match value.as_u64().and_then(|n| usize::try_from(n).ok()) {
                Some(number) => Ok(Some(number)),
                None => Err(self.wrong(key, value, "a whole number")),
            },
        }
    }

    fn text(&self, key: &str) -> Result<Option<String>> {
        match &self.0[key] {
            Value::Null => Ok(None),
            Value::String(text) if !text.is_empty() => Ok(Some(text.clone())),
            value => Err(self.wrong(key, value, "a string that is not empty")),
        }
    }

    fn mappings(&self) -> Result<Vec<(String, String)>> {
        let value = &self.0["arg_mappings"];
        let Some(map) = value.as_object() else {
            return if value.is_null() { Ok(Vec::new()) } else { Err(self.wrong("arg_mappings", value, "an object")) };
        };
        let flag = |(key, flag): (&String, &Value)| match flag.as_str() {
            Some(flag) if flag.starts_with('-') => Ok((key.clone(), flag.to_string())),
            _ => Err(self.wrong("arg_mappings", flag, "a flag of the script for each key, as \"--batch_size\"")),
        };
        map.iter().map(flag).collect()
    }

    fn unused(&self) -> Vec<String> {
        let reasons = [
            ("overwrite", "finished experiments are always kept; remove the folder of results to begin anew"),
            ("metric_path", "the measure comes from the script's --metrics"),
            ("tuner_type", "the search goes through all candidates in order"),
            ("model_info", "the model is looked at itself"),
            ("model_info_path", "the model is looked at itself"),
            ("mp_size", "there is no model parallelism"),
        ];
        let is_set = |key: &str| !matches!(&self.0[key], Value::Null) && self.0[key] != "gridsearch";
        reasons
            .iter()
            .filter(|(key, _)| is_set(key))
            .map(|(key, why)| format!("{key}: has no effect here: {why}"))
            .collect()
    }
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
        let settings = Settings::read(&section, None, false).unwrap();
        assert_eq!((settings.fast, settings.metric), (true, Metric::Latency));
        assert_eq!((settings.first_measured, settings.steps, settings.early_stopping), (4, 9, Some(3)));
        assert_eq!((settings.micro_batch, settings.unused.len()), ((None, 16), 1));
        assert_eq!(settings.mappings, [("train_micro_batch_size_per_gpu".to_string(), "--batch".to_string())]);
        let settings = Settings::read(&section, Some(3), false).unwrap();
        assert_eq!((settings.first_measured, settings.steps), (3, 3));
        let settings = Settings::read(&json!({}), None, false).unwrap();
        assert_eq!((settings.first_measured, settings.steps, settings.trials), (3, 5, 50));
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (section, words) in [
            (json!({"metric": "speed"}), "autotuning.metric"),
            (json!({"end_profile_step": "five"}), "autotuning.end_profile_step"),
            (json!({"results_dir": ""}), "autotuning.results_dir"),
            (json!({"arg_mappings": {"a": "b"}}), "autotuning.arg_mappings"),
        ] {
            let error = Settings::read(&json!({"autotuning": section}), None, false).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
    }
}
