//! A model as a list of layers, which is divided among the stages of a pipeline.

use candle_core::{Device, Result, Tensor};
use candle_nn::{Module, VarBuilder};
use regex::{Regex, RegexBuilder};
use std::any::Any;

/// A layer of a [`PipelineModule`]. Every [`Module`] that is [`Send`] is one.
///
/// `B` is the type of a micro batch. Every stage has the complete micro batch, so a layer may use parts of it, such as
/// the positions at which texts begin, in addition to the previous layer's output.
pub trait PipelineLayer<B>: Send {
    /// Returns the layer's output, given the previous layer's output `x`.
    ///
    /// # Errors
    /// Any error of the layer's operations.
    fn forward(&self, x: &Tensor, batch: &B) -> Result<Tensor>;

    /// Returns the layer's output in inference, where it may differ: the last layer of
    /// [`decoder_pipeline`](crate::models::decoder_pipeline) returns logits instead of the loss. If a text is
    /// continued, `state` contains the state that this layer has kept for the tokens before `x`.
    ///
    /// # Errors
    /// Any error of the layer's operations.
    fn infer(&self, x: &Tensor, batch: &B, state: &mut InferenceState) -> Result<Tensor> {
        _ = state;
        self.forward(x, batch)
    }
}

/// The state that a layer keeps for a text that a pipeline continues.
#[derive(Default)]
pub struct InferenceState {
    /// The number of tokens before the input, if a text is continued.
    position: Option<usize>,
    kept: Option<Box<dyn Any + Send>>,
}

impl InferenceState {
    /// Returns the state of a layer that has seen no tokens of a text yet.
    pub(crate) fn of_text() -> Self {
        Self { position: Some(0), kept: None }
    }

    /// Records that the layer has seen `tokens` more tokens.
    pub(crate) fn advance(&mut self, tokens: usize) {
        self.position = self.position.map(|position| position + tokens);
    }

    /// Returns the number of tokens before the input, or `None` if no text is continued. If a text is continued, only
    /// the output at its last position is needed.
    pub fn position(&self) -> Option<usize> {
        self.position
    }

    /// Returns the state that the layer has kept for the tokens before the input. The layer may change this state. A
    /// layer that has kept nothing begins with the result of `new`. Returns `None` if no text is continued.
    pub fn get_or_init<T: Any + Send>(&mut self, new: impl FnOnce() -> T) -> Option<&mut T> {
        self.position?;
        let kept = self.kept.take().and_then(|kept| kept.downcast::<T>().ok()).unwrap_or_else(|| Box::new(new()));
        self.kept.insert(kept).downcast_mut()
    }
}

impl<B, M: Module + Send> PipelineLayer<B> for M {
    fn forward(&self, x: &Tensor, _: &B) -> Result<Tensor> {
        Module::forward(self, x)
    }
}

impl PartitionMethod {
    /// Compiles the regular expression of a [`PartitionMethod::LayerKind`].
    ///
    /// # Errors
    /// The expression is invalid or too large.
    pub(crate) fn kind_pattern(expression: &str) -> std::result::Result<Regex, regex::Error> {
        RegexBuilder::new(expression).case_insensitive(true).build()
    }
}

type LayerBuilder<B> = Box<dyn Fn(VarBuilder<'_>) -> Result<Box<dyn PipelineLayer<B>>>>;
type BatchFn<B> = Box<dyn Fn(&B) -> Result<Tensor>>;
type ExampleFn<B> = Box<dyn Fn(usize, &Device) -> Result<B>>;
type LossFn<B> = Box<dyn Fn(&Tensor, &B) -> Result<Tensor>>;

/// The rule that cuts a model into stages: `pipeline.partition`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum PartitionMethod {
    /// Stages have about the same number of parameters (`parameters`, `best`).
    #[default]
    Parameters,
    /// Stages have about the same number of layers (`uniform`).
    Uniform,
    /// Stages have about the same number of layers whose kind matches this regular expression (`type:REGEX`), ignoring
    /// case.
    LayerKind(String),
    /// The slowest stage is as fast as possible, judging by the time that each layer takes on each rank, which is
    /// measured at the start (`time`).
    Time,
}

