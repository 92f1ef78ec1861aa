//! Builds sums, gathers and barriers on one collective, `gather_bytes`, as defaults for a communicator that has no
//! better implementation.
//!
//! ```text
//!   launch   fingerprint | elements in the wire format ----> gather_bytes
//!   wait     fingerprints equal? | decode | sum in rank order, in f32, rounded once
//! ```
//!
//! The results have the same bits as in shared memory. Every rank receives everything, so a reduction moves more bytes
//! than necessary.

use super::Pending;
use super::collective_kind::CollectiveKind;
use super::fingerprint::CollectiveFingerprint;
use super::shm::collectives::sum_exact;
use super::shm::partition::{StridedRanks, extract_group};
use super::shm::quantized::sum_blocks;
use super::wire::format::WireFormat;
use crate::error::CommError;
use crate::precision::{Flat, FlatRef};
use crate::util::counted;
use candle_core::DType;

/// A rank's position in its world and its `gather_bytes` collective.
pub(super) struct DefaultCollectives<G> {
    pub rank: usize,
    pub size: usize,
    /// The `gather_bytes` collective.
    pub gather: G,
}

impl<G: FnOnce(Vec<u8>) -> Pending<Vec<Vec<u8>>>> DefaultCollectives<G> {
    /// Implements `Communicator::all_gather_as`.
    pub fn all_gather(self, wire: WireFormat, mut shard: Flat, tag: u64) -> Pending<Flat> {
        let (world, len) = (self.size, shard.len());
        let call = CollectiveFingerprint::new(0, CollectiveKind::AllGather, wire, shard.dtype(), len, tag);
        let pending = self.exchange(call, encoded(wire, shard.as_ref()));
        Pending::from_fn(move || {
            let messages = pending.wait()?;
            // The result is in the memory of `shard` if that has room for it.
            shard.reserve_exact(len * (world - 1));
            shard.extend_zeros(len * (world - 1));
            for (rank, bytes) in messages.iter().enumerate() {
                decode(wire, bytes, &mut shard, rank * len, len);
            }
            Ok(shard)
        })
    }

    /// Implements `Communicator::all_gather_within_as`.
    pub fn all_gather_within(self, wire: WireFormat, ranks: usize, shard: Flat, tag: u64) -> Pending<Flat> {
        let (group, len) = (StridedRanks::neighbours(self.rank, ranks), shard.len());
        self.all_gather(wire, shard, tag).map(move |gathered| extract_group(gathered, group, len))
    }

    /// Implements `Communicator::reduce_to_groups_as`. As in [`all_reduce`](Self::all_reduce), the receiver encodes.
    pub fn reduce_to_groups(self, wire: WireFormat, ranks: usize, input: Flat, tag: u64) -> Pending<Flat> {
        let (world, rank) = (self.size, self.rank);
        assert!(world.is_multiple_of(ranks), "{} cannot form groups of {ranks}", counted(world, "rank"));
        assert!(
            input.len().is_multiple_of(world),
            "{} cannot form {world} equal chunks",
            counted(input.len(), "element")
        );
        let (owners, chunk) = (StridedRanks::across(rank, ranks, world), input.len() / world);
        let call = CollectiveFingerprint::new(0, CollectiveKind::ReduceScatter, wire, input.dtype(), input.len(), tag);
        let pending = self.exchange(call, encoded(WireFormat::Exact, input.as_ref()));
        Pending::from_fn(move || {
            let messages = pending.wait()?;
            let first = rank % ranks * owners.len();
            let chunks = owners.ranks().map(|owner| (owner, first + owners.position(owner)));
            Ok(sum_chunks(wire, &messages, input, chunk, chunks))
        })
    }

