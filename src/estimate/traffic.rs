//! The traffic of a rank: collectives by kind, and bytes of files.

use crate::comm::{CollectiveKind, WireFormat};
use candle_core::DType;
use serde::Serialize;
use std::collections::BTreeMap;

/// Collectives of one kind that a rank takes part in during one optimizer step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct CollectiveCounts {
    /// The number of collectives.
    pub calls: u64,
    /// The elements of this rank's arguments, summed.
    pub elements: u64,
    /// The bytes that this rank receives from other ranks.
    pub wire_bytes: u64,
}

/// The traffic of one rank in one optimizer step, accumulation included.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Traffic {
    /// The collectives by kind, as [`CommReport`](crate::comm::CommReport) counts them; kinds that do not occur are
    /// missing.
    pub collectives: BTreeMap<CollectiveKind, CollectiveCounts>,
    /// The bytes read from files.
    pub bytes_read: u64,
    /// The bytes written to files.
    pub bytes_written: u64,
}

impl Traffic {
    /// Returns the traffic of `kind`, or zeros if it does not occur.
    pub fn kind(&self, kind: CollectiveKind) -> CollectiveCounts {
        self.collectives.get(&kind).copied().unwrap_or_default()
    }

    /// Counts one collective whose argument has `elements` elements of a dtype on each of `world` ranks.
    pub(super) fn collective(
        &mut self,
        kind: CollectiveKind,
        elements: usize,
        dtype: DType,
        wire: WireFormat,
        world: usize,
    ) {
        let entry = self.collectives.entry(kind).or_default();
        entry.calls += 1;
        entry.elements += elements as u64;
        entry.wire_bytes += wire.bytes(kind, elements, dtype, world) as u64;
    }

    /// Counts the step of a reduction in which the `copies` ranks that hold the same shard combine their sums of
    /// `elements` elements.
    pub(super) fn sums_across(&mut self, elements: usize, dtype: DType, copies: usize) {
        let bytes = WireFormat::Exact.bytes(CollectiveKind::AllGather, elements, dtype, copies);
        self.collectives.entry(CollectiveKind::ReduceScatter).or_default().wire_bytes += bytes as u64;
    }

    /// Returns the traffic since `before`.
    pub(super) fn since(&self, before: &Self) -> Self {
        let collectives = self.collectives.iter().map(|(kind, c)| {
            let b = before.kind(*kind);
            let [calls, elements] = [c.calls - b.calls, c.elements - b.elements];
            (*kind, CollectiveCounts { calls, elements, wire_bytes: c.wire_bytes - b.wire_bytes })
        });
        Self {
            collectives: collectives.filter(|(_, c)| c.calls > 0).collect(),
            bytes_read: self.bytes_read - before.bytes_read,
            bytes_written: self.bytes_written - before.bytes_written,
        }
    }

    /// Adds `other`, multiplied by `times`.
    pub(super) fn add(&mut self, other: &Self, times: u64) {
        // The number of micro steps is not bounded, so the sums saturate.
        let add = |sum: &mut u64, amount: u64| *sum = sum.saturating_add(amount.saturating_mul(times));
        for (kind, o) in &other.collectives {
            let c = self.collectives.entry(*kind).or_default();
            add(&mut c.calls, o.calls);
            add(&mut c.elements, o.elements);
            add(&mut c.wire_bytes, o.wire_bytes);
        }
        add(&mut self.bytes_read, other.bytes_read);
        add(&mut self.bytes_written, other.bytes_written);
    }
}
