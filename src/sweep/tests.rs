//! Tests of the sweep as a whole: planted landscapes, and properties that hold for all results and orders.
#![allow(clippy::unwrap_used)]

use super::*;
use proptest::prelude::*;
use std::collections::BTreeMap;

/// Returns the loss of a planted landscape: it falls with the steps to a floor that the parameters determine, and a bit
/// of noise, which is always the same for the same trial and step, disturbs it.
fn planted_loss(trial: &SweepTrial, step: u64) -> f64 {
    let number = |name: &str| trial.parameter(name).and_then(serde_json::Value::as_f64).unwrap();
    let floor = (number("lr").log10() + 3.0).powi(2) + 0.1 * (number("width") - 20.0).abs();
    let noise = crate::util::mix(step ^ (trial.number as u64) << 32) as f64 / u64::MAX as f64 - 0.5;
    floor + (1.0 + floor) / (step as f64).sqrt() + 0.02 * noise
}

fn space() -> SweepSpace {
    SweepSpace::new().with("lr", ParameterDomain::log_uniform(1e-6, 1.0)).with("width", ParameterDomain::integer(4, 64))
}

fn settings(trials: usize, searcher: SweepSearcher, scheduler: TrialScheduler) -> SweepSettings {
    let mut settings = SweepSettings::new(space(), 256);
    (settings.trials, settings.searcher, settings.scheduler) = (Some(trials), searcher, scheduler);
    settings
}

fn run_sweep(settings: SweepSettings) -> Sweep {
    let mut sweep = Sweep::new(settings).unwrap();
    sweep.run(|trial, step| Ok(planted_loss(trial, step)));
    sweep
}

#[test]
fn successive_halving_finds_the_best_of_64_with_a_quarter_of_the_steps() {
    for seed in 0..20 {
        let with = |scheduler| {
            let mut settings = settings(64, SweepSearcher::Random, scheduler);
            settings.seed = seed;
            run_sweep(settings)
        };
        let (all, halved) = (with(TrialScheduler::None), with(TrialScheduler::asha(4)));
        let (best, found) = (all.best().unwrap(), halved.best().unwrap());
        assert_eq!((best.number, &best.parameters), (found.number, &found.parameters), "seed {seed}");
        assert_eq!((found.state.clone(), found.value()), (TrialState::Complete, best.value()));
        assert_eq!(all.steps_done(), 64 * 256);
        assert!(halved.steps_done() * 4 <= all.steps_done(), "{} steps", halved.steps_done());
    }
}

#[test]
fn the_estimator_finds_better_parameters_than_chance() {
    let loss = |searcher, seed| {
        let mut settings = settings(60, searcher, TrialScheduler::None);
        settings.seed = seed;
        run_sweep(settings).best().unwrap().value().unwrap()
    };
    let mean = |searcher| (0..10).map(|seed| loss(searcher, seed)).sum::<f64>() / 10.0;
    let (tpe, random) = (mean(SweepSearcher::Tpe), mean(SweepSearcher::Random));
    assert!(tpe < 0.6 * random, "{tpe} and {random}");
}

#[test]
fn stopping_at_the_median_saves_steps_and_keeps_the_best() {
    let all = run_sweep(settings(40, SweepSearcher::Random, TrialScheduler::None));
    let stopped = run_sweep(settings(40, SweepSearcher::Random, TrialScheduler::median_stop(16)));
    assert_eq!(all.best().unwrap().parameters, stopped.best().unwrap().parameters);
    assert!(stopped.steps_done() * 10 < all.steps_done() * 7, "{}", stopped.steps_done());
    assert!(stopped.trials().iter().any(|trial| trial.state == TrialState::Stopped));
}

