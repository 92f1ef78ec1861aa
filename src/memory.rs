//! The ledger of model-state memory: every allocation is held in it by kind, from allocation to release.
//!
//! The ledger counts what is allocated (capacities of buffers), not what arithmetic says should be. The report puts
//! both side by side.

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
pub enum MemoryKind {
    /// Parameters in the model's dtype: whole at stages 0 to 2, this rank's shares at stage 3.
    Parameters,
    /// Gradients between their backward and the optimizer step.
    Gradients,
    /// f32 weights behind 16-bit parameters.
    MasterWeights,
    /// The optimizer's states.
    Moments,
    /// Small parameters that stay gathered at stage 3 (`stage3_param_persistence_threshold`).
    Persistent,
    /// Parameters gathered for use at stage 3, and gathers under way.
    Gathered,
    /// This rank's part of its group's second copy of gathered parameters (`zero_hpz_partition_size`).
    SecondCopy,
    /// Gradients on their way through a reduction, and updated weights on their way through a gather.
    Buckets,
    /// Windows of the optimizer step, between files and the update, copies that direct access to files needs, and the windows
    /// through which copies between a GPU and the host pass.
    Staging,
    /// Inputs that recomputing units keep in a file until backward.
    Activations,
    /// Values of parameters that are moved for a forward of a check of gradients, until they are put back.
    GradientCheck,
    /// Tensors of the model that are no parameters (running statistics, position ids), whole on every rank.
    Buffers,
}

/// Where a piece of model-state memory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum MemoryTier {
    /// Memory of the GPU that the model computes on.
    Device,
    /// Memory of the host.
    Host,
    /// Page-locked memory of the host, through which copies between it and the GPU pass.
    Pinned,
    /// Space reserved in files.
    File,
    /// The part of files that is mapped into memory at the moment.
    Mapped,
}

impl MemoryKind {
    /// Name as in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Parameters => "parameters",
            Self::Gradients => "gradients",
            Self::MasterWeights => "master weights",
            Self::Moments => "moments",
            Self::Persistent => "persistent",
            Self::Gathered => "gathered",
            Self::SecondCopy => "second copy",
            Self::Buckets => "buckets",
            Self::Staging => "staging",
            Self::Activations => "activations",
            Self::GradientCheck => "gradient check",
            Self::Buffers => "buffers",
        }
    }
}

/// Bytes of one kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct HeldBytes {
    /// Held now.
    pub held: usize,
    /// Most held at any time.
    pub peak: usize,
}

/// Counts allocations by kind and tier.
#[derive(Debug, Clone, Default)]
pub(crate) struct Ledger(Arc<Mutex<LedgerEntries>>);

#[derive(Debug, Default)]
struct LedgerEntries {
    tiers: BTreeMap<(MemoryKind, MemoryTier), HeldBytes>,
    /// Device and host together, page-locked or not: their peaks need not be at the same time.
    memory: BTreeMap<MemoryKind, HeldBytes>,
}

/// One allocation in the ledger; dropped together with the memory that it stands for.
#[derive(Debug)]
pub(crate) struct LedgerEntry {
    ledger: Ledger,
    tier: MemoryTier,
    kind: MemoryKind,
    bytes: usize,
}

impl Ledger {
    /// Enters `bytes` of `kind` in the host's memory until the result is dropped.
    #[must_use]
    pub fn hold(&self, kind: MemoryKind, bytes: usize) -> LedgerEntry {
        self.hold_in(MemoryTier::Host, kind, bytes)
    }

    /// Enters `bytes` of `kind` in `tier` until the result is dropped.
    #[must_use]
    pub fn hold_in(&self, tier: MemoryTier, kind: MemoryKind, bytes: usize) -> LedgerEntry {
        self.change(tier, kind, 0, bytes);
        LedgerEntry { ledger: self.clone(), tier, kind, bytes }
    }

    /// Held and peak bytes of `kind` in memory, device and host together, page-locked or not.
    pub fn bytes(&self, kind: MemoryKind) -> HeldBytes {
        self.lock().memory.get(&kind).copied().unwrap_or_default()
    }

    /// Held and peak bytes of `kind` in `tier`.
    pub fn bytes_in(&self, tier: MemoryTier, kind: MemoryKind) -> HeldBytes {
        self.lock().tiers.get(&(kind, tier)).copied().unwrap_or_default()
    }

