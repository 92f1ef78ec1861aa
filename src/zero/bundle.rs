//! Parameters that are gathered and released together, and how: from all ranks, or from this host's second copy.

use super::moving::Cargo;
use super::parcel::Parcel;
use super::rank::{PlaceOf, Rank};
use super::sub_group::Home;
use super::travel::Collective;
use crate::comm::WireFormat;
use crate::error::Result;
use crate::layout::Division;
use crate::memory::{Held, Kind};
use crate::offload::Files;
use crate::param::{Param, ParamId, Residency};
use crate::precision::ElementBuffer;
use crate::tensor::residency;
use crate::timeline;
use crate::util::lock;

/// Parameters that are gathered and released together, in one all-gather for each large one and one for all small ones.
pub(super) struct Bundle {
    pub params: Vec<ParamId>,
    pub parcels: Vec<Parcel>,
    pub numel: usize,
    pub wire: WireFormat,
}

/// The parcels of a bundle that are under way.
pub(super) type Gathering<R> = Vec<(Transit<R>, Held)>;

/// How far a parcel has come.
pub(super) enum Transit<R: Rank> {
    /// This rank's shards are being read from a file. The all-gather begins when they are asked for, so that all ranks
    /// issue it at the same point.
    Reading(<R::Files as Files>::Reading),
    /// They are on their way from the host to the GPU. Likewise.
    Moving(R::Moving),
    /// The all-gather is under way.
    Travelling(R::Pending),
}

/// This rank's part of its group's second copy of each parcel of a bundle; none until a forward has gathered it.
pub(super) type SecondCopy<R> = Option<Vec<(<R as Rank>::Buffer, Held)>>;

/// What becomes of a gathered bundle.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum After {
    /// It is used, and gathered in the same way the next time.
    Used,
    /// This rank's group keeps a copy of it, to gather it from.
    Kept,
}

impl Bundle {
    pub fn new(params: Vec<ParamId>, all: &[Param], division: Division, wire: WireFormat) -> Self {
        let numel = params.iter().map(|p| all[*p].numel).sum();
        let parcels = Parcel::split(&params, all, division, wire);
        Self { params, parcels, numel, wire }
    }

    /// Empties the parameters' tensors.
    pub fn release(&self, all: &[Param]) -> Result<()> {
        self.params.iter().try_for_each(|param| release(&all[*param]).map(drop))
    }

    /// Begins the all-gathers inside of this rank's group.
    ///
    /// # Errors
    /// A GPU without memory.
    pub fn launch_within<R: Rank>(&self, core: &R, second: &[(R::Buffer, Held)]) -> Result<Gathering<R>> {
        let launch = |(parcel, (part, _)): (&Parcel, &(R::Buffer, Held))| {
            let _about = timeline::about(|| core.names(&parcel.params));
            let _span = timeline::span(timeline::EventCategory::Gather, "launch").of(|| core.names(&parcel.params));
            let room = parcel.chunk * core.division().shards();
            let mut buffer = R::Buffer::with_capacity(&part.place(), part.dtype(), room)?;
            buffer.extend_from(part, 0..part.len())?;
            let held = core.hold(Kind::Gathered, &buffer);
            let within = Collective::GatherWithin(core.second_group());
            Ok((Transit::Travelling(core.launch(within, WireFormat::Exact, buffer, &parcel.params)?), held))
        };
        self.parcels.iter().zip(second).map(launch).collect()
    }

    /// Begins the all-gathers of this rank's shares, or to read them.
    ///
    /// # Errors
    /// A GPU without memory.
    pub fn launch<R: Rank>(&self, core: &R) -> Result<Gathering<R>> {
        let groups = core.groups();
        let launch = |parcel: &Parcel| {
            let _about = timeline::about(|| core.names(&parcel.params));
            let _span = timeline::span(timeline::EventCategory::Gather, "launch").of(|| core.names(&parcel.params));
            // They lie in one place, as they are of one kind.
            let place = parcel.params.first().and_then(|p| match &groups[core.place(*p).0].weights {
                Some(Home::Memory(weights)) => Some(weights.buffer().place()),
                _ => None,
            });
            let place = place.unwrap_or_else(R::Buffer::host);
            let goes_on = goes_to_gpu(core, parcel, &place);
            // Room for the chunks of all shards, where they are gathered: the others' arrive in the same buffer.
            let room = if goes_on { parcel.chunk } else { parcel.chunk * core.division().shards() };
            let mut chunk = R::Buffer::with_capacity(&place, parcel.dtype(core.dtype()), room)?;
            let mut pieces = Vec::new();
            for (p, offset) in parcel.params.iter().zip(&parcel.offsets) {
                chunk.extend_zeros(offset - chunk.len())?;
                let (group, slot) = core.place(*p);
                let share = groups[group].slots[slot].padded();
                match &groups[group].weights {
                    Some(Home::Memory(weights)) => chunk.extend_from(weights.buffer(), share)?,
                    Some(Home::File(weights)) => {
                        pieces.push((weights.clone(), share.clone(), chunk.len()));
                        chunk.extend_zeros(share.len())?;
                    }
                    None => unreachable!("sharded parameters lie in their sub-group"),
                }
            }
            let held = core.hold(Kind::Gathered, &chunk);
            let way = match core.files() {
                Some(files) if !pieces.is_empty() => Transit::Reading(files.fill(chunk, pieces)),
                _ if goes_on => return self.send(core, parcel, chunk),
                _ => Transit::Travelling(self.gather(core, parcel, chunk)?),
            };
            Ok((way, held))
        };
        self.parcels.iter().map(launch).collect()
    }

