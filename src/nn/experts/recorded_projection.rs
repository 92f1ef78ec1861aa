//! A projection as a part of an operation: its products, and the gradients of its parameters.
//!
//! An operation computes the rows of some experts at a time. Only the products of these rows need the experts' weights.
//! The gradients of the parameters do not need these weights, and are delivered for all experts together.

use super::ExpertAssignment;
use super::adapter::{AdapterSizes, ExpertAdapter};
use super::grouped_gemm::{GroupedGemm, NAME, ProjectionSizes};
use super::tensors::{ExpertGradSinks, ExpertTensors, LentGradient};
use crate::graph::{InputGradSink, OpInputs, SavedTensor};
use crate::kernels::gemm::{column_sums, gemm_grouped};
use crate::nn::WeightLayout;
use crate::nn::f32_weight_linear::with_f32_values;
use crate::tensor::element::{TensorElement, with_element, with_elements};
use candle_core::Result;
use std::ops::Range;
use std::sync::Arc;

/// A projection's parameters, and the destinations of their gradients.
pub(super) struct RecordedProjection {
    sizes: ProjectionSizes,
    layout: WeightLayout,
    weights: Vec<ExpertTensors>,
    biases: Vec<ExpertTensors>,
    adapter: Option<RecordedAdapter>,
    weight_sinks: Vec<ExpertGradSinks>,
    bias_sinks: Vec<ExpertGradSinks>,
}

/// An adapter's matrices, and the destinations of their gradients.
struct RecordedAdapter {
    matrices: ExpertAdapter,
    to_a: InputGradSink,
    to_b: InputGradSink,
}

/// Consecutive experts whose rows are computed together.
pub(super) struct ExpertSlots {
    /// The rows of these experts only. Slots are counted from the first expert's first slot.
    pub assignment: Arc<ExpertAssignment>,
    /// The experts' slots among those of all experts.
    pub slots: Range<usize>,
}

impl ExpertSlots {
    /// Returns the part of an assignment that concerns `experts`.
    pub fn new(assignment: &ExpertAssignment, experts: Range<usize>) -> Self {
        let slots = assignment.slots_of_range(&experts);
        Self { assignment: Arc::new(assignment.narrow(experts)), slots }
    }

    /// Returns the range of the part's rows in a buffer with `width` elements for each slot.
    pub fn rows(&self, width: usize) -> Range<usize> {
        self.slots.start * width..self.slots.end * width
    }
}

impl RecordedProjection {
    /// Adds the parameters (weights, biases and the adapter's matrices) to an operation's inputs.
    pub fn new<const N: usize>(
        sizes: &ProjectionSizes,
        layout: WeightLayout,
        [weights, biases]: [&[ExpertTensors]; 2],
        adapter: Option<&ExpertAdapter>,
        inputs: &mut OpInputs<N>,
    ) -> Result<Self> {
        let adapter = match adapter.map(ExpertAdapter::contiguous).transpose()? {
            Some(matrices) => {
                let sinks = inputs.add([&matrices.a, &matrices.b])?;
                let [to_a, to_b] = [sinks[0].clone(), sinks[1].clone()];
                Some(RecordedAdapter { matrices, to_a, to_b })
            }
            None => None,
        };
        let contiguous =
            |params: &[ExpertTensors]| params.iter().map(ExpertTensors::contiguous).collect::<Result<Vec<_>>>();
        let (weights, biases) = (contiguous(weights)?, contiguous(biases)?);
        let mut record =
            |params: &[ExpertTensors]| params.iter().map(|param| param.record(inputs)).collect::<Result<Vec<_>>>();
        let (weight_sinks, bias_sinks) = (record(&weights)?, record(&biases)?);
        Ok(Self { sizes: sizes.clone(), layout, weights, biases, adapter, weight_sinks, bias_sinks })
    }

    /// Returns the adapter's matrices B in the order of [`AdapterSizes::sort_by_expert`], or an empty list if there is
    /// no adapter.
    pub fn sorted_adapter(&self) -> Result<Vec<f32>> {
        let Some(RecordedAdapter { matrices, .. }) = &self.adapter else { return Ok(Vec::new()) };
        with_f32_values(&matrices.b, |b| Ok(AdapterSizes::sort_by_expert(matrices, &self.sizes, b)))
    }

