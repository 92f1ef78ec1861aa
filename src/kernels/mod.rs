//! Arithmetic on slices: what the layers, the optimizers and the engine compute with on the CPU.
//!
//! Nothing here knows of tensors. A kernel reads elements of one storage dtype, computes in f32, and rounds a result
//! once when it is stored. SIMD is chosen at run time ([`simd::level`]). Results have the same bits for any number of
//! threads, and a row's result does not depend on how many other rows there are.

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
pub(crate) mod f32_access;
pub(crate) mod gemm;
mod half_conversion;
mod instruction_set;
pub(crate) mod mac_count;
pub(crate) mod math;
pub(crate) mod norm;
pub(crate) mod parallel;
pub(crate) mod pooling;
pub(crate) mod rope;
mod row_reduce;
pub(crate) mod scatter;
pub(crate) mod simd;
pub(crate) mod vector;
mod worker_pool;

pub(crate) use element::Element;
pub use instruction_set::{AUTO, InstructionSet, SIMD, checked_level};

/// A buffer of `len` elements for a kernel that writes all of them; what is in it before is not to be relied on.
pub(crate) fn buffer<E: Element>(len: usize) -> Vec<E> {
    let mut buffer = Vec::with_capacity(len);
    let memory: *mut E = buffer.as_mut_ptr();
    // SAFETY: the vector has this capacity, and any bits are an element ([`Element`] is `Pod`). The assembly, which may write
    // whatever its pointer leads to as far as the compiler knows, stands for having written the bits that are there: clearing
    // memory that is about to be written costs as much as writing it.
    unsafe {
        std::arch::asm!("/* {0} */", in(reg) memory, options(nostack, preserves_flags));
        buffer.set_len(len);
    }
    // In tests, numbers that spoil every result that they enter.
    #[cfg(test)]
    bytemuck::cast_slice_mut::<E, u8>(&mut buffer).fill(0xff);
    buffer
}
