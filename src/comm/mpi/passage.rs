//! What a collective sends between hosts, for estimates: the plan of [`super::tiers`] without ranks.

use super::crossing::{AHEAD, message_bytes};
use super::host_sums;
use super::hosts::Hosts;
use super::raw::message_elements;
use super::tiers::sum_of;
use super::traffic::{Busiest, Way, block_elements, chain_bytes, gather_bytes, host_sum_bytes, raw_bytes};
use crate::comm::encoding::Wire;
use crate::comm::kind::Kind;
use candle_core::DType;

/// Hosts with as many ranks each.
#[derive(Debug, Clone)]
pub(crate) struct EvenHosts(Hosts);

/// Messages between hosts that follow one another: a sum or a gather. Before them, headers are exchanged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Passage {
    /// Bytes into the host that gets most.
    pub into: usize,
    /// Bytes out of the host that sends most.
    pub out: usize,
    /// Messages from one rank to another.
    pub messages: usize,
    /// Messages of these that are on their way at a time.
    pub window: usize,
    /// Messages that wait for one another before the first result is there: 1, or for partial sums as many as hosts.
    pub hops: usize,
    /// Bytes that cross a cable in the hops after the first, while the cable of the first hop is idle.
    pub behind: usize,
}

impl EvenHosts {
    /// `hosts` hosts with `each` ranks each.
    pub(crate) fn new(hosts: usize, each: usize) -> Self {
        Self(Hosts::even(hosts, each))
    }

    /// What a collective sends between hosts whose argument has `elements` elements: nothing on one host, and one passage
    /// or, for an all-reduce, two.
    pub(crate) fn passages(&self, kind: Kind, wire: Wire, dtype: DType, elements: usize) -> Vec<Passage> {
        let (world, size) = (self.0.world_size(), dtype.size_in_bytes());
        if self.0.each().len() < 2 {
            return Vec::new();
        }
        match kind {
            Kind::ReduceScatter => vec![self.sum(wire, dtype, elements / world)],
            Kind::AllReduce => {
                let chunk = elements.div_ceil(world);
                vec![self.sum(wire, dtype, chunk), self.gather(chunk * size)]
            }
            Kind::AllGather | Kind::Control => {
                let code = wire.code();
                vec![self.gather(code.map_or(elements * size, |code| code.encoded_len(elements)))]
            }
            Kind::Barrier => vec![self.gather(1)],
        }
    }

    fn sum(&self, wire: Wire, dtype: DType, chunk: usize) -> Passage {
        let (hosts, size, world) = (&self.0, dtype.size_in_bytes(), self.0.world_size());
        let (wire, way) = sum_of(hosts, wire, dtype, chunk);
        match way {
            Way::Raw => {
                let Busiest { into, out } = raw_bytes(hosts.each(), wire, size, chunk);
                let step = message_elements(wire, size, world - hosts.here().len());
                let messages = chunk.div_ceil(step).max(1);
                Passage { into, out, messages, window: AHEAD, hops: 1, behind: 0 }
            }
            Way::HostSums(code) => {
                let Busiest { into, out } = host_sum_bytes(hosts.each(), code, chunk);
                let messages = chunk.div_ceil(host_sums::block_elements(hosts, code, chunk)).max(1);
                Passage { into, out, messages, window: AHEAD, hops: 1, behind: 0 }
            }
            Way::Chain => {
                let Busiest { into, out } = chain_bytes(hosts.each(), size, chunk);
                let block = block_elements(hosts, wire, chunk).min(chunk);
                let (count, ranks) = (hosts.each().len(), hosts.here().len());
                // The first block through the hosts between, and the sums of the last block.
                let behind = (count - 2) * size_of::<f32>() * world * block + (world - ranks) * block * size;
                let messages = chunk.div_ceil(block.max(1)).max(1);
                Passage { into, out, messages, window: AHEAD, hops: count, behind }
            }
        }
    }

