//! The configurations that `zerorun tune` tries.

use super::settings::TuneSettings;
use crate::error::{Result, ToolError};
use crate::tools::config_values::{get, set};
use candle_zero::config::{Config, RunValues};
use candle_zero::util::counted;
use serde_json::{Map, Value, json};
use std::fmt;
use std::path::PathBuf;

/// A configuration, given as its differences from the original: keys by path, with their values. Null removes a key.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct TuneCandidate(pub(super) Map<String, Value>);

/// The space of all candidates.
pub(super) struct SearchSpace {
    original: Value,
    ranks: usize,
    run: RunValues,
    /// The number of samples per step, if the original specifies this number or the micro batch.
    batch: Option<usize>,
    stages: Vec<u8>,
    micro_batches: Vec<usize>,
    /// The folder that offload may use.
    nvme_path: Option<PathBuf>,
}

const STAGE: &str = "zero_optimization.stage";
const TRAIN: &str = "train_batch_size";
const MICRO: &str = "train_micro_batch_size_per_gpu";
const ACCUMULATION: &str = "gradient_accumulation_steps";
const OPTIMIZER: &str = "zero_optimization.offload_optimizer";
const PARAM: &str = "zero_optimization.offload_param";

/// Keys and their old forms. A key is refused if its old form is also present.
const OLD_KEYS: [(&str, &str); 2] =
    [(OPTIMIZER, "zero_optimization.cpu_offload"), (PARAM, "zero_optimization.cpu_offload_param")];

/// DeepSpeed's bucket sizes, in elements.
const BUCKET_SIZES: [u64; 3] = [50_000_000, 500_000_000, 1_000_000_000];

impl SearchSpace {
    /// Creates the space. `config` is the `original` loaded for `run`; `stages` and `micro_batches` are those given on
    /// the command line.
    pub(super) fn new(
        original: &Value,
        (config, run): (&Config, RunValues),
        settings: &TuneSettings,
        stages: Vec<u8>,
        micro_batches: Vec<u32>,
        nvme_path: Option<PathBuf>,
    ) -> Result<Self> {
        let batch = config.batch;
        let (least, most) = settings.micro_batch;
        let sizes: Vec<usize> = if micro_batches.is_empty() {
            let start = least.unwrap_or(batch.train_micro_batch_size_per_gpu);
            let doubled = std::iter::successors(Some(start), |size| size.checked_mul(2));
            doubled.take(settings.micro_batches).collect()
        } else {
            micro_batches.into_iter().map(|size| size as usize).collect()
        };
        // A batch size that the original specifies stays fixed, because it affects the result of training.
        let is_fixed = has_value(original, TRAIN);
        let fits = |micro: &usize| {
            let step = micro.saturating_mul(config.world_size);
            let train_batch = match is_fixed {
                true => batch.train_batch_size,
                false => step.saturating_mul(batch.gradient_accumulation_steps),
            };
            let (least, most_samples) = settings.batch;
            *micro <= most && (least..=most_samples).contains(&train_batch) && train_batch.is_multiple_of(step)
        };
        let micro_batches: Vec<usize> = sizes.iter().copied().filter(fits).collect();
        if micro_batches.is_empty() {
            let problem = format!(
                "none of the micro batches {sizes:?} can be tried with {}; give values of --micro_batches whose \
                 product with the number of ranks divides train_batch_size (if the configuration sets it) and that are \
                 within the bounds of autotuning",
                counted(config.world_size, "rank")
            );
            return Err(ToolError::Tune { problem }.into());
        }
        Ok(Self {
            original: with_section(original.clone()),
            ranks: config.world_size,
            run,
            batch: (is_fixed || has_value(original, MICRO)).then_some(batch.train_batch_size),
            stages,
            micro_batches,
            nvme_path,
        })
    }

    /// Loads a configuration as the runs do.
    pub(super) fn load(&self, config: &Value) -> Result<Config> {
        Config::load_for(config.clone(), self.ranks, &self.run)
    }

    /// Returns the number of samples per step in the original if `config` has a different number.
    pub(super) fn original_batch(&self, config: &Config) -> Option<usize> {
        self.batch.filter(|samples| *samples != config.batch.train_batch_size)
    }

    /// Returns the configuration of a candidate, including all keys of the original that it does not change.
    pub(super) fn config(&self, candidate: &TuneCandidate) -> Value {
        let mut config = self.original.clone();
        for (path, value) in &candidate.0 {
            if let Some((_, old)) = OLD_KEYS.iter().find(|(new, _)| new == path) {
                set(&mut config, old, Value::Null);
            }
            set(&mut config, path, value.clone());
        }
        config
    }

