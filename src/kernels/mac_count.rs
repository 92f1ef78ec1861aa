//! Counts the multiply-adds of matrix products, convolutions and attention on the thread that requests them.
//!
//! The cost is one addition per call of a kernel, on the calling thread. The threads that do the computing count
//! nothing.

use std::cell::Cell;

thread_local! {
    static MACS: Cell<u64> = const { Cell::new(0) };
}

/// Counts the multiply-adds that a kernel is about to compute: the product of all `sizes`.
pub(super) fn add<const N: usize>(sizes: [usize; N]) {
    let macs = sizes.iter().map(|size| *size as u64).product::<u64>();
    MACS.set(MACS.get().wrapping_add(macs));
}

/// Runs `run`, whose tasks request multiply-adds on any threads, and counts their total on this thread: the product of
/// all `sizes`.
pub(crate) fn on_this_thread<const N: usize>(sizes: [usize; N], run: impl FnOnce()) {
    let before = MACS.get();
    run();
    MACS.set(before);
    add(sizes);
}

/// Returns the number of multiply-adds that this thread has requested since it started.
pub(crate) fn macs() -> u64 {
    MACS.get()
}
