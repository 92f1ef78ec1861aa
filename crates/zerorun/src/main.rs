//! The `zerorun` command: starts a training script on N ranks of this host, or runs a tool.
//!
//! The first word decides: one that names a tool goes to `tools`; else `args` reads the command line of a start, with
//! what `launcher_variables` finds in the variables of another launcher, and `launch` carries it out.

mod args;
mod error;
mod launch;
mod launcher_variables;
mod ranks_per_host;
mod tools;

use crate::error::{Error, LaunchError};
use crate::launch::console;
use candle_zero::kernels::checked_level;
use candle_zero::sandbox::BoundedAllocator;
use std::process::ExitCode;

#[global_allocator]
static ALLOCATOR: BoundedAllocator = BoundedAllocator;

/// Exit code for a script that does not compile, the same as cargo's.
const EXIT_COMPILE: u8 = 101;

/// The whole of `zerorun`: reads the command line, builds the script, runs the ranks; or runs a tool.
///
/// Must be called on the main thread: the kernel kills the ranks when the thread that started them ends.
/// The result is the exit code: that of the first rank that failed in the last run, 128 + n for a signal n, 2 for a
/// wrong command line or set-up, 101 for a script that does not compile.
fn main() -> ExitCode {
    candle_zero::sandbox::explain_limits();
    let mut words = std::env::args_os().skip(1).peekable();
    if let Some(tool) = words.peek().and_then(|word| tools::named(word)) {
        if let Err(error) = checked_level() {
            return console::refused(&error.into(), console::EXIT_SETUP);
        }
        return (tool.run)(words.collect()).unwrap_or_else(|refused| refused.print());
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
        Err(error) => console::refused(&naming_the_tool(error), console::EXIT_SETUP),
    }
}

/// A script that is not there may be a tool whose name was mistyped.
fn naming_the_tool(error: Error) -> Error {
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
