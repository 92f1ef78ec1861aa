//! The MLP of experts: gate and up, the gated activation, down, and the weighted sum.

use super::grouped_gemm::NAME;
use super::options::{ExpertActivation, GateUpOrder};
use super::recorded_projection::{ExpertSlots, ProjectionBackward};
use super::traveling_rows::RowRoutes;
use super::{ExpertAssignment, ExpertProjection, Routing, combine_experts, expert_rows, gated_activation};
use crate::graph::{InputGradSink, OpInputs, SavedTensor};
use crate::kernels::{buffer, gate_up_activation};
use crate::tensor::element::{TensorElement, with_element, with_elements};
use crate::util::counted;
use crate::zero::{RoutedPass, RoutedUnits};
use candle_core::{Device, Result, Shape, Tensor, bail};
use std::sync::Arc;

/// The MLP of all experts of a layer: for each row, the sum over its experts e of `weight_e down_e(act(gate_e x, up_e
/// x))`.
///
/// The results of a row's experts are added to 0 in ascending order of the experts' numbers, whatever their order in
/// the router's choice; the weight is applied after `down` and its bias. The memory of the activations is proportional
/// to the number of choices, not to the number of experts.
///
/// If every expert is a unit ([`with_units`](Self::with_units)), only the experts that at least one row on any rank
/// chose are gathered, a few at a time.
#[derive(Debug, Clone)]
pub struct ExpertMlp {
    gate_up: ExpertProjection,
    down: ExpertProjection,
    activation: GatedActivation,
    units: Option<RoutedUnits>,
}

/// The activation between the projections.
#[derive(Debug, Clone, Copy)]
struct GatedActivation {
    gate: ExpertActivation,
    order: GateUpOrder,
    /// The number of the activation's outputs for each row.
    width: usize,
}

impl ExpertMlp {
    /// Creates the MLP from `gate_up` (the projection to gate and up, with one weight for both or one for each), `down`
    /// (the projection from the activation to the output) and the activation `gate`.
    ///
    /// # Errors
    /// Projections whose numbers of experts differ, or whose sizes do not match.
    pub fn new(
        gate_up: ExpertProjection,
        down: ExpertProjection,
        gate: ExpertActivation,
        order: GateUpOrder,
    ) -> Result<Self> {
        let ((_, gate_up_outputs), (width, _)) = (gate_up.widths(), down.widths());
        if gate_up.experts() != down.experts() || gate_up_outputs != 2 * width {
            bail!(
                "experts: gate and up of {} have {}, and down of {} has {}; \
                 the numbers of experts must be equal, and there must be {} outputs",
                counted(gate_up.experts(), "expert"),
                counted(gate_up_outputs, "output"),
                counted(down.experts(), "expert"),
                counted(width, "input"),
                2 * width
            )
        }
        Ok(Self { gate_up, down, activation: GatedActivation { gate, order, width }, units: None })
    }

    /// Declares that the tensors of each expert belong to a separate unit; build `units` with
    /// [`routed_units`](crate::zero::routed_units), in the order of the experts. At stage 3, an expert is then gathered
    /// only if a row on any rank chose it. Experts are gathered, used and released a few at a time: as many as
    /// `stage3_prefetch_bucket_size` and `stage3_max_live_parameters` allow, but at least one. All ranks must run the
    /// layer.
    ///
    /// # Errors
    /// A number of units that differs from that of the experts.
    pub fn with_units(self, units: RoutedUnits) -> Result<Self> {
        if units.len() != self.experts() {
            bail!(
                "experts: the MLP has {}, but {}; build one unit for each expert",
                counted(self.experts(), "expert"),
                counted(units.len(), "unit")
            )
        }
        Ok(Self { units: Some(units), ..self })
    }

    /// Returns the number of experts.
    pub fn experts(&self) -> usize {
        self.down.experts()
    }

