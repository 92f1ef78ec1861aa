//! Sends requests to the Hub, and interprets failures.

use super::error::HubError;
use super::repository::{Repository, is_part};
use super::settings::HubSettings;
use crate::error::{Error, Result};
use candle_zero::files;
use hf_hub::api::RepoInfo;
use hf_hub::api::sync::{Api, ApiBuilder};
use hf_hub::{Cache, Repo, RepoType};
use std::io::Read;
use std::time::Duration;
use ureq::config::RedirectAuthHeaders;
use ureq::http::header::{
    ACCEPT_ENCODING, AUTHORIZATION, CONTENT_LENGTH, CONTENT_RANGE, ETAG, HeaderMap, LOCATION, RANGE,
};
use ureq::tls::{PemItem, RootCerts, TlsConfig, parse_pem};
use ureq::{Agent, Body, http};

/// A client for the files of a repository.
pub(super) struct HubClient<'a> {
    repository: &'a Repository,
    settings: &'a HubSettings,
    api: Api,
    /// The agent that downloads files. It follows redirects, and sends the token only to the original host.
    agent: Agent,
    /// The agent that locates files. It does not follow redirects.
    no_redirect_agent: Agent,
    tls: TlsConfig,
}

/// The properties of a file as reported by the Hub.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RemoteFile {
    /// The name of the file's content in the cache.
    pub etag: String,
    pub size: u64,
    /// Whether `etag` is the content's SHA-256.
    pub is_digest: bool,
}

/// The bytes of a file as they arrive.
pub(super) struct FileStream {
    /// The position of the first byte in the file.
    pub from: u64,
    pub reader: Box<dyn Read>,
}

/// The reason for a failed request.
pub(super) enum RequestFailure {
    /// A temporary failure, with the status of the response if there was one.
    Transient(String, Option<u16>),
    /// A permanent failure.
    Final(Error),
}

impl<E: Into<Error>> From<E> for RequestFailure {
    fn from(error: E) -> Self {
        Self::Final(error.into())
    }
}

/// The maximum time for which the server may be silent, and the maximum total time of a listing.
const IDLE_TIMEOUT: Duration = Duration::from_secs(60);
/// The maximum number of consecutive failed attempts. If a failed attempt received bytes of a file, it counts as the
/// first one again.
pub(super) const MAX_ATTEMPTS: u32 = 4;
/// The pause after the first attempt. It doubles after each further attempt.
const INITIAL_BACKOFF: Duration = Duration::from_millis(500);
/// The maximum size of a listing in bytes. Each file takes a few hundred bytes.
const MAX_LISTING_BYTES: u64 = 1 << 26;
/// The maximum size of a certificate file in bytes.
const MAX_CERTIFICATE_BYTES: u64 = 1 << 24;
/// The number of consecutive redirects after which the search for the properties of a file fails.
const MAX_REDIRECTS: usize = 8;
/// The maximum number of characters of a server's message that are shown.
const MAX_SHOWN_CHARS: usize = 200;
/// The name of the listing in messages.
const LISTING_NAME: &str = "the list of files";

impl<'a> HubClient<'a> {
    pub fn new(repository: &'a Repository, settings: &'a HubSettings) -> Result<Self> {
        let api = ApiBuilder::from_cache(Cache::new(settings.cache.clone()))
            .with_endpoint(settings.endpoint.clone())
            .with_token(settings.token.clone())
            .with_user_agent(env!("CARGO_PKG_NAME"), env!("CARGO_PKG_VERSION"));
        let api = api.build().map_err(|e| Self::unreachable_at(repository, settings, LISTING_NAME, e.to_string()))?;
        let tls = tls(settings)?;
        let config = || {
            Agent::config_builder()
                .tls_config(tls.clone())
                .http_status_as_error(false)
                .redirect_auth_headers(RedirectAuthHeaders::SameHost)
                .user_agent(concat!(env!("CARGO_PKG_NAME"), "/", env!("CARGO_PKG_VERSION")))
                .timeout_connect(Some(IDLE_TIMEOUT))
                .timeout_recv_response(Some(IDLE_TIMEOUT))
                .timeout_per_read(Some(IDLE_TIMEOUT))
        };
        let no_redirect_agent = config().max_redirects(0).max_redirects_will_error(false).build().into();
        Ok(Self { repository, settings, api, agent: config().build().into(), no_redirect_agent, tls })
    }

    /// Returns the commit of the revision and the names of its files.
    pub fn listing(&self) -> Result<RepoInfo> {
        self.with_retries(LISTING_NAME, || self.list())
    }

    /// Returns the properties of a file.
    pub fn remote(&self, commit: &str, file: &str) -> Result<RemoteFile> {
        self.with_retries(file, || self.look_up(commit, file))
    }

