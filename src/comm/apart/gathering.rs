//! The ranks that have come to rank 0, and what is heard of each.

use super::peer::Peer;
use super::socket::{address, system};
use super::wire::{self, Hello};
use crate::error::{CommError, Result};
use crate::util::list;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::os::fd::BorrowedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;

/// Rank 0's socket, and the connections to it.
pub(super) struct Gathering {
    listener: UnixListener,
    port: u16,
    world: usize,
    guests: Vec<Guest>,
}

struct Guest {
    stream: UnixStream,
    process: i32,
    /// Once it has said so.
    rank: Option<usize>,
}

/// What is heard.
#[derive(Debug)]
pub(super) enum News {
    /// A rank has come.
    Came,
    /// Nothing more will be heard of a rank: its process has ended.
    Gone(usize),
    /// A process cannot take part.
    Unfit(CommError),
}

impl Gathering {
    /// Begins to listen.
    ///
    /// # Errors
    /// Another process does at this port; the system's.
    pub(super) fn open(port: u16, world: usize) -> Result<Self> {
        let listener = UnixListener::bind_addr(&address(port)?).map_err(|error| match error.kind() {
            std::io::ErrorKind::AddrInUse => CommError::MeetingTaken { port },
            _ => system("open a socket for")(error),
        })?;
        Ok(Self { listener, port, world, guests: Vec::new() })
    }

    /// Which of the other ranks are there.
    fn there(&self) -> Vec<bool> {
        (0..self.world).map(|rank| rank == 0 || self.guests.iter().any(|guest| guest.rank == Some(rank))).collect()
    }

    pub(super) fn is_complete(&self) -> bool {
        self.there().into_iter().all(|there| there)
    }

    /// The error that some have not come within the limit.
    pub(super) fn incomplete(&self, limit: Duration) -> CommError {
        let there = self.there();
        let missing: Vec<String> = (0..self.world).filter(|rank| !there[*rank]).map(|rank| rank.to_string()).collect();
        let (world, port) = (self.world, self.port);
        CommError::RanksMissing { came: world - missing.len(), world, missing: list(&missing), port, limit }
    }

    /// Waits for news, up to `limit`.
    ///
    /// # Errors
    /// The system's.
    pub(super) fn next(&mut self, limit: Option<Duration>) -> Result<Vec<News>> {
        let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
        let mut watched: Vec<PollFd<'_>> = self.guests.iter().map(|g| PollFd::new(&g.stream, PollFlags::IN)).collect();
        watched.push(PollFd::new(&self.listener, PollFlags::IN));
        match poll(&mut watched, limit.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(system("listen for")(error.into()).into()),
        }
        let mut ready: Vec<bool> = watched.iter().map(|fd| !fd.revents().is_empty()).collect();
        drop(watched);
        let comes = ready.pop().unwrap_or(false);
        let mut news = Vec::new();
        for (guest, ready) in std::mem::take(&mut self.guests).into_iter().zip(ready) {
            if ready { news.extend(self.hear(guest)) } else { self.guests.push(guest) }
        }
        if comes
            && let Ok((stream, _)) = self.listener.accept()
            && let Ok(peer) = Peer::of(&stream)
            // Whoever else finds the name has no business here.
            && peer.is_own()
        {
            self.guests.push(Guest { stream, process: peer.process, rank: None });
        }
        Ok(news)
    }

    /// What a guest has to say, who is then still there or not.
    fn hear(&mut self, mut guest: Guest) -> Option<News> {
        if let Some(rank) = guest.rank {
            // A rank says nothing more: its end of the connection is closed.
            return Some(News::Gone(rank));
        }
        let Hello { rank, world } = Hello::take(&guest.stream)?;
        let same = self.guests.iter().find(|other| other.rank == Some(rank));
        let error = if world != self.world {
            CommError::WorldsDiffer { rank, world, first: self.world, port: self.port }
        } else if rank == 0 || rank >= world || same.is_some() {
            let earlier = same.map_or(std::process::id() as i32, |same| same.process);
            CommError::RankTwice { rank, earlier, later: guest.process, port: self.port }
        } else {
            guest.rank = Some(rank);
            self.guests.push(guest);
            return Some(News::Came);
        };
        // One that is gone already needs no reason.
        _ = wire::turn_away(&guest.stream, &error.to_string());
        Some(News::Unfit(error))
    }

    /// Gives all ranks the memory.
    ///
    /// # Errors
    /// One is gone.
    pub(super) fn welcome(&self, memory: BorrowedFd<'_>) -> Result<(), CommError> {
        for guest in &self.guests {
            if let (Some(rank), Err(_)) = (guest.rank, wire::welcome(&guest.stream, memory)) {
                return Err(CommError::GoneBeforeStart { rank });
            }
        }
        Ok(())
    }

    /// Tells all why nothing comes of it.
    pub(super) fn turn_away(self, why: &str) {
        for guest in &self.guests {
            _ = wire::turn_away(&guest.stream, why);
        }
    }
}
