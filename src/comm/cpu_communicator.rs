//! The communicator of the ranks of a job, or of a group of them, over shared memory and MPI.

use super::backend::CollectiveBackend;
use super::collective_queue::CollectiveLauncher;
use super::joined_rank::JoinedRank;
use super::mpi::MpiRank;
use super::shm::exchange::ShmExchange;
use super::shm::region::{CHANNELS, SharedMemoryRegion};
use super::{
    CollectiveKind, CommLog, CommReport, Communicator, Pending, SoloCommunicator, WireFormat, agree, point_to_point,
};
use crate::error::{CommError, Result};
use crate::precision::Flat;
use crate::util::{counted, fnv1a, is_or_are, lock};
use candle_core::DType;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// A communicator for ranks that are processes or threads: in shared memory on one host, and over MPI between hosts.
pub struct CpuCommunicator {
    // Fields are dropped in this order: a rank leaves the job after its launched collectives are done.
    launcher: CollectiveLauncher,
    /// The groups created so far; the one at position i uses channel i + 1.
    groups: Mutex<Vec<(Vec<Vec<usize>>, GroupCommunicator)>>,
    presence: Arc<JoinedRank>,
    /// This rank's position among `members`.
    rank: usize,
    size: usize,
    /// The members' numbers in the job, in ascending order, if this is a group.
    members: Option<Arc<[usize]>>,
    /// The channel of this communicator's collectives in shared memory: 0 for the job.
    channel: usize,
    ranks_here: Range<usize>,
}

/// The communicator of this rank's group in a division of the job into groups.
#[derive(Clone)]
pub(super) enum GroupCommunicator {
    /// Several ranks.
    Several(Arc<CpuCommunicator>),
    /// Only this rank.
    Alone(Arc<SoloCommunicator>),
}

impl CpuCommunicator {
    /// Joins the job of `region` as `rank`. A wait of more than `timeout` for a peer is an error.
    ///
    /// # Errors
    /// Fails if the rank is already taken, or a thread cannot be started.
    pub(crate) fn new(region: Arc<SharedMemoryRegion>, rank: usize, timeout: Duration) -> Result<Self> {
        Self::of_job(JoinedRank::enter(region, rank, timeout, None)?)
    }

    /// Joins the job as `rank`, with the other ranks of this host in `region` and those of other hosts over `mpi`.
    ///
    /// # Errors
    /// Fails for the same reasons as [`CpuCommunicator::new`].
    pub(super) fn across_hosts(
        region: Arc<SharedMemoryRegion>,
        rank: usize,
        timeout: Duration,
        mpi: MpiRank,
    ) -> Result<Self> {
        Self::of_job(JoinedRank::enter(region, rank, timeout, Some(mpi))?)
    }

    fn of_job(presence: Arc<JoinedRank>) -> Result<Self> {
        let (rank, size, first) = (presence.rank(), presence.world_size(), presence.first());
        let (region, timeout) = (presence.region().clone(), presence.timeout());
        let ranks_here = first..first + region.world_size();
        let exchange = ShmExchange::new(region, rank - first, timeout).numbered_from(first);
        let backend = match presence.other_hosts() {
            Some(mpi) => CollectiveBackend::MultiHost(mpi.collectives(exchange, timeout)),
            None => CollectiveBackend::SingleHost(exchange),
        };
        Self::start(presence, (rank, size, ranks_here), None, 0, backend)
    }

    /// Returns the communicator of this rank's group, which consists of the ranks `members` of the job and uses
    /// `channel`.
    fn of_group(presence: &Arc<JoinedRank>, members: Arc<[usize]>, channel: usize) -> Result<Self> {
        let (rank_in_job, first, timeout) = (presence.rank(), presence.first(), presence.timeout());
        let region = presence.region().clone();
        let host_ranks = first..first + region.world_size();
        let start = members.partition_point(|member| *member < host_ranks.start);
        let local: Vec<usize> =
            members.iter().filter(|rank| host_ranks.contains(rank)).map(|rank| rank - first).collect();
        let ranks_here = start..start + local.len();
        let rank = members.partition_point(|member| *member < rank_in_job);
        let exchange = ShmExchange::of_group(region, channel, local, rank - start, timeout).numbered_from(first);
        let backend = match presence.other_hosts().filter(|_| ranks_here.len() < members.len()) {
            Some(mpi) => {
                CollectiveBackend::MultiHost(mpi.group_collectives(exchange, members.clone(), channel, timeout))
            }
            None => CollectiveBackend::SingleHost(exchange),
        };
        Self::start(presence.clone(), (rank, members.len(), ranks_here), Some(members), channel, backend)
    }

