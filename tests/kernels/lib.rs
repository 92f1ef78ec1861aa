//! The unchanged kernels, with their unit tests and without the code that uses them: `scripts/check_aarch64.sh`
//! compiles this crate for aarch64 and runs its tests.

#[allow(dead_code, unused_imports, reason = "the code that uses them is not part of this crate")]
#[path = "../../src/kernels/mod.rs"]
mod kernels;

/// Small helpers that the kernels use.
#[allow(dead_code)]
#[path = "../../src/util.rs"]
mod util;
