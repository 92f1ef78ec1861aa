//! Loops compiled for several instruction sets, chosen at run time.
//!
//! The crate is built for the oldest CPU of its architecture, so a vectorized loop uses vectors of four numbers. A
//! [`SimdLoop`] is also compiled for each [`InstructionSet`], and runs at the [`level`] of this process. All levels
//! produce the same bits: the operations on an element are exactly those of the source, and a product and a sum are
//! never fused.

pub(crate) use super::instruction_set::{InstructionSet, level};

/// A loop, with the data that it runs over.
pub(crate) trait SimdLoop {
    /// The type of the loop's result.
    type Output;

    /// Runs the loop. Mark it `#[inline(always)]`, as well as everything that it calls per element: only inlined code
    /// is compiled for the level.
    fn run(self) -> Self::Output;
}

impl InstructionSet {
    /// Runs `l` with the instructions of this level.
    ///
    /// # Panics
    /// Panics if this CPU does not have them.
    #[inline]
    pub(crate) fn run<L: SimdLoop>(self, l: L) -> L::Output {
        assert!(self.is_available(), "this CPU has no {self:?}");
        match self {
            Self::Portable => l.run(),
            // SAFETY: the CPU has the instructions, as asserted above.
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => unsafe { avx2(l) },
            // SAFETY: same as above.
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => unsafe { avx512(l) },
            // The compiler always uses the instructions of this level.
            #[cfg(target_arch = "aarch64")]
            Self::Neon => l.run(),
        }
    }
}

/// Evaluates an expression that is compiled for the SIMD level of this process, together with everything that is
/// inlined into it. Mark functions and closures that it calls `#[inline(always)]`.
macro_rules! vectorized {
    ($body:expr $(,)?) => {
        $crate::kernels::simd::dispatch(
            #[inline(always)]
            || $body,
        )
    };
}
pub(crate) use vectorized;

/// Calls `f` compiled for the SIMD level of this process.
#[inline(always)]
pub(crate) fn dispatch<R>(f: impl FnOnce() -> R) -> R {
    struct CallLoop<F>(F);
    impl<R, F: FnOnce() -> R> SimdLoop for CallLoop<F> {
        type Output = R;
        #[inline(always)]
        fn run(self) -> R {
            (self.0)()
        }
    }
    level().run(CallLoop(f))
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn avx2<L: SimdLoop>(l: L) -> L::Output {
    l.run()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn avx512<L: SimdLoop>(l: L) -> L::Output {
    l.run()
}

/// Prefetches the cache line `ahead` elements after the start of `values`, which may be outside the slice.
#[inline(always)]
pub(crate) fn prefetch<T>(values: &[T], ahead: usize) {
    prefetch_at(values.as_ptr().wrapping_add(ahead));
}

/// Prefetches the cache line of an address, which need not be valid.
#[inline(always)]
pub(crate) fn prefetch_at<T>(address: *const T) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch reads nothing that the program could see and never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

/// Prefetches the cache line of an address that will be written.
#[inline(always)]
pub(crate) fn prefetch_to_write<T>(address: *const T) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_ET0, _mm_prefetch};
        // SAFETY: same as above.
        unsafe { _mm_prefetch::<_MM_HINT_ET0>(address.cast()) }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}
