//! Errors of communication between ranks, and of the environment that defines a process's rank.

use std::sync::Arc;

/// Errors of communication between ranks. They can be cloned, because every later collective fails with the first one.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum CommError {
    /// The shared memory, a thread or a socket could not be created or used.
    #[error("cannot {action}: {source}; check the limits of memory and processes (ulimit -a)")]
    Region {
        /// The attempted action.
        action: &'static str,
        /// The system's reason.
        #[source]
        source: Arc<std::io::Error>,
    },
    /// The inherited descriptor is not that of the launcher's shared memory.
    #[error(
        "file descriptor {fd} (CANDLE_ZERO_SHM_FD) is not the shared memory of this job: found {found}; start the \
         program with zerorun, and unset CANDLE_ZERO_SHM_FD if it is left over from another job"
    )]
    ForeignRegion {
        /// The file descriptor.
        fd: i32,
        /// The value found.
        found: String,
    },
    /// Two processes claim the same rank.
    #[error("rank {rank} is already taken ({state}) by another process of this job; each process needs its own rank")]
    RankTaken {
        /// The rank.
        rank: usize,
        /// The state of the rank's first process.
        state: String,
    },
    /// The ranks cannot be divided into groups.
    #[error(
        "rank {rank} cannot form groups of ranks: {why} (every rank must be in exactly one group, and all ranks must \
         pass the same groups in each call)"
    )]
    Groups {
        /// This rank.
        rank: usize,
        /// The problem.
        why: String,
    },
    /// NCCL failed, and no failed rank is known.
    #[error("collectives between GPUs fail on rank {rank}: {why}; set CANDLE_ZERO_NCCL=off to run without NCCL")]
    Gpus {
        /// This rank.
        rank: usize,
        /// NCCL's reason.
        why: String,
    },
    /// The variable that configures NCCL has an invalid value.
    #[error(
        "CANDLE_ZERO_NCCL is {found:?}, but must be exact (sums in rank order, bit for bit as on the host), fast \
         (NCCL's own sums) or off (collectives pass through the host)"
    )]
    NcclChoice {
        /// The value found.
        found: String,
    },
    /// A user-defined communicator failed.
    #[error(transparent)]
    Other(Arc<dyn std::error::Error + Send + Sync>),
    /// A peer's process ended.
    #[error(
        "rank {peer} died ({why}) while rank {rank} waited in {op}; check rank {peer}'s output, or the kernel log for \
         an out-of-memory kill"
    )]
    RankDied {
        /// This rank.
        rank: usize,
        /// The dead rank.
        peer: usize,
        /// The recorded cause of its death.
        why: String,
        /// The collective in which this rank waited.
        op: String,
    },
    /// A peer gave up.
    #[error("rank {peer} stopped ({why}) while rank {rank} waited in {op}")]
    RankAborted {
        /// This rank.
        rank: usize,
        /// The rank that gave up.
        peer: usize,
        /// The reason that the peer gave.
        why: String,
        /// The collective in which this rank waited.
        op: String,
    },
    /// This rank has already given up, for instance after an error of another engine in its process.
    #[error("rank {rank} gave up earlier ({why}) and takes part in no further collectives")]
    GaveUp {
        /// This rank.
        rank: usize,
        /// The reason that this rank gave.
        why: String,
    },
    /// A peer left without an error while others still needed it.
    #[error(
        "rank {peer} left the job while rank {rank} waited for it in {op}; every rank must run the same number of \
         steps and make the same number of collective calls"
    )]
    RankLeft {
        /// This rank.
        rank: usize,
        /// The rank that left.
        peer: usize,
        /// The collective in which this rank waited.
        op: String,
    },
    /// A peer's process shows no sign of life.
    #[error(
        "rank {peer} did not respond for {seconds} s while rank {rank} waited in {op}; it was stopped, or its \
         machine is overloaded"
    )]
    HeartbeatLost {
        /// This rank.
        rank: usize,
        /// The silent rank.
        peer: usize,
        /// The collective in which this rank waited.
        op: String,
        /// The length of the silence in seconds.
        seconds: u64,
    },
    /// A peer is alive but did not arrive in time.
    #[error(
        "rank {rank} waited {limit:?} for rank {peer} in {op}; if a step may take longer, raise the limit (zerorun \
         --timeout)"
    )]
    Timeout {
        /// This rank.
        rank: usize,
        /// The rank that was awaited.
        peer: usize,
        /// The collective in which this rank waited.
        op: String,
        /// The time limit.
        limit: std::time::Duration,
    },
    /// Ranks issued different collectives.
    #[error(
        "ranks have diverged: rank {rank} is in {here}, and rank {peer} is in {there}; every rank must run the same model \
         with the same configuration, and make the same calls in the same order: forward, step, eval, \
         save_checkpoint, load_checkpoint and exports must be called on all ranks, never on only some of them as in \
         `if rank == 0`"
    )]
    Diverged {
        /// This rank.
        rank: usize,
        /// The collective that this rank issued.
        here: String,
        /// The other rank.
        peer: usize,
        /// The collective that the other rank issued.
        there: String,
    },
    /// No MPI library was found.
    #[error(
        "the ranks were started on several hosts or by an MPI launcher, but no MPI library was found (tried {tried}); \
         install MPICH (or, for mpirun only, Open MPI), add its lib folder to LD_LIBRARY_PATH, or set \
         CANDLE_ZERO_MPI_LIBRARY to its file"
    )]
    NoMpi {
        /// The files that were tried.
        tried: String,
    },
    /// An MPI library was found but cannot be loaded.
    #[error(
        "the MPI library {library} was found but cannot be loaded ({why}); install its dependencies, or set \
         CANDLE_ZERO_MPI_LIBRARY to another file"
    )]
    MpiNotLoaded {
        /// The library file.
        library: String,
        /// The system's error message.
        why: String,
    },
    /// An MPI library lacks a function.
    #[error(
        "{library} has no {symbol}: it is not an MPI library that this program can use; use MPICH, Intel MPI, or \
         Open MPI 4 or later"
    )]
    MpiLacks {
        /// The library file.
        library: String,
        /// The missing function or handle.
        symbol: String,
    },
    /// An MPI library requires all calls to come from one thread.
    #[error(
        "{library} does not let several threads call it in turn (MPI_THREAD_SERIALIZED); use a build with thread \
         support"
    )]
    MpiThreads {
        /// The library file and its version.
        library: String,
    },
    /// An MPI call failed.
    #[error("MPI failed in {call}: {why}")]
    Mpi {
        /// The MPI function.
        call: &'static str,
        /// The library's error message.
        why: String,
    },
    /// MPI and the environment report different ranks.
    #[error(
        "the environment reports rank {rank} of {world}, but MPI reports rank {mpi_rank} of {mpi_world} ({library}): \
         the library is not that of the mpirun that started the ranks or, under zerorun, is not MPICH-compatible; set \
         CANDLE_ZERO_MPI_LIBRARY to the right file; Slurm's srun needs --mpi=pmi2"
    )]
    MpiForeign {
        /// The rank according to the environment.
        rank: usize,
        /// The number of ranks according to the environment.
        world: usize,
        /// The rank according to MPI.
        mpi_rank: usize,
        /// The number of ranks according to MPI.
        mpi_world: usize,
        /// The library file and its version.
        library: String,
    },
    /// Open MPI's mpirun has started the ranks, but the library found is a different one, whose use would end the
    /// ranks.
    #[error(
        "Open MPI's mpirun started the ranks, but the library found is {library}; add Open MPI's lib folder to \
         LD_LIBRARY_PATH, set CANDLE_ZERO_MPI_LIBRARY to its file, or start the ranks with this library's own mpirun"
    )]
    MpiNotOpenMpi {
        /// The library file and its version.
        library: String,
    },
    /// The ranks of one host are not consecutive.
    #[error(
        "ranks {first} and {second} are on host {host}, but ranks between them are not: the ranks of a host must be \
         consecutive; place them slot by slot (mpirun --map-by slot, srun --distribution block)"
    )]
    HostsMixed {
        /// The host.
        host: String,
        /// The first rank of the host.
        first: usize,
        /// The host's first rank that follows ranks of another host.
        second: usize,
    },
    /// Hosts run different programs.
    #[error("hosts {first} and {host} run programs with different contents; copy the same file to all hosts")]
    ProgramsDiffer {
        /// The first host.
        first: String,
        /// The host whose program differs from that of the first.
        host: String,
    },
    /// Not all ranks that were started individually have connected.
    #[error(
        "{connected} of {world} ranks connected to MASTER_PORT {port} on this host within {limit:?}; missing ranks: \
         {missing}; start each of them with its RANK, the same WORLD_SIZE and MASTER_PORT, as the same user and in the \
         same network namespace; ranks on several hosts are joined by zerorun --nnodes, mpirun or srun"
    )]
    RanksMissing {
        /// The number of ranks that connected.
        connected: usize,
        /// The total number of ranks.
        world: usize,
        /// The numbers of the missing ranks.
        missing: String,
        /// `MASTER_PORT`.
        port: u16,
        /// The time limit.
        limit: std::time::Duration,
    },
    /// Ranks were started individually, and rank 0 cannot be found.
    #[error(
        "rank {rank} of {world} found no rank 0 at MASTER_PORT {port} on this host within {limit:?}; start it with \
         RANK=0, WORLD_SIZE={world} and the same MASTER_PORT, as the same user and in the same network namespace, or \
         all ranks with `zerorun --num_ranks {world}`; ranks on several hosts are joined by zerorun --nnodes, mpirun \
         or srun"
    )]
    Rank0Missing {
        /// This rank.
        rank: usize,
        /// The total number of ranks.
        world: usize,
        /// `MASTER_PORT`.
        port: u16,
        /// The time limit.
        limit: std::time::Duration,
    },
    /// Rank 0 exists but does not answer.
    #[error(
        "rank 0 is running but has not answered rank {rank} for {limit:?}; it was stopped, or its machine is overloaded"
    )]
    Rank0Silent {
        /// This rank.
        rank: usize,
        /// The time limit.
        limit: std::time::Duration,
    },
    /// The process of a rank ended before all ranks had connected.
    #[error("the process of rank {rank} ended before all ranks had joined; see its own output")]
    GoneBeforeStart {
        /// The rank.
        rank: usize,
    },
    /// Ranks disagree about the number of ranks.
    #[error(
        "WORLD_SIZE is {first} on rank 0 and {world} on rank {rank}; give all ranks of a job the same value, and each \
         job its own MASTER_PORT (here {port})"
    )]
    WorldsDiffer {
        /// The rank that differs from rank 0.
        rank: usize,
        /// `WORLD_SIZE` on that rank.
        world: usize,
        /// `WORLD_SIZE` on rank 0.
        first: usize,
        /// `MASTER_PORT`.
        port: u16,
    },
    /// Two processes claim the same rank at the rendezvous.
    #[error(
        "processes {earlier} and {later} both claim rank {rank}; give each its own RANK, and each job its own \
         MASTER_PORT (here {port})"
    )]
    RankTwice {
        /// The rank.
        rank: usize,
        /// The process that connected first.
        earlier: i32,
        /// The process that connected later.
        later: i32,
        /// `MASTER_PORT`.
        port: u16,
    },
    /// Another job uses the port for its rendezvous.
    #[error("another job already uses MASTER_PORT {port} on this host; give each job its own port")]
    MasterPortInUse {
        /// `MASTER_PORT`.
        port: u16,
    },
    /// Rank 0 cancelled the rendezvous because of its own error.
    #[error("rank 0 cancelled the rendezvous: {why}")]
    RendezvousCancelled {
        /// The error message of rank 0.
        why: String,
    },
    /// The communication thread has ended.
    #[error("the communication thread of this rank ended after an earlier failure; see the first error")]
    ThreadEnded,
}

