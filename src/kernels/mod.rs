//! Arithmetic on slices, used by the layers, the optimizers and the engine on the CPU.
//!
//! Nothing in this module depends on tensors. A kernel reads elements of one storage dtype, computes in f32, and rounds
//! a result once when it is stored. The SIMD level is chosen at run time (`simd::level`). Results have the same bits
//! for any number of threads, and the result of a row does not depend on the number of other rows.

pub(crate) mod activation;
pub(crate) mod add;
pub(crate) mod attention;
pub(crate) mod batch_norm;
pub(crate) mod convolution;
pub(crate) mod cross_entropy;
pub(crate) mod digest;
pub(crate) mod dropout;
pub(crate) mod element;
pub(crate) mod embedding;
pub mod error;
pub(crate) mod expert_combine;
pub(crate) mod f32_access;
pub(crate) mod gate_up_activation;
pub(crate) mod gemm;
mod half_conversion;
mod instruction_set;
pub(crate) mod mac_count;
pub(crate) mod math;
pub(crate) mod norm;
pub(crate) mod parallel;
pub(crate) mod pooling;
pub(crate) mod rope;
pub(crate) mod routing;
mod row_reduce;
pub(crate) mod scatter;
pub(crate) mod simd;
pub(crate) mod vector;
mod worker_pool;

pub(crate) use element::Element;
pub use instruction_set::{AUTO, InstructionSet, SIMD, checked_level};

/// Returns a buffer of `len` elements for a kernel that overwrites all of them. Its initial contents are arbitrary.
pub(crate) fn buffer<E: Element>(len: usize) -> Vec<E> {
    let mut buffer = Vec::with_capacity(len);
    let memory: *mut E = buffer.as_mut_ptr();
    // SAFETY: the vector has this capacity, and any bit pattern is a valid element ([`Element`] is `Pod`). As far as
    // the compiler knows, the assembly may write to the memory behind its pointer, so the existing bits count as
    // written by it. Clearing memory that is about to be overwritten costs as much as writing it.
    unsafe {
        if !cfg!(miri) {
            std::arch::asm!("/* {0} */", in(reg) memory, options(nostack, preserves_flags));
        }
        buffer.set_len(len);
    }
    // In tests, the buffer is filled with NaN, which spoils every result that depends on it. Miri runs no assembly and
    // keeps the memory uninitialized: it reports every read of memory that has not been written.
    #[cfg(all(test, not(miri)))]
    bytemuck::cast_slice_mut::<E, u8>(&mut buffer).fill(0xff);
    buffer
}

/// Returns the step size with which tests that have very many cases go through these cases: 1, or 4 on an emulated
/// processor, which would take minutes for all of them.
#[cfg(test)]
fn case_step() -> usize {
    if std::env::var_os("CANDLE_ZERO_TEST_EMULATED").is_some() { 4 } else { 1 }
}
