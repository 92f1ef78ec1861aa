//! Reads `scheduler`. The table of its parameters depends on its type.

use super::note::printable;
use super::optim::{needs_type, parameters, unknown_type};
use super::walk::ConfigWalk;
use super::{AdafactorConfig, ConfigRule, OneCycleConfig, OptimizerConfig, PerGroup, SchedulerConfig, WarmupType};
use crate::util::counted;
use serde_json::Value;

/// The schedules, in exact letter case.
const SCHEDULES: [&str; 5] = ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest"];
/// PyTorch's schedules, which DeepSpeed also accepts but candle-zero does not support.
const PYTORCH_SCHEDULES: [&str; 15] = [
    "LambdaLR",
    "MultiplicativeLR",
    "StepLR",
    "MultiStepLR",
    "ConstantLR",
    "LinearLR",
    "ExponentialLR",
    "PolynomialLR",
    "CosineAnnealingLR",
    "CosineAnnealingWarmRestarts",
    "CyclicLR",
    "OneCycleLR",
    "ReduceLROnPlateau",
    "SequentialLR",
    "ChainedScheduler",
];

const SCHEDULER: &str = "scheduler";

/// Reads the file's schedule for the given optimizer. Problems are added to the walk.
pub(super) fn scheduler(walk: &mut ConfigWalk<'_>, optimizer: Option<&OptimizerConfig>) -> Option<SchedulerConfig> {
    if !walk.given.contains_key(SCHEDULER) || walk.get(SCHEDULER) == Some(&Value::Null) {
        return None;
    }
    let found = walk.str("scheduler.type").map(str::to_string);
    let name = found.and_then(|found| {
        let name = SCHEDULES.into_iter().find(|name| **name == found);
        if name.is_none() {
            unknown_type(walk, "scheduler.type", &found, &SCHEDULES, &PYTORCH_SCHEDULES, false);
        }
        name
    });
    let Some(name) = name else {
        needs_type(walk, SCHEDULER, &SCHEDULES);
        return None;
    };
    parameters(walk, SCHEDULER, name)?;
    match optimizer {
        Some(OptimizerConfig::ScheduleFree(_)) => report_conflict(
            walk,
            "AdamWScheduleFree averages weights instead of lowering the rate; leave the scheduler section out (warmup_steps \
             of the optimizer is its warm-up)",
        ),
        Some(OptimizerConfig::Adafactor(AdafactorConfig { lr: None, .. })) => report_conflict(
            walk,
            "Adafactor's relative_step sets the learning rate; leave the scheduler section out, or set relative_step to \
             false",
        ),
        _ => {}
    }
    match name {
        "OneCycle" => one_cycle(walk, optimizer).map(SchedulerConfig::OneCycle),
        "LRRangeTest" => Some(SchedulerConfig::LrRangeTest {
            lr_range_test_min_lr: rate(walk, "lr_range_test_min_lr"),
            lr_range_test_step_size: walk.count(&param("lr_range_test_step_size")),
            lr_range_test_step_rate: walk.float(&param("lr_range_test_step_rate")),
            lr_range_test_staircase: walk.bool(&param("lr_range_test_staircase")),
        }),
        _ => warm_up(walk, name, optimizer),
    }
}

/// Reports that the optimizer cannot have a schedule.
fn report_conflict(walk: &mut ConfigWalk<'_>, why: &str) {
    let position = walk.position("scheduler.type");
    walk.problem(ConfigRule::Conflict, "scheduler.type", position, why);
}

/// Returns the path of a parameter.
fn param(key: &str) -> String {
    format!("{SCHEDULER}.params.{key}")
}

/// Reads a rate, or one rate per parameter group. Returns `None` if the key is absent. The engine's builder determines
/// the number of groups.
fn given_rate(walk: &mut ConfigWalk<'_>, key: &str) -> Option<PerGroup> {
    let rate = match walk.get(&param(key))? {
        Value::Array(rates) => PerGroup::Each(rates.iter().filter_map(Value::as_f64).collect()),
        rate => PerGroup::All(rate.as_f64()?),
    };
    if let PerGroup::Each(rates) = &rate {
        let (numbers, groups) = (counted(rates.len(), "number"), counted(rates.len(), "parameter group"));
        walk.note(&param(key), format!("a list of {numbers}: it needs an engine with {groups}"));
    }
    Some(rate)
}