    /// The kinds of which `tier` holds something, with their bytes.
    pub fn held_in(&self, tier: MemoryTier) -> Vec<(MemoryKind, usize)> {
        let entries = self.lock();
        let here = entries.tiers.iter().filter(|((_, t), bytes)| *t == tier && bytes.held > 0);
        here.map(|((kind, _), bytes)| (*kind, bytes.held)).collect()
    }

    fn change(&self, tier: MemoryTier, kind: MemoryKind, from: usize, to: usize) {
        let mut entries = self.lock();
        entries.tiers.entry((kind, tier)).or_default().change(from, to);
        if matches!(tier, MemoryTier::Device | MemoryTier::Host | MemoryTier::Pinned) {
            entries.memory.entry(kind).or_default().change(from, to);
        }
    }

    fn lock(&self) -> MutexGuard<'_, LedgerEntries> {
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
    /// Where tensors of `device` are.
    pub fn of(device: &Device) -> Self {
        if device.is_cpu() { Self::Host } else { Self::Device }
    }

    /// Where buffers of a place are.
    pub(crate) fn at<B: ElementBuffer>(place: &B::Place) -> Self {
        if B::is_device(place) { Self::Device } else { Self::Host }
    }
}

impl LedgerEntry {
    /// Its bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The allocation has now `bytes` bytes.
    pub fn resize(&mut self, bytes: usize) {
        self.ledger.change(self.tier, self.kind, self.bytes, bytes);
        self.bytes = bytes;
    }
}

impl Drop for LedgerEntry {
    fn drop(&mut self) {
        self.ledger.change(self.tier, self.kind, self.bytes, 0);
    }
}

/// One line of the report: what is held of a kind beside what the ZeRO formula says.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct MemoryRow {
    /// Its purpose.
    pub kind: MemoryKind,
    /// Bytes in memory now, and at most: device and host together, page-locked or not.
    #[serde(flatten)]
    pub bytes: HeldBytes,
    /// Bytes in the memory of the GPU.
    pub device: HeldBytes,
    /// Bytes in the host's memory, without `pinned`.
    pub host: HeldBytes,
    /// Bytes in page-locked memory of the host.
    pub pinned: HeldBytes,
    /// Bytes reserved in files.
    pub file: HeldBytes,
    /// Bytes of files that are mapped into memory, besides `bytes`.
    pub mapped: HeldBytes,
    /// Bytes by the formula (ZeRO, arXiv 1910.02054, section 5), where it says something: memory and files together.
    pub formula: Option<f64>,
    /// Bytes of padding in the shards, the difference between the formula and what is allocated.
    pub padding: f64,
}

/// Model-state memory of one rank.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct MemoryReport {
    /// `zero_optimization.stage`.
    pub stage: u8,
    /// Number of ranks.
    pub world_size: usize,
    /// Ranks that hold the same shard: more than 1 with `mics_shard_size`.
    pub copies: usize,
    /// Elements of the whole model (Psi), frozen ones included.
    pub parameters: usize,
    /// Elements of frozen parameters, of which there are weights alone.
    pub frozen: usize,
    /// One row per kind.
    pub rows: Vec<MemoryRow>,
}

/// Bytes of one kind of state: of the whole model, and of this rank's part of it where it is sharded, padding included.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct StateBytes {
    pub whole: usize,
    pub own: usize,
}

/// Bytes of each kind of state, from which the formula is made.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ModelBytes {
    pub params: StateBytes,
    pub grads: StateBytes,
    pub master: StateBytes,
    pub moments: StateBytes,
}

