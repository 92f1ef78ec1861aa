//! The island server: the sockets around [`Membership`].
//!
//! Each connection has one thread that reads and another that writes. Every frame that arrives is handled under one
//! lock, so that all ranks of all islands see the same order of events.

use super::frame::{Frame, FrameKind, ReadError, read};
use super::membership::{ConnectionId, Membership, ServerAction};
use super::membership_log::{IslandEvent, RecordFile, Replay};
use super::messages::{Hello, MAGIC, MAX_MANIFEST, MAX_PART, MAX_SHORT, VERSION};
use super::outbox::{Outbox, start_writer};
use super::{DEFAULT_SILENCE_TIMEOUT, HEARTBEAT_INTERVAL};
use crate::error::{IslandError, Result};
use crate::notice::emit;
use crate::util::lock;
use std::collections::HashMap;
use std::io::Read;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

/// The maximum number of connections at a time.
const MAX_CONNECTIONS: usize = 1 << 16;

/// The options of an [`IslandServer`].
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct IslandServerOptions {
    /// The address and port to listen on. Default: a free port on 127.0.0.1.
    pub listen: String,
    /// The file to which the membership of the run is written; it must not exist.
    pub record: Option<PathBuf>,
    /// The record of the run whose joins and departures are to be repeated.
    pub replay: Option<PathBuf>,
    /// The time without a sign of life after which a rank counts as dead. Less than 4 s counts as 4 s. Default 60 s.
    pub silence_timeout: Duration,
    /// Whether events are printed. Default false.
    pub print_events: bool,
}

impl Default for IslandServerOptions {
    fn default() -> Self {
        Self {
            listen: "127.0.0.1:0".into(),
            record: None,
            replay: None,
            silence_timeout: DEFAULT_SILENCE_TIMEOUT,
            print_events: false,
        }
    }
}

/// The islands of a server's run, by slot.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct IslandServerStatus {
    /// The islands that take part in exchanges.
    pub members: Vec<usize>,
    /// The islands that wait to join, or are receiving the state of a donor.
    pub waiting: Vec<usize>,
}

/// A running island server: the meeting point of islands that join, leave and die without stopping the others.
///
/// ```
/// use candle_zero::island_server::{IslandServer, IslandServerOptions};
///
/// let server = IslandServer::start(&IslandServerOptions::default())?;
/// // The value of `local_steps.server` for islands on this host.
/// let address = server.address().to_string();
/// # assert!(address.starts_with("127.0.0.1:"));
/// # Ok::<(), candle_zero::Error>(())
/// ```
#[derive(Debug)]
pub struct IslandServer {
    address: SocketAddr,
    shared: Arc<SharedServer>,
    acceptor: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct SharedServer {
    state: Mutex<ServerState>,
    silence_timeout: Duration,
    print_events: bool,
    is_closing: AtomicBool,
}

#[derive(Debug)]
struct ServerState {
    membership: Membership,
    connections: HashMap<ConnectionId, Connection>,
    next: ConnectionId,
    record: Option<RecordFile>,
}

#[derive(Debug)]
struct Connection {
    outbox: Arc<Outbox>,
    stream: TcpStream,
}

impl IslandServer {
    /// Starts a server. The server ends when the returned value is dropped.
    ///
    /// # Errors
    /// [`IslandError::Listen`] if the address cannot be used; [`IslandError::Record`] if a record cannot be created or
    /// read.
    pub fn start(options: &IslandServerOptions) -> Result<Self> {
        let replay = options.replay.as_deref().map(Replay::read).transpose()?;
        let listen_error =
            |error: std::io::Error| IslandError::Listen { address: options.listen.clone(), why: error.to_string() };
        let listener = TcpListener::bind(&options.listen).map_err(listen_error)?;
        let address = listener.local_addr().map_err(listen_error)?;
        let record = options.record.as_deref().map(RecordFile::create).transpose()?;
        let shared = Arc::new(SharedServer {
            state: Mutex::new(ServerState {
                membership: Membership::new(replay),
                connections: HashMap::new(),
                next: 0,
                record,
            }),
            silence_timeout: options.silence_timeout.max(4 * HEARTBEAT_INTERVAL),
            print_events: options.print_events,
            is_closing: AtomicBool::new(false),
        });
        let acceptor = std::thread::Builder::new().name("island-server".into()).spawn({
            let shared = shared.clone();
            move || accept(&listener, &shared)
        });
        Ok(Self { address, shared, acceptor: Some(acceptor.map_err(listen_error)?) })
    }

