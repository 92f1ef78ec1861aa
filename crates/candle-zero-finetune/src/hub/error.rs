//! Errors in fetching a model from the Hugging Face Hub.

use std::path::PathBuf;

/// Errors in fetching a model from the Hugging Face Hub.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HubError {
    /// An environment variable, or a file that it names, whose value cannot be used.
    #[error("{name} is {found}, but must be {allowed}")]
    Setting {
        /// The variable or the file.
        name: String,
        /// The value, unless it is secret.
        found: String,
        /// The allowed values.
        allowed: &'static str,
    },
    /// No folder for the cache is known.
    #[error(
        "there is no folder for downloads from the Hugging Face Hub: HF_HOME, HF_HUB_CACHE, XDG_CACHE_HOME and HOME \
         are not set; set HF_HOME to a folder"
    )]
    NoCache,
    /// A repository that does not exist or is not public.
    #[error(
        "{} {repository} at {endpoint}, and no local file or folder has that name; check its spelling and, for a \
         private repository, give a token of an account that may read it (HF_TOKEN)",
        if *has_token { "this token can access no repository named" } else { "there is no public repository" }
    )]
    NoRepository {
        /// The repository.
        repository: String,
        /// The endpoint to which the request was sent.
        endpoint: String,
        /// Whether a token was given.
        has_token: bool,
    },
    /// A branch, tag or commit that does not exist in the repository.
    #[error("{name} has no branch, tag or commit {revision:?}; give another one, or just {name} for the branch main")]
    NoRevision {
        /// The repository, without the revision.
        name: String,
        /// The revision.
        revision: String,
    },
    /// A repository whose conditions must be accepted first.
    #[error(
        "{file} of {repository} requires accepting the model's conditions; accept them at {endpoint}/{name}, and give \
         a token of the account that accepted them (HF_TOKEN)"
    )]
    Gated {
        /// The repository.
        repository: String,
        /// The repository, without the revision.
        name: String,
        /// The file.
        file: String,
        /// The endpoint to which the request was sent.
        endpoint: String,
    },
    /// A token that is refused or missing.
    #[error(
        "{endpoint} refuses access to {file} of {repository} (HTTP {status}){}; {}",
        if server_message.is_empty() { String::new() } else { format!(": {server_message}") },
        if *has_token { "give a token that may read it (HF_TOKEN); this one is not accepted" }
        else { "give a token of an account that may read it (HF_TOKEN)" }
    )]
    Refused {
        /// The repository.
        repository: String,
        /// The file.
        file: String,
        /// The endpoint to which the request was sent.
        endpoint: String,
        /// The status of the response.
        status: u16,
        /// The server's message.
        server_message: String,
        /// Whether a token was given.
        has_token: bool,
    },
    /// A repository without a file that a model needs.
    #[error("{repository} has no {file}: {reason}")]
    NoFile {
        /// The repository.
        repository: String,
        /// The file.
        file: String,
        /// A description of what the repository contains, and what to do.
        reason: String,
    },
    /// A server that cannot be reached.
    #[error(
        "cannot reach {endpoint} for {file} of {repository}: {reason}; check the network, HTTPS_PROXY and HF_ENDPOINT, \
         or set HF_HUB_OFFLINE=1 to use files fetched before, or give a folder"
    )]
    Unreachable {
        /// The repository.
        repository: String,
        /// The file.
        file: String,
        /// The endpoint to which the request was sent.
        endpoint: String,
        /// The reason.
        reason: String,
    },
    /// A server that answers with an error status.
    #[error("{endpoint} answered the request for {file} of {repository} with HTTP {status}{}; {}",
        if server_message.is_empty() { String::new() } else { format!(" ({server_message})") },
        if *status == 429 { "too many requests came from this address; wait a few minutes, or give a token (HF_TOKEN)" }
        else { "try again later" }
    )]
    Status {
        /// The repository.
        repository: String,
        /// The file.
        file: String,
        /// The endpoint to which the request was sent.
        endpoint: String,
        /// The status of the response.
        status: u16,
        /// The server's message.
        server_message: String,
    },
    /// A response that does not come from a Hub.
    #[error(
        "the response from {endpoint} for {file} of {repository} is not that of a Hugging Face Hub: {problem}; check \
         HF_ENDPOINT"
    )]
    Answer {
        /// The repository.
        repository: String,
        /// The file.
        file: String,
        /// The endpoint to which the request was sent.
        endpoint: String,
        /// The problem with the response.
        problem: String,
    },
    /// A file that was not downloaded completely.
    #[error(
        "received only {done} of the {size} of {file} in {repository} (after several attempts; the last one failed: \
         {reason}); the received part is kept; run the command again to resume from there"
    )]
    Interrupted {
        /// The repository.
        repository: String,
        /// The file.
        file: String,
        /// The amount that was received.
        done: Box<str>,
        /// The size of the file.
        size: Box<str>,
        /// The reason.
        reason: String,
    },
    /// A file whose content does not match its checksum.
    #[error(
        "{file} of {repository} did not match its checksum in two downloads, so something is changing it in transit; \
         check HF_ENDPOINT and proxies"
    )]
    Damaged {
        /// The repository.
        repository: String,
        /// The file.
        file: String,
    },
    /// A file that is not in the cache, in offline mode.
    #[error(
        "HF_HUB_OFFLINE is set, and {file} of {repository} is not in {}; unset HF_HUB_OFFLINE for \
         one run to fetch the model, or give a folder",
        cache.display()
    )]
    NotCached {
        /// The repository.
        repository: String,
        /// The file.
        file: String,
        /// The folder of the cache.
        cache: PathBuf,
    },
    /// Too little disk space for the files to fetch.
    #[error(
        "{file} of {repository} needs {needed} in {}, where {free} is free; free up space there, or set HF_HOME to a \
         folder on another disk", folder.display()
    )]
    NoSpace {
        /// The repository.
        repository: String,
        /// The file or files.
        file: String,
        /// The target folder.
        folder: PathBuf,
        /// The space that is still needed.
        needed: Box<str>,
        /// The free space.
        free: Box<str>,
    },
}

impl From<HubError> for candle_zero::Error {
    fn from(error: HubError) -> Self {
        Self::other(error)
    }
}
