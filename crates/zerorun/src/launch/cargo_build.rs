//! Builds the executable with cargo, and shows rustc's messages with the script's own path.

use super::console::eprint;
use super::signals::die_with_parent;
use crate::error::{Error, LaunchError, Result};
use rustix::process::Signal;
use serde::Deserialize;
use std::ffi::OsString;
use std::io::{BufRead, BufReader, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The kind of target that cargo builds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CargoTargetKind {
    Example,
    Bin,
}

impl CargoTargetKind {
    fn word(self) -> &'static str {
        match self {
            Self::Example => "example",
            Self::Bin => "bin",
        }
    }
}

/// One invocation of cargo.
#[derive(Debug)]
pub(crate) struct CargoBuild {
    /// The script as typed, for messages.
    pub(super) script: PathBuf,
    /// The folder of the Cargo.toml.
    pub(super) package_dir: PathBuf,
    /// The target folder, or `None` if cargo decides.
    pub(super) target_dir: Option<PathBuf>,
    pub(super) kind: CargoTargetKind,
    /// Cargo's name for the target.
    pub(super) name: String,
    pub(super) features: Option<String>,
    /// The folder that `zerorun` was built from, if it no longer exists and the package needs it.
    pub(super) missing_source: Option<PathBuf>,
    pub(super) printed_path: Option<DiagnosticPath>,
}

/// The path of the script as rustc prints it, and as the user typed it.
///
/// rustc could print the user's path itself (`--remap-path-prefix`), but such a flag would also reach the dependencies,
/// and all of them would be recompiled for each script.
#[derive(Debug)]
pub(super) struct DiagnosticPath {
    pub(super) by_rustc: String,
    pub(super) as_typed: String,
}

/// The part of cargo's JSON messages that is needed here.
#[derive(Debug, Deserialize)]
struct CargoMessage {
    reason: String,
    message: Option<RustcDiagnostic>,
    target: Option<CargoBuiltTarget>,
    executable: Option<PathBuf>,
}

#[derive(Debug, Deserialize)]
struct RustcDiagnostic {
    rendered: Option<String>,
    level: String,
}

#[derive(Debug, Deserialize)]
struct CargoBuiltTarget {
    name: String,
    kind: Vec<String>,
}

/// Builds the executable and returns its path. rustc's messages go to stderr.
pub(crate) fn build(build: &CargoBuild) -> Result<PathBuf> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| OsString::from("cargo"));
    if let Some(target) = build.target_dir.as_deref().filter(|target| is_first_build(target)) {
        eprint(&format!(
            "zerorun: compiling Candle and candle-zero into {}: this takes a few minutes, but only once; later \
             scripts compile only their own code and added dependencies",
            target.display()
        ));
    }
    let read_error = |source| Error::from(LaunchError::Setup { what: "reading cargo's messages", source });
    let mut child = command(build, &cargo).spawn().map_err(|source| LaunchError::CargoNotStarted {
        cargo: cargo.to_string_lossy().into_owned(),
        script: build.script.clone(),
        source,
    })?;
    let mut executable = None;
    let mut errors = 0usize;
    // `stdout` is piped by `command`; without it, there would be no messages to read.
    for line in child.stdout.take().into_iter().flat_map(|stdout| BufReader::new(stdout).lines()) {
        let line = line.map_err(read_error)?;
        let Ok(message) = serde_json::from_str::<CargoMessage>(&line) else {
            eprint(&line);
            continue;
        };
        if let Some(diagnostic) = message.message {
            errors += usize::from(diagnostic.level.starts_with("error"));
            if let Some(rendered) = diagnostic.rendered {
                let relabelled = build.printed_path.as_ref().map(|path| with_typed_path(&rendered, path));
                // A closed stderr must not stop the build.
                let _ = std::io::stderr().write_all(relabelled.as_deref().unwrap_or(&rendered).as_bytes());
            }
        }
        let is_ours =
            |target: &CargoBuiltTarget| target.name == build.name && target.kind.iter().any(|k| k == build.kind.word());
        if message.reason == "compiler-artifact" && message.target.as_ref().is_some_and(is_ours) {
            executable = message.executable.or(executable);
        }
    }
    let status = child.wait().map_err(read_error)?;
    let failed = |problem: String| {
        Error::from(LaunchError::CargoFailed {
            script: build.script.clone(),
            package: build.package_dir.clone(),
            problem,
        })
    };
    if status.success() {
        return executable.ok_or_else(|| failed("it reported no executable".to_string()));
    }
    if errors > 0 {
        return Err(LaunchError::ScriptDoesNotCompile { script: build.script.clone() }.into());
    }
    let hint = build.missing_source.as_ref().map(|folder| {
        format!(
            "; candle-zero was not found, because {}, which zerorun was built from, no longer exists; install zerorun \
             from the sources' current folder (cargo install --path FOLDER/crates/zerorun)",
            folder.display()
        )
    });
    Err(failed(format!("{status}; see its message above{}", hint.unwrap_or_default())))
}

/// Returns whether the target folder does not contain a compiled candle-zero yet.
fn is_first_build(target: &Path) -> bool {
    let built = std::fs::read_dir(target.join("release/.fingerprint")).into_iter().flatten().flatten();
    let mut names = built.map(|entry| entry.file_name().to_string_lossy().into_owned());
    !names.any(|name| name.starts_with("candle-zero-") && !name.starts_with("candle-zero-finetune-"))
}