    /// Returns the address on which the server listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the islands of the run at this moment.
    pub fn status(&self) -> IslandServerStatus {
        let state = lock(&self.shared.state);
        IslandServerStatus { members: state.membership.members(), waiting: state.membership.waiting() }
    }
}

impl Drop for IslandServer {
    fn drop(&mut self) {
        self.shared.is_closing.store(true, Ordering::Release);
        // The acceptor is waiting for a connection, so connecting to it wakes it up.
        let mut address = self.address;
        if address.ip().is_unspecified() {
            address.set_ip(std::net::Ipv4Addr::LOCALHOST.into());
        }
        if TcpStream::connect_timeout(&address, Duration::from_secs(1)).is_ok()
            && let Some(acceptor) = self.acceptor.take()
        {
            _ = acceptor.join();
        }
        for connection in lock(&self.shared.state).connections.values() {
            connection.outbox.break_off();
            _ = connection.stream.shutdown(Shutdown::Both);
        }
    }
}

fn accept(listener: &TcpListener, shared: &Arc<SharedServer>) {
    for stream in listener.incoming() {
        if shared.is_closing.load(Ordering::Acquire) {
            return;
        }
        match stream {
            Ok(stream) => {
                let server = shared.clone();
                let started =
                    std::thread::Builder::new().name("island-reader".into()).spawn(move || server.serve(stream));
                if let Err(error) = started {
                    shared.print_event(&format!("a connection is refused: {error}"));
                }
            }
            Err(error) => {
                shared.print_event(&format!("a connection failed: {error}"));
                // If no file descriptors are left, every attempt fails immediately.
                std::thread::park_timeout(Duration::from_millis(50));
            }
        }
    }
}

impl SharedServer {
    fn print_event(&self, message: &str) {
        if self.print_events {
            emit(&format!("island server: {message}"));
        }
    }

    /// Serves a connection until it ends.
    fn serve(&self, stream: TcpStream) {
        let peer = stream.peer_addr().map_or("unknown".into(), |peer| peer.to_string());
        let streams = stream
            .set_read_timeout(Some(self.silence_timeout))
            .and_then(|()| stream.set_write_timeout(Some(self.silence_timeout)))
            .and_then(|()| stream.set_nodelay(true))
            .and_then(|()| Ok((stream.try_clone()?, stream.try_clone()?)));
        let Ok((mut reader, writer)) = streams else { return };
        let outbox = Arc::new(Outbox::default());
        let Ok(writer_thread) = start_writer(outbox.clone(), writer, HEARTBEAT_INTERVAL) else { return };
        let id = {
            let mut state = lock(&self.state);
            if state.connections.len() >= MAX_CONNECTIONS {
                outbox.break_off();
                return;
            }
            state.next += 1;
            let id = state.next;
            state.connections.insert(id, Connection { outbox: outbox.clone(), stream });
            id
        };
        let why = match read_preamble(&mut reader) {
            Ok(()) => self.read_frames(id, &mut reader),
            Err(why) => {
                outbox.push(Frame::new(FrameKind::Refused, why.as_bytes().to_vec()));
                why
            }
        };
        self.handle(|membership| membership.lost(id, &why));
        if let DisconnectCause::Foreign = DisconnectCause::of(&why) {
            self.print_event(&format!("the connection from {peer} is refused: {why}"));
        }
        outbox.close();
        _ = writer_thread.join();
        drain(&mut reader);
        lock(&self.state).connections.remove(&id);
    }

    /// Reads frames until the connection ends, and returns why it has ended.
    fn read_frames(&self, id: ConnectionId, reader: &mut impl Read) -> String {
        let mut has_sent_hello = false;
        loop {
            let limit = |kind| match kind {
                FrameKind::Hello if !has_sent_hello => Some(MAX_SHORT),
                FrameKind::Ping => Some(0),
                _ if !has_sent_hello => None,
                // The lengths of fragments are known when all ranks of an island are connected.
                FrameKind::Change => Some(lock(&self.state).membership.max_change()),
                FrameKind::DonationHead => Some(MAX_MANIFEST),
                FrameKind::DonationPart => Some(MAX_PART),
                FrameKind::DonationEnd => Some(8),
                FrameKind::Goodbye => Some(0),
                _ => None,
            };
            let (kind, body) = match read(reader, limit) {
                Ok(frame) => frame,
                Err(error) => return reason(error, self.silence_timeout),
            };
            match kind {
                FrameKind::Ping => {}
                FrameKind::Hello => match serde_json::from_slice::<Hello>(&body) {
                    Ok(hello) => {
                        has_sent_hello = true;
                        self.handle(|membership| membership.hello(id, hello));
                    }
                    Err(error) => return format!("{NOT_AN_ISLAND}: its first message cannot be read ({error})"),
                },
                FrameKind::Change => self.handle(|membership| membership.change(id, body)),
                FrameKind::Goodbye => {
                    self.handle(|membership| membership.goodbye(id));
                    return "its program has ended".into();
                }
                kind => self.relay(id, kind, body),
            }
        }
    }

