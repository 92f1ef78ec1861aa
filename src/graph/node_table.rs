//! Tensors with a token: the table that leads from a tensor to its token and slot.

use super::grad_slot::{Grad, GradSlot};
use super::prepared_op::prepared;
use crate::util::unpoisoned;
use candle_core::{Result, Shape, Storage, Tensor, TensorId};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, OnceLock, RwLock};

/// A tensor's token and slot.
#[derive(Clone)]
pub(crate) struct GraphNode {
    pub token: Tensor,
    pub slot: Arc<GradSlot>,
    remake: Option<RecomputeFn>,
    /// Where it says no, operations made now do not want the tensor's gradient.
    wanted: Option<Arc<AtomicBool>>,
    /// Elements whose gradient leaves out something on purpose, so that no check of gradients moves them.
    pub still: Range<usize>,
}

/// Computes a tensor's values once more.
type RecomputeFn = Arc<dyn Fn() -> Result<Tensor> + Send + Sync>;

impl GraphNode {
    pub fn new(token: Tensor, slot: Arc<GradSlot>) -> Self {
        Self { token, slot, remake: None, wanted: None, still: 0..0 }
    }

    /// Whether an operation that is made now has to give the tensor a gradient.
    pub fn is_wanted(&self) -> bool {
        self.wanted.as_ref().is_none_or(|wanted| wanted.load(Ordering::Relaxed))
    }
}

/// The nodes of all tensors that have one and are alive, in the whole process.
static NODES: LazyLock<RwLock<HashMap<TensorId, GraphNode>>> = LazyLock::new(RwLock::default);

/// The node of a tensor that has one.
pub(crate) fn node_of(tensor: &Tensor) -> Option<GraphNode> {
    unpoisoned(NODES.read()).get(&tensor.id()).cloned()
}

/// Says how `tensor`'s values can be computed once more, cheaply and to the same bits, from what its own operation
/// keeps for backward. Operations that need them in backward then need not keep the tensor; see [`SavedTensor`].
pub(crate) fn can_remake(tensor: &Tensor, remake: impl Fn() -> Result<Tensor> + Send + Sync + 'static) {
    let mut nodes = unpoisoned(NODES.write());
    if let Some(node) = nodes.get_mut(&tensor.id()) {
        node.remake = Some(Arc::new(remake));
    }
}

/// This library's operations give `tensor` a gradient only where `wanted` says so when they are made.
pub(crate) fn only_while(tensor: &Tensor, wanted: Arc<AtomicBool>) {
    if let Some(node) = unpoisoned(NODES.write()).get_mut(&tensor.id()) {
        node.wanted = Some(wanted);
    }
}

/// The gradient of these elements of `tensor` leaves out something on purpose.
pub(crate) fn hold_still(tensor: &Tensor, elements: Range<usize>) {
    if let Some(node) = unpoisoned(NODES.write()).get_mut(&tensor.id()) {
        node.still = elements;
    }
}

/// The values of an input until backward: the tensor, or the way to make it once more.
pub(crate) enum SavedTensor {
    Tensor(Tensor),
    Remade(RecomputeFn),
}

impl SavedTensor {
    pub fn of(tensor: &Tensor) -> Self {
        match node_of(tensor).and_then(|node| node.remake) {
            Some(remake) => Self::Remade(remake),
            None => Self::Tensor(tensor.clone()),
        }
    }

    pub fn get(&self) -> Result<Tensor> {
        match self {
            Self::Tensor(tensor) => Ok(tensor.clone()),
            Self::Remade(remake) => remake(),
        }
    }
}

/// Takes a tensor's node out of the table when the tensor's operation, and so the tensor, is dropped.
struct NodeTableEntry(Arc<OnceLock<TensorId>>);

impl Drop for NodeTableEntry {
    fn drop(&mut self) {
        let Some(id) = self.0.get() else { return };
        let node = unpoisoned(NODES.write()).remove(id);
        // Dropped outside of the lock: it may be the last hold on other tensors with nodes.
        drop(node);
    }
}

/// The tensor that `value` makes, as the result of `token`'s operation: Candle's operations on it put their gradient
/// into `slot`, and this library's find token and slot by the tensor.
pub(crate) fn with_token(
    token: Tensor,
    slot: Arc<GradSlot>,
    name: &'static str,
    value: (Storage, Shape),
) -> Result<Tensor> {
    let id = Arc::new(OnceLock::new());
    let (entry, of_candle) = (NodeTableEntry(id.clone()), slot.clone());
    let tensor = prepared(name, &token, value, move |token, grad| {
        let _ = &entry;
        of_candle.add(Grad::Shared(grad.clone()))?;
        Ok(Some(token.detach()))
    })?;
    // Set before the entry exists: whoever sees the entry can remove it.
    let _ = id.set(tensor.id());
    unpoisoned(NODES.write()).insert(tensor.id(), GraphNode::new(token, slot));
    Ok(tensor)
}
