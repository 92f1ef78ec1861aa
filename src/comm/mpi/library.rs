//! The MPI library of this machine, found and loaded at run time; it is not needed for building.

use super::abi::{AbiHandle, MpiAbi, MpiHandle};
use crate::comm::rank_env::SHM_FD;
use crate::error::CommError;
use libloading::os::unix::{Library as Loaded, RTLD_GLOBAL, RTLD_NOW, Symbol};
use std::error::Error as _;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::{Path, PathBuf};

/// The variable that names the file to load; without it, a library is searched for.
const LIBRARY_VARIABLE: &str = "CANDLE_ZERO_MPI_LIBRARY";
/// The size in bytes of a buffer for the longest text that any of the libraries writes.
const TEXT_BUFFER_BYTES: usize = 8192;

type InitThreadFn = unsafe extern "C" fn(*mut c_int, *mut *mut *mut c_char, c_int, *mut c_int) -> c_int;
type CommQueryFn = unsafe extern "C" fn(MpiHandle, *mut c_int) -> c_int;
type SetErrhandlerFn = unsafe extern "C" fn(MpiHandle, MpiHandle) -> c_int;
type MpiTransferFn = unsafe extern "C" fn(*mut c_void, c_int, MpiHandle, c_int, c_int, MpiHandle, *mut u64) -> c_int;
type TestFn = unsafe extern "C" fn(*mut u64, *mut c_int, usize) -> c_int;
type AllgatherFn =
    unsafe extern "C" fn(*const c_void, c_int, MpiHandle, *mut c_void, c_int, MpiHandle, MpiHandle) -> c_int;
type ErrorStringFn = unsafe extern "C" fn(c_int, *mut c_char, *mut c_int) -> c_int;
type LibraryVersionFn = unsafe extern "C" fn(*mut c_char, *mut c_int) -> c_int;
type AbortFn = unsafe extern "C" fn(MpiHandle, c_int) -> c_int;
type FinalizeFn = unsafe extern "C" fn() -> c_int;

/// A loaded library: its functions, and its handles and constants.
///
/// Handles are passed as [`MpiHandle`] to every library. A library that expects a 32-bit number finds it in the low
/// half of the register (System V on x86-64, AAPCS64), which is all that these conventions guarantee, and a library
/// that writes a 32-bit request writes the low half of a `u64`.
pub(super) struct MpiLibrary {
    path: PathBuf,
    abi: MpiAbi,
    pub(super) world: MpiHandle,
    pub(super) byte: MpiHandle,
    errors_return: MpiHandle,
    pub(super) status_ignore: usize,
    init_thread: Symbol<InitThreadFn>,
    comm_rank: Symbol<CommQueryFn>,
    comm_size: Symbol<CommQueryFn>,
    set_errhandler: Symbol<SetErrhandlerFn>,
    pub(super) isend: Symbol<MpiTransferFn>,
    pub(super) irecv: Symbol<MpiTransferFn>,
    pub(super) test: Symbol<TestFn>,
    pub(super) allgather: Symbol<AllgatherFn>,
    error_string: Symbol<ErrorStringFn>,
    version: Symbol<LibraryVersionFn>,
    pub(super) abort: Symbol<AbortFn>,
    pub(super) finalize: Symbol<FinalizeFn>,
    // The library is never unloaded, because it has its own threads and handlers.
    _loaded: std::mem::ManuallyDrop<Loaded>,
}

impl MpiLibrary {
    /// Loads the library that the variable names, or the first one found: for each name, in the system's search path,
    /// then in the `lib` folder next to the folder of the program that started this process, or of an `mpirun` or
    /// `mpiexec` on the PATH.
    ///
    /// # Errors
    /// Fails if no library is found (the error lists all places), none that is found can be loaded, or the one that is
    /// loaded lacks a required function.
    pub(super) fn find() -> Result<Self, CommError> {
        if let Some(path) = std::env::var_os(LIBRARY_VARIABLE).filter(|path| !path.is_empty()) {
            let path = PathBuf::from(path);
            let loaded =
                open(&path).map_err(|why| no_library(format!("{} from {LIBRARY_VARIABLE} ({why})", path.display())))?;
            let standard = path.file_name().is_some_and(|name| name.to_string_lossy().contains("mpi_abi"));
            // SAFETY: nothing is read at the address.
            let open_mpi = unsafe { loaded.get::<*mut c_void>(c"ompi_mpi_comm_world") }.is_ok();
            let abi = if standard {
                MpiAbi::Standard
            } else if open_mpi {
                MpiAbi::OpenMpi
            } else {
                MpiAbi::Mpich
            };
            return Self::of(loaded, path, abi);
        }
        let folders: Vec<PathBuf> = std::iter::once(PathBuf::new()).chain(mpirun_lib_folders()).collect();
        let (mut tried, mut load_error) = (Vec::new(), None);
        for abi in search_order(under_open_mpi(), under_zerorun()) {
            for path in abi.libraries().iter().flat_map(|name| folders.iter().map(move |folder| folder.join(name))) {
                let library = path.display().to_string();
                match open(&path) {
                    Ok(loaded) => return Self::of(loaded, path, abi),
                    Err(why) if is_missing(&why, &library) => tried.push(library),
                    Err(why) => drop(load_error.get_or_insert(CommError::MpiNotLoaded { library, why })),
                }
            }
        }
        Err(load_error.unwrap_or_else(|| no_library(tried.join(", "))))
    }

