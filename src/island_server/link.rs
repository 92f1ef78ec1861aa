//! A rank's connection to the island server.
//!
//! One thread sends and another receives, so training continues while changes and means are in transit.

use super::frame::{Frame, FrameKind, ReadError, read};
use super::messages::{
    DonationHead, Hello, MAGIC, MAX_MANIFEST, MAX_PART, MAX_SHORT, MeanHead, RoundKey, VERSION, Welcome, split_numbers,
};
use super::outbox::{Outbox, start_writer};
use super::{DEFAULT_SILENCE_TIMEOUT, HEARTBEAT_INTERVAL};
use crate::error::{Error, IslandError, Result};
use crate::notice::emit;
use crate::util::lock;
use std::collections::{BTreeMap, VecDeque};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream, ToSocketAddrs};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The time for which a rank tries to reach a server that is not listening yet.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// The time between two attempts to connect, and between two checks of whether another rank has failed.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// The time for which a rank waits for the server's reason after another rank of its island has failed.
const REASON_TIMEOUT: Duration = Duration::from_secs(1);
/// The time limit of one attempt to connect.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(10);
/// The number of parts of a donation that are received ahead.
const PARTS_AHEAD: usize = 8;

/// The way in which an island enters a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EntryMode {
    /// With its own weights.
    Begin,
    /// With the state of a donor.
    Join,
}

/// The result of an exchange.
#[derive(Debug)]
pub(crate) struct ExchangedMean {
    /// The number of samples of all members; 0 if no member has trained.
    pub samples: u64,
    /// The slots of the islands that took part.
    pub members: Vec<usize>,
    /// The donation to be made when the mean has taken effect.
    pub donation: Option<u64>,
    /// The encoded mean; empty if no member has trained.
    pub bytes: Vec<u8>,
}

/// A message to an island that joins.
#[derive(Debug)]
pub(crate) enum JoinMessage {
    Head(DonationHead),
    /// Values of the donation with this number. The bytes begin with the number.
    Part(u64, Vec<u8>),
    /// The donation with this number has been sent completely.
    End(u64),
    /// The island is part of the run.
    Joined,
    /// The donor is gone.
    Aborted,
    /// No other island is left.
    Begin,
}

/// A rank's connection to the island server.
pub(crate) struct IslandLink {
    address: String,
    position: usize,
    outbox: Arc<Outbox>,
    stream: TcpStream,
    inbox: Arc<SharedInbox>,
    threads: Vec<JoinHandle<()>>,
    welcome: Welcome,
}

#[derive(Debug, Default)]
struct SharedInbox {
    inbox: Mutex<Inbox>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Inbox {
    welcome: Option<Welcome>,
    means: BTreeMap<RoundKey, ExchangedMean>,
    join_messages: VecDeque<JoinMessage>,
    /// The reason why nothing more arrives.
    failed: Option<IslandError>,
    is_closed: bool,
}

impl IslandLink {
    /// Connects this rank, and waits until all ranks of its island are connected and the server has given the island a
    /// slot. `failure` returns the failure of another rank, if one is known.
    ///
    /// # Errors
    /// Fails if the server cannot be reached, is another program or refuses the island, or if another rank has failed.
    pub fn connect(address: &str, hello: &Hello, failure: &dyn Fn() -> Option<Error>) -> Result<Self> {
        let stream = reach(address, failure)?;
        let io_error = |error: std::io::Error| lost(address, error.to_string());
        stream.set_nodelay(true).map_err(io_error)?;
        stream.set_read_timeout(Some(DEFAULT_SILENCE_TIMEOUT)).map_err(io_error)?;
        stream.set_write_timeout(Some(DEFAULT_SILENCE_TIMEOUT)).map_err(io_error)?;
        let preamble = [&MAGIC[..], &VERSION.to_le_bytes()].concat();
        (&stream).write_all(&preamble).map_err(io_error)?;
        let (outbox, inbox) = (Arc::new(Outbox::default()), Arc::new(SharedInbox::default()));
        let text = serde_json::to_vec(hello)
            .unwrap_or_else(|error| unreachable!("numbers and strings are valid JSON: {error}"));
        outbox.push(Frame::new(FrameKind::Hello, text));
        let mut reader = stream.try_clone().map_err(io_error)?;
        let writer = stream.try_clone().map_err(io_error)?;
        let writer = start_writer(outbox.clone(), writer, HEARTBEAT_INTERVAL).map_err(io_error)?;
        let reader_thread = std::thread::Builder::new().name("island-reader".into()).spawn({
            let (inbox, address, prints_notices) = (inbox.clone(), address.to_owned(), hello.position == 0);
            let max_mean = hello.lens.iter().filter_map(|len| hello.run.format.encoded_len(*len)).max().unwrap_or(0);
            move || inbox.receive(&mut reader, &address, max_mean, prints_notices)
        });
        let mut link = Self {
            address: address.to_owned(),
            position: hello.position,
            outbox,
            stream,
            inbox,
            threads: vec![writer, reader_thread.map_err(io_error)?],
            welcome: Welcome { slot: 0, joins: false },
        };
        link.welcome = link.wait(|inbox| inbox.welcome.take(), failure)?;
        Ok(link)
    }

