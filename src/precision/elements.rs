//! The part of a buffer that decisions depend on: dtype, length and capacity, without the values.

use super::{Flat, FlatMut, FlatRef};
use candle_core::DType;
use std::ops::Range;

/// Elements of one dtype: in memory, or only counted. Only counted ones have no values.
pub(crate) trait Elements: Sized {
    /// No elements, and room for `capacity` of them.
    fn with_capacity(dtype: DType, capacity: usize) -> Self;
    fn dtype(&self) -> DType;
    fn len(&self) -> usize;
    fn capacity_in_bytes(&self) -> usize;
    /// Makes room for exactly `more` elements, if there is less.
    fn reserve_exact(&mut self, more: usize);
    fn extend_zeros(&mut self, count: usize);
    fn truncate(&mut self, len: usize);
    fn shrink_to_fit(&mut self);

    fn values(&self) -> Option<FlatRef<'_>> {
        None
    }

    fn values_mut(&mut self) -> Option<FlatMut<'_>> {
        None
    }

    /// Appends elements; of counted ones, their number.
    fn extend_cast(&mut self, values: FlatRef<'_>) {
        self.extend_zeros(values.len());
    }

    /// `len` zeros.
    fn zeros(dtype: DType, len: usize) -> Self {
        let mut zeros = Self::with_capacity(dtype, len);
        zeros.extend_zeros(len);
        zeros
    }

    /// Appends elements `range` of another buffer.
    fn extend_from(&mut self, from: &Self, range: Range<usize>) {
        match from.values() {
            Some(values) => self.extend_cast(values.slice(range)),
            None => self.extend_zeros(range.len()),
        }
    }
}

impl Elements for Flat {
    fn with_capacity(dtype: DType, capacity: usize) -> Self {
        Self::with_capacity(dtype, capacity)
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

    fn extend_cast(&mut self, values: FlatRef<'_>) {
        self.extend_cast(values);
    }

    fn zeros(dtype: DType, len: usize) -> Self {
        Self::zeros(dtype, len)
    }
}
