//! The cross entropy with target classes, computed from logits or from hidden states and an output projection.

use crate::error::ModelError;
use crate::graph::{Grad, OpInputs, is_single_backward};
use crate::kernels::cross_entropy::IGNORED;
use crate::kernels::gemm::{Epilogue, Matrix};
use crate::kernels::{self, buffer};
use crate::nn::embedding::host_ids;
use crate::nn::linear_product::LinearSizes;
#[cfg(feature = "cuda")]
use crate::nn::on_gpu;
use crate::nn::{WeightLayout, composed, f32_weight_linear, refuse};
use crate::precision::{Flat, FlatMut, FlatRef};
use crate::tensor::element::{TensorElement, with_all, with_element, with_elements};
use crate::util::lock;
use candle_core::{CpuStorage, D, DType, Result, Tensor, bail};
use std::borrow::Cow;
use std::sync::Mutex;

/// Returns the mean of `-log softmax(logits)[target]` over the rows that count, an f32 scalar.
///
/// `logits` is `[.., classes]` (f32, bf16, f16); `targets` is u32 or i64 with the shape of the logits' leading
/// dimensions. Rows whose target is -100 (in i64) do not count, as with PyTorch's `ignore_index`: padding, or a prompt
/// that the model must not be trained on. The mean is over the other rows, separately for each micro batch and rank.
/// All arithmetic is in f32, except that the sum for the mean is in f64. The gradient, (softmax - onehot) * (incoming
/// gradient / rows that count), is computed in f32 with the incoming gradient, which may contain a loss scale, and
/// rounded once to the logits' dtype.
///
/// # Errors
/// Shapes that do not match, no rows that count, or a target that is not a class, with a message that names the target,
/// its position and the number of classes.
pub fn cross_entropy(logits: &Tensor, targets: &Tensor) -> Result<Tensor> {
    cross_entropy_with(logits, targets, LossOptions::default())
}

/// The options of the loss: how logits and the losses of rows are processed. By default, logits are unchanged, and the
/// loss is the mean over the rows that count.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct LossOptions {
    /// The soft cap c of logits: they are mapped to c tanh(logit / c) (Gemma 2).
    pub soft_cap: Option<f64>,
    /// The divisor of the sum of the losses, instead of the number of rows that count: 1 for the sum, or the number of
    /// targets in a full batch of which these rows are a part. With a divisor, the loss and its gradients are 0 if no
    /// row counts.
    pub divisor: Option<f64>,
}

/// Computes [`cross_entropy`] with options.
///
/// # Errors
/// The errors of [`cross_entropy`], except that with a divisor it is not an error if no row counts; options that are
/// not positive and finite.
pub fn cross_entropy_with(logits: &Tensor, targets: &Tensor, options: LossOptions) -> Result<Tensor> {
    let Some((&classes, leading)) = logits.dims().split_last() else {
        bail!("cross_entropy: the logits are a scalar; they must be [rows, classes] or [batch, time, classes]")
    };
    if leading != targets.dims() {
        bail!("cross_entropy: logits {:?} need targets of shape {leading:?}, not {:?}", logits.dims(), targets.dims())
    }
    let host = host_targets(targets, classes)?;
    let (cap, divisor) =
        (cap(options.soft_cap)?, host.divisor(options.divisor, &|| format!("logits have shape {:?}", logits.dims()))?);
    #[cfg(feature = "cuda")]
    if let Some(loss) = on_gpu::cross_entropy::of_logits(logits, &host.row_targets, cap, divisor)? {
        return Ok(loss);
    }
    if !logits.device().is_cpu() {
        return host.composed(logits, options.soft_cap)?.sum_all()? / -divisor;
    }
    let logits = logits.contiguous()?;
    let inputs = OpInputs::of([Some(&logits)])?;
    with_element!(logits.dtype(), NAME, E => {
        let mut losses = vec![0f32; host.row_targets.len()];
        with_elements::<E, _>(&logits, NAME, |x| {
            kernels::cross_entropy::losses(x, classes, &host.row_targets, cap, &mut losses);
            Ok(())
        })?;
        inputs.result(NAME, CpuStorage::F32(vec![mean(&losses, divisor)]), (), move |grad, [to_logits]| {
            let scale = scalar(&grad)? / divisor as f32;
            to_logits.make::<E>(logits.elem_count(), |d| {
                with_elements::<E, _>(&logits, NAME, |x| {
                    d.copy_from_slice(x);
                    Ok(())
                })?;
                let mut losses = vec![0f32; host.row_targets.len()];
                kernels::cross_entropy::gradients(d, classes, &host.row_targets, cap, |_| scale, &mut losses);
                Ok(())
            })
        })
    })
}

