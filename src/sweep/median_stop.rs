//! The median stopping rule (Golovin et al. 2017): a trial ends if its best value so far is worse than the median of
//! the other trials' mean values up to the same step.

use super::settings::SweepGoal;
use super::trial::SweepTrial;

/// Returns whether `trial`, which has just reached a step, ends there.
pub(super) fn ends(trial: &SweepTrial, all: &[SweepTrial], grace: u64, min_trials: usize, goal: SweepGoal) -> bool {
    let step = trial.reached();
    if step < grace {
        return false;
    }
    let others = all.iter().filter(|other| other.number != trial.number && other.value_at(step).is_some());
    let mut means: Vec<f64> = others.map(|other| mean_score(other, step, goal)).collect();
    if means.len() < min_trials {
        return false;
    }
    means.sort_by(f64::total_cmp);
    // If the number of means is even, the worse of the two in the middle is used, so a trial continues in case of
    // doubt.
    let median = means[means.len() / 2];
    let best = trial.results.iter().map(|(_, value)| goal.score(*value)).fold(f64::INFINITY, f64::min);
    best > median
}

fn mean_score(trial: &SweepTrial, step: u64, goal: SweepGoal) -> f64 {
    let scores = trial.results.iter().filter(|(at, _)| *at <= step).map(|(_, value)| goal.score(*value));
    let (sum, count) = scores.fold((0.0, 0.0), |(sum, count), score| (sum + score, count + 1.0));
    sum / count
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trial_ends_if_it_is_worse_than_the_median_of_enough_others() {
        let trial = |number, values: &[f64]| SweepTrial {
            results: values.iter().enumerate().map(|(at, value)| (at as u64 + 1, *value)).collect(),
            ..SweepTrial::new(number, Vec::new(), None)
        };
        let all = [trial(1, &[4.0, 2.0]), trial(2, &[5.0, 3.0]), trial(3, &[9.0, 7.0, 1.0]), trial(4, &[6.0])];
        let goal = SweepGoal::Minimize;
        // The means of the others up to step 2 are 3, 4 and 8.
        assert!(ends(&trial(5, &[9.0, 4.5]), &all, 2, 3, goal));
        assert!(!ends(&trial(5, &[9.0, 4.0]), &all, 2, 3, goal));
        assert!(!ends(&trial(5, &[3.5, 9.0]), &all, 2, 3, goal), "its best value counts");
        assert!(!ends(&trial(5, &[9.0, 4.5]), &all, 3, 3, goal), "too early");
        assert!(!ends(&trial(5, &[9.0, 4.5]), &all, 2, 4, goal), "too few others");
        assert!(!ends(&trial(5, &[9.0, 4.5]), &all, 2, 3, SweepGoal::Maximize));
        assert!(ends(&trial(5, &[f64::NAN, f64::NAN]), &all, 2, 3, SweepGoal::Maximize));
    }
}
