//! Errors of optimizers, parameter groups and schedules.

/// Errors of optimizers, parameter groups and schedules.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OptimError {
    /// Training without an optimizer.
    #[error(
        "the configuration has no optimizer section, so the engine can only run eval; add for example \"optimizer\": \
         {{\"type\": \"AdamW\", \"params\": {{\"lr\": 1e-3}}}}"
    )]
    NoOptimizer,
    /// An optimizer of the user's own under ZeRO, which the configuration has not allowed.
    #[error(
        "optimizer {name} counts as untested with ZeRO (stage {stage}): set \"zero_allow_untested_optimizer\": true \
         in the configuration, or use stage 0"
    )]
    Untested {
        /// Its name.
        name: String,
        /// `zero_optimization.stage`.
        stage: u8,
    },
    /// Names of an optimizer's states that checkpoints cannot tell apart.
    #[error("the states of optimizer {optimizer} are called {names}: {problem}; give each a name of its own")]
    States {
        /// The optimizer.
        optimizer: String,
        /// Its states.
        names: String,
        /// The problem.
        problem: &'static str,
    },
    /// A parameter group that no optimizer can work with.
    #[error("parameter group {index} (from 0): {problem}")]
    ParameterGroup {
        /// Its number among those given.
        index: usize,
        /// The problem, and how to fix it.
        problem: String,
    },
    /// A parameter of the learning-rate schedule that no schedule can have.
    #[error("{key} is {found}; allowed is {allowed}: {fix}")]
    ScheduleParameter {
        /// Path of the key.
        key: &'static str,
        /// Its value.
        found: String,
        /// The allowed values.
        allowed: &'static str,
        /// The remedy.
        fix: &'static str,
    },
    /// A value of a schedule that no optimizer can work with.
    #[error(
        "the schedule has {found} as {what} of optimizer step {step}; allowed is {allowed}: correct the schedule \
         (OneCycle: lower decay_mom_rate), or train for fewer steps"
    )]
    ScheduleValue {
        /// Which value.
        what: &'static str,
        /// Number of the optimizer step, from 1; skipped ones do not count.
        step: i64,
        /// The value.
        found: f64,
        /// The allowed values.
        allowed: &'static str,
    },
}
