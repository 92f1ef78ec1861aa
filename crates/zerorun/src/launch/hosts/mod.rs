//! Ranks on several hosts: the hosts and slots, the selection among them, and the environment of each rank.
//!
//! The grammars and the numbering are those of DeepSpeed's launcher. `hostfile` reads the hosts, `host_filter` selects
//! those that the user asked for, and `world_info` numbers the ranks on them. `export_rules` finds the variables for
//! the other hosts, and `core_list` divides the cores of one host among its ranks. All of these modules work on text
//! and numbers only: none opens a file, reads the environment or starts a process.

pub(crate) mod core_list;
pub(crate) mod error;
pub(crate) mod export_rules;
pub(crate) mod host_filter;
pub(crate) mod hostfile;
#[cfg(test)]
pub(crate) mod recorded_cases;
pub(crate) mod world_info;

/// A host and its slots, each for one rank. The number of a slot is also that of its GPU, if the host has GPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HostSlots {
    /// The name as written in the hostfile.
    pub(crate) name: String,
    /// The slots in ascending order.
    pub(crate) slots: Vec<usize>,
}

impl HostSlots {
    /// Creates a host with `count` slots, numbered from 0.
    pub(crate) fn with_slots(name: impl Into<String>, count: usize) -> Self {
        Self { name: name.into(), slots: (0..count).collect() }
    }
}