    /// Calls `run` again after temporary failures, up to [`MAX_ATTEMPTS`] times in total.
    fn with_retries<T>(&self, file: &str, mut run: impl FnMut() -> Result<T, RequestFailure>) -> Result<T> {
        let mut tries = 0;
        loop {
            match run() {
                Ok(found) => return Ok(found),
                Err(RequestFailure::Final(error)) => return Err(error),
                Err(RequestFailure::Transient(..)) if tries + 1 < MAX_ATTEMPTS => {
                    tries += 1;
                    pause(tries);
                }
                Err(RequestFailure::Transient(_, Some(status))) => {
                    return Err(self.no_answer(file, status, String::new()).into());
                }
                Err(RequestFailure::Transient(reason, None)) => return Err(self.unreachable(file, reason).into()),
            }
        }
    }

    fn list(&self) -> Result<RepoInfo, RequestFailure> {
        let request = self.api.repo(self.repo(self.repository.revision())).info_request();
        let request = request
            .config()
            .http_status_as_error(false)
            .tls_config(self.tls.clone())
            .timeout_global(Some(IDLE_TIMEOUT))
            .build();
        // A request without a response is not sent again, because a second one is unlikely to get a response.
        let mut answer = request.call().map_err(|e| self.unreachable(LISTING_NAME, e.to_string()))?;
        self.check_status(LISTING_NAME, answer.status().as_u16(), answer.headers())?;
        let info: Result<RepoInfo, _> = answer.body_mut().with_config().limit(MAX_LISTING_BYTES).read_json();
        let info = info.map_err(|e| self.unexpected_answer(LISTING_NAME, format!("it is not a list of files: {e}")))?;
        let is_commit = (7..=64).contains(&info.sha.len()) && info.sha.bytes().all(|byte| byte.is_ascii_hexdigit());
        match is_commit {
            true => Ok(info),
            false => Err(self.unexpected_answer(LISTING_NAME, "it names no commit".into()).into()),
        }
    }

    fn look_up(&self, commit: &str, file: &str) -> Result<RemoteFile, RequestFailure> {
        let mut address = self.address(commit, file);
        for _ in 0..MAX_REDIRECTS {
            let request = self.no_redirect_agent.head(&address).header(ACCEPT_ENCODING, "identity");
            let answer = match self.authorization() {
                Some(token) => request.header(AUTHORIZATION, token),
                None => request,
            };
            let answer = answer.call().map_err(|e| RequestFailure::Transient(e.to_string(), None))?;
            let (status, headers) = (answer.status(), answer.headers());
            if !status.is_redirection() {
                self.check_status(file, status.as_u16(), headers)?;
                return self.parse_remote_file(file, headers, CONTENT_LENGTH.as_str());
            }
            // A redirect within this host leads to the file's properties. Another host only serves the file's bytes.
            match text_of(headers, LOCATION.as_str()).filter(|to| to.starts_with('/') && !to.starts_with("//")) {
                Some(to) => address = format!("{}{to}", self.origin()),
                None => return self.parse_remote_file(file, headers, "x-linked-size"),
            }
        }
        Err(self.unexpected_answer(file, format!("it redirected {MAX_REDIRECTS} times in a row")).into())
    }

    fn parse_remote_file(&self, file: &str, headers: &HeaderMap, size: &str) -> Result<RemoteFile, RequestFailure> {
        let linked = text_of(headers, "x-linked-etag");
        let etag = linked.or_else(|| text_of(headers, ETAG.as_str())).unwrap_or_default();
        let etag = etag.strip_prefix("W/").unwrap_or(etag).trim_matches('"');
        // The ETag becomes a file name.
        if !is_part(etag) || etag.len() > 128 {
            return Err(self.unexpected_answer(file, "it has no ETag that identifies the content".into()).into());
        }
        let size = ["x-linked-size", size].into_iter().find_map(|name| text_of(headers, name)?.parse().ok());
        let size = size.ok_or_else(|| self.unexpected_answer(file, "it states no size".into()))?;
        let is_digest = linked.is_some() && etag.len() == 64 && etag.bytes().all(|byte| byte.is_ascii_hexdigit());
        Ok(RemoteFile { etag: etag.to_ascii_lowercase(), size, is_digest })
    }

    /// Returns the bytes of a file starting at position `from`, or all of them if the server does not support ranges.
    pub fn bytes(&self, commit: &str, file: &str, from: u64) -> Result<FileStream, RequestFailure> {
        let mut request = self.agent.get(self.address(commit, file)).header(ACCEPT_ENCODING, "identity");
        if let Some(token) = self.authorization() {
            request = request.header(AUTHORIZATION, token);
        }
        if from > 0 {
            request = request.header(RANGE, format!("bytes={from}-"));
        }
        let answer: http::Response<Body> =
            request.call().map_err(|e| RequestFailure::Transient(e.to_string(), None))?;
        let status = answer.status().as_u16();
        self.check_status(file, status, answer.headers())?;
        let start = match status {
            206 => {
                let range = text_of(answer.headers(), CONTENT_RANGE.as_str()).unwrap_or_default();
                let first = range.strip_prefix("bytes ").and_then(|range| range.split('-').next()?.parse().ok());
                if first != Some(from) {
                    return Err(self
                        .unexpected_answer(
                            file,
                            format!("bytes from {from} onwards were requested, but {range:?} was sent"),
                        )
                        .into());
                }
                from
            }
            _ => 0,
        };
        Ok(FileStream { from: start, reader: Box::new(answer.into_body().into_reader()) })
    }