/// Reads a rate that has a default.
fn rate(walk: &mut ConfigWalk<'_>, key: &str) -> PerGroup {
    given_rate(walk, key).unwrap_or(PerGroup::All(0.0))
}

/// Reports a missing required parameter. (A value that does not fit has already been reported.)
fn report_missing(walk: &mut ConfigWalk<'_>, key: &str, why: &str) {
    let path = param(key);
    if !walk.given.contains_key(&path) {
        let position = walk.position(SCHEDULER);
        walk.problem(ConfigRule::Type, &path, position, format!("required: {why}"));
    }
}

/// Notes a warm-up to a lower rate, which DeepSpeed accepts too.
fn note_falling_warm_up(walk: &mut ConfigWalk<'_>, optimizer: Option<&OptimizerConfig>) {
    let Some(min) = walk.get(&param("warmup_min_lr")).and_then(Value::as_f64) else { return };
    let optimizer_lr =
        |walk: &ConfigWalk<'_>| optimizer.and_then(|_| walk.get("optimizer.params.lr")).and_then(Value::as_f64);
    let given = walk.get(&param("warmup_max_lr")).and_then(Value::as_f64);
    let (max, max_name) = match given {
        Some(max) => (Some(max), "warmup_max_lr"),
        None => (optimizer_lr(walk), "the optimizer's lr"),
    };
    if let Some(max) = max.filter(|max| min > *max) {
        let text = format!("{min} is above {max_name} {max}: the rate falls during the warm-up, as in DeepSpeed");
        walk.note(&param("warmup_min_lr"), text);
    }
}

fn warm_up(walk: &mut ConfigWalk<'_>, name: &str, optimizer: Option<&OptimizerConfig>) -> Option<SchedulerConfig> {
    let warmup_type = match walk.str(&param("warmup_type")) {
        Some("linear") => WarmupType::Linear,
        Some("log") | None => WarmupType::Log,
        Some(other) => {
            let other = printable(other);
            let text = format!("\"{other}\" is unknown (log or linear): treated as \"log\", as in DeepSpeed");
            walk.note(&param("warmup_type"), text);
            walk.set(&param("warmup_type"), "log".into());
            WarmupType::Log
        }
    };
    let warmup_num_steps = walk.count(&param("warmup_num_steps"));
    note_falling_warm_up(walk, optimizer);
    if name == "WarmupLR" {
        return Some(SchedulerConfig::WarmupLr {
            warmup_min_lr: rate(walk, "warmup_min_lr"),
            warmup_max_lr: given_rate(walk, "warmup_max_lr"),
            warmup_num_steps,
            warmup_type,
        });
    }
    let Some(total_num_steps) = walk.int(&param("total_num_steps")).and_then(|n| u64::try_from(n).ok()) else {
        report_missing(walk, "total_num_steps", &format!("{name} needs the number of steps of the complete schedule"));
        return None;
    };
    if total_num_steps < warmup_num_steps {
        let text =
            format!("{total_num_steps} is less than warmup_num_steps {warmup_num_steps}: the warm-up never ends");
        walk.note(&param("total_num_steps"), text);
    }
    Some(if name == "WarmupDecayLR" {
        let decay_power = walk.float(&param("decay_power"));
        if decay_power <= 0.0 {
            let position = walk.position(&param("decay_power"));
            let text = format!("expected a number above 0, found {decay_power}");
            walk.problem(ConfigRule::Range, &param("decay_power"), position, text);
        }
        SchedulerConfig::WarmupDecayLr {
            decay_power,
            total_num_steps,
            warmup_min_lr: rate(walk, "warmup_min_lr"),
            warmup_max_lr: rate(walk, "warmup_max_lr"),
            warmup_num_steps,
            warmup_type,
        }
    } else {
        SchedulerConfig::WarmupCosineLr {
            total_num_steps,
            warmup_min_ratio: walk.float(&param("warmup_min_ratio")),
            warmup_num_steps,
            cos_min_ratio: walk.float(&param("cos_min_ratio")),
            warmup_type,
        }
    })
}

