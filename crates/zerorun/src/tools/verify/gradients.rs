//! `zerorun verify SCRIPT`: runs a script's first step, and compares every parameter's gradient with differences of the
//! loss.

use crate::error::{Error, LaunchError, Result};
use crate::launch::console::{eprint, print};
use crate::launch::signals::die_with_parent;
use candle_zero::engine::{CHECK_GRADIENTS, GradientReport};
use candle_zero::util::is_or_are;
use rustix::process::Signal;
use std::ffi::OsString;
use std::fs::File;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};

/// The number of lines of the script's own output that are shown if there is no report.
const LAST_LINES: usize = 12;

/// Runs the script until its engine has checked its gradients, and prints the results.
pub(super) fn run(script: &Path, args: &[OsString], ranks: u16, json: bool) -> Result<ExitCode> {
    let folder = tempfile::tempdir().map_err(|source| Error::Io {
        action: "create a folder in",
        path: std::env::temp_dir(),
        source,
    })?;
    let [file, log] = ["gradients.json", "log.txt"].map(|name| folder.path().join(name));
    let out = File::create(&log).map_err(|source| Error::Io { action: "create", path: log.clone(), source })?;
    let err = out.try_clone().map_err(|source| Error::Io { action: "open", path: log.clone(), source })?;
    let launcher =
        std::env::current_exe().map_err(|source| LaunchError::Setup { what: "finding the launcher itself", source })?;
    let mut command = Command::new(launcher);
    command.args(["--num_ranks", &ranks.to_string()]).arg(script).args(args);
    command.env(CHECK_GRADIENTS, &file).stdin(Stdio::null()).stdout(out).stderr(err);
    die_with_parent(&mut command, Signal::TERM);
    let status =
        command.status().map_err(|source| LaunchError::Setup { what: "starting the script's ranks", source })?;
    let text = match std::fs::read_to_string(&file) {
        Ok(text) => text,
        Err(_) => {
            let log = std::fs::read(&log).unwrap_or_default();
            let log = String::from_utf8_lossy(&log);
            let lines: Vec<&str> = log.lines().collect();
            lines[lines.len().saturating_sub(LAST_LINES)..].iter().for_each(|line| eprint(line));
            eprint(&format!(
                "zerorun verify: the script ended ({status}) before its engine took a step; the last lines of its \
                 output are above"
            ));
            return Ok(ExitCode::FAILURE);
        }
    };
    let report: GradientReport = serde_json::from_str(&text).map_err(|source| Error::Io {
        action: "read",
        path: file,
        source: std::io::Error::other(source),
    })?;
    let wrong = report.wrong().count();
    let is_printed = print(if json { text } else { format!("{report}\n\n{}", verdict(&report, wrong)) });
    let is_right = wrong == 0 && report.not_judged.is_none();
    Ok(if is_printed && is_right { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn verdict(report: &GradientReport, wrong: usize) -> String {
    let total = report.rows.len();
    if report.not_judged.is_some() {
        return "Nothing is known about the gradients.".into();
    }
    if wrong > 0 {
        let be = is_or_are(wrong);
        return format!(
            "{wrong} of {total} gradients {be} wrong: the fault is between the loss and the last of these parameters, \
             in the order in which the model uses them. docs/engine.md lists possible causes."
        );
    }
    "All gradients match the loss, within the precision of the number format.".into()
}
