//! Resizes images and sequences by nearest-neighbour or linear interpolation.

use super::composed;
use super::in_f32::{deliver, has_kernels, narrowed, with_f32, with_grad};
use crate::graph::OpInputs;
use crate::kernels::buffer;
use crate::kernels::pooling::{InterpolationGrid, InterpolationPair};
use crate::tensor::element::{TensorElement, with_element};
use candle_core::{Result, Shape, Tensor, bail};

/// Resizes a sequence `[batch, channels, length]` to `size` elements, each the nearest element of the input. The new
/// size may be larger or smaller by any factor.
///
/// This is [`Tensor::upsample_nearest1d`] with a correct gradient: an input element gets the sum of the gradients of
/// all its copies.
///
/// # Errors
/// Fails if the input does not have three dimensions, if its length or `size` is 0, or if `size` is 2^32 or more.
pub fn upsample_nearest1d(x: &Tensor, size: usize) -> Result<Tensor> {
    const NAME: &str = "upsample_nearest1d";
    let &[images, channels, length] = x.dims() else {
        bail!("{NAME}: the input has shape {:?}; it must be [batch, channels, length]", x.dims())
    };
    let columns = nearest(NAME, "length", length, size)?;
    let resampling = InterpolationGrid { size: [1, length], rows: vec![(0, 0, 0.0)], columns };
    apply(NAME, x, (images, channels, 1, length), (images, channels, size).into(), resampling)
}

/// Resizes an image `[batch, channels, height, width]` to `height` x `width`. Each element of the result is the nearest
/// element of the input. The new size may be larger or smaller by any factor in each dimension.
///
/// This is [`Tensor::upsample_nearest2d`] with a correct gradient: an input element gets the sum of the gradients of
/// all its copies.
///
/// # Errors
/// Fails if the input does not have four dimensions, if a height or width, before or after, is 0, or if `height` or
/// `width` is 2^32 or more.
pub fn upsample_nearest2d(x: &Tensor, height: usize, width: usize) -> Result<Tensor> {
    const NAME: &str = "upsample_nearest2d";
    let (images, channels, h, w) = image(NAME, x)?;
    let (rows, columns) = (nearest(NAME, "height", h, height)?, nearest(NAME, "width", w, width)?);
    let resampling = InterpolationGrid { size: [h, w], rows, columns };
    apply(NAME, x, (images, channels, h, w), (images, channels, height, width).into(), resampling)
}

/// Resizes an image `[batch, channels, height, width]` to `height` x `width`. Each element of the result is the mean of
/// the four input elements around its position, weighted by proximity. With `align_corners`, the centres of the corner
/// elements stay in place; otherwise their outer edges do (as in PyTorch).
///
/// This is [`Tensor::upsample_bilinear2d`] with a gradient, which Candle's version does not have.
///
/// # Errors
/// Fails if the input does not have four dimensions, if a height or width, before or after, is 0, or if `height` or
/// `width` is 2^32 or more.
pub fn upsample_bilinear2d(x: &Tensor, height: usize, width: usize, align_corners: bool) -> Result<Tensor> {
    const NAME: &str = "upsample_bilinear2d";
    let (images, channels, h, w) = image(NAME, x)?;
    let rows = linear(NAME, "height", (h, height), align_corners)?;
    let columns = linear(NAME, "width", (w, width), align_corners)?;
    let resampling = InterpolationGrid { size: [h, w], rows, columns };
    apply(NAME, x, (images, channels, h, w), (images, channels, height, width).into(), resampling)
}

fn image(op: &'static str, x: &Tensor) -> Result<(usize, usize, usize, usize)> {
    match *x.dims() {
        [images, channels, height, width] => Ok((images, channels, height, width)),
        _ => bail!("{op}: the input has shape {:?}; it must be [batch, channels, height, width]", x.dims()),
    }
}

fn check_sizes(op: &'static str, axis: &str, old: usize, new: usize) -> Result<()> {
    if old == 0 || new == 0 || u32::try_from(new).is_err() {
        bail!("{op}: a {axis} of {old} cannot be resized to {new}; both must be at least 1, and the latter below 2^32")
    }
    Ok(())
}

/// Returns the nearest input element for each element of the result, computed as in Candle.
fn nearest(op: &'static str, axis: &str, old: usize, new: usize) -> Result<Vec<InterpolationPair>> {
    check_sizes(op, axis, old, new)?;
    let scale = old as f64 / new as f64;
    Ok((0..new).map(|i| ((i as f64 * scale) as usize).min(old - 1)).map(|i| (i, i, 0.0)).collect())
}

/// Returns the two input elements around the position of each element of the result.
fn linear(
    op: &'static str,
    axis: &str,
    (old, new): (usize, usize),
    align_corners: bool,
) -> Result<Vec<InterpolationPair>> {
    check_sizes(op, axis, old, new)?;
    let position = |i: usize| match align_corners {
        true if new == 1 => 0.0,
        true => i as f64 * ((old - 1) as f64 / (new - 1) as f64),
        false => ((i as f64 + 0.5) * (old as f64 / new as f64) - 0.5).max(0.0),
    };
    let pair = |position: f64| {
        let first = (position as usize).min(old - 1);
        let second = (first + 1).min(old - 1);
        (first, second, if second == first { 0.0 } else { (position - first as f64).clamp(0.0, 1.0) as f32 })
    };
    Ok((0..new).map(position).map(pair).collect())
}

fn apply(
    op: &'static str,
    x: &Tensor,
    planes: (usize, usize, usize, usize),
    shape: Shape,
    resampling: InterpolationGrid,
) -> Result<Tensor> {
    if !has_kernels(x) {
        return composed::resample(&x.reshape(planes)?, &resampling)?.reshape(shape);
    }
    let x = x.contiguous()?;
    let inputs = OpInputs::of([Some(&x)])?;
    let (elements, dtype) = (x.elem_count(), x.dtype());
    with_element!(dtype, op, E => {
        let mut y = buffer::<f32>(shape.elem_count());
        with_f32([Some(&x)], op, |[x]| {
            resampling.forward(x.unwrap_or_default(), &mut y);
            Ok(())
        })?;
        inputs.result(op, E::storage(narrowed(y)), shape, move |grad, [to_x]| {
            with_grad::<E, _>(&grad, op, |dy| {
                deliver(to_x, dtype, op, || {
                    let mut dx = buffer::<f32>(elements);
                    resampling.backward(dy, &mut dx);
                    dx
                })
            })
        })
    })
}
