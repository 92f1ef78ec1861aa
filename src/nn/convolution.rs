//! Convolution along one axis, and the transpose of this operation, with the names and settings of candle-nn.

use super::composed;
use super::in_f32::{deliver, has_kernels, narrowed, with_f32, with_grad};
use crate::graph::{OpInputs, SavedTensor};
use crate::kernels::buffer;
use crate::kernels::convolution::{ConvolutionSizes, channel_sums};
use crate::tensor::element::{TensorElement, with_element};
use crate::util::{counted, is_or_are};
use candle_core::{Result, Tensor, bail};
use candle_nn::{Conv1dConfig, ConvTranspose1dConfig, Init, Module, VarBuilder, init};

const CONV: &str = "conv1d";
const TRANSPOSED: &str = "conv_transpose1d";

/// Convolution along one axis, `[batch, in, length]` to `[batch, out, length']`, with a weight `[out, in / groups,
/// kernel]` named "weight" and a bias `[out]` named "bias". It replaces [`candle_nn::Conv1d`], whose gradients are
/// wrong on the CPU.
///
/// Sums are in f32 for all dtypes, and rounded once. (The layer that GPT-2 calls Conv1D is [`super::Conv1D`].)
#[derive(Debug, Clone)]
pub struct Conv1d {
    weight: Tensor,
    bias: Option<Tensor>,
    config: Conv1dConfig,
}

impl Conv1d {
    /// Creates a layer from existing tensors.
    pub fn new(weight: Tensor, bias: Option<Tensor>, config: Conv1dConfig) -> Self {
        Self { weight, bias, config }
    }

    /// Returns padding, stride, dilation and groups.
    pub fn config(&self) -> &Conv1dConfig {
        &self.config
    }

    /// Returns the weight, `[out, in / groups, kernel]`.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// Returns the bias, `[out]`.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }
}

impl Module for Conv1d {
    /// Returns the convolution of `x`.
    ///
    /// # Errors
    /// Shapes that do not match, an input that is shorter, padding included, than the span of the kernel, or a size,
    /// stride, dilation or number of groups that is 0.
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let sizes = self.sizes(x)?;
        if !has_kernels(x) {
            return composed::conv1d(x, &self.weight, self.bias.as_ref(), &self.config);
        }
        with_element!(x.dtype(), CONV, E => apply::<E>(CONV, x, (&self.weight, self.bias.as_ref()), sizes, false))
    }
}

impl Conv1d {
    fn sizes(&self, x: &Tensor) -> Result<ConvolutionSizes> {
        let Conv1dConfig { padding, stride, dilation, groups, .. } = self.config;
        let (&[batch, channels, l_in], &[outputs, c_in, kernel]) = (x.dims(), self.weight.dims()) else {
            bail!(
                "{CONV}: the input has shape {:?} and the weight {:?}; they must be [batch, in, length] and \
                 [out, in / groups, kernel]",
                x.dims(),
                self.weight.dims()
            )
        };
        require_positive(CONV, [("stride", stride), ("dilation", dilation), ("groups", groups), ("kernel", kernel)])?;
        let dimensions = [("in / groups", c_in), ("out", outputs), ("length of the input", l_in), ("in", channels)];
        require_positive(CONV, dimensions)?;
        if c_in.checked_mul(groups) != Some(channels) || outputs % groups != 0 {
            bail!(
                "{CONV}: the weight has shape {:?} and there {} {}; an input of shape {:?} needs [out, \
                 in / groups, kernel] with out divisible by the number of groups",
                self.weight.dims(),
                is_or_are(groups),
                counted(groups, "group"),
                x.dims()
            )
        }
        check_bias_shape(CONV, self.bias.as_ref(), outputs)?;
        let extent = extent(CONV, kernel, dilation)?;
        let Some(slack) = padding.checked_mul(2).and_then(|twice| twice.checked_add(l_in)?.checked_sub(extent)) else {
            bail!(
                "{CONV}: the kernel spans {extent} elements, but the input has {l_in} with a padding of \
                 {padding} on both sides; use longer inputs or more padding"
            )
        };
        let (c_out, l_out) = (outputs / groups, slack / stride + 1);
        Ok(ConvolutionSizes { batch, groups, c_in, c_out, l_in, l_out, kernel, stride, padding, dilation })
    }
}

