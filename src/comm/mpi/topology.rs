//! The assignment of ranks to hosts, and the memory that the ranks of a host share.

use super::link::MpiLink;
use crate::comm::rank_env::SHM_FD;
use crate::comm::shm::region::SharedMemoryRegion;
use crate::error::{CommError, Result};
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

/// The number of bytes for a host's name, and for the text that distinguishes hosts.
const MAX_NAME_BYTES: usize = 256;

/// The ranks of each host, which are consecutive, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct HostTopology {
    ranks: Vec<Range<usize>>,
    names: Vec<String>,
    /// The index of this rank's host.
    host_index: usize,
}

/// The data that a rank reports about its host.
#[derive(Debug, Clone, PartialEq, Eq)]
struct HostIdentity {
    name: String,
    /// A key that is equal for ranks that can share memory.
    key: String,
}

impl HostIdentity {
    /// Identifies this host: its name, its boot ID, and its PID and network namespaces.
    fn of_this_host() -> Self {
        let kernel = |file: &str| std::fs::read_to_string(format!("/proc/sys/kernel/{file}")).unwrap_or_default();
        let (name, boot) = (kernel("hostname").trim().to_string(), kernel("random/boot_id"));
        let namespace = |kind: &str| {
            let link = std::fs::read_link(format!("/proc/self/ns/{kind}"));
            link.map(|link| link.display().to_string()).unwrap_or_default()
        };
        // Under zerorun, only the ranks that one launcher has started share its memory.
        let node = match std::env::var_os(SHM_FD) {
            Some(_) => std::env::var("CROSS_RANK").unwrap_or_default(),
            None => String::new(),
        };
        let key = format!("{} {} {} {node} {name}", boot.trim(), namespace("net"), namespace("pid"));
        Self { name, key }
    }

    fn to_bytes(&self) -> Vec<u8> {
        [&self.name, &self.key].into_iter().flat_map(|text| to_fixed_length(text)).collect()
    }

    fn from_bytes(bytes: &[u8]) -> Self {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim_end_matches('\0').to_string();
        Self { name: text(&bytes[..MAX_NAME_BYTES]), key: text(&bytes[MAX_NAME_BYTES..]) }
    }
}

/// Returns a string as MAX_NAME_BYTES bytes, truncated or padded with zeros.
fn to_fixed_length(text: &str) -> Vec<u8> {
    let mut bytes = text.as_bytes().to_vec();
    bytes.resize(MAX_NAME_BYTES, 0);
    bytes
}

impl HostTopology {
    /// Exchanges the identities of hosts among all ranks.
    ///
    /// # Errors
    /// Fails if MPI fails, or if the ranks of one host are not consecutive.
    pub(super) fn exchange(link: &MpiLink) -> Result<Self> {
        let all = link.gather(&HostIdentity::of_this_host().to_bytes())?;
        Self::of(&all.iter().map(|bytes| HostIdentity::from_bytes(bytes)).collect::<Vec<_>>(), link.rank())
    }

    fn of(all: &[HostIdentity], rank: usize) -> Result<Self> {
        let (mut ranks, mut names) = (Vec::<Range<usize>>::new(), Vec::new());
        for (r, identity) in all.iter().enumerate() {
            if r > 0 && all[r - 1].key == identity.key {
                ranks.last_mut().expect("rank 0 has begun a host").end = r + 1;
                continue;
            }
            if let Some(earlier) = all[..r].iter().position(|other| other.key == identity.key) {
                return Err(CommError::HostsMixed { host: identity.name.clone(), first: earlier, second: r }.into());
            }
            ranks.push(r..r + 1);
            names.push(identity.name.clone());
        }
        let host_index = ranks.iter().position(|ranks| ranks.contains(&rank)).expect("every rank is on a host");
        Ok(Self { ranks, names, host_index })
    }

    /// Returns the topology of a group, whose ranks are counted from 0. `members` are their numbers in this topology,
    /// in ascending order.
    pub(super) fn within(&self, members: &[usize]) -> Self {
        let index_of = |rank: usize| members.partition_point(|member| *member < rank);
        let hosts = self.ranks.iter().zip(&self.names).enumerate();
        let member_hosts = hosts.map(|(host, (ranks, name))| (host, index_of(ranks.start)..index_of(ranks.end), name));
        let member_hosts: Vec<_> = member_hosts.filter(|(_, ranks, _)| !ranks.is_empty()).collect();
        let host_index =
            member_hosts.iter().position(|(host, ..)| *host == self.host_index).expect("this rank is a member");
        let ranks = member_hosts.iter().map(|(_, ranks, _)| ranks.clone()).collect();
        Self { ranks, names: member_hosts.into_iter().map(|(_, _, name)| name.clone()).collect(), host_index }
    }

    /// Returns a topology of `hosts` hosts with `ranks_per_host` ranks each, for estimates.
    pub(super) fn even(hosts: usize, ranks_per_host: usize) -> Self {
        let ranks = (0..hosts).map(|host| host * ranks_per_host..(host + 1) * ranks_per_host).collect();
        Self { ranks, names: Vec::new(), host_index: 0 }
    }

