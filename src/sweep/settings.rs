//! The settings of a sweep, and their allowed values.

use super::domain::ParameterDomain;
use super::error::SweepError;
use super::space::SweepSpace;
use crate::util::counted;

/// The maximum number of trials.
const MAX_TRIALS: usize = 10_000;
/// The maximum number of steps of a trial.
const MAX_STEPS: u64 = 1 << 53;
/// The minimum number of trials whose quarters can be compared.
const MIN_POPULATION: usize = 4;
/// The number of trials if none is given and the searcher does not determine it.
pub const DEFAULT_TRIALS: usize = 20;

/// Whether a small or a large value of the metric is good.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SweepGoal {
    /// Small values are good, such as those of a loss.
    #[default]
    Minimize,
    /// Large values are good, such as those of an accuracy.
    Maximize,
}

impl SweepGoal {
    /// Returns a number that is smaller for better values. A value that is not a number is the worst.
    pub fn score(self, value: f64) -> f64 {
        match self {
            _ if value.is_nan() => f64::INFINITY,
            Self::Minimize => value,
            Self::Maximize => -value,
        }
    }
}

/// The method by which the parameters of trials are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SweepSearcher {
    /// Every combination once; in random order if the scheduler compares trials before all have begun.
    Grid,
    /// At random; in a finite space, no combination twice, except with population-based training.
    #[default]
    Random,
    /// By a tree-structured Parzen estimator, after ten random trials.
    Tpe,
}

/// The rule that determines which trials continue, and up to which step.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[non_exhaustive]
pub enum TrialScheduler {
    /// Every trial runs to its last step.
    #[default]
    None,
    /// A trial ends if its best value is worse than the median of the others' mean values up to the same step.
    MedianStop {
        /// The number of steps between comparisons.
        every: u64,
        /// The number of steps before the first comparison.
        grace: u64,
        /// The minimum number of other trials to compare with.
        min_trials: usize,
    },
    /// Asynchronous successive halving: trials pause at rungs, and the best of a rung continue.
    Asha {
        /// The first rung, in steps.
        min_steps: u64,
        /// The reduction factor: one in `eta` trials of a rung continues, and each rung has `eta` times the steps of
        /// the previous rung.
        eta: u64,
    },
    /// Population-based training: at regular intervals, the worst trials are replaced by branches of the best.
    Pbt {
        /// The number of steps between replacements.
        every: u64,
        /// The fraction of the trials that is replaced, and the fraction that is branched from.
        quantile: f64,
        /// The probability that a parameter of a branch is drawn anew instead of perturbed.
        resample: f64,
    },
}

impl TrialScheduler {
    /// Returns successive halving that continues a quarter of the trials.
    pub fn asha(min_steps: u64) -> Self {
        Self::Asha { min_steps, eta: 4 }
    }

    /// Returns the rule that stops trials that are worse than the median, with the usual minimum number of trials.
    pub fn median_stop(every: u64) -> Self {
        Self::MedianStop { every, grace: every, min_trials: 3 }
    }

    /// Returns population-based training that replaces a quarter of the trials.
    pub fn pbt(every: u64) -> Self {
        Self::Pbt { every, quantile: 0.25, resample: 0.25 }
    }

    /// Returns the name, as it is written in a sweep file.
    pub fn name(&self) -> &'static str {
        match self {
            Self::None => "none",
            Self::MedianStop { .. } => "median",
            Self::Asha { .. } => "asha",
            Self::Pbt { .. } => "pbt",
        }
    }
}

/// The settings of a sweep.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct SweepSettings {
    /// The parameters that are varied.
    pub space: SweepSpace,
    /// The number of steps of a complete trial.
    pub steps: u64,
    /// The number of trials. `None`: all combinations of a grid, otherwise [`DEFAULT_TRIALS`]. In a finite space, there
    /// are at most as many trials as combinations, except with population-based training.
    pub trials: Option<usize>,
    /// Whether small or large values are good.
    pub goal: SweepGoal,
    /// The method by which parameters are chosen.
    pub searcher: SweepSearcher,
    /// The rule that determines which trials continue.
    pub scheduler: TrialScheduler,
    /// The seed of all random choices.
    pub seed: u64,
    /// The maximum number of failed trials; the sweep ends if more fail.
    pub max_failures: usize,
}

impl SweepSettings {
    /// Creates the settings of a sweep that minimizes the metric by random search.
    pub fn new(space: SweepSpace, steps: u64) -> Self {
        Self {
            space,
            steps,
            trials: None,
            goal: SweepGoal::default(),
            searcher: SweepSearcher::default(),
            scheduler: TrialScheduler::default(),
            seed: 0,
            max_failures: 10,
        }
    }

