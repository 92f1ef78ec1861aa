//! `zerorun schedule`: the effect of a configuration's schedule, without training.

use crate::support::processes::{stderr, stdout, zerorun};
use serde_json::{Value, json};
use std::process::Output;

/// Runs the tool on a configuration with these two sections.
fn schedule(optimizer: &Value, scheduler: &Value, more: &[&str]) -> Output {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let file = folder.path().join("ds_config.json");
    let config = json!({
        "train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1,
        "optimizer": optimizer, "scheduler": scheduler,
    });
    std::fs::write(&file, config.to_string()).unwrap();
    zerorun().arg("schedule").arg("--ds_config").arg(file).args(["-n", "2"]).args(more).output().unwrap()
}

fn lines(output: &Output) -> Vec<Value> {
    stdout(output).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn adam() -> Value {
    json!({"type": "Adam", "params": {"lr": 0.01}})
}

#[test]
fn each_step_has_the_rate_and_the_betas_that_deepspeed_recorded() {
    let file: Value = serde_json::from_str(include_str!("../fixtures/schedules.json")).unwrap();
    let is_close =
        |a: &Value, b: &Value| (a.as_f64().unwrap() - b.as_f64().unwrap()).abs() <= 1e-9 * b.as_f64().unwrap();
    let mut compared = 0;
    for case in file["cases"].as_array().unwrap() {
        let single = case["group_lrs"].as_array().unwrap().len() == 1 && case["skipped_steps"].is_null();
        // The tool stops when beta1 reaches 1.
        if !single || case["optimizer"] != "Adam" || case["params"]["decay_mom_rate"].is_number() {
            continue;
        }
        let optimizer = json!({"type": "Adam", "params": {"lr": case["group_lrs"][0]}});
        let scheduler = json!({"type": case["type"], "params": case["params"]});
        let output = schedule(&optimizer, &scheduler, &["--steps", "60"]);
        assert!(output.status.success(), "{}", stderr(&output));
        let lines = lines(&output);
        assert_eq!(lines.len(), 60);
        for (n, line) in lines.iter().enumerate() {
            assert_eq!(line["step"], n + 1);
            assert!(is_close(&line["lr"], &case["lr"][n]), "{case} {line}");
            let unchanged = json!([0.9, 0.999]);
            let betas = if case["betas"] == "unchanged" { &unchanged } else { &case["betas"][n] };
            assert!((0..2).all(|i| is_close(&line["betas"][i], &betas[i])), "{case} {line}");
        }
        compared += 1;
    }
    assert_eq!(compared, 18);
}

#[test]
fn auto_steps_of_a_schedule_are_those_that_are_shown() {
    let decay =
        |steps: Value| json!({"type": "WarmupDecayLR", "params": {"total_num_steps": steps, "warmup_num_steps": 2}});
    let auto = schedule(&adam(), &decay(json!("auto")), &["--steps", "8"]);
    assert!(auto.status.success(), "{}", stderr(&auto));
    assert_eq!(lines(&auto), lines(&schedule(&adam(), &decay(json!(8)), &["--steps", "8"])));
}

#[test]
fn sgd_shows_its_momentum_and_is_told_that_it_stays() {
    let sgd = json!({"type": "SGD", "params": {"lr": 0.1, "momentum": 0.8}});
    let cycle =
        json!({"type": "OneCycle", "params": {"cycle_min_lr": 0.5, "cycle_max_lr": 1, "cycle_first_step_size": 1}});
    let output = schedule(&sgd, &cycle, &["--steps", "3"]);
    insta::assert_snapshot!(stdout(&output), @r#"
    {"step":1,"lr":0.5,"momentum":0.8}
    {"step":2,"lr":1.0,"momentum":0.8}
    {"step":3,"lr":0.5,"momentum":0.8}
    "#);
    insta::assert_snapshot!(stderr(&output), @"zerorun: scheduler.params.cycle_momentum: has no effect on an optimizer without betas, which keeps its momentum, as in DeepSpeed");
}

#[test]
fn a_plot_shows_the_rate_and_a_momentum_that_changes() {
    let cycle = json!({"type": "OneCycle", "params": {
        "cycle_min_lr": 0, "cycle_max_lr": 0.5, "cycle_first_step_size": 11, "cycle_second_step_size": 11}});
    let output = schedule(&adam(), &cycle, &["--steps", "23", "--plot"]);
    let text = stdout(&output);
    assert!(output.status.success(), "{}", stderr(&output));
    insta::assert_snapshot!(text, @r"
    learning rate
      5.000e-1 |           *
               |          * *
               |         *   *
               |        *     *
               |       *       *
               |      *         *
               |     *           *
               |    *             *
               |   *               *
               |  *                 *
               | *                   *
       0.000e0 |*                     *
               +-----------------------
                1               step 23

    beta1
      9.000e-1 |                      *
               | *                   *
               |  *                 *
               |   *               *
               |    *             *
               |     *           *
               |      *         *
               |       *       *
               |        *     *
               |         *   *
               |          * *
      8.000e-1 |*          *
               +-----------------------
                1               step 23
    ");
    // A constant value is plotted as one row, and there is no second plot.
    let text = stdout(&schedule(&adam(), &Value::Null, &["--steps", "1000000", "--plot"]));
    assert!(text.contains(&format!("1.000e-2 |{}\n", "*".repeat(64))) && !text.contains("beta1"), "{text}");
    assert_eq!(text.lines().count(), 4);
}

#[test]
fn what_is_wrong_ends_with_code_2_and_its_name() {
    let warm_up = json!({"type": "WarmupLR", "params": {"warmup_num_steps": 0}});
    let valid = json!({"type": "WarmupLR", "params": {}});
    let steps: &[&str] = &["--steps", "5"];
    for (optimizer, scheduler, more, words) in [
        (adam(), warm_up, steps, "scheduler.params.warmup_num_steps"),
        (adam(), json!({"type": "OneCycle"}), steps, "scheduler.params.cycle_max_lr"),
        (adam(), json!({"type": "StepLR"}), steps, "\"StepLR\" is not supported"),
        (Value::Null, valid.clone(), steps, "no optimizer section"),
        (adam(), valid.clone(), &["--steps", "0"], "--steps"),
        (adam(), valid.clone(), &["--plot"], "--steps"),
        (adam(), valid, &["--steps", "5", "--num_ranks", "0"], "num_ranks"),
    ] {
        let output = schedule(&optimizer, &scheduler, more);
        assert_eq!(output.status.code(), Some(2), "{words}");
        assert!(stderr(&output).contains(words), "{words}: {}", stderr(&output));
        assert!(stdout(&output).is_empty());
    }
    let output = zerorun().args(["schedule", "--ds_config", "/no/such/file.json", "--steps", "5"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("/no/such/file.json"), "{}", stderr(&output));
    assert!(zerorun().args(["schedule", "--help"]).output().unwrap().status.success());
}

#[test]
fn a_momentum_that_reaches_one_is_shown_until_there() {
    let cycle = json!({"type": "OneCycle", "params": {
        "cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "cycle_first_step_size": 2, "cycle_max_mom": 0.99,
        "decay_step_size": 1, "decay_mom_rate": 0.004}});
    let output = schedule(&adam(), &cycle, &["--steps", "100"]);
    let shown = lines(&output);
    // There are four steps of the cycle, one for the start, and two of the decay: 0.99 x 1.008 is below 1, and 0.99 x
    // 1.012 is not.
    assert_eq!((shown.len(), output.status.code()), (7, Some(2)));
    assert!(stderr(&output).contains("sets beta1 to 1.00188 in optimizer step 8"), "{}", stderr(&output));
}
