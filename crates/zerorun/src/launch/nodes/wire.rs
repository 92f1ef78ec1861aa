//! The messages between the launchers of a job's hosts: lines of JSON over TCP, and a heartbeat every second.
//!
//! ```text
//!   LauncherConnection   complete lines, each with its seal if the hosts share a secret
//!   LauncherPeer         a connection to a launcher of the job, with a listening thread and heartbeats
//! ```

use super::checksums::FileChecksums;
use super::secret::MacKey;
use crate::launch::pmi::PmiValues;
use candle_zero::util::lock;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

/// How long a launcher may be silent before its host counts as lost.
const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(8);
/// The interval between heartbeats.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(1);
/// The maximum number of bytes in a message from a launcher of the job: the values of about ten thousand ranks.
pub(super) const MAX_MESSAGE_BYTES: usize = 64 << 20;
/// The number of bytes read at a time.
const READ_CHUNK: usize = 64 << 10;

/// The error about a launcher that has ended.
const CLOSED: &str = "it closed the connection";
/// The error about a message with a wrong seal.
const WRONG_SEAL: &str = "a message does not have the seal of its connection: something between the hosts changes their \
                       messages";
/// The error about a message that is too late.
const ANSWER_TIMED_OUT: &str = "it did not answer in time";
/// The error about messages from another program.
const FOREIGN_MESSAGE: &str = "it sent something that is not a message of this version of zerorun: another program is on \
                          this port";

/// A message. Messages about an attempt contain its number, so that late messages about an earlier attempt are
/// recognized.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) enum LauncherMessage {
    /// A host asks to join the job.
    Hello(HostHello),
    /// The host is refused, for this reason.
    Refused(String),
    /// The host is admitted.
    Joined,
    /// The host must start its ranks.
    Start(StartCommand),
    /// Values that the ranks' MPI libraries have put: those of one host in a message to the first host, and those of
    /// all hosts in a message from it.
    Values { attempt: u32, values: PmiValues },
    /// This rank has failed, or is on a host that is lost or has failed.
    Failed { attempt: u32, rank: usize, why: String },
    /// The launcher received this signal, which is meant for all ranks.
    Signal(i32),
    /// The ranks must end gracefully, as after SIGTERM: they will be started again, together with those of a host that
    /// is back.
    Regroup { attempt: u32 },
    /// All ranks of a host have ended.
    Ended { attempt: u32, how: HostOutcome },
    /// The job is over.
    Finish { code: u8, text: Option<String>, culprit: Option<usize> },
    /// A heartbeat.
    Beat,
}

/// A host that asks to join the job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct HostHello {
    /// The host's `--nnodes`.
    pub(super) nodes: usize,
    /// The host's `--node_rank`.
    pub(super) node: usize,
    /// The number of ranks that it starts.
    pub(super) ranks: usize,
    /// The name of the host.
    pub(super) host: String,
    /// The program's arguments.
    pub(super) words: Vec<String>,
    /// The checksums of the program and of the files that its arguments name.
    pub(super) files: FileChecksums,
    /// The checksums of the files in folders that its arguments name.
    pub(super) folders: BTreeMap<String, FileChecksums>,
    /// The host's clock, in seconds since 1970.
    pub(super) clock: u64,
    /// A number that identifies the launcher.
    pub(super) launcher: u64,
}

/// The command to start ranks, for one host.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct StartCommand {
    /// The number of the attempt, 0 for the first.
    pub(super) attempt: u32,
    /// The number of restarts after failures so far.
    pub(super) restart: u32,
    /// The index of the host among those in the attempt.
    #[serde(rename = "place")]
    pub(super) host_index: usize,
    /// The number of ranks on each of these hosts.
    pub(super) ranks: Vec<usize>,
    /// A port that was free on the first host, for use by the program.
    pub(super) port: u16,
    /// The name of the PMI key-value space, which is unique among all starts of all jobs.
    #[serde(rename = "space")]
    pub(super) kvs_name: String,
    /// A message to print before the start.
    pub(super) note: Option<String>,
}

/// The way in which the ranks of one host ended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) enum HostOutcome {
    /// All ranks ended with exit code 0.
    Well,
    /// All ranks ended with exit code 0, but some of their output could not be passed on.
    #[serde(rename = "Unwritten")]
    OutputLost,
    /// The ranks ended after a signal to the launcher, or because the hosts regroup.
    Interrupted(i32),
    /// The ranks ended because of another host.
    #[serde(rename = "Elsewhere")]
    EndedByOtherHost,
    /// The ranks failed on their own.
    Failed {
        /// The rank that failed first, and the time from the start to its failure.
        rank: usize,
        after: Duration,
        headline: String,
        code: u8,
        /// The rank that the failed rank's error output blames.
        blames: Option<usize>,
    },
}

