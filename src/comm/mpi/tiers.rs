//! Collectives of ranks on several hosts.
//!
//! ```text
//!   reduce-scatter   every rank sends its part to each owner on another host ----> sums of all parts in rank order
//!                    ranks of one host show each other theirs in shared memory --/
//!   all-gather       shards inside of each host -> slices of the host's whole from host to host -> slices inside again
//! ```
//!
//! Inside a host is the [`Exchange`] of a world of that host's ranks. Between hosts are messages: a header, which names the
//! collective that a rank is in, then pieces of data. Those of the next piece are on their way while this one is worked on.
//!
//! Sums run in rank order in f32, so the bits are those of one machine with as many ranks.

use super::hosts::Hosts;
use super::link::{Link, Tag, Transfer};
use super::notices::Notices;
use crate::comm::coded::sum_blocks;
use crate::comm::collectives::{piece_of, sum_exact, typed};
use crate::comm::encoding::Wire;
use crate::comm::exchange::{Exchange, Runner};
use crate::comm::fingerprint::Fingerprint;
use crate::comm::kind::Kind;
use crate::comm::shm::SLOT_BYTES;
use crate::comm::split::{give_each, given, others, pieces};
use crate::error::CommError;
use crate::precision::Flat;
use candle_core::DType;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The most bytes of a message.
const MESSAGE_BYTES: usize = 1 << 18;
/// The most bytes that a rank sends at a time, to all others together.
const SENT_BYTES: usize = 16 << 20;
/// Looks at a message that is awaited before the thread lets others run, and before it sleeps between looks.
const SPINS: u32 = 200;
const YIELDS: u32 = 20_000;
const NAP: Duration = Duration::from_micros(50);
/// How much later than its echo in this host the failure of a rank of another host may be heard of.
const ECHO: Duration = Duration::from_millis(100);
/// How often a wait looks for ranks that have failed.
const WATCH: Duration = Duration::from_millis(20);
type Result<T> = std::result::Result<T, CommError>;

/// One rank's side of collectives across hosts.
pub(in crate::comm) struct Tiers {
    /// The ranks of this host, counted from 0.
    local: Exchange,
    link: Arc<Link>,
    hosts: Arc<Hosts>,
    notices: Arc<Notices>,
    timeout: Duration,
    /// The present collective, and the engine's call in which it was launched.
    current: Option<Fingerprint>,
    sequence: u64,
    call: u64,
    /// Bytes from other hosts in the present collective, as they travelled and as they are in memory.
    wire_bytes: usize,
    exact_bytes: usize,
    /// What is being sent, oldest first.
    sending: VecDeque<(usize, Transfer)>,
}

impl Tiers {
    pub(super) fn new(
        local: Exchange,
        link: Arc<Link>,
        hosts: Arc<Hosts>,
        notices: Arc<Notices>,
        timeout: Duration,
    ) -> Self {
        Self {
            local,
            link,
            hosts,
            notices,
            timeout,
            current: None,
            sequence: 0,
            call: 0,
            wire_bytes: 0,
            exact_bytes: 0,
            sending: VecDeque::new(),
        }
    }

    fn rank(&self) -> usize {
        self.link.rank()
    }

    fn size(&self) -> usize {
        self.hosts.world_size()
    }

    pub(in crate::comm) fn run_by(&mut self, runner: Runner) {
        self.local.run_by(runner);
    }

    pub(in crate::comm) fn called_in(&mut self, call: u64) {
        self.call = call;
        self.local.called_in(call);
    }

    /// Bytes that came from other ranks in the present collective, and what they would have been without any encoding.
    pub(in crate::comm) fn bytes(&self) -> (usize, usize) {
        let (wire, exact) = self.local.bytes();
        (wire + self.wire_bytes, exact + self.exact_bytes)
    }

    /// Begins a collective.
    fn begin(&mut self, kind: Kind, wire: Wire, dtype: DType, elements: usize, tag: u64) {
        self.sequence += 1;
        self.current = Some(Fingerprint::new(self.sequence, kind, wire, dtype, elements, tag));
        self.local.begin(kind, wire, dtype, elements, tag);
        (self.wire_bytes, self.exact_bytes) = (0, 0);
    }

