//! Errors of the launcher.

use super::hosts::error::HostsError;
use std::path::PathBuf;

/// Errors of the launcher.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// The script is neither a Rust file nor an executable.
    #[error("cannot start {}: {found}; {fix}", path.display())]
    NotStartable {
        /// The path as it was typed.
        path: PathBuf,
        /// The finding at that path.
        found: String,
        /// The remedy.
        fix: String,
    },
    /// The manifest in front of a script (its frontmatter) cannot be used.
    #[error("{}:{line}: {problem}; {fix}", path.display())]
    Frontmatter {
        /// The script.
        path: PathBuf,
        /// Line in the script, counted from 1.
        line: usize,
        /// The problem.
        problem: String,
        /// The remedy.
        fix: String,
    },
    /// No folder for the packages that are generated from scripts.
    #[error("no folder for script builds: ZERORUN_CACHE_DIR, XDG_CACHE_HOME and HOME are all unset; set one of them")]
    NoScriptCache,
    /// The sources of this library are another user's, who could let a script run any code.
    #[error(
        "{} is where zerorun was built from and takes candle-zero from, but {problem}; install zerorun from a folder of \
         your own (cargo install --path FOLDER/crates/zerorun)",
        path.display()
    )]
    UntrustedSource {
        /// The folder, or a file in it.
        path: PathBuf,
        /// Who may change it.
        problem: String,
    },
    /// Cargo could not be started.
    #[error(
        "cannot start {cargo} to build {}: {source}; install Rust (rustup.rs) or start a built executable",
        script.display()
    )]
    CargoNotStarted {
        /// The cargo program that was tried.
        cargo: String,
        /// The target.
        script: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// rustc refused the script; its messages have been printed.
    #[error("{} does not compile", script.display())]
    ScriptDoesNotCompile {
        /// The script.
        script: PathBuf,
    },
    /// Cargo failed for another reason than an error in the code; its message has been printed.
    #[error("cargo could not build {}: {problem} (package in {})", script.display(), package.display())]
    CargoFailed {
        /// The script.
        script: PathBuf,
        /// Folder of the package that was built.
        package: PathBuf,
        /// The failure of cargo.
        problem: String,
    },
    /// A rank's process could not be started.
    #[error("cannot start rank {rank} ({}): {source}", program.display())]
    RankNotStarted {
        /// The rank.
        rank: usize,
        /// The program.
        program: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A tool that starts ranks was itself started several times.
    #[error(
        "mpirun or srun has started {processes} of `zerorun {tool}`, each of which would be a job of its own; start it once, \
         without them: `zerorun {tool} -n {processes} ...` starts that many ranks on this host"
    )]
    ToolInRanks {
        /// The tool's name.
        tool: &'static str,
        /// How many of it there are.
        processes: usize,
    },
    /// Signals, pipes or threads that the launcher itself needs could not be set up.
    #[error("cannot set up the launcher: {what}: {source}")]
    Setup {
        /// The attempted action.
        what: &'static str,
        /// The system's reason.
        source: std::io::Error,
    },
    /// Hosts, their slots, and what ranks there are given.
    #[error(transparent)]
    Hosts(#[from] HostsError),
}
