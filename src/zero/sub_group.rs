//! This rank's share of the model, sub-group by sub-group: what the optimizer works through.
//!
//! A sub-group is a run of parameters whose shares lie one after the other, in one buffer or one part of a file per
//! kind of state, and that one half of the optimizer trains: Muon's matrices and AdamW's vectors have different states,
//! so each half has sub-groups of its own. The optimizer step goes from sub-group to sub-group.
//!
//! | | stage 0 | stages 1, 2 | stage 3 |
//! |---|---|---|---|
//! | owned | the whole parameter | its shard | its shard |
//! | `weights` | - (in the tensors) | - (in the tensors) | shards in the model's dtype |
//! | `master` | 16-bit only | 16-bit only | 16-bit only |
//! | `grads`, `moments` | whole | shards | shards |
//!
//! Where nothing is offloaded to files, all of it is in memory. `offload_param` moves `weights`, `offload_optimizer` the
//! others. Gradients have a buffer per parameter: the one that a large gradient was reduced in.

use super::core::Core;
use super::share_plan::SharePlan;
use crate::error::{Error, Result};
use crate::layout::{Laid, Sharing, groups_in_memory};
use crate::memory::{Kind, Ledger, Tracked};
use crate::offload::{Extent, Offload, STEP, Staged, Stream, Transfer};
use crate::optim::Role;
use crate::param::ParamId;
use crate::precision::{Flat, FlatMut, FlatRef, sum_of_squares};
use candle_core::DType;
use std::collections::VecDeque;
use std::ops::Range;

/// Where the owned part of one parameter lies in its sub-group.
#[derive(Debug, Clone)]
pub(crate) struct Slot {
    pub param: ParamId,
    /// Elements of the whole parameter that this rank owns.
    pub owned: Range<usize>,
    /// Offset of the first of them in the sub-group.
    pub at: usize,
    /// Elements of a rank's share of the parameter, the padding of the last ranks included.
    pub len: usize,
}

impl Slot {
    /// The owned elements in the sub-group, without padding.
    pub fn range(&self) -> Range<usize> {
        self.at..self.at + self.owned.len()
    }

    /// Where elements `range` of the whole parameter, which this rank owns, lie in the sub-group.
    pub fn place(&self, range: &Range<usize>) -> Range<usize> {
        self.at + range.start - self.owned.start..self.at + range.end - self.owned.start
    }
}

/// Where one kind of state of a sub-group lies.
pub(crate) enum Home {
    /// In memory, all of it.
    Memory(Tracked),
    /// In a file; in memory only what the step is working on.
    File(Extent),
}

impl Home {
    /// The place in a file.
    pub fn file(&self) -> Option<&Extent> {
        match self {
            Self::Memory(_) => None,
            Self::File(extent) => Some(extent),
        }
    }

    /// Elements `range` of the sub-group: of memory, or of the next of the states that are `staged`.
    pub fn part<'a>(&'a mut self, staged: &mut std::slice::IterMut<'a, Staged>, range: Range<usize>) -> FlatMut<'a> {
        match self {
            Self::Memory(buffer) => buffer.slice_mut(range),
            Self::File(_) => staged.next().expect("a window has all states that lie in files").part(range),
        }
    }
}

/// This rank's gradient of one parameter.
pub(crate) enum GradShare {
    /// None has arrived since the last step.
    Absent,
    /// In memory.
    Memory(Tracked),
    /// In the sub-group's gradient file, or on its way there.
    File {
        /// The way there, until it has been waited for.
        writing: Option<Transfer<Tracked>>,
        /// Sum of the squares of this rank's shard.
        squares: f64,
    },
}

/// One sub-group of this rank's share.
pub(crate) struct SubGroup {
    /// The half of the optimizer that trains it.
    pub role: Role,
    pub slots: Vec<Slot>,
    /// Elements of each kind of state, padding included.
    pub len: usize,
    pub weights: Option<Home>,
    pub master: Option<Home>,
    /// Per slot.
    pub grads: Vec<GradShare>,
    /// Where gradients lie, if not in memory.
    pub grad_file: Option<Extent>,
    pub moments: Vec<Home>,
}

/// What a pass through a share has in memory, and whether it changes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pass {
    /// Everything, which stays as it is.
    Look,
    /// Everything: weights and moments change by the gradients.
    Update,
    /// Moments, which change by the gradients. Weights stay where they are.
    Moments,
    /// Weights, which change by something else than the gradients.
    Weights,
}

impl Pass {
    pub fn has_weights(self) -> bool {
        self != Self::Moments
    }

    /// Moments and gradients.
    pub fn has_moments(self) -> bool {
        self != Self::Weights
    }

    pub fn changes(self) -> bool {
        self != Self::Look
    }
}

/// Lays out sub-groups while parameters are registered.
pub(crate) struct SubGroupBuilder {
    sharing: Sharing,
    plan: SharePlan,
    ledger: Ledger,
    done: Vec<SubGroup>,
    /// By role.
    open: [Option<SubGroup>; Role::ALL.len()],
    /// Initial values on their way to files.
    writing: VecDeque<Transfer<Flat>>,
    /// A file could not get the space that it asked for: the rest is only counted.
    too_small: bool,
}

