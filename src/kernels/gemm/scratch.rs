//! Memory for packed operands and partial sums that is kept from one product to the next.

use std::cell::RefCell;

/// A cache line.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct CacheLine {
    _words: [f32; 16],
}

/// Bytes of the largest buffer that is kept: what a product needs beyond that costs little beside the product itself.
const MOST: usize = 16 << 20;

thread_local! {
    /// Buffers of this thread that are not in use. A stack: nested uses put them back in the reverse order, so that
    /// the same use finds the same buffer the next time.
    static FREE: RefCell<Vec<Vec<CacheLine>>> = const { RefCell::new(Vec::new()) };
}

/// Calls `f` with memory for `words` words of 32 bits, aligned to cache lines. What it holds is left from earlier uses.
///
/// A thread that waits for others may meanwhile run another product: it finds, or makes, a further buffer.
pub(super) fn with_words<R>(words: usize, f: impl FnOnce(*mut f32) -> R) -> R {
    let mut buffer = FREE.with_borrow_mut(Vec::pop).unwrap_or_default();
    let lines = words.div_ceil(16);
    if buffer.len() < lines {
        buffer.resize(lines, CacheLine { _words: [0.0; 16] });
    }
    let result = f(buffer.as_mut_ptr().cast());
    if size_of_val(&buffer[..]) > MOST {
        buffer = Vec::new();
    }
    FREE.with_borrow_mut(|free| free.push(buffer));
    result
}

/// Bytes of the buffers of this thread that are not in use.
#[cfg(test)]
pub(super) fn bytes_kept() -> usize {
    FREE.with_borrow(|free| free.iter().map(|buffer| buffer.capacity() * size_of::<CacheLine>()).sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_is_kept_for_the_next_use_unless_it_is_large() {
        // A thread of its own: nothing else has used its buffers.
        let kept = |bytes: usize| {
            let used = std::thread::spawn(move || {
                with_words(bytes / 4, |_| ());
                bytes_kept()
            });
            used.join().expect("no panic")
        };
        assert_eq!((kept(1 << 10), kept(1 << 20), kept(MOST)), (1 << 10, 1 << 20, MOST));
        assert_eq!(kept(MOST + 64), 0);
    }
}
