//! Errors of the kernels' settings.

/// An error in the choice of the kernels' SIMD level, which is the best available or the one that `CANDLE_ZERO_SIMD`
/// names.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SimdLevelError {
    /// No level has this name.
    #[error(
        "environment variable CANDLE_ZERO_SIMD is `{found}`, which is not a SIMD level; use {} or auto",
        available.join(", ")
    )]
    UnknownLevel {
        /// The variable's value.
        found: String,
        /// The levels that this processor has, widest first.
        available: Vec<&'static str>,
    },
    /// The ranks run at different levels, so they would compute different bits.
    #[error(
        "rank {rank} uses the SIMD level {level} and rank {other} a different one; every rank must have the same \
         CANDLE_ZERO_SIMD"
    )]
    LevelsDiffer {
        /// This rank.
        rank: usize,
        /// Another rank.
        other: usize,
        /// This rank's level.
        level: &'static str,
    },
    /// The processor lacks the level's instructions.
    #[error(
        "environment variable CANDLE_ZERO_SIMD is `{found}`, which this processor does not support; use {} or auto",
        available.join(", ")
    )]
    LevelNotAvailable {
        /// The variable's value.
        found: String,
        /// The levels that this processor has, widest first.
        available: Vec<&'static str>,
    },
}
