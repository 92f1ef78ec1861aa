//! Pooling of images: the maximum or the mean of each window.

use super::composed;
use super::in_f32::{deliver, has_kernels, narrowed, with_f32, with_grad};
use crate::graph::OpInputs;
use crate::kernels::buffer;
use crate::kernels::pooling::PoolingWindows;
use crate::tensor::element::{TensorElement, with_element};
use candle_core::{Result, Tensor, ToUsize2, bail};

/// The windows of a pooling operation. Each setting has a value for the height and one for the width.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pooling {
    /// The size of a window.
    pub kernel: (usize, usize),
    /// The distance from one window to the next.
    pub stride: (usize, usize),
    /// The number of elements added on each side, at most half of the kernel. A maximum ignores them, and a mean counts
    /// them as zeros.
    pub padding: (usize, usize),
}

impl Pooling {
    /// Describes adjacent windows without padding.
    pub fn new(kernel: impl ToUsize2) -> Self {
        let kernel = kernel.to_usize2();
        Self { kernel, stride: kernel, padding: (0, 0) }
    }

    /// Sets the distance between windows.
    pub fn stride(self, stride: impl ToUsize2) -> Self {
        Self { stride: stride.to_usize2(), ..self }
    }

    /// Sets the padding.
    pub fn padding(self, padding: impl ToUsize2) -> Self {
        Self { padding: padding.to_usize2(), ..self }
    }

    /// Returns the windows over an image, and the numbers of images and channels.
    fn windows_over(self, op: &'static str, x: &Tensor) -> Result<(PoolingWindows, [usize; 2])> {
        let &[images, channels, height, width] = x.dims() else {
            bail!("{op}: the input has shape {:?}; it must be [batch, channels, height, width]", x.dims())
        };
        let pair = |(a, b): (usize, usize)| [a, b];
        let [kernel, stride, padding] = [self.kernel, self.stride, self.padding].map(pair);
        let size = [height, width];
        let mut result = [0; 2];
        for (axis, name) in ["height", "width"].into_iter().enumerate() {
            let [length, kernel, stride, padding] = [size[axis], kernel[axis], stride[axis], padding[axis]];
            if kernel == 0 || stride == 0 || padding > kernel / 2 {
                bail!(
                    "{op}: kernel {kernel}, stride {stride} and padding {padding} for the {name}; kernel and stride must be \
                     at least 1, and the padding at most half of the kernel"
                )
            }
            // The padding is at most half of the kernel, so the padded size does not overflow either.
            let Some(remaining) = length.saturating_add(2 * padding).checked_sub(kernel).filter(|_| length > 0) else {
                bail!(
                    "{op}: a window of {kernel} does not fit into a {name} of {length} with a padding of {padding}; \
                     use a smaller kernel"
                )
            };
            result[axis] = remaining / stride + 1;
        }
        if height.checked_mul(width).is_none_or(|elements| u32::try_from(elements).is_err()) {
            bail!("{op}: an image of {height} x {width} is too large")
        }
        Ok((PoolingWindows { size, result, kernel, stride, padding }, [images, channels]))
    }
}

/// Returns the maximum of each window of size `kernel` in an image `[batch, channels, height, width]`. Windows are
/// adjacent, and elements left over at the end of a row or column are ignored.
///
/// This is [`Tensor::max_pool2d`] with a correct gradient, which goes to the largest element, or to the first of
/// several equal ones.
///
/// # Errors
/// An input that does not have four dimensions, an image of 2^32 or more elements, or a kernel that is 0 or larger than
/// the image.
pub fn max_pool2d(x: &Tensor, kernel: impl ToUsize2) -> Result<Tensor> {
    max_pool2d_with(x, Pooling::new(kernel))
}

/// Computes [`max_pool2d`] for windows that are `stride` apart, and may overlap or skip elements.
///
/// # Errors
/// The errors of [`max_pool2d`]; a stride of 0.
pub fn max_pool2d_with_stride(x: &Tensor, kernel: impl ToUsize2, stride: impl ToUsize2) -> Result<Tensor> {
    max_pool2d_with(x, Pooling::new(kernel).stride(stride))
}

