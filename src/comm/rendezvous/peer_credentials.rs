//! The credentials of the process at the other end of a socket.

use std::ffi::{c_int, c_void};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;

/// Linux's `SOL_SOCKET`.
const SOL_SOCKET: c_int = 1;
/// Linux's `SO_PEERCRED`, the socket option that returns a `struct ucred`.
const SO_PEERCRED: c_int = 17;

/// The credentials of the process at the other end, according to the kernel.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub(super) struct PeerCredentials {
    /// The process ID; 0 if the process is in another PID namespace.
    pub(super) process: i32,
    pub(super) user: u32,
    group: u32,
}

unsafe extern "C" {
    fn getsockopt(socket: c_int, level: c_int, name: c_int, value: *mut c_void, len: *mut u32) -> c_int;
}

impl PeerCredentials {
    /// Queries the kernel for the credentials.
    ///
    /// # Errors
    /// Fails if a system call fails.
    pub(super) fn of(stream: &UnixStream) -> io::Result<Self> {
        let mut peer = Self::default();
        let mut len = size_of::<Self>() as u32;
        // SAFETY: the socket is open, and `peer` has `len` bytes of memory, in which any bytes are valid.
        let code =
            unsafe { getsockopt(stream.as_raw_fd(), SOL_SOCKET, SO_PEERCRED, (&raw mut peer).cast(), &raw mut len) };
        if code == 0 { Ok(peer) } else { Err(io::Error::last_os_error()) }
    }

    /// Returns whether the process belongs to this user.
    pub(super) fn is_own(self) -> bool {
        self.user == rustix::process::geteuid().as_raw()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_other_end_of_a_pair_is_this_process() {
        let (one, _other) = UnixStream::pair().unwrap();
        let peer = PeerCredentials::of(&one).unwrap();
        assert_eq!(peer.process, std::process::id() as i32);
        assert!(peer.is_own());
    }
}
