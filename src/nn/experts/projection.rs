//! One projection of all experts as one operation: the grouped product.

use super::adapter::{AdapterSizes, ExpertAdapter};
use super::grouped_rows::{GroupedRows, NAME, ProjectionSizes};
use super::tensors::{ExpertSinks, ExpertTensors, LentGradient};
use super::{ExpertAssignment, unused};
use crate::graph::{InputGradSink, OpInputs, SavedTensor};
use crate::kernels::buffer;
use crate::kernels::gemm::{column_sums, gemm_grouped};
use crate::nn::f32_parameters::with_wide;
use crate::nn::in_f32::has_kernels;
use crate::nn::{WeightLayout, autocast, composed, linear, lora};
use crate::tensor::element::{TensorElement, with_element, with_elements};
use candle_core::{Result, Tensor, bail};
use std::ops::Range;
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
    /// Weights or biases whose shapes, numbers of experts or dtypes do not match.
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
                    "experts: a weight of {} experts with {inputs} inputs and dtype {:?} is joined to one of {} experts with \
                     {} inputs and dtype {:?}; these must be equal",
                    weight.experts(),
                    weight.tensors()[0].dtype(),
                    sizes.experts,
                    sizes.inputs,
                    weights[0].tensors()[0].dtype()
                )
            }
        }
        if weights.is_empty() || (!biases.is_empty() && biases.len() != weights.len()) {
            bail!(
                "experts: a projection of {} weights with {} biases; there must be at least one weight, and a bias for each \
                 or none",
                weights.len(),
                biases.len()
            )
        }
        for (bias, columns) in biases.iter().zip(&sizes.columns) {
            bias.check(1, "bias")?;
            if bias.experts() != sizes.experts || bias.dims() != [columns.len()] {
                bail!(
                    "experts: the biases of {} experts have shape {:?}; the weights of {} experts require [{}]",
                    bias.experts(),
                    bias.dims(),
                    sizes.experts,
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
                "experts: the input has shape {:?} and the assignment has {} experts; {} slots of a projection of {} \
                 experts need [{}, {}]",
                x.dims(),
                assignment.experts(),
                assignment.slots(),
                self.sizes.experts,
                assignment.slots(),
                self.sizes.inputs
            )
        }
        let adapter = self.adapter.as_ref().filter(|_| !lora::are_off());
        let is_of_one_dtype = self.weights.iter().chain(&self.biases).all(|of| of.dtype() == Some(x.dtype()));
        let is_lower = autocast::lower(x, &self.weights[0].tensors()[0]).is_some();
        if has_kernels(x) && is_of_one_dtype && !is_lower {
            return with_element!(x.dtype(), NAME, E => self.grouped::<E>(x, adapter, assignment));
        }
        let y = composed::expert_projection(x, &self.weights, &self.biases, self.layout, assignment, linear)?;
        let y = match adapter {
            Some(adapter) => crate::nn::add(&y, &adapter.composed(x, assignment, linear)?)?,
            None => y,
        };
        unused::with_zero_gradients(y, self.weights.iter().chain(&self.biases), assignment)
    }

    fn grouped<E: TensorElement>(
        &self,
        x: &Tensor,
        adapter: Option<&ExpertAdapter>,
        assignment: &Arc<ExpertAssignment>,
    ) -> Result<Tensor> {
        if let Some(device) = self.weights.iter().filter_map(ExpertTensors::device).find(|device| !device.is_cpu()) {
            bail!("experts: the input is on the CPU and a weight on {device:?}; move them to one device")
        }
        let x = x.contiguous()?;
        let contiguous = |of: &[ExpertTensors]| of.iter().map(ExpertTensors::contiguous).collect::<Result<Vec<_>>>();
        let (weights, biases) = (contiguous(&self.weights)?, contiguous(&self.biases)?);
        let adapter = adapter.map(ExpertAdapter::contiguous).transpose()?;
        let mut inputs = OpInputs::of([
            Some(&x),
            adapter.as_ref().map(|adapter| &adapter.a),
            adapter.as_ref().map(|adapter| &adapter.b),
        ])?;
        let record = |of: &[ExpertTensors], inputs: &mut OpInputs<3>| -> Result<Vec<ExpertSinks>> {
            of.iter().map(|of| of.record(inputs)).collect()
        };
        let (of_weights, of_biases) = (record(&weights, &mut inputs)?, record(&biases, &mut inputs)?);
        let grouped = GroupedRows { sizes: self.sizes.clone(), layout: self.layout, assignment: assignment.clone() };
        let outputs = self.sizes.outputs();
        let mut y = buffer::<E>(assignment.slots() * outputs);
        let mut kept = None;
        if let Some(adapter) = &adapter {
            let sizes = AdapterSizes::new(adapter, &self.sizes, assignment.clone());
            let h = with_wide(&adapter.a, |a| with_elements::<E, _>(&x, NAME, |x| Ok(sizes.project_down(x, a))))?;
            with_wide(&adapter.b, |b| {
                sizes.project_up(&h, &sizes.by_expert(b), &mut y);
                Ok(())
            })?;
            let h = if inputs.are_wanted() { h } else { Vec::new() };
            kept = Some(KeptAdapter { sizes, h, adapter: adapter.clone() });
        }
        with_elements::<E, _>(&x, NAME, |x| grouped.product(x, &weights, &biases, &mut y, adapter.is_some()))?;
        let backward = Arc::new(GroupedBackward { rows: grouped, x: SavedTensor::of(&x), weights, adapter: kept });
        inputs.result(NAME, E::storage(y), (assignment.slots(), outputs), move |grad, [to_x, to_a, to_b]| {
            grad.read::<E, _>(NAME, |g| backward.run(g, [to_x, to_a, to_b], [&of_weights, &of_biases]))
        })
    }
}

