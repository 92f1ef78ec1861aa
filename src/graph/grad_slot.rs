//! A gradient during a backward pass, and the slot in which the gradients of one tensor are added up.

use crate::kernels::add::add_into;
use crate::kernels::buffer;
use crate::precision::{Flat, FlatRef};
#[cfg(feature = "cuda")]
use crate::tensor::device_elements::add_in_place;
use crate::tensor::element::{TensorElement, locked};
use crate::tensor::residency::{storage_on, to_storage, with_view};
use crate::util::lock;
use candle_core::{DType, Device, Result, Shape, Tensor, op::BackpropOp};
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// The gradient of one tensor, or a part of it.
#[derive(Debug)]
pub(crate) enum Grad {
    /// The gradient is not shared: it may be changed in place.
    Own(Flat),
    /// A gradient in a GPU's memory that may be changed in place, too: a contiguous tensor that is not shared.
    OnDevice(Tensor),
    /// A tensor that may be shared, on any device.
    Shared(Tensor),
}

impl Grad {
    pub fn own<E: TensorElement>(values: Vec<E>) -> Self {
        Self::Own(E::flat(values))
    }

    pub fn dtype(&self) -> DType {
        match self {
            Self::Own(flat) => flat.dtype(),
            Self::Shared(tensor) | Self::OnDevice(tensor) => tensor.dtype(),
        }
    }

    pub fn len(&self) -> usize {
        match self {
            Self::Own(flat) => flat.len(),
            Self::Shared(tensor) | Self::OnDevice(tensor) => tensor.elem_count(),
        }
    }

    pub fn bytes(&self) -> usize {
        self.len() * self.dtype().size_in_bytes()
    }

    /// Calls `look` with the values on the host, in row-major order.
    pub fn view<T>(&self, look: impl FnOnce(FlatRef<'_>) -> T) -> Result<T> {
        match self {
            Self::Own(flat) => Ok(look(flat.as_ref())),
            Self::Shared(tensor) | Self::OnDevice(tensor) => with_view(tensor, look),
        }
    }

    /// Calls `look` with the values as elements of type `E`. `op` names the operation in errors.
    pub fn read<E: TensorElement, T>(&self, op: &'static str, look: impl FnOnce(&[E]) -> Result<T>) -> Result<T> {
        // One call of `look`, because the compiler would repeat its code for a second one.
        let (tensor, guard);
        look(match self {
            Self::Own(flat) => match E::of_flat(flat) {
                Some(values) => values,
                None => candle_core::bail!("{op}: the gradient is {:?}, but must be {:?}", flat.dtype(), E::DTYPE),
            },
            Self::Shared(shared) | Self::OnDevice(shared) => {
                tensor = shared.contiguous()?;
                guard = locked(&tensor);
                guard.elements(op)?
            }
        })
    }

    /// Returns a copy that may be changed.
    pub fn copy(&self) -> Result<Self> {
        self.view(|values| Self::Own(values.to_flat()))
    }

    /// Returns the gradient on the host, in a form that may be changed in place. A gradient that is a tensor is copied.
    pub fn into_own(self) -> Result<Flat> {
        match self {
            Self::Own(flat) => Ok(flat),
            Self::Shared(tensor) | Self::OnDevice(tensor) => with_view(&tensor, |values| values.to_flat()),
        }
    }

    /// Returns the gradient as a tensor of `shape`. A flat buffer is moved to `device`; a tensor stays on its device.
    pub fn into_tensor(self, shape: &Shape, device: &Device) -> Result<Tensor> {
        match self {
            Self::Shared(tensor) | Self::OnDevice(tensor) => tensor.reshape(shape),
            Self::Own(flat) => {
                let storage = storage_on(device, to_storage(flat))?;
                Ok(Tensor::from_storage(storage, shape.clone(), BackpropOp::none(), false))
            }
        }
    }
}

thread_local! {
    /// The generation of this thread's gradients, which changes after each failed backward pass.
    static PASS: Cell<u64> = Cell::new(new_pass());
}

fn new_pass() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Forgets the gradients that a failed backward pass of this thread left in slots: the next backward pass begins
/// without them.
pub(crate) fn abandon() {
    PASS.set(new_pass());
}

/// A slot in which the gradients of one tensor are added up during a backward pass.
#[derive(Default)]
pub(crate) struct GradSlot {
    grad: Mutex<Option<(u64, Grad)>>,
    /// The parts that are computed later, in the order of arrival, with the generation in which each of them arrived.
    deferred: Mutex<Vec<(u64, DeferredPart)>>,
    hooks: Mutex<Vec<BackwardHook>>,
    /// The gate that decides whether gradients are taken now. Without a gate, they always are.
    gate: Option<GradGate>,
}

/// A part of a gradient that is computed later.
pub(super) struct DeferredPart {
    /// The bytes of memory that the part keeps until it is computed.
    pub bytes: usize,
    /// Computes the part and delivers it to the slot.
    pub compute: Box<dyn FnOnce(Arc<GradSlot>) -> Result<()> + Send>,
}

/// A gradient, some parts of which have not been computed yet. These parts keep the data that they need in memory.
pub(crate) struct DeferredGradient {
    /// The sum of the parts that were computed immediately.
    first: Option<Grad>,
    deferred: Vec<DeferredPart>,
}

impl DeferredGradient {
    /// Takes the gradient that has arrived in `slot`, if there is one.
    pub fn taken_from(slot: &GradSlot) -> Option<Self> {
        let (first, deferred) = (slot.take(), slot.take_deferred());
        (first.is_some() || !deferred.is_empty()).then_some(Self { first, deferred })
    }

