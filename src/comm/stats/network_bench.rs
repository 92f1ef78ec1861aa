//! The performance of the network between hosts: MPI's own messages, compared with this library's collectives.

use crate::comm::agree::ranks_per_host;
use crate::comm::mpi::{MpiRank, mpi_rank};
use crate::comm::{CollectiveKind, Communicator};
use crate::error::Result;
use crate::precision::Flat;
use serde::Serialize;
use std::time::{Duration, Instant};

/// The number of rounds of each measurement, of which the fastest is reported.
const ROUNDS: usize = 3;

/// The time in seconds for which collectives are repeated while CPU usage is measured. The system counts usage in ticks
/// of a hundredth of a second.
const CPU_MEASUREMENT_SECS: f64 = 1.0;
/// The maximum number of these repetitions.
const MAX_CPU_ROUNDS: f64 = 200.0;

/// The results of the measurement, which are the same on all ranks.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[doc(hidden)]
pub struct NetworkMeasurement {
    /// The number of ranks on each host.
    pub hosts: Vec<usize>,
    /// The time in seconds that a message of a few bytes takes from one host to another.
    pub one_way_s: f64,
    /// The number of bytes of each message or buffer in the measurements below.
    pub bytes: usize,
    /// The measurement of MPI's large messages, from each host to the next.
    pub plain: TransferMeasurement,
    /// The measurement of a reduce-scatter of buffers of `bytes` bytes.
    pub reduce_scatter: TransferMeasurement,
    /// The measurement of an all-gather of buffers of `bytes` bytes.
    pub all_gather: TransferMeasurement,
    /// The fraction of a host's CPU time that is used while its network link is busy; `None` if the system does not
    /// report it.
    pub busy: Option<f64>,
}

/// One measurement.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[doc(hidden)]
pub struct TransferMeasurement {
    /// The number of bytes received by the host that received the most.
    pub into_a_host: f64,
    /// The time in seconds until the last rank was done.
    pub seconds: f64,
}

impl TransferMeasurement {
    /// Returns the number of bytes per second that the host received.
    pub fn rate(self) -> f64 {
        self.into_a_host / self.seconds.max(f64::MIN_POSITIVE)
    }
}

/// Measures the network with buffers of about `bytes` bytes, on all ranks at the same time. Returns `None` if all ranks
/// are on one host, or if this process has not joined the job through MPI.
///
/// # Errors
/// Fails if a collective fails.
#[doc(hidden)]
pub fn measure(comm: &dyn Communicator, bytes: usize) -> Result<Option<NetworkMeasurement>> {
    let hosts = ranks_per_host(comm)?;
    let (Some(mpi_rank), true) = (mpi_rank(), hosts.len() > 1) else { return Ok(None) };
    let chunk = (bytes / size_of::<f32>()).div_ceil(comm.size());
    let bytes = chunk * comm.size() * size_of::<f32>();
    let one_way_latency = one_way_latency(comm, mpi_rank)?;
    let plain = fastest(comm, CollectiveKind::Control, || Ok(mpi_rank.send_around(bytes)?))?;
    // Messages outside collectives are not counted.
    let plain = TransferMeasurement { into_a_host: bytes as f64, ..plain };
    let reduce_scatter = fastest(comm, CollectiveKind::ReduceScatter, || {
        comm.reduce_scatter(Flat::F32(vec![1.0; chunk * comm.size()]), 1).wait().map(drop)
    })?;
    let all_gather = all_gather(comm, chunk)?;
    let busy = busy(comm, chunk, [plain, reduce_scatter, all_gather])?;
    Ok(Some(NetworkMeasurement { hosts, one_way_s: one_way_latency, bytes, plain, reduce_scatter, all_gather, busy }))
}

/// Measures the number of bytes per second that a host receives in an all-gather of about `bytes` bytes. Collective.
/// Returns `None` if all ranks are on one host.
///
/// # Errors
/// Fails if a collective fails.
#[doc(hidden)]
pub fn rate_between_hosts(comm: &dyn Communicator, bytes: usize) -> Result<Option<f64>> {
    if comm.ranks_here().len() == comm.size() {
        return Ok(None);
    }
    let chunk = (bytes / size_of::<f32>()).div_ceil(comm.size());
    Ok(Some(all_gather(comm, chunk)?.rate()))
}

/// Measures an all-gather of `chunk` f32 values from each rank.
fn all_gather(comm: &dyn Communicator, chunk: usize) -> Result<TransferMeasurement> {
    fastest(comm, CollectiveKind::AllGather, || comm.all_gather(Flat::F32(vec![1.0; chunk]), 1).wait().map(drop))
}

