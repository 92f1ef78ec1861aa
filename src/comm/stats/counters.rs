//! Counters of calls, bytes and seconds per kind of collective.

use crate::comm::CollectiveKind;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Mutex;
use std::time::Duration;

/// The bytes that a rank received from others in one collective.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(in crate::comm) struct ReceivedBytes {
    /// The number of bytes as sent.
    pub wire: usize,
    /// The number of bytes without any encoding.
    pub exact: usize,
    /// The part of `wire` that came from other hosts.
    pub between_hosts: usize,
}

/// The cost of one kind of collective for one rank so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct CollectiveKindReport {
    /// The number of collectives.
    pub calls: u64,
    /// The total number of elements in this rank's arguments.
    pub elements: u64,
    /// The number of bytes that this rank received from other ranks.
    pub wire_bytes: u64,
    /// The number of bytes that this rank would have received without quantization.
    pub exact_bytes: u64,
    /// The part of `wire_bytes` that came from other hosts.
    pub between_hosts_bytes: u64,
    /// The seconds for which the collectives ran, on any thread, including waits for peers.
    pub busy_s: f64,
}

/// The communication of one rank since the start.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct CommReport {
    /// The cost per kind of collective; kinds that never ran are missing.
    pub kinds: BTreeMap<CollectiveKind, CollectiveKindReport>,
    /// The seconds that the training thread spent waiting for collectives.
    pub waited_s: f64,
}

impl CommReport {
    /// Returns the cost of `kind`; zeros if it never ran.
    pub fn kind(&self, kind: CollectiveKind) -> CollectiveKindReport {
        self.kinds.get(&kind).copied().unwrap_or_default()
    }

    /// Returns the number of bytes of gradients and parameters that this rank received (in all-reduces, reduce-scatters
    /// and all-gathers).
    pub fn data_wire_bytes(&self) -> u64 {
        self.data().map(|k| k.wire_bytes).sum()
    }

    /// Returns the value that [`data_wire_bytes`](Self::data_wire_bytes) would have without quantization.
    pub fn data_exact_bytes(&self) -> u64 {
        self.data().map(|k| k.exact_bytes).sum()
    }

    /// Returns the sums of this report and `other`.
    pub(crate) fn with(mut self, other: &Self) -> Self {
        for (kind, more) in &other.kinds {
            let sum = self.kinds.entry(*kind).or_default();
            sum.calls += more.calls;
            sum.elements += more.elements;
            sum.wire_bytes += more.wire_bytes;
            sum.exact_bytes += more.exact_bytes;
            sum.between_hosts_bytes += more.between_hosts_bytes;
            sum.busy_s += more.busy_s;
        }
        self.waited_s += other.waited_s;
        self
    }

    fn data(&self) -> impl Iterator<Item = CollectiveKindReport> {
        [CollectiveKind::AllReduce, CollectiveKind::ReduceScatter, CollectiveKind::AllGather]
            .into_iter()
            .map(|k| self.kind(k))
    }
}

impl fmt::Display for CommReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:<15} {:>8} {:>14} {:>14} {:>9}", "collective", "calls", "elements", "wire bytes", "busy s")?;
        for (kind, k) in &self.kinds {
            let (calls, elements, bytes, busy) = (k.calls, k.elements, k.wire_bytes, k.busy_s);
            writeln!(f, "{:<15} {calls:>8} {elements:>14} {bytes:>14} {busy:>9.3}", kind.name())?;
        }
        let (bytes, exact) = (self.data_wire_bytes(), self.data_exact_bytes());
        if bytes != exact {
            writeln!(f, "quantized: {bytes} bytes of gradients and weights instead of {exact}")?;
        }
        let between: u64 = self.kinds.values().map(|k| k.between_hosts_bytes).sum();
        if between > 0 {
            let of_kind = |(kind, k): (&CollectiveKind, &CollectiveKindReport)| {
                format!("{} {}", kind.name(), k.between_hosts_bytes)
            };
            let list: Vec<String> = self.kinds.iter().filter(|(_, k)| k.between_hosts_bytes > 0).map(of_kind).collect();
            writeln!(f, "from other hosts: {between} bytes ({})", list.join(", "))?;
        }
        write!(f, "training thread waited {:.3} s", self.waited_s)
    }
}

/// The counters of a rank: the threads that run collectives add to them, and the training thread reads them.
#[derive(Debug, Default)]
pub(in crate::comm) struct CommCounters(Mutex<CommReport>);

impl CommCounters {
    pub(in crate::comm) fn add(&self, kind: CollectiveKind, elements: usize, received: ReceivedBytes, busy: Duration) {
        let mut report = self.lock();
        let k = report.kinds.entry(kind).or_default();
        k.calls += 1;
        k.elements += elements as u64;
        k.wire_bytes += received.wire as u64;
        k.exact_bytes += received.exact as u64;
        k.between_hosts_bytes += received.between_hosts as u64;
        k.busy_s += busy.as_secs_f64();
    }

    pub(in crate::comm) fn waited(&self, time: Duration) {
        self.lock().waited_s += time.as_secs_f64();
    }

    pub(in crate::comm) fn report(&self) -> CommReport {
        self.lock().clone()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, CommReport> {
        crate::util::lock(&self.0)
    }
}
