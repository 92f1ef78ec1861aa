//! `zerorun bench scaling`: jobs of one and two ranks, a table, JSON and a picture, and mistakes.

use crate::support::processes::{stderr, stdout, zerorun};
use serde_json::Value;
use std::path::Path;
use std::process::Output;

/// Measures a tiny model.
fn scaling(folder: &Path, more: &[&str]) -> Output {
    let mut command = zerorun();
    command.current_dir(folder).args(["bench", "scaling", "--n_layer", "1", "--n_head", "1", "--n_embd", "8"]);
    command.args(["--ctx", "16", "--steps", "2"]).args(more).output().unwrap()
}

/// Returns the names of the elements of a well-formed XML document, in the order in which they begin. Comments, CDATA
/// and processing instructions are not allowed.
fn elements(xml: &str) -> Vec<String> {
    let mut names = Vec::new();
    let mut open: Vec<&str> = Vec::new();
    let mut rest = xml.trim_end();
    while let Some(at) = rest.find('<') {
        let (text, tag) = rest.split_at(at);
        assert!(!text.contains('>') && (!open.is_empty() || text.is_empty()), "text {text:?} in {open:?}");
        check_entities(text);
        let (tag, after) = tag[1..].split_once('>').unwrap();
        rest = after;
        if let Some(name) = tag.strip_prefix('/') {
            assert_eq!(open.pop(), Some(name));
            continue;
        }
        let (tag, is_empty) = tag.strip_suffix('/').map_or((tag, false), |tag| (tag, true));
        let (name, mut attributes) = tag.split_once(' ').unwrap_or((tag, ""));
        assert!(name.bytes().all(|byte| byte.is_ascii_alphanumeric()) && !name.is_empty(), "{name:?}");
        while !attributes.is_empty() {
            let (attribute, after) = attributes.split_once("=\"").unwrap();
            let is_name = |name: &str| name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-:".contains(&byte));
            assert!(!attribute.is_empty() && is_name(attribute), "{attribute:?}");
            let (value, after) = after.split_once('"').unwrap();
            check_entities(value);
            attributes = after.strip_prefix(' ').unwrap_or(after);
            assert!(attributes.is_empty() || after.starts_with(' '), "{after:?}");
        }
        names.push(name.to_string());
        if !is_empty {
            open.push(name);
        }
    }
    assert!(open.is_empty() && rest.is_empty(), "{open:?} {rest:?}");
    names
}

fn check_entities(text: &str) {
    for part in text.split('&').skip(1) {
        assert!(["amp;", "lt;", "gt;", "quot;"].iter().any(|entity| part.starts_with(entity)), "{text:?}");
    }
}

