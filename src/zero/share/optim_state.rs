//! An optimizer state of a sub-group, in its storage format.
//!
//! ```text
//!   f32, bf16     | elements                         |   in memory, or in a file
//!   8-bit         | codes, one byte per element      |   in memory, or in a file
//!                 | scales (f32), one per 256        |   in memory
//! ```
//!
//! A step works on f32: a state in another format is converted to f32 part by part, and rounded when the part has been
//! updated. On every rank, shares of parameters with codes begin at a block boundary, so that blocks do not depend on
//! the number of ranks.

use super::share_storage::{BufferLocationOf, FileExtentOf, ShareStorage};
use super::state_storage::StateStorage;
use crate::error::Result;
use crate::memory::{MemoryKind, MemoryLedger, TrackedBuffer};
use crate::offload::{FileIo, StagedState};
use crate::optim::{DecodeMode, StateFormat, decode, encode, scales_of};
use crate::precision::dynamic_map::{BLOCK, DynamicMap};
use crate::precision::stochastic_rounding::RoundingDice;
use crate::precision::{ElementBuffer, Flat, FlatMut, FlatRef};
use crate::tensor::flat_buffer::FlatBuffer;
use candle_core::DType;
use std::ops::Range;
use std::slice::IterMut;

/// One state of the parameters of a sub-group.
pub(crate) struct OptimState<R: ShareStorage> {
    pub format: StateFormat,
    /// The elements, or their codes: in memory, two codes per 16-bit number; in a file, one 8-bit number per code.
    pub storage: StateStorage<R>,
    /// The scales of codes.
    scales: Option<TrackedBuffer<R::Buffer>>,
}

/// Some elements of a sub-group's state, which are in memory.
pub(in crate::zero) enum OptimStateView<'a> {
    Floats(FlatMut<'a>),
    Codes { map: &'static DynamicMap, codes: &'a mut [u8], scales: &'a mut [f32] },
}

impl<R: ShareStorage> OptimState<R> {
    /// Creates zeros for `len` elements, in memory.
    ///
    /// # Errors
    /// Fails if a GPU does not have enough memory.
    pub fn in_memory(
        ledger: &MemoryLedger,
        location: &BufferLocationOf<R>,
        format: StateFormat,
        len: usize,
    ) -> Result<Self> {
        let (dtype, numbers) = match format {
            StateFormat::F32 => (DType::F32, len),
            StateFormat::Bf16 => (DType::BF16, len),
            StateFormat::Signed8 | StateFormat::Unsigned8 => (DType::BF16, len.div_ceil(2)),
        };
        let values = TrackedBuffer::new(ledger, MemoryKind::Moments, R::Buffer::zeros(location, dtype, numbers)?);
        Ok(Self { format, storage: StateStorage::Memory(values), scales: Self::scales(ledger, format, len)? })
    }

    /// Creates a state of `len` elements in a file that contains zeros.
    ///
    /// # Errors
    /// Fails if the scales cannot be created.
    pub fn in_file(ledger: &MemoryLedger, format: StateFormat, extent: FileExtentOf<R>, len: usize) -> Result<Self> {
        Ok(Self { format, storage: StateStorage::File(extent), scales: Self::scales(ledger, format, len)? })
    }

    /// Returns the type of the numbers in a file.
    pub fn dtype(format: StateFormat) -> DType {
        match format {
            StateFormat::F32 => DType::F32,
            StateFormat::Bf16 => DType::BF16,
            StateFormat::Signed8 | StateFormat::Unsigned8 => DType::U8,
        }
    }

    /// Creates scales of zero, with which every code represents zero.
    fn scales(ledger: &MemoryLedger, format: StateFormat, len: usize) -> Result<Option<TrackedBuffer<R::Buffer>>> {
        let zeros = || R::Buffer::zeros(&R::Buffer::host(), DType::F32, len.div_ceil(BLOCK));
        format.map().map(|_| Ok(TrackedBuffer::new(ledger, MemoryKind::Moments, zeros()?))).transpose()
    }
}

impl<R: ShareStorage<Buffer = FlatBuffer, Files = FileIo>> OptimState<R> {
    /// Returns elements `range` of the sub-group: from memory, or from the next of the `staged` states.
    pub(in crate::zero) fn part<'a>(
        &'a mut self,
        staged: &mut IterMut<'a, StagedState>,
        range: Range<usize>,
    ) -> OptimStateView<'a> {
        let Some(map) = self.format.map() else { return OptimStateView::Floats(self.storage.part(staged, range)) };
        let scales = match self.scales.as_mut().map(|scales| scales.buffer_mut().slice_mut(scales_of(&range))) {
            Some(FlatMut::F32(scales)) => scales,
            _ => unreachable!("codes have scales in f32"),
        };
        let codes = match &mut self.storage {
            StateStorage::Memory(codes) => &mut codes.buffer_mut().as_bytes_mut()[range],
            StateStorage::File(_) => staged.next().expect("a window contains all states in files").bytes(range),
        };
        OptimStateView::Codes { map, codes, scales }
    }

    /// Passes the values of elements `range` to `take`, in a form from which [`write`](Self::write) restores the
    /// state. The elements must be part of one parameter and begin at a block boundary.
    pub(in crate::zero) fn read(
        &mut self,
        range: Range<usize>,
        io: Option<&FileIo>,
        take: impl FnOnce(FlatRef<'_>),
    ) -> Result<()> {
        let in_file = self.storage.file().cloned().zip(io);
        let Some(map) = self.format.map() else {
            match in_file {
                Some((extent, io)) => {
                    let values = Flat::zeros(extent.dtype(), range.len());
                    take(io.read(values, vec![extent.piece(range, 0)]).wait()?.as_ref());
                }
                None => {
                    if let StateStorage::Memory(values) = &self.storage {
                        values.buffer().read(range, take)?;
                    }
                }
            }
            return Ok(());
        };
        let mut from_file;
        let codes = match (in_file, &mut self.storage) {
            (Some((extent, io)), _) => {
                let room = Flat::zeros(DType::BF16, range.len().div_ceil(2));
                from_file = io.read(room, vec![extent.piece(range.clone(), 0)]).wait()?;
                &mut from_file.as_bytes_mut()[..range.len()]
            }
            (None, StateStorage::Memory(codes)) => &mut codes.buffer_mut().as_bytes_mut()[range.clone()],
            (None, StateStorage::File(_)) => unreachable!("states are in files if there are files"),
        };
        let mut values = vec![0.0; range.len()];
        if let Some(FlatRef::F32(scales)) = self.scales.as_ref().map(|scales| scales.buffer().slice(scales_of(&range)))
        {
            decode(map, DecodeMode::Restorable, codes, scales, &mut values);
        }
        take(FlatRef::F32(&values));
        Ok(())
    }

    /// Sets elements `range` to `values`. The elements must be part of one parameter and begin at a block boundary.
    pub(in crate::zero) fn write(
        &mut self,
        range: Range<usize>,
        values: FlatRef<'_>,
        io: Option<&FileIo>,
    ) -> Result<()> {
        let Some(map) = self.format.map() else {
            match (&mut self.storage, io) {
                (StateStorage::Memory(buffer), _) => buffer.buffer_mut().write(range, values)?,
                (StateStorage::File(extent), Some(io)) => {
                    let mut copy = Flat::with_capacity(extent.dtype(), values.len());
                    copy.extend_cast(values);
                    io.write(copy, vec![extent.piece(range, 0)]).written()?;
                }
                (StateStorage::File(_), None) => unreachable!("states are in files if there are files"),
            }
            return Ok(());
        };
        let mut numbers = vec![0.0; values.len()];
        FlatMut::F32(&mut numbers).copy_cast(values);
        let scales = match self.scales.as_mut().map(|scales| scales.buffer_mut().slice_mut(scales_of(&range))) {
            Some(FlatMut::F32(scales)) => scales,
            _ => unreachable!("codes have scales in f32"),
        };
        match (&mut self.storage, io) {
            (StateStorage::Memory(codes), _) => {
                encode(map, &numbers, &mut codes.buffer_mut().as_bytes_mut()[range], scales)
            }
            (StateStorage::File(extent), Some(io)) => {
                let mut codes = Flat::zeros(DType::BF16, range.len().div_ceil(2));
                encode(map, &numbers, &mut codes.as_bytes_mut()[..range.len()], scales);
                io.write(codes, vec![extent.piece(range, 0)]).written()?;
            }
            (StateStorage::File(_), None) => unreachable!("states are in files if there are files"),
        }
        Ok(())
    }
}

