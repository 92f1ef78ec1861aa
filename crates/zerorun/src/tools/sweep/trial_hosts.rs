//! The hosts on which trials run, and the groups of slots for trials on them.

use super::definition::SweepDefinition;
use crate::error::{HostsError, Result};
use crate::launch::hosts::host_filter::HostSelection;
use crate::launch::hosts::{HostSlots, hostfile};
use candle_zero::util::{counted, format_bytes};
use std::path::Path;

/// A host on which trials run.
#[derive(Debug)]
struct TrialHost {
    /// The name in the hostfile, if there is one.
    name: Option<String>,
    is_here: bool,
    cores: usize,
    slot_groups: Vec<SlotGroup>,
    is_lost: bool,
}

/// The capacity of a host.
#[derive(Debug, Clone, Copy)]
pub(super) struct HostCapacity {
    /// Whether it is this host.
    pub(super) is_here: bool,
    pub(super) cores: usize,
    /// The number of bytes of memory that can be allocated, or 0 if it is unknown.
    pub(super) memory: u64,
}

/// A group of slots on a host, for one trial.
#[derive(Debug)]
struct SlotGroup {
    /// The slots of the group, separated by commas, if there is a hostfile.
    devices: Option<String>,
    is_taken: bool,
}

/// The slots that a trial has acquired.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SlotLease {
    host: usize,
    group: usize,
}

/// The hosts on which trials run.
#[derive(Debug)]
pub(super) struct TrialHosts(Vec<TrialHost>);

/// Returns the hosts and slots of the definition's hostfile, if there is one. `directory` is that of the sweep.
pub(super) fn read_hostfile(definition: &SweepDefinition, directory: &Path) -> Result<Option<Vec<HostSlots>>> {
    let Some(file) = &definition.hosts.hostfile else { return Ok(None) };
    let path = directory.join(file);
    let text = std::fs::read_to_string(&path)
        .map_err(|source| HostsError::NoHostfile { path: file.clone(), why: source.to_string() })?;
    let (include, exclude) = (definition.hosts.include.clone(), definition.hosts.exclude.clone());
    let selection = HostSelection { include, exclude, num_nodes: None, num_gpus: None };
    let hosts = selection.apply(&hostfile::parse(&text, file)?)?;
    let max_slots = hosts.iter().map(|host| host.slots.len()).max().unwrap_or(0);
    if max_slots == 0 {
        return Err(HostsError::NoSlot.into());
    }
    if max_slots < definition.ranks {
        let problem = format!(
            "each trial runs on one host and has {}, but no host of {} has more than {}; give a host more slots, or \
             set ranks to at most {max_slots}",
            counted(definition.ranks, "rank"),
            file.display(),
            counted(max_slots, "slot"),
        );
        return Err(definition.error(problem));
    }
    Ok(Some(hosts))
}

impl TrialHosts {
    /// Returns this host, with slots for `parallel` trials.
    pub(super) fn only_here(parallel: usize, cores: usize) -> Self {
        let slot_groups = (0..parallel).map(|_| SlotGroup { devices: None, is_taken: false }).collect();
        Self(vec![TrialHost { name: None, is_here: true, cores, slot_groups, is_lost: false }])
    }

