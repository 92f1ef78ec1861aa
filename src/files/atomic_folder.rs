//! Folders and files that appear only once they are complete: they are created in a scratch folder next to the target,
//! synced and renamed.

use super::scratch_folder::{ScratchFolder, WRITING};
use super::{folder_of, sync_folder};
use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;
use std::fs::File;
use std::io::{Error, ErrorKind, Result};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

/// A folder under construction. Nothing remains if it is dropped before it is finished.
#[derive(Debug)]
pub struct AtomicFolder {
    /// The scratch folder, which is removed when this value is dropped.
    _scratch: ScratchFolder,
    new: PathBuf,
    out: PathBuf,
    /// Whether the files are created inside `out` and moved one by one.
    is_inside: bool,
}

impl AtomicFolder {
    /// Creates a folder that becomes `out`, with the permissions of any new folder. The path must contain no links, and
    /// must be [free](free_folder) or belong to the caller.
    pub fn create_for(out: &Path) -> Result<Self> {
        let parent = folder_of(out);
        std::fs::create_dir_all(parent)?;
        let is_inside = must_stay(out);
        let scratch = ScratchFolder::new(if is_inside { out } else { parent }, WRITING)?;
        let new = scratch.path().join("new");
        std::fs::create_dir(&new)?;
        Ok(Self { _scratch: scratch, new, out: out.to_owned(), is_inside })
    }

    /// Returns the folder in which the files are written.
    pub fn path(&self) -> &Path {
        &self.new
    }

    /// Syncs the folder to disk and renames it, if the target does not exist or is an empty folder. The files must
    /// already be synced.
    ///
    /// # Errors
    /// The target exists and is not an empty folder; a write error.
    pub fn finish(&self) -> Result<()> {
        sync_folder(&self.new)?;
        if self.is_inside {
            return self.move_files(|_| false);
        }
        match renameat_with(CWD, &self.new, CWD, &self.out, RenameFlags::NOREPLACE) {
            Ok(()) => {}
            // The target exists but may be empty, or the operating system or the target's file system does not support
            // such a rename.
            Err(Errno::EXIST | Errno::INVAL | Errno::NOSYS) => std::fs::rename(&self.new, &self.out)?,
            Err(errno) => return Err(errno.into()),
        }
        sync_folder(folder_of(&self.out))
    }

