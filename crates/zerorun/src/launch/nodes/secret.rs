//! The secret that the launchers of a job share. It proves that a host belongs to the job, and seals what is said afterwards; it
//! itself never goes over the network.
//!
//! Keys are made of it with numbers that both sides draw for one connection, so that nothing that was heard on another one is of use.

use crate::error::{HostsError, LaunchError, Result};
use candle_zero::files::read_text;
use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};
use std::io::BufRead;
use std::path::PathBuf;

/// The variable with the secret, and the one with the path of a file that has it.
pub(crate) const SECRET: &str = "CANDLE_ZERO_SECRET";
pub(crate) const SECRET_FILE: &str = "CANDLE_ZERO_SECRET_FILE";

/// Bytes of the shortest and the longest secret.
const SHORTEST: usize = 16;
const LONGEST: usize = 4096;
/// Bytes of a number that is used once.
pub(super) const NONCE: usize = 32;

/// A number that is used once.
pub(super) type HandshakeNonce = [u8; NONCE];

/// The secret.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct JobSecret(String);

impl std::fmt::Debug for JobSecret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret(...)")
    }
}

impl JobSecret {
    /// That of the environment, if it has one.
    ///
    /// # Errors
    /// [`HostsError::BadSecret`]: both variables are set, the file cannot be read, too short, too long, several lines.
    pub(crate) fn of_environment() -> Result<Option<Self>> {
        let of = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
        match (of(SECRET), of(SECRET_FILE)) {
            (Some(_), Some(_)) => Err(bad(SECRET, format!("{SECRET_FILE} is set too; unset one of them"))),
            (Some(value), None) => match value.to_str() {
                Some(text) => Self::of_text(SECRET, text).map(Some),
                None => Err(bad(SECRET, wanted("it is no UTF-8 text"))),
            },
            (None, Some(path)) => {
                let (path, from) = (PathBuf::from(&path), format!("{SECRET_FILE}={}", path.to_string_lossy()));
                match read_text(&path, LONGEST as u64 + 2) {
                    Ok(text) => Self::of_text(&from, &text).map(Some),
                    Err(error) => Err(bad(&from, format!("the file cannot be read: {error}"))),
                }
            }
            (None, None) => Ok(None),
        }
    }

    /// That of a text; `from` is for messages. White space around it does not count.
    ///
    /// # Errors
    /// [`HostsError::BadSecret`].
    pub(crate) fn of_text(from: &str, text: &str) -> Result<Self> {
        let text = text.trim();
        match text.len() {
            _ if text.contains(['\n', '\r', '\0']) => Err(bad(from, wanted("it has several lines"))),
            SHORTEST..=LONGEST => Ok(Self(text.into())),
            bytes => Err(bad(from, wanted(&format!("it has {bytes} bytes")))),
        }
    }

    /// That of the next line, which the launcher that started this one has written.
    ///
    /// # Errors
    /// The system's; [`HostsError::BadSecret`].
    pub(crate) fn of_line(from: impl BufRead) -> Result<Self> {
        let mut line = String::new();
        let read = from.take(LONGEST as u64 + 2).read_line(&mut line);
        read.map_err(|source| LaunchError::Setup { what: "reading the secret from standard input", source })?;
        Self::of_text("standard input", &line)
    }

    /// A new one.
    ///
    /// # Errors
    /// The system has no random numbers.
    pub(crate) fn random() -> Result<Self> {
        Ok(Self(hex(&nonce()?)))
    }

    /// The line that [`JobSecret::of_line`] reads.
    pub(crate) fn line(&self) -> String {
        format!("{}\n", self.0)
    }

    /// The key for one purpose on one connection.
    pub(super) fn key(&self, purpose: KeyPurpose, first: &HandshakeNonce, host: &HandshakeNonce) -> MacKey {
        let mut mac = keyed(self.0.as_bytes());
        mac.update(purpose.label());
        mac.update(first);
        mac.update(host);
        MacKey(keyed(&mac.finalize().into_bytes()))
    }
}

/// What a key is for: no key is for two purposes, so what one side says is never what the other side has to say.
#[derive(Debug, Clone, Copy)]
pub(super) enum KeyPurpose {
    /// A host proves that it knows the secret.
    ProofOfHost,
    /// The first host does.
    ProofOfFirst,
    /// Messages to the first host.
    ToFirst,
    /// Messages from the first host.
    FromFirst,
}

impl KeyPurpose {
    /// All of one length.
    fn label(self) -> &'static [u8; 16] {
        match self {
            Self::ProofOfHost => b"candle-zero/1 ph",
            Self::ProofOfFirst => b"candle-zero/1 pf",
            Self::ToFirst => b"candle-zero/1 tf",
            Self::FromFirst => b"candle-zero/1 ff",
        }
    }
}

/// A key.
#[derive(Clone)]
pub(super) struct MacKey(Hmac<Sha256>);

impl std::fmt::Debug for MacKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Key(...)")
    }
}

impl MacKey {
    fn over(&self, number: u64, bytes: &[u8]) -> Hmac<Sha256> {
        let mut mac = self.0.clone();
        mac.update(&number.to_le_bytes());
        mac.update(bytes);
        mac
    }