    /// Applies the MLP to `x` `[.., width]`, for whose rows a router has chosen experts.
    ///
    /// # Errors
    /// An input or choices that do not match; with expert parallelism, an input or experts that are not on the CPU or
    /// have different dtypes; failures to gather the experts or to exchange rows.
    pub fn forward(&self, x: &Tensor, routing: &Routing) -> Result<Tensor> {
        let assignment = routing.assignment();
        if assignment.experts() != self.experts() {
            let (router_experts, experts) = (counted(assignment.experts(), "expert"), self.experts());
            bail!("experts: the router chose among {router_experts}; the MLP has {experts}")
        }
        let mut shape = x.dims().to_vec();
        if let Some(last) = shape.last_mut() {
            *last = self.down.widths().1;
        }
        let shape = shape.into();
        let Some(exchange) = self.units.as_ref().and_then(RoutedUnits::exchange) else {
            return self.forward_local(x, routing.weights(), assignment, &shape);
        };
        if !(self.gate_up.has_kernels_for(x) && self.down.has_kernels_for(x)) {
            bail!(
                "experts: the input is {:?} on {:?}; with expert_parallel, the input and the experts must be on the \
                 CPU and have the same dtype: f32, bf16 or f16",
                x.dtype(),
                x.device()
            )
        }
        let (routes, received) = RowRoutes::send(exchange, x, routing)?;
        let received_shape = Shape::from((received.assignment.rows(), self.down.widths().1));
        let y = self.forward_local(&received.rows, &received.weights, &received.assignment, &received_shape)?;
        routes.return_results(&y, &shape)
    }

    /// Applies the experts in `assignment` to the rows of `x`, and sums the results, multiplied by `weights`.
    fn forward_local(
        &self,
        x: &Tensor,
        weights: &Tensor,
        assignment: &Arc<ExpertAssignment>,
        shape: &Shape,
    ) -> Result<Tensor> {
        let experts = match &self.units {
            Some(units) => units.agree(assignment.active_experts())?,
            None => RoutedPass::all_resident(self.experts()),
        };
        let combine = |y: &Tensor| combine_experts(y, weights, assignment, shape);
        if self.gate_up.has_kernels_for(x) && self.down.has_kernels_for(x) {
            let rows = expert_rows(x, assignment)?;
            let y = with_element!(x.dtype(), NAME, E => self.grouped::<E>(&rows, assignment, experts))?;
            // The backward pass computes the rows again.
            drop(rows);
            return combine(&y);
        }
        self.units.iter().for_each(RoutedUnits::expect_any_order);
        experts.run_together(x, |x| {
            let both = self.gate_up.forward(&expert_rows(x, assignment)?, assignment)?;
            let GatedActivation { gate, order, .. } = self.activation;
            combine(&self.down.forward(&gated_activation(&both, gate, order)?, assignment)?)
        })
    }

    /// Computes the results of all slots as one operation, a few experts at a time.
    fn grouped<E: TensorElement>(
        &self,
        x: &Tensor,
        assignment: &Arc<ExpertAssignment>,
        experts: RoutedPass,
    ) -> Result<Tensor> {
        let (slots, inputs, outputs) = (assignment.slots(), self.gate_up.widths().0, self.down.widths().1);
        if x.dims() != [slots, inputs] {
            bail!(
                "experts: the rows of {} have shape {:?}; gate and up need [{slots}, {inputs}]",
                counted(slots, "slot"),
                x.dims()
            )
        }
        let x = x.contiguous()?;
        let mut op = OpInputs::of([Some(&x)])?;
        let (gate_up, down) = (self.gate_up.record(&mut op)?, self.down.record(&mut op)?);
        let sorted = (gate_up.sorted_adapter()?, down.sorted_adapter()?);
        let activation = self.activation;
        let width = activation.width;
        let mut saved_both = op.are_wanted().then(|| buffer::<E>(slots * 2 * width));
        let mut low_rank_products = (Vec::new(), Vec::new());
        let mut y = buffer::<E>(slots * outputs);
        with_elements::<E, _>(&x, NAME, |x| {
            experts.run(|experts| {
                let part = ExpertSlots::new(assignment, experts);
                let mut scratch = buffer::<E>(if saved_both.is_none() { part.slots.len() * 2 * width } else { 0 });
                let both = match &mut saved_both {
                    Some(saved_both) => &mut saved_both[part.rows(2 * width)],
                    None => &mut scratch[..],
                };
                let h = gate_up.forward(&x[part.rows(inputs)], &part.assignment, &sorted.0, both)?;
                low_rank_products.0.extend(h);
                let inner = activation.of(both);
                let h = down.forward(&inner, &part.assignment, &sorted.1, &mut y[part.rows(outputs)])?;
                low_rank_products.1.extend(h);
                Ok(())
            })
        })?;
        let (y, shape) = (E::storage(y), (slots, outputs));
        let Some(both) = saved_both else { return op.result(NAME, y, shape, |_, _| Ok(())) };
        let both = Tensor::from_vec(both, (slots, 2 * width), &Device::Cpu)?;
        let both_for_remake = both.clone();
        let inner = SavedTensor::recomputed(move || {
            let inner = with_elements::<E, _>(&both_for_remake, NAME, |both| Ok(activation.of(both)))?;
            Tensor::from_vec(inner, (slots, width), &Device::Cpu)
        });
        let gate_up = ProjectionBackward::new(gate_up, assignment.clone(), SavedTensor::of(&x), low_rank_products.0);
        let down = ProjectionBackward::new(down, assignment.clone(), inner, low_rank_products.1);
        let (gate_up, down) = (Arc::new(gate_up), Arc::new(down));
        let backward = MlpBackward { gate_up, down, activation, both, experts, assignment: assignment.clone() };
        op.result(NAME, y, shape, move |grad, [to_x]| grad.read::<E, _>(NAME, |g| backward.run(g, to_x)))
    }
}

