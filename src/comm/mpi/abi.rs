//! What differs from one MPI library to another under the same functions: the values of handles and constants.
//!
//! | ABI | library | handles |
//! | --- | --- | --- |
//! | MPI 5.0's own | `libmpi_abi.so.1` (MPICH 5, Intel MPI, Open MPI 6) | pointers with fixed values |
//! | MPICH's | `libmpi.so.12` (MPICH, Intel MPI, MVAPICH, Cray), `libmpich.so.12` (Debian's MPICH) | numbers of 32 bits |
//! | Open MPI's | `libmpi.so.40` (4 and 5) | addresses of objects in the library |

use std::ffi::c_int;

/// An interface of MPI as compiled programs see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MpiAbi {
    /// That of the standard, since MPI 5.0.
    Standard,
    /// MPICH's.
    Mpich,
    /// Open MPI's.
    OpenMpi,
}

/// A handle. Handles of 32 bits are in its low half.
pub(super) type MpiHandle = usize;

/// A handle as a library has it.
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
    /// The level of threads at which one thread at a time, whichever it is, may call the library.
    pub serialized: c_int,
}

impl MpiAbi {
    pub(super) const ALL: [Self; 3] = [Self::Standard, Self::Mpich, Self::OpenMpi];

    /// The names under which the system's loader knows a library, the usual one first.
    pub(super) fn libraries(self) -> &'static [&'static str] {
        match self {
            Self::Standard => &["libmpi_abi.so.1"],
            // Debian's package libmpich12 has the second alone.
            Self::Mpich => &["libmpi.so.12", "libmpich.so.12"],
            Self::OpenMpi => &["libmpi.so.40"],
        }
    }

    /// Its values: of MPI 5.0's mpi.h, MPICH's and Open MPI's.
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