const NAME: &str = "cross_entropy";

/// The approximate maximum number of bytes of logits that exist at a time.
pub(crate) const MAX_LOGITS_BYTES: usize = 52 << 20;

/// Computes [`cross_entropy`] for the logits h w of hidden states `h` `[.., width]`. The logits are never in memory all
/// at once: they are computed, and turned into gradients, for a block of rows at a time. `weight` is `[classes, width]`
/// with [`WeightLayout::OutIn`], otherwise `[width, classes]`. If the weight is in f32 and `h` in 16 bits, the logits
/// are f32 too.
///
/// If gradients are needed, they are computed together with the loss, without the incoming gradient. On the CPU, the
/// gradients of `h` and `weight` are kept in f32 until the backward pass multiplies them by the incoming gradient and
/// rounds them.
///
/// # Errors
/// The errors of [`cross_entropy`] and [`crate::nn::linear()`].
pub fn linear_cross_entropy(h: &Tensor, weight: &Tensor, layout: WeightLayout, targets: &Tensor) -> Result<Tensor> {
    linear_cross_entropy_with(h, weight, layout, targets, LossOptions::default())
}

/// Computes [`linear_cross_entropy`] with options. Rows that do not count cost nothing.
///
/// # Errors
/// The errors of [`linear_cross_entropy`], except that with a divisor it is not an error if no row counts; options that
/// are not positive and finite.
pub fn linear_cross_entropy_with(
    h: &Tensor,
    weight: &Tensor,
    layout: WeightLayout,
    targets: &Tensor,
    options: LossOptions,
) -> Result<Tensor> {
    let (classes, width) = sizes("linear_cross_entropy", h, weight, layout, targets)?;
    let host = host_targets(targets, classes)?;
    let (cap, divisor) = (
        cap(options.soft_cap)?,
        host.divisor(options.divisor, &|| format!("hidden states have shape {:?}", h.dims()))?,
    );
    if f32_weight_linear::is_wider(h, weight, None) {
        return linear_cross_entropy_with(&h.to_dtype(weight.dtype())?, weight, layout, targets, options);
    }
    #[cfg(feature = "cuda")]
    if let Some(head) = on_gpu::cross_entropy::GpuLossHead::new(h, weight, host.non_ignored().parts(), cap, layout)? {
        return head.loss(h, weight, divisor);
    }
    if !h.device().is_cpu() {
        let logits = composed::linear(h, weight, None, layout)?;
        return host.composed(&logits, options.soft_cap)?.sum_all()? / -divisor;
    }
    let (h, weight) = (h.contiguous()?, weight.contiguous()?);
    let inputs = OpInputs::of([Some(&h), Some(&weight)])?;
    with_element!(h.dtype(), NAME, E => {
        let wants = [inputs.wants(0), inputs.wants(1)];
        let head = LossHead { non_ignored: host.non_ignored(), cap, classes, width, layout };
        let (losses, grads) = with_all([Some(&h), Some(&weight)], NAME, |[h, weight]| {
            let h = head.non_ignored.select(h.unwrap_or_default(), width);
            Ok(head.run::<E>(&h, weight.unwrap_or_default(), wants, |_| 1.0))
        })?;
        let (grads, LossHead { non_ignored, .. }) = (Mutex::new(Some(grads)), head);
        let loss = CpuStorage::F32(vec![mean(&losses, divisor)]);
        inputs.result(NAME, loss, (), move |grad, [to_h, to_weight]| {
            let scale = scalar(&grad)? / divisor as f32;
            let mut saved = lock(&grads);
            let grads = if is_single_backward() { saved.take() } else { saved.clone() };
            let Some((dh, dweight)) = grads else {
                bail!("{NAME}: the gradients of this loss have already been taken")
            };
            if to_weight.is_wanted() {
                to_weight.deliver(Grad::Own(scaled::<E>(dweight, scale)))?;
            }
            if to_h.is_wanted() {
                to_h.deliver(Grad::Own(non_ignored.expand::<E>(scaled::<E>(dh, scale), width)))?;
            }
            Ok(())
        })
    })
}

