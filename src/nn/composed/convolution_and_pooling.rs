//! Convolution along one axis, pooling, resampling and scattering, composed of those Candle operations that have
//! correct gradients: two-dimensional convolution, `index_select`, `gather`, `index_add`.

use super::wide;
use crate::kernels::pooling::{InterpolationGrid, InterpolationPair, PoolingWindows};
use crate::kernels::scatter::{NOWHERE, ScatterIndices};
use candle_core::{D, Device, Result, Tensor};
use candle_nn::{Conv1dConfig, ConvTranspose1dConfig};

/// See [`crate::nn::Conv1d`].
pub fn conv1d(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, config: &Conv1dConfig) -> Result<Tensor> {
    let Conv1dConfig { padding, stride, dilation, groups, .. } = *config;
    let format = x.dtype();
    let x = x.to_dtype(weight.dtype())?.pad_with_zeros(2, padding, padding)?;
    let reach = dilation * (weight.dim(2)? - 1) + 1;
    // Elements after the last window are left out, because the gradient of Candle's convolution pads height and width
    // equally.
    let x = x.narrow(2, 0, (x.dim(2)? - reach) / stride * stride + reach)?.unsqueeze(2)?;
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
    let each = |(x, weight): (&Tensor, &Tensor)| {
        x.contiguous()?.conv_transpose2d(&weight.contiguous()?, 0, 0, stride, dilation)
    };
    let y = Tensor::cat(&xs.iter().zip(&weights).map(each).collect::<Result<Vec<_>>>()?, 1)?.squeeze(2)?;
    let length = y.dim(2)? + output_padding - 2 * padding;
    with_bias(y.pad_with_zeros(2, 0, output_padding)?.narrow(2, padding, length)?, bias)?.to_dtype(format)
}

fn with_bias(y: Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    match bias {
        Some(bias) => y.broadcast_add(&bias.to_dtype(y.dtype())?.reshape((1, (), 1))?),
        None => Ok(y),
    }
}

fn indices(places: impl Iterator<Item = usize>, device: &Device) -> Result<Tensor> {
    Tensor::from_iter(places.map(|place| place as u32), device)
}

/// Returns the elements of each window side by side: `[batch, channels, windows, elements]`. Elements in the padding
/// are replaced by the window's first element.
fn windowed(x: &Tensor, windows: PoolingWindows) -> Result<Tensor> {
    let (images, channels, _, width) = x.dims4()?;
    let PoolingWindows { kernel, result, .. } = windows;
    let all = |of: [usize; 2]| (0..of[0]).flat_map(move |i| (0..of[1]).map(move |j| [i, j]));
    let places = all(result).flat_map(|at| {
        all(kernel).map(move |within| {
            let place = |axis: usize| {
                let seen = windows.range(axis, at[axis]);
                let place = at[axis] * windows.stride[axis] + within[axis];
                place.checked_sub(windows.padding[axis]).filter(|place| seen.contains(place)).unwrap_or(seen.start)
            };
            place(0) * width + place(1)
        })
    });
    let places = indices(places, x.device())?;
    x.flatten_from(2)?.contiguous()?.index_select(&places, 2)?.reshape((
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
    let values = windowed(x, windows)?;
    let places = values.detach().argmax_keepdim(D::Minus1)?;
    as_image(&values.gather(&places, D::Minus1)?.squeeze(D::Minus1)?, windows)
}

/// See [`crate::nn::avg_pool2d`].
pub(in crate::nn) fn avg_pool2d(x: &Tensor, windows: PoolingWindows) -> Result<Tensor> {
    let [vertical, horizontal] = windows.padding;
    let padded = x.pad_with_zeros(2, vertical, vertical)?.pad_with_zeros(3, horizontal, horizontal)?;
    let size = [padded.dim(2)?, padded.dim(3)?];
    let values = wide(&windowed(&padded, PoolingWindows { size, padding: [0, 0], ..windows })?)?;
    as_image(&values.mean(D::Minus1)?, windows)?.to_dtype(x.dtype())
}

/// See [`crate::nn::upsample_bilinear2d`]; takes an image and any grid of linear interpolation.
pub(in crate::nn) fn resampled(x: &Tensor, resampling: &InterpolationGrid) -> Result<Tensor> {
    let along = |x: &Tensor, pairs: &[InterpolationPair], axis: usize| {
        let at = |place: fn(&InterpolationPair) -> usize| {
            x.contiguous()?.index_select(&indices(pairs.iter().map(place), x.device())?, axis)
        };
        let first = at(|pair| pair.0)?;
        if pairs.iter().all(|pair| pair.2 == 0.0) {
            return Ok(first);
        }
        let mut shape = [1; 4];
        shape[axis] = pairs.len();
        let share =
            Tensor::from_iter(pairs.iter().map(|pair| pair.2), x.device())?.reshape(&shape)?.to_dtype(x.dtype())?;
        let second = at(|pair| pair.1)?.broadcast_mul(&share)?;
        first.broadcast_mul(&share.affine(-1.0, 1.0)?)? + second
    };
    let h = along(&wide(x)?, &resampling.rows, 2)?;
    along(&h, &resampling.columns, 3)?.to_dtype(x.dtype())
}

/// See [`crate::nn::scatter_add`].
pub(in crate::nn) fn scatter_add(init: &Tensor, source: &Tensor, targets: &ScatterIndices) -> Result<Tensor> {
    let written = |number: &usize| targets.places[*number] != NOWHERE;
    added(init, source, targets, (0..targets.places.len()).filter(written).collect())
}

/// See [`crate::nn::scatter()`].
pub(in crate::nn) fn scatter(init: &Tensor, source: &Tensor, targets: &ScatterIndices) -> Result<Tensor> {
    let stays = targets.survives(init.elem_count());
    let mut overwritten = vec![0u8; init.elem_count()];
    targets.places.iter().filter(|place| **place != NOWHERE).for_each(|place| overwritten[*place] = 1);
    let overwritten = Tensor::from_vec(overwritten, init.shape(), init.device())?;
    let init = overwritten.where_cond(&init.zeros_like()?, init)?;
    added(&init, source, targets, (0..stays.len()).filter(|number| stays[*number]).collect())
}

/// Returns `init` with these elements of the source added at their targets.
fn added(init: &Tensor, source: &Tensor, targets: &ScatterIndices, numbers: Vec<usize>) -> Result<Tensor> {
    if numbers.is_empty() {
        return Ok(init.clone());
    }
    let places = indices(numbers.iter().map(|number| targets.places[*number]), init.device())?;
    let numbers = indices(numbers.into_iter(), init.device())?;
    let source = wide(source)?.flatten_all()?.index_select(&numbers, 0)?;
    let sum = wide(init)?.flatten_all()?.contiguous()?.index_add(&places, &source, 0)?;
    sum.reshape(init.shape())?.to_dtype(init.dtype())
}

/// See [`crate::nn::matmul()`]. The device determines how sums are computed.
pub fn matmul(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    a.contiguous()?.broadcast_matmul(&b.contiguous()?)
}
