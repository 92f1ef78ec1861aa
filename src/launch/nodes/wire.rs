//! What the launchers of a job's hosts tell one another: lines of JSON over TCP, and a sign of life every second.

use super::checksums::Checksums;
use crate::launch::pmi::Values;
use crate::util::lock;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

/// How long a launcher may be silent before its host counts as gone.
const SILENCE: Duration = Duration::from_secs(8);
/// How often it gives a sign of life.
const BEAT: Duration = Duration::from_secs(1);
/// Bytes of the longest message: the values of some ten thousand ranks.
const LONGEST: u64 = 64 << 20;

/// Why nothing more is heard of a launcher that has ended.
const CLOSED: &str = "it closed the connection";

/// A message. Those about an attempt name it: what comes late belongs to an earlier one.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) enum Message {
    /// A host asks to take part.
    Hello(Hello),
    /// It cannot, for this reason.
    Refused(String),
    /// The ranks shall be started.
    Start(Start),
    /// What ranks have put for their MPI libraries: of one host on the way to the first, of all on the way back.
    Values { attempt: u32, values: Values },
    /// This rank is on a host that is gone or has failed.
    Failed { attempt: u32, rank: usize, why: String },
    /// The launcher got this signal, which is for all ranks.
    Signal(i32),
    /// The ranks shall end in good order, as after SIGTERM: they will be started again on other hosts.
    Regroup { attempt: u32 },
    /// All ranks of a host have ended.
    Ended { attempt: u32, how: How },
    /// The job is over.
    Finish { code: u8, text: Option<String>, culprit: Option<usize> },
    /// A sign of life.
    Beat,
}

/// A host that asks to take part.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Hello {
    /// The version of `zerorun`.
    pub(super) version: String,
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
    pub(super) files: Checksums,
    /// The same of the files in folders that its arguments name.
    pub(super) folders: BTreeMap<String, Checksums>,
    /// Its clock, in seconds since 1970.
    pub(super) clock: u64,
    /// A number of the launcher's own.
    pub(super) launcher: u64,
}

/// A start of the ranks, as one host is told of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Start {
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
pub(super) enum How {
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
pub(super) enum Heard {
    Said(Message),
    /// Nothing more will be heard, for this reason.
    Lost(String),
}

/// A connection to another launcher. It ends when this is dropped.
#[derive(Debug)]
pub(super) struct Peer(Arc<Mutex<TcpStream>>);

impl Peer {
    /// Begins to listen, on a thread that calls `hear`, and to give signs of life.
    pub(super) fn over(stream: TcpStream, mut hear: impl FnMut(Heard) + Send + 'static) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(SILENCE))?;
        stream.set_write_timeout(Some(SILENCE))?;
        let mut from = BufReader::new(stream.try_clone()?);
        let listen = move || {
            loop {
                match next(&mut from) {
                    Ok(Message::Beat) => {}
                    Ok(message) => hear(Heard::Said(message)),
                    Err(why) => return hear(Heard::Lost(why)),
                }
            }
        };
        let stream = Arc::new(Mutex::new(stream));
        let alive = Arc::downgrade(&stream);
        std::thread::Builder::new().name("hears a launcher".into()).spawn(listen)?;
        std::thread::Builder::new().name("signs of life".into()).spawn(move || beat(&alive))?;
        Ok(Self(stream))
    }

    /// Sends a message. One that cannot be sent is noticed where this peer is listened to.
    pub(super) fn send(&self, message: &Message) {
        let _ = write(&self.0, message);
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = lock(&self.0).shutdown(Shutdown::Both);
    }
}

fn write(stream: &Mutex<TcpStream>, message: &Message) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    lock(stream).write_all(&line)
}

fn beat(stream: &Weak<Mutex<TcpStream>>) {
    while stream.upgrade().is_some_and(|stream| write(&stream, &Message::Beat).is_ok()) {
        std::thread::sleep(BEAT);
    }
}

/// The next message, or why there is none.
fn next(from: &mut BufReader<TcpStream>) -> Result<Message, String> {
    let mut line = Vec::new();
    match from.take(LONGEST).read_until(b'\n', &mut line) {
        Ok(_) if line.last() == Some(&b'\n') => serde_json::from_slice(&line).map_err(|_| {
            "what it sends is no message of this version of zerorun: another program is on this port".into()
        }),
        Ok(_) => Err(CLOSED.into()),
        Err(error) if error.kind() == io::ErrorKind::ConnectionReset => Err(CLOSED.into()),
        Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
            Err(format!("nothing was heard of it for {} s", SILENCE.as_secs()))
        }
        Err(error) => Err(format!("the connection broke: {error}")),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::net::TcpListener;
    use std::sync::mpsc::channel;

    #[test]
    fn messages_arrive_in_order_and_an_end_is_noticed() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let (sender, heard) = channel();
        let there = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (here, _) = listener.accept().unwrap();
        let _here = Peer::over(here, move |news| drop(sender.send(news))).unwrap();
        let there = Peer::over(there, |_| {}).unwrap();
        let values = Message::Values { attempt: 1, values: vec![("a".into(), "line\nbreak".into())] };
        for message in [&values, &Message::Signal(15)] {
            there.send(message);
            assert!(matches!(heard.recv().unwrap(), Heard::Said(said) if said == *message));
        }
        drop(there);
        assert!(matches!(heard.recv().unwrap(), Heard::Lost(why) if why.contains("closed")));
    }

    #[test]
    fn what_is_no_message_ends_the_connection() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let (sender, heard) = channel();
        let mut there = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let _here = Peer::over(listener.accept().unwrap().0, move |news| drop(sender.send(news))).unwrap();
        there.write_all(b"GET / HTTP/1.1\r\n").unwrap();
        assert!(matches!(heard.recv().unwrap(), Heard::Lost(why) if why.contains("another program")));
    }
}