    /// Checks the settings, and returns the number of trials.
    ///
    /// # Errors
    /// [`SweepError::Setting`], [`SweepError::Conflict`].
    pub fn check(&self) -> Result<usize, SweepError> {
        self.space.check()?;
        if !(1..=MAX_STEPS).contains(&self.steps) {
            return Err(SweepError::setting("steps", self.steps, "give 1 to 2^53 steps"));
        }
        if let Some(trials) = self.trials.filter(|trials| !(1..=MAX_TRIALS).contains(trials)) {
            return Err(SweepError::setting("trials", trials, "give 1 to 10000 trials"));
        }
        self.check_scheduler()?;
        let has_points = |domain: &ParameterDomain| matches!(domain, ParameterDomain::Real { points: Some(_), .. });
        let with_points = self.space.parameters().iter().find(|(_, domain)| has_points(domain));
        if let (Some((name, _)), true) = (with_points, self.searcher != SweepSearcher::Grid) {
            let problem = format!(
                "parameter {name} has points, which only the searcher grid uses; leave them out, or use the searcher \
                 grid"
            );
            return Err(SweepError::Conflict { problem });
        }
        let is_pbt = matches!(self.scheduler, TrialScheduler::Pbt { .. });
        let trials = match self.searcher {
            SweepSearcher::Grid => self.grid_trials()?,
            // The members of a population may begin with the same parameters: they differ later.
            SweepSearcher::Random | SweepSearcher::Tpe if !is_pbt => {
                let combinations = self.space.count().map_or(usize::MAX, |count| count as usize);
                self.trials.unwrap_or(DEFAULT_TRIALS).min(combinations)
            }
            SweepSearcher::Random | SweepSearcher::Tpe => self.trials.unwrap_or(DEFAULT_TRIALS),
        };
        if is_pbt && trials < MIN_POPULATION {
            return Err(SweepError::setting("trials", trials, "pbt compares quarters of the trials; give at least 4"));
        }
        Ok(trials)
    }

    fn grid_trials(&self) -> Result<usize, SweepError> {
        let infinite = self.space.parameters().iter().find(|(_, domain)| domain.grid_count().is_none());
        if let Some((name, domain)) = infinite {
            let problem = format!(
                "the searcher grid cannot take all values of parameter {name}, which is {}; add points = N to \
                 the parameter, make it a choice, or use another searcher",
                domain.kind()
            );
            return Err(SweepError::Conflict { problem });
        }
        let count = self.space.grid_count().unwrap_or(u64::MAX);
        if count > MAX_TRIALS as u64 {
            let problem = match count {
                u64::MAX => "the grid has more than 2^53 combinations".to_owned(),
                _ => format!("the grid has {count} combinations"),
            };
            let problem =
                format!("{problem}, and a sweep has at most 10000 trials; give fewer values, or use another searcher");
            return Err(SweepError::Conflict { problem });
        }
        match self.trials {
            Some(trials) if trials as u64 != count => Err(SweepError::setting(
                "trials",
                trials,
                format!(
                    "the grid has {}, and {} tried; leave trials out, or use another searcher",
                    counted(count, "combination"),
                    if count == 1 { "it is" } else { "all of them are" }
                ),
            )),
            _ => Ok(count as usize),
        }
    }

    fn check_scheduler(&self) -> Result<(), SweepError> {
        let steps = self.steps;
        let check_steps = |key: &str, found: u64| match (1..steps).contains(&found) {
            true => Ok(()),
            false => Err(SweepError::setting(
                key,
                found,
                format!("give at least 1 and fewer than the {} of a complete trial", counted(steps, "step")),
            )),
        };
        match self.scheduler {
            TrialScheduler::None => Ok(()),
            TrialScheduler::MedianStop { every, grace, min_trials } => {
                check_steps("median.every", every)?;
                check_steps("median.grace", grace)?;
                match min_trials {
                    0 => Err(SweepError::setting("median.min_trials", 0, "give at least 1")),
                    _ => Ok(()),
                }
            }
            TrialScheduler::Asha { min_steps, eta } => {
                check_steps("asha.min_steps", min_steps)?;
                match eta {
                    2..=1000 => Ok(()),
                    _ => Err(SweepError::setting("asha.eta", eta, "one in eta trials continues; give 2 to 1000")),
                }
            }
            TrialScheduler::Pbt { every, quantile, resample } => {
                check_steps("pbt.every", every)?;
                if !(quantile > 0.0 && quantile <= 0.5) {
                    let allowed = "give a fraction above 0 and at most 0.5";
                    return Err(SweepError::setting("pbt.quantile", quantile, allowed));
                }
                if !(0.0..=1.0).contains(&resample) {
                    return Err(SweepError::setting("pbt.resample", resample, "give a probability from 0 to 1"));
                }
                match self.searcher {
                    SweepSearcher::Tpe => {
                        let problem = "the searcher tpe compares trials by their parameters, but pbt changes the \
                                       parameters during training; use the searcher random or grid, or another \
                                       scheduler";
                        Err(SweepError::Conflict { problem: problem.into() })
                    }
                    SweepSearcher::Grid | SweepSearcher::Random => Ok(()),
                }
            }
        }
    }
}