    /// Passes on a part of a donation. If a receiver is slower than the donor, this call waits.
    fn relay(&self, id: ConnectionId, kind: FrameKind, body: Vec<u8>) {
        let receivers: Vec<Arc<Outbox>> = {
            let mut state = lock(&self.state);
            let receivers = state.membership.donation(id, kind, &body);
            receivers.iter().filter_map(|receiver| Some(state.connections.get(receiver)?.outbox.clone())).collect()
        };
        let body = Arc::new(body);
        for receiver in receivers {
            receiver.push_when_there_is_room(Frame::with_body(kind, Vec::new(), body.clone()));
        }
        if kind == FrameKind::DonationEnd {
            self.handle(|membership| membership.donation_ended(id));
        }
    }

    /// Changes the membership, and carries out the resulting actions.
    fn handle(&self, change: impl FnOnce(&mut Membership)) {
        let mut state = lock(&self.state);
        change(&mut state.membership);
        for action in state.membership.take_actions() {
            match action {
                ServerAction::Send(to, frame) => {
                    if let Some(connection) = state.connections.get(&to) {
                        connection.outbox.push(frame);
                    }
                }
                ServerAction::Close(id) => {
                    if let Some(connection) = state.connections.get(&id) {
                        connection.outbox.close();
                    }
                }
                ServerAction::Record(event) => self.record(&mut state, &event),
                ServerAction::Print(message) => self.print_event(&message),
            }
        }
    }

    fn record(&self, state: &mut ServerState, event: &IslandEvent) {
        if let Some(record) = &mut state.record {
            record.append(event);
        }
    }
}

/// The beginning of each reason that concerns the program at the other end rather than the network.
const NOT_AN_ISLAND: &str = "it is not an island";

/// The cause of a connection's end.
enum DisconnectCause {
    Foreign,
    Network,
}

impl DisconnectCause {
    fn of(why: &str) -> Self {
        if why.starts_with(NOT_AN_ISLAND) { Self::Foreign } else { Self::Network }
    }
}

/// Reads part of what a peer still sends, because closing a connection with unread bytes may discard what was sent to
/// the peer.
fn drain(reader: &mut impl Read) {
    let mut bytes = [0; 4096];
    for _ in 0..16 {
        if !matches!(reader.read(&mut bytes), Ok(1..)) {
            return;
        }
    }
}

/// Reads the first bytes of a connection, [`MAGIC`] and the version, and checks both.
fn read_preamble(reader: &mut impl Read) -> std::result::Result<(), String> {
    let mut preamble = [0; 12];
    reader.read_exact(&mut preamble).map_err(|error| format!("{NOT_AN_ISLAND}: {error}"))?;
    let (magic, version) = preamble.split_at(8);
    if magic != MAGIC {
        return Err(format!("{NOT_AN_ISLAND}: its first bytes are not those of an island"));
    }
    let version = version.try_into().map_or(0, u32::from_le_bytes);
    (version == VERSION).then_some(()).ok_or_else(|| {
        format!(
            "{NOT_AN_ISLAND} of this version: it uses version {version} of the protocol, and this server uses version \
             {VERSION}"
        )
    })
}

fn reason(error: ReadError, silence_timeout: Duration) -> String {
    match error {
        ReadError::Protocol(why) => format!("{NOT_AN_ISLAND}: {why}"),
        ReadError::Io(error) => match error.kind() {
            std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut => {
                format!("no sign of life for {} s", silence_timeout.as_secs_f64())
            }
            std::io::ErrorKind::UnexpectedEof => "it was closed".into(),
            _ => error.to_string(),
        },
    }
}
