//! Lays out sub-groups while parameters are registered.
//!
//! A share is appended to the open sub-group of its class: its initial values go into memory, or into files, which grow
//! with every share. When all parameters are registered, the states that belong on a GPU move there, and gradients and
//! optimizer states get their storage.

use super::optim_state::OptimState;
use super::packed_weight_shards;
use super::share_plan::{ShardDevices, SharePlan};
use super::share_storage::{BufferLocationOf, FileExtentOf, ShareStorage};
use super::state_storage::StateStorage;
use super::sub_group::{GradientShare, SubGroup, SubGroupPosition};
use crate::error::{Error, OffloadError, Result};
use crate::layout::{ShardCut, ShareLayout, SharePosition, groups_in_memory};
use crate::memory::{MemoryKind, MemoryLedger, TrackedBuffer};
use crate::offload::{FileExtent, FileTransfer, OffloadStore, StateFileKey};
use crate::optim::SubGroupKey;
use crate::param::{Param, ParamId};
use crate::precision::{ElementBuffer, Flat, FlatRef, WeightPacking};
use crate::tensor::flat_buffer::{BufferDevice, FlatBuffer};
use crate::zero::rank_core::RankCore;
use candle_core::DType;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

/// A state that can be stored in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SubGroupStateKind {
    Weights,
    Master,
    Gradients,
    /// The optimizer state with this name.
    Moment(&'static str),
    /// The state of the outer optimizer with this name.
    Outer(&'static str),
}

impl SubGroupStateKind {
    pub fn kind(self) -> MemoryKind {
        match self {
            Self::Weights => MemoryKind::Parameters,
            Self::Master => MemoryKind::MasterWeights,
            Self::Gradients => MemoryKind::Gradients,
            Self::Moment(_) => MemoryKind::Moments,
            Self::Outer(_) => MemoryKind::OuterStates,
        }
    }
}

/// Files under construction: those of this rank, or of a rehearsal that only counts.
pub(crate) trait StateFileBuilder<R: ShareStorage> {
    /// Begins an empty extent in the file of a state.
    fn begin(&self, state: SubGroupStateKind, class: SubGroupKey, dtype: DType) -> Result<FileExtentOf<R>>;
    /// Reserves `count` more elements.
    fn grow(&mut self, extent: &FileExtentOf<R>, count: usize) -> Result<()>;
    /// Begins to write `values` to the file, if there is one, starting at element `at`.
    fn write(&mut self, _: &FileExtentOf<R>, _: usize, _: FlatRef<'_>) -> Result<()> {
        Ok(())
    }
    /// Waits until everything is written.
    fn written(&mut self) -> Result<()> {
        Ok(())
    }
    /// Reads `count` elements into `room` and frees their extent. Returns `None` if they have no space in a file.
    fn take_back(
        &mut self,
        extent: &FileExtentOf<R>,
        count: usize,
        room: impl FnOnce() -> Result<TrackedBuffer<R::Buffer>>,
    ) -> Result<Option<TrackedBuffer<R::Buffer>>>;
}

/// The number of elements of initial values that are read together. It is a multiple of the number of elements that any
/// packing packs together, and this many packed elements fill complete pages of a file.
pub(super) const LOAD_CHUNK: usize = 1 << 24;

/// A share that is being filled.
struct UnfinishedShare {
    class: SubGroupKey,
    /// The offset of the share in its sub-group.
    offset: usize,
    /// The number of elements of the share, including padding.
    reserved_len: usize,
    /// The number of elements filled so far.
    filled: usize,
    /// Whether the sub-group ends with this share.
    closes: bool,
}

/// A builder that lays out sub-groups while parameters are registered.
pub(crate) struct SubGroupBuilder<R: ShareStorage = RankCore, C = OffloadFileBuilder> {
    plan: SharePlan,
    sharing: ShareLayout,
    files: C,
    ledger: MemoryLedger,
    /// The locations of complete sub-groups that are not in files. Until they are complete, they are on the host.
    devices: ShardDevices<BufferLocationOf<R>>,
    done: Vec<SubGroup<R>>,
    /// The open sub-group of each class.
    open: [Option<SubGroup<R>>; SubGroupKey::COUNT],
}

impl<R: ShareStorage, C: StateFileBuilder<R>> SubGroupBuilder<R, C> {
    pub fn with(plan: SharePlan, files: C, ledger: MemoryLedger, devices: ShardDevices<BufferLocationOf<R>>) -> Self {
        let sharing = ShareLayout::new(plan.placement.optim.is_sharded(), plan.sub_group_size);
        // In files, a parameter's share begins at an offset at which a request may begin.
        let sharing = if plan.has_files() { sharing.in_files(plan.step(), plan.weights_in_memory) } else { sharing };
        Self { plan, sharing, files, ledger, devices, done: Vec::new(), open: [const { None }; SubGroupKey::COUNT] }
    }

    /// Adds a parameter to the sub-groups of a class. `read` returns the initial values of the `len` elements that this
    /// rank owns, in order, one part at a time.
    pub fn push(
        &mut self,
        param: ParamId,
        cut: ShardCut,
        class: SubGroupKey,
        len: usize,
        read: &mut dyn FnMut(Range<usize>) -> Result<Vec<f32>>,
    ) -> Result<()> {
        let mut share = self.begin(param, cut, class)?;
        for start in (0..len).step_by(LOAD_CHUNK) {
            let values = read(start..len.min(start + LOAD_CHUNK))?;
            match self.packing(class) {
                // The last values are followed by the padding of the shard.
                Some(packing) => {
                    let is_last = start + values.len() == len;
                    let shard_len = if is_last { self.plan.mesh.of(cut).shard_len(cut) - start } else { values.len() };
                    let packed = packed_weight_shards::pack(packing, FlatRef::F32(&values), shard_len);
                    self.fill(&mut share, packed.as_ref())?;
                }
                None => self.fill(&mut share, FlatRef::F32(&values))?,
            }
        }
        self.end(share)
    }

    /// Returns how shares of a class are packed, if they are.
    fn packing(&self, class: SubGroupKey) -> Option<WeightPacking> {
        class.weights.packing().filter(|_| self.plan.placement.params.is_sharded())
    }

    /// Adds a parameter, given its share's values in the form in which a sub-group holds them. Packed values are words.
    pub fn push_share(&mut self, param: ParamId, cut: ShardCut, values: FlatRef<'_>, class: SubGroupKey) -> Result<()> {
        let mut share = self.begin(param, cut, class)?;
        self.fill(&mut share, values)?;
        self.end(share)
    }

    /// Reserves room for the share of a parameter.
    fn begin(&mut self, param: ParamId, cut: ShardCut, class: SubGroupKey) -> Result<UnfinishedShare> {
        let SharePlan { rank, placement, .. } = self.plan;
        // A rank has no elements of the experts of other ranks.
        let is_here = cut.is_on(rank);
        let mesh = self.plan.mesh.of(cut);
        let (shard_len, whole_len) = if is_here { (mesh.shard_len(cut), cut.numel) } else { (0, 0) };
        let shard_len =
            self.packing(class).map_or(shard_len, |packing| packed_weight_shards::word_count(packing, shard_len));
        let block = class.role().map_or(1, |role| self.plan.block(role));
        let SharePosition { share, reserved_len, is_first_in_file, closes, is_in_file } =
            self.sharing.push(shard_len, whole_len, class.index(), block);
        if is_first_in_file {
            self.close();
        }
        let mut group = match self.open[class.index()].take() {
            Some(group) => group,
            None => self.empty_group(class, is_in_file)?,
        };
        let offset = group.len;
        for storage in [&mut group.weights, &mut group.master].into_iter().flatten() {
            match storage {
                StateStorage::File(extent) => self.files.grow(extent, reserved_len)?,
                // The exact size is reserved: a large buffer grows in place (the allocator remaps its pages), and spare
                // room would be wasted.
                StateStorage::Memory(buffer) => buffer.resize(|flat| flat.reserve_exact(reserved_len))?,
            }
        }
        let number = self.plan.mesh.number_of(cut, rank);
        let (owned, piece) = match (is_here, placement.optim.is_sharded()) {
            (false, _) => (0..0, 0..0),
            (true, true) => (mesh.shard(cut, mesh.shard_of(number)), mesh.piece(cut, mesh.piece_of(number))),
            (true, false) => (0..cut.numel, mesh.piece(cut, mesh.piece_of(number))),
        };
        let piece = piece.start - owned.start..piece.end - owned.start;
        group.slots.push(SubGroupPosition { param, owned, piece, offset, len: share });
        group.grads.push(GradientShare::Absent);
        group.len += reserved_len;
        self.open[class.index()] = Some(group);
        Ok(UnfinishedShare { class, offset, reserved_len, filled: 0, closes })
    }

    /// Appends values to a share.
    fn fill(&mut self, share: &mut UnfinishedShare, values: FlatRef<'_>) -> Result<()> {
        let Self { open, files, .. } = self;
        let Some(group) = &mut open[share.class.index()] else { return Ok(()) };
        for storage in [&mut group.weights, &mut group.master].into_iter().flatten() {
            match storage {
                StateStorage::File(extent) => files.write(extent, share.offset + share.filled, values)?,
                StateStorage::Memory(buffer) => buffer.resize(|flat| flat.extend_cast(values))?,
            }
        }
        share.filled += values.len();
        Ok(())
    }

    /// Ends a share that has all its values.
    fn end(&mut self, share: UnfinishedShare) -> Result<()> {
        let open = &mut self.open[share.class.index()];
        if let Some(group) = open {
            for storage in [&mut group.weights, &mut group.master].into_iter().flatten() {
                if let StateStorage::Memory(buffer) = storage {
                    buffer.resize(|flat| flat.extend_zeros(share.reserved_len - share.filled))?;
                }
            }
        }
        if share.closes {
            self.done.extend(open.take());
        }
        Ok(())
    }

    /// Creates an empty sub-group. Its weights are stored in a file if `is_in_file`.
    fn empty_group(&self, class: SubGroupKey, is_in_file: bool) -> Result<SubGroup<R>> {
        let SharePlan { dtype, weights_in_memory, states_in_files, .. } = &self.plan;
        let storage = |state: SubGroupStateKind, dtype, in_file| match in_file {
            true => self.files.begin(state, class, dtype).map(StateStorage::File),
            false => {
                let empty = R::Buffer::with_capacity(&R::Buffer::host(), dtype, 0)?;
                Ok(StateStorage::Memory(TrackedBuffer::new(&self.ledger, state.kind(), empty)))
            }
        };
        // Packed weights are 32-bit words.
        let weights_dtype = class.weights.packing().map_or(class.weights.dtype(*dtype), |_| DType::F32);
        let weights = || storage(SubGroupStateKind::Weights, weights_dtype, is_in_file && weights_in_memory.is_some());
        let master = || storage(SubGroupStateKind::Master, DType::F32, states_in_files.is_some());
        let has_master = class.has_master(*dtype) && self.plan.has_master() || self.plan.averages_class(class);
        Ok(SubGroup {
            class,
            slots: Vec::new(),
            len: 0,
            weights: self.plan.shards(class.weights).then(weights).transpose()?,
            master: has_master.then(master).transpose()?,
            grads: Vec::new(),
            grad_file: None,
            moments: Vec::new(),
            factored: Vec::new(),
            outer: Vec::new(),
        })
    }

    fn close(&mut self) {
        self.done.extend(self.open.iter_mut().filter_map(Option::take));
    }

    /// Ends the layout: reserves the files of gradients and optimizer states, and allocates the states that stay in
    /// memory. `params` are the registered parameters.
    ///
    /// If there was not enough space for a file, the groups must not be used: [`OffloadStore::check_space`] returns the
    /// error.
    ///
    /// # Errors
    /// Fails if a file operation fails, or if a GPU does not have enough memory.
    pub fn finish(&mut self, params: &[Param]) -> Result<Vec<SubGroup<R>>> {
        self.close();
        let mut groups = std::mem::take(&mut self.done);
        // This makes the order of parameters, and of sums over them, independent of where sub-groups end.
        groups.sort_by_key(|group| group.class);
        self.files.written()?;
        let Self { plan, files, ledger, devices, .. } = self;
        // The trained sub-groups come first.
        let trained = groups.iter().filter(|group| group.class.is_trained()).count();
        let in_memory = plan.states_in_files.map_or(trained, |ratio| groups_in_memory(trained, ratio));
        for (i, group) in groups.iter_mut().enumerate() {
            // Packed weights are unpacked on the host.
            let stays_on_host = group.class.weights.packing().is_some() && group.weights.is_some();
            let states = [(&mut group.weights, &devices.weights), (&mut group.master, &devices.states)];
            for (state, device) in states.into_iter().filter(|_| !stays_on_host) {
                if let Some(StateStorage::Memory(values)) = state.take_if(|storage| storage.file().is_none()) {
                    *state = Some(StateStorage::Memory(values.move_to(ledger, device)?));
                }
            }
            let (class, len) = (group.class, group.len);
            let Some(role) = class.role() else { continue };
            let states = plan.grouping.state_names(role).iter().zip(plan.formats(role));
            if let Some(factored) =
                plan.grouping.factored(role).filter(|factored| !factored.factored_names().is_empty())
            {
                let states = group.slots.iter().map(|slot| {
                    let len = factored.factored_lens(params[slot.param].shape.dims()).iter().sum();
                    let zeros = R::Buffer::zeros(&R::Buffer::host(), DType::F32, len)?;
                    Ok(TrackedBuffer::new(ledger, MemoryKind::Moments, zeros))
                });
                group.factored = states.collect::<Result<_>>()?;
            }
            if i < in_memory {
                let zeros =
                    |kind| Ok(TrackedBuffer::new(ledger, kind, R::Buffer::zeros(&devices.states, DType::F32, len)?));
                if let Some(StateStorage::File(extent)) = &group.master {
                    let values = files.take_back(extent, len, || zeros(MemoryKind::MasterWeights))?;
                    group.master = values.map(StateStorage::Memory).or(group.master.take());
                }
                let moments = states.map(|(_, format)| OptimState::in_memory(ledger, &devices.states, format, len));
                group.moments = moments.collect::<Result<_>>()?;
                // Between two exchanges, nothing reads the outer states, so they need no room on a GPU.
                let host = || R::Buffer::zeros(&R::Buffer::host(), DType::F32, len);
                let outer = plan
                    .outer_states
                    .iter()
                    .map(|_| Ok(StateStorage::Memory(TrackedBuffer::new(ledger, MemoryKind::OuterStates, host()?))));
                group.outer = outer.collect::<Result<_>>()?;
                continue;
            }
            let grads = files.begin(SubGroupStateKind::Gradients, class, plan.grad_dtype)?;
            let moments = states.map(|(name, format)| {
                let extent = files.begin(SubGroupStateKind::Moment(name), class, OptimState::<R>::dtype(format))?;
                files.grow(&extent, len)?;
                OptimState::in_file(ledger, format, extent, len)
            });
            group.moments = moments.collect::<Result<_>>()?;
            for name in plan.outer_states {
                let extent = files.begin(SubGroupStateKind::Outer(name), class, DType::F32)?;
                files.grow(&extent, len)?;
                group.outer.push(StateStorage::File(extent));
            }
            files.grow(&grads, len)?;
            group.grad_file = Some(grads);
        }
        Ok(groups)
    }
}

impl SubGroupBuilder {
    /// Creates a builder with the files of this rank, if it has any.
    pub fn new(
        plan: SharePlan,
        offload: Option<Arc<OffloadStore>>,
        ledger: MemoryLedger,
        devices: ShardDevices<BufferDevice>,
    ) -> Self {
        Self::with(plan, OffloadFileBuilder { offload, writing: VecDeque::new(), too_small: false }, ledger, devices)
    }
}

/// The builder of this rank's files.
pub(crate) struct OffloadFileBuilder {
    offload: Option<Arc<OffloadStore>>,
    /// The pending writes of initial values.
    writing: VecDeque<FileTransfer<Flat>>,
    /// Whether a file could not get the space that it requested. Further requests are then only counted.
    too_small: bool,
}

/// The number of elements of initial values that are written together.
const PIECE: usize = 1 << 20;

/// The maximum number of pending pieces. When it is exceeded, the oldest piece is waited for.
const IN_FLIGHT: usize = 8;

impl StateFileBuilder<RankCore> for OffloadFileBuilder {
    fn begin(&self, state: SubGroupStateKind, class: SubGroupKey, dtype: DType) -> Result<FileExtent> {
        // The weights and master weights of all classes grow at the same time, so each class has its own files for
        // them. The other states are reserved one after the other, once all parameters are registered.
        let (name, class) = match state {
            SubGroupStateKind::Weights => ("parameters", Some(class)),
            SubGroupStateKind::Master => ("master weights", Some(class)),
            SubGroupStateKind::Gradients => ("gradients", None),
            SubGroupStateKind::Moment(name) | SubGroupStateKind::Outer(name) => (name, None),
        };
        let offload = self.offload.as_ref().expect("a state in a file has an offload store");
        Ok(FileExtent::at_end_of(&offload.file(StateFileKey { kind: state.kind(), name, class })?, dtype))
    }

    fn grow(&mut self, extent: &FileExtent, count: usize) -> Result<()> {
        if self.too_small {
            extent.ask_for(count);
            return Ok(());
        }
        match extent.grow(count) {
            Err(Error::Offload(OffloadError::Space { .. })) => {
                self.too_small = true;
                Ok(())
            }
            result => result,
        }
    }

    fn write(&mut self, extent: &FileExtent, at: usize, values: FlatRef<'_>) -> Result<()> {
        let Some(offload) = self.offload.as_ref().filter(|_| !self.too_small) else { return Ok(()) };
        for start in (0..values.len()).step_by(PIECE) {
            let part = values.slice(start..values.len().min(start + PIECE));
            let mut piece = Flat::with_capacity(extent.dtype(), part.len());
            piece.extend_cast(part);
            let target = extent.piece(at + start..at + start + part.len(), 0);
            self.writing.push_back(offload.io.write(piece, vec![target]));
            if self.writing.len() > IN_FLIGHT {
                self.writing.pop_front().map_or(Ok(()), FileTransfer::written)?;
            }
        }
        Ok(())
    }

    fn written(&mut self) -> Result<()> {
        self.writing.drain(..).try_for_each(FileTransfer::written)
    }

    fn take_back(
        &mut self,
        extent: &FileExtent,
        count: usize,
        room: impl FnOnce() -> Result<TrackedBuffer<FlatBuffer>>,
    ) -> Result<Option<TrackedBuffer<FlatBuffer>>> {
        let Some(offload) = self.offload.as_ref().filter(|_| !self.too_small) else { return Ok(None) };
        let room = room()?.map(FlatBuffer::into_host);
        let values = offload.io.read(room, vec![extent.piece(0..count, 0)]).wait()?;
        extent.give_back(count);
        Ok(Some(values.map(FlatBuffer::from)))
    }
}