    /// Begins to bring this rank's shards to the GPU. On the way they are entered already.
    fn send<R: Rank>(&self, core: &R, parcel: &Parcel, chunk: R::Buffer) -> Result<(Transit<R>, Held)> {
        let room = parcel.chunk * core.division().shards();
        let moving = core.send(Cargo::Shards, chunk, core.model_place(), room)?;
        Ok((Transit::Moving(moving), core.ledger().hold(Kind::Gathered, 0)))
    }

    fn gather<R: Rank>(&self, core: &R, parcel: &Parcel, chunk: R::Buffer) -> Result<R::Pending> {
        core.gather(parcel.wire(self.wire), chunk, &parcel.params)
    }

    /// Waits for the parcels and puts the whole parameters into their tensors. Gives this rank's part of a second copy, if
    /// one is to be kept.
    pub fn install<R: Rank>(
        &self,
        core: &R,
        gathering: Gathering<R>,
        kind: Kind,
        after: After,
    ) -> Result<SecondCopy<R>> {
        // All of them are on their way to the GPU, and then travel, before the first is waited for.
        let read = |(parcel, (way, held)): (&Parcel, (Transit<R>, Held))| {
            let _about = timeline::about(|| core.names(&parcel.params));
            match (way, core.files()) {
                (Transit::Reading(reading), Some(files)) => {
                    let chunk = files.filled(reading)?;
                    if goes_to_gpu(core, parcel, &chunk.place()) {
                        return self.send(core, parcel, chunk);
                    }
                    Ok((Transit::Travelling(self.gather(core, parcel, chunk)?), held))
                }
                (way, _) => Ok((way, held)),
            }
        };
        let read = self.parcels.iter().zip(gathering).map(read).collect::<Result<Vec<_>>>()?;
        let travel = |(parcel, (way, held)): (&Parcel, (Transit<R>, Held))| {
            let _about = timeline::about(|| core.names(&parcel.params));
            match way {
                Transit::Moving(moving) => {
                    let chunk = core.arrived(moving)?;
                    let held = core.hold(Kind::Gathered, &chunk);
                    Ok((self.gather(core, parcel, chunk)?, held))
                }
                Transit::Travelling(pending) => Ok((pending, held)),
                Transit::Reading(_) => unreachable!("what is read lies in files"),
            }
        };
        let travelling = self.parcels.iter().zip(read).map(travel).collect::<Result<Vec<_>>>()?;
        let mut second = Vec::new();
        for (parcel, (pending, held)) in self.parcels.iter().zip(travelling) {
            let chunks = core.wait(pending)?;
            drop(held);
            if after == After::Kept {
                second.push(part_of_group(core, &chunks)?);
            }
            let _span = timeline::span(timeline::EventCategory::Gather, "install").of(|| core.names(&parcel.params));
            // Small parameters are copied out of the buffer, which a GPU has no room to spare for.
            let is_copied = parcel.params.len() > 1 && R::Buffer::is_device(&chunks.place());
            let _copied = is_copied.then(|| core.hold(Kind::Buckets, &chunks));
            parcel.unpack(core, chunks, |param, whole| {
                let held = core.ledger().hold_in(core.tier(), kind, whole.capacity_in_bytes());
                core.put(param, whole)?;
                *lock(&param.residency) = Residency::Whole(held);
                Ok(())
            })?;
        }
        Ok((after == After::Kept).then_some(second))
    }
}

/// Whether a parcel's shards, which lie in `place`, are gathered on the GPU, to which they have to be brought. Packed ones are
/// unpacked on the host.
fn goes_to_gpu<R: Rank>(core: &R, parcel: &Parcel, place: &PlaceOf<R>) -> bool {
    R::Buffer::is_device(core.model_place()) && !R::Buffer::is_device(place) && !parcel.is_packed()
}

/// This rank's part of a parcel's chunks, as its group divides them.
fn part_of_group<R: Rank>(core: &R, chunks: &R::Buffer) -> Result<(R::Buffer, Held)> {
    let ranks = core.second_group();
    let (len, place) = (chunks.len() / ranks, core.rank() % ranks);
    let mut part = R::Buffer::with_capacity(&chunks.place(), chunks.dtype(), len)?;
    part.extend_from(chunks, place * len..(place + 1) * len)?;
    let held = core.hold(Kind::SecondCopy, &part);
    Ok((part, held))
}

/// Waits for parcels that nobody came for: also for what is only being read, since the step may write there.
pub(super) fn forget<R: Rank>(core: &R, gathering: Gathering<R>) -> Result<()> {
    gathering.into_iter().try_for_each(|(way, _)| match (way, core.files()) {
        (Transit::Travelling(pending), _) => core.wait(pending).map(drop),
        (Transit::Moving(moving), _) => core.arrived(moving).map(drop),
        (Transit::Reading(reading), Some(files)) => files.filled(reading).map(drop),
        (Transit::Reading(_), None) => unreachable!("what is read lies in files"),
    })
}

/// Empties a parameter's tensor; false if it was empty already.
pub(super) fn release(param: &Param) -> Result<bool> {
    if !param.is_whole() {
        return Ok(false);
    }
    residency::clear(&param.tensor)?;
    *lock(&param.residency) = Residency::Absent;
    Ok(true)
}
