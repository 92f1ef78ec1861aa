//! What the engine and the operations inside the autograd graph share.
//!
//! Operations hold a [`Link`]: it leads to the [`Core`] while the engine lives, and to nothing before and after, so
//! that a model outside of an engine is a plain Candle model.

use super::gather::Gatherer;
use super::gradients::{Gradients, ReducePlan};
use super::sub_group::SubGroup;
use super::trace::Event;
use crate::comm::Communicator;
use crate::config::ZeroConfig;
use crate::error::{Error, ParamError, Result};
use crate::graph::Grad;
use crate::layout::Placement;
use crate::memory::{Ledger, Tier};
use crate::offload::Offload;
use crate::param::registry::Registered;
use crate::param::{Param, ParamId, ROOT, UnitId, lock, residency};
use crate::timeline::{self, Span};
use candle_core::DType;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};

/// The partitioned state of one rank.
pub(crate) struct Core {
    pub comm: Arc<dyn Communicator>,
    pub placement: Placement,
    pub zero: ZeroConfig,
    pub dtype: DType,
    /// Where whole parameters are.
    pub tensor_tier: Tier,
    pub ledger: Ledger,
    /// The files of what is offloaded.
    pub offload: Option<Arc<Offload>>,
    pub params: Vec<Param>,
    /// Names of the units, the root (an empty name) first.
    pub units: Vec<String>,
    /// Sub-group and slot of each parameter.
    pub places: Vec<(usize, usize)>,
    pub groups: Mutex<Vec<SubGroup>>,
    pub gather: Mutex<Gatherer>,
    pub gradients: Mutex<Gradients>,
    /// Every unit recomputes its forward in backward.
    pub recompute: bool,
    /// What recomputing units keep leaves the model's memory.
    pub cpu_checkpointing: bool,
    /// A model is only evaluated: nothing is recorded or kept.
    evaluating: AtomicBool,
    /// The first error inside an operation; Candle's own error type cannot carry it.
    failure: Mutex<Option<Error>>,
}

/// The way from an operation to the engine.
#[derive(Clone, Default)]
pub(crate) struct Link(Arc<OnceLock<Weak<Core>>>);

impl Link {
    /// The engine's core, if there is an engine.
    pub fn core(&self) -> Option<Arc<Core>> {
        self.0.get().and_then(Weak::upgrade)
    }
}

impl Core {
    /// Builds the core of a registered model and connects `link` to it.
    #[expect(clippy::too_many_arguments, reason = "called in one place, and each is a thing of its own")]
    pub fn new(
        comm: Arc<dyn Communicator>,
        zero: ZeroConfig,
        plan: ReducePlan,
        dtype: DType,
        [recompute, cpu_checkpointing]: [bool; 2],
        registered: Registered,
        ledger: Ledger,
        offload: Option<Arc<Offload>>,
        link: &Link,
    ) -> Arc<Self> {
        let Registered { params, units, groups } = registered;
        let mut places = vec![(0, 0); params.len()];
        for (g, group) in groups.iter().enumerate() {
            for (s, slot) in group.slots.iter().enumerate() {
                places[slot.param] = (g, s);
            }
        }
        let ahead = offload.as_ref().and_then(|o| o.params.as_ref()).map(|p| p.ahead);
        let gather = Gatherer::new(&params, units.len(), &zero, comm.size(), ahead);
        let gradients = Gradients::new(plan, zero.reduce_bucket_size, params.len());
        let core = Arc::new(Self {
            comm,
            placement: zero.stage.placement(),
            zero,
            dtype,
            tensor_tier: params.first().map_or(Tier::Host, |p| Tier::of(p.tensor.device())),
            ledger,
            offload,
            params,
            units,
            places,
            groups: Mutex::new(groups),
            gather: Mutex::new(gather),
            gradients: Mutex::new(gradients),
            recompute,
            cpu_checkpointing,
            evaluating: AtomicBool::new(false),
            failure: Mutex::new(None),
        });
        assert!(link.0.set(Arc::downgrade(&core)).is_ok(), "a link is connected once");
        core
    }