impl MemoryReport {
    /// Puts the ledger beside the formula.
    pub(crate) fn new(
        ledger: &Ledger,
        stage: ZeroStage,
        mesh: ShardMesh,
        (parameters, frozen): (usize, usize),
        bytes: ModelBytes,
    ) -> Self {
        let placement = stage.placement();
        let free = |kind| MemoryRow {
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
        let row = |kind, StateBytes { whole, own }: StateBytes, sharded: bool| {
            let exact = whole as f64 / if sharded { mesh.shards() as f64 } else { 1.0 };
            let padding = if sharded { own as f64 - exact } else { 0.0 };
            MemoryRow { formula: Some(exact), padding, ..free(kind) }
        };
        let rows = vec![
            row(MemoryKind::Parameters, bytes.params, placement.params.is_sharded()),
            row(MemoryKind::Gradients, bytes.grads, placement.grads.is_sharded()),
            row(MemoryKind::MasterWeights, bytes.master, placement.optim.is_sharded()),
            row(MemoryKind::Moments, bytes.moments, placement.optim.is_sharded()),
            free(MemoryKind::Persistent),
            free(MemoryKind::Gathered),
            free(MemoryKind::SecondCopy),
            free(MemoryKind::Buckets),
            free(MemoryKind::Staging),
            free(MemoryKind::Activations),
            free(MemoryKind::GradientCheck),
            free(MemoryKind::Buffers),
        ];
        let (world_size, copies) = (mesh.world_size(), mesh.copies());
        Self { stage: stage.number(), world_size, copies, parameters, frozen, rows }
    }

    /// The row of `kind`.
    pub fn row(&self, kind: MemoryKind) -> &MemoryRow {
        self.rows.iter().find(|r| r.kind == kind).expect("a report has a row of every kind")
    }

    /// Peak bytes of the kinds that the formula speaks of.
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
            "{psi} parameters{frozen} at stage {stage} on {}{groups}; bytes of this rank:",
            counted(world, "rank")
        )?;
        write!(f, "{:<15} {:>14} {:>14} {:>14}", "kind", "device", "host", "pinned")?;
        write!(f, " {:>14} {:>14}", "peak in memory", "files")?;
        write!(f, " {:>16} {:>12}", "formula", "padding")?;
        for row in &self.rows {
            let formula = row.formula.map_or("-".into(), |b| format!("{b:.0}"));
            let (device, host, pinned) = (row.device.held, row.host.held, row.pinned.held);
            let (peak, file, padding) = (row.bytes.peak, row.file.held, row.padding);
            write!(f, "\n{:<15} {device:>14} {host:>14} {pinned:>14} {peak:>14} {file:>14}", row.kind.name())?;
            write!(f, " {formula:>16} {padding:>12.0}")?;
        }
        Ok(())
    }
}

/// A buffer with its entry in the ledger.
#[derive(Debug)]
pub(crate) struct TrackedBuffer<B = Flat> {
    flat: B,
    held: LedgerEntry,
}

impl<B: ElementBuffer> TrackedBuffer<B> {
    pub fn new(ledger: &Ledger, kind: MemoryKind, flat: B) -> Self {
        let held = ledger.hold_in(MemoryTier::at::<B>(&flat.place()), kind, flat.capacity_in_bytes());
        Self { flat, held }
    }

    /// Lets `grow` change the buffer's size, and accounts for it.
    ///
    /// # Errors
    /// That of `grow`.
    pub fn resize<E>(&mut self, grow: impl FnOnce(&mut B) -> Result<(), E>) -> Result<(), E> {
        let grown = grow(&mut self.flat);
        self.held.resize(self.flat.capacity_in_bytes());
        grown
    }

    /// The same in a GPU's memory, or on the host. Where it has to move, it lies in both for a moment.
    ///
    /// # Errors
    /// There is no memory.
    pub fn moved_to(self, ledger: &Ledger, place: &B::Place) -> crate::error::Result<Self> {
        if B::is_device(place) == B::is_device(&self.flat.place()) {
            return Ok(self);
        }
        let kind = self.held.kind;
        let moving = self.held;
        let moved = Self::new(ledger, kind, self.flat.moved_to(place)?);
        drop(moving);
        Ok(moved)
    }

    /// Lets `change` work on the buffer, whose size stays.
    pub fn try_map<C, E>(self, change: impl FnOnce(B) -> Result<C, E>) -> Result<TrackedBuffer<C>, E> {
        Ok(TrackedBuffer { flat: change(self.flat)?, held: self.held })
    }

    /// The same memory as another type of buffer.
    pub fn map<C>(self, change: impl FnOnce(B) -> C) -> TrackedBuffer<C> {
        TrackedBuffer { flat: change(self.flat), held: self.held }
    }

    /// The buffer, out of the ledger.
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
    /// The raw bytes, writable.
    pub fn as_bytes_mut(&mut self) -> &mut [u8] {
        self.flat.as_bytes_mut()
    }

    pub fn slice_mut(&mut self, range: Range<usize>) -> FlatMut<'_> {
        self.flat.slice_mut(range)
    }
}
