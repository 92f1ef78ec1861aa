//! Checkpoints of islands: each island saves its own, the first one in the folder itself and the others in folders
//! below it.
//!
//! ```text
//!   DIR/latest, DIR/TAG/...                        island 0: loads like any other checkpoint
//!   DIR/island_1/latest, DIR/island_1/TAG/...      island 1
//! ```
//!
//! With an island server, each island saves when its program requests it, independently of the others. Otherwise,
//! island 0 publishes its checkpoint last, and only if all others have published theirs. The checkpoints of one save
//! have a random number in common.

use super::Engine;
use super::island_transport::random;
use super::islands::Islands;
use crate::checkpoint::{self, IslandOfJob, LoadOptions, Manifest, SaveOptions};
use crate::comm::agree::{JointOperationFailure, gather_u64, text_of_rank_0};
use crate::error::{EngineError, Result};
use crate::zero::share::share_plan::{OUTER_MOMENTUM, OUTER_WEIGHTS};
use std::path::{Path, PathBuf};

/// The checkpoint that an island loads.
pub(super) struct IslandCheckpointSource {
    pub dir: PathBuf,
    pub tag: Option<String>,
    /// Whether this island saved the checkpoint and continues with its progress. Otherwise, the island begins anew with
    /// the loaded weights.
    is_own: bool,
}

/// Returns the checkpoint that an island loads if it is a separate job: its own or, if the island has none, that of the
/// island in slot 0. Collective among the ranks of the island.
fn source_of_separate_job(
    islands: &Islands,
    dir: &Path,
    tag: Option<&str>,
    with_states: bool,
) -> Result<IslandCheckpointSource, JointOperationFailure> {
    let (job, own_folder) = (&**islands.ranks.job(), islands.ranks.folder(dir));
    let found = match job.rank() {
        0 => checkpoint::peek(&own_folder, tag).map_or(String::new(), |manifest| {
            let was_island = if manifest.islands.is_some() { "island" } else { "" };
            format!("{was_island} {}", manifest.tag)
        }),
        _ => String::new(),
    };
    let found = text_of_rank_0(job, &found)?;
    Ok(match found.split_once(' ') {
        Some((was_island, found)) => {
            let is_own = with_states && was_island == "island";
            IslandCheckpointSource { dir: own_folder, tag: Some(found.to_owned()), is_own }
        }
        None => IslandCheckpointSource { dir: dir.to_owned(), tag: tag.map(str::to_owned), is_own: false },
    })
}

impl<M> Engine<M> {
    /// Returns the folder in which this island saves, and the options.
    pub(super) fn island_folder_and_options(&self, dir: &Path, options: &SaveOptions) -> (PathBuf, SaveOptions) {
        let Some(islands) = &self.islands else { return (dir.to_owned(), options.clone()) };
        // The other islands may have saved one more checkpoint than island 0 when a job dies.
        let extra = usize::from(islands.ranks.inter_island_comm().is_some() && islands.ranks.number() > 0);
        let keep = options.keep.map(|keep| keep.max(1) + extra);
        (islands.ranks.folder(dir), SaveOptions { keep, ..options.clone() })
    }

    /// Returns this rank's island, if all islands must agree on a save. Otherwise, returns `None`.
    pub(super) fn island_of_job(&self) -> Option<IslandOfJob> {
        let ranks = &self.islands.as_ref()?.ranks;
        // Islands that are separate jobs save independently of each other.
        let (_, job) = ranks.inter_island_comm()?;
        Some(IslandOfJob { number: ranks.number(), job: job.clone() })
    }

    /// Collective if ranks take local steps: completes the manifest, and stores the exchanges in flight among the
    /// optimizer states.
    pub(super) fn manifest_of_island(&mut self, manifest: Manifest) -> Result<Manifest> {
        self.attempt(|engine| {
            let Some(islands) = &mut engine.islands else { return Ok::<_, JointOperationFailure>(manifest) };
            let save = gather_u64(&**islands.ranks.job(), &[random()])?[0][0];
            islands.store_exchanges(&engine.core)?;
            Ok(manifest.of_island(islands.progress(save)))
        })
    }

