//! Records an operation of this library: its inputs, the destinations of their gradients, and its result.

use super::autograd_meta::{AutogradMeta, node_of, with_token};
use super::backward_flags::{defers_weight_gradients, is_single_backward, is_without_gradients};
use super::grad_slot::{DeferredPart, Grad, GradSlot, abandon};
use super::precomputed_op::{apply_precomputed, copy_storage, token_value};
use crate::kernels::buffer;
use crate::tensor::element::TensorElement;
use crate::util::lock;
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, CudaStorage, CustomOp1, CustomOp2, Device, Layout, Result, Shape, Storage, Tensor, Var};
use std::sync::{Arc, Mutex, OnceLock};

/// The destination of one input's gradient.
#[derive(Clone)]
pub(crate) struct InputGradSink(Option<Arc<GradSlot>>);

impl InputGradSink {
    /// Returns whether the gradient is wanted in the current backward pass.
    pub fn is_wanted(&self) -> bool {
        self.open().is_some()
    }

    /// Returns whether a backward pass may want the gradient. This method is for the time when an operation is
    /// recorded, before any backward pass runs.
    pub fn is_recorded(&self) -> bool {
        self.0.is_some()
    }

    pub(super) fn open(&self) -> Option<&GradSlot> {
        self.0.as_deref().filter(|slot| slot.is_open())
    }

    /// Calls `weight_gradient` with the gradient of a layer's output, to deliver that of the layer's weight.
    /// `weight_gradient` is called immediately or, if the backward pass is divided and the weight is a parameter, later
    /// and with a copy of the output's gradient. Until then, `weight_gradient` keeps `kept` bytes of memory, those of
    /// the layer's input.
    pub fn deliver_or_defer<E: TensorElement>(
        &self,
        grad: &[E],
        kept: usize,
        weight_gradient: impl Fn(&[E], &InputGradSink) -> Result<()> + Send + 'static,
    ) -> Result<()> {
        match self.open() {
            Some(slot) if self.is_deferred() => {
                let (grad, bytes) = (grad.to_vec(), kept + size_of_val(grad));
                let compute = Box::new(move |slot| weight_gradient(&grad, &Self(Some(slot))));
                slot.add_later(DeferredPart { bytes, compute });
                Ok(())
            }
            Some(_) => weight_gradient(grad, self),
            None => Ok(()),
        }
    }

    /// Returns whether [`InputGradSink::deliver_or_defer`] would leave the gradient for later.
    pub fn is_deferred(&self) -> bool {
        self.open().is_some_and(|slot| defers_weight_gradients() && slot.has_gate())
    }

    /// Takes the gradient out of its slot, so that the caller can add to it and give it back; see [`GradSlot::lend`].
    /// Returns `None` if no gradient is wanted.
    pub fn lend<E: TensorElement>(&self, len: usize) -> Result<Option<(Vec<E>, bool)>> {
        self.open().map(|slot| slot.lend(len)).transpose()
    }

    /// Delivers a gradient, or a part of it.
    pub fn deliver(&self, grad: Grad) -> Result<()> {
        self.0.as_ref().map_or(Ok(()), |slot| slot.add(grad))
    }

    fn deliver_if_empty(&self, grad: impl FnOnce() -> Grad) -> Result<()> {
        self.open().filter(|slot| slot.is_empty()).map_or(Ok(()), |slot| slot.add(grad()))
    }

    /// Calls [`GradSlot::accumulate`], or does nothing if the gradient is not wanted.
    pub fn accumulate<E: TensorElement>(
        &self,
        len: usize,
        write: impl FnOnce(&mut [E], bool) -> Result<()>,
    ) -> Result<()> {
        self.0.as_ref().map_or(Ok(()), |slot| slot.accumulate(len, write))
    }
}

impl InputGradSink {
    /// Runs `write` in any case: with the gradient as in [`InputGradSink::accumulate`], or with `None` if it is not
    /// wanted. This is for operations that compute several gradients in one pass.
    pub fn accumulate_if_wanted<E: TensorElement>(
        &self,
        len: usize,
        write: impl FnOnce(Option<(&mut [E], bool)>) -> Result<()>,
    ) -> Result<()> {
        match self.open() {
            Some(slot) => slot.accumulate(len, |grad, add| write(Some((grad, add)))),
            None => write(None),
        }
    }

    /// Calls `add` to add to the gradient in place, or to zeros if there was none.
    pub fn accumulate_zeroed<E: TensorElement>(
        &self,
        len: usize,
        add: impl FnOnce(&mut [E]) -> Result<()>,
    ) -> Result<()> {
        // Memory fresh from the system is already zero, so the zeros of untouched rows cost nothing.
        self.deliver_if_empty(|| Grad::own(bytemuck::zeroed_vec::<E>(len)))?;
        self.accumulate(len, |values, _| add(values))
    }

    /// Delivers a gradient of `len` elements. `write` receives arbitrary values and must write all of them.
    pub fn make<E: TensorElement>(&self, len: usize, write: impl FnOnce(&mut [E]) -> Result<()>) -> Result<()> {
        let Some(slot) = self.open() else { return Ok(()) };
        let mut values = buffer::<E>(len);
        write(&mut values)?;
        slot.add(Grad::own(values))
    }

