//! The server of the dashboard: accepts connections, and answers each on its own thread.

use super::access::AccessRules;
use super::api;
use super::assets::ASSETS;
use super::error::DashboardError;
use super::http::{ContentKind, HttpRefusal, HttpRequest, json_bytes, respond};
use super::live;
use super::server_state::{ServedFolder, SharedServerState};
use super::sweeps::SweepReader;
use serde_json::{Value, json};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

/// The maximum number of connections, and of those that receive live updates.
const MAX_CONNECTIONS: usize = 64;
const MAX_LIVE: usize = 32;
/// The increment of the niceness of the server's threads.
const NICENESS: i32 = 10;
/// The pause after a failure to accept a connection: the process may be out of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(200);
/// The time for which a client whose request was refused may continue to send.
const LINGER: Duration = Duration::from_millis(500);

/// A running server. It ends when it is dropped.
#[derive(Debug)]
pub(crate) struct Dashboard {
    address: SocketAddr,
    state: Arc<SharedServerState>,
    thread: Option<JoinHandle<()>>,
}

impl Dashboard {
    /// Serves the runs in a folder, and the sweeps that the reader finds. Port 0 selects a free port.
    ///
    /// # Errors
    /// Fails if the port is taken or not allowed, or if no token can be created.
    pub(crate) fn serve(
        folder: ServedFolder,
        sweeps: Option<Box<dyn SweepReader>>,
        bind: SocketAddr,
    ) -> Result<Self, DashboardError> {
        let failed = |source| DashboardError::Port { address: bind.ip(), port: bind.port(), source };
        let rules = AccessRules::new(bind.ip())?;
        let listener = TcpListener::bind(bind).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let state = Arc::new(SharedServerState {
            folder,
            rules,
            sweeps,
            list: Mutex::default(),
            connections: AtomicUsize::new(0),
            live: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
        });
        let shared = Arc::clone(&state);
        let accept = move || {
            yield_to_training();
            for client in listener.incoming() {
                if shared.is_ending() {
                    return;
                }
                match client {
                    Ok(client) => answer_on_thread(client, &shared),
                    Err(_) => std::thread::sleep(ACCEPT_PAUSE),
                }
            }
        };
        let thread = std::thread::Builder::new().name("dashboard".into()).spawn(accept).map_err(failed)?;
        Ok(Self { address, state, thread: Some(thread) })
    }

    /// Returns the address to open in a browser, with the token that authorizes requests.
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

/// Lowers the priority of this thread and of those that it starts, so that ranks on this host do not wait for them.
/// On systems other than Linux, this would lower the priority of the whole process.
fn yield_to_training() {
    if cfg!(target_os = "linux") {
        // If this fails, the thread keeps its old priority, which does no harm.
        _ = rustix::process::nice(NICENESS);
    }
}

/// One of a limited number of permits for connections, which is given back when the value is dropped.
struct ConnectionPermit<'a>(&'a AtomicUsize);

impl<'a> ConnectionPermit<'a> {
    fn take(count: &'a AtomicUsize, max: usize) -> Option<Self> {
        let permit = Self(count);
        // If there are too many, the permit is given back immediately.
        (count.fetch_add(1, Ordering::SeqCst) < max).then_some(permit)
    }
}

impl Drop for ConnectionPermit<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Answers a client on its own thread. If there are too many clients, the request is refused.
fn answer_on_thread(client: TcpStream, state: &Arc<SharedServerState>) {
    let shared = Arc::clone(state);
    // If no thread can be started, the connection is closed.
    _ = std::thread::Builder::new().name("dashboard client".into()).spawn(move || {
        let permit = ConnectionPermit::take(&shared.connections, MAX_CONNECTIONS);
        // A client that has disconnected needs no answer.
        _ = answer(client, permit.is_some(), &shared);
    });
}

