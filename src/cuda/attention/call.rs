//! The arguments that the kernel launches of one attention call share: sizes, strides and tiles.

use super::element::AttentionElement;
use super::tile_sizes::{self, AttentionTileSizes, BlockAndTileSizes};
use crate::cuda::kernel_module::KernelFunction;
use crate::kernels::attention::{AttentionRule, AttentionShape, SequenceSpan};
use crate::util::counted;
use candle_core::cuda_backend::cudarc::driver::{
    CudaSlice, CudaView, DevicePtr, DeviceRepr, LaunchArgs, PushKernelArg,
};
use candle_core::{CudaDevice, Result};

/// Queries, keys or values. They start at the first element of a view, and each position is `stride` elements
/// after the previous one.
#[derive(Debug)]
pub(super) struct DeviceHeadRows<'a, E> {
    pub values: CudaView<'a, E>,
    pub stride: usize,
}

/// The sizes of an attention call. kernels/attention.cuh has the same struct.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct AttentionSizes {
    time: u32,
    rows: u32,
    heads: u32,
    kv_heads: u32,
    head: u32,
    window: u32,
    both_ways: u32,
    pub vectors: u32,
    q_stride: u32,
    k_stride: u32,
    v_stride: u32,
    pub dq_stride: u32,
    pub dk_stride: u32,
    pub dv_stride: u32,
    scale: f32,
    capped: f32,
    inner: f32,
    outer: f32,
    to_powers: f32,
}

// SAFETY: the struct has C's layout without padding, and any bits are valid values of its fields.
unsafe impl DeviceRepr for AttentionSizes {}

/// The common part of the kernel launches of one attention call.
pub(super) struct AttentionCall<'a> {
    device: &'a CudaDevice,
    rule: &'a AttentionRule<'a>,
    h: &'a AttentionShape,
    pub sizes: AttentionSizes,
    width: usize,
    pub tile_sizes: AttentionTileSizes,
}

impl<'a> AttentionCall<'a> {
    /// Checks the sizes and chooses those of blocks and tiles.
    ///
    /// # Panics
    /// Panics if rows are not within their views.
    pub fn new<E: AttentionElement>(
        device: &'a CudaDevice,
        (h, rule): (&'a AttentionShape, &'a AttentionRule<'a>),
        rows: [&DeviceHeadRows<'_, E>; 3],
    ) -> Result<Self> {
        let Some(width) = tile_sizes::width(h.head) else {
            candle_core::bail!(
                "attention: heads have {} elements, but the GPU kernels support at most {}",
                h.head,
                tile_sizes::WIDTHS[4]
            )
        };
        let [q, k, v] = rows;
        for (rows, heads) in [(q, h.heads), (k, h.kv_heads), (v, h.kv_heads)] {
            let end = (h.batch * h.time - 1) * rows.stride + heads * h.head;
            assert!(
                end <= rows.values.len() && heads * h.head <= rows.stride,
                "{h:?}: {}",
                counted(rows.values.len(), "element")
            );
        }
        let stream = device.cuda_stream();
        let piece = 16 / size_of::<E>();
        let in_pieces = |rows: &DeviceHeadRows<'_, E>| {
            rows.stride.is_multiple_of(piece) && rows.values.device_ptr(&stream).0.is_multiple_of(16)
        };
        let (to_powers, cap) = rule.to_powers();
        let u32 = |n: usize| u32::try_from(n).map_err(candle_core::Error::wrap);
        let sizes = AttentionSizes {
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
            ..AttentionSizes::default()
        };
        Ok(Self { device, rule, h, sizes, width, tile_sizes: AttentionTileSizes::of(width, size_of::<E>()) })
    }

    pub fn function<E: AttentionElement>(&self, kernel: &str, block: BlockAndTileSizes) -> Result<KernelFunction> {
        let name = format!("attention_{kernel}_{}_{}", E::SUFFIX, self.width);
        E::KERNELS.function(self.device, &name)?.with_shared_memory(block.bytes)
    }

    /// Returns the tiles of `tile_len` positions, counted from the start of each sequence.
    pub fn tiles(&self, tile_len: usize) -> Result<TileTable> {
        let Some(_) = self.rule.starts else {
            return Ok(TileTable { list: None, count: self.h.batch * self.h.time.div_ceil(tile_len) });
        };
        let spans = self.rule.spans(self.h);
        let of_span = |span: &SequenceSpan| {
            let (first, len) = (span.first as u32, span.len as u32);
            (0..len).step_by(tile_len).flat_map(move |start| [first, len, start])
        };
        let list: Vec<u32> = spans.iter().flat_map(of_span).collect();
        Ok(TileTable { count: list.len() / 3, list: Some(self.device.clone_htod(&list)?) })
    }
}

/// The tiles of rows that blocks own, each as {first position of the sequence, length of the sequence, first position
/// of the tile within the sequence}.
pub(super) struct TileTable {
    /// The list of tiles, or `None` if each row of the batch is one sequence: the kernels then compute the tiles
    /// themselves.
    list: Option<CudaSlice<u32>>,
    pub count: usize,
}

impl TileTable {
    /// Passes the list, or a null pointer, to a kernel.
    pub fn pass_to<'a>(&'a self, arguments: &mut LaunchArgs<'a>) {
        match &self.list {
            Some(list) => arguments.arg(list),
            None => arguments.arg(&0u64),
        };
    }
}
