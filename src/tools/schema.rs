//! `zerorun schema`: a JSON Schema of the configuration, for editors.

use crate::launch::console::{EXIT_SETUP, Refused, print};
use clap::Parser;
use std::ffi::OsString;
use std::process::ExitCode;

/// Prints a JSON Schema (draft 2020-12) of the configuration file: an editor that uses it completes keys, shows
/// their meaning and default, and marks unknown ones.
///
/// Exit code: 0 it is printed, 2 standard output refused it or the command line is wrong.
#[derive(Debug, Parser)]
#[command(name = "schema", bin_name = "zerorun schema")]
struct Arguments {}

/// The tool.
pub(super) fn run(words: Vec<OsString>) -> Result<ExitCode, Refused> {
    let Arguments {} = Arguments::try_parse_from(words).map_err(Refused)?;
    Ok(if print(format_args!("{:#}", crate::config::json_schema())) {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(EXIT_SETUP)
    })
}
