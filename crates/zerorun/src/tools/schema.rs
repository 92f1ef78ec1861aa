//! `zerorun schema`: prints a JSON Schema of the configuration, for editors.

use crate::launch::console::{CommandLineError, print_and_exit};
use clap::Parser;
use std::ffi::OsString;
use std::process::ExitCode;

/// Print a JSON Schema (draft 2020-12) of the configuration file. An editor that uses it completes keys, shows their
/// meanings and defaults, and marks unknown keys.
///
/// Exit code: 0 if the schema is printed, 2 if standard output could not be written or the command line is wrong.
#[derive(Debug, Parser)]
#[command(name = "schema", bin_name = "zerorun schema")]
struct SchemaArguments {}

/// Returns the definition of the tool's command line.
pub(super) fn command() -> clap::Command {
    <SchemaArguments as clap::CommandFactory>::command()
}

/// Runs the tool.
pub(super) fn run(words: Vec<OsString>) -> Result<ExitCode, CommandLineError> {
    let SchemaArguments {} = SchemaArguments::try_parse_from(words).map_err(CommandLineError)?;
    Ok(print_and_exit(format_args!("{:#}", candle_zero::config::json_schema())))
}