    /// Collective if ranks take local steps: returns the checkpoint that this island loads.
    ///
    /// # Errors
    /// Returns an error on all ranks if an island's checkpoint cannot be read or belongs to a different save or, with
    /// `checkpoint.use_node_local_storage`, if the saved run had a different number of islands. A failed collective.
    pub(super) fn island_checkpoint_source(
        &mut self,
        dir: &Path,
        tag: Option<&str>,
        options: &LoadOptions,
    ) -> Result<Option<IslandCheckpointSource>> {
        let with_states = options.load_optimizer_states && !options.load_module_only;
        let on_each_host = self.config.use_node_local_storage;
        self.attempt(|engine| {
            let Some(islands) = &engine.islands else { return Ok::<_, JointOperationFailure>(None) };
            let job = &**islands.ranks.job();
            let rank = job.rank();
            if islands.ranks.inter_island_comm().is_none() {
                return Ok(Some(source_of_separate_job(islands, dir, tag, with_states)?));
            }
            let found = match rank {
                0 => checkpoint::peek(dir, tag).map_or(String::new(), |manifest| {
                    let islands = manifest.islands.as_ref().map_or(1, |progress| progress.islands);
                    format!("{islands} {}", manifest.tag)
                }),
                _ => String::new(),
            };
            let found = text_of_rank_0(job, &found)?;
            let refused = |why: String| JointOperationFailure::InStep(EngineError::LocalSteps { why }.into());
            let Some((count, found)) = found.split_once(' ') else {
                return Ok(Some(IslandCheckpointSource {
                    dir: dir.to_owned(),
                    tag: tag.map(str::to_owned),
                    is_own: false,
                }));
            };
            let is_same_count = count.parse() == Ok(islands.ranks.count());
            if on_each_host && !is_same_count {
                return Err(refused(format!(
                    "the number of islands is {count} in checkpoint {found} in {}, but {} in this job, and with \
                     checkpoint.use_node_local_storage each host has only its island's part; start as many islands as \
                     before, or copy the first island's checkpoint to all hosts and remove that key",
                    dir.display(),
                    islands.ranks.count()
                )));
            }
            if !is_same_count || !with_states {
                return Ok(Some(IslandCheckpointSource {
                    dir: dir.to_owned(),
                    tag: Some(found.to_owned()),
                    is_own: false,
                }));
            }
            let own_folder = islands.ranks.folder(dir);
            let manifest = checkpoint::peek(&own_folder, Some(found));
            let progress = manifest.as_ref().and_then(|manifest| manifest.islands.as_ref());
            let id = progress.map_or([0, 0], |progress| [1, progress.save]);
            let all = gather_u64(job, &id)?;
            if let Some(other) = all.iter().position(|id| *id != all[0]) {
                let why = match all[other][0] {
                    0 => format!("rank {other} cannot read its island's part of it"),
                    _ => format!("the part of rank {other}'s island is from a different save"),
                };
                return Err(refused(format!(
                    "checkpoint {found} in {} is not complete: {why}; load another tag, or remove the island_* folders \
                     and start a different number of islands, which all begin with the first island's part",
                    dir.display()
                )));
            }
            Ok(Some(IslandCheckpointSource { dir: own_folder, tag: Some(found.to_owned()), is_own: true }))
        })
    }

    /// Collective if ranks take local steps, after a checkpoint was loaded: continues with the state of the saved run's
    /// outer optimizer, or begins anew with the loaded weights.
    pub(super) fn resume_local_steps(
        &mut self,
        manifest: &Manifest,
        options: &LoadOptions,
        saved: Option<&IslandCheckpointSource>,
    ) -> Result<()> {
        let Some(islands) = &mut self.islands else { return Ok(()) };
        let has = |name: &str| manifest.states.iter().any(|state| state == name);
        let with_states = options.load_optimizer_states && !options.load_module_only && has(OUTER_WEIGHTS);
        if !with_states {
            self.core.begin_local_steps()?;
            islands.begin_anew();
            return Ok(());
        }
        if !has(OUTER_MOMENTUM) {
            self.core.clear_outer_momentum()?;
        }
        match (saved, &manifest.islands) {
            (Some(IslandCheckpointSource { is_own: true, .. }), Some(progress)) => islands.resume(&self.core, progress),
            _ => {
                // The weights of island 0 are not those of the others; the outer weights are the same everywhere.
                let trained: Vec<_> = self.core.trained_params().map(|(param, _)| param).collect();
                self.core.take_outer_weights(&trained)?;
                self.core.refresh()?;
                islands.begin_anew();
            }
        }
        Ok(())
    }
}
