//! The check of all paths before a run writes anything: no output collides with an input or another output, each can be
//! written, and none belongs to another job.
//!
//! ```text
//! InputOutputPaths::default()
//!     .reads("--data", "d.jsonl", InputKind::File)      must stay unchanged
//!     .writes("--out", "adapter", OutputKind::Folder)   will be written
//!     .check()                                          compared with each other
//!     .claim()                                          locked, until the guard is dropped
//! ```

use super::atomic_folder::{may_write, must_stay};
use super::error::OutputError;
use super::lock::{FileLock, FileLockOutcome, sweep_locks};
use super::resolved_path::{FileId, ResolvedPath};
use super::scratch_folder::{WRITING, sweep};
use super::{LOCK, folder_of, lock_owner};
use crate::error::{Error, Result};
use rustix::fs::FlockOperation;
use std::collections::HashSet;
use std::ffi::OsStr;
use std::io::ErrorKind;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The kind of an input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InputKind {
    /// A file.
    File,
    /// A folder from which the files of a model are read, or one such file.
    Model,
    /// A folder of checkpoints, or a single checkpoint.
    Checkpoints,
}

/// The kind of an output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OutputKind {
    /// A folder that appears once it is complete, and belongs only to this run.
    Folder,
    /// A file that appears once it is complete.
    File,
    /// A file that grows during a run. It may be a character device.
    Lines,
    /// A folder of checkpoints. The run locks it, and saving a checkpoint takes another lock in it.
    Checkpoints,
    /// A folder that may also contain files of other runs.
    Shared,
}

/// The inputs and outputs of a run.
#[derive(Debug, Clone, Default)]
pub struct InputOutputPaths {
    reads: Vec<NamedPath<InputKind>>,
    writes: Vec<NamedPath<OutputKind>>,
}

/// A path, as the user names it.
#[derive(Debug, Clone)]
struct NamedPath<K> {
    flag: String,
    path: PathBuf,
    kind: K,
}

/// A named path with its resolved form.
struct NamedResolvedPath<'a, K> {
    named: &'a NamedPath<K>,
    resolved: ResolvedPath,
}

/// The locks on this job's outputs, held until dropped.
#[derive(Debug, Default)]
pub struct OutputLocks {
    _locks: Vec<FileLock>,
}

impl InputOutputPaths {
    /// Adds the input `path`. A missing input is reported when it is opened.
    #[must_use]
    pub fn reads(mut self, flag: impl Into<String>, path: impl Into<PathBuf>, kind: InputKind) -> Self {
        self.reads.push(NamedPath { flag: flag.into(), path: path.into(), kind });
        self
    }

    /// Adds the output `path`.
    #[must_use]
    pub fn writes(mut self, flag: impl Into<String>, path: impl Into<PathBuf>, kind: OutputKind) -> Self {
        self.writes.push(NamedPath { flag: flag.into(), path: path.into(), kind });
        self
    }

    /// Compares all paths by device and inode instead of by name, and checks that each output can be written as its
    /// kind requires.
    ///
    /// # Errors
    /// [`OutputError::Input`] if an output would change an input, [`OutputError::Collision`] if two outputs collide,
    /// and [`OutputError::Refused`] for a path that cannot be written.
    pub fn check(&self) -> Result<()> {
        let reads = self
            .reads
            .iter()
            .filter_map(|named| Some(NamedResolvedPath { resolved: ResolvedPath::of(&named.path).ok()?, named }));
        let reads: Vec<_> = reads.filter(|read| read.resolved.exists()).collect();
        let writes = self.writes.iter().filter(|named| !(named.kind == OutputKind::Lines && is_device(&named.path)));
        let writes = writes.map(|named| {
            let resolved = ResolvedPath::of(&named.path).map_err(|e| refused(&named.path, e.to_string()))?;
            Ok(NamedResolvedPath { resolved, named })
        });
        let writes = writes.collect::<Result<Vec<_>>>()?;
        for write in &writes {
            write.check_kind()?;
            reads.iter().try_for_each(|read| write.check_input(read))?;
        }
        for (index, first) in writes.iter().enumerate() {
            writes[index + 1..].iter().try_for_each(|second| {
                first.check_other(second)?;
                second.check_other(first)
            })?;
        }
        Ok(())
    }