    /// Delivers a gradient that was summed in f32, rounded once.
    pub fn deliver_sums<E: TensorElement>(&self, sums: &[f32]) -> Result<()> {
        self.accumulate::<E>(sums.len(), |grad, add| {
            if add {
                let mut total = vec![0f32; sums.len()];
                E::widen(grad, &mut total);
                total.iter_mut().zip(sums).for_each(|(t, s)| *t += s);
                E::narrow(&total, grad);
            } else {
                E::narrow(sums, grad);
            }
            Ok(())
        })
    }
}

/// The inputs of an operation under construction.
pub(crate) struct OpInputs<const N: usize> {
    tokens: Vec<Tensor>,
    sinks: [InputGradSink; N],
}

impl<const N: usize> OpInputs<N> {
    /// Finds or creates the tokens of `inputs`. An input that is `None` wants no gradient.
    ///
    /// In the backward pass, the gradients of the last inputs are complete first.
    pub fn of(inputs: [Option<&Tensor>; N]) -> Result<Self> {
        let mut all = Self { tokens: Vec::new(), sinks: [const { InputGradSink(None) }; N] };
        for (i, input) in inputs.into_iter().enumerate() {
            all.sinks[i] = input.map_or(Ok(InputGradSink(None)), |input| all.sink(input))?;
        }
        Ok(all)
    }

    /// Adds inputs whose number is known only at run time, and returns the destinations of their gradients.
    pub fn add<'a>(&mut self, inputs: impl IntoIterator<Item = &'a Tensor>) -> Result<Vec<InputGradSink>> {
        inputs.into_iter().map(|input| self.sink(input)).collect()
    }

    /// Finds or creates the token of an input, and returns the destination of its gradient.
    fn sink(&mut self, input: &Tensor) -> Result<InputGradSink> {
        if !input.track_op() || is_without_gradients() {
            return Ok(InputGradSink(None));
        }
        let AutogradMeta { token, slot, .. } = match node_of(input) {
            Some(node) if !node.is_wanted() => return Ok(InputGradSink(None)),
            Some(node) => node,
            None => adapter_token(input)?,
        };
        self.tokens.push(token);
        Ok(InputGradSink(Some(slot)))
    }

    /// Returns whether the gradient of any input is wanted. If none is, nothing needs to be kept for the backward pass.
    pub fn are_wanted(&self) -> bool {
        !self.tokens.is_empty()
    }

    /// Returns whether a backward pass may want the gradient of input `i`.
    pub fn wants(&self, i: usize) -> bool {
        self.sinks[i].is_recorded()
    }

    /// Returns the operation's result. `backward` receives the result's gradient and the destinations of the inputs'
    /// gradients, in the order of the inputs, and delivers these gradients.
    pub fn result(
        self,
        name: &'static str,
        storage: impl Into<ResultStorage>,
        shape: impl Into<Shape>,
        backward: impl Fn(Grad, &[InputGradSink; N]) -> Result<()> + Send + Sync + 'static,
    ) -> Result<Tensor> {
        let (ResultStorage(storage), shape) = (storage.into(), shape.into());
        if !self.are_wanted() {
            return Ok(Tensor::from_storage(storage, shape, BackpropOp::none(), false));
        }
        let sinks = self.sinks;
        record(self.tokens, name, (storage, shape), Box::new(move |grad| backward(grad, &sinks)))
    }
}

/// Returns the result of an operation that a backward pass differentiates.
fn record(inputs: Vec<Tensor>, name: &'static str, result: (Storage, Shape), backward: BackwardFn) -> Result<Tensor> {
    let slot = Arc::new(GradSlot::default());
    let operation = RecordedOp { name, slot: slot.clone(), backward: Mutex::new(Some(backward)) };
    with_token(operation.into_token(inputs)?, slot, name, result)
}

/// Creates a token for a tensor that has none, for one use.
fn adapter_token(input: &Tensor) -> Result<AutogradMeta> {
    let slot = Arc::new(GradSlot::default());
    let grad_source = slot.clone();
    let token = apply_precomputed("adapted-input", input, token_value(input.device())?, move |input, _| {
        match grad_source.take() {
            Some(grad) => grad.into_tensor(input.shape(), input.device()).map(Some),
            // Candle requests a gradient of every tensor that it tracks.
            None => input.zeros_like().map(Some),
        }
    })?;
    Ok(AutogradMeta::new(token, slot))
}

/// A result's storage, on any device.
pub(crate) struct ResultStorage(pub Storage);

impl From<CpuStorage> for ResultStorage {
    fn from(storage: CpuStorage) -> Self {
        Self(Storage::Cpu(storage))
    }
}

impl From<CudaStorage> for ResultStorage {
    fn from(storage: CudaStorage) -> Self {
        Self(Storage::Cuda(storage))
    }
}

