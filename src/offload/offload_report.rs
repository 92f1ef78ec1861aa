//! Bytes and seconds of file access.

use serde::Serialize;
use std::fmt;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// The file accesses of one rank since its engine was created.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct OffloadReport {
    /// The bytes read from files.
    pub bytes_read: u64,
    /// The bytes written to files.
    pub bytes_written: u64,
    /// The seconds during which at least one request was pending.
    pub busy_s: f64,
    /// The seconds during which the training thread waited for a request.
    pub waited_s: f64,
}

impl OffloadReport {
    /// Returns the bytes per second, in both directions, over the time during which requests were pending; 0 if there
    /// were no requests.
    pub fn bytes_per_s(&self) -> f64 {
        if self.busy_s > 0.0 { (self.bytes_read + self.bytes_written) as f64 / self.busy_s } else { 0.0 }
    }

    /// Returns the traffic since `before`, an earlier report of the same engine.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        Self {
            bytes_read: self.bytes_read - before.bytes_read,
            bytes_written: self.bytes_written - before.bytes_written,
            busy_s: self.busy_s - before.busy_s,
            waited_s: self.waited_s - before.waited_s,
        }
    }
}

impl fmt::Display for OffloadReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gb = |bytes: u64| bytes as f64 / 1e9;
        write!(
            f,
            "files: {:.2} GB read, {:.2} GB written in {:.2} s ({:.2} GB/s); training waited {:.2} s for them",
            gb(self.bytes_read),
            gb(self.bytes_written),
            self.busy_s,
            self.bytes_per_s() / 1e9,
            self.waited_s
        )
    }
}

/// A meter of the requests of many threads.
#[derive(Debug, Default)]
pub(super) struct IoMeter(Mutex<IoCounts>);

#[derive(Debug, Default)]
struct IoCounts {
    report: OffloadReport,
    /// The number of pending requests.
    active: usize,
    /// The time since which there has been at least one pending request.
    since: Option<Instant>,
}

impl IoMeter {
    pub fn begin(&self) {
        let mut counts = self.lock();
        counts.active += 1;
        counts.since.get_or_insert_with(Instant::now);
    }

    /// Ends a request that has read and written these numbers of bytes.
    pub fn end(&self, [read, written]: [usize; 2]) {
        let mut counts = self.lock();
        counts.report.bytes_read += read as u64;
        counts.report.bytes_written += written as u64;
        counts.active -= 1;
        if counts.active == 0 {
            let busy = counts.since.take().map_or(Duration::ZERO, |since| since.elapsed());
            counts.report.busy_s += busy.as_secs_f64();
        }
    }

    pub fn waited(&self, time: Duration) {
        self.lock().report.waited_s += time.as_secs_f64();
    }

    pub fn report(&self) -> OffloadReport {
        let counts = self.lock();
        let current = counts.since.map_or(0.0, |since| since.elapsed().as_secs_f64());
        OffloadReport { busy_s: counts.report.busy_s + current, ..counts.report }
    }

    fn lock(&self) -> MutexGuard<'_, IoCounts> {
        crate::util::lock(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_in_which_requests_overlap_counts_once() {
        let meter = IoMeter::default();
        let start = std::time::Instant::now();
        meter.begin();
        meter.begin();
        std::thread::sleep(Duration::from_millis(20));
        meter.end([10, 0]);
        meter.end([0, 20]);
        let report = meter.report();
        assert_eq!((report.bytes_read, report.bytes_written), (10, 20));
        let elapsed = start.elapsed().as_secs_f64();
        assert!((0.02..=elapsed).contains(&report.busy_s), "{report:?} of {elapsed} s");
        assert_eq!(report.since(&report), OffloadReport::default());
    }
}