/// Trains a population. The loss depends on the learning rates of all steps, as in real training.
fn population(seed: u64) -> (Sweep, BTreeMap<usize, f64>) {
    let mut settings = settings(8, SweepSearcher::Random, TrialScheduler::pbt(32));
    settings.seed = seed;
    let mut sweep = Sweep::new(settings).unwrap();
    let mut losses: BTreeMap<(usize, u64), f64> = BTreeMap::new();
    sweep.run(|trial, step| {
        let (mut loss, from) = match (trial.results.last(), trial.branch) {
            (Some((from, loss)), _) => (*loss, *from),
            // A branch is handed out before its donor continues, so the donor's newest loss is that of the branch.
            (None, Some(branch)) => (losses[&(branch.trial, branch.step)], branch.step),
            (None, None) => (10.0, 0),
        };
        assert!(!losses.contains_key(&(trial.number, step)));
        let gain = 0.04 * (-(trial.parameter("lr").unwrap().as_f64().unwrap().log10() + 3.0).powi(2)).exp();
        (from..step).for_each(|_| loss *= 1.0 - gain);
        losses.insert((trial.number, step), loss);
        Ok(loss)
    });
    let last = sweep.trials().iter().filter_map(|trial| Some((trial.number, trial.value_at(256)?))).collect();
    (sweep, last)
}

#[test]
fn a_population_replaces_its_worst_by_branches_of_its_best() {
    let (sweep, last) = population(3);
    assert_eq!(last.len(), 8, "all members of the last generation are complete");
    // Two of eight are replaced after each of seven generations.
    assert_eq!((sweep.trials().len(), sweep.steps_done()), (8 + 14, 8 * 256));
    let branches: Vec<&SweepTrial> = sweep.trials().iter().filter(|trial| trial.branch.is_some()).collect();
    assert_eq!(branches.len(), 14);
    for branch in branches {
        let origin = branch.branch.unwrap();
        let donor = sweep.trial(origin.trial).unwrap();
        assert!(donor.value_at(origin.step).is_some() && donor.number < branch.number);
        assert_ne!(donor.parameters, branch.parameters);
    }
    let unscheduled = run_sweep(settings(8, SweepSearcher::Random, TrialScheduler::None));
    assert_eq!(unscheduled.trials().len(), 8);
    assert!(sweep.best().unwrap().branch.is_some(), "a branch is the best of this landscape");
}

#[test]
fn a_finite_space_is_searched_without_repetition_and_to_its_end() {
    let space = SweepSpace::new()
        .with("a", ParameterDomain::choice(["x", "y", "z"]))
        .with("b", ParameterDomain::Integer { low: 0, high: 8, step: 2, log: false });
    for searcher in [SweepSearcher::Grid, SweepSearcher::Random, SweepSearcher::Tpe] {
        let mut settings = SweepSettings::new(space.clone(), 3);
        settings.searcher = searcher;
        let mut sweep = Sweep::new(settings).unwrap();
        sweep.run(|trial, _| Ok(trial.parameter("b").unwrap().as_f64().unwrap()));
        let all: std::collections::BTreeSet<String> =
            sweep.trials().iter().map(|trial| format!("{:?}", trial.parameters)).collect();
        assert_eq!((all.len(), sweep.trials().len()), (15, 15), "{searcher:?}");
    }
}

#[test]
fn failures_are_recorded_and_too_many_end_the_sweep() {
    let mut settings = settings(20, SweepSearcher::Random, TrialScheduler::None);
    settings.max_failures = 3;
    let mut sweep = Sweep::new(settings.clone()).unwrap();
    sweep.run(|trial, step| match trial.number {
        2 | 5 => Err(crate::Error::other("it diverged")),
        _ => Ok(planted_loss(trial, step)),
    });
    assert_eq!((sweep.failures(), sweep.has_failed(), sweep.trials().len()), (2, false, 20));
    assert_eq!(sweep.trials()[1].state, TrialState::Failed("it diverged".into()));
    let mut sweep = Sweep::new(settings).unwrap();
    sweep.run(|_, _| Err(crate::Error::other("no data")));
    assert_eq!((sweep.failures(), sweep.has_failed(), sweep.best().is_none()), (4, true, true));
    assert_eq!(sweep.ask(), SweepDecision::End);
    assert!(sweep.tell(1, Ok(1.0)).is_err() && sweep.tell(0, Ok(1.0)).is_err() && sweep.tell(99, Ok(1.0)).is_err());
}

