//! Resolves `"auto"` to the run's own value, as the Hugging Face Trainer does, or to the key's default.

use super::json_node::{JsonEntry, JsonNode};
use super::keys::{ConfigKey, ConfigSection};
use super::walk::ConfigWalk;
use super::{ConfigRule, value_conversion};
use serde_json::Value;

/// The batch keys. Their `"auto"` is resolved once all three have been read.
pub(crate) const BATCH_KEYS: [&str; 3] =
    ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"];

impl ConfigWalk<'_> {
    /// Resolves the `"auto"` of a key and notes the resulting value.
    pub fn auto(&mut self, section: &ConfigSection, key: &ConfigKey, entry: &JsonEntry, path: String) {
        if !section.checked {
            return;
        }
        if BATCH_KEYS.contains(&path.as_str()) {
            return self.autos.push(path);
        }
        let run_value = self.value_of_run(&path);
        let (prefix, suffix) = if run_value.is_some() { ("taken as", "") } else { ("the default", " applies") };
        let Some(value) = run_value.or_else(|| key.default_value()) else {
            let advice = if path.ends_with(".total_num_steps") {
                ", or load the configuration with RunValues::total_num_steps (zerorun check: --total_num_steps)"
            } else {
                ""
            };
            let message =
                format!("\"auto\" has no value here; give {}{advice}", value_conversion::describe_kind(key.kind));
            return self.problem(ConfigRule::Auto, &path, entry.node.position, message);
        };
        let node = JsonNode { position: entry.node.position, ..JsonNode::from_value(&value) };
        match value_conversion::convert(&node, key, section.lenient) {
            Ok(value) => {
                self.note(&path, format!("\"auto\": {prefix} {value}{suffix}"));
                self.set(&path, value);
            }
            Err((rule, text)) => {
                self.problem(rule, &path, node.position, format!("the value of \"auto\" in this run: {text}"))
            }
        }
    }

    /// Returns the run's value for a key.
    fn value_of_run(&self, path: &str) -> Option<Value> {
        let run = self.run;
        let (owner, name) = path.rsplit_once('.')?;
        let squared = |h: u64| u128::from(h) * u128::from(h);
        let count = |n: u128| Value::from(i64::try_from(n).unwrap_or(i64::MAX));
        let steps = |n: Option<u64>| n.map(|n| count(n.into()));
        match (owner, name) {
            ("optimizer.params", "lr") => Some(run.lr.into()),
            ("scheduler.params", "warmup_max_lr") => {
                // The section `optimizer` has already been read.
                Some(self.get("optimizer.params.lr").cloned().unwrap_or_else(|| run.lr.into()))
            }
            // The Trainer's default is no warm-up; a schedule needs at least one warm-up step.
            ("scheduler.params", "warmup_num_steps") => steps(Some(run.warmup_num_steps.unwrap_or(0).max(1))),
            ("scheduler.params", "total_num_steps") => steps(run.total_num_steps),
            ("zero_optimization", "reduce_bucket_size") => run.hidden_size.map(|h| count(squared(h))),
            ("zero_optimization", "stage3_prefetch_bucket_size") => {
                run.hidden_size.map(|h| count(squared(h) / 10 * 9 + squared(h) % 10 * 9 / 10))
            }
            ("zero_optimization", "stage3_param_persistence_threshold") => {
                run.hidden_size.map(|h| count(u128::from(h) * 10))
            }
            _ => None,
        }
    }
}
