//! The SIMD level of every kernel: the best that the processor has, or the one that `CANDLE_ZERO_SIMD` names.

use super::error::SimdLevelError;
use std::ffi::OsString;
#[cfg(target_arch = "x86_64")]
use std::sync::LazyLock;
use std::sync::OnceLock;

/// The environment variable that forces the level of every kernel of this process.
pub const SIMD: &str = "CANDLE_ZERO_SIMD";

/// The variable's value for the best level, which is also the default.
pub const AUTO: &str = "auto";

/// A set of vector instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InstructionSet {
    /// The instructions that every CPU of the architecture has. The kernels of this level produce the same bits on
    /// every machine.
    Portable,
    /// Vectors of eight f32, with the fused multiply-add (in products) and the conversions of f16 that accompany them.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// Vectors of sixteen f32. Products of bf16 use the bf16 instructions of CPUs on which these are fast.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// Vectors of four f32, with the fused multiply-add in products.
    #[cfg(target_arch = "aarch64")]
    Neon,
}

impl InstructionSet {
    /// Every level of the architecture, widest first.
    const ALL: &[Self] = &[
        #[cfg(target_arch = "x86_64")]
        Self::Avx512,
        #[cfg(target_arch = "x86_64")]
        Self::Avx2,
        #[cfg(target_arch = "aarch64")]
        Self::Neon,
        Self::Portable,
    ];

    /// Returns the level's name, as accepted in `CANDLE_ZERO_SIMD`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => "avx512",
            #[cfg(target_arch = "aarch64")]
            Self::Neon => "neon",
        }
    }

    /// Returns whether products at this level take less time in bf16 than in f32 on this CPU.
    pub fn is_faster_in_bf16(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => pairs_are_fast(),
            _ => false,
        }
    }

    /// Returns the levels that this CPU has, widest first.
    pub fn available() -> impl Iterator<Item = Self> {
        Self::ALL.iter().copied().filter(|level| level.is_available())
    }

    /// Returns whether this CPU has the level. The standard library queries the CPU once and caches the result.
    pub(super) fn is_available(self) -> bool {
        match self {
            Self::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => {
                is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
            #[cfg(target_arch = "aarch64")]
            Self::Neon => true,
        }
    }

    /// Returns the widest level that this CPU has.
    fn best() -> Self {
        Self::available().next().unwrap_or(Self::Portable)
    }

    /// Returns the level that a value of the variable selects on this CPU.
    fn selected_by(value: Option<OsString>) -> Result<Self, SimdLevelError> {
        let Some(value) = value.filter(|value| !value.is_empty() && value != AUTO) else { return Ok(Self::best()) };
        let found = value.to_string_lossy().into_owned();
        match Self::ALL.iter().find(|level| level.name() == found) {
            Some(level) if level.is_available() => Ok(*level),
            Some(_) => Err(SimdLevelError::LevelNotAvailable { found, available: Self::available_names() }),
            None => Err(SimdLevelError::UnknownLevel { found, available: Self::available_names() }),
        }
    }

    /// Returns the names of the levels that this CPU has, widest first.
    fn available_names() -> Vec<&'static str> {
        Self::available().map(Self::name).collect()
    }
}

/// Returns whether this processor multiplies bf16 numbers faster in pairs than after widening them to f32. Intel's
/// processors are half as fast with pairs as with f32 numbers (Emerald Rapids, registers only: 87 GFLOP/s against 175);
/// AMD's are twice as fast (Zen 5: 528 against 263).
#[cfg(target_arch = "x86_64")]
fn pairs_are_fast() -> bool {
    static FAST: LazyLock<bool> = LazyLock::new(|| {
        let vendor = std::arch::x86_64::__cpuid(0);
        is_x86_feature_detected!("avx512bf16") && [vendor.ebx, vendor.edx, vendor.ecx] != INTEL
    });
    *FAST
}

/// "GenuineIntel".
#[cfg(target_arch = "x86_64")]
const INTEL: [u32; 3] = [u32::from_le_bytes(*b"Genu"), u32::from_le_bytes(*b"ineI"), u32::from_le_bytes(*b"ntel")];

/// Returns the level of every kernel of this process. The environment is read once.
///
/// # Errors
/// Returns an error if `CANDLE_ZERO_SIMD` is set to anything other than `auto` or a level that this CPU has. An empty
/// value counts as `auto`.
pub fn checked_level() -> Result<InstructionSet, SimdLevelError> {
    static LEVEL: OnceLock<Result<InstructionSet, SimdLevelError>> = OnceLock::new();
    LEVEL.get_or_init(|| InstructionSet::selected_by(std::env::var_os(SIMD))).clone()
}

/// Returns the level of [`checked_level`], for use in kernels. Code that runs kernels (the engine, `zerorun`, the
/// layers) calls [`checked_level`] first.
///
/// # Panics
/// Panics if [`checked_level`] returns an error.
#[inline]
pub(crate) fn level() -> InstructionSet {
    // A separate static, so that even a loop over a few elements can read the level with one load: copying the `Result`
    // would take a function call.
    static LEVEL: OnceLock<InstructionSet> = OnceLock::new();
    *LEVEL.get_or_init(|| checked_level().unwrap_or_else(|error| panic!("{error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn selected_by(value: &str) -> Result<InstructionSet, String> {
        InstructionSet::selected_by(Some(value.into())).map_err(|error| error.to_string())
    }

    #[test]
    fn nothing_and_auto_are_the_best_level_and_a_name_is_that_level() {
        assert_eq!(InstructionSet::selected_by(None), Ok(InstructionSet::best()));
        assert_eq!((selected_by(""), selected_by("auto")), (Ok(InstructionSet::best()), Ok(InstructionSet::best())));
        assert_eq!(InstructionSet::available().next(), Some(InstructionSet::best()));
        for level in InstructionSet::available() {
            assert_eq!(selected_by(level.name()), Ok(level));
        }
        assert_eq!(selected_by("portable"), Ok(InstructionSet::Portable), "every CPU has it");
    }

    #[test]
    fn a_level_that_the_cpu_lacks_is_an_error_that_lists_those_it_has() {
        for level in InstructionSet::ALL.iter().filter(|level| !level.is_available()) {
            let error = selected_by(level.name()).expect_err("it is not available");
            assert!(error.contains(&format!("`{}`", level.name())), "{error}");
            assert!(error.ends_with(&format!("{} or auto", InstructionSet::available_names().join(", "))), "{error}");
        }
    }

    #[test]
    fn the_errors_say_what_was_found_and_what_is_allowed() {
        let available = vec!["avx2", "portable"];
        let unknown = SimdLevelError::UnknownLevel { found: "AVX2".into(), available: available.clone() };
        insta::assert_snapshot!(unknown, @"environment variable CANDLE_ZERO_SIMD is `AVX2`, which is not a SIMD level; use avx2, portable or auto");
        let lacking = SimdLevelError::LevelNotAvailable { found: "avx512".into(), available };
        insta::assert_snapshot!(lacking, @"environment variable CANDLE_ZERO_SIMD is `avx512`, which this processor does not support; use avx2, portable or auto");
        let error = selected_by("sse9").expect_err("no such level");
        assert!(error.contains("`sse9`"), "{error}");
    }

    #[test]
    fn kernels_run_at_the_level_of_the_environment() {
        assert_eq!(Ok(level()), InstructionSet::selected_by(std::env::var_os(SIMD)));
    }
}
