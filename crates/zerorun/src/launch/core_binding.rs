//! Binds ranks to their own cores: `--bind_cores_to_rank`.
//!
//! Without a list, the cores are the physical cores on which this process may run: one hardware thread of each, NUMA
//! node by NUMA node. A rank runs on its cores from its first instruction, so the memory that it touches first is near
//! them.

use super::hosts::core_list::{CoreList, ranges};
use crate::error::{HostsError, LaunchError, Result};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// The variable that makes Intel's OpenMP bind threads.
const KMP_AFFINITY: &str = "KMP_AFFINITY";

/// The cores that the user gives to ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CoreBinding {
    /// The cores of `--bind_core_list`, or `None` for the physical cores.
    pub(crate) list: Option<CoreList>,
}

impl CoreBinding {
    /// Returns the cores for `ranks` ranks on this host, whose name is `host`.
    ///
    /// # Errors
    /// Fails if a core of the list is not available to this process, there are fewer cores than ranks, or the
    /// environment variable `KMP_AFFINITY` is set.
    pub(crate) fn cores(&self, ranks: usize, host: &str) -> Result<CoreList> {
        if std::env::var_os(KMP_AFFINITY).is_some() {
            return Err(HostsError::KmpAffinity.into());
        }
        let allowed = allowed_cores()?;
        let cores = match &self.list {
            None => CoreList::of(physical_cores(&allowed, siblings)).by_node(&numa_nodes()),
            Some(list) => match list.cores().iter().find(|core| !allowed.contains(core)) {
                None => list.clone(),
                Some(core) => {
                    let (host, known) = (host.to_string(), ranges(&allowed));
                    return Err(HostsError::NoSuchCore { core: *core, host, known }.into());
                }
            },
        };
        cores.share(0, ranks)?;
        Ok(cores)
    }

    /// Returns the command line options of this binding.
    pub(crate) fn to_args(&self) -> Vec<String> {
        let list = self.list.iter().flat_map(|list| ["--bind_core_list".to_string(), ranges(list.cores())]);
        std::iter::once("--bind_cores_to_rank".to_string()).chain(list).collect()
    }
}

/// Returns the hardware threads on which this process may run, in ascending order.
fn allowed_cores() -> Result<Vec<usize>> {
    let set = sched_getaffinity(None)
        .map_err(|error| LaunchError::Setup { what: "finding the cores of this process", source: error.into() })?;
    Ok((0..CpuSet::MAX_CPU).filter(|core| set.is_set(*core)).collect())
}

/// Returns one hardware thread of each physical core: the first of its threads in `allowed`. `siblings` returns the
/// threads that share a core with a given one.
fn physical_cores(allowed: &[usize], siblings: impl Fn(usize) -> Option<CoreList>) -> Vec<usize> {
    let first = |core: usize| {
        let shared = siblings(core)?;
        shared.cores().iter().copied().find(|other| allowed.contains(other))
    };
    allowed.iter().copied().filter(|core| first(*core).is_none_or(|first| first == *core)).collect()
}

/// Returns the kernel's list of the hardware threads of a core, or `None` if there is none.
fn siblings(core: usize) -> Option<CoreList> {
    let file = format!("/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list");
    CoreList::parse(std::fs::read_to_string(file).ok()?.trim()).ok()
}

/// Returns the hardware threads of each NUMA node that has any, in the order of the nodes' numbers. Returns no nodes if
/// the kernel does not list them.
fn numa_nodes() -> Vec<CoreList> {
    let folder = |number: usize| format!("/sys/devices/system/node/node{number}/cpulist");
    let online = std::fs::read_to_string("/sys/devices/system/node/online").unwrap_or_default();
    let numbers = CoreList::parse(online.trim()).map(|numbers| numbers.cores().to_vec()).unwrap_or_default();
    let list = |number: usize| CoreList::parse(std::fs::read_to_string(folder(number)).ok()?.trim()).ok();
    // The list of a node with only memory is empty, which is not a valid `CoreList`.
    numbers.into_iter().filter_map(list).collect()
}

/// Restricts a program to these cores.
pub(super) fn bind(command: &mut Command, cores: &[usize]) {
    let mut set = CpuSet::new();
    cores.iter().for_each(|core| set.set(*core));
    let in_child = move || sched_setaffinity(None, &set).map_err(io::Error::from);
    // SAFETY: between fork and exec, only async-signal-safe calls are allowed. The closure makes one system call; it
    // does not allocate, lock or panic.
    unsafe {
        command.pre_exec(in_child);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn of_threads_that_share_a_core_the_first_one_that_is_allowed_counts() {
        let pairs = |core: usize| Some(CoreList::of(vec![core % 4, core % 4 + 4]));
        assert_eq!(physical_cores(&[0, 1, 2, 3, 4, 5, 6, 7], pairs), [0, 1, 2, 3]);
        assert_eq!(physical_cores(&[1, 4, 5, 6], pairs), [1, 4, 6]);
        assert_eq!(physical_cores(&[2, 6], |_| None), [2, 6], "if the kernel lists no siblings");
    }

    #[test]
    fn another_launcher_is_told_the_same() {
        assert_eq!(CoreBinding { list: None }.to_args(), ["--bind_cores_to_rank"]);
        let list = Some(CoreList::parse("0,1,2,5").unwrap());
        assert_eq!(CoreBinding { list }.to_args(), ["--bind_cores_to_rank", "--bind_core_list", "0-2,5"]);
    }

    #[test]
    fn cores_of_this_process_are_taken_and_others_refused() {
        let allowed = allowed_cores().unwrap();
        let one = CoreBinding { list: Some(CoreList::of(vec![allowed[0]])) };
        assert_eq!(one.cores(1, "a").unwrap().cores(), [allowed[0]]);
        insta::assert_snapshot!(one.cores(2, "a").unwrap_err(), @"2 ranks on a host need at least 2 cores to be bound to, but only 1 can be used; give a longer core list, or start fewer ranks");
        let all = CoreBinding { list: None }.cores(1, "a").unwrap();
        assert!(all.cores().iter().all(|core| allowed.contains(core)), "{all:?} {allowed:?}");
        let far = CoreBinding { list: Some(CoreList::of(vec![allowed[0], 60_000])) };
        let text = far.cores(1, "a").unwrap_err().to_string();
        let text = text.replace(&format!("run on {};", ranges(&allowed)), "run on CORES;");
        insta::assert_snapshot!(text, @"--bind_core_list names core 60000, but zerorun's processes on host a may run on CORES; name only these, or start zerorun with more cores (taskset, a container, Slurm)");
    }
}
