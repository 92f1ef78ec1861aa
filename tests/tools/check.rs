//! `zerorun check` and `zerorun schema`: what a user learns about a configuration without starting a job.

use crate::support::processes::{stderr, stdout, zerorun};
use serde_json::{Value, json};
use std::path::Path;
use std::process::Output;

/// Runs `zerorun check ds.json` in a folder with that file.
fn check(text: impl AsRef<[u8]>, more: &[&str]) -> Output {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("ds.json"), text).unwrap();
    run(folder.path(), "ds.json", more)
}

fn run(folder: &Path, file: &str, more: &[&str]) -> Output {
    zerorun().current_dir(folder).args(["check", file]).args(more).output().unwrap()
}

/// Returns the text for a configuration that a job would not accept.
fn refused(text: impl AsRef<[u8]>) -> String {
    let output = check(text, &[]);
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(stderr(&output), "");
    stdout(&output)
}

fn printed(output: &Output) -> Value {
    serde_json::from_str(&stdout(output)).unwrap()
}

const BROKEN: &str = "{
  // Not the first line.
  \"train_batch_size\": 33,
  \"train_micro_batch_size_per_gpu\": 4,
  \"gradient_acumulation_steps\": 2,
  \"zero_optimization\": {\"stage\": 4, \"cpu_offload_param\": false},
  \"_about\": \"a comment\"
}
";

#[test]
fn every_problem_has_a_picture_and_then_comes_what_was_said() {
    insta::assert_snapshot!(refused(BROKEN), @r##"
    error: `train_batch_size`: train_batch_size must equal micro_batch_per_gpu * gradient_acc_step * world_size: 33 != 4 * 8 (derived) * 1; choose a train_batch_size that is a multiple of 4
     --> ds.json:3:3
      |
    3 |   "train_batch_size": 33,
      |   ^^^^^^^^^^^^^^^^^^

    error: `gradient_acumulation_steps`: not a key at the top level; did you mean `gradient_accumulation_steps`?
     --> ds.json:5:3
      |
    5 |   "gradient_acumulation_steps": 2,
      |   ^^^^^^^^^^^^^^^^^^^^^^^^^^^^

    error: `zero_optimization.stage`: expected 0 to 3, found 4
     --> ds.json:6:34
      |
    6 |   "zero_optimization": {"stage": 4, "cpu_offload_param": false},
      |                                  ^

    ds.json: 3 problems
      zero_optimization.cpu_offload_param: deprecated: treated as `zero_optimization.offload_param.device` = "none"
      _about: a comment: ignored
    "##);
}

#[test]
fn the_same_as_one_json_object() {
    let output = check(BROKEN, &["--json", "--world_size", "2"]);
    assert_eq!(output.status.code(), Some(2));
    let all = printed(&output);
    assert_eq!((&all["ok"], &all["resolved"]), (&json!(false), &Value::Null));
    assert_eq!(
        all["errors"][2],
        json!({"path": "zero_optimization.stage", "line": 6, "column": 34, "rule": "range",
               "message": "expected 0 to 3, found 4"})
    );
    assert_eq!(all["errors"].as_array().unwrap().len(), 3);
    assert_eq!(all["said"][1], json!({"path": "_about", "message": "a comment: ignored"}));
}

#[test]
fn text_that_cannot_be_read_has_a_picture_too() {
    insta::assert_snapshot!(refused("{\"a\": [1,\r\n  2"), @r"
    error: expected `]` for the list that starts at line 1, column 7, found the end of the text
     --> ds.json:2:4
      |
    2 |   2
      |    ^

    ds.json: 1 problem
    ");
    insta::assert_snapshot!(refused("{\"seed\": 1,\n\"aio\": {},\n\n\n\n\"seed\": 2}"), @r#"
    error: `seed`: given twice, at line 1, column 2 and at line 6, column 1; remove one of them
     --> ds.json:6:1
      |
    1 | {"seed": 1,
      |  ------ first here
    ...
    6 | "seed": 2}
      | ^^^^^^

    ds.json: 1 problem
    "#);
    insta::assert_snapshot!(refused(b"{\"a\": \"\xff\"}"), @r#"
    error: expected UTF-8 text, found the byte 0xff
     --> ds.json:1:8
      |
    1 | {"a": "�"}
      |        ^

    ds.json: 1 problem
    "#);
}

#[test]
fn what_has_no_place_has_no_line() {
    let folder = tempfile::tempdir().unwrap();
    let output = run(folder.path(), "absent.json", &["--json"]);
    assert_eq!(output.status.code(), Some(2));
    let error = &printed(&output)["errors"][0];
    assert_eq!((&error["path"], &error["line"], &error["column"]), (&json!("$"), &Value::Null, &Value::Null));
    assert!(error["message"].as_str().unwrap().contains("cannot read the configuration absent.json"));
    let text = stdout(&run(folder.path(), "absent.json", &[]));
    assert!(text.starts_with("error: cannot read the configuration absent.json"), "{text}");
    assert!(refused("{}").starts_with("error: `train_batch_size`: either train_batch_size or"));
}

#[test]
fn a_good_configuration_is_resolved_and_every_auto_has_its_value() {
    let text = json!({
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto",
        "bf16": {"enabled": true},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
        "scheduler": {"type": "WarmupDecayLR", "params": {
            "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto",
        }},
    });
    let output = check(text.to_string(), &["--world_size", "4", "--total_num_steps", "500"]);
    assert_eq!(output.status.code(), Some(0), "{}", stdout(&output));
    insta::assert_snapshot!(stdout(&output), @r#"
    ds.json: ok for 4 ranks: batch 4 = 1 x 1 x 4, stage 0, bf16, optimizer AdamW, scheduler WarmupDecayLR
      gradient_clipping: "auto": the default 1.0 applies
      train_batch_size: "auto": derived as 4 from the other batch keys
      train_micro_batch_size_per_gpu: "auto": taken as 1
      optimizer.params.lr: "auto": taken as 0.00005
      optimizer.params.weight_decay: "auto": the default 0.0 applies
      scheduler.params.total_num_steps: "auto": taken as 500
      scheduler.params.warmup_max_lr: "auto": taken as 0.00005
      scheduler.params.warmup_num_steps: "auto": taken as 1
    "#);
    let all = printed(&check(text.to_string(), &["--total_num_steps", "500", "--json"]));
    assert_eq!((&all["ok"], &all["errors"]), (&json!(true), &json!([])));
    assert_eq!(all["resolved"]["scheduler"]["params"]["warmup_max_lr"], json!(5e-5));
    assert_eq!(all["resolved"]["zero_optimization"]["reduce_bucket_size"], json!(500_000_000));
    let unknown = refused(text.to_string());
    assert!(unknown.contains("`scheduler.params.total_num_steps`: \"auto\" has no value here"), "{unknown}");
}

#[test]
fn a_job_of_no_ranks_is_a_wrong_command_line() {
    let output = check("{}", &["--world_size", "0"]);
    assert_eq!((output.status.code(), stdout(&output)), (Some(2), String::new()));
    assert!(stderr(&output).contains("--world_size"), "{}", stderr(&output));
}

#[test]
fn the_schema_is_one_json_object() {
    let output = zerorun().arg("schema").output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(printed(&output), candle_zero::config::json_schema());
}