    /// Called by a parameter's capture operation.
    pub fn gradient_arrived(&self, param: ParamId, grad: Grad) -> candle_core::Result<()> {
        let arrived = lock(&self.gradients).arrive(self, param, grad);
        arrived.and_then(|()| self.release_param(param)).map_err(|e| self.stash(e))
    }

    fn release_param(&self, param: ParamId) -> Result<()> {
        if self.placement.params.is_sharded() { lock(&self.gather).release_param(self, param) } else { Ok(()) }
    }

    /// A unit is about to run forward or backward.
    pub fn enter(&self, event: Event) -> candle_core::Result<()> {
        if let Event::Backward(_) = event {
            timeline::end_section();
        }
        lock(&self.gather).enter(self, event).map_err(|e| self.stash(e))?;
        if let Event::Backward(unit) = event {
            timeline::section(timeline::Kind::Unit, "backward", || self.unit_name(unit));
        }
        Ok(())
    }

    /// A unit's forward in the timeline, from now on.
    pub fn forward_span(&self, unit: UnitId) -> Span {
        timeline::span(timeline::Kind::Unit, "forward").of(|| self.unit_name(unit))
    }

    /// A unit's name for people.
    pub fn unit_name(&self, unit: UnitId) -> String {
        if unit == ROOT { "root".to_owned() } else { self.units[unit].clone() }
    }

    /// Parameters that travel together, for people.
    pub fn names(&self, params: &[ParamId]) -> String {
        match params {
            [] => String::new(),
            [param] => self.params[*param].name.clone(),
            [first, rest @ ..] => format!("{} + {}", self.params[*first].name, rest.len()),
        }
    }

    /// A unit's forward is over.
    pub fn leave_forward(&self, unit: UnitId) -> candle_core::Result<()> {
        lock(&self.gather).leave_forward(self, unit).map_err(|e| self.stash(e))
    }

    /// A unit will run again in backward.
    pub fn will_recompute(&self) {
        lock(&self.gather).will_recompute();
    }

    /// Runs a backward inside of the engine's.
    pub fn nested<T>(&self, backward: impl FnOnce() -> T) -> T {
        lock(&self.gather).nest();
        let _sections = timeline::sections();
        let result = backward();
        lock(&self.gather).unnest();
        result
    }

    /// Whether a model is only evaluated.
    pub fn is_evaluating(&self) -> bool {
        self.evaluating.load(Ordering::Relaxed)
    }

    /// Switches between training and evaluation.
    pub fn set_evaluating(&self, evaluating: bool) {
        self.evaluating.store(evaluating, Ordering::Relaxed);
    }

    /// Keeps `error` for the engine and gives Candle its text.
    pub fn stash(&self, error: Error) -> candle_core::Error {
        let text = error.to_string();
        lock(&self.failure).get_or_insert(error);
        candle_core::Error::Msg(text)
    }

    /// The typed error behind a failed Candle operation.
    pub fn explain(&self, error: candle_core::Error) -> Error {
        if let Some(failure) = lock(&self.failure).take() {
            return failure;
        }
        if residency::is_refusal(&error) {
            let absent: Vec<&str> = self.params.iter().filter(|p| !p.is_whole()).map(|p| p.name.as_str()).collect();
            if !absent.is_empty() {
                let why = crate::error::without_backtrace(&error.to_string());
                return ParamError::Absent { names: crate::param::list(&absent), why }.into();
            }
        }
        error.into()
    }

    /// A hash of which parameters travel together, for the collectives' fingerprints.
    pub fn tag(&self, params: &[ParamId]) -> u64 {
        params.iter().fold(0xcbf2_9ce4_8422_2325, |h, p| (h ^ *p as u64).wrapping_mul(0x0000_0100_0000_01b3))
    }
}
