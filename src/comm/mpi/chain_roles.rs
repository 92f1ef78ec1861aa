//! The roles of ranks in a chain, in which partial sums go from host to host.
//!
//! The chunk of rank o belongs to lane o modulo the number of lanes, which is the smallest number of ranks on any host.
//! On each host, the first ranks serve the lanes, one rank per lane. If all hosts have the same number of ranks, each
//! owner serves the lane of its own chunk on its host.

use super::topology::HostTopology;

/// The role of one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ChainRole {
    /// The owners of the chunks that this rank adds up for its lane, in order; empty if the rank serves no lane.
    pub owners: Vec<usize>,
    /// The rank that serves the lane on the previous host, if there is one.
    pub previous: Option<usize>,
    /// The rank that serves the lane on the next host, if there is one.
    pub next: Option<usize>,
    /// The rank on the last host that sends this rank the sums of its chunk.
    pub sum_sender: usize,
    /// Whether this rank's host is the first.
    pub first: bool,
    /// Whether this rank's host is the last.
    pub last: bool,
}

impl ChainRole {
    /// Returns the role of `rank`, which is on this host.
    pub(super) fn of(hosts: &HostTopology, rank: usize) -> Self {
        let (host_ranks, host_index, lanes) = (hosts.host_ranks(), hosts.host_index(), hosts.lanes());
        let (lane, last) = (rank - hosts.local_ranks().start, host_ranks.len() - 1);
        let lane_rank_on = |host: Option<usize>| {
            host.filter(|_| lane < lanes).and_then(|host| Some(host_ranks.get(host)?.start + lane))
        };
        Self {
            owners: (0..hosts.world_size()).filter(|owner| lane < lanes && owner % lanes == lane).collect(),
            previous: lane_rank_on(host_index.checked_sub(1)),
            next: lane_rank_on(Some(host_index + 1)),
            sum_sender: host_ranks[last].start + rank % lanes,
            first: host_index == 0,
            last: host_index == last,
        }
    }

    /// Returns the ranks of other hosts with which this rank exchanges messages, in order. The relation is symmetric.
    pub(super) fn partners(&self, hosts: &HostTopology) -> Vec<usize> {
        let local_ranks = hosts.local_ranks();
        let mut partners: Vec<usize> = self.previous.into_iter().chain(self.next).collect();
        match self.last {
            true => partners.extend(self.owners.iter().filter(|owner| !local_ranks.contains(owner))),
            false => partners.push(self.sum_sender),
        }
        partners.sort_unstable();
        partners.dedup();
        partners
    }
}

/// Returns the ranks of the last host, other than `sum_sender`, that receive their sums from rank `sum_sender` of that
/// host.
pub(super) fn receivers_from(hosts: &HostTopology, sum_sender: usize) -> Vec<usize> {
    let last = hosts.host_ranks()[hosts.host_ranks().len() - 1].clone();
    let lane = sum_sender - last.start;
    let lanes = hosts.lanes();
    last.filter(|owner| lane < lanes && owner % lanes == lane && *owner != sum_sender).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const COUNTS: [&[usize]; 8] = [&[1, 1], &[2, 2], &[3, 3, 3], &[1, 2], &[3, 1], &[9, 7], &[2, 3, 2], &[5, 2, 4, 3]];

    fn all(counts: &[usize]) -> Vec<(HostTopology, ChainRole)> {
        let world = counts.iter().sum();
        let of = |rank| {
            let hosts = HostTopology::with(counts, rank);
            let role = ChainRole::of(&hosts, rank);
            (hosts, role)
        };
        (0..world).map(of).collect()
    }

    #[test]
    fn the_lanes_of_each_host_share_all_chunks() {
        for counts in COUNTS {
            let all = all(counts);
            for ranks in all[0].0.host_ranks() {
                let mut owners: Vec<usize> = ranks.clone().flat_map(|rank| all[rank].1.owners.clone()).collect();
                owners.sort_unstable();
                assert_eq!(owners, (0..all.len()).collect::<Vec<_>>(), "{counts:?}");
            }
        }
    }

    #[test]
    fn every_partner_has_this_rank_as_its_partner_and_no_rank_of_its_own_host() {
        for counts in COUNTS {
            let all = all(counts);
            for (rank, (hosts, role)) in all.iter().enumerate() {
                for partner in role.partners(hosts) {
                    let (theirs, other) = &all[partner];
                    assert!(other.partners(theirs).contains(&rank), "{counts:?}: {rank} and {partner}");
                    assert!(!hosts.local_ranks().contains(&partner));
                }
                let back = role.next.map(|next| all[next].1.previous);
                assert!(back.is_none_or(|previous| previous == Some(rank)), "{counts:?}");
            }
        }
    }

    #[test]
    fn every_owner_has_one_giver_and_where_hosts_are_alike_it_hands_nothing_to_others_of_its_host() {
        for counts in COUNTS {
            let all = all(counts);
            let last = all[0].0.host_ranks()[counts.len() - 1].clone();
            for (rank, (hosts, role)) in all.iter().enumerate() {
                assert!(last.contains(&role.sum_sender) && all[role.sum_sender].1.owners.contains(&rank), "{counts:?}");
                if role.last {
                    assert_eq!(
                        receivers_from(hosts, role.sum_sender).contains(&rank),
                        role.sum_sender != rank,
                        "{counts:?}"
                    );
                }
            }
            if counts.windows(2).all(|pair| pair[0] == pair[1]) {
                assert!(last.clone().all(|rank| receivers_from(&all[rank].0, rank).is_empty()), "{counts:?}");
            }
        }
    }
}
