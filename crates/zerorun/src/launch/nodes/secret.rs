//! The secret that the launchers of a job share. It proves that a host belongs to the job, and seals later messages.
//! The secret itself is never sent over the network.
//!
//! For each connection, keys are derived from the secret and from random numbers that both sides contribute, so
//! messages recorded from one connection are useless on another.

use crate::error::{HostsError, LaunchError, Result};
use candle_zero::files::read_text;
use candle_zero::util::{counted, hex};
use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};
use std::io::BufRead;
use std::path::PathBuf;

/// The variable with the secret, and the variable with the path of a file that contains it.
pub(crate) const SECRET: &str = "CANDLE_ZERO_SECRET";
pub(crate) const SECRET_FILE: &str = "CANDLE_ZERO_SECRET_FILE";

/// The minimum and the maximum length of a secret in bytes.
const MIN_SECRET_BYTES: usize = 16;
const MAX_SECRET_BYTES: usize = 4096;
/// The length of a nonce in bytes.
pub(super) const NONCE_BYTES: usize = 32;

/// A random number that is used only once.
pub(super) type HandshakeNonce = [u8; NONCE_BYTES];

/// The secret that the launchers of a job share.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct JobSecret(String);

impl std::fmt::Debug for JobSecret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret(...)")
    }
}

impl JobSecret {
    /// Returns the secret from the environment variables, if one is set.
    ///
    /// # Errors
    /// Fails with [`HostsError::BadSecret`] if both variables are set, if the file cannot be read, or if the secret is
    /// not UTF-8 text, is too short or too long, or has several lines or a NUL byte.
    pub(crate) fn of_environment() -> Result<Option<Self>> {
        let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
        match (variable(SECRET), variable(SECRET_FILE)) {
            (Some(_), Some(_)) => Err(bad_secret(SECRET, format!("{SECRET_FILE} is also set; unset one of them"))),
            (Some(value), None) => match value.to_str() {
                Some(text) => Self::of_text(SECRET, text).map(Some),
                None => Err(bad_secret(SECRET, with_requirement("it is not UTF-8 text"))),
            },
            (None, Some(path)) => {
                let (path, from) = (PathBuf::from(&path), format!("{SECRET_FILE}={}", path.to_string_lossy()));
                match read_text(&path, MAX_SECRET_BYTES as u64 + 2) {
                    Ok(text) => Self::of_text(&from, &text).map(Some),
                    Err(error) => Err(bad_secret(&from, format!("the file cannot be read: {error}"))),
                }
            }
            (None, None) => Ok(None),
        }
    }

    /// Creates a secret from a text, ignoring white space around it. `from` is used in error messages.
    ///
    /// # Errors
    /// Fails with [`HostsError::BadSecret`] if the text is too short or too long, or has several lines or a NUL byte.
    pub(crate) fn of_text(from: &str, text: &str) -> Result<Self> {
        let text = text.trim();
        match text.len() {
            _ if text.contains(['\n', '\r', '\0']) => {
                Err(bad_secret(from, with_requirement("it has several lines or a NUL byte")))
            }
            MIN_SECRET_BYTES..=MAX_SECRET_BYTES => Ok(Self(text.into())),
            bytes => Err(bad_secret(from, with_requirement(&format!("it is {} long", counted(bytes, "byte"))))),
        }
    }

    /// Reads the secret from the next line, which was written by the launcher that started this one.
    ///
    /// # Errors
    /// Fails if the line cannot be read, or with [`HostsError::BadSecret`].
    pub(crate) fn of_line(from: impl BufRead) -> Result<Self> {
        let mut line = String::new();
        let read = from.take(MAX_SECRET_BYTES as u64 + 2).read_line(&mut line);
        read.map_err(|source| LaunchError::Setup { what: "reading the secret from standard input", source })?;
        Self::of_text("standard input", &line)
    }

