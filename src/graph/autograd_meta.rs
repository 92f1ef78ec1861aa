//! The table that maps a tensor to its token and slot.

use super::grad_slot::{Grad, GradSlot};
use super::precomputed_op::apply_precomputed;
use crate::util::unpoisoned;
use candle_core::{Result, Shape, Storage, Tensor, TensorId};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, OnceLock, RwLock};

/// A tensor's token and slot.
#[derive(Clone)]
pub(crate) struct AutogradMeta {
    pub token: Tensor,
    pub slot: Arc<GradSlot>,
    recompute: Option<RecomputeFn>,
    /// Whether operations that are recorded now want the tensor's gradient; `None` if they always do.
    wanted: Option<Arc<AtomicBool>>,
    /// The elements whose gradient is incomplete on purpose, so that gradient checks do not perturb them.
    pub unchecked: Range<usize>,
}

/// A function that computes a tensor's values again.
type RecomputeFn = Arc<dyn Fn() -> Result<Tensor> + Send + Sync>;

impl AutogradMeta {
    pub fn new(token: Tensor, slot: Arc<GradSlot>) -> Self {
        Self { token, slot, recompute: None, wanted: None, unchecked: 0..0 }
    }

    /// Returns whether an operation that is recorded now must compute a gradient of the tensor.
    pub fn is_wanted(&self) -> bool {
        self.wanted.as_ref().is_none_or(|wanted| wanted.load(Ordering::Relaxed))
    }
}

/// The [`AutogradMeta`] of all live tensors that have one, in the entire process.
static NODES: LazyLock<RwLock<HashMap<TensorId, AutogradMeta>>> = LazyLock::new(RwLock::default);

/// Returns the node, the [`AutogradMeta`], of a tensor, if it has one.
pub(crate) fn node_of(tensor: &Tensor) -> Option<AutogradMeta> {
    unpoisoned(NODES.read()).get(&tensor.id()).cloned()
}

/// Registers a function that computes `tensor`'s values again, cheaply and bit for bit, from the data that the tensor's
/// own operation keeps for the backward pass. Operations that need the values in that pass need not keep the tensor:
/// see [`SavedTensor`].
pub(crate) fn register_recompute(tensor: &Tensor, recompute: impl Fn() -> Result<Tensor> + Send + Sync + 'static) {
    let mut nodes = unpoisoned(NODES.write());
    if let Some(node) = nodes.get_mut(&tensor.id()) {
        node.recompute = Some(Arc::new(recompute));
    }
}

/// Makes this library's operations compute a gradient of `tensor` only if `wanted` is true when they are recorded.
pub(crate) fn want_grad_while(tensor: &Tensor, wanted: Arc<AtomicBool>) {
    if let Some(node) = unpoisoned(NODES.write()).get_mut(&tensor.id()) {
        node.wanted = Some(wanted);
    }
}

/// Marks elements of `tensor` whose gradient is incomplete on purpose.
pub(crate) fn exclude_from_gradient_check(tensor: &Tensor, elements: Range<usize>) {
    if let Some(node) = unpoisoned(NODES.write()).get_mut(&tensor.id()) {
        node.unchecked = elements;
    }
}

/// The values of an input until the backward pass: the tensor, or the function that computes it again.
pub(crate) enum SavedTensor {
    Tensor(Tensor),
    Recomputed(RecomputeFn),
}

impl SavedTensor {
    pub fn of(tensor: &Tensor) -> Self {
        match node_of(tensor).and_then(|node| node.recompute) {
            Some(recompute) => Self::Recomputed(recompute),
            None => Self::Tensor(tensor.clone()),
        }
    }

    /// Returns values that `recompute` computes from data that the operation keeps anyway.
    pub fn recomputed(recompute: impl Fn() -> Result<Tensor> + Send + Sync + 'static) -> Self {
        Self::Recomputed(Arc::new(recompute))
    }

    pub fn get(&self) -> Result<Tensor> {
        match self {
            Self::Tensor(tensor) => Ok(tensor.clone()),
            Self::Recomputed(recompute) => recompute(),
        }
    }
}

/// A guard that removes a tensor's node from the table when the tensor's operation, and with it the tensor, is dropped.
struct AutogradRemovalGuard(Arc<OnceLock<TensorId>>);

impl Drop for AutogradRemovalGuard {
    fn drop(&mut self) {
        let Some(id) = self.0.get() else { return };
        let node = unpoisoned(NODES.write()).remove(id);
        // The node is dropped outside the lock, because it may hold the last reference to other tensors with nodes.
        drop(node);
    }
}

/// Creates a tensor from `value` as the result of an operation on `token`. Candle's operations on this tensor put their
/// gradient into `slot`, and this library's operations find the token and the slot by the tensor's id.
pub(crate) fn with_token(
    token: Tensor,
    slot: Arc<GradSlot>,
    name: &'static str,
    value: (Storage, Shape),
) -> Result<Tensor> {
    let id = Arc::new(OnceLock::new());
    let (entry, candle_slot) = (AutogradRemovalGuard(id.clone()), slot.clone());
    let tensor = apply_precomputed(name, &token, value, move |token, grad| {
        let _ = &entry;
        candle_slot.add(Grad::Shared(grad.clone()))?;
        Ok(Some(token.detach()))
    })?;
    // The id is set before the entry exists, because any thread that sees the entry can remove it.
    let _ = id.set(tensor.id());
    unpoisoned(NODES.write()).insert(tensor.id(), AutogradMeta::new(token, slot));
    Ok(tensor)
}