    /// Returns the bytes of memory that the gradient keeps. An input that several layers share is counted for
    /// each of them.
    pub fn bytes(&self) -> usize {
        self.first.as_ref().map_or(0, Grad::bytes) + self.deferred.iter().map(|part| part.bytes).sum::<usize>()
    }

    /// Returns the number of parts that are computed later.
    #[cfg(test)]
    pub fn parts_left(&self) -> usize {
        self.deferred.len()
    }

    /// Computes the gradient: the sum of its parts, added in the order in which a complete backward pass adds them.
    pub fn compute(self) -> Result<Grad> {
        let slot = Arc::new(GradSlot::default());
        self.first.map_or(Ok(()), |first| slot.add(first))?;
        self.deferred.into_iter().try_for_each(|part| (part.compute)(slot.clone()))?;
        match slot.take() {
            Some(grad) => Ok(grad),
            None => candle_core::bail!("a layer deferred the gradient of a weight and then delivered none"),
        }
    }
}

/// A function that decides, for the backward pass that this thread runs, whether a slot takes gradients.
pub(crate) type GradGate = Box<dyn Fn() -> bool + Send + Sync>;

/// A function that runs before the operation that produced a tensor is differentiated.
pub(crate) type BackwardHook = Box<dyn Fn() -> Result<()> + Send + Sync>;

impl GradSlot {
    /// Creates the slot of a parameter, which takes gradients while `gate` returns true and drops them otherwise.
    pub fn with_gate(gate: GradGate) -> Self {
        Self { gate: Some(gate), ..Self::default() }
    }

    /// Returns whether gradients are taken now.
    pub fn is_open(&self) -> bool {
        self.gate.as_ref().is_none_or(|is_open| is_open())
    }

    /// Returns whether the slot is a parameter's.
    pub fn has_gate(&self) -> bool {
        self.gate.is_some()
    }

    /// Adds a gradient. The first one is kept unchanged. Each later one is added in the order of arrival, and the sum
    /// is rounded to the tensor's dtype.
    pub fn add(&self, grad: Grad) -> Result<()> {
        if !self.is_open() {
            return Ok(());
        }
        self.compute_deferred()?;
        let sum = match (self.take(), grad) {
            (None, grad) => grad,
            (Some(Grad::Shared(a)), Grad::Shared(b)) => Grad::Shared((a + b)?),
            (Some(Grad::OnDevice(sum)), Grad::Shared(other) | Grad::OnDevice(other))
            | (Some(Grad::Shared(other)), Grad::OnDevice(sum)) => {
                let other = other.reshape(sum.shape())?;
                Grad::OnDevice(add_in_place(sum, &other)?)
            }
            (Some(Grad::Own(mut sum)), other) | (Some(other), Grad::Own(mut sum)) => {
                other.view(|values| add_flat(&mut sum, values))??;
                Grad::Own(sum)
            }
        };
        self.put(sum);
        Ok(())
    }