impl<'a> OptimStateView<'a> {
    /// Returns whether a step works on the elements in place.
    pub fn is_f32(&self) -> bool {
        matches!(self, Self::Floats(FlatMut::F32(_)))
    }

    /// Returns whether elements of a format need a buffer for their conversion to f32.
    pub fn needs_scratch(format: StateFormat) -> bool {
        format != StateFormat::F32
    }

    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        match self {
            Self::Floats(elements) => elements.len(),
            Self::Codes { codes, .. } => codes.len(),
        }
    }

    /// Returns the elements in `range` in f32: in place, or converted in `room`. The range begins at a block boundary.
    pub fn in_f32<'s>(&'s mut self, range: Range<usize>, room: &'s mut [f32]) -> &'s mut [f32] {
        if let Self::Floats(FlatMut::F32(elements)) = self {
            return &mut elements[range];
        }
        let room = &mut room[..range.len()];
        self.widen(range, room);
        room
    }

    /// Returns the elements, which must be f32.
    pub fn into_f32(self) -> &'a mut [f32] {
        match self {
            Self::Floats(FlatMut::F32(values)) => values,
            _ => unreachable!("the state is in another format"),
        }
    }

    /// Converts the elements in `range` to f32. The range begins at a block boundary.
    fn widen(&self, range: Range<usize>, values: &mut [f32]) {
        match self {
            Self::Floats(elements) => FlatMut::F32(values).copy_cast(elements.as_ref().slice(range)),
            Self::Codes { map, codes, scales } => {
                decode(map, DecodeMode::ByMap, &codes[range.clone()], &scales[scales_of(&range)], values);
            }
        }
    }

    /// Sets the elements in `range` to `values`, rounded to nearest or stochastically. The range begins at a block
    /// boundary. For stochastic rounding, `chance` contains the source of random bits and the index of the first
    /// element in its parameter.
    pub fn narrow(&mut self, range: Range<usize>, values: &[f32], chance: Option<(RoundingDice, usize)>) {
        match self {
            Self::Floats(elements) => round(elements.reborrow().slice(range), values, chance),
            Self::Codes { map, codes, scales } => {
                let scales = &mut scales[scales_of(&range)];
                encode(map, values, &mut codes[range], scales);
            }
        }
    }
}

/// Writes `values` into `target` in the format of `target`: rounded to nearest, or stochastically if the format is
/// bfloat16 and there is a `chance`.
pub(in crate::zero) fn round(target: FlatMut<'_>, values: &[f32], chance: Option<(RoundingDice, usize)>) {
    match (target, chance) {
        (FlatMut::BF16(target), Some((dice, first))) => dice.round(values, target, first),
        (target, _) => target.copy_cast(FlatRef::F32(values)),
    }
}
