//! Memory that a transfer between files and memory owns.

use crate::memory::Tracked;
use crate::precision::Flat;

/// Memory that a transfer can own.
///
/// # Safety
/// The bytes lie on the heap and stay there when the value moves.
pub(crate) unsafe trait Buffer: Send + 'static {
    /// All of it.
    fn bytes(&mut self) -> &mut [u8];
}

// SAFETY: the bytes are those of a vector.
unsafe impl Buffer for Flat {
    fn bytes(&mut self) -> &mut [u8] {
        self.as_bytes_mut()
    }
}

// SAFETY: the bytes are those of a vector.
unsafe impl Buffer for Tracked {
    fn bytes(&mut self) -> &mut [u8] {
        self.as_bytes_mut()
    }
}
