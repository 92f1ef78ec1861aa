//! Kernels by name, loaded onto a device at their first use.

use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::sys::CUfunction_attribute;
use candle_core::cuda_backend::cudarc::driver::{CudaFunction, CudaStream, LaunchArgs, LaunchConfig};
use candle_core::{CudaDevice, DType, Result};
use std::sync::Arc;

/// The number of threads of a block in which each thread has separate elements.
const THREADS: u32 = 256;
/// The maximum number of blocks of a launch by [`launch_over`], enough for several on every multiprocessor of a GPU.
const MAX_BLOCKS: usize = 2048;

/// The kernels of one file.
#[derive(Debug, Clone, Copy)]
pub(crate) struct KernelModule {
    name: &'static str,
    ptx: &'static str,
}

/// Creates the module of the kernels in `kernels/$name.cu`.
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
    /// Creates a module that is loaded onto devices under `name`.
    pub const fn new(name: &'static str, ptx: &'static str) -> Self {
        Self { name, ptx }
    }

    /// Returns one of the kernels on a device.
    ///
    /// # Errors
    /// Returns an error if the driver refuses the PTX, for example because the GPU is older than the PTX's target.
    pub fn function(self, device: &CudaDevice, kernel: &str) -> Result<KernelFunction> {
        let function = device.get_or_load_custom_func(kernel, self.name, self.ptx)?.into_cuda_function();
        Ok(KernelFunction { function, stream: device.cuda_stream() })
    }
}

/// A kernel and the stream on which it runs, which is that of Candle's device or a different one.
pub(crate) struct KernelFunction {
    function: CudaFunction,
    stream: Arc<CudaStream>,
}

impl KernelFunction {
    /// Returns the kernel with up to `bytes` of shared memory per block, which may exceed the default of 48 KiB.
    ///
    /// # Errors
    /// Returns an error if the device has less shared memory.
    pub fn with_shared_memory(self, bytes: usize) -> Result<Self> {
        let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        self.function.set_attribute(attribute, i32::try_from(bytes).map_err(candle_core::Error::wrap)?).w()?;
        Ok(self)
    }

    /// Returns the kernel on another stream of the device.
    pub fn on(self, stream: &Arc<CudaStream>) -> Self {
        Self { stream: stream.clone(), ..self }
    }

    /// Returns a launch builder, to which arguments are added.
    pub fn builder(&self) -> LaunchArgs<'_> {
        self.stream.launch_builder(&self.function)
    }
}

/// Returns a launch whose threads process `count` elements in a grid-stride loop.
pub(crate) fn launch_over(count: usize) -> LaunchConfig {
    let blocks = count.div_ceil(THREADS as usize).clamp(1, MAX_BLOCKS);
    LaunchConfig { grid_dim: (blocks as u32, 1, 1), block_dim: (THREADS, 1, 1), shared_mem_bytes: 0 }
}

/// Returns a format's suffix in the names of kernels.
pub(crate) fn suffix(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "f32",
        DType::BF16 => "bf16",
        DType::F16 => "f16",
        other => panic!("flat buffers hold f32, bf16 or f16, not {other:?}"),
    }
}