    /// Returns this island's slot.
    pub fn slot(&self) -> usize {
        self.welcome.slot
    }

    /// Returns how this island enters the run.
    pub fn entry_mode(&self) -> EntryMode {
        if self.welcome.joins { EntryMode::Join } else { EntryMode::Begin }
    }

    /// Sends a change. `weights` is a hash of the weights after the last exchange.
    pub fn send_change(&self, key: RoundKey, samples: u64, weights: u64, bytes: Vec<u8>) {
        let mut head = key.to_bytes().to_vec();
        head.extend([samples, weights].into_iter().flat_map(u64::to_le_bytes));
        self.outbox.push(Frame::with_body(FrameKind::Change, head, Arc::new(bytes)));
    }

    /// Waits for the mean of an exchange.
    ///
    /// # Errors
    /// Fails if the server is lost or has removed the island, or if another rank has failed.
    pub fn mean(&self, key: RoundKey, failure: &dyn Fn() -> Option<Error>) -> Result<ExchangedMean> {
        self.wait(|inbox| inbox.means.remove(&key), failure)
    }

    /// Waits for the next message to an island that joins.
    ///
    /// # Errors
    /// Fails if the server is lost or refuses the island, or if another rank has failed.
    pub fn next_join_message(&self, failure: &dyn Fn() -> Option<Error>) -> Result<JoinMessage> {
        let received = self.wait(|inbox| inbox.join_messages.pop_front(), failure)?;
        // There is room for another part.
        self.inbox.changed.notify_all();
        Ok(received)
    }

    /// Sends the head of a donation.
    pub fn donate(&self, head: &DonationHead) {
        let text = serde_json::to_vec(head)
            .unwrap_or_else(|error| unreachable!("numbers and strings are valid JSON: {error}"));
        self.outbox.push(Frame::new(FrameKind::DonationHead, text));
    }

    /// Sends a part of donation `number`, when there is room for it.
    pub fn donate_part(&self, number: u64, bytes: Vec<u8>) {
        let head = number.to_le_bytes().to_vec();
        self.outbox.push_when_there_is_room(Frame::with_body(FrameKind::DonationPart, head, Arc::new(bytes)));
    }

    /// Ends donation `number`.
    pub fn end_donation(&self, number: u64) {
        self.outbox.push(Frame::new(FrameKind::DonationEnd, number.to_le_bytes().to_vec()));
    }

    /// Notifies the server that the program of this island has ended, and ends the connection.
    pub fn say_goodbye(&self) {
        self.outbox.push(Frame::new(FrameKind::Goodbye, Vec::new()));
        self.outbox.close();
    }

    fn wait<T>(&self, mut take: impl FnMut(&mut Inbox) -> Option<T>, failure: &dyn Fn() -> Option<Error>) -> Result<T> {
        let mut inbox = lock(&self.inbox.inbox);
        let mut failed: Option<(Error, Instant)> = None;
        loop {
            if let Some(found) = take(&mut inbox) {
                return Ok(found);
            }
            if let Some(failed) = &inbox.failed {
                return Err(failed.clone().into());
            }
            match failed {
                // The server's own reason, which all ranks of the island get, is more specific.
                Some((_, since)) if since.elapsed() < REASON_TIMEOUT => {}
                Some((error, _)) => return Err(error),
                None => failed = failure().map(|error| (error, Instant::now())),
            }
            (inbox, _) = self.inbox.changed.wait_timeout(inbox, POLL_INTERVAL).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl std::fmt::Debug for IslandLink {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "IslandLink {{ {}, slot {}, rank {} }}", self.address, self.welcome.slot, self.position)
    }
}

impl Drop for IslandLink {
    fn drop(&mut self) {
        lock(&self.inbox.inbox).is_closed = true;
        self.inbox.changed.notify_all();
        // Waiting frames are still sent. If the server no longer reads, the write timeout ends the attempt.
        self.outbox.close();
        let mut threads = self.threads.drain(..);
        if let Some(writer) = threads.next() {
            _ = writer.join();
        }
        _ = self.stream.shutdown(Shutdown::Both);
        threads.for_each(|thread| _ = thread.join());
    }
}

impl SharedInbox {
    /// Receives frames until the connection ends.
    fn receive(&self, reader: &mut impl Read, address: &str, max_mean: u64, prints_notices: bool) {
        let failed = loop {
            let limit = |kind| match kind {
                FrameKind::Ping | FrameKind::Begin | FrameKind::DonationAborted | FrameKind::Joined => Some(0),
                FrameKind::Welcome | FrameKind::Notice | FrameKind::Refused => Some(MAX_SHORT),
                FrameKind::Mean => Some(max_mean + MAX_SHORT),
                FrameKind::DonationHead => Some(MAX_MANIFEST),
                FrameKind::DonationPart => Some(MAX_PART),
                FrameKind::DonationEnd => Some(8),
                _ => None,
            };
            let (kind, body) = match read(reader, limit) {
                Ok(frame) => frame,
                Err(error) => break failure_of(error, address, lock(&self.inbox).welcome.is_some()),
            };
            if let Err(failed) = self.take(kind, body, address, prints_notices) {
                break failed;
            }
        };
        let mut inbox = lock(&self.inbox);
        inbox.failed.get_or_insert(failed);
        self.changed.notify_all();
    }

