//! Paths that are compared by device and inode instead of by name: symbolic links, `..`, hard links and mounts make no
//! difference.

use std::ffi::OsString;
use std::io::{Error, ErrorKind, Result};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Component, Path, PathBuf};

/// The device and inode of a file or folder.
pub(super) type FileId = (u64, u64);

/// A resolved path: the part that exists, and the names after it.
#[derive(Debug, Clone)]
pub(crate) struct ResolvedPath {
    /// The existing part, without links or `..`.
    existing: PathBuf,
    /// The names that do not exist yet.
    rest: Vec<OsString>,
    /// The ids of `existing`, its parent folder, and all further ancestors up to the root.
    ids: Vec<FileId>,
    /// Whether the file system ignores case in names.
    folds_case: bool,
}

impl ResolvedPath {
    /// Resolves `path`.
    ///
    /// # Errors
    /// A dangling link; a file where a folder is needed; a path that cannot be examined.
    pub fn of(path: &Path) -> Result<Self> {
        let (mut existing, mut rest) = (PathBuf::from("/"), Vec::new());
        for part in std::path::absolute(path)?.components() {
            match part {
                Component::Normal(name) if !rest.is_empty() => rest.push(name.to_owned()),
                Component::Normal(name) => {
                    let next = existing.join(name);
                    match next.symlink_metadata() {
                        Ok(_) => existing = next.canonicalize().map_err(broken_link_error)?,
                        Err(e) if e.kind() == ErrorKind::NotFound => rest.push(name.to_owned()),
                        Err(e) => return Err(e),
                    }
                }
                Component::ParentDir if rest.pop().is_none() => _ = existing.pop(),
                _ => {}
            }
        }
        let ids = existing.ancestors().map(|folder| folder.metadata().map(|m| (m.dev(), m.ino())));
        let ids = ids.collect::<Result<Vec<_>>>()?;
        let folds_case = !rest.is_empty() && ignores_case(&existing);
        Ok(Self { existing, rest, ids, folds_case })
    }

    /// Returns the path without links or `..`.
    pub fn path(&self) -> PathBuf {
        // The names are joined one by one, because joining an empty path would append a slash and turn a file into a
        // folder.
        self.rest.iter().fold(self.existing.clone(), |path, name| path.join(name))
    }

    /// Returns whether the path exists.
    pub fn exists(&self) -> bool {
        self.rest.is_empty()
    }

    /// Returns the id of the file or folder at this path, if it exists.
    pub(super) fn id(&self) -> Option<FileId> {
        self.exists().then(|| self.ids[0])
    }

    /// Returns whether both paths are the same file or folder, or will be.
    pub fn is(&self, other: &Self) -> bool {
        self.ids[0] == other.ids[0] && self.rest.len() == other.rest.len() && self.rest_starts_with(other)
    }

    /// Returns whether this path is in `other`, at any depth, or will be.
    pub fn is_in(&self, other: &Self) -> bool {
        match other.rest.is_empty() {
            true => self.ids[usize::from(self.rest.is_empty())..].contains(&other.ids[0]),
            false => self.ids[0] == other.ids[0] && self.rest.len() > other.rest.len() && self.rest_starts_with(other),
        }
    }

    /// Returns whether the names that do not exist yet begin with those of `other`.
    fn rest_starts_with(&self, other: &Self) -> bool {
        let same = |(a, b): (&OsString, &OsString)| {
            a == b || self.folds_case && a.to_string_lossy().to_lowercase() == b.to_string_lossy().to_lowercase()
        };
        self.rest.iter().zip(&other.rest).all(same)
    }
}

fn broken_link_error(error: Error) -> Error {
    match error.kind() {
        ErrorKind::NotFound => Error::new(ErrorKind::NotFound, "it is a broken link, or leads through one"),
        _ => error,
    }
}

/// Returns whether the file system of `folder` ignores case, judging by existing names.
fn ignores_case(folder: &Path) -> bool {
    let swap_case = |name: &str| -> String {
        name.chars().map(|c| if c.is_lowercase() { c.to_ascii_uppercase() } else { c.to_ascii_lowercase() }).collect()
    };
    let swapped = |path: &Path| Some(path.with_file_name(swap_case(path.file_name()?.to_str()?)));
    let id = |path: &Path| path.symlink_metadata().ok().map(|m| (m.dev(), m.ino()));
    // An entry shows the behaviour of this folder; the folder's own name shows that of its parent, which is most
    // likely on the same disk.
    let entry = std::fs::read_dir(folder).ok().and_then(|mut entries| entries.find_map(|e| Some(e.ok()?.path())));
    [entry.as_deref(), Some(folder)]
        .into_iter()
        .flatten()
        .any(|path| swapped(path).is_some_and(|other| other != *path && id(path).is_some() && id(&other) == id(path)))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn a_place_is_known_by_what_is_there_and_not_by_its_name() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let place = |name: &str| ResolvedPath::of(&at(name)).unwrap();
        std::fs::create_dir_all(at("a/b")).unwrap();
        std::fs::write(at("a/file"), "x").unwrap();
        std::fs::hard_link(at("a/file"), at("hard")).unwrap();
        symlink(at("a"), at("link")).unwrap();
        symlink("nowhere", at("dangling")).unwrap();
        for (one, other) in [
            ("a", "link"),
            ("a/b", "link/b"),
            ("a", "a/b/.."),
            ("a", "link/b/.."),
            ("a/file", "hard"),
            ("a/new", "link/new"),
            ("a/new/x", "link/./other/../new/x"),
        ] {
            assert!(place(one).is(&place(other)), "{one} {other}");
        }
        for (inner, outer) in [("a/b", "link"), ("link/b/new", "a"), ("n/m", "n"), ("a/n/m/k", "link/n")] {
            assert!(place(inner).is_in(&place(outer)), "{inner} {outer}");
            assert!(!place(outer).is_in(&place(inner)) && !place(outer).is(&place(inner)), "{inner} {outer}");
        }
        for (one, other) in [("a", "b"), ("a/new", "a/New"), ("ab", "a"), ("n", "nn")] {
            assert!(!place(one).is(&place(other)) && !place(one).is_in(&place(other)), "{one} {other}");
        }
        assert!(place("a/file").path().is_file());
        assert_eq!(place("a/b/../n").path(), at("a").canonicalize().unwrap().join("n"));
        let error = |name: &str| ResolvedPath::of(&at(name)).unwrap_err().to_string();
        assert_eq!(error("dangling"), "it is a broken link, or leads through one");
        assert_eq!(error("dangling/x"), "it is a broken link, or leads through one");
        assert_eq!(error("a/file/x"), "Not a directory (os error 20)");
    }
}
