//! How many bytes go between hosts, and which way a sum takes for that reason.
//!
//! Of W ranks on H hosts, L are on a host; a chunk has c elements of s bytes, which take e bytes as they travel (c s, or the integers
//! that stand for them). All hosts' cables carry both directions at a time.
//!
//! | | into a host | out of it |
//! | --- | --- | --- |
//! | sum, raw | L (W - L) e | L (W - L) e |
//! | sum, chain | 4 W c, but for the first; L c s, but for the last | 4 W c; for the last (W - L) c s |
//! | sum, hosts' sums as codes | (H - 1) L e | (W - L) e |
//! | gather | (W - L) e | L e for each other host |
//!
//! Raw parts cross a cable once per rank that owns or has one, L times as often as they would have to. A chain carries each
//! element once, but as a partial sum in f32, and the sums come back from the last host. Two hosts with 8 ranks each (W = 16):
//! raw 256 c bytes of f32, 128 c of bf16, 66 c as eight and 34 c as four bits; a chain 64 c, whatever travels. What is coded
//! between hosts alone ([`Wire::BetweenHosts`]) goes as hosts' sums, in one way: 16 c as bf16, 8.25 c as eight and 4.25 c as
//! four bits.

use super::crossing::MESSAGE_BYTES;
use super::hosts::Hosts;
use super::partial::Layout;
use crate::comm::code::Code;
use crate::comm::encoding::Wire;
use crate::comm::shm::SLOT_BYTES;
use std::ops::Range;

/// Sums of fewer bytes, of all chunks together, go as raw parts: they are there after one message.
const SHORT_BYTES: usize = 256 << 10;
/// Bytes of a partial sum of one element.
const PARTIAL: usize = size_of::<f32>();
/// Blocks of a sum for each host that it passes, where it is long enough: hosts work on different ones at a time.
const BLOCKS_A_HOST: usize = 8;
/// The least bytes of a message for which a sum is cut into more blocks.
pub(super) const LEAST_MESSAGE: usize = 16 << 10;

/// How parts become sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// Every part goes to the owner of the sum.
    Raw,
    /// Sums of the first hosts go on to the next.
    Chain,
    /// Each host's sum goes to the owner, as codes.
    HostSums(Code),
}

/// Bytes into the host that gets most, and out of the one that sends most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Busiest {
    pub into: usize,
    pub out: usize,
}

impl Busiest {
    fn of(hosts: impl Iterator<Item = Self>) -> Self {
        let most = |a: Self, b: Self| Self { into: a.into.max(b.into), out: a.out.max(b.out) };
        hosts.fold(Self { into: 0, out: 0 }, most)
    }

    /// Bytes of the busier direction.
    fn most(self) -> usize {
        self.into.max(self.out)
    }
}

/// The way of a sum whose chunks have `chunk` elements of `size` bytes, which travel as `wire`: the one with fewer bytes in
/// the busiest direction of any host, where the bits leave a choice. The same on all ranks.
pub(super) fn way(hosts: &Hosts, wire: Wire, size: usize, chunk: usize) -> Way {
    if let Wire::BetweenHosts(code) = wire {
        return Way::HostSums(code);
    }
    let (each, world) = (hosts.each(), hosts.world_size());
    let fits = Layout { wire, size, world }.elements_in(SLOT_BYTES) > 0;
    let long = world * chunk * size >= SHORT_BYTES;
    let fewer = chain_bytes(each, size, chunk).most() < raw_bytes(each, wire, size, chunk).most();
    if fits && long && fewer { Way::Chain } else { Way::Raw }
}

/// Where raw parts go.
pub(super) fn raw_bytes(hosts: &[Range<usize>], wire: Wire, size: usize, chunk: usize) -> Busiest {
    let world = hosts.last().map_or(0, |ranks| ranks.end);
    let encoded = wire.encoded_len(chunk, size);
    // An estimate may be of more bytes than can be counted.
    let either = |ranks: &Range<usize>| (ranks.len() * (world - ranks.len())).saturating_mul(encoded);
    Busiest::of(hosts.iter().map(|ranks| Busiest { into: either(ranks), out: either(ranks) }))
}

/// Where partial sums go.
pub(super) fn chain_bytes(hosts: &[Range<usize>], size: usize, chunk: usize) -> Busiest {
    let (world, last) = (hosts.last().map_or(0, |ranks| ranks.end), hosts.len() - 1);
    let partials = PARTIAL * world * chunk;
    let of = |(host, ranks): (usize, &Range<usize>)| Busiest {
        into: if host > 0 { partials } else { 0 } + if host < last { ranks.len() * chunk * size } else { 0 },
        out: if host < last { partials } else { (world - ranks.len()) * chunk * size },
    };
    Busiest::of(hosts.iter().enumerate().map(of))
}

/// Where each host's sums go as codes.
pub(super) fn host_sum_bytes(hosts: &[Range<usize>], code: Code, chunk: usize) -> Busiest {
    let (world, encoded) = (hosts.last().map_or(0, |ranks| ranks.end), code.encoded_len(chunk));
    let of = |ranks: &Range<usize>| Busiest {
        into: ((hosts.len() - 1) * ranks.len()).saturating_mul(encoded),
        out: (world - ranks.len()).saturating_mul(encoded),
    };
    Busiest::of(hosts.iter().map(of))
}

/// Where a gather has `part` bytes of each rank.
pub(super) fn gather_bytes(hosts: &[Range<usize>], part: usize) -> Busiest {
    let world = hosts.last().map_or(0, |ranks| ranks.end);
    let of = |ranks: &Range<usize>| Busiest {
        into: (world - ranks.len()).saturating_mul(part),
        out: (ranks.len() * (hosts.len() - 1)).saturating_mul(part),
    };
    Busiest::of(hosts.iter().map(of))
}

