//! Joins a host to the job: the handshake, then its Hello, which the first host accepts or refuses.

use super::acceptor::MAX_UNAUTHENTICATED_BYTES;
use super::handshake::{self, HandshakeError, printable};
use super::secret::{JobSecret, SECRET};
use super::wire::{HostHello, LauncherConnection, LauncherMessage, MAX_MESSAGE_BYTES, ReadDeadline};
use std::collections::BTreeMap;
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Introduces this host, and waits up to `patience` to be admitted or refused.
pub(super) fn join(
    stream: TcpStream,
    secret: Option<&JobSecret>,
    hello: &HostHello,
    patience: Duration,
) -> Result<LauncherConnection, HandshakeError> {
    let refused = |why: String| HandshakeError::Refused { host: hello.host.clone(), why };
    let wait = ReadDeadline::Until(Instant::now() + patience);
    let mut session =
        LauncherConnection::over(Arc::new(stream)).map_err(|error| HandshakeError::Lost(error.to_string()))?;
    handshake::introduce(&mut session, secret, &hello.host, wait)?;
    let hello = shorten_to_fit(hello, if secret.is_some() { MAX_MESSAGE_BYTES } else { MAX_UNAUTHENTICATED_BYTES })
        .map_err(refused)?;
    session.send(&LauncherMessage::Hello(hello));
    match session.next(MAX_UNAUTHENTICATED_BYTES, wait).map_err(HandshakeError::Lost)? {
        LauncherMessage::Joined => Ok(session),
        LauncherMessage::Refused(why) => Err(refused(printable(&why, 4000))),
        _ => Err(HandshakeError::NoLauncher),
    }
}

/// Returns a host's Hello, which must fit in a line of at most `max_bytes` bytes. If it is too long, the folders, whose
/// comparison gives only warnings, are left out.
fn shorten_to_fit(hello: &HostHello, max_bytes: usize) -> Result<HostHello, String> {
    // 100 bytes suffice for the seal and the JSON characters around the Hello.
    let fits = |hello: &HostHello| serde_json::to_vec(hello).is_ok_and(|text| text.len() + 100 < max_bytes);
    if fits(hello) {
        return Ok(hello.clone());
    }
    let without_folders = HostHello { folders: BTreeMap::new(), ..hello.clone() };
    if fits(&without_folders) {
        return Ok(without_folders);
    }
    Err(format!(
        "the program's arguments and the files that they name take more than {max_bytes} bytes to compare; name a \
         folder instead of its files, or set {} on every host, which raises this limit",
        SECRET
    ))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::admission::tests::hello;
    use super::*;

    #[test]
    fn folders_are_left_out_where_all_takes_more_than_a_stranger_may_say_and_arguments_are_not() {
        let files = |number: usize| (0..number).map(|at| (format!("{at}"), "0 bytes".to_string())).collect();
        let small = HostHello { folders: BTreeMap::from([("data".into(), files(10))]), ..hello("b") };
        assert_eq!(shorten_to_fit(&small, MAX_UNAUTHENTICATED_BYTES).unwrap(), small);
        let large = HostHello { folders: BTreeMap::from([("data".into(), files(100_000))]), ..hello("b") };
        assert_eq!(shorten_to_fit(&large, MAX_UNAUTHENTICATED_BYTES).unwrap(), hello("b"));
        assert_eq!(shorten_to_fit(&large, MAX_MESSAGE_BYTES).unwrap(), large);
        let many_files = HostHello { files: files(100_000), ..hello("b") };
        let message = shorten_to_fit(&many_files, MAX_UNAUTHENTICATED_BYTES).unwrap_err();
        insta::assert_snapshot!(message, @"the program's arguments and the files that they name take more than 1048576 bytes to compare; name a folder instead of its files, or set CANDLE_ZERO_SECRET on every host, which raises this limit");
    }
}
