//! The description of a message between two ranks, compared before its data is read.

use super::CollectiveKind;
use super::fingerprint::CollectiveFingerprint;
use crate::error::CommError;

/// The description of a message, which must be the same on both sides, and the engine call that launched the message.
#[derive(Clone, Copy)]
pub(super) struct MessageFingerprint {
    pub fingerprint: CollectiveFingerprint,
    /// Whether this rank sends or receives.
    pub kind: CollectiveKind,
    pub call: u64,
}

impl MessageFingerprint {
    /// The number of words of a message's header.
    pub(super) const WORDS: usize = CollectiveFingerprint::WORDS + 1;

    pub(super) fn words(&self) -> [u64; Self::WORDS] {
        let mut words = [self.call; Self::WORDS];
        words[..CollectiveFingerprint::WORDS].copy_from_slice(&self.fingerprint.words());
        words
    }

    /// Returns the description of this rank's side of the message, for errors.
    pub(super) fn op(&self) -> String {
        self.fingerprint.of_kind(self.kind).within(self.call)
    }

    /// Checks that `words`, sent by `peer`, describe the message that `rank` expects.
    ///
    /// # Errors
    /// Fails with [`CommError::Diverged`] if the words describe a different message.
    pub(super) fn check(&self, rank: usize, peer: usize, words: [u64; Self::WORDS]) -> Result<(), CommError> {
        let [theirs @ .., call] = words;
        let theirs = CollectiveFingerprint::from_words(theirs);
        if theirs == self.fingerprint {
            return Ok(());
        }
        let (here, there) = (self.op(), theirs.within(call));
        Err(CommError::Diverged { rank, here, peer, there })
    }
}
