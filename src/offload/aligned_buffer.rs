//! Page-aligned memory: files are read into it, and written from it, without a copy.

use super::transfer_buffer::TransferBuffer;
use crate::precision::{FlatMut, prefer_huge};
use candle_core::DType;
use std::ops::Range;

/// Offsets and lengths in files, and memory addresses for direct access, are multiples of this many bytes.
pub(crate) const ALIGN: usize = 4096;

/// Zeroed bytes that begin at a multiple of [`ALIGN`].
#[derive(Debug)]
pub(crate) struct AlignedBuffer {
    memory: Vec<u8>,
    range: Range<usize>,
}

impl AlignedBuffer {
    pub fn new(len: usize) -> Self {
        let mut memory = vec![0u8; len + ALIGN - 1];
        prefer_huge(&mut memory);
        let skipped = memory.as_ptr().align_offset(ALIGN);
        Self { memory, range: skipped..skipped + len }
    }

    pub fn len(&self) -> usize {
        self.range.len()
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.range.clone()]
    }

    /// Returns elements `range` of the buffer, interpreted as numbers of `dtype`.
    pub fn elements(&mut self, dtype: DType, range: Range<usize>) -> FlatMut<'_> {
        let size = dtype.size_in_bytes();
        let bytes = &mut self.bytes_mut()[range.start * size..range.end * size];
        match dtype {
            DType::F32 => FlatMut::F32(bytemuck::cast_slice_mut(bytes)),
            DType::BF16 => FlatMut::BF16(bytemuck::cast_slice_mut(bytes)),
            DType::F16 => FlatMut::F16(bytemuck::cast_slice_mut(bytes)),
            other => panic!("files hold f32, bf16 or f16, not {other:?}"),
        }
    }
}

// SAFETY: the bytes are on the heap and stay there when the value moves.
unsafe impl TransferBuffer for AlignedBuffer {
    fn bytes(&mut self) -> &mut [u8] {
        self.bytes_mut()
    }
}
