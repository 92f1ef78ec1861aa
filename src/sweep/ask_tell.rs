//! A sweep, driven by the calls `ask` and `tell`: which trial is trained next, and the consequences of its results.

use super::error::SweepError;
use super::pbt::{explored, generation_end, members, quantiles};
use super::random::{RandomPurpose, RandomStream};
use super::search::next_parameters;
use super::settings::{SweepSettings, TrialScheduler};
use super::space::TrialParameters;
use super::trial::{SweepTrial, TrialBranch, TrialState};
use super::{asha, median_stop};

/// A part of a trial: the steps from where it paused up to its next pause.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SweepJob {
    /// The number of the trial.
    pub trial: usize,
    /// The step that the trial has reached.
    pub from: u64,
    /// The step after which the trial pauses or is complete.
    pub to: u64,
}

/// The next thing to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SweepDecision {
    /// Train a trial.
    Train(SweepJob),
    /// Wait until a running trial has a result.
    Wait,
    /// The sweep has ended.
    End,
}

/// A sweep, which hands out jobs and chooses further jobs based on their results.
///
/// It is deterministic: the same settings, and the same calls with the same results, give the same jobs.
#[derive(Debug, Clone)]
pub struct Sweep {
    settings: SweepSettings,
    /// The number of trials, without the branches of population-based training.
    count: usize,
    /// The rungs of successive halving.
    rungs: Vec<u64>,
    trials: Vec<SweepTrial>,
}

impl Sweep {
    /// Begins a sweep.
    ///
    /// # Errors
    /// The errors of [`SweepSettings::check`].
    pub fn new(settings: SweepSettings) -> Result<Self, SweepError> {
        let count = settings.check()?;
        let rungs = match settings.scheduler {
            TrialScheduler::Asha { min_steps, eta } => asha::rungs(min_steps, eta, settings.steps),
            _ => Vec::new(),
        };
        Ok(Self { settings, count, rungs, trials: Vec::new() })
    }

    /// Returns the settings.
    pub fn settings(&self) -> &SweepSettings {
        &self.settings
    }

    /// Changes the maximum number of failed trials; the sweep ends if more fail.
    pub fn set_max_failures(&mut self, max_failures: usize) {
        self.settings.max_failures = max_failures;
    }

    /// Returns the number of trials of the complete sweep, without the branches of population-based training.
    pub fn trial_count(&self) -> usize {
        self.count
    }

    /// Returns the trials so far, by number.
    pub fn trials(&self) -> &[SweepTrial] {
        &self.trials
    }

    /// Returns the trial with this number.
    pub fn trial(&self, number: usize) -> Option<&SweepTrial> {
        self.trials.get(number.checked_sub(1)?)
    }

    /// Returns the number of steps trained so far.
    pub fn steps_done(&self) -> u64 {
        self.trials.iter().map(SweepTrial::steps_done).sum()
    }

    /// Returns the number of trials that have failed.
    pub fn failures(&self) -> usize {
        self.trials.iter().filter(|trial| matches!(trial.state, TrialState::Failed(_))).count()
    }

    /// Returns whether the sweep has ended because too many trials have failed.
    pub fn has_failed(&self) -> bool {
        self.failures() > self.settings.max_failures
    }

    /// Returns the best complete trial or, if no trial is complete, the best of those that got furthest.
    pub fn best(&self) -> Option<&SweepTrial> {
        let goal = self.settings.goal;
        let usable = |trial: &&SweepTrial| !trial.results.is_empty() && !matches!(trial.state, TrialState::Failed(_));
        let order = |a: &&SweepTrial, b: &&SweepTrial| {
            let further = b.reached().cmp(&a.reached());
            further.then(a.score(goal).total_cmp(&b.score(goal))).then(a.number.cmp(&b.number))
        };
        self.trials.iter().filter(usable).min_by(order)
    }

    /// Returns the next decision. A job that is returned counts as running until [`tell`](Self::tell) is called for its
    /// trial.
    ///
    /// A branch is returned before the trial from which it branches is trained further, so that the checkpoint of that
    /// trial can be copied in time.
    pub fn ask(&mut self) -> SweepDecision {
        let next = if self.has_failed() { None } else { self.next_job() };
        match next {
            Some(job) => {
                self.trials[job.trial - 1].state = TrialState::Running { to: job.to };
                SweepDecision::Train(job)
            }
            None if self.is_running() => SweepDecision::Wait,
            None => SweepDecision::End,
        }
    }

