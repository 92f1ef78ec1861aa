//! A job on several hosts: one launcher on each, and the first host's decides.
//!
//! ```text
//!   host 0: zerorun --nnodes 2 --node_rank 0 --master_addr a ...      host 1: zerorun --nnodes 2 --node_rank 1 --master_addr a ...
//!     coordinator: waits at the port <---- handshake, Hello ----------- agent: joins, gets Start, starts its ranks
//!     agent: as on every host                                           ranks meet in MPI, through `pmi`; signs of life
//! ```
//!
//! `coordinator` is what only the first host does, `agent` what each does, `wire` how they speak. The first listens at the addresses
//! of `listen_address`; its `acceptor` bounds what strangers cost, a `handshake` with the `secret` tells them from hosts of the job,
//! and `admission` says which of these may take part. `ssh` starts the launcher of each host of a hostfile.

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
use super::ranks::LocalJob;
use crate::error::{LaunchError, Result};
use agent::JoinOptions;
use candle_zero::util::host_name;
use coordinator::ElasticPolicy;
use secret::{JobSecret, SECRET};
use std::time::Duration;
use wire::HostHello;

/// DeepSpeed's and torchrun's port.
pub(crate) const DEFAULT_PORT: u16 = 29500;
/// How long the hosts are waited for, unless `--timeout` says otherwise.
const PATIENCE: Duration = Duration::from_secs(600);

/// Which host of a job this is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NodeOptions {
    /// The number of hosts.
    pub(crate) nodes: usize,
    /// The fewest hosts to go on with after a failure.
    pub(crate) min_nodes: usize,
    /// This host's number.
    pub(crate) node: usize,
    /// The first host's address.
    pub(crate) master_addr: String,
    /// The address of this host at which the first one listens; `None`: `master_addr`.
    pub(crate) bind_addr: Option<String>,
    /// Whether the first line of standard input is the secret, and the end of it asks this launcher to end.
    pub(crate) until_stdin_ends: bool,
}

/// Runs this host's part of the job to its end; the result is the exit code. Call it on the main thread.
///
/// # Errors
/// The secret cannot be used, the port is taken or another host's, the first host cannot be reached or refuses this one.
pub(super) fn run(job: LocalJob, node: &NodeOptions, max_restarts: u32) -> Result<u8> {
    let patience = job.timeout.unwrap_or(PATIENCE);
    let port = job.master_port.unwrap_or(DEFAULT_PORT);
    let secret = match node.until_stdin_ends {
        true => Some(JobSecret::of_line(std::io::stdin().lock())?),
        false => JobSecret::of_environment()?,
    };
    // Before anything is read: a port that is taken is told at once.
    let listening = match node.node {
        0 => Some(listen_address::listen(&node.master_addr, node.bind_addr.as_deref(), port, patience)?),
        _ => None,
    };
    if let (Some(open), None) = (listening.as_ref().and_then(|at| at.open_to_others()), &secret) {
        eprint(&format!(
            "zerorun: warning: whoever reaches port {port} of {open} can take a host's place in this job, as {SECRET} is not set; \
             set it to one value on every host, for example what `openssl rand -hex 32` prints"
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
        launcher: launcher()?,
    };
    let rule = ElasticPolicy { nodes: node.nodes, min_nodes: node.min_nodes, max_restarts, patience };
    let own = listening.as_ref().map(|listening| listening.own.clone());
    let first = listening.map(|at| coordinator::serve(at.listeners, secret.clone(), rule, hello.clone())).transpose();
    let first = first.map_err(|source| LaunchError::Setup { what: "meeting other hosts", source })?;
    let joining = JoinOptions {
        master_addr: node.master_addr.clone(),
        master_port: port,
        own,
        secret,
        patience,
        hello,
        returns: max_restarts > 0 && node.node > 0,
        until_stdin_ends: node.until_stdin_ends,
    };
    let code = agent::run(job, &joining);
    if let Some(first) = first.filter(|_| code.is_ok()) {
        // It has said how the job ends to this host's side; the others shall hear it too.
        let _ = first.join();
    }
    code
}

/// A number that no other launcher has, and that nobody guesses.
fn launcher() -> Result<u64> {
    let [a, b, c, d, e, f, g, h, ..] = secret::nonce()?;
    Ok(u64::from_le_bytes([a, b, c, d, e, f, g, h]))
}
