//! `zerorun completions`: prints completions for a shell, from the definitions of the command line.

use crate::launch::console::{CommandLineError, print_and_exit};
use crate::man;
use crate::tools;
use clap::{CommandFactory as _, Parser};
use clap_complete::Shell;
use std::ffi::OsString;
use std::process::ExitCode;

/// Print completions for a shell: commands, options and the options' values.
///
/// Exit code: 0 if the completions are printed, 2 if standard output could not be written or the command line is wrong.
#[derive(Debug, Parser)]
#[command(name = "completions", bin_name = "zerorun completions", after_help = EXAMPLES)]
struct CompletionsArguments {
    /// Shell to print completions for
    #[arg(value_name = "SHELL")]
    shell: Shell,
}

const EXAMPLES: &str = "Examples:
  zerorun completions bash > ~/.local/share/bash-completion/completions/zerorun
  zerorun completions zsh > \"${fpath[1]}/_zerorun\"
  zerorun completions fish > ~/.config/fish/completions/zerorun.fish";

/// Returns the command line of `zerorun` with all commands.
pub(crate) fn whole_command_line() -> clap::Command {
    crate::args::command()
        .subcommands(tools::commands())
        .subcommand(CompletionsArguments::command())
        .subcommand(man::command())
}

/// Runs the command.
pub(crate) fn run(words: Vec<OsString>) -> Result<ExitCode, CommandLineError> {
    let CompletionsArguments { shell } = CompletionsArguments::try_parse_from(words).map_err(CommandLineError)?;
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut whole_command_line(), "zerorun", &mut text);
    Ok(print_and_exit(String::from_utf8_lossy(&text).trim_end()))
}
