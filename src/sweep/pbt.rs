//! Population-based training (Jaderberg et al. 2017), in generations: when all trials have reached a generation's last
//! step, branches of the best take the places of the worst.

use super::random::RandomStream;
use super::settings::SweepGoal;
use super::space::{SweepSpace, TrialParameters};
use super::trial::{SweepTrial, TrialState};

/// Returns the members of the population: the trials that no branch has replaced.
pub(super) fn members(trials: &[SweepTrial]) -> impl Iterator<Item = &SweepTrial> {
    trials.iter().filter(|trial| !matches!(trial.state, TrialState::Replaced { .. }))
}

/// Returns the last step of the generation that is in progress after `reached` steps.
pub(super) fn generation_end(reached: u64, every: u64, steps: u64) -> u64 {
    (reached / every).saturating_add(1).saturating_mul(every).min(steps)
}

/// Returns the numbers of the trials to replace, and those of the trials to branch from, once all members have reached
/// the end of a generation or have failed. A failed trial ranks last. Both lists are empty if all trials have failed.
pub(super) fn quantiles(trials: &[SweepTrial], quantile: f64, goal: SweepGoal) -> (Vec<usize>, Vec<usize>) {
    let has_failed = |trial: &SweepTrial| matches!(trial.state, TrialState::Failed(_));
    let mut ranked: Vec<&SweepTrial> = members(trials).collect();
    let key = |trial: &SweepTrial| if has_failed(trial) { f64::INFINITY } else { trial.score(goal) };
    let order = |a: &&SweepTrial, b: &&SweepTrial| {
        has_failed(a).cmp(&has_failed(b)).then(key(a).total_cmp(&key(b))).then(a.number.cmp(&b.number))
    };
    ranked.sort_by(order);
    let alive = ranked.iter().filter(|trial| !has_failed(trial)).count();
    let count = ((ranked.len() as f64 * quantile) as usize).max(1);
    let best = count.min(alive);
    // No trial is both among the best and among the worst.
    let worst = count.max(ranked.len() - alive).min(ranked.len() - best);
    if best == 0 {
        return (Vec::new(), Vec::new());
    }
    let numbers = |trials: &[&SweepTrial]| trials.iter().map(|trial| trial.number).collect::<Vec<_>>();
    let mut replaced = numbers(&ranked[ranked.len() - worst..]);
    replaced.sort_unstable();
    (replaced, numbers(&ranked[..best]))
}

/// Returns the parameters of a branch: each is drawn anew with probability `resample`, and otherwise perturbed.
pub(super) fn explored(
    space: &SweepSpace,
    parameters: &TrialParameters,
    resample: f64,
    random: &mut RandomStream,
) -> TrialParameters {
    let explored = space.parameters().iter().zip(parameters).map(|((name, domain), (_, value))| {
        let is_new = random.unit() < resample;
        (name.clone(), if is_new { domain.draw(random) } else { domain.perturbed(value, random) })
    });
    explored.collect()
}

#[cfg(test)]
mod tests {
    use super::super::trial::TrialBranch;
    use super::*;

    fn population(values: &[Option<f64>]) -> Vec<SweepTrial> {
        let trial = |(at, value): (usize, &Option<f64>)| SweepTrial {
            results: value.map(|value| (5, value)).into_iter().collect(),
            state: if value.is_some() { TrialState::Paused } else { TrialState::Failed("x".into()) },
            ..SweepTrial::new(at + 1, Vec::new(), None)
        };
        values.iter().enumerate().map(trial).collect()
    }

    #[test]
    fn the_worst_quarter_and_all_failures_are_replaced_by_branches_of_the_best_quarter() {
        let quarters = |values: &[Option<f64>]| quantiles(&population(values), 0.25, SweepGoal::Minimize);
        let losses: Vec<Option<f64>> = [5.0, 1.0, 3.0, 8.0, 2.0, 7.0, 4.0, 6.0].map(Some).to_vec();
        assert_eq!(quarters(&losses), (vec![4, 6], vec![2, 5]));
        let mut failing = losses.clone();
        for at in [0, 2, 6] {
            failing[at] = None;
        }
        assert_eq!(quarters(&failing), (vec![1, 3, 7], vec![2, 5]));
        assert_eq!(quarters(&[None, None, None, Some(1.0)]), (vec![1, 2, 3], vec![4]));
        assert_eq!(quarters(&[None; 4]), (vec![], vec![]));
        assert_eq!(quantiles(&population(&losses), 0.25, SweepGoal::Maximize), (vec![2, 5], vec![4, 6]));
    }

    #[test]
    fn generations_end_at_multiples_of_the_interval() {
        let ends = |reached| generation_end(reached, 10, 25);
        assert_eq!((ends(0), ends(9), ends(10), ends(20)), (10, 10, 20, 25));
        let mut trials = population(&[Some(1.0); 2]);
        trials[0].state = TrialState::Replaced { by: 2 };
        assert_eq!(members(&trials).map(|trial| trial.number).collect::<Vec<_>>(), [2]);
        let branch = SweepTrial::new(3, Vec::new(), Some(TrialBranch { trial: 1, step: 10 }));
        assert_eq!((branch.reached(), branch.steps_done()), (10, 0));
    }
}