    /// The seal of message `number`, in hexadecimal digits.
    pub(super) fn seal(&self, number: u64, bytes: &[u8]) -> String {
        hex(&self.over(number, bytes).finalize().into_bytes())
    }

    /// Whether `seal` is that of message `number`. Takes as long for each wrong one.
    pub(super) fn is_sealed(&self, number: u64, bytes: &[u8], seal: &[u8]) -> bool {
        of_hex::<32>(seal).is_some_and(|seal| self.over(number, bytes).verify_slice(&seal).is_ok())
    }
}

/// A number that nobody has had before and nobody can guess.
///
/// # Errors
/// The system has no random numbers.
pub(super) fn nonce() -> Result<HandshakeNonce> {
    let mut nonce = [0; NONCE];
    let drawn = getrandom::fill(&mut nonce).map_err(|error| std::io::Error::other(error.to_string()));
    drawn.map_err(|source| LaunchError::Setup { what: "drawing random numbers", source })?;
    Ok(nonce)
}

/// By which two people can see whether they have the same words, without telling them.
pub(super) fn digest(words: &[String]) -> String {
    let mut hash = Sha256::new();
    for word in words {
        hash.update((word.len() as u64).to_le_bytes());
        hash.update(word);
    }
    hex(&hash.finalize()[..4])
}

/// Hexadecimal digits.
pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The bytes of so many hexadecimal digits.
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

fn keyed(key: &[u8]) -> Hmac<Sha256> {
    Hmac::new_from_slice(key).expect("HMAC takes a key of any length")
}

fn wanted(found: &str) -> String {
    format!(
        "{found}; give one line of {SHORTEST} to {LONGEST} bytes that nobody can guess, as `openssl rand -hex 32` prints"
    )
}

fn bad(from: &str, problem: String) -> candle_zero::Error {
    HostsError::BadSecret { from: from.into(), problem }.into()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_one_line_that_nobody_guesses_and_no_message_tells_it() {
        let told = |text: &str| JobSecret::of_text("X", text).unwrap_err().to_string();
        insta::assert_snapshot!(told("hunter2"), @"X cannot be the secret of the hosts: it has 7 bytes; give one line of 16 to 4096 bytes that nobody can guess, as `openssl rand -hex 32` prints");
        insta::assert_snapshot!(told("hunter2hunter2\nhunter2"), @"X cannot be the secret of the hosts: it has several lines; give one line of 16 to 4096 bytes that nobody can guess, as `openssl rand -hex 32` prints");
        assert!(told(&"x".repeat(LONGEST + 1)).contains("4097 bytes"));
        let secret = JobSecret::of_text("X", "  correct horse battery staple \n").unwrap();
        assert_eq!(secret.line(), "correct horse battery staple\n");
        assert_eq!(format!("{secret:?}"), "Secret(...)");
        assert_eq!(JobSecret::of_line(secret.line().as_bytes()).unwrap(), secret);
        assert!(JobSecret::of_line(&b""[..]).is_err());
        assert_ne!(JobSecret::random().unwrap(), JobSecret::random().unwrap());
    }

    /// HMAC-SHA256 as Python's `hmac` and `hashlib` compute it: no other program has to agree, but a mistake here would hold
    /// against nothing.
    #[test]
    fn a_seal_is_the_hmac_of_key_number_and_message() {
        let secret = JobSecret::of_text("X", "correct horse battery staple").unwrap();
        let key = secret.key(KeyPurpose::ToFirst, &[1; NONCE], &[2; NONCE]);
        insta::assert_snapshot!(key.seal(3, b"hello"), @"0acd3d093015f0f40ab590a5efd14b367711268fd349aa08ccf58e935c3be686");
    }

    #[test]
    fn a_seal_holds_for_one_message_one_number_one_purpose_and_one_connection() {
        let secret = JobSecret::of_text("X", "correct horse battery staple").unwrap();
        let key = |purpose, first: u8, host: u8| secret.key(purpose, &[first; NONCE], &[host; NONCE]);
        let own = key(KeyPurpose::ToFirst, 1, 2);
        let seal = own.seal(3, b"hello");
        assert!(own.is_sealed(3, b"hello", seal.as_bytes()));
        assert!(!own.is_sealed(4, b"hello", seal.as_bytes()) && !own.is_sealed(3, b"hallo", seal.as_bytes()));
        for other in [key(KeyPurpose::FromFirst, 1, 2), key(KeyPurpose::ToFirst, 2, 2), key(KeyPurpose::ToFirst, 1, 1)]
        {
            assert!(!other.is_sealed(3, b"hello", seal.as_bytes()));
        }
        let other = JobSecret::of_text("X", "correct horse battery stable").unwrap();
        let other = other.key(KeyPurpose::ToFirst, &[1; NONCE], &[2; NONCE]);
        assert!(!other.is_sealed(3, b"hello", seal.as_bytes()));
        for wrong in ["", "00", &seal[1..], &format!("{seal}0"), &"zz".repeat(32), &"00".repeat(32)] {
            assert!(!own.is_sealed(3, b"hello", wrong.as_bytes()), "{wrong}");
        }
    }
}
