//! The part of HTTP/1.1 that the dashboard needs: one request per connection. The body of a request is ignored.

use serde_json::Value;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// The maximum number of bytes of a request line with its headers.
const MAX_HEAD: usize = 16 << 10;
/// The maximum number of headers.
const MAX_HEADERS: usize = 64;
/// The maximum number of bytes of a body, which is read and ignored.
const MAX_BODY: usize = 1 << 10;
/// The time limits for a complete request, and for each write.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);

/// The policy for the page: it may load only its own files, and talk only to this server.
pub(super) const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
                                 base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// A request.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct HttpRequest {
    pub(super) method: String,
    pub(super) path: String,
    /// The decoded names and values of the query.
    pub(super) query: Vec<(String, String)>,
    /// The names, in lower case, and values of the headers.
    pub(super) headers: Vec<(String, String)>,
}

/// A response that explains why a request is refused.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct HttpRefusal {
    pub(super) status: u16,
    pub(super) text: String,
}

impl HttpRefusal {
    pub(super) fn new(status: u16, text: impl Into<String>) -> Self {
        Self { status, text: text.into() }
    }
}

/// The kind of a response's body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ContentKind {
    Html,
    Style,
    Script,
    Svg,
    Json,
    EventStream,
}

impl ContentKind {
    fn header(self) -> &'static str {
        match self {
            Self::Html => "text/html; charset=utf-8",
            Self::Style => "text/css; charset=utf-8",
            Self::Script => "text/javascript; charset=utf-8",
            Self::Svg => "image/svg+xml",
            Self::Json => "application/json",
            Self::EventStream => "text/event-stream",
        }
    }
}

impl HttpRequest {
    /// Returns the value of a header whose name is given in lower case.
    pub(super) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    /// Returns the first value of a name in the query.
    pub(super) fn value(&self, name: &str) -> Option<&str> {
        self.query.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    /// Reads a request, or returns the response to one that is malformed or too large.
    ///
    /// # Errors
    /// Fails if the client has disconnected or is too slow.
    pub(super) fn read(client: &mut TcpStream) -> io::Result<Result<Self, HttpRefusal>> {
        let deadline = Instant::now() + REQUEST_TIMEOUT;
        client.set_write_timeout(Some(WRITE_TIMEOUT))?;
        let (mut bytes, mut buffer) = (Vec::new(), [0; 4096]);
        let mut read_more = |bytes: &mut Vec<u8>| -> io::Result<bool> {
            let remaining = deadline.saturating_duration_since(Instant::now());
            client.set_read_timeout(Some(remaining.max(Duration::from_millis(1))))?;
            let read = client.read(&mut buffer)?;
            bytes.extend_from_slice(&buffer[..read]);
            Ok(read > 0 && !remaining.is_zero())
        };
        let end = loop {
            let end = bytes.windows(4).position(|end| end == b"\r\n\r\n");
            if let Some(end) = end.filter(|end| *end <= MAX_HEAD) {
                break end;
            }
            if bytes.len() > MAX_HEAD {
                let text = format!("the request has more than {MAX_HEAD} bytes of headers");
                return Ok(Err(HttpRefusal::new(431, text)));
            }
            if !read_more(&mut bytes)? {
                return Err(io::ErrorKind::TimedOut.into());
            }
        };
        let (request, body) = match Self::parse(&bytes[..end]) {
            Ok(parsed) => parsed,
            Err(refusal) => return Ok(Err(refusal)),
        };
        while bytes.len() < end + 4 + body {
            if !read_more(&mut bytes)? {
                return Err(io::ErrorKind::TimedOut.into());
            }
        }
        Ok(Ok(request))
    }

    /// Parses the head of a request. Returns the request and the length of its body.
    fn parse(head: &[u8]) -> Result<(Self, usize), HttpRefusal> {
        let bad = |text: &str| HttpRefusal::new(400, text);
        let head = std::str::from_utf8(head).map_err(|_| bad("the request is not UTF-8"))?;
        let mut lines = head.split("\r\n");
        let mut words = lines.next().unwrap_or_default().split(' ');
        let (Some(method), Some(target), Some(version), None) =
            (words.next(), words.next(), words.next(), words.next())
        else {
            return Err(bad("the request line is not METHOD PATH HTTP/1.1"));
        };
        if !version.starts_with("HTTP/1.") || !target.starts_with('/') {
            return Err(bad("the request line is not METHOD PATH HTTP/1.1"));
        }
        let mut headers: Vec<(String, String)> = Vec::new();
        for line in lines {
            let (name, value) = line.split_once(':').ok_or_else(|| bad("a header has no colon"))?;
            let is_name = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
            if name.is_empty()
                || !name.bytes().all(is_name)
                || value.contains(|letter: char| letter.is_control() && letter != '\t')
            {
                return Err(bad("a header has characters that are not allowed"));
            }
            headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
        }
        if headers.len() > MAX_HEADERS {
            return Err(HttpRefusal::new(431, format!("the request has more than {MAX_HEADERS} headers")));
        }
        let all = |name: &'static str| headers.iter().filter(move |(key, _)| key == name).map(|(_, value)| value);
        if all("host").count() > 1 || all("content-length").count() > 1 || all("transfer-encoding").count() > 0 {
            return Err(bad("the request has several hosts, several lengths, or a transfer encoding"));
        }
        let body = match all("content-length").next().map(|length| (length.len() <= 9).then(|| length.parse::<u32>())) {
            None => 0,
            Some(Some(Ok(length))) if length as usize <= MAX_BODY => length as usize,
            Some(Some(Ok(_)) | None) => {
                return Err(HttpRefusal::new(413, format!("the body has more than {MAX_BODY} bytes")));
            }
            Some(Some(Err(_))) => return Err(bad("the length of the body is not a number")),
        };
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        let query = parse_query(query).ok_or_else(|| bad("the query is not encoded correctly"))?;
        Ok((Self { method: method.into(), path: path.into(), query, headers }, body))
    }
}

/// Parses the query of an address: `a=1&b=x%20y`.
pub(super) fn parse_query(text: &str) -> Option<Vec<(String, String)>> {
    let pair = |pair: &str| {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        Some((decode(name)?, decode(value)?))
    };
    text.split('&').filter(|pair| !pair.is_empty()).map(pair).collect()
}

fn decode(text: &str) -> Option<String> {
    let mut bytes = text.bytes();
    let mut out = Vec::with_capacity(text.len());
    while let Some(byte) = bytes.next() {
        out.push(match byte {
            b'%' => {
                let mut digit = || char::from(bytes.next()?).to_digit(16);
                (digit()? * 16 + digit()?) as u8
            }
            b'+' => b' ',
            byte => byte,
        });
    }
    String::from_utf8(out).ok()
}

/// Encodes a text for a query.
pub(super) fn encode(text: &str) -> String {
    let letter = |byte: u8| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => char::from(byte).to_string(),
        byte => format!("%{byte:02X}"),
    };
    text.bytes().map(letter).collect()
}

