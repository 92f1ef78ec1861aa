//! `zerorun cache`: shows the disk space used by builds of single-file scripts, and frees it.

use crate::launch::console::{CommandLineError, EXIT_SETUP, print, refused};
use crate::launch::script_package::{cache, script_of};
use candle_zero::Error;
use candle_zero::util::format_bytes;
use clap::Parser;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// List the scripts that zerorun has built and the size of its build folder, or remove builds that are no longer
/// needed.
///
/// Removed builds are rebuilt when a script needs them.
///
/// Exit code: 0 on success, 1 if something cannot be read, removed or printed, 2 if the folder cannot be determined or
/// the command line is wrong.
#[derive(Debug, Parser)]
#[command(name = "cache", bin_name = "zerorun cache")]
struct CacheArguments {
    /// Remove the packages and programs of scripts that no longer exist
    #[arg(long)]
    prune: bool,

    /// Remove everything; the next start of a script compiles Candle and candle-zero again
    #[arg(long, conflicts_with = "prune")]
    clear: bool,
}

/// Returns the definition of the tool's command line.
pub(super) fn command() -> clap::Command {
    <CacheArguments as clap::CommandFactory>::command()
}

/// Runs the tool.
pub(super) fn run(words: Vec<OsString>) -> Result<ExitCode, CommandLineError> {
    let arguments = CacheArguments::try_parse_from(words).map_err(CommandLineError)?;
    let folder = match cache() {
        Ok(folder) => folder,
        Err(error) => return Ok(refused(&error, EXIT_SETUP)),
    };
    Ok(match arguments.act(&folder) {
        Ok(text) if print(&text) => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => refused(&error, 1),
    })
}

impl CacheArguments {
    fn act(&self, folder: &Path) -> Result<String, Error> {
        let before = size(folder).map_err(io_error("read", folder))?;
        if self.clear {
            // Anything else in the folder stays.
            for name in CACHE_SUBFOLDERS {
                remove(&folder.join(name))?;
            }
            let after = size(folder).map_err(io_error("read", folder))?;
            return Ok(format!("{}: {} removed", folder.display(), format_bytes(before.saturating_sub(after))));
        }
        let mut scripts = scripts(folder)?;
        if self.prune {
            let (existing, removed): (Vec<CachedScript>, _) = scripts.into_iter().partition(CachedScript::exists);
            for script in &removed {
                script.remove(folder)?;
            }
            scripts = existing;
        }
        let now = if self.prune { size(folder).map_err(io_error("read", folder))? } else { before };
        let mut text = format!("{}: {}", folder.display(), format_bytes(now));
        if self.prune {
            _ = write!(text, ", {} removed", format_bytes(before.saturating_sub(now)));
        }
        for script in &scripts {
            let note = if script.exists() { "" } else { " (no longer exists: --prune removes it)" };
            _ = write!(text, "\n  {}{note}", script.path.display());
        }
        Ok(text)
    }
}

/// The subfolders that zerorun owns.
const CACHE_SUBFOLDERS: [&str; 2] = ["packages", "target"];

fn io_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::Io { action, path, source }
}

/// A script that has been built.
struct CachedScript {
    path: PathBuf,
    /// The name of its package.
    name: String,
}

/// Returns the scripts, sorted by path.
fn scripts(folder: &Path) -> Result<Vec<CachedScript>, Error> {
    let packages = folder.join("packages");
    let entries = match std::fs::read_dir(&packages) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(io_error("read", &packages))?,
    };
    let script = |entry: std::fs::DirEntry| {
        let manifest = std::fs::read_to_string(entry.path().join("Cargo.toml")).ok()?;
        Some(CachedScript { path: script_of(&manifest)?, name: entry.file_name().into_string().ok()? })
    };
    let mut scripts: Vec<CachedScript> = entries.flatten().filter_map(script).collect();
    scripts.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(scripts)
}

impl CachedScript {
    fn exists(&self) -> bool {
        self.path.is_file()
    }

    /// Removes the script's package and cargo's build of it.
    fn remove(&self, folder: &Path) -> Result<(), Error> {
        let release = folder.join("target/release");
        let crate_name = self.name.replace('-', "_");
        for subfolder in ["", "deps", ".fingerprint", "incremental"] {
            let subfolder = release.join(subfolder);
            for entry in std::fs::read_dir(&subfolder).into_iter().flatten().flatten() {
                let file = entry.file_name();
                let file = file.to_string_lossy();
                let rest = file.strip_prefix(&self.name).or_else(|| file.strip_prefix(&crate_name));
                if rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(['-', '.'])) {
                    remove(&entry.path())?;
                }
            }
        }
        remove(&folder.join("packages").join(&self.name))
    }
}

/// Removes a file, or a folder with all its contents. A missing path is not an error.
fn remove(path: &Path) -> Result<(), Error> {
    let is_folder = std::fs::symlink_metadata(path).is_ok_and(|metadata| metadata.is_dir());
    let removed = if is_folder { std::fs::remove_dir_all(path) } else { std::fs::remove_file(path) };
    match removed {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(io_error("remove", path)(error)),
        _ => Ok(()),
    }
}

/// Returns the number of bytes that the files in a folder take up on disk, or 0 if the folder does not exist. A file
/// with several hard links counts once.
fn size(folder: &Path) -> io::Result<u64> {
    use std::os::unix::fs::MetadataExt as _;
    let mut seen = std::collections::HashSet::new();
    let mut pending = vec![folder.to_owned()];
    let mut bytes = 0;
    while let Some(path) = pending.pop() {
        let metadata = match std::fs::symlink_metadata(&path) {
            // The entry has been removed in the meantime, for example by cargo.
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            metadata => metadata?,
        };
        if metadata.is_dir() {
            for entry in std::fs::read_dir(&path)? {
                pending.push(entry?.path());
            }
        } else if seen.insert((metadata.dev(), metadata.ino())) {
            bytes += metadata.blocks() * 512;
        }
    }
    Ok(bytes)
}