    /// Adds the result of a job: the metric at its last step, or the reason why the trial failed.
    ///
    /// # Errors
    /// [`SweepError::NotRunning`].
    pub fn tell(&mut self, trial: usize, result: Result<f64, String>) -> Result<(), SweepError> {
        let steps = self.settings.steps;
        let entry = trial.checked_sub(1).and_then(|at| self.trials.get_mut(at));
        let Some((entry, to)) = entry.and_then(|entry| match entry.state {
            TrialState::Running { to } => Some((entry, to)),
            _ => None,
        }) else {
            return Err(SweepError::NotRunning { trial });
        };
        match result {
            Err(reason) => entry.state = TrialState::Failed(reason),
            Ok(value) => {
                entry.results.push((to, value));
                entry.state = if to >= steps { TrialState::Complete } else { TrialState::Paused };
            }
        }
        match self.settings.scheduler {
            TrialScheduler::MedianStop { grace, min_trials, .. } => {
                let entry = &self.trials[trial - 1];
                let is_paused = entry.state == TrialState::Paused;
                if is_paused && median_stop::ends(entry, &self.trials, grace, min_trials, self.settings.goal) {
                    self.trials[trial - 1].state = TrialState::Stopped;
                }
            }
            TrialScheduler::Pbt { every, quantile, resample } => self.end_generation(every, quantile, resample),
            TrialScheduler::None | TrialScheduler::Asha { .. } => {}
        }
        Ok(())
    }

    fn is_running(&self) -> bool {
        self.trials.iter().any(|trial| matches!(trial.state, TrialState::Running { .. }))
    }

    fn next_job(&mut self) -> Option<SweepJob> {
        let steps = self.settings.steps;
        match self.settings.scheduler {
            TrialScheduler::None => self.new_trial(steps),
            TrialScheduler::MedianStop { every, .. } => {
                let paused = self.trials.iter().find(|trial| trial.state == TrialState::Paused);
                match paused.map(|trial| (trial.number, trial.reached().saturating_add(every).min(steps))) {
                    Some((trial, to)) => self.job(trial, to),
                    None => self.new_trial(every),
                }
            }
            TrialScheduler::Asha { eta, .. } => {
                let goal = self.settings.goal;
                if let Some((trial, to)) = asha::promotion(&self.trials, &self.rungs, eta, goal) {
                    return self.job(trial, to);
                }
                if let Some(job) = self.new_trial(self.rungs[0]) {
                    return Some(job);
                }
                if self.is_running() {
                    return None;
                }
                let (trial, to) = asha::last_promotion(&self.trials, &self.rungs, goal)?;
                self.job(trial, to)
            }
            TrialScheduler::Pbt { every, .. } => {
                if let Some(job) = self.new_trial(every) {
                    return Some(job);
                }
                // All members of a generation begin at the same step, and its new branches come first.
                let alive = || members(&self.trials).filter(|trial| !matches!(trial.state, TrialState::Failed(_)));
                let end = generation_end(alive().map(SweepTrial::reached).min()?, every, steps);
                let waiting = alive().filter(|trial| trial.state == TrialState::Paused && trial.reached() < end);
                let has_begun = |trial: &SweepTrial| trial.branch.is_none() || !trial.results.is_empty();
                let next = waiting.min_by_key(|trial| (has_begun(trial), trial.number))?.number;
                self.job(next, end)
            }
        }
    }

    fn job(&self, trial: usize, to: u64) -> Option<SweepJob> {
        let from = self.trial(trial)?.reached();
        Some(SweepJob { trial, from, to })
    }

    /// Adds a trial that runs to the step `to`, unless there are already enough trials.
    fn new_trial(&mut self, to: u64) -> Option<SweepJob> {
        if self.trials.len() >= self.count {
            return None;
        }
        let parameters = next_parameters(&self.settings, &self.trials);
        let trial = self.push(parameters, None);
        self.job(trial, to)
    }

    fn push(&mut self, parameters: TrialParameters, branch: Option<TrialBranch>) -> usize {
        let number = self.trials.len() + 1;
        self.trials.push(SweepTrial::new(number, parameters, branch));
        number
    }

    /// Replaces the worst members if all have reached the end of a generation other than the last.
    fn end_generation(&mut self, every: u64, quantile: f64, resample: f64) {
        if self.trials.len() < self.count || self.is_running() {
            return;
        }
        let alive = || members(&self.trials).filter(|trial| !matches!(trial.state, TrialState::Failed(_)));
        let reached = alive().map(SweepTrial::reached).min();
        let is_end = alive().all(|trial| Some(trial.reached()) == reached && trial.state == TrialState::Paused);
        let Some(step) = reached.filter(|step| is_end && step.is_multiple_of(every)) else { return };
        let (replaced, best) = quantiles(&self.trials, quantile, self.settings.goal);
        for number in replaced {
            let mut random = RandomStream::new(self.settings.seed, RandomPurpose::Branch(self.trials.len() + 1));
            let donor = best[random.below(best.len() as u64) as usize];
            let parameters = &self.trials[donor - 1].parameters;
            let parameters = explored(&self.settings.space, parameters, resample, &mut random);
            let by = self.push(parameters, Some(TrialBranch { trial: donor, step }));
            self.trials[number - 1].state = TrialState::Replaced { by };
        }
    }
}
