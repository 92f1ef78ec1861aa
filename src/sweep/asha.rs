//! Asynchronous successive halving (ASHA, Li et al. 2020), with trials that pause: a trial that is promoted continues
//! from its checkpoint.

use super::settings::SweepGoal;
use super::trial::{SweepTrial, TrialState};

/// Returns the steps at which trials pause, followed by the number of steps of a complete trial.
pub(super) fn rungs(min_steps: u64, eta: u64, steps: u64) -> Vec<u64> {
    let rungs = std::iter::successors(Some(min_steps), |rung| rung.checked_mul(eta));
    rungs.take_while(|rung| *rung < steps).chain([steps]).collect()
}

/// Returns the trial to promote and the rung to which it continues. A trial can be promoted if it is among the best
/// `1 / eta` of a rung and has not continued yet; of these trials, the best one of the highest rung is returned.
pub(super) fn promotion(trials: &[SweepTrial], rungs: &[u64], eta: u64, goal: SweepGoal) -> Option<(usize, u64)> {
    rungs.windows(2).rev().find_map(|pair| {
        let [rung, next] = [pair[0], pair[1]];
        let ranked = ranked_at(trials, rung, goal);
        let count = ranked.len() / usize::try_from(eta).unwrap_or(usize::MAX);
        let mut best = ranked.into_iter().take(count);
        best.find(|trial| is_waiting_at(trial, rung)).map(|trial| (trial.number, next))
    })
}

/// Returns the trial that continues if no rung has enough trials for a promotion and no trial is complete: the best
/// paused trial of the highest rung that has one. Without this rule, a sweep with few trials would train none of them
/// to the end.
pub(super) fn last_promotion(trials: &[SweepTrial], rungs: &[u64], goal: SweepGoal) -> Option<(usize, u64)> {
    if trials.iter().any(|trial| trial.state == TrialState::Complete) {
        return None;
    }
    rungs.windows(2).rev().find_map(|pair| {
        let waiting = ranked_at(trials, pair[0], goal).into_iter().find(|trial| is_waiting_at(trial, pair[0]));
        waiting.map(|trial| (trial.number, pair[1]))
    })
}

fn is_waiting_at(trial: &SweepTrial, rung: u64) -> bool {
    trial.state == TrialState::Paused && trial.reached() == rung
}

/// Returns the trials that have reached a rung, the best first.
fn ranked_at(trials: &[SweepTrial], rung: u64, goal: SweepGoal) -> Vec<&SweepTrial> {
    let reached = trials.iter().filter_map(|trial| Some((goal.score(trial.value_at(rung)?), trial)));
    let mut reached: Vec<_> = reached.collect();
    reached.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.number.cmp(&b.1.number)));
    reached.into_iter().map(|(_, trial)| trial).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trial(number: usize, results: &[(u64, f64)], state: TrialState) -> SweepTrial {
        SweepTrial { results: results.to_vec(), state, ..SweepTrial::new(number, Vec::new(), None) }
    }

    #[test]
    fn rungs_grow_by_eta_and_end_with_the_complete_trial() {
        assert_eq!(rungs(1, 4, 64), [1, 4, 16, 64]);
        assert_eq!(rungs(3, 2, 20), [3, 6, 12, 20]);
        assert_eq!(rungs(19, 4, 20), [19, 20]);
        assert_eq!(rungs(1, 2, u64::MAX).len(), 65);
    }

    #[test]
    fn the_best_of_a_rung_continue_once_there_are_enough_and_the_highest_rung_comes_first() {
        use TrialState::{Failed, Paused, Running};
        let (rungs, goal) = ([1, 4, 16], SweepGoal::Minimize);
        let mut trials: Vec<SweepTrial> =
            [3.0, 1.0, 2.0].iter().enumerate().map(|(at, loss)| trial(at + 1, &[(1, *loss)], Paused)).collect();
        assert_eq!(promotion(&trials, &rungs, 4, goal), None, "three are too few for a quarter");
        trials.push(trial(4, &[(1, f64::NAN)], Paused));
        assert_eq!(promotion(&trials, &rungs, 4, goal), Some((2, 4)));
        assert_eq!(promotion(&trials, &rungs, 2, SweepGoal::Maximize), Some((1, 4)), "NaN is the worst value");
        trials[1].state = Running { to: 4 };
        assert_eq!(promotion(&trials, &rungs, 4, goal), None);
        trials[1].state = Failed("x".into());
        assert_eq!(promotion(&trials, &rungs, 4, goal), None, "its place is taken");
        assert_eq!(last_promotion(&trials, &rungs, goal), Some((3, 4)));
        for (number, loss) in [(1, 0.5), (3, 0.4)] {
            trials[number - 1].results.push((4, loss));
        }
        assert_eq!(promotion(&trials, &rungs, 2, goal), Some((3, 16)));
        assert_eq!(last_promotion(&trials, &rungs, goal), Some((3, 16)));
    }
}