    fn of(loaded: Loaded, path: PathBuf, abi: MpiAbi) -> Result<Self, CommError> {
        let lacks = |name: &CStr| CommError::MpiLacks {
            library: path.display().to_string(),
            symbol: name.to_string_lossy().into_owned(),
        };
        macro_rules! symbol {
            ($name:literal) => {
                // SAFETY: the function has this type in MPI's standard, with handles as described for `MpiLibrary`.
                unsafe { loaded.get($name) }.map_err(|_| lacks($name))?
            };
        }
        let handle = |value: AbiHandle| match value {
            AbiHandle::Number(number) => Ok(number),
            AbiHandle::Symbol(name) => {
                let name = std::ffi::CString::new(name).unwrap_or_default();
                // SAFETY: nothing is read at the address, which is the handle.
                let symbol = unsafe { loaded.get::<*mut c_void>(&name) }.map_err(|_| lacks(&name))?;
                Ok(symbol.into_raw() as MpiHandle)
            }
        };
        let constants = abi.constants();
        Ok(Self {
            abi,
            world: handle(constants.world)?,
            byte: handle(constants.byte)?,
            errors_return: handle(constants.errors_return)?,
            status_ignore: constants.status_ignore,
            init_thread: symbol!(c"MPI_Init_thread"),
            comm_rank: symbol!(c"MPI_Comm_rank"),
            comm_size: symbol!(c"MPI_Comm_size"),
            set_errhandler: symbol!(c"MPI_Comm_set_errhandler"),
            isend: symbol!(c"MPI_Isend"),
            irecv: symbol!(c"MPI_Irecv"),
            test: symbol!(c"MPI_Test"),
            allgather: symbol!(c"MPI_Allgather"),
            error_string: symbol!(c"MPI_Error_string"),
            version: symbol!(c"MPI_Get_library_version"),
            abort: symbol!(c"MPI_Abort"),
            finalize: symbol!(c"MPI_Finalize"),
            path,
            _loaded: std::mem::ManuallyDrop::new(loaded),
        })
    }

    /// Initializes MPI, with errors as return values, and returns this process's rank and the number of ranks.
    ///
    /// # Errors
    /// Fails if MPI fails, the library is not the launcher's, or it grants too low a thread level.
    pub(super) fn init(&self) -> Result<(usize, usize), CommError> {
        let name = self.name();
        if under_open_mpi() && !under_zerorun() && !name.contains("Open MPI") {
            return Err(CommError::MpiNotOpenMpi { library: name });
        }
        let required = self.abi.constants().serialized;
        let mut granted = 0;
        // SAFETY: MPI allows null for the program's arguments; `granted` has room for a number.
        let code = unsafe { (self.init_thread)(std::ptr::null_mut(), std::ptr::null_mut(), required, &mut granted) };
        self.check("MPI_Init_thread", code)?;
        if granted < required {
            return Err(CommError::MpiThreads { library: self.name() });
        }
        // SAFETY: the handles are this library's.
        let code = unsafe { (self.set_errhandler)(self.world, self.errors_return) };
        self.check("MPI_Comm_set_errhandler", code)?;
        let (mut rank, mut size) = (0, 0);
        // SAFETY: the handles are this library's; the pointers point to numbers.
        let codes = unsafe { [(self.comm_rank)(self.world, &mut rank), (self.comm_size)(self.world, &mut size)] };
        self.check("MPI_Comm_rank", codes[0])?;
        self.check("MPI_Comm_size", codes[1])?;
        Ok((rank.max(0) as usize, size.max(1) as usize))
    }

