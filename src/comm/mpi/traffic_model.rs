//! The number of bytes sent between hosts, and the choice of the reduce algorithm based on that number.
//!
//! Of W ranks on H hosts, L are on the given host; a chunk has c elements of s bytes, which take e bytes when sent (c
//! s, or the size of their encoding). The network link of each host carries traffic in both directions at the same
//! time.
//!
//! | | into a host | out of a host |
//! | --- | --- | --- |
//! | sum, direct | L (W - L) e | L (W - L) e |
//! | sum, chain | 4 W c, except on the first host, plus L c s, except on the last | 4 W c; on the last host (W - L) c s |
//! | sum, encoded host sums | (H - 1) L e | (W - L) e |
//! | gather | (W - L) e | L e for each other host |
//!
//! In a direct sum, the parts of a host's L ranks for the same chunk cross the link separately, although their sum
//! would suffice: L times as many bytes as necessary. A chain carries each element once, but as an f32 partial sum, and
//! the sums come back from the last host. With two hosts of 8 ranks each (W = 16), a direct sum sends 256 c bytes in
//! f32, 128 c in bf16, 66 c as 8-bit and 34 c as 4-bit integers; a chain sends 64 c in any format. A format that is
//! encoded only between hosts ([`WireFormat::BetweenHosts`]) is always sent as host sums: 16 c as bf16, 8.25 c as 8-bit
//! and 4.25 c as 4-bit integers.

use super::inter_host::MAX_MESSAGE_BYTES;
use super::partial_sum::SlotLayout;
use super::topology::HostTopology;
use crate::comm::shm::region::SLOT_BYTES;
use crate::comm::wire::format::WireFormat;
use crate::comm::wire::inter_host::InterHostFormat;
use std::ops::Range;

/// Sums whose chunks have fewer bytes in total do not form a chain: raw parts reach their owner in a single message.
const SHORT_BYTES: usize = 256 << 10;
/// The number of bytes of a partial sum of one element.
const PARTIAL_SUM_BYTES: usize = size_of::<f32>();
/// The number of blocks that a sufficiently long sum is cut into for each host that it passes, so that hosts work on
/// different blocks at the same time.
const BLOCKS_PER_HOST: usize = 8;
/// The message size in bytes below which a sum is not split into more blocks.
pub(super) const MIN_MESSAGE_BYTES: usize = 16 << 10;

/// The algorithm that sums parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ReduceAlgorithm {
    /// Every part goes to the owner of the sum.
    Direct,
    /// Each host adds its parts to the sums of the preceding hosts, and passes the new sums to the next host.
    Chain,
    /// Each host's sum goes to the owner, encoded.
    HostSums(InterHostFormat),
}

/// The bytes received by the host that receives the most, and those sent by the host that sends the most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PeakHostTraffic {
    pub bytes_in: usize,
    pub bytes_out: usize,
}

impl PeakHostTraffic {
    fn of(hosts: impl Iterator<Item = Self>) -> Self {
        let max =
            |a: Self, b: Self| Self { bytes_in: a.bytes_in.max(b.bytes_in), bytes_out: a.bytes_out.max(b.bytes_out) };
        hosts.fold(Self { bytes_in: 0, bytes_out: 0 }, max)
    }

    /// Returns the bytes of the busier direction.
    fn busier_direction(self) -> usize {
        self.bytes_in.max(self.bytes_out)
    }
}

/// Returns the algorithm of a sum whose chunks have `chunk` elements of `size` bytes, sent in the format `wire`: host
/// sums if that format is only for data between hosts; a chain if the sum is not short, a slot has room for a block for
/// each rank, and the largest number of bytes that a host receives or sends is smaller than in a direct sum; and
/// otherwise a direct sum. The result is the same on all ranks.
pub(super) fn algorithm(hosts: &HostTopology, wire: WireFormat, size: usize, chunk: usize) -> ReduceAlgorithm {
    if let WireFormat::BetweenHosts(code) = wire {
        return ReduceAlgorithm::HostSums(code);
    }
    let (host_ranks, world) = (hosts.host_ranks(), hosts.world_size());
    let fits = SlotLayout { wire, size, world }.elements_in(SLOT_BYTES) > 0;
    let long = world * chunk * size >= SHORT_BYTES;
    let fewer = chain_bytes(host_ranks, size, chunk).busier_direction()
        < direct_bytes(host_ranks, wire, size, chunk).busier_direction();
    if fits && long && fewer { ReduceAlgorithm::Chain } else { ReduceAlgorithm::Direct }
}

