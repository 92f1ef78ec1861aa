//! Buffers without memory.

use crate::precision::{Elements, FlatMut, FlatRef};
use candle_core::DType;

/// So many elements of a dtype, and room for so many, of which none is there.
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

    fn zeros(dtype: DType, len: usize) -> Self {
        Self { dtype, len, capacity: len }
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

    fn extend_cast(&mut self, values: FlatRef<'_>) {
        self.extend_zeros(values.len());
    }

    fn extend_zeros(&mut self, count: usize) {
        self.len += count;
        self.capacity = self.capacity.max(self.len);
    }

    fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    fn shrink_to_fit(&mut self) {
        self.capacity = self.len;
    }

    fn values(&self) -> Option<FlatRef<'_>> {
        None
    }

    fn values_mut(&mut self) -> Option<FlatMut<'_>> {
        None
    }
}