    /// Creates a random secret.
    ///
    /// # Errors
    /// Fails if the system provides no random numbers.
    pub(crate) fn random() -> Result<Self> {
        Ok(Self(hex(&nonce()?)))
    }

    /// Returns the line that [`JobSecret::of_line`] reads.
    pub(crate) fn line(&self) -> String {
        format!("{}\n", self.0)
    }

    /// Derives the key for one purpose on one connection.
    pub(super) fn key(&self, purpose: KeyPurpose, first: &HandshakeNonce, host: &HandshakeNonce) -> MacKey {
        let mut mac = hmac_with_key(self.0.as_bytes());
        mac.update(purpose.label());
        mac.update(first);
        mac.update(host);
        MacKey(hmac_with_key(&mac.finalize().into_bytes()))
    }
}

/// The purpose of a key. No key has two purposes, so a message from one side is never accepted as one from the other.
#[derive(Debug, Clone, Copy)]
pub(super) enum KeyPurpose {
    /// A host's proof that it knows the secret.
    ProofOfHost,
    /// The first host's proof that it knows the secret.
    ProofOfFirst,
    /// Messages to the first host.
    ToFirst,
    /// Messages from the first host.
    FromFirst,
}

impl KeyPurpose {
    /// Returns the purpose's label. All labels have the same length.
    fn label(self) -> &'static [u8; 16] {
        match self {
            Self::ProofOfHost => b"candle-zero/1 ph",
            Self::ProofOfFirst => b"candle-zero/1 pf",
            Self::ToFirst => b"candle-zero/1 tf",
            Self::FromFirst => b"candle-zero/1 ff",
        }
    }
}

/// A key for one purpose on one connection.
#[derive(Clone)]
pub(super) struct MacKey(Hmac<Sha256>);

impl std::fmt::Debug for MacKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Key(...)")
    }
}

impl MacKey {
    fn hmac(&self, number: u64, bytes: &[u8]) -> Hmac<Sha256> {
        let mut mac = self.0.clone();
        mac.update(&number.to_le_bytes());
        mac.update(bytes);
        mac
    }

    /// Returns the seal of message `number`, in hexadecimal digits.
    pub(super) fn seal(&self, number: u64, bytes: &[u8]) -> String {
        hex(&self.hmac(number, bytes).finalize().into_bytes())
    }

    /// Checks in constant time whether `seal` is the seal of message `number`.
    pub(super) fn is_sealed(&self, number: u64, bytes: &[u8], seal: &[u8]) -> bool {
        of_hex::<32>(seal).is_some_and(|seal| self.hmac(number, bytes).verify_slice(&seal).is_ok())
    }
}

/// Returns a random number that is unique and cannot be guessed.
///
/// # Errors
/// Fails if the system provides no random numbers.
pub(super) fn nonce() -> Result<HandshakeNonce> {
    let mut nonce = [0; NONCE_BYTES];
    let result = getrandom::fill(&mut nonce).map_err(|error| std::io::Error::other(error.to_string()));
    result.map_err(|source| LaunchError::Setup { what: "generating random numbers", source })?;
    Ok(nonce)
}

/// Returns a digest that lets two people compare lists of words without revealing them.
pub(super) fn digest(words: &[String]) -> String {
    let mut hash = Sha256::new();
    for word in words {
        hash.update((word.len() as u64).to_le_bytes());
        hash.update(word);
    }
    hex(&hash.finalize()[..4])
}

/// Parses exactly N bytes from hexadecimal digits.
pub(super) fn of_hex<const N: usize>(text: &[u8]) -> Option<[u8; N]> {
    let digit = |byte: u8| char::from(byte).to_digit(16).map(|digit| digit as u8);
    let mut bytes = [0; N];
    if text.len() != 2 * N {
        return None;
    }
    for (byte, pair) in bytes.iter_mut().zip(text.chunks(2)) {
        *byte = digit(pair[0])? << 4 | digit(pair[1])?;
    }
    Some(bytes)
}

