//! The trace, in Chrome's JSON format, which Perfetto (ui.perfetto.dev) opens. Its processes are ranks, and its threads
//! are lanes.

use super::event::{EventLine, TimelineLane};
use crate::error::{Error, MonitorError, Result};
use crate::files::{AtomicFile, check_replaceable};
use crate::util::{counted, is_or_are};
use memmap2::Mmap;
use std::collections::BTreeSet;
use std::fmt;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

/// The summary of a trace's content.
#[derive(Debug, PartialEq, Eq)]
pub struct TraceSummary {
    file: PathBuf,
    pub events: usize,
    pub ranks: usize,
    /// The number of missing events.
    pub dropped: u64,
}

impl fmt::Display for TraceSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { file, events, ranks, dropped } = self;
        let (verb, events) = (is_or_are(*events), counted(*events, "event"));
        write!(f, "{events} of {} {verb} in {}", counted(*ranks, "rank"), file.display())?;
        match dropped {
            0 => Ok(()),
            1 => f.write_str("; 1 later event was dropped; record fewer steps"),
            dropped => write!(f, "; {dropped} later events were dropped; record fewer steps"),
        }
    }
}

/// Rejects an existing file that is not an earlier trace.
pub(super) fn check_earlier(file: &Path) -> std::io::Result<()> {
    check_replaceable(file, b"{\"displayTimeUnit\":\"ms\",\"otherData\":{\"dropped_events\":", "timeline")
}

/// Combines the lines of `parts` into `file`, which appears only when it is complete. Times are counted from `zero`.
pub(super) fn write_trace(parts: &[&File], zero: u64, file: &Path) -> Result<TraceSummary> {
    let wrong = |e: std::io::Error| cannot_write(file, &e);
    let parts: Vec<Option<Mmap>> = parts.iter().map(|part| map(part)).collect::<Result<_, _>>().map_err(wrong)?;
    let mut events = Vec::new();
    let (mut lanes, mut dropped) = (BTreeSet::new(), 0);
    for line in parts.iter().flatten().flat_map(|part| part.split_inclusive(|byte| *byte == b'\n')) {
        match std::str::from_utf8(line).ok().and_then(EventLine::read) {
            Some(EventLine::Event { start, end, rank, lane, rest }) => {
                lanes.insert((rank, lane));
                // Of two events with the same start, the one that ends later encloses the other.
                events.push((start, std::cmp::Reverse(end), rank, lane, rest));
            }
            Some(EventLine::Dropped(count)) => dropped += count,
            // This is an incomplete line of a process that was killed while writing.
            None => {}
        }
    }
    events.sort_unstable_by_key(|(start, end, rank, lane, _)| (*start, *end, *rank, *lane));

    check_earlier(file).map_err(wrong)?;
    let mut new = AtomicFile::create_for(file).map_err(wrong)?;
    let mut out = BufWriter::new(new.file());
    let mut write = || -> std::io::Result<()> {
        write!(out, "{{\"displayTimeUnit\":\"ms\",\"otherData\":{{\"dropped_events\":{dropped}}},\"traceEvents\":[")?;
        let mut comma = "\n";
        let mut write_metadata = |out: &mut BufWriter<_>, kind, (rank, lane): (usize, usize), args: String| {
            let result = write!(
                out,
                "{comma}{{\"ph\":\"M\",\"pid\":{rank},\"tid\":{lane},\"name\":\"{kind}\",\"args\":{{{args}}}}}"
            );
            comma = ",\n";
            result
        };
        let ranks: BTreeSet<usize> = lanes.iter().map(|(rank, _)| *rank).collect();
        for rank in &ranks {
            let ids = (*rank, TimelineLane::Training.number(0));
            write_metadata(&mut out, "process_name", ids, format!("\"name\":\"rank {rank}\""))?;
            write_metadata(&mut out, "process_sort_index", ids, format!("\"sort_index\":{rank}"))?;
        }
        for (rank, lane) in &lanes {
            let (ids, name) = ((*rank, *lane), TimelineLane::name_of(*lane));
            write_metadata(&mut out, "thread_name", ids, format!("\"name\":\"{name}\""))?;
            write_metadata(&mut out, "thread_sort_index", ids, format!("\"sort_index\":{lane}"))?;
        }
        for (start, end, rank, lane, rest) in &events {
            let (ts, dur) = (Microseconds(start.saturating_sub(zero)), Microseconds(end.0 - start));
            write!(out, "{comma}{{\"ph\":\"X\",\"pid\":{rank},\"tid\":{lane},\"ts\":{ts},\"dur\":{dur},{rest}}}")?;
            comma = ",\n";
        }
        out.write_all(b"\n]}\n")?;
        out.flush()
    };
    write().map_err(wrong)?;
    drop(out);
    new.finish().map_err(wrong)?;
    let ranks = lanes.iter().map(|(rank, _)| rank).collect::<BTreeSet<_>>().len();
    Ok(TraceSummary { file: file.into(), events: events.len(), ranks, dropped })
}