/// Generates settings with every scheduler, for the random and the TPE searcher.
fn any_settings() -> impl Strategy<Value = SweepSettings> {
    let schedulers = prop_oneof![
        Just(TrialScheduler::None),
        (1u64..30, 1usize..5).prop_map(|(every, min_trials)| TrialScheduler::MedianStop {
            every,
            grace: every,
            min_trials
        }),
        (1u64..30, 2u64..6).prop_map(|(min_steps, eta)| TrialScheduler::Asha { min_steps, eta }),
        (1u64..30, 0.01f64..0.5, 0.0f64..1.0).prop_map(|(every, quantile, resample)| TrialScheduler::Pbt {
            every,
            quantile,
            resample
        }),
    ];
    let searchers = prop_oneof![Just(SweepSearcher::Random), Just(SweepSearcher::Tpe)];
    (schedulers, searchers, 4usize..25, 30u64..100, any::<u64>(), any::<bool>(), 0usize..30).prop_map(
        |(scheduler, searcher, trials, steps, seed, maximize, max_failures)| {
            let mut settings = SweepSettings::new(space(), steps);
            let is_pbt = matches!(scheduler, TrialScheduler::Pbt { .. });
            settings.searcher = if is_pbt { SweepSearcher::Random } else { searcher };
            settings.goal = if maximize { SweepGoal::Maximize } else { SweepGoal::Minimize };
            (settings.scheduler, settings.trials, settings.seed) = (scheduler, Some(trials), seed);
            settings.max_failures = max_failures;
            settings
        },
    )
}

/// A call to a sweep, and its answer.
#[derive(Debug, Clone, PartialEq)]
enum SweepCall {
    Ask(SweepDecision),
    Tell(usize, Result<f64, String>),
}

/// Runs a sweep with up to `workers` jobs at a time that end in an order determined by `chance`, and checks every job.
fn simulate(settings: &SweepSettings, workers: usize, chance: u64) -> (Sweep, Vec<SweepCall>) {
    let mut sweep = Sweep::new(settings.clone()).unwrap();
    let (mut calls, mut running): (Vec<SweepCall>, Vec<SweepJob>) = (Vec::new(), Vec::new());
    for turn in 0u64.. {
        assert!(turn < 100_000, "the sweep does not end");
        let drawn = crate::util::mix(chance ^ turn);
        let task = if running.len() < workers { sweep.ask() } else { SweepDecision::Wait };
        if running.len() < workers {
            calls.push(SweepCall::Ask(task));
        }
        match task {
            SweepDecision::Train(job) => {
                let trial = sweep.trial(job.trial).unwrap();
                assert_eq!(trial.state, TrialState::Running { to: job.to });
                assert!(job.from == trial.reached() && job.from < job.to && job.to <= settings.steps, "{job:?}");
                assert!(running.iter().all(|other| other.trial != job.trial), "{job:?} is running");
                if let (Some(branch), true) = (trial.branch, trial.results.is_empty()) {
                    let donor = sweep.trial(branch.trial).unwrap();
                    assert_eq!((donor.reached(), job.from), (branch.step, branch.step), "the donor has not continued");
                    assert!(!matches!(donor.state, TrialState::Running { .. }));
                }
                running.push(job);
            }
            SweepDecision::Wait => {
                assert!(!running.is_empty(), "nothing to wait for");
                let job = running.swap_remove(drawn as usize % running.len());
                let result = match drawn >> 32 & 15 {
                    0 => Err("failed".to_owned()),
                    1 => Ok(f64::NAN),
                    value => Ok(value as f64 / job.to as f64),
                };
                // NaN is not equal to itself.
                calls.push(SweepCall::Tell(
                    job.trial,
                    result.clone().map(|value| if value.is_nan() { -1.0 } else { value }),
                ));
                sweep.tell(job.trial, result).unwrap();
            }
            SweepDecision::End => {
                assert!(running.is_empty());
                return (sweep, calls);
            }
        }
    }
    unreachable!("the loop returns");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn every_sweep_ends_and_makes_the_same_decisions_again(settings in any_settings(), workers in 1usize..6, chance: u64) {
        let (sweep, calls) = simulate(&settings, workers, chance);
        let (repeated_sweep, same_calls) = simulate(&settings, workers, chance);
        prop_assert_eq!(calls, same_calls);
        prop_assert_eq!(sweep.steps_done(), repeated_sweep.steps_done());
        let (count, steps) = (sweep.trial_count(), settings.steps);
        prop_assert!(sweep.steps_done() <= count as u64 * steps);
        let is_complete = sweep.trials().iter().any(|trial| trial.state == TrialState::Complete);
        if sweep.has_failed() {
            prop_assert!(sweep.failures() > settings.max_failures);
        } else {
            prop_assert!(sweep.trials().len() >= count);
            let is_alive = |trial: &SweepTrial| !matches!(trial.state, TrialState::Failed(_) | TrialState::Stopped | TrialState::Replaced { .. });
            // Unless all trials have failed, or were stopped or replaced, at least one is trained to its end.
            prop_assert!(is_complete || !sweep.trials().iter().any(is_alive), "{:?}", sweep.trials());
        }
        if let TrialScheduler::Asha { min_steps, eta } = settings.scheduler {
            let rungs = asha::rungs(min_steps, eta, steps);
            for pair in rungs.windows(2) {
                let reached = |rung: u64| sweep.trials().iter().filter(|trial| trial.value_at(rung).is_some()).count();
                // In an asynchronous order, the best of a rung may change after a promotion.
                prop_assert!(reached(pair[1]) <= reached(pair[0]));
            }
        }
    }
}

