//! A buffer whose values may be absent, for code whose decisions depend only on the buffer's dtype, length and
//! capacity.

use super::{Flat, FlatMut, FlatRef, sum_of_squares};
use crate::error::Result;
use candle_core::DType;
use std::ops::Range;

/// Elements of one dtype on the host, in a GPU's memory, or only counted. Only elements on the host have readable
/// values.
pub(crate) trait ElementBuffer: Sized {
    /// The type of a memory location.
    type Location: Clone;

    /// Returns the host's memory.
    fn host() -> Self::Location;
    /// Returns whether a location is a GPU's memory.
    fn is_device(location: &Self::Location) -> bool;
    /// Creates an empty buffer with room for `capacity` elements.
    ///
    /// # Errors
    /// Returns an error if a GPU is out of memory.
    fn with_capacity(location: &Self::Location, dtype: DType, capacity: usize) -> Result<Self>;
    fn location(&self) -> Self::Location;
    fn dtype(&self) -> DType;
    fn len(&self) -> usize;
    fn capacity_in_bytes(&self) -> usize;
    /// Makes room for exactly `more` further elements, if there is room for fewer.
    fn reserve_exact(&mut self, more: usize) -> Result<()>;
    fn extend_zeros(&mut self, count: usize) -> Result<()>;
    fn truncate(&mut self, len: usize);
    fn shrink_to_fit(&mut self) -> Result<()>;
    /// Moves the elements to another location.
    fn move_to(self, location: &Self::Location) -> Result<Self>;

    fn values(&self) -> Option<FlatRef<'_>> {
        None
    }

    fn values_mut(&mut self) -> Option<FlatMut<'_>> {
        None
    }

    /// Appends elements. A counted buffer only adds their number.
    fn extend_cast(&mut self, values: FlatRef<'_>) -> Result<()> {
        self.extend_zeros(values.len())
    }

    /// Creates a buffer of `len` zeros.
    fn zeros(location: &Self::Location, dtype: DType, len: usize) -> Result<Self> {
        let mut zeros = Self::with_capacity(location, dtype, len)?;
        zeros.extend_zeros(len)?;
        Ok(zeros)
    }

    /// Appends elements `range` of another buffer in the same memory.
    fn extend_from(&mut self, source: &Self, range: Range<usize>) -> Result<()> {
        match source.values() {
            Some(values) => self.extend_cast(values.slice(range)),
            None => self.extend_zeros(range.len()),
        }
    }

    /// Multiplies all elements by `factor` in f32, and rounds once.
    fn scale(&mut self, factor: f32) -> Result<()> {
        self.values_mut().into_iter().for_each(|values| values.scale(factor));
        Ok(())
    }

    /// Adds elements `range` of `other`, multiplied by `factor`, to the elements of this buffer that begin at index
    /// `start`, in f32 and rounded once. `other` must be in the same memory.
    fn add_scaled(&mut self, start: usize, other: &Self, range: Range<usize>, factor: f32) -> Result<()> {
        if let (Some(sum), Some(values)) = (self.values_mut(), other.values()) {
            sum.slice(start..start + range.len()).add_scaled(values.slice(range), factor);
        }
        Ok(())
    }

    /// Returns sums of the squares of elements, computed like [`sum_of_squares`], and 0 for elements that are only
    /// counted.
    fn sums_of_squares(parts: &[(&Self, Range<usize>)]) -> Result<Vec<f64>> {
        let sum = |(buffer, range): &(&Self, Range<usize>)| {
            buffer.values().map_or(0.0, |values| sum_of_squares(values.slice(range.clone())))
        };
        Ok(parts.iter().map(sum).collect())
    }
}

impl ElementBuffer for Flat {
    type Location = ();

    fn host() {}

    fn is_device((): &()) -> bool {
        false
    }

    fn with_capacity((): &(), dtype: DType, capacity: usize) -> Result<Self> {
        Ok(Self::with_capacity(dtype, capacity))
    }

    fn location(&self) {}

    fn dtype(&self) -> DType {
        self.dtype()
    }

    fn len(&self) -> usize {
        self.len()
    }

    fn capacity_in_bytes(&self) -> usize {
        self.capacity_in_bytes()
    }

    fn reserve_exact(&mut self, more: usize) -> Result<()> {
        self.reserve_exact(more);
        Ok(())
    }

    fn extend_zeros(&mut self, count: usize) -> Result<()> {
        self.extend_zeros(count);
        Ok(())
    }

    fn truncate(&mut self, len: usize) {
        self.truncate(len);
    }

    fn shrink_to_fit(&mut self) -> Result<()> {
        self.shrink_to_fit();
        Ok(())
    }

    fn move_to(self, (): &()) -> Result<Self> {
        Ok(self)
    }

    fn values(&self) -> Option<FlatRef<'_>> {
        Some(self.as_ref())
    }

    fn values_mut(&mut self) -> Option<FlatMut<'_>> {
        Some(self.as_mut())
    }

    fn extend_cast(&mut self, values: FlatRef<'_>) -> Result<()> {
        self.extend_cast(values);
        Ok(())
    }
}
