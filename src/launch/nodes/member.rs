//! One host's side of a job on several hosts: it joins, starts its ranks when it is told to, and says how they ended.

use super::greeting::Parting;
use super::join::join;
use super::secret::Secret;
use super::wire::{Heard, Hello, How, LONGEST, Message, Peer, Session, Start};
use crate::error::{HostsError, LaunchError, Result};
use crate::launch::console::say;
use crate::launch::pmi;
use crate::launch::ranks::{self, End, Job, Part};
use crate::launch::signals::{self, Event};
use crate::util::lock;
use rustix::process::Signal;
use std::collections::VecDeque;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// How long a try to reach the first host may take, and then to join.
const TRY: Duration = Duration::from_secs(5);
/// The pause between two tries to reach the first host.
const RETRY: Duration = Duration::from_millis(300);
/// How often what was heard is looked at, should the event be lost.
const TICK: Duration = Duration::from_millis(500);
/// Exit code where the first host is gone.
const EXIT_LOST: u8 = 1;

/// How a host joins.
pub(super) struct Joining {
    pub(super) master_addr: String,
    pub(super) master_port: u16,
    /// How the first host itself comes to its port.
    pub(super) own: Option<Vec<SocketAddr>>,
    pub(super) secret: Option<Secret>,
    /// How long the first host is tried.
    pub(super) patience: Duration,
    pub(super) hello: Hello,
    /// Whether it joins again when it has lost the first host.
    pub(super) returns: bool,
    /// Whether the end of standard input is a SIGTERM.
    pub(super) until_stdin_ends: bool,
}

/// What the thread that listens to the first host leaves for the main thread.
#[derive(Default)]
struct Inbox {
    messages: Mutex<VecDeque<Heard>>,
    /// Of the attempt that runs.
    running: Mutex<Option<Running>>,
}

struct Running {
    attempt: u32,
    pmi: Arc<pmi::Server>,
    news: Arc<Mutex<Option<(usize, String)>>>,
    /// The next signal comes from the first host, which need not be told of it.
    passed_on: Arc<AtomicBool>,
}

impl Running {
    fn passed_on(&self, signal: Signal) -> Event {
        self.passed_on.store(true, Ordering::SeqCst);
        Event::End(signal)
    }
}

impl Inbox {
    /// Takes what is heard of the first host.
    fn hear(&self, heard: Heard, events: &Sender<Event>) {
        let running = lock(&self.running);
        let of = |attempt: u32| running.as_ref().filter(|running| running.attempt == attempt);
        let event = match heard {
            Heard::Said(Message::Values { attempt, values }) => {
                return of(attempt).into_iter().for_each(|running| running.pmi.deliver(values.clone()));
            }
            Heard::Said(Message::Failed { attempt, rank, why }) => {
                if let Some(running) = of(attempt) {
                    lock(&running.news).get_or_insert((rank, why));
                }
                Event::News
            }
            Heard::Said(Message::Signal(number)) => match (named(number), &*running) {
                (Some(signal), Some(running)) => running.passed_on(signal),
                _ => return,
            },
            Heard::Said(Message::Regroup { attempt }) => match of(attempt) {
                Some(running) => running.passed_on(Signal::TERM),
                None => return,
            },
            heard => {
                if let (Heard::Lost(why), Some(running)) = (&heard, &*running) {
                    // Rank 0 is on the first host.
                    lock(&running.news).get_or_insert((0, format!("the first host is gone: {why}")));
                }
                lock(&self.messages).push_back(heard);
                Event::News
            }
        };
        let _ = events.send(event);
    }
}

/// The signals that ask a launcher to end.
fn named(number: i32) -> Option<Signal> {
    [Signal::INT, Signal::TERM, Signal::HUP].into_iter().find(|signal| signal.as_raw() == number)
}

/// Why a host no longer takes part.
enum Left {
    /// The job is over, with this exit code.
    Over(u8),
    /// The first host is gone.
    Lost(String),
}

