//! One projection of all experts as one operation: the grouped product.

use super::adapter::ExpertAdapter;
use super::grouped_gemm::{NAME, ProjectionSizes};
use super::recorded_projection::{ProjectionBackward, RecordedProjection};
use super::tensors::ExpertTensors;
use super::{ExpertAssignment, unused};
use crate::graph::{OpInputs, SavedTensor};
use crate::kernels::buffer;
use crate::nn::in_f32::has_kernels;
use crate::nn::{WeightLayout, autocast, composed, linear, lora};
use crate::tensor::element::{TensorElement, with_element, with_elements};
use crate::util::counted;
use candle_core::{Result, Tensor, bail};
use std::sync::Arc;

/// One projection of all experts: y = x W_e (+ b_e) for each row x of expert e.
///
/// A projection may consist of several parameters, such as the gate and up projections of Llama's MLP in files that
/// store them separately. The outputs of the first parameter are then followed by those of the next.
///
/// On the CPU, a projection is one pass over the rows of all experts, without padding. Sums are in f32 and are rounded
/// once to the input's dtype. A row's result has the same bits as that of [`linear()`] with the expert's weight,
/// whatever the other rows and the number of threads are. Frozen parameters get no gradient. For other parameters,
/// every expert gets a gradient, which is zero if no row chose the expert.
#[derive(Debug, Clone)]
pub struct ExpertProjection {
    weights: Vec<ExpertTensors>,
    /// As many biases as weights, or none.
    biases: Vec<ExpertTensors>,
    layout: WeightLayout,
    adapter: Option<ExpertAdapter>,
    sizes: ProjectionSizes,
}

impl ExpertProjection {
    /// Creates a projection. For one expert, a weight is a matrix in `layout`, and a bias `[out]`; there are as many
    /// biases as weights, or none.
    ///
    /// # Errors
    /// No weight; a number of biases that is neither 0 nor that of the weights; weights or biases whose shapes, numbers
    /// of experts or dtypes do not match.
    pub fn new(weights: Vec<ExpertTensors>, biases: Vec<ExpertTensors>, layout: WeightLayout) -> Result<Self> {
        let mut sizes = ProjectionSizes { experts: 0, inputs: 0, columns: Vec::new() };
        for weight in &weights {
            weight.check(2, "weight")?;
            let (inputs, outputs) = match layout {
                WeightLayout::OutIn => (weight.dims()[1], weight.dims()[0]),
                WeightLayout::InOut => (weight.dims()[0], weight.dims()[1]),
            };
            let first = sizes.outputs();
            if first == 0 {
                (sizes.experts, sizes.inputs) = (weight.experts(), inputs);
            }
            sizes.columns.push(first..first + outputs);
            if (weight.experts(), inputs) != (sizes.experts, sizes.inputs) || weight.dtype() != weights[0].dtype() {
                bail!(
                    "experts: a weight of {} with {} and dtype {:?} is joined to one of {} with {} and dtype {:?}; \
                     these must be equal",
                    counted(weight.experts(), "expert"),
                    counted(inputs, "input"),
                    weight.tensors()[0].dtype(),
                    counted(sizes.experts, "expert"),
                    counted(sizes.inputs, "input"),
                    weights[0].tensors()[0].dtype()
                )
            }
        }
        if weights.is_empty() || (!biases.is_empty() && biases.len() != weights.len()) {
            bail!(
                "experts: a projection has {} and {} {}; there must be at least one weight, and either a bias for each \
                 weight or no bias",
                counted(weights.len(), "weight"),
                biases.len(),
                if biases.len() == 1 { "bias" } else { "biases" }
            )
        }
        for (bias, columns) in biases.iter().zip(&sizes.columns) {
            bias.check(1, "bias")?;
            if bias.experts() != sizes.experts || bias.dims() != [columns.len()] {
                bail!(
                    "experts: the biases of {} have shape {:?}; the weights of {} require [{}]",
                    counted(bias.experts(), "expert"),
                    bias.dims(),
                    counted(sizes.experts, "expert"),
                    columns.len()
                )
            }
        }
        Ok(Self { weights, biases, layout, adapter: None, sizes })
    }

    /// Adds a low-rank adapter, which applies to the joined outputs.
    ///
    /// # Errors
    /// Matrices whose shapes do not match the projection.
    pub fn with_adapter(self, adapter: ExpertAdapter) -> Result<Self> {
        adapter.check(&self.sizes)?;
        Ok(Self { adapter: Some(adapter), ..self })
    }

