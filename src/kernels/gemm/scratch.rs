//! Memory for packed operands and partial sums that is kept between products.

use std::cell::RefCell;

/// A cache line.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct CacheLine {
    _words: [f32; 16],
}

/// The maximum size in bytes of a buffer that is kept. A product that needs a larger one takes so long that the
/// allocation matters little.
const MAX_KEPT_BYTES: usize = 16 << 20;

thread_local! {
    /// The unused buffers of this thread. They form a stack: nested uses return them in reverse order, so that the same
    /// use finds the same buffer the next time.
    static FREE_BUFFERS: RefCell<Vec<Vec<CacheLine>>> = const { RefCell::new(Vec::new()) };
}

/// Calls `f` with memory for `words` 32-bit words, aligned to cache lines. The contents are left over from earlier
/// uses.
///
/// A thread that waits for others may run another product in the meantime. That product finds or allocates another
/// buffer.
pub(super) fn with_words<R>(words: usize, f: impl FnOnce(*mut f32) -> R) -> R {
    let mut buffer = take_buffer(words);
    let result = f(buffer.as_mut_ptr().cast());
    give_back(buffer);
    result
}

fn take_buffer(words: usize) -> Vec<CacheLine> {
    let mut buffer = FREE_BUFFERS.with_borrow_mut(Vec::pop).unwrap_or_default();
    let lines = words.div_ceil(16);
    if buffer.len() < lines {
        buffer.resize(lines, CacheLine { _words: [0.0; 16] });
    }
    buffer
}

fn give_back(mut buffer: Vec<CacheLine>) {
    if size_of_val(&buffer[..]) > MAX_KEPT_BYTES {
        buffer = Vec::new();
    }
    FREE_BUFFERS.with_borrow_mut(|free| free.push(buffer));
}

/// Returns the size in bytes of this thread's unused buffers.
#[cfg(test)]
pub(super) fn bytes_kept() -> usize {
    FREE_BUFFERS.with_borrow(|free| free.iter().map(|buffer| buffer.capacity() * size_of::<CacheLine>()).sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_is_kept_for_the_next_use_unless_it_is_large() {
        // Each call uses a new thread, which has no buffers yet.
        let kept_after = |bytes: usize| {
            let thread = std::thread::spawn(move || {
                with_words(bytes / 4, |_| ());
                bytes_kept()
            });
            thread.join().expect("no panic")
        };
        assert_eq!(
            (kept_after(1 << 10), kept_after(1 << 20), kept_after(MAX_KEPT_BYTES)),
            (1 << 10, 1 << 20, MAX_KEPT_BYTES)
        );
        assert_eq!(kept_after(MAX_KEPT_BYTES + 64), 0);
    }
}
