//! Serves the last value of every tag to Prometheus on a port of this host.

use super::{Monitor, MonitorEvent};
use crate::error::{Error, MonitorError, Result};
use crate::notice::emit;
use crate::util::lock;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The name of the environment variable for the port, which `zerorun --prometheus` sets.
#[doc(hidden)]
pub const PORT: &str = "CANDLE_ZERO_PROMETHEUS";

/// The time limit for one client.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(1);
/// The maximum size of a request, in bytes.
const MAX_REQUEST_BYTES: usize = 8 << 10;

/// A monitor that answers `GET /metrics` on 127.0.0.1, on its own thread. Training never waits for it.
#[derive(Debug)]
pub struct Prometheus {
    address: SocketAddr,
    last: Arc<Mutex<LastValues>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

/// The value and step of each tag.
type LastValues = BTreeMap<String, (f64, u64)>;

/// The number of monitors of this kind in this process.
static LISTENING_MONITORS: AtomicUsize = AtomicUsize::new(0);

impl Prometheus {
    /// Listens on a port; 0 selects a free one. The address is printed.
    ///
    /// # Errors
    /// [`MonitorError::PrometheusPort`] if the port is taken or not allowed, or if the monitor's thread cannot be
    /// started.
    pub fn listen(port: u16) -> Result<Self> {
        let error = |source| Error::from(MonitorError::PrometheusPort { port, source });
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).map_err(error)?;
        let address = listener.local_addr().map_err(error)?;
        let (last, stop) = (Arc::<Mutex<LastValues>>::default(), Arc::<AtomicBool>::default());
        let (values, stopped) = (last.clone(), stop.clone());
        let serve = move || {
            for client in listener.incoming() {
                if stopped.load(Ordering::Relaxed) {
                    return;
                }
                match client {
                    // A client that disconnects must not affect training.
                    Ok(client) => _ = answer(client, &values),
                    // The process may be out of file descriptors, so wait before trying again.
                    Err(_) => std::thread::sleep(CLIENT_TIMEOUT),
                }
            }
        };
        let thread = std::thread::Builder::new().name("prometheus".into()).spawn(serve).map_err(error)?;
        LISTENING_MONITORS.fetch_add(1, Ordering::Relaxed);
        emit(&format!("metrics for Prometheus: http://{address}/metrics"));
        Ok(Self { address, last, stop, thread: Some(thread) })
    }

    /// Returns the port that `CANDLE_ZERO_PROMETHEUS` requests.
    ///
    /// # Errors
    /// [`MonitorError::PrometheusVariable`] if the value is not a port.
    pub(crate) fn requested_port() -> Result<Option<u16>> {
        let Some(value) = std::env::var_os(PORT) else { return Ok(None) };
        let value = value.to_string_lossy().into_owned();
        match value.parse() {
            Ok(port) => Ok(Some(port)),
            Err(_) => Err(MonitorError::PrometheusVariable { name: PORT, value }.into()),
        }
    }

    /// Returns whether this process already has such a monitor, for another engine.
    pub(crate) fn is_listening() -> bool {
        LISTENING_MONITORS.load(Ordering::Relaxed) > 0
    }

    /// Returns the address that the monitor listens on.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Monitor for Prometheus {
    fn write(&mut self, events: &[MonitorEvent]) -> Result<()> {
        let mut last = lock(&self.last);
        for MonitorEvent { tag, value, step } in events {
            last.insert(tag.clone(), (*value, *step));
        }
        Ok(())
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        LISTENING_MONITORS.fetch_sub(1, Ordering::Relaxed);
        self.stop.store(true, Ordering::Relaxed);
        // Wakes the thread. If that fails, the thread has ended, or ends with the process.
        if TcpStream::connect_timeout(&self.address, CLIENT_TIMEOUT).is_ok()
            && let Some(thread) = self.thread.take()
        {
            _ = thread.join();
        }
    }
}

fn answer(mut client: TcpStream, last: &Mutex<LastValues>) -> std::io::Result<()> {
    let deadline = Instant::now() + CLIENT_TIMEOUT;
    client.set_write_timeout(Some(CLIENT_TIMEOUT))?;
    let (mut request, mut chunk) = (Vec::new(), [0; 1024]);
    // Reads up to the end of the headers, so that a client that is still sending is not cut off.
    while !request.windows(4).any(|end| end == b"\r\n\r\n") && request.len() < MAX_REQUEST_BYTES {
        let remaining = deadline.saturating_duration_since(Instant::now());
        client.set_read_timeout(Some(remaining.max(Duration::from_millis(1))))?;
        let read = client.read(&mut chunk)?;
        if read == 0 || remaining.is_zero() {
            return Ok(());
        }
        request.extend_from_slice(&chunk[..read]);
    }
    // A scraper may add a query.
    let requests = |path: &str| {
        let rest = request.strip_prefix(format!("GET {path}").as_bytes());
        rest.is_some_and(|rest| rest.starts_with(b" HTTP/") || rest.starts_with(b"?"))
    };
    let (status, body) = match requests("/metrics") || requests("/") {
        true => ("200 OK", text(&lock(last).clone())),
        false => ("404 Not Found", "only GET /metrics is supported\n".to_string()),
    };
    let length = body.len();
    let head = "Content-Type: text/plain; version=0.0.4; charset=utf-8\r\nConnection: close\r\nContent-Length:";
    client.write_all(format!("HTTP/1.1 {status}\r\n{head} {length}\r\n\r\n{body}").as_bytes())
}

