//! Kernels by their names, loaded into a device when they are first used.

use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::sys::CUfunction_attribute;
use candle_core::cuda_backend::cudarc::driver::{CudaFunction, CudaStream, LaunchArgs, LaunchConfig};
use candle_core::{CudaDevice, DType, Result};
use std::sync::Arc;

/// Threads of a block where each takes elements of its own.
const THREADS: u32 = 256;
/// The most blocks of such a launch: enough for every processor of a GPU to have several.
const MOST_BLOCKS: usize = 2048;

/// The kernels of one file.
#[derive(Debug, Clone, Copy)]
pub(crate) struct KernelModule {
    name: &'static str,
    ptx: &'static str,
}

/// The kernels of `kernels/$name.cu`.
macro_rules! module {
    ($name:literal) => {
        $crate::cuda::KernelModule::new(
            concat!("candle_zero_", $name),
            include_str!(concat!(env!("OUT_DIR"), "/", $name, ".ptx")),
        )
    };
}
pub(crate) use module;

impl KernelModule {
    /// Kernels that a device knows by `name`.
    pub const fn new(name: &'static str, ptx: &'static str) -> Self {
        Self { name, ptx }
    }

    /// One of them, on a device.
    ///
    /// # Errors
    /// The driver refuses the PTX: the GPU is older than what it was made for.
    pub fn function(self, device: &CudaDevice, kernel: &str) -> Result<KernelFunction> {
        let function = device.get_or_load_custom_func(kernel, self.name, self.ptx)?.into_cuda_function();
        Ok(KernelFunction { function, stream: device.cuda_stream() })
    }
}

/// A kernel on the stream of Candle's device, or another one.
pub(crate) struct KernelFunction {
    function: CudaFunction,
    stream: Arc<CudaStream>,
}

impl KernelFunction {
    /// The same, launched with so many bytes of shared memory, which may be more than the 48 KiB that a block has unasked.
    ///
    /// # Errors
    /// The device has less.
    pub fn with_shared_memory(self, bytes: usize) -> Result<Self> {
        let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        self.function.set_attribute(attribute, i32::try_from(bytes).map_err(candle_core::Error::wrap)?).w()?;
        Ok(self)
    }

    /// The same on another stream of the device.
    pub fn on(self, stream: &Arc<CudaStream>) -> Self {
        Self { stream: stream.clone(), ..self }
    }

    /// A launch, to which arguments are given.
    pub fn builder(&self) -> LaunchArgs<'_> {
        self.stream.launch_builder(&self.function)
    }
}

/// A launch in which threads take `count` elements in turns.
pub(crate) fn over(count: usize) -> LaunchConfig {
    let blocks = count.div_ceil(THREADS as usize).clamp(1, MOST_BLOCKS);
    LaunchConfig { grid_dim: (blocks as u32, 1, 1), block_dim: (THREADS, 1, 1), shared_mem_bytes: 0 }
}

/// A format's name in those of kernels.
pub(crate) fn suffix(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "f32",
        DType::BF16 => "bf16",
        DType::F16 => "f16",
        other => panic!("flat buffers hold f32, bf16 or f16, not {other:?}"),
    }
}