    /// Adds a part that is computed later.
    pub(super) fn add_later(&self, part: DeferredPart) {
        lock(&self.deferred).push((PASS.get(), part));
    }

    /// Takes the parts that are computed later and have arrived in this backward pass.
    fn take_deferred(&self) -> Vec<DeferredPart> {
        let parts = std::mem::take(&mut *lock(&self.deferred));
        parts.into_iter().filter(|(pass, _)| *pass == PASS.get()).map(|(_, part)| part).collect()
    }

    /// Computes the parts that were left for later, because a part that must follow them is about to arrive.
    pub(super) fn compute_deferred(&self) -> Result<()> {
        if lock(&self.deferred).is_empty() {
            return Ok(());
        }
        if let Some(deferred) = DeferredGradient::taken_from(self) {
            self.put(deferred.compute()?);
        }
        Ok(())
    }

    /// Returns whether no gradient has arrived.
    pub fn is_empty(&self) -> bool {
        lock(&self.deferred).is_empty() && lock(&self.grad).as_ref().is_none_or(|(pass, _)| *pass != PASS.get())
    }

    /// Registers `hook` to run before the operation that produced the tensor is differentiated.
    pub fn before_backward(&self, hook: BackwardHook) {
        lock(&self.hooks).push(hook);
    }

    /// Runs the hooks that [`GradSlot::before_backward`] has registered.
    pub fn run_hooks(&self) -> Result<()> {
        lock(&self.hooks).iter().try_for_each(|hook| hook())
    }

    /// Calls `look` with the gradient that has arrived in this backward pass, if there is one.
    pub fn with_grad<T>(&self, look: impl FnOnce(&Grad) -> T) -> Option<T> {
        lock(&self.grad).as_ref().filter(|(pass, _)| *pass == PASS.get()).map(|(_, grad)| look(grad))
    }

    /// Takes the gradient that has arrived in this backward pass. Another thread's gradient stays.
    pub fn take(&self) -> Option<Grad> {
        lock(&self.grad).take_if(|(pass, _)| *pass == PASS.get()).map(|(_, grad)| grad)
    }

    fn put(&self, grad: Grad) {
        *lock(&self.grad) = Some((PASS.get(), grad));
    }

    /// Calls `write` to add to the gradient in place (`true`), or to create it (`false`). In the latter case, `write`
    /// receives `len` elements with arbitrary values and must write all of them.
    pub fn accumulate<E: TensorElement>(
        &self,
        len: usize,
        write: impl FnOnce(&mut [E], bool) -> Result<()>,
    ) -> Result<()> {
        if !self.is_open() {
            return Ok(());
        }
        let (mut values, add) = self.lend(len)?;
        write(&mut values, add)?;
        self.put(Grad::own(values));
        Ok(())
    }

    /// Takes the gradient out (`true`), so that the caller can change it in place and add it again, or creates one
    /// (`false`) of `len` elements with arbitrary values.
    pub fn lend<E: TensorElement>(&self, len: usize) -> Result<(Vec<E>, bool)> {
        self.compute_deferred()?;
        let Some(grad) = self.take() else { return Ok((buffer::<E>(len), false)) };
        let mut flat = grad.into_own()?;
        let dtype = flat.dtype();
        match E::of_flat_mut(&mut flat) {
            Some(values) => Ok((std::mem::take(values), true)),
            None => candle_core::bail!("gradients of one tensor have the dtypes {dtype:?} and {:?}", E::DTYPE),
        }
    }
}

#[cfg(not(feature = "cuda"))]
fn add_in_place(sum: Tensor, other: &Tensor) -> Result<Tensor> {
    sum + other
}

fn add_flat(sum: &mut Flat, values: FlatRef<'_>) -> Result<()> {
    assert_eq!(sum.len(), values.len(), "gradients of one tensor have the same length");
    match (sum, values) {
        (Flat::F32(sum), FlatRef::F32(values)) => add_into(sum, values),
        (Flat::BF16(sum), FlatRef::BF16(values)) => add_into(sum, values),
        (Flat::F16(sum), FlatRef::F16(values)) => add_into(sum, values),
        (sum, values) => {
            candle_core::bail!("gradients of one tensor have the dtypes {:?} and {:?}", sum.dtype(), values.dtype())
        }
    }
    Ok(())
}
