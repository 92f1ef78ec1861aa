//! One rank, as the decisions of a training step see it.
//!
//! Decisions are written once, over [`Rank`]. They are carried out by the engine's [`Core`], or the rehearsal of an
//! estimate, which has sizes in the place of values and counts what travels. What either does with values of gradients
//! and states stands, as a trait `Carrier`, beside the decisions: in `gradients.rs` and `walk.rs`.

use super::core::Core;
use super::moving::{Cargo, Moving};
use super::sub_group::SubGroup;
use super::travel::{Collective, Means, Travel};
use crate::comm::WireFormat;
use crate::config::ZeroConfig;
use crate::error::Result;
use crate::layout::{Division, Placement};
use crate::memory::{Held, Kind, Ledger, MemoryReport, ModelBytes, StateBytes, Tier};
use crate::offload::{Files, Io, Windows};
use crate::param::{Param, ParamId};
use crate::precision::{ElementBuffer, WeightPacking};
use crate::tensor::flat_buffer::{BufferDevice, FlatBuffer};
use crate::tensor::host_slice::with_part;
use crate::tensor::residency;
use crate::util::lock;
use candle_core::DType;
use std::ops::Range;
use std::sync::MutexGuard;
#[cfg(feature = "cuda")]
use {crate::tensor::device_elements::with_each, candle_core::Storage};

/// The constants of a rank while it trains.
pub(crate) struct Facts<'a> {
    pub rank: usize,
    pub division: Division,
    /// Ranks of a group that keeps a second copy of gathered parameters; 1: there is none.
    pub second_group: usize,
    pub params: &'a [Param],
    pub zero: &'a ZeroConfig,
    /// The model's.
    pub dtype: DType,
    /// Where whole parameters are.
    pub tier: Tier,
    pub ledger: &'a Ledger,
}

/// A kind of memory in which a rank has buffers.
pub(crate) type PlaceOf<R> = <<R as Rank>::Buffer as ElementBuffer>::Place;

/// A rank that trains, or rehearses it.
pub(crate) trait Rank: Sized {
    /// Elements in memory.
    type Buffer: ElementBuffer;
    /// A collective under way.
    type Pending;
    /// A buffer on its way between the host and the GPU on which the model computes.
    type Moving;
    /// Where states lie that are not in memory.
    type Files: Files<Buffer = Self::Buffer>;

    fn facts(&self) -> Facts<'_>;
    /// Where this rank's share lies, if not in files.
    fn home(&self) -> &PlaceOf<Self>;
    /// Where the model computes: gathered parameters, and what travels between ranks.
    fn model_place(&self) -> &PlaceOf<Self>;
    /// A model is only evaluated.
    fn is_evaluating(&self) -> bool;
    /// This rank's share.
    fn groups(&self) -> MutexGuard<'_, Vec<SubGroup<Self>>>;
    /// Sub-group and slot of a parameter.
    fn place(&self, param: ParamId) -> (usize, usize);
    fn files(&self) -> Option<&Self::Files>;
    /// How a pass goes through files.
    fn windows(&self) -> Windows;
    /// Begins a collective on what belongs to `params`.
    fn launch(
        &self,
        collective: Collective,
        wire: WireFormat,
        buffer: Self::Buffer,
        params: &[ParamId],
    ) -> Result<Self::Pending>;
    /// Waits for its result, which lies in the memory of its argument.
    fn wait(&self, pending: Self::Pending) -> Result<Self::Buffer>;
    /// Begins to bring a buffer to a place, if it is not there. On a GPU there will be room for `capacity` elements.
    fn send(&self, cargo: Cargo, buffer: Self::Buffer, to: &PlaceOf<Self>, capacity: usize) -> Result<Self::Moving>;
    /// Waits until it is there.
    fn arrived(&self, moving: Self::Moving) -> Result<Self::Buffer>;
    /// A few numbers of every rank, in rank order.
    fn gather_f64(&self, values: Vec<f64>) -> Result<Vec<Vec<f64>>>;
    /// Appends elements `range` of a whole parameter to a buffer.
    fn copy(&self, param: &Param, range: Range<usize>, to: &mut Self::Buffer) -> Result<()>;
    /// Puts a whole parameter into its tensor.
    fn put(&self, param: &Param, whole: Self::Buffer) -> Result<()>;

