//! NCCL of this machine, found and loaded when the program runs: nothing of it is needed to build or to start.

use super::error::NcclError;
use candle_core::DType;
use candle_core::cuda_backend::cudarc::driver::sys::{CUdeviceptr, CUstream};
use libloading::os::unix::{Library as Loaded, RTLD_LOCAL, RTLD_NOW};
use std::error::Error as _;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::{Path, PathBuf};

/// The file to load in place of what is found.
const LIBRARY: &str = "CANDLE_ZERO_NCCL_LIBRARY";
/// What the system is asked for: NCCL 2 has had this name from the beginning.
const NAME: &str = "libnccl.so.2";

/// ncclSuccess: the call is done.
pub(super) const SUCCESS: c_int = 0;
/// ncclInProgress: the call goes on, and ncclCommGetAsyncError says when it is done.
pub(super) const IN_PROGRESS: c_int = 7;
/// ncclSum.
pub(super) const SUM: c_int = 0;
/// NCCL's name for an int that is not set.
const UNSET: c_int = c_int::MIN;

/// A communicator of the library.
pub(super) type RawNcclComm = *mut c_void;

/// What ranks meet by: ncclUniqueId, which is passed by value.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct NcclUniqueId(pub(super) [u8; 128]);

/// ncclConfig_t as NCCL 2.14 has it. Later versions read as much as `size` says and take what `version` does not have from
/// their defaults.
#[repr(C)]
pub(super) struct NcclConfig {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
    /// Of a later version, where this one has nothing.
    unset: c_int,
}

impl NcclConfig {
    /// Calls return before they are done: a peer that does not come cannot hold one.
    pub(super) const NOT_BLOCKING: Self =
        Self { size: size_of::<Self>(), magic: 0xcafe_beef, version: 21400, blocking: 0, unset: UNSET };
}

type AsyncErrorFn = unsafe extern "C" fn(RawNcclComm, *mut c_int) -> c_int;
type CommFn = unsafe extern "C" fn(RawNcclComm) -> c_int;
type GroupFn = unsafe extern "C" fn() -> c_int;
type InitRankConfigFn = unsafe extern "C" fn(*mut RawNcclComm, c_int, NcclUniqueId, c_int, *mut NcclConfig) -> c_int;
type AllGatherFn = unsafe extern "C" fn(CUdeviceptr, CUdeviceptr, usize, c_int, RawNcclComm, CUstream) -> c_int;
type ReduceFn = unsafe extern "C" fn(CUdeviceptr, CUdeviceptr, usize, c_int, c_int, RawNcclComm, CUstream) -> c_int;
type PeerTransferFn = unsafe extern "C" fn(CUdeviceptr, usize, c_int, c_int, RawNcclComm, CUstream) -> c_int;

/// A loaded library: its functions.
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
    /// The library that the variable names, or that the system finds.
    ///
    /// # Errors
    /// None is found; one that cannot be loaded; one without a function that is needed.
    pub(crate) fn find() -> Result<Self, NcclError> {
        let named = std::env::var_os(LIBRARY).filter(|path| !path.is_empty());
        Self::open(&named.map_or_else(|| PathBuf::from(NAME), PathBuf::from))
    }

    /// The library in a file, or by a name that the system knows.
    pub(super) fn open(path: &Path) -> Result<Self, NcclError> {
        let library = path.display().to_string();
        // SAFETY: loading NCCL runs nothing that this program could disturb.
        let loaded = unsafe { Loaded::open(Some(path), RTLD_NOW | RTLD_LOCAL) }.map_err(|error| {
            // The error itself says no more than that it was this call; the system's words are its source.
            let why = error.source().map_or(error.to_string(), ToString::to_string);
            NcclError::NotFound { library: library.clone(), why }
        })?;
        // Unloaded never: the library has threads of its own, and its functions are copied out of it.
        let loaded = std::mem::ManuallyDrop::new(loaded);
        let lacks =
            |name: &CStr| NcclError::Lacks { library: library.clone(), symbol: name.to_string_lossy().into_owned() };
        macro_rules! symbol {
            ($name:literal) => {
                // SAFETY: the function has this type in every version of NCCL 2.
                *unsafe { loaded.get($name) }.map_err(|_| lacks($name))?
            };
        }
        let get_version: unsafe extern "C" fn(*mut c_int) -> c_int = symbol!(c"ncclGetVersion");
        let mut version = 0;
        // SAFETY: a place for a number.
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

    /// The file and the version.
    pub(crate) fn name(&self) -> String {
        format!("{} (NCCL {})", self.path.display(), version_text(self.version))
    }

    /// What the ranks of one communicator meet by: one of them makes it and tells the others.
    ///
    /// # Errors
    /// The library's own: no network interface, say.
    pub(crate) fn unique_id(&self) -> Result<[u8; 128], NcclError> {
        let mut id = NcclUniqueId([0; 128]);
        // SAFETY: the library writes 128 bytes.
        let code = unsafe { (self.unique_id)(&mut id) };
        self.check("ncclGetUniqueId", code)?;
        Ok(id.0)
    }

    /// An error where a call is neither done nor under way.
    pub(super) fn check(&self, call: &'static str, code: c_int) -> Result<(), NcclError> {
        match code {
            SUCCESS | IN_PROGRESS => Ok(()),
            code => Err(NcclError::Refused { call, why: self.text(code) }),
        }
    }

    /// What a code means, and the library's last words about it.
    pub(super) fn text(&self, code: c_int) -> String {
        // SAFETY: both return texts that end with a zero, the second one that of the last error of any communicator.
        let (meaning, last) =
            unsafe { (of_text((self.error_string)(code)), of_text((self.last_error)(std::ptr::null_mut()))) };
        let last = last.trim();
        if last.is_empty() { meaning } else { format!("{meaning}: {last}") }
    }
}

/// # Safety
/// A text that ends with a zero, or null.
unsafe fn of_text(text: *const c_char) -> String {
    // SAFETY: as the caller promises.
    if text.is_null() { String::new() } else { unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned() }
}

/// NCCL writes 2.30.4 as 23004, and versions before 2.9 with a digit less.
fn version_text(version: c_int) -> String {
    let (major, rest) =
        if version < 10_000 { (version / 1000, version % 1000) } else { (version / 10_000, version % 10_000) };
    format!("{major}.{}.{}", rest / 100, rest % 100)
}

/// ncclUint8 of ncclDataType_t.
pub(super) const BYTES: c_int = 1;

/// ncclDataType_t.
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
        let other = NcclLibrary::open(Path::new("libc.so.6")).err().map(|error| error.to_string());
        assert_eq!(
            other.as_deref(),
            Some("libc.so.6 has no function ncclGetVersion: it is not NCCL, or older than 2.14")
        );
    }
}