/// Returns the logarithms of the targets' probabilities, in f32 with the targets' shape, and 0 for rows that do not
/// count. The logits h w, as in [`linear_cross_entropy`], are never in memory all at once; the backward pass
/// computes them again. Each row may have its own gradient, as preference optimization requires for sums over an
/// answer's tokens.
///
/// # Errors
/// The errors of [`linear_cross_entropy`], except that it is not an error if no row counts; a cap that is not positive
/// and finite.
pub fn linear_log_probabilities(
    h: &Tensor,
    weight: &Tensor,
    layout: WeightLayout,
    targets: &Tensor,
    soft_cap: Option<f64>,
) -> Result<Tensor> {
    const NAME: &str = "linear_log_probabilities";
    let (classes, width) = sizes(NAME, h, weight, layout, targets)?;
    let (host, shape, cap) = (host_targets(targets, classes)?, targets.shape().clone(), cap(soft_cap)?);
    if f32_weight_linear::is_wider(h, weight, None) {
        return linear_log_probabilities(&h.to_dtype(weight.dtype())?, weight, layout, targets, soft_cap);
    }
    #[cfg(feature = "cuda")]
    if let Some(head) = on_gpu::cross_entropy::GpuLossHead::new(h, weight, host.non_ignored().parts(), cap, layout)? {
        return head.log_probabilities(h, weight, shape.dims());
    }
    if !h.device().is_cpu() {
        let row_values = host.composed(&composed::linear(h, weight, None, layout)?, soft_cap)?;
        let rows: Vec<u32> = host.non_ignored().rows.iter().map(|row| *row as u32).collect();
        let zeros = Tensor::zeros(host.row_targets.len(), row_values.dtype(), h.device())?;
        let rows = Tensor::from_vec(rows, host.count, h.device())?;
        return zeros.index_add(&rows, &row_values, 0)?.reshape(shape);
    }
    let (h, weight) = (h.contiguous()?, weight.contiguous()?);
    let inputs = OpInputs::of([Some(&h), Some(&weight)])?;
    with_element!(h.dtype(), NAME, E => {
        let head = LossHead { non_ignored: host.non_ignored(), cap, classes, width, layout };
        let losses = with_all([Some(&h), Some(&weight)], NAME, |[h, weight]| {
            let h = head.non_ignored.select(h.unwrap_or_default(), width);
            Ok(head.run::<E>(&h, weight.unwrap_or_default(), [false; 2], |_| 1.0).0)
        })?;
        let mut values = vec![0f32; host.row_targets.len()];
        head.non_ignored.rows.iter().zip(losses).for_each(|(row, loss)| values[*row] = -loss);
        inputs.result(NAME, CpuStorage::F32(values), shape, move |grad, [to_h, to_weight]| {
            let row_grads: Vec<f32> =
                grad.read::<f32, _>(NAME, |grad| Ok(head.non_ignored.select(grad, 1).into_owned()))?;
            let (dh, dweight) = with_all([Some(&h), Some(&weight)], NAME, |[h, weight]| {
                let h = head.non_ignored.select(h.unwrap_or_default(), width);
                let wants = [to_h.is_wanted(), to_weight.is_wanted()];
                Ok(head.run::<E>(&h, weight.unwrap_or_default(), wants, |row| -row_grads[row]).1)
            })?;
            if to_weight.is_wanted() {
                to_weight.deliver(Grad::Own(scaled::<E>(dweight, 1.0)))?;
            }
            if to_h.is_wanted() {
                to_h.deliver(Grad::Own(head.non_ignored.expand::<E>(scaled::<E>(dh, 1.0), width)))?;
            }
            Ok(())
        })
    })
}

/// Returns the number of classes and the width of hidden states.
fn sizes(op: &str, h: &Tensor, weight: &Tensor, layout: WeightLayout, targets: &Tensor) -> Result<(usize, usize)> {
    let (classes, width) = match layout {
        WeightLayout::OutIn => weight.dims2()?,
        WeightLayout::InOut => weight.t()?.dims2()?,
    };
    let leading = &h.dims()[..h.rank().saturating_sub(1)];
    if h.dims().last() != Some(&width) || leading != targets.dims() {
        bail!(
            "{op}: hidden states {:?} with a weight {:?} need a last dimension of {width} and \
             targets of shape {leading:?}; the targets have shape {:?}",
            h.dims(),
            weight.dims(),
            targets.dims()
        )
    }
    Ok((classes, width))
}