    /// Computes the results `y` of the rows `x`. `sorted` is from [`sorted_adapter`](Self::sorted_adapter). Returns the
    /// low-rank products of the adapter.
    pub fn forward<E: TensorElement>(
        &self,
        x: &[E],
        assignment: &Arc<ExpertAssignment>,
        sorted: &[f32],
        y: &mut [E],
    ) -> Result<Vec<f32>> {
        let mut h = Vec::new();
        if let Some(RecordedAdapter { matrices, .. }) = &self.adapter {
            let sizes = AdapterSizes::new(matrices, &self.sizes, assignment.clone());
            h = with_f32_values(&matrices.a, |a| Ok(sizes.project_down(x, a)))?;
            sizes.project_up(&h, sorted, y);
        }
        self.grouped_gemm(assignment).product(x, &self.weights, &self.biases, y, self.adapter.is_some())?;
        Ok(h)
    }

    fn grouped_gemm(&self, assignment: &Arc<ExpertAssignment>) -> GroupedGemm {
        GroupedGemm { sizes: self.sizes.clone(), layout: self.layout, assignment: assignment.clone() }
    }

    /// Returns whether the gradient of any parameter is wanted.
    pub fn trains(&self) -> bool {
        let mut sinks = self.weight_sinks.iter().chain(&self.bias_sinks);
        sinks.any(ExpertGradSinks::are_wanted) || self.trains_adapter()
    }

    fn trains_adapter(&self) -> bool {
        self.adapter.as_ref().is_some_and(|adapter| adapter.to_a.is_wanted() || adapter.to_b.is_wanted())
    }
}

/// The values that the backward pass of a projection needs.
pub(super) struct ProjectionBackward {
    projection: RecordedProjection,
    rows: GroupedGemm,
    x: SavedTensor,
    /// The low-rank products of the adapter.
    h: Vec<f32>,
}

/// A backward pass in progress, with the sums over its parts.
pub(super) struct ProjectionBackwardPass<'a> {
    backward: &'a ProjectionBackward,
    /// The adapter's matrices B, from [`RecordedProjection::sorted_adapter`].
    sorted: Vec<f32>,
    /// The gradients of the matrices B, if they are wanted.
    sorted_grads: Option<Vec<f32>>,
    /// The gradients of the low-rank products of the parts so far.
    dh: Vec<f32>,
}

impl ProjectionBackward {
    /// Keeps a projection, its input and the low-rank products of the adapter after a forward pass.
    pub fn new(projection: RecordedProjection, assignment: Arc<ExpertAssignment>, x: SavedTensor, h: Vec<f32>) -> Self {
        let rows = projection.grouped_gemm(&assignment);
        Self { projection, rows, x, h }
    }

    /// Returns the number of slots.
    pub fn slots(&self) -> usize {
        self.rows.assignment.slots()
    }

    /// Returns the number of inputs.
    pub fn inputs(&self) -> usize {
        self.rows.sizes.inputs
    }

    /// Returns whether the gradient of any parameter is wanted.
    pub fn trains(&self) -> bool {
        self.projection.trains()
    }

    /// Returns all experts as one part.
    pub fn all_experts(&self) -> ExpertSlots {
        ExpertSlots { assignment: self.rows.assignment.clone(), slots: 0..self.slots() }
    }