/// Takes part in the job until it is over; the result is the exit code. Call it on the main thread.
///
/// # Errors
/// The first host cannot be reached, or refuses this one.
pub(super) fn run(mut job: Job, joining: &Joining) -> Result<u8> {
    let (sender, events) = signals::listen()?;
    if joining.until_stdin_ends {
        let sender = sender.clone();
        let listen = move || {
            let _ = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink());
            let _ = sender.send(Event::End(Signal::TERM));
        };
        std::thread::Builder::new()
            .name("standard input".into())
            .spawn(listen)
            .map_err(|source| LaunchError::Setup { what: "listening to standard input", source })?;
    }
    loop {
        match attend(&mut job, joining, &sender, &events)? {
            Left::Over(code) => return Ok(code),
            Left::Lost(why) => say(&format!("zerorun: the first host, {}, is gone: {why}", joining.master_addr)),
        }
        if !joining.returns {
            return Ok(EXIT_LOST);
        }
        say("zerorun: this host joins again as soon as the first one can be reached");
    }
}

fn attend(job: &mut Job, joining: &Joining, sender: &Sender<Event>, events: &Receiver<Event>) -> Result<Left> {
    let inbox = Arc::new(Inbox::default());
    let (heard, sender) = (Arc::clone(&inbox), sender.clone());
    let session = match connect(joining, events)? {
        Ok(session) => session,
        Err(signal) => return Ok(stopped_by(signal)),
    };
    let hear = move |news| heard.hear(news, &sender);
    let peer = Peer::over(session, LONGEST, hear).map_err(|source| unreachable(joining, source.to_string()))?;
    let peer = Arc::new(peer);
    let mut failed = None;
    loop {
        match wait(&inbox, events) {
            Ok(Heard::Said(Message::Start(start))) => {
                let attempt = start.attempt;
                let how = carry_out(job, joining, start, &inbox, &peer, events, &mut failed)?;
                *lock(&inbox.running) = None;
                peer.send(&Message::Ended { attempt, how });
            }
            Ok(Heard::Said(Message::Finish { code, text, culprit })) => {
                // Of its own ranks a host knows more than the others.
                let own = failed.filter(|_| culprit == Some(joining.hello.node));
                match (own, text.as_deref().and_then(|text| text.split_once('\n'))) {
                    (Some(own), Some((_, rest))) => say(&format!("{own}\n{rest}")),
                    (own, _) => own.or(text).iter().for_each(|text| say(text)),
                }
                return Ok(Left::Over(code));
            }
            Ok(Heard::Said(_)) => {}
            Ok(Heard::Lost(why)) => return Ok(Left::Lost(why)),
            Err(signal) => {
                peer.send(&Message::Signal(signal.as_raw()));
                return Ok(stopped_by(signal));
            }
        }
    }
}

fn stopped_by(signal: Signal) -> Left {
    say(&format!("zerorun: stopped by {}", signals::name(signal.as_raw())));
    Left::Over(128 + signal.as_raw() as u8)
}

/// Joins the job, or ends with a signal. What may be better the next time is tried again.
fn connect(joining: &Joining, events: &Receiver<Event>) -> Result<std::result::Result<Session, Signal>> {
    let since = Instant::now();
    loop {
        let why = match reach(joining) {
            Ok(stream) => {
                let hello = Hello { clock: crate::comm::clock_skew::seconds(), ..joining.hello.clone() };
                match join(stream, joining.secret.as_ref(), &hello, TRY) {
                    Ok(session) => return Ok(Ok(session)),
                    Err(Parting::Refused { why, .. }) => return Err(HostsError::Refused { why }.into()),
                    Err(Parting::NoLauncher) => {
                        let Joining { master_addr, master_port, .. } = joining;
                        return Err(HostsError::NoLauncher { address: master_addr.clone(), port: *master_port }.into());
                    }
                    Err(Parting::Lost(why)) => why,
                }
            }
            Err(error) => error.to_string(),
        };
        if since.elapsed() >= joining.patience {
            return Err(unreachable(joining, why));
        }
        match events.recv_timeout(RETRY) {
            Ok(Event::End(signal)) => return Ok(Err(signal)),
            Ok(Event::Suspend) => signals::suspend_self(),
            _ => {}
        }
    }
}