fn one_cycle(walk: &mut ConfigWalk<'_>, optimizer: Option<&OptimizerConfig>) -> Option<OneCycleConfig> {
    let bounds = ["cycle_min_lr", "cycle_max_lr"].map(|key| {
        let lr = given_rate(walk, key);
        if lr.is_none() {
            report_missing(walk, key, "OneCycle goes from cycle_min_lr to cycle_max_lr and back");
        }
        lr
    });
    let [Some(cycle_min_lr), Some(cycle_max_lr)] = bounds else { return None };
    let cycle_first_step_size = walk.float(&param("cycle_first_step_size"));
    let cycle_first_stair_count = walk.count(&param("cycle_first_stair_count"));
    let cycle = OneCycleConfig {
        cycle_min_lr,
        cycle_max_lr,
        decay_lr_rate: walk.float(&param("decay_lr_rate")),
        cycle_first_step_size,
        cycle_second_step_size: walk
            .get(&param("cycle_second_step_size"))
            .and_then(Value::as_f64)
            .unwrap_or(cycle_first_step_size),
        cycle_first_stair_count,
        cycle_second_stair_count: walk
            .get(&param("cycle_second_stair_count"))
            .and_then(Value::as_u64)
            .unwrap_or(cycle_first_stair_count),
        decay_step_size: walk.float(&param("decay_step_size")),
        cycle_momentum: walk.bool(&param("cycle_momentum")),
        cycle_min_mom: walk.float(&param("cycle_min_mom")),
        cycle_max_mom: walk.float(&param("cycle_max_mom")),
        decay_mom_rate: walk.float(&param("decay_mom_rate")),
    };
    if cycle_first_step_size == 0.0 {
        let position = walk.position(&param("cycle_first_step_size"));
        walk.problem(
            ConfigRule::Range,
            &param("cycle_first_step_size"),
            position,
            "expected a number above 0, found 0",
        );
    }
    if cycle.cycle_momentum {
        check_momentum(walk, &cycle, optimizer);
    }
    Some(cycle)
}

/// Checks the momentum of the cycle, and adds a note if it has no effect or will stop training.
fn check_momentum(walk: &mut ConfigWalk<'_>, cycle: &OneCycleConfig, optimizer: Option<&OptimizerConfig>) {
    if optimizer.is_some_and(|optimizer| !optimizer.has_betas()) {
        let text = "has no effect on an optimizer without betas, which keeps its momentum, as in DeepSpeed";
        return walk.note(&param("cycle_momentum"), text);
    }
    for (key, beta) in [("cycle_min_mom", cycle.cycle_min_mom), ("cycle_max_mom", cycle.cycle_max_mom)] {
        if beta == 1.0 {
            let position = walk.position(&param(key));
            walk.problem(
                ConfigRule::Range,
                &param(key),
                position,
                "expected a number of at least 0 and below 1, found 1",
            );
        }
    }
    let per_step = cycle.cycle_max_mom * cycle.decay_mom_rate / cycle.decay_step_size;
    if cycle.decay_step_size > 0.0 && per_step > 0.0 {
        // The steps of the cycle, plus one step for its start, come before the first step after the cycle.
        let steps_to_one = ((1.0 - cycle.cycle_max_mom) / per_step).ceil();
        let step = cycle.cycle_first_step_size + cycle.cycle_second_step_size + 1.0 + steps_to_one;
        let text = format!(
            "beta1 grows after the cycle, and training will stop with an error when it reaches 1, at about optimizer \
             step {step:.0}"
        );
        walk.note(&param("decay_mom_rate"), text);
    }
}