/// Returns the traffic if raw parts are sent.
pub(super) fn direct_bytes(hosts: &[Range<usize>], wire: WireFormat, size: usize, chunk: usize) -> PeakHostTraffic {
    let world = hosts.last().map_or(0, |ranks| ranks.end);
    let encoded = wire.encoded_len(chunk, size);
    // An estimate may count more bytes than fit in the type.
    let one_way = |ranks: &Range<usize>| (ranks.len() * (world - ranks.len())).saturating_mul(encoded);
    PeakHostTraffic::of(
        hosts.iter().map(|ranks| PeakHostTraffic { bytes_in: one_way(ranks), bytes_out: one_way(ranks) }),
    )
}

/// Returns the traffic if partial sums are sent.
pub(super) fn chain_bytes(hosts: &[Range<usize>], size: usize, chunk: usize) -> PeakHostTraffic {
    let (world, last) = (hosts.last().map_or(0, |ranks| ranks.end), hosts.len() - 1);
    let partials = PARTIAL_SUM_BYTES * world * chunk;
    let of = |(host, ranks): (usize, &Range<usize>)| PeakHostTraffic {
        bytes_in: if host > 0 { partials } else { 0 } + if host < last { ranks.len() * chunk * size } else { 0 },
        bytes_out: if host < last { partials } else { (world - ranks.len()) * chunk * size },
    };
    PeakHostTraffic::of(hosts.iter().enumerate().map(of))
}

/// Returns the traffic if each host's sums are sent encoded.
pub(super) fn host_sum_bytes(hosts: &[Range<usize>], code: InterHostFormat, chunk: usize) -> PeakHostTraffic {
    let (world, encoded) = (hosts.last().map_or(0, |ranks| ranks.end), code.encoded_len(chunk));
    let of = |ranks: &Range<usize>| PeakHostTraffic {
        bytes_in: ((hosts.len() - 1) * ranks.len()).saturating_mul(encoded),
        bytes_out: (world - ranks.len()).saturating_mul(encoded),
    };
    PeakHostTraffic::of(hosts.iter().map(of))
}

/// Returns the traffic of a gather with `part` bytes from each rank.
pub(super) fn gather_bytes(hosts: &[Range<usize>], part: usize) -> PeakHostTraffic {
    let world = hosts.last().map_or(0, |ranks| ranks.end);
    let of = |ranks: &Range<usize>| PeakHostTraffic {
        bytes_in: (world - ranks.len()).saturating_mul(part),
        bytes_out: (ranks.len() * (hosts.len() - 1)).saturating_mul(part),
    };
    PeakHostTraffic::of(hosts.iter().map(of))
}

