//! A training step that only counts: the engine's layout, decisions and ledger, without memory, files and ranks.
//!
//! Shares are laid out by [`Sharing`], units are gathered by the engine's own [`Gatherer`], buckets fill by
//! [`BucketRule`](crate::layout::BucketRule), and every allocation is entered in a [`Ledger`], as in the engine. What depends on the model's
//! operations is taken as models usually are: units run in the order of registration, and gradients arrive in the
//! reverse order.

use super::files;
use super::gradients::GradientRehearsal;
use super::traffic::Traffic;
use crate::comm::{Kind as Collective, Wire};
use crate::config::{Config, OffloadOptimizer, OffloadTo, ZeroConfig};
use crate::error::Result;
use crate::layout::{Placement, Sharing, groups_in_memory};
use crate::memory::{ElementBytes, Held, Kind, Ledger, MemoryReport, Tier};
use crate::offload::{DiskAccess, STEP};
use crate::optim::{self, Grouping, Role};
use crate::param::{Param, ParamId, ROOT, Residency};
use crate::util::lock;
use crate::zero::gather::{Bundle, Carrier, Gatherer};
use crate::zero::gradients::ReducePlan;
use crate::zero::parcel::Parcel;
use crate::zero::trace::Event;
use candle_core::DType;
use std::cell::RefCell;
use std::sync::Arc;

/// Where one kind of state of a sub-group lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Home {
    /// There is none: f32 parameters have no master weights, and whole ones no share.
    None,
    Memory,
    File,
}

/// One sub-group.
pub(super) struct Group {
    /// The half of the optimizer that trains it.
    pub role: Role,
    pub params: Vec<ParamId>,
    /// Elements of each kind of state.
    pub len: usize,
    pub weights: Home,
    pub master: Home,
    /// Of gradients and moments.
    pub states: Home,
}

/// One rank.
pub(super) struct Rehearsal<'a> {
    pub params: &'a [Param],
    pub config: &'a Config,
    pub world: usize,
    pub placement: Placement,
    pub dtype: DType,
    pub plan: ReducePlan,
    /// Where whole parameters are.
    pub tier: Tier,
    /// Units recompute their forward.
    pub recompute: bool,
    pub access: DiskAccess,
    /// The optimizer, and which of its halves trains what.
    pub grouping: Grouping,
    pub ledger: Ledger,
    pub groups: Vec<Group>,
    /// Elements of each parameter's share, and its sub-group.
    pub shares: Vec<(usize, usize)>,
    pub traffic: RefCell<Traffic>,
    num_units: usize,
    /// What is there from the start to the end.
    lasting: Vec<Held>,
}

/// What is offloaded to files.
fn to_files(config: &ZeroConfig) -> (Option<&OffloadOptimizer>, bool) {
    let optimizer = config.offload_optimizer.as_ref().filter(|o| matches!(o.to, OffloadTo::Nvme { .. }));
    let params = config.offload_param.as_ref().is_some_and(|p| matches!(p.to, OffloadTo::Nvme { .. }));
    (optimizer, params)
}

impl<'a> Rehearsal<'a> {
    /// The rank at the start of training. `access`: how its files are accessed; nothing for what is fastest.
    pub fn new(
        params: &'a [Param],
        num_units: usize,
        config: &'a Config,
        [recompute, gpu]: [bool; 2],
        access: Option<DiskAccess>,
    ) -> Result<Self> {
        // A parameter may be as an earlier rehearsal has left it.
        params.iter().for_each(|param| *lock(&param.residency) = Residency::Absent);
        let placement = config.zero.stage.placement();
        let dtype = config.precision.dtype();
        let mut rehearsal = Self {
            params,
            config,
            world: config.world_size,
            placement,
            dtype,
            plan: ReducePlan::new(config, placement, config.world_size, dtype),
            tier: if gpu { Tier::Device } else { Tier::Host },
            recompute: recompute || config.activation_checkpointing,
            access: access.unwrap_or(DiskAccess::Direct),
            grouping: Grouping::new(config.optimizer.as_ref().map(|o| Arc::from(optim::from_config(o))), Vec::new())?,
            ledger: Ledger::default(),
            groups: Vec::new(),
            shares: Vec::new(),
            traffic: RefCell::default(),
            num_units,
            lasting: Vec::new(),
        };
        rehearsal.lay_out();
        if access.is_none() {
            let bytes = rehearsal.file_bytes().saturating_mul(rehearsal.world as u64);
            rehearsal.access = DiskAccess::fastest(bytes, true);
        }
        Ok(rehearsal)
    }

    /// Bytes in files.
    pub fn file_bytes(&self) -> u64 {
        let kinds = [Kind::Parameters, Kind::Gradients, Kind::MasterWeights, Kind::Moments];
        kinds.iter().map(|kind| self.ledger.bytes_in(Tier::File, *kind).held as u64).sum()
    }