impl CommError {
    /// Wraps the failure of a user-defined communicator.
    pub fn other(source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self::Other(Arc::from(source.into()))
    }
}

/// Errors of the environment variables that define a process's rank.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RankEnvError {
    /// Some of the variables that define a process's rank are set, and others are missing.
    #[error("{set} is set but {missing} is not: a rank needs both; start the program with zerorun, or unset {set}")]
    Incomplete {
        /// A variable that is set.
        set: &'static str,
        /// The missing variable.
        missing: &'static str,
    },
    /// A variable about ranks has a value that cannot be parsed.
    #[error("environment variable {name} is `{value}`; it must be {expected}")]
    Variable {
        /// The variable.
        name: &'static str,
        /// The value of the variable.
        value: String,
        /// The allowed values.
        expected: &'static str,
    },
    /// A rank is not less than the number of ranks.
    #[error("{rank_name} is {rank}, but must be below {world_name}, which is {world}")]
    OutOfRange {
        /// The variable that holds the rank.
        rank_name: &'static str,
        /// The rank.
        rank: usize,
        /// The variable that holds the number of ranks.
        world_name: &'static str,
        /// The number of ranks.
        world: usize,
    },
    /// The ranks are on several hosts.
    #[error(
        "{local_world} of {world} ranks {} on this host, but these variables join only the ranks of one host; start \
         one launcher on each host instead of the ranks, `zerorun --nnodes {hosts} --node_rank N --master_addr \
         {first} --num_ranks {local_world} PROGRAM`, or let mpirun or srun start the ranks",
        crate::util::is_or_are(*local_world)
    )]
    SeveralHosts {
        /// The number of ranks on this host.
        local_world: usize,
        /// The total number of ranks.
        world: usize,
        /// The number of hosts, if all have the same number of ranks.
        hosts: usize,
        /// The address of the first host.
        first: String,
    },
}