    fn start(
        presence: Arc<JoinedRank>,
        (rank, size, ranks_here): (usize, usize, Range<usize>),
        members: Option<Arc<[usize]>>,
        channel: usize,
        backend: CollectiveBackend,
    ) -> Result<Self> {
        let name = match channel {
            0 => format!("comm-{rank}"),
            _ => format!("comm-{}-{channel}", presence.rank()),
        };
        let abort_signal = presence.abort_signal();
        let started = CollectiveLauncher::start(name, backend, abort_signal.clone());
        let launcher = started.map_err(|source| abort_signal.thread_not_started(source))?;
        Ok(Self { presence, rank, size, members, channel, ranks_here, launcher, groups: Mutex::default() })
    }

    /// Notifies the other ranks that this rank is panicking.
    pub(super) fn abort_in_panic(&self) {
        self.presence.abort_signal().abort("it panicked; see its own output");
    }

    /// Waits until all launched collectives of this communicator are done.
    pub(super) fn finish_launched(&self) {
        self.launcher.finish_launched();
    }

    pub(super) fn presence(&self) -> &JoinedRank {
        &self.presence
    }

    /// Returns the job-wide number of another rank of this communicator.
    fn peer_in_job(&self, rank: usize) -> usize {
        assert!(
            rank < self.size && rank != self.rank,
            "rank {} of {} cannot exchange a message with rank {rank}; name another rank below {}",
            self.rank,
            self.size,
            self.size
        );
        self.in_job(rank)
    }

    /// Does the work of [`Communicator::group`].
    pub(super) fn group_of(&self, groups: &[Vec<usize>]) -> Result<GroupCommunicator> {
        let rank = self.in_job(self.rank);
        let groups_error = |why: String| CommError::Groups { rank, why };
        if self.members.is_some() {
            let why = "this communicator belongs to a group; call `group` on the communicator of the job";
            return Err(groups_error(why.into()).into());
        }
        let division = self.division(groups);
        // Ranks with invalid groups also run this collective, so that all ranks stay in step.
        let hash = |groups: &Vec<Vec<usize>>| fnv1a(format!("{groups:?}").as_bytes());
        let all = agree::gather_u64(self, &[division.as_ref().map_or(0, hash)])?;
        let groups = division.map_err(groups_error)?;
        if let Some(peer) = all.iter().position(|hash| *hash != all[rank]) {
            let why = format!("rank {peer} passes groups that differ from those of this rank, {}", listed(&groups));
            return Err(groups_error(why).into());
        }
        let mut divisions = lock(&self.groups);
        if let Some((_, group)) = divisions.iter().find(|(existing, _)| *existing == groups) {
            return Ok(group.clone());
        }
        let channel = divisions.len() + 1;
        if channel == CHANNELS {
            let why = format!(
                "the job has already been divided into groups in {} different ways, which is the maximum; use the \
                 same groups again",
                CHANNELS - 1
            );
            return Err(groups_error(why).into());
        }
        let own = groups.iter().find(|group| group.contains(&rank)).expect("every rank is in a group");
        let group = match own.len() {
            1 => GroupCommunicator::Alone(Arc::new(SoloCommunicator::in_job(self.presence.clone()))),
            _ => GroupCommunicator::Several(Arc::new(Self::of_group(&self.presence, own.clone().into(), channel)?)),
        };
        divisions.push((groups, group.clone()));
        Ok(group)
    }

    /// Returns the groups in ascending order if each rank is in exactly one of them, and otherwise, as an error, the
    /// problem.
    fn division(&self, groups: &[Vec<usize>]) -> Result<Vec<Vec<usize>>, String> {
        let mut seen = vec![false; self.size];
        for member in groups.iter().flatten() {
            match seen.get_mut(*member) {
                None => {
                    let (be, ranks) = (is_or_are(self.size), counted(self.size, "rank"));
                    return Err(format!("rank {member} does not exist: there {be} {ranks}"));
                }
                Some(true) => return Err(format!("rank {member} is in two groups or twice in one")),
                Some(seen) => *seen = true,
            }
        }
        if let Some(missing) = seen.iter().position(|seen| !seen) {
            return Err(format!("rank {missing} is in no group"));
        }
        let mut groups: Vec<Vec<usize>> = groups.iter().filter(|group| !group.is_empty()).cloned().collect();
        groups.iter_mut().for_each(|group| group.sort_unstable());
        groups.sort_unstable();
        Ok(groups)
    }
}

