//! The mean cross entropy against target classes: of logits, and of hidden states through an output projection.

use crate::error::ModelError;
use crate::graph::{Grad, Inputs, is_once};
use crate::kernels::cross_entropy::IGNORED;
use crate::kernels::gemm::{Epilogue, Matrix};
use crate::kernels::{self, buffer};
use crate::nn::embedding::host_ids;
use crate::nn::product::Sizes;
use crate::nn::{WeightLayout, composed, refuse, wide};
use crate::precision::{Flat, FlatMut, FlatRef};
use crate::tensor::element::{Element, with_all, with_element, with_elements};
use crate::util::lock;
use candle_core::{CpuStorage, D, DType, Result, Tensor, bail};
use std::sync::Mutex;

/// Mean over all rows of `-log softmax(logits)[target]`: a scalar of f32.
///
/// `logits` `[.., classes]` (f32, bf16, f16), `targets` u32 or i64 with the shape of the logits' leading dimensions.
/// Rows whose target is -100 (of i64) do not count, as with PyTorch's `ignore_index`: padding, or a prompt that is not
/// to be learned. The mean is that of the others, in each micro batch and on each rank of its own. All arithmetic is
/// f32, the mean's sum f64. The backward is (softmax - onehot) * (incoming gradient / rows that count), with the
/// incoming gradient - a loss scale may be in it - taken as the f32 number it is, and rounded once to the logits'
/// dtype.
///
/// # Errors
/// Shapes that do not fit, no rows that count, or a target that is no class: the message names the target, its
/// position and the number of classes.
pub fn cross_entropy(logits: &Tensor, targets: &Tensor) -> Result<Tensor> {
    let Some((&classes, leading)) = logits.dims().split_last() else {
        bail!("cross_entropy: the logits are a scalar; [rows, classes] or [batch, time, classes] is needed")
    };
    if leading != targets.dims() {
        bail!("cross_entropy: logits {:?} need targets of shape {leading:?}, not {:?}", logits.dims(), targets.dims())
    }
    let host = host_targets(targets, classes, &format!("logits have shape {:?}", logits.dims()))?;
    if !logits.device().is_cpu() {
        return of_composed(logits, targets, &host);
    }
    let logits = logits.contiguous()?;
    let inputs = Inputs::of([Some(&logits)])?;
    with_element!(logits.dtype(), NAME, E => {
        let mut losses = vec![0f32; host.of_rows.len()];
        with_elements::<E, _>(&logits, NAME, |x| {
            kernels::cross_entropy::losses(x, classes, &host.of_rows, &mut losses);
            Ok(())
        })?;
        inputs.result(NAME, CpuStorage::F32(vec![host.mean(&losses)]), (), move |grad, [to_logits]| {
            let scale = scalar(&grad)? / host.count as f32;
            to_logits.make::<E>(logits.elem_count(), |d| {
                with_elements::<E, _>(&logits, NAME, |x| {
                    d.copy_from_slice(x);
                    Ok(())
                })?;
                kernels::cross_entropy::gradients(d, classes, &host.of_rows, scale, &mut vec![0f32; host.of_rows.len()]);
                Ok(())
            })
        })
    })
}

const NAME: &str = "cross_entropy";

/// Bytes of the logits that exist at a time.
const CHUNK: usize = 26 << 20;

/// [`cross_entropy`] of the logits h w of hidden states `h` `[.., width]`, which are never whole in memory: they are
/// made, and turned into gradients, for some rows at a time. `weight` is `[classes, width]` with
/// [`WeightLayout::OutIn`], else `[width, classes]`; in f32 under `h` of 16 bits, the logits are f32 too.
///
/// Where gradients are wanted they are computed together with the loss, in f32 and without the incoming gradient,
/// which multiplies them in backward before they are rounded. Kept until then: the gradients of `h` and `weight`, f32.
///
/// # Errors
/// As [`cross_entropy`] and [`crate::nn::linear()`].
pub fn linear_cross_entropy(h: &Tensor, weight: &Tensor, layout: WeightLayout, targets: &Tensor) -> Result<Tensor> {
    let (classes, width) = match layout {
        WeightLayout::OutIn => weight.dims2()?,
        WeightLayout::InOut => weight.t()?.dims2()?,
    };
    let leading = &h.dims()[..h.rank().saturating_sub(1)];
    if h.dims().last() != Some(&width) || leading != targets.dims() {
        bail!(
            "linear_cross_entropy: hidden states {:?} with a weight {:?} need targets of shape {leading:?} and a last \
             dimension of {width}; the targets have {:?}",
            h.dims(),
            weight.dims(),
            targets.dims()
        )
    }
    let host = host_targets(targets, classes, &format!("hidden states have shape {:?}", h.dims()))?;
    if wide::is_wider(h, weight, None) {
        return linear_cross_entropy(&h.to_dtype(weight.dtype())?, weight, layout, targets);
    }
    if !h.device().is_cpu() {
        return of_composed(&composed::linear(h, weight, None, layout)?, targets, &host);
    }
    let (h, weight) = (h.contiguous()?, weight.contiguous()?);
    let inputs = Inputs::of([Some(&h), Some(&weight)])?;
    with_element!(h.dtype(), NAME, E => {
        let head = Head { targets: &host, classes, width, layout };
        let (loss, grads) = with_all([Some(&h), Some(&weight)], NAME, |[h, weight]| {
            let (h, weight) = (h.unwrap_or_default(), weight.unwrap_or_default());
            Ok(head.run::<E>(h, weight, inputs.wants(0), inputs.wants(1)))
        })?;
        let (rows, grads) = (host.count, Mutex::new(Some(grads)));
        inputs.result(NAME, CpuStorage::F32(vec![loss]), (), move |grad, [to_h, to_weight]| {
            let scale = scalar(&grad)? / rows as f32;
            let mut kept = lock(&grads);
            let grads = if is_once() { kept.take() } else { kept.clone() };
            let Some((dh, dweight)) = grads else { bail!("{NAME}: its gradients were taken already") };
            if to_weight.is_wanted() {
                to_weight.give(Grad::Own(scaled::<E>(dweight, scale)))?;
            }
            if to_h.is_wanted() {
                to_h.give(Grad::Own(scaled::<E>(dh, scale)))?;
            }
            Ok(())
        })
    })
}

