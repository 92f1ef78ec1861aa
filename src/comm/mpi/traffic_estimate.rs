//! The traffic of a collective between hosts, for estimates: the transfers that [`super::hierarchical`] would make.

use super::direct_reduce::message_elements;
use super::hierarchical::sum_of;
use super::host_sum_reduce;
use super::inter_host::{MESSAGES_IN_FLIGHT, message_bytes};
use super::topology::HostTopology;
use super::traffic_model::{
    PeakHostTraffic, ReduceAlgorithm, block_elements, chain_bytes, direct_bytes, gather_bytes, host_sum_bytes,
};
use crate::comm::collective_kind::CollectiveKind;
use crate::comm::wire::format::WireFormat;
use candle_core::DType;

/// Hosts with the same number of ranks each.
#[derive(Debug, Clone)]
pub(crate) struct UniformHosts(HostTopology);

/// An estimate of consecutive messages between hosts for one sum or gather. Headers are exchanged before them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct InterHostTransferEstimate {
    /// The number of bytes received by the host that receives the most.
    pub bytes_in: usize,
    /// The number of bytes sent by the host that sends the most.
    pub bytes_out: usize,
    /// The number of messages from one rank to another.
    pub messages: usize,
    /// The number of these messages in flight at a time.
    pub window: usize,
    /// The number of messages that wait for one another before the first result arrives: 1 or, for a sum that passes
    /// from host to host, the number of hosts.
    pub hops: usize,
    /// The bytes that cross a link in the hops after the first, while the link of the first hop is idle.
    pub later_hop_bytes: usize,
}

impl InterHostTransferEstimate {
    /// Returns the transfer of `messages` messages, none of which waits for a message from a third host.
    fn of_one_hop(PeakHostTraffic { bytes_in, bytes_out }: PeakHostTraffic, messages: usize) -> Self {
        Self { bytes_in, bytes_out, messages, window: MESSAGES_IN_FLIGHT, hops: 1, later_hop_bytes: 0 }
    }
}

impl UniformHosts {
    /// Returns `hosts` hosts with `ranks_per_host` ranks each.
    pub(crate) fn new(hosts: usize, ranks_per_host: usize) -> Self {
        Self(HostTopology::even(hosts, ranks_per_host))
    }

    /// Returns the transfers between hosts of a collective whose argument has `elements` elements: none on one host or
    /// for a message to one rank, and otherwise one or, for an all-reduce, two.
    pub(crate) fn transfers(
        &self,
        kind: CollectiveKind,
        wire: WireFormat,
        dtype: DType,
        elements: usize,
    ) -> Vec<InterHostTransferEstimate> {
        let (world, size) = (self.0.world_size(), dtype.size_in_bytes());
        if self.0.host_ranks().len() < 2 {
            return Vec::new();
        }
        match kind {
            CollectiveKind::ReduceScatter => vec![self.sum(wire, dtype, elements / world)],
            CollectiveKind::AllReduce => {
                let chunk = elements.div_ceil(world);
                vec![self.sum(wire, dtype, chunk), self.gather(chunk * size)]
            }
            CollectiveKind::AllGather | CollectiveKind::Control => {
                let code = wire.code();
                vec![self.gather(code.map_or(elements * size, |code| code.encoded_len(elements)))]
            }
            CollectiveKind::Barrier => vec![self.gather(1)],
            // A message may stay within a host, which only a schedule of messages can determine.
            CollectiveKind::Send | CollectiveKind::Receive => Vec::new(),
        }
    }

    fn sum(&self, wire: WireFormat, dtype: DType, chunk: usize) -> InterHostTransferEstimate {
        let (hosts, size, world) = (&self.0, dtype.size_in_bytes(), self.0.world_size());
        let (wire, algorithm) = sum_of(hosts, wire, dtype, chunk);
        match algorithm {
            ReduceAlgorithm::Direct => {
                let traffic = direct_bytes(hosts.host_ranks(), wire, size, chunk);
                let step = message_elements(wire, size, world - hosts.local_ranks().len());
                let messages = chunk.div_ceil(step).max(1);
                InterHostTransferEstimate::of_one_hop(traffic, messages)
            }
            ReduceAlgorithm::HostSums(code) => {
                let traffic = host_sum_bytes(hosts.host_ranks(), code, chunk);
                let messages = chunk.div_ceil(host_sum_reduce::block_elements(hosts, code, chunk)).max(1);
                InterHostTransferEstimate::of_one_hop(traffic, messages)
            }
            ReduceAlgorithm::Chain => {
                let traffic = chain_bytes(hosts.host_ranks(), size, chunk);
                let block = block_elements(hosts, wire, chunk).min(chunk);
                let (count, ranks) = (hosts.host_ranks().len(), hosts.local_ranks().len());
                // These are the bytes of the first block on its way through the hosts in between, and of the last
                // block's sums.
                let later_hop_bytes = (count - 2) * size_of::<f32>() * world * block + (world - ranks) * block * size;
                let messages = chunk.div_ceil(block.max(1)).max(1);
                let one_hop = InterHostTransferEstimate::of_one_hop(traffic, messages);
                InterHostTransferEstimate { hops: count, later_hop_bytes, ..one_hop }
            }
        }
    }