    /// A gather of `part` bytes of each rank.
    fn gather(&self, part: usize) -> Passage {
        let Busiest { into, out } = gather_bytes(self.0.each(), part);
        let step = message_bytes(self.0.each().len() - 1);
        // Each lane sends as many bytes as a rank has.
        let messages = part.div_ceil(step).max(1);
        Passage { into, out, messages, window: AHEAD, hops: 1, behind: 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::code::Code;
    use crate::comm::mpi::crossing::MESSAGE_BYTES;
    use crate::precision::Ints;

    const INT4: Wire = Wire::Blocks(Ints::Int4);

    #[test]
    fn bytes_are_those_of_the_documents_table() {
        for (hosts, each, wire) in [(2, 2, Wire::Exact), (2, 8, Wire::Exact), (2, 8, INT4), (4, 3, INT4), (3, 1, INT4)]
        {
            let (world, chunk) = (hosts * each, 128 * 999);
            let all = EvenHosts::new(hosts, each);
            let e = wire.encoded_len(chunk, 4);
            let raw = each * (world - each) * e;
            let middle = if hosts > 2 { each * chunk * 4 } else { 0 };
            let chain = 4 * world * chunk + middle;
            let [sum] = all.passages(Kind::ReduceScatter, wire, DType::F32, chunk * world)[..] else { panic!() };
            assert_eq!(sum.into.max(sum.out), raw.min(chain), "{hosts} {each} {wire:?}");
            assert_eq!(sum.hops > 1, chain < raw);
            let lanes = if chain < raw { each } else { each * (world - each) };
            let main = if chain < raw { 4 * world * chunk } else { raw };
            // Enough messages, and none without elements.
            let of_message = main.div_ceil(sum.messages * lanes);
            assert!(of_message <= MESSAGE_BYTES && of_message > MESSAGE_BYTES / 8, "{sum:?}");
            let [gather] = all.passages(Kind::AllGather, wire, DType::F32, chunk)[..] else { panic!() };
            assert_eq!((gather.into, gather.out), ((world - each) * e, each * e * (hosts - 1)));
            let both = all.passages(Kind::AllReduce, wire, DType::F32, chunk * world);
            assert_eq!(both[0], sum);
            assert_eq!(both[1], all.passages(Kind::AllGather, Wire::Exact, DType::F32, chunk)[0]);
        }
    }

    #[test]
    fn what_is_coded_between_hosts_alone_crosses_once_a_host() {
        for (hosts, each, code) in
            [(2, 2, Code::Bf16), (2, 8, Code::Blocks(Ints::Int4)), (4, 3, Code::F16), (3, 1, Code::Bf16)]
        {
            let (world, chunk, wire) = (hosts * each, 128 * 999, Wire::BetweenHosts(code));
            let (all, e) = (EvenHosts::new(hosts, each), code.encoded_len(chunk));
            let [sum] = all.passages(Kind::ReduceScatter, wire, DType::F32, chunk * world)[..] else { panic!() };
            assert_eq!((sum.into, sum.out, sum.hops), ((hosts - 1) * each * e, (world - each) * e, 1));
            let of_message = e.div_ceil(sum.messages);
            assert!(of_message <= MESSAGE_BYTES && of_message > (16 << 10) / 2, "{sum:?}");
            let [gather] = all.passages(Kind::AllGather, wire, DType::F32, chunk)[..] else { panic!() };
            assert_eq!((gather.into, gather.out), ((world - each) * e, each * e * (hosts - 1)));
            // The sums of an all-reduce travel as they are.
            let both = all.passages(Kind::AllReduce, wire, DType::F32, chunk * world);
            assert_eq!(both, [sum, all.passages(Kind::AllGather, Wire::Exact, DType::F32, chunk)[0]]);
        }
    }

    #[test]
    fn one_host_sends_nothing() {
        let alone = EvenHosts::new(1, 8);
        for kind in Kind::ALL {
            assert_eq!(alone.passages(kind, Wire::Exact, DType::BF16, 8000), []);
        }
        let [vote] = EvenHosts::new(2, 8).passages(Kind::Control, Wire::Exact, DType::F64, 3)[..] else { panic!() };
        assert_eq!((vote.into, vote.out, vote.messages), (8 * 24, 8 * 24, 1));
    }
}
