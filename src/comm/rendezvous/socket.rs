//! The socket through which the ranks of one host meet.

use crate::error::{CommError, Result};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::SocketAddr;
use std::sync::Arc;

/// Returns the address of the socket for this user's job on the given port.
pub(super) fn address(port: u16) -> Result<SocketAddr> {
    let user = rustix::process::geteuid().as_raw();
    let name = format!("candle-zero ranks of user {user} at port {port}");
    Ok(SocketAddr::from_abstract_name(name).map_err(system("name the socket of rank 0"))?)
}

/// Returns a function that wraps a system error, with the attempted action.
pub(super) fn system(action: &'static str) -> impl Fn(std::io::Error) -> CommError {
    move |source| CommError::Region { action, source: Arc::new(source) }
}
