//! Huge pages for large buffers.
//!
//! A fresh buffer of 4 KiB pages causes a page fault for each page at its first use, which takes longer than the use
//! itself. On request, Linux maps 2 MiB at a time, and streaming through the buffer then also causes fewer TLB misses.

/// The minimum size of buffers for which the system call pays off.
const MIN_BUFFER_BYTES: usize = 4 << 20;

/// Requests huge pages for the capacity of `v`. Only pages that have not been touched yet can become huge, so call this
/// function right after the memory has been allocated.
pub(crate) fn prefer_huge<T>(v: &mut Vec<T>) {
    let bytes = v.capacity() * size_of::<T>();
    if bytes >= MIN_BUFFER_BYTES {
        advise(v.as_mut_ptr().cast(), bytes);
    }
}

#[cfg(target_os = "linux")]
fn advise(start: *mut u8, bytes: usize) {
    /// The size of a huge page on x86-64 and, with 4 KiB pages, on ARM.
    const HUGE_PAGE_BYTES: usize = 2 << 20;
    // The advice covers only full huge pages inside the buffer, so that neighbours on the heap are not affected.
    let skipped = start.align_offset(HUGE_PAGE_BYTES);
    let len = bytes.saturating_sub(skipped) / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES;
    if len > 0 {
        let first = start.wrapping_add(skipped);
        // SAFETY: the range is inside one allocation that the caller owns, and this advice changes no contents. The
        // kernel may refuse it (if it has no huge pages), and then nothing changes.
        let _ = unsafe { rustix::mm::madvise(first.cast(), len, rustix::mm::Advice::LinuxHugepage) };
    }
}

#[cfg(not(target_os = "linux"))]
fn advise(_start: *mut u8, _bytes: usize) {}
