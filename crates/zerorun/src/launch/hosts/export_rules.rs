//! The variables that ranks on other hosts get from this host: those with certain prefixes, and those in the files
//! `.deepspeed_env`.
//!
//! A file has one line `NAME=VALUE` per variable. Empty lines and lines that begin with `#` are ignored. The file in
//! the home directory is read first, then the one in the working directory; later values override earlier ones.

use super::error::{HostsError, one_line};
use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

/// The prefixes of variables that are passed on: DeepSpeed's list for CUDA devices.
const EXPORTED_PREFIXES: [&str; 5] = ["MLFLOW", "PYTHON", "MV2", "UCX", "NCCL"];

/// The variable that marks an AISC job, in which the variables in [`NOT_IN_AISC`] are not passed on.
const AISC: &str = "AISC_JOB_NAME";
const NOT_IN_AISC: [&str; 2] = ["NCCL_IB_HCA", "UCX_NET_DEVICES"];

/// The name of the files, unless `DS_ENV_FILE` gives another.
const FILE: &str = ".deepspeed_env";

/// Returns the files in reading order. `name` is the value of `DS_ENV_FILE`.
pub(crate) fn files(home: Option<&Path>, working: &Path, name: Option<&OsStr>) -> Vec<PathBuf> {
    let name = name.filter(|name| !name.is_empty()).unwrap_or(OsStr::new(FILE));
    let mut files: Vec<PathBuf> = home.into_iter().chain([working]).map(|folder| folder.join(name)).collect();
    // The paths are equal if the name is absolute or the home directory is the working directory.
    files.dedup();
    files
}

/// Returns the value of a variable for other hosts.
///
/// # Errors
/// [`HostsError::ValueNotUtf8`].
pub(crate) fn value_as_text<'a>(name: &str, value: &'a OsStr) -> Result<&'a str, HostsError> {
    value.to_str().ok_or_else(|| HostsError::ValueNotUtf8 { name: name.into() })
}

/// Variables and their values, sorted by name.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct ExportedVariables(BTreeMap<String, String>);

impl ExportedVariables {
    /// Selects the variables of this process that are passed on.
    pub(crate) fn of(environment: impl IntoIterator<Item = (OsString, OsString)>) -> Result<Self, HostsError> {
        let mut exports = Self::default();
        let mut in_aisc = false;
        for (name, value) in environment {
            in_aisc |= name == AISC;
            // A name that a shell cannot export, such as that of a bash function, is not passed on.
            let Some(name) = name.to_str().filter(|name| is_forwarded(name) && is_name(name)) else { continue };
            exports.add(name, value_as_text(name, &value)?);
        }
        if in_aisc {
            NOT_IN_AISC.iter().for_each(|name| drop(exports.0.remove(*name)));
        }
        Ok(exports)
    }

    /// Adds the variables of a file. `path` is for messages.
    pub(crate) fn add_file(&mut self, text: &str, path: &Path) -> Result<(), HostsError> {
        for (at, content) in text.lines().map(str::trim).enumerate() {
            if content.is_empty() || content.starts_with('#') {
                continue;
            }
            let (path, line) = (path.into(), at + 1);
            match content.split_once('=') {
                None => return Err(HostsError::BadVariable { path, line, text: one_line(content) }),
                Some((name, _)) if !is_name(name.trim()) => {
                    return Err(HostsError::BadVariableName { path, line, name: one_line(name.trim()) });
                }
                Some((name, value)) => self.add(name, value),
            }
        }
        Ok(())
    }

    fn add(&mut self, name: &str, value: &str) {
        self.0.insert(name.trim().to_string(), value.trim().to_string());
    }

    /// Returns names and values.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(name, value)| (name.as_str(), value.as_str()))
    }
}

