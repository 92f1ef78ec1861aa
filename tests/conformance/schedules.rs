//! Learning-rate schedules, built from configurations, compared with the rates and betas recorded from DeepSpeed.

use candle_zero::Config;
use candle_zero::config::ConfigProblem;
use candle_zero::error::{ConfigError, Error, OptimError};
use candle_zero::optim::{Momentum, Schedule};
use serde_json::{Value, json};

/// Loads a recorded case as a configuration with the one parameter group `group`: each list is reduced to the group's
/// entry.
fn load(case: &Value, group: usize, base_lr: &Value) -> Result<Config, Vec<ConfigProblem>> {
    let mut params = case["params"].clone();
    let groups = case["group_lrs"].as_array().map_or(1, Vec::len);
    for value in params.as_object_mut().unwrap().values_mut() {
        if let Some(entry) = value.as_array().filter(|list| list.len() == groups).and_then(|list| list.get(group)) {
            *value = json!([entry]);
        }
    }
    let name = case["optimizer"].as_str().unwrap_or("Adam");
    let mut optimizer = json!({"type": name, "params": {"lr": base_lr}});
    if name == "SGD" {
        optimizer["params"]["momentum"] = json!(0.9);
    }
    let config = json!({
        "train_batch_size": 1, "optimizer": optimizer, "scheduler": {"type": case["type"], "params": params},
    });
    Config::load(config, 1).map_err(|error| match error {
        Error::Config(ConfigError::Problems { problems, .. }) => problems,
        other => panic!("{other}"),
    })
}

fn schedule(case: &Value, group: usize, base_lr: &Value) -> Schedule {
    let config = load(case, group, base_lr).unwrap();
    Schedule::new(config.scheduler.as_ref(), config.optimizer.as_ref()).unwrap()
}

/// Returns the keys that are refused in a case with one parameter group; the configuration does not contain the number
/// of groups.
fn refused_keys(case: &Value) -> Vec<String> {
    match load(case, 0, &json!(0.1)) {
        Err(problems) => problems.into_iter().map(|problem| problem.path).collect(),
        Ok(config) => match Schedule::new(config.scheduler.as_ref(), config.optimizer.as_ref()) {
            Err(Error::Optim(OptimError::ScheduleParameter { key, .. })) => vec![key.into()],
            result => result.map(|_| vec![]).unwrap(),
        },
    }
}

fn assert_close(got: f64, want: &Value, rtol: f64, context: &str) {
    let want = want.as_f64().unwrap();
    assert!((got - want).abs() <= rtol * want.abs(), "{context}: {got} instead of {want}");
}

/// Checks the momentum of a step against recorded betas, against a recorded beta1, or against the optimizer's own
/// values if the schedule does not change them.
fn check_momentum(case: &Value, expect: &Value, step: usize, schedule: &Schedule, rtol: f64, context: &str) {
    let found = schedule.momentum();
    match (found, &case["betas"], &expect["momentum_of_step_1_to_n"]) {
        (Momentum::Betas(beta1, beta2), Value::Array(steps), _) => {
            assert_close(beta1, &steps[step][0], rtol, context);
            assert_close(beta2, &steps[step][1], rtol, context);
        }
        (Momentum::Betas(beta1, beta2), _, Value::Array(steps)) => {
            assert_close(beta1, &steps[step], rtol, context);
            assert_eq!(beta2, 0.99, "{context}");
        }
        (found, betas, _) if betas == "unchanged" => assert_eq!(found, Momentum::Betas(0.9, 0.999), "{context}"),
        (found, ..) if case["momentum"] == "unchanged" => assert_eq!(found, Momentum::Factor(0.9), "{context}"),
        // Nothing is recorded.
        (_, Value::Null, Value::Null) => {}
        (found, betas, _) => panic!("{context}: {found:?}, but {betas} is recorded"),
    }
    assert_eq!(
        schedule.betas().is_some(),
        case["type"] == "OneCycle" && found != Momentum::Factor(0.9) && case["params"]["cycle_momentum"] != false,
        "{context}"
    );
}

