//! Where ranks of one host meet.

use crate::error::{CommError, Result};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::SocketAddr;
use std::sync::Arc;

/// The name of the socket at which this user's job with a port meets.
pub(super) fn address(port: u16) -> Result<SocketAddr> {
    let user = rustix::process::geteuid().as_raw();
    let name = format!("candle-zero ranks of user {user} at port {port}");
    Ok(SocketAddr::from_abstract_name(name).map_err(system("name a socket for"))?)
}

/// An error of the system's, with what was tried.
pub(super) fn system(action: &'static str) -> impl Fn(std::io::Error) -> CommError {
    move |source| CommError::Region { action, source: Arc::new(source) }
}
