//! The first host's side of a job on several hosts: waits for the hosts, starts attempts, and decides how the job ends.
//!
//! ```text
//!   gather: each host sends Hello -> Start to all -> the ranks' MPI libraries exchange values -> each sends Ended
//!      ^                                                                     |
//!      +-- a host is lost or a rank failed: the others are notified, all end +-- if restarts are left: again
//!          a host is back: the ranks are asked to end gracefully ------------+
//! ```
//!
//! Everything happens on one thread, which handles the messages from all hosts one by one.

use super::acceptor::{HostAcceptor, JoiningHost, MAX_UNAUTHENTICATED_BYTES};
use super::admission::{self, refusal};
use super::secret::JobSecret;
use super::wire::{HostHello, HostOutcome, LauncherMessage, LauncherPeer, PeerEvent, StartCommand};
use crate::launch::restarts;
use candle_zero::comm::clock_skew;
use candle_zero::util::list;
use std::collections::BTreeMap;
use std::net::{Ipv4Addr, TcpListener};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

/// How long a new attempt waits for hosts of the previous one, if it may continue without them.
const REJOIN_TIMEOUT: Duration = Duration::from_secs(3);
/// How long an attempt runs before it is restarted to include a host that is back.
const SCALE_UP_DELAY: Duration = Duration::from_secs(10);
/// The interval at which deadlines are checked.
const TICK: Duration = Duration::from_millis(200);
/// The maximum number of bytes in a host's message for each rank of that host: the values of the rank's MPI library,
/// and other data.
const MAX_MESSAGE_BYTES_PER_RANK: usize = 64 << 10;
/// The exit code if a host is lost, hosts are missing, or a signal ends the job while it waits for hosts.
const EXIT_LOST: u8 = 1;

/// The rules for starting ranks.
#[derive(Debug, Clone, Copy)]
pub(super) struct ElasticPolicy {
    /// The number of hosts of the job.
    pub(super) nodes: usize,
    /// The minimum number of hosts to continue with after a failure.
    pub(super) min_nodes: usize,
    /// The maximum number of restarts in total.
    pub(super) max_restarts: u32,
    /// How long to wait for hosts.
    pub(super) patience: Duration,
}

/// Serves the job on a separate thread until it is over. `first_host` describes this host; the other hosts are
/// compared with it. The unique number of this host's launcher identifies the job.
///
/// # Errors
/// Fails if the system cannot start the threads.
pub(super) fn serve(
    listeners: Vec<TcpListener>,
    secret: Option<JobSecret>,
    policy: ElasticPolicy,
    first_host: HostHello,
) -> std::io::Result<std::thread::JoinHandle<()>> {
    let (sender, events) = channel();
    let acceptor = Arc::new(HostAcceptor::new(secret));
    for listener in listeners {
        let event_sender = sender.clone();
        let on_join = move |joining| _ = event_sender.send(CoordinatorEvent::HostArrived(Box::new(joining)));
        acceptor.open(listener, on_join)?;
    }
    let mut job = Coordinator { policy, first_host, events, sender, acceptor, hosts: BTreeMap::new() };
    std::thread::Builder::new().name("first of hosts".into()).spawn(move || job.run())
}

/// An event: a new host, or a message from a known one, which is identified by the number of its connection.
enum CoordinatorEvent {
    HostArrived(Box<JoiningHost>),
    FromHost(u64, PeerEvent),
}

/// A host that takes part in the job.
struct JoinedHost {
    connection: u64,
    peer: LauncherPeer,
    hello: HostHello,
    /// How far its clock is ahead of this host's, in seconds.
    ahead: i64,
}

/// The state of the job, as kept by the first host.
struct Coordinator {
    policy: ElasticPolicy,
    first_host: HostHello,
    events: Receiver<CoordinatorEvent>,
    /// The sender for threads that listen to hosts.
    sender: Sender<CoordinatorEvent>,
    /// The acceptor of new hosts.
    acceptor: Arc<HostAcceptor>,
    /// The hosts by `--node_rank`.
    hosts: BTreeMap<usize, JoinedHost>,
}

/// A host in an attempt.
struct AttemptHost {
    first_rank: usize,
    host: String,
    values: Option<Vec<(String, String)>>,
    end: Option<HostEnd>,
}

