//! A local Hugging Face Hub with one repository: it lists files, redirects to them, serves ranges of them, and
//! simulates faults.

use candle_zero::serde_json::json;
use std::collections::{BTreeMap, HashMap};
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

pub const NAME: &str = "org/tiny";
pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
pub const TOKEN: &str = "hf_right";

/// The faults that the server simulates.
#[derive(Debug, Clone, Default)]
pub struct Faults {
    /// The file ("" for the list) for which every request is refused, with the status, code and message of the
    /// response.
    pub refused: Option<(&'static str, u16, &'static str, &'static str)>,
    /// The positions in the file at which successive responses with the weights are cut off.
    pub cut_positions: Vec<usize>,
    /// The number of responses that contain a wrong byte.
    pub wrong_bytes: usize,
    /// Whether ranges are unsupported. Every response then contains the complete file.
    pub no_ranges: bool,
    /// The number of requests for files that are answered with 503.
    pub busy: usize,
    /// A false size that is reported for the weights.
    pub size: Option<u64>,
    /// Whether only the right token is accepted.
    pub is_private: bool,
    /// The pause before the bytes of the weights are sent.
    pub pause: Duration,
    /// A replacement for the list.
    pub list: Option<&'static str>,
    /// A replacement for the ETags of all files.
    pub etag: Option<&'static str>,
}

/// A Hub that serves until the process of the test ends.
pub struct Server {
    hub: Arc<Hub>,
    address: SocketAddr,
}

struct Hub {
    files: BTreeMap<String, Vec<u8>>,
    faults: Mutex<Faults>,
    requests: Mutex<Vec<String>>,
    /// The address on another host that serves the bytes of the weights.
    storage: SocketAddr,
}

impl Server {
    /// Starts a Hub with the files in a folder and these additional files.
    pub fn start(folder: &Path, more: &[(&str, &str)]) -> Self {
        let read = |entry: std::io::Result<std::fs::DirEntry>| {
            let entry = entry.unwrap();
            (entry.file_name().into_string().unwrap(), std::fs::read(entry.path()).unwrap())
        };
        let mut files: BTreeMap<String, Vec<u8>> = std::fs::read_dir(folder).unwrap().map(read).collect();
        files.extend(more.iter().map(|(name, text)| (name.to_string(), text.as_bytes().to_vec())));
        let [hub, storage] = ["127.0.0.1:0", "127.0.0.2:0"].map(|at| TcpListener::bind(at).unwrap());
        let (address, at) = (hub.local_addr().unwrap(), storage.local_addr().unwrap());
        let state = Arc::new(Hub { files, faults: Mutex::default(), requests: Mutex::default(), storage: at });
        for listener in [hub, storage] {
            let hub = state.clone();
            std::thread::spawn(move || {
                for stream in listener.incoming() {
                    let hub = hub.clone();
                    // The client may already be gone.
                    std::thread::spawn(move || _ = hub.serve(stream.unwrap()));
                }
            });
        }
        Self { hub: state, address }
    }

    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Sets the faults of later responses, and forgets earlier requests.
    pub fn set(&self, faults: Faults) {
        *self.hub.faults.lock().unwrap() = faults;
        self.hub.requests.lock().unwrap().clear();
    }

    /// Returns the requests: method, path, and the range if there is one.
    pub fn requests(&self) -> Vec<String> {
        self.hub.requests.lock().unwrap().clone()
    }