/// Checks a case group by group, with a separate schedule for each, because a configuration describes only one group.
fn check(case: &Value, rates: &Value, expect: &Value, rtol: f64) {
    let groups = case["group_lrs"].as_array().unwrap();
    let skipped: Vec<u64> =
        case["skipped_steps"].as_array().into_iter().flatten().map(|s| s.as_u64().unwrap()).collect();
    for (group, base_lr) in groups.iter().enumerate() {
        let mut schedule = schedule(case, group, base_lr);
        // With several groups, a conformance case has a list of the groups' rates for each step, and schedules.json has
        // a list of the steps' rates for each group.
        let steps = rates.as_array().unwrap();
        let per_group = groups.len() > 1 && steps.len() == groups.len();
        let steps = if per_group { steps[group].as_array().unwrap() } else { steps };
        for (step, lr) in steps.iter().enumerate() {
            let context = format!("{} {} group {group} step {}", case["type"], case["params"], step + 1);
            assert_close(schedule.lr(), lr.get(group).unwrap_or(lr), rtol, &context);
            check_momentum(case, expect, step, &schedule, rtol, &context);
            // Resuming from a checkpoint gives the same values.
            let mut resumed = self::schedule(case, group, base_lr);
            resumed.restore(schedule.last_batch_iteration());
            assert_eq!((resumed.lr(), resumed.momentum()), (schedule.lr(), schedule.momentum()), "{context}");
            if !skipped.contains(&(step as u64 + 1)) {
                schedule.step();
            }
        }
        if let Some(state) = case["state_after"]["last_batch_iteration"].as_i64() {
            assert_eq!(schedule.last_batch_iteration(), state);
            assert_close(schedule.lr(), &case["get_last_lr_after"][group], rtol, "after the run");
        }
    }
}

fn recorded() -> Value {
    serde_json::from_str(include_str!("../fixtures/schedules.json")).unwrap()
}

#[test]
fn every_recorded_rate_and_momentum_is_met_to_a_billionth() {
    let file = recorded();
    let cases = file["cases"].as_array().unwrap();
    for case in cases {
        check(case, &case["lr"], &Value::Null, 1e-9);
    }
    let of = |name: &str| cases.iter().filter(|case| case["type"] == name).count();
    let counts = ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest"].map(of);
    assert_eq!((counts, cases.len()), ([8, 4, 4, 6, 4], 26));
}

#[test]
fn every_parameter_set_that_deepspeed_refuses_is_refused_by_its_key() {
    let file = recorded();
    let keys: Vec<Vec<String>> = file["errors"]
        .as_array()
        .unwrap()
        .iter()
        .map(|case| refused_keys(case).iter().map(|key| key.replace("scheduler.params.", "")).collect())
        .collect();
    let expected = [
        "warmup_num_steps",
        "warmup_num_steps",
        "warmup_min_lr",
        "total_num_steps",
        "warmup_num_steps",
        "total_num_steps",
        "warmup_num_steps",
        "cycle_max_lr",
        "cycle_first_step_size",
        "cycle_second_step_size",
        "cycle_min_lr",
        "lr_range_test_step_size",
        "lr_range_test_min_lr",
        "warmup_steps",
    ];
    assert_eq!(keys, expected.map(|key| vec![key.to_string()]));
}

#[test]
fn the_conformance_cases_hold() {
    let file: Value = serde_json::from_str(include_str!("../fixtures/conformance_data.json")).unwrap();
    let (mut rates, mut verdicts) = (0, 0);
    for case in file.as_array().unwrap().iter().filter(|c| c["area"] == "lr-schedule") {
        let (id, input, expect) = (case["id"].as_str().unwrap(), &case["input"], &case["expect"]);
        if let Some(types) = expect["types"].as_array() {
            for name in types.iter().chain([&json!("StepLR"), &json!("Warmup")]) {
                let params = json!({"total_num_steps": 9, "cycle_min_lr": 0.1, "cycle_max_lr": 0.2});
                let case = json!({"type": name, "params": params});
                // Parameters of the other schedules are unknown keys of this one.
                let problems = load(&case, 0, &json!(0.1)).err().unwrap_or_default();
                let known = problems.iter().all(|problem| problem.path != "scheduler.type");
                assert_eq!(known, types.contains(name), "{name}");
            }
            verdicts += 1;
        } else if let Some(ok) = expect["ok"].as_bool() {
            // DeepSpeed accepts `true` as a number outside the sections that pydantic reads; candle-zero does not.
            let ok = ok && id != "lr-55";
            // A configuration has one group, for which lists of two numbers are wrong.
            let case = json!({"type": input["type"], "params": input["params"]});
            assert_eq!(refused_keys(&case).is_empty(), ok, "{id}");
            verdicts += 1;
        } else {
            check(input, &expect["lr_of_optimizer_step_1_to_n"], expect, case["rtol"].as_f64().unwrap());
            rates += 1;
        }
    }
    assert_eq!((rates, verdicts), (11, 9));
}

#[test]
fn where_the_momentum_would_reach_one_is_said_beforehand_and_is_an_error() {
    let file = recorded();
    let case = file["cases"].as_array().unwrap().iter().find(|c| c["notes"] == "post-cycle decay of lr and momentum");
    let config = load(case.unwrap(), 0, &json!(0.01)).unwrap();
    let note = config.notes.iter().find(|note| note.path == "scheduler.params.decay_mom_rate").unwrap();
    let mut schedule = Schedule::new(config.scheduler.as_ref(), config.optimizer.as_ref()).unwrap();
    let first = (1..).find(|_| {
        let refused = schedule.current_values().is_err();
        schedule.step();
        refused
    });
    let ending = format!("about optimizer step {}", first.unwrap());
    assert!(note.message.ends_with(&ending), "{} and {ending}", note.message);
}
