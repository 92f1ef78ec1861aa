//! A unit is what is gathered and released together: one transformer block.
//!
//! ```text
//!   forward    gather | inner.forward | release | mark the output
//!   backward   mark: gather | inner's operations; each parameter is released when its gradient has arrived
//! ```
//!
//! The mark is an identity operation on the unit's output: Candle runs its backward before any backward of the
//! unit's own operations. Without an engine, and where parameters are not sharded, a unit passes through.
//!
//! A unit may recompute (activation checkpointing): forward keeps only its input, and backward runs forward again.

use super::core::{Core, Link};
use super::trace::Event;
use crate::param::UnitId;
use crate::param::registry::Registry;
use crate::param::residency::Prepared;
use candle_core::{CpuStorage, CudaStorage, CustomOp1, Layout, Result, Shape, Tensor, Var};
use candle_nn::{Module, VarBuilder};
use std::cell::RefCell;
use std::sync::Arc;

thread_local! {
    /// The registry of the model that this thread is building for an engine.
    static BUILDING: RefCell<Option<Registry>> = const { RefCell::new(None) };
}

/// Runs `build` with `registry` as the one that [`unit`] finds.
pub(crate) fn building<T>(registry: &Registry, build: impl FnOnce() -> T) -> T {
    struct Reset(Option<Registry>);
    impl Drop for Reset {
        fn drop(&mut self) {
            BUILDING.set(self.0.take());
        }
    }
    let _reset = Reset(BUILDING.replace(Some(registry.clone())));
    build()
}

/// A part of a model whose parameters are gathered and released together at stage 3.
pub struct Unit<M> {
    inner: Arc<M>,
    /// The unit's number and the way to the engine; nothing outside of an engine.
    hook: Option<(UnitId, Link)>,
    recompute: bool,
}

/// Builds a unit: the parameters that `build` takes from its `VarBuilder` belong to it. A parameter that several units
/// take by the same name belongs to none of them: it is in memory during the whole forward and backward.
///
/// ```
/// use candle_core::{Result, Tensor};
/// use candle_nn::{Linear, Module, VarBuilder, linear};
/// use candle_zero::zero::{Unit, unit};
///
/// struct Mlp {
///     layers: Vec<Unit<Linear>>,
/// }
///
/// impl Mlp {
///     fn new(vb: VarBuilder) -> Result<Self> {
///         let layer = |i| unit(vb.pp(format!("layer.{i}")), |vb| linear(16, 16, vb));
///         Ok(Self { layers: (0..4).map(layer).collect::<Result<_>>()? })
///     }
///
///     fn forward(&self, x: &Tensor) -> Result<Tensor> {
///         self.layers.iter().try_fold(x.clone(), |x, layer| layer.forward(&x)?.relu())
///     }
/// }
/// ```
pub fn unit<M>(vb: VarBuilder<'_>, build: impl FnOnce(VarBuilder<'_>) -> Result<M>) -> Result<Unit<M>> {
    let registry = BUILDING.with_borrow(|r| r.clone());
    let Some(registry) = registry else {
        return Ok(Unit { inner: Arc::new(build(vb)?), hook: None, recompute: false });
    };
    let hook = registry.open_unit(vb.prefix());
    let inner = build(vb);
    registry.close_unit();
    Ok(Unit { inner: Arc::new(inner?), hook: Some(hook), recompute: false })
}

impl<M> Unit<M> {
    /// With `true`, backward runs the unit's forward again instead of keeping its activations. The results are the
    /// same bits; memory falls to the unit's input, and a step takes about a third longer. Without an engine it has no
    /// effect.
    #[must_use]
    pub fn checkpointed(mut self, recompute: bool) -> Self {
        self.recompute = recompute;
        self
    }

    /// The module inside. Its parameters may be used only while the unit's forward runs.
    pub fn inner(&self) -> &M {
        &self.inner
    }
}

impl<M: Module + Send + Sync + 'static> Module for Unit<M> {
    /// Runs the module on `x`, with its parameters in memory.
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let core = self.core();
        if core.as_ref().is_some_and(|(_, core)| core.is_evaluating()) {
            return self.run(&core, &x.detach()).map(|y| y.detach());
        }
        // Recomputation delivers the parameters' gradients to an engine; without one they belong in Candle's graph.
        // An untracked input would keep the recomputing operation's backward from ever being called.
        if let Some((_, core_ref)) = &core
            && (self.recompute || core_ref.recompute)
            && x.track_op()
        {
            core_ref.will_recompute();
            let output = Prepared::copy_of(&self.run(&core, &x.detach())?)?;
            return x.apply_op1(Recompute { unit: self.clone(), output });
        }
        let y = self.run(&core, x)?;
        match (&self.hook, core) {
            (Some((unit, link)), Some((_, core))) if core.placement.params.is_sharded() => {
                let output = Prepared::copy_of(&y)?;
                y.apply_op1(Mark { unit: *unit, link: link.clone(), output })
            }
            _ => Ok(y),
        }
    }
}

impl<M> Clone for Unit<M> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), hook: self.hook.clone(), recompute: self.recompute }
    }
}

impl<M: std::fmt::Debug> std::fmt::Debug for Unit<M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Unit").field("inner", &self.inner).field("recompute", &self.recompute).finish_non_exhaustive()
    }
}

impl<M: Module> Unit<M> {
    fn core(&self) -> Option<(UnitId, Arc<Core>)> {
        let (unit, link) = self.hook.as_ref()?;
        Some((*unit, link.core()?))
    }

    fn run(&self, core: &Option<(UnitId, Arc<Core>)>, x: &Tensor) -> Result<Tensor> {
        let sharded = |(_, core): &&(UnitId, Arc<Core>)| core.placement.params.is_sharded();
        let Some((unit, core)) = core.as_ref().filter(sharded) else { return self.inner.forward(x) };
        core.enter(Event::Forward(*unit))?;
        let y = self.inner.forward(x)?;
        core.leave_forward(*unit)?;
        Ok(y)
    }
}

/// Identity on a unit's output: its backward comes before the unit's own.
struct Mark {
    unit: UnitId,
    link: Link,
    output: Prepared,
}

impl CustomOp1 for Mark {
    fn name(&self) -> &'static str {
        "unit-output"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        self.output.cpu()
    }

    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        self.output.cuda()
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        if let Some(core) = self.link.core() {
            core.enter(Event::Backward(self.unit))?;
        }
        Ok(Some(grad.clone()))
    }
}

/// A unit as one operation, which keeps nothing but its input and runs again in backward.
struct Recompute<M> {
    unit: Unit<M>,
    /// The output of the first run.
    output: Prepared,
}

impl<M: Module + Send + Sync + 'static> CustomOp1 for Recompute<M> {
    fn name(&self) -> &'static str {
        "recompute-unit"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        self.output.cpu()
    }

    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        self.output.cuda()
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let backward = || {
            let input = Var::from_tensor(&x.detach())?;
            let y = self.unit.inner.forward(input.as_tensor())?;
            // The scalar whose derivative by y is exactly `grad`: its backward seeds the graph with it.
            let mut grads = y.mul(&grad.detach())?.sum_all()?.backward()?;
            Ok(grads.remove(input.as_tensor()))
        };
        match self.unit.core().filter(|(_, core)| core.placement.params.is_sharded()) {
            Some((unit, core)) => core.nested(|| {
                core.enter(Event::Backward(unit))?;
                backward()
            }),
            None => backward(),
        }
    }
}