    fn rank(&self) -> usize {
        self.facts().rank
    }

    fn division(&self) -> Division {
        self.facts().division
    }

    /// All ranks, over which means and sums are.
    fn world_size(&self) -> usize {
        self.division().world_size()
    }

    /// Begins to join the shards of all places.
    fn gather(&self, wire: WireFormat, shard: Self::Buffer, params: &[ParamId]) -> Result<Self::Pending> {
        let collective = match self.division() {
            division if division.copies() == 1 => Collective::AllGather,
            division => Collective::GatherWithin(division.shards()),
        };
        self.launch(collective, wire, shard, params)
    }

    /// Begins to sum all pieces of all ranks; each rank receives those of its shard.
    fn reduce(&self, wire: WireFormat, pieces: Self::Buffer, params: &[ParamId]) -> Result<Self::Pending> {
        let collective = match self.division() {
            division if division.copies() == 1 => Collective::ReduceScatter,
            division => Collective::ReduceToGroups(division.shards()),
        };
        self.launch(collective, wire, pieces, params)
    }

    fn second_group(&self) -> usize {
        self.facts().second_group
    }

    fn params(&self) -> &[Param] {
        self.facts().params
    }

    fn zero(&self) -> &ZeroConfig {
        self.facts().zero
    }

    fn placement(&self) -> Placement {
        self.zero().stage.placement()
    }

    fn dtype(&self) -> DType {
        self.facts().dtype
    }

    fn tier(&self) -> Tier {
        self.facts().tier
    }

    fn ledger(&self) -> &Ledger {
        self.facts().ledger
    }

    /// Enters a buffer in the ledger until the result is dropped.
    fn hold(&self, kind: Kind, buffer: &Self::Buffer) -> Held {
        self.ledger().hold_in(Tier::at::<Self::Buffer>(&buffer.place()), kind, buffer.capacity_in_bytes())
    }

    /// Parameters that travel together, for people.
    fn names(&self, params: &[ParamId]) -> String {
        match params {
            [] => String::new(),
            [param] => self.params()[*param].name.clone(),
            [first, rest @ ..] => format!("{} + {}", self.params()[*first].name, rest.len()),
        }
    }

    /// The ledger's counts beside the formula, for gradients that are accumulated in `accumulate`.
    fn ledger_report(&self, accumulate: DType) -> MemoryReport {
        let Facts { division, params, zero, dtype, ledger, .. } = self.facts();
        let mut bytes = ModelBytes::default();
        for group in self.groups().iter() {
            let numel: usize = group.slots.iter().map(|s| params[s.param].numel).sum();
            let of = |size: usize| StateBytes { whole: numel * size, own: group.len * size };
            let add = |sum: &mut StateBytes, more: StateBytes| {
                *sum = StateBytes { whole: sum.whole + more.whole, own: sum.own + more.own };
            };
            let packed = |packing: WeightPacking| {
                let whole = group.slots.iter().map(|s| packing.packed_len(params[s.param].numel)).sum();
                StateBytes { whole, own: group.len * size_of::<f32>() }
            };
            let plain = || of(group.class.weights.dtype(dtype).size_in_bytes());
            let weights = group.packed().map_or_else(plain, |(packing, _)| packed(packing));
            add(&mut bytes.params, weights);
            if group.class.is_trained() {
                add(&mut bytes.grads, of(accumulate.size_in_bytes()));
                add(&mut bytes.master, of(if group.master.is_some() { 4 } else { 0 }));
                for format in group.moments.iter().map(|moment| moment.format) {
                    let own = format.bytes(group.len);
                    let whole = match zero.stage.placement().optim.is_sharded() {
                        true => group.slots.iter().map(|slot| format.bytes(params[slot.param].numel)).sum(),
                        // A block that is not full takes its whole place.
                        false => own,
                    };
                    add(&mut bytes.moments, StateBytes { whole, own });
                }
            }
        }
        let elements = |frozen: bool| params.iter().filter(|p| !frozen || !p.is_trained()).map(|p| p.numel).sum();
        MemoryReport::new(ledger, zero.stage, division, (elements(false), elements(true)), bytes)
    }
}