    /// Runs one of the collectives that follow, to the end of everything that this rank sends in it.
    pub(in crate::comm) fn run<T>(&mut self, collective: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        let result = collective(self).and_then(|result| self.flush().map(|()| result));
        result.map_err(|error| self.at_first(error))
    }

    /// The failure of which this one is the echo, if it is: a rank of this host may have been told of a rank of another host
    /// before this one was.
    fn at_first(&self, error: CommError) -> CommError {
        if !matches!(error, CommError::RankAborted { .. } | CommError::RankLeft { .. }) {
            return error;
        }
        let until = Instant::now() + ECHO;
        loop {
            match self.notices.failure() {
                Ok(Some((from, why))) => return self.aborted(from, &why),
                Ok(None) if Instant::now() < until => std::thread::sleep(NAP),
                _ => return error,
            }
        }
    }

    /// The sum lies where `input` lay.
    pub(in crate::comm) fn reduce_scatter(&mut self, wire: Wire, mut input: Flat, tag: u64) -> Result<Flat> {
        self.begin(Kind::ReduceScatter, wire, input.dtype(), input.len(), tag);
        assert!(input.len().is_multiple_of(self.size()), "{} elements in {} equal chunks", input.len(), self.size());
        let chunk = input.len() / self.size();
        self.reduce(wire, &mut input, 0)?;
        input.truncate(chunk);
        Ok(input)
    }

    pub(in crate::comm) fn all_gather(&mut self, wire: Wire, shard: Flat, tag: u64) -> Result<Flat> {
        self.begin(Kind::AllGather, wire, shard.dtype(), shard.len(), tag);
        let (world, rank, chunk) = (self.size(), self.rank(), shard.len());
        let exact = shard.size_in_bytes();
        let mut whole = shard;
        whole.reserve_exact(chunk * (world - 1));
        let Wire::Blocks(ints) = wire else {
            whole.extend_zeros(chunk * (world - 1));
            let bytes = whole.as_bytes_mut();
            bytes.copy_within(..exact, rank * exact);
            self.gather(bytes, exact)?;
            return Ok(whole);
        };
        let part = ints.encoded_len(chunk);
        let mut coded = vec![0; part * world];
        ints.encode(whole.slice(0..chunk), &mut coded[rank * part..][..part]);
        self.gather(&mut coded, exact)?;
        whole.extend_zeros(chunk * (world - 1));
        for (r, coded) in coded.chunks_exact(part.max(1)).enumerate() {
            ints.decode(coded, whole.slice_mut(r * chunk..(r + 1) * chunk));
        }
        Ok(whole)
    }

    /// A reduce-scatter and an all-gather in the memory of `input`. The sums are those of the reduce-scatter, bit for bit.
    pub(in crate::comm) fn all_reduce(&mut self, wire: Wire, mut input: Flat, tag: u64) -> Result<Flat> {
        self.begin(Kind::AllReduce, wire, input.dtype(), input.len(), tag);
        let (len, size) = (input.len(), input.dtype().size_in_bytes());
        let chunk = len.div_ceil(self.size());
        input.extend_zeros(chunk * self.size() - len);
        self.reduce(wire, &mut input, self.rank() * chunk)?;
        self.gather(input.as_bytes_mut(), chunk * size)?;
        input.truncate(len);
        Ok(input)
    }

    pub(in crate::comm) fn gather_bytes(&mut self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.begin(Kind::Control, Wire::Exact, DType::U8, bytes.len(), 0);
        let mut whole = vec![0; bytes.len() * self.size()];
        whole[self.rank() * bytes.len()..][..bytes.len()].copy_from_slice(bytes);
        self.gather(&mut whole, bytes.len())?;
        Ok(match bytes.len() {
            0 => vec![Vec::new(); self.size()],
            len => whole.chunks_exact(len).map(<[u8]>::to_vec).collect(),
        })
    }

    pub(in crate::comm) fn barrier(&mut self) -> Result<()> {
        self.begin(Kind::Barrier, Wire::Exact, DType::U8, 0, 0);
        // A byte from each rank: whoever has all of them knows that all have come.
        self.gather(&mut vec![0; self.size()], 1)
    }

