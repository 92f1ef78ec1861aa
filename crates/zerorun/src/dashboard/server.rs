//! The server of the dashboard: accepts connections, and answers each on its own thread.

use super::access::AccessRules;
use super::api::{self, RunsList};
use super::assets::ASSETS;
use super::error::DashboardError;
use super::http::{ContentKind, HttpRefusal, HttpRequest, respond};
use super::live;
use candle_zero::runs::RunsFolder;
use candle_zero::util::lock;
use serde_json::{Value, json};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

/// The maximum number of connections, and of those that receive live updates.
const MAX_CONNECTIONS: usize = 64;
const MAX_LIVE: usize = 32;
/// How long to wait after a failure to accept a connection: the process may be out of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(200);
/// How long a client whose request was refused may go on sending.
const LINGER: Duration = Duration::from_millis(500);

/// The folder of runs that is served. A job may turn out to record elsewhere than expected.
#[derive(Debug, Clone)]
pub(crate) struct ServedFolder(Arc<Mutex<PathBuf>>);

impl ServedFolder {
    pub(crate) fn new(folder: impl Into<PathBuf>) -> Self {
        Self(Arc::new(Mutex::new(folder.into())))
    }

    /// Serves another folder from now on.
    pub(crate) fn change(&self, folder: &Path) {
        let mut served = lock(&self.0);
        if *served != folder {
            folder.clone_into(&mut served);
        }
    }

    /// Returns the folder.
    pub(super) fn runs(&self) -> RunsFolder {
        RunsFolder::find(Some(lock(&self.0).clone()))
    }
}

/// What the threads of a server share.
#[derive(Debug)]
pub(super) struct DashboardState {
    pub(super) folder: ServedFolder,
    rules: AccessRules,
    pub(super) list: Mutex<RunsList>,
    connections: AtomicUsize,
    live: AtomicUsize,
    stop: AtomicBool,
}

impl DashboardState {
    /// Returns whether the server is ending.
    pub(super) fn is_ending(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}

/// A running server. It ends when it is dropped.
#[derive(Debug)]
pub(crate) struct Dashboard {
    address: SocketAddr,
    state: Arc<DashboardState>,
    thread: Option<JoinHandle<()>>,
}

impl Dashboard {
    /// Serves the runs of a folder; port 0 selects a free one.
    ///
    /// # Errors
    /// [`DashboardError`] if the port is taken or not allowed, or if there is no token.
    pub(crate) fn serve(folder: ServedFolder, bind: SocketAddr) -> Result<Self, DashboardError> {
        let failed = |source| DashboardError::Port { address: bind.ip(), port: bind.port(), source };
        let rules = AccessRules::new(bind.ip())?;
        let listener = TcpListener::bind(bind).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let state = Arc::new(DashboardState {
            folder,
            rules,
            list: Mutex::default(),
            connections: AtomicUsize::new(0),
            live: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
        });
        let shared = Arc::clone(&state);
        let accept = move || {
            for client in listener.incoming() {
                if shared.is_ending() {
                    return;
                }
                match client {
                    Ok(client) => answer_apart(client, &shared),
                    Err(_) => std::thread::sleep(ACCEPT_PAUSE),
                }
            }
        };
        let thread = std::thread::Builder::new().name("dashboard".into()).spawn(accept).map_err(failed)?;
        Ok(Self { address, state, thread: Some(thread) })
    }

    /// Returns the address to open in a browser, with the token that allows to act.
    pub(crate) fn link(&self) -> String {
        let host = match self.address.ip() {
            IpAddr::V4(Ipv4Addr::UNSPECIFIED) => candle_zero::util::host_name(),
            IpAddr::V6(Ipv6Addr::UNSPECIFIED) => candle_zero::util::host_name(),
            IpAddr::V4(address) => address.to_string(),
            IpAddr::V6(address) => format!("[{address}]"),
        };
        format!("http://{host}:{}/#token={}", self.address.port(), self.state.rules.token.text())
    }

