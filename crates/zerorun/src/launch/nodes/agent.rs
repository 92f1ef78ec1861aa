//! One host's side of a job on several hosts: joins, starts its ranks on request, and reports how they ended.

use super::handshake::HandshakeError;
use super::join::join;
use super::secret::JobSecret;
use super::wire::{
    HostHello, HostOutcome, LauncherConnection, LauncherMessage, LauncherPeer, MAX_MESSAGE_BYTES, PeerEvent,
    StartCommand,
};
use crate::error::{HostsError, LaunchError, Result};
use crate::launch::console::eprint;
use crate::launch::local_job_spec::{LocalJobSpec, MultiHostContext};
use crate::launch::pmi;
use crate::launch::ranks::{self, RunEnd};
use crate::launch::signals::{self, LauncherEvent};
use candle_zero::util::lock;
use rustix::process::Signal;
use std::collections::VecDeque;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// The time limit for an attempt to connect to the first host, and then for joining.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// The pause between two attempts to connect to the first host.
const RETRY_INTERVAL: Duration = Duration::from_millis(300);
/// The interval at which messages are checked, in case an event is lost.
const TICK: Duration = Duration::from_millis(500);
/// The exit code if the first host is lost.
const EXIT_LOST: u8 = 1;

/// The settings for joining a job.
pub(super) struct JoinOptions {
    pub(super) master_addr: String,
    pub(super) master_port: u16,
    /// On the first host, the addresses at which it reaches its own port.
    pub(super) local_addresses: Option<Vec<SocketAddr>>,
    pub(super) secret: Option<JobSecret>,
    /// How long to try to reach the first host.
    pub(super) patience: Duration,
    pub(super) hello: HostHello,
    /// Whether to join again after losing the first host.
    pub(super) rejoins: bool,
    /// Whether signals are read from standard input, whose end is treated as SIGTERM.
    pub(super) until_stdin_ends: bool,
}

/// Messages to the main thread from the thread that listens to the first host.
#[derive(Default)]
struct AgentInbox {
    messages: Mutex<VecDeque<PeerEvent>>,
    /// The running attempt, if any.
    running: Mutex<Option<RunningAttempt>>,
}

/// The attempt whose ranks run on this host.
struct RunningAttempt {
    attempt: u32,
    pmi: Arc<pmi::PmiServer>,
    remote_failure: Arc<Mutex<Option<(usize, String)>>>,
    /// Whether the next signal comes from the first host. Such a signal is not reported back.
    is_forwarded: Arc<AtomicBool>,
}

impl RunningAttempt {
    fn forwarded_signal(&self, signal: Signal) -> LauncherEvent {
        self.is_forwarded.store(true, Ordering::SeqCst);
        LauncherEvent::End(signal)
    }
}

impl AgentInbox {
    /// Receives a message from the first host.
    fn receive(&self, peer_event: PeerEvent, events: &Sender<LauncherEvent>) {
        let running = lock(&self.running);
        let if_running = |attempt: u32| running.as_ref().filter(|running| running.attempt == attempt);
        let event = match peer_event {
            PeerEvent::Message(LauncherMessage::Values { attempt, values }) => {
                return if_running(attempt).into_iter().for_each(|running| running.pmi.deliver(values.clone()));
            }
            PeerEvent::Message(LauncherMessage::Failed { attempt, rank, why }) => {
                if let Some(running) = if_running(attempt) {
                    lock(&running.remote_failure).get_or_insert((rank, why));
                }
                LauncherEvent::PeerMessage
            }
            PeerEvent::Message(LauncherMessage::Signal(number)) => match (signals::ending_signal(number), &*running) {
                (Some(signal), Some(running)) => running.forwarded_signal(signal),
                _ => return,
            },
            PeerEvent::Message(LauncherMessage::Regroup { attempt }) => match if_running(attempt) {
                Some(running) => running.forwarded_signal(Signal::TERM),
                None => return,
            },
            peer_event => {
                if let (PeerEvent::Lost(why), Some(running)) = (&peer_event, &*running) {
                    // Rank 0 is on the first host.
                    lock(&running.remote_failure).get_or_insert((0, format!("the first host is gone: {why}")));
                }
                lock(&self.messages).push_back(peer_event);
                LauncherEvent::PeerMessage
            }
        };
        let _ = events.send(event);
    }
}

/// The reason why a host leaves the job.
enum LeaveReason {
    /// The job is over, with this exit code.
    Over(u8),
    /// The first host is lost.
    Lost(String),
}

