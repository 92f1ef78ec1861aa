//! Parameters: registered by name while a model is built, initialized by name, and either whole or absent in memory.
//!
//! This module relies on three mechanisms of Candle, each used in one file: `zero/share/var_builder_backend.rs` (a
//! `VarBuilder` backend sees every parameter), `gradient_capture.rs` (an operation whose backward pass takes a
//! parameter's complete gradient) and `tensor/residency.rs` (a tensor's storage is taken out and put back while the
//! model and the graph hold the tensor).

pub(crate) mod error;
pub(crate) mod gradient_capture;
mod init;
mod model_buffer;
mod weight_file;
mod weight_files;
mod weight_source;

pub use gradient_capture::drop_gradient;
pub use model_buffer::BufferSync;
pub(crate) use model_buffer::{BufferFilter, ModelBuffer, dtype_of_buffer, has_name_of_buffer, is_dispensable};
pub use weight_file::{FileTensor, check_finite};
pub use weight_files::WeightFiles;
pub use weight_files::{FILE_OF_FOLDER, INDEX_OF_FOLDER, weight_map};
pub use weight_source::{InitialValues, WeightSource};

use crate::layout::{ExpertPlacement, ShardCut, ShardMesh};
use crate::memory::MemoryLedgerEntry;
use crate::optim::{OptimizerRole, SubGroupKey, WeightFormat};
use crate::precision::WeightPacking;
use crate::util::lock;
use candle_core::{Shape, Tensor};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// The index of a parameter in order of registration, equal on all ranks.
pub(crate) type ParamId = usize;

/// The index of a unit.
pub(crate) type UnitId = usize;

/// The root unit, which has the parameters outside all other units, and those that several units use.
pub(crate) const ROOT: UnitId = 0;

/// The part of a parameter that its tensor holds.
#[derive(Debug)]
pub(crate) enum Residency {
    /// The complete parameter.
    Whole(#[allow(dead_code, reason = "held for its Drop")] MemoryLedgerEntry),
    /// No elements. Computing with the tensor is an error. This rank's share is in a sub-group.
    Absent,
}

/// One parameter.
#[derive(Debug)]
pub(crate) struct Param {
    pub name: String,
    pub shape: Shape,
    pub numel: usize,
    /// The number of elements that must be on one rank together. An estimate sets it after the other fields.
    pub block: AtomicUsize,
    /// The ranks that hold the parameter, if it belongs to an expert and experts are divided among ranks.
    pub expert: Option<ExpertPlacement>,
    /// The storage and wire format of the weights.
    pub weights: WeightFormat,
    pub unit: UnitId,
    /// The role of the optimizer that trains the parameter, unless the parameter is frozen.
    pub role: OptimizerRole,
    /// The number of weight updates while the parameter was frozen, before its own first update.
    pub updates_before: AtomicU64,
    /// The index of the parameter group.
    pub group: usize,
    /// Whether the parameter is trained; otherwise it is frozen. The graph reads this too.
    pub trained: Arc<AtomicBool>,
    /// The model's tensor: the result of a capture operation on an empty leaf.
    pub tensor: Tensor,
    pub residency: Mutex<Residency>,
}

impl Param {
    /// Returns the same parameter for an estimate: absent, and with this weight format.
    pub fn for_estimate(&self, weights: WeightFormat) -> Self {
        Self {
            name: self.name.clone(),
            shape: self.shape.clone(),
            numel: self.numel,
            block: AtomicUsize::new(self.block.load(Ordering::Relaxed)),
            expert: self.expert,
            weights,
            unit: self.unit,
            role: self.role,
            updates_before: AtomicU64::new(self.updates_before.load(Ordering::Relaxed)),
            group: self.group,
            trained: self.trained.clone(),
            tensor: self.tensor.clone(),
            residency: Mutex::new(Residency::Absent),
        }
    }

    /// Returns the parameter's cut into shards.
    pub fn cut(&self) -> ShardCut {
        ShardCut { numel: self.numel, block: self.block.load(Ordering::Relaxed), expert: self.expert }
    }

    /// Returns the elements of a shard in the mesh of the ranks that hold the parameter.
    pub fn shard(&self, mesh: ShardMesh, shard: usize) -> Range<usize> {
        mesh.shard(self.cut(), shard)
    }

    /// Returns the number of elements of every shard, including padding.
    pub fn shard_len(&self, mesh: ShardMesh) -> usize {
        mesh.shard_len(self.cut())
    }

    /// Returns the class of the parameter, given whether it is `trained` or frozen. The class determines which states
    /// the parameter has.
    pub fn class(&self, trained: bool) -> SubGroupKey {
        SubGroupKey::new(self.role, trained, self.weights)
    }

    /// Returns the packing of the weights, if there is one. It applies only if parameters are sharded.
    pub fn packing(&self) -> Option<WeightPacking> {
        self.weights.packing()
    }

    /// Returns whether the parameter has a gradient, and is updated.
    pub fn is_trained(&self) -> bool {
        self.trained.load(Ordering::Relaxed)
    }

    /// Returns whether the tensor holds the parameter.
    pub fn is_whole(&self) -> bool {
        matches!(*lock(&self.residency), Residency::Whole(_))
    }
}