/// Elements of initial values that are written together.
const PIECE: usize = 1 << 20;

/// Pieces under way before the oldest is waited for.
const IN_FLIGHT: usize = 8;

impl SubGroupBuilder {
    pub fn new(plan: &SharePlan, ledger: Ledger) -> Self {
        let sharing = Sharing::new(plan.world_size, plan.placement.optim.is_sharded(), plan.sub_group_size);
        let sharing = match &plan.offload {
            // In files a parameter's share begins where a request may begin.
            Some(offload) => sharing.in_files(STEP, offload.params.as_ref().map(|file| file.in_memory)),
            None => sharing,
        };
        Self {
            sharing,
            plan: plan.clone(),
            ledger,
            done: Vec::new(),
            open: [None, None],
            writing: VecDeque::new(),
            too_small: false,
        }
    }

    /// Adds a parameter of `numel` elements of which this rank owns `owned`, with those elements' initial values, to the
    /// sub-groups of a half of the optimizer.
    pub fn push(
        &mut self,
        param: ParamId,
        numel: usize,
        owned: Range<usize>,
        values: FlatRef<'_>,
        role: Role,
    ) -> Result<()> {
        let Laid { share, room: len, begins, closes, spills } = self.sharing.push(numel, role as usize);
        if begins {
            self.close();
        }
        let mut group = self.open[role as usize].take().unwrap_or_else(|| self.empty_group(role, spills));
        let at = group.len;
        for home in [&group.weights, &group.master].into_iter().flatten() {
            if let Home::File(extent) = home {
                self.grow(extent, len)?;
                self.write(extent, at, values)?;
            }
        }
        for home in [&mut group.weights, &mut group.master].into_iter().flatten() {
            if let Home::Memory(buffer) = home {
                // Exact: a large buffer grows in place (the allocator remaps its pages), and spare room would be waste.
                buffer.resize(|flat| {
                    flat.reserve_exact(len);
                    flat.extend_cast(values);
                    flat.extend_zeros(len - values.len());
                });
            }
        }
        group.slots.push(Slot { param, owned, at, len: share });
        group.grads.push(GradShare::Absent);
        group.len += len;
        self.open[role as usize] = Some(group);
        if closes {
            self.done.extend(self.open[role as usize].take());
        }
        Ok(())
    }

    /// A sub-group whose weights lie in a file if they `spill`.
    fn empty_group(&self, role: Role, spills: bool) -> SubGroup {
        let SharePlan { placement, dtype, offload, .. } = &self.plan;
        let memory = |kind, dtype| Home::Memory(Tracked::new(&self.ledger, kind, Flat::with_capacity(dtype, 0)));
        let params = offload.as_ref().and_then(|o| o.params.as_ref()).filter(|_| spills);
        let weights = || match params {
            Some(file) => Home::File(Extent::at_end_of(&file.arenas[role as usize], *dtype)),
            None => memory(Kind::Parameters, *dtype),
        };
        let master = || match offload.as_ref().and_then(|o| o.optimizer.as_ref()?.master.as_ref()) {
            Some(arenas) => Home::File(Extent::at_end_of(&arenas[role as usize], DType::F32)),
            None => memory(Kind::MasterWeights, DType::F32),
        };
        SubGroup {
            role,
            slots: Vec::new(),
            len: 0,
            weights: placement.params.is_sharded().then(weights),
            master: (*dtype != DType::F32).then(master),
            grads: Vec::new(),
            grad_file: None,
            moments: Vec::new(),
        }
    }

    /// Reserves `count` more elements.
    fn grow(&mut self, extent: &Extent, count: usize) -> Result<()> {
        if self.too_small {
            extent.ask_for(count);
            return Ok(());
        }
        match extent.grow(count) {
            Err(Error::OffloadSpace { .. }) => {
                self.too_small = true;
                Ok(())
            }
            result => result,
        }
    }

    /// Begins to write `values` from element `at` on.
    fn write(&mut self, extent: &Extent, at: usize, values: FlatRef<'_>) -> Result<()> {
        let Some(offload) = self.plan.offload.as_ref().filter(|_| !self.too_small) else { return Ok(()) };
        for start in (0..values.len()).step_by(PIECE) {
            let part = values.slice(start..values.len().min(start + PIECE));
            let mut piece = Flat::with_capacity(extent.dtype(), part.len());
            piece.extend_cast(part);
            let place = extent.piece(at + start..at + start + part.len(), 0);
            self.writing.push_back(offload.io.write(piece, vec![place]));
            if self.writing.len() > IN_FLIGHT {
                self.writing.pop_front().map_or(Ok(()), Transfer::written)?;
            }
        }
        Ok(())
    }

    fn close(&mut self) {
        self.done.extend(self.open.iter_mut().filter_map(Option::take));
    }