fn command(build: &CargoBuild, cargo: &OsString) -> Command {
    let mut command = Command::new(cargo);
    command.args(["build", "--release", message_format(), "--manifest-path"]).arg(build.package_dir.join("Cargo.toml"));
    command.arg(format!("--{}", build.kind.word())).arg(&build.name);
    if let Some(dir) = &build.target_dir {
        command.arg("--target-dir").arg(dir);
    }
    if let Some(features) = &build.features {
        command.arg("--features").arg(features);
    }
    // Cargo reads its settings from its current folder upwards. The package's own settings must apply wherever zerorun
    // is started, because other settings would recompile everything. A relative CARGO_TARGET_DIR keeps its meaning.
    command.current_dir(&build.package_dir);
    if let Some(dir) = std::env::var_os("CARGO_TARGET_DIR")
        && let Ok(dir) = std::path::absolute(&dir)
    {
        command.env("CARGO_TARGET_DIR", dir);
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    die_with_parent(&mut command, Signal::TERM);
    command
}

/// Returns the message format, with colours according to cargo's own rules.
fn message_format() -> &'static str {
    let colours = match std::env::var("CARGO_TERM_COLOR").as_deref() {
        Ok("always") => true,
        Ok("never") => false,
        _ => std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty()),
    };
    if colours { "--message-format=json-diagnostic-rendered-ansi" } else { "--message-format=json" }
}

/// Replaces the path in the `--> path:line:column` lines of a message with the path that the user typed.
fn with_typed_path(rendered: &str, path: &DiagnosticPath) -> String {
    let mut text = String::with_capacity(rendered.len() + path.as_typed.len());
    for line in rendered.split_inclusive('\n') {
        match path_position(line, &path.by_rustc) {
            Some(at) => {
                text.push_str(&line[..at]);
                text.push_str(&path.as_typed);
                text.push_str(&line[at + path.by_rustc.len()..]);
            }
            None => text.push_str(line),
        }
    }
    text
}

/// Returns the position of `path` in a line that names a source location, such as ` --> path:1:2` or ` ::: path:1:2`.
fn path_position(line: &str, path: &str) -> Option<usize> {
    let arrow = skip_blank_and_colour(line, 0);
    let rest = line[arrow..].strip_prefix("-->").or_else(|| line[arrow..].strip_prefix(":::"))?;
    let at = skip_blank_and_colour(line, line.len() - rest.len());
    line[at..].strip_prefix(path)?.starts_with(':').then_some(at)
}

/// Returns the position after spaces and terminal colour sequences (`ESC [ ... m`).
fn skip_blank_and_colour(line: &str, from: usize) -> usize {
    let mut at = from;
    loop {
        let rest = &line[at..];
        if rest.starts_with(' ') {
            at += 1;
        } else if let Some(end) = rest.strip_prefix("\x1b[").and_then(|code| code.find('m')) {
            at += 2 + end + 1;
        } else {
            return at;
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn relabelled(rendered: &str) -> String {
        let path = DiagnosticPath { by_rustc: "train.rs".to_string(), as_typed: "../my/train.rs".to_string() };
        with_typed_path(rendered, &path)
    }

    #[test]
    fn places_get_the_users_path() {
        assert_eq!(relabelled("error\n  --> train.rs:3:5\n"), "error\n  --> ../my/train.rs:3:5\n");
        assert_eq!(relabelled(" ::: train.rs:3:5\n"), " ::: ../my/train.rs:3:5\n");
        assert_eq!(
            relabelled(" \x1b[1m\x1b[94m--> \x1b[0mtrain.rs:2:18\n"),
            " \x1b[1m\x1b[94m--> \x1b[0m../my/train.rs:2:18\n"
        );
    }

    #[test]
    fn the_first_build_is_known_by_what_is_compiled() {
        let target = tempfile::tempdir().unwrap();
        assert!(is_first_build(target.path()));
        std::fs::create_dir_all(target.path().join("release/.fingerprint/candle-core-0123")).unwrap();
        assert!(is_first_build(target.path()), "it was interrupted");
        std::fs::create_dir_all(target.path().join("release/.fingerprint/candle-zero-0123")).unwrap();
        assert!(!is_first_build(target.path()));
    }

    #[test]
    fn a_checkout_that_is_gone_is_named_where_cargo_fails_without_it() {
        // A folder without a manifest: cargo fails immediately.
        let package = tempfile::tempdir().unwrap();
        let error_of = |missing_source: Option<&str>| {
            let of_script = CargoBuild {
                script: "train.rs".into(),
                package_dir: package.path().into(),
                target_dir: None,
                kind: CargoTargetKind::Bin,
                name: "train".into(),
                features: None,
                missing_source: missing_source.map(PathBuf::from),
                printed_path: None,
            };
            build(&of_script).unwrap_err().to_string()
        };
        let expected =
            "because /was/here, which zerorun was built from, no longer exists; install zerorun from the sources'";
        assert!(error_of(Some("/was/here")).contains(expected), "{}", error_of(Some("/was/here")));
        assert!(!error_of(None).contains("no longer exists"));
    }

    #[test]
    fn other_files_and_lines_of_code_stay() {
        for text in
            ["--> train.rs2:1:1\n", " --> /x/train.rs:1:1\n", "3 | // --> train.rs:1:1\n", " -->\n", "\x1b[", ""]
        {
            assert_eq!(relabelled(text), text);
        }
    }
}