/// Returns a copy of a tensor's values as the result of an operation.
pub(crate) fn copy_to_result(tensor: &Tensor) -> Result<ResultStorage> {
    Ok(ResultStorage(copy_storage(tensor)?.0))
}

/// The value of an operation's result, kept for the operation's own backward pass. It shares the result's memory
/// without being part of the result's graph.
#[derive(Debug, Clone, Default)]
pub(crate) struct SavedResult(Arc<OnceLock<Tensor>>);

impl SavedResult {
    /// Returns the result, once it exists.
    pub fn get(&self) -> Result<&Tensor> {
        match self.0.get() {
            Some(result) => Ok(result),
            None => candle_core::bail!("an operation's backward pass ran before its result was saved"),
        }
    }

    /// Saves the result, and returns it.
    pub fn save(&self, result: Tensor) -> Tensor {
        let _ = self.0.set(result.detach());
        result
    }
}

type BackwardFn = Box<dyn Fn(Grad) -> Result<()> + Send + Sync>;

/// The operation between the tokens of its inputs and the token of its result.
struct RecordedOp {
    name: &'static str,
    slot: Arc<GradSlot>,
    /// `None` once the function has run in a backward pass that was started by
    /// [`with_single_backward`](super::with_single_backward).
    backward: Mutex<Option<BackwardFn>>,
}

impl RecordedOp {
    /// Creates the operation's token.
    fn into_token(self, mut tokens: Vec<Tensor>) -> Result<Tensor> {
        // The tokens are joined in reverse. The second argument of a join is differentiated first, and therefore the
        // last inputs come first.
        while let [.., a, b] = &tokens[..] {
            let joined = a.apply_op2(b, JoinTokensOp)?;
            tokens.truncate(tokens.len() - 2);
            tokens.push(joined);
        }
        tokens[0].apply_op1(self)
    }

    fn run(&self) -> Result<()> {
        self.slot.run_hooks()?;
        // No gradient has arrived if no use of the result passed one on.
        let Some(grad) = self.slot.take() else { return Ok(()) };
        let Some(backward) = lock(&self.backward).take() else {
            candle_core::bail!(
                "{}: this graph was already differentiated, and its saved values are gone; run forward again",
                self.name
            )
        };
        let result = backward(grad);
        if result.is_err() || !is_single_backward() {
            *lock(&self.backward) = Some(backward);
        }
        if result.is_err() {
            abandon();
        }
        result
    }
}

impl CustomOp1 for RecordedOp {
    fn name(&self) -> &'static str {
        self.name
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok((CpuStorage::F32(vec![0.0]), Shape::from(1)))
    }

    fn cuda_fwd(&self, token: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        token_value_on_cuda(token)
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, token_grad: &Tensor) -> Result<Option<Tensor>> {
        self.run()?;
        // Only the presence of the gradient matters: it shows that this operation has been differentiated.
        Ok(Some(token_grad.clone()))
    }
}

/// Creates a token on the same GPU as another token.
fn token_value_on_cuda(token: &CudaStorage) -> Result<(CudaStorage, Shape)> {
    use candle_core::backend::BackendStorage;
    match token_value(&Device::Cuda(token.device().clone()))? {
        (Storage::Cuda(storage), shape) => Ok((storage, shape)),
        _ => candle_core::bail!("a token for the GPU was created on another device"),
    }
}

/// An operation that joins two tokens into one.
struct JoinTokensOp;

impl CustomOp2 for JoinTokensOp {
    fn name(&self) -> &'static str {
        "joined-tokens"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok((CpuStorage::F32(vec![0.0]), Shape::from(1)))
    }

    fn cuda_fwd(&self, token: &CudaStorage, _: &Layout, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        token_value_on_cuda(token)
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, _: &Tensor, token_grad: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        Ok((Some(token_grad.clone()), Some(token_grad.clone())))
    }
}

/// Returns a scalar whose backward pass delivers `output_grad`, the gradient of `output`, after `weight_grad`, a part
/// of the gradient of `weight`.
pub(crate) fn deliver_gradients(
    output: &Tensor,
    output_grad: Tensor,
    weight: &Tensor,
    weight_grad: Grad,
) -> Result<Tensor> {
    let (storage, _) = token_value(output.device())?;
    let weight_grad = Mutex::new(Some(weight_grad));
    let result = OpInputs::of([Some(output), Some(weight)])?;
    result.result("delivered-gradients", ResultStorage(storage), Shape::from(()), move |_, [to_output, to_weight]| {
        lock(&weight_grad).take().map_or(Ok(()), |grad| to_weight.deliver(grad))?;
        to_output.deliver(Grad::Shared(output_grad.clone()))
    })
}

/// Returns the input of a part of a graph that is differentiated separately, as the result of an operation of this
/// library: the gradients of its uses are added up as in the middle of a graph.
pub(crate) fn subgraph_input(input: &Var) -> Result<Tensor> {
    let (storage, shape) = copy_storage(input)?;
    OpInputs::of([Some(input.as_tensor())])?
        .result("part-input", ResultStorage(storage), shape, |grad, [to_x]| to_x.deliver(grad))
}
