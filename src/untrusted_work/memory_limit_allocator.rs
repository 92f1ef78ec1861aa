//! An allocator that counts the memory of sandboxed work.

use super::signals;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicIsize, Ordering};

/// The system's allocator, with a bound on the memory for work on untrusted files: a chat template, a tokenizer, a
/// Parquet file. When the bound is exceeded, the process ends with an error.
#[derive(Debug, Clone, Copy)]
pub struct SandboxAllocator;

/// The number of bytes that a thread counts before it adds them to [`HELD_BYTES`].
const LOCAL_COUNT_BYTES: isize = 256 << 10;

/// The number of bytes held by all sandboxed work, updated in steps of at least [`LOCAL_COUNT_BYTES`].
static HELD_BYTES: AtomicIsize = AtomicIsize::new(0);

/// The allocations of this thread's work.
#[derive(Clone, Copy)]
struct ThreadAllocations {
    /// The maximum number of bytes of all sandboxed work; `None` outside such work.
    limit: Option<usize>,
    /// The bytes not yet counted in [`HELD_BYTES`].
    pending: isize,
    /// This work's part of [`HELD_BYTES`].
    held: isize,
}

thread_local! {
    static THREAD_ALLOCATIONS: Cell<ThreadAllocations> = const { Cell::new(ThreadAllocations { limit: None, pending: 0, held: 0 }) };
}

pub(super) fn enter(limit: usize) {
    THREAD_ALLOCATIONS.set(ThreadAllocations { limit: Some(limit), pending: 0, held: 0 });
}

pub(super) fn leave() {
    let account = THREAD_ALLOCATIONS.replace(ThreadAllocations { limit: None, pending: 0, held: 0 });
    HELD_BYTES.fetch_sub(account.held, Ordering::Relaxed);
}

/// Counts `bytes` more, or fewer if negative.
fn count(bytes: isize) {
    // A thread that is ending no longer has this thread-local value.
    _ = THREAD_ALLOCATIONS.try_with(|cell| {
        let mut account = cell.get();
        let Some(limit) = account.limit else { return };
        account.pending = account.pending.saturating_add(bytes);
        if account.pending.abs() >= LOCAL_COUNT_BYTES {
            let pending = account.pending;
            account.held = account.held.saturating_add(pending);
            account.pending = 0;
            let held = HELD_BYTES.fetch_add(pending, Ordering::Relaxed).saturating_add(pending);
            if pending > 0 && held > limit.cast_signed() {
                signals::end_of_work(" needs too much memory");
            }
        }
        cell.set(account);
    });
}

fn size(layout: Layout) -> isize {
    // No layout is larger than `isize::MAX`.
    layout.size().cast_signed()
}

// SAFETY: all calls go to the system's allocator; counting allocates nothing, and ends the process or returns.
unsafe impl GlobalAlloc for SandboxAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(size(layout));
        // SAFETY: the caller upholds this function's contract.
        record_failure(unsafe { System.alloc(layout) })
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(size(layout));
        // SAFETY: the caller upholds this function's contract.
        record_failure(unsafe { System.alloc_zeroed(layout) })
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        count(new_size.cast_signed().saturating_sub(size(layout)));
        // SAFETY: the caller upholds this function's contract.
        record_failure(unsafe { System.realloc(pointer, layout, new_size) })
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-size(layout));
        // SAFETY: the caller upholds this function's contract.
        unsafe { System.dealloc(pointer, layout) };
    }
}

/// Records that an allocation failed, for the abort that follows if the caller does not handle it.
fn record_failure(pointer: *mut u8) -> *mut u8 {
    if pointer.is_null() {
        signals::no_memory();
    }
    pointer
}
