//! The kernels as they are, with their unit tests and without what uses them: `scripts/check_aarch64.sh` compiles these
//! for aarch64 and runs them.

#[allow(dead_code, unused_imports, reason = "their users are not here")]
#[path = "../../src/kernels/mod.rs"]
mod kernels;

/// Small helpers that the kernels use.
#[allow(dead_code)]
#[path = "../../src/util.rs"]
mod util;