    fn take(&self, kind: FrameKind, body: Vec<u8>, address: &str, prints_notices: bool) -> Result<(), IslandError> {
        let foreign = || IslandError::NoServer {
            address: address.to_owned(),
            why: format!("a message of kind {kind:?} cannot be read"),
        };
        let number = |body: &[u8]| split_numbers::<1>(body).map(|([number], _)| number).ok_or_else(foreign);
        match kind {
            FrameKind::Welcome => {
                let welcome = serde_json::from_slice(&body).map_err(|_| foreign())?;
                lock(&self.inbox).welcome = Some(welcome);
            }
            FrameKind::Mean => {
                let (key, mean) = mean_of(body).ok_or_else(foreign)?;
                lock(&self.inbox).means.insert(key, mean);
            }
            FrameKind::Notice if prints_notices => emit(&format!("local_steps: {}", String::from_utf8_lossy(&body))),
            FrameKind::Refused => {
                let why = String::from_utf8_lossy(&body).into_owned();
                return Err(IslandError::Refused { address: address.to_owned(), why });
            }
            FrameKind::Begin => self.push_join_message(JoinMessage::Begin),
            FrameKind::Joined => self.push_join_message(JoinMessage::Joined),
            FrameKind::DonationAborted => self.push_join_message(JoinMessage::Aborted),
            FrameKind::DonationHead => {
                self.push_join_message(JoinMessage::Head(serde_json::from_slice(&body).map_err(|_| foreign())?));
            }
            FrameKind::DonationPart => {
                let number = number(&body)?;
                self.push_join_message(JoinMessage::Part(number, body));
            }
            FrameKind::DonationEnd => self.push_join_message(JoinMessage::End(number(&body)?)),
            _ => {}
        }
        self.changed.notify_all();
        Ok(())
    }

    /// Queues a message to an island that joins. If the queue is full, waits until a message is taken.
    fn push_join_message(&self, received: JoinMessage) {
        let mut inbox = lock(&self.inbox);
        while inbox.join_messages.len() >= PARTS_AHEAD && !inbox.is_closed {
            inbox = self.changed.wait(inbox).unwrap_or_else(PoisonError::into_inner);
        }
        inbox.join_messages.push_back(received);
    }
}

/// Reads the frame of a mean.
fn mean_of(mut body: Vec<u8>) -> Option<(RoundKey, ExchangedMean)> {
    let (key, rest) = RoundKey::split(&body)?;
    let ([len], rest) = split_numbers(rest)?;
    let (head, rest) = rest.split_at_checked(usize::try_from(len).ok()?)?;
    let MeanHead { samples, members, donation } = serde_json::from_slice(head).ok()?;
    let start = body.len() - rest.len();
    body.drain(..start);
    Some((key, ExchangedMean { samples, members, donation, bytes: body }))
}

fn lost(address: &str, why: String) -> Error {
    IslandError::Lost { address: address.to_owned(), why }.into()
}

fn failure_of(error: ReadError, address: &str, was_welcome: bool) -> IslandError {
    let address = address.to_owned();
    let why = match error {
        ReadError::Protocol(why) => return IslandError::NoServer { address, why },
        ReadError::Io(error) => match error.kind() {
            std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut => {
                format!("no sign of life for {} s", DEFAULT_SILENCE_TIMEOUT.as_secs())
            }
            std::io::ErrorKind::UnexpectedEof if !was_welcome => {
                "the connection was closed before the server had answered".into()
            }
            std::io::ErrorKind::UnexpectedEof => "the connection was closed".into(),
            _ => error.to_string(),
        },
    };
    IslandError::Lost { address, why }
}

/// Connects to the server, which may still be starting.
fn reach(address: &str, failure: &dyn Fn() -> Option<Error>) -> Result<TcpStream> {
    let unreachable = |why: String| Error::from(IslandError::Unreachable { address: address.to_owned(), why });
    let end = Instant::now() + CONNECT_TIMEOUT;
    loop {
        let addresses = address.to_socket_addrs().map_err(|error| unreachable(error.to_string()))?;
        let mut why = "the name has no address".to_string();
        for socket_address in addresses {
            match TcpStream::connect_timeout(&socket_address, ATTEMPT_TIMEOUT) {
                Ok(stream) => return Ok(stream),
                Err(error) => why = error.to_string(),
            }
        }
        if let Some(error) = failure() {
            return Err(error);
        }
        if Instant::now() >= end {
            return Err(unreachable(why));
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}