    /// Ends the layout: reserves the files of gradients and moments, and allocates what stays in memory.
    ///
    /// Where a file got no space, the groups are not to be used: [`Offload::check_space`] says so.
    ///
    /// # Errors
    /// A file operation.
    pub fn finish(&mut self) -> Result<Vec<SubGroup>> {
        self.close();
        let mut groups = std::mem::take(&mut self.done);
        // So that the order of parameters, and of sums over them, does not depend on where sub-groups end.
        groups.sort_by_key(|group| group.role);
        self.writing.drain(..).try_for_each(Transfer::written)?;
        let offload = self.plan.offload.clone();
        let optimizer = offload.as_ref().and_then(|o| o.optimizer.as_ref());
        let stay = optimizer.map_or(groups.len(), |o| groups_in_memory(groups.len(), o.settings.ratio));
        for (i, group) in groups.iter_mut().enumerate() {
            let names = self.plan.grouping.state_names(group.role);
            match optimizer.filter(|_| i >= stay) {
                Some(files) => {
                    let extent = |arena, dtype| Extent::at_end_of(arena, dtype);
                    let grads = extent(&files.gradients, self.plan.grad_dtype);
                    let moments: Vec<Extent> =
                        names.iter().map(|name| extent(&files.moments[name], DType::F32)).collect();
                    for extent in moments.iter().chain([&grads]) {
                        self.grow(extent, group.len)?;
                    }
                    group.grad_file = Some(grads);
                    group.moments = moments.into_iter().map(Home::File).collect();
                }
                None => {
                    if let (Some(offload), false) = (&offload, self.too_small) {
                        group.bring_master_to_memory(offload, &self.ledger)?;
                    }
                    let zeros = || Tracked::new(&self.ledger, Kind::Moments, Flat::zeros(DType::F32, group.len));
                    group.moments = names.iter().map(|_| Home::Memory(zeros())).collect();
                }
            }
        }
        Ok(groups)
    }
}

impl SubGroup {
    fn bring_master_to_memory(&mut self, offload: &Offload, ledger: &Ledger) -> Result<()> {
        let Some(Home::File(extent)) = &self.master else { return Ok(()) };
        let values = Tracked::new(ledger, Kind::MasterWeights, Flat::zeros(DType::F32, self.len));
        let values = offload.io.read(values, vec![extent.piece(0..self.len, 0)]).wait()?;
        extent.give_back(self.len);
        self.master = Some(Home::Memory(values));
        Ok(())
    }

    /// Takes a gradient out, to be added to and put back; nothing where none has arrived.
    pub fn take_grads(&mut self, slot: usize, core: &Core) -> Result<Option<Tracked>> {
        match (std::mem::replace(&mut self.grads[slot], GradShare::Absent), &self.grad_file, &core.offload) {
            (GradShare::Memory(grads), ..) => Ok(Some(grads)),
            (GradShare::File { writing, .. }, Some(file), Some(offload)) => {
                writing.map_or(Ok(()), Transfer::written)?;
                let Slot { at, len, .. } = self.slots[slot];
                let room = Tracked::new(&core.ledger, Kind::Gradients, Flat::zeros(file.dtype(), len));
                offload.io.read(room, vec![file.piece(at..at + len, 0)]).wait().map(Some)
            }
            _ => Ok(None),
        }
    }

    /// A gradient is complete as far as this micro step goes: it stays in memory, or begins its way to the file.
    pub fn put_grads(&mut self, slot: usize, grads: Tracked, core: &Core) {
        self.grads[slot] = match (&self.grad_file, &core.offload) {
            (Some(file), Some(offload)) => {
                let Slot { at, len, .. } = self.slots[slot];
                // Now, while it is in memory. The last micro step's is what counts.
                let squares = sum_of_squares(grads.slice(core.own_part(&self.slots[slot])));
                let piece = file.piece(at..at + len, 0);
                let writing = Some(offload.io.write_and_drop(grads, vec![piece]));
                GradShare::File { writing, squares }
            }
            _ => GradShare::Memory(grads),
        };
    }

    /// The gradient buffer of a slot (its owned elements and padding), zeroed where none has arrived.
    pub fn zeroed_grads(&self, slot: usize, ledger: &Ledger, dtype: DType) -> Tracked {
        Tracked::new(ledger, Kind::Gradients, Flat::zeros(dtype, self.slots[slot].len))
    }

    /// What a window of a pass brings in from files and back, in the order in which [`Home::part`] asks for it:
    /// weights, master weights, moments, gradients.
    pub fn streams(&self, pass: Pass) -> Vec<Stream> {
        let writes = pass.changes();
        let changes = |home: &Home| home.file().map(|e| Stream { extent: e.clone(), reads: true, writes });
        // 16-bit weights are made anew from the master weights.
        let made_anew = self.master.is_some();
        let of_weights = self.weights.as_ref().and_then(changes).map(|s| Stream { reads: !made_anew, ..s });
        let weights = of_weights.into_iter().chain(self.master.as_ref().and_then(changes));
        let grads = self.grad_file.clone().map(|extent| Stream { extent, reads: true, writes: false });
        let moments = self.moments.iter().filter_map(changes).chain(grads);
        let weights = weights.filter(|_| pass.has_weights());
        weights.chain(moments.filter(|_| pass.has_moments())).collect()
    }
}