    /// Sums this rank's chunk of all ranks' `input` (world size x n elements), and writes it from element `at` on: the place
    /// of the first chunk or of this rank's.
    fn reduce(&mut self, wire: Wire, input: &mut Flat, at: usize) -> Result<()> {
        let (world, rank, dtype) = (self.size(), self.rank(), input.dtype());
        let here = self.hosts.here();
        let remote: Vec<usize> = self.hosts.remote().collect();
        let (chunk, size) = (input.len() / world, dtype.size_in_bytes());
        // As elements travel in a world of this size on one machine.
        let (wire, _) = piece_of(world, wire, dtype);
        let (local_wire, local_step) = piece_of(here.len(), wire, dtype);
        assert!(local_wire == wire, "fewer ranks leave more room");
        let local_step = if here.len() == 1 { usize::MAX } else { local_step };
        let step = message_elements(wire, size, remote.len());
        let encoded = |len: usize| match wire {
            Wire::Exact => len * size,
            Wire::Blocks(ints) => ints.encoded_len(len),
        };
        self.greet(&remote)?;
        let mut ranges = pieces(chunk, step).peekable();
        let mut next = Some(self.post(&remote, wire, input, ranges.peek().cloned().unwrap_or_default(), encoded)?);
        while let Some(range) = ranges.next() {
            let arriving = next.take().unwrap_or_default();
            if let Some(range) = ranges.peek() {
                next = Some(self.post(&remote, wire, input, range.clone(), encoded)?);
            }
            let mut parts = Vec::with_capacity(remote.len());
            for (peer, transfer) in remote.iter().zip(arriving) {
                parts.push(self.finish(*peer, transfer)?);
            }
            self.wire_bytes += remote.len() * encoded(range.len());
            self.exact_bytes += remote.len() * range.len() * size;
            for inside in pieces(range.len(), local_step) {
                let bytes = encoded(inside.len());
                let of =
                    |owner: usize| owner * chunk + range.start + inside.start..owner * chunk + range.start + inside.end;
                give_each(&mut self.local, bytes, |r, part| match wire {
                    Wire::Exact => part.copy_from_slice(input.slice(of(here.start + r)).as_bytes()),
                    Wire::Blocks(ints) => ints.encode(input.slice(of(here.start + r)), part),
                })?;
                if inside.is_empty() {
                    continue;
                }
                let from = encoded(inside.start);
                let (before, after) = parts.split_at(here.start);
                let peers: Vec<&[u8]> = (before.iter().map(|part| &part[from..from + bytes]))
                    .chain(given(&self.local, bytes, inside.len() * size))
                    .chain(after.iter().map(|part| &part[from..from + bytes]))
                    .collect();
                let places = (of(rank).start, at + range.start + inside.start);
                match wire {
                    Wire::Exact => {
                        let peers: Vec<_> = peers.into_iter().map(|part| typed(dtype, part)).collect();
                        sum_exact(input, places, inside.len(), rank, &peers);
                    }
                    Wire::Blocks(ints) => sum_blocks(ints, input, places, inside.len(), rank, &peers),
                }
            }
        }
        Ok(())
    }

    /// Sends the elements `range` of each remote rank's chunk, and begins to receive theirs of this rank's.
    fn post(
        &mut self,
        remote: &[usize],
        wire: Wire,
        input: &Flat,
        range: Range<usize>,
        encoded: impl Fn(usize) -> usize,
    ) -> Result<Vec<Transfer>> {
        let chunk = input.len() / self.size();
        let bytes = encoded(range.len());
        let arriving = self.receive(remote, Tag::Data, bytes)?;
        for peer in remote {
            let part = input.slice(peer * chunk + range.start..peer * chunk + range.end);
            let message = match wire {
                Wire::Exact => part.as_bytes().to_vec(),
                Wire::Blocks(ints) => {
                    let mut coded = vec![0; bytes];
                    ints.encode(part, &mut coded);
                    coded
                }
            };
            self.send(*peer, Tag::Data, message)?;
        }
        Ok(arriving)
    }

