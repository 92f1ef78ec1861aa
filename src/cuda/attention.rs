//! Attention on a GPU, forward and backward in tiles: launches of kernels/attention_*.cu.
//!
//! ```text
//!   forward    attention_forward ------------------> result, log-sum-exp     a block for each (tile of queries, head)
//!   backward   attention_along -> sums of result x gradient
//!              attention_backward_queries ---------> dq                      a block for each (tile of queries, head)
//!              attention_backward_keys ------------> dk, dv                  a block for each (tile of keys, key head)
//! ```
//!
//! Sums and softmax are in f32. Products of f32 elements are also in f32. Products of 16-bit elements use tensor cores,
//! with weights rounded to 16 bits. Every row of a result is written by one warp, which sums in order, so the bits are
//! the same in every run. Tiles are counted from the start of each sequence, so that a packed sequence gives the same
//! bits as a separately processed one.

use super::flat_view::DeviceFlatRef;
use crate::kernels::attention::{AttentionRule, AttentionShape};
use call::{AttentionCall, DeviceHeadRows};
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaView, DevicePtr, DevicePtrMut, PushKernelArg};
use candle_core::{CudaDevice, CudaStorage, Result, bail};
use element::{AttentionElement, of_format};
use std::array::from_fn;

mod call;
mod element;
mod tile_sizes;

/// Returns whether the kernels support attention of these sizes on this device.
pub(crate) fn supports(device: &CudaDevice, h: &AttentionShape) -> bool {
    // From compute capability 8.0 on, tensor cores support bfloat16, and a block can have enough shared memory.
    let capable = device.cuda_stream().context().compute_capability().is_ok_and(|(major, _)| major >= 8);
    let rows = h.batch.saturating_mul(h.time);
    let elements = rows.saturating_mul(h.heads).saturating_mul(h.head);
    let fits_launch = (1..=i32::MAX as usize).contains(&rows) && h.heads <= 1 << 15 && elements <= 1 << 46;
    capable && fits_launch && tile_sizes::width(h.head).is_some()
}

