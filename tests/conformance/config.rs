//! Recorded behaviour of DeepSpeed's configuration, case by case.

use crate::support::recorded::is_left_out;
use candle_zero::config::{BatchConfig, Config};
use candle_zero::error::{ConfigError, Error, Result};
use serde_json::{Value, json};

fn cases() -> Vec<Value> {
    serde_json::from_str(include_str!("../fixtures/conformance_config.json")).unwrap()
}

fn usize_at(value: &Value, key: &str) -> usize {
    usize::try_from(value[key].as_u64().unwrap()).unwrap()
}

/// Returns the value at a dotted path of the printed configuration.
fn value_at<'a>(printed: &'a Value, path: &str) -> Option<&'a Value> {
    // One recorded name is not a path: the switch of the comms logger.
    let path = if path == "comms logger on" { "comms_logger.enabled" } else { path };
    path.split('.').try_fold(printed, |value, key| value.get(key))
}

fn is_same(ours: &Value, theirs: &Value) -> bool {
    match (ours, theirs) {
        // The record has the name of a Python type; candle-zero prints the name used in configuration files.
        (Value::String(ours), Value::String(theirs)) if theirs.starts_with("float") || theirs == "bfloat16" => {
            ["fp32", "fp16", "bf16"].into_iter().zip(["float32", "float16", "bfloat16"]).any(|p| p == (ours, theirs))
        }
        (Value::Number(a), Value::Number(b)) => a.as_f64() == b.as_f64(),
        (Value::Object(a), Value::Object(b)) => {
            a.len() == b.len() && a.iter().all(|(key, a)| b.get(key).is_some_and(|b| is_same(a, b)))
        }
        _ => ours == theirs,
    }
}

fn load(case: &Value) -> Result<Config> {
    let input = &case["input"];
    let world_size = usize_at(input, "world_size");
    let Some(text) = input["file_text"].as_str() else { return Config::load(input["config"].clone(), world_size) };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ds.json");
    std::fs::write(&path, text).unwrap();
    Config::load(path, world_size)
}

/// Returns the difference between candle-zero's result and the recorded one; `None` if there is none.
fn check(case: &Value) -> Option<String> {
    let expect = &case["expect"];
    if case["area"] == "config-default" {
        let path = case["input"]["key"].as_str().unwrap();
        // Sections that are absent by default are present but empty in this test, as in the record.
        let config = if path.contains("offload_") {
            json!({"train_batch_size": 1, "zero_optimization": {"offload_param": {}, "offload_optimizer": {}}})
        } else {
            json!({"train_batch_size": 1})
        };
        let printed = Config::load(config, 1).unwrap().to_deepspeed_json();
        let ours = value_at(&printed, path);
        return (!ours.is_some_and(|ours| is_same(ours, &expect["default"]))).then(|| format!("{path} is {ours:?}"));
    }
    let result = if case["input"].get("set_train_batch_size").is_some() { resize(&case["input"]) } else { load(case) };
    match (result, expect["ok"].as_bool().unwrap()) {
        (Ok(_), false) => Some("is accepted".into()),
        (Err(e), true) => Some(format!("is refused: {e}")),
        (Err(e), false) => {
            let message = e.to_string().to_lowercase();
            let words = expect["message_mentions"].as_array().into_iter().flatten();
            let missing: Vec<_> =
                words.filter(|word| !message.contains(&word.as_str().unwrap().to_lowercase())).collect();
            (!missing.is_empty()).then(|| format!("does not mention {missing:?}: {message}"))
        }
        (Ok(config), true) => {
            let printed = config.to_deepspeed_json();
            let batch = expect.as_object().unwrap().iter().filter(|(key, _)| value_at(&printed, key).is_some());
            let values = expect["values"].as_object().into_iter().flatten();
            let is_wrong =
                |(path, theirs): &(&String, &Value)| !value_at(&printed, path).is_some_and(|o| is_same(o, theirs));
            let wrong = batch.chain(values).find(is_wrong);
            wrong.map(|(path, theirs)| format!("{path} is {:?}, not {theirs}", value_at(&printed, path)))
        }
    }
}

/// Returns the configuration that results from `set_train_batch_size` on a running engine.
fn resize(input: &Value) -> Result<Config> {
    let world_size = usize_at(input, "world_size");
    let keys = json!({
        "train_micro_batch_size_per_gpu": input["train_micro_batch_size_per_gpu"],
        "gradient_accumulation_steps": input["gradient_accumulation_steps"],
    });
    let mut config = Config::load(keys, world_size)?;
    config.batch = config.batch.with_train_batch_size(usize_at(input, "set_train_batch_size"), world_size)?;
    Ok(config)
}

#[test]
fn every_recorded_case_is_answered_as_recorded() {
    let cases = cases();
    let (left_out, covered): (Vec<_>, Vec<_>) = cases.iter().partition(|case| is_left_out(case));
    let wrong: Vec<_> =
        covered.iter().filter_map(|case| check(case).map(|problem| format!("{} {problem}", case["id"]))).collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    // Cases that are left out are refused by name, not accepted silently.
    for case in left_out {
        if case["area"] == "config-default" {
            assert!(check(case).is_some(), "{} is the default here too", case["id"]);
            continue;
        }
        let error = load(case).unwrap_err();
        assert!(
            matches!(error, Error::Config(ConfigError::Problems { .. })) && error.to_string().contains("not supported"),
            "{error}"
        );
    }
}

#[test]
fn the_new_accumulation_follows_from_the_train_batch_size() {
    let batch = BatchConfig { train_batch_size: 24, train_micro_batch_size_per_gpu: 3, gradient_accumulation_steps: 2 };
    assert_eq!(batch.with_train_batch_size(60, 4).unwrap().gradient_accumulation_steps, 5);
}
