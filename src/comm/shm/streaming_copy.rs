//! Copies of data that is too large to stay in cache.

use std::mem::MaybeUninit;

/// Copies `src` to `dst`, which must have the same length. With `bypass_caches`, the stores bypass the caches on
/// x86-64: a plain store first reads the line that it overwrites, and may evict another line that is still useful.
pub(in crate::comm) fn copy(dst: &mut [MaybeUninit<u8>], src: &[u8], bypass_caches: bool) {
    assert_eq!(dst.len(), src.len(), "a copy between buffers of different lengths");
    #[cfg(target_arch = "x86_64")]
    if bypass_caches {
        // SAFETY: checked above to have equal lengths; references do not overlap if one of them is mutable.
        return unsafe { stream(dst.as_mut_ptr().cast(), src.as_ptr(), src.len()) };
    }
    let _ = bypass_caches;
    dst.write_copy_of_slice(src);
}

/// # Safety
/// `src` must be readable and `dst` writable for `len` bytes, and they must not overlap.
#[cfg(target_arch = "x86_64")]
unsafe fn stream(dst: *mut u8, src: *const u8, len: usize) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};
    const LINE: usize = 64;
    let head = dst.align_offset(LINE).min(len);
    let lines = (len - head) / LINE;
    let tail = head + lines * LINE;
    // SAFETY: all offsets are below `len`, and the streaming stores go to addresses that are multiples of 64.
    unsafe {
        std::ptr::copy_nonoverlapping(src, dst, head);
        for at in (head..tail).step_by(LINE) {
            let (from, to) = (src.add(at).cast::<__m128i>(), dst.add(at).cast::<__m128i>());
            let line = [0, 1, 2, 3].map(|i| _mm_loadu_si128(from.add(i)));
            line.into_iter().enumerate().for_each(|(i, part)| _mm_stream_si128(to.add(i), part));
        }
        std::ptr::copy_nonoverlapping(src.add(tail), dst.add(tail), len - tail);
        // Streaming stores are not ordered with other stores; a thread that receives `dst` must find them completed.
        _mm_sfence();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_arrives_wherever_it_lies() {
        let src: Vec<u8> = (0..1000).map(|i| (i * 7 % 251) as u8).collect();
        for (bypass_caches, from, to, len) in
            [(false, 0, 0, 1000), (true, 0, 0, 1000), (true, 3, 5, 700), (true, 1, 63, 2)]
        {
            let mut dst = [MaybeUninit::new(0xff); 1100];
            copy(&mut dst[to..to + len], &src[from..from + len], bypass_caches);
            // SAFETY: all bytes are initialized.
            let dst = dst.map(|byte| unsafe { byte.assume_init() });
            assert_eq!(dst[to..to + len], src[from..from + len]);
            assert!(dst[..to].iter().chain(&dst[to + len..]).all(|byte| *byte == 0xff));
        }
    }
}