    /// Locks all outputs for this job, after [`check`](Self::check). Removes leftovers of dead jobs next to the
    /// outputs.
    ///
    /// # Errors
    /// The same as [`check`](Self::check), [`OutputError::Busy`] if another job has locked an output, and [`Error::Io`]
    /// for a folder that cannot be created.
    pub fn claim(&self) -> Result<OutputLocks> {
        self.check()?;
        let locks = self.writes.iter().filter_map(|named| lock(named).transpose());
        Ok(OutputLocks { _locks: locks.collect::<Result<_>>()? })
    }
}

impl NamedResolvedPath<'_, OutputKind> {
    /// Checks that the path can be an output of its kind.
    fn check_kind(&self) -> Result<()> {
        let Self { named: NamedPath { path, kind: output_kind, .. }, resolved } = self;
        let is_folder = matches!(output_kind, OutputKind::Folder | OutputKind::Checkpoints | OutputKind::Shared);
        let Ok(found) = resolved.path().metadata() else {
            let parent = folder_of(path);
            if !is_folder && !parent.is_dir() {
                return Err(refused(path, format!("there is no folder {}", parent.display())));
            }
            let ancestor = resolved.path();
            let ancestor = ancestor.ancestors().find(|folder| folder.exists()).unwrap_or(Path::new("/"));
            return match may_write(ancestor) {
                true => Ok(()),
                false => Err(refused(path, format!("the folder {} is read-only for this user", ancestor.display()))),
            };
        };
        let kind = found.file_type();
        let problem = match () {
            () if *output_kind == OutputKind::Folder && !kind.is_dir() => {
                "the output must be a new or empty folder, but this is a file"
            }
            () if is_folder && !kind.is_dir() => "it is a file, but a folder is needed",
            () if is_folder || kind.is_file() => return Ok(()),
            () if kind.is_dir() => "it is a folder, but a file is needed",
            () if kind.is_fifo() => "it is a pipe, but a file is needed",
            () if kind.is_socket() => "it is a socket, but a file is needed",
            () => "it is a device, but a file is needed",
        };
        Err(refused(path, problem.into()))
    }

    /// Checks that the output does not change an input.
    fn check_input(&self, read: &NamedResolvedPath<'_, InputKind>) -> Result<()> {
        let relation = match read.named.kind {
            _ if self.resolved.is(&read.resolved) => "is",
            _ if self.named.kind == OutputKind::Folder && read.resolved.is_in(&self.resolved) => "contains",
            InputKind::File => return Ok(()),
            InputKind::Model if self.is_of_model(read) => "is a file of",
            InputKind::Checkpoints if self.resolved.is_in(&read.resolved) && self.is_in_checkpoint(&read.resolved) => {
                "is in"
            }
            _ => return Ok(()),
        };
        Err(OutputError::Input {
            output: self.named.flag.as_str().into(),
            path: self.named.path.clone(),
            relation,
            input: read.named.flag.as_str().into(),
            other: read.named.path.clone(),
        }
        .into())
    }

    /// Returns whether the output is, or would be, one of the files of the model in a folder.
    fn is_of_model(&self, read: &NamedResolvedPath<'_, InputKind>) -> bool {
        let folder = read.resolved.path();
        if !folder.is_dir() {
            return false;
        }
        let is_in_folder =
            ResolvedPath::of(folder_of(&self.resolved.path())).is_ok_and(|parent| parent.is(&read.resolved));
        let is_named = self.resolved.path().file_name().is_some_and(is_model_file_name);
        let is_file = matches!(self.named.kind, OutputKind::File | OutputKind::Lines);
        is_file && is_in_folder && is_named || self.resolved.id().is_some_and(|id| files_in(&folder).contains(&id))
    }

    /// Returns whether the output would be inside one of the checkpoints in a folder, rather than next to them.
    fn is_in_checkpoint(&self, folder: &ResolvedPath) -> bool {
        /// Marker files of this library's and DeepSpeed's checkpoints.
        const CHECKPOINT_MARKERS: [&str; 2] = ["manifest.json", "mp_rank_00_model_states.pt"];
        let (path, folder) = (self.resolved.path(), folder.path());
        let is_checkpoint = |path: &Path| {
            CHECKPOINT_MARKERS.iter().any(|name| path.join(name).exists())
                || path.join("zero_pp_rank_0_mp_rank_00_model_states.pt").exists()
        };
        path.ancestors().skip(1).take_while(|ancestor| ancestor.starts_with(&folder)).any(is_checkpoint)
    }

    /// Checks that the output does not collide with another output.
    fn check_other(&self, other: &NamedResolvedPath<'_, OutputKind>) -> Result<()> {
        let relation = match other.named.kind {
            _ if self.resolved.is(&other.resolved) => "is",
            OutputKind::Folder if self.resolved.is_in(&other.resolved) => "is in",
            OutputKind::Checkpoints if self.is_named_as_checkpoints(&other.resolved) => {
                "has the name of a checkpoint file of"
            }
            _ => return Ok(()),
        };
        Err(OutputError::Collision {
            output: self.named.flag.as_str().into(),
            path: self.named.path.clone(),
            relation,
            second: other.named.flag.as_str().into(),
            other: other.named.path.clone(),
        }
        .into())
    }

    /// Returns whether the output is in a folder of checkpoints under a name that checkpoints need.
    fn is_named_as_checkpoints(&self, folder: &ResolvedPath) -> bool {
        let (path, folder) = (self.resolved.path(), folder.path());
        let first = path.strip_prefix(folder).ok().and_then(|rest| rest.iter().next()).and_then(OsStr::to_str);
        first
            .is_some_and(|name| name == "latest" || name.starts_with(".candle-zero") || name.starts_with("global_step"))
    }
}