fn hmac_with_key(key: &[u8]) -> Hmac<Sha256> {
    Hmac::new_from_slice(key).expect("HMAC takes a key of any length")
}

fn with_requirement(problem: &str) -> String {
    format!(
        "{problem}; give one line of {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES} bytes that no one can guess, such as the \
         output of `openssl rand -hex 32`"
    )
}

fn bad_secret(from: &str, problem: String) -> candle_zero::Error {
    HostsError::BadSecret { from: from.into(), problem }.into()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_one_line_that_nobody_guesses_and_no_message_tells_it() {
        let message = |text: &str| JobSecret::of_text("X", text).unwrap_err().to_string();
        insta::assert_snapshot!(message("hunter2"), @"X cannot be used as the secret of the hosts: it is 7 bytes long; give one line of 16 to 4096 bytes that no one can guess, such as the output of `openssl rand -hex 32`");
        insta::assert_snapshot!(message("hunter2hunter2\nhunter2"), @"X cannot be used as the secret of the hosts: it has several lines or a NUL byte; give one line of 16 to 4096 bytes that no one can guess, such as the output of `openssl rand -hex 32`");
        assert!(message(&"x".repeat(MAX_SECRET_BYTES + 1)).contains("4097 bytes"));
        let secret = JobSecret::of_text("X", "  correct horse battery staple \n").unwrap();
        assert_eq!(secret.line(), "correct horse battery staple\n");
        assert_eq!(format!("{secret:?}"), "Secret(...)");
        assert_eq!(JobSecret::of_line(secret.line().as_bytes()).unwrap(), secret);
        assert!(JobSecret::of_line(&b""[..]).is_err());
        assert_ne!(JobSecret::random().unwrap(), JobSecret::random().unwrap());
    }

    /// Compares a seal with HMAC-SHA256 as computed by Python's `hmac` and `hashlib`. No other program has to produce
    /// the same seals, but a mistake here would make them worthless.
    #[test]
    fn a_seal_is_the_hmac_of_key_number_and_message() {
        let secret = JobSecret::of_text("X", "correct horse battery staple").unwrap();
        let key = secret.key(KeyPurpose::ToFirst, &[1; NONCE_BYTES], &[2; NONCE_BYTES]);
        insta::assert_snapshot!(key.seal(3, b"hello"), @"0acd3d093015f0f40ab590a5efd14b367711268fd349aa08ccf58e935c3be686");
    }

    #[test]
    fn a_seal_holds_for_one_message_one_number_one_purpose_and_one_connection() {
        let secret = JobSecret::of_text("X", "correct horse battery staple").unwrap();
        let key = |purpose, first: u8, host: u8| secret.key(purpose, &[first; NONCE_BYTES], &[host; NONCE_BYTES]);
        let own = key(KeyPurpose::ToFirst, 1, 2);
        let seal = own.seal(3, b"hello");
        assert!(own.is_sealed(3, b"hello", seal.as_bytes()));
        assert!(!own.is_sealed(4, b"hello", seal.as_bytes()) && !own.is_sealed(3, b"hallo", seal.as_bytes()));
        for other in [key(KeyPurpose::FromFirst, 1, 2), key(KeyPurpose::ToFirst, 2, 2), key(KeyPurpose::ToFirst, 1, 1)]
        {
            assert!(!other.is_sealed(3, b"hello", seal.as_bytes()));
        }
        let other = JobSecret::of_text("X", "correct horse battery stable").unwrap();
        let other = other.key(KeyPurpose::ToFirst, &[1; NONCE_BYTES], &[2; NONCE_BYTES]);
        assert!(!other.is_sealed(3, b"hello", seal.as_bytes()));
        for wrong in ["", "00", &seal[1..], &format!("{seal}0"), &"zz".repeat(32), &"00".repeat(32)] {
            assert!(!own.is_sealed(3, b"hello", wrong.as_bytes()), "{wrong}");
        }
    }
}
