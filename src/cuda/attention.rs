//! Attention on a GPU, forward and backward in tiles: launches of kernels/attention_*.cu.
//!
//! ```text
//!   forward    attention_forward ------------------------------> result, log-sum-exp     a block for each (tile of queries, head)
//!   backward   attention_along -> sums of result x gradient
//!              attention_backward_queries ---------------------> dq                      a block for each (tile of queries, head)
//!              attention_backward_keys ------------------------> dk, dv                  a block for each (tile of keys, key head)
//! ```
//!
//! Sums and softmax are in f32; so are products of f32, and those of 16 bits are of tensor cores, with weights rounded to 16 bits.
//! Every row of a result is written by one warp, which sums in order: the bits are the same in every run. A tile begins where a
//! sequence begins, so that a packed one has the bits that it has alone.

use super::load::{Function, Module, module};
use crate::kernels::attention::{Heads, Rule};
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::{
    CudaSlice, CudaView, DevicePtr, DevicePtrMut, DeviceRepr, LaunchArgs, PushKernelArg,
};
use candle_core::{CudaDevice, Result};
use half::{bf16, f16};
use launches::{Launch, Launches};

mod launches;

/// A format that there are kernels for.
pub(crate) trait Format: DeviceRepr {
    const KERNELS: Module;
    const SUFFIX: &'static str;
}

impl Format for f32 {
    const KERNELS: Module = module!("attention_f32");
    const SUFFIX: &'static str = "f32";
}

impl Format for bf16 {
    const KERNELS: Module = module!("attention_bf16");
    const SUFFIX: &'static str = "bf16";
}

impl Format for f16 {
    const KERNELS: Module = module!("attention_f16");
    const SUFFIX: &'static str = "f16";
}

/// Queries, keys or values: from the first element of a view on, those of the next position `stride` elements further.
#[derive(Debug)]
pub(crate) struct Rows<'a, E> {
    pub values: CudaView<'a, E>,
    pub stride: usize,
}

