//! Chooses the checkpoint to load if each host has its own folder, and finds the hosts that have its files.
//!
//! ```text
//!   each host    the tag that `latest` names, or the requested tag         -> tags
//!   each host    for each tag: checksum of the manifest, files that exist  -> the newest tag complete across all hosts
//!   one host     the manifest                                              -> all
//! ```
//!
//! On every host, a save renames the tag's folder and then makes `latest` name the tag. A job that died in between may
//! have left a tag that `latest` names on some hosts and that other hosts lack. That tag is passed over in favour of
//! the one that `latest` names on the other hosts. If all hosts name the same tag and it is incomplete, it has been
//! damaged since it was saved, which is an error.

use super::folder;
use super::manifest::{MANIFEST, Manifest};
use super::rank_agreement::remote_failure;
use super::ranks_by_folder::RanksByFolder;
use crate::comm::Communicator;
use crate::comm::agree::{JointOperationFailure, agree, texts};
use crate::error::{CheckpointError, Error, Result};
use crate::notice::warn;
use crate::util::{host_name, list};
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use twox_hash::XxHash3_64;

/// A checkpoint each of whose files exists on at least one host.
pub(super) struct LocatedCheckpoint {
    /// The checkpoint's folder on this host. It exists only if this host has a part of the checkpoint.
    pub path: PathBuf,
    pub manifest: Manifest,
    pub hosts: RanksByFolder,
    /// For each file of [`files`], the hosts that have it, by their first ranks.
    pub hosts_of_files: Vec<Vec<usize>>,
}

/// The parts of a tag that a host has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct HostTagFiles {
    /// The checksum of the manifest, which is equal on all hosts that saved together.
    checksum: String,
    steps: u64,
    /// The expected files, with the hosts that wrote them.
    files: Vec<(String, Option<String>)>,
    /// Whether each file exists with the right length.
    is_here: Vec<bool>,
}

/// The parts of a tag on each host; as an error, the reason why a host has none.
type TagFilesByHost = BTreeMap<usize, std::result::Result<HostTagFiles, String>>;

/// Returns the names and lengths of a checkpoint's files: those of the ranks, then that of the buffers.
pub(super) fn files(manifest: &Manifest) -> impl Iterator<Item = (&str, u64)> {
    let ranks = manifest.files.iter().map(|file| (file.name.as_str(), file.bytes));
    ranks.chain(manifest.buffers.iter().map(|file| (file.name.as_str(), file.bytes)))
}

/// Finds checkpoint `tag` in the folders `dir`, or the newest complete checkpoint that `latest` names on any host.
/// Returns `None` if no tag is requested and no host has a checkpoint. Collective.
///
/// # Errors
/// Fails on all ranks, with a [`CheckpointError::Unusable`] that names the hosts and files, if no complete one exists.
/// Also fails if a collective fails.
pub(super) fn locate(
    comm: &dyn Communicator,
    dir: &Path,
    tag: Option<&str>,
) -> Result<Option<LocatedCheckpoint>, JointOperationFailure> {
    let hosts = RanksByFolder::by_neighbours(comm, dir)?;
    let reads_folder = hosts.makes_folder();
    let named_tag = match (reads_folder, tag) {
        (true, None) => folder::latest(dir),
        (_, tag) => tag.map_or(Ok(None), |tag| folder::check_tag(dir, tag).map(|()| Some(tag.to_owned()))),
    };
    let named_tag = agree(comm, named_tag, remote_failure(dir))?.unwrap_or_default();
    let named_tags = texts(comm, if reads_folder { &named_tag } else { "" })?;
    let mut tags: Vec<&str> = named_tags.iter().map(String::as_str).filter(|tag| !tag.is_empty()).collect();
    tags.sort_unstable();
    tags.dedup();
    if tags.is_empty() {
        let none = if reads_folder { folder::check_no_checkpoints(dir) } else { Ok(()) };
        return agree(comm, none, remote_failure(dir)).map(|()| None);
    }
    let host_files: Vec<_> =
        if reads_folder { tags.iter().map(|tag| host_tag_files(dir, tag)).collect() } else { Vec::new() };
    let files_of_hosts = texts(
        comm,
        &serde_json::to_string(&host_files).unwrap_or_else(|e| unreachable!("strings and numbers are valid JSON: {e}")),
    )?;
    let names = texts(comm, &host_name())?;
    let mut by_tag: BTreeMap<&str, TagFilesByHost> = BTreeMap::new();
    for first in hosts.all() {
        let files_by_tag: Vec<std::result::Result<HostTagFiles, String>> = serde_json::from_str(&files_of_hosts[first])
            .map_err(|e| Error::from(CheckpointError::Unusable { path: dir.to_owned(), problem: e.to_string() }))?;
        for (tag, files) in tags.iter().zip(files_by_tag) {
            by_tag.entry(tag).or_default().insert(first, files);
        }
    }
    let all_hosts_name_tags = hosts.all().all(|first| !named_tags[first].is_empty());
    let chosen = choose(&by_tag, all_hosts_name_tags, &|first| host_with_ranks(&hosts, &names, first));
    let wrong =
        |path: PathBuf, problem| JointOperationFailure::InStep(CheckpointError::Unusable { path, problem }.into());
    let ChosenTag { tag, checksum, hosts_of_files, notes } =
        chosen.map_err(|(tag, problem)| wrong(dir.join(tag), problem))?;
    if comm.rank() == 0 {
        notes.iter().for_each(|note| warn(&format!("warning: {note}; {tag} is loaded")));
    }
    // A host without the tag also needs the manifest, and all ranks must use the same one.
    let has_manifest = |first: &usize| matches!(&by_tag[tag][first], Ok(files) if files.checksum == checksum);
    let path = folder::find_tag_folder(dir, tag).unwrap_or_else(|_| dir.join(tag));
    let sender = hosts.all().find(has_manifest).unwrap_or_else(|| unreachable!("a host has the manifest"));
    let read = if comm.rank() == sender {
        Manifest::read(&path.join(MANIFEST)).map(|m| m.to_text())
    } else {
        Ok(String::new())
    };
    let text = texts(comm, &agree(comm, read, remote_failure(&path))?)?.swap_remove(sender);
    let manifest = Manifest::parse(&text).map_err(|problem| wrong(path.join(MANIFEST), problem))?;
    Ok(Some(LocatedCheckpoint { path, manifest, hosts, hosts_of_files }))
}