/// Computes [`max_pool2d`] for any windows.
///
/// # Errors
/// The errors of [`max_pool2d`]; a stride of 0; a padding greater than half of the kernel.
pub fn max_pool2d_with(x: &Tensor, pooling: Pooling) -> Result<Tensor> {
    const NAME: &str = "max_pool2d";
    let (windows, [images, channels]) = pooling.windows_over(NAME, x)?;
    if !has_kernels(x) {
        return composed::max_pool2d(x, windows);
    }
    let mut argmax = vec![0u32; images * channels * windows.result[0] * windows.result[1]];
    pooled(
        NAME,
        (x, windows, [images, channels]),
        |x, y| {
            windows.maxima(x, y, &mut argmax);
            argmax
        },
        move |dy, argmax, dx| windows.maxima_backward(dy, argmax, dx),
    )
}

/// Returns the mean of each window of size `kernel` in an image `[batch, channels, height, width]`. Windows are
/// adjacent, and elements left over at the end of a row or column are ignored.
///
/// This is [`Tensor::avg_pool2d`] with a correct gradient. Sums are in f32 and rounded once.
///
/// # Errors
/// The errors of [`max_pool2d`].
pub fn avg_pool2d(x: &Tensor, kernel: impl ToUsize2) -> Result<Tensor> {
    avg_pool2d_with(x, Pooling::new(kernel))
}

/// Computes [`avg_pool2d`] for windows that are `stride` apart, and may overlap or skip elements.
///
/// # Errors
/// The errors of [`max_pool2d`]; a stride of 0.
pub fn avg_pool2d_with_stride(x: &Tensor, kernel: impl ToUsize2, stride: impl ToUsize2) -> Result<Tensor> {
    avg_pool2d_with(x, Pooling::new(kernel).stride(stride))
}

/// Computes [`avg_pool2d`] for any windows.
///
/// # Errors
/// The errors of [`max_pool2d_with`].
pub fn avg_pool2d_with(x: &Tensor, pooling: Pooling) -> Result<Tensor> {
    const NAME: &str = "avg_pool2d";
    let (windows, [images, channels]) = pooling.windows_over(NAME, x)?;
    if !has_kernels(x) {
        return composed::avg_pool2d(x, windows);
    }
    pooled(
        NAME,
        (x, windows, [images, channels]),
        |x, y| windows.means(x, y),
        move |dy, (), dx| windows.means_backward(dy, dx),
    )
}

/// Returns the result of `forward` on an image's f32 values, in the image's dtype. `backward` receives the gradient and
/// the values kept by `forward`, and writes the gradient of the image.
fn pooled<K: Send + Sync + 'static>(
    name: &'static str,
    (x, windows, [images, channels]): (&Tensor, PoolingWindows, [usize; 2]),
    forward: impl FnOnce(&[f32], &mut [f32]) -> K,
    backward: impl Fn(&[f32], &K, &mut [f32]) + Send + Sync + 'static,
) -> Result<Tensor> {
    let x = x.contiguous()?;
    let inputs = OpInputs::of([Some(&x)])?;
    let (elements, dtype) = (x.elem_count(), x.dtype());
    let shape = (images, channels, windows.result[0], windows.result[1]);
    with_element!(dtype, name, E => {
        let mut y = buffer::<f32>(images * channels * windows.result[0] * windows.result[1]);
        let saved = with_f32([Some(&x)], name, |[x]| Ok(forward(x.unwrap_or_default(), &mut y)))?;
        inputs.result(name, E::storage(narrowed(y)), shape, move |grad, [to_x]| {
            with_grad::<E, _>(&grad, name, |dy| {
                deliver(to_x, dtype, name, || {
                    let mut dx = buffer::<f32>(elements);
                    backward(dy, &saved, &mut dx);
                    dx
                })
            })
        })
    })
}