    /// Returns whether other hosts can reach the server.
    pub(crate) fn is_open_to_others(&self) -> bool {
        !self.address.ip().is_loopback()
    }
}

impl Drop for Dashboard {
    fn drop(&mut self) {
        self.state.stop.store(true, Ordering::Relaxed);
        let here = match self.address.ip() {
            ip if !ip.is_unspecified() => ip,
            IpAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
            IpAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
        };
        // Wakes the thread. If that fails, the thread has ended, or ends with the process.
        let address = SocketAddr::new(here, self.address.port());
        if TcpStream::connect_timeout(&address, Duration::from_secs(1)).is_ok()
            && let Some(thread) = self.thread.take()
        {
            _ = thread.join();
        }
    }
}

/// A counted place among a limited number.
struct CountedPlace<'a>(&'a AtomicUsize);

impl<'a> CountedPlace<'a> {
    fn take(count: &'a AtomicUsize, most: usize) -> Option<Self> {
        let place = Self(count);
        // The place is given back at once if there are too many.
        (count.fetch_add(1, Ordering::SeqCst) < most).then_some(place)
    }
}

impl Drop for CountedPlace<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Answers a client on its own thread, unless there are too many clients.
fn answer_apart(client: TcpStream, state: &Arc<DashboardState>) {
    let shared = Arc::clone(state);
    // If there is no thread, the connection is closed.
    _ = std::thread::Builder::new().name("dashboard client".into()).spawn(move || {
        let place = CountedPlace::take(&shared.connections, MAX_CONNECTIONS);
        // A client that has left needs no answer.
        _ = answer(client, place.is_some(), &shared);
    });
}

fn answer(mut client: TcpStream, has_place: bool, state: &DashboardState) -> std::io::Result<()> {
    if !has_place {
        let refusal = HttpRefusal::new(503, format!("there are {MAX_CONNECTIONS} connections; close some pages"));
        client.set_write_timeout(Some(LINGER))?;
        return refuse(client, &refusal);
    }
    let request = match HttpRequest::read(&mut client)? {
        Ok(request) => request,
        Err(refusal) => return refuse(client, &refusal),
    };
    match route(&request, &mut client, state) {
        Ok(written) => written,
        Err(refusal) => refuse(client, &refusal),
    }
}

/// Answers a request, or returns why not.
fn route(
    request: &HttpRequest,
    client: &mut TcpStream,
    state: &DashboardState,
) -> Result<std::io::Result<()>, HttpRefusal> {
    state.rules.check(request)?;
    let has_body = request.method != "HEAD";
    let mut json = |value: &Value| respond(client, 200, ContentKind::Json, &json_bytes(value), has_body);
    match (request.method.as_str(), request.path.as_str()) {
        ("GET" | "HEAD", "/api/runs") => api::runs(state).map(|value| json(&value)),
        ("GET" | "HEAD", "/api/run") => api::run(request, state).map(|value| json(&value)),
        ("GET" | "HEAD", "/api/metrics") => api::metrics(request, state).map(|value| json(&value)),
        ("POST", "/api/request") => api::request(request, state).map(|value| json(&value)),
        ("GET", "/api/live") => {
            let Some(_place) = CountedPlace::take(&state.live, MAX_LIVE) else {
                return Err(HttpRefusal::new(503, format!("there are {MAX_LIVE} pages with live updates; close some")));
            };
            let tails = live::tails(request, state)?;
            Ok(live::stream(client, tails, state))
        }
        ("GET" | "HEAD", path) => match ASSETS.iter().find(|asset| asset.path == path) {
            Some(asset) => Ok(respond(client, 200, asset.kind, asset.bytes, has_body)),
            None => Err(HttpRefusal::new(404, "there is no such page")),
        },
        ("POST", _) => Err(HttpRefusal::new(404, "there is no such action")),
        _ => Err(HttpRefusal::new(405, "only GET, HEAD and POST are supported")),
    }
}

/// Returns JSON in which `<` is escaped, so that it stays harmless even in the middle of HTML.
pub(super) fn json_bytes(value: &Value) -> Vec<u8> {
    value.to_string().replace('<', "\\u003c").into_bytes()
}

fn refuse(mut client: TcpStream, refusal: &HttpRefusal) -> std::io::Result<()> {
    let body = json_bytes(&json!({"error": refusal.text}));
    respond(&mut client, refusal.status, ContentKind::Json, &body, true)?;
    client.shutdown(Shutdown::Write)?;
    // A client that is still sending would lose the response if the connection were closed now.
    client.set_read_timeout(Some(LINGER))?;
    let until = std::time::Instant::now() + LINGER;
    let mut part = [0; 4096];
    while std::time::Instant::now() < until && std::io::Read::read(&mut client, &mut part)? > 0 {}
    Ok(())
}
