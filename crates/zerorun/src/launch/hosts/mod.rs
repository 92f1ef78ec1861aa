//! Ranks on many hosts: which hosts and slots there are, which of them are used, and what a rank there is given.
//!
//! The grammars and the numbering are those of DeepSpeed's launcher. `hostfile` reads the hosts, `host_filter` keeps those
//! that the user asked for, `world_info` numbers the ranks on them; `export_rules` finds the variables that the other hosts get,
//! `core_list` divides the cores of one host among its ranks. All of it is computing on text and numbers: nothing here
//! opens a file, reads the environment or starts a process.

pub(crate) mod core_list;
pub(crate) mod error;
pub(crate) mod export_rules;
pub(crate) mod host_filter;
pub(crate) mod hostfile;
#[cfg(test)]
pub(crate) mod recorded_cases;
pub(crate) mod world_info;

/// A host and its slots, the places for one rank each. A slot's number is also that of its GPU, where there are any.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HostSlots {
    /// As the hostfile has it.
    pub(crate) name: String,
    /// In ascending order.
    pub(crate) slots: Vec<usize>,
}

impl HostSlots {
    /// A host with the slots from 0 on.
    pub(crate) fn with_slots(name: impl Into<String>, count: usize) -> Self {
        Self { name: name.into(), slots: (0..count).collect() }
    }
}