/// Returns the fraction of CPU time used on the host where it is largest. The collectives run on the communication
/// threads, as during computation.
fn busy(
    comm: &dyn Communicator,
    chunk: usize,
    [plain, reduce_scatter, all_gather]: [TransferMeasurement; 3],
) -> Result<Option<f64>> {
    // All ranks have the same times, so they agree on the number of rounds.
    let round = reduce_scatter.seconds + all_gather.seconds;
    let rounds = (CPU_MEASUREMENT_SECS / round.max(f64::MIN_POSITIVE)).clamp(1.0, MAX_CPU_ROUNDS).ceil();
    comm.barrier().wait()?;
    let before = processors();
    for _ in 0..rounds as usize {
        let sum = comm.reduce_scatter(Flat::F32(vec![1.0; chunk * comm.size()]), 1);
        std::thread::sleep(Duration::from_secs_f64(1.5 * reduce_scatter.seconds));
        sum.wait()?;
        let gathered = comm.all_gather(Flat::F32(vec![1.0; chunk]), 1);
        std::thread::sleep(Duration::from_secs_f64(1.5 * all_gather.seconds));
        gathered.wait()?;
    }
    comm.barrier().wait()?;
    // The seconds for which the link is busy.
    let link_seconds = rounds * (reduce_scatter.into_a_host + all_gather.into_a_host) / plain.rate();
    let own = before.zip(processors()).map(|(before, after)| (after.busy - before.busy) / (after.count * link_seconds));
    let all = comm.gather_f64(vec![own.unwrap_or(-1.0)]).wait()?.into_iter().flatten().fold(-1.0, f64::max);
    Ok((all >= 0.0).then_some(all.min(1.0)))
}

/// The CPU times of this host since it was started.
struct HostCpuTimes {
    count: f64,
    /// The seconds for which the processors were busy, summed over all of them.
    busy: f64,
}

/// Reads the CPU times that Linux counts in /proc/stat, in hundredths of a second.
fn processors() -> Option<HostCpuTimes> {
    processors_of(&std::fs::read_to_string("/proc/stat").ok()?)
}

fn processors_of(stat: &str) -> Option<HostCpuTimes> {
    let (all, lines) = stat.split_once('\n')?;
    let times: Vec<f64> = all.strip_prefix("cpu ")?.split_whitespace().map_while(|time| time.parse().ok()).collect();
    // The fields are user, nice, system, idle, iowait, irq and softirq, of which idle and iowait do not count. The
    // fields after them are the time of other virtual machines, or are already included in user and nice.
    let [user, nice, system, _, _, irq, softirq, ..] = times[..] else { return None };
    let count = lines.lines().take_while(|line| line.starts_with("cpu")).count();
    (count > 0).then(|| HostCpuTimes { count: count as f64, busy: (user + nice + system + irq + softirq) / 100.0 })
}

fn one_way_latency(comm: &dyn Communicator, mpi_rank: &MpiRank) -> Result<f64> {
    comm.barrier().wait()?;
    let own = mpi_rank.one_way_latency()?.map_or(0.0, |time| time.as_secs_f64());
    Ok(comm.gather_f64(vec![own]).wait()?.into_iter().flatten().fold(0.0, f64::max))
}

/// Runs a function on all ranks at the same time, in several rounds. Returns the time of the fastest round, and the
/// largest number of bytes that one host received in that round in collectives of `kind`.
fn fastest(comm: &dyn Communicator, kind: CollectiveKind, run: impl Fn() -> Result<()>) -> Result<TransferMeasurement> {
    let between = || comm.report().kind(kind).between_hosts_bytes;
    let mut best = TransferMeasurement { into_a_host: 0.0, seconds: Duration::MAX.as_secs_f64() };
    for _ in 0..ROUNDS {
        comm.barrier().wait()?;
        let (before, start) = (between(), Instant::now());
        run()?;
        let own = [start.elapsed().as_secs_f64(), (between() - before) as f64, comm.ranks_here().start as f64];
        let all = comm.gather_f64(own.to_vec()).wait()?;
        let seconds = all.iter().map(|rank| rank[0]).fold(0.0, f64::max);
        let into = |first: f64| all.iter().filter(|rank| rank[2] == first).map(|rank| rank[1]).sum::<f64>();
        let into_a_host = all.iter().map(|rank| into(rank[2])).fold(0.0, f64::max);
        if seconds < best.seconds {
            best = TransferMeasurement { into_a_host, seconds };
        }
    }
    Ok(best)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn busy_processors_are_counted_without_waiting_for_disks_and_time_taken_by_others() {
        let stat =
            "cpu  100 20 300 4000 500 60 7 80 90 0\ncpu0 1 2 3 4 5 6 7 8 9 0\ncpu1 1 2 3 4 5 6 7 8 9 0\nintr 5\n";
        let HostCpuTimes { count, busy } = processors_of(stat).unwrap();
        assert_eq!((count, busy), (2.0, 4.87));
        for invalid in ["", "cpu  1 2 3\ncpu0 1 2 3\n", "cpu  1 2 3 4 5 6 7 8 9 0\nintr 5\n"] {
            assert!(processors_of(invalid).is_none(), "{invalid}");
        }
        // The machine that runs this test has processors, and they have done some work.
        assert!(processors().is_none_or(|found| found.count >= 1.0 && found.busy > 0.0));
    }
}
