//! The launcher's part of the records of runs: the output of the ranks, and how they ended.
//!
//! ```text
//!   launcher   creates a file in memory, and names it in CANDLE_ZERO_RUN_FOLDERS
//!   rank 0     appends the folder of each run that it records (candle_zero::runs)
//!   launcher   then writes `log.txt` and `launch.jsonl` in these folders, starting with what it has collected so far
//! ```
//!
//! Only the launcher on the host of rank 0 receives the folders, so the records contain only the output of that
//! host's ranks.

use super::console::eprint;
use super::failure_report::{EndedRank, StopRequest};
use super::run_record_flags::RunRecordFlags;
use crate::dashboard::ServedFolder;
use candle_zero::runs::LaunchWriter;
use candle_zero::util::{host_name, lock};
use rustix::fs::{MemfdFlags, memfd_create};
use serde_json::{Map, Value, json};
use std::collections::VecDeque;
use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// The maximum number of bytes of lines that are collected before a run begins. Older lines are dropped.
const MAX_WAITING: usize = 256 << 10;
/// The minimum time between two searches for new folders.
const SEARCH_INTERVAL: Duration = Duration::from_millis(100);
/// The maximum number of runs of a job, and of bytes of the paths of their folders.
const MAX_RUNS: usize = 64;
const MAX_FOLDERS_BYTES: usize = 256 << 10;

/// The writer of the launcher's part of the records of a job's runs.
#[derive(Debug)]
pub(super) struct JobRecordWriter {
    /// The file to which rank 0 appends the folders; `None` if nothing is recorded, or if rank 0 is on another host.
    folders_file: Option<File>,
    state: Mutex<JobRecordState>,
    served: Option<ServedFolder>,
}

#[derive(Debug, Default)]
struct JobRecordState {
    writers: Vec<LaunchWriter>,
    /// The events so far, for runs that begin later.
    events: Vec<Map<String, Value>>,
    lines: VecDeque<WaitingLine>,
    waiting_bytes: usize,
    last_search: Option<Instant>,
    has_given_up: bool,
}

/// A line that a rank wrote before its run began.
#[derive(Debug)]
struct WaitingLine {
    time: f64,
    prefix: String,
    text: Vec<u8>,
}

impl WaitingLine {
    /// Returns roughly how many bytes of memory the line takes; an empty line takes some, too.
    fn bytes(&self) -> usize {
        std::mem::size_of::<Self>() + self.prefix.len() + self.text.len()
    }
}

impl JobRecordWriter {
    /// Begins the record of a start of the job, which has been restarted `restart` times. `first` is the number of the
    /// first of the `local_ranks` ranks on this host, and `ranks` is the total number of ranks.
    pub(super) fn begin(run: &RunRecordFlags, restart: u32, first: usize, [local_ranks, ranks]: [usize; 2]) -> Self {
        // The file is in memory, so nothing is left if this launcher is killed. If it cannot be created, there is no
        // log.
        let file = || memfd_create("candle-zero-runs", MemfdFlags::CLOEXEC).ok().map(File::from);
        let folders_file = (!run.is_off() && first == 0).then(file).flatten();
        let record = Self { folders_file, state: Mutex::default(), served: run.served.clone() };
        record.event(json!({"event": "start", "restart": restart, "ranks": ranks, "here": local_ranks}));
        record
    }

    /// Returns the path by which the ranks open the file.
    pub(super) fn path(&self) -> Option<PathBuf> {
        let file = self.folders_file.as_ref()?;
        Some(format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd()).into())
    }

    /// Adds a line of a rank's output.
    pub(super) fn line(&self, prefix: &str, text: &[u8]) {
        let Some(file) = &self.folders_file else { return };
        let mut state = lock(&self.state);
        self.find_folders(&mut state, file, false);
        let time = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64());
        if state.writers.is_empty() {
            state.wait(WaitingLine { time, prefix: prefix.to_owned(), text: text.to_owned() });
        } else {
            state.write(|writer| writer.line(time, prefix, text));
        }
    }

    /// Adds the end of a rank. `rank` is its number among all ranks of the job.
    pub(super) fn ended(&self, rank: usize, end: &EndedRank) {
        let description = match end.request {
            StopRequest::Nothing => end.ended.to_string(),
            StopRequest::Terminate => "was stopped by zerorun after another rank or host had failed".to_owned(),
            StopRequest::Kill => "was killed by zerorun because it did not end".to_owned(),
        };
        let outcome = match end.request {
            _ if !end.ended.is_failure() => "ended",
            StopRequest::Nothing if end.before_failure => "failed",
            // The rank ended because of another rank, or because of a signal to the launcher.
            _ => "stopped",
        };
        self.event(json!({"event": "rank", "rank": rank, "host": host_name(), "outcome": outcome, "how": description}));
    }

    /// Adds the failure of a rank on another host.
    pub(super) fn failed_elsewhere(&self, rank: usize, why: &str) {
        self.event(json!({"event": "rank", "rank": rank, "outcome": "failed", "how": why}));
    }

    /// Adds the message about the failure of the job.
    pub(super) fn failed(&self, rank: usize, message: &str) {
        self.event(json!({"event": "failure", "rank": rank, "message": message}));
    }

    /// Looks for folders for the last time, and writes the lines that are still waiting.
    pub(super) fn finish(&self) {
        if let Some(file) = &self.folders_file {
            self.find_folders(&mut lock(&self.state), file, true);
        }
    }

    fn event(&self, event: Value) {
        let (Some(file), Value::Object(event)) = (&self.folders_file, event) else { return };
        let mut state = lock(&self.state);
        self.find_folders(&mut state, file, true);
        state.write(|writer| writer.event(event.clone()));
        state.events.push(event);
    }

    /// Looks for folders that rank 0 has announced.
    fn find_folders(&self, state: &mut JobRecordState, file: &File, at_once: bool) {
        if !at_once && state.last_search.is_some_and(|at| at.elapsed() < SEARCH_INTERVAL) {
            return;
        }
        state.last_search = Some(Instant::now());
        let length = file.metadata().map_or(0, |metadata| metadata.len());
        let mut bytes = vec![0; MAX_FOLDERS_BYTES.min(usize::try_from(length).unwrap_or(usize::MAX))];
        let text =
            file.read_exact_at(&mut bytes, 0).ok().and_then(|()| String::from_utf8(bytes).ok()).unwrap_or_default();
        let complete = text.rsplit_once('\n').map_or("", |(complete, _)| complete);
        for folder in complete.lines().map(PathBuf::from).take(MAX_RUNS) {
            if !state.has_given_up && !state.writers.iter().any(|writer| writer.folder() == folder) {
                if let (Some(served), Some(runs)) = (&self.served, folder.parent()) {
                    served.change(runs);
                }
                state.open(folder);
            }
        }
    }
}

