//! `comms_logger`: a log of every collective by kind and size.

use crate::comm::{Bandwidth, CollectiveKind, size_text, trimmed_mean};
use crate::config::CommsLoggerConfig;
use crate::notice::emit;
use crate::util::{counted, lock};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Mutex;
use std::time::Duration;

/// The number of most recent calls of a kind and size whose times are kept for the averages.
const KEPT_CALLS: usize = 4096;
/// The fraction of calls that averages leave out at each end: the fastest tenth and the slowest tenth.
const TRIMMED_FRACTION: f64 = 0.1;

/// The log of one rank's collectives, filled by the threads that run them.
#[derive(Debug)]
pub struct CommLog {
    rank: usize,
    world_size: usize,
    /// The kinds to log; `None` means all.
    kinds: Option<Vec<CollectiveKind>>,
    verbose: bool,
    entries: Mutex<BTreeMap<(CollectiveKind, u64), CommLogEntry>>,
}

#[derive(Debug, Default)]
struct CommLogEntry {
    calls: u64,
    total_ms: f64,
    /// A ring buffer of the most recent times.
    times: Vec<f64>,
}

/// The cost of collectives of one kind and size.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct CommLogRow {
    /// The kind of collective.
    pub kind: CollectiveKind,
    /// The number of bytes of one rank's part: its result from a reduce-scatter, or its argument in any other
    /// collective.
    pub bytes: u64,
    /// The number of collectives.
    pub calls: u64,
    /// The total time in milliseconds, including waits for peers.
    pub total_ms: f64,
    /// The mean time without the fastest and the slowest tenth of the most recent calls, as in all averages of this
    /// log.
    pub average_ms: f64,
    /// The bandwidth of the operation in gigabits per second.
    pub algorithm_gbps: f64,
    /// The bandwidth on the busiest link of an ideal algorithm in gigabits per second.
    pub bus_gbps: f64,
}

/// The table of `comms_logger`.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct CommSummary {
    /// The number of ranks.
    pub world_size: usize,
    /// The rows by kind and size.
    pub rows: Vec<CommLogRow>,
}

impl CommLog {
    /// Returns a log with the settings of the `comms_logger` section. Rank 0 reports unknown `prof_ops`, and prints
    /// collectives if the section is verbose.
    pub(crate) fn new(config: &CommsLoggerConfig, rank: usize, world_size: usize) -> Self {
        let kind = |op: &String| {
            let kind = CollectiveKind::of_op(op);
            if kind.is_none() && rank == 0 {
                let known = CollectiveKind::ALL.map(CollectiveKind::name).join(", ");
                emit(&format!("config: comms_logger.prof_ops: there is no operation `{op}`, only {known}"));
            }
            kind
        };
        let kinds = (!config.prof_all).then(|| config.prof_ops.iter().filter_map(kind).collect());
        Self { rank, world_size, kinds, verbose: config.verbose && rank == 0, entries: Mutex::default() }
    }

    /// Adds a collective with an argument of `argument` bytes and its time.
    pub(in crate::comm) fn add(&self, kind: CollectiveKind, argument: usize, duration: Duration) {
        if self.kinds.as_ref().is_some_and(|kinds| !kinds.contains(&kind)) {
            return;
        }
        let bytes = match kind {
            CollectiveKind::ReduceScatter => argument / self.world_size,
            _ => argument,
        } as u64;
        let ms = duration.as_secs_f64() * 1e3;
        if self.verbose {
            let Bandwidth { algorithm, bus } = self.bandwidth(kind, bytes, ms);
            let (rank, name, size) = (self.rank, kind.name(), size_text(bytes));
            emit(&format!(
                "rank={rank} | comm op: {name} | time (ms): {ms:.2} | msg size: {size} | algbw (Gbps): {algorithm:.2} \
                 | busbw (Gbps): {bus:.2}"
            ));
        }
        let mut entries = lock(&self.entries);
        let entry = entries.entry((kind, bytes)).or_default();
        match entry.times.get_mut(entry.calls as usize % KEPT_CALLS) {
            Some(oldest) => *oldest = ms,
            None => entry.times.push(ms),
        }
        entry.calls += 1;
        entry.total_ms += ms;
    }

