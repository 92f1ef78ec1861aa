//! A device of the driver without cudarc's additions: it records no events automatically, so a test can leave out a
//! wait.

use candle_core::cuda_backend::cudarc::driver::result::{self, event, stream};
use candle_core::cuda_backend::cudarc::driver::{DriverError, sys};
use std::ffi::{CString, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use sys::{CUdeviceptr, CUfunction, CUstream};

type Count = unsafe extern "C" fn(i32) -> usize;

/// Returns a function that only the mock has, or `None` if the driver is not the mock.
fn count(name: &str) -> Option<Count> {
    let program = libloading::os::unix::Library::this();
    // SAFETY: the mock's functions with these names have this type.
    unsafe { program.get::<Count>(name) }.ok().map(|f| *f)
}

/// Returns whether the driver is the mock.
pub fn is_mock() -> bool {
    count("mock_cuda_live_bytes").is_some()
}

fn name_of(error: DriverError) -> String {
    error.error_name().unwrap().to_str().unwrap().into()
}

/// Returns the path of this folder's kernels, which the mock's nvcc compiles once for this process and its children.
pub fn ptx() -> &'static Path {
    static PTX: OnceLock<PathBuf> = OnceLock::new();
    PTX.get_or_init(|| {
        if let Some(path) = std::env::var_os(PTX_OF_PARENT) {
            return path.into();
        }
        let nvcc = Path::new(&std::env::var_os("CUDA_HOME").expect("CUDA_HOME names the mock")).join("bin/nvcc");
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/mock_cuda/kernels.cu");
        let out = Path::new(env!("CARGO_TARGET_TMPDIR"));
        let status = Command::new(nvcc).arg("--ptx").arg("--output-directory").arg(out).arg(source).status().unwrap();
        assert!(status.success());
        out.join("kernels.ptx")
    })
}

/// The variable that contains the path of the compiled kernels for a child process.
pub const PTX_OF_PARENT: &str = "MOCK_CUDA_TEST_PTX";

/// A device whose context is current on the calling thread.
pub struct Device {
    ordinal: i32,
    context: sys::CUcontext,
    module: OnceLock<usize>,
}

impl Device {
    pub fn new(ordinal: i32) -> Self {
        result::init().unwrap();
        let device = result::device::get(ordinal).unwrap();
        // SAFETY: the device exists, and is never released here.
        let context = unsafe { result::primary_ctx::retain(device) }.unwrap();
        let device = Self { ordinal, context, module: OnceLock::new() };
        device.make_current();
        device
    }

    pub fn make_current(&self) {
        // SAFETY: the context is never released.
        unsafe { result::ctx::set_current(self.context) }.unwrap();
    }

    pub fn stream(&self) -> CUstream {
        stream::create(stream::StreamKind::NonBlocking).unwrap()
    }

    /// Returns the live bytes and their maximum, as the mock counts them.
    pub fn live_and_peak_bytes(&self) -> (usize, usize) {
        let of = |name| {
            // SAFETY: the function has this type.
            unsafe { count(name).unwrap()(self.ordinal) }
        };
        (of("mock_cuda_live_bytes"), of("mock_cuda_peak_bytes"))
    }

    pub fn try_alloc(&self, stream: CUstream, floats: usize) -> Result<CUdeviceptr, String> {
        // SAFETY: `stream` is a live stream of this device, as everywhere below.
        unsafe { result::malloc_async(stream, floats * 4) }.map_err(name_of)
    }

    pub fn alloc(&self, stream: CUstream, floats: usize) -> CUdeviceptr {
        self.try_alloc(stream, floats).unwrap()
    }

    pub fn free(&self, stream: CUstream, p: CUdeviceptr) {
        // SAFETY: the mock checks the pointer.
        unsafe { result::free_async(p, stream) }.unwrap();
    }