/// The transpose of a convolution along one axis, `[batch, in, length]` to `[batch, out, length']`, with a weight `[in,
/// out / groups, kernel]` named "weight" and a bias `[out]` named "bias". It replaces [`candle_nn::ConvTranspose1d`],
/// which has no backward pass and, on the CPU, returns wrong values for a batch of several inputs if neither padding
/// nor dilation is used.
///
/// length' is (length - 1) stride - 2 padding + dilation (kernel - 1) + output_padding + 1. Sums are in f32 for all
/// dtypes, and rounded once.
#[derive(Debug, Clone)]
pub struct ConvTranspose1d {
    weight: Tensor,
    bias: Option<Tensor>,
    config: ConvTranspose1dConfig,
}

impl ConvTranspose1d {
    /// Creates a layer from existing tensors.
    pub fn new(weight: Tensor, bias: Option<Tensor>, config: ConvTranspose1dConfig) -> Self {
        Self { weight, bias, config }
    }

    /// Returns paddings, stride, dilation and groups.
    pub fn config(&self) -> &ConvTranspose1dConfig {
        &self.config
    }

    /// Returns the weight, `[in, out / groups, kernel]`.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// Returns the bias, `[out]`.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }
}

impl Module for ConvTranspose1d {
    /// Returns the transposed convolution of `x`.
    ///
    /// # Errors
    /// Shapes that do not match, a padding that leaves nothing, an output padding that is neither below the stride nor
    /// below the dilation, or a size, stride, dilation or number of groups that is 0.
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let sizes = self.sizes(x)?;
        if !has_kernels(x) {
            return composed::conv_transpose1d(x, &self.weight, self.bias.as_ref(), &self.config);
        }
        with_element!(x.dtype(), TRANSPOSED, E => {
            apply::<E>(TRANSPOSED, x, (&self.weight, self.bias.as_ref()), sizes, true)
        })
    }
}

impl ConvTranspose1d {
    /// Returns the sizes of the convolution of which this is the transpose.
    fn sizes(&self, x: &Tensor) -> Result<ConvolutionSizes> {
        let ConvTranspose1dConfig { padding, output_padding, stride, dilation, groups } = self.config;
        let (&[batch, channels, l_out], &[inputs, c_in, kernel]) = (x.dims(), self.weight.dims()) else {
            bail!(
                "{TRANSPOSED}: the input has shape {:?} and the weight {:?}; they must be [batch, in, length] and \
                 [in, out / groups, kernel]",
                x.dims(),
                self.weight.dims()
            )
        };
        let settings = [("stride", stride), ("dilation", dilation), ("groups", groups), ("kernel", kernel)];
        require_positive(TRANSPOSED, settings)?;
        require_positive(TRANSPOSED, [("out / groups", c_in), ("length of the input", l_out), ("in", inputs)])?;
        if inputs != channels || channels % groups != 0 {
            bail!(
                "{TRANSPOSED}: the weight has shape {:?} and there {} {}; an input of shape {:?} needs \
                 [in, out / groups, kernel] with in divisible by the number of groups",
                self.weight.dims(),
                is_or_are(groups),
                counted(groups, "group"),
                x.dims()
            )
        }
        check_bias_shape(TRANSPOSED, self.bias.as_ref(), c_in * groups)?;
        if output_padding >= stride.max(dilation) {
            bail!(
                "{TRANSPOSED}: output_padding is {output_padding}; it must be below the stride, {stride}, or the dilation, \
                 {dilation}"
            )
        }
        let extent = extent(TRANSPOSED, kernel, dilation)?;
        let full_length =
            (l_out - 1).checked_mul(stride).and_then(|length| length.checked_add(extent)?.checked_add(output_padding));
        let Some(l_in) = full_length.and_then(|len| len.checked_sub(padding.checked_mul(2)?)).filter(|l_in| *l_in > 0)
        else {
            bail!(
                "{TRANSPOSED}: an input of {} leaves no output with a kernel of {kernel}, stride {stride}, dilation \
                 {dilation} and padding {padding} on both sides; use less padding",
                counted(l_out, "element")
            )
        };
        Ok(ConvolutionSizes {
            batch,
            groups,
            c_in,
            c_out: channels / groups,
            l_in,
            l_out,
            kernel,
            stride,
            padding,
            dilation,
        })
    }
}