/// Elements of every chunk in one block of a chain: a message from host to host has those of a lane's chunks.
pub(super) fn block_elements(hosts: &Hosts, wire: Wire, chunk: usize) -> usize {
    let of_each = PARTIAL * hosts.world_size().div_ceil(hosts.lanes());
    let bytes = (of_each * chunk / (BLOCKS_A_HOST * hosts.each().len())).clamp(LEAST_MESSAGE, MESSAGE_BYTES);
    let align = wire.alignment();
    (bytes / of_each / align * align).max(align)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::precision::Ints;

    const INT8: Wire = Wire::Blocks(Ints::Int8);
    const INT4: Wire = Wire::Blocks(Ints::Int4);

    #[test]
    fn bytes_are_those_of_the_table() {
        let bytes = |counts: &[usize], wire, size| {
            let hosts = Hosts::with(counts, 0);
            (raw_bytes(hosts.each(), wire, size, 1280).most(), chain_bytes(hosts.each(), size, 1280).most())
        };
        assert_eq!(bytes(&[8, 8], Wire::Exact, 4), (256 * 1280, 64 * 1280));
        assert_eq!(bytes(&[8, 8], Wire::Exact, 2), (128 * 1280, 64 * 1280));
        assert_eq!(bytes(&[8, 8], INT8, 2), (64 * 1320, 64 * 1280));
        assert_eq!(bytes(&[8, 8], INT4, 2), (64 * 680, 64 * 1280));
        assert_eq!(bytes(&[1, 1], Wire::Exact, 4), (4 * 1280, 8 * 1280));
        // A host in the middle gets partial sums and its own.
        assert_eq!(bytes(&[8, 8, 8, 8], Wire::Exact, 4), (8 * 24 * 4 * 1280, (32 * 4 + 8 * 4) * 1280));
        assert_eq!(bytes(&[3, 1], Wire::Exact, 4), (12 * 1280, 16 * 1280));
        let coded = |counts: &[usize], code| host_sum_bytes(Hosts::with(counts, 0).each(), code, 1280);
        for (code, bytes) in [(Code::Bf16, 8 * 2 * 1280), (Code::Blocks(Ints::Int4), 8 * 680)] {
            assert_eq!(coded(&[8, 8], code), Busiest { into: bytes, out: bytes });
            assert_eq!(coded(&[8, 8, 8], code), Busiest { into: 2 * bytes, out: 2 * bytes });
            assert_eq!(coded(&[8, 4], code), Busiest { into: bytes, out: bytes }, "four owners get, eight are sent to");
        }
        // The host of one rank gets most, that of three sends most.
        let gather = |counts: &[usize]| gather_bytes(Hosts::with(counts, 0).each(), 100);
        assert_eq!(gather(&[3, 1]), Busiest { into: 300, out: 300 });
        assert_eq!(gather(&[2, 2, 2]), Busiest { into: 400, out: 400 });
    }

    #[test]
    fn long_sums_of_many_ranks_a_host_go_in_a_chain() {
        let way = |counts: &[usize], wire, size, chunk| way(&Hosts::with(counts, 0), wire, size, chunk);
        assert_eq!(way(&[8, 8], Wire::Exact, 4, 1 << 20), Way::Chain);
        assert_eq!(way(&[8, 8], Wire::Exact, 4, 4096), Way::Chain, "256 KiB");
        assert_eq!(way(&[8, 8], Wire::Exact, 4, 4095), Way::Raw, "short");
        assert_eq!(way(&[8, 8], Wire::Exact, 2, 1 << 20), Way::Chain);
        assert_eq!(way(&[8, 8], INT4, 4, 1 << 20), Way::Raw);
        assert_eq!(way(&[3, 3], Wire::Exact, 4, 1 << 20), Way::Chain);
        assert_eq!(way(&[2, 2], Wire::Exact, 4, 1 << 20), Way::Raw, "as many bytes either way");
        for hosts in 2..20 {
            assert_eq!(way(&vec![1; hosts], Wire::Exact, 4, 1 << 20), Way::Raw, "{hosts} hosts of one rank");
        }
        // A slot has no room for a block for every rank.
        assert_eq!(way(&[600, 600], Wire::Exact, 4, 1 << 20), Way::Chain);
        assert_eq!(way(&[600, 600], INT8, 4, 1 << 20), Way::Raw);
        // However short, a sum of which the bits depend on the way takes that way.
        for wire in [Code::Bf16, Code::Blocks(Ints::Int4)] {
            assert_eq!(way(&[8, 8], Wire::BetweenHosts(wire), 4, 1), Way::HostSums(wire));
        }
        // All ranks find the same.
        let counts = [3, 4, 2, 5];
        assert!((0..14).all(|rank| super::way(&Hosts::with(&counts, rank), Wire::Exact, 4, 9999) == Way::Chain));
    }

    #[test]
    fn blocks_are_whole_and_messages_of_a_few_hundred_kilobytes_at_most() {
        for counts in [&[8, 8][..], &[9, 7], &[2, 3, 2], &[64; 32]] {
            let hosts = Hosts::with(counts, 0);
            for (wire, chunk) in [Wire::Exact, INT8, INT4].into_iter().flat_map(|w| [1, 5000, 1 << 24].map(|c| (w, c)))
            {
                let elements = block_elements(&hosts, wire, chunk);
                let lane = hosts.world_size().div_ceil(hosts.lanes());
                assert!(elements > 0 && elements.is_multiple_of(wire.alignment()));
                assert!(elements * lane * PARTIAL <= MESSAGE_BYTES, "{counts:?} {wire:?} {chunk}: {elements}");
            }
        }
    }
}