    fn has_files(&self) -> bool {
        let (optimizer, params) = to_files(&self.config.zero);
        optimizer.is_some() || params
    }

    /// Lays out shares and states, as registration does, and holds them.
    fn lay_out(&mut self) {
        let zero = &self.config.zero;
        let (optimizer, params_in_file) = to_files(zero);
        let sharded = self.placement.params.is_sharded();
        let mut sharing = Sharing::new(self.world, self.placement.optim.is_sharded(), zero.sub_group_size);
        if self.has_files() {
            let in_memory = zero.offload_param.as_ref().filter(|_| params_in_file).map(|p| p.max_in_cpu);
            sharing = sharing.in_files(STEP, in_memory);
            files::hold_copies_of_start(self);
        }
        let mut groups = Vec::new();
        let mut open = Role::ALL.map(|_| None);
        for (id, param) in self.params.iter().enumerate() {
            let role = self.role(param);
            let laid = sharing.push(param.numel, role as usize);
            if laid.begins {
                groups.extend(open.iter_mut().filter_map(Option::take));
            }
            let group = open[role as usize].get_or_insert_with(|| Group {
                role,
                params: Vec::new(),
                len: 0,
                weights: match (sharded, params_in_file && laid.spills) {
                    (false, _) => Home::None,
                    (true, false) => Home::Memory,
                    (true, true) => Home::File,
                },
                master: match (self.dtype, optimizer) {
                    (DType::F32, _) => Home::None,
                    (_, None) => Home::Memory,
                    (_, Some(_)) => Home::File,
                },
                states: Home::Memory,
            });
            group.params.push(id);
            group.len += laid.room;
            self.shares.push((0, laid.share));
            if !sharded {
                let held = self.ledger.hold_in(self.tier, Kind::Parameters, self.bytes(param.numel));
                self.lasting.push(held);
            }
            if laid.closes {
                groups.extend(open[role as usize].take());
            }
        }
        groups.extend(open.into_iter().flatten());
        groups.sort_by_key(|group: &Group| group.role);
        for (g, group) in groups.iter().enumerate() {
            group.params.iter().for_each(|param| self.shares[*param].0 = g);
            self.hold(group.weights, Kind::Parameters, group.len, self.dtype);
        }
        let masters: Vec<_> =
            groups.iter().map(|g| self.held(g.master, Kind::MasterWeights, g.len, DType::F32)).collect();
        let stay = optimizer.map_or(groups.len(), |o| groups_in_memory(groups.len(), o.ratio));
        for (i, (group, master)) in groups.iter_mut().zip(masters).enumerate() {
            if optimizer.is_some() && i >= stay {
                group.states = Home::File;
                self.hold(Home::File, Kind::Gradients, group.len, self.plan.accumulate);
                self.lasting.extend(master);
            } else if group.master == Home::File {
                // Registration has put them into the file: they are read, and their place is given back.
                group.master = Home::Memory;
                self.hold(Home::Memory, Kind::MasterWeights, group.len, DType::F32);
                drop(master);
            } else {
                self.lasting.extend(master);
            }
            for _ in self.grouping.state_names(group.role) {
                self.hold(group.states, Kind::Moments, group.len, DType::F32);
            }
        }
        self.groups = groups;
    }

    fn held(&self, home: Home, kind: Kind, elements: usize, dtype: DType) -> Option<Held> {
        let bytes = elements * dtype.size_in_bytes();
        match home {
            Home::None => None,
            Home::Memory => Some(self.ledger.hold(kind, bytes)),
            Home::File => Some(self.ledger.hold_in(Tier::File, kind, bytes)),
        }
    }

    fn hold(&mut self, home: Home, kind: Kind, elements: usize, dtype: DType) {
        let held = self.held(home, kind, elements, dtype);
        self.lasting.extend(held);
    }

    /// Bytes of `elements` in the model's dtype.
    pub fn bytes(&self, elements: usize) -> usize {
        elements * self.dtype.size_in_bytes()
    }

    /// Counts a collective of exact elements.
    pub fn collective(&self, kind: Collective, elements: usize, dtype: DType) {
        self.coded(kind, elements, dtype, Wire::Exact);
    }

    /// Counts a collective.
    pub fn coded(&self, kind: Collective, elements: usize, dtype: DType, wire: Wire) {
        self.traffic.borrow_mut().collective(kind, elements, (dtype, wire), self.world);
    }

    /// The half of the optimizer that trains a parameter.
    fn role(&self, param: &Param) -> Role {
        Grouping::role(self.grouping.group(&param.name, param.shape.dims()))
    }

