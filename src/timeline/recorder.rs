//! The recorder of an engine's events.

use super::event_sink::EventSink;
use super::{FILE, PARTS};
use crate::error::Result;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The number of engines of this process that record.
static RECORDERS: AtomicUsize = AtomicUsize::new(0);

/// Returns whether any engine of this process records.
pub(super) fn is_any_recording() -> bool {
    RECORDERS.load(Ordering::Relaxed) > 0
}

/// The destination of an engine's events.
pub(super) struct EngineTrack {
    pub sink: Arc<EventSink>,
    pub rank: usize,
    /// The engine's number among those that record for the rank at this time.
    pub engine: usize,
}

/// A handle during whose lifetime an engine's events are recorded. If the process writes its own trace file, the file
/// is written when the last recorder is dropped.
pub(crate) struct TimelineRecorder(Arc<EngineTrack>);

impl TimelineRecorder {
    /// Returns a recorder for rank `rank` that writes to the part files of `zerorun --timeline`, otherwise to `file`,
    /// otherwise to the file that the environment names. Returns `None` if none of these is given. If each rank is a
    /// process (`ranks_are_processes`) and no launcher combines their parts, each writes its own file.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn open(file: Option<PathBuf>, rank: usize, ranks_are_processes: bool) -> Result<Option<Self>> {
        let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let sink = match (variable(PARTS), file.or_else(|| variable(FILE))) {
            (Some(folder), _) => EventSink::part(&folder)?,
            (None, Some(file)) if ranks_are_processes => EventSink::for_trace(&rank_file(&file, rank))?,
            (None, Some(file)) => EventSink::for_trace(&file)?,
            (None, None) => return Ok(None),
        };
        let engine = sink.join(rank);
        RECORDERS.fetch_add(1, Ordering::Relaxed);
        Ok(Some(Self(Arc::new(EngineTrack { sink, rank, engine }))))
    }

    pub(super) fn track(&self) -> &Arc<EngineTrack> {
        &self.0
    }

    /// Writes the recorded events to the file now, in case the process ends.
    pub fn flush(recorder: Option<&Self>) {
        if let Some(recorder) = recorder {
            recorder.0.sink.flush();
        }
    }
}

impl Drop for TimelineRecorder {
    fn drop(&mut self) {
        RECORDERS.fetch_sub(1, Ordering::Relaxed);
        self.0.sink.leave(self.0.rank, self.0.engine);
    }
}

/// Returns the file of a rank: `trace.rank-1.json` for rank 1 if `file` is `trace.json`.
fn rank_file(file: &Path, rank: usize) -> PathBuf {
    let mut name = file.file_stem().unwrap_or_default().to_os_string();
    name.push(format!(".rank-{rank}"));
    if let Some(extension) = file.extension() {
        name.push(".");
        name.push(extension);
    }
    file.with_file_name(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_has_its_number_before_the_ending() {
        assert_eq!(rank_file(Path::new("a/trace.json"), 1), Path::new("a/trace.rank-1.json"));
        assert_eq!(rank_file(Path::new("trace"), 12), Path::new("trace.rank-12"));
    }
}