    /// Fills `whole` with the parts of all ranks, of which this rank's is in its place. A part is `exact` bytes where it
    /// stands for elements that take so many.
    fn gather(&mut self, whole: &mut [u8], exact: usize) -> Result<()> {
        let part = whole.len() / self.size();
        let (hosts, here) = (self.hosts.clone(), self.hosts.here());
        let (lanes, lane) = (hosts.lanes(), self.rank() - here.start);
        // One byte of one host's whole is sent by one lane of that host to the same lane of each other.
        let slice = |ranks: &Range<usize>, lane: usize| {
            let bound = |lane: usize| ranks.start * part + ranks.len() * part * lane / lanes;
            bound(lane)..bound(lane + 1)
        };
        let partners: Vec<usize> = match lane < lanes {
            true => hosts.elsewhere().map(|ranks| ranks.start + lane).collect(),
            false => Vec::new(),
        };
        self.greet(&partners)?;
        let own = self.rank() * part..(self.rank() + 1) * part;
        for range in pieces(part, SLOT_BYTES) {
            let mine = own.start + range.start..own.start + range.end;
            self.local.piece(range.len(), |slot| slot.copy_from_slice(&whole[mine]))?;
            for (r, _) in others(here.len(), lane) {
                let from = self.local.coded(r, 0, range.len(), exact_share(range.len(), part, exact));
                whole[(here.start + r) * part + range.start..][..range.len()].copy_from_slice(from);
            }
        }
        let longest = hosts.elsewhere().chain([here.clone()]).map(|ranks| ranks.len() * part).max().unwrap_or(0);
        let step = MESSAGE_BYTES.min((SENT_BYTES / partners.len().max(1)).max(1 << 12));
        let blocks: Vec<Range<usize>> = pieces(longest.div_ceil(lanes), step).collect();
        let cut = |slice: Range<usize>, block: &Range<usize>| {
            let bound = |at: usize| (slice.start + at).min(slice.end);
            bound(block.start)..bound(block.end)
        };
        let mut next = Some(self.swap(whole, &hosts, &partners, |ranks| cut(slice(ranks, lane), &blocks[0]))?);
        for (i, block) in blocks.iter().enumerate() {
            let arriving = next.take().unwrap_or_default();
            if let Some(block) = blocks.get(i + 1) {
                next = Some(self.swap(whole, &hosts, &partners, |ranks| cut(slice(ranks, lane), block))?);
            }
            let mut arriving = partners.iter().zip(arriving);
            for ranks in hosts.elsewhere() {
                let mine = if lane < lanes { cut(slice(&ranks, lane), block) } else { 0..0 };
                if let Some((peer, transfer)) = arriving.next() {
                    whole[mine.clone()].copy_from_slice(&self.finish(*peer, transfer)?);
                    self.wire_bytes += mine.len();
                    self.exact_bytes += exact_share(mine.len(), part, exact);
                }
                for range in pieces(block.len(), SLOT_BYTES) {
                    let of_lane = |lane: usize| match lane < lanes {
                        true => cut(cut(slice(&ranks, lane), block), &range),
                        false => 0..0,
                    };
                    let mine = of_lane(lane);
                    self.local.piece(mine.len(), |slot| slot.copy_from_slice(&whole[mine]))?;
                    for (r, _) in others(here.len(), lane) {
                        let theirs = of_lane(r);
                        let exact = exact_share(theirs.len(), part, exact);
                        let from = self.local.coded(r, 0, theirs.len(), exact);
                        whole[theirs].copy_from_slice(from);
                    }
                }
            }
        }
        Ok(())
    }

    /// Sends bytes of this host to the partners, and begins to receive those of their hosts.
    fn swap(
        &mut self,
        whole: &[u8],
        hosts: &Hosts,
        partners: &[usize],
        range_of: impl Fn(&Range<usize>) -> Range<usize>,
    ) -> Result<Vec<Transfer>> {
        let mut arriving = Vec::with_capacity(partners.len());
        for (peer, ranks) in partners.iter().zip(hosts.elsewhere()) {
            arriving.push(self.link.receive(*peer, Tag::Data, range_of(&ranks).len())?);
        }
        for peer in partners {
            self.send(*peer, Tag::Data, whole[range_of(&hosts.here())].to_vec())?;
        }
        Ok(arriving)
    }

