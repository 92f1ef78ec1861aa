//! Tiled attention.

use super::supported_device;
use crate::cuda::attention as kernel;
use crate::graph::{Grad, OpInputs, SavedResult};
use crate::kernels::attention::AttentionShape;
use crate::nn::{AttentionOptions, Sequences};
use crate::tensor::device_elements::with_each;
use candle_core::{Result, Tensor};

/// Computes attention for queries, keys and values, or for one tensor that contains them side by side. The kernels do
/// not support windows in both directions. For such windows, and for unsupported devices, formats and sizes, this
/// function returns `None`.
pub(in crate::nn) fn attention<const N: usize>(
    name: &'static str,
    heads: AttentionShape,
    parts: [&Tensor; N],
    options: &AttentionOptions,
    sequences: Option<&Sequences>,
) -> Result<Option<Tensor>> {
    let one_format = parts.iter().all(|part| part.dtype() == parts[0].dtype());
    let has_kernel = one_format && !(options.bidirectional && options.window.is_some());
    let device = supported_device(&parts).filter(|device| has_kernel && kernel::supports(device, &heads));
    let Some(device) = device else { return Ok(None) };
    let rule = options.rule(heads.head, sequences)?;
    let parts: Vec<Tensor> = parts.iter().map(|part| part.contiguous()).collect::<Result<_>>()?;
    let Ok(parts) = <[Tensor; N]>::try_from(parts) else { return Ok(None) };
    let inputs = OpInputs::of(parts.each_ref().map(Some))?;
    let (y, lse) = with_each(parts.each_ref(), name, |parts| kernel::forward(&device, (&heads, &rule), parts))?;
    let shape = (heads.batch, heads.time, heads.heads * heads.head);
    let saved_result = SavedResult::default();
    let (result, options, sequences) = (saved_result.clone(), *options, sequences.cloned());
    let y = inputs.result(name, y, shape, move |grad, sinks| {
        let rule = options.rule(heads.head, sequences.as_ref())?;
        let dy = grad.on_device(&device)?;
        let gradients = with_each([result.get()?, &dy], name, |[y, dy]| {
            with_each(parts.each_ref(), name, |parts| kernel::backward(&device, (&heads, &rule), parts, (y, &lse, dy)))
        })?;
        for ((sink, gradient), part) in sinks.iter().zip(gradients).zip(&parts) {
            sink.deliver(Grad::of_storage(gradient, part.elem_count()))?;
        }
        Ok(())
    })?;
    Ok(Some(saved_result.save(y)))
}
