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

mod first;
mod member;
pub(crate) mod starter;
mod wire;

use super::ranks::Job;
use crate::error::{HostsError, LaunchError, Result};
use crate::util::host_name;
use first::Rule;
use member::Joining;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{BufReader, Read};
use std::net::{Ipv4Addr, Ipv6Addr, TcpListener};
use std::path::Path;
use std::time::Duration;
use twox_hash::XxHash3_64;
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
        files: checksums(&job),
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

/// Checksums of the program and of the files that its arguments name, by what a user calls them.
fn checksums(job: &Job) -> BTreeMap<String, String> {
    let named = |word: &OsString| {
        // `--ds_config=FILE` too.
        let word = word.to_string_lossy();
        let name =
            word.split_once('=').filter(|(flag, _)| flag.starts_with('-')).map_or(&*word, |(_, name)| name).to_string();
        Path::new(&name).is_file().then(|| (name.clone(), name.into()))
    };
    let files = job.args.iter().filter_map(named).chain([("the program".to_string(), job.program.clone())]);
    files.map(|(name, path)| (name, checksum(&path).unwrap_or_else(|error| format!("unreadable ({error})")))).collect()
}

/// The size and the checksum of a file. Of one above 256 MiB only the beginning is read.
fn checksum(path: &Path) -> std::io::Result<String> {
    let file = std::fs::File::open(path)?;
    let bytes = file.metadata()?.len();
    let (mut hash, mut from, mut buffer) = (XxHash3_64::new(), BufReader::new(file).take(256 << 20), vec![0; 1 << 20]);
    loop {
        match from.read(&mut buffer)? {
            0 => return Ok(format!("{bytes} bytes with checksum {:x}", std::hash::Hasher::finish(&hash))),
            read => std::hash::Hasher::write(&mut hash, &buffer[..read]),
        }
    }
}