/// Formats the values in Prometheus's text format. A tag becomes the value of a label, not part of a metric name: a
/// label value may be any text, so different tags stay different.
fn text(last: &LastValues) -> String {
    let mut values = "# HELP candle_zero_value Last value of a tag.\n# TYPE candle_zero_value gauge\n".to_string();
    let mut steps =
        "# HELP candle_zero_step Step of the last value of a tag; for the engine's own tags, the number of samples \
         processed by all ranks.\n\
                     # TYPE candle_zero_step gauge\n"
            .to_string();
    for (tag, (value, step)) in last {
        let tag = tag.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
        let value = match *value {
            f64::INFINITY => "+Inf".into(),
            f64::NEG_INFINITY => "-Inf".into(),
            value => format!("{value:?}"),
        };
        // Writing to a String cannot fail.
        _ = writeln!(values, "candle_zero_value{{tag=\"{tag}\"}} {value}");
        _ = writeln!(steps, "candle_zero_step{{tag=\"{tag}\"}} {step}");
    }
    values + &steps
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn get(address: SocketAddr, request: &str) -> String {
        let mut client = TcpStream::connect(address).unwrap();
        client.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        client.read_to_string(&mut answer).unwrap();
        answer
    }

    #[test]
    fn the_last_values_are_served_to_this_host() {
        let mut prometheus = Prometheus::listen(0).unwrap();
        let address = prometheus.address();
        assert!(address.ip().is_loopback());
        prometheus
            .write(&[MonitorEvent::new("Train/Samples/lr", 0.5, 8), MonitorEvent::new("a\"\\\n", f64::INFINITY, 1)])
            .unwrap();
        prometheus.write(&[MonitorEvent::new("Train/Samples/lr", 1e-7, 16)]).unwrap();
        let answer = get(address, "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 200 OK\r\n") && head.ends_with(&format!(": {}", body.len())), "{head}");
        insta::assert_snapshot!(body, @r#"
        # HELP candle_zero_value Last value of a tag.
        # TYPE candle_zero_value gauge
        candle_zero_value{tag="Train/Samples/lr"} 1e-7
        candle_zero_value{tag="a\"\\\n"} +Inf
        # HELP candle_zero_step Step of the last value of a tag; for the engine's own tags, the number of samples processed by all ranks.
        # TYPE candle_zero_step gauge
        candle_zero_step{tag="Train/Samples/lr"} 16
        candle_zero_step{tag="a\"\\\n"} 1
        "#);
        assert!(get(address, "POST /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 404 "));
        // Dropping the monitor frees the port.
        drop(prometheus);
        assert_eq!(Prometheus::listen(address.port()).unwrap().address(), address);
    }

    #[test]
    fn clients_that_say_nothing_or_too_much_hold_up_neither_training_nor_others() {
        let mut prometheus = Prometheus::listen(0).unwrap();
        let silent = TcpStream::connect(prometheus.address()).unwrap();
        let start = Instant::now();
        prometheus.write(&[MonitorEvent::new("x", 1.0, 1)]).unwrap();
        assert!(start.elapsed() < CLIENT_TIMEOUT / 2, "{:?}", start.elapsed());
        let mut endless = TcpStream::connect(prometheus.address()).unwrap();
        _ = endless.write_all(&[b'x'; 4 * MAX_REQUEST_BYTES]);
        assert!(get(prometheus.address(), "GET / HTTP/1.0\r\n\r\n").contains("candle_zero_value{tag=\"x\"} 1.0\n"));
        drop((silent, endless));
    }

    #[test]
    fn a_port_that_is_taken_is_named() {
        let other = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = other.local_addr().unwrap().port();
        let error = Prometheus::listen(port).unwrap_err().to_string().replace(&port.to_string(), "PORT");
        insta::assert_snapshot!(error, @"cannot serve metrics for Prometheus on 127.0.0.1, port PORT: Address already in use (os error 98); give another port, or 0 for a free one");
    }
}
