//! The variables that are passed to other hosts, from this process and from files: those that DeepSpeed's rules select
//! ([`export_rules`]), and some others.

use super::hosts::error::HostsError;
use super::hosts::export_rules::{self, ExportedVariables};
use super::nodes::secret::{SECRET, SECRET_FILE};
use crate::error::{LaunchError, Result};
use std::ffi::OsString;
use std::path::PathBuf;

/// The prefixes of variables that launchers and ranks on other hosts get in addition to DeepSpeed's.
const ADDITIONAL_PREFIXES: [&str; 5] = ["CANDLE_ZERO_", "RUST_", "RAYON_", "MPIR_CVAR_", "LD_LIBRARY_PATH"];

/// Returns the variables for other hosts. The secret is not among them, because these variables appear in command lines,
/// which every user of a host can read.
///
/// # Errors
/// Fails if a value is not UTF-8, or a file of variables cannot be read or is invalid.
pub(crate) fn exports() -> Result<Vec<(String, String)>> {
    let mut exports = ExportedVariables::of(std::env::vars_os())?;
    let home = std::env::var_os("HOME").map(PathBuf::from);
    let here = std::env::current_dir()
        .map_err(|source| LaunchError::Setup { what: "finding the working directory", source })?;
    for path in export_rules::files(home.as_deref(), &here, std::env::var_os("DS_ENV_FILE").as_deref()) {
        match std::fs::read_to_string(&path) {
            Ok(text) => exports.add_file(&text, &path)?,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(source) => return Err(HostsError::NoVariables { path, why: source.to_string() }.into()),
        }
    }
    let text = |(name, value): (OsString, OsString)| Some((name.into_string().ok()?, value.into_string().ok()?));
    let ours = std::env::vars_os()
        .filter_map(text)
        .filter(|(name, _)| ADDITIONAL_PREFIXES.iter().any(|ours| name.starts_with(ours)));
    let mut all: Vec<(String, String)> = ours.collect();
    all.extend(exports.iter().map(|(name, value)| (name.to_string(), value.to_string())));
    all.retain(|(name, _)| name != SECRET && name != SECRET_FILE);
    Ok(all)
}