/// Returns the number of elements that a kernel spans.
fn extent(op: &'static str, kernel: usize, dilation: usize) -> Result<usize> {
    match (kernel - 1).checked_mul(dilation).and_then(|extent| extent.checked_add(1)) {
        Some(extent) => Ok(extent),
        None => bail!("{op}: a kernel of {kernel} with a dilation of {dilation} is too long"),
    }
}

fn require_positive<const N: usize>(op: &'static str, numbers: [(&str, usize); N]) -> Result<()> {
    match numbers.iter().find(|(_, number)| *number == 0) {
        Some((name, _)) => bail!("{op}: {name} is 0; it must be at least 1"),
        None => Ok(()),
    }
}

fn check_bias_shape(op: &'static str, bias: Option<&Tensor>, outputs: usize) -> Result<()> {
    match bias {
        Some(bias) if bias.dims() != [outputs] => {
            bail!("{op}: the bias has shape {:?}; the weight requires [{outputs}]", bias.dims())
        }
        _ => Ok(()),
    }
}

/// Applies the convolution of these sizes, or its transpose, on the CPU.
fn apply<E: TensorElement>(
    op: &'static str,
    x: &Tensor,
    (weight, bias): (&Tensor, Option<&Tensor>),
    s: ConvolutionSizes,
    transposed: bool,
) -> Result<Tensor> {
    let (x, weight) = (x.contiguous()?, weight.contiguous()?);
    let bias = bias.map(Tensor::contiguous).transpose()?;
    let inputs = OpInputs::of([Some(&x), Some(&weight), bias.as_ref()])?;
    let (channels, length) = if transposed { (s.groups * s.c_in, s.l_in) } else { (s.groups * s.c_out, s.l_out) };
    let shape = (s.batch, channels, length);
    let y = with_f32([Some(&x), Some(&weight), bias.as_ref()], op, |[x, w, bias]| {
        let (x, w) = (x.unwrap_or_default(), w.unwrap_or_default());
        let mut y = buffer::<f32>(s.batch * channels * length);
        if transposed {
            s.input_gradient(x, w, bias, &mut y)
        } else {
            s.forward(x, w, bias, &mut y)
        }
        Ok(y)
    })?;
    let formats = [x.dtype(), weight.dtype(), bias.as_ref().map_or(x.dtype(), Tensor::dtype)];
    let (elements, weights, saved_x) = (x.elem_count(), weight.elem_count(), SavedTensor::of(&x));
    inputs.result(op, E::storage(narrowed(y)), shape, move |grad, [to_x, to_weight, to_bias]| {
        with_grad::<E, _>(&grad, op, |dy| {
            deliver(to_bias, formats[2], op, || channel_sums(dy, channels, length))?;
            if to_weight.is_wanted() {
                let gradient = with_f32([Some(&saved_x.get()?)], op, |[x]| {
                    let (x, mut dw) = (x.unwrap_or_default(), buffer::<f32>(weights));
                    if transposed {
                        s.weight_gradient(dy, x, &mut dw)
                    } else {
                        s.weight_gradient(x, dy, &mut dw)
                    }
                    Ok(dw)
                })?;
                deliver(to_weight, formats[1], op, || gradient)?;
            }
            if to_x.is_wanted() {
                let gradient = with_f32([Some(&weight)], op, |[w]| {
                    let (w, mut dx) = (w.unwrap_or_default(), buffer::<f32>(elements));
                    if transposed {
                        s.forward(dy, w, None, &mut dx)
                    } else {
                        s.input_gradient(dy, w, None, &mut dx)
                    }
                    Ok(dx)
                })?;
                deliver(to_x, formats[0], op, || gradient)?;
            }
            Ok(())
        })
    })
}

