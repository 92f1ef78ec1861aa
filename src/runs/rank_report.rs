//! The report that each rank sends about once a second: its memory by kind, and the times of its last step.

use crate::memory::{MemoryKind, MemoryReport, MemoryRow};
use crate::monitor::{rss_bytes, rss_peak_bytes};
use crate::profiler::StepTimings;
use crate::util::host_name;
use serde_json::{Map, Value, json};

/// The number of bytes of a host's name in one number. Whole numbers below 2^53 are exact in f64.
const BYTES_IN_NUMBER: usize = 6;
/// The number of numbers that hold the host's name. A longer name is cut off.
const NAME_NUMBERS: usize = 10;
/// The number of numbers before those of the memory.
const HEAD: usize = 3 + 5 + NAME_NUMBERS;

/// The report of one rank. It is sent as a row of numbers.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct RankReport {
    pid: u32,
    host: String,
    /// The current resident memory of the process, and its maximum; 0 if unknown.
    resident: [u64; 2],
    timings: StepTimings,
    memory: Vec<KindBytes>,
}

/// The bytes of one memory kind: currently in memory, the maximum in memory, and in files.
#[derive(Debug, Clone, Copy, PartialEq)]
struct KindBytes {
    kind: MemoryKind,
    held: u64,
    peak: u64,
    file: u64,
}

impl RankReport {
    /// Returns the report of this process.
    pub fn of(memory: &MemoryReport, timings: StepTimings) -> Self {
        let bytes = |row: &MemoryRow| KindBytes {
            kind: row.kind,
            held: row.bytes.held as u64,
            peak: row.bytes.peak as u64,
            file: row.file.held as u64,
        };
        Self {
            pid: std::process::id(),
            host: host_name(),
            resident: [rss_bytes(), rss_peak_bytes()].map(Option::unwrap_or_default),
            timings,
            memory: memory.rows.iter().map(bytes).collect(),
        }
    }

    /// Returns the report as numbers, whose count is the same on every rank.
    pub fn to_numbers(&self) -> Vec<f64> {
        let StepTimings { forward_ms, backward_ms, step_ms, comm_ms, disk_ms } = self.timings;
        let [now, peak] = self.resident;
        let mut numbers = vec![f64::from(self.pid), now as f64, peak as f64];
        numbers.extend([forward_ms, backward_ms, step_ms, comm_ms, disk_ms]);
        let name = self.host.as_bytes();
        numbers.extend((0..NAME_NUMBERS).map(|index| {
            let part = name.iter().skip(index * BYTES_IN_NUMBER).take(BYTES_IN_NUMBER);
            part.enumerate().map(|(byte, letter)| u64::from(*letter) << (8 * byte)).sum::<u64>() as f64
        }));
        for kind in MemoryKind::ALL {
            let bytes = self.memory.iter().find(|bytes| bytes.kind == kind);
            numbers
                .extend(bytes.map_or([0.0; 3], |bytes| [bytes.held, bytes.peak, bytes.file].map(|bytes| bytes as f64)));
        }
        numbers
    }

    /// Reads the numbers of [`to_numbers`](Self::to_numbers). Numbers that are missing are 0.
    pub fn of_numbers(numbers: &[f64]) -> Self {
        let number = |position: usize| numbers.get(position).copied().unwrap_or_default();
        let letters = (0..NAME_NUMBERS * BYTES_IN_NUMBER).map(|position| {
            let part = number(8 + position / BYTES_IN_NUMBER) as u64;
            (part >> (8 * (position % BYTES_IN_NUMBER))) as u8
        });
        let name: Vec<u8> = letters.take_while(|letter| *letter != 0).collect();
        let memory = MemoryKind::ALL.into_iter().enumerate().map(|(index, kind)| {
            let [held, peak, file] = [0, 1, 2].map(|part| number(HEAD + 3 * index + part) as u64);
            KindBytes { kind, held, peak, file }
        });
        Self {
            pid: number(0) as u32,
            host: String::from_utf8_lossy(&name).into_owned(),
            resident: [number(1) as u64, number(2) as u64],
            timings: StepTimings {
                forward_ms: number(3),
                backward_ms: number(4),
                step_ms: number(5),
                comm_ms: number(6),
                disk_ms: number(7),
            },
            memory: memory.filter(|bytes| bytes.held + bytes.peak + bytes.file > 0).collect(),
        }
    }

    /// Returns the report as an object for `ranks.json`.
    pub fn to_json(&self, rank: usize) -> Value {
        let StepTimings { forward_ms, backward_ms, step_ms, comm_ms, disk_ms } = self.timings;
        let of_kind = |bytes: &KindBytes| {
            let KindBytes { kind, held, peak, file } = bytes;
            (kind.name().to_owned(), json!({"held": held, "peak": peak, "file": file}))
        };
        json!({
            "rank": rank,
            "host": self.host,
            "pid": self.pid,
            "rss_bytes": self.resident[0],
            "rss_peak_bytes": self.resident[1],
            "forward_ms": forward_ms,
            "backward_ms": backward_ms,
            "step_ms": step_ms,
            "comm_ms": comm_ms,
            "disk_ms": disk_ms,
            "memory": self.memory.iter().map(of_kind).collect::<Map<_, _>>(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(host: &str) -> RankReport {
        RankReport {
            pid: u32::MAX,
            host: host.into(),
            resident: [1 << 40, 1 << 41],
            timings: StepTimings { forward_ms: 1.5, backward_ms: 2.5, step_ms: 0.25, comm_ms: 0.5, disk_ms: 0.0 },
            memory: vec![
                KindBytes { kind: MemoryKind::Parameters, held: 7, peak: 9, file: 0 },
                KindBytes { kind: MemoryKind::Moments, held: 0, peak: 0, file: 1 << 45 },
            ],
        }
    }

    #[test]
    fn a_report_survives_as_numbers_of_the_same_count_on_every_rank() {
        for host in ["", "a", "node-17.cluster", "ü-host"] {
            let report = report(host);
            assert_eq!(RankReport::of_numbers(&report.to_numbers()), report);
        }
        let empty = RankReport { memory: vec![], ..report("x") };
        assert_eq!(empty.to_numbers().len(), report("y").to_numbers().len());
        let long = RankReport::of_numbers(&report(&"n".repeat(100)).to_numbers());
        assert_eq!(long.host.len(), BYTES_IN_NUMBER * NAME_NUMBERS);
        assert_eq!(RankReport::of_numbers(&[1.0]).pid, 1);
    }

    #[test]
    fn every_kind_of_memory_is_reported() {
        let names: std::collections::BTreeSet<&str> = MemoryKind::ALL.iter().map(|kind| kind.name()).collect();
        assert_eq!(names.len(), MemoryKind::ALL.len());
        insta::assert_snapshot!(report("h").to_json(3), @r#"{"backward_ms":2.5,"comm_ms":0.5,"disk_ms":0.0,"forward_ms":1.5,"host":"h","memory":{"moments":{"file":35184372088832,"held":0,"peak":0},"parameters":{"file":0,"held":7,"peak":9}},"pid":4294967295,"rank":3,"rss_bytes":1099511627776,"rss_peak_bytes":2199023255552,"step_ms":0.25}"#);
    }
}
