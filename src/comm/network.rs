//! What the network between hosts gives: MPI's own messages, and this library's collectives beside them.

use super::mpi::{Place, entered};
use super::{Communicator, Kind};
use crate::error::Result;
use crate::precision::Flat;
use serde::Serialize;
use std::time::{Duration, Instant};

/// Rounds of each measurement; the fastest counts.
const ROUNDS: usize = 3;

/// What was measured, as all ranks know it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Network {
    /// Ranks of each host.
    pub hosts: Vec<usize>,
    /// Seconds that a few bytes take from one host to another.
    pub one_way_s: f64,
    /// Bytes that each host sent and received in the following.
    pub bytes: usize,
    /// MPI's large messages, from each host to the next.
    pub plain: Row,
    /// Collectives of buffers of `bytes`.
    pub reduce_scatter: Row,
    /// As above.
    pub all_gather: Row,
}

/// One measurement.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Row {
    /// Bytes that came into the host that got the most.
    pub into_a_host: f64,
    /// Seconds until the last rank was done.
    pub seconds: f64,
}

impl Row {
    /// Bytes per second into a host.
    pub fn rate(self) -> f64 {
        self.into_a_host / self.seconds.max(f64::MIN_POSITIVE)
    }
}

/// Measures with buffers of about `bytes`, on all ranks at a time. `None` where all are on one host.
///
/// # Errors
/// Those of collectives.
pub(crate) fn measure(comm: &dyn Communicator, bytes: usize) -> Result<Option<Network>> {
    let firsts = comm.gather_f64(vec![comm.ranks_here().start as f64]).wait()?;
    let mut hosts: Vec<(f64, usize)> = Vec::new();
    for first in firsts.into_iter().flatten() {
        match hosts.last_mut() {
            Some((of, ranks)) if *of == first => *ranks += 1,
            _ => hosts.push((first, 1)),
        }
    }
    let (Some(place), true) = (entered(), hosts.len() > 1) else { return Ok(None) };
    let chunk = (bytes / size_of::<f32>()).div_ceil(comm.size());
    let bytes = chunk * comm.size() * size_of::<f32>();
    let one_way = one_way(comm, place)?;
    let plain = fastest(comm, Kind::Control, || Ok(place.send_around(bytes)?))?;
    let reduce_scatter = fastest(comm, Kind::ReduceScatter, || {
        comm.reduce_scatter(Flat::F32(vec![1.0; chunk * comm.size()]), 1).wait().map(drop)
    })?;
    let all_gather =
        fastest(comm, Kind::AllGather, || comm.all_gather(Flat::F32(vec![1.0; chunk]), 1).wait().map(drop))?;
    Ok(Some(Network {
        hosts: hosts.into_iter().map(|(_, ranks)| ranks).collect(),
        one_way_s: one_way,
        bytes,
        plain: Row { into_a_host: bytes as f64, ..plain },
        reduce_scatter,
        all_gather,
    }))
}

fn one_way(comm: &dyn Communicator, place: &Place) -> Result<f64> {
    comm.barrier().wait()?;
    let own = place.one_way()?.map_or(0.0, |time| time.as_secs_f64());
    Ok(comm.gather_f64(vec![own]).wait()?.into_iter().flatten().fold(0.0, f64::max))
}

/// Runs something on all ranks at a time, a few times: the fastest, and the bytes of `kind` that it brought into a host.
fn fastest(comm: &dyn Communicator, kind: Kind, run: impl Fn() -> Result<()>) -> Result<Row> {
    let between = || comm.report().kind(kind).between_hosts_bytes;
    let mut best = Row { into_a_host: 0.0, seconds: Duration::MAX.as_secs_f64() };
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
            best = Row { into_a_host, seconds };
        }
    }
    Ok(best)
}
