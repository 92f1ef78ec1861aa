//! The engine's calls for local steps.

use super::Engine;
use super::islands::Islands;
use crate::comm::CommReport;
use crate::comm::engine_call::during;
use crate::error::{EngineError, Error, Result};
use serde_json::Value;

impl<M> Engine<M> {
    /// Collective among all ranks of the job: ends the current window of local steps early, so that all islands have
    /// the same weights. With an island server, all islands that train must call it after the same step. Without
    /// `local_steps`, nothing is exchanged.
    ///
    /// Call it after the last step, before weights are evaluated or exported, unless the last step ended a window.
    ///
    /// # Errors
    /// [`EngineError::MidAccumulation`] in the middle of an accumulation; the error of a failed background save; a
    /// failed collective; with an island server, a lost connection or a refusal by the server.
    pub fn synchronize_islands(&mut self) -> Result<()> {
        let _call = during("synchronize_islands");
        self.wait_for_checkpoint()?;
        self.between_steps("synchronize_islands")?;
        self.forget_forward();
        if self.has_just_joined() {
            // An island that has just joined has the outer weights.
            return Ok(());
        }
        self.settled(|engine| {
            let step = engine.global_steps;
            let Some(islands) = &mut engine.islands else { return Ok::<(), Error>(()) };
            islands.synchronize(&engine.core, step)?;
            engine.core.refresh()?;
            engine.donate()
        })
    }

    /// Returns an error if ranks take local steps, because `call` would change weights that the islands have in common.
    pub(super) fn not_on_islands(&self, call: &str) -> Result<()> {
        let Some(_) = &self.islands else { return Ok(()) };
        let why = format!(
            "{call} would change what islands exchange; call it in a run without local_steps, save a checkpoint, and load \
             that checkpoint"
        );
        Err(EngineError::LocalSteps { why }.into())
    }

    /// Returns the index of this rank's island, counted from 0, and the number of islands, if the ranks take local
    /// steps. With an island server, these are the slot and the number of slots.
    pub fn island(&self) -> Option<(usize, usize)> {
        self.islands.as_ref().map(|islands| (islands.ranks.number(), islands.ranks.count()))
    }

    /// Returns the bytes and calls of this rank's exchanges with other islands so far, if the ranks take local steps.
    pub fn island_report(&self) -> Option<CommReport> {
        self.islands.as_ref().map(Islands::report)
    }

    /// Exchanges the changes of islands, if an exchange is due after this step. `applied` states whether the step
    /// changed weights. Returns whether the exchange changed weights.
    pub(super) fn exchange_between_islands(&mut self, applied: bool) -> Result<bool> {
        let Some(islands) = &mut self.islands else { return Ok(false) };
        let samples = self.config.batch.train_batch_size / islands.ranks.count();
        islands.after_step(&self.core, self.global_steps, if applied { samples as u64 } else { 0 })
    }

    /// With an island server: sets the client state that a joining island receives from this one. A checkpoint that
    /// is saved or loaded also sets it.
    pub fn set_donated_client_state(&mut self, state: Value) {
        if let Some(islands) = &mut self.islands {
            islands.client_state = state;
        }
    }

    /// If this island has joined others through an island server and has not trained since, returns the client state
    /// that it received; null if the donor had none.
    pub fn donated_client_state(&self) -> Option<&Value> {
        self.islands.as_ref().filter(|_| self.has_just_joined()).map(|islands| &islands.client_state)
    }
}
