//! The errors of the launcher.

use super::hosts::error::HostsError;
use std::path::PathBuf;

/// An error of the launcher.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// The script cannot be started, for example because it does not exist or is neither a Rust file nor an executable.
    #[error("cannot start {}: {found}; {fix}", path.display())]
    NotStartable {
        /// The path as it was typed.
        path: PathBuf,
        /// A description of what is at that path.
        found: String,
        /// The remedy.
        fix: String,
    },
    /// The manifest at the top of a script (its frontmatter) cannot be used.
    #[error("{}:{line}: {problem}; {fix}", path.display())]
    Frontmatter {
        /// The script.
        path: PathBuf,
        /// The line in the script, counted from 1.
        line: usize,
        /// The problem.
        problem: String,
        /// The remedy.
        fix: String,
    },
    /// There is no folder for the packages that are generated from scripts.
    #[error("no folder for script builds: ZERORUN_CACHE_DIR, XDG_CACHE_HOME and HOME are all unset; set one of them")]
    NoScriptCache,
    /// Another user can change the sources that `zerorun` was built from, and could thus make a script run any code.
    #[error(
        "zerorun and the candle-zero that scripts use come from {}, but {problem}; install zerorun from a folder that \
         you own (cargo install --path FOLDER/crates/zerorun)",
        path.display()
    )]
    UntrustedSource {
        /// The folder, or a file in it.
        path: PathBuf,
        /// The problem: another user owns it, or every user can change it.
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
        /// The script.
        script: PathBuf,
        /// The error of the operating system.
        source: std::io::Error,
    },
    /// rustc rejected the script. Its messages have been printed.
    #[error("{} does not compile", script.display())]
    ScriptDoesNotCompile {
        /// The script.
        script: PathBuf,
    },
    /// Cargo failed for a reason other than an error in the code. Its message has been printed.
    #[error("cargo could not build {}: {problem} (package in {})", script.display(), package.display())]
    CargoFailed {
        /// The script.
        script: PathBuf,
        /// The folder of the package that was built.
        package: PathBuf,
        /// The failure that cargo reported.
        problem: String,
    },
    /// A rank's process could not be started.
    #[error("cannot start rank {rank} ({}): {source}", program.display())]
    RankNotStarted {
        /// The rank.
        rank: usize,
        /// The program.
        program: PathBuf,
        /// The error of the operating system.
        source: std::io::Error,
    },
    /// A tool that starts ranks was itself started several times.
    #[error(
        "mpirun or srun has started {processes} processes of `zerorun {tool}`, each of which would be a separate job; \
         start the command once, without mpirun or srun: `zerorun {tool} -n {processes} ...` starts that many ranks \
         on this host"
    )]
    ToolInRanks {
        /// The tool's name.
        tool: &'static str,
        /// The number of its processes.
        processes: usize,
    },
    /// Signals, pipes or threads that the launcher needs could not be set up.
    #[error("cannot set up the launcher: {what}: {source}")]
    Setup {
        /// The attempted action.
        what: &'static str,
        /// The error of the operating system.
        source: std::io::Error,
    },
    /// An error about hosts, their slots, or the environment of their ranks.
    #[error(transparent)]
    Hosts(#[from] HostsError),
}
