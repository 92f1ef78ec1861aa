//! The git revision of a folder, read from git's own files: no program is started.

use crate::files;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// The maximum size in bytes of a git file that is read.
const MAX_GIT_FILE: u64 = 16 << 20;

/// The revision that is checked out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct GitRevision {
    /// The hash of the commit.
    pub commit: String,
    /// The branch, unless a commit is checked out directly.
    #[serde(default)]
    pub branch: Option<String>,
}

impl GitRevision {
    /// Returns the revision of the repository that contains `folder`, if there is one.
    pub(super) fn of(folder: &Path) -> Option<Self> {
        let git = folder.ancestors().find_map(git_folder)?;
        let text = |path: PathBuf| Some(files::read_text(path, MAX_GIT_FILE).ok()?.trim().to_owned());
        let head = text(git.join("HEAD"))?;
        let Some(name) = head.strip_prefix("ref: ").map(str::trim) else {
            return is_hash(&head).then_some(Self { commit: head, branch: None });
        };
        // A worktree has its own HEAD, and shares the branches.
        let common = text(git.join("commondir")).map_or(git.clone(), |common| git.join(common));
        let is_plain = Path::new(name).components().all(|part| matches!(part, std::path::Component::Normal(_)));
        let loose = || [&git, &common].into_iter().find_map(|folder| text(folder.join(name)));
        let packed = || {
            let lines = text(common.join("packed-refs"))?;
            let hash = lines.lines().find_map(|line| line.split_once(' ').filter(|(_, other)| *other == name))?.0;
            Some(hash.to_owned())
        };
        let commit = if is_plain { loose().or_else(packed) } else { None }.filter(|hash| is_hash(hash))?;
        Some(Self { commit, branch: Some(name.strip_prefix("refs/heads/").unwrap_or(name).to_owned()) })
    }
}

/// Returns the git folder of the working tree whose top is `folder`.
fn git_folder(folder: &Path) -> Option<PathBuf> {
    let git = folder.join(".git");
    if git.is_dir() {
        return Some(git);
    }
    let text = files::read_text(&git, MAX_GIT_FILE).ok()?;
    Some(folder.join(text.strip_prefix("gitdir:")?.trim()))
}

fn is_hash(text: &str) -> bool {
    [40, 64].contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_revision_is_that_of_head_on_a_branch_packed_or_detached_and_in_a_worktree() {
        let dir = tempfile::tempdir().unwrap();
        let (git, below) = (dir.path().join(".git"), dir.path().join("a/b"));
        let [one, two] = ["1", "2"].map(|digit| digit.repeat(40));
        std::fs::create_dir_all(git.join("refs/heads/x")).unwrap();
        std::fs::create_dir_all(&below).unwrap();
        let write = |name: &str, text: &str| std::fs::write(git.join(name), text).unwrap();
        write("HEAD", "ref: refs/heads/x/y\n");
        let branch = Some("x/y".to_owned());
        assert_eq!(GitRevision::of(&below), None, "a repository without a commit");
        write("packed-refs", &format!("# pack-refs with: peeled\n{one} refs/heads/x/y\n"));
        assert_eq!(GitRevision::of(&below), Some(GitRevision { commit: one.clone(), branch: branch.clone() }));
        write("refs/heads/x/y", &format!("{two}\n"));
        assert_eq!(GitRevision::of(&below), Some(GitRevision { commit: two.clone(), branch }));
        write("HEAD", &one);
        assert_eq!(GitRevision::of(dir.path()), Some(GitRevision { commit: one.clone(), branch: None }));
        let worktree_folder = git.join("worktrees/t");
        std::fs::create_dir_all(&worktree_folder).unwrap();
        std::fs::write(worktree_folder.join("HEAD"), "ref: refs/heads/x/y").unwrap();
        std::fs::write(worktree_folder.join("commondir"), "../..").unwrap();
        std::fs::write(below.join(".git"), format!("gitdir: {}\n", worktree_folder.display())).unwrap();
        assert_eq!(GitRevision::of(&below).unwrap().commit, two);
        for bad in ["ref: ../../x", "ref: /etc/passwd", "not a hash", ""] {
            write("HEAD", bad);
            assert_eq!(GitRevision::of(dir.path()), None, "{bad}");
        }
    }
}