/// Returns whether a path leads to a character device.
fn is_device(path: &Path) -> bool {
    path.metadata().is_ok_and(|found| found.file_type().is_char_device())
}

/// Returns whether a model loader might open a file with that name.
fn is_model_file_name(name: &OsStr) -> bool {
    const MODEL_FILE_SUFFIXES: [&str; 9] =
        [".json", ".safetensors", ".gguf", ".jinja", ".txt", ".model", ".bin", ".pt", ".py"];
    let name = name.to_string_lossy().to_lowercase();
    MODEL_FILE_SUFFIXES.iter().any(|end| name.ends_with(end)) || name == "license"
}

/// Returns the ids of the files in a model's folder, including those that links lead to.
fn files_in(folder: &Path) -> HashSet<FileId> {
    let files = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let files = files.filter(|file| is_model_file_name(&file.file_name()));
    files.filter_map(|file| file.path().metadata().ok()).filter(|m| m.is_file()).map(|m| (m.dev(), m.ino())).collect()
}

/// Locks an output; returns `None` if it needs no lock or cannot have one.
fn lock(named: &NamedPath<OutputKind>) -> Result<Option<FileLock>> {
    /// The time for which a killed process may still hold the lock.
    const LOCK_RELEASE_TIMEOUT: Duration = Duration::from_secs(2);
    let NamedPath { path, kind, .. } = named;
    if *kind == OutputKind::Shared || is_device(path) {
        return Ok(None);
    }
    let io_error = |action| move |source| Error::Io { action, path: path.clone(), source };
    let resolved = ResolvedPath::of(path).map_err(io_error("find"))?.path();
    let parent = folder_of(&resolved);
    if *kind == OutputKind::Checkpoints {
        std::fs::create_dir_all(&resolved).map_err(io_error("create"))?;
    } else if *kind == OutputKind::Folder {
        std::fs::create_dir_all(parent).map_err(io_error("create"))?;
    }
    let is_fixed = resolved.is_dir() && must_stay(&resolved);
    sweep(if is_fixed { &resolved } else { parent }, WRITING);
    sweep_locks(parent, |name| {
        name != LOCK && name.as_encoded_bytes().starts_with(b".") && name.as_encoded_bytes().ends_with(LOCK.as_bytes())
    });
    let file = match kind {
        // This is in addition to the lock that saving a checkpoint takes there.
        OutputKind::Checkpoints => resolved.join(".candle-zero-job.lock"),
        _ if is_fixed => resolved.join(LOCK),
        // The folder is read-only, so no lock file can be created next to the output.
        _ if !may_write(parent) => return Ok(None),
        _ => parent.join(lock_name(resolved.file_name().unwrap_or_default())),
    };
    let start = Instant::now();
    loop {
        match FileLock::attempt(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(FileLockOutcome::Held(lock)) => return Ok(Some(lock)),
            Ok(FileLockOutcome::Busy(inode)) if start.elapsed() > LOCK_RELEASE_TIMEOUT => {
                return Err(OutputError::Busy { path: path.clone(), owner: lock_owner(inode) }.into());
            }
            // This happens in folders such as /proc, in which users cannot create files.
            Ok(FileLockOutcome::Gone) if start.elapsed() > LOCK_RELEASE_TIMEOUT => {
                return Err(refused(path, format!("cannot create a file in {}", folder_of(&file).display())));
            }
            Ok(_) => std::thread::sleep(Duration::from_millis(10)),
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(refused(path, format!("cannot lock {}: {e}", file.display()))),
        }
    }
}

