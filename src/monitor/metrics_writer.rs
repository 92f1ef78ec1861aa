//! Writes metrics as JSON lines.

use crate::error::MonitorError;
use crate::files::{self, AtomicFile, lock_owner};
use crate::{Error, Result};
use rustix::fs::{FlockOperation, flock};
use serde::Serialize;
use serde_json::Value;
use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read as _, Write};
use std::os::unix::fs::{FileExt as _, FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The time for which a killed process may still hold the file.
const LOCK_RELEASE_TIMEOUT: Duration = Duration::from_secs(2);

/// A writer of one JSON object per line. Each line is passed to the system in one write, so a run that dies leaves
/// complete lines.
///
/// A file that was [created](Self::create) or [resumed](Self::resume) is locked by this process until the writer is
/// dropped. If several processes [append](Self::append) to one file, each line stays intact.
#[derive(Debug)]
pub struct MetricsWriter {
    file: File,
    path: PathBuf,
}

impl MetricsWriter {
    /// Creates the file, or empties one with earlier metrics.
    ///
    /// # Errors
    /// [`Error::Io`], also for a pipe, and for a file that contains anything other than metrics, which is left
    /// unchanged; [`MonitorError::MetricsBusy`] if another process is writing to the file.
    pub fn create(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let io_error = |source| Error::Io { action: "create", path: path.into(), source };
        let file = open_to_append(path).map_err(io_error)?;
        // The file must not be emptied before this process has locked it.
        if claim(&file, path)? {
            require_metrics(&file).map_err(io_error)?;
            file.set_len(0).map_err(io_error)?;
        }
        Ok(Self { file, path: path.into() })
    }

    /// Opens the file to append to it, or creates it.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn append(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let open = || {
            let file = open_to_append(path)?;
            if file.metadata()?.is_file() {
                require_metrics(&file)?;
            }
            end_last_line(&file)?;
            Ok(file)
        };
        let file = open().map_err(|source| Error::Io { action: "open", path: path.into(), source })?;
        Ok(Self { file, path: path.into() })
    }

    /// Continues the file of a stopped run, starting at step `step`. Lines of this and later steps, and lines without a
    /// step, such as the run's summary, are removed, since they will be written again. If there is no file, it is
    /// created.
    ///
    /// # Errors
    /// [`Error::Io`]; [`MonitorError::MetricsBusy`] if another process is writing to the file.
    pub fn resume(path: impl AsRef<Path>, step: u64) -> Result<Self> {
        let path = path.as_ref();
        let io_error = |source| Error::Io { action: "resume", path: path.into(), source };
        let mut old_file = match files::open(path) {
            Ok(file) => file,
            Err(e) if e.kind() == ErrorKind::NotFound => return Self::create(path),
            Err(e) => return Err(io_error(e)),
        };
        claim(&old_file, path)?;
        require_metrics(&old_file).map_err(io_error)?;
        let mut text = String::new();
        old_file.read_to_string(&mut text).map_err(io_error)?;
        let is_earlier = |line: &&str| {
            let line: Option<Value> = serde_json::from_str(line).ok();
            line.and_then(|line| line["step"].as_u64()).is_some_and(|s| s < step)
        };
        let kept_lines: String = text.lines().filter(is_earlier).map(|line| format!("{line}\n")).collect();
        // The new file is written under another name and then renamed, so that the metrics survive if the process is
        // killed.
        let replace = || {
            let mut new = AtomicFile::create_for(path)?;
            new.file().write_all(kept_lines.as_bytes())?;
            new.finish()
        };
        replace().map_err(io_error)?;
        let file = open_to_append(path).map_err(io_error)?;
        claim(&file, path)?;
        Ok(Self { file, path: path.into() })
    }

    /// Appends one line. Numbers that are not finite become `null`, since JSON cannot represent them.
    ///
    /// # Errors
    /// [`Error::Io`], including if `record` cannot be converted to JSON (a map whose keys are not text).
    pub fn write(&mut self, record: &impl Serialize) -> Result<()> {
        let write = |file: &mut File| {
            let mut line = serde_json::to_vec(record)?;
            line.push(b'\n');
            let metadata = file.metadata()?;
            file.write_all(&line).inspect_err(|_| {
                // If the disk is full, the written part is not a complete line and is removed.
                if metadata.is_file() {
                    _ = file.set_len(metadata.len());
                }
            })
        };
        write(&mut self.file).map_err(|source| Error::Io { action: "write", path: self.path.clone(), source })
    }
}

impl Drop for MetricsWriter {
    /// Unlocks the file explicitly, because a process that another thread is starting holds a copy of the open file
    /// until it executes its program.
    fn drop(&mut self) {
        _ = flock(&self.file, FlockOperation::Unlock);
    }
}

