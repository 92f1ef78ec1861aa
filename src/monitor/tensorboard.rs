//! Writes TensorBoard's event files.
//!
//! A file is a sequence of TFRecords, each a protobuf message `Event`:
//!
//! ```text
//! record   length (u64) | masked CRC-32C of the length | message | masked CRC-32C of the message
//! Event    1 wall_time (f64) | 2 step (i64) | 3 file_version (string; the first record), 5 summary or 7 session_log
//! summary  1 value: 1 tag (string) | 2 simple_value (f32), or 8 tensor and 9 metadata (tensorboard_hparams.rs)
//! ```
//!
//! A session log marks the step from which a run continues. TensorBoard then ignores the values of later steps in
//! earlier files, because these steps are repeated.

use super::crc32c::masked_crc32c;
use super::protobuf::ProtobufMessage;
use super::{Monitor, MonitorEvent, RunMilestone, tensorboard_hparams};
use crate::util::host_name;
use crate::{Error, Result};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

/// A monitor that writes one event file. A resumed run writes another file into the same folder, and TensorBoard joins
/// them.
#[derive(Debug)]
pub struct TensorBoard {
    file: File,
    path: PathBuf,
}

impl TensorBoard {
    /// Creates a file in `folder`, which is created if it is missing.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn create(folder: impl AsRef<Path>) -> Result<Self> {
        let folder = folder.as_ref();
        let io_error = |path: &Path| {
            let path = path.to_path_buf();
            |source| Error::Io { action: "create", path, source }
        };
        std::fs::create_dir_all(folder).map_err(io_error(folder))?;
        let path = folder.join(file_name());
        let file = File::create_new(&path).map_err(io_error(&path))?;
        let mut board = Self { file, path };
        board.append(&record(&ProtobufMessage::default().double(1, seconds()).bytes(3, b"brain.Event:2").0))?;
        Ok(board)
    }

    /// Returns the path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn append(&mut self, records: &[u8]) -> Result<()> {
        let io_error = |source| Error::Io { action: "write", path: self.path.clone(), source };
        self.file.write_all(records).map_err(io_error)
    }
}

impl Monitor for TensorBoard {
    /// Writes events. Values are stored in f32, as TensorBoard's scalars are.
    fn write(&mut self, events: &[MonitorEvent]) -> Result<()> {
        let now = seconds();
        let records: Vec<u8> = events.iter().flat_map(|event| record(&message(event, now))).collect();
        self.append(&records)
    }

    /// Writes session logs, and the hyperparameters and the outcome of the run for TensorBoard's table of
    /// hyperparameters.
    fn note(&mut self, milestone: &RunMilestone<'_>) -> Result<()> {
        let now = seconds();
        match milestone {
            RunMilestone::Begins(run) => {
                let [experiment, start] = tensorboard_hparams::beginning(run, now);
                let records =
                    [session_start(run.samples, now), hparams_event(&experiment, now), hparams_event(&start, now)];
                self.append(&records.map(|event| record(&event)).concat())
            }
            RunMilestone::Loaded { samples } => self.append(&record(&session_start(*samples, now))),
            RunMilestone::Ends(ending) => match tensorboard_hparams::ending(*ending, now) {
                Some(end) => self.append(&record(&hparams_event(&end, now))),
                None => Ok(()),
            },
            RunMilestone::Saved { .. } => Ok(()),
        }
    }
}

/// Returns the event that marks the position after `samples` samples, from which the run continues.
fn session_start(samples: u64, now: f64) -> Vec<u8> {
    /// `SessionLog.START`.
    const START: u64 = 1;
    let log = ProtobufMessage::default().varint(1, START);
    ProtobufMessage::default().double(1, now).varint(2, samples + 1).message(7, &log).0
}

fn hparams_event(value: &ProtobufMessage, now: f64) -> Vec<u8> {
    let summary = ProtobufMessage::default().message(1, value);
    ProtobufMessage::default().double(1, now).message(5, &summary).0
}