impl JobRecordState {
    /// Begins to write into the folder of a run.
    fn open(&mut self, folder: PathBuf) {
        let opened = LaunchWriter::open(folder).and_then(|mut writer| {
            self.events.iter().try_for_each(|event| writer.event(event.clone()))?;
            for WaitingLine { time, prefix, text } in self.lines.drain(..) {
                writer.line(time, &prefix, &text)?;
            }
            Ok(writer)
        });
        self.waiting_bytes = 0;
        match opened {
            Ok(writer) => self.writers.push(writer),
            Err(error) => self.give_up(&error),
        }
    }

    fn wait(&mut self, line: WaitingLine) {
        self.waiting_bytes += line.bytes();
        self.lines.push_back(line);
        while self.waiting_bytes > MAX_WAITING
            && let Some(oldest) = self.lines.pop_front()
        {
            self.waiting_bytes -= oldest.bytes();
        }
    }

    fn write(&mut self, mut write: impl FnMut(&mut LaunchWriter) -> candle_zero::Result<()>) {
        if let Err(error) = self.writers.iter_mut().try_for_each(&mut write) {
            self.give_up(&error);
        }
    }

    fn give_up(&mut self, error: &candle_zero::Error) {
        self.has_given_up = true;
        self.writers.clear();
        eprint(&format!("zerorun: the output of the ranks is no longer recorded: {error}"));
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::io::Write as _;

    fn record() -> JobRecordWriter {
        let file = memfd_create("test", MemfdFlags::CLOEXEC).map(File::from).unwrap();
        JobRecordWriter {
            folders_file: Some(file),
            state: Mutex::default(),
            served: Some(ServedFolder::new("elsewhere")),
        }
    }

    fn announce(record: &JobRecordWriter, folder: &std::path::Path) {
        // A rank opens the file by its path, too.
        let mut file = std::fs::OpenOptions::new().append(true).open(record.path().unwrap()).unwrap();
        file.write_all(format!("{}\n", folder.display()).as_bytes()).unwrap();
    }

    #[test]
    fn what_ranks_wrote_before_their_run_began_is_in_its_log_and_the_page_shows_its_folder() {
        let dir = tempfile::tempdir().unwrap();
        let (first, second) = (dir.path().join("a"), dir.path().join("b"));
        for folder in [&first, &second] {
            std::fs::create_dir(folder).unwrap();
        }
        let record = record();
        record.event(json!({"event": "start"}));
        record.line("[rank 1] ", b"early");
        announce(&record, &first);
        announce(&record, &second);
        record.finish();
        record.line("[rank 0] ", b"late");
        record.failed(1, "rank 1 failed");
        let read = |folder: &PathBuf, name: &str| std::fs::read_to_string(folder.join(name)).unwrap();
        let log = read(&first, "log.txt");
        let lines: Vec<&str> = log.lines().map(|line| line.split_once(" [").unwrap().1).collect();
        assert_eq!(lines, ["rank 1] early", "rank 0] late"]);
        assert_eq!(read(&second, "log.txt").lines().count(), 1);
        for folder in [&first, &second] {
            let events = read(folder, "launch.jsonl");
            assert_eq!(events.lines().count(), 2, "{events}");
        }
        assert_eq!(record.served.unwrap().runs().path(), dir.path());
    }

    #[test]
    fn lines_that_wait_are_bounded_and_the_newest_stay() {
        let record = record();
        for _ in 0..10_000 {
            record.line("[rank 0] ", b"");
        }
        record.line("[rank 0] ", &[b'x'; MAX_WAITING / 2]);
        let state = lock(&record.state);
        assert!(state.waiting_bytes <= MAX_WAITING && state.lines.len() > 100);
        assert_eq!(state.lines.back().unwrap().text.len(), MAX_WAITING / 2);
    }
}
