//! The timeline of a `zerorun` job: its ranks write part files, which the launcher combines.

use super::now;
use super::trace::cannot_write;
use super::trace::{TraceSummary, check_earlier, write_trace};
use crate::error::{Error, MonitorError, Result};
use crate::files::{InputOutputPaths, OutputKind, OutputLocks, ScratchFolder, folder_of};
use std::fs::File;
use std::path::{Path, PathBuf};

/// The prefix of the names of part files.
pub(super) const PART_PREFIX: &str = "part-";

/// A job that is recorded. Its part files are deleted when this value is dropped.
pub struct JobTimeline {
    file: PathBuf,
    parts: ScratchFolder,
    zero: u64,
    /// Locks that keep other jobs from writing to the same output.
    _claims: OutputLocks,
}

impl JobTimeline {
    /// Starts the timeline now.
    ///
    /// # Errors
    /// [`MonitorError::Timeline`]: the file's folder does not exist or is not writable, the file is a folder, or the
    /// file exists and is not an earlier timeline. Also fails if another job is writing to the same file.
    pub fn begin(file: &Path) -> Result<Self> {
        let wrong = |e: std::io::Error| match e.kind() {
            std::io::ErrorKind::NotFound => {
                let problem =
                    format!("the folder {} does not exist; create it, or name another", folder_of(file).display());
                MonitorError::Timeline { path: file.into(), problem }.into()
            }
            _ => cannot_write(file, &e),
        };
        let absolute = std::path::absolute(file).map_err(wrong)?;
        if absolute.is_dir() {
            let problem = "it is a folder; name a file in it".to_string();
            return Err(MonitorError::Timeline { path: file.into(), problem }.into());
        }
        check_earlier(&absolute).map_err(wrong)?;
        let parts = ScratchFolder::new(folder_of(&absolute), ".candle-zero-timeline-").map_err(wrong)?;
        let claims = InputOutputPaths::default().writes("--timeline", &absolute, OutputKind::File).claim()?;
        Ok(Self { file: absolute, parts, zero: now(), _claims: claims })
    }

    /// Returns the folder for the part files of the ranks.
    pub fn folder(&self) -> &Path {
        self.parts.path()
    }

    /// Writes the trace from the existing part files, even if ranks have failed.
    ///
    /// # Errors
    /// [`MonitorError::Timeline`]: a part file cannot be read, or the trace cannot be written.
    pub fn finish(self) -> Result<TraceSummary> {
        self.merge().map_err(|error| {
            // Hours may have been recorded: the existing parts are kept if writing fails.
            let parts = self.parts.keep();
            match error {
                Error::Monitor(MonitorError::Timeline { path, problem }) => {
                    let problem = format!("{problem}; the ranks' records remain in {}", parts.display());
                    MonitorError::Timeline { path, problem }.into()
                }
                other => other,
            }
        })
    }

    fn merge(&self) -> Result<TraceSummary> {
        let wrong = |e: std::io::Error| cannot_write(&self.file, &e);
        let entries = std::fs::read_dir(self.folder()).map_err(wrong)?;
        let entries = entries.collect::<std::io::Result<Vec<_>>>().map_err(wrong)?;
        let is_part =
            |entry: &&std::fs::DirEntry| entry.file_name().as_encoded_bytes().starts_with(PART_PREFIX.as_bytes());
        let parts = entries.iter().filter(is_part).map(|entry| File::open(entry.path()));
        let parts: Vec<File> = parts.collect::<std::io::Result<_>>().map_err(wrong)?;
        write_trace(&parts.iter().collect::<Vec<_>>(), self.zero, &self.file)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_cannot_be_is_refused_at_the_beginning() {
        let refused = |path: &str| JobTimeline::begin(Path::new(path)).map(|_| ()).unwrap_err();
        insta::assert_snapshot!(refused("no/such/trace.json"), @"cannot write the timeline no/such/trace.json: the folder no/such does not exist; create it, or name another");
        insta::assert_snapshot!(refused("src"), @"cannot write the timeline src: it is a folder; name a file in it");
    }
}
