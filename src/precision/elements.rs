//! The part of a buffer that decisions depend on: dtype, length and capacity, without the values.

use super::{Flat, FlatMut, FlatRef};
use candle_core::DType;

/// Elements of one dtype: in memory, or only counted.
pub(crate) trait Elements: Sized {
    /// No elements, and room for `capacity` of them.
    fn with_capacity(dtype: DType, capacity: usize) -> Self;
    /// As many zeros.
    fn zeros(dtype: DType, len: usize) -> Self;
    fn dtype(&self) -> DType;
    fn len(&self) -> usize;
    fn capacity_in_bytes(&self) -> usize;
    fn reserve_exact(&mut self, more: usize);
    fn extend_cast(&mut self, values: FlatRef<'_>);
    fn extend_zeros(&mut self, count: usize);
    fn truncate(&mut self, len: usize);
    fn shrink_to_fit(&mut self);
    /// The values; `None` where elements are only counted.
    fn values(&self) -> Option<FlatRef<'_>>;
    /// The same, writable.
    fn values_mut(&mut self) -> Option<FlatMut<'_>>;
}

impl Elements for Flat {
    fn with_capacity(dtype: DType, capacity: usize) -> Self {
        Self::with_capacity(dtype, capacity)
    }

    fn zeros(dtype: DType, len: usize) -> Self {
        Self::zeros(dtype, len)
    }

    fn dtype(&self) -> DType {
        self.dtype()
    }

    fn len(&self) -> usize {
        self.len()
    }

    fn capacity_in_bytes(&self) -> usize {
        self.capacity_in_bytes()
    }

    fn reserve_exact(&mut self, more: usize) {
        self.reserve_exact(more);
    }

    fn extend_cast(&mut self, values: FlatRef<'_>) {
        self.extend_cast(values);
    }

    fn extend_zeros(&mut self, count: usize) {
        self.extend_zeros(count);
    }

    fn truncate(&mut self, len: usize) {
        self.truncate(len);
    }

    fn shrink_to_fit(&mut self) {
        self.shrink_to_fit();
    }

    fn values(&self) -> Option<FlatRef<'_>> {
        Some(self.as_ref())
    }

    fn values_mut(&mut self) -> Option<FlatMut<'_>> {
        Some(self.as_mut())
    }
}
