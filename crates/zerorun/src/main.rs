//! The `zerorun` command: starts a training script as N ranks on one or several hosts, or runs a tool.
//!
//! If the first word of the command line names a tool, `tools` runs it. Otherwise, `args` parses the command line (with
//! `host_flags`, which `zerorun finetune` uses too), `launcher_variables` adds the variables of another launcher, and
//! `launch` starts the script. `dashboard` serves the page in the browser, for a job or as a tool.

mod args;
mod completions;
mod dashboard;
mod error;
mod host_flags;
mod island_flags;
mod launch;
mod launcher_variables;
mod man;
mod ranks_per_host;
mod tools;

use crate::error::{Error, LaunchError};
use crate::launch::console;
use candle_zero::kernels::checked_level;
use candle_zero::untrusted_work::SandboxAllocator;
use std::ffi::OsString;
use std::process::ExitCode;

#[global_allocator]
static ALLOCATOR: SandboxAllocator = SandboxAllocator;

/// The exit code for a script that does not compile, the same as cargo's.
const EXIT_COMPILE: u8 = 101;

/// Reads the command line, builds the script and runs the ranks; or runs a tool.
///
/// Must be called on the main thread: the kernel kills the ranks when the thread that started them ends. Returns the
/// exit code: that of the first rank that failed in the last run, 128 + n for a signal n, 1 if output could not be
/// written, 2 for a wrong command line or a failed setup, or 101 for a script that does not compile.
fn main() -> ExitCode {
    candle_zero::untrusted_work::explain_limits();
    let words: Vec<OsString> = std::env::args_os().skip(1).collect();
    match words.first().and_then(|word| word.to_str()) {
        Some("completions") => return completions::run(words).unwrap_or_else(|refused| refused.print()),
        Some("man") => {
            return man::run(words, completions::whole_command_line()).unwrap_or_else(|refused| refused.print());
        }
        _ => {}
    }
    if let Some(tool) = words.first().and_then(|word| tools::named(word)) {
        if let Err(error) = checked_level() {
            return console::refused(&error.into(), console::EXIT_SETUP);
        }
        return (tool.run)(words).unwrap_or_else(|refused| refused.print());
    }
    let options = match args::read(std::env::args_os()) {
        Ok(options) => options,
        Err(refused) => return refused.print(),
    };
    match launch::start(&options) {
        Ok(code) => ExitCode::from(code),
        Err(error) if matches!(error.downcast_ref(), Some(LaunchError::ScriptDoesNotCompile { .. })) => {
            console::refused(&error, EXIT_COMPILE)
        }
        Err(error) => console::refused(&with_suggested_tool(error), console::EXIT_SETUP),
    }
}

/// Suggests a tool with a similar name if the script does not exist, because the user may have mistyped the tool's
/// name.
fn with_suggested_tool(error: Error) -> Error {
    let (path, found, mut fix) = match error.downcast() {
        Ok(LaunchError::NotStartable { path, found, fix }) => (path, found, fix),
        Ok(other) => return other.into(),
        Err(error) => return error,
    };
    if !fix.starts_with("did you mean")
        && let Some(tool) = path.to_str().and_then(tools::nearest)
    {
        fix = format!("did you mean the command `zerorun {tool}`?");
    }
    LaunchError::NotStartable { path, found, fix }.into()
}