/// Returns the parts of a tag that this host has.
fn host_tag_files(dir: &Path, tag: &str) -> std::result::Result<HostTagFiles, String> {
    let path = match folder::find_tag_folder(dir, tag) {
        Ok(path) => path,
        Err(_) => return Err(format!("has no {}", dir.join(tag).display())),
    };
    let manifest = Manifest::read(&path.join(MANIFEST)).map_err(|error| format!("reports: {error}"))?;
    let writers = manifest.files.iter().map(|file| file.host.clone());
    // Rank 0 writes the buffers.
    let writers = writers.chain(manifest.files.first().map(|file| file.host.clone()));
    let is_here = |(name, bytes): (&str, u64)| path.join(name).metadata().is_ok_and(|m| m.len() == bytes);
    Ok(HostTagFiles {
        checksum: format!("{:016x}", XxHash3_64::oneshot(manifest.to_text().as_bytes())),
        steps: manifest.global_steps,
        files: files(&manifest).map(|(name, _)| name.to_owned()).zip(writers).collect(),
        is_here: files(&manifest).map(is_here).collect(),
    })
}

/// A complete tag.
#[derive(Debug, PartialEq, Eq)]
struct ChosenTag<'a> {
    tag: &'a str,
    checksum: String,
    hosts_of_files: Vec<Vec<usize>>,
    /// The reasons why newer tags were passed over.
    notes: Vec<String>,
}

/// Returns the newest complete tag of `found`; as an error, the newest tag and its problem. `all_hosts_name_tags`
/// indicates whether every host has named a tag. `name` returns the name of a host.
fn choose<'a>(
    found: &BTreeMap<&'a str, TagFilesByHost>,
    all_hosts_name_tags: bool,
    name: &dyn Fn(usize) -> String,
) -> std::result::Result<ChosenTag<'a>, (&'a str, String)> {
    let mut tags: Vec<_> = found.iter().collect();
    tags.sort_by_key(|(tag, by_host)| Reverse((by_host.values().flatten().map(|found| found.steps).max(), **tag)));
    let mut notes = Vec::new();
    let mut first_problem = None;
    for (tag, by_host) in tags {
        let problem = match find_complete(by_host, name) {
            Ok((checksum, hosts_of_files)) => return Ok(ChosenTag { tag, checksum, hosts_of_files, notes }),
            Err(problem) => problem,
        };
        notes.push(format!("checkpoint {tag} is incomplete and is skipped: {problem}"));
        first_problem.get_or_insert((*tag, problem));
    }
    let (tag, problem) = first_problem.unwrap_or_else(|| unreachable!("there is a tag"));
    let hint = if all_hosts_name_tags { "" } else { ", or remove the existing checkpoints to start from scratch" };
    Err((
        tag,
        format!(
            "all hosts together have no complete copy: {problem}; start ranks on the hosts that have its files, or merge the \
             folders of this tag from all hosts into one, or give another tag{hint}"
        ),
    ))
}

/// Returns the checksum of the manifest for which a tag is complete, and the hosts of each file; as an error, the
/// missing files.
fn find_complete(
    by_host: &TagFilesByHost,
    name: &dyn Fn(usize) -> String,
) -> std::result::Result<(String, Vec<Vec<usize>>), String> {
    let mut problem = None;
    for candidate in by_host.values().flatten() {
        let matching = by_host.iter().filter_map(|(first, found)| Some((*first, found.as_ref().ok()?)));
        let matching: Vec<_> = matching.filter(|(_, found)| found.checksum == candidate.checksum).collect();
        let hosts_of_file =
            |file: usize| matching.iter().filter(|(_, f)| f.is_here[file]).map(|(first, _)| *first).collect();
        let hosts_of_files: Vec<Vec<usize>> = (0..candidate.files.len()).map(hosts_of_file).collect();
        let missing = candidate.files.iter().zip(&hosts_of_files).filter(|(_, hosts)| hosts.is_empty());
        let missing: Vec<String> = missing
            .map(|((file, host), _)| match host {
                Some(host) => format!("{file} (written on host {host})"),
                None => file.clone(),
            })
            .collect();
        if missing.is_empty() {
            return Ok((candidate.checksum.clone(), hosts_of_files));
        }
        problem.get_or_insert(missing);
    }
    let lacking = by_host.iter().filter_map(|(first, found)| Some((*first, found.as_ref().err()?)));
    let lacking: Vec<String> = lacking.map(|(first, why)| format!("{} {why}", name(first))).collect();
    let missing = problem.map(|missing| format!("no host has {}", list(&missing)));
    let all: Vec<String> = missing.into_iter().chain(lacking).collect();
    Err(all.join("; "))
}

/// Describes a host and its ranks.
fn host_with_ranks(hosts: &RanksByFolder, names: &[String], first: usize) -> String {
    let last = hosts.ranks(first).last().unwrap_or(first);
    let ranks = if first == last { format!("rank {first}") } else { format!("ranks {first} to {last}") };
    format!("host {} ({ranks})", names[first])
}
