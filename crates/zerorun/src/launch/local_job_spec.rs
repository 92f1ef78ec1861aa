//! The ranks that one launcher starts on this host: their program, their place in the job, and the environment that
//! they share.

use super::console::eprint;
use super::hosts::core_list::CoreList;
use super::hosts::world_info::DEVICES;
use super::pmi;
use super::run_record_flags::RunRecordFlags;
use crate::error::{Error, LaunchError, Result};
use candle_zero::comm::rank_env::{DEFAULT_TIMEOUT, TIMEOUT_MS};
use candle_zero::island_server;
use candle_zero::monitor::PROMETHEUS_PORT;
use candle_zero::stop_signal::RESTART;
use candle_zero::util::counted;
use rustix::process::Signal;
use std::ffi::OsString;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::net::{Ipv4Addr, TcpListener};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

/// Torchrun's name for [`RESTART`], the number of restarts so far.
const TORCH_RESTART: &str = "TORCHELASTIC_RESTART_COUNT";

/// The description of the ranks to start on this host.
#[derive(Debug)]
pub(crate) struct LocalJobSpec {
    /// The absolute path of the executable.
    pub(crate) program: PathBuf,
    pub(crate) args: Vec<OsString>,
    /// The number of ranks.
    pub(crate) world: usize,
    /// The timeout of collectives. `None` means the value from the environment, or else the ranks' default.
    pub(crate) timeout: Option<Duration>,
    /// How long the ranks may take to end after a signal to the launcher.
    pub(crate) grace: Duration,
    /// The message printed when a signal asks the job to end and the launcher waits for the ranks.
    pub(crate) on_signal: Option<&'static str>,
    /// The script as typed, for the ranks' messages about their command line.
    pub(crate) script: Option<PathBuf>,
    /// The port of rank 0, or `None` for a free port, chosen anew at each start.
    pub(crate) master_port: Option<u16>,
    /// The port on which rank 0 serves metrics. `None` means the value from the environment.
    pub(crate) prometheus: Option<u16>,
    /// The record of the run. Settings that are not given come from the environment.
    pub(crate) run: RunRecordFlags,
    /// The options of a job that is one of several islands.
    pub(crate) island: IslandOptions,
    /// The number of restarts so far.
    pub(crate) restart: u32,
    /// The folder in which ranks write their parts of the timeline.
    pub(crate) timeline: Option<PathBuf>,
    /// This host's part of the job, if the job has several hosts or its ranks communicate by MPI.
    pub(crate) multi_host: Option<MultiHostContext>,
    /// The cores to which ranks are bound, at least one per rank, or `None` if ranks run on any core.
    pub(crate) cores: Option<CoreList>,
    /// The ranks' [`DEVICES`]. `None` means the value from the environment.
    pub(crate) devices: Option<String>,
}

/// The options of a job that is one of several islands, which meet at a server. `None` means the value from the
/// environment or the configuration.
#[derive(Debug, Clone, Default)]
pub(crate) struct IslandOptions {
    /// The address of the server.
    pub(crate) server: Option<String>,
    /// The slot to request.
    pub(crate) slot: Option<u16>,
}

/// Returns the number by which an island server recognizes the islands that this launcher starts, one after the other.
fn launcher_number() -> u64 {
    static NUMBER: OnceLock<u64> = OnceLock::new();
    // A new hasher has random keys.
    *NUMBER.get_or_init(|| RandomState::new().build_hasher().finish())
}

/// This host's part of a job on several hosts, or of a job whose ranks communicate by MPI.
#[derive(Clone)]
pub(crate) struct MultiHostContext {
    /// The number of this host's first rank among the ranks of all hosts.
    pub(crate) first: usize,
    /// The index of this host, and the number of hosts.
    pub(crate) host_index: usize,
    pub(crate) hosts: usize,
    /// The name of this host, for the lines of its ranks, if there are other hosts.
    pub(crate) host: Option<String>,
    /// The address of the first host, for use by the program.
    pub(crate) master_addr: String,
    /// The server that connects the ranks' MPI libraries.
    pub(crate) pmi: Arc<pmi::PmiServer>,
    /// A rank that has failed or whose host is lost or has failed, and why. The event
    /// [`PeerMessage`](super::signals::LauncherEvent::PeerMessage) announces it.
    pub(crate) remote_failure: Arc<Mutex<Option<(usize, String)>>>,
    /// Forwards to the other hosts a signal that asks this launcher to end.
    pub(crate) forward_signal: Arc<dyn Fn(Signal) + Send + Sync>,
}

