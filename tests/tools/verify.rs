//! `zerorun verify`: stages and offload give the same bits on this machine.

use crate::support::processes::{stderr, stdout, zerorun};
use serde_json::{Value, json};
use std::collections::BTreeSet;

#[test]
fn every_row_of_every_precision_has_the_bits_of_stage_0() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let output = zerorun().args(["verify", "--steps", "3", "--json", "--dir"]).arg(folder.path()).output().unwrap();
    assert!(output.status.success(), "{} {}", stdout(&output), stderr(&output));
    let report: Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert_eq!((&report["ok"], &report["num_ranks"], &report["steps"]), (&json!(true), &json!(2), &json!(3)));
    let rows = report["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 27);
    for (precision, rows) in ["f32", "bf16", "fp16"].iter().zip(rows.chunks(9)) {
        let (rows, pipelines) = rows.split_at(6);
        let schedules: Vec<&Value> = pipelines.iter().map(|row| &row["pipeline"]).collect();
        assert_eq!(schedules, [&Value::Null, &json!("1f1b"), &json!("zero_bubble")]);
        assert_eq!(pipelines.iter().map(|row| row["num_ranks"].as_u64().unwrap()).collect::<Vec<_>>(), [1, 2, 2]);
        for row in pipelines {
            assert_eq!((&row["precision"], &row["difference"]), (&json!(precision), &Value::Null));
            assert_eq!(row["parameters"], pipelines[0]["parameters"], "{row}");
            assert!(row["peak_bytes"].as_u64() <= pipelines[0]["peak_bytes"].as_u64(), "{row}");
        }
        let places: Vec<Value> = rows.iter().map(|row| json!([row["stage"], row["offload"]])).collect();
        assert_eq!(json!(places), json!([[0, null], [1, null], [2, null], [3, null], [3, "cpu"], [3, "nvme"]]));
        for row in rows {
            assert_eq!((&row["precision"], &row["difference"]), (&json!(precision), &Value::Null));
            for what in ["losses", "parameters"] {
                assert_eq!(row[what], rows[0][what], "{row}");
            }
            assert!(row["ms_per_step"].as_f64().unwrap() > 0.0);
            assert_eq!(row["file_bytes"].as_u64().unwrap() > 0, row["offload"] == "nvme", "{row}");
        }
        let peaks: Vec<u64> = rows[..4].iter().map(|row| row["peak_bytes"].as_u64().unwrap()).collect();
        assert!(peaks.is_sorted_by(|a, b| a > b), "{peaks:?}");
    }
    // The precisions give three different results, on two ranks and on one.
    for index in [0, 6] {
        let first = rows.chunks(9).map(|rows| rows[index]["parameters"].as_str().unwrap());
        assert_eq!(first.collect::<BTreeSet<_>>().len(), 3);
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is left");
}

#[test]
fn the_table_ends_with_a_verdict() {
    let output = zerorun().args(["verify", "-n", "1", "--steps", "1"]).output().unwrap();
    assert!(output.status.success(), "{} {}", stdout(&output), stderr(&output));
    let text = stdout(&output);
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 20, "{text}");
    assert!(lines[0].starts_with("precision  states in"));
    assert_eq!(lines.iter().filter(|line| line.ends_with("  same")).count(), 15, "{text}");
    assert_eq!(
        lines[19],
        "All bits are the same: in each precision, every loss and every parameter of 1 step on 1 rank equals that of stage \
         0."
    );
    assert!(stderr(&output).is_empty(), "{}", stderr(&output));
}

#[test]
fn what_cannot_be_is_refused() {
    let output = zerorun().args(["verify", "--dir", "no/such/folder"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let message = "zerorun: cannot create a folder in no/such/folder: No such file or directory";
    assert!(stderr(&output).starts_with(message), "{}", stderr(&output));
    for words in [["--num_ranks", "0"], ["--steps", "0"]] {
        assert_eq!(zerorun().arg("verify").args(words).output().unwrap().status.code(), Some(2));
    }
}
