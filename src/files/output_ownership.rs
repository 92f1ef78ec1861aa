//! The digests of a run's output files, which allow the run to replace its own files and nothing else.

use super::{AtomicFile, read, read_text};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::File;
use std::hash::Hasher as _;
use std::io::{Read as _, Result, Write as _};
use std::path::{Path, PathBuf};

/// The name of the file that stores the digests in a run's folder of checkpoints.
const FILE_NAME: &str = ".candle-zero-outputs.json";
/// The maximum size of that file in bytes; no run writes that much.
const MAX_FILE_BYTES: u64 = 1 << 24;

/// Digests of the files in each of a run's folders, by the folder's part (its role in the run) and the file's name.
/// While new files replace older ones, both digests are present.
#[derive(Debug, Clone, Default)]
pub struct OutputDigests {
    /// The file that keeps the digests after the process has ended.
    file: Option<PathBuf>,
    digests: DigestsByPart,
}

type DigestsByPart = BTreeMap<String, BTreeMap<String, Vec<String>>>;

/// The content of the file with the digests.
#[derive(Debug, Default, Serialize, Deserialize)]
struct DigestsFile {
    written: DigestsByPart,
}

impl OutputDigests {
    /// Creates an empty set that is stored in the folder `checkpoints`, if one is given.
    pub fn empty(checkpoints: Option<&Path>) -> Self {
        Self { file: checkpoints.map(|folder| folder.join(FILE_NAME)), digests: DigestsByPart::new() }
    }

    /// Returns the digests of the run whose checkpoints are in the folder `checkpoints`.
    pub fn of_run(checkpoints: &Path) -> Self {
        let file = checkpoints.join(FILE_NAME);
        let found =
            read_text(&file, MAX_FILE_BYTES).ok().and_then(|text| serde_json::from_str::<DigestsFile>(&text).ok());
        Self { file: Some(file), digests: found.unwrap_or_default().written }
    }

    /// Returns whether the file at `path` was written by the run and is unchanged.
    pub fn is_own(&self, part: &str, path: &Path) -> bool {
        let name = path.file_name().and_then(|name| name.to_str());
        let known = name.and_then(|name| self.digests.get(part)?.get(name));
        let is_file = || path.symlink_metadata().is_ok_and(|found| found.is_file());
        known.is_some_and(|known| is_file() && digest(path).is_ok_and(|digest| known.contains(&digest)))
    }

    /// Checks that the run may write its files into the folder: the folder must contain unchanged files of the run, and
    /// no other file with one of their names. Otherwise, returns the reason as an error.
    pub fn may_replace(&self, part: &str, folder: &Path) -> std::result::Result<(), String> {
        let names = self.digests.get(part).into_iter().flatten().map(|(name, _)| folder.join(name));
        let (own, others): (Vec<_>, Vec<_>) =
            names.filter(|path| path.symlink_metadata().is_ok()).partition(|path| self.is_own(part, path));
        match (own.is_empty(), others.first()) {
            (false, None) => Ok(()),
            (_, Some(other)) => {
                let name = other.file_name().unwrap_or_default();
                Err(format!("its {} is not the one that this run wrote", name.display()))
            }
            (true, None) => Err("it has files that were not written by this run".into()),
        }
    }

    /// Records that the files in `new` are about to replace those of the same part.
    pub fn begin(&mut self, part: &str, new: &Path) -> Result<()> {
        let known = self.digests.entry(part.into()).or_default();
        for entry in std::fs::read_dir(new)? {
            let entry = entry?;
            if let Ok(name) = entry.file_name().into_string() {
                let digest = digest(&entry.path())?;
                let digests = known.entry(name).or_default();
                digests.retain(|known| *known != digest);
                digests.push(digest);
            }
        }
        self.save()
    }

    /// Records that a file with these bytes is about to be written under a name.
    pub fn begin_file(&mut self, part: &str, name: &str, bytes: &[u8]) -> Result<()> {
        let digests = self.digests.entry(part.into()).or_default().entry(name.into()).or_default();
        digests.drain(..digests.len().saturating_sub(1));
        digests.push(format!("{}-{:016x}", bytes.len(), twox_hash::XxHash3_64::oneshot(bytes)));
        self.save()
    }

    /// Records that the replacement is complete.
    pub fn end(&mut self, part: &str) -> Result<()> {
        for digests in self.digests.entry(part.into()).or_default().values_mut() {
            digests.drain(..digests.len().saturating_sub(1));
        }
        self.save()
    }

    fn save(&self) -> Result<()> {
        let Some(path) = &self.file else { return Ok(()) };
        std::fs::create_dir_all(super::folder_of(path))?;
        let text = serde_json::to_string_pretty(&DigestsFile { written: self.digests.clone() })?;
        // Usually the content is unchanged, and nothing is written.
        if read(path, MAX_FILE_BYTES).is_ok_and(|existing| existing == text.as_bytes()) {
            return Ok(());
        }
        let mut file = AtomicFile::create_for(path)?;
        file.file().write_all(text.as_bytes())?;
        file.finish().map(drop)
    }
}

fn digest(path: &Path) -> Result<String> {
    let (mut file, mut hash, mut piece) = (super::open(path)?, twox_hash::XxHash3_64::new(), vec![0; 1 << 20]);
    let mut bytes = 0u64;
    loop {
        let read = File::read(&mut file, &mut piece)?;
        if read == 0 {
            return Ok(format!("{bytes}-{:016x}", hash.finish()));
        }
        bytes += read as u64;
        hash.write(&piece[..read]);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn only_what_the_run_wrote_and_nobody_changed_is_its_own() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let new = |text: &str| {
            std::fs::create_dir_all(at("new")).unwrap();
            std::fs::write(at("new/a.json"), text).unwrap();
        };
        std::fs::create_dir(at("out")).unwrap();
        let mut written = OutputDigests::empty(Some(&at("ck")));
        new("1");
        written.begin("result", &at("new")).unwrap();
        std::fs::write(at("out/a.json"), "1").unwrap();
        // If the run was killed in between, both the older and the newer file belong to it.
        new("2");
        written.begin("result", &at("new")).unwrap();
        let reload = || OutputDigests::of_run(&at("ck"));
        assert!(reload().is_own("result", &at("out/a.json")));
        assert_eq!(reload().may_replace("result", &at("out")), Ok(()));
        std::fs::write(at("out/a.json"), "2").unwrap();
        assert!(reload().is_own("result", &at("out/a.json")) && !reload().is_own("best", &at("out/a.json")));
        written.end("result").unwrap();
        std::fs::write(at("out/a.json"), "1").unwrap();
        assert_eq!(
            reload().may_replace("result", &at("out")),
            Err("its a.json is not the one that this run wrote".into())
        );
        std::fs::remove_file(at("out/a.json")).unwrap();
        std::os::unix::fs::symlink(at("new/a.json"), at("out/a.json")).unwrap();
        assert!(!reload().is_own("result", &at("out/a.json")));
        std::fs::remove_file(at("out/a.json")).unwrap();
        std::fs::write(at("out/mine"), "x").unwrap();
        assert_eq!(
            reload().may_replace("result", &at("out")),
            Err("it has files that were not written by this run".into())
        );
    }
}