/// Writes the head of a response. `length` is the length of the body, or `None` if the body ends with the connection.
pub(super) fn write_head(
    client: &mut impl Write,
    status: u16,
    kind: ContentKind,
    length: Option<usize>,
) -> io::Result<()> {
    let reason = match status {
        200 => "OK",
        400 => "Bad Request",
        403 => "Forbidden",
        404 => "Not Found",
        405 => "Method Not Allowed",
        409 => "Conflict",
        413 => "Content Too Large",
        431 => "Request Header Fields Too Large",
        503 => "Service Unavailable",
        _ => "Internal Server Error",
    };
    let length = length.map_or(String::new(), |length| format!("Content-Length: {length}\r\n"));
    let allow = if status == 405 { "Allow: GET, HEAD, POST\r\n" } else { "" };
    let head = format!(
        "HTTP/1.1 {status} {reason}\r\nContent-Type: {}\r\n{length}{allow}Connection: close\r\nCache-Control: no-store\r\n\
         Content-Security-Policy: {POLICY}\r\nX-Content-Type-Options: nosniff\r\nX-Frame-Options: DENY\r\n\
         Referrer-Policy: no-referrer\r\nCross-Origin-Resource-Policy: same-origin\r\n\
         Cross-Origin-Opener-Policy: same-origin\r\n\r\n",
        kind.header()
    );
    client.write_all(head.as_bytes())
}

/// Writes a complete response. `has_body` is false for HEAD.
pub(super) fn respond(
    client: &mut impl Write,
    status: u16,
    kind: ContentKind,
    body: &[u8],
    has_body: bool,
) -> io::Result<()> {
    write_head(client, status, kind, Some(body.len()))?;
    if has_body {
        client.write_all(body)?;
    }
    client.flush()
}

/// Returns JSON in which `<` is escaped, so that it stays harmless even in the middle of HTML.
pub(super) fn json_bytes(value: &Value) -> Vec<u8> {
    value.to_string().replace('<', "\\u003c").into_bytes()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn parse(head: &str) -> Result<(HttpRequest, usize), u16> {
        HttpRequest::parse(head.as_bytes()).map_err(|refusal| refusal.status)
    }

    #[test]
    fn a_request_is_parsed() {
        let (request, body) =
            parse("POST /api/request?id=a%20b%2F%C3%BC&x=1+2&y HTTP/1.1\r\nHost: localhost:1\r\nContent-Length: 7")
                .unwrap();
        assert_eq!((request.method.as_str(), request.path.as_str(), body), ("POST", "/api/request", 7));
        assert_eq!(
            (request.value("id"), request.value("x"), request.value("y")),
            (Some("a b/ü"), Some("1 2"), Some(""))
        );
        assert_eq!((request.header("host"), request.header("origin")), (Some("localhost:1"), None));
        let text = "a b/ü&=+%";
        assert_eq!(parse_query(&format!("n={}", encode(text))).unwrap(), [("n".to_owned(), text.to_owned())]);
    }

    #[test]
    fn what_is_not_a_request_is_refused() {
        for head in [
            "",
            "GET",
            "GET /",
            "GET / HTTP/2",
            "GET x HTTP/1.1",
            "GET http://a/ HTTP/1.1",
            "GET  / HTTP/1.1",
            "GET / HTTP/1.1 x",
            "GET / HTTP/1.1\r\nno colon",
            "GET / HTTP/1.1\r\na b: c",
            "GET / HTTP/1.1\r\n: c",
            "GET / HTTP/1.1\r\na: \u{1}",
            "GET / HTTP/1.1\r\nHost: a\r\nhost: b",
            "GET /?%zz HTTP/1.1",
            "GET /?%ff HTTP/1.1",
            "GET /?%a HTTP/1.1",
            "POST / HTTP/1.1\r\nTransfer-Encoding: chunked",
            "POST / HTTP/1.1\r\nContent-Length: -1",
            "POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 1",
        ] {
            assert_eq!(parse(head), Err(400), "{head:?}");
        }
        for length in ["1025", "4294967296", "99999999999999999999"] {
            assert_eq!(parse(&format!("POST / HTTP/1.1\r\nContent-Length: {length}")), Err(413), "{length}");
        }
        let many = "GET / HTTP/1.1".to_owned() + &"\r\na: b".repeat(MAX_HEADERS + 1);
        assert_eq!(parse(&many), Err(431));
        assert_eq!(HttpRequest::parse(b"GET /\xff HTTP/1.1").unwrap_err().status, 400);
    }
}
