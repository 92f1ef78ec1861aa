//! The NCCL library of this machine, found and loaded at run time. A program can be built and started without it.

use super::error::NcclError;
use candle_core::DType;
use candle_core::cuda_backend::cudarc::driver::sys::{CUdeviceptr, CUstream};
use libloading::os::unix::{Library as Loaded, RTLD_LOCAL, RTLD_NOW};
use std::error::Error as _;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::{Path, PathBuf};

/// The environment variable that names the file to load instead of the system's library.
const LIBRARY_VARIABLE: &str = "CANDLE_ZERO_NCCL_LIBRARY";
/// The name that the system's loader searches. All versions of NCCL 2 have used it.
const LIBRARY_NAME: &str = "libnccl.so.2";

/// ncclSuccess: the call is complete.
pub(super) const SUCCESS: c_int = 0;
/// ncclInProgress: the call continues, and ncclCommGetAsyncError reports when it is complete.
pub(super) const IN_PROGRESS: c_int = 7;
/// ncclSum.
pub(super) const SUM: c_int = 0;
/// NCCL's value for an int that is not set.
const UNSET_INT: c_int = c_int::MIN;

/// A communicator of the library.
pub(super) type RawNcclComm = *mut c_void;

/// The id by which ranks find each other: ncclUniqueId, which is passed by value.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct NcclUniqueId(pub(super) [u8; 128]);

/// ncclConfig_t in the layout of NCCL 2.14. Later versions read only `size` bytes, and use their defaults for fields
/// that `version` does not have.
#[repr(C)]
pub(super) struct NcclConfig {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
    /// A field of a later version, in the padding of this one.
    unset: c_int,
}

impl NcclConfig {
    /// A configuration in which calls return before they are complete, so a missing peer cannot block them.
    pub(super) const NONBLOCKING: Self =
        Self { size: size_of::<Self>(), magic: 0xcafe_beef, version: 21400, blocking: 0, unset: UNSET_INT };
}

type AsyncErrorFn = unsafe extern "C" fn(RawNcclComm, *mut c_int) -> c_int;
type CommFn = unsafe extern "C" fn(RawNcclComm) -> c_int;
type GroupFn = unsafe extern "C" fn() -> c_int;
type InitRankConfigFn = unsafe extern "C" fn(*mut RawNcclComm, c_int, NcclUniqueId, c_int, *mut NcclConfig) -> c_int;
type AllGatherFn = unsafe extern "C" fn(CUdeviceptr, CUdeviceptr, usize, c_int, RawNcclComm, CUstream) -> c_int;
type ReduceFn = unsafe extern "C" fn(CUdeviceptr, CUdeviceptr, usize, c_int, c_int, RawNcclComm, CUstream) -> c_int;
type PeerTransferFn = unsafe extern "C" fn(CUdeviceptr, usize, c_int, c_int, RawNcclComm, CUstream) -> c_int;

/// The functions of a loaded library.
#[derive(Clone)]
pub(crate) struct NcclLibrary {
    path: PathBuf,
    version: c_int,
    error_string: unsafe extern "C" fn(c_int) -> *const c_char,
    last_error: unsafe extern "C" fn(RawNcclComm) -> *const c_char,
    unique_id: unsafe extern "C" fn(*mut NcclUniqueId) -> c_int,
    pub(super) init_rank_config: InitRankConfigFn,
    pub(super) async_error: AsyncErrorFn,
    pub(super) finalize: CommFn,
    pub(super) destroy: CommFn,
    pub(super) abort: CommFn,
    pub(super) group_start: GroupFn,
    pub(super) group_end: GroupFn,
    pub(super) all_reduce: ReduceFn,
    pub(super) reduce_scatter: ReduceFn,
    pub(super) all_gather: AllGatherFn,
    pub(super) send: PeerTransferFn,
    pub(super) receive: PeerTransferFn,
}

impl NcclLibrary {
    /// Loads the library that the environment variable `CANDLE_ZERO_NCCL_LIBRARY` names, or that the system finds.
    ///
    /// # Errors
    /// Returns an error if no library is found, or if it cannot be loaded or lacks a required function.
    pub(crate) fn find() -> Result<Self, NcclError> {
        let configured_path = std::env::var_os(LIBRARY_VARIABLE).filter(|path| !path.is_empty());
        Self::open(&configured_path.map_or_else(|| PathBuf::from(LIBRARY_NAME), PathBuf::from))
    }

