//! The messages of `zerorun` itself, and the exit codes that go with them.

use crate::Error;
use std::fmt::Display;
use std::io::Write as _;
use std::process::ExitCode;

/// Exit code for a wrong command line and for a build or start that could not be set up.
pub(crate) const EXIT_SETUP: u8 = 2;

/// A line on stderr. A closed stderr must not change the exit code, as `eprintln!` would.
pub(crate) fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// Whether standard output took the text, as a line.
pub(crate) fn print(text: impl Display) -> bool {
    writeln!(std::io::stdout(), "{text}").is_ok()
}

/// Says why nothing was done, or not all, and gives the exit code `code`.
pub(crate) fn refused(error: &Error, code: u8) -> ExitCode {
    say(&format!("zerorun: {error}"));
    ExitCode::from(code)
}

/// Why there is nothing to carry out: help or version was asked for, or the command line is wrong.
#[derive(Debug)]
pub(crate) struct Refused(pub(crate) clap::Error);

impl Refused {
    /// Prints the text where it belongs and gives the exit code.
    pub(crate) fn print(&self) -> ExitCode {
        if self.0.use_stderr() {
            say(self.message().trim_end());
            ExitCode::from(EXIT_SETUP)
        } else {
            // Help on a closed pipe is nobody's loss.
            let _ = self.0.print();
            ExitCode::SUCCESS
        }
    }

    pub(crate) fn message(&self) -> String {
        let text = self.0.render().to_string();
        format!("zerorun: {}", text.strip_prefix("error: ").unwrap_or(&text))
    }
}