    /// Trains for some steps and gives what one of them moves.
    pub fn train(&self) -> Result<Traffic> {
        let zero = &self.config.zero;
        let ahead = zero.offload_param.as_ref().filter(|_| to_files(zero).1).map(|p| p.ahead());
        let mut gather = Gatherer::new(self.params, self.num_units, zero, self.world, ahead);
        let mut gradients = GradientRehearsal::new(self);
        gather.refresh_persistent(self)?;
        // From the third micro step on all of a step are alike: what they move can be multiplied.
        let accumulation = self.config.batch.gradient_accumulation_steps;
        let micro_steps = accumulation.min(3);
        let mut moved = Traffic::default();
        // The first step records the order of the units; the others follow it.
        for _ in 0..3 {
            let before = self.traffic.borrow().clone();
            let mut last = Traffic::default();
            for _ in 0..micro_steps {
                let before = self.traffic.borrow().clone();
                self.micro_step(&mut gather, &mut gradients)?;
                last = self.traffic.borrow().since(&before);
            }
            self.step(&mut gradients);
            gather.refresh_persistent(self)?;
            moved = self.traffic.borrow().since(&before);
            moved.add(&last, (accumulation - micro_steps) as u64);
        }
        Ok(moved)
    }

    /// Forward and backward.
    fn micro_step(&self, gather: &mut Gatherer<Vec<Held>>, gradients: &mut GradientRehearsal<'_, 'a>) -> Result<()> {
        let sharded = self.placement.params.is_sharded();
        gather.enter(self, Event::Forward(ROOT))?;
        for unit in (0..self.num_units).filter(|unit| *unit != ROOT && sharded) {
            if self.recompute {
                gather.will_recompute();
            }
            gather.enter(self, Event::Forward(unit))?;
            gather.leave_forward(self, unit)?;
        }
        gather.leave_forward(self, ROOT)?;
        gather.enter(self, Event::Backward(ROOT))?;
        let mut open = ROOT;
        for (id, param) in self.params.iter().enumerate().rev() {
            if param.unit != open && sharded {
                // A unit that recomputes runs a backward of its own.
                if open != ROOT && self.recompute {
                    gather.unnest();
                }
                if param.unit != ROOT && self.recompute {
                    gather.nest();
                }
                if param.unit != ROOT {
                    gather.enter(self, Event::Backward(param.unit))?;
                }
                open = param.unit;
            }
            gradients.arrive(id);
            if sharded {
                gather.release_param(self, id)?;
            }
        }
        if open != ROOT && self.recompute {
            gather.unnest();
        }
        gradients.end_backward();
        gather.end(self)
    }

    /// What the ledger has counted, beside the formula.
    pub fn report(&self) -> MemoryReport {
        let each = ElementBytes {
            params: self.dtype.size_in_bytes(),
            grads: self.plan.accumulate.size_in_bytes(),
            master: if self.dtype == DType::F32 { 0 } else { 4 },
            moments: self.params.iter().map(|p| 4 * p.numel * self.grouping.state_names(self.role(p)).len()).sum(),
        };
        let parameters = self.params.iter().map(|p| p.numel).sum();
        let share = self.groups.iter().map(|g| g.len).sum();
        let moments = self.groups.iter().map(|g| 4 * g.len * self.grouping.state_names(g.role).len()).sum();
        MemoryReport::new(&self.ledger, self.config.zero.stage, self.world, parameters, [share, moments], each)
    }
}

impl Carrier for Rehearsal<'_> {
    type Gathering = Vec<Held>;

    fn params(&self) -> &[Param] {
        self.params
    }

    fn zero(&self) -> &ZeroConfig {
        &self.config.zero
    }

    fn is_evaluating(&self) -> bool {
        false
    }

    fn launch(&self, bundle: &Bundle) -> Vec<Held> {
        let launch = |parcel: &Parcel| {
            let in_file = |p: &&ParamId| self.groups[self.shares[**p].0].weights == Home::File;
            let read: usize = parcel.params.iter().filter(in_file).map(|p| self.shares[*p].1).sum();
            self.traffic.borrow_mut().read(read, self.dtype);
            self.ledger.hold(Kind::Gathered, self.bytes(parcel.chunk * self.world))
        };
        bundle.parcels.iter().map(launch).collect()
    }

    fn install(&self, bundle: &Bundle, gathering: Vec<Held>, kind: Kind) -> Result<()> {
        for (parcel, held) in bundle.parcels.iter().zip(gathering) {
            self.coded(Collective::AllGather, parcel.chunk, self.dtype, bundle.wire);
            drop(held);
            for p in &parcel.params {
                // A parameter that travelled alone takes the buffer over, padding included.
                let elements = if parcel.params.len() == 1 { parcel.chunk * self.world } else { self.params[*p].numel };
                let held = self.ledger.hold_in(self.tier, kind, self.bytes(elements));
                *lock(&self.params[*p].residency) = Residency::Whole(held);
            }
        }
        Ok(())
    }

    /// In the recorded order, which a rehearsal never leaves, nothing is gathered that nobody comes for.
    fn forget(&self, _: Vec<Held>) -> Result<()> {
        Ok(())
    }
}
