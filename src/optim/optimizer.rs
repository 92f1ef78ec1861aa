//! The trait of an optimizer: a step on slices, and what it may need besides.

use super::StateFormat;
#[cfg(feature = "cuda")]
use crate::cuda::ElementwiseUpdate;
use crate::precision::{FlatMut, FlatRef};

/// The inputs of one optimizer step besides the buffers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepContext {
    /// Learning rate in force.
    pub lr: f64,
    /// Betas in force where a schedule or a [`ParameterGroup`](super::ParameterGroup) changes them; `None`: the
    /// optimizer's own. An optimizer without betas ignores them.
    pub betas: Option<(f64, f64)>,
    /// `eps` where a [`ParameterGroup`](super::ParameterGroup) has one; `None`: the optimizer's own.
    pub eps: Option<f64>,
    /// Weight decay where a [`ParameterGroup`](super::ParameterGroup) has one; `None`: the optimizer's own.
    pub weight_decay: Option<f64>,
    /// Number of this step, from 1. Skipped steps are not counted.
    pub step: u64,
    /// Every gradient element is multiplied by this first: 1 / (loss scale x clip factor). See
    /// [`gradient_multiplier`](crate::precision::gradient_multiplier).
    pub grad_scale: f32,
}

impl StepContext {
    /// Step number `step` at learning rate `lr`, with the optimizer's own numbers and gradients as they are.
    pub fn new(lr: f64, step: u64) -> Self {
        Self { lr, betas: None, eps: None, weight_decay: None, step, grad_scale: 1.0 }
    }
}

/// The momentum of an optimizer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Momentum {
    /// The decays of two moments. A schedule may change them.
    Betas(f64, f64),
    /// One factor (SGD's; 0 where there is none). No schedule changes it.
    Factor(f64),
}

/// An optimizer on slices of weights. One of your own goes to
/// [`EngineBuilder::optimizer`](crate::EngineBuilder::optimizer): its states are sharded, offloaded and checkpointed as
/// those of the built-in ones.
///
/// ```
/// use candle_zero::Engine;
/// use candle_zero::optim::{Optimizer, StepContext};
/// use candle_zero::precision::{FlatMut, FlatRef};
///
/// /// Steps by the sign of the gradient's running mean.
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
/// // As in DeepSpeed, an optimizer of one's own counts as untested with ZeRO.
/// let config = r#"{"train_batch_size": 8, "zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": true}"#;
/// let mut engine = Engine::builder().optimizer(SignOfMean).initialize(|vb| candle_nn::linear(4, 1, vb), config)?;
/// let loss = engine.forward(|model| model.weight().sqr()?.sum_all()? + model.bias().unwrap().sqr()?.sum_all()?)?;
/// engine.backward(&loss)?;
/// engine.step()?;
/// assert_eq!(engine.get_lr(), [1e-3]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait Optimizer: Send + Sync {
    /// Its name in checkpoints and messages. Default: the name of its type.
    fn name(&self) -> &str {
        std::any::type_name::<Self>()
    }

    /// The learning rate without a schedule, and the base of one. Default 1e-3.
    fn lr(&self) -> f64 {
        1e-3
    }

    /// Its momentum: the betas that a schedule such as OneCycle changes. Default: none.
    fn momentum(&self) -> Momentum {
        Momentum::Factor(0.0)
    }

    /// Names of the state buffers that [`update`](Self::update) expects, in order, as DeepSpeed's checkpoints call
    /// them. Each is f32, as long as the parameter, and starts with zeros.
    fn state_names(&self) -> &'static [&'static str];

    /// How state number `state` of [`state_names`](Self::state_names) is kept between steps. Default: in f32.
    fn state_format(&self, state: usize) -> StateFormat {
        _ = state;
        StateFormat::F32
    }

    /// One step on one slice, in one pass over memory.
    ///
    /// `param` holds the f32 master weights, `grad` the gradient in any flat dtype, `state` one buffer for each of
    /// [`state_names`](Self::state_names), `half` the copy of the weights in the model's dtype, if there is one.
    /// Slices of a parameter may be updated in any order; each has to give the bits that the whole would give.
    ///
    /// # Panics
    ///
    /// If the buffers differ in length, if their number is wrong, or if `ctx.step` is 0.
    fn update(
        &self,
        ctx: &StepContext,
        param: &mut [f32],
        grad: FlatRef<'_>,
        state: &mut [&mut [f32]],
        half: Option<FlatMut<'_>>,
    );

    /// The pass before the update, if a step depends on more of a parameter than the element that it updates.
    fn needs(&self) -> OptimizerNeeds<'_> {
        OptimizerNeeds::Elements
    }

    /// Whether it trains a parameter of this name and shape; the name is empty where a group says
    /// [`use_muon`](super::ParameterGroup::use_muon), and then the shape alone decides. What it does not take, its
    /// [`auxiliary`](Self::auxiliary) trains; without one it has to take all.
    fn takes(&self, name: &str, shape: &[usize]) -> bool {
        _ = (name, shape);
        true
    }

    /// The optimizer of the parameters that this one does not take. It has none itself.
    fn auxiliary(&self) -> Option<&dyn Optimizer> {
        None
    }

    /// Whether a kernel of this library does [`update`](Self::update) on a GPU too, with states in f32 and the same bits: then a
    /// GPU keeps the states of the model that it computes. Default: none does.
    #[doc(hidden)]
    fn has_kernel(&self) -> bool {
        false
    }

    /// The constants of this step for that kernel.
    #[cfg(feature = "cuda")]
    #[doc(hidden)]
    fn elementwise(&self, ctx: &StepContext) -> Option<ElementwiseUpdate> {
        _ = ctx;
        None
    }
}

