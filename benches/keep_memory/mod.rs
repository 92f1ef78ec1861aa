//! What `zerorun` gives its ranks, for benches that measure as a rank would run.

use std::os::unix::process::CommandExt;
use std::process::Command;

/// Freed memory stays in the process, as in the ranks that `zerorun` starts (see `crates/zerorun/src/launch/ranks.rs`).
const KEEP_MEMORY: (&str, &str) =
    ("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=1073741824:glibc.malloc.trim_threshold=17179869184");

/// Starts this program again with the C library's settings of a rank and the variables of `more`, unless it has them:
/// the library reads them before main.
pub fn start_as_a_rank(more: &[(&str, &str)]) {
    let (name, value) = KEEP_MEMORY;
    if std::env::var_os(name).is_none() {
        let program = std::env::current_exe().unwrap();
        let mut again = Command::new(program);
        let error = again.args(std::env::args_os().skip(1)).env(name, value).envs(more.iter().copied()).exec();
        panic!("cannot start again: {error}");
    }
}