    /// Returns the candidates for each stage and offload, with the micro batches in ascending order.
    pub(super) fn candidate_groups(&self) -> Vec<Vec<TuneCandidate>> {
        let mut sizes = self.micro_batches.clone();
        sizes.sort_unstable();
        sizes.dedup();
        let mut groups = Vec::new();
        for stage in &self.stages {
            for offload in self.offloads(*stage) {
                let candidate = |size: &usize| {
                    let mut changes = TuneCandidate::default();
                    changes.0.insert(STAGE.into(), json!(stage));
                    changes.0.insert(MICRO.into(), json!(size));
                    if has_value(&self.original, TRAIN) && !self.original[ACCUMULATION].is_null() {
                        // The accumulation follows from the other two keys.
                        changes.0.insert(ACCUMULATION.into(), Value::Null);
                    }
                    changes.0.extend(offload.clone());
                    changes
                };
                groups.push(sizes.iter().map(candidate).collect());
            }
        }
        groups
    }

    /// Returns the offload settings to try at a stage. Without an offload folder, only those of the original are tried;
    /// with one, the first entry offloads nothing.
    fn offloads(&self, stage: u8) -> Vec<Map<String, Value>> {
        let Some(folder) = &self.nvme_path else { return vec![Map::new()] };
        let section = |path: &str, device: &str| {
            let mut section = get(&self.original, path).as_object().cloned().unwrap_or_default();
            section.insert("device".into(), json!(device));
            section.insert("nvme_path".into(), json!(folder));
            (path.to_string(), Value::Object(section))
        };
        let no_offload = Map::from_iter([section(OPTIMIZER, "none"), section(PARAM, "none")]);
        let mut all = vec![no_offload];
        // Below stage 1, the engine offloads no optimizer states, and below stage 3, no parameters.
        if stage >= 1 {
            all.push(Map::from_iter([section(OPTIMIZER, "nvme"), section(PARAM, "none")]));
        }
        if stage >= 3 {
            all.push(Map::from_iter([section(OPTIMIZER, "nvme"), section(PARAM, "nvme")]));
        }
        all
    }

    /// Returns the variants of the best candidate that differ in the key with index `key`; `None` after the last key.
    pub(super) fn variations(&self, best: &TuneCandidate, key: usize) -> Option<Vec<TuneCandidate>> {
        let switch = || vec![json!(true), json!(false)];
        let buckets = || BUCKET_SIZES.iter().map(|elements| json!(elements)).collect();
        let (key, values): (&str, Vec<Value>) = match key {
            0 => ("zero_optimization.reduce_bucket_size", buckets()),
            1 => ("zero_optimization.allgather_bucket_size", buckets()),
            2 => ("zero_optimization.overlap_comm", switch()),
            3 => ("zero_optimization.reduce_scatter", switch()),
            _ => return None,
        };
        // This is the current value, whether given or the default.
        let resolved = self.load(&self.config(best)).map(|config| config.to_deepspeed_json());
        let current = resolved.map_or(Value::Null, |config| get(&config, key).clone());
        let is_same = |value: &Value| *value == current || value.as_f64().is_some_and(|v| current.as_f64() == Some(v));
        let with_value = |value: Value| {
            let mut candidate = best.clone();
            candidate.0.insert(key.into(), value);
            candidate
        };
        Some(values.into_iter().filter(|value| !is_same(value)).map(with_value).collect())
    }
}

/// Returns whether a key has an explicit value.
fn has_value(config: &Value, key: &str) -> bool {
    !config[key].is_null() && config[key] != "auto"
}

/// Replaces the old form of `zero_optimization`, true or false, with a section, to which keys can be added.
fn with_section(mut config: Value) -> Value {
    let Some(on) = config["zero_optimization"].as_bool() else { return config };
    let mut section = json!({"stage": u8::from(on)});
    let size = config.as_object_mut().and_then(|map| map.remove("allgather_size"));
    if let Some(size) = size.filter(|size| on && !size.is_null()) {
        section["allgather_bucket_size"] = size;
    }
    config["zero_optimization"] = section;
    config
}

impl fmt::Display for TuneCandidate {
    /// Formats a candidate as `stage 2, micro batch 4, overlap_comm false`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let on_disk = |path: &str| self.0.get(path).is_some_and(|section| section["device"] == "nvme");
        let mut words = Vec::new();
        for (path, name) in [(STAGE, "stage"), (MICRO, "micro batch")] {
            words.extend(self.0.get(path).map(|value| format!("{name} {value}")));
        }
        words.extend(match (on_disk(OPTIMIZER), on_disk(PARAM)) {
            (true, true) => Some("optimizer and parameters in files".to_string()),
            (true, false) => Some("optimizer in files".to_string()),
            _ => None,
        });
        let formatted = [STAGE, MICRO, ACCUMULATION, OPTIMIZER, PARAM];
        for (path, value) in self.0.iter().filter(|(path, _)| !formatted.contains(&path.as_str())) {
            words.push(format!("{} {value}", path.rsplit('.').next().unwrap_or(path)));
        }
        f.write_str(&words.join(", "))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn space(original: Value, micro: Vec<u32>, nvme: Option<&str>) -> Result<SearchSpace> {
        let run = RunValues { hidden_size: Some(64), ..RunValues::default() };
        let config = Config::load_for(original.clone(), 2, &run)?;
        let settings = TuneSettings::read(&original, None, false)?;
        SearchSpace::new(&original, (&config, run), &settings, vec![0, 3], micro, nvme.map(PathBuf::from))
    }