    /// Tells the ranks with which data will be exchanged which collective this is, and looks that theirs is the same.
    fn greet(&mut self, peers: &[usize]) -> Result<()> {
        let mine = self.current.expect("a collective has begun");
        let arriving = self.receive(peers, Tag::Header, 8 * (Fingerprint::WORDS + 1))?;
        let header: Vec<u8> = mine.words().into_iter().chain([self.call]).flat_map(u64::to_le_bytes).collect();
        for peer in peers {
            self.send(*peer, Tag::Header, header.clone())?;
        }
        for (peer, transfer) in peers.iter().zip(arriving) {
            let bytes = self.finish(*peer, transfer)?;
            let mut words = [0u64; Fingerprint::WORDS + 1];
            for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(8)) {
                *word = u64::from_le_bytes(bytes.try_into().expect("eight bytes"));
            }
            let [words @ .., call] = words;
            let theirs = Fingerprint::from_words(words);
            if theirs != mine {
                let (here, there) = (mine.within(self.call), theirs.within(call));
                return Err(CommError::Diverged { rank: self.rank(), here, peer: *peer, there });
            }
        }
        Ok(())
    }

    fn receive(&self, peers: &[usize], tag: Tag, len: usize) -> Result<Vec<Transfer>> {
        peers.iter().map(|peer| self.link.receive(*peer, tag, len)).collect()
    }

    /// Begins to send; what was sent before is freed where it is done.
    fn send(&mut self, peer: usize, tag: Tag, bytes: Vec<u8>) -> Result<()> {
        while let Some((_, oldest)) = self.sending.front_mut() {
            if !oldest.is_done()? {
                break;
            }
            drop(self.sending.pop_front().map(|(_, sent)| sent.into_bytes()));
        }
        self.sending.push_back((peer, self.link.send(peer, tag, bytes)?));
        Ok(())
    }

    /// Waits until everything has been sent: the process may end before the next collective.
    fn flush(&mut self) -> Result<()> {
        while let Some((peer, sent)) = self.sending.pop_front() {
            self.finish(peer, sent)?;
        }
        Ok(())
    }

    /// Waits for a message of a rank of another host.
    fn finish(&mut self, peer: usize, mut transfer: Transfer) -> Result<Vec<u8>> {
        let (mut turns, mut waited, mut last) = (0u32, Duration::ZERO, None::<Instant>);
        while !transfer.is_done()? {
            turns += 1;
            match turns {
                ..SPINS => std::hint::spin_loop(),
                SPINS..YIELDS => std::thread::yield_now(),
                _ => std::thread::sleep(NAP),
            }
            if turns.is_multiple_of(SPINS) {
                let now = Instant::now();
                let passed = now.duration_since(*last.get_or_insert(now));
                if passed >= WATCH {
                    // As in shared memory, a job that was stopped for an hour has not waited for an hour.
                    waited += passed.min(Duration::from_secs(1));
                    last = Some(now);
                    self.watch(peer)?;
                    if waited > self.timeout {
                        let (rank, op, limit) = (self.rank(), self.op(), self.timeout);
                        return Err(CommError::Timeout { rank, peer, op, limit });
                    }
                }
            }
        }
        Ok(transfer.into_bytes())
    }

    /// Looks for ranks that have failed, while `peer` is awaited.
    fn watch(&mut self, peer: usize) -> Result<()> {
        if let Some(error) = self.local.failed_peer() {
            return Err(error);
        }
        if let Some((from, why)) = self.notices.failure()? {
            return Err(self.aborted(from, &why));
        }
        if self.notices.has_left(peer) {
            let (rank, op) = (self.rank(), self.op());
            return Err(CommError::RankLeft { rank, peer, op });
        }
        Ok(())
    }

    /// The error where rank `from` of another host has given up.
    fn aborted(&self, from: usize, why: &str) -> CommError {
        let why = format!("on host {}: {why}", self.hosts.name_of(from));
        CommError::RankAborted { rank: self.rank(), peer: from, why, op: self.op() }
    }

    /// The present collective, for messages.
    fn op(&self) -> String {
        self.current.map(|fingerprint| fingerprint.to_string()).unwrap_or_default()
    }
}

/// Elements of a message to each of `peers` ranks, whole blocks of them where they travel in blocks.
fn message_elements(wire: Wire, size: usize, peers: usize) -> usize {
    let bytes = MESSAGE_BYTES.min((SENT_BYTES / peers.max(1)).max(1 << 12));
    match wire {
        Wire::Exact => bytes / size,
        Wire::Blocks(ints) => ints.whole_blocks_in(bytes),
    }
}

/// Of `exact` bytes for which `part` bytes travel, the share of `len` of these.
fn exact_share(len: usize, part: usize, exact: usize) -> usize {
    if part == 0 { 0 } else { (len as u128 * exact as u128 / part as u128) as usize }
}
