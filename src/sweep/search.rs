//! The choice of the next trial's parameters, for each searcher.

use super::random::{RandomPurpose, RandomStream};
use super::settings::{SweepSearcher, SweepSettings, TrialScheduler};
use super::space::TrialParameters;
use super::tpe::{self, STARTUP_TRIALS};
use super::trial::{SweepTrial, TrialState};
use crate::util::permute;

/// The maximum number of suggestions for a trial, if earlier trials already have the suggested parameters.
const REDRAWS: usize = 100;

/// Returns the parameters of the trial after `trials`.
pub(super) fn next_parameters(settings: &SweepSettings, trials: &[SweepTrial]) -> TrialParameters {
    let mut random = RandomStream::new(settings.seed, RandomPurpose::Trial(trials.len() + 1));
    let ranked = ranked(settings, trials);
    match settings.searcher {
        SweepSearcher::Grid => settings.space.combination(grid_index(settings, trials.len() as u64)),
        SweepSearcher::Tpe if ranked.len() >= STARTUP_TRIALS => suggested(settings, trials, &ranked, &mut random),
        SweepSearcher::Random | SweepSearcher::Tpe => drawn(settings, trials, &mut random),
    }
}

/// Returns the index of the combination that a grid tries after `previous` others. The order is random if trials are
/// compared before all have begun: in the order of a grid, neighbours are similar, and later combinations are often
/// better.
fn grid_index(settings: &SweepSettings, previous: u64) -> u64 {
    match (settings.scheduler, settings.space.grid_count()) {
        (TrialScheduler::Asha { .. } | TrialScheduler::MedianStop { .. }, Some(count)) => {
            permute(previous, count, RandomStream::new(settings.seed, RandomPurpose::Order).next())
        }
        _ => previous,
    }
}

/// Draws parameters. In a finite space, each combination is drawn once, except for the members of a population.
fn drawn(settings: &SweepSettings, trials: &[SweepTrial], random: &mut RandomStream) -> TrialParameters {
    let is_population = matches!(settings.scheduler, TrialScheduler::Pbt { .. });
    match settings.space.count().filter(|_| !is_population) {
        None => settings.space.draw(random),
        Some(count) => {
            let key = RandomStream::new(settings.seed, RandomPurpose::Order).next();
            let combinations = (0..count).map(|at| settings.space.combination(permute(at, count, key)));
            // Trials that were suggested may have taken some combinations.
            let mut free = combinations.take(trials.len() + 1).filter(|parameters| !is_taken(trials, parameters));
            free.next().unwrap_or_else(|| settings.space.draw(random))
        }
    }
}

/// Returns the suggestion of the estimator, or drawn parameters if it keeps suggesting those of earlier trials.
fn suggested(
    settings: &SweepSettings,
    trials: &[SweepTrial],
    ranked: &[&TrialParameters],
    random: &mut RandomStream,
) -> TrialParameters {
    let mut suggestions = (0..REDRAWS).map(|_| tpe::suggest(&settings.space, ranked, random));
    let new = suggestions.find(|parameters| !is_taken(trials, parameters));
    new.unwrap_or_else(|| drawn(settings, trials, random))
}

fn is_taken(trials: &[SweepTrial], parameters: &TrialParameters) -> bool {
    trials.iter().any(|trial| trial.parameters == *parameters)
}

/// Returns the parameters of the trials that have a result or have failed, the best first. A trial that got further
/// counts as better, because the scheduler has preferred it. Failed trials are last.
fn ranked<'a>(settings: &SweepSettings, trials: &'a [SweepTrial]) -> Vec<&'a TrialParameters> {
    let has_failed = |trial: &SweepTrial| matches!(trial.state, TrialState::Failed(_));
    let mut ranked: Vec<&SweepTrial> =
        trials.iter().filter(|trial| has_failed(trial) || !trial.results.is_empty()).collect();
    ranked.sort_by(|a, b| {
        let further = b.reached().cmp(&a.reached());
        let better = a.score(settings.goal).total_cmp(&b.score(settings.goal));
        has_failed(a).cmp(&has_failed(b)).then(further).then(better).then(a.number.cmp(&b.number))
    });
    ranked.into_iter().map(|trial| &trial.parameters).collect()
}