/// The values that an optimizer's step in a parameter depends on.
#[derive(Clone, Copy)]
pub enum OptimizerNeeds<'a> {
    /// Each element on itself alone.
    Elements,
    /// Norms of the whole parameter too.
    Norms(&'a dyn Layerwise),
    /// A direction that is made of all elements of a parameter together.
    Whole(&'a dyn WholeParameterOptimizer),
}

/// An optimizer whose direction in a parameter depends on all its elements at once.
///
/// Its step has three parts: [`WholeParameterOptimizer::momentum`] on slices, which makes a rough direction of the gradient and the
/// states; [`WholeParameterOptimizer::finish`] on the whole rough direction, each parameter's on one rank; then [`Optimizer::update`]
/// on slices, with the finished direction in the place of the gradient, in f32, and without states.
pub trait WholeParameterOptimizer {
    /// Updates the states of a slice with its gradient and writes its rough direction. Slices may come in any order;
    /// each has to give the bits that the whole would give.
    ///
    /// # Panics
    ///
    /// As [`Optimizer::update`].
    fn momentum(&self, ctx: &StepContext, grad: FlatRef<'_>, state: &mut [&mut [f32]], direction: &mut [f32]);

    /// Turns the rough direction of a whole parameter of `shape`, row-major, into the finished one. The bits must not
    /// depend on the number of threads.
    fn finish(&self, direction: &mut [f32], shape: &[usize]);

    /// Bytes that [`finish`](Self::finish) allocates meanwhile.
    fn workspace(&self, shape: &[usize]) -> usize;

    /// About how long [`finish`](Self::finish) takes, in any unit: parameters of like cost are finished at the same
    /// time.
    fn cost(&self, shape: &[usize]) -> u128;
}

/// Elements whose squares make one term of the sums of [`Layerwise::add_squares`].
pub const SQUARES_BLOCK: usize = 1024;

/// Sums of squares over a parameter or a part of it.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct SquareSums {
    /// Sum of squares of the weights.
    pub weights: f64,
    /// Sum of squares of the update that they would get, before the learning rate.
    pub update: f64,
}

/// An optimizer whose step in a parameter depends on norms of the whole parameter.
///
/// Its step has two passes: the sums of squares of each parameter, over all ranks; then [`Optimizer::update`], with the
/// learning rate times the parameter's trust ratio.
pub trait Layerwise {
    /// Adds the squares of a slice to those of the elements before it. Weights and states stay as they are.
    ///
    /// The slices of a parameter come in order. Where all but the last have a multiple of [`SQUARES_BLOCK`] elements,
    /// the sums have the bits that the whole would give.
    ///
    /// # Panics
    ///
    /// As [`Optimizer::update`].
    fn add_squares(
        &self,
        ctx: &StepContext,
        param: &[f32],
        grad: FlatRef<'_>,
        state: &[&[f32]],
        squares: &mut SquareSums,
    );

    /// The factor of the learning rate for a parameter with these sums of squares.
    fn trust_ratio(&self, squares: SquareSums) -> f64;
}
