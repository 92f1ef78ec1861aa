//! The network performance of MPI itself between hosts: messages without any collective of this library.

use super::MpiRank;
use super::link::{MessageTag, MpiTransfer};
use crate::error::CommError;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// The size of a message in bytes: as large as a program that only moves bytes would choose.
const MESSAGE_BYTES: usize = 4 << 20;
/// The number of messages in each direction that may still be in flight when the next one is begun.
const MESSAGES_IN_FLIGHT: usize = 3;
/// The number of round trips with messages of a few bytes.
const ROUND_TRIPS: usize = 200;
/// The interval at which a wait checks for failed ranks.
const FAILURE_CHECK_INTERVAL: Duration = Duration::from_millis(20);

type Result<T> = std::result::Result<T, CommError>;

impl MpiRank {
    /// Sends `bytes` bytes from this host to the next one, and receives as many from the previous one. The ranks of a
    /// host that serve lanes divide the bytes among themselves. All ranks must call this at the same time, while no
    /// collective is in progress.
    ///
    /// # Errors
    /// Fails if MPI fails or a rank has given up.
    pub(in crate::comm) fn send_around(&self, bytes: usize) -> Result<()> {
        let (lanes, lane) = (self.hosts.lanes(), self.link.rank() - self.hosts.local_ranks().start);
        if lane >= lanes {
            return Ok(());
        }
        let (host_ranks, host_index) = (self.hosts.host_ranks(), self.hosts.host_index());
        let to = host_ranks[(host_index + 1) % host_ranks.len()].start + lane;
        let from = host_ranks[(host_index + host_ranks.len() - 1) % host_ranks.len()].start + lane;
        let (mut incoming, mut outgoing) = (VecDeque::new(), VecDeque::new());
        let share = bytes.div_ceil(lanes);
        for start in (0..share).step_by(MESSAGE_BYTES) {
            let len = MESSAGE_BYTES.min(share - start);
            incoming.push_back(self.link.receive(from, MessageTag::Plain, len)?);
            outgoing.push_back(self.link.send(to, MessageTag::Plain, vec![1; len])?);
            if incoming.len() > MESSAGES_IN_FLIGHT {
                self.finish(incoming.pop_front())?;
                self.finish(outgoing.pop_front())?;
            }
        }
        incoming.into_iter().chain(outgoing).try_for_each(|transfer| self.finish(Some(transfer)))
    }

    /// Returns, on the first host's first rank, the latency of a message of a few bytes to the second host's first
    /// rank: half of the median round trip. Returns `None` on all other ranks. There must be at least two hosts.
    ///
    /// # Errors
    /// Fails for the same reasons as [`MpiRank::send_around`].
    pub(in crate::comm) fn one_way_latency(&self) -> Result<Option<Duration>> {
        let (rank, hosts) = (self.link.rank(), self.hosts.host_ranks());
        let (first, second) = (hosts[0].start, hosts[1].start);
        let mut times = Vec::new();
        for _ in 0..ROUND_TRIPS {
            let start = Instant::now();
            if rank == first {
                self.finish(Some(self.link.send(second, MessageTag::Data, vec![1; 8])?))?;
                self.finish(Some(self.link.receive(second, MessageTag::Data, 8)?))?;
            } else if rank == second {
                self.finish(Some(self.link.receive(first, MessageTag::Data, 8)?))?;
                self.finish(Some(self.link.send(first, MessageTag::Data, vec![1; 8])?))?;
            }
            times.push(start.elapsed() / 2);
        }
        times.sort_unstable();
        Ok((rank == first).then_some(times[ROUND_TRIPS / 2]))
    }

    fn finish(&self, transfer: Option<MpiTransfer>) -> Result<()> {
        let Some(mut transfer) = transfer else { return Ok(()) };
        let mut last_check = Instant::now();
        while !transfer.is_done()? {
            std::thread::yield_now();
            if last_check.elapsed() > FAILURE_CHECK_INTERVAL {
                last_check = Instant::now();
                if let Some((rank, why)) = self.peer_exit_notices.failure()? {
                    return Err(CommError::other(format!("rank {rank} gave up: {why}")));
                }
            }
        }
        drop(transfer.into_bytes());
        Ok(())
    }
}