    /// Returns the hosts of a hostfile that have room for a trial, and a message about each of the others. `memory`
    /// is the memory of a trial, if it is known.
    pub(super) fn from_hostfile(
        definition: &SweepDefinition,
        hosts: &[HostSlots],
        capacities: &[HostCapacity],
        memory: Option<u64>,
    ) -> Result<(Self, Vec<String>)> {
        let (mut used, mut left_out) = (Vec::new(), Vec::new());
        for (host, capacity) in hosts.iter().zip(capacities) {
            // The capacity of a host that does not report its memory is 0 bytes.
            let trial_memory = memory.filter(|bytes| *bytes > 0 && capacity.memory > 0);
            let by_memory = trial_memory.map_or(usize::MAX, |bytes| (capacity.memory / bytes) as usize);
            let slot_chunks = host.slots.chunks_exact(definition.ranks);
            match (slot_chunks.len(), by_memory) {
                (0, _) => left_out.push(format!(
                    "host {} is not used: a trial has {}, and the host has {}",
                    host.name,
                    counted(definition.ranks, "rank"),
                    counted(host.slots.len(), "slot")
                )),
                (_, 0) => left_out.push(format!(
                    "host {} is not used: a trial needs {} of memory, and the host has {}",
                    host.name,
                    format_bytes(memory.unwrap_or(0)),
                    format_bytes(capacity.memory)
                )),
                _ => {
                    let devices = |slots: &[usize]| slots.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
                    let slot_groups = slot_chunks
                        .take(by_memory)
                        .map(|slots| SlotGroup { devices: Some(devices(slots)), is_taken: false })
                        .collect();
                    let (name, is_here, cores) = (Some(host.name.clone()), capacity.is_here, capacity.cores);
                    used.push(TrialHost { name, is_here, cores, slot_groups, is_lost: false });
                }
            }
        }
        if used.is_empty() {
            let problem = format!(
                "no host in the hostfile has room for a trial ({}); name other hosts, or set memory to a smaller value",
                left_out.join("; ")
            );
            return Err(definition.error(problem));
        }
        Ok((Self(used), left_out))
    }

    /// Returns the number of trials for which the hosts have slots.
    pub(super) fn max_trials(&self) -> usize {
        self.0.iter().map(|host| host.slot_groups.len()).sum()
    }

    /// Returns the number of threads of a rank, which is the same on all hosts. If at most `parallel` trials of `ranks`
    /// ranks run at the same time, each rank has its own cores, unless a host has fewer cores than ranks.
    pub(super) fn threads(&self, parallel: usize, ranks: usize) -> usize {
        let of_host = |host: &TrialHost| host.cores / (host.slot_groups.len().min(parallel).max(1) * ranks);
        self.0.iter().map(of_host).min().unwrap_or(1).max(1)
    }

    /// Acquires a free group of slots: on the host with this name if possible, else on the host with the most free
    /// groups.
    pub(super) fn acquire(&mut self, preferred: Option<&str>) -> Option<SlotLease> {
        let free = |host: &TrialHost| match host.is_lost {
            true => 0,
            false => host.slot_groups.iter().filter(|group| !group.is_taken).count(),
        };
        let is_preferred = |host: &TrialHost| preferred.is_some() && host.name.as_deref() == preferred;
        let numbered = self.0.iter().enumerate().filter(|(_, host)| free(host) > 0);
        let (host, _) = numbered.max_by_key(|(at, host)| (is_preferred(host), free(host), usize::MAX - at))?;
        let group = self.0[host].slot_groups.iter().position(|group| !group.is_taken)?;
        self.0[host].slot_groups[group].is_taken = true;
        Some(SlotLease { host, group })
    }

    /// Releases the slots of a trial.
    pub(super) fn release(&mut self, lease: SlotLease) {
        self.0[lease.host].slot_groups[lease.group].is_taken = false;
    }

    /// Records that the host of these slots is lost. Returns the host's name if the loss was not known before.
    pub(super) fn mark_lost(&mut self, lease: SlotLease) -> Option<&str> {
        let host = &mut self.0[lease.host];
        let is_new = !std::mem::replace(&mut host.is_lost, true);
        host.name.as_deref().filter(|_| is_new)
    }

    /// Returns whether all hosts are lost.
    pub(super) fn are_lost(&self) -> bool {
        self.0.iter().all(|host| host.is_lost)
    }

    /// Returns the name of the host of these slots, if there is a hostfile.
    pub(super) fn name(&self, lease: SlotLease) -> Option<&str> {
        self.0[lease.host].name.as_deref()
    }

