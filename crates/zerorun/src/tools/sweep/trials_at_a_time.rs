//! The number of trials that this machine can train at a time.

use super::definition::SweepDefinition;
use super::trial_command::{CommandTemplate, TrialPaths};
use crate::tools::finetune;
use crate::tools::tune::model_of;
use candle_zero::config::{Config, RunValues};
use candle_zero::estimate::{Estimate, Shapes, UnitRule};
use candle_zero::offload::available_memory;
use candle_zero::precision::{Nf4Scales, WeightPacking};
use clap::ArgMatches;
use clap::parser::ValueSource;
use serde_json::{Value, json};
use std::path::PathBuf;

/// Returns the number of cores.
pub(super) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Returns the number of trials that this machine can train at a time, so that each rank has its own cores and, if the
/// memory of a trial is given or can be estimated, each trial has enough memory. The result is at least 1.
pub(super) fn trials_at_a_time(definition: &SweepDefinition, template: &CommandTemplate) -> usize {
    let by_cores = cores() / (definition.ranks * definition.threads.unwrap_or(1));
    let memory = memory_of_trial(definition, template).filter(|bytes| *bytes > 0);
    let by_memory = memory.map_or(usize::MAX, |bytes| (available_memory() / bytes) as usize);
    by_cores.min(by_memory).max(1)
}

/// Returns the bytes that a trial needs, if they are given or can be estimated.
pub(super) fn memory_of_trial(definition: &SweepDefinition, template: &CommandTemplate) -> Option<u64> {
    definition.memory.or_else(|| estimated_memory(definition, template))
}

/// Returns the estimated bytes of a trial's model state, without activations, if the model is known: one of
/// candle-zero's that a script names, or one in safetensors files.
fn estimated_memory(definition: &SweepDefinition, template: &CommandTemplate) -> Option<u64> {
    let steps = Some(definition.settings.steps);
    let (shapes, config, hidden_size) = match template.script() {
        Some((_, args)) => {
            let (shapes, hidden_size) = model_of(args)?;
            (shapes, template.configuration()?.clone(), hidden_size)
        }
        None => {
            let (shapes, config) = finetune_model(template)?;
            (shapes, config, 1)
        }
    };
    let run = RunValues { total_num_steps: steps, hidden_size: Some(hidden_size), ..RunValues::default() };
    let config = Config::load_for(config, definition.ranks, &run).ok()?;
    Some(Estimate::new(&shapes, &config).ok()?.host_bytes() as u64 * definition.ranks as u64)
}

/// Returns the parameters that `zerorun finetune` trains and holds, and a configuration. Instead of an adapter, which
/// is small, the one-dimensional parameters count as trained.
fn finetune_model(template: &CommandTemplate) -> Option<(Shapes, Value)> {
    let paths =
        TrialPaths { folder: "trial".into(), ds_config: "ds_config.json".into(), record: None, is_branch: false };
    let matches = finetune::command().try_get_matches_from(template.words_of(&Vec::new(), &paths)).ok()?;
    let model = matches.get_one::<PathBuf>("model")?;
    let files = ["model.safetensors.index.json", "model.safetensors"].map(|name| model.join(name));
    let shapes = Shapes::safetensors(files.iter().find(|file| file.is_file())?, &UnitRule::default()).ok()?;
    let is_given = |name: &str| matches.value_source(name) == Some(ValueSource::CommandLine);
    let adapts = ["lora", "qlora", "adapter"].into_iter().any(is_given);
    let is_full = is_given("full") || flag_value(&matches, "task") == Some("classify") && !adapts;
    let shapes = match (is_full, is_given("qlora")) {
        (true, _) => shapes,
        (false, is_packed) => {
            let shapes = shapes.trainable(|_, shape| shape.len() == 1);
            if is_packed { shapes.quantized(WeightPacking::Nf4(Nf4Scales::Bf16)) } else { shapes }
        }
    };
    Some((shapes, with_defaults(template.configuration().cloned().unwrap_or_else(|| json!({})), &matches)))
}

/// Returns the value of a flag as typed, or its default.
fn flag_value<'a>(matches: &'a ArgMatches, name: &str) -> Option<&'a str> {
    matches.get_raw(name)?.next()?.to_str()
}

/// Adds the settings that `zerorun finetune` adds to a configuration and that affect memory.
fn with_defaults(mut config: Value, matches: &ArgMatches) -> Value {
    let has = |config: &Value, keys: &[&str]| keys.iter().any(|key| !config[*key].is_null());
    if !has(&config, &["train_batch_size", "train_micro_batch_size_per_gpu"]) {
        config["train_micro_batch_size_per_gpu"] = json!(1);
    }
    if !has(&config, &["optimizer"]) {
        config["optimizer"] = json!({"type": "AdamW", "params": {"lr": 1e-3}});
    }
    // Packed weights stay packed only at stage 3.
    if matches.get_flag("qlora") && !has(&config, &["zero_optimization"]) {
        config["zero_optimization"] = json!({"stage": 3});
    }
    if let (Some(dtype @ ("bf16" | "fp16")), false) = (flag_value(matches, "dtype"), has(&config, &["bf16", "fp16"])) {
        config[dtype] = json!({"enabled": true});
    }
    config
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use serde_json::Map;
    use std::path::Path;

    #[test]
    fn the_memory_of_known_models_is_estimated_and_limits_the_trials_at_a_time() {
        let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let result_of = |words: &[&str], memory: Option<u64>| {
            let table = json!({
                "command": words, "metric": "loss", "steps": 9, "memory": memory.unwrap_or(1),
                "parameters": {"--seed": [1, 2]},
            });
            let table: Map<String, Value> = table.as_object().unwrap().clone();
            let definition = SweepDefinition::new("x", &table).unwrap();
            let template = CommandTemplate::new(&definition, &repository, None).unwrap();
            (estimated_memory(&definition, &template), trials_at_a_time(&definition, &template))
        };
        let model = repository.join("tests/fixtures/finetune/models/llama");
        let model = model.to_str().unwrap();
        let tuned = |more: &[&str]| result_of(&[&["finetune", model, "--data", "x"], more].concat(), None).0.unwrap();
        let (full, lora, lora_bf16) = (tuned(&["--full"]), tuned(&[]), tuned(&["--dtype", "bf16"]));
        assert!(full > lora && lora > lora_bf16 && lora_bf16 > 0, "{full} {lora} {lora_bf16}");
        let nano = result_of(&["train.rs", "--ds_config", "ds_configs/zero1.json", "--model", "nano"], None).0;
        assert!(nano.is_some_and(|bytes| bytes > 1 << 20), "{nano:?}");
        let unknown = result_of(&["train.rs", "--ds_config", "ds_configs/zero1.json"], Some(1 << 53));
        assert_eq!(unknown, (None, 1), "no machine has room for two such trials");
    }
}