/// Where the gradients of queries, keys and values go.
#[derive(Debug)]
pub(crate) enum Gradients<'a, E> {
    /// A buffer each, with dense rows.
    Apart([&'a mut CudaSlice<E>; 3]),
    /// Side by side in each row of one buffer.
    Fused(&'a mut CudaSlice<E>),
}

/// Whether the kernels take an attention of these sizes on this device.
pub(crate) fn takes(device: &CudaDevice, h: &Heads) -> bool {
    // Tensor cores know bfloat16, and a block may have the shared memory, from 8.0 on.
    let capable = device.cuda_stream().context().compute_capability().is_ok_and(|(major, _)| major >= 8);
    let rows = h.batch.saturating_mul(h.time);
    let elements = rows.saturating_mul(h.heads).saturating_mul(h.head);
    let launched = (1..=i32::MAX as usize).contains(&rows) && h.heads <= 1 << 15 && elements <= 1 << 46;
    capable && launched && launches::width(h.head).is_some()
}

/// The result, `[batch, time, heads * head]`, and the log-sum-exp of each query's scores in powers of 2, `[batch, time, heads]`.
///
/// # Errors
/// The driver's.
pub(crate) fn forward<E: Format>(
    device: &CudaDevice,
    of: (&Heads, &Rule<'_>),
    [q, k, v]: [Rows<'_, E>; 3],
) -> Result<(CudaSlice<E>, CudaSlice<f32>)> {
    let h = of.0;
    let call = Call::new::<E>(device, of, [&q, &k, &v])?;
    // SAFETY: the kernel writes every element.
    let (mut out, mut lse) = unsafe {
        (device.alloc::<E>(h.batch * h.time * h.heads * h.head)?, device.alloc::<f32>(h.batch * h.time * h.heads)?)
    };
    let how = call.how.forward;
    let tiles = call.tiles(how.own)?;
    let function = call.function::<E>("forward", how)?;
    let mut arguments = function.builder();
    arguments.arg(&call.sizes);
    tiles.give(&mut arguments);
    arguments.arg(&q.values).arg(&k.values).arg(&v.values).arg(&mut out).arg(&mut lse);
    // SAFETY: the arguments of the kernel, of the format in its name; `Call` has checked that rows lie within the views, and tiles lie in rows.
    unsafe { arguments.launch(how.over([tiles.count, h.heads, 1])) }.w()?;
    Ok((out, lse))
}

/// The gradients of [`forward`]'s inputs.
///
/// `out` and `lse` are what forward computed, `dout` the gradient of `out`.
///
/// # Errors
/// The driver's.
pub(crate) fn backward<'a, E: Format>(
    device: &CudaDevice,
    of: (&Heads, &Rule<'_>),
    [q, k, v]: [Rows<'_, E>; 3],
    (out, lse, dout): (CudaView<'_, E>, &CudaSlice<f32>, CudaView<'_, E>),
    gradients: Gradients<'a, E>,
) -> Result<()> {
    let (h, stream) = (of.0, device.cuda_stream());
    let (width, kv_width) = (h.heads * h.head, h.kv_heads * h.head);
    let elements = h.batch * h.time * width;
    assert!(out.len() == elements && dout.len() == elements && lse.len() == h.batch * h.time * h.heads, "{h:?}");
    let mut call = Call::new::<E>(device, of, [&q, &k, &v])?;
    call.sizes.vectors &= u32::from(dout.device_ptr(&stream).0.is_multiple_of(16));

    // SAFETY: the first kernel writes every element.
    let mut along = unsafe { device.alloc::<f32>(lse.len()) }?;
    let function = E::KERNELS.function(device, &format!("attention_along_{}", E::SUFFIX))?;
    let mut arguments = function.builder();
    arguments.arg(&call.sizes).arg(&out).arg(&dout).arg(&mut along);
    // SAFETY: the arguments of the kernel, of the format in its name, with a warp for each element of `along`.
    unsafe { arguments.launch(launches::warps(lse.len())) }.w()?;

    let bytes = size_of::<E>() as u64;
    // What records the writes is kept until the kernels are launched.
    let pointer = |slice: &'a mut CudaSlice<E>, elements: usize| {
        assert_eq!(slice.len(), h.batch * h.time * elements, "{h:?}: elements of a gradient");
        slice.device_ptr_mut(&stream)
    };
    let fused = width + 2 * kv_width;
    let (_recorded, [dq, dk, dv], strides) = match gradients {
        Gradients::Apart([dq, dk, dv]) => {
            let [dq, dk, dv] = [pointer(dq, width), pointer(dk, kv_width), pointer(dv, kv_width)];
            (vec![dq.1, dk.1, dv.1], [dq.0, dk.0, dv.0], [width, kv_width, kv_width])
        }
        Gradients::Fused(all) => {
            let (start, recorded) = pointer(all, fused);
            let at = |column: usize| start + column as u64 * bytes;
            (vec![recorded], [at(0), at(width), at(width + kv_width)], [fused; 3])
        }
    };
    [call.sizes.dq_stride, call.sizes.dk_stride, call.sizes.dv_stride] = strides.map(|stride| stride as u32);

    let how = call.how.backward;
    let tiles = call.tiles(how.own)?;
    let function = call.function::<E>("backward_queries", how)?;
    let mut arguments = function.builder();
    arguments.arg(&call.sizes);
    tiles.give(&mut arguments);
    arguments.arg(&q.values).arg(&k.values).arg(&v.values);
    arguments.arg(&dout).arg(lse).arg(&along).arg(&dq);
    // SAFETY: as in forward; `pointer` has checked the length of the gradients.
    unsafe { arguments.launch(how.over([tiles.count, h.heads, 1])) }.w()?;

    let function = call.function::<E>("backward_keys", how)?;
    let mut arguments = function.builder();
    arguments.arg(&call.sizes);
    tiles.give(&mut arguments);
    arguments.arg(&q.values).arg(&k.values).arg(&v.values);
    arguments.arg(&dout).arg(lse).arg(&along).arg(&dk).arg(&dv);
    // SAFETY: as before.
    unsafe { arguments.launch(how.over([tiles.count, h.kv_heads, how.planes])) }.w()?;
    Ok(())
}

/// kernels/attention.cuh has the same struct.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct Sizes {
    time: u32,
    rows: u32,
    heads: u32,
    kv_heads: u32,
    head: u32,
    window: u32,
    both_ways: u32,
    vectors: u32,
    q_stride: u32,
    k_stride: u32,
    v_stride: u32,
    dq_stride: u32,
    dk_stride: u32,
    dv_stride: u32,
    scale: f32,
    capped: f32,
    inner: f32,
    outer: f32,
    to_powers: f32,
}

// SAFETY: C's layout, with nothing between the fields, of which all bits are values.
unsafe impl DeviceRepr for Sizes {}

/// What the launches of one attention have in common.
struct Call<'a> {
    device: &'a CudaDevice,
    rule: &'a Rule<'a>,
    h: &'a Heads,
    sizes: Sizes,
    width: usize,
    how: Launches,
}

impl<'a> Call<'a> {
    /// Panics if rows do not lie within their views.
    fn new<E: Format>(
        device: &'a CudaDevice,
        (h, rule): (&'a Heads, &'a Rule<'a>),
        rows: [&Rows<'_, E>; 3],
    ) -> Result<Self> {
        let Some(width) = launches::width(h.head) else {
            candle_core::bail!("attention: heads of {} elements on a GPU; {} are the most", h.head, launches::WIDTHS[4])
        };
        let [q, k, v] = rows;
        for (rows, heads) in [(q, h.heads), (k, h.kv_heads), (v, h.kv_heads)] {
            let end = (h.batch * h.time - 1) * rows.stride + heads * h.head;
            assert!(end <= rows.values.len() && heads * h.head <= rows.stride, "{h:?}: {} elements", rows.values.len());
        }
        let stream = device.cuda_stream();
        let piece = 16 / size_of::<E>();
        let in_pieces = |rows: &Rows<'_, E>| {
            rows.stride.is_multiple_of(piece) && rows.values.device_ptr(&stream).0.is_multiple_of(16)
        };
        let (to_powers, cap) = rule.to_powers();
        let u32 = |n: usize| u32::try_from(n).map_err(candle_core::Error::wrap);
        let sizes = Sizes {
            time: u32(h.time)?,
            rows: u32(h.batch * h.time)?,
            heads: u32(h.heads)?,
            kv_heads: u32(h.kv_heads)?,
            head: u32(h.head)?,
            window: rule.window.map_or(u32::MAX, |window| u32::try_from(window).unwrap_or(u32::MAX)),
            both_ways: u32::from(rule.bidirectional),
            vectors: u32::from(h.head.is_multiple_of(piece) && [q, k, v].into_iter().all(in_pieces)),
            q_stride: u32(q.stride)?,
            k_stride: u32(k.stride)?,
            v_stride: u32(v.stride)?,
            scale: rule.scale,
            capped: f32::from(u8::from(cap.is_some())),
            inner: cap.map_or(0.0, |cap| cap.inner),
            outer: cap.map_or(1.0, |cap| cap.outer),
            to_powers,
            ..Sizes::default()
        };
        Ok(Self { device, rule, h, sizes, width, how: Launches::of(width, size_of::<E>()) })
    }

    fn function<E: Format>(&self, kernel: &str, how: Launch) -> Result<Function> {
        let name = format!("attention_{kernel}_{}_{}", E::SUFFIX, self.width);
        E::KERNELS.function(self.device, &name)?.with_shared_memory(how.bytes)
    }

    /// Tiles of `own` positions, which begin where a sequence begins.
    fn tiles(&self, own: usize) -> Result<Tiles> {
        let Some(_) = self.rule.starts else {
            return Ok(Tiles { list: None, count: self.h.batch * self.h.time.div_ceil(own) });
        };
        let spans = self.rule.spans(self.h);
        let of_span = |span: &crate::kernels::attention::Span| {
            let (first, len) = (span.first as u32, span.len as u32);
            (0..len).step_by(own).flat_map(move |start| [first, len, start])
        };
        let list: Vec<u32> = spans.iter().flat_map(of_span).collect();
        Ok(Tiles { count: list.len() / 3, list: Some(self.device.clone_htod(&list)?) })
    }
}

/// The tiles of own rows: {first position of the sequence, its length, first position of the tile}.
struct Tiles {
    /// Nothing where each row is a sequence: kernels know those.
    list: Option<CudaSlice<u32>>,
    count: usize,
}

impl Tiles {
    /// Gives the list to a kernel, or a null pointer.
    fn give<'a>(&'a self, arguments: &mut LaunchArgs<'a>) {
        match &self.list {
            Some(list) => arguments.arg(list),
            None => arguments.arg(&0u64),
        };
    }
}

#[cfg(test)]
mod tests;
