//! Errors of optimizers, parameter groups and schedules.

/// Errors of optimizers, parameter groups and schedules.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OptimError {
    /// There is no optimizer to train with.
    #[error(
        "the configuration has no optimizer section, so the engine can only run eval; add, for example, \
         \"optimizer\": {{\"type\": \"AdamW\", \"params\": {{\"lr\": 1e-3}}}}"
    )]
    NoOptimizer,
    /// A user-defined optimizer is used with ZeRO, and the configuration does not allow it.
    #[error(
        "optimizer {name} counts as untested with ZeRO (stage {stage}); set \"zero_allow_untested_optimizer\": true \
         in the configuration, or use stage 0"
    )]
    Untested {
        /// The name of the optimizer.
        name: String,
        /// The value of `zero_optimization.stage`.
        stage: u8,
    },
    /// There is a schedule, but the optimizer determines the learning rate itself.
    #[error(
        "{optimizer} with this configuration determines its learning rate itself and cannot follow a schedule; leave the \
         schedule out (EngineBuilder::schedule, scheduler), or use another optimizer (Adafactor: set relative_step to \
         false)"
    )]
    NoSchedule {
        /// The name of the optimizer.
        optimizer: String,
    },
    /// The names of an optimizer's states cannot be used in checkpoints.
    #[error(
        "the states of optimizer {optimizer} are called {names}: {problem}; give each state a valid and unique name"
    )]
    States {
        /// The name of the optimizer.
        optimizer: String,
        /// The names of its states.
        names: String,
        /// The problem.
        problem: &'static str,
    },
    /// The optimizer cannot work with a parameter group.
    #[error("parameter group {index} (counted from 0): {problem}")]
    ParameterGroup {
        /// The index of the group among those given.
        index: usize,
        /// The problem, and how to fix it.
        problem: String,
    },
    /// The value of a parameter of the learning-rate schedule is not allowed.
    #[error("{key} is {found} (allowed: {allowed}); {fix}")]
    ScheduleParameter {
        /// The path of the key.
        key: &'static str,
        /// The value of the key.
        found: String,
        /// The allowed values.
        allowed: &'static str,
        /// The suggested fix.
        fix: &'static str,
    },
    /// The optimizer cannot work with a value of a schedule.
    #[error(
        "the schedule sets {what} to {found} in optimizer step {step} (allowed: {allowed}); correct the schedule \
         (OneCycle: lower decay_mom_rate), or train for fewer steps"
    )]
    ScheduleValue {
        /// The kind of value.
        what: &'static str,
        /// The number of the optimizer step, counted from 1; skipped steps do not count.
        step: i64,
        /// The value of the schedule.
        found: f64,
        /// The allowed values.
        allowed: &'static str,
    },
}
