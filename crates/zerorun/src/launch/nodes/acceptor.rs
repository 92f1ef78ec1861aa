//! The first host's port. Each connection has a few seconds and little memory to identify itself.
//!
//! ```text
//!   accept -> a thread per stranger: handshake, Hello -> the first host's own thread, which admits or refuses it
//! ```
//!
//! A stranger is a connection that has not identified itself yet. The number of strangers is limited: an additional one
//! evicts the oldest from the address with the most strangers. This bounds their cost, and strangers from one address
//! do not keep out those from another.

use super::handshake::{self, HandshakeError};
use super::secret::{JobSecret, SECRET};
use super::wire::{HostHello, LauncherConnection, LauncherMessage, MAX_MESSAGE_BYTES, ReadDeadline};
use crate::launch::console::eprint;
use candle_zero::util::lock;
use rustix::process::{Resource, getrlimit};
use std::collections::BTreeMap;
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// How long a stranger may take to identify itself.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// The pause in accepting connections after a system error.
const ACCEPT_RETRY_INTERVAL: Duration = Duration::from_millis(200);
/// The maximum size in bytes of a message from a peer that has not proved that it belongs to the job.
pub(super) const MAX_UNAUTHENTICATED_BYTES: usize = 1 << 20;
/// The maximum number of strangers, and the divisor of this process's open file limit that gives a second maximum.
const MAX_STRANGERS: usize = 64;
const OPEN_FILES_DIVISOR: u64 = 4;
/// The maximum number of messages about refused hosts, so that a program that keeps connecting does not fill the disk.
const MAX_REFUSAL_MESSAGES: usize = 50;

/// A host that has sent its Hello.
pub(super) struct JoiningHost {
    /// The number of its connection.
    pub(super) number: u64,
    pub(super) from: SocketAddr,
    pub(super) session: LauncherConnection,
    pub(super) hello: HostHello,
}

/// An acceptor of connections, which bounds the number of strangers.
pub(super) struct HostAcceptor {
    secret: Option<JobSecret>,
    max_strangers: usize,
    strangers: Mutex<BTreeMap<u64, (IpAddr, Arc<TcpStream>)>>,
    next_number: AtomicU64,
    refusals: AtomicUsize,
}

impl HostAcceptor {
    pub(super) fn new(secret: Option<JobSecret>) -> Self {
        let files = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let max_strangers = usize::try_from(files / OPEN_FILES_DIVISOR).unwrap_or(MAX_STRANGERS);
        Self {
            secret,
            max_strangers: max_strangers.clamp(1, MAX_STRANGERS),
            strangers: Mutex::default(),
            next_number: AtomicU64::new(0),
            refusals: AtomicUsize::new(0),
        }
    }

    /// Accepts strangers on separate threads. `on_join` receives those that have sent their Hello.
    ///
    /// # Errors
    /// Fails if the system cannot start the thread that accepts connections.
    pub(super) fn open(
        self: &Arc<Self>,
        listener: TcpListener,
        on_join: impl Fn(JoiningHost) + Clone + Send + 'static,
    ) -> std::io::Result<()> {
        let acceptor = Arc::clone(self);
        let accept = move || {
            loop {
                let accepted = listener
                    .accept()
                    .and_then(|(stream, from)| acceptor.accept_stranger(stream, from, on_join.clone()));
                // For example, file descriptors or threads have run out. A stranger is evicted to free some.
                if accepted.is_err() {
                    acceptor.evict_one();
                    std::thread::sleep(ACCEPT_RETRY_INTERVAL);
                }
            }
        };
        std::thread::Builder::new().name("lets hosts in".into()).spawn(accept).map(drop)
    }

    fn accept_stranger(
        self: &Arc<Self>,
        stream: TcpStream,
        from: SocketAddr,
        on_join: impl Fn(JoiningHost) + Send + 'static,
    ) -> std::io::Result<()> {
        let (acceptor, number) = (Arc::clone(self), self.next_number.fetch_add(1, Ordering::Relaxed));
        let stream = Arc::new(stream);
        while lock(&self.strangers).len() >= self.max_strangers {
            self.evict_one();
        }
        lock(&self.strangers).insert(number, (from.ip(), Arc::clone(&stream)));
        let identify = move || match acceptor.identify(stream) {
            Ok((session, hello)) => on_join(JoiningHost { number, from, session, hello }),
            Err(error) => {
                acceptor.forget(number);
                if let HandshakeError::Refused { host, why } = error {
                    acceptor.report_refused(&host, from, &why);
                }
            }
        };
        let spawned = std::thread::Builder::new().name("hears a stranger".into()).spawn(identify);
        spawned.map(drop).inspect_err(|_| self.forget(number))
    }

    fn identify(&self, stream: Arc<TcpStream>) -> Result<(LauncherConnection, HostHello), HandshakeError> {
        let wait = ReadDeadline::Until(Instant::now() + HANDSHAKE_TIMEOUT);
        let mut session = LauncherConnection::over(stream).map_err(|error| HandshakeError::Lost(error.to_string()))?;
        handshake::receive(&mut session, self.secret.as_ref(), wait)?;
        let max_bytes = if self.secret.is_some() { MAX_MESSAGE_BYTES } else { MAX_UNAUTHENTICATED_BYTES };
        match session.next(max_bytes, wait).map_err(HandshakeError::Lost)? {
            LauncherMessage::Hello(hello) => Ok((session, hello)),
            _ => Err(HandshakeError::NoLauncher),
        }
    }

