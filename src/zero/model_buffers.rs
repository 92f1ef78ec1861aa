//! The buffers of a model on this rank: their synchronization between ranks, and their restoration by a recomputing
//! unit.

use crate::comm::Communicator;
use crate::error::Result;
use crate::param::{BufferSync, ModelBuffer, UnitId};
use crate::tensor::bytes::{decode, encode};
use crate::util::fnv1a;

/// All buffers of a model, in order of registration.
#[derive(Debug, Default)]
pub(crate) struct ModelBuffers {
    list: Vec<ModelBuffer>,
    sync: BufferSync,
}

/// The values that some buffers had at an earlier time, such as before a unit's forward pass, by buffer number.
#[derive(Default)]
pub(super) struct SavedBuffers(Vec<(usize, Vec<u8>)>);

impl ModelBuffers {
    pub fn new(list: Vec<ModelBuffer>, sync: BufferSync) -> Self {
        Self { list, sync }
    }

    /// Returns the buffers.
    pub fn list(&self) -> &[ModelBuffer] {
        &self.list
    }

    /// Returns a hash of each buffer's name, type, shape and values.
    pub fn hashes(&self) -> Result<Vec<u64>> {
        let hash = |buffer: &ModelBuffer| {
            let mut bytes = buffer.bytes()?;
            let tensor = &buffer.tensor;
            bytes.extend(format!("{} {:?} {:?}", buffer.name, tensor.dtype(), tensor.dims()).bytes());
            Ok(fnv1a(&bytes))
        };
        self.list.iter().map(hash).collect()
    }

    /// Returns whether ranks exchange buffers before each training forward pass.
    pub(super) fn are_exchanged_before_forward(&self) -> bool {
        self.sync == BufferSync::FromRankZero && !self.list.is_empty()
    }

    /// Collective: prepares the buffers for a training forward pass.
    pub(super) fn before_forward(&self, comm: &dyn Communicator) -> Result<()> {
        self.list.iter().try_for_each(ModelBuffer::check)?;
        if self.sync == BufferSync::FromRankZero { self.copy_from_rank_zero(comm) } else { Ok(()) }
    }

    /// Collective: synchronizes the buffers after an optimizer step.
    pub(super) fn after_step(&self, comm: &dyn Communicator) -> Result<()> {
        if self.sync == BufferSync::Mean { self.take_mean(comm) } else { Ok(()) }
    }

    /// Collective: synchronizes the buffers outside a step: with `BufferSync::Mean`, sets the floating-point buffers to
    /// their means; otherwise, gives all ranks rank 0's values.
    pub(super) fn agree(&self, comm: &dyn Communicator) -> Result<()> {
        if self.sync == BufferSync::Mean { self.take_mean(comm) } else { self.copy_from_rank_zero(comm) }
    }

    fn copy_from_rank_zero(&self, comm: &dyn Communicator) -> Result<()> {
        if comm.size() == 1 || self.list.is_empty() {
            return Ok(());
        }
        let bytes = match comm.rank() {
            0 => self.bytes_of(&self.list)?,
            // These zeros are a placeholder as large as rank 0's values; no rank reads them.
            _ => vec![0; self.list.iter().map(ModelBuffer::size).sum()],
        };
        let all = comm.gather_bytes(bytes).wait()?;
        if comm.rank() == 0 { Ok(()) } else { self.set(&self.list, &all[0]) }
    }

    fn take_mean(&self, comm: &dyn Communicator) -> Result<()> {
        let floats = || self.list.iter().filter(|buffer| buffer.tensor.dtype().is_float());
        if comm.size() == 1 || floats().next().is_none() {
            return Ok(());
        }
        let all = comm.gather_bytes(self.bytes_of(floats())?).wait()?;
        let mut at = 0;
        for buffer in floats() {
            let (range, dtype) = (at..at + buffer.size(), buffer.tensor.dtype());
            let mut ranks = all.iter().map(|bytes| decode(dtype, &bytes[range.clone()]));
            let mut mean = ranks.next().unwrap_or_default();
            ranks.for_each(|values| mean.iter_mut().zip(values).for_each(|(sum, value)| *sum += value));
            let count = comm.size() as f64;
            buffer.set(&encode(dtype, mean.into_iter().map(|sum| sum / count)))?;
            at = range.end;
        }
        Ok(())
    }

    fn bytes_of<'a>(&self, buffers: impl IntoIterator<Item = &'a ModelBuffer>) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        buffers.into_iter().try_for_each(|buffer| {
            bytes.extend(buffer.bytes()?);
            Ok::<_, crate::Error>(())
        })?;
        Ok(bytes)
    }

    fn set(&self, buffers: &[ModelBuffer], mut bytes: &[u8]) -> Result<()> {
        for buffer in buffers {
            let (values, rest) = bytes.split_at(buffer.size());
            buffer.set(values)?;
            bytes = rest;
        }
        Ok(())
    }

    /// Returns the values of the buffers of a unit that is about to run.
    pub(super) fn of_unit(&self, unit: UnitId) -> Result<SavedBuffers> {
        let buffers = self.list.iter().enumerate().filter(|(_, buffer)| buffer.units.contains(&unit));
        buffers.map(|(number, buffer)| Ok((number, buffer.bytes()?))).collect::<Result<_>>().map(SavedBuffers)
    }

    /// Returns the values of all buffers.
    pub(super) fn all(&self) -> Result<SavedBuffers> {
        let all = self.list.iter().enumerate();
        all.map(|(number, buffer)| Ok((number, buffer.bytes()?))).collect::<Result<_>>().map(SavedBuffers)
    }

    /// Returns only the saved values of buffers that have changed since they were saved.
    pub(super) fn changed_since(&self, SavedBuffers(mut saved): SavedBuffers) -> Result<SavedBuffers> {
        let mut failure = Ok(());
        saved.retain(|(number, previous)| match self.list[*number].bytes() {
            Ok(current) => current != *previous,
            Err(error) => {
                failure = Err(error);
                false
            }
        });
        failure.map(|()| SavedBuffers(saved))
    }

    pub(super) fn exchange(&self, SavedBuffers(saved): &SavedBuffers) -> Result<SavedBuffers> {
        let exchange = |(number, values): &(usize, Vec<u8>)| {
            let current = self.list[*number].bytes()?;
            self.list[*number].set(values)?;
            Ok((*number, current))
        };
        saved.iter().map(exchange).collect::<Result<_>>().map(SavedBuffers)
    }
}
