//! Memory that a transfer to or from a file owns.

use crate::memory::TrackedBuffer;
use crate::precision::Flat;

/// Memory that a transfer can own.
///
/// # Safety
/// The bytes must be on the heap and stay there when the value moves.
pub(crate) unsafe trait TransferBuffer: Send + 'static {
    /// Returns all bytes.
    fn bytes(&mut self) -> &mut [u8];
}

// SAFETY: the bytes are those of a vector, which are on the heap.
unsafe impl TransferBuffer for Flat {
    fn bytes(&mut self) -> &mut [u8] {
        self.as_bytes_mut()
    }
}

// SAFETY: the bytes are those of a vector, which are on the heap.
unsafe impl TransferBuffer for TrackedBuffer {
    fn bytes(&mut self) -> &mut [u8] {
        self.as_bytes_mut()
    }
}
