//! Convolution along one axis, pooling, resampling, scattering and `matmul`, composed of those Candle operations that
//! have correct gradients: two-dimensional convolution and its transpose, `index_select`, `gather`, `index_add` and
//! products of contiguous operands.

use super::wide;
use crate::kernels::pooling::{InterpolationGrid, InterpolationPair, PoolingWindows};
use crate::kernels::scatter::{NO_TARGET, ScatterIndices};
use candle_core::{D, Device, Result, Tensor};
use candle_nn::{Conv1dConfig, ConvTranspose1dConfig};

/// See [`crate::nn::Conv1d`].
pub fn conv1d(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, config: &Conv1dConfig) -> Result<Tensor> {
    let Conv1dConfig { padding, stride, dilation, groups, .. } = *config;
    let format = x.dtype();
    let x = x.to_dtype(weight.dtype())?.pad_with_zeros(2, padding, padding)?;
    let extent = dilation * (weight.dim(2)? - 1) + 1;
    // Elements after the last window are left out, because the gradient of Candle's convolution pads height and width
    // equally.
    let x = x.narrow(2, 0, (x.dim(2)? - extent) / stride * stride + extent)?.unsqueeze(2)?;
    let y = x.contiguous()?.conv2d(&weight.unsqueeze(2)?, 0, stride, dilation, groups)?.squeeze(2)?;
    with_bias(y, bias)?.to_dtype(format)
}

/// See [`crate::nn::ConvTranspose1d`].
pub fn conv_transpose1d(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    config: &ConvTranspose1dConfig,
) -> Result<Tensor> {
    let ConvTranspose1dConfig { padding, output_padding, stride, dilation, groups } = *config;
    let format = x.dtype();
    let (xs, weights) =
        (x.to_dtype(weight.dtype())?.unsqueeze(2)?.chunk(groups, 1)?, weight.unsqueeze(2)?.chunk(groups, 0)?);
    let convolve = |(x, weight): (&Tensor, &Tensor)| {
        x.contiguous()?.conv_transpose2d(&weight.contiguous()?, 0, 0, stride, dilation)
    };
    let y = Tensor::cat(&xs.iter().zip(&weights).map(convolve).collect::<Result<Vec<_>>>()?, 1)?.squeeze(2)?;
    let length = y.dim(2)? + output_padding - 2 * padding;
    with_bias(y.pad_with_zeros(2, 0, output_padding)?.narrow(2, padding, length)?, bias)?.to_dtype(format)
}

fn with_bias(y: Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    match bias {
        Some(bias) => y.broadcast_add(&bias.to_dtype(y.dtype())?.reshape((1, (), 1))?),
        None => Ok(y),
    }
}

fn indices(positions: impl Iterator<Item = usize>, device: &Device) -> Result<Tensor> {
    Tensor::from_iter(positions.map(|position| position as u32), device)
}

/// Returns the elements of each window side by side: `[batch, channels, windows, elements]`. Elements in the padding
/// are replaced by the window's first element.
fn windows_of(x: &Tensor, windows: PoolingWindows) -> Result<Tensor> {
    let (images, channels, _, width) = x.dims4()?;
    let PoolingWindows { kernel, result, .. } = windows;
    let grid = |sizes: [usize; 2]| (0..sizes[0]).flat_map(move |i| (0..sizes[1]).map(move |j| [i, j]));
    let positions = grid(result).flat_map(|window| {
        grid(kernel).map(move |offset| {
            let position = |axis: usize| {
                let range = windows.range(axis, window[axis]);
                let position = window[axis] * windows.stride[axis] + offset[axis];
                position.checked_sub(windows.padding[axis]).filter(|i| range.contains(i)).unwrap_or(range.start)
            };
            position(0) * width + position(1)
        })
    });
    let positions = indices(positions, x.device())?;
    x.flatten_from(2)?.contiguous()?.index_select(&positions, 2)?.reshape((
        images,
        channels,
        result[0] * result[1],
        kernel[0] * kernel[1],
    ))
}

fn as_image(y: &Tensor, windows: PoolingWindows) -> Result<Tensor> {
    let (images, channels, _) = y.dims3()?;
    y.reshape((images, channels, windows.result[0], windows.result[1]))
}

