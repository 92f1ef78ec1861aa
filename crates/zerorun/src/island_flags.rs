//! The flags of a job that is one of several islands. The command lines for scripts and for `zerorun finetune` share them.

use crate::launch::local_job_spec::IslandOptions;
use candle_zero::config::is_address;
use clap::Args;

/// The heading in the help.
pub(crate) const ISLANDS: &str = "Local steps";

/// The flags of a job that is one of several islands.
#[derive(Debug, Args)]
pub(crate) struct IslandFlags {
    /// Take part in a run with local steps as one island, through the island server at this address (zerorun
    /// island-server); replaces local_steps.server
    #[arg(long = "island_server", alias = "island-server", value_name = "HOST:PORT", value_parser = server_address,
          help_heading = ISLANDS)]
    pub(crate) island_server: Option<String>,

    /// With an island server: the slot to request, from 0 [default: after a restart, the previous slot; otherwise, the
    /// lowest free one]
    #[arg(long = "island_slot", alias = "island-slot", value_name = "N", help_heading = ISLANDS)]
    island_slot: Option<u16>,
}

impl IslandFlags {
    /// Returns each flag with whether it is given.
    pub(crate) fn given(&self) -> [(&'static str, bool); 2] {
        [("--island_server", self.island_server.is_some()), ("--island_slot", self.island_slot.is_some())]
    }

    /// Returns the options with which the job's ranks take part in a run of islands.
    pub(crate) fn options(&self) -> IslandOptions {
        IslandOptions { server: self.island_server.clone(), slot: self.island_slot }
    }
}

/// Checks the address of an island server.
fn server_address(text: &str) -> std::result::Result<String, String> {
    match is_address(text) {
        true => Ok(text.to_owned()),
        false => {
            Err("give a name or an address, a colon and a port from 1 to 65535, for example host0:29600".to_string())
        }
    }
}