/// Returns the number of elements of every chunk in one block of a chain: a message from host to host contains this
/// many elements of each chunk of a lane.
pub(super) fn block_elements(hosts: &HostTopology, wire: WireFormat, chunk: usize) -> usize {
    let bytes_per_element = PARTIAL_SUM_BYTES * hosts.world_size().div_ceil(hosts.lanes());
    let bytes = (bytes_per_element * chunk / (BLOCKS_PER_HOST * hosts.host_ranks().len()))
        .clamp(MIN_MESSAGE_BYTES, MAX_MESSAGE_BYTES);
    let align = wire.alignment();
    (bytes / bytes_per_element / align * align).max(align)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::precision::IntFormat;

    const INT8: WireFormat = WireFormat::Blocks(IntFormat::Int8);
    const INT4: WireFormat = WireFormat::Blocks(IntFormat::Int4);

    #[test]
    fn bytes_are_those_of_the_table() {
        let bytes = |counts: &[usize], wire, size| {
            let hosts = HostTopology::with(counts, 0);
            (
                direct_bytes(hosts.host_ranks(), wire, size, 1280).busier_direction(),
                chain_bytes(hosts.host_ranks(), size, 1280).busier_direction(),
            )
        };
        assert_eq!(bytes(&[8, 8], WireFormat::Exact, 4), (256 * 1280, 64 * 1280));
        assert_eq!(bytes(&[8, 8], WireFormat::Exact, 2), (128 * 1280, 64 * 1280));
        assert_eq!(bytes(&[8, 8], INT8, 2), (64 * 1320, 64 * 1280));
        assert_eq!(bytes(&[8, 8], INT4, 2), (64 * 680, 64 * 1280));
        assert_eq!(bytes(&[1, 1], WireFormat::Exact, 4), (4 * 1280, 8 * 1280));
        // A host in the middle receives partial sums and its own sums.
        assert_eq!(bytes(&[8, 8, 8, 8], WireFormat::Exact, 4), (8 * 24 * 4 * 1280, (32 * 4 + 8 * 4) * 1280));
        assert_eq!(bytes(&[3, 1], WireFormat::Exact, 4), (12 * 1280, 16 * 1280));
        let coded = |counts: &[usize], code| host_sum_bytes(HostTopology::with(counts, 0).host_ranks(), code, 1280);
        for (code, bytes) in
            [(InterHostFormat::Bf16, 8 * 2 * 1280), (InterHostFormat::Blocks(IntFormat::Int4), 8 * 680)]
        {
            assert_eq!(coded(&[8, 8], code), PeakHostTraffic { bytes_in: bytes, bytes_out: bytes });
            assert_eq!(coded(&[8, 8, 8], code), PeakHostTraffic { bytes_in: 2 * bytes, bytes_out: 2 * bytes });
            assert_eq!(
                coded(&[8, 4], code),
                PeakHostTraffic { bytes_in: bytes, bytes_out: bytes },
                "eight owners receive on the first host; the second host sends to these eight"
            );
        }
        // The host with one rank receives the most, and the host with three ranks sends the most.
        let gather = |counts: &[usize]| gather_bytes(HostTopology::with(counts, 0).host_ranks(), 100);
        assert_eq!(gather(&[3, 1]), PeakHostTraffic { bytes_in: 300, bytes_out: 300 });
        assert_eq!(gather(&[2, 2, 2]), PeakHostTraffic { bytes_in: 400, bytes_out: 400 });
    }

    #[test]
    fn long_sums_of_many_ranks_a_host_go_in_a_chain() {
        let algorithm =
            |counts: &[usize], wire, size, chunk| algorithm(&HostTopology::with(counts, 0), wire, size, chunk);
        assert_eq!(algorithm(&[8, 8], WireFormat::Exact, 4, 1 << 20), ReduceAlgorithm::Chain);
        assert_eq!(algorithm(&[8, 8], WireFormat::Exact, 4, 4096), ReduceAlgorithm::Chain, "256 KiB");
        assert_eq!(algorithm(&[8, 8], WireFormat::Exact, 4, 4095), ReduceAlgorithm::Direct, "short");
        assert_eq!(algorithm(&[8, 8], WireFormat::Exact, 2, 1 << 20), ReduceAlgorithm::Chain);
        assert_eq!(algorithm(&[8, 8], INT4, 4, 1 << 20), ReduceAlgorithm::Direct);
        assert_eq!(algorithm(&[3, 3], WireFormat::Exact, 4, 1 << 20), ReduceAlgorithm::Chain);
        assert_eq!(
            algorithm(&[2, 2], WireFormat::Exact, 4, 1 << 20),
            ReduceAlgorithm::Direct,
            "as many bytes either way"
        );
        for hosts in 2..20 {
            assert_eq!(
                algorithm(&vec![1; hosts], WireFormat::Exact, 4, 1 << 20),
                ReduceAlgorithm::Direct,
                "{hosts} hosts of one rank"
            );
        }
        // With int8, a slot has no room for a block for every rank.
        assert_eq!(algorithm(&[600, 600], WireFormat::Exact, 4, 1 << 20), ReduceAlgorithm::Chain);
        assert_eq!(algorithm(&[600, 600], INT8, 4, 1 << 20), ReduceAlgorithm::Direct);
        // A sum in a format whose bits depend on the algorithm always uses that algorithm, however short the sum is.
        for wire in [InterHostFormat::Bf16, InterHostFormat::Blocks(IntFormat::Int4)] {
            assert_eq!(algorithm(&[8, 8], WireFormat::BetweenHosts(wire), 4, 1), ReduceAlgorithm::HostSums(wire));
        }
        // All ranks choose the same algorithm.
        let counts = [3, 4, 2, 5];
        assert!((0..14).all(|rank| super::algorithm(&HostTopology::with(&counts, rank), WireFormat::Exact, 4, 9999)
            == ReduceAlgorithm::Chain));
    }

    #[test]
    fn blocks_are_whole_and_messages_of_a_few_hundred_kilobytes_at_most() {
        for counts in [&[8, 8][..], &[9, 7], &[2, 3, 2], &[64; 32]] {
            let hosts = HostTopology::with(counts, 0);
            for (wire, chunk) in
                [WireFormat::Exact, INT8, INT4].into_iter().flat_map(|w| [1, 5000, 1 << 24].map(|c| (w, c)))
            {
                let elements = block_elements(&hosts, wire, chunk);
                let lane = hosts.world_size().div_ceil(hosts.lanes());
                assert!(elements > 0 && elements.is_multiple_of(wire.alignment()));
                assert!(
                    elements * lane * PARTIAL_SUM_BYTES <= MAX_MESSAGE_BYTES,
                    "{counts:?} {wire:?} {chunk}: {elements}"
                );
            }
        }
    }
}