/// Takes part in the job until it is over, and returns the exit code. Must be called on the main thread.
///
/// # Errors
/// Fails if signals cannot be handled, if the first host cannot be reached, has another program on the port or refuses
/// this host, or if a rank cannot be started.
pub(super) fn run(mut job: LocalJobSpec, options: &JoinOptions) -> Result<u8> {
    let (sender, events) = signals::listen()?;
    if options.until_stdin_ends {
        let sender = sender.clone();
        let listen = move || {
            // The receiver exists until the job is over.
            let receive = |signal| _ = sender.send(signals::request_of(signal));
            signals::read_signals(std::io::stdin().lock(), receive);
            receive(Signal::TERM);
        };
        std::thread::Builder::new()
            .name("standard input".into())
            .spawn(listen)
            .map_err(|source| LaunchError::Setup { what: "listening to standard input", source })?;
    }
    loop {
        match run_session(&mut job, options, &sender, &events)? {
            LeaveReason::Over(code) => return Ok(code),
            LeaveReason::Lost(why) => {
                eprint(&format!("zerorun: the first host, {}, is gone: {why}", options.master_addr))
            }
        }
        if !options.rejoins {
            return Ok(EXIT_LOST);
        }
        eprint("zerorun: this host rejoins as soon as the first host can be reached");
    }
}

fn run_session(
    job: &mut LocalJobSpec,
    options: &JoinOptions,
    sender: &Sender<LauncherEvent>,
    events: &Receiver<LauncherEvent>,
) -> Result<LeaveReason> {
    let inbox = Arc::new(AgentInbox::default());
    let (receiver, sender) = (Arc::clone(&inbox), sender.clone());
    let session = match connect(options, events)? {
        Ok(session) => session,
        Err(signal) => return Ok(stopped_by(signal)),
    };
    let on_event = move |event| receiver.receive(event, &sender);
    let peer = LauncherPeer::over(session, MAX_MESSAGE_BYTES, on_event)
        .map_err(|source| unreachable(options, source.to_string()))?;
    let peer = Arc::new(peer);
    let mut failure_report = None;
    loop {
        match wait(&inbox, events) {
            Ok(PeerEvent::Message(LauncherMessage::Start(start))) => {
                let attempt = start.attempt;
                let how = run_attempt(job, options, start, &inbox, &peer, events, &mut failure_report)?;
                *lock(&inbox.running) = None;
                peer.send(&LauncherMessage::Ended { attempt, how });
            }
            Ok(PeerEvent::Message(LauncherMessage::Finish { code, text, culprit })) => {
                // This host's own report on its ranks is more detailed than the first host's text.
                let own_report = failure_report.filter(|_| culprit == Some(options.hello.node));
                match (own_report, text.as_deref().and_then(|text| text.split_once('\n'))) {
                    (Some(own_report), Some((_, rest))) => eprint(&format!("{own_report}\n{rest}")),
                    (own_report, _) => own_report.or(text).iter().for_each(|text| eprint(text)),
                }
                return Ok(LeaveReason::Over(code));
            }
            Ok(PeerEvent::Message(_)) => {}
            Ok(PeerEvent::Lost(why)) => return Ok(LeaveReason::Lost(why)),
            Err(signal) => {
                peer.send(&LauncherMessage::Signal(signal.as_raw()));
                return Ok(stopped_by(signal));
            }
        }
    }
}

fn stopped_by(signal: Signal) -> LeaveReason {
    eprint(&format!("zerorun: stopped by {}", signals::name(signal.as_raw())));
    LeaveReason::Over(128 + signal.as_raw() as u8)
}

/// Joins the job, or returns the signal that interrupts joining. Temporary failures are retried.
fn connect(
    options: &JoinOptions,
    events: &Receiver<LauncherEvent>,
) -> Result<std::result::Result<LauncherConnection, Signal>> {
    let since = Instant::now();
    loop {
        let why = match reach(options) {
            Ok(stream) => {
                let hello = HostHello { clock: candle_zero::comm::clock_skew::seconds(), ..options.hello.clone() };
                match join(stream, options.secret.as_ref(), &hello, CONNECT_TIMEOUT) {
                    Ok(session) => return Ok(Ok(session)),
                    Err(HandshakeError::Refused { why, .. }) => return Err(HostsError::Refused { why }.into()),
                    Err(HandshakeError::NoLauncher) => {
                        let JoinOptions { master_addr, master_port, .. } = options;
                        return Err(HostsError::NoLauncher { address: master_addr.clone(), port: *master_port }.into());
                    }
                    Err(HandshakeError::Lost(why)) => why,
                }
            }
            Err(error) => error.to_string(),
        };
        if since.elapsed() >= options.patience {
            return Err(unreachable(options, why));
        }
        match events.recv_timeout(RETRY_INTERVAL) {
            Ok(LauncherEvent::End(signal)) => return Ok(Err(signal)),
            Ok(LauncherEvent::Suspend) => signals::suspend_self(),
            _ => {}
        }
    }
}

