//! The choice of vectors and words for a SIMD level.

use crate::kernels::element::Element;
#[cfg(target_arch = "x86_64")]
use crate::kernels::element::ElementDtype;
use crate::kernels::instruction_set::InstructionSet;

/// A method of computing products: the vectors of a level, and the words that they multiply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SimdMethod {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// Words of two bf16 values.
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16,
    #[cfg(target_arch = "aarch64")]
    Neon,
}

impl SimdMethod {
    /// Returns the method of a level that this processor has, for operands of a dtype.
    pub(crate) fn of<E: Element>(level: InstructionSet) -> Self {
        match level {
            InstructionSet::Portable => Self::Portable,
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx2 => Self::Avx2,
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx512 if E::KIND == ElementDtype::BF16 && level.is_faster_in_bf16() => Self::Avx512Bf16,
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx512 => Self::Avx512,
            #[cfg(target_arch = "aarch64")]
            InstructionSet::Neon => Self::Neon,
        }
    }

    /// Returns every method that this processor has for operands of a dtype, including the portable one.
    #[cfg(test)]
    pub(crate) fn available<E: Element>() -> Vec<Self> {
        #[cfg_attr(not(target_arch = "x86_64"), allow(unused_mut, reason = "each level has one method"))]
        let mut methods: Vec<Self> = InstructionSet::available().map(Self::of::<f32>).collect();
        #[cfg(target_arch = "x86_64")]
        if E::KIND == ElementDtype::BF16 && methods.contains(&Self::Avx512) && is_x86_feature_detected!("avx512bf16") {
            methods.push(Self::Avx512Bf16);
        }
        methods
    }
}

/// Evaluates `$body` with `$Words` as the words of `$method`.
macro_rules! with_words_of {
    ($method:expr, $Words:ident => $body:expr) => {
        match $method {
            $crate::kernels::vector::SimdMethod::Portable => {
                type $Words = $crate::kernels::vector::F32Words<$crate::kernels::vector::PortableVector>;
                $body
            }
            #[cfg(target_arch = "x86_64")]
            $crate::kernels::vector::SimdMethod::Avx2 => {
                type $Words = $crate::kernels::vector::F32Words<$crate::kernels::vector::Avx2>;
                $body
            }
            #[cfg(target_arch = "x86_64")]
            $crate::kernels::vector::SimdMethod::Avx512 => {
                type $Words = $crate::kernels::vector::F32Words<$crate::kernels::vector::Avx512>;
                $body
            }
            #[cfg(target_arch = "x86_64")]
            $crate::kernels::vector::SimdMethod::Avx512Bf16 => {
                type $Words = $crate::kernels::vector::Bf16PairWords;
                $body
            }
            #[cfg(target_arch = "aarch64")]
            $crate::kernels::vector::SimdMethod::Neon => {
                type $Words = $crate::kernels::vector::F32Words<$crate::kernels::vector::Neon>;
                $body
            }
        }
    };
}
pub(crate) use with_words_of;
