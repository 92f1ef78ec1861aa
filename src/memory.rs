//! The ledger of model-state memory: every allocation is held in it by kind, from allocation to release.
//!
//! The ledger counts what is allocated (capacities of buffers), not what arithmetic says should be. The report puts
//! both side by side.

use crate::layout::ZeroStage;
use crate::precision::{Flat, FlatMut, FlatRef};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};

/// What a piece of model-state memory is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
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
    /// Gradients on their way through a reduction, and updated weights on their way through a gather.
    Buckets,
}

impl Kind {
    /// Name as in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Parameters => "parameters",
            Self::Gradients => "gradients",
            Self::MasterWeights => "master weights",
            Self::Moments => "moments",
            Self::Persistent => "persistent",
            Self::Gathered => "gathered",
            Self::Buckets => "buckets",
        }
    }
}

/// Bytes of one kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Bytes {
    /// Held now.
    pub held: usize,
    /// Most held at any time.
    pub peak: usize,
}

/// Counts allocations by kind.
#[derive(Debug, Clone, Default)]
pub struct Ledger(Arc<Mutex<BTreeMap<Kind, Bytes>>>);

/// One allocation in the ledger; dropped together with the memory that it stands for.
#[derive(Debug)]
pub struct Held {
    ledger: Ledger,
    kind: Kind,
    bytes: usize,
}

impl Ledger {
    /// Enters `bytes` of `kind` until the result is dropped.
    #[must_use]
    pub fn hold(&self, kind: Kind, bytes: usize) -> Held {
        self.change(kind, 0, bytes);
        Held { ledger: self.clone(), kind, bytes }
    }

    /// Held and peak bytes of `kind`.
    pub fn bytes(&self, kind: Kind) -> Bytes {
        self.lock().get(&kind).copied().unwrap_or_default()
    }

    fn change(&self, kind: Kind, from: usize, to: usize) {
        let mut kinds = self.lock();
        let b = kinds.entry(kind).or_default();
        b.held = b.held - from + to;
        b.peak = b.peak.max(b.held);
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Kind, Bytes>> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl Held {
    /// The allocation has now `bytes` bytes.
    pub fn resize(&mut self, bytes: usize) {
        self.ledger.change(self.kind, self.bytes, bytes);
        self.bytes = bytes;
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.ledger.change(self.kind, self.bytes, 0);
    }
}

/// One line of the report: what is held of a kind beside what the ZeRO formula says.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct MemoryRow {
    /// What for.
    pub kind: Kind,
    /// Bytes held now, and at most.
    #[serde(flatten)]
    pub bytes: Bytes,
    /// Bytes by the formula (ZeRO, arXiv 1910.02054, section 5), where it says something.
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
    /// Trainable elements of the whole model (Psi).
    pub parameters: usize,
    /// One row per kind.
    pub rows: Vec<MemoryRow>,
}

/// Bytes per element of each state, from which the formula is made.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ElementBytes {
    pub params: usize,
    pub grads: usize,
    pub master: usize,
    pub moments: usize,
}

impl MemoryReport {
    /// Puts the ledger beside the formula. `share` is the number of elements of a rank's shares, padding included.
    pub(crate) fn new(
        ledger: &Ledger,
        stage: ZeroStage,
        world_size: usize,
        parameters: usize,
        share: usize,
        each: ElementBytes,
    ) -> Self {
        let placement = stage.placement();
        let row = |kind, size: usize, sharded: bool| {
            let exact = parameters as f64 / if sharded { world_size as f64 } else { 1.0 };
            let padding = if sharded { share as f64 - exact } else { 0.0 };
            let size = size as f64;
            MemoryRow { kind, bytes: ledger.bytes(kind), formula: Some(exact * size), padding: padding * size }
        };
        let free = |kind| MemoryRow { kind, bytes: ledger.bytes(kind), formula: None, padding: 0.0 };
        let rows = vec![
            row(Kind::Parameters, each.params, placement.params.is_sharded()),
            row(Kind::Gradients, each.grads, placement.grads.is_sharded()),
            row(Kind::MasterWeights, each.master, placement.optim.is_sharded()),
            row(Kind::Moments, each.moments, placement.optim.is_sharded()),
            free(Kind::Persistent),
            free(Kind::Gathered),
            free(Kind::Buckets),
        ];
        Self { stage: stage.number(), world_size, parameters, rows }
    }

    /// The row of `kind`.
    pub fn row(&self, kind: Kind) -> &MemoryRow {
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
        writeln!(f, "{psi} parameters at stage {stage} on {world} ranks; bytes of this rank:")?;
        writeln!(f, "{:<15} {:>14} {:>14} {:>16} {:>12}", "kind", "held", "peak", "formula", "padding")?;
        for (i, row) in self.rows.iter().enumerate() {
            let formula = row.formula.map_or("-".into(), |b| format!("{b:.0}"));
            let (held, peak, padding) = (row.bytes.held, row.bytes.peak, row.padding);
            let end = if i + 1 == self.rows.len() { "" } else { "\n" };
            write!(f, "{:<15} {held:>14} {peak:>14} {formula:>16} {padding:>12.0}{end}", row.kind.name())?;
        }
        Ok(())
    }
}

/// A buffer with its entry in the ledger.
#[derive(Debug)]
pub(crate) struct Tracked {
    flat: Flat,
    held: Held,
}

impl Tracked {
    pub fn new(ledger: &Ledger, kind: Kind, flat: Flat) -> Self {
        let held = ledger.hold(kind, flat.capacity_in_bytes());
        Self { flat, held }
    }

    /// Lets `grow` change the buffer's size, and accounts for it.
    pub fn resize(&mut self, grow: impl FnOnce(&mut Flat)) {
        grow(&mut self.flat);
        self.held.resize(self.flat.capacity_in_bytes());
    }

    pub fn slice(&self, range: Range<usize>) -> FlatRef<'_> {
        self.flat.slice(range)
    }

    pub fn slice_mut(&mut self, range: Range<usize>) -> FlatMut<'_> {
        self.flat.slice_mut(range)
    }
}