    fn repo(&self, revision: &str) -> Repo {
        Repo::with_revision(self.repository.name().into(), RepoType::Model, revision.into())
    }

    fn address(&self, commit: &str, file: &str) -> String {
        self.api.repo(self.repo(commit)).url(file)
    }

    /// Returns the scheme and host of the endpoint.
    fn origin(&self) -> &str {
        let endpoint = &self.settings.endpoint;
        let host = endpoint.find("://").map_or(0, |at| at + 3);
        endpoint[host..].find('/').map_or(endpoint, |end| &endpoint[..host + end])
    }

    fn authorization(&self) -> Option<String> {
        self.settings.token.as_ref().map(|token| format!("Bearer {token}"))
    }

    /// Returns an error unless the status indicates success.
    fn check_status(&self, file: &str, status: u16, headers: &HeaderMap) -> Result<(), RequestFailure> {
        let repository = self.repository.to_string();
        let (name, revision) = (self.repository.name().to_owned(), self.repository.revision().to_owned());
        let (endpoint, file) = (self.settings.endpoint.clone(), file.to_owned());
        let has_token = self.settings.token.is_some();
        let server_message = text_of(headers, "x-error-message").unwrap_or_default();
        let server_message: String =
            server_message.trim_end_matches('.').chars().filter(|c| !c.is_control()).take(MAX_SHOWN_CHARS).collect();
        Err(match (status, text_of(headers, "x-error-code").unwrap_or_default()) {
            (200 | 206, _) => return Ok(()),
            (_, "RepoNotFound") => HubError::NoRepository { repository, endpoint, has_token }.into(),
            (_, "RevisionNotFound") => HubError::NoRevision { name, revision }.into(),
            (_, "GatedRepo") => HubError::Gated { repository, name, file, endpoint }.into(),
            (401 | 403, _) => {
                HubError::Refused { repository, file, endpoint, status, server_message, has_token }.into()
            }
            (404, _) if file == LISTING_NAME => HubError::NoRepository { repository, endpoint, has_token }.into(),
            (408 | 416 | 500..=504, _) => {
                RequestFailure::Transient(format!("{endpoint} answered with HTTP {status}"), Some(status))
            }
            _ => self.no_answer(&file, status, server_message).into(),
        })
    }

    fn no_answer(&self, file: &str, status: u16, server_message: String) -> HubError {
        let (repository, file, endpoint) =
            (self.repository.to_string(), file.to_owned(), self.settings.endpoint.clone());
        HubError::Status { repository, file, endpoint, status, server_message }
    }

    fn unreachable(&self, file: &str, reason: String) -> HubError {
        Self::unreachable_at(self.repository, self.settings, file, reason)
    }

    fn unreachable_at(repository: &Repository, settings: &HubSettings, file: &str, reason: String) -> HubError {
        let (repository, file, endpoint) = (repository.to_string(), file.to_owned(), settings.endpoint.clone());
        HubError::Unreachable { repository, file, endpoint, reason }
    }

    pub fn unexpected_answer(&self, file: &str, problem: String) -> HubError {
        let (repository, file) = (self.repository.to_string(), file.to_owned());
        HubError::Answer { repository, file, endpoint: self.settings.endpoint.clone(), problem }
    }
}

/// Returns the TLS configuration, which contains the certificates to trust.
fn tls(settings: &HubSettings) -> Result<TlsConfig> {
    let Some(path) = &settings.certificates else { return Ok(TlsConfig::default()) };
    let bytes = files::read(path, MAX_CERTIFICATE_BYTES);
    let bytes = bytes.map_err(|source| Error::Io { action: "read", path: path.clone(), source })?;
    let roots = parse_pem(&bytes).filter_map(|item| match item {
        Ok(PemItem::Certificate(certificate)) => Some(certificate),
        _ => None,
    });
    let roots: Vec<_> = roots.collect();
    if roots.is_empty() {
        let (found, allowed) = (path.display().to_string(), "a file with certificates in PEM format");
        return Err(HubError::Setting { name: "SSL_CERT_FILE".into(), found, allowed }.into());
    }
    Ok(TlsConfig::builder().root_certs(RootCerts::from(roots)).build())
}

/// Waits before the next attempt.
pub(super) fn pause(tries: u32) {
    std::thread::sleep(INITIAL_BACKOFF * 2u32.pow(tries.saturating_sub(1)));
}

fn text_of<'h>(headers: &'h HeaderMap, name: &str) -> Option<&'h str> {
    headers.get(name)?.to_str().ok().filter(|text| !text.is_empty())
}
