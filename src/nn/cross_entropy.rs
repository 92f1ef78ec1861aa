//! The mean cross entropy of logits against target classes.

use crate::Error;
use crate::nn::element::{Element, elements, with_element, with_elements};
use crate::nn::embedding::host_ids;
use crate::nn::{composed, refuse, rows};
use candle_core::{CpuStorage, CustomOp1, DType, Layout, Result, Shape, Tensor, bail};
use rayon::prelude::*;

/// Mean over all rows of `-log softmax(logits)[target]`: a scalar of f32.
///
/// `logits` `[.., classes]` (f32, bf16, f16), `targets` u32 with the shape of the logits' leading dimensions. All
/// arithmetic is f32, the mean's sum f64. The backward is (softmax - onehot) * (incoming gradient / rows), with the
/// incoming gradient - a loss scale may be in it - taken as the f32 number it is, and rounded once to the logits' dtype.
///
/// Errors: shapes that do not fit, no rows at all, or a target that is no class: the message names the target, its
/// position and the number of classes.
pub fn cross_entropy(logits: &Tensor, targets: &Tensor) -> Result<Tensor> {
    let Some((&classes, leading)) = logits.dims().split_last() else {
        bail!("cross_entropy: the logits are a scalar; [rows, classes] or [batch, time, classes] is needed")
    };
    if leading != targets.dims() {
        bail!("cross_entropy: logits {:?} need targets of shape {leading:?}, not {:?}", logits.dims(), targets.dims())
    }
    let host = host_ids(targets, NAME, "targets")?;
    if host.is_empty() {
        bail!("cross_entropy: the mean over no rows at all is not defined; logits have shape {:?}", logits.dims())
    }
    if let Some(position) = host.iter().position(|t| *t as usize >= classes) {
        return Err(refuse(Error::TargetOutOfRange { target: host[position], position, classes }));
    }
    if !logits.device().is_cpu() {
        return composed::cross_entropy(logits, targets);
    }
    logits.contiguous()?.apply_op1(CrossEntropyOp { targets: host, classes })
}

struct CrossEntropyOp {
    /// Each below `classes`; one per row.
    targets: Vec<u32>,
    classes: usize,
}

const NAME: &str = "cross_entropy";

impl CrossEntropyOp {
    fn mean_loss<E: Element>(&self, logits: &[E]) -> f32 {
        let losses: Vec<f32> = logits
            .par_chunks_exact(self.classes)
            .zip(&self.targets)
            .map_init(Vec::new, |row: &mut Vec<f32>, (logits, target)| {
                row.resize(self.classes, 0.0);
                E::widen(logits, row);
                let at_target = row[*target as usize];
                let (max, sum) = rows::exp_row(row);
                sum.ln() + (max - at_target)
            })
            .collect();
        let total: f64 = losses.iter().map(|x| f64::from(*x)).sum();
        (total / losses.len() as f64) as f32
    }

    fn backward<E: Element>(&self, logits: &[E], grad: f32) -> Vec<E> {
        let scale = grad / self.targets.len() as f32;
        let mut out = vec![E::default(); logits.len()];
        out.par_chunks_exact_mut(self.classes)
            .zip(logits.par_chunks_exact(self.classes))
            .zip(&self.targets)
            .for_each_init(Vec::new, |row: &mut Vec<f32>, ((out, logits), target)| {
                row.resize(self.classes, 0.0);
                E::widen(logits, row);
                let (_, sum) = rows::exp_row(row);
                row.iter_mut().for_each(|x| *x /= sum);
                row[*target as usize] -= 1.0;
                row.iter_mut().for_each(|x| *x *= scale);
                E::narrow(row, out);
            });
        out
    }
}

impl CustomOp1 for CrossEntropyOp {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(&self, logits: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        use candle_core::backend::BackendStorage;
        let loss = with_element!(logits.dtype(), NAME, E => {
            Ok(self.mean_loss(elements::<E>(logits, layout, NAME)?))
        })?;
        Ok((CpuStorage::F32(vec![loss]), Shape::from(())))
    }

    fn bwd(&self, logits: &Tensor, _loss: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let grad = grad.to_dtype(DType::F32)?.to_scalar::<f32>()?;
        with_element!(logits.dtype(), NAME, E => {
            let data = with_elements::<E, _>(logits, NAME, |l| Ok(self.backward(l, grad)))?;
            Ok(Some(Tensor::from_vec(data, logits.shape(), logits.device())?))
        })
    }
}
