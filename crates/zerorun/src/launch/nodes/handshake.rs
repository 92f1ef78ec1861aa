//! The handshake in which two connected launchers check that they belong to one job, before either reveals anything
//! about it.
//!
//! ```text
//!   first -> host    Challenge: version, a random number for this connection, whether there is a secret
//!   host  -> first   Answer: version, its name, its own random number, whether it has a secret, and a proof that it
//!                    knows the secret
//!   first -> host    Welcome: a proof that it also knows the secret; or Refused
//! ```
//!
//! A proof is a seal (an HMAC) under a key that is derived from the secret and both random numbers. The first host
//! proves nothing to a host that has not proved itself. If there is a secret, all later messages are sealed.

use super::secret::{JobSecret, KeyPurpose, NONCE_BYTES, nonce, of_hex};
use super::wire::{LauncherConnection, ReadDeadline, is_another_program};
use candle_zero::util::hex;
use serde::{Deserialize, Serialize};

/// The maximum number of bytes in a line.
const MAX_LINE_BYTES: usize = 4096;
/// The text that a proof seals. It is empty, because the host's version and name are not secret, and an attacker gains
/// nothing by changing them.
const SEALED_PROOF_TEXT: &[u8] = b"";

/// This version of `zerorun`.
const VERSION: &str = env!("CARGO_PKG_VERSION");

#[derive(Debug, Serialize, Deserialize)]
enum HandshakeMessage {
    Challenge { version: String, nonce: String, has_secret: bool },
    Answer { version: String, host: String, nonce: String, has_secret: bool, proof: Option<String> },
    Welcome { proof: Option<String> },
    Refused(String),
}

/// The reason why a handshake fails.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum HandshakeError {
    /// The first host has refused the joining host, or the joining host itself cannot join, for this reason. `host` is
    /// the joining host's own name.
    Refused { host: String, why: String },
    /// The other side is not a launcher.
    NoLauncher,
    /// The connection ended, or the other side took too long to answer.
    Lost(String),
}

impl HandshakeError {
    fn of(why: String) -> Self {
        if is_another_program(&why) { Self::NoLauncher } else { Self::Lost(why) }
    }

    fn refused(host: &str, why: impl Into<String>) -> Self {
        Self::Refused { host: printable(host, 64), why: why.into() }
    }
}

/// Runs the first host's side: checks whether the other host may send its Hello, and returns that host's name.
pub(super) fn receive(
    session: &mut LauncherConnection,
    secret: Option<&JobSecret>,
    wait: ReadDeadline,
) -> Result<String, HandshakeError> {
    let our_nonce = nonce().map_err(|error| HandshakeError::Lost(error.to_string()))?;
    session.send(&HandshakeMessage::Challenge {
        version: VERSION.into(),
        nonce: hex(&our_nonce),
        has_secret: secret.is_some(),
    });
    let answer = session.next(MAX_LINE_BYTES, wait).map_err(HandshakeError::of)?;
    let HandshakeMessage::Answer { version, host, nonce, has_secret, proof } = answer else {
        return Err(HandshakeError::NoLauncher);
    };
    let problem = if version != VERSION {
        Some(format!(
            "zerorun is version {VERSION} on the first host and {} on the other; install the same version",
            printable(&version, 40)
        ))
    } else {
        match (secret.is_some(), has_secret) {
            (true, false) => Some(format!(
                "the first host has a secret but the other has none; set {} to the same value on every host",
                super::secret::SECRET
            )),
            (false, true) => Some(format!(
                "the other host has a secret but the first has none; set {} to the same value on every host, or on \
                 none",
                super::secret::SECRET
            )),
            _ => None,
        }
    };
    let refuse = |session: &mut LauncherConnection, why: String| {
        session.send(&HandshakeMessage::Refused(why.clone()));
        HandshakeError::refused(&host, why)
    };
    if let Some(problem) = problem {
        return Err(refuse(session, problem));
    }
    let Some(secret) = secret else {
        session.send(&HandshakeMessage::Welcome { proof: None });
        return Ok(printable(&host, 64));
    };
    let Some(their_nonce) = of_hex::<NONCE_BYTES>(nonce.as_bytes()) else { return Err(HandshakeError::NoLauncher) };
    let key = |purpose| secret.key(purpose, &our_nonce, &their_nonce);
    if !key(KeyPurpose::ProofOfHost).is_sealed(0, SEALED_PROOF_TEXT, proof.unwrap_or_default().as_bytes()) {
        let why = format!(
            "its secret differs from the first host's; set {} to the same value on every host",
            super::secret::SECRET
        );
        return Err(refuse(session, why));
    }
    session.send(&HandshakeMessage::Welcome { proof: Some(key(KeyPurpose::ProofOfFirst).seal(0, SEALED_PROOF_TEXT)) });
    session.seal(key(KeyPurpose::ToFirst), key(KeyPurpose::FromFirst));
    Ok(printable(&host, 64))
}

