//! Kernel launches: the arguments of a kernel, and the number of threads that run it.

use super::flat_view::{DeviceFlatMut, DeviceFlatRef, each};
use super::kernel_module::KernelFunction;
use candle_core::Result;
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaView, LaunchConfig, PushKernelArg};

/// An argument of a kernel.
pub(crate) enum KernelArgument<'a> {
    /// Elements to read, of a dtype that the kernel supports.
    Read(&'a DeviceFlatRef<'a>),
    /// Elements to write.
    Write(DeviceFlatMut<'a>),
    /// Numbers that this library allocated, for a kernel to read.
    Floats(&'a CudaSlice<f32>),
    /// Numbers that this library allocated, for a kernel to write.
    FloatsMut(&'a mut CudaSlice<f32>),
    /// Sums to write.
    DoublesMut(&'a mut CudaSlice<f64>),
    /// A table of pointers and sizes.
    Table(&'a CudaSlice<u64>),
    /// Ids and positions.
    Words(CudaView<'a, u32>),
    Word(u32),
    /// A null pointer for an optional argument that is missing.
    Nothing,
    Count(usize),
    Float(f32),
    Double(f64),
    Int(i32),
    Long(u64),
}

/// Implements the conversion from a type to an argument.
macro_rules! argument {
    ($type:ty, $variant:ident) => {
        impl<'a> From<$type> for KernelArgument<'a> {
            fn from(value: $type) -> Self {
                Self::$variant(value)
            }
        }
    };
}
argument!(&'a DeviceFlatRef<'a>, Read);
argument!(DeviceFlatMut<'a>, Write);
argument!(&'a CudaSlice<f32>, Floats);
argument!(&'a mut CudaSlice<f32>, FloatsMut);
argument!(&'a mut CudaSlice<f64>, DoublesMut);
argument!(&'a CudaSlice<u64>, Table);
argument!(CudaView<'a, u32>, Words);
argument!(u32, Word);
argument!(i32, Int);
argument!(usize, Count);
argument!(f32, Float);
argument!(f64, Double);
argument!(u64, Long);

impl<'a> From<&'a CudaSlice<u32>> for KernelArgument<'a> {
    fn from(words: &'a CudaSlice<u32>) -> Self {
        Self::Words(words.as_view())
    }
}

/// Converts a flag to an int.
impl From<bool> for KernelArgument<'_> {
    fn from(value: bool) -> Self {
        Self::Int(i32::from(value))
    }
}

impl<'a, T: Into<KernelArgument<'a>>> From<Option<T>> for KernelArgument<'a> {
    fn from(value: Option<T>) -> Self {
        value.map_or(Self::Nothing, Into::into)
    }
}

/// Creates a list of arguments from any types that convert to [`KernelArgument`].
macro_rules! arguments {
    ($($value:expr),* $(,)?) => { [$($crate::cuda::kernel_launch::KernelArgument::from($value)),*] };
}
pub(crate) use arguments;

impl KernelFunction {
    /// Runs the kernel on its stream.
    ///
    /// # Safety
    /// The kernel must take arguments of these types in this order, and this launch's threads must stay within the
    /// arguments' bounds.
    ///
    /// # Errors
    /// Returns an error if the driver reports one.
    pub unsafe fn run<'a>(&self, threads: LaunchConfig, mut arguments: impl AsMut<[KernelArgument<'a>]>) -> Result<()> {
        let mut launch = self.builder();
        for argument in arguments.as_mut() {
            match argument {
                KernelArgument::Read(elements) => each!(DeviceFlatRef, *elements, v => launch.arg(v)),
                KernelArgument::Write(elements) => each!(DeviceFlatMut, elements, v => launch.arg(v)),
                KernelArgument::Floats(numbers) => launch.arg(*numbers),
                KernelArgument::FloatsMut(numbers) => launch.arg(&mut **numbers),
                KernelArgument::DoublesMut(numbers) => launch.arg(&mut **numbers),
                KernelArgument::Table(words) => launch.arg(*words),
                KernelArgument::Words(words) => launch.arg(&*words),
                KernelArgument::Nothing => launch.arg(&0usize),
                KernelArgument::Count(value) => launch.arg(&*value),
                KernelArgument::Word(value) => launch.arg(&*value),
                KernelArgument::Float(value) => launch.arg(&*value),
                KernelArgument::Double(value) => launch.arg(&*value),
                KernelArgument::Int(value) => launch.arg(&*value),
                KernelArgument::Long(value) => launch.arg(&*value),
            };
        }
        // SAFETY: as the caller promises.
        unsafe { launch.launch(threads) }.w().map(drop)
    }
}

/// The number of threads of a warp.
const WARP: usize = 32;
/// The maximum number of threads that share a row.
const MAX_THREADS_PER_ROW: usize = 256;

/// The number of elements of a pack in a row (vectorized_access.cuh).
const ROW_PACK: usize = 8;

/// Returns a launch with a block for each of `rows` rows of `width` elements. The number of threads, and therefore the
/// order of a row's sums, depends only on the width.
pub(crate) fn by_row(rows: usize, width: usize) -> LaunchConfig {
    let threads = width.div_ceil(ROW_PACK).next_multiple_of(WARP).clamp(WARP, MAX_THREADS_PER_ROW);
    LaunchConfig { grid_dim: (rows as u32, 1, 1), block_dim: (threads as u32, 1, 1), shared_mem_bytes: 0 }
}
