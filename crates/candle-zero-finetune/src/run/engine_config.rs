//! Builds the engine's configuration for a run: the user's file, if there is one, completed from the options.

use super::options::{LocalStepsOptions, ModelPrecision, Options, option_use_error};
use crate::error::Result;
use candle_zero::config::{Config, RunValues, island_slots, read_value};
use candle_zero::util::counted;
use serde_json::{Map, Value, json};

/// Returns the file's configuration, or an empty one, with the options' settings of local steps.
///
/// # Errors
/// A file that cannot be read; settings for local steps that contradict the file.
pub(super) fn read(options: &Options) -> Result<Value> {
    let mut config = options.ds_config.as_deref().map_or(Ok(json!({})), read_value)?;
    set_local_steps(&mut config, &options.local_steps)?;
    Ok(config)
}

/// Completes the `local_steps` section. A section of the wrong type is reported when the configuration is resolved.
fn set_local_steps(config: &mut Value, options: &LocalStepsOptions) -> Result<()> {
    let section = config.get("local_steps").unwrap_or(&Value::Null);
    if *options == LocalStepsOptions::default() || !config.is_object() || !(section.is_null() || section.is_object()) {
        return Ok(());
    }
    let numbers = [
        ("--local_steps", "steps", options.steps),
        ("--islands", "islands", options.islands.map(|islands| islands as u64)),
    ];
    for (flag, key, number) in numbers {
        if let (Some(number), Some(found)) = (number, explicit_value(section.get(key)))
            && found.as_f64() != Some(number as f64)
        {
            return Err(conflict(flag, number, &format!("local_steps.{key}"), found));
        }
    }
    if section.is_null() {
        config["local_steps"] = json!({});
    }
    for (_, key, number) in numbers {
        if let Some(number) = number {
            config["local_steps"][key] = json!(number);
        }
    }
    if let Some(server) = &options.server {
        config["local_steps"]["server"] = json!(server);
    }
    Ok(())
}

/// Returns the number of ranks that share the rows of a step, given that this job has `ranks` ranks. If islands meet
/// at a server, the ranks of all slots are counted.
pub(super) fn ranks_of_all_islands(config: &Value, ranks: usize) -> usize {
    ranks.saturating_mul(island_slots(config).unwrap_or(1))
}

/// The number of parts into which the ranks divide the rows of a micro step, and whether each part is a pipeline of
/// several ranks instead of a single rank.
#[derive(Debug, Clone, Copy)]
pub(super) struct DataParallelDegree {
    pub count: usize,
    pub are_pipelines: bool,
}

/// Returns `config` with batch, optimizer, clipping, seed and precision filled in. If neither `config` nor the options
/// set the number of rows in a step, this number is `rows`, and the second returned value is true.
pub(super) fn complete_config(
    mut config: Value,
    options: &Options,
    parts: DataParallelDegree,
    rows: usize,
    hidden_size: usize,
) -> Result<(Value, bool)> {
    let Some(map) = config.as_object_mut() else { return Ok((config, false)) };
    let takes_rows = set_batch(map, options, parts, rows)?;
    set_learning_rate(map, options, hidden_size)?;
    let mut set = |key: &str, value: Value| _ = map.entry(key).or_insert(value);
    set("gradient_clipping", json!(1.0));
    set("seed", json!(options.seed));
    if ["fp16", "bf16", "bfloat16"].iter().all(|key| map.get(*key).is_none()) {
        match options.precision {
            ModelPrecision::F32 => {}
            ModelPrecision::Bf16 => _ = map.insert("bf16".into(), json!({ "enabled": true })),
            ModelPrecision::F16 => _ = map.insert("fp16".into(), json!({ "enabled": true })),
        }
    }
    Ok((config, takes_rows))
}

/// Returns a value in the file, unless it is null or `"auto"`.
fn explicit_value(value: Option<&Value>) -> Option<&Value> {
    value.filter(|value| !value.is_null() && value.as_str() != Some("auto"))
}

const BATCH_KEYS: [&str; 3] = ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"];

/// Sets the batch. Returns whether a step has `rows` rows because nothing else sets its size.
fn set_batch(map: &mut Map<String, Value>, options: &Options, parts: DataParallelDegree, rows: usize) -> Result<bool> {
    if BATCH_KEYS.iter().any(|key| explicit_value(map.get(*key)).is_some()) {
        if let (Some(batch), Some(found)) = (options.batch, explicit_value(map.get(BATCH_KEYS[0])))
            && found.as_u64() != Some(batch as u64)
        {
            return Err(conflict("--batch", batch, BATCH_KEYS[0], found));
        }
        return Ok(false);
    }
    let rows_at_once = options.micro_batch.max(1).saturating_mul(parts.count.max(1));
    if let Some(batch) = options.batch.filter(|batch| batch % rows_at_once != 0) {
        let below = batch / rows_at_once * rows_at_once;
        let multiples = [below, below.saturating_add(rows_at_once)];
        let multiples: Vec<String> = multiples.iter().filter(|rows| **rows > 0).map(usize::to_string).collect();
        let problem = format!(
            "is {batch}, which is not a multiple of the {rows_at_once} rows that are computed at the same time \
             (--micro_batch {} {}); give --batch {}, or another --micro_batch",
            options.micro_batch,
            match parts.are_pipelines {
                true => format!("in {}", counted(parts.count, "pipeline")),
                false => format!("on {}", counted(parts.count, "rank")),
            },
            multiples.join(" or "),
        );
        return Err(option_use_error("--batch", problem));
    }
    // These keys may be "auto".
    BATCH_KEYS.iter().for_each(|key| _ = map.remove(*key));
    map.insert(BATCH_KEYS[0].into(), json!(options.batch.unwrap_or(rows)));
    map.insert(BATCH_KEYS[1].into(), json!(options.micro_batch));
    Ok(options.batch.is_none())
}

fn set_learning_rate(map: &mut Map<String, Value>, options: &Options, hidden_size: usize) -> Result<()> {
    let Some(optimizer) = map.get("optimizer") else {
        let params =
            json!({ "lr": options.peak_lr(hidden_size), "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0 });
        map.insert("optimizer".into(), json!({ "type": "AdamW", "params": params }));
        return Ok(());
    };
    match (options.lr, explicit_value(optimizer.pointer("/params/lr"))) {
        (Some(lr), Some(found)) if found.as_f64() != Some(lr) => {
            Err(conflict("--lr", lr, "optimizer.params.lr", found))
        }
        _ => Ok(()),
    }
}

fn conflict(flag: &'static str, given: impl std::fmt::Display, key: &str, found: &Value) -> candle_zero::Error {
    option_use_error(
        flag,
        format!(
            "is {given}, but the DeepSpeed configuration has {key}: {found}; give only one of them, or \"auto\" there"
        ),
    )
}

/// Returns, for a run with this number of steps, the values of the keys that are "auto".
pub(super) fn run_values(options: &Options, hidden_size: usize, warmup: u64, steps: u64) -> RunValues {
    RunValues {
        train_micro_batch_size_per_gpu: options.micro_batch,
        lr: options.peak_lr(hidden_size),
        warmup_num_steps: Some(warmup),
        total_num_steps: Some(steps),
        hidden_size: Some(hidden_size as u64),
        ..RunValues::default()
    }
}

/// Returns the engine's configuration for a run with this number of steps.
pub(super) fn resolve(
    config: &Value,
    options: &Options,
    parts: usize,
    hidden_size: usize,
    warmup: u64,
    steps: u64,
) -> Result<Config> {
    let values = run_values(options, hidden_size, warmup, steps);
    Config::load_for(config.clone(), parts, &values)
}