/// Runs the side of the joining host, which is called `host`.
pub(super) fn introduce(
    session: &mut LauncherConnection,
    secret: Option<&JobSecret>,
    host: &str,
    wait: ReadDeadline,
) -> Result<(), HandshakeError> {
    let challenge = session.next(MAX_LINE_BYTES, wait).map_err(HandshakeError::of)?;
    let HandshakeMessage::Challenge { nonce: their_nonce, has_secret, .. } = challenge else {
        return Err(HandshakeError::NoLauncher);
    };
    let Some(their_nonce) = of_hex::<NONCE_BYTES>(their_nonce.as_bytes()) else {
        return Err(HandshakeError::NoLauncher);
    };
    let our_nonce = nonce().map_err(|error| HandshakeError::Lost(error.to_string()))?;
    let key = |secret: &JobSecret, purpose| secret.key(purpose, &their_nonce, &our_nonce);
    let prover = secret.filter(|_| has_secret);
    session.send(&HandshakeMessage::Answer {
        version: VERSION.into(),
        host: host.into(),
        nonce: hex(&our_nonce),
        has_secret: secret.is_some(),
        proof: prover.map(|secret| key(secret, KeyPurpose::ProofOfHost).seal(0, SEALED_PROOF_TEXT)),
    });
    let proof = match session.next(MAX_LINE_BYTES, wait).map_err(HandshakeError::of)? {
        HandshakeMessage::Welcome { proof } => proof.unwrap_or_default(),
        HandshakeMessage::Refused(why) => return Err(HandshakeError::refused(host, printable(&why, 1000))),
        _ => return Err(HandshakeError::NoLauncher),
    };
    match secret {
        Some(secret) if key(secret, KeyPurpose::ProofOfFirst).is_sealed(0, SEALED_PROOF_TEXT, proof.as_bytes()) => {
            session.seal(key(secret, KeyPurpose::FromFirst), key(secret, KeyPurpose::ToFirst));
            Ok(())
        }
        Some(_) => Err(HandshakeError::refused(
            host,
            "the program at --master_addr does not know the secret, so it is not this job's first host, and nothing about \
             the job was sent to it; check --master_addr and --master_port",
        )),
        None => Ok(()),
    }
}