/// Tries each of the address' meanings for a while.
fn reach(joining: &Joining) -> std::io::Result<TcpStream> {
    let mut last = std::io::Error::from(std::io::ErrorKind::NotFound);
    let addresses = match &joining.own {
        Some(own) => own.clone(),
        None => (joining.master_addr.as_str(), joining.master_port).to_socket_addrs()?.collect(),
    };
    for address in addresses {
        match TcpStream::connect_timeout(&address, TRY) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

fn unreachable(joining: &Joining, why: String) -> crate::Error {
    let Joining { master_addr, master_port, patience, .. } = joining;
    let (address, port, seconds) = (master_addr.clone(), *master_port, patience.as_secs());
    HostsError::FirstUnreachable { address, port, seconds, why }.into()
}

/// What is heard next, or the signal that asks this launcher to end.
fn wait(inbox: &Inbox, events: &Receiver<Event>) -> std::result::Result<Heard, Signal> {
    loop {
        if let Some(heard) = lock(&inbox.messages).pop_front() {
            return Ok(heard);
        }
        match events.recv_timeout(TICK) {
            Ok(Event::End(signal)) => return Err(signal),
            Ok(Event::Suspend) => signals::suspend_self(),
            Ok(Event::Child | Event::Pass(_) | Event::News) | Err(RecvTimeoutError::Timeout) => {}
            // As in `Ranks::supervise`.
            Err(RecvTimeoutError::Disconnected) => std::thread::sleep(TICK),
        }
    }
}

/// Runs this host's ranks; the report of their own failure goes to `failed`.
fn carry_out(
    job: &mut Job,
    joining: &Joining,
    start: Start,
    inbox: &Inbox,
    peer: &Arc<Peer>,
    events: &Receiver<Event>,
    failed: &mut Option<String>,
) -> Result<How> {
    let Start { attempt, restart, place, ranks, port, space, note } = start;
    note.iter().for_each(|note| say(note));
    let values = Arc::clone(peer);
    let send = move |fresh| values.send(&Message::Values { attempt, values: fresh });
    let server = Arc::new(pmi::Server::new(space, &ranks, place, send));
    let news = Arc::new(Mutex::new(None));
    let passed_on = Arc::new(AtomicBool::new(false));
    let (pmi, told) = (server.clone(), passed_on.clone());
    *lock(&inbox.running) = Some(Running { attempt, pmi, news: news.clone(), passed_on });
    // One host of several may be left alone: its ranks need no library to meet.
    let alone = ranks.len() == 1;
    let asked = Arc::clone(peer);
    job.part = (!alone).then(|| Part {
        first: ranks[..place].iter().sum(),
        place,
        hosts: ranks.len(),
        host: Some(joining.hello.host.clone()),
        master_addr: joining.master_addr.clone(),
        pmi: server,
        news,
        tell: Arc::new(move |signal: Signal| {
            if !told.swap(false, Ordering::SeqCst) {
                asked.send(&Message::Signal(signal.as_raw()));
            }
        }),
    });
    (job.restart, job.master_port) = (restart, Some(port));
    Ok(match ranks::run(job, events)? {
        End::Well => How::Well,
        End::Unwritten => How::Unwritten,
        End::Interrupted(signal) => How::Interrupted(signal.as_raw()),
        End::Elsewhere => How::Elsewhere,
        End::Failed(failure) => {
            *failed = Some(failure.report);
            let ranks::Failure { rank, after, headline, code, blames, .. } = failure;
            How::Failed { rank, after, headline, code, blames }
        }
    })
}