    /// Returns the weights.
    pub fn weights(&self) -> &[ExpertTensors] {
        &self.weights
    }

    /// Returns the number of experts.
    pub fn experts(&self) -> usize {
        self.sizes.experts
    }

    /// Returns the numbers of inputs and of outputs.
    pub fn widths(&self) -> (usize, usize) {
        (self.sizes.inputs, self.sizes.outputs())
    }

    /// Applies the projection to the slots' rows, `[slots, in]`.
    ///
    /// # Errors
    /// An input or an assignment that does not match the projection.
    pub fn forward(&self, x: &Tensor, assignment: &Arc<ExpertAssignment>) -> Result<Tensor> {
        if x.dims() != [assignment.slots(), self.sizes.inputs] || assignment.experts() != self.sizes.experts {
            bail!(
                "experts: the input has shape {:?} and the assignment has {}; for {}, a projection of {} needs an \
                 input of shape [{}, {}] and an assignment of as many experts",
                x.dims(),
                counted(assignment.experts(), "expert"),
                counted(assignment.slots(), "slot"),
                counted(self.sizes.experts, "expert"),
                assignment.slots(),
                self.sizes.inputs
            )
        }
        if self.has_kernels_for(x) {
            return with_element!(x.dtype(), NAME, E => self.grouped::<E>(x, assignment));
        }
        let y = composed::expert_projection(x, &self.weights, &self.biases, self.layout, assignment, linear)?;
        let y = match self.active_adapter() {
            Some(adapter) => crate::nn::add(&y, &adapter.composed(x, assignment, linear)?)?,
            None => y,
        };
        let adapter = self.active_adapter().into_iter().flat_map(|adapter| [&adapter.a, &adapter.b]);
        let others = std::iter::once(x).chain(adapter);
        unused::with_zero_gradients(y, self.weights.iter().chain(&self.biases), others, assignment)
    }

    /// Returns the adapter, unless adapters are switched off.
    fn active_adapter(&self) -> Option<&ExpertAdapter> {
        self.adapter.as_ref().filter(|_| !lora::are_off())
    }

    /// Returns whether the projection of `x` is a grouped product, not a loop over the experts.
    pub(super) fn has_kernels_for(&self, x: &Tensor) -> bool {
        let have_same_dtype = self.weights.iter().chain(&self.biases).all(|param| param.dtype() == Some(x.dtype()));
        let is_lower = autocast::lower_format(x, &self.weights[0].tensors()[0]).is_some();
        has_kernels(x) && have_same_dtype && !is_lower
    }

    /// Adds the parameters to the inputs of an operation on the CPU.
    pub(super) fn record<const N: usize>(&self, inputs: &mut OpInputs<N>) -> Result<RecordedProjection> {
        let parameters = || self.weights.iter().chain(&self.biases);
        if let Some(device) = parameters().filter_map(ExpertTensors::device).find(|device| !device.is_cpu()) {
            bail!("experts: the input is on the CPU and a weight on {device:?}; move them to one device")
        }
        let parameters = [&self.weights[..], &self.biases];
        RecordedProjection::new(&self.sizes, self.layout, parameters, self.active_adapter(), inputs)
    }

    fn grouped<E: TensorElement>(&self, x: &Tensor, assignment: &Arc<ExpertAssignment>) -> Result<Tensor> {
        let x = x.contiguous()?;
        let mut inputs = OpInputs::of([Some(&x)])?;
        let projection = self.record(&mut inputs)?;
        let shape = (assignment.slots(), self.sizes.outputs());
        let mut y = buffer::<E>(shape.0 * shape.1);
        let sorted = projection.sorted_adapter()?;
        let h = with_elements::<E, _>(&x, NAME, |x| projection.forward(x, assignment, &sorted, &mut y))?;
        let h = if inputs.are_wanted() { h } else { Vec::new() };
        let backward = Arc::new(ProjectionBackward::new(projection, assignment.clone(), SavedTensor::of(&x), h));
        inputs.result(NAME, E::storage(y), shape, move |grad, [to_x]| {
            grad.read::<E, _>(NAME, |g| {
                let mut pass = backward.begin()?;
                let len = backward.slots() * backward.inputs();
                to_x.accumulate_if_wanted::<E>(len, |dx| pass.rows(&backward.all_experts(), g, dx))?;
                backward.deliver::<E>(g, pass)
            })
        })
    }
}
