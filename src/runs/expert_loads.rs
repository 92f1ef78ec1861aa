//! `experts.json`: how often the routers of a mixture chose each expert in the newest step.
//!
//! A mixture may have thousands of experts, so their loads are not part of `metrics.jsonl`: the record keeps only the
//! newest ones, in a file that is replaced about once a second.

use super::{EXPERTS, MAX_FILE_BYTES, json_line_reader};
use crate::error::{Error, Result, RunError};
use crate::files;
use serde::{Deserialize, Serialize};
use std::io::ErrorKind;
use std::path::Path;
use std::time::{Duration, Instant};

/// The minimum time between two replacements of the file.
const INTERVAL: Duration = Duration::from_secs(1);

/// The loads of a mixture's experts in a step: how often the routers chose each expert, over all ranks.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct RecordedLoads {
    /// The number of optimizer steps so far.
    pub step: u64,
    /// The time at which the loads were recorded, in seconds since 1970.
    pub time: f64,
    /// The number of the process that recorded them, counted from 1.
    pub session: u64,
    /// The loads of each block with a mixture.
    pub blocks: Vec<BlockLoads>,
}

/// The loads of a block's experts: how often the block's router chose each of them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct BlockLoads {
    /// The number of the block.
    pub block: usize,
    /// The number of tokens that chose each expert.
    pub choices: Vec<u64>,
}

impl RecordedLoads {
    /// Reads the loads in the folder of a run. Returns `None` if the run has recorded none.
    pub(super) fn read(folder: &Path) -> Result<Option<Self>> {
        let path = folder.join(EXPERTS);
        let bytes = match json_line_reader::read(&path, MAX_FILE_BYTES) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            read => read.map_err(|source| Error::Io { action: "read", path: path.clone(), source })?,
        };
        let damaged = |error: serde_json::Error| RunError::Damaged { path: path.clone(), problem: error.to_string() };
        Ok(Some(serde_json::from_slice(&bytes).map_err(damaged)?))
    }
}

/// The state of the file's writer.
#[derive(Debug, Default)]
pub(super) struct ExpertLoadsFile {
    last_write: Option<Instant>,
    /// Loads that are newer than those in the file.
    pending: Option<RecordedLoads>,
}

impl ExpertLoadsFile {
    /// Takes the loads of a step, and replaces the file unless it was replaced less than a second ago.
    pub fn put(&mut self, folder: &Path, loads: RecordedLoads) -> Result<()> {
        self.pending = Some(loads);
        if self.last_write.is_none_or(|at| at.elapsed() >= INTERVAL) { self.flush(folder) } else { Ok(()) }
    }

    /// Replaces the file if there are newer loads.
    pub fn flush(&mut self, folder: &Path) -> Result<()> {
        let Some(loads) = self.pending.take() else { return Ok(()) };
        self.last_write = Some(Instant::now());
        let bytes = serde_json::to_vec(&loads).expect("numbers are JSON");
        let path = folder.join(EXPERTS);
        // The file is not synced to disk, because the next loads replace it.
        files::replace_unsynced(&path, files::UNFINISHED, &bytes).map_err(|source| Error::Io {
            action: "write",
            path,
            source,
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn loads(step: u64, choices: &[u64]) -> RecordedLoads {
        let blocks = vec![BlockLoads { block: 1, choices: choices.to_vec() }];
        RecordedLoads { step, time: 2.5, session: 1, blocks }
    }

    #[test]
    fn the_first_and_the_last_loads_are_in_the_file() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(RecordedLoads::read(dir.path()).unwrap(), None);
        let mut file = ExpertLoadsFile::default();
        file.put(dir.path(), loads(1, &[3, 0])).unwrap();
        assert_eq!(RecordedLoads::read(dir.path()).unwrap(), Some(loads(1, &[3, 0])));
        for step in 2..=50 {
            file.put(dir.path(), loads(step, &[step, 1])).unwrap();
        }
        file.flush(dir.path()).unwrap();
        file.flush(dir.path()).unwrap();
        assert_eq!(RecordedLoads::read(dir.path()).unwrap(), Some(loads(50, &[50, 1])));
        // Nothing else is left in the folder.
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_damaged_file_is_named() {
        let dir = tempfile::tempdir().unwrap();
        for text in ["", "{", "[]", "{\"step\":1}", "{\"step\":-1,\"time\":1,\"session\":1,\"blocks\":[]}"] {
            std::fs::write(dir.path().join(EXPERTS), text).unwrap();
            let error = RecordedLoads::read(dir.path()).unwrap_err().to_string();
            assert!(error.contains("experts.json is damaged: "), "{error}");
        }
    }
}
