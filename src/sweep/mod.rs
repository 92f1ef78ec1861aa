//! Search for the best parameters of a training run: many trials, of which the promising ones are trained further.
//!
//! ```text
//!   SweepSettings: SweepSpace, SweepSearcher, TrialScheduler
//!        |
//!      Sweep ---- ask ----> SweepJob: train this trial up to this step
//!        ^                      |
//!        +------- tell ---------+ the metric there, or why it has failed
//! ```
//!
//! [`Sweep`] only makes decisions: it trains nothing, reads no clock, and always makes the same decisions if it
//! receives the same results in the same order. [`Sweep::run`] trains the trials one after another by calling a
//! closure; `zerorun sweep` trains them in processes, several at a time.
//!
//! A paused trial must continue exactly where it paused, for example from a checkpoint. It is trained with the schedule
//! of a complete trial from its first step, so a trial that is promoted to its last step gives the same result as one
//! that never paused.
//!
//! ```
//! use candle_zero::sweep::{ParameterDomain, Sweep, SweepSearcher, SweepSettings, SweepSpace, TrialScheduler};
//!
//! let space = SweepSpace::new().with("lr", ParameterDomain::log_uniform(1e-5, 1e-1));
//! let mut settings = SweepSettings::new(space, 64);
//! settings.trials = Some(32);
//! settings.searcher = SweepSearcher::Tpe;
//! settings.scheduler = TrialScheduler::asha(1);
//! let mut sweep = Sweep::new(settings)?;
//! sweep.run(|trial, step| {
//!     let lr = trial.parameter("lr").and_then(|lr| lr.as_f64()).unwrap_or_default();
//!     // Train up to `step`, and return the validation loss.
//!     Ok((lr.log10() + 3.0).abs() + 1.0 / step as f64)
//! });
//! let best = sweep.best().expect("trials have results");
//! println!("{:?}: {:?}", best.parameters, best.value());
//! # Ok::<(), candle_zero::Error>(())
//! ```

mod asha;
mod ask_tell;
mod domain;
pub(crate) mod error;
mod job_result_order;
mod median_stop;
mod pbt;
mod random;
mod search;
mod settings;
mod space;
mod tpe;
mod trial;

pub use ask_tell::{Sweep, SweepDecision, SweepJob};
pub use domain::ParameterDomain;
pub use job_result_order::JobResultOrder;
pub use settings::{DEFAULT_TRIALS, SweepGoal, SweepSearcher, SweepSettings, TrialScheduler};
pub use space::{SweepSpace, TrialParameters};
pub use trial::{SweepTrial, TrialBranch, TrialState};

use crate::error::Result;

impl Sweep {
    /// Trains all trials, one after another. `train` continues a trial up to the given step, and returns the metric at
    /// that step. It continues from where the trial last paused or, at the beginning of a branch, from the checkpoint
    /// that [`SweepTrial::branch`] names. If it returns an error, the trial has failed.
    pub fn run(&mut self, mut train: impl FnMut(&SweepTrial, u64) -> Result<f64>) {
        while let SweepDecision::Train(job) = self.ask() {
            let trial = self.trial(job.trial).expect("the trial of a job exists");
            let result = train(trial, job.to).map_err(|error| error.to_string());
            self.tell(job.trial, result).expect("the job is running");
        }
    }
}

#[cfg(test)]
mod tests;
