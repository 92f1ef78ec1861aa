//! `zerorun man`: prints a manual page, from the definitions of the command line.

use crate::launch::console::{CommandLineError, print_and_exit};
use clap::{CommandFactory as _, Parser, error::ErrorKind};
use std::ffi::OsString;
use std::process::ExitCode;

/// Print the manual page of a command, or of zerorun itself, in roff.
///
/// Exit code: 0 if the page is printed, 2 if standard output could not be written or the command line is wrong.
#[derive(Debug, Parser)]
#[command(name = "man", bin_name = "zerorun man", after_help = EXAMPLES)]
struct ManArguments {
    /// Command, such as finetune [default: zerorun itself]
    #[arg(value_name = "COMMAND")]
    tool: Option<String>,
}

const EXAMPLES: &str = "Examples:
  zerorun man finetune | man -l -
  zerorun man > ~/.local/share/man/man1/zerorun.1";

/// Returns the definition of the command's own command line.
pub(crate) fn command() -> clap::Command {
    ManArguments::command()
}

/// Runs the command; `zerorun` is the definition of zerorun's command line, with all commands.
pub(crate) fn run(words: Vec<OsString>, zerorun: clap::Command) -> Result<ExitCode, CommandLineError> {
    let ManArguments { tool } = ManArguments::try_parse_from(words).map_err(CommandLineError)?;
    let page = match tool {
        None => clap_mangen::Man::new(zerorun),
        Some(name) => {
            let Some(tool) = zerorun.find_subcommand(&name) else {
                let names: Vec<&str> = zerorun.get_subcommands().map(clap::Command::get_name).collect();
                let text = format!("there is no command {name}; the commands are {}", names.join(", "));
                return Err(CommandLineError(ManArguments::command().error(ErrorKind::InvalidValue, text)));
            };
            clap_mangen::Man::new(tool.clone()).title(format!("zerorun-{name}"))
        }
    };
    let mut text = Vec::new();
    let rendered = page.render(&mut text);
    debug_assert!(rendered.is_ok(), "writing to memory cannot fail");
    Ok(print_and_exit(String::from_utf8_lossy(&text).trim_end()))
}
