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
/// The number of bytes in a [`JoinRequest`], which is small enough to arrive completely or not at all.
const JOIN_REQUEST_BYTES: usize = 32;
/// The maximum number of bytes of a reason.
const MAX_REASON_BYTES: usize = 4096;

/// The request that a rank sends to join.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct JoinRequest {
    pub(super) rank: usize,
    /// The number of ranks according to the sender's environment variables.
    pub(super) world: usize,
}

impl JoinRequest {
    pub(super) fn send(self, mut to: &UnixStream) -> io::Result<()> {
        to.write_all(&[MAGIC, VERSION, self.rank as u64, self.world as u64].map(u64::to_le_bytes).concat())
    }

    /// Reads a request from a connection that has data; returns `None` if the sender is not a rank that uses this
    /// version of the protocol.
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

/// Admits a rank: sends it the descriptor of the shared memory.
pub(super) fn welcome(to: &UnixStream, memory: BorrowedFd<'_>) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors = [memory];
    control.push(SendAncillaryMessage::ScmRights(&descriptors));
    sendmsg(to, &[IoSlice::new(&0u32.to_le_bytes())], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Sends a rank the reason why it is not admitted.
pub(super) fn reject(mut to: &UnixStream, why: &str) -> io::Result<()> {
    let text = &why.as_bytes()[..why.floor_char_boundary(MAX_REASON_BYTES)];
    to.write_all(&[&(text.len() as u32).to_le_bytes(), text].concat())
}

/// The reply of rank 0.
#[derive(Debug)]
pub(super) enum JoinReply {
    /// The descriptor of the shared memory.
    Welcome(OwnedFd),
    /// The reason why there is no descriptor.
    Rejected(String),
}

/// Waits for rank 0's reply, up to the connection's time limit. Returns `None` if rank 0 has ended without replying.
pub(super) fn receive_reply(from: &UnixStream) -> io::Result<Option<JoinReply>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut bytes = vec![0; 4 + MAX_REASON_BYTES];
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
        None => JoinReply::Rejected(String::from_utf8_lossy(&bytes[4..read]).into_owned()),
    }))
}