/// Connects to the first host, at the first of its addresses that accepts the connection.
fn reach(options: &JoinOptions) -> std::io::Result<TcpStream> {
    let mut last_error = std::io::Error::from(std::io::ErrorKind::NotFound);
    let addresses = match &options.local_addresses {
        Some(local_addresses) => local_addresses.clone(),
        None => (options.master_addr.as_str(), options.master_port).to_socket_addrs()?.collect(),
    };
    for address in addresses {
        match TcpStream::connect_timeout(&address, CONNECT_TIMEOUT) {
            Ok(stream) => return Ok(stream),
            Err(error) => last_error = error,
        }
    }
    Err(last_error)
}

fn unreachable(options: &JoinOptions, why: String) -> candle_zero::Error {
    let JoinOptions { master_addr, master_port, patience, .. } = options;
    let (address, port, seconds) = (master_addr.clone(), *master_port, patience.as_secs());
    HostsError::FirstUnreachable { address, port, seconds, why }.into()
}

/// Waits for the next message, or for a signal that asks this launcher to end.
fn wait(inbox: &AgentInbox, events: &Receiver<LauncherEvent>) -> std::result::Result<PeerEvent, Signal> {
    loop {
        if let Some(event) = lock(&inbox.messages).pop_front() {
            return Ok(event);
        }
        match events.recv_timeout(TICK) {
            Ok(LauncherEvent::End(signal)) => return Err(signal),
            Ok(LauncherEvent::Suspend) => signals::suspend_self(),
            Ok(LauncherEvent::Child | LauncherEvent::Pass(_) | LauncherEvent::PeerMessage)
            | Err(RecvTimeoutError::Timeout) => {}
            // This cannot happen; see `RankProcesses::supervise`.
            Err(RecvTimeoutError::Disconnected) => std::thread::sleep(TICK),
        }
    }
}

/// Runs this host's ranks. The report of their own failure is stored in `failure_report`.
fn run_attempt(
    job: &mut LocalJobSpec,
    options: &JoinOptions,
    start: StartCommand,
    inbox: &AgentInbox,
    peer: &Arc<LauncherPeer>,
    events: &Receiver<LauncherEvent>,
    failure_report: &mut Option<String>,
) -> Result<HostOutcome> {
    let StartCommand { attempt, restart, host_index, ranks, port, kvs_name, note } = start;
    note.iter().for_each(|note| eprint(note));
    let values = Arc::clone(peer);
    let send = move |fresh| values.send(&LauncherMessage::Values { attempt, values: fresh });
    let server = Arc::new(pmi::PmiServer::new(kvs_name, &ranks, host_index, send));
    let remote_failure = Arc::new(Mutex::new(None));
    let is_forwarded = Arc::new(AtomicBool::new(false));
    let (pmi, signal_is_forwarded) = (server.clone(), is_forwarded.clone());
    *lock(&inbox.running) = Some(RunningAttempt { attempt, pmi, remote_failure: remote_failure.clone(), is_forwarded });
    // If only one of several hosts is left, its ranks need no MPI library.
    let is_only_host = ranks.len() == 1;
    let first_host = Arc::clone(peer);
    job.multi_host = (!is_only_host).then(|| MultiHostContext {
        first: ranks[..host_index].iter().sum(),
        host_index,
        hosts: ranks.len(),
        host: Some(options.hello.host.clone()),
        master_addr: options.master_addr.clone(),
        pmi: server,
        remote_failure,
        forward_signal: Arc::new(move |signal: Signal| {
            if !signal_is_forwarded.swap(false, Ordering::SeqCst) {
                first_host.send(&LauncherMessage::Signal(signal.as_raw()));
            }
        }),
    });
    (job.restart, job.master_port) = (restart, Some(port));
    Ok(match ranks::run(job, events)? {
        RunEnd::Well => HostOutcome::Well,
        RunEnd::OutputLost => HostOutcome::OutputLost,
        RunEnd::Interrupted(signal) => HostOutcome::Interrupted(signal.as_raw()),
        RunEnd::EndedByOtherHost => HostOutcome::EndedByOtherHost,
        RunEnd::Failed(failure) => {
            *failure_report = Some(failure.report);
            let ranks::RunFailure { rank, after, headline, code, blames, .. } = failure;
            HostOutcome::Failed { rank, after, headline, code, blames }
        }
    })
}
