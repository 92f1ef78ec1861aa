//! The optimizer trait: a step on slices, and its optional extensions.

use super::StateFormat;
#[cfg(feature = "cuda")]
use crate::cuda::ElementwiseUpdate;
use crate::precision::{FlatMut, FlatRef};

/// The inputs of one optimizer step besides the buffers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepContext {
    /// The learning rate in force.
    pub lr: f64,
    /// The betas in force if a schedule or a [`ParameterGroup`](super::ParameterGroup) changes them; `None` means the
    /// optimizer's own. An optimizer without betas ignores them.
    pub betas: Option<(f64, f64)>,
    /// The `eps` of a [`ParameterGroup`](super::ParameterGroup); `None` means the optimizer's own.
    pub eps: Option<f64>,
    /// The weight decay of a [`ParameterGroup`](super::ParameterGroup); `None` means the optimizer's own.
    pub weight_decay: Option<f64>,
    /// Whether a [`Layerwise`] optimizer multiplies the learning rate by the parameter's trust ratio: true unless a
    /// [`ParameterGroup`](super::ParameterGroup) switches that off. Other optimizers ignore this field.
    pub trust_ratio: bool,
    /// The number of this step, counted from 1. Skipped steps are not counted.
    pub step: u64,
    /// The factor by which every gradient element is first multiplied: 1 / (loss scale x clip factor). See
    /// [`gradient_multiplier`](crate::precision::gradient_multiplier).
    pub grad_scale: f32,
}

impl StepContext {
    /// Creates the context of step number `step` at learning rate `lr`, with the optimizer's own settings and unscaled
    /// gradients.
    pub fn new(lr: f64, step: u64) -> Self {
        Self { lr, betas: None, eps: None, weight_decay: None, trust_ratio: true, step, grad_scale: 1.0 }
    }
}

/// The momentum of an optimizer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Momentum {
    /// The decay rates of two moments. A schedule may change them.
    Betas(f64, f64),
    /// One factor, as in SGD and Muon; 0 if there is no momentum. No schedule changes it.
    Factor(f64),
}

/// An optimizer that updates slices of weights. Pass a custom one to
/// [`EngineBuilder::optimizer`](crate::EngineBuilder::optimizer): its states are sharded, offloaded and checkpointed
/// like those of the built-in optimizers.
///
/// ```
/// use candle_zero::Engine;
/// use candle_zero::optim::{Optimizer, StepContext};
/// use candle_zero::precision::{FlatMut, FlatRef};
///
/// /// An optimizer that steps by the sign of the gradient's running mean.
/// struct SignOfMean;
///
/// impl Optimizer for SignOfMean {
///     fn lr(&self) -> f64 {
///         1e-3
///     }
///
///     fn state_names(&self) -> &'static [&'static str] {
///         &["mean"]
///     }
///
///     fn update(
///         &self,
///         ctx: &StepContext,
///         param: &mut [f32],
///         grad: FlatRef<'_>,
///         state: &mut [&mut [f32]],
///         half: Option<FlatMut<'_>>,
///     ) {
///         let decay = (ctx.lr * ctx.weight_decay.unwrap_or(0.0)) as f32;
///         for (i, (p, mean)) in param.iter_mut().zip(state[0].iter_mut()).enumerate() {
///             *mean = 0.9 * *mean + 0.1 * (grad.get(i) * ctx.grad_scale);
///             *p = *p - decay * *p - ctx.lr as f32 * mean.signum();
///         }
///         if let Some(half) = half {
///             half.copy_cast(FlatRef::F32(param));
///         }
///     }
/// }
///
/// // As in DeepSpeed, a custom optimizer counts as untested with ZeRO.
/// let config = r#"{"train_batch_size": 8, "zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": true}"#;
/// let mut engine = Engine::builder().optimizer(SignOfMean).initialize(|vb| candle_nn::linear(4, 1, vb), config)?;
/// let loss = engine.forward(|model| model.weight().sqr()?.sum_all()? + model.bias().unwrap().sqr()?.sum_all()?)?;
/// engine.backward(&loss)?;
/// engine.step()?;
/// assert_eq!(engine.lr(), [1e-3]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait Optimizer: Send + Sync {
    /// Returns the optimizer's name in checkpoints and messages. The default is the name of its type.
    fn name(&self) -> &str {
        std::any::type_name::<Self>()
    }

    /// Returns the learning rate that applies without a schedule, and on which schedules are based. The default is
    /// 1e-3.
    fn lr(&self) -> f64 {
        1e-3
    }

    /// Returns the momentum: betas, which a schedule such as OneCycle changes, or one factor. The default is no
    /// momentum.
    fn momentum(&self) -> Momentum {
        Momentum::Factor(0.0)
    }

    /// Returns the names of the state buffers that [`update`](Self::update) expects, in order, as in DeepSpeed's
    /// checkpoints. Each buffer is f32, has the length of the parameter, and starts with zeros.
    fn state_names(&self) -> &'static [&'static str];

    /// Returns the format in which the state at index `state` of [`state_names`](Self::state_names) is stored between
    /// steps. The default is f32.
    fn state_format(&self, state: usize) -> StateFormat {
        _ = state;
        StateFormat::F32
    }

    /// Performs one step on one slice, in one pass over memory.
    ///
    /// `param` contains the f32 master weights, `grad` the gradient in any flat dtype, `state` one buffer for each of
    /// [`state_names`](Self::state_names), and `half` the copy of the weights in the model's dtype, if there is one.
    /// Slices of a parameter may be updated in any order. Each must get the same bits as in an update of the full
    /// parameter.
    ///
    /// # Panics
    ///
    /// Panics if the buffers differ in length, if their number is wrong, or if `ctx.step` is 0.
    fn update(
        &self,
        ctx: &StepContext,
        param: &mut [f32],
        grad: FlatRef<'_>,
        state: &mut [&mut [f32]],
        half: Option<FlatMut<'_>>,
    );

    /// Returns the additional pass that the optimizer needs before the update, if a step depends on more of a parameter
    /// than the element that it updates.
    fn needs(&self) -> OptimizerNeeds<'_> {
        OptimizerNeeds::Elements
    }

    /// Returns whether the optimizer trains a parameter of this name and shape. The name is empty if a group has set
    /// [`use_muon`](super::ParameterGroup::use_muon); then only the shape decides. All other parameters are trained by
    /// the [`auxiliary`](Self::auxiliary). An optimizer without an auxiliary must accept all parameters.
    fn trains(&self, name: &str, shape: &[usize]) -> bool {
        _ = (name, shape);
        true
    }

    /// Returns the optimizer of the parameters that this one does not train. An auxiliary has no auxiliary itself.
    fn auxiliary(&self) -> Option<&dyn Optimizer> {
        None
    }

    /// Returns the source of the learning rate. The default is a schedule, or [`lr`](Self::lr) if there is none.
    fn rate_rule(&self) -> RateRule {
        RateRule::Schedule
    }

    /// Returns the optimizer's averaging, if the trained weights differ from those with which the run ends.
    fn averaging(&self) -> Option<&dyn WeightAveraging> {
        None
    }

    /// Returns whether a kernel of this library can perform [`update`](Self::update) on a GPU too, with states in f32
    /// and bit-identical results. If so, the GPU that runs the model also keeps the states. The default is false.
    #[doc(hidden)]
    fn has_kernel(&self) -> bool {
        false
    }

    /// Returns the constants of this step for the kernel that [`has_kernel`](Self::has_kernel) reports.
    #[cfg(feature = "cuda")]
    #[doc(hidden)]
    fn elementwise(&self, ctx: &StepContext) -> Option<ElementwiseUpdate> {
        _ = ctx;
        None
    }
}