/// An event of a connection to a peer.
#[derive(Debug)]
pub(super) enum PeerEvent {
    Message(LauncherMessage),
    /// The connection is lost, for this reason.
    Lost(String),
}

/// How long to wait for a line.
#[derive(Debug, Clone, Copy)]
pub(super) enum ReadDeadline {
    /// Until this time, however much arrives.
    Until(Instant),
    /// Until nothing arrives for this long.
    Silence(Duration),
}

/// Seals the numbered messages in one direction of a connection, or checks their seals.
#[derive(Debug)]
struct MessageSealer {
    /// The key, or `None` if the hosts share no secret.
    key: Option<MacKey>,
    /// The number of the next message.
    number: u64,
}

impl MessageSealer {
    const NONE: Self = Self { key: None, number: 0 };

    fn next(&mut self) -> u64 {
        self.number += 1;
        self.number - 1
    }

    /// Returns the line for this message.
    fn line(&mut self, message: &[u8]) -> Vec<u8> {
        let number = self.next();
        let seal = self.key.as_ref().map_or(String::new(), |key| key.seal(number, message) + " ");
        [seal.as_bytes(), message, b"\n"].concat()
    }

    /// Returns the message of a line, or `None` if its seal is not that of the next message.
    fn message<'a>(&mut self, line: &'a [u8]) -> Option<&'a [u8]> {
        let number = self.next();
        let Some(key) = &self.key else { return Some(line) };
        let space = line.iter().position(|byte| *byte == b' ')?;
        let (seal, message) = (&line[..space], &line[space + 1..]);
        key.is_sealed(number, message, seal).then_some(message)
    }
}

/// A reader of a connection, line by line.
#[derive(Debug)]
struct SealedReader {
    stream: Arc<TcpStream>,
    /// The bytes received but not returned yet. The first `searched` of them contain no line end.
    buffer: Vec<u8>,
    searched: usize,
    seal: MessageSealer,
}

impl SealedReader {
    /// Returns the next message, of at most `max_bytes` bytes, or the reason why there is none.
    fn next<T: for<'a> Deserialize<'a>>(&mut self, max_bytes: usize, wait: ReadDeadline) -> Result<T, String> {
        let line = self.line(max_bytes, wait)?;
        let message = self.seal.message(&line).ok_or(WRONG_SEAL)?;
        serde_json::from_slice(message).map_err(|_| FOREIGN_MESSAGE.into())
    }

    /// Returns the next line of at most `max_bytes` bytes, or the reason why there is none.
    fn line(&mut self, max_bytes: usize, wait: ReadDeadline) -> Result<Vec<u8>, String> {
        loop {
            if let Some(at) = self.buffer[self.searched..].iter().position(|byte| *byte == b'\n') {
                let rest = self.buffer.split_off(self.searched + at + 1);
                let mut line = std::mem::replace(&mut self.buffer, rest);
                line.pop();
                self.searched = 0;
                return Ok(line);
            }
            self.searched = self.buffer.len();
            if self.buffer.len() >= max_bytes {
                return Err(format!("it sent a line of more than {max_bytes} bytes"));
            }
            let patience = match wait {
                ReadDeadline::Until(end) => end.saturating_duration_since(Instant::now()),
                ReadDeadline::Silence(patience) => patience,
            };
            // Zero would mean no limit.
            let timeout = Some(patience.max(Duration::from_millis(1)));
            self.stream.set_read_timeout(timeout).map_err(|error| broken(&error))?;
            let (before, chunk) = (self.buffer.len(), READ_CHUNK.min(max_bytes - self.buffer.len()));
            self.buffer.resize(before + chunk, 0);
            let read = (&*self.stream).read(&mut self.buffer[before..]);
            self.buffer.truncate(before + *read.as_ref().unwrap_or(&0));
            match read {
                Ok(0) => return Err(CLOSED.into()),
                Ok(_) if matches!(wait, ReadDeadline::Until(end) if Instant::now() >= end) => {
                    return Err(ANSWER_TIMED_OUT.into());
                }
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Err(CLOSED.into()),
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                    return Err(match wait {
                        ReadDeadline::Until(_) => ANSWER_TIMED_OUT.into(),
                        ReadDeadline::Silence(patience) => {
                            format!("it sent nothing for {} s", patience.as_secs())
                        }
                    });
                }
                Err(error) => return Err(broken(&error)),
            }
        }
    }
}