/// The way in which a host's part of an attempt ended.
enum HostEnd {
    Ended(HostOutcome),
    /// The connection to the host was lost.
    Lost(String),
}

/// The result of an attempt.
#[derive(Debug, Clone, PartialEq)]
enum AttemptOutcome {
    Well,
    OutputLost,
    Interrupted(i32),
    /// Ranks were asked to end because a host is back.
    Regrouped,
    Failed(AttemptFailure),
}

/// The failure that ended an attempt.
#[derive(Debug, Clone, PartialEq)]
struct AttemptFailure {
    /// The `--node_rank` of the host that failed.
    node: usize,
    text: String,
    code: u8,
}

impl Coordinator {
    fn run(&mut self) {
        let (mut restart, mut note) = (0, None);
        // The number of consecutive early failures, and the pause before the next start.
        let (mut early_failures, mut pause) = (0, Duration::ZERO);
        for attempt in 0.. {
            if let Err(text) = self.gather(attempt > 0, std::mem::take(&mut pause)) {
                return self.finish(EXIT_LOST, Some(text), None);
            }
            let began = Instant::now();
            let (code, text, culprit) = match self.attempt(attempt, restart, note.take()) {
                AttemptOutcome::Well => (0, None, None),
                AttemptOutcome::OutputLost => (1, None, None),
                AttemptOutcome::Interrupted(signal) => (128 + (signal & 0x7f) as u8, None, None),
                AttemptOutcome::Regrouped => {
                    note = Some("zerorun: a host is back; the job continues with it".to_string());
                    continue;
                }
                AttemptOutcome::Failed(failure) if restart < self.policy.max_restarts => {
                    restart += 1;
                    early_failures = if began.elapsed() < restarts::EARLY_FAILURE { early_failures + 1 } else { 0 };
                    note = Some(format!("{}; restart {restart} of {}", failure.text, self.policy.max_restarts));
                    pause = restarts::pause_after(early_failures);
                    continue;
                }
                AttemptOutcome::Failed(AttemptFailure { node, text, code }) => {
                    let text = match self.policy.max_restarts {
                        0 => text,
                        all => format!("{text}\nzerorun: no restarts are left: --max_restarts {all} is exhausted"),
                    };
                    (code, Some(text), Some(node))
                }
            };
            return self.finish(code, text, culprit);
        }
    }

    /// Waits for hosts, for at least `pause`: at first for all of them, later for as many as are needed.
    fn gather(&mut self, is_restart: bool, pause: Duration) -> Result<(), String> {
        let since = Instant::now();
        loop {
            let (connected, ElasticPolicy { nodes, min_nodes, patience, .. }) = (self.hosts.len(), self.policy);
            let are_enough =
                connected == nodes || (is_restart && connected >= min_nodes && since.elapsed() >= REJOIN_TIMEOUT);
            if are_enough && since.elapsed() >= pause {
                return Ok(());
            }
            if since.elapsed() >= patience.max(pause) {
                let missing: Vec<String> =
                    (0..nodes).filter(|n| !self.hosts.contains_key(n)).map(|n| n.to_string()).collect();
                return Err(format!(
                    "zerorun: {connected} of {nodes} hosts connected within {} s; missing: --node_rank {}; start \
                     zerorun on each missing host with the same --nnodes, --master_addr and --master_port, and check \
                     that this port of the first host can be reached",
                    patience.as_secs(),
                    list(&missing)
                ));
            }
            if let Some((node, PeerEvent::Message(LauncherMessage::Signal(signal)))) = self.next() {
                let name = self.hosts.get(&node).map_or("?".into(), |host| admission::name(&host.hello));
                return Err(format!(
                    "zerorun: stopped by signal {signal}, which was sent to the launcher on host {name}"
                ));
            }
        }
    }

    /// Returns the next message from a host, if one arrives within a tick. This function also adds and removes hosts.
    fn next(&mut self) -> Option<(usize, PeerEvent)> {
        let (number, event) = match self.events.recv_timeout(TICK) {
            Ok(CoordinatorEvent::HostArrived(joining)) => {
                self.admit(*joining);
                return None;
            }
            Ok(CoordinatorEvent::FromHost(number, event)) => (number, event),
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => return None,
        };
        let node = self.hosts.iter().find(|(_, host)| host.connection == number).map(|(node, _)| *node)?;
        if let PeerEvent::Lost(_) = &event {
            self.hosts.remove(&node);
        }
        Some((node, event))
    }

