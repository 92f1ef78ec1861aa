//! The products of a linear layer's forward and backward passes, in both orientations of the weight.

use super::WeightLayout;
use crate::kernels::element::Element;
use crate::kernels::gemm::{Epilogue, Matrix, MatrixMut, gemm};
use candle_core::{Result, Shape, bail};

/// The sizes of one use of a layer: `rows` rows of `inputs` elements become rows of `outputs` elements.
#[derive(Clone, Copy)]
pub(super) struct LinearSizes {
    pub rows: usize,
    pub inputs: usize,
    pub outputs: usize,
    pub layout: WeightLayout,
}

impl LinearSizes {
    pub fn new(x: &Shape, weight: &Shape, bias: Option<&Shape>, layout: WeightLayout) -> Result<Self> {
        let (inputs, outputs) = match (weight.dims(), layout) {
            (&[outputs, inputs], WeightLayout::OutIn) | (&[inputs, outputs], WeightLayout::InOut) => (inputs, outputs),
            (dims, _) => bail!("linear: the weight must have two dimensions, not {dims:?}"),
        };
        let last = x.dims().last().copied().unwrap_or(0);
        if x.rank() == 0 || last != inputs {
            bail!(
                "linear: the input has shape {:?}; its last dimension must be {inputs}, the number of inputs of the weight",
                x.dims()
            )
        }
        if let Some(bias) = bias
            && bias.dims() != [outputs]
        {
            bail!(
                "linear: the bias has shape {:?}; it must have shape [{outputs}], the number of outputs of the weight",
                bias.dims()
            )
        }
        let rows = x.dims()[..x.rank() - 1].iter().product();
        Ok(Self { rows, inputs, outputs, layout })
    }

    pub fn result_shape(&self, x: &Shape) -> Shape {
        let mut dims = x.dims().to_vec();
        let last = dims.len() - 1;
        dims[last] = self.outputs;
        Shape::from(dims)
    }

    /// Returns the weight as a matrix `[in, out]`.
    fn weight<'a, E: Copy>(&self, weight: &'a [E]) -> Matrix<'a, E> {
        match self.layout {
            WeightLayout::OutIn => Matrix::new(weight, self.outputs, self.inputs).t(),
            WeightLayout::InOut => Matrix::new(weight, self.inputs, self.outputs),
        }
    }

    /// Computes `y = x w` `[rows, outputs]` with an epilogue.
    pub fn product<E: Element, C: Element>(&self, x: &[E], weight: &[E], y: &mut [C], epilogue: Epilogue<'_, C>) {
        let x = Matrix::new(x, self.rows, self.inputs);
        gemm(MatrixMut::new(y, self.rows, self.outputs), x, self.weight(weight), epilogue);
    }

    /// Computes the gradient of the weight, in its layout, from the gradient of the result, `g` `[rows, outputs]`.
    pub fn weight_gradient<E: Element, C: Element>(
        &self,
        x: &[E],
        g: Matrix<'_, E>,
        dw: &mut [C],
        epilogue: Epilogue<'_, C>,
    ) {
        let x = Matrix::new(x, self.rows, self.inputs);
        match self.layout {
            WeightLayout::OutIn => gemm(MatrixMut::new(dw, self.outputs, self.inputs), g.t(), x, epilogue),
            WeightLayout::InOut => gemm(MatrixMut::new(dw, self.inputs, self.outputs), x.t(), g, epilogue),
        }
    }

    /// Computes the gradient of the input `[rows, inputs]` from the gradient of the result, `g` `[rows, outputs]`.
    pub fn input_gradient<E: Element, C: Element>(
        &self,
        g: Matrix<'_, E>,
        weight: &[E],
        dx: &mut [C],
        epilogue: Epilogue<'_, C>,
    ) {
        gemm(MatrixMut::new(dx, self.rows, self.inputs), g, self.weight(weight).t(), epilogue);
    }
}
