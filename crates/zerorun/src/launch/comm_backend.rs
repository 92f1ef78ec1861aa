//! What joins the ranks of one host.

/// What joins the ranks of one host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum CommBackend {
    /// Shared memory
    Shm,
    /// MPI, which is found as under mpirun
    Mpi,
}
