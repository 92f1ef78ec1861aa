//! Linear layers in both orientations of the weight.

use crate::nn::composed;
use crate::nn::element::{Element, elements, with_element, with_elements};
use crate::nn::matrix::{Matrix, column_sums, matmul};
use candle_core::{CpuStorage, CustomOp2, CustomOp3, Layout, Result, Shape, Tensor, bail};
use candle_nn::{Init, Module, VarBuilder, init};

/// How a linear layer's weight lies in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightLayout {
    /// `[out, in]`, as PyTorch's and candle-nn's Linear: y = x w^T + b.
    OutIn,
    /// `[in, out]`, as GPT-2's Conv1D: y = x w + b.
    InOut,
}

/// y = x w (+ bias) with true backward for x `[.., in]`, of the weight's dtype, and a bias `[out]`.
///
/// Sums are in f32 whatever the dtype and are rounded once. The parameters are arguments of the op, so that Candle's
/// autograd gives each of them its whole gradient, and are read when they are needed, in forward and again in backward.
///
/// Errors: shapes that do not fit, operands of different dtypes, a dtype other than f32, bf16, f16 on the CPU.
pub fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, layout: WeightLayout) -> Result<Tensor> {
    if !x.device().is_cpu() {
        return composed::linear(x, weight, bias, layout);
    }
    let (x, weight) = (x.contiguous()?, weight.contiguous()?);
    match bias {
        Some(bias) => x.apply_op3(&weight, &bias.contiguous()?, LinearOp { layout }),
        None => x.apply_op2(&weight, LinearOp { layout }),
    }
}

struct LinearOp {
    layout: WeightLayout,
}

const NAME: &str = "linear";

/// Sizes of one application: `rows` rows of `inputs` elements become rows of `outputs`.
#[derive(Clone, Copy)]
struct Sizes {
    rows: usize,
    inputs: usize,
    outputs: usize,
}

impl LinearOp {
    fn sizes(&self, x: &Shape, weight: &Shape, bias: Option<&Shape>) -> Result<Sizes> {
        let (inputs, outputs) = match (weight.dims(), self.layout) {
            (&[outputs, inputs], WeightLayout::OutIn) | (&[inputs, outputs], WeightLayout::InOut) => (inputs, outputs),
            (dims, _) => bail!("linear: the weight must have two dimensions, not {dims:?}"),
        };
        let last = x.dims().last().copied().unwrap_or(0);
        if x.rank() == 0 || last != inputs {
            bail!(
                "linear: the input has shape {:?}; its last dimension must be {inputs}, the weight's inputs",
                x.dims()
            )
        }
        if let Some(bias) = bias
            && bias.dims() != [outputs]
        {
            bail!("linear: the bias has shape {:?}; the weight's outputs ask for [{outputs}]", bias.dims())
        }
        let rows = x.dims()[..x.rank() - 1].iter().product();
        Ok(Sizes { rows, inputs, outputs })
    }

    /// The weight as a matrix `[in, out]`.
    fn weight_matrix<'a, E: Copy>(&self, weight: &'a [E], s: Sizes) -> Matrix<'a, E> {
        match self.layout {
            WeightLayout::OutIn => Matrix::new(weight, s.outputs, s.inputs).t(),
            WeightLayout::InOut => Matrix::new(weight, s.inputs, s.outputs),
        }
    }

    fn forward(
        &self,
        (x, x_layout): (&CpuStorage, &Layout),
        (weight, weight_layout): (&CpuStorage, &Layout),
        bias: Option<(&CpuStorage, &Layout)>,
    ) -> Result<(CpuStorage, Shape)> {
        use candle_core::backend::BackendStorage;
        let sizes = self.sizes(x_layout.shape(), weight_layout.shape(), bias.map(|(_, l)| l.shape()))?;
        let mut dims = x_layout.dims().to_vec();
        let last = dims.len() - 1;
        dims[last] = sizes.outputs;
        let storage = with_element!(x.dtype(), NAME, E => {
            let x = elements::<E>(x, x_layout, NAME)?;
            let weight = elements::<E>(weight, weight_layout, NAME)?;
            let bias = bias.map(|(b, l)| elements::<E>(b, l, NAME)).transpose()?;
            let x = Matrix::new(x, sizes.rows, sizes.inputs);
            Ok(E::storage(matmul(x, self.weight_matrix(weight, sizes), bias)))
        })?;
        Ok((storage, Shape::from(dims)))
    }

    /// Gradients of the input and the weight, each only where something wants it.
    fn backward(&self, x: &Tensor, weight: &Tensor, grad: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let sizes = self.sizes(x.shape(), weight.shape(), None)?;
        with_element!(x.dtype(), NAME, E => self.backward_in::<E>(x, weight, grad, sizes))
    }

    fn backward_in<E: Element>(
        &self,
        x: &Tensor,
        weight: &Tensor,
        grad: &Tensor,
        s: Sizes,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        with_elements::<E, _>(grad, NAME, |g| {
            let g = Matrix::new(g, s.rows, s.outputs);
            let x_grad = if x.track_op() {
                let data = with_elements::<E, _>(weight, NAME, |w| Ok(matmul(g, self.weight_matrix(w, s).t(), None)))?;
                Some(Tensor::from_vec(data, x.shape(), x.device())?)
            } else {
                None
            };
            let weight_grad = if weight.track_op() {
                let data = with_elements::<E, _>(x, NAME, |x| {
                    let x = Matrix::new(x, s.rows, s.inputs);
                    Ok(match self.layout {
                        WeightLayout::OutIn => matmul(g.t(), x, None),
                        WeightLayout::InOut => matmul(x.t(), g, None),
                    })
                })?;
                Some(Tensor::from_vec(data, weight.shape(), weight.device())?)
            } else {
                None
            };
            Ok((x_grad, weight_grad))
        })
    }
}

