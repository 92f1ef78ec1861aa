//! Status notices between ranks of different hosts: each rank sends one when it leaves or gives up.

use super::link::{MessageTag, MpiLink, MpiTransfer};
use super::topology::HostTopology;
use crate::comm::shm::region::SharedMemoryRegion;
use crate::error::CommError;
use crate::util::lock;
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

/// The number of bytes of a notice: its kind, the rank that it is about, the length of its text, and the text.
const NOTICE_BYTES: usize = 12 + MAX_TEXT_BYTES;
const MAX_TEXT_BYTES: usize = 1024;

/// The status that a rank reports.
#[derive(Debug, Clone, PartialEq, Eq)]
enum StatusNotice {
    /// The sender gives up because the rank with this number has failed: the sender itself, or another rank on its
    /// host. The text is the reason.
    GivesUp(usize, String),
    /// The rank leaves without an error.
    Leaves,
}

impl StatusNotice {
    fn to_bytes(&self) -> Vec<u8> {
        let (kind, rank, text) = match self {
            Self::GivesUp(rank, why) => (1u32, *rank as u32, why.as_str()),
            Self::Leaves => (2, 0, ""),
        };
        let mut end = text.len().min(MAX_TEXT_BYTES);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        let mut bytes = [kind, rank, end as u32].map(u32::to_le_bytes).concat();
        bytes.extend_from_slice(&text.as_bytes()[..end]);
        bytes.resize(NOTICE_BYTES, 0);
        bytes
    }

    fn from_bytes(bytes: &[u8]) -> Self {
        let word = |i: usize| u32::from_le_bytes(bytes[4 * i..4 * i + 4].try_into().expect("four bytes")) as usize;
        match word(0) {
            2 => Self::Leaves,
            _ => Self::GivesUp(
                word(1),
                String::from_utf8_lossy(&bytes[12..12 + word(2).min(MAX_TEXT_BYTES)]).into_owned(),
            ),
        }
    }
}

/// The notices of this rank and of the ranks of other hosts.
pub(super) struct PeerExitNotices {
    link: Arc<MpiLink>,
    /// The region in which zerorun, or the first rank's heartbeat, records that a host is gone.
    region: Arc<SharedMemoryRegion>,
    state: Mutex<PeerExitNoticesState>,
}

#[derive(Default)]
struct PeerExitNoticesState {
    /// The pending receives from the ranks that have sent nothing yet.
    pending: Vec<(usize, MpiTransfer)>,
    left_ranks: BTreeSet<usize>,
    /// The first rank that failed, with the reason.
    failure: Option<(usize, String)>,
    /// The notice of this rank, in flight to each of the others.
    sent_notices: Option<Vec<MpiTransfer>>,
}

impl PeerExitNotices {
    /// Begins to listen to every rank of other hosts.
    ///
    /// # Errors
    /// Fails if MPI fails.
    pub(super) fn listen(
        link: Arc<MpiLink>,
        hosts: &HostTopology,
        region: Arc<SharedMemoryRegion>,
    ) -> Result<Self, CommError> {
        let mut pending = Vec::new();
        for peer in hosts.remote() {
            pending.push((peer, link.receive(peer, MessageTag::Status, NOTICE_BYTES)?));
        }
        Ok(Self {
            link,
            region,
            state: Mutex::new(PeerExitNoticesState { pending, ..PeerExitNoticesState::default() }),
        })
    }

    /// Notifies the others that this rank gives up, because `rank` of this host has failed.
    pub(super) fn give_up(&self, hosts: &HostTopology, rank: usize, why: &str) {
        self.send_notice(hosts, &StatusNotice::GivesUp(rank, why.to_string()));
    }

    /// Notifies the others that this rank leaves, unless it has given up.
    pub(super) fn leave(&self, hosts: &HostTopology) {
        self.send_notice(hosts, &StatusNotice::Leaves);
    }

    fn send_notice(&self, hosts: &HostTopology, notice: &StatusNotice) {
        let mut state = lock(&self.state);
        if state.sent_notices.is_none() {
            // Best effort: a rank that is gone cannot receive it.
            let sent =
                hosts.remote().filter_map(|peer| self.link.send(peer, MessageTag::Status, notice.to_bytes()).ok());
            state.sent_notices = Some(sent.collect());
        }
    }

    /// Returns the first rank of another host that is known to have failed, with the reason.
    ///
    /// # Errors
    /// Fails if MPI fails.
    pub(super) fn failure(&self) -> Result<Option<(usize, String)>, CommError> {
        let mut state = lock(&self.state);
        for (peer, mut transfer) in std::mem::take(&mut state.pending) {
            if !transfer.is_done()? {
                state.pending.push((peer, transfer));
                continue;
            }
            match StatusNotice::from_bytes(&transfer.into_bytes()) {
                StatusNotice::Leaves => drop(state.left_ranks.insert(peer)),
                StatusNotice::GivesUp(rank, why) => drop(state.failure.get_or_insert((rank, why))),
            }
        }
        // A reason that a rank itself has reported is more precise than the launcher's.
        Ok(state.failure.clone().or_else(|| self.region.remote_death()))
    }

    /// Makes progress on all messages of this rank, of any kind, if any other rank is still awaited.
    pub(super) fn progress(&self) {
        // Errors occur again when notices are read.
        let mut state = lock(&self.state);
        _ = state.pending.iter_mut().find_map(|(_, transfer)| (!matches!(transfer.is_done(), Ok(true))).then_some(()));
    }

    /// Returns whether a rank is known to have left, as of the last call to [`PeerExitNotices::failure`].
    pub(super) fn has_left(&self, rank: usize) -> bool {
        lock(&self.state).left_ranks.contains(&rank)
    }

    /// Returns whether all ranks of other hosts have sent their notices and this rank's notice, if there is one, has
    /// been sent to them.
    ///
    /// # Errors
    /// Fails if MPI fails.
    pub(super) fn all_exchanged(&self) -> Result<bool, CommError> {
        self.failure()?;
        let mut state = lock(&self.state);
        let mut sent = true;
        for transfer in state.sent_notices.iter_mut().flatten() {
            sent &= transfer.is_done()?;
        }
        Ok(sent && state.pending.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_notice_is_read_as_it_was_sent_and_a_long_text_is_cut_at_a_character() {
        for notice in [StatusNotice::GivesUp(7, "out of memory".into()), StatusNotice::Leaves] {
            assert_eq!(StatusNotice::from_bytes(&notice.to_bytes()), notice);
        }
        let long = StatusNotice::GivesUp(7, "é".repeat(MAX_TEXT_BYTES));
        assert_eq!(
            StatusNotice::from_bytes(&long.to_bytes()),
            StatusNotice::GivesUp(7, "é".repeat(MAX_TEXT_BYTES / 2))
        );
    }
}