/// Returns untrusted text in a form that is safe for a terminal or a log: shortened, and with its control characters
/// escaped.
pub(super) fn printable(text: &str, max_chars: usize) -> String {
    let mut characters = text.chars();
    let mut output = String::new();
    for character in characters.by_ref().take(max_chars) {
        match character {
            // Characters that change the text direction can disguise a line.
            '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => {
                output.extend(character.escape_unicode());
            }
            _ if character.is_control() => output.extend(character.escape_default()),
            _ => output.push(character),
        }
    }
    if characters.next().is_some() {
        output += "...";
    }
    output
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::wire::ends::{deadline, pair, session};
    use super::super::wire::{LauncherMessage, MAX_MESSAGE_BYTES};
    use super::*;
    use std::io::{BufRead, BufReader, Write};

    fn secret(text: &str) -> Option<JobSecret> {
        (!text.is_empty()).then(|| JobSecret::of_text("X", text).unwrap())
    }

    type Ends = (Result<String, HandshakeError>, Result<(), HandshakeError>);

    /// Returns the results of both sides with these secrets, and their sessions.
    fn greet(first: &str, host: &str) -> (Ends, [LauncherConnection; 2]) {
        let [here, there] = pair().map(session);
        let (first, host) = (secret(first), secret(host));
        let first = std::thread::spawn(move || {
            let mut here = here;
            (receive(&mut here, first.as_ref(), deadline()), here)
        });
        let mut there = there;
        let result = introduce(&mut there, host.as_ref(), "b", deadline());
        let (received, here) = first.join().unwrap();
        ((received, result), [here, there])
    }

    const OUR_SECRET: &str = "correct horse battery staple";

    #[test]
    fn both_sides_go_on_where_they_have_one_secret_or_none_and_what_follows_is_sealed() {
        for both in [OUR_SECRET, ""] {
            let ((received, result), [mut here, mut there]) = greet(both, both);
            assert_eq!((received, result), (Ok("b".into()), Ok(())), "{both}");
            there.send(&LauncherMessage::Signal(2));
            here.send(&LauncherMessage::Signal(15));
            assert_eq!(here.next::<LauncherMessage>(MAX_MESSAGE_BYTES, deadline()), Ok(LauncherMessage::Signal(2)));
            assert_eq!(there.next::<LauncherMessage>(MAX_MESSAGE_BYTES, deadline()), Ok(LauncherMessage::Signal(15)));
        }
    }

    #[test]
    fn a_host_with_another_secret_or_none_is_refused_and_both_sides_say_why() {
        let refusal = |first: &str, host: &str| {
            let ((received, result), _) = greet(first, host);
            let (Err(HandshakeError::Refused { host, why }), Err(result)) = (received, result) else {
                panic!("{first} {host}")
            };
            assert_eq!(result, HandshakeError::Refused { host, why: why.clone() });
            why
        };
        insta::assert_snapshot!(refusal(OUR_SECRET, ""), @"the first host has a secret but the other has none; set CANDLE_ZERO_SECRET to the same value on every host");
        insta::assert_snapshot!(refusal("", OUR_SECRET), @"the other host has a secret but the first has none; set CANDLE_ZERO_SECRET to the same value on every host, or on none");
        insta::assert_snapshot!(refusal(OUR_SECRET, "correct horse battery stable"), @"its secret differs from the first host's; set CANDLE_ZERO_SECRET to the same value on every host");
    }

    /// Returns what a program in the first host's place learns about a host after sending these lines.
    fn heard_by_a_stranger(lines: &[&str]) -> (String, Result<(), HandshakeError>) {
        let [here, there] = pair();
        for line in lines {
            (&here).write_all(format!("{line}\n").as_bytes()).unwrap();
        }
        here.shutdown(std::net::Shutdown::Write).unwrap();
        let mut there = session(there);
        let result = introduce(&mut there, secret(OUR_SECRET).as_ref(), "b", deadline());
        drop(there);
        let mut heard = String::new();
        for line in BufReader::new(here).lines() {
            heard += &(line.unwrap_or_default() + "\n");
        }
        (heard, result)
    }

    #[test]
    fn a_program_in_the_first_hosts_place_gets_no_proof_without_a_challenge_and_no_host_without_its_own() {
        let challenge = |has_secret: bool| {
            let nonce = "00".repeat(NONCE_BYTES);
            format!("{{\"Challenge\":{{\"version\":\"{VERSION}\",\"nonce\":\"{nonce}\",\"has_secret\":{has_secret}}}}}")
        };
        let welcome = |proof: &str| format!("{{\"Welcome\":{{\"proof\":{proof}}}}}");
        for (has_secret, proof) in [(true, "null"), (true, "\"00\""), (false, "null")] {
            let (heard, result) = heard_by_a_stranger(&[&challenge(has_secret), &welcome(proof)]);
            assert!(
                matches!(&result, Err(HandshakeError::Refused { why, .. }) if why.contains("does not know the secret")),
                "{result:?}"
            );
            assert_eq!(heard.contains("\"proof\":null"), !has_secret, "{heard}");
            assert!(!heard.contains(OUR_SECRET), "{heard}");
        }
        // The host's own proof, sent back to it.
        let (heard, _) = heard_by_a_stranger(&[&challenge(true)]);
        let proof = heard.split("\"proof\":").nth(1).unwrap().trim_end().trim_end_matches('}').to_string();
        let (_, result) = heard_by_a_stranger(&[&challenge(true), &welcome(&proof)]);
        assert!(matches!(result, Err(HandshakeError::Refused { .. })), "{result:?}");
        for wrong in ["SSH-2.0-OpenSSH_9.2", "{}", "", &challenge(true).replace("00", "0")] {
            assert_eq!(heard_by_a_stranger(&[wrong]).1, Err(HandshakeError::NoLauncher), "{wrong}");
        }
    }

    #[test]
    fn an_answer_that_was_heard_on_another_connection_is_of_no_use() {
        let answer_to = |answer: Option<String>| {
            let [here, there] = pair();
            let first =
                std::thread::spawn(move || receive(&mut session(here), secret(OUR_SECRET).as_ref(), deadline()));
            let mut own = session(there.try_clone().unwrap());
            let Some(answer) = answer else {
                // The host itself answers.
                let _ = introduce(&mut own, secret(OUR_SECRET).as_ref(), "b", deadline());
                return first.join().unwrap();
            };
            (&there).write_all(answer.as_bytes()).unwrap();
            first.join().unwrap()
        };
        assert_eq!(answer_to(None), Ok("b".into()));
        let nonce = "00".repeat(NONCE_BYTES);
        let challenge =
            format!("{{\"Challenge\":{{\"version\":\"{VERSION}\",\"nonce\":\"{nonce}\",\"has_secret\":true}}}}");
        let (heard, _) = heard_by_a_stranger(&[&challenge]);
        assert!(
            matches!(answer_to(Some(heard)), Err(HandshakeError::Refused { why, .. }) if why.contains("its secret"))
        );
    }

    #[test]
    fn a_strangers_words_are_printed_without_what_a_terminal_obeys() {
        assert_eq!(printable("a\u{1b}[2J\nb\u{202e}", 99), "a\\u{1b}[2J\\nb\\u{202e}");
        assert_eq!(printable("abcdef", 3), "abc...");
    }
}