fn is_forwarded(name: &str) -> bool {
    EXPORTED_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

/// Returns whether a shell allows a variable of this name.
fn is_name(name: &str) -> bool {
    let is_name_character = |c: char| c.is_ascii_alphanumeric() || c == '_';
    name.chars().all(is_name_character) && name.starts_with(|c: char| !c.is_ascii_digit())
}

/// Formats a value as DeepSpeed writes it into the remote shell's command line: in double quotes if it contains special
/// characters. The remote shell expands it: `$HOME` becomes the remote host's, and double quotes in the value are
/// removed.
pub(crate) fn expanded_word(value: &str) -> String {
    if value.chars().all(is_plain) { value.to_string() } else { format!("\"{value}\"") }
}

/// Quotes a value so that a shell reads it back unchanged, as one word.
pub(crate) fn literal_word(value: &str) -> String {
    let is_plain_word = !value.is_empty() && value.chars().all(is_plain);
    if is_plain_word { value.to_string() } else { format!("'{}'", value.replace('\'', r"'\''")) }
}

fn is_plain(c: char) -> bool {
    c.is_alphanumeric() || "_@%+=:,./-".contains(c)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::recorded_cases;
    use super::*;
    use serde_json::{Map, json};
    use std::os::unix::ffi::OsStringExt;

    fn of(variables: &[(&str, &str)]) -> Vec<(String, String)> {
        let variables = variables.iter().map(|(name, value)| (OsString::from(name), OsString::from(value)));
        listed(&ExportedVariables::of(variables).unwrap())
    }

    fn listed(exports: &ExportedVariables) -> Vec<(String, String)> {
        exports.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect()
    }

    fn names(variables: &[(&str, &str)]) -> Vec<String> {
        of(variables).into_iter().map(|(name, _)| name).collect()
    }

    fn refusal(text: &str) -> String {
        ExportedVariables::default().add_file(text, Path::new("/home/me/.deepspeed_env")).unwrap_err().to_string()
    }

    #[test]
    fn the_recorded_cases_hold() {
        let cases = recorded_cases::of_area("launcher-export");
        for case in &cases {
            let text = |key: &str| case["input"][key].as_str().unwrap();
            let mut exports = ExportedVariables::default();
            exports.add_file(&format!("{}={}\n", text("key"), text("value")), Path::new("env")).unwrap();
            let words = exports.iter().map(|(name, value)| (name.to_string(), json!(expanded_word(value))));
            recorded_cases::check(case, Ok(json!({"exports": words.collect::<Map<_, _>>()})));
        }
        assert_eq!(cases.len(), 2);
    }

    #[test]
    fn variables_are_passed_on_by_the_beginning_of_their_names() {
        let all = [
            ("NCCL_DEBUG", "INFO"),
            ("PATH", "/bin"),
            ("UCX_TLS", "tcp"),
            ("MLFLOW_URI", "x"),
            ("MY_NCCL", "1"),
            ("PYTHONPATH", " /a "),
            ("MV2_X", ""),
            ("nccl", "1"),
            ("UCX_F()%%", "1"),
        ];
        assert_eq!(names(&all), ["MLFLOW_URI", "MV2_X", "NCCL_DEBUG", "PYTHONPATH", "UCX_TLS"]);
        assert_eq!(of(&[("PYTHONPATH", " /a ")]), [("PYTHONPATH".to_string(), "/a".to_string())]);
        let cards = [("NCCL_IB_HCA", "mlx5"), ("UCX_NET_DEVICES", "eth0"), ("NCCL_IB_HCA_2", "")];
        assert_eq!(names(&cards).len(), 3);
        let mut in_aisc = cards.to_vec();
        in_aisc.push(("AISC_JOB_NAME", ""));
        assert_eq!(names(&in_aisc), ["NCCL_IB_HCA_2"]);
    }

    #[test]
    fn the_later_value_of_a_variable_counts() {
        let mut exports = ExportedVariables::of([("NCCL_DEBUG".into(), "INFO".into())]).unwrap();
        exports.add_file("# ours\n\n NCCL_DEBUG = WARN \r\nA=b=c\nE=\n", Path::new("env")).unwrap();
        exports.add_file("A=d\n", Path::new("env")).unwrap();
        let pairs = [("A", "d"), ("E", ""), ("NCCL_DEBUG", "WARN")];
        assert_eq!(listed(&exports), pairs.map(|(name, value)| (name.to_string(), value.to_string())));
    }

    #[test]
    fn files_are_at_home_and_where_the_user_works() {
        let find = |home: Option<&str>, name: Option<&str>| {
            let found = files(home.map(Path::new), Path::new("/work"), name.map(OsStr::new));
            found.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(find(Some("/home/me"), None), "/home/me/.deepspeed_env /work/.deepspeed_env");
        assert_eq!(find(Some("/home/me"), Some("env")), "/home/me/env /work/env");
        assert_eq!(find(Some("/home/me"), Some("/etc/env")), "/etc/env");
        assert_eq!(find(Some("/work"), Some("")), "/work/.deepspeed_env");
        assert_eq!(find(None, None), "/work/.deepspeed_env");
    }

    #[test]
    fn words_are_as_a_shell_reads_them() {
        assert_eq!(expanded_word("a@b%c+d=e:f,g./h-i_é"), "a@b%c+d=e:f,g./h-i_é");
        assert_eq!(expanded_word("/opt/bin:$PATH"), "\"/opt/bin:$PATH\"");
        assert_eq!(["", "a"].map(literal_word), ["''", "a"]);
        let values = ["", "plain", "two words", "$HOME", "it's", "\"q\"", "`id`", "a\nb", "~/*", "a\\b", "-n"];
        for value in values {
            let command = format!("K={}; printf %s \"$K\"", literal_word(value));
            let output = std::process::Command::new("sh").args(["-c", &command]).output().unwrap();
            assert_eq!(String::from_utf8(output.stdout).unwrap(), value, "{command}");
        }
    }

    #[test]
    fn errors_name_the_line() {
        insta::assert_snapshot!(refusal("A=1\n\nB\n"), @"/home/me/.deepspeed_env:3: `B` does not set a variable; write NAME=VALUE, or # in front of a comment");
        insta::assert_snapshot!(refusal("export A=1\n"), @"/home/me/.deepspeed_env:1: `export A` is not a variable name; write NAME=VALUE with letters, digits and _ in the name");
        insta::assert_snapshot!(refusal("=1\n"), @"/home/me/.deepspeed_env:1: `` is not a variable name; write NAME=VALUE with letters, digits and _ in the name");
        let not_utf8 = [("NCCL_X".into(), OsString::from_vec(vec![0xff]))];
        insta::assert_snapshot!(ExportedVariables::of(not_utf8).unwrap_err(), @"the value of NCCL_X is not UTF-8 text and cannot be passed to other hosts; set it to text, or unset it");
    }
}
