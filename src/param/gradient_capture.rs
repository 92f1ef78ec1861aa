//! The capture of a parameter's gradient, by an operation between an empty leaf and the parameter's tensor.
//!
//! ```text
//!   empty leaf --Capture--> token --> parameter --> the model's operations --> loss
//!                  ^ bwd: the complete gradient, once per backward pass, after every use has been differentiated
//! ```
//!
//! Candle visits nodes in the reverse order of their creation, so the last layer's gradients come first. The gradient
//! is handed to the engine, and the leaf receives none (`None`, which Candle allows for leaves). Once the gradient has
//! arrived, no operation of this backward pass needs the parameter's values any longer. See [`crate::graph`] for the
//! token.
//!
//! Gradients count only in the backward pass of the engine that owns the parameter. Any other backward pass through the
//! parameter (Candle's own `loss.backward()`, another engine's) only reports that it no longer needs the parameter.

use super::ParamId;
use crate::graph::precomputed_op::{apply_precomputed, copy_storage, token_value};
use crate::graph::{DeferredGradient, GradSlot, want_grad_while, with_token};
use crate::tensor::residency::empty_leaf;
use candle_core::{Device, Result, Shape, Storage, Tensor};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Receives the gradients of parameters as they become complete.
pub(crate) trait GradientSink: Send + Sync {
    /// Returns whether gradients count in the backward pass that this thread runs. Otherwise they are dropped, or not
    /// even computed if an operation can do without them.
    fn takes_gradients(&self) -> bool;
    /// Takes the gradient of `param`, to which this backward pass adds nothing more.
    fn gradient_arrived(&self, param: ParamId, grad: DeferredGradient) -> Result<()>;
    /// Reports that a backward pass in which gradients do not count has differentiated all uses of `param`.
    fn no_longer_needed(&self, param: ParamId) -> Result<()>;
}

/// Creates a parameter's tensor, whose first storage is `storage`. Its gradients go to `sink`. While the parameter is
/// not `trained`, candle-zero's operations compute no gradients for it; Candle's do, and the sink ignores them.
pub(crate) fn capture(
    param: ParamId,
    trained: Arc<AtomicBool>,
    sink: Arc<dyn GradientSink>,
    device: &Device,
    (storage, shape): (Storage, Shape),
) -> Result<Tensor> {
    let gate = sink.clone();
    let slot = Arc::new(GradSlot::with_gate(Box::new(move || gate.takes_gradients())));
    let complete = slot.clone();
    let leaf = empty_leaf(device, &Shape::from(1))?;
    let token = apply_precomputed("capture-gradient", &leaf, token_value(device)?, move |_, _| {
        match DeferredGradient::taken_from(&complete) {
            _ if !sink.takes_gradients() => sink.no_longer_needed(param)?,
            Some(grad) => sink.gradient_arrived(param, grad)?,
            None => {}
        }
        Ok(None)
    })?;
    let tensor = with_token(token, slot, "parameter", (storage, shape))?;
    want_grad_while(&tensor, trained);
    Ok(tensor)
}

/// Returns a tensor of the same values, whose gradient is captured like that of an engine's parameter and then dropped.
/// Benches measure layers with it: neither a copy of the gradient nor a sum is added to their time.
///
/// # Errors
///
/// Candle's errors, for example if the device has no memory for the copy of the values.
pub fn drop_gradient(tensor: &Tensor) -> Result<Tensor> {
    let trained = Arc::new(AtomicBool::new(true));
    capture(0, trained, Arc::new(DropGradients), tensor.device(), copy_storage(tensor)?)
}

/// Takes gradients and drops them.
struct DropGradients;

impl GradientSink for DropGradients {
    fn takes_gradients(&self) -> bool {
        true
    }

    fn gradient_arrived(&self, _: ParamId, _: DeferredGradient) -> Result<()> {
        Ok(())
    }