#[test]
fn one_and_two_ranks_are_measured_with_both_kinds_of_scaling_and_drawn() {
    let folder = tempfile::tempdir().unwrap();
    let flags = ["--ranks", "2", "--stages", "0,3", "--batch", "2", "--json", "--svg", "scaling.svg"];
    let output = scaling(folder.path(), &flags);
    assert!(output.status.success(), "{}", stderr(&output));
    let result: Value = serde_json::from_str(&stdout(&output)).unwrap();
    let found: Vec<String> = result["rows"]
        .as_array()
        .unwrap()
        .iter()
        .map(|row| {
            let [kind, stage, ranks, batch, accumulation] =
                ["scaling", "stage", "ranks", "batch", "accumulation"].map(|key| &row[key]);
            format!("{kind} {stage} {ranks} {batch} {accumulation}")
        })
        .collect();
    let expected = [
        "\"weak\" 0 1 2 1",
        "\"weak\" 0 2 4 1",
        "\"weak\" 3 1 2 1",
        "\"weak\" 3 2 4 1",
        "\"strong\" 0 1 4 2",
        "\"strong\" 0 2 4 1",
        "\"strong\" 3 1 4 2",
        "\"strong\" 3 2 4 1",
    ];
    assert_eq!(found, expected);
    for row in result["rows"].as_array().unwrap() {
        let number = |key: &str| row[key].as_f64().unwrap();
        assert!(number("step_ms") > 0.0 && number("efficiency") > 0.0, "{row}");
        let tokens = number("batch") * 16.0 * number("steps_per_s");
        assert!((tokens / number("tokens_per_s") - 1.0).abs() < 1e-9, "{row}");
        // In an all-reduce of two ranks, each rank sends as many bytes as the gradients take: those of an embedding of
        // 256 tokens, 16 positions, a block and a norm. Stage 3 keeps such small parameters on all ranks, and sends the
        // same number of bytes.
        let parameters = 256 * 8 + 16 * 8 + (12 * 8 * 8 + 13 * 8) + 2 * 8;
        assert_eq!(number("sent_bytes"), if row["ranks"] == 2 { f64::from(4 * parameters) } else { 0.0 }, "{row}");
        assert!(row["ranks"] == 2 || number("efficiency") == 1.0, "{row}");
    }
    // There are six different jobs; the jobs of two ranks serve both kinds of scaling.
    assert_eq!(stderr(&output).matches(" ms a step").count(), 6, "{}", stderr(&output));
    let rows = &result["rows"];
    assert_eq!(rows[1]["step_ms"], rows[5]["step_ms"]);

    let svg = std::fs::read_to_string(folder.path().join("scaling.svg")).unwrap();
    let elements = elements(&svg);
    let count = |name: &str| elements.iter().filter(|element| *element == name).count();
    // In each of the four panels, the curve has two points and a marker in the legend.
    assert_eq!((elements[0].as_str(), count("svg"), count("g"), count("circle")), ("svg", 1, 4, 12));
    // An earlier picture is replaced.
    let again = scaling(folder.path(), &["--ranks", "1", "--stages", "0", "--scaling", "weak", "--svg", "scaling.svg"]);
    assert!(again.status.success(), "{}", stderr(&again));
    assert!(stdout(&again).contains("\nweak scaling: the same batch per rank\nstage  ranks"), "{}", stdout(&again));
    assert_ne!(std::fs::read_to_string(folder.path().join("scaling.svg")).unwrap(), svg);
}

#[test]
fn mistakes_are_named_before_anything_is_measured() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("notes.svg"), "<svg/>").unwrap();
    let refused = |more: &[&str]| {
        let output = scaling(folder.path(), more);
        assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
        stderr(&output)
    };
    insta::assert_snapshot!(refused(&["--model", "huge"]), @r#"zerorun: there is no model preset "huge"; the presets are nano, mini, gpt2, gpt2-medium, gpt2-large, gpt2-xl, llama-nano, llama-mini, tinyllama-1.1b, llama-3.2-1b, llama-3.2-3b, llama-2-7b"#);
    insta::assert_snapshot!(refused(&["--seq_len", "17"]), @"zerorun: cannot measure: --seq_len is 17; it must be 1 to 16, the context of the model (see --ctx)");
    insta::assert_snapshot!(refused(&["--n_kv_head", "2"]), @"zerorun: model configuration: n_kv_head is 2, but must be absent: a GPT-2 has none");
    insta::assert_snapshot!(refused(&["--ranks", "7,11,13,1021"]), @"zerorun: cannot measure: strong scaling needs a batch that is a multiple of all numbers of ranks; the smallest one for [7, 11, 13, 1021] would have more than 1024 micro batches per rank; give other numbers, or only --scaling weak");
    insta::assert_snapshot!(refused(&["--svg", "notes.svg"]), @"zerorun: cannot write notes.svg: a file with that name exists, but is not a picture of `zerorun bench scaling`, so it is not replaced; give another name, or remove it");
    insta::assert_snapshot!(refused(&["--svg", "no/such/folder.svg"]), @"zerorun: cannot write to no/such/folder.svg: there is no folder no/such; give another path");
    assert_eq!(std::fs::read_to_string(folder.path().join("notes.svg")).unwrap(), "<svg/>");
}