/// Maps a part file into memory; returns `None` if it is empty.
fn map(part: &File) -> std::io::Result<Option<Mmap>> {
    if part.metadata()?.len() == 0 {
        return Ok(None);
    }
    // SAFETY: part files belong to this job: nothing else writes to them, and nothing shortens them.
    unsafe { Mmap::map(part) }.map(Some)
}

/// A number of nanoseconds that is displayed as microseconds.
struct Microseconds(u64);

impl fmt::Display for Microseconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:03}", self.0 / 1000, self.0 % 1000)
    }
}

/// Returns the error for a timeline that cannot be written.
pub(super) fn cannot_write(path: &Path, error: &std::io::Error) -> Error {
    MonitorError::Timeline { path: path.into(), problem: error.to_string() }.into()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn part(text: &str) -> File {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        file
    }

    #[test]
    fn parts_of_all_ranks_become_one_trace_in_the_order_of_time() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("trace.json");
        let first = part(
            "1500 1750 0 2 \"name\":\"b\",\"cat\":\"x\",\"args\":{}\n1000 1000999 0 1 \"name\":\"a\",\"cat\":\"x\",\"args\":{}\ndropped 3\n",
        );
        let torn = part(
            "1000 2000 1 1 \"name\":\"c\",\"cat\":\"x\",\"args\":{}\ndropped 4\n3000 4000 1 1 \"name\":\"d\",\"ca",
        );
        let summary = write_trace(&[&first, &torn, &part("")], 1000, &path).unwrap();
        assert_eq!((summary.events, summary.ranks, summary.dropped), (3, 2, 7));
        insta::assert_snapshot!(std::fs::read_to_string(&path).unwrap(), @r#"
        {"displayTimeUnit":"ms","otherData":{"dropped_events":7},"traceEvents":[
        {"ph":"M","pid":0,"tid":1,"name":"process_name","args":{"name":"rank 0"}},
        {"ph":"M","pid":0,"tid":1,"name":"process_sort_index","args":{"sort_index":0}},
        {"ph":"M","pid":1,"tid":1,"name":"process_name","args":{"name":"rank 1"}},
        {"ph":"M","pid":1,"tid":1,"name":"process_sort_index","args":{"sort_index":1}},
        {"ph":"M","pid":0,"tid":1,"name":"thread_name","args":{"name":"training"}},
        {"ph":"M","pid":0,"tid":1,"name":"thread_sort_index","args":{"sort_index":1}},
        {"ph":"M","pid":0,"tid":2,"name":"thread_name","args":{"name":"collectives"}},
        {"ph":"M","pid":0,"tid":2,"name":"thread_sort_index","args":{"sort_index":2}},
        {"ph":"M","pid":1,"tid":1,"name":"thread_name","args":{"name":"training"}},
        {"ph":"M","pid":1,"tid":1,"name":"thread_sort_index","args":{"sort_index":1}},
        {"ph":"X","pid":0,"tid":1,"ts":0.000,"dur":999.999,"name":"a","cat":"x","args":{}},
        {"ph":"X","pid":1,"tid":1,"ts":0.000,"dur":1.000,"name":"c","cat":"x","args":{}},
        {"ph":"X","pid":0,"tid":2,"ts":0.500,"dur":0.250,"name":"b","cat":"x","args":{}}
        ]}
        "#);
    }

    #[test]
    fn a_trace_without_events_can_be_opened() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("trace.json");
        let summary = write_trace(&[], 0, &path).unwrap();
        assert_eq!((summary.events, summary.ranks), (0, 0));
        let trace: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        assert_eq!(trace["traceEvents"], serde_json::json!([]));
    }
}
