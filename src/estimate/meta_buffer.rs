//! Buffers without memory, used to count sizes.

use crate::error::Result;
use crate::memory::MemoryTier;
use crate::precision::ElementBuffer;
use candle_core::DType;

/// A buffer of a dtype with a length and a capacity, but without memory.
#[derive(Debug, Clone, Copy)]
pub(super) struct MetaBuffer {
    location: MemoryTier,
    dtype: DType,
    len: usize,
    capacity: usize,
}

impl MetaBuffer {
    /// Returns a buffer of `len` elements.
    pub fn with_len(location: MemoryTier, dtype: DType, len: usize) -> Self {
        Self { location, dtype, len, capacity: len }
    }
}

impl ElementBuffer for MetaBuffer {
    type Location = MemoryTier;

    fn host() -> MemoryTier {
        MemoryTier::Host
    }

    fn is_device(location: &MemoryTier) -> bool {
        *location == MemoryTier::Device
    }

    fn with_capacity(location: &MemoryTier, dtype: DType, capacity: usize) -> Result<Self> {
        Ok(Self { location: *location, dtype, len: 0, capacity })
    }

    fn location(&self) -> MemoryTier {
        self.location
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

    fn reserve_exact(&mut self, additional: usize) -> Result<()> {
        self.capacity = self.capacity.max(self.len + additional);
        Ok(())
    }

    fn extend_zeros(&mut self, count: usize) -> Result<()> {
        self.reserve_exact(count)?;
        self.len += count;
        Ok(())
    }

    fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    fn shrink_to_fit(&mut self) -> Result<()> {
        self.capacity = self.len;
        Ok(())
    }

    fn move_to(self, location: &MemoryTier) -> Result<Self> {
        Ok(Self { location: *location, capacity: self.len, ..self })
    }
}
