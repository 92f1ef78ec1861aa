//! A unit is a part of a model, such as one transformer block, whose parameters are gathered and released together.
//!
//! ```text
//!   forward    gather | inner.forward | release | mark the output
//!   backward   mark: gather | inner's operations; each parameter is released when its gradient has arrived
//! ```
//!
//! The mark runs before the unit's last operation is differentiated, and therefore before any other operation of the
//! unit is. If the last operation is one of candle-zero's, the mark is one of its hooks. Otherwise, the mark is an
//! identity operation on the unit's output. Without an engine, a unit only runs the module inside. If parameters are
//! not sharded, nothing is gathered, and only leaves mark their output, unless a profile or a timeline is recorded.
//!
//! A unit may recompute (activation checkpointing): the forward pass keeps only the unit's input, and the backward pass
//! runs the forward pass again.

use super::leaf_units::LeafPosition;
use super::recompute_check::OutputDigest;
use super::recompute_input::RecomputeInput;
use super::unit_trace::UnitEvent;
use crate::error::EngineError;
use crate::graph::precomputed_op::{apply_precomputed, copy_storage, seed_backward};
use crate::graph::{
    Grad, OpInputs, ResultStorage, autocast, autocast_format, draw_from, node_of, stream_position, subgraph_input,
    with_single_backward, without_gradients,
};
use crate::param::UnitId;
use crate::precision::Flat;
use crate::profiler::spans::{self, MicroStepHalf};
use crate::tensor::residency::empty_leaf;
use crate::timeline;
use crate::zero::hooks::before_backward;
use crate::zero::model_buffers::SavedBuffers;
use crate::zero::rank_core::{EngineLink, RankCore};
use candle_core::{DType, Result, Shape, Tensor, Var};
use candle_nn::{Module, VarBuilder};
use std::cell::RefCell;
use std::sync::Arc;

thread_local! {
    /// The units of the model that this thread is building for an engine.
    static BUILDING: RefCell<Option<Arc<dyn UnitRegistrar>>> = const { RefCell::new(None) };
}

/// The units of a model under construction.
pub(crate) trait UnitRegistrar {
    /// Begins a unit of this name, and returns its number and the link to the engine.
    fn open_unit(&self, name: String) -> Result<(UnitId, EngineLink)>;
    /// Ends the unit under construction.
    fn close_unit(&self);
    /// Marks a unit to be gathered together with all units inside it.
    fn mark_leaf(&self, unit: UnitId);
    /// Marks a unit to be gathered only if the input of a layer chose it. `first` is the first such unit of the layer.
    /// `number_of` contains the unit's number among those of the layer, and how many there are.
    ///
    /// # Errors
    /// A number of units that cannot be divided among the ranks that share them.
    fn mark_routed(&self, unit: UnitId, first: UnitId, number_of: (usize, usize)) -> Result<()>;
    /// Returns the link to the engine.
    fn link(&self) -> EngineLink;
}

/// Returns the link to the engine for which this thread is building a model, or a link to nothing if there is none.
pub(crate) fn link_under_construction() -> EngineLink {
    BUILDING.with_borrow(|units| units.as_ref().map(|units| units.link())).unwrap_or_default()
}

/// Returns the registrar of the model that this thread is building, if it is being built for an engine.
pub(super) fn under_construction() -> Option<Arc<dyn UnitRegistrar>> {
    BUILDING.with_borrow(|units| units.clone())
}

/// Runs `build` with `units` as the registrar that [`unit()`] finds.
pub(crate) fn building<T>(units: &(impl UnitRegistrar + Clone + 'static), build: impl FnOnce() -> T) -> T {
    struct RegistrarGuard(Option<Arc<dyn UnitRegistrar>>);
    impl Drop for RegistrarGuard {
        fn drop(&mut self) {
            BUILDING.set(self.0.take());
        }
    }
    let _reset = RegistrarGuard(BUILDING.replace(Some(Arc::new(units.clone()))));
    build()
}

/// A part of a model whose parameters are gathered and released together at stage 3.
pub struct Unit<M> {
    inner: Arc<M>,
    /// The unit's number and the link to the engine; `None` outside an engine.
    hook: Option<(UnitId, EngineLink)>,
    recompute: bool,
}

/// Builds a unit: the parameters that `build` takes from its `VarBuilder` belong to it. A parameter that several units
/// take under the same name belongs to none of them: it is in memory during the entire forward and backward passes.
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
    let Some(units) = under_construction() else {
        return Ok(Unit { inner: Arc::new(build(vb)?), hook: None, recompute: false });
    };
    let hook = units.open_unit(vb.prefix())?;
    let inner = build(vb);
    units.close_unit();
    Ok(Unit { inner: Arc::new(inner?), hook: Some(hook), recompute: false })
}