/// The output projection of one application.
struct Head<'a> {
    targets: &'a Targets,
    classes: usize,
    width: usize,
    layout: WeightLayout,
}

impl Head<'_> {
    /// The mean loss, and the gradients of `h` and `weight` of the sum of the losses, empty where not wanted.
    fn run<E: Element>(&self, h: &[E], weight: &[E], wants_h: bool, wants_weight: bool) -> (f32, (Vec<f32>, Vec<f32>)) {
        let (classes, width, targets) = (self.classes, self.width, &self.targets.of_rows);
        let mut losses = vec![0f32; targets.len()];
        let mut dh = buffer::<f32>(if wants_h { h.len() } else { 0 });
        let mut dweight = buffer::<f32>(if wants_weight { weight.len() } else { 0 });
        let rows = CHUNK / size_of::<E>() / classes.max(1);
        let step = (rows / 64 * 64).max(64).min(targets.len());
        let mut logits = buffer::<E>(step * classes);
        for start in (0..targets.len()).step_by(step) {
            let rows = step.min(targets.len() - start);
            let (targets, losses) = (&targets[start..start + rows], &mut losses[start..start + rows]);
            let sizes = Sizes { rows, inputs: width, outputs: classes, layout: self.layout };
            let part = start * width..(start + rows) * width;
            let (h, logits) = (&h[part.clone()], &mut logits[..rows * classes]);
            sizes.product(h, weight, logits, Epilogue::default());
            if !wants_h && !wants_weight {
                kernels::cross_entropy::losses(logits, classes, targets, losses);
                continue;
            }
            // Without the factor 1 / rows, which would make small numbers vanish in f16.
            kernels::cross_entropy::gradients(logits, classes, targets, 1.0, losses);
            let d = Matrix::new(logits, rows, classes);
            if wants_h {
                sizes.input_gradient(d, weight, &mut dh[part], Epilogue::default());
            }
            if wants_weight {
                let epilogue = Epilogue { accumulate: start > 0, ..Epilogue::default() };
                sizes.weight_gradient(h, d, &mut dweight, epilogue);
            }
        }
        (self.targets.mean(&losses), (dh, dweight))
    }
}

/// The incoming gradient of a scalar.
fn scalar(grad: &Grad) -> Result<f32> {
    grad.view(|values| values.get(0))
}

/// `values * factor`, rounded once.
fn scaled<E: Element>(mut values: Vec<f32>, factor: f32) -> Flat {
    if E::DTYPE == DType::F32 {
        FlatMut::F32(&mut values).scale(factor);
        return Flat::F32(values);
    }
    let mut out = E::flat(buffer::<E>(values.len()));
    out.as_mut().copy_scaled(FlatRef::F32(&values), factor);
    out
}

/// The targets on the host.
struct Targets {
    /// Of each row, a class or [`IGNORED`].
    of_rows: Vec<u32>,
    /// Rows that count: at least one.
    count: usize,
}

impl Targets {
    /// The mean over the rows that count; the others' losses are 0.
    fn mean(&self, losses: &[f32]) -> f32 {
        (losses.iter().map(|x| f64::from(*x)).sum::<f64>() / self.count as f64) as f32
    }
}

/// The target that does not count, in i64: PyTorch's `ignore_index`.
const IGNORED_I64: i64 = -100;

fn host_targets(targets: &Tensor, classes: usize, shapes: &str) -> Result<Targets> {
    let given: Vec<i64> = match targets.dtype() {
        DType::I64 => targets.flatten_all()?.to_vec1()?,
        _ => host_ids(targets, NAME, "targets")?.into_iter().map(i64::from).collect(),
    };
    let of_row = |(position, target): (usize, i64)| match u32::try_from(target) {
        Ok(class) if (class as usize) < classes => Ok(class),
        _ if target == IGNORED_I64 => Ok(IGNORED),
        _ => Err(refuse(ModelError::TargetOutOfRange { target, position, classes }.into())),
    };
    let of_rows: Vec<u32> = given.into_iter().enumerate().map(of_row).collect::<Result<_>>()?;
    match of_rows.iter().filter(|target| **target != IGNORED).count() {
        0 => bail!(
            "cross_entropy: the mean over no rows at all is not defined; {shapes}, and a target of -100 does not count"
        ),
        count => Ok(Targets { of_rows, count }),
    }
}

/// The same of Candle's operations.
fn of_composed(logits: &Tensor, targets: &Tensor, host: &Targets) -> Result<Tensor> {
    if host.count == host.of_rows.len() {
        return composed::cross_entropy(logits, targets);
    }
    let counting = || host.of_rows.iter().enumerate().filter(|(_, target)| **target != IGNORED);
    let of_host = |values: Vec<u32>| Tensor::from_vec(values, host.count, logits.device());
    let rows = logits.reshape(((), logits.dim(D::Minus1)?))?;
    let rows = rows.index_select(&of_host(counting().map(|(row, _)| row as u32).collect())?, 0)?;
    composed::cross_entropy(&rows, &of_host(counting().map(|(_, target)| *target).collect())?)
}
