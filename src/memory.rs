//! The ledger of model-state memory: it has an entry for every allocation, by kind, from allocation to release.
//!
//! The ledger counts allocated memory (capacities of buffers), not theoretical sizes. The report shows both side by
//! side.

use crate::layout::{ShardMesh, ZeroStage};
use crate::precision::{ElementBuffer, Flat, FlatMut};
use crate::util::counted;
use candle_core::Device;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};

/// The purpose of a piece of model-state memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum MemoryKind {
    /// Parameters in the model's dtype: in full at stages 0 to 2, this rank's shards at stage 3.
    Parameters,
    /// Gradients between their backward pass and the optimizer step.
    Gradients,
    /// f32 weights behind 16-bit parameters.
    MasterWeights,
    /// The optimizer states.
    Moments,
    /// The weights after the last exchange between islands, and the momentum of the outer optimizer (`local_steps`).
    OuterStates,
    /// Small parameters that stay gathered at stage 3 (`stage3_param_persistence_threshold`).
    Persistent,
    /// Parameters gathered for use at stage 3, and pending gathers.
    Gathered,
    /// This rank's part of its group's second copy of gathered parameters (`zero_hpz_partition_size`).
    SecondCopy,
    /// Gradients that are being reduced, and updated weights that are being gathered.
    Buckets,
    /// The windows through which the optimizer step moves state out of files and back, copies that direct file access
    /// needs, and the windows of copies between a GPU and the host.
    Staging,
    /// Inputs that recomputing units keep in a file until the backward pass.
    Activations,
    /// The memory that a rank of a pipeline keeps for micro batches whose backward pass is not complete: the inputs and
    /// outputs of its stages, and the values that the second part of a divided backward pass needs. Activations between
    /// the layers of a stage are not counted.
    StageActivations,
    /// Activations and gradients on their way between the stages of a pipeline, and those that wait for their turn: a
    /// sent message until this rank knows that it has been sent, a received one until the stage has used it, and the
    /// parts of a tied weight's gradient until all of them have arrived.
    StageMessages,
    /// The original values of parameters that a gradient check perturbs for a forward pass.
    GradientCheck,
    /// Tensors of the model that are not parameters (running statistics, position ids), in full on every rank.
    Buffers,
}

/// The location of a piece of model-state memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum MemoryTier {
    /// The memory of the GPU that runs the model.
    Device,
    /// The host's memory.
    Host,
    /// Page-locked memory of the host, through which copies between the host and the GPU pass.
    Pinned,
    /// Space reserved in files.
    File,
    /// The part of files that is currently mapped into memory.
    Mapped,
}

impl MemoryKind {
    /// All kinds.
    pub(crate) const ALL: [Self; 15] = [
        Self::Parameters,
        Self::Gradients,
        Self::MasterWeights,
        Self::Moments,
        Self::OuterStates,
        Self::Persistent,
        Self::Gathered,
        Self::SecondCopy,
        Self::Buckets,
        Self::Staging,
        Self::Activations,
        Self::StageActivations,
        Self::StageMessages,
        Self::GradientCheck,
        Self::Buffers,
    ];

    /// Returns the name used in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Parameters => "parameters",
            Self::Gradients => "gradients",
            Self::MasterWeights => "master weights",
            Self::Moments => "moments",
            Self::OuterStates => "outer states",
            Self::Persistent => "persistent",
            Self::Gathered => "gathered",
            Self::SecondCopy => "second copy",
            Self::Buckets => "buckets",
            Self::Staging => "staging",
            Self::Activations => "activations",
            Self::StageActivations => "stage activations",
            Self::StageMessages => "stage messages",
            Self::GradientCheck => "gradient check",
            Self::Buffers => "buffers",
        }
    }
}

/// The bytes of one kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct HeldBytes {
    /// The bytes held now.
    pub held: usize,
    /// The maximum number of bytes held at any time.
    pub peak: usize,
}

/// A ledger that counts allocations by kind and tier.
#[derive(Debug, Clone, Default)]
pub(crate) struct MemoryLedger(Arc<Mutex<LedgerTotals>>);

#[derive(Debug, Default)]
struct LedgerTotals {
    tiers: BTreeMap<(MemoryKind, MemoryTier), HeldBytes>,
    /// The bytes of device and host together, including page-locked memory. They are counted separately, because the
    /// peaks of the tiers need not coincide.
    memory: BTreeMap<MemoryKind, HeldBytes>,
}

