//! The ranks that have connected to rank 0, and the events on their connections.

use super::messages::{self, JoinRequest};
use super::peer_credentials::PeerCredentials;
use super::socket::{address, system};
use crate::error::{CommError, Result};
use crate::util::list;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::os::fd::BorrowedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;

/// Rank 0's socket, and the connections to it.
pub(super) struct RendezvousMembers {
    listener: UnixListener,
    port: u16,
    world: usize,
    connections: Vec<MemberConnection>,
}

struct MemberConnection {
    stream: UnixStream,
    process: i32,
    /// The rank, once the process has sent it.
    rank: Option<usize>,
}

/// An event concerning the other ranks, as seen by rank 0.
#[derive(Debug)]
pub(super) enum MembershipEvent {
    /// A rank has connected.
    Connected,
    /// The process of a rank has ended: it will send nothing more.
    Disconnected(usize),
    /// A process cannot join.
    Rejected(CommError),
}

impl RendezvousMembers {
    /// Starts listening.
    ///
    /// # Errors
    /// Fails if another process is listening on this port or a system call fails.
    pub(super) fn open(port: u16, world: usize) -> Result<Self> {
        let listener = UnixListener::bind_addr(&address(port)?).map_err(|error| match error.kind() {
            std::io::ErrorKind::AddrInUse => CommError::MasterPortInUse { port },
            _ => system("open a socket for the other ranks")(error),
        })?;
        Ok(Self { listener, port, world, connections: Vec::new() })
    }

    /// Returns for each rank whether it has connected.
    fn connected_ranks(&self) -> Vec<bool> {
        (0..self.world)
            .map(|rank| rank == 0 || self.connections.iter().any(|connection| connection.rank == Some(rank)))
            .collect()
    }

    pub(super) fn is_complete(&self) -> bool {
        self.connected_ranks().into_iter().all(|connected| connected)
    }

    /// Returns the error for ranks that have not connected within the limit.
    pub(super) fn incomplete(&self, limit: Duration) -> CommError {
        let connected = self.connected_ranks();
        let missing: Vec<String> =
            (0..self.world).filter(|rank| !connected[*rank]).map(|rank| rank.to_string()).collect();
        let (world, port) = (self.world, self.port);
        CommError::RanksMissing { connected: world - missing.len(), world, missing: list(&missing), port, limit }
    }

    /// Waits for events, for at most `limit` (`None` means without a limit).
    ///
    /// # Errors
    /// Fails if a system call fails.
    pub(super) fn next(&mut self, limit: Option<Duration>) -> Result<Vec<MembershipEvent>> {
        let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
        let mut poll_fds: Vec<PollFd<'_>> =
            self.connections.iter().map(|g| PollFd::new(&g.stream, PollFlags::IN)).collect();
        poll_fds.push(PollFd::new(&self.listener, PollFlags::IN));
        match poll(&mut poll_fds, limit.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(system("listen for the other ranks")(error.into()).into()),
        }
        let mut ready: Vec<bool> = poll_fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        drop(poll_fds);
        let has_new_connection = ready.pop().unwrap_or(false);
        let mut events = Vec::new();
        for (connection, ready) in std::mem::take(&mut self.connections).into_iter().zip(ready) {
            if ready { events.extend(self.read_request(connection)) } else { self.connections.push(connection) }
        }
        if has_new_connection
            && let Ok((stream, _)) = self.listener.accept()
            && let Ok(peer) = PeerCredentials::of(&stream)
            // Connections from other users' processes are ignored.
            && peer.is_own()
        {
            self.connections.push(MemberConnection { stream, process: peer.process, rank: None });
        }
        Ok(events)
    }

    /// Reads a rank's request from its connection, and keeps or drops the connection.
    fn read_request(&mut self, mut connection: MemberConnection) -> Option<MembershipEvent> {
        if let Some(rank) = connection.rank {
            // A rank sends nothing after its request, so an event on its connection means that it has closed its end.
            return Some(MembershipEvent::Disconnected(rank));
        }
        let JoinRequest { rank, world } = JoinRequest::take(&connection.stream)?;
        let duplicate = self.connections.iter().find(|other| other.rank == Some(rank));
        let error = if world != self.world {
            CommError::WorldsDiffer { rank, world, first: self.world, port: self.port }
        } else if rank == 0 || rank >= world || duplicate.is_some() {
            let earlier = duplicate.map_or(std::process::id() as i32, |duplicate| duplicate.process);
            CommError::RankTwice { rank, earlier, later: connection.process, port: self.port }
        } else {
            connection.rank = Some(rank);
            self.connections.push(connection);
            return Some(MembershipEvent::Connected);
        };
        // If this fails, the process is already gone and needs no reason.
        _ = messages::reject(&connection.stream, &error.to_string());
        Some(MembershipEvent::Rejected(error))
    }

    /// Sends all ranks the shared memory.
    ///
    /// # Errors
    /// Fails if a rank is gone.
    pub(super) fn welcome(&self, memory: BorrowedFd<'_>) -> Result<(), CommError> {
        for connection in &self.connections {
            if let (Some(rank), Err(_)) = (connection.rank, messages::welcome(&connection.stream, memory)) {
                return Err(CommError::GoneBeforeStart { rank });
            }
        }
        Ok(())
    }

    /// Sends all ranks the reason why the rendezvous failed.
    pub(super) fn reject_all(self, why: &str) {
        for connection in &self.connections {
            _ = messages::reject(&connection.stream, why);
        }
    }
}