    pub fn filled(&self, stream: CUstream, values: &[f32]) -> CUdeviceptr {
        let p = self.alloc(stream, values.len());
        // SAFETY: `p` has as many bytes as `values`.
        unsafe { result::memcpy_htod_async(p, values, stream) }.unwrap();
        p
    }

    /// Returns the values when all of the stream's work is done.
    pub fn read(&self, stream: CUstream, p: CUdeviceptr, floats: usize) -> Vec<f32> {
        let mut values = vec![0f32; floats];
        // SAFETY: `p` and `values` have this number of elements.
        unsafe { result::memcpy_dtoh_async(&mut values, p, stream) }.unwrap();
        values
    }

    pub fn copy(&self, stream: CUstream, to: CUdeviceptr, from: CUdeviceptr, floats: usize) {
        // SAFETY: both allocations have this number of elements.
        unsafe { result::memcpy_dtod_async(to, from, floats * 4, stream) }.unwrap();
    }

    /// Returns pinned memory that is never freed.
    pub fn pinned(&self, floats: usize) -> &'static mut [f32] {
        // SAFETY: the driver returns this number of bytes, which are never freed; every bit pattern is a float.
        unsafe { std::slice::from_raw_parts_mut(result::malloc_host(floats * 4, 0).unwrap().cast(), floats) }
    }

    pub fn copy_to_pinned(&self, stream: CUstream, to: &mut [f32], from: CUdeviceptr) {
        // SAFETY: `from` has as many bytes as `to`.
        unsafe { result::memcpy_dtoh_async(to, from, stream) }.unwrap();
    }

    /// Orders two streams: work that `second` receives later waits until `first` has finished its current work.
    pub fn order(&self, first: CUstream, second: CUstream) {
        let event = event::create(sys::CUevent_flags::CU_EVENT_DEFAULT).unwrap();
        // SAFETY: the event and the streams are live and belong to this device.
        unsafe {
            event::record(event, first).unwrap();
            stream::wait_event(second, event, sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT).unwrap();
        }
    }

    pub fn wait(&self, stream: CUstream) {
        // SAFETY: `stream` is live.
        unsafe { stream::synchronize(stream) }.unwrap();
    }

    pub fn add_one(&self, stream: CUstream, values: CUdeviceptr, floats: usize) {
        self.try_add_one(stream, values, floats).unwrap();
    }

    pub fn try_add_one(&self, stream: CUstream, values: CUdeviceptr, floats: usize) -> Result<(), String> {
        // The count is an argument of 8 bytes, like the pointer.
        self.launch(stream, "add_one", (u32::try_from(floats.div_ceil(32)).unwrap(), 32, 0), &[values, floats as u64])
    }

    /// Launches a kernel with these numbers of blocks, threads per block and bytes of shared memory, and 8-byte
    /// arguments.
    pub fn launch(
        &self,
        stream: CUstream,
        kernel: &str,
        (blocks, threads, shared): (u32, u32, u32),
        arguments: &[u64],
    ) -> Result<(), String> {
        let mut arguments: Vec<*mut c_void> =
            arguments.iter().map(|a| std::ptr::from_ref(a).cast_mut().cast()).collect();
        let function = self.function(kernel);
        // SAFETY: the mock copies as many arguments as the kernel has.
        unsafe { result::launch_kernel(function, (blocks, 1, 1), (threads, 1, 1), shared, stream, &mut arguments) }
            .map_err(name_of)
    }

    fn function(&self, kernel: &str) -> CUfunction {
        let module = *self.module.get_or_init(|| {
            let image = CString::new(std::fs::read(ptx()).unwrap()).unwrap();
            // SAFETY: the string ends with a zero.
            unsafe { result::module::load_data(image.as_ptr().cast()) }.unwrap() as usize
        });
        // SAFETY: the module is never unloaded.
        unsafe { result::module::get_function(module as sys::CUmodule, CString::new(kernel).unwrap()) }.unwrap()
    }
}