    /// Returns the name of the host of these slots if it is another host.
    pub(super) fn remote_name(&self, lease: SlotLease) -> Option<&str> {
        let host = &self.0[lease.host];
        host.name.as_deref().filter(|_| !host.is_here)
    }

    /// Returns the slots, separated by commas, if there is a hostfile.
    pub(super) fn devices(&self, lease: SlotLease) -> Option<&str> {
        self.0[lease.host].slot_groups[lease.group].devices.as_deref()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use serde_json::json;

    fn definition(ranks: usize) -> SweepDefinition {
        let table = json!({
            "command": ["train.rs"], "metric": "loss", "steps": 9, "ranks": ranks, "parameters": {"--seed": [1, 2]},
        });
        SweepDefinition::new("x", table.as_object().unwrap()).unwrap()
    }

    const HERE: HostCapacity = HostCapacity { is_here: true, cores: 8, memory: 100 };
    const OTHER: HostCapacity = HostCapacity { is_here: false, cores: 4, memory: 0 };

    #[test]
    fn slots_and_memory_give_the_places_of_a_host() {
        let hosts = [("a", 5), ("b", 2), ("c", 1)].map(|(name, slots)| HostSlots::with_slots(name, slots));
        let capacities = [HERE, OTHER, OTHER];
        let (all, left_out) = TrialHosts::from_hostfile(&definition(2), &hosts, &capacities, None).unwrap();
        assert_eq!(all.max_trials(), 3);
        insta::assert_snapshot!(left_out.join("\n"), @"host c is not used: a trial has 2 ranks, and the host has 1 slot");
        // Host a has memory for one trial, and that of host b is unknown.
        let (some, _) = TrialHosts::from_hostfile(&definition(2), &hosts, &capacities, Some(51)).unwrap();
        assert_eq!(some.max_trials(), 2);
        // The ranks of both trials on host a and of the trial on host b have two cores each.
        assert_eq!((all.threads(3, 2), some.threads(2, 2), all.threads(1, 2)), (2, 2, 2));
        let refused = TrialHosts::from_hostfile(&definition(2), &hosts[..1], &capacities, Some(101)).unwrap_err();
        insta::assert_snapshot!(refused, @"x: no host in the hostfile has room for a trial (host a is not used: a trial needs 101 B of memory, and the host has 100 B); name other hosts, or set memory to a smaller value");
    }

    #[test]
    fn a_trial_takes_a_place_on_its_last_host_or_on_the_emptiest_one() {
        let hosts = [("a", 2), ("b", 4)].map(|(name, slots)| HostSlots::with_slots(name, slots));
        let (mut hosts, _) = TrialHosts::from_hostfile(&definition(2), &hosts, &[HERE, OTHER], None).unwrap();
        let acquire = |hosts: &mut TrialHosts, preferred| {
            let lease = hosts.acquire(preferred)?;
            Some((lease, format!("{} {}", hosts.name(lease).unwrap(), hosts.devices(lease).unwrap())))
        };
        let (first, text) = acquire(&mut hosts, None).unwrap();
        assert_eq!((text.as_str(), hosts.remote_name(first)), ("b 0,1", Some("b")));
        let (second, text) = acquire(&mut hosts, Some("a")).unwrap();
        assert_eq!((text.as_str(), hosts.remote_name(second)), ("a 0,1", None));
        let (_, text) = acquire(&mut hosts, Some("a")).unwrap();
        assert_eq!(text, "b 2,3", "host a has no free slots");
        assert_eq!(acquire(&mut hosts, None), None);
        hosts.release(first);
        assert_eq!(hosts.mark_lost(first), Some("b"));
        assert!(!hosts.are_lost());
        assert_eq!(hosts.mark_lost(first), None);
        assert_eq!(hosts.acquire(Some("b")), None);
        hosts.mark_lost(second);
        assert!(hosts.are_lost());
    }
}
