//! The values of handles and constants, which differ between MPI libraries that have the same functions.
//!
//! | ABI | library | handles |
//! | --- | --- | --- |
//! | MPI 5.0's own | `libmpi_abi.so.1` (MPICH 5, Intel MPI, Open MPI 6) | pointers with fixed values |
//! | MPICH's | `libmpi.so.12` (MPICH, Intel MPI, MVAPICH, Cray), `libmpich.so.12` (Debian) | 32-bit numbers |
//! | Open MPI's | `libmpi.so.40` (4 and 5) | addresses of objects in the library |

use std::ffi::c_int;

/// The binary interface of an MPI library, as compiled programs see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MpiAbi {
    /// The standard ABI, since MPI 5.0.
    Standard,
    /// The ABI of MPICH.
    Mpich,
    /// The ABI of Open MPI.
    OpenMpi,
}

/// A handle. 32-bit handles are in its low half.
pub(super) type MpiHandle = usize;

/// A handle in an ABI's format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AbiHandle {
    Number(MpiHandle),
    /// The address of this symbol.
    Symbol(&'static str),
}

/// The constants of an ABI.
#[derive(Debug, Clone, Copy)]
pub(super) struct AbiConstants {
    pub world: AbiHandle,
    pub byte: AbiHandle,
    pub errors_return: AbiHandle,
    pub status_ignore: usize,
    /// The thread level at which all threads may call the library, but only one at a time.
    pub serialized: c_int,
}

impl MpiAbi {
    pub(super) const ALL: [Self; 3] = [Self::Standard, Self::Mpich, Self::OpenMpi];

    /// Returns the names under which the system's loader finds a library, the usual one first.
    pub(super) fn libraries(self) -> &'static [&'static str] {
        match self {
            Self::Standard => &["libmpi_abi.so.1"],
            // Debian's package libmpich12 has only the second.
            Self::Mpich => &["libmpi.so.12", "libmpich.so.12"],
            Self::OpenMpi => &["libmpi.so.40"],
        }
    }

    /// Returns the ABI's constants, from the mpi.h of MPI 5.0, MPICH and Open MPI.
    pub(super) fn constants(self) -> AbiConstants {
        match self {
            Self::Standard => AbiConstants {
                world: AbiHandle::Number(0x101),
                byte: AbiHandle::Number(0x247),
                errors_return: AbiHandle::Number(0x143),
                status_ignore: 0,
                serialized: 2048,
            },
            Self::Mpich => AbiConstants {
                world: AbiHandle::Number(0x4400_0000),
                byte: AbiHandle::Number(0x4c00_010d),
                errors_return: AbiHandle::Number(0x5400_0001),
                status_ignore: 1,
                serialized: 2,
            },
            Self::OpenMpi => AbiConstants {
                world: AbiHandle::Symbol("ompi_mpi_comm_world"),
                byte: AbiHandle::Symbol("ompi_mpi_byte"),
                errors_return: AbiHandle::Symbol("ompi_mpi_errors_return"),
                status_ignore: 0,
                serialized: 2,
            },
        }
    }
}
