//! A job on several hosts, with one launcher on each. The launcher of the first host coordinates the others.
//!
//! ```text
//!   host 0: zerorun --nnodes 2 --node_rank 0 --master_addr a  host 1: zerorun --nnodes 2 --node_rank 1 --master_addr a
//!     coordinator: waits at the port <---- handshake, Hello -----------  agent: joins, gets Start, starts its ranks
//!     agent: as on every host                                           ranks meet in MPI, through `pmi`; heartbeats
//! ```
//!
//! `coordinator` runs only on the first host, `agent` on each host, and `wire` connects them. The first host listens at
//! the addresses of `listen_address`. Its `acceptor` limits the resources that unidentified connections can use, a
//! `handshake` with the `secret` identifies the hosts of the job, and `admission` decides which of them may join it.
//! `ssh` starts the launcher on each host in a hostfile.

mod acceptor;
mod admission;
mod agent;
mod checksums;
mod coordinator;
mod handshake;
mod join;
pub(crate) mod listen_address;
pub(crate) mod secret;
pub(crate) mod ssh;
mod wire;

use super::console::eprint;
use super::local_job_spec::LocalJobSpec;
use crate::error::{LaunchError, Result};
use agent::JoinOptions;
use candle_zero::util::host_name;
use coordinator::ElasticPolicy;
use secret::{JobSecret, SECRET};
use std::time::Duration;
use wire::HostHello;

/// The default port of DeepSpeed and torchrun.
pub(crate) const DEFAULT_PORT: u16 = 29500;
/// How long to wait for the hosts, unless `--timeout` is given.
const DEFAULT_JOIN_TIMEOUT: Duration = Duration::from_secs(600);

/// The options of this host in a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NodeOptions {
    /// The number of hosts.
    pub(crate) nodes: usize,
    /// The minimum number of hosts to continue with after a failure.
    pub(crate) min_nodes: usize,
    /// This host's index.
    pub(crate) node: usize,
    /// The first host's address.
    pub(crate) master_addr: String,
    /// The local address at which the first host listens, or `None` for `master_addr`.
    pub(crate) bind_addr: Option<String>,
    /// Whether the first line of standard input is the secret, later lines are signals, and the end of standard input
    /// asks this launcher to end.
    pub(crate) until_stdin_ends: bool,
}

/// Runs this host's part of the job to its end, and returns the exit code. Must be called on the main thread.
///
/// # Errors
/// Fails if the secret cannot be used, the port is in use, the address is unknown or belongs to another host, the first
/// host cannot be reached or refuses this one, or a rank cannot be started.
pub(super) fn run(job: LocalJobSpec, node: &NodeOptions, max_restarts: u32) -> Result<u8> {
    let patience = job.timeout.unwrap_or(DEFAULT_JOIN_TIMEOUT);
    let port = job.master_port.unwrap_or(DEFAULT_PORT);
    let secret = match node.until_stdin_ends {
        true => Some(JobSecret::of_line(std::io::stdin().lock())?),
        false => JobSecret::of_environment()?,
    };
    // Listens before any file is read, so that a port in use is reported immediately.
    let listening = match node.node {
        0 => Some(listen_address::listen(&node.master_addr, node.bind_addr.as_deref(), port, patience)?),
        _ => None,
    };
    if let (Some(open), None) = (listening.as_ref().and_then(|at| at.open_to_others()), &secret) {
        eprint(&format!(
            "zerorun: warning: anyone who can reach port {port} on {open} can take a host's place in this job, because \
             {SECRET} is not set; set it to the same value on every host, for example the output of `openssl rand -hex \
             32`"
        ));
    }
    let hello = HostHello {
        nodes: node.nodes,
        node: node.node,
        ranks: job.world,
        host: host_name(),
        words: job.args.iter().map(|word| word.to_string_lossy().into_owned()).collect(),
        files: checksums::of_files(&job.program, &job.args),
        folders: checksums::of_folders(&job.args),
        clock: 0,
        launcher: random_launcher_number()?,
    };
    let policy = ElasticPolicy { nodes: node.nodes, min_nodes: node.min_nodes, max_restarts, patience };
    let local_addresses = listening.as_ref().map(|listening| listening.local_addresses.clone());
    let coordinator_thread = listening
        .map(|at| coordinator::serve(at.listeners, secret.clone(), policy, hello.clone()))
        .transpose()
        .map_err(|source| LaunchError::Setup { what: "accepting other hosts", source })?;
    let join_options = JoinOptions {
        master_addr: node.master_addr.clone(),
        master_port: port,
        local_addresses,
        secret,
        patience,
        hello,
        rejoins: max_restarts > 0 && node.node > 0,
        until_stdin_ends: node.until_stdin_ends,
    };
    let code = agent::run(job, &join_options);
    if let Some(coordinator_thread) = coordinator_thread.filter(|_| code.is_ok()) {
        // The coordinator has sent the job's result to this host's agent. The other hosts should receive it too.
        let _ = coordinator_thread.join();
    }
    code
}

/// Returns a random number that identifies this launcher and cannot be guessed.
fn random_launcher_number() -> Result<u64> {
    let [a, b, c, d, e, f, g, h, ..] = secret::nonce()?;
    Ok(u64::from_le_bytes([a, b, c, d, e, f, g, h]))
}
