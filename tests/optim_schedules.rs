//! Learning-rate schedules against the rates that DeepSpeed recorded.
#![allow(clippy::unwrap_used)]

use candle_zero::config::{SchedulerConfig, WarmupType};
use candle_zero::optim::Schedule;
use serde_json::Value;

/// The value for group `group`: of a list its entry, else the value itself.
fn of_group(v: &Value, group: usize) -> Option<f64> {
    v.get(group).unwrap_or(v).as_f64()
}

/// Parameters as the configuration resolves them; `None` for a schedule that does not exist here.
fn config(case: &Value, group: usize) -> Option<SchedulerConfig> {
    let params = &case["params"];
    let number = |key: &str| of_group(&params[key], group);
    let warmup_num_steps = params["warmup_num_steps"].as_u64().unwrap_or(1000);
    // An unknown shape is a warning and then the logarithm.
    let warmup_type = if params["warmup_type"] == "linear" { WarmupType::Linear } else { WarmupType::Log };
    Some(match case["type"].as_str()? {
        "WarmupLR" => SchedulerConfig::WarmupLr {
            warmup_min_lr: number("warmup_min_lr").unwrap_or(0.0),
            warmup_max_lr: number("warmup_max_lr"),
            warmup_num_steps,
            warmup_type,
        },
        "WarmupDecayLR" => SchedulerConfig::WarmupDecayLr {
            total_num_steps: params["total_num_steps"].as_u64().unwrap(),
            warmup_min_lr: number("warmup_min_lr").unwrap_or(0.0),
            warmup_max_lr: number("warmup_max_lr").unwrap_or(0.001),
            warmup_num_steps,
            warmup_type,
        },
        "WarmupCosineLR" => SchedulerConfig::WarmupCosineLr {
            total_num_steps: params["total_num_steps"].as_u64().unwrap(),
            warmup_min_ratio: number("warmup_min_ratio").unwrap_or(0.0),
            warmup_num_steps,
            cos_min_ratio: number("cos_min_ratio").unwrap_or(0.0001),
            warmup_type,
        },
        _ => return None,
    })
}

fn assert_close(got: f64, want: f64, rtol: f64, context: &str) {
    assert!((got - want).abs() <= rtol * want.abs(), "{context}: {got} instead of {want}");
}

/// Every group of a case has a schedule of its own, as the engine has one optimizer and one group.
fn check(case: &Value, rates: &Value, rtol: f64) {
    let groups = case["group_lrs"].as_array().unwrap();
    let skipped: Vec<u64> =
        case["skipped_steps"].as_array().into_iter().flatten().map(|s| s.as_u64().unwrap()).collect();
    for (group, base_lr) in groups.iter().enumerate() {
        let mut schedule = Schedule::new(&config(case, group).unwrap(), base_lr.as_f64().unwrap()).unwrap();
        // lr-16 and lr-20 list [group] per step, schedules.json lists [step] per group.
        let steps = rates.as_array().unwrap();
        let per_group = groups.len() > 1 && steps.len() == groups.len();
        let steps = if per_group { steps[group].as_array().unwrap() } else { steps };
        for (n, lr) in (1u64..).zip(steps) {
            let context = format!("{case:.0?} group {group} step {n}");
            assert_close(schedule.lr(), of_group(lr, group).unwrap(), rtol, &context);
            if !skipped.contains(&n) {
                schedule.step();
            }
        }
        if let Some(state) = case["state_after"]["last_batch_iteration"].as_i64() {
            assert_eq!(schedule.last_batch_iteration(), state);
            assert_close(schedule.lr(), case["get_last_lr_after"][group].as_f64().unwrap(), rtol, "after the run");
        }
    }
}

#[test]
fn every_recorded_rate_is_met_to_a_billionth() {
    let file: Value = serde_json::from_str(include_str!("fixtures/schedules.json")).unwrap();
    let (mut run, mut skipped) = (0, vec![]);
    for case in file["cases"].as_array().unwrap() {
        match config(case, 0) {
            Some(_) => {
                check(case, &case["lr"], 1e-9);
                run += 1;
            }
            None => skipped.push(case["type"].as_str().unwrap()),
        }
    }
    assert_eq!(run, 16);
    assert_eq!(skipped.iter().filter(|t| **t == "OneCycle").count(), 6);
    assert_eq!(skipped.iter().filter(|t| **t == "LRRangeTest").count(), 4);
}

#[test]
fn refused_parameter_sets_that_the_types_can_hold_are_refused() {
    let file: Value = serde_json::from_str(include_str!("fixtures/schedules.json")).unwrap();
    let mut run = 0;
    for case in file["errors"].as_array().unwrap() {
        // Fractions, negative numbers, lists, missing and unknown keys are for the configuration to refuse.
        if case["params"]["warmup_num_steps"] == 0 {
            let error = Schedule::new(&config(case, 0).unwrap(), 0.1).unwrap_err();
            assert!(error.to_string().contains("warmup_num_steps"), "{error}");
            run += 1;
        }
    }
    assert_eq!(run, 2);
}

#[test]
fn the_conformance_cases_hold() {
    let file: Value = serde_json::from_str(include_str!("fixtures/conformance_data.json")).unwrap();
    let (mut run, mut skipped) = (0, vec![]);
    for case in file.as_array().unwrap().iter().filter(|c| c["area"] == "lr-schedule") {
        let id = case["id"].as_str().unwrap();
        let rates = &case["expect"]["lr_of_optimizer_step_1_to_n"];
        match id {
            // Types and forms of values (null, true, lists of the wrong length) are for the configuration to judge.
            "lr-49" | "lr-55" | "lr-69" | "lr-names" => skipped.push(id),
            "lr-72" => {
                assert!(Schedule::new(&config(&case["input"], 0).unwrap(), 0.1).is_ok(), "{id}");
                run += 1;
            }
            _ if config(&case["input"], 0).is_none() => skipped.push(id),
            _ => {
                check(&case["input"], rates, case["rtol"].as_f64().unwrap());
                run += 1;
            }
        }
    }
    assert_eq!(run, 5, "lr-15, lr-16, lr-19, lr-20, lr-72");
    assert_eq!(skipped.len(), 15, "{skipped:?}");
}