/// One allocation in the ledger. It is dropped together with the memory that it represents.
#[derive(Debug)]
pub(crate) struct MemoryLedgerEntry {
    ledger: MemoryLedger,
    tier: MemoryTier,
    kind: MemoryKind,
    bytes: usize,
}

impl MemoryLedger {
    /// Records `bytes` of `kind`, held in the host's memory, until the result is dropped.
    #[must_use]
    pub fn hold(&self, kind: MemoryKind, bytes: usize) -> MemoryLedgerEntry {
        self.hold_in(MemoryTier::Host, kind, bytes)
    }

    /// Records `bytes` of `kind`, held in `tier`, until the result is dropped.
    #[must_use]
    pub fn hold_in(&self, tier: MemoryTier, kind: MemoryKind, bytes: usize) -> MemoryLedgerEntry {
        self.change(tier, kind, 0, bytes);
        MemoryLedgerEntry { ledger: self.clone(), tier, kind, bytes }
    }

    /// Returns the held and peak bytes of `kind` in memory: device and host together, including page-locked memory.
    pub fn bytes(&self, kind: MemoryKind) -> HeldBytes {
        self.lock().memory.get(&kind).copied().unwrap_or_default()
    }

    /// Returns the held and peak bytes of `kind` in `tier`.
    pub fn bytes_in(&self, tier: MemoryTier, kind: MemoryKind) -> HeldBytes {
        self.lock().tiers.get(&(kind, tier)).copied().unwrap_or_default()
    }

    /// Returns the kinds that occupy bytes in `tier`, with their bytes.
    pub fn held_in(&self, tier: MemoryTier) -> Vec<(MemoryKind, usize)> {
        let entries = self.lock();
        let entries_in_tier = entries.tiers.iter().filter(|((_, t), bytes)| *t == tier && bytes.held > 0);
        entries_in_tier.map(|((kind, _), bytes)| (*kind, bytes.held)).collect()
    }

    fn change(&self, tier: MemoryTier, kind: MemoryKind, from: usize, to: usize) {
        let mut entries = self.lock();
        entries.tiers.entry((kind, tier)).or_default().change(from, to);
        if matches!(tier, MemoryTier::Device | MemoryTier::Host | MemoryTier::Pinned) {
            entries.memory.entry(kind).or_default().change(from, to);
        }
    }

    fn lock(&self) -> MutexGuard<'_, LedgerTotals> {
        crate::util::lock(&self.0)
    }
}

impl HeldBytes {
    fn change(&mut self, from: usize, to: usize) {
        self.held = self.held - from + to;
        self.peak = self.peak.max(self.held);
    }
}

impl MemoryTier {
    /// Returns the tier of tensors on `device`.
    pub fn of(device: &Device) -> Self {
        if device.is_cpu() { Self::Host } else { Self::Device }
    }

    /// Returns the tier of buffers at `location`.
    pub(crate) fn at<B: ElementBuffer>(location: &B::Location) -> Self {
        if B::is_device(location) { Self::Device } else { Self::Host }
    }
}

impl MemoryLedgerEntry {
    /// Returns the size in bytes of the allocation.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Records that the size of the allocation is now `bytes` bytes.
    pub fn resize(&mut self, bytes: usize) {
        self.ledger.change(self.tier, self.kind, self.bytes, bytes);
        self.bytes = bytes;
    }
}

impl Drop for MemoryLedgerEntry {
    fn drop(&mut self) {
        self.ledger.change(self.tier, self.kind, self.bytes, 0);
    }
}

/// One line of the report: the bytes held of one kind, alongside the bytes that the ZeRO formula gives.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct MemoryRow {
    /// The purpose of the memory.
    pub kind: MemoryKind,
    /// The bytes in memory now, and the maximum: device and host together, including page-locked memory.
    #[serde(flatten)]
    pub bytes: HeldBytes,
    /// The bytes in the GPU's memory.
    pub device: HeldBytes,
    /// The bytes in the host's memory, without `pinned`.
    pub host: HeldBytes,
    /// The bytes in page-locked memory of the host.
    pub pinned: HeldBytes,
    /// The bytes reserved in files.
    pub file: HeldBytes,
    /// The bytes of files that are mapped into memory, in addition to `bytes`.
    pub mapped: HeldBytes,
    /// The bytes that the formula gives (ZeRO, arXiv 1910.02054, section 5), if it covers this kind: memory and files
    /// together.
    pub formula: Option<f64>,
    /// The bytes of padding in the shards: the size of this rank's shards with padding, minus the formula.
    pub padding: f64,
}

