//! A parameter of all experts: one tensor for each expert, or one tensor for all of them.

use crate::graph::{InputGradSink, OpInputs};
use crate::tensor::element::{TensorElement, with_each};
use crate::util::counted;
use candle_core::{DType, Device, Result, Tensor, bail};
use std::ops::Range;

/// A parameter of all experts of a layer, in one of the two forms of published checkpoints. Neither form is copied into
/// the other.
#[derive(Debug, Clone)]
pub enum ExpertTensors {
    /// One tensor for each expert, in the order of the experts, all of the same shape. Values of experts that no row
    /// chose are not read.
    Separate(Vec<Tensor>),
    /// One tensor `[experts, ..]`.
    Fused(Tensor),
}

impl ExpertTensors {
    /// Returns the number of experts.
    pub fn experts(&self) -> usize {
        match self {
            Self::Separate(tensors) => tensors.len(),
            Self::Fused(tensor) => tensor.dims().first().copied().unwrap_or(0),
        }
    }

    /// Returns the dimensions of one expert's tensor.
    pub fn dims(&self) -> &[usize] {
        match self {
            Self::Separate(tensors) => tensors.first().map_or(&[], Tensor::dims),
            Self::Fused(tensor) => tensor.dims().get(1..).unwrap_or(&[]),
        }
    }

    /// Returns the dtype of all tensors. It is `None` if there is no expert.
    pub fn dtype(&self) -> Option<DType> {
        self.tensors().first().map(Tensor::dtype)
    }

    /// Returns an expert's tensor as a view.
    ///
    /// # Errors
    /// An expert that does not exist.
    pub fn of(&self, expert: usize) -> Result<Tensor> {
        match self {
            Self::Separate(tensors) => match tensors.get(expert) {
                Some(tensor) => Ok(tensor.clone()),
                None => bail!("experts: there is no expert {expert} among {}", tensors.len()),
            },
            Self::Fused(tensor) => tensor.get(expert),
        }
    }

    /// Returns the tensors themselves, each once.
    pub fn tensors(&self) -> &[Tensor] {
        match self {
            Self::Separate(tensors) => tensors,
            Self::Fused(tensor) => std::slice::from_ref(tensor),
        }
    }

    /// Checks that all experts have tensors of the same dtype and the same shape, with `rank` dimensions.
    pub(super) fn check(&self, rank: usize, role: &str) -> Result<()> {
        let (dims, dtype) = (self.dims(), self.dtype());
        if self.experts() == 0 || dims.len() != rank {
            bail!(
                "experts: the {role} of each of {} has shape {dims:?}; there must be at least one expert, and a {} for \
                 each",
                counted(self.experts(), "expert"),
                if rank == 1 { "vector" } else { "matrix" }
            )
        }
        let Self::Separate(tensors) = self else { return Ok(()) };
        let differs = |tensor: &&Tensor| tensor.dims() != dims || Some(tensor.dtype()) != dtype;
        if let Some((expert, tensor)) = tensors.iter().enumerate().find(|(_, tensor)| differs(tensor)) {
            bail!(
                "experts: the {role} of expert {expert} has shape {:?} and dtype {:?}; expert 0 has {dims:?} and {:?}, and \
                 all must be equal",
                tensor.dims(),
                tensor.dtype(),
                tensors[0].dtype()
            )
        }
        Ok(())
    }

    /// Returns the tensors in contiguous memory.
    pub(super) fn contiguous(&self) -> Result<Self> {
        Ok(match self {
            Self::Separate(tensors) => Self::Separate(tensors.iter().map(Tensor::contiguous).collect::<Result<_>>()?),
            Self::Fused(tensor) => Self::Fused(tensor.contiguous()?),
        })
    }

    /// Returns the device of the first tensor.
    pub(super) fn device(&self) -> Option<&Device> {
        self.tensors().first().map(Tensor::device)
    }

    /// Returns the number of elements of one expert's tensor.
    fn len(&self) -> usize {
        self.dims().iter().product()
    }

    /// Calls `look` with the values of the tensors of `experts`. The tensors must be contiguous and on the CPU. If each
    /// expert has a separate tensor, the values of the other experts need not be in memory.
    pub(super) fn with_values<E: TensorElement, R>(
        &self,
        experts: &[usize],
        op: &'static str,
        look: impl FnOnce(&[&[E]]) -> Result<R>,
    ) -> Result<R> {
        match self {
            Self::Separate(tensors) => with_each(experts.iter().map(|expert| &tensors[*expert]), op, look),
            Self::Fused(_) if experts.is_empty() => look(&[]),
            Self::Fused(tensor) => with_each([tensor], op, |values: &[&[E]]| {
                let len = self.len();
                look(&experts.iter().map(|expert| &values[0][expert * len..][..len]).collect::<Vec<_>>())
            }),
        }
    }

    /// Adds the tensors to an operation's inputs.
    pub(super) fn record<const N: usize>(&self, inputs: &mut OpInputs<N>) -> Result<ExpertGradSinks> {
        Ok(ExpertGradSinks { sinks: inputs.add(self.tensors())?, experts: self.experts() })
    }
}

/// The destinations of the gradients of a parameter of all experts.
pub(super) struct ExpertGradSinks {
    /// One destination for each expert, or one for all.
    sinks: Vec<InputGradSink>,
    experts: usize,
}

/// The gradients of some experts, in one buffer, while they are written.
pub(super) struct LentGradient<'a, E> {
    sink: &'a InputGradSink,
    values: Vec<E>,
    /// Whether `values` hold earlier gradients, to which others are to be added.
    pub add: bool,
    first: usize,
    len: usize,
}

impl ExpertGradSinks {
    /// Returns the destinations, each with the experts whose gradients it takes.
    pub fn iter(&self) -> impl Iterator<Item = (Range<usize>, &InputGradSink)> {
        let per_sink = self.experts / self.sinks.len().max(1);
        self.sinks.iter().enumerate().map(move |(i, sink)| (i * per_sink..(i + 1) * per_sink, sink))
    }

    /// Returns whether any gradient is wanted.
    pub fn are_wanted(&self) -> bool {
        self.sinks.iter().any(InputGradSink::is_wanted)
    }
}

impl<'a, E: TensorElement> LentGradient<'a, E> {
    /// Takes out the gradient of `experts`, whose tensors have `len` elements each, if it is wanted.
    pub fn take(sink: &'a InputGradSink, experts: &Range<usize>, len: usize) -> Result<Option<Self>> {
        let lent = sink.lend::<E>(experts.len() * len)?;
        Ok(lent.map(|(values, add)| Self { sink, values, add, first: experts.start, len }))
    }

    /// Returns the experts and their gradients.
    pub fn parts(&mut self) -> impl Iterator<Item = (usize, &mut [E])> {
        (self.first..).zip(self.values.chunks_exact_mut(self.len.max(1)))
    }

    /// Delivers the gradient.
    pub fn deliver(self) -> Result<()> {
        self.sink.deliver(crate::graph::Grad::own(self.values))
    }
}