impl MultiHostContext {
    /// Creates the context of a job on a single host whose ranks communicate by MPI nonetheless. `start` is the number
    /// of restarts so far.
    pub(crate) fn mpi_on_one_host(ranks: usize, start: u32) -> Self {
        let now =
            std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |since| since.as_nanos());
        let name = format!("candle_zero_{:x}_{now:x}_{start}", std::process::id());
        Self {
            first: 0,
            host_index: 0,
            hosts: 1,
            host: None,
            master_addr: Ipv4Addr::LOCALHOST.to_string(),
            pmi: pmi::PmiServer::for_one_host(name, ranks),
            remote_failure: Arc::default(),
            forward_signal: Arc::new(|_| {}),
        }
    }
}

impl std::fmt::Debug for MultiHostContext {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { first, host_index, hosts, host, .. } = self;
        let host = host.as_deref().unwrap_or("this one");
        write!(f, "MultiHostContext {{ ranks from {first} on, host {host_index} of {hosts}: {host} }}")
    }
}

/// Returns the variables that are the same for all ranks.
pub(super) fn common_environment(job: &LocalJobSpec) -> Result<Vec<(&'static str, String)>> {
    let local_size = job.world.to_string();
    let port = match job.master_port {
        Some(port) => port,
        None => free_port()?,
    };
    let context = job.multi_host.as_ref();
    let mut variables = vec![
        ("WORLD_SIZE", context.map_or(job.world, |context| context.pmi.world()).to_string()),
        ("LOCAL_WORLD_SIZE", local_size.clone()),
        ("LOCAL_SIZE", local_size),
        ("MASTER_ADDR", context.map_or_else(|| Ipv4Addr::LOCALHOST.to_string(), |context| context.master_addr.clone())),
        ("MASTER_PORT", port.to_string()),
        (RESTART, job.restart.to_string()),
        (TORCH_RESTART, job.restart.to_string()),
    ];
    match job.timeout {
        Some(timeout) => variables.push((TIMEOUT_MS, timeout.as_millis().to_string())),
        None if is_set(TIMEOUT_MS) => {}
        None => variables.push((TIMEOUT_MS, DEFAULT_TIMEOUT.as_millis().to_string())),
    }
    let (host_index, hosts) = context.map_or((0, 1), |context| (context.host_index, context.hosts));
    variables.extend([("CROSS_RANK", host_index.to_string()), ("CROSS_SIZE", hosts.to_string())]);
    variables.extend(context.map(|context| ("PMI_SIZE", context.pmi.world().to_string())));
    variables.extend(job.prometheus.map(|port| (PROMETHEUS_PORT, port.to_string())));
    variables.extend(job.island.server.clone().map(|server| (island_server::SERVER, server)));
    variables.extend(job.island.slot.map(|slot| (island_server::SLOT, slot.to_string())));
    variables.push((island_server::LAUNCHER, launcher_number().to_string()));
    variables.extend(job.devices.clone().map(|devices| (DEVICES, devices)));
    let cores = match &job.cores {
        Some(list) => list.cores().len(),
        None => std::thread::available_parallelism().map_or(1, usize::from),
    };
    if job.world > cores && job.restart == 0 {
        eprint(&format!(
            "zerorun: warning: {} ranks share {}; each computes with one thread, and they slow one another down",
            job.world,
            counted(cores, "core")
        ));
    }
    // This limits Candle's own thread pool and rayon's: ranks that all use every core are many times slower than ranks
    // that divide the cores among themselves.
    let threads = (cores / job.world).max(1).to_string();
    // DeepSpeed sets the number of OpenMP threads only if it binds ranks.
    let openmp_variable = job.cores.as_ref().map(|_| "OMP_NUM_THREADS");
    for name in ["RAYON_NUM_THREADS", "CANDLE_NUM_THREADS"].into_iter().chain(openmp_variable) {
        if !is_set(name) {
            variables.push((name, threads.clone()));
        }
    }
    let (name, value) = KEEP_MEMORY;
    if cfg!(target_env = "gnu") && !is_set(name) {
        variables.push((name, value.into()));
    }
    Ok(variables)
}

/// The environment variable and the value that make the GNU C library keep freed blocks of up to 1 GiB in the process.
///
/// A training step allocates the same buffers again and again, and getting pages from the system each time costs up to
/// a fifth of the step's time. `zerorun` sets the variable for its ranks; a program that is started in another way must
/// have it set when it starts.
pub(crate) const KEEP_MEMORY: (&str, &str) =
    ("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=1073741824:glibc.malloc.trim_threshold=17179869184");

fn is_set(name: &str) -> bool {
    std::env::var_os(name).is_some_and(|value| !value.is_empty())
}

fn free_port() -> Result<u16> {
    let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|socket| Ok(socket.local_addr()?.port()));
    port.map_err(|source| Error::from(LaunchError::Setup { what: "finding a free port", source }))
}