impl<M> Unit<M> {
    /// Sets whether the unit recomputes. With `true`, the backward pass runs the unit's forward pass again instead of
    /// keeping its activations: only the unit's input stays in memory, and a step takes about a third longer. Without
    /// an engine, this has no effect.
    ///
    /// Losses keep the same bits, and so do gradients, with one exception: a sum of gradients that has terms from
    /// inside and from outside the unit. The exception concerns an input that the unit uses several times and that
    /// other parts of the model also use, and a parameter that other parts of the model also use. The unit then adds up
    /// its own terms first, and the last bits may differ.
    ///
    /// The second forward pass must return the first one's output, which every backward pass checks
    /// ([`EngineError::RecomputationDiffers`]). Random numbers in a module must therefore come from
    /// [`nn::Dropout`](crate::nn::Dropout), whose draws are repeated. Candle's random numbers (`candle_nn::Dropout`,
    /// `Tensor::rand`) cannot be repeated.
    #[must_use]
    pub fn checkpointed(mut self, recompute: bool) -> Self {
        self.recompute = recompute;
        self
    }

    /// Makes this unit a leaf: it is gathered together with all units inside it. Use it for modules of which ranks run
    /// different parts, such as the experts of a mixture. All ranks must run the leaf itself. Parameters that a rank's
    /// run does not use get a gradient of zeros. [`EngineBuilder::leaf_units`](crate::EngineBuilder::leaf_units) and
    /// `zero_optimization.leaf_module` do the same. Call this method while the model is being built; without an engine,
    /// it has no effect.
    ///
    /// The gradients of a leaf are held until the backward pass ends. At stage 3, the gathered parameters that a
    /// rank has not used are also held, unless the leaf recomputes ([`checkpointed`](Self::checkpointed)).
    #[must_use]
    pub fn leaf(self) -> Self {
        if let Some((unit, _)) = &self.hook {
            BUILDING.with_borrow(|units| units.iter().for_each(|units| units.mark_leaf(*unit)));
        }
        self
    }

    /// Returns the module inside. Its parameters may be used only while the unit's forward pass or
    /// [`evaluate`](Self::evaluate) runs.
    pub fn inner(&self) -> &M {
        &self.inner
    }

    /// Runs something other than the module's forward pass, with its parameters in memory: a computation that a module
    /// performs only in evaluation, such as computing one more token of a text from the values kept for earlier tokens.
    /// The result has no graph. All ranks must call this method, as they must run a forward pass.
    ///
    /// # Errors
    /// Errors of `run`, and failures to gather the parameters.
    pub fn evaluate(&self, run: impl FnOnce(&M) -> Result<Tensor>) -> Result<Tensor> {
        let result = without_gradients(|| match self.connected() {
            Some(hook) => self.run(&hook, run),
            None => run(&self.inner),
        });
        Ok(result?.detach())
    }
}

impl<M: Module + Send + Sync + 'static> Module for Unit<M> {
    /// Runs the module on `x`, with its parameters in memory.
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.forward_by(x, M::forward)
    }
}