/// Returns the soft cap of logits in f32.
fn cap(soft_cap: Option<f64>) -> Result<Option<f32>> {
    match soft_cap {
        Some(cap) if !(cap > 0.0 && cap.is_finite()) => {
            bail!("cross_entropy: the soft cap is {cap}; it must be a positive finite number")
        }
        cap => Ok(cap.map(|cap| cap as f32)),
    }
}

/// The sizes of the output projection, and the rows that count in one call.
struct LossHead {
    non_ignored: NonIgnoredRows,
    cap: Option<f32>,
    classes: usize,
    width: usize,
    layout: WeightLayout,
}

impl LossHead {
    /// Returns the losses of the rows that count, and gradients with respect to these rows of `h` and to `weight`: the
    /// gradients of the sum of the losses, in which each loss is multiplied by its scale. Gradients that are not
    /// requested are empty.
    fn run<E: TensorElement>(
        &self,
        h: &[E],
        weight: &[E],
        [wants_h, wants_weight]: [bool; 2],
        scale: impl Fn(usize) -> f32 + Sync,
    ) -> (Vec<f32>, (Vec<f32>, Vec<f32>)) {
        let (classes, width, targets) = (self.classes, self.width, &self.non_ignored.targets);
        let mut losses = vec![0f32; targets.len()];
        let mut dh = buffer::<f32>(if wants_h { h.len() } else { 0 });
        let mut dweight = buffer::<f32>(if wants_weight { weight.len() } else { 0 });
        if targets.is_empty() {
            dweight.fill(0.0);
            return (losses, (dh, dweight));
        }
        let rows = MAX_LOGITS_BYTES / size_of::<E>() / classes.max(1);
        let step = (rows / 64 * 64).max(64).min(targets.len());
        let mut logits = buffer::<E>(step * classes);
        for start in (0..targets.len()).step_by(step) {
            let rows = step.min(targets.len() - start);
            let (targets, losses) = (&targets[start..start + rows], &mut losses[start..start + rows]);
            let sizes = LinearSizes { rows, inputs: width, outputs: classes, layout: self.layout };
            let range = start * width..(start + rows) * width;
            let (h, logits) = (&h[range.clone()], &mut logits[..rows * classes]);
            sizes.product(h, weight, logits, Epilogue::default());
            if !wants_h && !wants_weight {
                kernels::cross_entropy::losses(logits, classes, targets, self.cap, losses);
                continue;
            }
            // The factor 1 / divisor is left out here, because it would make small numbers vanish in f16.
            kernels::cross_entropy::gradients(logits, classes, targets, self.cap, |row| scale(start + row), losses);
            let d = Matrix::new(logits, rows, classes);
            if wants_h {
                sizes.input_gradient(d, weight, &mut dh[range], Epilogue::default());
            }
            if wants_weight {
                let epilogue = Epilogue { accumulate: start > 0, ..Epilogue::default() };
                sizes.weight_gradient(h, d, &mut dweight, epilogue);
            }
        }
        (losses, (dh, dweight))
    }
}

/// Returns the incoming gradient of a scalar.
fn scalar(grad: &Grad) -> Result<f32> {
    grad.view(|values| values.get(0))
}

/// Returns `values * factor`, rounded once.
fn scaled<E: TensorElement>(mut values: Vec<f32>, factor: f32) -> Flat {
    if E::DTYPE == DType::F32 {
        FlatMut::F32(&mut values).scale(factor);
        return Flat::F32(values);
    }
    let mut out = E::flat(buffer::<E>(values.len()));
    out.as_mut().copy_scaled(FlatRef::F32(&values), factor);
    out
}

/// Returns the sum of losses divided by `divisor`.
fn mean(losses: &[f32], divisor: f64) -> f32 {
    (losses.iter().map(|x| f64::from(*x)).sum::<f64>() / divisor) as f32
}

/// The targets on the host.
struct HostTargetIds {
    /// The class of each row, or [`IGNORED`].
    row_targets: Vec<u32>,
    /// The number of rows that count.
    count: usize,
}

