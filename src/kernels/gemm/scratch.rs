//! Memory for packed operands and partial sums that is kept from one product to the next.

use std::cell::RefCell;

/// A cache line.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line {
    _words: [u32; 16],
}

thread_local! {
    /// Buffers of this thread that are not in use. A stack: nested uses put them back in the reverse order, so that
    /// the same use finds the same buffer the next time.
    static FREE: RefCell<Vec<Vec<Line>>> = const { RefCell::new(Vec::new()) };
}

/// Calls `f` with memory for `words` words of 32 bits, aligned to cache lines. What it holds is left from earlier uses.
///
/// A thread that waits for others may meanwhile run another product: it finds, or makes, a further buffer.
pub(super) fn with_words<R>(words: usize, f: impl FnOnce(*mut u32) -> R) -> R {
    let mut buffer = FREE.with_borrow_mut(Vec::pop).unwrap_or_default();
    let lines = words.div_ceil(16);
    if buffer.len() < lines {
        buffer.resize(lines, Line { _words: [0; 16] });
    }
    let result = f(buffer.as_mut_ptr().cast());
    FREE.with_borrow_mut(|free| free.push(buffer));
    result
}