/// See [`crate::nn::max_pool2d`].
pub(in crate::nn) fn max_pool2d(x: &Tensor, windows: PoolingWindows) -> Result<Tensor> {
    let values = windows_of(x, windows)?;
    let positions = values.detach().argmax_keepdim(D::Minus1)?;
    as_image(&values.gather(&positions, D::Minus1)?.squeeze(D::Minus1)?, windows)
}

/// See [`crate::nn::avg_pool2d`].
pub(in crate::nn) fn avg_pool2d(x: &Tensor, windows: PoolingWindows) -> Result<Tensor> {
    let [vertical, horizontal] = windows.padding;
    let padded = x.pad_with_zeros(2, vertical, vertical)?.pad_with_zeros(3, horizontal, horizontal)?;
    let size = [padded.dim(2)?, padded.dim(3)?];
    let values = wide(&windows_of(&padded, PoolingWindows { size, padding: [0, 0], ..windows })?)?;
    as_image(&values.mean(D::Minus1)?, windows)?.to_dtype(x.dtype())
}

/// See [`crate::nn::upsample_bilinear2d`]; takes an image and any grid of linear interpolation.
pub(in crate::nn) fn resample(x: &Tensor, resampling: &InterpolationGrid) -> Result<Tensor> {
    let interpolate_axis = |x: &Tensor, pairs: &[InterpolationPair], axis: usize| {
        let select = |position: fn(&InterpolationPair) -> usize| {
            x.contiguous()?.index_select(&indices(pairs.iter().map(position), x.device())?, axis)
        };
        let first = select(|pair| pair.0)?;
        if pairs.iter().all(|pair| pair.2 == 0.0) {
            return Ok(first);
        }
        let mut shape = [1; 4];
        shape[axis] = pairs.len();
        let weight =
            Tensor::from_iter(pairs.iter().map(|pair| pair.2), x.device())?.reshape(&shape)?.to_dtype(x.dtype())?;
        let second = select(|pair| pair.1)?.broadcast_mul(&weight)?;
        first.broadcast_mul(&weight.affine(-1.0, 1.0)?)? + second
    };
    let h = interpolate_axis(&wide(x)?, &resampling.rows, 2)?;
    interpolate_axis(&h, &resampling.columns, 3)?.to_dtype(x.dtype())
}

/// See [`crate::nn::scatter_add`].
pub(in crate::nn) fn scatter_add(init: &Tensor, source: &Tensor, targets: &ScatterIndices) -> Result<Tensor> {
    let written = |number: &usize| targets.flat_indices[*number] != NO_TARGET;
    add_at_targets(init, source, targets, (0..targets.flat_indices.len()).filter(written).collect())
}

/// See [`crate::nn::scatter()`].
pub(in crate::nn) fn scatter(init: &Tensor, source: &Tensor, targets: &ScatterIndices) -> Result<Tensor> {
    let survives = targets.surviving(init.elem_count());
    let mut overwritten = vec![0u8; init.elem_count()];
    targets
        .flat_indices
        .iter()
        .filter(|position| **position != NO_TARGET)
        .for_each(|position| overwritten[*position] = 1);
    let overwritten = Tensor::from_vec(overwritten, init.shape(), init.device())?;
    let init = overwritten.where_cond(&init.zeros_like()?, init)?;
    add_at_targets(&init, source, targets, (0..survives.len()).filter(|number| survives[*number]).collect())
}

/// Returns `init` with these elements of the source added at their targets.
fn add_at_targets(init: &Tensor, source: &Tensor, targets: &ScatterIndices, elements: Vec<usize>) -> Result<Tensor> {
    if elements.is_empty() {
        return Ok(init.clone());
    }
    let positions = indices(elements.iter().map(|number| targets.flat_indices[*number]), init.device())?;
    let elements = indices(elements.into_iter(), init.device())?;
    let source = wide(source)?.flatten_all()?.index_select(&elements, 0)?;
    let sum = wide(init)?.flatten_all()?.contiguous()?.index_add(&positions, &source, 0)?;
    sum.reshape(init.shape())?.to_dtype(init.dtype())
}

/// See [`crate::nn::matmul()`]. The device determines how sums are computed.
pub fn matmul(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    a.contiguous()?.broadcast_matmul(&b.contiguous()?)
}