/// The source of an optimizer's learning rate.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum RateRule {
    /// A schedule, or the optimizer's own rate if there is none.
    Schedule,
    /// The optimizer's own rate. A schedule is an error.
    Constant,
    /// A rule of the optimizer, which returns the rate after a number of applied steps. A schedule is an error.
    OfSteps(fn(u64) -> f64),
}

/// An optimizer that averages weights: it trains one set of weights, and keeps an average for evaluation and export.
/// [`Optimizer::update`] receives and changes the average as `param`, and checkpoints contain it. The average is always
/// kept in f32. The model computes gradients with the trained weights, which the update writes to `half`.
pub trait WeightAveraging {
    /// Writes the trained weights of a slice after step `ctx.step`, given the average and the states. Before the first
    /// step, the trained weights and the average are the same.
    fn trained_weights(&self, ctx: &StepContext, average: &[f32], state: &[&mut [f32]], trained: FlatMut<'_>);
}

/// The values on which an optimizer step on a parameter depends.
#[derive(Clone, Copy)]
#[non_exhaustive]
pub enum OptimizerNeeds<'a> {
    /// Each element depends only on its own values.
    Elements,
    /// The step also depends on norms of the full parameter.
    Norms(&'a dyn Layerwise),
    /// The direction depends on all elements of a parameter together.
    WholeParameter(&'a dyn WholeParameterOptimizer),
    /// The step depends on sums over the rows and columns of the gradient, and on norms of the full parameter.
    Factors(&'a dyn FactoredOptimizer),
}

/// An optimizer whose direction for a parameter depends on all elements of the parameter.
///
/// A step has three parts. [`WholeParameterOptimizer::momentum`] runs on slices and computes a rough direction from the
/// gradient and the states. [`WholeParameterOptimizer::finish`] runs on the full rough direction of each parameter, on
/// one rank. Then [`Optimizer::update`] runs on slices, with the finished direction in place of the gradient, in f32,
/// and without states.
pub trait WholeParameterOptimizer {
    /// Updates the states of a slice with its gradient and writes its rough direction. Slices may be processed in any
    /// order. Each must get the same bits as if the full parameter were processed.
    ///
    /// # Panics
    ///
    /// The panics of [`Optimizer::update`].
    fn momentum(&self, ctx: &StepContext, grad: FlatRef<'_>, state: &mut [&mut [f32]], direction: &mut [f32]);

    /// Turns the rough direction of a full parameter of `shape`, row-major, into the finished one. The bits must not
    /// depend on the number of threads.
    fn finish(&self, direction: &mut [f32], shape: &[usize]);

    /// Returns the number of bytes that [`finish`](Self::finish) allocates temporarily.
    fn workspace(&self, shape: &[usize]) -> usize;

    /// Returns the approximate cost of [`finish`](Self::finish), in any unit. Parameters of similar cost are finished
    /// at the same time.
    fn cost(&self, shape: &[usize]) -> u128;
}

/// The number of elements whose squares form one term of the sums of [`Layerwise::add_squares`].
pub const SQUARES_BLOCK: usize = 1024;

/// Sums of squares over a parameter or a part of it.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct SquareSums {
    /// The sum of squares of the weights.
    pub weights: f64,
    /// The sum of squares of their update before the learning rate is applied; for LARS, of their gradients.
    pub update: f64,
}

/// An optimizer whose step on a parameter depends on norms of the full parameter.
///
/// A step has two passes. The first sums the squares of each parameter over all ranks. The second is
/// [`Optimizer::update`], with the learning rate multiplied by the parameter's trust ratio.
pub trait Layerwise {
    /// Adds the squares of a slice to those of the elements before it. Weights and states are not changed.
    ///
    /// The slices of a parameter are processed in order. If the lengths of all but the last are multiples of
    /// [`SQUARES_BLOCK`], the sums have the same bits as for the full parameter.
    ///
    /// # Panics
    ///
    /// The panics of [`Optimizer::update`].
    fn add_squares(
        &self,
        ctx: &StepContext,
        param: &[f32],
        grad: FlatRef<'_>,
        state: &[&[f32]],
        squares: &mut SquareSums,
    );

    /// Returns the factor of the learning rate for a parameter with these sums of squares.
    fn trust_ratio(&self, ctx: &StepContext, squares: SquareSums) -> f64;
}

/// The position of a slice in its parameter.
#[derive(Debug, Clone, Copy)]
pub struct SlicePosition<'a> {
    /// The shape of the parameter.
    pub shape: &'a [usize],
    /// The index of the slice's first element in the parameter, row-major.
    pub first: usize,
}

/// An optimizer that keeps sums over the rows and columns of a matrix instead of a state for each element.
///
/// These factored states have their own lengths. They are small, and an element's step depends on many of them, so
/// every rank has all of them, and all ranks change them in the same way.
///
/// A step has three passes over a parameter. The first, only for parameters with factored states, computes sums over
/// the parts of the gradient on all ranks ([`add_sums`](Self::add_sums)), from which [`take_sums`](Self::take_sums)
/// computes the new factored states. The second sums squares ([`add_squares`](Self::add_squares)). The third performs
/// the step ([`update`](Self::update)) in place of [`Optimizer::update`]. In the second and third passes, `factored`
/// contains the new factored states, and the states of the elements are those before the step.
pub trait FactoredOptimizer {
    /// Returns the names of the factored states, in order.
    fn factored_names(&self) -> &'static [&'static str];

    /// Returns the lengths of the factored states of a parameter of `shape`, in the order of their names.
    fn factored_lens(&self, shape: &[usize]) -> Vec<usize>;

    /// Adds the terms of a slice to the sums, of which there is one for each element of the factored states. The slices
    /// of a parameter are processed in order, and give the same bits wherever they end.
    fn add_sums(&self, ctx: &StepContext, at: SlicePosition<'_>, grad: FlatRef<'_>, sums: &mut [f64]);

    /// Updates the factored states of a parameter of `shape` with the sums of all ranks.
    fn take_sums(&self, ctx: &StepContext, shape: &[usize], sums: &[f64], factored: &mut [f32]);

    /// Adds the squares of a slice of the weights and of its update to those of the elements before it. Weights and
    /// states are not changed. The slices of a parameter are processed in order. If the lengths of all but the last are
    /// multiples of [`SQUARES_BLOCK`], the sums have the same bits as for the full parameter.
    fn add_squares(
        &self,
        ctx: &StepContext,
        at: SlicePosition<'_>,
        slice: FactoredSlice<'_, '_>,
        squares: &mut SquareSums,
    );

    /// Performs the step on one slice. `squares` are the sums over the full parameter.
    fn update(
        &self,
        ctx: &StepContext,
        at: SlicePosition<'_>,
        slice: FactoredSlice<'_, '_>,
        squares: SquareSums,
        half: Option<FlatMut<'_>>,
    );
}

/// The buffers of one slice of a parameter with factored states.
pub struct FactoredSlice<'a, 's> {
    /// The f32 master weights.
    pub param: &'a mut [f32],
    /// The gradient.
    pub grad: FlatRef<'a>,
    /// The states of the slice's elements.
    pub state: &'a mut [&'s mut [f32]],
    /// All factored states of the parameter, one after the other; empty if it has none.
    pub factored: &'a [f32],
}
