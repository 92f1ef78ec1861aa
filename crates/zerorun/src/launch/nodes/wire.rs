//! What the launchers of a job's hosts tell one another: lines of JSON over TCP, and a sign of life every second.
//!
//! ```text
//!   LauncherConnection   whole lines, each with its seal where the hosts share a secret
//!   LauncherPeer         a connection to a launcher of the job: it is listened to, and gets signs of life
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

/// How long a launcher may be silent before its host counts as gone.
const SILENCE: Duration = Duration::from_secs(8);
/// How often it gives a sign of life.
const BEAT: Duration = Duration::from_secs(1);
/// Bytes of the longest message of a launcher that belongs to the job: the values of some ten thousand ranks.
pub(super) const LONGEST: usize = 64 << 20;
/// Bytes that are asked for at once.
const AT_ONCE: usize = 64 << 10;

/// Why nothing more is heard of a launcher that has ended.
const CLOSED: &str = "it closed the connection";
/// Why what is heard is not believed.
const NO_SEAL: &str = "a message has not the seal of its connection: something between the hosts changes what they say";
/// Why nothing more is waited for.
const LATE: &str = "it did not answer in time";
/// Why nothing is made of what another program says.
const NO_MESSAGE: &str = "what it sends is no message of this version of zerorun: another program is on this port";

/// A message. Those about an attempt name it: what comes late belongs to an earlier one.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) enum LauncherMessage {
    /// A host asks to take part.
    Hello(HostHello),
    /// It cannot, for this reason.
    Refused(String),
    /// It does.
    Joined,
    /// The ranks shall be started.
    Start(StartCommand),
    /// What ranks have put for their MPI libraries: of one host on the way to the first, of all on the way back.
    Values { attempt: u32, values: PmiValues },
    /// This rank is on a host that is gone or has failed.
    Failed { attempt: u32, rank: usize, why: String },
    /// The launcher got this signal, which is for all ranks.
    Signal(i32),
    /// The ranks shall end in good order, as after SIGTERM: they will be started again on other hosts.
    Regroup { attempt: u32 },
    /// All ranks of a host have ended.
    Ended { attempt: u32, how: HostOutcome },
    /// The job is over.
    Finish { code: u8, text: Option<String>, culprit: Option<usize> },
    /// A sign of life.
    Beat,
}

/// A host that asks to take part.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct HostHello {
    /// `--nnodes` there.
    pub(super) nodes: usize,
    /// `--node_rank` there.
    pub(super) node: usize,
    /// How many ranks it starts.
    pub(super) ranks: usize,
    /// Its name.
    pub(super) host: String,
    /// The program's arguments.
    pub(super) words: Vec<String>,
    /// Checksums of the program and of the files that its arguments name.
    pub(super) files: FileChecksums,
    /// The same of the files in folders that its arguments name.
    pub(super) folders: BTreeMap<String, FileChecksums>,
    /// Its clock, in seconds since 1970.
    pub(super) clock: u64,
    /// A number of the launcher's own.
    pub(super) launcher: u64,
}

/// A start of the ranks, as one host is told of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct StartCommand {
    /// 0 for the first.
    pub(super) attempt: u32,
    /// How often ranks were started again after a failure.
    pub(super) restart: u32,
    /// The host's place among those that take part.
    pub(super) place: usize,
    /// The numbers of ranks of all of these.
    pub(super) ranks: Vec<usize>,
    /// A port that was free on the first host, for the program's own use.
    pub(super) port: u16,
    /// A name that no other start has, of this job or another.
    pub(super) space: String,
    /// What there is to say before.
    pub(super) note: Option<String>,
}

/// How the ranks of one host have ended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) enum HostOutcome {
    /// All with 0.
    Well,
    /// All with 0, but not all of their output could be passed on.
    Unwritten,
    /// After a signal to the launcher, or to regroup.
    Interrupted(i32),
    /// Because of another host.
    Elsewhere,
    /// By themselves.
    Failed {
        /// The rank that failed first, and after how long.
        rank: usize,
        after: Duration,
        headline: String,
        code: u8,
        /// The rank that its own words blame.
        blames: Option<usize>,
    },
}

