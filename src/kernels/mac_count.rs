//! Multiplications of matrix products and of attention, counted where they are asked for.
//!
//! One addition per call of a kernel, on the thread that calls it: the threads that compute need not know.

use std::cell::Cell;

thread_local! {
    static MACS: Cell<u64> = const { Cell::new(0) };
}

/// A kernel is about to make the product of all `sizes` multiply-adds.
pub(super) fn add<const N: usize>(sizes: [usize; N]) {
    let macs = sizes.iter().map(|size| *size as u64).product::<u64>();
    MACS.set(MACS.get().wrapping_add(macs));
}

/// Runs what makes the products of all `sizes` in tasks, each of which asks for its own on some thread: they count here.
pub(crate) fn on_this_thread<const N: usize>(sizes: [usize; N], run: impl FnOnce()) {
    let before = MACS.get();
    run();
    MACS.set(before);
    add(sizes);
}

/// The operations that this thread has asked for since it began.
pub(crate) fn macs() -> u64 {
    MACS.get()
}