/// Builds a [`Conv1d`] with a bias, initialized as in [`candle_nn::conv1d()`].
///
/// # Errors
/// A number of groups that is 0 or does not divide the number of channels; any error of the `VarBuilder`.
pub fn conv1d(
    in_channels: usize,
    out_channels: usize,
    kernel_size: usize,
    cfg: Conv1dConfig,
    vb: VarBuilder<'_>,
) -> Result<Conv1d> {
    let layer = conv1d_no_bias(in_channels, out_channels, kernel_size, cfg, vb.clone())?;
    let bound = 1.0 / (in_channels as f64).sqrt();
    let bias = vb.get_with_hints(out_channels, "bias", Init::Uniform { lo: -bound, up: bound })?;
    Ok(Conv1d { bias: Some(bias), ..layer })
}

/// Builds a [`Conv1d`] without a bias, initialized as in [`candle_nn::conv1d_no_bias()`].
///
/// # Errors
/// The errors of [`conv1d()`].
pub fn conv1d_no_bias(
    in_channels: usize,
    out_channels: usize,
    kernel_size: usize,
    cfg: Conv1dConfig,
    vb: VarBuilder<'_>,
) -> Result<Conv1d> {
    let group_channels = channels_per_group(CONV, in_channels, cfg.groups)?;
    let shape = (out_channels, group_channels, kernel_size);
    let weight = vb.get_with_hints(shape, "weight", init::DEFAULT_KAIMING_NORMAL)?;
    Ok(Conv1d::new(weight, None, cfg))
}

/// Builds a [`ConvTranspose1d`] with a bias, initialized as in [`candle_nn::conv_transpose1d()`].
///
/// # Errors
/// The errors of [`conv1d()`].
pub fn conv_transpose1d(
    in_channels: usize,
    out_channels: usize,
    kernel_size: usize,
    cfg: ConvTranspose1dConfig,
    vb: VarBuilder<'_>,
) -> Result<ConvTranspose1d> {
    let layer = conv_transpose1d_no_bias(in_channels, out_channels, kernel_size, cfg, vb.clone())?;
    let bias = vb.get_with_hints(out_channels, "bias", transposed_init(out_channels, kernel_size))?;
    Ok(ConvTranspose1d { bias: Some(bias), ..layer })
}

/// Builds a [`ConvTranspose1d`] without a bias, initialized as in [`candle_nn::conv_transpose1d_no_bias()`].
///
/// # Errors
/// The errors of [`conv1d()`].
pub fn conv_transpose1d_no_bias(
    in_channels: usize,
    out_channels: usize,
    kernel_size: usize,
    cfg: ConvTranspose1dConfig,
    vb: VarBuilder<'_>,
) -> Result<ConvTranspose1d> {
    let group_channels = channels_per_group(TRANSPOSED, out_channels, cfg.groups)?;
    let hint = transposed_init(out_channels, kernel_size);
    let weight = vb.get_with_hints((in_channels, group_channels, kernel_size), "weight", hint)?;
    Ok(ConvTranspose1d::new(weight, None, cfg))
}

fn transposed_init(out_channels: usize, kernel_size: usize) -> Init {
    let bound = 1.0 / (out_channels as f64 * kernel_size as f64).sqrt();
    Init::Uniform { lo: -bound, up: bound }
}

/// Returns the number of channels per group.
fn channels_per_group(op: &'static str, channels: usize, groups: usize) -> Result<usize> {
    if groups == 0 || !channels.is_multiple_of(groups) {
        bail!(
            "{op}: {} cannot be divided into {} of equal size",
            counted(channels, "channel"),
            counted(groups, "group")
        )
    }
    Ok(channels / groups)
}