    /// Moves this folder's files into `out`, where they replace those of the same names. Files for which `is_own` is
    /// true may be replaced or removed; everything else in `out` stays.
    ///
    /// # Errors
    /// A file of the same name does not belong to the caller; a write error.
    pub fn exchange(&self, is_own: impl Fn(&Path) -> bool) -> Result<()> {
        sync_folder(&self.new)?;
        let entries = std::fs::read_dir(&self.out)?.collect::<Result<Vec<_>>>()?;
        let only_own = entries.iter().all(|entry| is_own(&entry.path()));
        if self.is_inside || !only_own {
            return self.move_files(is_own);
        }
        match renameat_with(CWD, &self.new, CWD, &self.out, RenameFlags::EXCHANGE) {
            // The old content is in the scratch folder now. Files that appeared in the meantime are moved back.
            Ok(()) => {
                for entry in std::fs::read_dir(&self.new)?.flatten().filter(|entry| !is_own(&entry.path())) {
                    let back = self.out.join(entry.file_name());
                    renameat_with(CWD, entry.path(), CWD, back, RenameFlags::NOREPLACE)?;
                }
                sync_folder(folder_of(&self.out))
            }
            // The folder must stay, or the file system does not support exchanging names.
            Err(Errno::INVAL | Errno::NOSYS | Errno::BUSY | Errno::ACCESS | Errno::PERM) => self.move_files(is_own),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Moves the files one by one into the existing folder.
    fn move_files(&self, is_own: impl Fn(&Path) -> bool) -> Result<()> {
        let files = std::fs::read_dir(&self.new)?.collect::<Result<Vec<_>>>()?;
        let moves: Vec<_> = files.iter().map(|file| (file.path(), self.out.join(file.file_name()))).collect();
        if let Some((_, taken)) = moves.iter().find(|(_, to)| to.symlink_metadata().is_ok() && !is_own(to)) {
            let text = format!("{} exists and was not written by this run", taken.display());
            return Err(Error::new(ErrorKind::AlreadyExists, text));
        }
        for (from, to) in moves {
            if is_own(&to) {
                std::fs::rename(from, to)?;
            } else {
                // Files that appeared in the meantime stay, too.
                renameat_with(CWD, &from, CWD, &to, RenameFlags::NOREPLACE).or_else(|errno| match errno {
                    Errno::INVAL | Errno::NOSYS => std::fs::rename(&from, &to),
                    errno => Err(errno.into()),
                })?;
            }
        }
        sync_folder(&self.out)
    }
}

/// Returns whether an existing folder can only be written into, not replaced: a disk is mounted there, this process
/// runs in it, or its parent is read-only for this user.
pub fn must_stay(out: &Path) -> bool {
    let Ok(metadata) = out.metadata() else { return false };
    let id = |path: &Path| path.metadata().ok().map(|m| (m.dev(), m.ino()));
    let parent = folder_of(out);
    let is_mount = parent.metadata().is_ok_and(|m| m.dev() != metadata.dev());
    let is_current = id(Path::new(".")) == Some((metadata.dev(), metadata.ino()));
    is_mount || is_current || !may_write(parent)
}

/// Returns whether this user may create files in a folder, according to the folder's permissions.
pub(super) fn may_write(folder: &Path) -> bool {
    rustix::fs::access(folder, rustix::fs::Access::WRITE_OK | rustix::fs::Access::EXEC_OK).is_ok()
}

/// A file under construction. Nothing remains if it is dropped before it is finished.
#[derive(Debug)]
pub struct AtomicFile {
    file: File,
    scratch: ScratchFolder,
    out: PathBuf,
}

impl AtomicFile {
    /// Creates a file that becomes `out`, with the permissions of any new file. If `out` is a link, its target is
    /// replaced, not the link.
    ///
    /// # Errors
    /// The existing target is not a file; a write error.
    pub fn create_for(out: &Path) -> Result<Self> {
        let out = match out.symlink_metadata() {
            Ok(_) => {
                let resolved = out.canonicalize()?;
                super::check_regular_file(&resolved.metadata()?)?;
                resolved
            }
            Err(_) => out.to_owned(),
        };
        let scratch = ScratchFolder::new(folder_of(&out), WRITING)?;
        let file = File::options().read(true).write(true).create_new(true).open(scratch.path().join("new"))?;
        Ok(Self { file, scratch, out })
    }

    /// Returns the file for writing.
    pub fn file(&mut self) -> &mut File {
        &mut self.file
    }

    /// Syncs the file to disk and renames it, replacing an existing file. Returns the file, positioned at its end.
    pub fn finish(self) -> Result<File> {
        self.file.sync_all()?;
        std::fs::rename(self.scratch.path().join("new"), &self.out)?;
        sync_folder(folder_of(&self.out))?;
        Ok(self.file)
    }
}

/// Returns the folder that `out` refers to, if that folder does not exist or is empty; otherwise returns, as an inner
/// error, why the folder cannot be written to.
pub fn free_folder(out: &Path) -> Result<std::result::Result<PathBuf, &'static str>> {
    // If `out` is a link, its target is replaced, not the link.
    let out = match out.symlink_metadata() {
        Ok(_) => match out.canonicalize() {
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Err("it is a broken link")),
            found => found?,
        },
        Err(_) => std::path::absolute(out)?,
    };
    super::scratch_folder::sweep(&out, WRITING);
    match std::fs::read_dir(&out) {
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(Ok(out)),
        Ok(mut entries) => Ok(match entries.find(|e| e.as_ref().map_or(true, |e| e.file_name() != super::LOCK)) {
            None => Ok(out),
            Some(_) => Err("the output must be a new or empty folder, but this folder is not empty"),
        }),
        Err(e) if e.kind() == ErrorKind::NotADirectory => {
            Ok(Err("the output must be a new or empty folder, but this is a file"))
        }
        Err(e) => Err(e),
    }
}