    /// Admits a host, or refuses it.
    fn admit(&mut self, joining: JoiningHost) {
        let JoiningHost { number, from, mut session, hello } = joining;
        self.acceptor.forget(number);
        // This host's own launcher may join after those of other hosts.
        let node = hello.node;
        let holder = if node == self.first_host.node {
            Some(&self.first_host)
        } else {
            self.hosts.get(&node).map(|host| &host.hello)
        };
        if let Some(refusal) = refusal(&self.first_host, holder, &hello) {
            self.acceptor.report_refused(&admission::name(&hello), from, &refusal.for_first_host);
            session.send(&LauncherMessage::Refused(refusal.for_host));
            return;
        }
        // A host that lost its connection may be back before the loss is noticed. Until then, it is ignored here and
        // keeps retrying. Replayed messages from a host therefore do not remove that host.
        if self.hosts.contains_key(&node) {
            return;
        }
        session.send(&LauncherMessage::Joined);
        let sender = self.sender.clone();
        let hear = move |heard| _ = sender.send(CoordinatorEvent::FromHost(number, heard));
        // A connection that is already closed does not count as a host.
        let max_bytes = MAX_UNAUTHENTICATED_BYTES + hello.ranks * MAX_MESSAGE_BYTES_PER_RANK;
        let Ok(peer) = LauncherPeer::over(session, max_bytes, hear) else { return };
        let ahead = admission::clock_ahead(&hello);
        self.hosts.insert(node, JoinedHost { connection: number, peer, hello, ahead });
    }

    /// Starts the ranks once and waits until all have ended.
    fn attempt(&mut self, attempt: u32, restart: u32, note: Option<String>) -> AttemptOutcome {
        let began = Instant::now();
        let ranks: Vec<usize> = self.hosts.values().map(|host| host.hello.ranks).collect();
        // Folders are compared only at the first start, because a job may write into them.
        let folders = if attempt == 0 { self.folders() } else { None };
        let note = [note, self.clocks(), folders].into_iter().flatten().collect::<Vec<_>>().join("\n");
        let note = Some(note).filter(|note| !note.is_empty());
        let port = free_port();
        let mut attempt_hosts = BTreeMap::new();
        for (host_index, (node, host)) in self.hosts.iter().enumerate() {
            let (note, ranks) = (note.clone(), ranks.clone());
            let first_rank = ranks[..host_index].iter().sum();
            attempt_hosts
                .insert(*node, AttemptHost { first_rank, host: admission::name(&host.hello), values: None, end: None });
            let kvs_name = format!("candle_zero_{:x}_{attempt}", self.first_host.launcher);
            let start = StartCommand { attempt, restart, host_index, ranks, port, kvs_name, note };
            host.peer.send(&LauncherMessage::Start(start));
        }
        let mut order = Vec::new();
        let (mut signal, mut regroup) = (None, false);
        loop {
            if attempt_hosts.values().all(|attempt_host| attempt_host.end.is_some()) {
                break;
            }
            let has_returned = self.hosts.keys().any(|node| !attempt_hosts.contains_key(node));
            let is_ending = signal.is_some() || attempt_hosts.values().any(|attempt_host| attempt_host.end.is_some());
            if has_returned && !regroup && !is_ending && began.elapsed() >= SCALE_UP_DELAY {
                regroup = true;
                self.send_to_running(&attempt_hosts, &LauncherMessage::Regroup { attempt });
            }
            let Some((node, event)) = self.next() else { continue };
            let Some(attempt_host) = attempt_hosts.get_mut(&node) else { continue };
            let message = match event {
                PeerEvent::Message(message) => message,
                PeerEvent::Lost(_) if attempt_host.end.is_some() => continue,
                PeerEvent::Lost(why) => {
                    let rank = attempt_host.first_rank;
                    attempt_host.end = Some(HostEnd::Lost(why.clone()));
                    order.push(node);
                    self.send_to_running(
                        &attempt_hosts,
                        &LauncherMessage::Failed { attempt, rank, why: format!("its host is gone: {why}") },
                    );
                    continue;
                }
            };
            match message {
                LauncherMessage::Values { attempt: of_attempt, values } if of_attempt == attempt => {
                    attempt_host.values = Some(values);
                    if attempt_hosts.values().all(|attempt_host| attempt_host.values.is_some()) {
                        let values = attempt_hosts
                            .values_mut()
                            .filter_map(|attempt_host| attempt_host.values.take())
                            .flatten()
                            .collect();
                        self.send_to_running(&attempt_hosts, &LauncherMessage::Values { attempt, values });
                    }
                }
                LauncherMessage::Signal(number) if signal.is_none() => {
                    signal = Some(number);
                    self.send_to_running(&attempt_hosts, &LauncherMessage::Signal(number));
                }
                LauncherMessage::Ended { attempt: of_attempt, how }
                    if of_attempt == attempt && attempt_host.end.is_none() =>
                {
                    if let HostOutcome::Failed { rank, headline, .. } = &how {
                        let failed = LauncherMessage::Failed { attempt, rank: *rank, why: headline.clone() };
                        attempt_host.end = Some(HostEnd::Ended(how));
                        self.send_to_running(&attempt_hosts, &failed);
                    } else {
                        attempt_host.end = Some(HostEnd::Ended(how));
                    }
                    order.push(node);
                }
                _ => {}
            }
        }
        let ended: Vec<(usize, &AttemptHost)> = order.iter().map(|node| (*node, &attempt_hosts[node])).collect();
        outcome(&ended, signal, regroup)
    }

