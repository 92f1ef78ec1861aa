//! The connection between two launchers: the handshake, and messages after it.

#[path = "../../../../crates/zerorun/src/launch/nodes/checksums.rs"]
mod checksums;
#[path = "../../../../crates/zerorun/src/launch/nodes/handshake.rs"]
mod handshake;
#[path = "../../../../crates/zerorun/src/launch/nodes/secret.rs"]
mod secret;
#[path = "../../../../crates/zerorun/src/launch/nodes/wire.rs"]
mod wire;

use rustix::net::sockopt::set_socket_linger;
use secret::JobSecret;
use std::io::Write;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use wire::{LauncherConnection, LauncherMessage, ReadDeadline};

/// The maximum length of a message in bytes.
const MAX_MESSAGE_LENGTH: usize = 1 << 16;

/// Reads each line as a message. Returns whether all lines are messages.
///
/// # Panics
/// Panics if a message differs after it has been written and read again.
pub(crate) fn messages(data: &[u8]) -> bool {
    data.split(|byte| *byte == b'\n').all(|line| {
        let Ok(message) = serde_json::from_slice::<LauncherMessage>(line) else { return false };
        let text = serde_json::to_vec(&message).expect("a message can be written");
        let again: LauncherMessage = serde_json::from_slice(&text).expect("a written message can be read");
        assert_eq!(again, message);
        true
    })
}

/// Reads a stream as the first host's launcher does or, if `joins` is true, as another host's launcher does: the
/// handshake, then messages. Returns whether the handshake succeeds.
pub(crate) fn session(data: &[u8], joins: bool, has_secret: bool) -> bool {
    let [reader, mut writer] = ends();
    std::thread::scope(|scope| {
        // The data is written in a thread, because the reader stops at the first error and leaves the rest.
        scope.spawn(move || {
            let _ = writer.write_all(data);
            let _ = writer.shutdown(Shutdown::Write);
            writer
        });
        let reader = Arc::new(reader);
        let result = read(&reader, joins, has_secret);
        // Closes the connection without TIME_WAIT, which would keep the port for a minute.
        let _ = set_socket_linger(&*reader, Some(Duration::ZERO));
        result
    })
}

fn read(stream: &Arc<TcpStream>, joins: bool, has_secret: bool) -> bool {
    let wait = ReadDeadline::Silence(Duration::from_secs(5));
    let secret = has_secret.then(|| JobSecret::of_text("the test", "0123456789abcdef").expect("a valid secret"));
    let Ok(mut session) = LauncherConnection::over(stream.clone()) else { return false };
    let succeeded = match joins {
        true => handshake::introduce(&mut session, secret.as_ref(), "host", wait).is_ok(),
        false => handshake::receive(&mut session, secret.as_ref(), wait).is_ok(),
    };
    if succeeded {
        while session.next::<LauncherMessage>(MAX_MESSAGE_LENGTH, wait).is_ok() {}
    }
    let _ = stream.shutdown(Shutdown::Read);
    succeeded
}

/// Returns the two ends of a connection.
fn ends() -> [TcpStream; 2] {
    static LISTENER: OnceLock<TcpListener> = OnceLock::new();
    let listener = LISTENER.get_or_init(|| TcpListener::bind(("127.0.0.1", 0)).expect("a free port"));
    let client = TcpStream::connect(listener.local_addr().expect("an address")).expect("a connection");
    [listener.accept().expect("a connection").0, client]
}