/// The model-state memory of one rank.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct MemoryReport {
    /// `zero_optimization.stage`.
    pub stage: u8,
    /// The number of ranks.
    pub world_size: usize,
    /// The number of ranks that hold the same shard: more than 1 with `mics_shard_size`.
    pub copies: usize,
    /// The number of elements of the entire model (Psi), including frozen ones.
    pub parameters: usize,
    /// The number of elements of frozen parameters, which have only weights.
    pub frozen: usize,
    /// One row per kind.
    pub rows: Vec<MemoryRow>,
}

/// The bytes of one kind of state: of the entire model, and of this rank's part if it is sharded, including padding.
/// Experts that are divided among ranks count separately.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct StateBytes {
    pub full: usize,
    /// The bytes of the experts that this rank holds, which are sharded only among the ranks that hold them.
    pub experts: usize,
    pub shard: usize,
}

/// The bytes of each kind of state, from which the formula is computed.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ModelBytes {
    pub params: StateBytes,
    pub grads: StateBytes,
    pub master: StateBytes,
    pub moments: StateBytes,
    /// The moments that every rank has in full.
    pub factored: usize,
    pub outer: StateBytes,
}

impl MemoryReport {
    /// Compares the ledger with the formula. `holders` is the number of ranks that hold the same experts.
    pub(crate) fn new(
        ledger: &MemoryLedger,
        stage: ZeroStage,
        (mesh, holders): (ShardMesh, usize),
        (parameters, frozen): (usize, usize),
        bytes: ModelBytes,
    ) -> Self {
        let placement = stage.placement();
        let plain_row = |kind| MemoryRow {
            kind,
            bytes: ledger.bytes(kind),
            device: ledger.bytes_in(MemoryTier::Device, kind),
            host: ledger.bytes_in(MemoryTier::Host, kind),
            pinned: ledger.bytes_in(MemoryTier::Pinned, kind),
            file: ledger.bytes_in(MemoryTier::File, kind),
            mapped: ledger.bytes_in(MemoryTier::Mapped, kind),
            formula: None,
            padding: 0.0,
        };
        let row = |kind, StateBytes { full, shard, experts }: StateBytes, sharded: bool| {
            let divisor = |ranks: usize| if sharded { ranks as f64 } else { 1.0 };
            let exact = full as f64 / divisor(mesh.shards()) + experts as f64 / divisor(holders);
            let padding = if sharded { shard as f64 - exact } else { 0.0 };
            MemoryRow { formula: Some(exact), padding, ..plain_row(kind) }
        };
        let moments = row(MemoryKind::Moments, bytes.moments, placement.optim.is_sharded());
        let mut rows = vec![
            row(MemoryKind::Parameters, bytes.params, placement.params.is_sharded()),
            row(MemoryKind::Gradients, bytes.grads, placement.grads.is_sharded()),
            row(MemoryKind::MasterWeights, bytes.master, placement.optim.is_sharded()),
            MemoryRow { formula: moments.formula.map(|sharded| sharded + bytes.factored as f64), ..moments },
            plain_row(MemoryKind::Persistent),
            plain_row(MemoryKind::Gathered),
            plain_row(MemoryKind::SecondCopy),
            plain_row(MemoryKind::Buckets),
            plain_row(MemoryKind::Staging),
            plain_row(MemoryKind::Activations),
            plain_row(MemoryKind::GradientCheck),
            plain_row(MemoryKind::Buffers),
        ];
        let index_after = |kind, rows: &[MemoryRow]| 1 + rows.iter().position(|row| row.kind == kind).unwrap_or(0);
        if bytes.outer.shard > 0 {
            let outer = row(MemoryKind::OuterStates, bytes.outer, placement.optim.is_sharded());
            rows.insert(index_after(MemoryKind::Moments, &rows), outer);
        }
        let stage_rows = [MemoryKind::StageMessages, MemoryKind::StageActivations].map(plain_row);
        for row in stage_rows.into_iter().filter(|row| row.bytes.peak > 0) {
            rows.insert(index_after(MemoryKind::Activations, &rows), row);
        }
        let (world_size, copies) = (mesh.world_size(), mesh.copies());
        Self { stage: stage.number(), world_size, copies, parameters, frozen, rows }
    }

    /// Returns the row of `kind`.
    ///
    /// # Panics
    /// Panics if there is no such row. [`MemoryKind::OuterStates`] has a row only with local steps, and
    /// [`MemoryKind::StageActivations`] and [`MemoryKind::StageMessages`] only after a batch of a pipeline.
    pub fn row(&self, kind: MemoryKind) -> &MemoryRow {
        self.rows.iter().find(|r| r.kind == kind).expect("a report has a row for this kind")
    }

