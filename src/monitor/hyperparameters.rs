//! The hyperparameters of a run: the values that distinguish runs.

use super::RunDescription;
use crate::config::{Config, RunValues};
use crate::json_leaves::json_leaves;
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::OnceLock;

/// A value of a hyperparameter.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Hyperparameter {
    Bool(bool),
    Number(f64),
    Text(String),
}

/// Keys of the configuration that are listed even if they have their default values.
const ALWAYS_LISTED: [&str; 8] = [
    "bf16.enabled",
    "fp16.enabled",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "seed",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "zero_optimization.stage",
];
/// Top-level keys of the configuration that control only output or the search of `zerorun tune`. They are not listed.
const OUTPUT_KEYS: [&str; 14] = [
    "autotuning",
    "comet",
    "comms_logger",
    "csv_monitor",
    "dump_state",
    "flops_profiler",
    "log_level",
    "memory_breakdown",
    "run",
    "steps_per_print",
    "tensorboard",
    "timers",
    "wall_clock_breakdown",
    "wandb",
];
/// The maximum number of hyperparameters.
const MAX_COUNT: usize = 1000;
/// The maximum number of characters in the text of a hyperparameter.
const MAX_CHARS: usize = 1000;

/// Returns the hyperparameters of a run by name: the numbers of ranks and steps, the settings of the program, and the
/// keys of the configuration that differ from their defaults or are always listed. If a setting has the name of another
/// hyperparameter, the setting's name is prefixed with `settings.`.
pub(super) fn hyperparameters(run: &RunDescription) -> BTreeMap<String, Hyperparameter> {
    let defaults = leaves(defaults());
    let from_config = leaves(&run.configuration).into_iter().filter(|(name, value)| {
        let section = name.split('.').next().unwrap_or_default();
        let is_listed = ALWAYS_LISTED.contains(&name.as_str()) || defaults.get(name) != Some(value);
        is_listed && !OUTPUT_KEYS.contains(&section)
    });
    let mut all: BTreeMap<String, Hyperparameter> = from_config.collect();
    all.insert("world_size".into(), Hyperparameter::Number(run.world_size as f64));
    all.extend(run.total_steps.map(|steps| ("total_steps".into(), Hyperparameter::Number(steps as f64))));
    for (name, value) in leaves(&run.settings) {
        let name = if all.contains_key(&name) { format!("settings.{name}") } else { name };
        all.insert(name, value);
    }
    all.into_iter().take(MAX_COUNT).collect()
}

/// Returns the resolved configuration of a file that sets nothing.
fn defaults() -> &'static Value {
    static DEFAULTS: OnceLock<Value> = OnceLock::new();
    DEFAULTS.get_or_init(|| {
        let config = Config::load_for(r#"{"train_batch_size": 1}"#, 1, &RunValues::default());
        config.map_or(Value::Null, |config| config.to_deepspeed_json())
    })
}

/// Returns the values of a tree by their paths, without null and empty objects.
fn leaves(tree: &Value) -> BTreeMap<String, Hyperparameter> {
    let mut found = BTreeMap::new();
    json_leaves("", tree, &mut |path, leaf| found.extend(Hyperparameter::of(leaf).map(|value| (path, value))));
    found.remove("");
    found
}

impl Hyperparameter {
    /// Returns the value of a leaf of JSON, if it has one.
    fn of(leaf: &Value) -> Option<Self> {
        let truncated = |text: &str| Self::Text(text.chars().take(MAX_CHARS).collect());
        match leaf {
            Value::Null | Value::Object(_) => None,
            Value::Bool(value) => Some(Self::Bool(*value)),
            Value::Number(number) => number.as_f64().map(Self::Number),
            Value::String(text) => Some(truncated(text)),
            Value::Array(_) => Some(truncated(&leaf.to_string())),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_differs_from_the_defaults_is_listed_with_the_settings_of_the_program() {
        let file = json!({
            "train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.003, "betas": [0.9, 0.95]}},
            "zero_optimization": {"stage": 0, "reduce_bucket_size": 7}, "steps_per_print": 3,
            "tensorboard": {"enabled": true, "output_path": "logs"},
        });
        let config = Config::load_for(file.to_string(), 2, &RunValues::default()).unwrap();
        let run = RunDescription {
            world_size: 2,
            configuration: config.to_deepspeed_json(),
            total_steps: Some(20),
            settings: json!({"model": "nano", "seed": 7, "data": {"files": ["a", "b"]}, "none": null}),
            ..RunDescription::default()
        };
        let found = hyperparameters(&run);
        let list: Vec<String> = found.iter().map(|(name, value)| format!("{name} {value:?}")).collect();
        insta::assert_snapshot!(list.join("\n"), @r#"
        bf16.enabled Bool(false)
        data.files Text("[\"a\",\"b\"]")
        fp16.enabled Bool(false)
        gradient_accumulation_steps Number(1.0)
        gradient_clipping Number(1.0)
        model Text("nano")
        optimizer.params.adam_w_mode Bool(true)
        optimizer.params.betas Text("[0.9,0.95]")
        optimizer.params.bias_correction Bool(true)
        optimizer.params.eps Number(1e-8)
        optimizer.params.lr Number(0.003)
        optimizer.params.weight_decay Number(0.0)
        optimizer.type Text("AdamW")
        seed Number(42.0)
        settings.seed Number(7.0)
        total_steps Number(20.0)
        train_batch_size Number(8.0)
        train_micro_batch_size_per_gpu Number(4.0)
        world_size Number(2.0)
        zero_optimization.reduce_bucket_size Number(7.0)
        zero_optimization.stage Number(0.0)
        "#);
    }

    #[test]
    fn long_texts_and_long_lists_are_bounded() {
        let settings: serde_json::Map<String, Value> =
            (0..3000).map(|i| (format!("key-{i}"), json!("x".repeat(5000)))).collect();
        let run = RunDescription { settings: settings.into(), ..RunDescription::default() };
        let found = hyperparameters(&run);
        assert_eq!(found.len(), MAX_COUNT);
        assert!(found.values().all(|value| matches!(value, Hyperparameter::Text(text) if text.len() == MAX_CHARS)));
    }
}