    /// Sends a message to all hosts of an attempt whose ranks are running.
    fn send_to_running(&self, attempt_hosts: &BTreeMap<usize, AttemptHost>, message: &LauncherMessage) {
        let running = self
            .hosts
            .iter()
            .filter(|(node, _)| attempt_hosts.get(node).is_some_and(|attempt_host| attempt_host.end.is_none()));
        running.for_each(|(_, host)| host.peer.send(message));
    }

    /// Returns a warning about hosts whose clocks differ from this host's.
    fn clocks(&self) -> Option<String> {
        let warnings =
            self.hosts.values().filter_map(|host| clock_skew::warning(&admission::name(&host.hello), host.ahead));
        warnings.map(|text| format!("zerorun: {text}")).reduce(|all, text| format!("{all}\n{text}"))
    }

    /// Returns a warning about folders that differ between hosts.
    fn folders(&self) -> Option<String> {
        let warnings = self.hosts.values().flat_map(|host| admission::folders(&self.first_host, &host.hello));
        warnings.reduce(|all, text| format!("{all}\n{text}"))
    }

    fn finish(&mut self, code: u8, text: Option<String>, culprit: Option<usize>) {
        for host in self.hosts.values() {
            host.peer.send(&LauncherMessage::Finish { code, text: text.clone(), culprit });
        }
        // The launchers now end and close their connections. Once they have done so, everything sent has arrived.
        let until = Instant::now() + Duration::from_secs(5);
        while !self.hosts.is_empty() && Instant::now() < until {
            self.next();
        }
    }
}

/// Derives the result of an attempt from how its hosts ended, given in chronological order.
fn outcome(ended: &[(usize, &AttemptHost)], signal: Option<i32>, regroup: bool) -> AttemptOutcome {
    let outcomes = || {
        ended.iter().filter_map(
            |(_, attempt_host)| if let Some(HostEnd::Ended(how)) = &attempt_host.end { Some(how) } else { None },
        )
    };
    let interrupted =
        outcomes().find_map(|how| if let HostOutcome::Interrupted(signal) = how { Some(*signal) } else { None });
    if let Some(signal) = signal.or(interrupted.filter(|_| !regroup)) {
        return AttemptOutcome::Interrupted(signal);
    }
    if let Some(failure) = failure(ended) {
        return AttemptOutcome::Failed(failure);
    }
    match () {
        () if interrupted.is_some() => AttemptOutcome::Regrouped,
        () if outcomes().any(|how| *how == HostOutcome::OutputLost) => AttemptOutcome::OutputLost,
        () => AttemptOutcome::Well,
    }
}

