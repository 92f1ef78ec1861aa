//! Linear layers. Candle (cuBLAS) computes the products, the epilogue takes one pass, and gradients are accumulated in
//! place.

use super::supported_device;
use crate::cuda::column_sums::PartialColumnSums;
use crate::cuda::{activation, linear_epilogue};
use crate::graph::{Grad, InputGradSink, OpInputs, SavedTensor, register_recompute};
use crate::kernels::gemm::Activation;
use crate::nn::linear_product::LinearSizes;
use crate::nn::{LinearEpilogue, WeightLayout};
use crate::tensor::device_elements::{change, take, tensor_of, with_arrays, with_each};
use candle_core::{CudaDevice, Result, Tensor};

const NAME: &str = "linear";

/// Computes [`crate::nn::linear_with_epilogue`]. The residual's shape has been checked.
pub(in crate::nn) fn linear_with_epilogue(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    sizes: LinearSizes,
    epilogue: LinearEpilogue<'_>,
) -> Result<Option<Tensor>> {
    let operands: Vec<&Tensor> = [x, weight].into_iter().chain(bias).chain(epilogue.residual).collect();
    let is_one_dtype = operands.iter().all(|t| t.dtype() == x.dtype());
    // cuBLAS does not multiply empty matrices.
    let Some(device) = supported_device(&operands).filter(|_| is_one_dtype && x.elem_count() > 0 && sizes.outputs > 0)
    else {
        return Ok(None);
    };
    let shape = sizes.result_shape(x.shape());
    let (x, weight) = (x.contiguous()?, weight.contiguous()?);
    let bias = bias.map(Tensor::contiguous).transpose()?;
    let residual = epilogue.residual.map(Tensor::contiguous).transpose()?;
    let inputs = OpInputs::of([Some(&x), residual.as_ref(), Some(&weight), bias.as_ref()])?;
    let products = rows_of(&x, sizes.rows, sizes.inputs)?.matmul(&matrix(&weight, sizes.layout)?)?;
    let mut y = None;
    if bias.is_some() || residual.is_some() || epilogue.activation.is_some() {
        with_arrays([bias.as_ref(), residual.as_ref()], NAME, |[bias, residual]| {
            change(&products, |products| {
                y = linear_epilogue::apply(&device, products, sizes.outputs, bias, epilogue.activation, residual)?;
                Ok(())
            })
        })?;
    }
    let (y, pre_activation) = match y {
        Some(y) => (y, Some(products).filter(|_| inputs.are_wanted())),
        None => (take(&products)?, None),
    };
    let saved_activation = epilogue.activation.zip(pre_activation);
    let recompute = saved_activation.clone().filter(|_| residual.is_none()).map(|saved| (saved, device.clone()));
    let backward = GpuLinearBackward { device, x: SavedTensor::of(&x), weight, sizes, saved_activation };
    let y = inputs.result(NAME, y, shape.clone(), move |grad, sinks| backward.run(grad, sinks))?;
    if let Some(((function, pre_activation), device)) = recompute {
        register_recompute(&y, move || {
            let values = with_each([&pre_activation], NAME, |[values]| activation::forward(&device, function, values))?;
            Ok(tensor_of(values, &shape))
        });
    }
    Ok(Some(y))
}

/// Returns the rows of a contiguous tensor, outside any graph.
fn rows_of(x: &Tensor, rows: usize, width: usize) -> Result<Tensor> {
    x.detach().reshape((rows, width))
}

/// Returns the weight as a matrix `[in, out]`, outside any graph. If the weight is absent, returns an error that names
/// the weight.
fn matrix(weight: &Tensor, layout: WeightLayout) -> Result<Tensor> {
    with_each([weight], NAME, |_| Ok(()))?;
    match layout {
        WeightLayout::OutIn => weight.detach().t(),
        WeightLayout::InOut => Ok(weight.detach()),
    }
}

/// The values that the backward pass needs.
struct GpuLinearBackward {
    device: CudaDevice,
    x: SavedTensor,
    weight: Tensor,
    sizes: LinearSizes,
    saved_activation: Option<(Activation, Tensor)>,
}

impl GpuLinearBackward {
    fn run(&self, grad: Grad, [to_x, to_residual, to_weight, to_bias]: &[InputGradSink; 4]) -> Result<()> {
        let Self { device, x, weight, sizes: s, saved_activation } = self;
        let is_own = matches!(grad, Grad::OnDevice(_));
        let dy = grad.on_device(device)?;
        let g = match saved_activation {
            None => dy.clone(),
            Some((function, pre_activation)) => {
                let inner = crate::cuda::alloc_and_write(device, dy.dtype(), dy.elem_count(), |inner| {
                    with_each([pre_activation, &dy], NAME, |operands| {
                        activation::backward(device, *function, operands, inner)
                    })
                })?;
                tensor_of(inner, dy.shape())
            }
        };
        if to_bias.is_wanted() {
            let sums = with_each([&g], NAME, |[g]| PartialColumnSums::of_columns(device, g, s.outputs))?;
            to_bias.accumulate_on(device, g.dtype(), s.outputs, |grad, add| sums.put(device, grad, add))?;
        }
        let g = g.reshape((s.rows, s.outputs))?;
        if to_weight.is_wanted() {
            let x = rows_of(&x.get()?.contiguous()?, s.rows, s.inputs)?;
            let dweight = match s.layout {
                WeightLayout::OutIn => g.t()?.matmul(&x)?,
                WeightLayout::InOut => x.t()?.matmul(&g)?,
            };
            to_weight.deliver(Grad::OnDevice(dweight))?;
        }
        if to_x.is_wanted() {
            to_x.deliver(Grad::OnDevice(g.matmul(&matrix(weight, s.layout)?.t()?)?))?;
        }
        // This gradient comes last, when nothing else holds its tensor, because other gradients of the residual are
        // added to that tensor in place.
        drop(g);
        to_residual.deliver(if is_own { Grad::OnDevice(dy) } else { Grad::Shared(dy) })
    }
}