/// What is heard of a peer.
#[derive(Debug)]
pub(super) enum PeerEvent {
    Message(LauncherMessage),
    /// Nothing more will be heard, for this reason.
    Lost(String),
}

/// How long is waited for a line.
#[derive(Debug, Clone, Copy)]
pub(super) enum ReadDeadline {
    /// Until then, however much comes.
    Until(Instant),
    /// For so long each time nothing comes.
    Silence(Duration),
}

/// Seals the messages of one direction of a connection, and counts them.
#[derive(Debug)]
struct MessageSeal {
    /// `None`: the hosts share no secret.
    key: Option<MacKey>,
    /// Of the next message.
    number: u64,
}

impl MessageSeal {
    const NONE: Self = Self { key: None, number: 0 };

    fn next(&mut self) -> u64 {
        self.number += 1;
        self.number - 1
    }

    /// A line for this message.
    fn line(&mut self, message: &[u8]) -> Vec<u8> {
        let number = self.next();
        let seal = self.key.as_ref().map_or(String::new(), |key| key.seal(number, message) + " ");
        [seal.as_bytes(), message, b"\n"].concat()
    }

    /// The message of a line; `None` where it has another seal than that of the next message.
    fn message<'a>(&mut self, line: &'a [u8]) -> Option<&'a [u8]> {
        let number = self.next();
        let Some(key) = &self.key else { return Some(line) };
        let space = line.iter().position(|byte| *byte == b' ')?;
        let (seal, message) = (&line[..space], &line[space + 1..]);
        key.is_sealed(number, message, seal).then_some(message)
    }
}

/// What comes of a connection, line by line.
#[derive(Debug)]
struct SealedReader {
    stream: Arc<TcpStream>,
    /// What has come and was not taken, in the beginning of which is no end of a line.
    held: Vec<u8>,
    searched: usize,
    seal: MessageSeal,
}

impl SealedReader {
    /// The next message, of at most `longest` bytes, or why there is none.
    fn next<T: for<'a> Deserialize<'a>>(&mut self, longest: usize, wait: ReadDeadline) -> Result<T, String> {
        let line = self.line(longest, wait)?;
        let message = self.seal.message(&line).ok_or(NO_SEAL)?;
        serde_json::from_slice(message).map_err(|_| NO_MESSAGE.into())
    }

