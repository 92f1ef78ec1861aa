//! Gives a bench the environment that `zerorun` gives its ranks.

use std::os::unix::process::CommandExt;
use std::process::Command;

/// The environment variable, and its value, with which freed memory stays in the process, as in ranks started by
/// `zerorun` (see `crates/zerorun/src/launch/local_job_spec.rs`).
const KEEP_MEMORY: (&str, &str) =
    ("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=1073741824:glibc.malloc.trim_threshold=17179869184");

/// Restarts this program with a rank's settings for the C library and with `variables`, unless `GLIBC_TUNABLES`
/// is already set. The C library reads these settings before `main` runs.
pub fn start_as_a_rank(variables: &[(&str, &str)]) {
    let (name, value) = KEEP_MEMORY;
    if std::env::var_os(name).is_none() {
        let program = std::env::current_exe().unwrap();
        let mut command = Command::new(program);
        let error = command.args(std::env::args_os().skip(1)).env(name, value).envs(variables.iter().copied()).exec();
        panic!("cannot restart this program: {error}");
    }
}