    /// Returns the transfer for a gather of `part` bytes from each rank.
    fn gather(&self, part: usize) -> InterHostTransferEstimate {
        let traffic = gather_bytes(self.0.host_ranks(), part);
        let step = message_bytes(self.0.host_ranks().len() - 1);
        // Each lane sends as many bytes as a rank has.
        let messages = part.div_ceil(step).max(1);
        InterHostTransferEstimate::of_one_hop(traffic, messages)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::mpi::inter_host::MAX_MESSAGE_BYTES;
    use crate::comm::wire::inter_host::InterHostFormat;
    use crate::precision::IntFormat;

    const INT4: WireFormat = WireFormat::Blocks(IntFormat::Int4);

    #[test]
    fn bytes_are_those_of_the_documents_table() {
        for (hosts, each, wire) in
            [(2, 2, WireFormat::Exact), (2, 8, WireFormat::Exact), (2, 8, INT4), (4, 3, INT4), (3, 1, INT4)]
        {
            let (world, chunk) = (hosts * each, 128 * 999);
            let all = UniformHosts::new(hosts, each);
            let e = wire.encoded_len(chunk, 4);
            let direct = each * (world - each) * e;
            let middle = if hosts > 2 { each * chunk * 4 } else { 0 };
            let chain = 4 * world * chunk + middle;
            let [sum] = all.transfers(CollectiveKind::ReduceScatter, wire, DType::F32, chunk * world)[..] else {
                panic!()
            };
            assert_eq!(sum.bytes_in.max(sum.bytes_out), direct.min(chain), "{hosts} {each} {wire:?}");
            assert_eq!(sum.hops > 1, chain < direct);
            let lanes = if chain < direct { each } else { each * (world - each) };
            let main = if chain < direct { 4 * world * chunk } else { direct };
            // Enough messages, and none without elements.
            let of_message = main.div_ceil(sum.messages * lanes);
            assert!(of_message <= MAX_MESSAGE_BYTES && of_message > MAX_MESSAGE_BYTES / 8, "{sum:?}");
            let [gather] = all.transfers(CollectiveKind::AllGather, wire, DType::F32, chunk)[..] else { panic!() };
            assert_eq!((gather.bytes_in, gather.bytes_out), ((world - each) * e, each * e * (hosts - 1)));
            let both = all.transfers(CollectiveKind::AllReduce, wire, DType::F32, chunk * world);
            assert_eq!(both[0], sum);
            assert_eq!(both[1], all.transfers(CollectiveKind::AllGather, WireFormat::Exact, DType::F32, chunk)[0]);
        }
    }

    #[test]
    fn what_is_coded_between_hosts_alone_crosses_once_a_host() {
        for (hosts, each, code) in [
            (2, 2, InterHostFormat::Bf16),
            (2, 8, InterHostFormat::Blocks(IntFormat::Int4)),
            (4, 3, InterHostFormat::F16),
            (3, 1, InterHostFormat::Bf16),
        ] {
            let (world, chunk, wire) = (hosts * each, 128 * 999, WireFormat::BetweenHosts(code));
            let (all, e) = (UniformHosts::new(hosts, each), code.encoded_len(chunk));
            let [sum] = all.transfers(CollectiveKind::ReduceScatter, wire, DType::F32, chunk * world)[..] else {
                panic!()
            };
            assert_eq!((sum.bytes_in, sum.bytes_out, sum.hops), ((hosts - 1) * each * e, (world - each) * e, 1));
            let of_message = e.div_ceil(sum.messages);
            assert!(of_message <= MAX_MESSAGE_BYTES && of_message > (16 << 10) / 2, "{sum:?}");
            let [gather] = all.transfers(CollectiveKind::AllGather, wire, DType::F32, chunk)[..] else { panic!() };
            assert_eq!((gather.bytes_in, gather.bytes_out), ((world - each) * e, each * e * (hosts - 1)));
            // The sums of an all-reduce are sent unchanged.
            let both = all.transfers(CollectiveKind::AllReduce, wire, DType::F32, chunk * world);
            assert_eq!(both, [sum, all.transfers(CollectiveKind::AllGather, WireFormat::Exact, DType::F32, chunk)[0]]);
        }
    }

    #[test]
    fn one_host_sends_nothing() {
        let one_host = UniformHosts::new(1, 8);
        for kind in CollectiveKind::ALL {
            assert_eq!(one_host.transfers(kind, WireFormat::Exact, DType::BF16, 8000), []);
        }
        let [vote] = UniformHosts::new(2, 8).transfers(CollectiveKind::Control, WireFormat::Exact, DType::F64, 3)[..]
        else {
            panic!()
        };
        assert_eq!((vote.bytes_in, vote.bytes_out, vote.messages), (8 * 24, 8 * 24, 1));
    }
}