impl GatedActivation {
    /// Returns the activation of `both`, which holds gate and up.
    fn of<E: TensorElement>(self, both: &[E]) -> Vec<E> {
        let mut inner = buffer::<E>(both.len() / 2);
        gate_up_activation::gated(self.gate, self.order, both, self.width, &mut inner);
        inner
    }

    /// Computes the gradient of `both` from that of the activation.
    fn backward<E: TensorElement>(self, both: &[E], d_inner: &[E], d_both: &mut [E]) {
        gate_up_activation::gated_backward(self.gate, self.order, (both, d_inner), self.width, d_both);
    }
}

/// The values that the backward pass of the MLP needs.
struct MlpBackward {
    gate_up: Arc<ProjectionBackward>,
    down: Arc<ProjectionBackward>,
    activation: GatedActivation,
    /// The results of gate and up, `[slots, 2 width]`.
    both: Tensor,
    experts: RoutedPass,
    assignment: Arc<ExpertAssignment>,
}

impl MlpBackward {
    /// Delivers all gradients. `g` is the gradient of the result.
    fn run<E: TensorElement>(&self, g: &[E], to_x: &InputGradSink) -> Result<()> {
        let slots = self.assignment.slots();
        let mut passes = (self.gate_up.begin()?, self.down.begin()?);
        if !to_x.is_wanted() && !self.gate_up.trains() {
            // Only `down` needs gradients, and they can be computed without the weights of any expert.
            passes.1.rows::<E>(&self.down.all_experts(), g, None)?;
            return self.down.deliver(g, passes.1);
        }
        let (inputs, width) = (self.gate_up.inputs(), self.activation.width);
        let outputs = g.len().checked_div(slots).unwrap_or(0);
        let mut d_both = buffer::<E>(slots * 2 * width);
        to_x.accumulate_if_wanted::<E>(slots * inputs, |mut dx| {
            with_elements::<E, _>(&self.both, NAME, |both| {
                self.experts.run(|experts| {
                    let part = ExpertSlots::new(&self.assignment, experts);
                    let mut d_inner = buffer::<E>(part.slots.len() * width);
                    passes.1.rows(&part, &g[part.rows(outputs)], Some((&mut d_inner, false)))?;
                    let d_both = &mut d_both[part.rows(2 * width)];
                    self.activation.backward(&both[part.rows(2 * width)], &d_inner, d_both);
                    let dx = dx.as_mut().map(|(dx, add)| (&mut dx[part.rows(inputs)], *add));
                    passes.0.rows(&part, d_both, dx)
                })
            })
        })?;
        self.down.deliver(g, passes.1)?;
        self.gate_up.deliver(&d_both, passes.0)
    }
}
