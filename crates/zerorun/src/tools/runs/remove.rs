//! `zerorun runs rm`: removes the records of runs.

use super::folder_flag::FolderFlag;
use super::table::plain;
use crate::error::{Result, ToolError};
use crate::launch::console::{EXIT_SETUP, eprint, print, refused};
use candle_zero::runs::RunsFolder;
use candle_zero::util::{counted, list};
use clap::Args;
use std::collections::BTreeSet;
use std::io::IsTerminal as _;
use std::process::ExitCode;

#[derive(Debug, Args)]
pub(super) struct RemoveFlags {
    #[command(flatten)]
    folder: FolderFlag,

    /// The runs: their names, or prefixes of their names
    #[arg(value_name = "RUN", required = true)]
    run: Vec<String>,

    /// Do not ask for confirmation
    #[arg(long, short = 'y')]
    yes: bool,

    /// Also remove the record of a run that is still running
    #[arg(long)]
    force: bool,
}

impl RemoveFlags {
    /// Removes the records. Checkpoints and other files are not part of them.
    pub(super) fn run(&self) -> ExitCode {
        let folder = self.folder.find();
        let ids = match self.ids(&folder).and_then(|ids| self.confirm(ids)) {
            Ok(Some(ids)) => ids,
            Ok(None) => {
                print("nothing was removed");
                return ExitCode::FAILURE;
            }
            Err(error) => return refused(&error, EXIT_SETUP),
        };
        let mut code = ExitCode::SUCCESS;
        for id in ids {
            match folder.remove(&id, self.force) {
                Ok(None) => _ = print(format!("{} was removed", plain(&id))),
                Ok(Some(remaining)) => {
                    eprint(&format!(
                        "zerorun: the record of {} was removed, but its folder {} contains other files, which are kept",
                        plain(&id),
                        remaining.display()
                    ));
                }
                Err(error) => code = refused(&error, 1),
            }
        }
        code
    }

    /// Returns the runs, each once.
    fn ids(&self, folder: &RunsFolder) -> Result<BTreeSet<String>> {
        let id = |name: &String| {
            let path = folder.named(name)?;
            Ok(path.file_name().unwrap_or_default().to_string_lossy().into_owned())
        };
        self.run.iter().map(id).collect()
    }

    /// Returns the runs if the user agrees.
    fn confirm(&self, ids: BTreeSet<String>) -> Result<Option<BTreeSet<String>>> {
        if self.yes {
            return Ok(Some(ids));
        }
        let names: Vec<String> = ids.iter().map(|id| plain(id)).collect();
        if !std::io::stdin().is_terminal() {
            return Err(ToolError::NotConfirmed { what: list(&names) }.into());
        }
        eprint(&format!("remove {}: {}? [y/N]", counted(ids.len(), "record"), list(&names)));
        let mut answer = String::new();
        // Without an answer, nothing is removed.
        _ = std::io::stdin().read_line(&mut answer);
        Ok(["y", "yes"].contains(&answer.trim().to_lowercase().as_str()).then_some(ids))
    }
}
