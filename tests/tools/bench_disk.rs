//! `zerorun bench disk`: it runs, its numbers are finite, it leaves nothing behind, and it reports mistakes.

use crate::support::processes::{stderr, stdout, zerorun};
use serde_json::Value;
use std::path::Path;
use std::process::Output;

fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn bench(path: &Path, more: &[&str]) -> Output {
    zerorun().args(["bench", "disk"]).arg(path).args(more).output().unwrap()
}

fn is_empty(path: &Path) -> bool {
    std::fs::read_dir(path).unwrap().next().is_none()
}

/// Collects every number in `value`, with its path.
fn numbers(value: &Value, path: &str, found: &mut Vec<(String, f64)>) {
    match value {
        Value::Number(number) => found.push((path.to_string(), number.as_f64().unwrap())),
        Value::Array(values) => {
            values.iter().enumerate().for_each(|(i, value)| numbers(value, &format!("{path}[{i}]"), found));
        }
        Value::Object(values) => values.iter().for_each(|(key, value)| numbers(value, &format!("{path}.{key}"), found)),
        _ => {}
    }
}

#[test]
fn every_pass_has_a_speed_and_nothing_is_left() {
    let folder = folder();
    let output = bench(folder.path(), &["--size", "24MiB", "--json", "--sweep", "--queue-depth", "3"]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(is_empty(folder.path()));
    let result: Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert_eq!(result["bytes"], 24 << 20);
    assert_eq!(result["aio"]["queue_depth"], 3);
    // Adam with bf16 keeps 16 bytes per element in files, and a step transfers 28.
    assert_eq!(result["step"]["bytes"], (24 << 20) / 16 * 28);
    let mut found = Vec::new();
    numbers(&result, "", &mut found);
    for (path, number) in found {
        // JSON has no infinity: a number that is not finite would be null.
        assert!(number > 0.0 || path == ".cached_at_start", "{path}: {number}");
    }
    for timing in ["/sequential/0/write", "/step/plain/0", "/step/pipeline/3", "/step/update", "/sweep/14"] {
        let timing = result.pointer(timing).unwrap_or_else(|| panic!("no {timing} in {result}"));
        assert!(timing["seconds"].is_number() && timing["bytes_per_s"].is_number(), "{timing}");
        assert_eq!(timing["rounds"].as_array().unwrap().len(), 3);
    }
    assert_eq!(result["step"]["pipeline"].as_array().unwrap().len(), 4);
    assert_eq!(result["sweep"].as_array().unwrap().len(), 15);
}

#[test]
fn a_size_that_is_no_multiple_of_anything_gives_a_table() {
    let folder = folder();
    let output = bench(folder.path(), &["--size", "1234567"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let table = stdout(&output);
    for words in ["sequential", "plain loop", "engine, pipeline_read, pipeline_write", "update only"] {
        assert!(table.contains(words), "{table}");
    }
    assert!(is_empty(folder.path()));
}

#[test]
fn what_cannot_be_measured_is_said_before_anything_is_written() {
    let folder = folder();
    let file = folder.path().join("file");
    std::fs::write(&file, "text").unwrap();
    let cases = [
        (file.clone(), "1MiB", "it is a file"),
        (folder.path().to_owned(), "0", "give 1MiB or more"),
        (folder.path().to_owned(), "1000000TiB", "more bytes are needed"),
        (folder.path().to_owned(), "9999999999TiB", "no disk is this large"),
    ];
    for (path, size, words) in cases {
        let output = bench(&path, &["--size", size]);
        assert_eq!(output.status.code(), Some(2), "{size}: {}", stderr(&output));
        assert!(stderr(&output).contains(words), "{size}: {}", stderr(&output));
        assert_eq!(stdout(&output), "");
    }
    std::fs::remove_file(file).unwrap();
    assert!(is_empty(folder.path()));
}
