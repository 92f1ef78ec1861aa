//! A job on several hosts: one launcher on each, and the first host's decides.
//!
//! ```text
//!   host 0: zerorun --nnodes 2 --node_rank 0 --master_addr a ...      host 1: zerorun --nnodes 2 --node_rank 1 --master_addr a ...
//!     first: waits at the port <------------- Hello ------------------- member: joins, gets Start, starts its ranks
//!     member: as on every host                                          ranks meet in MPI, through `pmi`; signs of life
//! ```
//!
//! `first` is what only the first host does, `member` what each does, `wire` how they speak. `starter` starts the launcher of
//! each host of a hostfile.

mod checksums;
mod first;
mod member;
pub(crate) mod starter;
mod wire;

use super::ranks::Job;
use crate::error::{HostsError, LaunchError, Result};
use crate::util::host_name;
use first::Rule;
use member::Joining;
use std::net::{Ipv4Addr, Ipv6Addr, TcpListener};
use std::time::Duration;
use wire::Hello;

/// DeepSpeed's and torchrun's port.
pub(crate) const DEFAULT_PORT: u16 = 29500;
/// How long the hosts are waited for, unless `--timeout` says otherwise.
const PATIENCE: Duration = Duration::from_secs(600);

/// Which host of a job this is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Node {
    /// The number of hosts.
    pub(crate) nodes: usize,
    /// The fewest hosts to go on with after a failure.
    pub(crate) min_nodes: usize,
    /// This host's number.
    pub(crate) node: usize,
    /// The first host's address.
    pub(crate) master_addr: String,
    /// Whether the end of standard input asks this launcher to end.
    pub(crate) until_stdin_ends: bool,
}

/// Runs this host's part of the job to its end; the result is the exit code. Call it on the main thread.
///
/// # Errors
/// The port is taken, the first host cannot be reached or refuses this one.
pub(super) fn run(job: Job, node: &Node, max_restarts: u32) -> Result<u8> {
    let patience = job.timeout.unwrap_or(PATIENCE);
    let port = job.master_port.unwrap_or(DEFAULT_PORT);
    // Before anything is read: a port that is taken is told at once.
    let listener = if node.node == 0 { Some(listen(port)?) } else { None };
    let hello = Hello {
        version: env!("CARGO_PKG_VERSION").into(),
        nodes: node.nodes,
        node: node.node,
        ranks: job.world,
        host: host_name(),
        words: job.args.iter().map(|word| word.to_string_lossy().into_owned()).collect(),
        files: checksums::of_files(&job.program, &job.args),
        folders: checksums::of_folders(&job.args),
        clock: 0,
        launcher: launcher(),
    };
    let rule = Rule { nodes: node.nodes, min_nodes: node.min_nodes, max_restarts, patience };
    let first = listener.map(|listener| first::serve(listener, rule, hello.clone())).transpose();
    let first = first.map_err(|source| LaunchError::Setup { what: "meeting other hosts", source })?;
    let joining = Joining {
        master_addr: node.master_addr.clone(),
        master_port: port,
        patience,
        hello,
        returns: max_restarts > 0 && node.node > 0,
        until_stdin_ends: node.until_stdin_ends,
    };
    let code = member::run(job, &joining);
    if let Some(first) = first.filter(|_| code.is_ok()) {
        // It has said how the job ends to this host's side; the others shall hear it too.
        let _ = first.join();
    }
    code
}

/// At all addresses of this host.
fn listen(port: u16) -> Result<TcpListener> {
    let listener = TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)).or_else(|error| match error.kind() {
        std::io::ErrorKind::AddrInUse => Err(error),
        // No IPv6 here.
        _ => TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)),
    });
    Ok(listener.map_err(|source| HostsError::PortTaken { port, why: source.to_string() })?)
}

/// A number that no other launcher has.
fn launcher() -> u64 {
    let now =
        std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64);
    now ^ u64::from(std::process::id()).rotate_left(32)
}