    /// Implements `Communicator::reduce_scatter_as`.
    pub fn reduce_scatter(self, wire: WireFormat, mut input: Flat, tag: u64) -> Pending<Flat> {
        let (world, rank) = (self.size, self.rank);
        assert!(
            input.len().is_multiple_of(world),
            "{} cannot form {world} equal chunks",
            counted(input.len(), "element")
        );
        let chunk = input.len() / world;
        let call = CollectiveFingerprint::new(0, CollectiveKind::ReduceScatter, wire, input.dtype(), input.len(), tag);
        // Each chunk has its own blocks.
        let parts: Vec<Vec<u8>> = (0..world).map(|r| encoded(wire, input.slice(r * chunk..(r + 1) * chunk))).collect();
        let bytes = parts[rank].len();
        let pending = self.exchange(call, parts.concat());
        Pending::from_fn(move || {
            let messages = pending.wait()?;
            let peers = others(&messages, rank).map(|all| &all[rank * bytes..(rank + 1) * bytes]).collect();
            sum(wire, &mut input, rank * chunk, chunk, rank, peers);
            input.truncate(chunk);
            Ok(input)
        })
    }

    /// Implements `Communicator::all_reduce_as`. Summands are sent unchanged; the receiver encodes those that a better
    /// implementation would have sent encoded.
    pub fn all_reduce(self, wire: WireFormat, mut input: Flat, tag: u64) -> Pending<Flat> {
        let (world, len, dtype) = (self.size, input.len(), input.dtype());
        let call = CollectiveFingerprint::new(0, CollectiveKind::AllReduce, wire, dtype, len, tag);
        let chunk = len.div_ceil(world);
        input.extend_zeros(chunk * world - len);
        let pending = self.exchange(call, encoded(WireFormat::Exact, input.as_ref()));
        Pending::from_fn(move || {
            let messages = pending.wait()?;
            let mut sums = sum_chunks(wire, &messages, input, chunk, (0..world).map(|owner| (owner, owner)));
            sums.truncate(len);
            Ok(sums)
        })
    }

    /// Implements `Communicator::barrier`.
    pub fn barrier(self) -> Pending<()> {
        self.exchange(
            CollectiveFingerprint::new(0, CollectiveKind::Barrier, WireFormat::Exact, DType::U8, 0, 0),
            Vec::new(),
        )
        .map(drop)
    }

    /// Implements `Communicator::gather_f64`.
    pub fn gather_f64(self, values: &[f64]) -> Pending<Vec<Vec<f64>>> {
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let values = |bytes: Vec<u8>| bytes.as_chunks::<8>().0.iter().map(|value| f64::from_le_bytes(*value)).collect();
        let (size, rank) = (self.size, self.rank);
        let pending = (self.gather)(bytes);
        Pending::from_fn(move || Ok(of_equal_length(pending.wait()?, size, rank)?.into_iter().map(values).collect()))
    }

    /// Sends the `bytes` of a call to all ranks, and checks that all ranks are in the same call.
    fn exchange(self, call: CollectiveFingerprint, bytes: Vec<u8>) -> Pending<Vec<Vec<u8>>> {
        const HEADER_BYTES: usize = 8 * CollectiveFingerprint::WORDS;
        let (size, rank) = (self.size, self.rank);
        let header = call.words().into_iter().flat_map(u64::to_le_bytes);
        let pending = (self.gather)(header.chain(bytes).collect());
        Pending::from_fn(move || {
            let mut messages = pending.wait()?;
            for (peer, bytes) in messages.iter_mut().enumerate() {
                let data = bytes.split_off(HEADER_BYTES.min(bytes.len()));
                let mut words = [0; CollectiveFingerprint::WORDS];
                let header = bytes.as_chunks::<8>().0;
                words.iter_mut().zip(header).for_each(|(word, bytes)| *word = u64::from_le_bytes(*bytes));
                let theirs = CollectiveFingerprint::from_words(words);
                if theirs != call {
                    let (here, there) = (call.to_string(), theirs.to_string());
                    return Err(CommError::Diverged { rank, here, peer, there }.into());
                }
                *bytes = data;
            }
            Ok(of_equal_length(messages, size, rank)?)
        })
    }
}