/// Returns a file name such as `events.out.tfevents.SECONDS.HOST.PROCESS.NUMBER`: TensorBoard looks for the first
/// words, and the rest makes the name unique.
fn file_name() -> String {
    static FILES: AtomicU64 = AtomicU64::new(0);
    let host = host_name();
    let host = if host.is_empty() { "localhost" } else { &host };
    let number = FILES.fetch_add(1, Ordering::Relaxed);
    format!("events.out.tfevents.{:010}.{host}.{}.{number}", seconds() as u64, std::process::id())
}

/// Returns the seconds since 1970.
fn seconds() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

fn message(event: &MonitorEvent, now: f64) -> Vec<u8> {
    let value = ProtobufMessage::default().bytes(1, event.tag.as_bytes()).float(2, event.value as f32);
    let summary = ProtobufMessage::default().bytes(1, &value.0);
    ProtobufMessage::default().double(1, now).varint(2, event.step).bytes(5, &summary.0).0
}

/// Returns a TFRecord that contains a message.
fn record(message: &[u8]) -> Vec<u8> {
    let length = (message.len() as u64).to_le_bytes();
    [&length[..], &masked_crc32c(&length).to_le_bytes(), message, &masked_crc32c(message).to_le_bytes()].concat()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::{RunDescription, RunEnding};
    use super::*;

    /// Computes CRC-32C by polynomial division, bit by bit from the highest power: without a lookup table, and without
    /// reversing anything but the bits of each byte and of the result.
    fn crc_by_division(bytes: &[u8]) -> u32 {
        const DIVISOR: u64 = 0x1_1EDC_6F41;
        let bits = bytes.iter().flat_map(|byte| (0..8).map(move |bit| byte >> bit & 1));
        let bits: Vec<u8> = bits.chain([0; 32]).collect();
        let mut rest = 0u64;
        for (i, bit) in bits.iter().enumerate() {
            // The first 32 bits are XORed with ones.
            rest = rest << 1 | u64::from(bit ^ u8::from(i < 32));
            if rest >> 32 == 1 {
                rest ^= DIVISOR;
            }
        }
        !(rest as u32).reverse_bits()
    }

    fn check(checksum: &[u8], data: &[u8]) {
        let crc = crc_by_division(data);
        let masked = crc.rotate_right(15).wrapping_add(0xa282_ead8);
        assert_eq!(u32::from_le_bytes(checksum.try_into().unwrap()), masked);
    }

    /// Returns the messages of the complete records in a file, after checking their checksums.
    fn messages(mut bytes: &[u8]) -> Vec<&[u8]> {
        let mut messages = vec![];
        while bytes.len() >= 12 {
            let (head, rest) = bytes.split_at(12);
            check(&head[8..], &head[..8]);
            let length = u64::from_le_bytes(head[..8].try_into().unwrap()) as usize;
            if rest.len() < length + 4 {
                break;
            }
            let (message, rest) = rest.split_at(length);
            check(&rest[..4], message);
            messages.push(message);
            bytes = &rest[4..];
        }
        messages
    }

    /// Returns a field of a message by its number: the bytes of the value, and the value itself if it is a varint.
    fn field(mut message: &[u8], number: u64) -> Option<(&[u8], u64)> {
        let varint = |message: &mut &[u8]| {
            let length = message.iter().position(|byte| byte & 0x80 == 0).unwrap() + 1;
            let (bytes, rest) = message.split_at(length);
            *message = rest;
            bytes.iter().rev().fold(0u64, |value, byte| value << 7 | u64::from(byte & 0x7f))
        };
        while !message.is_empty() {
            let key = varint(&mut message);
            let (length, value) = match key & 7 {
                0 => (0, varint(&mut message)),
                1 => (8, 0),
                2 => (varint(&mut message) as usize, 0),
                5 => (4, 0),
                other => panic!("wire type {other}"),
            };
            let (bytes, rest) = message.split_at(length);
            if key >> 3 == number {
                return Some((bytes, value));
            }
            message = rest;
        }
        None
    }

    #[test]
    fn records_read_back_with_every_bit_of_value_and_step() {
        let dir = tempfile::tempdir().unwrap();
        let mut board = TensorBoard::create(dir.path().join("a/b")).unwrap();
        let long = "Train/".repeat(50);
        let written = [
            MonitorEvent::new("Train/Samples/lr", 1e-3, 0),
            MonitorEvent::new("Train/Samples/lr", -0.0, 127),
            MonitorEvent::new(&long, f64::INFINITY, 128),
            MonitorEvent::new("größe", 2.5, u64::from(u32::MAX) << 7),
        ];
        board.write(&written[..3]).unwrap();
        board.write(&written[3..]).unwrap();
        let name = board.path().file_name().unwrap().to_str().unwrap().to_string();
        let parts: Vec<&str> = name.split('.').collect();
        assert_eq!(parts[..3], ["events", "out", "tfevents"]);
        assert!(parts[3].len() == 10 && name.contains(&format!(".{}.", std::process::id())), "{name}");

        let bytes = std::fs::read(board.path()).unwrap();
        let read = messages(&bytes);
        assert_eq!(read.len(), 1 + written.len());
        assert_eq!(field(read[0], 3).unwrap().0, b"brain.Event:2");
        for (event, message) in written.iter().zip(&read[1..]) {
            assert_eq!(field(message, 2).unwrap().1, event.step);
            let wall_time = f64::from_le_bytes(field(message, 1).unwrap().0.try_into().unwrap());
            assert!((seconds() - wall_time).abs() < 60.0, "{wall_time}");
            let value = field(field(message, 5).unwrap().0, 1).unwrap().0;
            assert_eq!(field(value, 1).unwrap().0, event.tag.as_bytes());
            let simple_value = f32::from_le_bytes(field(value, 2).unwrap().0.try_into().unwrap());
            assert_eq!(simple_value.to_bits(), (event.value as f32).to_bits());
        }
        // A run that is killed in the middle of a record leaves the records before it intact.
        assert_eq!(messages(&bytes[..bytes.len() - 3]).len(), written.len());
    }

    #[test]
    fn a_run_that_begins_marks_its_first_step_and_names_its_hyperparameters() {
        let dir = tempfile::tempdir().unwrap();
        let mut board = TensorBoard::create(dir.path()).unwrap();
        let run = RunDescription { samples: 24, world_size: 2, ..RunDescription::default() };
        board.note(&RunMilestone::Begins(&run)).unwrap();
        board.write(&[MonitorEvent::new("x", 1.0, 32)]).unwrap();
        board.note(&RunMilestone::Loaded { samples: 8 }).unwrap();
        board.note(&RunMilestone::Ends(RunEnding::Stopped)).unwrap();
        board.note(&RunMilestone::Ends(RunEnding::Finished)).unwrap();
        let bytes = std::fs::read(board.path()).unwrap();
        let read = messages(&bytes);
        let start = |message: &[u8]| (field(message, 2).unwrap().1, field(field(message, 7).unwrap().0, 1).unwrap().1);
        assert_eq!((start(read[1]), start(read[5])), ((25, 1), (9, 1)));
        let tags: Vec<&[u8]> =
            read.iter().filter_map(|message| field(field(field(message, 5)?.0, 1)?.0, 1)).map(|tag| tag.0).collect();
        let hparams = ["experiment", "session_start_info", "session_end_info"].map(|name| format!("_hparams_/{name}"));
        let [experiment, begin, end] = hparams.each_ref().map(|tag| tag.as_bytes());
        assert_eq!(tags, [experiment, begin, b"x", end]);
    }

    #[test]
    fn two_files_of_one_second_have_two_names() {
        let dir = tempfile::tempdir().unwrap();
        let [a, b] = [(), ()].map(|()| TensorBoard::create(dir.path()).unwrap());
        assert_ne!(a.path(), b.path());
    }

    #[test]
    fn a_folder_that_cannot_be_is_named() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("file"), "").unwrap();
        let error = TensorBoard::create(dir.path().join("file/logs")).unwrap_err().to_string();
        assert!(error.starts_with("cannot create ") && error.contains("file/logs: "), "{error}");
    }
}
