//! Buffers without memory.

use crate::precision::Elements;
use candle_core::DType;

/// A number of elements of a dtype, and room for a number of them, without memory for any.
#[derive(Debug, Clone, Copy)]
pub(super) struct Blank {
    dtype: DType,
    len: usize,
    capacity: usize,
}

impl Elements for Blank {
    fn with_capacity(dtype: DType, capacity: usize) -> Self {
        Self { dtype, len: 0, capacity }
    }

    fn dtype(&self) -> DType {
        self.dtype
    }

    fn len(&self) -> usize {
        self.len
    }

    fn capacity_in_bytes(&self) -> usize {
        self.capacity * self.dtype.size_in_bytes()
    }

    fn reserve_exact(&mut self, more: usize) {
        self.capacity = self.capacity.max(self.len + more);
    }

    fn extend_zeros(&mut self, count: usize) {
        self.reserve_exact(count);
        self.len += count;
    }

    fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    fn shrink_to_fit(&mut self) {
        self.capacity = self.len;
    }
}