impl CustomOp2 for LinearOp {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(&self, x: &CpuStorage, xl: &Layout, w: &CpuStorage, wl: &Layout) -> Result<(CpuStorage, Shape)> {
        self.forward((x, xl), (w, wl), None)
    }

    fn bwd(&self, x: &Tensor, w: &Tensor, _y: &Tensor, grad: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        self.backward(x, w, &grad.contiguous()?)
    }
}

impl CustomOp3 for LinearOp {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        xl: &Layout,
        w: &CpuStorage,
        wl: &Layout,
        b: &CpuStorage,
        bl: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        self.forward((x, xl), (w, wl), Some((b, bl)))
    }

    fn bwd(
        &self,
        x: &Tensor,
        w: &Tensor,
        b: &Tensor,
        _y: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let grad = grad.contiguous()?;
        let (x_grad, w_grad) = self.backward(x, w, &grad)?;
        let b_grad = if b.track_op() {
            Some(with_element!(grad.dtype(), NAME, E => {
                let sums = with_elements::<E, _>(&grad, NAME, |g| Ok(column_sums(g, b.elem_count())))?;
                Tensor::from_vec(sums, b.shape(), b.device())
            })?)
        } else {
            None
        };
        Ok((x_grad, w_grad, b_grad))
    }
}

/// y = x w^T + b with a weight `[out, in]`, named "weight" and "bias", as PyTorch's `nn.Linear` and candle-nn's.
#[derive(Debug, Clone)]
pub struct Linear {
    weight: Tensor,
    bias: Option<Tensor>,
}

impl Linear {
    /// A layer from `inputs` to `outputs` with bias; weight from N(0, 0.02), bias 0.
    pub fn new(inputs: usize, outputs: usize, vb: VarBuilder<'_>) -> Result<Self> {
        Self::with_init(inputs, outputs, true, super::normal(0.02), vb)
    }

    /// A layer without bias; weight from N(0, 0.02).
    pub fn no_bias(inputs: usize, outputs: usize, vb: VarBuilder<'_>) -> Result<Self> {
        Self::with_init(inputs, outputs, false, super::normal(0.02), vb)
    }

    /// A layer whose weight starts as `weight_init` says; the bias starts at 0.
    pub fn with_init(inputs: usize, outputs: usize, bias: bool, weight_init: Init, vb: VarBuilder<'_>) -> Result<Self> {
        let weight = vb.get_with_hints((outputs, inputs), "weight", weight_init)?;
        let bias = if bias { Some(vb.get_with_hints(outputs, "bias", init::ZERO)?) } else { None };
        Ok(Self { weight, bias })
    }

    /// A layer over tensors that exist already: weight `[out, in]`, bias `[out]`. For tied weights.
    pub fn from_tensors(weight: Tensor, bias: Option<Tensor>) -> Self {
        Self { weight, bias }
    }

    /// The weight, `[out, in]`.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }
}

impl Module for Linear {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        linear(x, &self.weight, self.bias.as_ref(), WeightLayout::OutIn)
    }
}

/// y = x w + b with a weight `[in, out]`: the orientation of GPT-2's Conv1D, whose files it can use as they are.
#[derive(Debug, Clone)]
pub struct Conv1D {
    weight: Tensor,
    bias: Tensor,
}

impl Conv1D {
    /// A layer from `inputs` to `outputs`; weight from N(0, `std`), bias 0.
    pub fn new(inputs: usize, outputs: usize, std: f64, vb: VarBuilder<'_>) -> Result<Self> {
        let weight = vb.get_with_hints((inputs, outputs), "weight", super::normal(std))?;
        let bias = vb.get_with_hints(outputs, "bias", init::ZERO)?;
        Ok(Self { weight, bias })
    }
}

impl Module for Conv1D {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        linear(x, &self.weight, Some(&self.bias), WeightLayout::InOut)
    }
}