/// The values of the adapter that the backward pass needs.
struct KeptAdapter {
    sizes: AdapterSizes,
    h: Vec<f32>,
    adapter: ExpertAdapter,
}

/// The values that the backward pass needs.
struct GroupedBackward {
    rows: GroupedRows,
    x: SavedTensor,
    weights: Vec<ExpertTensors>,
    adapter: Option<KeptAdapter>,
}

impl GroupedBackward {
    fn run<E: TensorElement>(
        self: &Arc<Self>,
        g: &[E],
        [to_x, to_a, to_b]: [&InputGradSink; 3],
        [of_weights, of_biases]: [&[ExpertSinks]; 2],
    ) -> Result<()> {
        for (part, sinks) in of_biases.iter().enumerate() {
            self.deliver_bias_gradients(g, part, sinks)?;
        }
        let mut dh = Vec::new();
        if let Some(KeptAdapter { sizes, h, adapter }) = &self.adapter
            && [to_x, to_a, to_b].iter().any(|sink| sink.is_wanted())
        {
            let mut db = to_b.is_wanted().then(|| vec![0f32; adapter.b.elem_count()]);
            dh = with_wide(&adapter.b, |b| Ok(sizes.thin_gradients(g, h, &sizes.by_expert(b), db.as_deref_mut())))?;
            if let Some(db) = db {
                with_element!(adapter.b.dtype(), NAME, P => to_b.give_sums::<P>(&db))?;
            }
            if to_a.is_wanted() {
                let da = with_elements::<E, _>(&self.x.get()?, NAME, |x| Ok(sizes.gradient_of_a(x, &dh)))?;
                with_element!(adapter.a.dtype(), NAME, P => to_a.give_sums::<P>(&da))?;
            }
        }
        for (part, sinks) in of_weights.iter().enumerate() {
            self.deliver_weight_gradients(g, part, sinks)?;
        }
        let (slots, inputs) = (self.rows.assignment.slots(), self.rows.sizes.inputs);
        to_x.accumulate::<E>(slots * inputs, |dx, add| {
            if let Some(KeptAdapter { sizes, adapter, .. }) = &self.adapter {
                with_wide(&adapter.a, |a| {
                    sizes.gradient_of_x(&dh, a, dx, add);
                    Ok(())
                })?;
            }
            self.rows.input_gradient(g, &self.weights, dx, add || self.adapter.is_some())
        })
    }

    fn deliver_bias_gradients<E: TensorElement>(&self, g: &[E], part: usize, sinks: &ExpertSinks) -> Result<()> {
        let width = self.rows.sizes.columns[part].len();
        for (experts, sink) in sinks.iter().filter(|(_, sink)| sink.is_wanted()) {
            let mut sums = vec![0f32; experts.len() * width];
            for (expert, sums) in experts.zip(sums.chunks_exact_mut(width.max(1))) {
                column_sums(self.rows.columns(g, part, expert, 0), sums);
            }
            sink.give_sums::<E>(&sums)?;
        }
        Ok(())
    }

    /// Delivers the gradients of a weight of all experts in one pass, except those that are left for later.
    fn deliver_weight_gradients<E: TensorElement>(
        self: &Arc<Self>,
        g: &[E],
        part: usize,
        sinks: &ExpertSinks,
    ) -> Result<()> {
        if !sinks.are_wanted() {
            return Ok(());
        }
        let len = self.rows.sizes.inputs * self.rows.sizes.columns[part].len();
        let mut lent = Vec::new();
        for (experts, sink) in sinks.iter() {
            if !sink.is_deferred() {
                lent.extend(LentGradient::take(sink, &experts, len)?);
                continue;
            }
            let slots = self.slots_of(&experts);
            let (this, outputs) = (self.clone(), self.rows.sizes.outputs());
            let kept = slots.len() * self.rows.sizes.inputs * size_of::<E>();
            sink.now_or_later(&g[slots.start * outputs..slots.end * outputs], kept, move |g, sink| {
                let lent = LentGradient::<E>::take(sink, &experts, len)?;
                this.write_weight_gradients(lent.into_iter().collect(), part, g, slots.start)
            })?;
        }
        self.write_weight_gradients(lent, part, g, 0)
    }

    /// Returns the slots of consecutive experts.
    fn slots_of(&self, experts: &Range<usize>) -> Range<usize> {
        let slots = |expert: usize| self.rows.assignment.slots_of(expert);
        match experts.is_empty() {
            true => 0..0,
            false => slots(experts.start).start..slots(experts.end - 1).end,
        }
    }

    fn write_weight_gradients<E: TensorElement>(
        &self,
        mut lent: Vec<LentGradient<'_, E>>,
        part: usize,
        g: &[E],
        first: usize,
    ) -> Result<()> {
        with_elements::<E, _>(&self.x.get()?, NAME, |x| {
            let products = lent.iter_mut().flat_map(|lent| {
                let add = lent.add;
                let parts = lent.parts();
                parts.map(move |(expert, dw)| self.rows.weight_gradient(x, (g, first), (part, expert), dw, add))
            });
            gemm_grouped(products.collect());
            Ok(())
        })?;
        lent.into_iter().try_for_each(LentGradient::deliver)
    }
}