    /// Returns the log so far.
    pub(crate) fn summary(&self) -> CommSummary {
        let row =
            |(&(kind, bytes), CommLogEntry { calls, total_ms, times }): (&(CollectiveKind, u64), &CommLogEntry)| {
                let mean = |values: Vec<f64>| trimmed_mean(&values, TRIMMED_FRACTION);
                let bandwidth = |select: fn(Bandwidth) -> f64| {
                    mean(times.iter().map(|ms| select(self.bandwidth(kind, bytes, *ms))).collect())
                };
                CommLogRow {
                    kind,
                    bytes,
                    calls: *calls,
                    total_ms: *total_ms,
                    average_ms: mean(times.clone()),
                    algorithm_gbps: bandwidth(|b| b.algorithm),
                    bus_gbps: bandwidth(|b| b.bus),
                }
            };
        CommSummary { world_size: self.world_size, rows: lock(&self.entries).iter().map(row).collect() }
    }

    fn bandwidth(&self, kind: CollectiveKind, bytes: u64, ms: f64) -> Bandwidth {
        Bandwidth::of(kind.name(), bytes as f64, ms, self.world_size)
    }
}

impl fmt::Display for CommSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let columns = ["Count", "Total Latency(ms)", "Avg Latency(ms)", "tput_avg (Gbps)", "busbw_avg (Gbps)"];
        write!(f, "{:<16}{:>13}", "Comm. Op", "Message Size")?;
        columns.iter().try_for_each(|name| write!(f, "{name:>19}"))?;
        for row in &self.rows {
            write!(f, "\n{:<16}{:>13}{:>19}", row.kind.name(), size_text(row.bytes), row.calls)?;
            for value in [row.total_ms, row.average_ms, row.algorithm_gbps, row.bus_gbps] {
                write!(f, "{value:>19.2}")?;
            }
        }
        if self.rows.is_empty() {
            write!(f, "\nno collectives were logged ({})", counted(self.world_size, "rank"))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log(prof_ops: Option<&[&str]>) -> CommLog {
        let config = CommsLoggerConfig {
            prof_all: prof_ops.is_none(),
            prof_ops: prof_ops.unwrap_or_default().iter().map(|op| op.to_string()).collect(),
            verbose: false,
        };
        CommLog::new(&config, 1, 4)
    }

    #[test]
    fn calls_add_up_by_kind_and_size_and_averages_leave_out_the_extremes() {
        let log = log(None);
        for ms in [1, 2, 2, 2, 2, 2, 2, 2, 2, 100] {
            log.add(CollectiveKind::AllGather, 1 << 20, Duration::from_millis(ms));
        }
        log.add(CollectiveKind::ReduceScatter, 4 << 10, Duration::from_millis(4));
        log.add(CollectiveKind::AllReduce, 3 << 9, Duration::from_millis(4));
        log.add(CollectiveKind::Barrier, 0, Duration::from_millis(1));
        insta::assert_snapshot!(log.summary(), @r"
        Comm. Op         Message Size              Count  Total Latency(ms)    Avg Latency(ms)    tput_avg (Gbps)   busbw_avg (Gbps)
        all_reduce             1.5 KB                  1               4.00               4.00               0.01               0.00
        reduce_scatter         1.0 KB                  1               4.00               4.00               0.01               0.01
        all_gather             1.0 MB                 10             117.00               2.00              16.78              12.58
        barrier                    0B                  1               1.00               1.00               0.00               0.00
        ");
    }

    #[test]
    fn the_newest_times_are_kept_and_all_calls_counted() {
        let log = log(None);
        for call in 0..2 * KEPT_CALLS {
            log.add(CollectiveKind::AllReduce, 8, Duration::from_millis(if call < KEPT_CALLS { 7 } else { 3 }));
        }
        let CommSummary { rows, .. } = log.summary();
        assert_eq!((rows[0].calls, rows[0].average_ms), (2 * KEPT_CALLS as u64, 3.0));
        assert!((rows[0].total_ms - 10.0 * KEPT_CALLS as f64).abs() < 1e-6);
    }

    #[test]
    fn prof_ops_choose_by_deepspeeds_names_and_by_ours() {
        let log = log(Some(&["all_gather_into_tensor", "barrier", "send", "irecv", "gather"]));
        for kind in CollectiveKind::ALL {
            log.add(kind, 8, Duration::from_millis(1));
        }
        let kinds: Vec<CollectiveKind> = log.summary().rows.iter().map(|row| row.kind).collect();
        let expected =
            [CollectiveKind::AllGather, CollectiveKind::Barrier, CollectiveKind::Send, CollectiveKind::Receive];
        assert_eq!(kinds, expected);
    }
}
