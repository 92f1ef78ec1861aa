//! The ranks that save into the same folder: all of them or, with `use_node_local_storage`, those of each host.
//!
//! Hosts that share a folder despite that setting save into it together, whatever its path is on each of them.

use super::folder::{VISIBILITY_PREFIX, create_all, write_error};
use super::rank_agreement::{remote_failure, same_on_all_ranks};
use crate::comm::Communicator;
use crate::comm::agree::{JointOperationFailure, agree, gather_u64, texts};
use crate::error::{CheckpointError, Result};
use crate::files::new_temp_file;
use crate::util::fnv1a;
use rustix::fs::{FlockOperation, flock};
use std::path::Path;
use tempfile::NamedTempFile;

/// The ranks of each folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RanksByFolder {
    rank: usize,
    /// For each rank, the first of the ranks that use its folder.
    firsts: Vec<usize>,
}

impl RanksByFolder {
    /// Finds the ranks that share `dir`: all ranks or, with `on_each_host`, those of each host. With
    /// `on_each_host` and several hosts, `dir` is created on each of them. Collective.
    ///
    /// # Errors
    /// Fails on all ranks if ranks that must share a folder give different paths or if a folder cannot be written, and
    /// if a collective fails.
    pub fn of(comm: &dyn Communicator, dir: &Path, on_each_host: bool) -> Result<Self, JointOperationFailure> {
        if !on_each_host {
            same_on_all_ranks(comm, "folders", &dir.to_string_lossy(), dir)?;
            return Ok(Self { rank: comm.rank(), firsts: vec![0; comm.size()] });
        }
        let hosts = Self::by_neighbours(comm, dir)?;
        let marker = match hosts.makes_folder() && hosts.are_several() {
            true => marker(dir).map(Some).map_err(|e| write_error(dir, &e)),
            false => Ok(None),
        };
        let marker = agree(comm, marker, remote_failure(dir))?;
        let name = |marker: &NamedTempFile| marker.path().file_name().map(|name| name.to_string_lossy().into_owned());
        let names = texts(comm, &marker.as_ref().and_then(name).unwrap_or_default())?;
        let is_seen = |rank: &usize| !names[*rank].is_empty() && dir.join(&names[*rank]).exists();
        let host_first = hosts.firsts[hosts.rank];
        let folder_first =
            if marker.is_some() { (0..host_first).find(is_seen).unwrap_or(host_first) } else { host_first };
        let folder_first = gather_u64(comm, &[folder_first as u64])?;
        let firsts = hosts.firsts.iter().map(|first| folder_first[*first][0] as usize).collect();
        Ok(Self { firsts, ..hosts })
    }

    /// Groups the ranks by host. All ranks of a host must name the same folder. Collective.
    ///
    /// # Errors
    /// Fails on all ranks if the ranks of a host name different folders, and if a collective fails.
    pub fn by_neighbours(comm: &dyn Communicator, dir: &Path) -> Result<Self, JointOperationFailure> {
        let own = [comm.ranks_here().start as u64, fnv1a(dir.to_string_lossy().as_bytes())];
        let all = gather_u64(comm, &own)?;
        let firsts: Vec<usize> = all.iter().map(|rank| rank[0] as usize).collect();
        if let Some(rank) = (0..comm.size()).find(|rank| all[*rank][1] != all[firsts[*rank]][1]) {
            let problem = format!(
                "ranks {rank} and {} are on one host but name different folders; this rank names {}; use the same \
                 folder on all ranks of a host",
                firsts[rank],
                dir.display()
            );
            return Err(JointOperationFailure::InStep(
                CheckpointError::Unusable { path: dir.to_owned(), problem }.into(),
            ));
        }
        Ok(Self { rank: comm.rank(), firsts })
    }

    /// Returns whether this rank creates the folder of a checkpoint and renames it.
    pub fn makes_folder(&self) -> bool {
        self.firsts[self.rank] == self.rank
    }

    /// Returns whether there are several folders.
    pub fn are_several(&self) -> bool {
        self.firsts.iter().any(|first| *first != self.firsts[0])
    }

    /// Returns the first rank that uses the folder of `rank`.
    pub fn first(&self, rank: usize) -> usize {
        self.firsts[rank]
    }

    /// Returns the first rank of each folder.
    pub fn all(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.firsts.len()).filter(|rank| self.firsts[*rank] == *rank)
    }

    /// Returns the ranks that use the folder of rank `first`.
    pub fn ranks(&self, first: usize) -> impl Iterator<Item = usize> + '_ {
        (0..self.firsts.len()).filter(move |rank| self.firsts[*rank] == first)
    }
}

/// Creates a file in `dir` that no other save removes. It is removed when the returned value is dropped.
fn marker(dir: &Path) -> std::io::Result<NamedTempFile> {
    create_all(dir)?;
    let marker = new_temp_file(dir, VISIBILITY_PREFIX)?;
    _ = flock(marker.as_file(), FlockOperation::NonBlockingLockExclusive);
    Ok(marker)
}