#[test]
fn wrong_settings_are_refused_with_what_is_allowed() {
    let space_of = |domain| SweepSpace::new().with("--lr", domain);
    let wrong = |space: SweepSpace, change: &dyn Fn(&mut SweepSettings)| {
        let mut settings = SweepSettings::new(space, 100);
        change(&mut settings);
        Sweep::new(settings).unwrap_err().to_string()
    };
    let lr = || space_of(ParameterDomain::uniform(0.0, 1.0));
    let domains = [
        ParameterDomain::Choice(vec![]),
        ParameterDomain::choice([1, 2, 1]),
        ParameterDomain::uniform(1.0, 1.0),
        ParameterDomain::uniform(0.0, f64::INFINITY),
        ParameterDomain::log_uniform(0.0, 1.0),
        ParameterDomain::integer(5, 4),
        ParameterDomain::Integer { low: 0, high: 9, step: 1, log: true },
        ParameterDomain::Integer { low: 0, high: 9, step: 10, log: false },
        ParameterDomain::Integer { low: 1, high: 9, step: 2, log: true },
        ParameterDomain::integer(0, i64::MAX),
        ParameterDomain::Real { low: 0.0, high: 1.0, log: false, points: Some(1) },
    ];
    let domain_errors: Vec<String> = domains.map(|domain| wrong(space_of(domain), &|_| {})).to_vec();
    insta::assert_snapshot!(domain_errors.join("\n"), @r"
    parameter --lr is a choice of no values; give at least one value
    parameter --lr is a choice that contains 1 twice; give each value once
    parameter --lr is uniform = [1, 1]; give a lower end below the upper end, or one value as a choice
    parameter --lr is uniform = [0, inf]; give finite numbers
    parameter --lr is log_uniform = [0, 1]; zero and negative numbers have no logarithm; give a lower end above 0, or use uniform
    parameter --lr is integer = [5, 4]; give a lower end below the upper end, or one value as a choice
    parameter --lr is log_integer = [0, 9]; give a lower end of at least 1, or use integer
    parameter --lr is integer = [0, 9], step = 10; give a step from 1 to the difference between the ends
    parameter --lr is log_integer = [1, 9], step = 2; leave step out, or use integer
    parameter --lr is integer = [0, 9223372036854775807]; give whole numbers of at most 2^53
    parameter --lr is uniform = [0, 1], points = 1; give 2 to 10000 points, which include both ends
    ");
    let changes: [&dyn Fn(&mut SweepSettings); 15] = [
        &|s| s.steps = 0,
        &|s| s.trials = Some(0),
        &|s| s.searcher = SweepSearcher::Grid,
        &|s| s.scheduler = TrialScheduler::Asha { min_steps: 100, eta: 4 },
        &|s| s.scheduler = TrialScheduler::Asha { min_steps: 0, eta: 4 },
        &|s| s.scheduler = TrialScheduler::Asha { min_steps: 1, eta: 1 },
        &|s| s.scheduler = TrialScheduler::median_stop(200),
        &|s| s.scheduler = TrialScheduler::MedianStop { every: 1, grace: 1, min_trials: 0 },
        &|s| s.scheduler = TrialScheduler::pbt(0),
        &|s| s.scheduler = TrialScheduler::Pbt { every: 1, quantile: 0.6, resample: 0.25 },
        &|s| s.scheduler = TrialScheduler::Pbt { every: 1, quantile: 0.25, resample: f64::NAN },
        &|s| (s.scheduler, s.searcher) = (TrialScheduler::pbt(1), SweepSearcher::Tpe),
        &|s| (s.scheduler, s.trials) = (TrialScheduler::pbt(1), Some(3)),
        &|s| s.space = SweepSpace::new(),
        &|s| {
            s.space = space_of(ParameterDomain::Real { low: 0.0, high: 1.0, log: false, points: Some(3) });
        },
    ];
    let setting_errors: Vec<String> = changes.iter().map(|change| wrong(lr(), change)).collect();
    insta::assert_snapshot!(setting_errors.join("\n"), @r"
    steps is 0; give 1 to 2^53 steps
    trials is 0; give 1 to 10000 trials
    the searcher grid cannot take all values of parameter --lr, which is uniform; add points = N to the parameter, make it a choice, or use another searcher
    asha.min_steps is 100; give at least 1 and fewer than the 100 steps of a complete trial
    asha.min_steps is 0; give at least 1 and fewer than the 100 steps of a complete trial
    asha.eta is 1; one in eta trials continues; give 2 to 1000
    median.every is 200; give at least 1 and fewer than the 100 steps of a complete trial
    median.min_trials is 0; give at least 1
    pbt.every is 0; give at least 1 and fewer than the 100 steps of a complete trial
    pbt.quantile is 0.6; give a fraction above 0 and at most 0.5
    pbt.resample is NaN; give a probability from 0 to 1
    the searcher tpe compares trials by their parameters, but pbt changes the parameters during training; use the searcher random or grid, or another scheduler
    trials is 3; pbt compares quarters of the trials; give at least 4
    the number of parameters is 0; give 1 to 64 parameters to vary
    parameter --lr has points, which only the searcher grid uses; leave them out, or use the searcher grid
    ");
    let grid = |domain| wrong(space_of(domain), &|s| (s.searcher, s.trials) = (SweepSearcher::Grid, Some(5)));
    insta::assert_snapshot!([grid(ParameterDomain::integer(1, 4)), grid(ParameterDomain::integer(1, 1 << 20))].join("\n"), @r"
    trials is 5; the grid has 4 combinations, and all of them are tried; leave trials out, or use another searcher
    the grid has 1048576 combinations, and a sweep has at most 10000 trials; give fewer values, or use another searcher
    ");
    let duplicate = lr().with("--lr", ParameterDomain::choice([1]));
    insta::assert_snapshot!(wrong(duplicate, &|_| {}), @"parameter --lr is given twice; give it once");
}