    /// Returns the sum of the peak bytes of the kinds that the formula covers.
    pub fn model_state_peak(&self) -> usize {
        self.rows.iter().filter(|r| r.formula.is_some()).map(|r| r.bytes.peak).sum()
    }
}

impl fmt::Display for MemoryReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (psi, stage, world) = (self.parameters, self.stage, self.world_size);
        let frozen = if self.frozen == 0 { String::new() } else { format!(", {} of them frozen,", self.frozen) };
        let groups = if self.copies == 1 { String::new() } else { format!(" in groups of {}", world / self.copies) };
        writeln!(
            f,
            "{}{frozen} at stage {stage} on {}{groups}; bytes of this rank:",
            counted(psi, "parameter"),
            counted(world, "rank")
        )?;
        let width = self.rows.iter().map(|row| row.kind.name().len()).fold(15, usize::max);
        write!(f, "{:<width$} {:>14} {:>14} {:>14}", "kind", "device", "host", "pinned")?;
        write!(f, " {:>14} {:>14}", "peak in memory", "files")?;
        write!(f, " {:>16} {:>12}", "formula", "padding")?;
        for row in &self.rows {
            let formula = row.formula.map_or("-".into(), |b| format!("{b:.0}"));
            let (device, host, pinned) = (row.device.held, row.host.held, row.pinned.held);
            let (peak, file, padding) = (row.bytes.peak, row.file.held, row.padding);
            write!(f, "\n{:<width$} {device:>14} {host:>14} {pinned:>14} {peak:>14} {file:>14}", row.kind.name())?;
            write!(f, " {formula:>16} {padding:>12.0}")?;
        }
        Ok(())
    }
}

/// A buffer with its entry in the ledger.
#[derive(Debug)]
pub(crate) struct TrackedBuffer<B = Flat> {
    flat: B,
    entry: MemoryLedgerEntry,
}

impl<B: ElementBuffer> TrackedBuffer<B> {
    pub fn new(ledger: &MemoryLedger, kind: MemoryKind, flat: B) -> Self {
        let entry = ledger.hold_in(MemoryTier::at::<B>(&flat.location()), kind, flat.capacity_in_bytes());
        Self { flat, entry }
    }

    /// Calls `grow` to change the buffer's size, and records the new size in the ledger.
    ///
    /// # Errors
    /// Returns the error of `grow`.
    pub fn resize<E>(&mut self, grow: impl FnOnce(&mut B) -> Result<(), E>) -> Result<(), E> {
        let result = grow(&mut self.flat);
        self.entry.resize(self.flat.capacity_in_bytes());
        result
    }

    /// Returns the same buffer in a GPU's memory, or on the host. If the buffer must move, it exists in both for a
    /// short time.
    ///
    /// # Errors
    /// Returns an error if the allocation or the copy fails.
    pub fn move_to(self, ledger: &MemoryLedger, location: &B::Location) -> crate::error::Result<Self> {
        if B::is_device(location) == B::is_device(&self.flat.location()) {
            return Ok(self);
        }
        let kind = self.entry.kind;
        let moving = self.entry;
        let moved = Self::new(ledger, kind, self.flat.move_to(location)?);
        drop(moving);
        Ok(moved)
    }

    /// Converts the buffer with `change`, which must keep its size.
    pub fn try_map<C, E>(self, change: impl FnOnce(B) -> Result<C, E>) -> Result<TrackedBuffer<C>, E> {
        Ok(TrackedBuffer { flat: change(self.flat)?, entry: self.entry })
    }

    /// Converts the buffer into another type that uses the same memory.
    pub fn map<C>(self, change: impl FnOnce(B) -> C) -> TrackedBuffer<C> {
        TrackedBuffer { flat: change(self.flat), entry: self.entry }
    }

    /// Removes the buffer from the ledger and returns it.
    pub fn into_buffer(self) -> B {
        self.flat
    }

    pub fn buffer(&self) -> &B {
        &self.flat
    }

    pub fn buffer_mut(&mut self) -> &mut B {
        &mut self.flat
    }
}

impl TrackedBuffer {
    /// Returns the raw bytes for writing.
    pub fn as_bytes_mut(&mut self) -> &mut [u8] {
        self.flat.as_bytes_mut()
    }

    pub fn slice_mut(&mut self, range: Range<usize>) -> FlatMut<'_> {
        self.flat.slice_mut(range)
    }
}