    fn original() -> Value {
        json!({"train_batch_size": 16, "gradient_accumulation_steps": 8, "optimizer": {"type": "AdamW"},
               "zero_optimization": {"stage": 1, "reduce_bucket_size": 5e7, "sub_group_size": 7}})
    }

    #[test]
    fn a_batch_that_is_named_stays_and_every_other_key_too() {
        let space = space(original(), vec![], None).unwrap();
        let names: Vec<String> = space.candidate_groups().concat().iter().map(TuneCandidate::to_string).collect();
        assert_eq!(names[..3], ["stage 0, micro batch 1", "stage 0, micro batch 2", "stage 0, micro batch 4"]);
        assert_eq!(names.len(), 6);
        let config = space.config(&space.candidate_groups()[1][2]);
        assert_eq!(
            config,
            json!({
                "train_batch_size": 16, "train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW"},
                "zero_optimization": {"stage": 3, "reduce_bucket_size": 5e7, "sub_group_size": 7},
            })
        );
        Config::load(config, 2).unwrap();
    }

    #[test]
    fn old_forms_of_zero_take_changes_too() {
        for (zero, bucket, expected) in [(true, 77, json!(77)), (false, 77, Value::Null)] {
            let original = json!({"train_batch_size": 2, "optimizer": {"type": "AdamW"}, "allgather_size": bucket,
                                  "zero_optimization": zero});
            let space = space(original, vec![1], Some("/disk")).unwrap();
            let config = space.config(&space.candidate_groups()[2][0]);
            assert_eq!(config["zero_optimization"]["stage"], 3);
            assert_eq!(config["zero_optimization"]["allgather_bucket_size"], expected);
            assert!(config["allgather_size"].is_null());
            space.load(&config).unwrap();
        }
        let mut original = original();
        original["zero_optimization"] = json!({"stage": 3, "cpu_offload": true, "cpu_offload_param": false});
        let space = space(original, vec![1], Some("/disk")).unwrap();
        for candidate in space.candidate_groups().concat() {
            space.load(&space.config(&candidate)).unwrap();
        }
    }

    #[test]
    fn a_batch_counts_as_named_whatever_its_form_and_auto_is_what_the_run_knows() {
        let mut original = original();
        original["train_batch_size"] = json!(16.0);
        original["zero_optimization"]["reduce_bucket_size"] = json!("auto");
        let space = space(original, vec![], None).unwrap();
        let config = space.load(&space.config(&space.candidate_groups()[0][2])).unwrap();
        assert_eq!((config.batch.train_batch_size, space.original_batch(&config)), (16, None));
        assert_eq!(config.to_deepspeed_json()["zero_optimization"]["reduce_bucket_size"], 64 * 64);
    }

    #[test]
    fn micro_batches_that_do_not_divide_the_batch_are_left_out_or_refused() {
        assert_eq!(space(original(), vec![3, 8, 16], None).unwrap().micro_batches, [8]);
        let error = space(original(), vec![3], None).err().unwrap().to_string();
        assert!(error.contains("[3]") && error.contains("train_batch_size"), "{error}");
    }

    #[test]
    fn a_folder_brings_offload_into_the_search() {
        let space = space(original(), vec![1], Some("/disk")).unwrap();
        let names: Vec<String> = space.candidate_groups().concat().iter().map(TuneCandidate::to_string).collect();
        assert_eq!(
            names,
            [
                "stage 0, micro batch 1",
                "stage 3, micro batch 1",
                "stage 3, micro batch 1, optimizer in files",
                "stage 3, micro batch 1, optimizer and parameters in files",
            ]
        );
        let config = space.config(&space.candidate_groups()[2][0]);
        assert_eq!(config["zero_optimization"]["offload_optimizer"], json!({"device": "nvme", "nvme_path": "/disk"}));
    }

    #[test]
    fn the_keys_of_the_best_are_varied_one_after_the_other() {
        let space = space(original(), vec![1], None).unwrap();
        let best = space.candidate_groups()[0][0].clone();
        let values = space.variations(&best, 0).unwrap();
        // 5e7 is the current value.
        assert_eq!(
            values.iter().map(TuneCandidate::to_string).collect::<Vec<_>>(),
            [
                "stage 0, micro batch 1, reduce_bucket_size 500000000",
                "stage 0, micro batch 1, reduce_bucket_size 1000000000",
            ]
        );
        assert!(space.variations(&best, 4).is_none());
    }
}
