//! The transfer of a donor's state to an island that joins: the donor's side, and the side of the island that joins.
//!
//! ```text
//!   donor     head: its progress, as in a checkpoint | optimizer and outer states, piece by piece | buffers | end
//!   joiner    receives these in this order; then weights = outer weights, and no samples since the last exchange
//! ```
//!
//! Each rank of the donor sends to the rank at the same position of the island that joins, which has the same share of
//! the model. The changes in the donor's weights since the last exchange are not sent; the joiner starts with the outer
//! weights.

use super::Engine;
use super::islands::Islands;
use crate::checkpoint::{self, LoadOptions, LoadedCheckpoint, Manifest, SaveOptions, TrainingProgress};
use crate::error::{EngineError, Error, Result};
use crate::island_server::{DonationHead, EntryMode, IslandLink, JoinMessage};
use crate::notice::emit;
use crate::optim::GroupedOptimizer;
use crate::precision::{Flat, FlatMut};
use crate::zero::rank_core::RankCore;
use crate::zero::share::state_access::{ParamStateKind, pieces};
use serde_json::Value;
use std::ops::{ControlFlow, Range};
use std::path::Path;

/// The maximum number of bytes of a part of a buffer.
const BUFFER_PART: usize = 4 << 20;

/// Returns the connection of an island to its server, if there is one.
fn link(islands: &Islands) -> Result<Option<&IslandLink>> {
    islands.ranks.server().map(|server| server.link()).transpose()
}

impl<M> Engine<M> {
    /// Gives this island's state to the islands that join, if the server has requested it. This happens at the
    /// beginning of the next step, or at the end of `synchronize_islands`, so that the state is that after all
    /// exchanges of a step.
    pub(super) fn donate(&mut self) -> Result<()> {
        let Some(islands) = &mut self.islands else { return Ok(()) };
        let Some(donation) = islands.take_donation() else { return Ok(()) };
        islands.store_exchanges(&self.core)?;
        let (client_state, options) = (islands.client_state.clone(), SaveOptions::default());
        let progress = self.progress();
        let manifest =
            checkpoint::manifest(&self.core, &self.trainer, &self.config, progress, None, client_state, &options);
        let Some(islands) = &self.islands else { return Ok(()) };
        let manifest = serde_json::to_string(&manifest.of_island(islands.progress(0)))
            .unwrap_or_else(|error| unreachable!("strings and numbers are valid JSON: {error}"));
        let Some(link) = link(islands)? else { return Ok(()) };
        link.donate(&DonationHead { donation, step: self.global_steps, manifest });
        for DonatedPiece { kind, param, range } in pieces_of(&self.core, &self.trainer) {
            let mut values = vec![0f32; range.len()];
            self.core.read_state(kind, param, range, |read| FlatMut::F32(&mut values).copy_cast(read))?;
            link.donate_part(donation, Flat::from(values).as_ref().as_bytes().to_vec());
        }
        for buffer in self.core.buffers().list() {
            buffer.bytes()?.chunks(BUFFER_PART).for_each(|part| link.donate_part(donation, part.to_vec()));
        }
        link.end_donation(donation);
        Ok(())
    }

    /// Collective among the ranks of the island: receives the state of a donor, if the island joins others.
    pub(super) fn join_islands(&mut self) -> Result<()> {
        let joins = match &self.islands {
            Some(islands) => link(islands)?.is_some_and(|link| link.entry_mode() == EntryMode::Join),
            None => false,
        };
        if !joins {
            return Ok(());
        }
        let Some(manifest) = self.receive_donation()? else {
            if self.core.comm().rank() == 0 {
                emit("local_steps: no other island is left, so this one begins without joining");
            }
            return Ok(());
        };
        self.settled(|engine| engine.continue_from_donor(&manifest))
    }

    /// Receives a donation into the states of this rank and returns the donor's manifest, or `None` if no island is
    /// left to join. If a donor dies, another donor begins anew.
    fn receive_donation(&mut self) -> Result<Option<Manifest>> {
        let Some(islands) = &self.islands else { return Ok(None) };
        let (Some(link), island) = (link(islands)?, islands.ranks.island.clone()) else { return Ok(None) };
        let failure = move || island.failure().map(Error::from);
        self.core.release_all()?;
        let mut entry = JoinProgress::Waits;
        loop {
            entry = match entry {
                JoinProgress::Waits => JoinProgress::after(link.next_join_message(&failure)?),
                JoinProgress::Receives(head) => self.receive_from(link, &failure, head)?,
                JoinProgress::Begins => {
                    // A donor that died may have left a part of its state.
                    self.core.begin_local_steps()?;
                    return Ok(None);
                }
                JoinProgress::Joined(head) => {
                    let head = head.ok_or_else(mismatch_error)?;
                    return serde_json::from_str(&head.manifest).map(Some).map_err(|_| mismatch_error());
                }
            }
        }
    }