fn broken(error: &io::Error) -> String {
    format!("the connection broke: {error}")
}

/// A writer of sealed messages to a connection.
#[derive(Debug)]
struct SealedWriter {
    stream: Arc<TcpStream>,
    seal: MessageSealer,
}

impl SealedWriter {
    fn write(&mut self, message: &impl Serialize) -> io::Result<()> {
        let line = self.seal.line(&serde_json::to_vec(message)?);
        (&*self.stream).write_all(&line)
    }
}

/// A connection on which the two sides take turns. Dropping it closes the connection.
#[derive(Debug)]
pub(super) struct LauncherConnection {
    incoming: SealedReader,
    outgoing: SealedWriter,
}

impl LauncherConnection {
    /// Creates a connection over a stream.
    ///
    /// # Errors
    /// Fails if a system call does.
    pub(super) fn over(stream: Arc<TcpStream>) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(HEARTBEAT_TIMEOUT))?;
        let incoming =
            SealedReader { stream: stream.clone(), buffer: Vec::new(), searched: 0, seal: MessageSealer::NONE };
        Ok(Self { incoming, outgoing: SealedWriter { stream, seal: MessageSealer::NONE } })
    }

    /// Seals each line from now on.
    pub(super) fn seal(&mut self, incoming: MacKey, outgoing: MacKey) {
        self.incoming.seal = MessageSealer { key: Some(incoming), number: 0 };
        self.outgoing.seal = MessageSealer { key: Some(outgoing), number: 0 };
    }

    /// Sends a message. A failure is noticed when the answer is awaited.
    pub(super) fn send(&mut self, message: &impl Serialize) {
        let _ = self.outgoing.write(message);
    }

    /// Returns the next message, of at most `max_bytes` bytes, or the reason why there is none.
    pub(super) fn next<T: for<'a> Deserialize<'a>>(
        &mut self,
        max_bytes: usize,
        wait: ReadDeadline,
    ) -> Result<T, String> {
        self.incoming.next(max_bytes, wait)
    }
}

/// Returns whether this error means that the other side is another program.
pub(super) fn is_another_program(why: &str) -> bool {
    why == FOREIGN_MESSAGE
}

/// A connection to a launcher that belongs to the job. Dropping it closes the connection.
#[derive(Debug)]
pub(super) struct LauncherPeer(Arc<Mutex<SealedWriter>>);

impl LauncherPeer {
    /// Starts a thread that listens and calls `on_event`, and one that sends heartbeats. A message has at most
    /// `max_bytes` bytes.
    pub(super) fn over(
        session: LauncherConnection,
        max_bytes: usize,
        mut on_event: impl FnMut(PeerEvent) + Send + 'static,
    ) -> io::Result<Self> {
        let LauncherConnection { mut incoming, outgoing } = session;
        let listen = move || {
            loop {
                match incoming.next(max_bytes, ReadDeadline::Silence(HEARTBEAT_TIMEOUT)) {
                    Ok(LauncherMessage::Beat) => {}
                    Ok(message) => on_event(PeerEvent::Message(message)),
                    Err(why) => return on_event(PeerEvent::Lost(why)),
                }
            }
        };
        let outgoing = Arc::new(Mutex::new(outgoing));
        let alive = Arc::downgrade(&outgoing);
        std::thread::Builder::new().name("launcher listener".into()).spawn(listen)?;
        std::thread::Builder::new().name("heartbeat".into()).spawn(move || beat(&alive))?;
        Ok(Self(outgoing))
    }

    /// Sends a message. A failure is noticed by the listening thread.
    pub(super) fn send(&self, message: &LauncherMessage) {
        let _ = lock(&self.0).write(message);
    }
}

impl Drop for LauncherPeer {
    fn drop(&mut self) {
        let _ = lock(&self.0).stream.shutdown(Shutdown::Both);
    }
}

fn beat(outgoing: &Weak<Mutex<SealedWriter>>) {
    while outgoing.upgrade().is_some_and(|outgoing| lock(&outgoing).write(&LauncherMessage::Beat).is_ok()) {
        std::thread::sleep(HEARTBEAT_INTERVAL);
    }
}

