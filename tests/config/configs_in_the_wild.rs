//! Configs of public projects, if they are next to this repository: `zerorun check` gives each its expected verdict.

use crate::support::processes::{repository, stdout, zerorun};
use crate::support::skips::skipped;
use serde_json::Value;
use std::path::{Path, PathBuf};

fn folder() -> PathBuf {
    repository().join("../shared/ds_configs_in_the_wild")
}

fn list<'a>(value: &'a Value, key: &str) -> &'a [Value] {
    value[key].as_array().map_or(&[], Vec::as_slice)
}

/// Returns a path with the section name that messages use.
fn canonical(path: &str) -> String {
    path.replace("bfloat16", "bf16")
}

/// Returns the output of `zerorun check --json`.
fn check(file: &Path, world_size: &str) -> Value {
    // A training run would provide the number of steps of its schedule itself.
    let more = ["--world_size", world_size, "--total_num_steps", "1000", "--json"];
    let output = zerorun().arg("check").arg(file).args(more).output().unwrap();
    let printed: Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert_eq!(output.status.code(), Some(if printed["ok"] == true { 0 } else { 2 }), "{}", file.display());
    printed
}

/// Returns the differences between the expected and the printed verdict for one number of ranks.
fn differences(expected: &Value, batch: Option<&Value>, printed: &Value) -> Vec<String> {
    let mut wrong = Vec::new();
    let fits = expected["verdict"] != "error" && !batch.is_some_and(Value::is_string);
    if printed["ok"] != fits {
        return vec![format!("ok is {}: {}", printed["ok"], printed["errors"])];
    }
    if batch.is_some_and(Value::is_string) {
        let named = list(printed, "errors").iter().any(|error| error["rule"] == "batch");
        return if named { Vec::new() } else { vec![format!("no batch error in {}", printed["errors"])] };
    }
    if let Some(batch) = batch {
        const KEYS: [&str; 3] = ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"];
        let ours: Value = KEYS.iter().map(|key| printed["resolved"][key].clone()).collect();
        wrong.extend((ours != *batch).then(|| format!("batch is {ours}, not {batch}")));
    }
    wrong.extend(missing_errors(expected, printed));
    let syntax = list(printed, "errors").iter().any(|error| error["rule"] == "syntax");
    if !syntax {
        wrong.extend(missing_messages(expected, printed));
    }
    wrong
}

/// Returns the expected errors that are not reported.
fn missing_errors(expected: &Value, printed: &Value) -> Vec<String> {
    let ours = list(printed, "errors");
    let hjson = list(expected, "errors_of_a_full_hjson_reader");
    let expected_errors = if hjson.is_empty() { list(expected, "errors") } else { hjson };
    let missing = expected_errors.iter().filter(|error| {
        !ours.iter().any(|our| {
            // If a key of that name exists elsewhere, candle-zero reports it as a misplaced key.
            let rule =
                our["rule"] == error["rule"] || (our["rule"] == "misplaced key" && error["rule"] == "unknown key");
            let message = our["message"].as_str().unwrap();
            let near = error["near"].as_str().is_none_or(|near| message.contains(near));
            // Positions of syntax errors are in the note, for example "line 34 column 23: ...".
            let position = format!("line {} column {}:", our["line"], our["column"]);
            let position = error["rule"] != "syntax" || error["note"].as_str().unwrap().starts_with(&position);
            our["path"] == error["path"] && rule && near && position
        })
    });
    missing.map(|error| format!("{error} is not among {ours:?}")).collect()
}

/// Returns the expected messages that are missing.
fn missing_messages(expected: &Value, printed: &Value) -> Vec<String> {
    let messages: Vec<(&str, &str)> = list(printed, "said")
        .iter()
        .map(|note| (note["path"].as_str().unwrap(), note["message"].as_str().unwrap()))
        .collect();
    let texts = |key: &str| list(expected, key).iter().map(|text| text.as_str().unwrap().to_string());
    let is_reported = |path: &str| {
        messages.iter().any(|(p, _)| p.strip_prefix(path).is_some_and(|rest| rest.is_empty() || rest.starts_with('.')))
    };
    let ignored = texts("ignored").filter(|path| !is_reported(path));
    let translated = texts("translated").filter(|text| {
        let (from, _) = text.split_once(" -> ").unwrap();
        !messages.iter().any(|(path, _)| *path == from)
    });
    let auto = texts("auto")
        .filter(|path| !messages.iter().any(|(p, message)| *p == canonical(path) && message.starts_with("\"auto\": ")));
    ignored.chain(translated).chain(auto).map(|text| format!("{text} is not reported")).collect()
}

#[test]
fn every_config_has_its_expected_verdict() {
    let Ok(verdicts) = std::fs::read_to_string(folder().join("verdicts.json")) else {
        return skipped(every_config_has_its_expected_verdict, format_args!("there is no {}", folder().display()));
    };
    let verdicts: Value = serde_json::from_str(&verdicts).unwrap();
    let (mut agree, mut wrong) = (0, Vec::new());
    for config in list(&verdicts, "configs") {
        let (name, expected) = (config["file"].as_str().unwrap(), &config["expected"]);
        let path = folder().join(name);
        let found: Vec<String> = match expected["batch"].as_object() {
            Some(batches) => batches
                .iter()
                .flat_map(|(world_size, batch)| differences(expected, Some(batch), &check(&path, world_size)))
                .collect(),
            None => differences(expected, None, &check(&path, "1")),
        };
        if found.is_empty() {
            agree += 1;
        } else {
            wrong.push(format!("{name}: {}", found.join("\n  ")));
        }
    }
    println!("{agree} configs have the expected verdict");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert_eq!(agree, list(&verdicts, "configs").len());
}
