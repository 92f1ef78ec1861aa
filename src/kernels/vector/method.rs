//! Which vectors and words a level of SIMD takes.

use crate::kernels::element::Element;
#[cfg(target_arch = "x86_64")]
use crate::kernels::element::Kind;
use crate::kernels::level::Level;

/// A way to compute products: vectors of a level, and the words that they multiply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Method {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// Words of two bf16.
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16,
    #[cfg(target_arch = "aarch64")]
    Neon,
}

impl Method {
    /// The method of a level that this processor has, for operands of a dtype.
    pub(crate) fn of<E: Element>(level: Level) -> Self {
        match level {
            Level::Portable => Self::Portable,
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => Self::Avx2,
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 if E::KIND == Kind::BF16 && is_x86_feature_detected!("avx512bf16") => Self::Avx512Bf16,
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => Self::Avx512,
            #[cfg(target_arch = "aarch64")]
            Level::Neon => Self::Neon,
        }
    }
}

/// Evaluates `$body` with `$Words` as the words of `$method`.
macro_rules! with_words_of {
    ($method:expr, $Words:ident => $body:expr) => {
        match $method {
            $crate::kernels::vector::Method::Portable => {
                type $Words = $crate::kernels::vector::Single<$crate::kernels::vector::Portable>;
                $body
            }
            #[cfg(target_arch = "x86_64")]
            $crate::kernels::vector::Method::Avx2 => {
                type $Words = $crate::kernels::vector::Single<$crate::kernels::vector::Avx2>;
                $body
            }
            #[cfg(target_arch = "x86_64")]
            $crate::kernels::vector::Method::Avx512 => {
                type $Words = $crate::kernels::vector::Single<$crate::kernels::vector::Avx512>;
                $body
            }
            #[cfg(target_arch = "x86_64")]
            $crate::kernels::vector::Method::Avx512Bf16 => {
                type $Words = $crate::kernels::vector::Pairs;
                $body
            }
            #[cfg(target_arch = "aarch64")]
            $crate::kernels::vector::Method::Neon => {
                type $Words = $crate::kernels::vector::Single<$crate::kernels::vector::Neon>;
                $body
            }
        }
    };
}
pub(crate) use with_words_of;