/// Computes the result, `[batch, time, heads * head]`, and the log-sum-exp of each query's scores, which [`backward`]
/// needs.
///
/// `parts` are queries, keys and values with dense rows, or one array with all three side by side in each row.
///
/// # Errors
/// Returns an error if the driver reports one, or if the parts have different formats.
///
/// # Panics
/// May panic if a part has too few elements.
pub(crate) fn forward<const N: usize>(
    device: &CudaDevice,
    shape_and_rule: (&AttentionShape, &AttentionRule<'_>),
    parts: [&DeviceFlatRef<'_>; N],
) -> Result<(CudaStorage, CudaSlice<f32>)> {
    of_format!(parts[0], E => {
        let (out, lse) = forward_of::<E>(device, shape_and_rule, rows(shape_and_rule.0, parts)?)?;
        Ok((CudaStorage { slice: E::storage(out), device: device.clone() }, lse))
    })
}

/// Computes the gradients of [`forward`]'s parts.
///
/// `out` and `lse` are the results of the forward pass, and `dout` is the gradient of `out`.
///
/// # Errors
/// Returns an error if the driver reports one, or if the parts have different formats.
///
/// # Panics
/// May panic if a part has too few elements.
pub(crate) fn backward<const N: usize>(
    device: &CudaDevice,
    shape_and_rule: (&AttentionShape, &AttentionRule<'_>),
    parts: [&DeviceFlatRef<'_>; N],
    (out, lse, dout): (&DeviceFlatRef<'_>, &CudaSlice<f32>, &DeviceFlatRef<'_>),
) -> Result<[CudaStorage; N]> {
    of_format!(parts[0], E => {
        let qkv = rows::<E, N>(shape_and_rule.0, parts)?;
        let (Some(out), Some(dout)) = (E::of(out), E::of(dout)) else { bail!("attention: {TWO_FORMATS}") };
        let mut buffers = Vec::with_capacity(N);
        for part in parts {
            // SAFETY: the kernels write every element.
            buffers.push(unsafe { device.alloc::<E>(part.len()) }?);
        }
        let gradients = match &mut buffers[..] {
            [all] => QkvGradients::Fused(all),
            [dq, dk, dv] => QkvGradients::Separate([dq, dk, dv]),
            _ => bail!("attention: {N} parts were given, but 1 or 3 are needed"),
        };
        backward_of(device, shape_and_rule, qkv, (out, lse, dout), gradients)?;
        let mut storages =
            buffers.into_iter().map(|slice| CudaStorage { slice: E::storage(slice), device: device.clone() });
        Ok(from_fn(|_| storages.next().unwrap_or_else(|| unreachable!("as many gradients as parts"))))
    })
}

const TWO_FORMATS: &str = "the operands have different formats";

/// Returns the rows of queries, keys and values.
fn rows<'a, E: AttentionElement, const N: usize>(
    h: &AttentionShape,
    parts: [&DeviceFlatRef<'a>; N],
) -> Result<[DeviceHeadRows<'a, E>; 3]> {
    let (width, kv_width) = (h.heads * h.head, h.kv_heads * h.head);
    let view = |i: usize, start: usize, stride: usize| match E::of(parts[i]).and_then(|part| part.try_slice(start..)) {
        Some(values) => Ok(DeviceHeadRows { values, stride }),
        None => bail!("attention: {TWO_FORMATS}, or fewer elements than {h:?} needs"),
    };
    match N {
        1 => {
            let fused = width + 2 * kv_width;
            Ok([view(0, 0, fused)?, view(0, width, fused)?, view(0, width + kv_width, fused)?])
        }
        3 => Ok([view(0, 0, width)?, view(1, 0, kv_width)?, view(2, 0, kv_width)?]),
        _ => bail!("attention: {N} parts were given, but 1 or 3 are needed"),
    }
}

/// The buffers for the gradients of queries, keys and values.
#[derive(Debug)]
enum QkvGradients<'a, E> {
    /// A separate buffer for each, with dense rows.
    Separate([&'a mut CudaSlice<E>; 3]),
    /// One buffer, with all three side by side in each row.
    Fused(&'a mut CudaSlice<E>),
}

/// Computes [`forward`] for one format. The log-sum-exp is to base 2 and has shape `[batch, time, heads]`.
fn forward_of<E: AttentionElement>(
    device: &CudaDevice,
    shape_and_rule: (&AttentionShape, &AttentionRule<'_>),
    [q, k, v]: [DeviceHeadRows<'_, E>; 3],
) -> Result<(CudaSlice<E>, CudaSlice<f32>)> {
    let h = shape_and_rule.0;
    let call = AttentionCall::new::<E>(device, shape_and_rule, [&q, &k, &v])?;
    // SAFETY: the kernel writes every element.
    let (mut out, mut lse) = unsafe {
        (device.alloc::<E>(h.batch * h.time * h.heads * h.head)?, device.alloc::<f32>(h.batch * h.time * h.heads)?)
    };
    let block_sizes = call.tile_sizes.forward;
    let tiles = call.tiles(block_sizes.own_rows)?;
    let function = call.function::<E>("forward", block_sizes)?;
    let mut arguments = function.builder();
    arguments.arg(&call.sizes);
    tiles.pass_to(&mut arguments);
    arguments.arg(&q.values).arg(&k.values).arg(&v.values).arg(&mut out).arg(&mut lse);
    // SAFETY: the kernel takes these arguments, in the format in its name; `AttentionCall` has checked that rows are
    // within the views, and tiles are within rows.
    unsafe { arguments.launch(block_sizes.launch_over([tiles.count, h.heads, 1])) }.w()?;
    Ok((out, lse))
}

/// Computes [`backward`] for one format.
fn backward_of<'a, E: AttentionElement>(
    device: &CudaDevice,
    shape_and_rule: (&AttentionShape, &AttentionRule<'_>),
    [q, k, v]: [DeviceHeadRows<'_, E>; 3],
    (out, lse, dout): (CudaView<'_, E>, &CudaSlice<f32>, CudaView<'_, E>),
    gradients: QkvGradients<'a, E>,
) -> Result<()> {
    let (h, stream) = (shape_and_rule.0, device.cuda_stream());
    let (width, kv_width) = (h.heads * h.head, h.kv_heads * h.head);
    let elements = h.batch * h.time * width;
    assert!(out.len() == elements && dout.len() == elements && lse.len() == h.batch * h.time * h.heads, "{h:?}");
    let mut call = AttentionCall::new::<E>(device, shape_and_rule, [&q, &k, &v])?;
    call.sizes.vectors &= u32::from(dout.device_ptr(&stream).0.is_multiple_of(16));

    // SAFETY: the first kernel writes every element.
    let mut along = unsafe { device.alloc::<f32>(lse.len()) }?;
    let function = E::KERNELS.function(device, &format!("attention_along_{}", E::SUFFIX))?;
    let mut arguments = function.builder();
    arguments.arg(&call.sizes).arg(&out).arg(&dout).arg(&mut along);
    // SAFETY: the kernel takes these arguments, in the format in its name, with a warp for each element of `along`.
    unsafe { arguments.launch(tile_sizes::warps(lse.len())) }.w()?;

    let bytes = size_of::<E>() as u64;
    // The guards that record the writes are kept until the kernels are launched.
    let pointer = |slice: &'a mut CudaSlice<E>, elements: usize| {
        assert_eq!(slice.len(), h.batch * h.time * elements, "{h:?}: elements of a gradient");
        slice.device_ptr_mut(&stream)
    };
    let fused = width + 2 * kv_width;
    let (_recorded, [dq, dk, dv], strides) = match gradients {
        QkvGradients::Separate([dq, dk, dv]) => {
            let [dq, dk, dv] = [pointer(dq, width), pointer(dk, kv_width), pointer(dv, kv_width)];
            (vec![dq.1, dk.1, dv.1], [dq.0, dk.0, dv.0], [width, kv_width, kv_width])
        }
        QkvGradients::Fused(all) => {
            let (start, recorded) = pointer(all, fused);
            let at = |column: usize| start + column as u64 * bytes;
            (vec![recorded], [at(0), at(width), at(width + kv_width)], [fused; 3])
        }
    };
    [call.sizes.dq_stride, call.sizes.dk_stride, call.sizes.dv_stride] = strides.map(|stride| stride as u32);

    let block_sizes = call.tile_sizes.backward;
    let tiles = call.tiles(block_sizes.own_rows)?;
    let function = call.function::<E>("backward_queries", block_sizes)?;
    let mut arguments = function.builder();
    arguments.arg(&call.sizes);
    tiles.pass_to(&mut arguments);
    arguments.arg(&q.values).arg(&k.values).arg(&v.values);
    arguments.arg(&dout).arg(lse).arg(&along).arg(&dq);
    // SAFETY: as in `forward_of`; `pointer` has checked the length of the gradients.
    unsafe { arguments.launch(block_sizes.launch_over([tiles.count, h.heads, 1])) }.w()?;

    let function = call.function::<E>("backward_keys", block_sizes)?;
    let mut arguments = function.builder();
    arguments.arg(&call.sizes);
    tiles.pass_to(&mut arguments);
    arguments.arg(&q.values).arg(&k.values).arg(&v.values);
    arguments.arg(&dout).arg(lse).arg(&along).arg(&dk).arg(&dv);
    // SAFETY: same as above.
    unsafe { arguments.launch(block_sizes.launch_over([tiles.count, h.kv_heads, block_sizes.planes])) }.w()?;
    Ok(())
}

#[cfg(test)]
mod tests;