/// Returns the name of the lock next to a file or folder.
fn lock_name(name: &OsStr) -> std::ffi::OsString {
    /// The maximum number of bytes in the name, which leaves room for the prefix and suffix.
    const MAX_NAME_BYTES: usize = 200;
    let mut lock = std::ffi::OsString::from(".");
    match name.len() <= MAX_NAME_BYTES {
        true => lock.push(name),
        false => lock.push(format!("{:016x}", twox_hash::XxHash3_64::oneshot(name.as_encoded_bytes()))),
    }
    lock.push(LOCK);
    lock
}

fn refused(path: &Path, problem: String) -> Error {
    OutputError::Refused { path: path.to_owned(), problem }.into()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    /// Returns the problem, without the path of the test's folder.
    fn problem(dir: &Path, outputs: &InputOutputPaths) -> String {
        let text = outputs.check().map_or_else(|e| e.to_string(), |()| "nothing".into());
        text.replace(&format!("{}/", dir.display()), "")
    }

    #[test]
    fn outputs_are_compared_with_inputs_by_what_is_there() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::create_dir_all(at("m/data")).unwrap();
        std::fs::create_dir_all(at("ck/global_step3")).unwrap();
        for file in ["m/config.json", "m/w.safetensors", "m/data/d.jsonl", "d.jsonl", "ck/global_step3/manifest.json"] {
            std::fs::write(at(file), "x").unwrap();
        }
        std::fs::hard_link(at("d.jsonl"), at("hard")).unwrap();
        symlink(at("m"), at("link")).unwrap();
        symlink(at("m/w.safetensors"), at("weights")).unwrap();
        let check = |kind, path: &str| {
            let outputs = InputOutputPaths::default()
                .reads("MODEL", at("m"), InputKind::Model)
                .reads("--data", at("d.jsonl"), InputKind::File)
                .reads("--data", at("m/data/d.jsonl"), InputKind::File)
                .reads("DIR", at("ck"), InputKind::Checkpoints)
                .writes("--out", at(path), kind);
            problem(dir.path(), &outputs)
        };
        insta::assert_snapshot!(check(OutputKind::Folder, "link/../m"), @"--out link/../m is MODEL m, which is an input; give another path");
        insta::assert_snapshot!(check(OutputKind::Folder, "m/data"), @"--out m/data contains --data m/data/d.jsonl, which is an input; give another path");
        insta::assert_snapshot!(check(OutputKind::Lines, "hard"), @"--out hard is --data d.jsonl, which is an input; give another path");
        insta::assert_snapshot!(check(OutputKind::File, "weights"), @"--out weights is a file of MODEL m, which is an input; give another path");
        insta::assert_snapshot!(check(OutputKind::File, "link/model.safetensors.index.json"), @"--out link/model.safetensors.index.json is a file of MODEL m, which is an input; give another path");
        insta::assert_snapshot!(check(OutputKind::Folder, "ck/global_step3/x"), @"--out ck/global_step3/x is in DIR ck, which is an input; give another path");
        for (kind, path) in [
            (OutputKind::Folder, "link/new"),
            (OutputKind::Folder, "ck/new"),
            (OutputKind::Lines, "m/m.jsonl"),
            (OutputKind::Shared, "."),
        ] {
            assert_eq!(check(kind, path), "nothing", "{path}");
        }
    }

    #[test]
    fn outputs_stay_out_of_each_others_way() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::create_dir(at("d")).unwrap();
        symlink(at("d"), at("e")).unwrap();
        let check = |out: &str, save: &str, metrics: &str| {
            let outputs = InputOutputPaths::default()
                .writes("--out", at(out), OutputKind::Folder)
                .writes("--save", at(save), OutputKind::Checkpoints)
                .writes("--metrics", at(metrics), OutputKind::Lines);
            problem(dir.path(), &outputs)
        };
        insta::assert_snapshot!(check("d/new", "e/./new", "m"), @"--out d/new is --save e/./new, but both are outputs; give each its own path");
        insta::assert_snapshot!(check("o", "o/ck", "m"), @"--save o/ck is in --out o, but both are outputs; give each its own path");
        insta::assert_snapshot!(check("d", "ck", "e/m"), @"--metrics e/m is in --out d, but both are outputs; give each its own path");
        insta::assert_snapshot!(check("o", "d", "e/latest"), @"--metrics e/latest has the name of a checkpoint file of --save d, but both are outputs; give each its own path");
        assert_eq!(check("d/out", "d", "d/m.jsonl"), "nothing");
    }

    #[test]
    fn what_cannot_be_written_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::write(at("file"), "x").unwrap();
        std::fs::create_dir(at("folder")).unwrap();
        symlink("nowhere", at("dangling")).unwrap();
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mknodat(rustix::fs::CWD, at("pipe"), rustix::fs::FileType::Fifo, mode, 0).unwrap();
        let check =
            |kind, path: &str| problem(dir.path(), &InputOutputPaths::default().writes("--out", at(path), kind));
        insta::assert_snapshot!(check(OutputKind::Folder, "file"), @"cannot write to file: the output must be a new or empty folder, but this is a file; give another path");
        insta::assert_snapshot!(check(OutputKind::Folder, "file/x"), @"cannot write to file/x: Not a directory (os error 20); give another path");
        insta::assert_snapshot!(check(OutputKind::Lines, "folder"), @"cannot write to folder: it is a folder, but a file is needed; give another path");
        insta::assert_snapshot!(check(OutputKind::Lines, "pipe"), @"cannot write to pipe: it is a pipe, but a file is needed; give another path");
        insta::assert_snapshot!(check(OutputKind::File, "dangling"), @"cannot write to dangling: it is a broken link, or leads through one; give another path");
        assert_eq!(check(OutputKind::Folder, "a/b/c"), "nothing");
        assert!(check(OutputKind::File, "a/b").starts_with("cannot write to a/b: there is no folder"));
        let null = |kind| problem(dir.path(), &InputOutputPaths::default().writes("--out", "/dev/null", kind));
        assert_eq!(null(OutputKind::Lines), "nothing");
        insta::assert_snapshot!(null(OutputKind::File), @"cannot write to /dev/null: it is a device, but a file is needed; give another path");
    }

    #[test]
    fn an_output_is_one_jobs_at_a_time_and_nothing_stays_beside_it() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::create_dir(at("o")).unwrap();
        symlink(at("o"), at("link")).unwrap();
        let claim = |path: &str, kind| InputOutputPaths::default().writes("--out", at(path), kind).claim();
        for (one, other, kind) in [
            ("o", "link", OutputKind::Folder),
            ("new", "./new", OutputKind::Folder),
            ("ck", "ck", OutputKind::Checkpoints),
            ("m", "m", OutputKind::Lines),
        ] {
            let first = claim(one, kind).unwrap();
            let error = claim(other, kind).unwrap_err();
            assert!(matches!(error, Error::Output(OutputError::Busy { .. })), "{error}");
            drop(first);
            claim(other, kind).unwrap();
        }
        let mut names: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["ck", "link", "o"]);
        // A user's file has the name of the lock.
        std::fs::write(at(".new.candle-zero.lock"), "notes").unwrap();
        assert!(claim("new", OutputKind::Folder).is_err());
        assert_eq!(std::fs::read_to_string(at(".new.candle-zero.lock")).unwrap(), "notes");
    }
}