/// Opens a file, which is created if it does not exist, or a character device. A pipe is rejected, because opening it
/// would block.
fn open_to_append(path: &Path) -> std::io::Result<File> {
    if let Ok(metadata) = path.metadata()
        && !metadata.file_type().is_char_device()
    {
        files::check_regular_file(&metadata)?;
    }
    let flags = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
    OpenOptions::new().create(true).append(true).read(true).custom_flags(flags).open(path).or_else(|e| {
        // This is a device that cannot be read, or a file that this user can only write.
        let reopened = OpenOptions::new().append(true).custom_flags(flags).open(path);
        if e.kind() == ErrorKind::NotFound { Err(e) } else { reopened }
    })
}

/// Rejects a file that contains anything other than metrics. Each complete line in its first 64 KiB must be a summary,
/// or an object with a number named `step` or `epoch`. Metrics contain no strings except the tag of an event.
fn require_metrics(file: &File) -> std::io::Result<()> {
    /// The number of bytes that are checked.
    const CHECKED_BYTES: usize = 1 << 16;
    let mut prefix = vec![0; CHECKED_BYTES];
    let mut filled = 0;
    loop {
        match file.read_at(&mut prefix[filled..], filled as u64)? {
            0 => break,
            read => filled += read,
        }
    }
    prefix.truncate(filled);
    let is_metrics = |line: &[u8]| {
        let Ok(Value::Object(line)) = serde_json::from_slice(line) else { return false };
        let is_text = |(key, value): (&String, &Value)| value.is_string() && key != "tag";
        let is_step = ["step", "epoch"].iter().any(|key| line.get(*key).is_some_and(Value::is_number));
        line.get("summary") == Some(&Value::Bool(true)) || is_step && !line.iter().any(is_text)
    };
    let complete = prefix.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
    let (lines, rest) = prefix.split_at(complete);
    let mut lines = lines.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
    // A line that is incomplete, because the disk was full or the process was killed, must begin like metrics.
    let is_valid_rest = match (serde_json::from_slice::<Value>(rest), complete) {
        _ if rest.is_empty() => true,
        (Ok(_), _) => is_metrics(rest),
        (Err(_), 0) => rest.starts_with(b"{\"step\":") && filled < CHECKED_BYTES,
        (Err(_), _) => rest.starts_with(b"{"),
    };
    if lines.all(is_metrics) && is_valid_rest {
        return Ok(());
    }
    let text = "it contains something other than metrics, so it is not changed; give another file, or remove this one";
    Err(std::io::Error::new(ErrorKind::AlreadyExists, text))
}

/// Locks the file against other processes while it is open. Returns false for anything but a regular file: a device is
/// shared.
fn claim(file: &File, path: &Path) -> Result<bool> {
    let metadata = file.metadata().map_err(|source| Error::Io { action: "read", path: path.into(), source })?;
    if !metadata.is_file() {
        return Ok(false);
    }
    let start = Instant::now();
    // If the file system does not support locks, the file is used without a lock.
    while flock(file, FlockOperation::NonBlockingLockExclusive) == Err(rustix::io::Errno::WOULDBLOCK) {
        match lock_owner(metadata.ino()) {
            Some(owner) if owner == std::process::id() => break,
            owner if start.elapsed() > LOCK_RELEASE_TIMEOUT => {
                return Err(MonitorError::MetricsBusy { path: path.into(), owner }.into());
            }
            _ => std::thread::sleep(Duration::from_millis(10)),
        }
    }
    Ok(true)
}