/// The ends of connections, for tests of this module and of those that use it.
#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(super) mod ends {
    use super::*;
    use std::net::TcpListener;

    /// Returns the two ends of a connection.
    pub fn pair() -> [TcpStream; 2] {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let there = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        [listener.accept().unwrap().0, there]
    }

    pub fn session(stream: TcpStream) -> LauncherConnection {
        LauncherConnection::over(Arc::new(stream)).unwrap()
    }

    pub fn deadline() -> ReadDeadline {
        ReadDeadline::Until(Instant::now() + Duration::from_secs(60))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::secret::{JobSecret, KeyPurpose};
    use super::ends::{deadline, pair, session};
    use super::*;
    use std::sync::mpsc::channel;

    #[test]
    fn messages_arrive_in_order_and_an_end_is_noticed() {
        let (sender, events) = channel();
        let [here, there] = pair();
        let _here = LauncherPeer::over(session(here), MAX_MESSAGE_BYTES, move |news| drop(sender.send(news))).unwrap();
        let there = LauncherPeer::over(session(there), MAX_MESSAGE_BYTES, |_| {}).unwrap();
        let values = LauncherMessage::Values { attempt: 1, values: vec![("a".into(), "line\nbreak".into())] };
        for message in [&values, &LauncherMessage::Signal(15)] {
            there.send(message);
            assert!(matches!(events.recv().unwrap(), PeerEvent::Message(said) if said == *message));
        }
        drop(there);
        assert!(matches!(events.recv().unwrap(), PeerEvent::Lost(why) if why.contains("closed")));
    }

    #[test]
    fn what_is_no_message_ends_the_connection() {
        let (sender, events) = channel();
        let [here, mut there] = pair();
        let _here = LauncherPeer::over(session(here), MAX_MESSAGE_BYTES, move |news| drop(sender.send(news))).unwrap();
        there.write_all(b"GET / HTTP/1.1\r\n").unwrap();
        assert!(matches!(events.recv().unwrap(), PeerEvent::Lost(why) if why.contains("another program")));
    }

    #[test]
    fn a_line_has_a_limit_and_a_deadline_holds_however_much_comes() {
        let [here, mut there] = pair();
        there.write_all(&[b'a'; 200]).unwrap();
        let error = session(here).next::<LauncherMessage>(100, deadline()).unwrap_err();
        insta::assert_snapshot!(error, @"it sent a line of more than 100 bytes");
        let [here, mut there] = pair();
        let drip = std::thread::spawn(move || while there.write_all(b" ").is_ok() {});
        let wait = ReadDeadline::Until(Instant::now() + Duration::from_millis(50));
        let mut here = session(here);
        assert_eq!(here.next::<LauncherMessage>(1 << 30, wait).unwrap_err(), ANSWER_TIMED_OUT);
        drop(here);
        drip.join().unwrap();
    }

    #[test]
    fn a_sealed_message_is_heard_once_and_as_it_was_said() {
        let secret = JobSecret::of_text("X", "correct horse battery staple").unwrap();
        let key = |purpose| secret.key(purpose, &[1; 32], &[2; 32]);
        let keys = || [KeyPurpose::ToFirst, KeyPurpose::FromFirst].map(key);
        let sealed = || {
            let [stream, raw] = pair();
            let (mut here, [there, back]) = (session(stream), keys());
            here.seal(there, back);
            (here, raw)
        };
        let lines: Vec<Vec<u8>> = {
            let mut seal = MessageSealer { key: Some(keys()[0].clone()), number: 0 };
            (0..3).map(|signal| seal.line(&serde_json::to_vec(&LauncherMessage::Signal(signal)).unwrap())).collect()
        };
        let heard = |bytes: &[u8], messages: usize| {
            let (mut here, mut raw) = sealed();
            raw.write_all(bytes).unwrap();
            (0..messages).map(|_| here.next::<LauncherMessage>(MAX_MESSAGE_BYTES, deadline())).collect::<Vec<_>>()
        };
        let all = heard(&lines.concat(), 3);
        assert!(all.iter().enumerate().all(|(at, said)| *said == Ok(LauncherMessage::Signal(at as i32))), "{all:?}");
        // Repeated, out of order, changed, in the other direction, and without a seal.
        let changed = String::from_utf8(lines[0].clone()).unwrap().replace("Signal\":0", "Signal\":9").into_bytes();
        let mut other = MessageSealer { key: Some(keys()[1].clone()), number: 0 };
        let other = other.line(&serde_json::to_vec(&LauncherMessage::Signal(0)).unwrap());
        assert_eq!(heard(&[&lines[0][..], &lines[0]].concat(), 2)[1], Err(WRONG_SEAL.into()));
        for wrong in [&lines[1], &changed, &other, &b"{\"Signal\":0}\n".to_vec()] {
            assert_eq!(heard(wrong, 1), [Err(WRONG_SEAL.into())]);
        }
    }
}
