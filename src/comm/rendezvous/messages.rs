//! Messages of the rendezvous, one each way: a request to join and its reply.

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

const MAGIC: u64 = 0x6361_6e64_6c65_7a6d; // "candlezm"
const VERSION: u64 = 1;
/// Bytes of a [`JoinRequest`]: few enough to arrive whole or not at all.
const JOIN_REQUEST_BYTES: usize = 32;
/// The most bytes of a reason.
const TEXT: usize = 4096;

/// What a rank sends to join.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct JoinRequest {
    pub(super) rank: usize,
    /// How many ranks there are, by its own variables.
    pub(super) world: usize,
}

impl JoinRequest {
    pub(super) fn send(self, mut to: &UnixStream) -> io::Result<()> {
        to.write_all(&[MAGIC, VERSION, self.rank as u64, self.world as u64].map(u64::to_le_bytes).concat())
    }

    /// What has come over a connection that has something to read; `None` where it is no rank of this version.
    pub(super) fn take(mut from: &UnixStream) -> Option<Self> {
        let mut bytes = [0; JOIN_REQUEST_BYTES];
        if from.read(&mut bytes).ok()? != JOIN_REQUEST_BYTES {
            return None;
        }
        let word = |at: usize| u64::from_le_bytes(bytes[8 * at..8 * at + 8].try_into().expect("eight bytes"));
        let request = Self { rank: word(2) as usize, world: word(3) as usize };
        (word(0) == MAGIC && word(1) == VERSION).then_some(request)
    }
}

/// Lets a rank in: it gets the descriptor of the memory.
pub(super) fn welcome(to: &UnixStream, memory: BorrowedFd<'_>) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors = [memory];
    control.push(SendAncillaryMessage::ScmRights(&descriptors));
    sendmsg(to, &[IoSlice::new(&0u32.to_le_bytes())], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Tells a rank why it is not let in.
pub(super) fn turn_away(mut to: &UnixStream, why: &str) -> io::Result<()> {
    let text = &why.as_bytes()[..why.floor_char_boundary(TEXT)];
    to.write_all(&[&(text.len() as u32).to_le_bytes(), text].concat())
}

/// Rank 0's reply.
#[derive(Debug)]
pub(super) enum JoinReply {
    /// The descriptor of the memory.
    Welcome(OwnedFd),
    /// Why there is none.
    TurnedAway(String),
}

/// Waits for rank 0's answer, for as long as the connection's time limit says. `None`: it has ended without one.
pub(super) fn receive_reply(from: &UnixStream) -> io::Result<Option<JoinReply>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut bytes = vec![0; 4 + TEXT];
    let read = recvmsg(from, &mut [IoSliceMut::new(&mut bytes)], &mut control, RecvFlags::CMSG_CLOEXEC)?.bytes;
    if read < 4 {
        return Ok(None);
    }
    let descriptor = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut all) => all.next(),
        _ => None,
    });
    Ok(Some(match descriptor {
        Some(memory) => JoinReply::Welcome(memory),
        None => JoinReply::TurnedAway(String::from_utf8_lossy(&bytes[4..read]).into_owned()),
    }))
}