impl<M: Send + Sync + 'static> Unit<M> {
    /// Runs a forward pass that is not the module's own: `run` receives the module and `x`, and may use more
    /// information, such as the positions in a row of a batch at which a new text begins. If the unit recomputes, `run`
    /// runs again in the backward pass. Tensors that it captures get no gradient.
    ///
    /// # Errors
    /// Errors of `run`, and failures to gather the parameters.
    pub fn forward_by(
        &self,
        x: &Tensor,
        run: impl Fn(&M, &Tensor) -> Result<Tensor> + Send + Sync + 'static,
    ) -> Result<Tensor> {
        let Some(hook) = self.connected() else { return run(&self.inner, x) };
        if hook.core.is_evaluating() {
            return Ok(self.run(&hook, |inner| run(inner, &x.detach()))?.detach());
        }
        if !x.track_op() && hook.core.is_frozen(hook.unit) {
            // Neither the unit nor anything before it is trained: no graph, and no backward pass.
            return Ok(without_gradients(|| self.run(&hook, |inner| run(inner, x)))?.detach());
        }
        // If every unit recomputes, a leaf recomputes as one unit.
        let recomputes =
            self.recompute || (hook.core.recomputation.every_unit && hook.position() != LeafPosition::Inside);
        // Recomputation delivers the parameters' gradients to an engine; without one, they belong in Candle's graph. An
        // untracked input would keep the operation's backward pass from ever being called.
        if recomputes && x.track_op() {
            return self.forward_to_recompute(&hook, x, run);
        }
        let y = self.run(&hook, |inner| run(inner, x))?;
        hook.profile_input(x);
        if hook.position() == LeafPosition::Leaf { hook.mark_leaf(x, &y) } else { hook.mark_output(y) }
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

impl<M> Unit<M> {
    /// Returns the unit's context, if it is connected to an engine.
    fn connected(&self) -> Option<UnitContext> {
        let (unit, link) = self.hook.clone()?;
        let core = link.core()?;
        Some(UnitContext { unit, link, core })
    }

    /// Runs a forward pass with the unit's parameters in memory.
    fn run(
        &self,
        UnitContext { unit, core, .. }: &UnitContext,
        forward: impl FnOnce(&M) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let _profile = spans::enter(MicroStepHalf::Forward, *unit);
        core.enter(UnitEvent::Forward(*unit))?;
        let checks_writes = core.shards_params();
        if checks_writes {
            core.look_for_writes_in(*unit).map_err(|e| core.stash(e))?;
        }
        let span = core.forward_span(*unit);
        let y = forward(&self.inner)?;
        drop(span);
        if checks_writes {
            core.look_for_writes_in(*unit).map_err(|e| core.stash(e))?;
        }
        core.leave_forward(*unit)?;
        Ok(y)
    }
}

impl<M> Unit<M> {
    /// Computes the input's gradient from the output's gradient, by a second forward pass, which must reproduce the
    /// output of the `first` one, and a separate backward pass.
    fn run_again(
        &self,
        run: &impl Fn(&M, &Tensor) -> Result<Tensor>,
        first: &SavedForRecompute,
        grad: &Tensor,
    ) -> Result<Option<Tensor>> {
        let Some(UnitContext { unit, core, .. }) = self.connected() else {
            candle_core::bail!(
                "a unit that recomputes was differentiated after its engine was dropped; keep the engine"
            )
        };
        let _profile = spans::enter(MicroStepHalf::Backward, unit);
        let forward = || {
            let input = Var::from_tensor(&core.kept_input(&first.input)?)?;
            let x = if first.adds_up { subgraph_input(&input)? } else { input.as_tensor().clone() };
            let y = core.with_saved_buffers(&first.buffers, || run(&self.inner, &x))?;
            if !first.output.matches(&y)? {
                return Err(core.stash(EngineError::RecomputationDiffers { unit: core.unit_name(unit) }.into()));
            }
            Ok((input, y))
        };
        core.nested_backward(unit, forward, |(input, y)| {
            let seed = seed_backward(&y, grad.clone())?;
            Ok(with_single_backward(|| seed.backward())?.remove(input.as_tensor()))
        })
    }
}

impl<M: Send + Sync + 'static> Unit<M> {
    /// Runs a forward pass without a graph, as one operation whose backward pass runs the unit again.
    fn forward_to_recompute(
        &self,
        hook: &UnitContext,
        x: &Tensor,
        run: impl Fn(&M, &Tensor) -> Result<Tensor> + Send + Sync + 'static,
    ) -> Result<Tensor> {
        hook.core.will_recompute();
        let (draws, format) = (stream_position(), autocast_format());
        // The input is made contiguous, as it will be the second time, because the order of a sum may depend on the
        // layout.
        let input = x.detach().contiguous()?;
        let forward = || without_gradients(|| self.run(hook, |inner| run(inner, &input)));
        let (y, buffers) = hook.core.saving_buffers(hook.unit, forward)?;
        let (output, (storage, shape)) = (OutputDigest::of(&y)?, copy_storage(&y)?);
        drop(y);
        let first =
            SavedForRecompute { input: hook.core.keep_input(&input)?, adds_up: node_of(x).is_some(), output, buffers };
        let (unit, device) = (self.clone(), x.device().clone());
        let unused = (hook.position() == LeafPosition::Leaf).then(|| ZeroGradient::like(x));
        OpInputs::of([Some(x)])?.result("recompute-unit", ResultStorage(storage), shape.clone(), move |grad, [to_x]| {
            let grad = grad.into_tensor(&shape, &device)?;
            match autocast(format, || draw_from(draws, || unit.run_again(&run, &first, &grad)))? {
                Some(grad) => to_x.deliver(Grad::Shared(grad)),
                None => unused.iter().try_for_each(|unused| to_x.deliver(unused.gradient())),
            }
        })
    }
}