    /// Returns an error if `code`, returned by an MPI function, reports one.
    pub(super) fn check(&self, call: &'static str, code: c_int) -> Result<(), CommError> {
        if code == 0 {
            return Ok(());
        }
        let mut text = vec![0u8; TEXT_BUFFER_BYTES];
        let mut len = 0;
        // SAFETY: the buffer is larger than any library needs.
        let succeeded = unsafe { (self.error_string)(code, text.as_mut_ptr().cast(), &mut len) } == 0;
        let why = if succeeded { text_before_zero(&text) } else { format!("code {code}") };
        Err(CommError::Mpi { call, why })
    }

    /// Returns the file and the first line of the library's version text.
    pub(super) fn name(&self) -> String {
        let mut text = vec![0u8; TEXT_BUFFER_BYTES];
        let mut len = 0;
        // SAFETY: the buffer is larger than any library needs; MPI allows the call at any time.
        let succeeded = unsafe { (self.version)(text.as_mut_ptr().cast(), &mut len) } == 0;
        let version = if succeeded { text_before_zero(&text) } else { String::new() };
        let first = version.lines().next().unwrap_or_default().split_whitespace().collect::<Vec<_>>().join(" ");
        format!("{} ({first})", self.path.display())
    }
}

/// Returns the text before the first zero byte.
fn text_before_zero(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

fn no_library(tried: String) -> CommError {
    CommError::NoMpi { tried }
}

/// Loads a library so that the components that it loads itself find its symbols, as Open MPI's require.
fn open(path: &Path) -> Result<Loaded, String> {
    // SAFETY: MPI libraries start their work in MPI_Init_thread; loading them runs nothing that could disturb this
    // program.
    let opened = unsafe { Loaded::open(Some(path), RTLD_NOW | RTLD_GLOBAL) };
    // The error itself only names the failed call; its source has the system's message.
    opened.map_err(|error| error.source().map_or(error.to_string(), ToString::to_string))
}

/// Returns whether the loader's message reports that the file itself is missing, rather than one of its dependencies.
fn is_missing(why: &str, library: &str) -> bool {
    why.strip_prefix(library).is_some_and(|rest| rest.starts_with(": cannot open shared object file: No such file"))
}

fn under_open_mpi() -> bool {
    std::env::var_os("OMPI_COMM_WORLD_RANK").is_some()
}

fn under_zerorun() -> bool {
    std::env::var_os(SHM_FD).is_some()
}

/// Returns the ABIs in the order in which their libraries are searched for. Under Open MPI's mpirun, Open MPI's own ABI
/// comes first.
fn search_order(under_open_mpi: bool, under_zerorun: bool) -> Vec<MpiAbi> {
    match (under_zerorun, under_open_mpi) {
        // zerorun connects ranks as MPICH's process managers do; Open MPI's library supports only Open MPI's own.
        (true, _) => vec![MpiAbi::Standard, MpiAbi::Mpich],
        (_, true) => vec![MpiAbi::OpenMpi, MpiAbi::Standard, MpiAbi::Mpich],
        _ => MpiAbi::ALL.to_vec(),
    }
}

/// Returns `lib` folders: the one next to the folder of the program that started this process, then those next to the
/// folders of the mpirun and mpiexec programs on the PATH.
fn mpirun_lib_folders() -> Vec<PathBuf> {
    let parent = rustix::process::getppid().map(|pid| format!("/proc/{}/exe", pid.as_raw_nonzero()));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let on_path = std::env::split_paths(&path).flat_map(|folder| ["mpirun", "mpiexec"].map(|name| folder.join(name)));
    let mut folders = Vec::new();
    for program in parent.map(PathBuf::from).into_iter().chain(on_path) {
        let lib = std::fs::canonicalize(program).ok().and_then(|file| Some(file.parent()?.parent()?.join("lib")));
        folders.extend(lib.filter(|lib| !folders.contains(lib)));
    }
    folders
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn under_open_mpi_its_own_library_is_looked_for_first() {
        assert_eq!(search_order(true, false)[0], MpiAbi::OpenMpi);
        assert_eq!(search_order(false, false)[0], MpiAbi::Standard);
        assert!(!search_order(true, true).contains(&MpiAbi::OpenMpi), "zerorun cannot launch its ranks");
    }

    #[test]
    fn a_library_that_is_missing_is_told_from_one_that_lacks_another() {
        let missing = open(Path::new("libno_such_mpi.so.1")).err().unwrap_or_default();
        assert!(is_missing(&missing, "libno_such_mpi.so.1"), "{missing}");
        let lacks = "libucp.so.0: cannot open shared object file: No such file or directory";
        assert!(!is_missing(lacks, "libmpich.so.12"));
    }
}
