//! Checkpoints of islands: each island saves its own, the first one in the folder itself and the others in folders below
//! it.
//!
//! ```text
//!   DIR/latest, DIR/TAG/...                        island 0: loads like any other checkpoint
//!   DIR/island_1/latest, DIR/island_1/TAG/...      island 1
//! ```
//!
//! Island 0 publishes its checkpoint last, so whatever `latest` names there exists on all islands.

use super::Engine;
use crate::checkpoint::{self, LastCheckpoint, LoadOptions, Manifest, SaveJob, SaveOptions, store::UploadRequest};
use crate::comm::agree::{CollectiveFailure, text_of_rank_0};
use crate::error::Result;
use crate::zero::share::share_plan::{OUTER_CHANGE, OUTER_WEIGHTS};
use std::path::{Path, PathBuf};

/// The checkpoint that an island loads.
pub(super) struct SavedByIslands {
    pub dir: PathBuf,
    pub tag: Option<String>,
    /// Whether this island saved it: otherwise all islands load that of island 0.
    is_own: bool,
}

impl<M> Engine<M> {
    /// Returns the folder in which this island saves, and the options.
    pub(super) fn of_island(&self, dir: &Path, options: &SaveOptions) -> (PathBuf, SaveOptions) {
        let Some(islands) = &self.islands else { return (dir.to_owned(), options.clone()) };
        // The other islands may have saved one more than island 0 when a job dies.
        let more = usize::from(islands.ranks.number() > 0);
        let keep = options.keep.map(|keep| keep.max(1) + more);
        (islands.ranks.folder(dir), SaveOptions { keep, ..options.clone() })
    }

    /// Collective if ranks take local steps: completes the manifest, and puts exchanges in flight among the states.
    pub(super) fn manifest_of_island(&mut self, manifest: Manifest) -> Result<Manifest> {
        self.attempt(|engine| {
            let Some(islands) = &mut engine.islands else { return Ok::<_, CollectiveFailure>(manifest) };
            islands.store_exchanges(&engine.core)?;
            Ok(manifest.of_islands(islands.ranks.count(), islands.samples.clone()))
        })
    }

    /// Collective: ends a save, on island 0 after all others.
    pub(super) fn end_in_order(
        &self,
        saving: SaveJob,
    ) -> Result<(Option<LastCheckpoint>, Option<UploadRequest>), CollectiveFailure> {
        let Some(islands) = &self.islands else { return saving.end() };
        let others_have_saved = || islands.ranks.job().barrier().wait();
        if islands.ranks.number() == 0 {
            others_have_saved()?;
            return saving.end();
        }
        let ended = saving.end();
        others_have_saved()?;
        ended
    }

    /// Collective if ranks take local steps: returns the checkpoint that this island loads.
    pub(super) fn saved_by_islands(&mut self, dir: &Path, tag: Option<&str>) -> Result<Option<SavedByIslands>> {
        self.attempt(|engine| {
            let Some(islands) = &engine.islands else { return Ok::<_, CollectiveFailure>(None) };
            let found = match engine.rank() {
                0 => checkpoint::islands_of(dir, tag).map_or(String::new(), |(tag, count)| format!("{count} {tag}")),
                _ => String::new(),
            };
            let found = text_of_rank_0(&**islands.ranks.job(), &found)?;
            let (count, found) = found.split_once(' ').unwrap_or(("0", ""));
            let is_own = count.parse() == Ok(islands.ranks.count());
            let dir = if is_own { islands.ranks.folder(dir) } else { dir.to_owned() };
            let tag = if is_own { Some(found.to_owned()) } else { tag.map(str::to_owned) };
            Ok(Some(SavedByIslands { dir, tag, is_own }))
        })
    }

    /// Collective if ranks take local steps, after a checkpoint was loaded: continues with what the outer optimizer of the
    /// saved run had, or begins anew with the loaded weights.
    pub(super) fn resume_local_steps(
        &mut self,
        manifest: &Manifest,
        options: &LoadOptions,
        saved: Option<&SavedByIslands>,
    ) -> Result<()> {
        let Some(islands) = &mut self.islands else { return Ok(()) };
        let has = |name: &str| manifest.states.iter().any(|state| state == name);
        let with_states = options.load_optimizer_states && !options.load_module_only && has(OUTER_WEIGHTS);
        if !with_states {
            self.core.begin_local_steps()?;
            islands.begin_anew();
        } else if saved.is_some_and(|saved| saved.is_own) {
            islands.resume(&self.core, self.global_steps, &manifest.island_samples, has(OUTER_CHANGE));
        } else {
            // The weights of island 0 are not those of the others; the outer weights are the same everywhere.
            self.core.take_outer_weights()?;
            self.core.refresh()?;
            islands.begin_anew();
        }
        Ok(())
    }
}
