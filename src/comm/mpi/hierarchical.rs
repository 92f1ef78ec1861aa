//! Collectives of ranks on several hosts.
//!
//! ```text
//!   reduce-scatter   direct     every rank's part goes to the owner ----> sums of all parts in rank order
//!                    chain      sums of a host's parts, added to those of the previous hosts, go to the next host
//!                    host sums  sums of each host's parts, encoded, go to the owner ----> sums of these in host order
//!   all-gather       shards within each host -> slices of its result from host to host -> slices within each host
//! ```
//!
//! Within a host, collectives use a [`ShmExchange`](crate::comm::shm::exchange::ShmExchange) between that host's ranks.
//! Between hosts, they use messages: a header, which names the collective that a rank is in, then pieces of data. The
//! next pieces are in flight while the current one is processed.
//!
//! Sums run in rank order in f32, so the bits are those of one machine with the same number of ranks, whichever
//! algorithm computes them. Unless a sum is short, the algorithm that sends fewer bytes between hosts is used: see
//! [`super::traffic_model`]. The exception is encoded host sums, which the caller chooses
//! ([`WireFormat::BetweenHosts`]) and which give different bits.

use super::all_gather::{gather, gather_across};
use super::inter_host::{InterHostExchange, Result};
use super::topology::HostTopology;
use super::traffic_model::{ReduceAlgorithm, algorithm};
use super::{chain_reduce, direct_reduce, host_sum_reduce};
use crate::comm::collective_kind::CollectiveKind;
use crate::comm::shm::collectives::{gather_of, piece_of};
use crate::comm::shm::exchange::CollectiveThreadKind;
use crate::comm::shm::partition::{StridedRanks, extract_group, sort_chunks_by_rank};
use crate::comm::stats::counters::ReceivedBytes;
use crate::comm::wire::format::WireFormat;
use crate::precision::Flat;
use crate::util::counted;
use candle_core::DType;
use std::ops::Range;

/// Returns the wire format and the algorithm of a sum with chunks of `chunk` elements.
pub(super) fn sum_of(
    hosts: &HostTopology,
    wire: WireFormat,
    dtype: DType,
    chunk: usize,
) -> (WireFormat, ReduceAlgorithm) {
    if let WireFormat::BetweenHosts(_) = wire {
        return (wire.within_host(), algorithm(hosts, wire, dtype.size_in_bytes(), chunk));
    }
    // This is the wire format that a world of this size has on one machine.
    let (wire, _) = piece_of(hosts.world_size(), wire, dtype);
    (wire, algorithm(hosts, wire, dtype.size_in_bytes(), chunk))
}

/// One rank's side of collectives across hosts.
pub(in crate::comm) struct HierarchicalCollectives(InterHostExchange);

impl HierarchicalCollectives {
    pub(super) fn new(inter_host: InterHostExchange) -> Self {
        Self(inter_host)
    }

    pub(in crate::comm) fn set_runner(&mut self, runner: CollectiveThreadKind) {
        self.0.local.set_runner(runner);
    }

    pub(in crate::comm) fn set_engine_call(&mut self, call: u64) {
        self.0.set_engine_call(call);
    }

    /// Returns the bytes received from other ranks in the current collective.
    pub(in crate::comm) fn bytes(&self) -> ReceivedBytes {
        self.0.bytes()
    }

    /// Runs one of the collectives below, and waits until everything that this rank sends in it has been sent.
    pub(in crate::comm) fn run<T>(&mut self, collective: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        let result = collective(self);
        self.0.end(result)
    }

    /// Sums `input` in place: the result is in the memory of `input`.
    pub(in crate::comm) fn reduce_scatter(&mut self, wire: WireFormat, mut input: Flat, tag: u64) -> Result<Flat> {
        self.0.begin(CollectiveKind::ReduceScatter, wire, input.dtype(), input.len(), tag);
        assert!(
            input.len().is_multiple_of(self.0.size()),
            "{} cannot form {} equal chunks",
            counted(input.len(), "element"),
            self.0.size()
        );
        let chunk = input.len() / self.0.size();
        self.reduce(wire, &mut input, 0)?;
        input.truncate(chunk);
        Ok(input)
    }

    pub(in crate::comm) fn all_gather(&mut self, wire: WireFormat, shard: Flat, tag: u64) -> Result<Flat> {
        self.0.begin(CollectiveKind::AllGather, wire, shard.dtype(), shard.len(), tag);
        let (world, rank, chunk) = (self.0.size(), self.0.rank(), shard.len());
        let shard_bytes = shard.size_in_bytes();
        let mut output = shard;
        output.reserve_exact(chunk * (world - 1));
        // If nothing goes between hosts, an encoding that applies only between hosts is not used.
        let wire = if self.0.hosts.host_ranks().len() == 1 { wire.within_host() } else { wire };
        let Some(code) = wire.code() else {
            output.extend_zeros(chunk * (world - 1));
            let bytes = output.as_bytes_mut();
            bytes.copy_within(..shard_bytes, rank * shard_bytes);
            gather(&mut self.0, bytes, shard_bytes)?;
            return Ok(output);
        };
        let part = code.encoded_len(chunk);
        let mut coded = vec![0; part * world];
        code.encode(output.slice(0..chunk), &mut coded[rank * part..][..part]);
        gather(&mut self.0, &mut coded, shard_bytes)?;
        output.extend_zeros(chunk * (world - 1));
        for (r, coded) in coded.chunks_exact(part.max(1)).enumerate() {
            code.decode(coded, output.slice_mut(r * chunk..(r + 1) * chunk));
        }
        Ok(output)
    }