/// Returns groups as text, shortened if there are many.
fn listed(groups: &[Vec<usize>]) -> String {
    const MAX_GROUPS: usize = 8;
    let first: Vec<String> = groups.iter().take(MAX_GROUPS).map(|group| format!("{group:?}")).collect();
    let more = if groups.len() > MAX_GROUPS { format!(", ... ({} groups)", groups.len()) } else { String::new() };
    format!("[{}{more}]", first.join(", "))
}

/// Returns the number of elements and of bytes.
fn size(flat: &Flat) -> (usize, usize) {
    (flat.len(), flat.size_in_bytes())
}

impl Communicator for CpuCommunicator {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn all_reduce_as(&self, wire: WireFormat, input: Flat, tag: u64) -> Pending<Flat> {
        self.launcher
            .launch(CollectiveKind::AllReduce, size(&input), move |backend| backend.all_reduce(wire, input, tag))
    }

    fn reduce_scatter_as(&self, wire: WireFormat, input: Flat, tag: u64) -> Pending<Flat> {
        self.launcher.launch(CollectiveKind::ReduceScatter, size(&input), move |backend| {
            backend.reduce_scatter(wire, input, tag)
        })
    }

    fn all_gather_as(&self, wire: WireFormat, shard: Flat, tag: u64) -> Pending<Flat> {
        self.launcher
            .launch(CollectiveKind::AllGather, size(&shard), move |backend| backend.all_gather(wire, shard, tag))
    }

    fn ranks_here(&self) -> Range<usize> {
        self.ranks_here.clone()
    }

    fn all_gather_within_as(&self, wire: WireFormat, ranks: usize, shard: Flat, tag: u64) -> Pending<Flat> {
        self.launcher.launch(CollectiveKind::AllGather, size(&shard), move |backend| {
            backend.all_gather_within(wire, ranks, shard, tag)
        })
    }

    fn reduce_to_groups_as(&self, wire: WireFormat, ranks: usize, input: Flat, tag: u64) -> Pending<Flat> {
        self.launcher.launch(CollectiveKind::ReduceScatter, size(&input), move |backend| {
            backend.reduce_to_groups(wire, ranks, input, tag)
        })
    }

    fn gather_bytes(&self, bytes: Vec<u8>) -> Pending<Vec<Vec<u8>>> {
        self.launcher.launch(
            CollectiveKind::Control,
            (CollectiveKind::control_elements(&bytes), bytes.len()),
            move |backend| backend.gather_bytes(&bytes),
        )
    }

    fn barrier(&self) -> Pending<()> {
        self.launcher.launch(CollectiveKind::Barrier, (0, 0), CollectiveBackend::barrier)
    }

    fn abort(&self, why: &str) {
        self.presence.abort_signal().abort(why);
    }

    fn timeout(&self) -> Duration {
        self.presence.timeout()
    }

    fn failure(&self) -> Option<CommError> {
        self.presence.failure("an operation outside this communicator")
    }

    fn report(&self) -> CommReport {
        self.launcher.counters().report()
    }

    fn log_into(&self, log: Option<Arc<CommLog>>) {
        self.launcher.log_into(log);
    }

    fn send(&self, to: usize, data: Flat, tag: u64) -> Pending<()> {
        let to = (self.peer_in_job(to), self.channel);
        point_to_point::send(&self.presence, self.launcher.counters(), to, data, tag)
    }

    fn receive(&self, from: usize, dtype: DType, len: usize, tag: u64) -> Pending<Flat> {
        let from = (self.peer_in_job(from), self.channel);
        point_to_point::receive(&self.presence, self.launcher.counters(), from, (dtype, len), tag)
    }

    fn in_job(&self, rank: usize) -> usize {
        self.members.as_ref().map_or(rank, |members| members[rank])
    }

    fn group(&self, groups: &[Vec<usize>]) -> Result<Arc<dyn Communicator>> {
        Ok(match self.group_of(groups)? {
            GroupCommunicator::Several(group) => group,
            GroupCommunicator::Alone(group) => group,
        })
    }
}

impl Drop for CpuCommunicator {
    /// Notifies the other ranks if this one is panicking. Otherwise, dropping `launcher` waits for launched
    /// collectives.
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.abort_in_panic();
        }
    }
}