/// A model as layers that run one after the other (DeepSpeed's `PipelineModule`). A rank builds only the layers of its
/// own stages.
///
/// ```
/// use candle_core::Tensor;
/// use candle_nn::{Activation, linear};
/// use candle_zero::pipeline::PipelineModule;
///
/// // A micro batch: inputs and targets.
/// let module = PipelineModule::new(
///     |(x, _): &(Tensor, Tensor)| Ok(x.clone()),
///     |y, (_, target)| y.sub(target)?.sqr()?.mean_all(),
/// );
/// let module = module
///     .layer("fc1", |vb| linear(4, 16, vb))
///     .layer("act", |_| Ok(Activation::Silu))
///     .layer("fc2", |vb| linear(16, 1, vb));
/// assert_eq!(module.len(), 3);
/// ```
pub struct PipelineModule<B> {
    input: BatchFn<B>,
    layers: Vec<LayerSpec<B>>,
    loss: LossFn<B>,
    /// The context length in tokens, if the model is a language model.
    context: Option<usize>,
    example: Option<ExampleFn<B>>,
}

/// A layer that is built on the rank that needs it.
struct LayerSpec<B> {
    /// The prefix of its parameters' names.
    prefix: String,
    kind: &'static str,
    build: LayerBuilder<B>,
}

impl<B> PipelineModule<B> {
    /// Returns a model without layers. `input` returns the first layer's input, and `loss` computes the loss, a scalar,
    /// from the last layer's output.
    pub fn new(
        input: impl Fn(&B) -> Result<Tensor> + 'static,
        loss: impl Fn(&Tensor, &B) -> Result<Tensor> + 'static,
    ) -> Self {
        Self { input: Box::new(input), layers: Vec::new(), loss: Box::new(loss), context: None, example: None }
    }

    /// Appends a layer, whose parameters' names begin with `prefix`; an empty prefix adds nothing to the names.
    #[must_use]
    pub fn layer<L: PipelineLayer<B> + 'static>(
        mut self,
        prefix: impl Into<String>,
        build: impl Fn(VarBuilder<'_>) -> Result<L> + 'static,
    ) -> Self {
        let build: LayerBuilder<B> = Box::new(move |vb| Ok(Box::new(build(vb)?)));
        self.layers.push(LayerSpec { prefix: prefix.into(), kind: std::any::type_name::<L>(), build });
        self
    }

    /// Sets the function that returns an example of a micro batch, given its number of samples and the device of its
    /// tensors. With `pipeline.partition` `time`, each layer's time is measured with this example; shapes and dtypes
    /// matter, values do not. [`decoder_pipeline`](crate::models::decoder_pipeline) sets such a function.
    #[must_use]
    pub fn example(self, example: impl Fn(usize, &Device) -> Result<B> + 'static) -> Self {
        Self { example: Some(Box::new(example)), ..self }
    }

    /// Returns an example of a micro batch, if the model has one.
    pub(crate) fn example_batch(&self, samples: usize, device: &Device) -> Option<Result<B>> {
        self.example.as_ref().map(|example| example(samples, device))
    }

    /// Sets the context length of a language model, in tokens.
    #[must_use]
    pub(crate) fn with_context(self, tokens: usize) -> Self {
        Self { context: Some(tokens), ..self }
    }

    /// Returns the context length in tokens, if the model is a language model.
    pub(crate) fn context(&self) -> Option<usize> {
        self.context
    }

    /// Returns the number of layers.
    pub fn len(&self) -> usize {
        self.layers.len()
    }

    /// Returns whether there are no layers.
    pub fn is_empty(&self) -> bool {
        self.layers.is_empty()
    }

    /// Returns the kind of a layer: the name of its type, without modules and generic arguments.
    pub(crate) fn kind(&self, layer: usize) -> &'static str {
        let kind = self.layers[layer].kind;
        let kind = kind.split_once('<').map_or(kind, |(kind, _)| kind);
        kind.rsplit_once("::").map_or(kind, |(_, kind)| kind)
    }

    /// Builds a layer.
    pub(crate) fn build(&self, layer: usize, vb: VarBuilder<'_>) -> Result<Box<dyn PipelineLayer<B>>> {
        let LayerSpec { prefix, build, .. } = &self.layers[layer];
        build(if prefix.is_empty() { vb } else { vb.pp(prefix) })
    }

    /// Returns the first layer's input.
    pub(crate) fn input(&self, batch: &B) -> Result<Tensor> {
        (self.input)(batch)
    }

    /// Returns the loss for the last layer's output.
    pub(crate) fn loss(&self, output: &Tensor, batch: &B) -> Result<Tensor> {
        (self.loss)(output, batch)
    }
}
