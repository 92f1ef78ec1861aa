//! The contents of frames.

use super::pseudo_gradient_codec::PseudoGradientFormat;
use serde::{Deserialize, Serialize};

/// The version of the protocol. The server and the islands must use the same version.
pub(super) const VERSION: u32 = 1;
/// The first word of a connection, before the first frame.
pub(super) const MAGIC: &[u8; 8] = b"CZISLAND";

/// The maximum number of bytes in a short message.
pub(super) const MAX_SHORT: u64 = 1 << 20;
/// The maximum number of bytes in a message with a manifest.
pub(super) const MAX_MANIFEST: u64 = 256 << 20;
/// The maximum number of bytes in a part of a donation.
pub(super) const MAX_PART: u64 = 16 << 20;

/// The key of a fragment's exchange. Keys sort in the order of the exchanges.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(crate) struct RoundKey {
    /// The step after which the fragment is sent, counted from 1.
    pub step: u64,
    /// 0 if the schedule demands the exchange; otherwise the number of `synchronize_islands` calls since the step.
    pub call: u64,
    pub fragment: u64,
}

impl RoundKey {
    pub const BYTES: usize = 24;

    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        for (chunk, number) in bytes.chunks_exact_mut(8).zip([self.step, self.call, self.fragment]) {
            chunk.copy_from_slice(&number.to_le_bytes());
        }
        bytes
    }

    /// Splits a key from the start of `bytes`.
    pub fn split(bytes: &[u8]) -> Option<(Self, &[u8])> {
        let ([step, call, fragment], rest) = split_numbers(bytes)?;
        Some((Self { step, call, fragment }, rest))
    }
}

/// Splits little-endian numbers from the start of `bytes`.
pub(super) fn split_numbers<const N: usize>(bytes: &[u8]) -> Option<([u64; N], &[u8])> {
    let mut numbers = [0; N];
    let mut rest = bytes;
    for number in &mut numbers {
        let (first, remaining) = rest.split_first_chunk::<8>()?;
        (*number, rest) = (u64::from_le_bytes(*first), remaining);
    }
    Some((numbers, rest))
}

/// The first message of a rank: the properties that its island shares with the others, and its identity.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Hello {
    /// A random number that identifies this start of the island. It is the same on all ranks of the island.
    pub start: u64,
    /// The number of the launcher that starts and restarts the island; a random number if there is none.
    pub launcher: u64,
    /// The requested slot, if any.
    pub slot: Option<usize>,
    /// The position of this rank in its island.
    pub position: usize,
    /// The properties that all islands share.
    pub run: RunShape,
    /// For each fragment, the number of elements of this rank's pieces.
    pub lens: Vec<u64>,
}

/// The properties that all islands of a run share.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RunShape {
    /// The number of slots.
    pub slots: usize,
    /// The number of ranks of an island.
    pub ranks: usize,
    /// The number of islands that must have begun before the first exchange.
    pub min_islands: usize,
    pub format: PseudoGradientFormat,
    /// Hashes of the values that engines compare, each with a name for messages.
    pub fingerprint: Vec<(String, u64)>,
}

impl RunShape {
    /// Returns the name of the first property in which another island differs, with both values if they are numbers.
    pub fn difference(&self, other: &Self) -> Option<String> {
        let numbers = [
            ("numbers of islands (local_steps.islands)", self.slots, other.slots),
            ("numbers of ranks per island", self.ranks, other.ranks),
            ("values of local_steps.min_islands", self.min_islands, other.min_islands),
        ];
        if let Some((property, own, theirs)) = numbers.into_iter().find(|(_, own, theirs)| own != theirs) {
            return Some(format!("{property}: {own} and {theirs}"));
        }
        if self.format != other.format {
            return Some("values of local_steps.wire_dtype".into());
        }
        let difference = self.fingerprint.iter().zip(&other.fingerprint).find(|(own, theirs)| own != theirs);
        match difference {
            Some(((name, _), _)) => Some(name.clone()),
            None => (self.fingerprint.len() != other.fingerprint.len()).then(|| "fingerprints".into()),
        }
    }
}

/// The server's answer to an island whose ranks are all connected.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Welcome {
    pub slot: usize,
    /// Whether the island joins others: it waits for a donor's state.
    pub joins: bool,
}

/// The first part of a donation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct DonationHead {
    /// The number that the server gave the donation.
    pub donation: u64,
    /// The donor's step. The island that joins takes part in every exchange of later steps.
    pub step: u64,
    /// The manifest that a checkpoint of the donor would have.
    pub manifest: String,
}

/// The head of a mean.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct MeanHead {
    /// The samples of all members; 0 if no member has trained, in which case there is no mean.
    pub samples: u64,
    /// The slots of the islands that took part.
    pub members: Vec<usize>,
    /// The donation that the receiver begins when the mean takes effect.
    pub donation: Option<u64>,
}
