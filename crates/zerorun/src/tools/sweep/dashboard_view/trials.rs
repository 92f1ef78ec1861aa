//! The trials of a sweep, as the dashboard shows them.

use super::super::folder::SweepFolder;
use super::super::journal::{JobResult, JournalEvent, ReplayedSweep};
use candle_zero::runs::json_number;
use candle_zero::sweep::{SweepGoal, SweepJob, SweepTrial, TrialBranch, TrialParameters, TrialState};
use serde_json::{Value, json};
use std::cmp::Ordering;
use std::collections::BTreeMap;

/// A trial as the journal describes it.
#[derive(Debug, Clone)]
pub(super) struct TrialView {
    pub(super) number: usize,
    pub(super) state: TrialState,
    /// The values of its parameters, unless they are unknown because an earlier line of the journal is damaged.
    parameters: Option<TrialParameters>,
    branch: Option<TrialBranch>,
    /// The host on which the trial was last started, if there is a hostfile.
    host: Option<String>,
    /// The metric at each step at which the trial has paused or ended.
    results: Vec<(u64, f64)>,
    /// The result of a job that has ended, if the sweep has not received this result yet.
    pending: Option<JobResult>,
}

impl TrialView {
    /// Returns the trials of a sweep that was replayed from its journal.
    pub(super) fn all(replayed: &ReplayedSweep) -> Vec<Self> {
        let is_running = |number: usize| replayed.order.running().any(|running| running == number);
        let view = |trial: &SweepTrial| {
            let state = match &trial.state {
                // The sweep has handed out a job that the journal does not contain: the trial was not started.
                TrialState::Running { .. } if !is_running(trial.number) => TrialState::Paused,
                state => state.clone(),
            };
            let is_begun = state != TrialState::Paused || !trial.results.is_empty() || trial.branch.is_some();
            is_begun.then(|| Self {
                number: trial.number,
                state,
                parameters: Some(trial.parameters.clone()),
                branch: trial.branch,
                host: replayed.hosts.get(&trial.number).cloned(),
                results: trial.results.clone(),
                pending: replayed.results.get(&trial.number).cloned(),
            })
        };
        replayed.sweep.trials().iter().filter_map(view).collect()
    }

    /// Adds an event to trials that are known only from single lines of the journal. `steps` is the number of steps of
    /// a complete trial.
    pub(super) fn add(trials: &mut BTreeMap<usize, Self>, event: &JournalEvent, steps: u64) {
        let number = match event {
            JournalEvent::Begin { .. } => return trials.values_mut().for_each(|trial| trial.host = None),
            JournalEvent::Take { .. } => return,
            JournalEvent::Start(SweepJob { trial, .. })
            | JournalEvent::Place { trial, .. }
            | JournalEvent::End { trial, .. } => *trial,
        };
        let trial = trials.entry(number).or_insert_with(|| Self {
            number,
            state: TrialState::Paused,
            parameters: None,
            branch: None,
            host: None,
            results: Vec::new(),
            pending: None,
        });
        match event {
            JournalEvent::Start(job) => trial.state = TrialState::Running { to: job.to },
            JournalEvent::Place { host, .. } => trial.host = Some(host.clone()),
            JournalEvent::End { to, result, .. } => trial.end(*to, result.clone(), steps),
            JournalEvent::Begin { .. } | JournalEvent::Take { .. } => {}
        }
    }

    /// Adds the result that the sweep has not received yet, if there is one, to the trial's own results.
    pub(super) fn settle(mut self, steps: u64) -> Self {
        if let (Some(result), TrialState::Running { to }) = (self.pending.take(), self.state.clone()) {
            self.end(to, result, steps);
        }
        self
    }

    /// Adds the result of the steps up to `to`.
    fn end(&mut self, to: u64, result: JobResult, steps: u64) {
        self.state = match result {
            Err(why) => TrialState::Failed(why),
            Ok(value) => {
                self.results.push((to, value));
                if to >= steps { TrialState::Complete } else { TrialState::Paused }
            }
        };
    }

    pub(super) fn has_failed(&self) -> bool {
        matches!(self.state, TrialState::Failed(_))
    }