fn answer(mut client: TcpStream, has_permit: bool, state: &SharedServerState) -> std::io::Result<()> {
    if !has_permit {
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

/// Answers a request, or returns the reason why it is refused.
fn route(
    request: &HttpRequest,
    client: &mut TcpStream,
    state: &SharedServerState,
) -> Result<std::io::Result<()>, HttpRefusal> {
    state.rules.check(request)?;
    let has_body = request.method != "HEAD";
    let mut json = |value: &Value| respond(client, 200, ContentKind::Json, &json_bytes(value), has_body);
    match (request.method.as_str(), request.path.as_str()) {
        ("GET" | "HEAD", "/api/runs") => api::runs(state).map(|value| json(&value)),
        ("GET" | "HEAD", "/api/run") => api::run(request, state).map(|value| json(&value)),
        ("GET" | "HEAD", "/api/sweep") => api::sweep(request, state).map(|value| json(&value)),
        ("GET" | "HEAD", "/api/metrics") => api::metrics(request, state).map(|value| json(&value)),
        ("POST", "/api/request") => api::request(request, state).map(|value| json(&value)),
        ("GET", "/api/live") => {
            let Some(_permit) = ConnectionPermit::take(&state.live, MAX_LIVE) else {
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

fn refuse(mut client: TcpStream, refusal: &HttpRefusal) -> std::io::Result<()> {
    let body = json_bytes(&json!({"error": refusal.text}));
    respond(&mut client, refusal.status, ContentKind::Json, &body, true)?;
    client.shutdown(Shutdown::Write)?;
    // A client that is still sending would lose the response if the connection were closed now.
    client.set_read_timeout(Some(LINGER))?;
    let deadline = std::time::Instant::now() + LINGER;
    let mut buffer = [0; 4096];
    while std::time::Instant::now() < deadline && std::io::Read::read(&mut client, &mut buffer)? > 0 {}
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::io::{Read as _, Write as _};
    use std::path::Path;

    const ID: &str = "x-20260131-235959";

    /// Writes the record of a run. A test can lock the folder to act as the process that records the run.
    fn record(runs: &Path) {
        let folder = runs.join(ID);
        std::fs::create_dir_all(&folder).unwrap();
        let info = json!({"format": 1, "name": "</script><b>", "created": 1.0, "world_size": 2, "configuration": {"a": {"b": 1}}});
        std::fs::write(folder.join("run.json"), info.to_string()).unwrap();
        let line = |step: u64| format!("{{\"step\":{step},\"time\":{step},\"loss\":0.5}}\n");
        std::fs::write(folder.join("metrics.jsonl"), (1..=3000).map(line).collect::<String>()).unwrap();
        std::fs::write(folder.join("events.jsonl"), "{\"event\":\"start\",\"time\":1}\n").unwrap();
        std::fs::write(folder.join("ranks.json"), json!({"answers": ["stop"], "ranks": []}).to_string()).unwrap();
        std::fs::write(folder.join("log.txt"), "<img src=x>\n").unwrap();
    }

    fn serve(runs: &Path) -> Dashboard {
        Dashboard::serve(ServedFolder::new(runs), None, (Ipv4Addr::LOCALHOST, 0).into()).unwrap()
    }

    fn send(dashboard: &Dashboard, request: &str) -> String {
        let mut client = TcpStream::connect(dashboard.address).unwrap();
        client.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        client.read_to_string(&mut answer).unwrap();
        answer
    }

    fn get(dashboard: &Dashboard, path: &str) -> (u16, String) {
        let answer = send(dashboard, &format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n"));
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
    }

    fn post(dashboard: &Dashboard, path: &str) -> (u16, Value) {
        let token = dashboard.state.rules.token.text();
        let head = format!("Host: localhost\r\nAuthorization: Bearer {token}\r\nContent-Length: 0");
        let answer = send(dashboard, &format!("POST {path} HTTP/1.1\r\n{head}\r\n\r\n"));
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        (head.split(' ').nth(1).unwrap().parse().unwrap(), serde_json::from_str(body).unwrap())
    }

    #[test]
    fn the_page_and_the_records_are_served_with_a_strict_policy() {
        let dir = tempfile::tempdir().unwrap();
        record(dir.path());
        let dashboard = serve(dir.path());
        for asset in ASSETS {
            let answer = send(&dashboard, &format!("GET {} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", asset.path));
            assert!(
                answer.starts_with("HTTP/1.1 200 OK\r\n")
                    && answer.ends_with(std::str::from_utf8(asset.bytes).unwrap())
            );
        }
        let head = send(&dashboard, "HEAD / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n");
        assert!(head.ends_with("\r\n\r\n"), "{head}");
        let length = ASSETS[0].bytes.len().to_string();
        insta::assert_snapshot!(head.trim_end().replace(&length, "LENGTH"), @r"
        HTTP/1.1 200 OK
        Content-Type: text/html; charset=utf-8
        Content-Length: LENGTH
        Connection: close
        Cache-Control: no-store
        Content-Security-Policy: default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'
        X-Content-Type-Options: nosniff
        X-Frame-Options: DENY
        Referrer-Policy: no-referrer
        Cross-Origin-Resource-Policy: same-origin
        Cross-Origin-Opener-Policy: same-origin
        ");
        let (status, body) = get(&dashboard, "/api/runs");
        let list: Value = serde_json::from_str(&body).unwrap();
        assert_eq!(
            (status, list["runs"][0]["id"].as_str(), list["runs"][0]["steps"].as_u64()),
            (200, Some(ID), Some(3000))
        );
        let (_, body) = get(&dashboard, &format!("/api/run?id={ID}"));
        assert!(!body.contains('<'), "{body}");
        let run: Value = serde_json::from_str(&body).unwrap();
        assert_eq!(
            (run["log"][0].as_str(), &run["config"][0]),
            (Some("<img src=x>"), &json!(["configuration.a.b", 1]))
        );
        assert_eq!(run["info"]["name"], "</script><b>");
        let (_, body) = get(&dashboard, &format!("/api/metrics?id={ID}&rows=100"));
        let metrics: Value = serde_json::from_str(&body).unwrap();
        assert_eq!(metrics["rows"]["steps"].as_array().unwrap().len(), 100);
        assert_eq!(
            metrics["position"],
            json!(std::fs::metadata(dir.path().join(ID).join("metrics.jsonl")).unwrap().len())
        );
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn the_threads_of_the_server_have_a_lower_priority_than_those_of_a_job() {
        let niceness = |folder: &Path| {
            let stat = std::fs::read_to_string(folder.join("stat")).ok()?;
            let (_, after_name) = stat.rsplit_once(") ")?;
            after_name.split(' ').nth(16)?.parse::<i32>().ok()
        };
        let dir = tempfile::tempdir().unwrap();
        let dashboard = serve(dir.path());
        // An answer comes from a thread that the server's thread has started.
        assert_eq!(get(&dashboard, "/api/runs").0, 200);
        let test_niceness = niceness(Path::new("/proc/thread-self")).unwrap();
        let threads = std::fs::read_dir("/proc/self/task").unwrap().map(|thread| thread.unwrap().path());
        let server_niceness: Vec<i32> = threads
            .filter(|folder| std::fs::read_to_string(folder.join("comm")).is_ok_and(|name| name == "dashboard\n"))
            .filter_map(|folder| niceness(&folder))
            .collect();
        assert!(
            server_niceness.contains(&(test_niceness + NICENESS).min(19)),
            "{server_niceness:?}, the test has {test_niceness}"
        );
    }

    #[test]
    fn what_does_not_exist_or_is_not_allowed_is_refused_with_a_reason() {
        let dir = tempfile::tempdir().unwrap();
        record(dir.path());
        std::fs::write(dir.path().join("secret"), "x").unwrap();
        std::fs::create_dir(dir.path().join("damaged")).unwrap();
        std::fs::write(dir.path().join("damaged/run.json"), "{").unwrap();
        let dashboard = serve(&dir.path().join("."));
        for id in ["", ".", "..", "../x", "/etc", "secret", "nothing", "x-20260131-235959/", "%2e%2e", "a%00b"] {
            assert_eq!(get(&dashboard, &format!("/api/run?id={id}")).0, 404, "{id}");
        }
        for (path, status) in [
            ("/nothing", 404),
            ("/api/nothing", 404),
            ("/../src/main.rs", 404),
            ("/api/run?id=damaged", 500),
            ("/api/live?run=x", 400),
            ("/api/live?run=x@1", 400),
            ("/api/live?run=x@0.0.0.0.0", 404),
            ("/api/metrics?id=x-20260131-235959&rows=many", 400),
        ] {
            let (found, body) = get(&dashboard, path);
            assert_eq!(found, status, "{path}: {body}");
            assert!(body.starts_with("{\"error\":"), "{body}");
        }
        let status = |request: &str| send(&dashboard, request).split(' ').nth(1).unwrap_or_default().to_owned();
        assert_eq!(status("DELETE / HTTP/1.1\r\nHost: localhost\r\n\r\n"), "405");
        assert_eq!(status("GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n"), "403");
        assert_eq!(status("GET / HTTP/1.1\r\n\r\n"), "403");
        assert_eq!(status("POST /api/request?id=x&what=stop HTTP/1.1\r\nHost: localhost\r\n\r\n"), "403");
        assert_eq!(status("nonsense\r\n\r\n"), "400");
        assert_eq!(status(&format!("GET / HTTP/1.1\r\nx: {}\r\n\r\n", "x".repeat(20_000))), "431");
        assert_eq!(status("POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2000\r\n\r\n"), "413");
    }

    #[test]
    fn requests_reach_a_running_program_that_answers_them_and_no_other() {
        let dir = tempfile::tempdir().unwrap();
        record(dir.path());
        let dashboard = serve(dir.path());
        let folder = dir.path().join(ID);
        let (status, answer) = post(&dashboard, &format!("/api/request?id={ID}&what=stop"));
        assert_eq!(
            (status, answer["error"].as_str()),
            (409, Some("run x-20260131-235959 is not running; its state is killed"))
        );
        let _lock = candle_zero::files::FolderLock::acquire(&folder, Duration::ZERO).unwrap();
        assert_eq!(post(&dashboard, &format!("/api/request?id={ID}&what=save")).0, 409);
        assert_eq!(post(&dashboard, &format!("/api/request?id={ID}&what=remove")).0, 400);
        assert_eq!(post(&dashboard, "/api/request?id=y&what=stop").0, 404);
        let has = |name: &str| folder.join(name).exists();
        assert!(!has("stop.request") && !has("save.request"));
        assert_eq!(post(&dashboard, &format!("/api/request?id={ID}&what=stop")).0, 200);
        assert!(has("stop.request") && !has("save.request"));
    }

    #[test]
    fn what_is_appended_arrives_as_events_and_the_server_ends_with_its_clients() {
        let dir = tempfile::tempdir().unwrap();
        record(dir.path());
        let dashboard = serve(dir.path());
        let metrics = dir.path().join(ID).join("metrics.jsonl");
        let length = std::fs::metadata(&metrics).unwrap().len();
        let mut client = TcpStream::connect(dashboard.address).unwrap();
        let request = format!("GET /api/live?run={ID}@{length}.0.0.0.0 HTTP/1.1\r\nHost: localhost\r\n\r\n");
        client.write_all(request.as_bytes()).unwrap();
        let mut lines = std::io::BufRead::lines(std::io::BufReader::new(client));
        let mut next = || -> Value {
            let data =
                lines.by_ref().map(Result::unwrap).find_map(|line| line.strip_prefix("data: ").map(str::to_owned));
            serde_json::from_str::<Value>(&data.unwrap()).unwrap()["runs"][0].clone()
        };
        let first = next();
        assert_eq!((first["run"]["steps"].as_u64(), first["log"][0].as_str()), (Some(3000), Some("<img src=x>")));
        assert!(first["rows"].is_null() && first["ranks"]["answers"][0] == "stop");
        let mut file = std::fs::OpenOptions::new().append(true).open(&metrics).unwrap();
        let line = |step: u64| format!("{{\"step\":{step},\"time\":{step},\"loss\":0.25}}\n");
        file.write_all((3001..=4000).map(line).collect::<String>().as_bytes()).unwrap();
        let news = loop {
            let news = next();
            if !news["rows"].is_null() {
                break news;
            }
        };
        assert_eq!((news["after"].as_u64(), news["rows"]["steps"].as_array().unwrap().len()), (Some(3000), 100));
        assert_eq!(news["rows"]["steps"][99], 4000);
        let address = dashboard.address;
        drop(dashboard);
        // The stream ends too.
        lines.for_each(drop);
        let again = Dashboard::serve(ServedFolder::new(dir.path()), None, address).unwrap();
        assert_eq!(again.address, address);
    }

    #[test]
    fn more_connections_than_allowed_are_refused_and_places_are_given_back() {
        let count = AtomicUsize::new(0);
        let permits: Vec<_> = (0..3).map(|_| ConnectionPermit::take(&count, 2)).collect();
        assert_eq!(permits.iter().map(Option::is_some).collect::<Vec<_>>(), [true, true, false]);
        drop(permits);
        assert!(ConnectionPermit::take(&count, 1).is_some() && count.load(Ordering::SeqCst) == 0);

        let dir = tempfile::tempdir().unwrap();
        let dashboard = serve(dir.path());
        dashboard.state.connections.store(MAX_CONNECTIONS, Ordering::SeqCst);
        let refused = send(&dashboard, "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n");
        assert!(refused.starts_with("HTTP/1.1 503 ") && refused.contains("close some pages"), "{refused}");
        dashboard.state.connections.store(0, Ordering::SeqCst);
        dashboard.state.live.store(MAX_LIVE, Ordering::SeqCst);
        assert_eq!((get(&dashboard, "/api/live").0, get(&dashboard, "/api/runs").0), (503, 200));
    }

    #[test]
    fn a_port_that_is_taken_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let other = serve(dir.path());
        let error = Dashboard::serve(ServedFolder::new(dir.path()), None, other.address).unwrap_err().to_string();
        let port = other.address.port().to_string();
        insta::assert_snapshot!(error.replace(&port, "PORT"), @"cannot serve the dashboard on 127.0.0.1, port PORT: Address already in use (os error 98); give another port, or 0 for a free one");
    }
}