    /// Begins a backward pass.
    pub fn begin(&self) -> Result<ProjectionBackwardPass<'_>> {
        let sorted = self.projection.sorted_adapter()?;
        let to_b = self.projection.adapter.as_ref().map(|adapter| &adapter.to_b);
        let sorted_grads = to_b.filter(|to_b| to_b.is_wanted()).map(|_| vec![0f32; sorted.len()]);
        Ok(ProjectionBackwardPass { backward: self, sorted, sorted_grads, dh: Vec::new() })
    }

    /// Delivers the gradients of the parameters. `g` is the gradient of the result, whose parts have all been computed
    /// in `pass`.
    pub fn deliver<E: TensorElement>(self: &Arc<Self>, g: &[E], pass: ProjectionBackwardPass<'_>) -> Result<()> {
        for (param, sinks) in self.projection.bias_sinks.iter().enumerate() {
            self.deliver_bias_gradients(g, param, sinks)?;
        }
        if let Some(RecordedAdapter { matrices, to_a, to_b }) = &self.projection.adapter {
            let sizes = AdapterSizes::new(matrices, &self.rows.sizes, self.rows.assignment.clone());
            if let Some(sorted) = pass.sorted_grads {
                let mut db = vec![0f32; matrices.b.elem_count()];
                sizes.in_layout(&sorted, &mut db);
                with_element!(matrices.b.dtype(), NAME, P => to_b.deliver_sums::<P>(&db))?;
            }
            if to_a.is_wanted() {
                let da = with_elements::<E, _>(&self.x.get()?, NAME, |x| Ok(sizes.gradient_of_a(x, &pass.dh)))?;
                with_element!(matrices.a.dtype(), NAME, P => to_a.deliver_sums::<P>(&da))?;
            }
        }
        for (param, sinks) in self.projection.weight_sinks.iter().enumerate() {
            self.deliver_weight_gradients(g, param, sinks)?;
        }
        Ok(())
    }

    fn deliver_bias_gradients<E: TensorElement>(&self, g: &[E], param: usize, sinks: &ExpertGradSinks) -> Result<()> {
        let width = self.rows.sizes.columns[param].len();
        for (experts, sink) in sinks.iter().filter(|(_, sink)| sink.is_wanted()) {
            let mut sums = vec![0f32; experts.len() * width];
            for (expert, sums) in experts.zip(sums.chunks_exact_mut(width.max(1))) {
                column_sums(self.rows.columns(g, param, expert, 0), sums);
            }
            sink.deliver_sums::<E>(&sums)?;
        }
        Ok(())
    }

    /// Delivers the gradients of a weight of all experts in one pass, except those that are left for later.
    fn deliver_weight_gradients<E: TensorElement>(
        self: &Arc<Self>,
        g: &[E],
        param: usize,
        sinks: &ExpertGradSinks,
    ) -> Result<()> {
        if !sinks.are_wanted() {
            return Ok(());
        }
        let len = self.rows.sizes.inputs * self.rows.sizes.columns[param].len();
        let mut lent = Vec::new();
        for (experts, sink) in sinks.iter() {
            if !sink.is_deferred() {
                lent.extend(LentGradient::take(sink, &experts, len)?);
                continue;
            }
            let slots = self.rows.assignment.slots_of_range(&experts);
            let (this, outputs) = (self.clone(), self.rows.sizes.outputs());
            let kept_bytes = slots.len() * self.rows.sizes.inputs * size_of::<E>();
            sink.deliver_or_defer(&g[slots.start * outputs..slots.end * outputs], kept_bytes, move |g, sink| {
                let lent = LentGradient::<E>::take(sink, &experts, len)?;
                this.write_weight_gradients(lent.into_iter().collect(), param, g, slots.start)
            })?;
        }
        self.write_weight_gradients(lent, param, g, 0)
    }

    fn write_weight_gradients<E: TensorElement>(
        &self,
        mut lent: Vec<LentGradient<'_, E>>,
        param: usize,
        g: &[E],
        first: usize,
    ) -> Result<()> {
        with_elements::<E, _>(&self.x.get()?, NAME, |x| {
            let products = lent.iter_mut().flat_map(|lent| {
                let add = lent.add;
                let gradients = lent.parts();
                gradients.map(move |(expert, dw)| self.rows.weight_gradient(x, (g, first), (param, expert), dw, add))
            });
            gemm_grouped(products.collect());
            Ok(())
        })?;
        lent.into_iter().try_for_each(LentGradient::deliver)
    }
}

impl ProjectionBackwardPass<'_> {
    /// Computes the gradients of the rows `x` of a part from the gradient `g` of their results, and writes them to
    /// `dx` or, if its flag is true, adds them to it. Parts come in the order of the experts, each once. If `dx` is
    /// `None`, only the adapter's gradients are computed.
    pub fn rows<E: TensorElement>(&mut self, part: &ExpertSlots, g: &[E], dx: Option<(&mut [E], bool)>) -> Result<()> {
        let ProjectionBackward { projection, h, .. } = self.backward;
        let mut dh = Vec::new();
        if let Some(adapter) = projection.adapter.as_ref().filter(|_| dx.is_some() || projection.trains_adapter()) {
            let sizes = AdapterSizes::new(&adapter.matrices, &projection.sizes, part.assignment.clone());
            let h = &h[part.rows(sizes.rank())];
            dh = sizes.low_rank_gradients(g, h, &self.sorted, self.sorted_grads.as_deref_mut());
            self.dh.extend_from_slice(&dh);
        }
        let Some((dx, mut add)) = dx else { return Ok(()) };
        if let Some(RecordedAdapter { matrices, .. }) = &projection.adapter {
            let sizes = AdapterSizes::new(matrices, &projection.sizes, part.assignment.clone());
            with_f32_values(&matrices.a, |a| {
                sizes.gradient_of_x(&dh, a, dx, add);
                Ok(())
            })?;
            add = true;
        }
        projection.grouped_gemm(&part.assignment).input_gradient(g, &projection.weights, dx, add)
    }
}