/// The values that a recomputing unit keeps from its first run.
struct SavedForRecompute {
    input: RecomputeInput,
    /// Whether candle-zero's layers add up the gradients of the input's uses. Candle would round each one first.
    adds_up: bool,
    output: OutputDigest,
    /// The buffers as they were before the first run.
    buffers: SavedBuffers,
}

/// A unit's number and its engine.
struct UnitContext {
    unit: UnitId,
    link: EngineLink,
    core: Arc<RankCore>,
}

/// The zero gradient of an input that a leaf does not use.
struct ZeroGradient {
    dtype: DType,
    numel: usize,
}

impl ZeroGradient {
    fn like(x: &Tensor) -> Self {
        Self { dtype: x.dtype(), numel: x.elem_count() }
    }

    fn gradient(&self) -> Grad {
        Grad::Own(Flat::zeros(self.dtype, self.numel))
    }
}

impl UnitContext {
    fn position(&self) -> LeafPosition {
        self.core.leaves[self.unit]
    }

    /// Returns a function that begins the unit's backward pass.
    fn begin_backward(&self) -> impl Fn() -> Result<()> + Send + Sync + 'static {
        let (unit, link) = (self.unit, self.link.clone());
        move || {
            let Some(core) = link.core() else { return Ok(()) };
            if core.is_in_backward() {
                spans::begin_backward(unit);
            }
            core.begin_backward(unit)
        }
    }

    /// Marks the output of a leaf, like [`mark_output`](Self::mark_output). The leaf's backward pass begins on all
    /// ranks and continues to the operations before the leaf, whether or not this rank's run has used its parameters or
    /// its input.
    fn mark_leaf(&self, x: &Tensor, y: &Tensor) -> Result<Tensor> {
        let begin = self.begin_backward();
        if !x.track_op() && !y.track_op() {
            let anchor = empty_leaf(y.device(), &Shape::from(1))?;
            return apply_precomputed("leaf-output", &anchor, copy_storage(y)?, move |_, _| begin().map(|()| None));
        }
        let ((storage, shape), unused) = (copy_storage(y)?, ZeroGradient::like(x));
        // Of two inputs, the second is differentiated first: in this case `y`, with everything that only the output
        // depends on.
        let y = OpInputs::of([Some(x), Some(y)])?.result(
            "leaf-output",
            ResultStorage(storage),
            shape,
            move |grad, [to_x, to_y]| {
                if to_x.is_wanted() {
                    to_x.deliver(unused.gradient())?;
                }
                to_y.deliver(grad)
            },
        )?;
        if let Some(node) = node_of(&y) {
            node.slot.before_backward(Box::new(begin));
        }
        Ok(y)
    }

    /// Ends the unit's backward pass in the profile when the unit's input has its gradient.
    fn profile_input(&self, x: &Tensor) {
        let unit = self.unit;
        if let (true, Some(node)) = (spans::is_recording(), node_of(x)) {
            node.slot.before_backward(Box::new(move || {
                spans::end_backward(unit);
                Ok(())
            }));
        }
    }

    /// Makes the unit's backward pass begin before the last of its operations is differentiated.
    fn mark_output(&self, y: Tensor) -> Result<Tensor> {
        let shards_params = self.core.shards_params() && self.position() != LeafPosition::Inside;
        if !shards_params && !spans::is_recording() && !timeline::is_recording() {
            return Ok(y);
        }
        let begin = self.begin_backward();
        if !shards_params && node_of(&y).is_none() {
            return Ok(y);
        }
        before_backward(y, "unit-output", begin)
    }
}
