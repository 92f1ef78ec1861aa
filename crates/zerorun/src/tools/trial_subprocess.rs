//! The common start of the trials of `sweep` and `tune`: files that are either complete or absent, and a process that
//! writes to a log.

use crate::error::{Error, Result};
use crate::launch::signals::die_with_parent;
use candle_zero::files::AtomicFile;
use candle_zero::monitor::PROMETHEUS_PORT;
use candle_zero::runs::{RUN, RUNS_DIR};
use candle_zero::stop_signal::STOP_AT;
use candle_zero::timeline;
use rustix::process::Signal;
use std::fs::File;
use std::io::Write as _;
use std::path::Path;
use std::process::Command;

/// The variables with which the user configures a run. If they are set, they are meant for runs other than trials.
const RUN_VARIABLES: [&str; 6] = [timeline::FILE, timeline::PARTS, PROMETHEUS_PORT, RUN, RUNS_DIR, STOP_AT];

/// Writes a file atomically: if writing fails, the file is unchanged.
pub(super) fn write_atomically(path: &Path, text: &str) -> Result<()> {
    let write = || {
        let mut file = AtomicFile::create_for(path)?;
        file.file().write_all(text.as_bytes())?;
        file.finish().map(drop)
    };
    write().map_err(|source| Error::Io { action: "write", path: path.to_owned(), source })
}

/// Makes `command` a trial: it writes into a new `log`, receives SIGTERM if this process dies, and does not see the
/// variables of other runs.
pub(super) fn configure_trial(command: &mut Command, log: &Path) -> Result<()> {
    let io = |action| move |source| Error::Io { action, path: log.to_owned(), source };
    let out = File::create(log).map_err(io("create"))?;
    let err = out.try_clone().map_err(io("open"))?;
    RUN_VARIABLES.iter().for_each(|name| _ = command.env_remove(name));
    command.stdout(out).stderr(err);
    die_with_parent(command, Signal::TERM);
    Ok(())
}
