//! The transport between the ranks of one host.

/// The transport between the ranks of one host.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum CommBackend {
    /// Shared memory
    #[default]
    Shm,
    /// MPI, with the same library as under mpirun
    Mpi,
}