    fn no_longer_needed(&self, _: ParamId) -> Result<()> {
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::graph::with_deferred_weight_gradients;
    use crate::nn::{
        ExpertActivation, ExpertAssignment, ExpertMlp, ExpertProjection, ExpertTensors, GateUpOrder, RouterOptions,
        RouterOrder, WeightLayout, linear, route,
    };
    use std::sync::Mutex;

    /// The gradients that have arrived.
    #[derive(Default)]
    struct Arrived(Mutex<Vec<DeferredGradient>>);

    impl GradientSink for Arrived {
        fn takes_gradients(&self) -> bool {
            true
        }

        fn gradient_arrived(&self, _: ParamId, grad: DeferredGradient) -> Result<()> {
            self.0.lock().unwrap().push(grad);
            Ok(())
        }

        fn no_longer_needed(&self, _: ParamId) -> Result<()> {
            Ok(())
        }
    }

    fn ramp(shape: (usize, usize)) -> Tensor {
        let values: Vec<f32> = (0..shape.0 * shape.1).map(|i| (i as f32 * 0.37).sin()).collect();
        Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
    }

    /// Returns, for a weight that `forward` uses, the number of parts of its gradient that were left for later, and the
    /// gradient.
    fn gradient_of(is_divided: bool, forward: impl Fn(&Tensor) -> Result<Tensor>) -> (usize, Vec<f32>) {
        let arrived = Arc::new(Arrived::default());
        let storage = (
            ramp((4, 4)).storage_and_layout().0.try_clone(&candle_core::Layout::contiguous(16)).unwrap(),
            Shape::from((4, 4)),
        );
        let weight = capture(0, Arc::new(AtomicBool::new(true)), arrived.clone(), &Device::Cpu, storage).unwrap();
        let loss = forward(&weight).unwrap().sqr().unwrap().sum_all().unwrap();
        if is_divided {
            with_deferred_weight_gradients(|| loss.backward()).unwrap()
        } else {
            loss.backward().unwrap()
        };
        let grad = arrived.0.lock().unwrap().pop().unwrap();
        let deferred_parts = grad.parts_left();
        (deferred_parts, grad.compute().unwrap().read::<f32, _>("test", |values| Ok(values.to_vec())).unwrap())
    }

    #[test]
    fn the_gradient_of_a_weight_is_left_for_later_and_has_the_same_bits() {
        let once = |w: &Tensor| linear(&ramp((3, 4)), w, None, WeightLayout::OutIn);
        let twice =
            |w: &Tensor| linear(&linear(&ramp((3, 4)), w, None, WeightLayout::OutIn)?, w, None, WeightLayout::InOut);
        // One of Candle's own operations, between two that defer their gradients, delivers its gradient immediately.
        let mixed = |w: &Tensor| {
            let y = linear(&ramp((3, 4)), w, None, WeightLayout::OutIn)?;
            linear(&y.matmul(&w.sqr()?)?, w, None, WeightLayout::InOut)
        };
        assert_eq!(gradient_of(false, once).0, 0);
        assert_eq!(gradient_of(true, once), (1, gradient_of(false, once).1));
        assert_eq!(gradient_of(true, twice), (2, gradient_of(false, twice).1));
        let (deferred_parts, grad) = gradient_of(true, mixed);
        assert!(deferred_parts < 2);
        assert_eq!(grad, gradient_of(false, mixed).1);
    }

    #[test]
    fn the_gradients_of_experts_are_left_for_later_and_have_the_same_bits() {
        // There are three experts with the same weight, one of which has no rows.
        let experts = |w: &Tensor| {
            let assignment = Arc::new(ExpertAssignment::new(&[2, 0, 2], 1, 3)?);
            let weights = vec![ExpertTensors::Separate(vec![w.clone(); 3])];
            ExpertProjection::new(weights, Vec::new(), WeightLayout::OutIn)?.forward(&ramp((3, 4)), &assignment)
        };
        let at_once = gradient_of(false, experts);
        assert!(at_once.0 == 0 && at_once.1.iter().any(|x| *x != 0.0));
        assert_eq!(gradient_of(true, experts), (3, at_once.1));
        // The gate, up and down projections of each expert have the same weight.
        let mlp = |w: &Tensor| {
            let logits = Tensor::new(&[[0f32, -1.0, 2.0], [1.0, 0.0, -1.0], [0.0, 0.0, 3.0]], &Device::Cpu)?;
            let order = RouterOrder::SoftmaxThenTop { renormalize: true };
            let routing = route(&logits, RouterOptions { experts_per_row: 1, order, keep_f32: false })?;
            let tensors = || ExpertTensors::Separate(vec![w.clone(); 3]);
            let projection = |weights| ExpertProjection::new(weights, Vec::new(), WeightLayout::OutIn);
            let (gate_up, down) = (projection(vec![tensors(), tensors()])?, projection(vec![tensors()])?);
            ExpertMlp::new(gate_up, down, ExpertActivation::Silu, GateUpOrder::Halves)?.forward(&ramp((3, 4)), &routing)
        };
        let at_once = gradient_of(false, mlp);
        assert!(at_once.0 == 0 && at_once.1.iter().any(|x| *x != 0.0));
        assert_eq!(gradient_of(true, mlp), (9, at_once.1));
    }
}