/// Returns the failure that caused the others: a lost host, or else a rank whose error blames no other failed rank.
fn failure(ended: &[(usize, &AttemptHost)]) -> Option<AttemptFailure> {
    let lost = ended.iter().find_map(|(node, attempt_host)| match &attempt_host.end {
        Some(HostEnd::Lost(why)) => {
            let text = format!("zerorun: host {} is gone: {why}", attempt_host.host);
            Some(AttemptFailure { node: *node, text, code: EXIT_LOST })
        }
        _ => None,
    });
    let failed = ended.iter().filter_map(|(node, attempt_host)| match &attempt_host.end {
        Some(HostEnd::Ended(HostOutcome::Failed { rank, headline, code, blames, .. })) => {
            let text = format!("{headline} (host {})", attempt_host.host);
            Some((*rank, *blames, AttemptFailure { node: *node, text, code: *code }))
        }
        _ => None,
    });
    let failed: Vec<_> = failed.collect();
    let blamed = |rank: usize| failed.iter().any(|(other, ..)| *other == rank);
    let first = failed.iter().find(|(rank, blames, _)| blames.is_none_or(|other| other == *rank || !blamed(other)));
    lost.or_else(|| first.or(failed.first()).map(|(.., failure)| failure.clone()))
}

/// Returns a free port, or a default port if none is found. Programs that do not use the port are unaffected.
fn free_port() -> u16 {
    let address = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).and_then(|socket| socket.local_addr());
    address.map_or(29501, |address| address.port())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    use super::super::admission::tests::hello;
    use super::super::handshake::HandshakeError;
    use super::super::join::join;
    use super::super::wire::{LauncherConnection, MAX_MESSAGE_BYTES};
    use std::net::SocketAddr;

    /// Starts the first host of a job of two hosts, without a secret.
    fn start_first_host(own: HostHello) -> SocketAddr {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let policy = ElasticPolicy { nodes: 2, min_nodes: 2, max_restarts: 0, patience: Duration::from_secs(60) };
        serve(vec![listener], None, policy, own).unwrap();
        address
    }

    fn join_host(address: SocketAddr, hello: &HostHello) -> Result<LauncherConnection, HandshakeError> {
        join(std::net::TcpStream::connect(address).unwrap(), None, hello, Duration::from_secs(60))
    }

    #[test]
    fn others_are_compared_with_the_first_host_even_where_its_own_launcher_comes_after_them() {
        let address = start_first_host(hello("a"));
        let refused = |hello: HostHello| match join_host(address, &hello) {
            Err(HandshakeError::Refused { why, .. }) => why,
            other => panic!("{other:?}"),
        };
        let other = |node: usize, word: &str| HostHello { node, launcher: 2, words: vec![word.into()], ..hello("b") };
        insta::assert_snapshot!(refused(other(1, "--help")), @"the script's arguments are `--help` on this host, with digest 8cff0500, but those on host a have digest ed663171; give the arguments that the output of host a shows");
        insta::assert_snapshot!(refused(other(0, "--help")), @"--node_rank 0 is already used by host a; give each host its own number from 0 to 1, and each job its own --master_port");
    }

    #[test]
    fn whoever_repeats_what_a_host_has_said_does_not_take_its_place_while_it_is_there() {
        let address = start_first_host(hello("a"));
        let other = HostHello { node: 1, launcher: 2, ..hello("b") };
        let here = join_host(address, &other).unwrap();
        for _ in 0..3 {
            assert!(matches!(join_host(address, &other), Err(HandshakeError::Lost(_))));
        }
        drop(here);
        // As soon as the lost connection is noticed, the host is admitted again.
        let until = Instant::now() + Duration::from_secs(60);
        while join_host(address, &other).is_err() {
            assert!(Instant::now() < until);
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    #[test]
    fn a_host_whose_clock_is_far_from_the_first_ones_or_whose_folders_differ_is_named_at_the_start() {
        let folders = BTreeMap::from([("data".into(), BTreeMap::from([("a.txt".into(), "0 bytes".to_string())]))]);
        let address = start_first_host(HostHello { folders, ..hello("a") });
        let now = clock_skew::seconds();
        let member = |node: usize, host: &str, clock: u64| {
            let (sender, heard) = channel();
            let folders =
                BTreeMap::from([("data".into(), BTreeMap::from([("a.txt".into(), format!("{} bytes", 2 * node))]))]);
            let hello = HostHello { node, clock, folders, launcher: node as u64 + 1, ..hello(host) };
            let session = join_host(address, &hello).unwrap();
            (LauncherPeer::over(session, MAX_MESSAGE_BYTES, move |heard| _ = sender.send(heard)).unwrap(), heard)
        };
        // The other host's clock is two minutes behind, and its data differ.
        let members = [member(0, "a", now), member(1, "b", now - 120)];
        let notes = members.iter().map(|(_, heard)| match heard.recv_timeout(Duration::from_secs(60)).unwrap() {
            // Its Hello may be read a second later.
            PeerEvent::Message(LauncherMessage::Start(start)) => start.note.unwrap().replace("121 s", "120 s"),
            other => panic!("{other:?}"),
        });
        let notes: Vec<String> = notes.collect();
        assert_eq!(notes[0], notes[1]);
        insta::assert_snapshot!(notes[0], @"
        zerorun: warning: the clock of host b is 120 s behind the first host's: the times of logs and checkpoints cannot be compared; synchronize both clocks with a time server
        zerorun: warning: the folder data differs between hosts a and b: a.txt is 0 bytes on a and 2 bytes on b; copy the same files to both, unless the job itself writes there
        ");
    }

    fn attempt_host(host: &str, first_rank: usize, end: HostEnd) -> AttemptHost {
        AttemptHost { first_rank, host: host.into(), values: None, end: Some(end) }
    }

    fn failed(rank: usize, blames: Option<usize>) -> HostEnd {
        let headline = format!("zerorun: rank {rank} failed first: it ended with exit code {rank} after 3.0 s");
        HostEnd::Ended(HostOutcome::Failed { rank, after: Duration::from_secs(3), headline, code: rank as u8, blames })
    }

    #[test]
    fn the_failure_that_others_follow_from_is_found() {
        let outcome_of = |ends: Vec<(usize, HostEnd)>| {
            let attempt_hosts: Vec<AttemptHost> =
                ends.into_iter().map(|(node, end)| attempt_host(["a", "b"][node], 2 * node, end)).collect();
            let nodes: Vec<(usize, &AttemptHost)> =
                attempt_hosts.iter().map(|attempt_host| (attempt_host.first_rank / 2, attempt_host)).collect();
            outcome(&nodes, None, false)
        };
        let text =
            |outcome| if let AttemptOutcome::Failed(failure) = outcome { failure.text } else { panic!("{outcome:?}") };
        // The host that ended first blames a rank of the other host.
        insta::assert_snapshot!(text(outcome_of(vec![(0, failed(0, Some(3))), (1, failed(3, None))])), @"zerorun: rank 3 failed first: it ended with exit code 3 after 3.0 s (host b)");
        insta::assert_snapshot!(text(outcome_of(vec![(0, failed(0, None)), (1, failed(3, Some(0)))])), @"zerorun: rank 0 failed first: it ended with exit code 0 after 3.0 s (host a)");
        insta::assert_snapshot!(text(outcome_of(vec![(0, failed(0, Some(2))), (1, HostEnd::Lost("it sent nothing for 8 s".into()))])), @"zerorun: host b is gone: it sent nothing for 8 s");
        assert_eq!(
            outcome_of(vec![(0, HostEnd::Ended(HostOutcome::Well)), (1, HostEnd::Ended(HostOutcome::Well))]),
            AttemptOutcome::Well
        );
        assert_eq!(
            outcome_of(vec![(0, HostEnd::Ended(HostOutcome::Well)), (1, HostEnd::Ended(HostOutcome::OutputLost))]),
            AttemptOutcome::OutputLost
        );
        assert_eq!(
            outcome_of(vec![(0, HostEnd::Ended(HostOutcome::Interrupted(15))), (1, HostEnd::Ended(HostOutcome::Well))]),
            AttemptOutcome::Interrupted(15)
        );
    }
}