/// A place in a file.
pub(crate) type ExtentOf<R> = <<R as Rank>::Files as Files>::Extent;

/// Memory of a window of the optimizer step.
pub(crate) type StagingOf<R> = <<R as Rank>::Files as Files>::Staging;

impl Rank for Core {
    type Buffer = FlatBuffer;
    type Pending = Travel;
    type Moving = Moving;
    type Files = Io;

    fn facts(&self) -> Facts<'_> {
        Facts {
            rank: self.comm.rank(),
            division: self.share_plan.division,
            second_group: self.second_group,
            params: &self.params,
            zero: &self.zero,
            dtype: self.dtype,
            tier: self.tensor_tier,
            ledger: &self.ledger,
        }
    }

    fn home(&self) -> &BufferDevice {
        &self.home
    }

    fn model_place(&self) -> &BufferDevice {
        &self.model_place
    }

    fn is_evaluating(&self) -> bool {
        Self::is_evaluating(self)
    }

    fn groups(&self) -> MutexGuard<'_, Vec<SubGroup>> {
        lock(&self.groups)
    }

    fn place(&self, param: ParamId) -> (usize, usize) {
        self.place_of(param)
    }

    fn files(&self) -> Option<&Io> {
        self.offload.as_ref().map(|offload| &*offload.io)
    }

    fn windows(&self) -> Windows {
        self.offload.as_ref().map_or_else(Windows::default, |offload| offload.windows())
    }

    fn launch(
        &self,
        collective: Collective,
        wire: WireFormat,
        buffer: FlatBuffer,
        params: &[ParamId],
    ) -> Result<Travel> {
        let means = Means {
            comm: self.comm(),
            #[cfg(feature = "cuda")]
            gpus: self.gpus.get(),
            #[cfg(feature = "cuda")]
            ledger: &self.ledger,
        };
        Travel::launch(&means, collective, wire, buffer, self.tag(params))
    }

    fn wait(&self, travel: Travel) -> Result<FlatBuffer> {
        travel.wait()
    }

    fn send(&self, cargo: Cargo, buffer: FlatBuffer, to: &BufferDevice, capacity: usize) -> Result<Moving> {
        #[cfg(feature = "cuda")]
        if let Some(copies) = &self.copies {
            return copies.send(cargo, buffer, to, capacity);
        }
        _ = (cargo, to, capacity);
        Ok(Moving::There(buffer))
    }

    fn arrived(&self, moving: Moving) -> Result<FlatBuffer> {
        moving.wait()
    }

    fn gather_f64(&self, values: Vec<f64>) -> Result<Vec<Vec<f64>>> {
        self.comm.gather_f64(values).wait()
    }

    fn copy(&self, param: &Param, range: Range<usize>, to: &mut FlatBuffer) -> Result<()> {
        match to {
            FlatBuffer::Host(to) => Ok(with_part(&param.tensor, range, |values| to.extend_cast(values))?),
            #[cfg(feature = "cuda")]
            FlatBuffer::Device(to) => Ok(with_each([&param.tensor], "copy", |[whole]| to.extend(&whole.part(range)?))?),
        }
    }

    fn put(&self, param: &Param, whole: FlatBuffer) -> Result<()> {
        match whole {
            FlatBuffer::Host(whole) => Ok(residency::put(&param.tensor, whole)?),
            #[cfg(feature = "cuda")]
            FlatBuffer::Device(whole) => {
                assert_eq!((whole.len(), whole.dtype()), (param.numel, param.tensor.dtype()));
                Ok(residency::fill(&param.tensor, Storage::Cuda(whole.into_storage()))?)
            }
        }
    }
}
