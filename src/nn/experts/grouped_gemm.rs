//! The grouped products of a projection: those of its forward pass, and those of the gradients of its input and
//! weights.

use super::{ExpertAssignment, ExpertTensors};
use crate::kernels::gemm::{Epilogue, Matrix, MatrixMut, Product, gemm_grouped};
use crate::nn::WeightLayout;
use crate::tensor::element::TensorElement;
use candle_core::Result;
use std::ops::Range;
use std::sync::Arc;

/// The sizes of a projection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ProjectionSizes {
    pub experts: usize,
    pub inputs: usize,
    /// The columns of each weight's outputs.
    pub columns: Vec<Range<usize>>,
}

impl ProjectionSizes {
    /// Returns the number of outputs of all weights.
    pub fn outputs(&self) -> usize {
        self.columns.last().map_or(0, |columns| columns.end)
    }
}

pub(super) const NAME: &str = "experts";

/// The grouped products of a projection: its sizes, the layout of its weights, and the rows of each expert.
pub(super) struct GroupedGemm {
    pub sizes: ProjectionSizes,
    pub layout: WeightLayout,
    pub assignment: Arc<ExpertAssignment>,
}

impl GroupedGemm {
    /// Returns the weight of an expert as a matrix `[in, out]`.
    fn matrix<'a, E: Copy>(&self, weight: &'a [E], param: usize) -> Matrix<'a, E> {
        let (inputs, outputs) = (self.sizes.inputs, self.sizes.columns[param].len());
        match self.layout {
            WeightLayout::OutIn => Matrix::new(weight, outputs, inputs).t(),
            WeightLayout::InOut => Matrix::new(weight, inputs, outputs),
        }
    }

    /// Returns the rows of an expert in `x`, which begins with slot `first` and has `width` elements for each slot.
    fn rows<'a, E: Copy>(&self, x: &'a [E], width: usize, expert: usize, first: usize) -> Matrix<'a, E> {
        let slots = self.assignment.slots_of(expert);
        Matrix::new(&x[(slots.start - first) * width..(slots.end - first) * width], slots.len(), width)
    }

    /// Returns the columns of a weight's outputs, in the rows of an expert.
    pub fn columns<'a, E: Copy>(&self, g: &'a [E], param: usize, expert: usize, first: usize) -> Matrix<'a, E> {
        let (slots, columns, outputs) =
            (self.assignment.slots_of(expert), &self.sizes.columns[param], self.sizes.outputs());
        let rows = &g[(slots.start - first) * outputs..(slots.end - first) * outputs];
        Matrix::strided(rows.get(columns.start..).unwrap_or_default(), slots.len(), columns.len(), outputs)
    }

    /// Computes `x W + bias`, and writes it to `y` or, with `accumulate`, adds it to `y`.
    pub fn product<E: TensorElement>(
        &self,
        x: &[E],
        weights: &[ExpertTensors],
        biases: &[ExpertTensors],
        y: &mut [E],
        accumulate: bool,
    ) -> Result<()> {
        let active_experts: Vec<usize> = self.assignment.active_experts().collect();
        let (inputs, outputs) = (self.sizes.inputs, self.sizes.outputs());
        with_parameter_values::<E>(weights, &active_experts, &[], &mut |weights| {
            with_parameter_values::<E>(biases, &active_experts, &[], &mut |biases| {
                let mut products = Vec::new();
                let mut rest = &mut *y;
                for (i, expert) in active_experts.iter().enumerate() {
                    let slots = self.assignment.slots_of(*expert).len();
                    let (mine, others) = std::mem::take(&mut rest).split_at_mut(slots * outputs);
                    rest = others;
                    let mut columns = MatrixMut::new(mine, slots, outputs);
                    for (param, weight) in weights.iter().enumerate() {
                        let (result, after) = columns.split_columns(self.sizes.columns[param].len());
                        columns = after;
                        let bias = biases.get(param).map(|bias| bias[i]);
                        let (a, b) = (self.rows(x, inputs, *expert, 0), self.matrix(weight[i], param));
                        let epilogue = Epilogue { accumulate, bias, ..Epilogue::default() };
                        products.push(Product { result, a, b, epilogue });
                    }
                }
                gemm_grouped(products);
                Ok(())
            })
        })
    }

    /// Computes the gradient of the input from that of the result, `g`, and writes it to `dx` or, with `accumulate`,
    /// adds it to `dx`.
    pub fn input_gradient<E: TensorElement>(
        &self,
        g: &[E],
        weights: &[ExpertTensors],
        dx: &mut [E],
        accumulate: bool,
    ) -> Result<()> {
        let active_experts: Vec<usize> = self.assignment.active_experts().collect();
        let inputs = self.sizes.inputs;
        for (param, weights) in weights.iter().enumerate() {
            weights.with_values::<E, _>(&active_experts, NAME, |weights| {
                let mut products = Vec::new();
                let mut rest = &mut *dx;
                for (expert, weight) in active_experts.iter().zip(weights) {
                    let slots = self.assignment.slots_of(*expert).len();
                    let (mine, others) = std::mem::take(&mut rest).split_at_mut(slots * inputs);
                    rest = others;
                    products.push(Product {
                        result: MatrixMut::new(mine, slots, inputs),
                        a: self.columns(g, param, *expert, 0),
                        b: self.matrix(weight, param).t(),
                        epilogue: Epilogue { accumulate: accumulate || param > 0, ..Epilogue::default() },
                    });
                }
                gemm_grouped(products);
                Ok(())
            })?;
        }
        Ok(())
    }

    /// Returns the product that writes the gradient of an expert's weight, in the weight's layout, to `dw` or, with
    /// `accumulate`, adds it to `dw`. `g` begins with the row of slot `first`.
    pub fn weight_gradient<'a, E: TensorElement>(
        &self,
        x: &'a [E],
        (g, first): (&'a [E], usize),
        (param, expert): (usize, usize),
        dw: &'a mut [E],
        accumulate: bool,
    ) -> Product<'a, E, E> {
        let (x, g) = (self.rows(x, self.sizes.inputs, expert, 0), self.columns(g, param, expert, first));
        let (inputs, outputs) = (self.sizes.inputs, self.sizes.columns[param].len());
        let epilogue = Epilogue { accumulate, ..Epilogue::default() };
        match self.layout {
            WeightLayout::OutIn => Product { result: MatrixMut::new(dw, outputs, inputs), a: g.t(), b: x, epilogue },
            WeightLayout::InOut => Product { result: MatrixMut::new(dw, inputs, outputs), a: x.t(), b: g, epilogue },
        }
    }
}

/// The values of some experts' tensors of one parameter.
type ExpertValues<'a, E> = Vec<&'a [E]>;

/// Calls `look` with `collected`, followed by the values of the `experts`' tensors of each parameter.
fn with_parameter_values<E: TensorElement>(
    parameters: &[ExpertTensors],
    experts: &[usize],
    collected: &[ExpertValues<'_, E>],
    look: &mut dyn FnMut(&[ExpertValues<'_, E>]) -> Result<()>,
) -> Result<()> {
    let Some((first, rest)) = parameters.split_first() else { return look(collected) };
    first.with_values::<E, _>(experts, NAME, |values| {
        let mut collected = collected.to_vec();
        collected.push(values.to_vec());
        with_parameter_values(rest, experts, &collected, look)
    })
}