    /// The next line of at most `longest` bytes, or why there is none.
    fn line(&mut self, longest: usize, wait: ReadDeadline) -> Result<Vec<u8>, String> {
        loop {
            if let Some(at) = self.held[self.searched..].iter().position(|byte| *byte == b'\n') {
                let rest = self.held.split_off(self.searched + at + 1);
                let mut line = std::mem::replace(&mut self.held, rest);
                line.pop();
                self.searched = 0;
                return Ok(line);
            }
            self.searched = self.held.len();
            if self.held.len() >= longest {
                return Err(format!("it sent a line of more than {longest} bytes"));
            }
            let patience = match wait {
                ReadDeadline::Until(end) => end.saturating_duration_since(Instant::now()),
                ReadDeadline::Silence(patience) => patience,
            };
            // Zero stands for no limit there.
            let timeout = Some(patience.max(Duration::from_millis(1)));
            self.stream.set_read_timeout(timeout).map_err(|error| broken(&error))?;
            let (before, most) = (self.held.len(), AT_ONCE.min(longest - self.held.len()));
            self.held.resize(before + most, 0);
            let read = (&*self.stream).read(&mut self.held[before..]);
            self.held.truncate(before + *read.as_ref().unwrap_or(&0));
            match read {
                Ok(0) => return Err(CLOSED.into()),
                Ok(_) if matches!(wait, ReadDeadline::Until(end) if Instant::now() >= end) => return Err(LATE.into()),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Err(CLOSED.into()),
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                    return Err(match wait {
                        ReadDeadline::Until(_) => LATE.into(),
                        ReadDeadline::Silence(patience) => {
                            format!("nothing was heard of it for {} s", patience.as_secs())
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

/// What goes over a connection.
#[derive(Debug)]
struct SealedWriter {
    stream: Arc<TcpStream>,
    seal: MessageSeal,
}

impl SealedWriter {
    fn write(&mut self, message: &impl Serialize) -> io::Result<()> {
        let line = self.seal.line(&serde_json::to_vec(message)?);
        (&*self.stream).write_all(&line)
    }
}

/// One connection, on which the two sides speak in turn. It ends when this is dropped.
#[derive(Debug)]
pub(super) struct LauncherConnection {
    incoming: SealedReader,
    outgoing: SealedWriter,
}

impl LauncherConnection {
    /// # Errors
    /// The system's.
    pub(super) fn over(stream: Arc<TcpStream>) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(SILENCE))?;
        let incoming = SealedReader { stream: stream.clone(), held: Vec::new(), searched: 0, seal: MessageSeal::NONE };
        Ok(Self { incoming, outgoing: SealedWriter { stream, seal: MessageSeal::NONE } })
    }

    /// From now on each line has its seal.
    pub(super) fn seal(&mut self, incoming: MacKey, outgoing: MacKey) {
        self.incoming.seal = MessageSeal { key: Some(incoming), number: 0 };
        self.outgoing.seal = MessageSeal { key: Some(outgoing), number: 0 };
    }

    /// Sends a message. One that cannot be sent is noticed where an answer is awaited.
    pub(super) fn send(&mut self, message: &impl Serialize) {
        let _ = self.outgoing.write(message);
    }

    /// The next message, of at most `longest` bytes, or why there is none.
    pub(super) fn next<T: for<'a> Deserialize<'a>>(&mut self, longest: usize, wait: ReadDeadline) -> Result<T, String> {
        self.incoming.next(longest, wait)
    }
}

/// Whether this is why nothing is made of what another program says.
pub(super) fn is_another_program(why: &str) -> bool {
    why == NO_MESSAGE
}

/// A connection to a launcher that belongs to the job. It ends when this is dropped.
#[derive(Debug)]
pub(super) struct LauncherPeer(Arc<Mutex<SealedWriter>>);

impl LauncherPeer {
    /// Begins to listen, on a thread that calls `hear`, and to give signs of life. A message has at most `longest` bytes.
    pub(super) fn over(
        session: LauncherConnection,
        longest: usize,
        mut hear: impl FnMut(PeerEvent) + Send + 'static,
    ) -> io::Result<Self> {
        let LauncherConnection { mut incoming, outgoing } = session;
        let listen = move || {
            loop {
                match incoming.next(longest, ReadDeadline::Silence(SILENCE)) {
                    Ok(LauncherMessage::Beat) => {}
                    Ok(message) => hear(PeerEvent::Message(message)),
                    Err(why) => return hear(PeerEvent::Lost(why)),
                }
            }
        };
        let outgoing = Arc::new(Mutex::new(outgoing));
        let alive = Arc::downgrade(&outgoing);
        std::thread::Builder::new().name("hears a launcher".into()).spawn(listen)?;
        std::thread::Builder::new().name("signs of life".into()).spawn(move || beat(&alive))?;
        Ok(Self(outgoing))
    }

    /// Sends a message. One that cannot be sent is noticed where this peer is listened to.
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
        std::thread::sleep(BEAT);
    }
}

/// Ends of connections, for tests of this module and of those above it.
#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(super) mod ends {
    use super::*;
    use std::net::TcpListener;

    /// The two ends of a connection.
    pub fn pair() -> [TcpStream; 2] {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let there = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        [listener.accept().unwrap().0, there]
    }

    pub fn session(stream: TcpStream) -> LauncherConnection {
        LauncherConnection::over(Arc::new(stream)).unwrap()
    }

    pub fn soon() -> ReadDeadline {
        ReadDeadline::Until(Instant::now() + Duration::from_secs(60))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::secret::{JobSecret, KeyPurpose};
    use super::ends::{pair, session, soon};
    use super::*;
    use std::sync::mpsc::channel;

    #[test]
    fn messages_arrive_in_order_and_an_end_is_noticed() {
        let (sender, heard) = channel();
        let [here, there] = pair();
        let _here = LauncherPeer::over(session(here), LONGEST, move |news| drop(sender.send(news))).unwrap();
        let there = LauncherPeer::over(session(there), LONGEST, |_| {}).unwrap();
        let values = LauncherMessage::Values { attempt: 1, values: vec![("a".into(), "line\nbreak".into())] };
        for message in [&values, &LauncherMessage::Signal(15)] {
            there.send(message);
            assert!(matches!(heard.recv().unwrap(), PeerEvent::Message(said) if said == *message));
        }
        drop(there);
        assert!(matches!(heard.recv().unwrap(), PeerEvent::Lost(why) if why.contains("closed")));
    }

    #[test]
    fn what_is_no_message_ends_the_connection() {
        let (sender, heard) = channel();
        let [here, mut there] = pair();
        let _here = LauncherPeer::over(session(here), LONGEST, move |news| drop(sender.send(news))).unwrap();
        there.write_all(b"GET / HTTP/1.1\r\n").unwrap();
        assert!(matches!(heard.recv().unwrap(), PeerEvent::Lost(why) if why.contains("another program")));
    }

    #[test]
    fn a_line_has_a_limit_and_a_deadline_holds_however_much_comes() {
        let [here, mut there] = pair();
        there.write_all(&[b'a'; 200]).unwrap();
        let told = session(here).next::<LauncherMessage>(100, soon()).unwrap_err();
        insta::assert_snapshot!(told, @"it sent a line of more than 100 bytes");
        let [here, mut there] = pair();
        let drip = std::thread::spawn(move || while there.write_all(b" ").is_ok() {});
        let wait = ReadDeadline::Until(Instant::now() + Duration::from_millis(50));
        let mut here = session(here);
        assert_eq!(here.next::<LauncherMessage>(1 << 30, wait).unwrap_err(), LATE);
        drop(here);
        drip.join().unwrap();
    }

    #[test]
    fn a_sealed_message_is_heard_once_and_as_it_was_said() {
        let secret = JobSecret::of_text("X", "correct horse battery staple").unwrap();
        let keys = || [KeyPurpose::ToFirst, KeyPurpose::FromFirst].map(|way| secret.key(way, &[1; 32], &[2; 32]));
        let sealed = || {
            let [stream, raw] = pair();
            let (mut here, [there, back]) = (session(stream), keys());
            here.seal(there, back);
            (here, raw)
        };
        let lines: Vec<Vec<u8>> = {
            let mut seal = MessageSeal { key: Some(keys()[0].clone()), number: 0 };
            (0..3).map(|signal| seal.line(&serde_json::to_vec(&LauncherMessage::Signal(signal)).unwrap())).collect()
        };
        let heard = |bytes: &[u8], messages: usize| {
            let (mut here, mut raw) = sealed();
            raw.write_all(bytes).unwrap();
            (0..messages).map(|_| here.next::<LauncherMessage>(LONGEST, soon())).collect::<Vec<_>>()
        };
        let all = heard(&lines.concat(), 3);
        assert!(all.iter().enumerate().all(|(at, said)| *said == Ok(LauncherMessage::Signal(at as i32))), "{all:?}");
        // Twice, out of turn, changed, of the other way, without a seal.
        let changed = String::from_utf8(lines[0].clone()).unwrap().replace("Signal\":0", "Signal\":9").into_bytes();
        let mut other = MessageSeal { key: Some(keys()[1].clone()), number: 0 };
        let other = other.line(&serde_json::to_vec(&LauncherMessage::Signal(0)).unwrap());
        assert_eq!(heard(&[&lines[0][..], &lines[0]].concat(), 2)[1], Err(NO_SEAL.into()));
        for wrong in [&lines[1], &changed, &other, &b"{\"Signal\":0}\n".to_vec()] {
            assert_eq!(heard(wrong, 1), [Err(NO_SEAL.into())]);
        }
    }
}
