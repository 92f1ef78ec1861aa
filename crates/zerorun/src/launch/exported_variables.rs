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

/// Returns the variables for other hosts. The secret is not among them, because these variables appear in command
/// lines, which every user of a host can read.
///
/// # Errors
/// Fails if the value of one of these variables is not UTF-8, or a file of variables cannot be read or is invalid.
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
    let mut all = additional(std::env::vars_os())?;
    all.extend(exports.iter().map(|(name, value)| (name.to_string(), value.to_string())));
    all.retain(|(name, _)| !is_secret(name));
    Ok(all)
}

/// Returns the variables with one of [`ADDITIONAL_PREFIXES`].
fn additional(environment: impl IntoIterator<Item = (OsString, OsString)>) -> Result<Vec<(String, String)>> {
    let mut all = Vec::new();
    for (name, value) in environment {
        let Ok(name) = name.into_string() else { continue };
        if !is_secret(&name) && ADDITIONAL_PREFIXES.iter().any(|prefix| name.starts_with(prefix)) {
            let value = export_rules::value_as_text(&name, &value)?.to_owned();
            all.push((name, value));
        }
    }
    Ok(all)
}

fn is_secret(name: &str) -> bool {
    name == SECRET || name == SECRET_FILE
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::os::unix::ffi::OsStringExt as _;

    #[test]
    fn a_variable_that_is_not_text_is_refused_if_other_hosts_need_it() {
        let not_text = || OsString::from_vec(vec![b'/', 0xff]);
        let of = |name: &str| additional([(OsString::from(name), not_text()), ("RUST_LOG".into(), "info".into())]);
        insta::assert_snapshot!(of("RUST_BACKTRACE").unwrap_err(), @"the value of RUST_BACKTRACE is not UTF-8 text and cannot be passed to other hosts; set it to text, or unset it");
        for kept_here in ["HOME", SECRET_FILE] {
            assert_eq!(of(kept_here).unwrap(), [("RUST_LOG".to_string(), "info".to_string())]);
        }
    }
}