    /// Loads the library from a file, or by a name for which the system's loader searches.
    pub(super) fn open(path: &Path) -> Result<Self, NcclError> {
        let library = path.display().to_string();
        // SAFETY: loading NCCL runs no code that could interfere with this program.
        let loaded = unsafe { Loaded::open(Some(path), RTLD_NOW | RTLD_LOCAL) }.map_err(|error| {
            // The error itself only names the call. Its source has the system's message.
            let why = error.source().map_or(error.to_string(), ToString::to_string);
            NcclError::NotFound { library: library.clone(), why }
        })?;
        // The library is never unloaded, because it has its own threads and pointers to its functions are kept.
        let loaded = std::mem::ManuallyDrop::new(loaded);
        let missing_symbol = |name: &CStr| NcclError::MissingFunction {
            library: library.clone(),
            symbol: name.to_string_lossy().into_owned(),
        };
        macro_rules! symbol {
            ($name:literal) => {
                // SAFETY: the function has this type in every version of NCCL 2.
                *unsafe { loaded.get($name) }.map_err(|_| missing_symbol($name))?
            };
        }
        let get_version: unsafe extern "C" fn(*mut c_int) -> c_int = symbol!(c"ncclGetVersion");
        let mut version = 0;
        // SAFETY: the pointer points to a number.
        unsafe { get_version(&mut version) };
        Ok(Self {
            version,
            error_string: symbol!(c"ncclGetErrorString"),
            last_error: symbol!(c"ncclGetLastError"),
            unique_id: symbol!(c"ncclGetUniqueId"),
            init_rank_config: symbol!(c"ncclCommInitRankConfig"),
            async_error: symbol!(c"ncclCommGetAsyncError"),
            finalize: symbol!(c"ncclCommFinalize"),
            destroy: symbol!(c"ncclCommDestroy"),
            abort: symbol!(c"ncclCommAbort"),
            group_start: symbol!(c"ncclGroupStart"),
            group_end: symbol!(c"ncclGroupEnd"),
            all_reduce: symbol!(c"ncclAllReduce"),
            reduce_scatter: symbol!(c"ncclReduceScatter"),
            all_gather: symbol!(c"ncclAllGather"),
            send: symbol!(c"ncclSend"),
            receive: symbol!(c"ncclRecv"),
            path: path.to_owned(),
        })
    }

    /// Returns the file and the version.
    pub(crate) fn name(&self) -> String {
        format!("{} (NCCL {})", self.path.display(), version_text(self.version))
    }

    /// Returns the id of a new communicator. One rank creates it and sends it to the others.
    ///
    /// # Errors
    /// Returns an error if the library reports one, for example if there is no network interface.
    pub(crate) fn unique_id(&self) -> Result<[u8; 128], NcclError> {
        let mut id = NcclUniqueId([0; 128]);
        // SAFETY: the library writes 128 bytes.
        let code = unsafe { (self.unique_id)(&mut id) };
        self.check("ncclGetUniqueId", code)?;
        Ok(id.0)
    }

    /// Returns an error if a call is neither complete nor in progress.
    pub(super) fn check(&self, call: &'static str, code: c_int) -> Result<(), NcclError> {
        match code {
            SUCCESS | IN_PROGRESS => Ok(()),
            code => Err(NcclError::CallFailed { call, why: self.text(code) }),
        }
    }

    /// Returns the meaning of a code and the library's last message.
    pub(super) fn text(&self, code: c_int) -> String {
        // SAFETY: both return null-terminated strings; the second one describes the last error of any communicator.
        let (meaning, last_message) =
            unsafe { (text_from_c((self.error_string)(code)), text_from_c((self.last_error)(std::ptr::null_mut()))) };
        let last_message = last_message.trim();
        if last_message.is_empty() { meaning } else { format!("{meaning}: {last_message}") }
    }
}

/// # Safety
/// The pointer points to a null-terminated string, or is null.
unsafe fn text_from_c(text: *const c_char) -> String {
    // SAFETY: as the caller promises.
    if text.is_null() { String::new() } else { unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned() }
}

/// Formats a version. NCCL encodes 2.30.4 as 23004, and versions before 2.9 with one digit fewer.
fn version_text(version: c_int) -> String {
    let (major, rest) =
        if version < 10_000 { (version / 1000, version % 1000) } else { (version / 10_000, version % 10_000) };
    format!("{major}.{}.{}", rest / 100, rest % 100)
}

/// ncclUint8 of ncclDataType_t.
pub(super) const UINT8: c_int = 1;

/// Returns the ncclDataType_t of a dtype.
pub(super) fn data_type(dtype: DType) -> c_int {
    match dtype {
        DType::F16 => 6,
        DType::F32 => 7,
        DType::BF16 => 9,
        other => panic!("flat buffers hold f32, bf16 or f16, not {other:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_as_their_makers_write_them() {
        assert_eq!([2708, 21403, 23004].map(version_text), ["2.7.8", "2.14.3", "2.30.4"]);
    }

    #[test]
    fn a_missing_library_and_one_that_is_not_nccl_are_told() {
        let missing = NcclLibrary::open(Path::new("libno_such_nccl.so.2")).err().map(|error| error.to_string());
        assert!(missing.is_some_and(|why| why.contains("libno_such_nccl.so.2: cannot open shared object file")));
        let not_nccl = NcclLibrary::open(Path::new("libc.so.6")).err().map(|error| error.to_string());
        assert_eq!(
            not_nccl.as_deref(),
            Some("libc.so.6 has no function ncclGetVersion: it is not NCCL, or is older than 2.14")
        );
    }
}