    /// Gathers within groups. Nothing goes from host to host if each group is on one host.
    pub(in crate::comm) fn all_gather_within(
        &mut self,
        wire: WireFormat,
        ranks: usize,
        shard: Flat,
        tag: u64,
    ) -> Result<Flat> {
        if self.each_group_is_on_one_host(ranks) {
            self.0.begin(CollectiveKind::AllGather, wire, shard.dtype(), shard.len(), tag);
            let local_rank = self.0.rank() - self.0.hosts.local_ranks().start;
            return gather_of(&mut self.0.local, wire, StridedRanks::neighbours(local_rank, ranks), shard);
        }
        let len = shard.len();
        let output = self.all_gather(wire, shard, tag)?;
        Ok(extract_group(output, StridedRanks::neighbours(self.0.rank(), ranks), len))
    }

    /// Runs a reduce-scatter to all ranks, then a gather of the sums of the ranks that have the same position in their
    /// groups, in the memory of `input`. The sums cost as much traffic between hosts as in an all-reduce, if each host
    /// has the same number of ranks and complete groups.
    pub(in crate::comm) fn reduce_to_groups(
        &mut self,
        wire: WireFormat,
        ranks: usize,
        mut input: Flat,
        tag: u64,
    ) -> Result<Flat> {
        sort_chunks_by_rank(&mut input, ranks, self.0.size());
        let mut sum = self.reduce_scatter(wire, input, tag)?;
        let (group, len) = (StridedRanks::across(self.0.rank(), ranks, self.0.size()), sum.len());
        let bytes = sum.size_in_bytes();
        let hosts = self.0.hosts.clone();
        if self.each_group_is_on_one_host(ranks) && hosts.host_ranks().iter().all(|host| host.len() == hosts.lanes()) {
            sum.extend_zeros(len * (group.len() - 1));
            let output = sum.as_bytes_mut();
            output.copy_within(..bytes, group.position(self.0.rank()) * bytes);
            gather_across(&mut self.0, output, ranks)?;
            return Ok(sum);
        }
        sum.extend_zeros(len * (self.0.size() - 1));
        let output = sum.as_bytes_mut();
        output.copy_within(..bytes, self.0.rank() * bytes);
        gather(&mut self.0, output, bytes)?;
        Ok(extract_group(sum, group, len))
    }

    fn each_group_is_on_one_host(&self, ranks: usize) -> bool {
        let on_one = |host: &Range<usize>| host.start.is_multiple_of(ranks) && host.len().is_multiple_of(ranks);
        self.0.hosts.host_ranks().iter().all(on_one)
    }

    /// Runs a reduce-scatter and an all-gather in the memory of `input`. The sums are those of the reduce-scatter, bit
    /// for bit.
    pub(in crate::comm) fn all_reduce(&mut self, wire: WireFormat, mut input: Flat, tag: u64) -> Result<Flat> {
        self.0.begin(CollectiveKind::AllReduce, wire, input.dtype(), input.len(), tag);
        let (len, size) = (input.len(), input.dtype().size_in_bytes());
        let chunk = len.div_ceil(self.0.size());
        input.extend_zeros(chunk * self.0.size() - len);
        self.reduce(wire, &mut input, self.0.rank() * chunk)?;
        gather(&mut self.0, input.as_bytes_mut(), chunk * size)?;
        input.truncate(len);
        Ok(input)
    }

    pub(in crate::comm) fn gather_bytes(&mut self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.0.begin(CollectiveKind::Control, WireFormat::Exact, DType::U8, bytes.len(), 0);
        let mut output = vec![0; bytes.len() * self.0.size()];
        output[self.0.rank() * bytes.len()..][..bytes.len()].copy_from_slice(bytes);
        gather(&mut self.0, &mut output, bytes.len())?;
        Ok(match bytes.len() {
            0 => vec![Vec::new(); self.0.size()],
            len => output.chunks_exact(len).map(<[u8]>::to_vec).collect(),
        })
    }

    pub(in crate::comm) fn barrier(&mut self) -> Result<()> {
        self.0.begin(CollectiveKind::Barrier, WireFormat::Exact, DType::U8, 0, 0);
        // Each rank sends one byte: once a rank has received all of them, all ranks have arrived.
        let mut bytes = vec![0; self.0.size()];
        gather(&mut self.0, &mut bytes, 1)
    }

    /// Sums this rank's chunk of all ranks' `input` (world size x n elements), and writes the sum to `input` from
    /// element `at` on. `at` is the position of the first chunk or of this rank's chunk.
    fn reduce(&mut self, wire: WireFormat, input: &mut Flat, at: usize) -> Result<()> {
        let (wire, algorithm) = sum_of(&self.0.hosts, wire, input.dtype(), input.len() / self.0.size());
        match algorithm {
            ReduceAlgorithm::Direct => direct_reduce::reduce(&mut self.0, wire, input, at),
            ReduceAlgorithm::Chain => chain_reduce::reduce(&mut self.0, wire, input, at),
            ReduceAlgorithm::HostSums(code) => host_sum_reduce::reduce(&mut self.0, code, input, at),
        }
    }
}
