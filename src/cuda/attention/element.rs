//! The element formats that attention supports.

use crate::cuda::flat_view::DeviceFlatRef;
use crate::cuda::kernel_module::{KernelModule, module};
use candle_core::cuda_backend::CudaStorageSlice;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaView, DeviceRepr};
use half::{bf16, f16};

/// A format for which kernels exist.
pub(super) trait AttentionElement: DeviceRepr + Sized {
    const KERNELS: KernelModule;
    const SUFFIX: &'static str;

    fn of<'a>(elements: &DeviceFlatRef<'a>) -> Option<CudaView<'a, Self>>;
    fn storage(elements: CudaSlice<Self>) -> CudaStorageSlice;
}

macro_rules! element_of {
    ($type:ty, $variant:ident, $suffix:literal, $file:literal) => {
        impl AttentionElement for $type {
            const KERNELS: KernelModule = module!($file);
            const SUFFIX: &'static str = $suffix;

            fn of<'a>(elements: &DeviceFlatRef<'a>) -> Option<CudaView<'a, Self>> {
                if let DeviceFlatRef::$variant(view) = elements { view.try_slice(..) } else { None }
            }

            fn storage(elements: CudaSlice<Self>) -> CudaStorageSlice {
                CudaStorageSlice::$variant(elements)
            }
        }
    };
}
element_of!(f32, F32, "f32", "attention_f32");
element_of!(bf16, BF16, "bf16", "attention_bf16");
element_of!(f16, F16, "f16", "attention_f16");

/// Evaluates an expression that is generic over the element type `$E`, for the format of `$elements`.
macro_rules! of_format {
    ($elements:expr, $E:ident => $body:expr) => {
        match $elements {
            $crate::cuda::DeviceFlatRef::F32(_) => {
                type $E = f32;
                $body
            }
            $crate::cuda::DeviceFlatRef::BF16(_) => {
                type $E = half::bf16;
                $body
            }
            $crate::cuda::DeviceFlatRef::F16(_) => {
                type $E = half::f16;
                $body
            }
        }
    };
}
pub(super) use of_format;