    /// Receives the donation that begins with `head`.
    fn receive_from(
        &self,
        link: &IslandLink,
        failure: &dyn Fn() -> Option<Error>,
        head: DonationHead,
    ) -> Result<JoinProgress> {
        // Returns the next part, or the event that took its place. Parts of a donor that died may still arrive.
        let next = || loop {
            match link.next_join_message(failure)? {
                JoinMessage::Part(donation, part) if donation == head.donation => {
                    return Ok::<_, Error>(ControlFlow::Continue(part));
                }
                JoinMessage::Part(..) => {}
                JoinMessage::End(donation) if donation <= head.donation => {}
                JoinMessage::Head(other) if other.donation < head.donation => {}
                other => return Ok(ControlFlow::Break(JoinProgress::after(other))),
            }
        };
        for DonatedPiece { kind, param, range } in pieces_of(&self.core, &self.trainer) {
            let part = match next()? {
                ControlFlow::Continue(part) => part,
                ControlFlow::Break(entry) => return Ok(entry),
            };
            let bytes = part.get(8..).filter(|bytes| bytes.len() == range.len() * 4).ok_or_else(mismatch_error)?;
            let values: Vec<f32> = bytes.as_chunks::<4>().0.iter().map(|value| f32::from_le_bytes(*value)).collect();
            let values = Flat::from(values);
            self.core.write_state(kind, param, range, |_| Ok(values.clone()))?;
        }
        for buffer in self.core.buffers().list() {
            let mut bytes = Vec::new();
            while bytes.len() < buffer.size() {
                let part = match next()? {
                    ControlFlow::Continue(part) => part,
                    ControlFlow::Break(entry) => return Ok(entry),
                };
                bytes.extend_from_slice(part.get(8..).filter(|part| !part.is_empty()).ok_or_else(mismatch_error)?);
            }
            buffer.set((bytes.len() == buffer.size()).then_some(&bytes).ok_or_else(mismatch_error)?)?;
        }
        // The island is part of the run when all its ranks have received everything.
        match next()? {
            ControlFlow::Continue(_) => Err(mismatch_error()),
            ControlFlow::Break(JoinProgress::Joined(_)) => Ok(JoinProgress::Joined(Some(head))),
            ControlFlow::Break(entry) => Ok(entry),
        }
    }

    /// Collective among the ranks of the island: continues at the donor's step, with the outer weights.
    fn continue_from_donor(&mut self, manifest: &Manifest) -> Result<()> {
        let trained: Vec<_> = self.core.trained_params().map(|(param, _)| param).collect();
        self.core.take_outer_weights(&trained)?;
        self.core.refresh()?;
        checkpoint::set_counts(&self.core, manifest);
        if let Some(seed) = manifest.rounding_seed {
            self.core.set_rounding_seed(seed);
        }
        self.set_progress(TrainingProgress::of(manifest, self.progress(), &LoadOptions::default()));
        self.restore_rates(manifest);
        if self.global_steps > 0 {
            self.core.skip_unused_check();
        }
        let Some(islands) = &mut self.islands else { return Ok(()) };
        let Some(progress) = &manifest.islands else { return Err(mismatch_error()) };
        islands.join(&self.core, progress);
        if self.core.comm().rank() == 0 {
            emit(&format!(
                "local_steps: island {} has joined the others at step {}",
                islands.ranks.number(),
                self.global_steps
            ));
        }
        islands.client_state = manifest.client_state.clone();
        islands.joined_at = Some(self.global_steps);
        Ok(())
    }

    /// Returns whether this island has joined others and has not trained since.
    pub(super) fn has_just_joined(&self) -> bool {
        self.islands.as_ref().is_some_and(|islands| islands.joined_at == Some(self.global_steps))
    }

    /// Returns the result of loading the checkpoint in `dir` if this island has joined others and has not trained
    /// since: the state that it received is newer, and is kept.
    pub(super) fn joined_instead_of(&self, dir: &Path, tag: Option<&str>) -> Option<LoadedCheckpoint> {
        let islands = self.islands.as_ref().filter(|_| self.has_just_joined())?;
        if self.core.comm().rank() == 0 {
            emit(&format!(
                "local_steps: the checkpoint in {} is not loaded: this island continues with the state of the others at \
                 step {}",
                dir.display(),
                self.global_steps
            ));
        }
        let client_state = match &islands.client_state {
            // The donor has neither saved nor loaded a checkpoint.
            Value::Null => {
                checkpoint::peek(&islands.ranks.folder(dir), tag).map_or(Value::Null, |own| own.client_state)
            }
            state => state.clone(),
        };
        Some(LoadedCheckpoint { path: dir.to_owned(), client_state, global_samples: self.global_samples })
    }

    /// Notifies the server that this island's program has ended.
    pub(super) fn leave_islands(&self) {
        if let Some(Ok(Some(link))) = self.islands.as_ref().map(link) {
            link.say_goodbye();
        }
    }
}

/// The progress of an island that joins others.
enum JoinProgress {
    /// It waits for a donor.
    Waits,
    /// A donor sends its state.
    Receives(DonationHead),
    /// It is part of the run. The head is that of the donation, if it is known here.
    Joined(Option<DonationHead>),
    /// No other island is left.
    Begins,
}

impl JoinProgress {
    /// Returns the progress after a message that is not a part of the donation.
    fn after(received: JoinMessage) -> Self {
        match received {
            JoinMessage::Head(head) => Self::Receives(head),
            JoinMessage::Begin => Self::Begins,
            JoinMessage::Joined => Self::Joined(None),
            JoinMessage::Aborted | JoinMessage::Part(..) | JoinMessage::End(_) => Self::Waits,
        }
    }
}

/// Some elements of a parameter's state.
struct DonatedPiece {
    kind: ParamStateKind,
    param: usize,
    range: Range<usize>,
}

/// Returns the pieces of a donation, in order. They are the same for ranks at the same position.
fn pieces_of(core: &RankCore, trainer: &GroupedOptimizer) -> Vec<DonatedPiece> {
    let param_pieces = |(number, param)| {
        let names = core.state_names(param, trainer);
        let kinds = names.iter().filter_map(move |name| ParamStateKind::named(name, names));
        let owned = core.owned_range(number);
        kinds.flat_map(move |kind| pieces(&owned).map(move |range| DonatedPiece { kind, param: number, range }))
    };
    core.trained_params().flat_map(param_pieces).collect()
}

fn mismatch_error() -> Error {
    let why =
        "the state of the donor does not fit this model; start the same program with the same files on all islands";
    EngineError::LocalSteps { why: why.into() }.into()
}