/// The rows that count.
struct NonIgnoredRows {
    rows: Vec<usize>,
    /// The targets of the rows.
    targets: Vec<u32>,
    /// The total number of rows.
    total_rows: usize,
}

impl NonIgnoredRows {
    /// Returns the rows that count, their targets, and the total number of rows.
    #[cfg(feature = "cuda")]
    fn parts(&self) -> (&[usize], &[u32], usize) {
        (&self.rows, &self.targets, self.total_rows)
    }

    /// Selects the rows that count from `x`, whose rows have `width` elements.
    fn select<'a, E: TensorElement>(&self, x: &'a [E], width: usize) -> Cow<'a, [E]> {
        if self.rows.len() == self.total_rows {
            return Cow::Borrowed(x);
        }
        let mut selected = Vec::with_capacity(self.rows.len() * width);
        self.rows.iter().for_each(|row| selected.extend_from_slice(&x[row * width..][..width]));
        Cow::Owned(selected)
    }

    /// Expands the rows that count to all rows, with zeros for the others.
    fn expand<E: TensorElement>(&self, selected: Flat, width: usize) -> Flat {
        match E::of_flat(&selected) {
            Some(values) if self.rows.len() < self.total_rows => {
                let mut values_of_all = bytemuck::zeroed_vec::<E>(self.total_rows * width);
                for (row, values) in self.rows.iter().zip(values.chunks_exact(width)) {
                    values_of_all[row * width..][..width].copy_from_slice(values);
                }
                E::flat(values_of_all)
            }
            _ => selected,
        }
    }
}

impl HostTargetIds {
    fn non_ignored(&self) -> NonIgnoredRows {
        let counts = |(row, target): (usize, &u32)| (*target != IGNORED).then_some((row, *target));
        let (rows, targets) = self.row_targets.iter().enumerate().filter_map(counts).unzip();
        NonIgnoredRows { rows, targets, total_rows: self.row_targets.len() }
    }

    /// Returns the divisor of the sum of the losses: the given number, or the number of rows that count.
    fn divisor(&self, given: Option<f64>, shapes: &dyn Fn() -> String) -> Result<f64> {
        match given {
            Some(divisor) if divisor > 0.0 && divisor.is_finite() => Ok(divisor),
            Some(divisor) => bail!("cross_entropy: the divisor is {divisor}; it must be a positive finite number"),
            None if self.count == 0 => bail!(
                "cross_entropy: the mean over zero rows is undefined; {}, and a target of -100 does not count",
                shapes()
            ),
            None => Ok(self.count as f64),
        }
    }

    /// Returns the logarithms of the targets' probabilities for the rows that count, composed of Candle's operations.
    fn composed(&self, logits: &Tensor, soft_cap: Option<f64>) -> Result<Tensor> {
        let NonIgnoredRows { rows, targets, .. } = self.non_ignored();
        let rows = rows.into_iter().map(|row| row as u32).collect();
        let to_tensor = |values: Vec<u32>| Tensor::from_vec(values, self.count, logits.device());
        let logits = logits.reshape(((), logits.dim(D::Minus1)?))?.index_select(&to_tensor(rows)?, 0)?;
        composed::log_probabilities(&logits, &to_tensor(targets)?, soft_cap)
    }
}

/// The i64 target that does not count: PyTorch's `ignore_index`.
const IGNORED_I64: i64 = -100;

fn host_targets(targets: &Tensor, classes: usize) -> Result<HostTargetIds> {
    let values: Vec<i64> = match targets.dtype() {
        DType::I64 => targets.flatten_all()?.to_vec1()?,
        _ => host_ids(targets, NAME, "targets")?.into_iter().map(i64::from).collect(),
    };
    let class_of = |(position, target): (usize, i64)| match u32::try_from(target) {
        Ok(class) if (class as usize) < classes => Ok(class),
        _ if target == IGNORED_I64 => Ok(IGNORED),
        _ => Err(refuse(ModelError::TargetOutOfRange { target, position, classes }.into())),
    };
    let row_targets: Vec<u32> = values.into_iter().enumerate().map(class_of).collect::<Result<_>>()?;
    let count = row_targets.iter().filter(|target| **target != IGNORED).count();
    Ok(HostTargetIds { row_targets, count })
}