/// Removes an incomplete last line, which a full disk or a killed process leaves behind. Anything but a regular
/// file is left unchanged.
pub(crate) fn end_last_line(file: &File) -> std::io::Result<()> {
    /// The number of bytes that are read at a time, starting from the end.
    const READ_CHUNK: u64 = 4096;
    let metadata = file.metadata()?;
    let mut end = if metadata.is_file() { metadata.len() } else { 0 };
    while end > 0 {
        let start = end.saturating_sub(READ_CHUNK);
        let mut part = vec![0; (end - start) as usize];
        file.read_exact_at(&mut part, start)?;
        if let Some(last) = part.iter().rposition(|byte| *byte == b'\n') {
            end = start + last as u64 + 1;
            break;
        }
        end = start;
    }
    if metadata.is_file() && end < metadata.len() { file.set_len(end) } else { Ok(()) }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn each_record_is_a_line_that_is_there_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        std::fs::write(&path, "{\"step\":7}\n{\"st").unwrap();
        let mut writer = MetricsWriter::create(&path).unwrap();
        writer.write(&json!({"step": 0, "loss": 0.1})).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "{\"loss\":0.1,\"step\":0}\n");
        writer.write(&json!({"step": 1, "loss": f64::NAN})).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        assert_eq!(text.lines().nth(1).unwrap(), "{\"loss\":null,\"step\":1}");
    }

    #[test]
    fn what_is_no_metrics_stays_as_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let lines = "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}]}\n".repeat(3);
        let numbered = "{\"step\":1,\"prompt\":\"x\",\"completion\":\"y\"}\n";
        let then = "{\"step\":1}\nnotes\n";
        for text in [
            lines.as_str(),
            numbered,
            then,
            "notes",
            "{}",
            "{\"train_batch_size\":8}",
            "[1]\n",
            "1\n",
            "\0\n",
            "{\"a\"",
        ] {
            std::fs::write(&path, text).unwrap();
            for open in [MetricsWriter::create(&path), MetricsWriter::resume(&path, 1), MetricsWriter::append(&path)] {
                let error = open.unwrap_err().to_string();
                assert!(error.contains("it contains something other than metrics, so it is not changed"), "{error}");
            }
            assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
        }
        let pipe = dir.path().join("pipe");
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        let error = MetricsWriter::create(&pipe).unwrap_err().to_string();
        assert!(error.ends_with("it is a pipe, but a file is needed"), "{error}");
    }

    #[test]
    fn a_resumed_run_keeps_the_lines_of_earlier_steps() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        MetricsWriter::resume(&path, 5).unwrap();
        std::fs::write(&path, "{\"step\":0}\n{\"step\":1}\n{\"step\":2}\n{\"summary\":true}\n{\"ste").unwrap();
        let mut writer = MetricsWriter::resume(&path, 2).unwrap();
        writer.write(&json!({"step": 2, "loss": 1})).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        assert_eq!(text, "{\"step\":0}\n{\"step\":1}\n{\"loss\":1,\"step\":2}\n");
    }

    #[test]
    fn a_file_that_another_job_writes_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.jsonl");
        let mut first = MetricsWriter::create(&path).unwrap();
        first.write(&json!({"step": 0})).unwrap();
        // Another process is needed, because this process may open its own file twice.
        drop(MetricsWriter::resume(&path, 1).unwrap());
        drop(first);
        let mut other = std::process::Command::new("flock");
        other.arg(&path).args(["sh", "-c", "echo held; read line"]);
        let mut other = match other.stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped()).spawn() {
            Ok(other) => other,
            // `flock` is missing if util-linux is not installed.
            Err(e) if e.kind() == ErrorKind::NotFound => return,
            Err(e) => panic!("{e}"),
        };
        other.stdout.as_mut().unwrap().read_exact(&mut [0; 5]).unwrap();
        for open in [MetricsWriter::create(&path), MetricsWriter::resume(&path, 1)] {
            let text = open.unwrap_err().to_string().replace(dir.path().to_str().unwrap(), "DIR");
            let text = text.replace(&format!("process {}", other.id()), "process PID");
            assert_eq!(
                text,
                "cannot write metrics to DIR/m.jsonl: a running job is already writing them there (process PID); give \
                 each job its own file, or stop the other one"
            );
        }
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "{\"step\":0}\n");
        drop(other.stdin.take());
        other.wait().unwrap();
        MetricsWriter::create(&path).unwrap();
    }

    #[test]
    fn what_is_appended_begins_a_line_of_its_own() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.jsonl");
        let long = format!("{{\"step\":0}}\n{{{}", "x".repeat(10_000));
        for (before, kept) in
            [("", ""), ("{\"step\":0}\n", "{\"step\":0}\n"), ("{\"step\":1,\"l", ""), (long.as_str(), "{\"step\":0}\n")]
        {
            std::fs::write(&path, before).unwrap();
            MetricsWriter::append(&path).unwrap().write(&json!({"step": 1})).unwrap();
            assert_eq!(std::fs::read_to_string(&path).unwrap(), format!("{kept}{{\"step\":1}}\n"));
        }
    }

    #[test]
    fn a_folder_that_does_not_exist_is_named() {
        let error = MetricsWriter::create(Path::new("no/such/folder/m.jsonl")).unwrap_err();
        insta::assert_snapshot!(error, @"cannot create no/such/folder/m.jsonl: No such file or directory (os error 2)");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_full_disk_is_an_error_that_names_the_file() {
        let mut writer = MetricsWriter::create(Path::new("/dev/full")).unwrap();
        insta::assert_snapshot!(writer.write(&json!({"step": 0})).unwrap_err(), @"cannot write /dev/full: No space left on device (os error 28)");
    }
}