/// Returns the messages of all `size` ranks if there are `size` messages and each is as long as that of this `rank`.
///
/// # Errors
/// Fails with [`CommError::Other`] if the communicator has lost a message, or another rank is in a different call.
pub(super) fn of_equal_length(all: Vec<Vec<u8>>, size: usize, rank: usize) -> Result<Vec<Vec<u8>>, CommError> {
    if all.len() != size {
        let found = all.len();
        return Err(CommError::other(format!(
            "gather_bytes must return {} on rank {rank}, one for each rank, but returned {found}",
            counted(size, "message")
        )));
    }
    let sent = all[rank].len();
    match all.iter().position(|message| message.len() != sent) {
        None => Ok(all),
        Some(peer) => Err(CommError::other(format!(
            "gather_bytes returned {} from rank {peer} and {sent} from rank {rank}; every rank must make the \
             same calls in the same order",
            counted(all[peer].len(), "byte")
        ))),
    }
}

/// Returns the sums of chunks of all ranks' elements in `messages`, one after the other, in the memory of `buffer`.
/// `chunks` are pairs of the rank that owns the chunk and the chunk's position; each chunk is summed as its owner would
/// sum it.
fn sum_chunks(
    wire: WireFormat,
    messages: &[Vec<u8>],
    mut buffer: Flat,
    chunk: usize,
    chunks: impl Iterator<Item = (usize, usize)>,
) -> Flat {
    let dtype = buffer.dtype();
    buffer.truncate(0);
    for (owner, position) in chunks {
        let part = |bytes: &Vec<u8>| {
            let mut part = Flat::zeros(dtype, chunk);
            let size = chunk * dtype.size_in_bytes();
            part.as_bytes_mut().copy_from_slice(&bytes[position * size..(position + 1) * size]);
            part
        };
        let mut total = part(&messages[owner]);
        let peers: Vec<Vec<u8>> = others(messages, owner).map(|b| encoded(wire, part(b).as_ref())).collect();
        sum(wire, &mut total, 0, chunk, owner, peers.iter().map(|bytes| &bytes[..]).collect());
        buffer.extend_cast(total.as_ref());
    }
    buffer
}

/// Returns the messages of the other ranks, in rank order.
fn others(messages: &[Vec<u8>], rank: usize) -> impl Iterator<Item = &Vec<u8>> {
    messages.iter().enumerate().filter(move |(r, _)| *r != rank).map(|(_, message)| message)
}

/// Encodes elements in the wire format. This function does not distinguish between hosts.
fn encoded(wire: WireFormat, values: FlatRef<'_>) -> Vec<u8> {
    match wire {
        WireFormat::Exact | WireFormat::BetweenHosts(_) => values.as_bytes().to_vec(),
        WireFormat::Blocks(ints) => {
            let mut bytes = vec![0; ints.encoded_len(values.len())];
            ints.encode(values, &mut bytes);
            bytes
        }
    }
}

/// Decodes received elements into elements `at ..` of `values`.
fn decode(wire: WireFormat, bytes: &[u8], values: &mut Flat, at: usize, len: usize) {
    match wire {
        WireFormat::Exact | WireFormat::BetweenHosts(_) => {
            let size = values.dtype().size_in_bytes();
            values.as_bytes_mut()[at * size..(at + len) * size].copy_from_slice(bytes);
        }
        WireFormat::Blocks(ints) => ints.decode(bytes, values.slice_mut(at..at + len)),
    }
}

/// Adds the peers' parts to elements `start ..` of `values`, in rank order, and writes the sums to the start of
/// `values`.
fn sum(wire: WireFormat, values: &mut Flat, start: usize, len: usize, rank: usize, peers: Vec<&[u8]>) {
    match wire {
        WireFormat::Exact | WireFormat::BetweenHosts(_) => {
            let part = |bytes: &&[u8]| {
                let mut part = Flat::zeros(values.dtype(), len);
                part.as_bytes_mut().copy_from_slice(bytes);
                part
            };
            let parts: Vec<Flat> = peers.iter().map(part).collect();
            let parts: Vec<FlatRef<'_>> = parts.iter().map(Flat::as_ref).collect();
            sum_exact(values, (start, 0), len, rank, &parts);
        }
        WireFormat::Blocks(ints) => sum_blocks(ints, values, (start, 0), len, rank, &peers),
    }
}
