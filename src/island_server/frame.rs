//! Frames: the units of a connection between a rank and the island server.
//!
//! ```text
//!   kind (1 byte) | length (8 bytes, little endian) | body
//! ```
//!
//! A frame's length is checked against the limit for the frame's kind before the body is read, and the body takes
//! memory only as its bytes arrive.

use crate::util::counted;
use std::io::{self, Read, Write};
use std::sync::Arc;

/// The maximum number of bytes by which a body grows at a time while it arrives.
const GROWTH: u64 = 1 << 20;

/// The kind of a frame. The numbers are part of the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum FrameKind {
    /// To the server: the identity of the rank that connects ([`Hello`](super::messages::Hello)).
    Hello = 1,
    /// To the server: the change in a fragment.
    Change = 2,
    /// To the server and on to islands that join: the progress of the donor.
    DonationHead = 3,
    /// To the server and on to islands that join: values of the donor's state.
    DonationPart = 4,
    /// To the server and on to islands that join: the donor has sent everything.
    DonationEnd = 5,
    /// In both directions: the sender is alive.
    Ping = 6,
    /// To the server: the program of this island has ended.
    Goodbye = 7,
    /// From the server: the island's slot, and how it begins.
    Welcome = 8,
    /// From the server to an island that waits to join: no other island is left, so begin without a donor.
    Begin = 9,
    /// From the server to an island that joins: the donor is gone; wait for another one.
    DonationAborted = 10,
    /// From the server to an island that joins: the island is part of the run.
    Joined = 11,
    /// From the server: the mean change in a fragment.
    Mean = 12,
    /// From the server: a message for the user.
    Notice = 13,
    /// From the server: this island is not, or no longer, part of the run, and why.
    Refused = 14,
}

impl FrameKind {
    const ALL: [Self; 14] = [
        Self::Hello,
        Self::Change,
        Self::DonationHead,
        Self::DonationPart,
        Self::DonationEnd,
        Self::Ping,
        Self::Goodbye,
        Self::Welcome,
        Self::Begin,
        Self::DonationAborted,
        Self::Joined,
        Self::Mean,
        Self::Notice,
        Self::Refused,
    ];

    fn of(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| *kind as u8 == number)
    }
}

/// A frame to be sent. The body may be shared by several connections.
#[derive(Debug, Clone)]
pub(super) struct Frame {
    pub kind: FrameKind,
    pub head: Vec<u8>,
    pub body: Arc<Vec<u8>>,
}

impl Frame {
    pub fn new(kind: FrameKind, head: Vec<u8>) -> Self {
        Self { kind, head, body: Arc::default() }
    }

    pub fn with_body(kind: FrameKind, head: Vec<u8>, body: Arc<Vec<u8>>) -> Self {
        Self { kind, head, body }
    }

    /// Returns the number of bytes of the head and the body.
    pub fn len(&self) -> usize {
        self.head.len() + self.body.len()
    }

    pub fn write(&self, to: &mut impl Write) -> io::Result<()> {
        let mut start = Vec::with_capacity(9 + self.head.len());
        start.push(self.kind as u8);
        start.extend((self.len() as u64).to_le_bytes());
        start.extend(&self.head);
        to.write_all(&start)?;
        to.write_all(&self.body)
    }
}

/// The reason why no frame could be read.
#[derive(Debug)]
pub(super) enum ReadError {
    Io(io::Error),
    /// The other side does not follow the protocol.
    Protocol(String),
}

impl From<io::Error> for ReadError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// Reads a frame. `limit` returns the largest length that is allowed for a kind, or `None` if the kind is not allowed.
pub(super) fn read(
    from: &mut impl Read,
    limit: impl FnOnce(FrameKind) -> Option<u64>,
) -> Result<(FrameKind, Vec<u8>), ReadError> {
    let mut start = [0; 9];
    from.read_exact(&mut start)?;
    let [number, length @ ..] = start;
    let kind = FrameKind::of(number).ok_or_else(|| ReadError::Protocol(format!("it sent a frame of kind {number}")))?;
    let length = u64::from_le_bytes(length);
    match limit(kind) {
        None => {
            return Err(ReadError::Protocol(format!("it sent a frame of kind {kind:?}, which is not expected here")));
        }
        Some(limit) if length > limit => {
            let length = counted(length, "byte");
            let why = format!("it sent a frame of kind {kind:?} of {length}; at most {limit} are allowed");
            return Err(ReadError::Protocol(why));
        }
        Some(_) => {}
    }
    let mut body = Vec::new();
    let mut remaining = length;
    while remaining > 0 {
        let part = remaining.min(GROWTH);
        if from.take(part).read_to_end(&mut body)? as u64 != part {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
        }
        remaining -= part;
    }
    Ok((kind, body))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_arrives_as_it_was_sent() {
        let frame = Frame::with_body(FrameKind::Change, vec![1, 2], Arc::new(vec![3; 3_000_000]));
        let mut bytes = Vec::new();
        frame.write(&mut bytes).unwrap();
        let (kind, body) = read(&mut &bytes[..], |_| Some(u64::MAX)).unwrap();
        assert_eq!(kind, FrameKind::Change);
        assert!(body[..2] == [1, 2] && body[2..] == frame.body[..]);
        let cut = &bytes[..bytes.len() - 1];
        assert!(matches!(read(&mut &*cut, |_| Some(u64::MAX)), Err(ReadError::Io(_))));
    }

    #[test]
    fn lengths_and_kinds_that_are_not_allowed_are_refused_before_anything_is_read() {
        let frame = |kind: u8, length: u64| {
            let mut bytes = vec![kind];
            bytes.extend(length.to_le_bytes());
            bytes
        };
        let foreign = |bytes: &[u8]| match read(&mut &*bytes, |kind| (kind != FrameKind::Mean).then_some(10)) {
            Err(ReadError::Protocol(why)) => why,
            other => panic!("{other:?}"),
        };
        assert_eq!(foreign(&frame(72, 1)), "it sent a frame of kind 72");
        assert_eq!(foreign(&frame(12, 1)), "it sent a frame of kind Mean, which is not expected here");
        assert_eq!(
            foreign(&frame(2, u64::MAX)),
            "it sent a frame of kind Change of 18446744073709551615 bytes; at most 10 are allowed"
        );
    }
}
