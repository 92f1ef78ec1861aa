//! Big pages for big buffers.
//!
//! A fresh buffer of 4 KiB pages costs a page fault for each of them at its first use, which takes longer than the use.
//! Linux maps 2 MiB at a time where it is asked to, and a stream through the buffer then also misses the TLB less.

/// Buffers from this size on are worth a system call.
const MIN_BYTES: usize = 4 << 20;

/// Asks for big pages behind the room of `v`. Only pages that are touched from now on can become big: call this on
/// memory that was just allocated.
pub(crate) fn prefer_huge<T>(v: &mut Vec<T>) {
    let bytes = v.capacity() * size_of::<T>();
    if bytes >= MIN_BYTES {
        advise(v.as_mut_ptr().cast(), bytes);
    }
}

#[cfg(target_os = "linux")]
fn advise(start: *mut u8, bytes: usize) {
    /// The size of a big page on x86-64 and, with 4 KiB pages, on ARM.
    const HUGE: usize = 2 << 20;
    // Whole big pages inside the buffer, so that no neighbour on the heap is concerned.
    let skipped = start.align_offset(HUGE);
    let len = bytes.saturating_sub(skipped) / HUGE * HUGE;
    if len > 0 {
        let first = start.wrapping_add(skipped);
        // SAFETY: the range is inside one allocation that the caller owns, and this advice changes no contents.
        // It may be refused (a kernel without big pages), which leaves things as they are.
        let _ = unsafe { rustix::mm::madvise(first.cast(), len, rustix::mm::Advice::LinuxHugepage) };
    }
}

#[cfg(not(target_os = "linux"))]
fn advise(_start: *mut u8, _bytes: usize) {}