    /// Returns a topology with these numbers of ranks on each host, as seen by `rank`.
    #[cfg(test)]
    pub(super) fn with(counts: &[usize], rank: usize) -> Self {
        let starts = (0..=counts.len()).map(|host| counts[..host].iter().sum::<usize>());
        let ranks: Vec<_> = starts.clone().zip(starts.skip(1)).map(|(start, end)| start..end).collect();
        let host_index = ranks.iter().position(|ranks| ranks.contains(&rank)).expect("a rank of a host");
        Self { names: vec![String::new(); ranks.len()], ranks, host_index }
    }

    /// Returns the number of ranks on all hosts.
    pub(super) fn world_size(&self) -> usize {
        self.ranks.last().map_or(0, |ranks| ranks.end)
    }

    /// Returns the ranks of this host.
    pub(super) fn local_ranks(&self) -> Range<usize> {
        self.ranks[self.host_index].clone()
    }

    /// Returns the ranks of each host, in order.
    pub(super) fn host_ranks(&self) -> &[Range<usize>] {
        &self.ranks
    }

    /// Returns the index of this host.
    pub(super) fn host_index(&self) -> usize {
        self.host_index
    }

    /// Returns the ranks of each of the other hosts.
    pub(super) fn remote_ranks(&self) -> impl Iterator<Item = Range<usize>> {
        let host_index = self.host_index;
        self.ranks.iter().enumerate().filter(move |(host, _)| *host != host_index).map(|(_, ranks)| ranks.clone())
    }

    /// Returns the ranks of all other hosts, in order.
    pub(super) fn remote(&self) -> impl Iterator<Item = usize> {
        self.remote_ranks().flatten()
    }

    /// Returns the smallest number of ranks on any host: this many ranks of each host serve the lanes, and divide
    /// among themselves the data that their host exchanges with others.
    pub(super) fn lanes(&self) -> usize {
        self.ranks.iter().map(Range::len).min().unwrap_or(1)
    }

    /// Returns the name of the host of a rank.
    pub(super) fn name_of(&self, rank: usize) -> &str {
        let host = self.ranks.iter().position(|ranks| ranks.contains(&rank));
        host.map_or("?", |host| &self.names[host])
    }
}

/// Returns the memory that this host's ranks share. The first of these ranks creates it, and the others open it through
/// the first rank's descriptor.
///
/// # Errors
/// Fails if MPI or the system fails.
pub(super) fn share_region(link: &MpiLink, hosts: &HostTopology, rank: usize) -> Result<Arc<SharedMemoryRegion>> {
    let local_ranks = hosts.local_ranks();
    let created = if rank == local_ranks.start { Some(SharedMemoryRegion::create(local_ranks.len())?) } else { None };
    let fd = created.as_ref().map_or(-1, |region| region.as_fd().as_raw_fd());
    let own = [std::process::id() as i32, fd].map(i32::to_le_bytes).concat();
    let all = link.gather(&own)?;
    let word = |at: usize| i32::from_le_bytes(all[local_ranks.start][at..at + 4].try_into().expect("four bytes"));
    let region = match created {
        Some(region) => {
            region.mark_all_started();
            region
        }
        None => {
            let path = format!("/proc/{}/fd/{}", word(0), word(4));
            let opened = std::fs::File::options().read(true).write(true).open(&path);
            let file = opened.map_err(|source| CommError::Region {
                action: "open the memory that ranks share",
                source: Arc::new(source),
            })?;
            SharedMemoryRegion::open(OwnedFd::from(file), local_ranks.len())?
        }
    };
    // The first rank must not end before all others have opened its descriptor, because its exit closes the descriptor.
    link.gather(&[0])?;
    Ok(Arc::new(region))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn of(keys: &str, rank: usize) -> Result<HostTopology> {
        let identity = |key: char| HostIdentity { name: format!("host-{key}"), key: key.to_string() };
        HostTopology::of(&keys.chars().map(identity).collect::<Vec<_>>(), rank)
    }

    #[test]
    fn consecutive_ranks_with_one_key_are_a_host() {
        let hosts = of("aabccc", 2).unwrap();
        assert_eq!((hosts.world_size(), hosts.local_ranks(), hosts.lanes()), (6, 2..3, 1));
        assert_eq!(hosts.remote_ranks().collect::<Vec<_>>(), [0..2, 3..6]);
        assert_eq!(hosts.remote().collect::<Vec<_>>(), [0, 1, 3, 4, 5]);
        assert_eq!(hosts.name_of(4), "host-c");
    }

    #[test]
    fn a_group_has_the_hosts_of_its_members() {
        let hosts = of("aabbbccd", 3).unwrap().within(&[0, 3, 4, 7]);
        assert_eq!(hosts.host_ranks(), [0..1, 1..3, 3..4]);
        assert_eq!((hosts.local_ranks(), hosts.world_size(), hosts.name_of(3)), (1..3, 4, "host-d"));
    }

    #[test]
    fn ranks_of_a_host_with_others_between_them_are_refused() {
        insta::assert_snapshot!(of("aba", 0).unwrap_err(), @"ranks 0 and 2 are on host host-a, but ranks between them are not: the ranks of a host must be consecutive; place them slot by slot (mpirun --map-by slot, srun --distribution block)");
    }

    #[test]
    fn what_a_rank_tells_of_its_host_is_read_as_it_was() {
        let here = HostIdentity::of_this_host();
        assert_eq!(HostIdentity::from_bytes(&here.to_bytes()), here);
        assert!(!here.name.is_empty());
    }
}