    /// Removes connection `number` from the strangers.
    pub(super) fn forget(&self, number: u64) {
        lock(&self.strangers).remove(&number);
    }

    /// Evicts the oldest stranger from the address with the most strangers.
    fn evict_one(&self) {
        let mut strangers = lock(&self.strangers);
        let mut counts = BTreeMap::<IpAddr, usize>::new();
        strangers.values().for_each(|(from, _)| *counts.entry(*from).or_default() += 1);
        let Some((address, _)) = counts.into_iter().max_by_key(|(_, number)| *number) else { return };
        let oldest = strangers.iter().find(|(_, (from, _))| *from == address).map(|(number, _)| *number);
        if let Some((_, stream)) = oldest.and_then(|number| strangers.remove(&number)) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// Reports that a host is refused, up to a limited number of times.
    pub(super) fn report_refused(&self, host: &str, from: SocketAddr, why: &str) {
        match self.refusals.fetch_add(1, Ordering::Relaxed) {
            refusals if refusals < MAX_REFUSAL_MESSAGES => {
                eprint(&format!("zerorun: host {host} ({}) was refused: {why}", from.ip()))
            }
            MAX_REFUSAL_MESSAGES => eprint(&format!(
                "zerorun: {MAX_REFUSAL_MESSAGES} connections were refused; no more are reported. If these are not your hosts, \
                 check who can reach this port, and set {SECRET}"
            )),
            _ => {}
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::sync::mpsc::channel;

    /// Returns an acceptor, its address, and the receiver of the hosts that join.
    fn acceptor(secret: Option<JobSecret>) -> (Arc<HostAcceptor>, SocketAddr, std::sync::mpsc::Receiver<JoiningHost>) {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let (address, acceptor) = (listener.local_addr().unwrap(), Arc::new(HostAcceptor::new(secret)));
        let (sender, arrivals) = channel();
        acceptor.open(listener, move |arrival| _ = sender.send(arrival)).unwrap();
        (acceptor, address, arrivals)
    }

    /// Returns whether the other side has closed the connection.
    fn is_closed(mut stream: &TcpStream) -> bool {
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let mut buffer = [0; 4096];
        loop {
            match stream.read(&mut buffer) {
                Ok(0) => return true,
                Ok(_) => {}
                Err(error) => return error.kind() == std::io::ErrorKind::ConnectionReset,
            }
        }
    }

    #[test]
    fn the_oldest_stranger_is_sent_away_for_one_more() {
        let (acceptor, address, _arrivals) = acceptor(None);
        let max_strangers = acceptor.max_strangers;
        let all: Vec<TcpStream> = (0..max_strangers + 3).map(|_| TcpStream::connect(address).unwrap()).collect();
        for first in &all[..3] {
            assert!(is_closed(first));
        }
        // A stranger is evicted before its replacement is added to the list.
        let until = Instant::now() + Duration::from_secs(60);
        while !lock(&acceptor.strangers).contains_key(&(max_strangers as u64 + 2)) && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
        }
        let remaining: Vec<u64> = lock(&acceptor.strangers).keys().copied().collect();
        assert_eq!(remaining, (3..max_strangers as u64 + 3).collect::<Vec<_>>(), "the oldest went first");
    }

    #[test]
    fn those_of_one_address_do_not_keep_another_out() {
        let acceptor = HostAcceptor::new(None);
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let stream = || Arc::new(TcpStream::connect(listener.local_addr().unwrap()).unwrap());
        let from = |last: u8| IpAddr::from([10, 0, 0, last]);
        for (number, last) in [(0, 7), (1, 1), (2, 1), (3, 2)] {
            lock(&acceptor.strangers).insert(number, (from(last), stream()));
        }
        let remaining = |acceptor: &HostAcceptor| lock(&acceptor.strangers).keys().copied().collect::<Vec<_>>();
        acceptor.evict_one();
        assert_eq!(remaining(&acceptor), [0, 2, 3]);
        (0..4).for_each(|_| acceptor.evict_one());
        assert_eq!(remaining(&acceptor), [0; 0]);
    }

    #[test]
    fn a_stranger_that_says_too_much_or_only_gives_signs_of_life_is_sent_away() {
        use std::io::Write;
        let (acceptor, address, _arrivals) = acceptor(None);
        let inputs: [&[u8]; 6] =
            [&[b'a'; 8192], b"\"Beat\"\n", b"GET / HTTP/1.1\r\n\r\n", b"{\"Hello\":{}}\n", b"\n", &[0xff, 0, b'\n']];
        for line in inputs {
            let mut stream = TcpStream::connect(address).unwrap();
            let _ = stream.write_all(line);
            assert!(is_closed(&stream), "{line:?}");
        }
        let until = Instant::now() + Duration::from_secs(60);
        while !lock(&acceptor.strangers).is_empty() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(lock(&acceptor.strangers).len(), 0);
    }
}