    pub(super) fn is_running(&self) -> bool {
        matches!(self.state, TrialState::Running { .. })
    }

    /// Returns whether the trial can be the best one.
    pub(super) fn is_usable(&self) -> bool {
        !self.results.is_empty() && !self.has_failed()
    }

    /// Compares trials as [`Sweep::best`](candle_zero::sweep::Sweep::best) does: a trial that got further is better;
    /// among trials that got equally far, the value counts. Trials without a result come after the others, and failed
    /// trials are last.
    pub(super) fn order(&self, other: &Self, goal: SweepGoal) -> Ordering {
        let reached = |trial: &Self| trial.results.last().map(|last| last.0);
        let score = |trial: &Self| trial.results.last().map_or(f64::INFINITY, |(_, value)| goal.score(*value));
        let further = reached(other).cmp(&reached(self));
        let worse = self.has_failed().cmp(&other.has_failed());
        worse.then(further).then(score(self).total_cmp(&score(other))).then(self.number.cmp(&other.number))
    }

    /// Returns the trial as JSON, with the values of its parameters in the order of the space.
    pub(super) fn to_json(&self) -> Value {
        let begin = self.branch.map_or(0, |branch| branch.step);
        let values = self.parameters.as_ref().map(|parameters| parameters.iter().map(|(_, value)| value));
        let mut trial = json!({
            "trial": self.number,
            "run": SweepFolder::run_name(self.number),
            "state": self.state.name(),
            "step": self.results.last().map_or(begin, |last| last.0),
            "value": self.results.last().map(|last| json_number(last.1)),
            "values": values.map(|values| values.cloned().collect::<Vec<Value>>()),
        });
        match &self.state {
            TrialState::Running { to } => {
                trial["to"] = (*to).into();
                if let Some(host) = self.host.as_ref().filter(|_| self.pending.is_none()) {
                    trial["host"] = host.as_str().into();
                }
            }
            TrialState::Replaced { by } => trial["by"] = (*by).into(),
            TrialState::Failed(why) => trial["error"] = why.as_str().into(),
            _ => {}
        }
        if let Some(branch) = self.branch {
            trial["branch_of"] = branch.trial.into();
        }
        if self.pending.is_some() {
            // Other trials, whose results come first, are still running.
            trial["state"] = "ended".into();
        }
        trial
    }
}

/// The best value of the metric so far, over the steps of all trials.
#[derive(Debug)]
pub(super) struct BestSoFar {
    goal: SweepGoal,
    /// The steps at which the running jobs began, by trial.
    start_steps: BTreeMap<usize, u64>,
    /// The total number of steps that led to results.
    steps: u64,
    best: Option<f64>,
    /// Each improvement: the number of steps at that time, the value and the trial.
    improvements: Vec<(u64, f64, usize)>,
}

impl BestSoFar {
    pub(super) fn new(goal: SweepGoal) -> Self {
        Self { goal, start_steps: BTreeMap::new(), steps: 0, best: None, improvements: Vec::new() }
    }

    /// Adds an event from the journal.
    pub(super) fn add(&mut self, event: &JournalEvent) {
        match event {
            JournalEvent::Start(job) => _ = self.start_steps.insert(job.trial, job.from),
            JournalEvent::End { trial, to, result } => {
                let from = self.start_steps.remove(trial).unwrap_or(*to);
                let Ok(value) = result else { return };
                self.steps = self.steps.saturating_add(to.saturating_sub(from));
                let is_better = self.best.is_none_or(|best| self.goal.score(*value) < self.goal.score(best));
                if value.is_finite() && is_better {
                    self.best = Some(*value);
                    self.improvements.push((self.steps, *value, *trial));
                }
            }
            JournalEvent::Begin { .. } | JournalEvent::Place { .. } | JournalEvent::Take { .. } => {}
        }
    }

    pub(super) fn to_json(&self) -> Value {
        let point = |(steps, value, trial): &(u64, f64, usize)| json!({"steps": steps, "value": value, "trial": trial});
        json!({"steps": self.steps, "improvements": self.improvements.iter().map(point).collect::<Vec<_>>()})
    }
}