    pub fn file(&self, name: &str) -> &[u8] {
        &self.hub.files[name]
    }
}

pub fn digest(bytes: &[u8]) -> String {
    let digest = ring::digest::digest(&ring::digest::SHA256, bytes);
    digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns whether the Hub stores a file on the other host.
fn is_stored_elsewhere(name: &str) -> bool {
    name.ends_with(".safetensors")
}

impl Hub {
    fn serve(&self, stream: TcpStream) -> std::io::Result<()> {
        let (mut reader, mut stream) = (BufReader::new(stream.try_clone()?), stream);
        loop {
            let mut line = String::new();
            if reader.read_line(&mut line)? == 0 {
                return Ok(());
            }
            let words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
            let mut headers = HashMap::new();
            loop {
                let mut line = String::new();
                reader.read_line(&mut line)?;
                match line.trim().split_once(": ") {
                    Some((name, value)) => _ = headers.insert(name.to_ascii_lowercase(), value.to_owned()),
                    None => break,
                }
            }
            let range = headers.get("range").map_or(String::new(), |range| format!(" {range}"));
            self.requests.lock().unwrap().push(format!("{} {}{range}", words[0], words[1]));
            let is_storage = stream.local_addr()? == self.storage;
            assert!(!(is_storage && headers.contains_key("authorization")), "the token is sent to another host");
            if !self.answer(&mut stream, [&words[0], &words[1]], &headers)? {
                return Ok(());
            }
        }
    }

    /// Sends a response. Returns whether the connection stays open.
    fn answer(
        &self,
        stream: &mut TcpStream,
        [method, path]: [&str; 2],
        headers: &HashMap<String, String>,
    ) -> std::io::Result<bool> {
        let faults = self.faults.lock().unwrap().clone();
        let list = format!("/api/models/{NAME}/revision/");
        let by_name = format!("/{NAME}/resolve/{COMMIT}/");
        let by_commit = format!("/api/resolve-cache/models/{NAME}/{COMMIT}/");
        let in_folder = [&by_name, &by_commit].iter().find_map(|folder| path.strip_prefix(folder.as_str()));
        let name = in_folder.unwrap_or(path.rsplit('/').next().unwrap());
        let requested = if path.starts_with("/api/models/") { "" } else { name };
        let has_right = headers.get("authorization").is_some_and(|given| *given == format!("Bearer {TOKEN}"));
        let refused = match faults.refused {
            Some((file, status, code, message)) if file == requested => Some((status, code, message)),
            _ if faults.is_private && !has_right && !path.starts_with("/storage/") => {
                Some((401, "RepoNotFound", "Invalid username or password."))
            }
            None if path.starts_with("/api/models/") && !path.starts_with(&list) => {
                Some((401, "RepoNotFound", "Repository not found"))
            }
            None if path.starts_with(&list) && !["main", COMMIT].contains(&&path[list.len()..]) => {
                Some((404, "RevisionNotFound", "Invalid rev id"))
            }
            _ => None,
        };
        if let Some((status, code, message)) = refused {
            let headers = format!("X-Error-Code: {code}\r\nX-Error-Message: {message}\r\n");
            return head(stream, status, &headers, 0).map(|()| true);
        }
        if path.starts_with(&list) {
            let names: Vec<_> = self.files.keys().map(|name| json!({"rfilename": name})).collect();
            let text = json!({"id": NAME, "sha": COMMIT, "siblings": names}).to_string();
            let text = faults.list.unwrap_or(&text);
            head(stream, 200, "Content-Type: application/json\r\n", text.len())?;
            return stream.write_all(text.as_bytes()).map(|()| true);
        }
        let Some(bytes) = self.files.get(name) else {
            return head(stream, 404, "X-Error-Code: EntryNotFound\r\n", 0).map(|()| true);
        };
        if faults.busy > 0 {
            self.faults.lock().unwrap().busy -= 1;
            return head(stream, 503, "", 0).map(|()| true);
        }
        let digest = digest(bytes);
        if path.starts_with(&by_name) {
            let headers = match is_stored_elsewhere(name) {
                true => {
                    let (etag, size) = (faults.etag.unwrap_or(&digest), faults.size.unwrap_or(bytes.len() as u64));
                    let target = format!("Location: http://{}/storage/{name}\r\n", self.storage);
                    format!("X-Repo-Commit: {COMMIT}\r\nX-Linked-Etag: \"{etag}\"\r\nX-Linked-Size: {size}\r\n{target}")
                }
                false => format!("X-Repo-Commit: {COMMIT}\r\nLocation: {by_commit}{name}\r\n"),
            };
            return head(stream, if is_stored_elsewhere(name) { 302 } else { 307 }, &headers, 0).map(|()| true);
        }
        let from = headers.get("range").filter(|_| !faults.no_ranges);
        let from = from.map(|range| range.strip_prefix("bytes=").unwrap().trim_end_matches('-').parse().unwrap());
        let rest = &bytes[from.unwrap_or(0)..];
        let etag = faults.etag.unwrap_or(&digest[..40]);
        let mut response_headers = format!("ETag: W/\"{etag}\"\r\nX-Repo-Commit: {COMMIT}\r\n");
        if let Some(from) = from {
            response_headers += &format!("Content-Range: bytes {from}-{}/{}\r\n", bytes.len() - 1, bytes.len());
        }
        head(stream, if from.is_some() { 206 } else { 200 }, &response_headers, rest.len())?;
        if method == "HEAD" {
            return Ok(true);
        }
        let mut rest = rest.to_vec();
        if is_stored_elsewhere(name) {
            std::thread::sleep(faults.pause);
            let mut faults = self.faults.lock().unwrap();
            if !faults.cut_positions.is_empty() {
                let end = faults.cut_positions.remove(0).saturating_sub(from.unwrap_or(0));
                return stream.write_all(&rest[..end]).map(|()| false);
            }
            if faults.wrong_bytes > 0 {
                faults.wrong_bytes -= 1;
                *rest.last_mut().unwrap() ^= 1;
            }
        }
        stream.write_all(&rest).map(|()| true)
    }
}

fn head(stream: &mut TcpStream, status: u16, headers: &str, length: usize) -> std::io::Result<()> {
    write!(stream, "HTTP/1.1 {status} As it is\r\n{headers}Content-Length: {length}\r\n\r\n")
}
