//! Freezing and unfreezing: parameters change their class between two steps.
//!
//! ```text
//!   all ranks agree -> every share is laid out anew, weights at full precision -> states of those that stay trained
//! ```
//!
//! The new layout is that of an engine built with these parameters trained. The old one stays until the new one is
//! complete: if there is not enough space for a file, nothing changes. A share on a GPU exists twice for a short time.

use super::state_access::{ParamStateKind, pieces};
use super::sub_group::param_slots;
use super::sub_group_builder::SubGroupBuilder;
use crate::comm::agree::{JointOperationFailure, gather_u64};
use crate::error::{EngineError, Result};
use crate::precision::{Flat, FlatRef};
use crate::tensor::flat_buffer::BufferDevice;
use crate::util::{fnv1a, lock, unpoisoned};
use crate::zero::rank_core::RankCore;
use candle_core::DType;
use std::ops::Range;
use std::sync::atomic::Ordering;

impl RankCore {
    /// Collective: from now on, trains exactly the parameters that `trained` selects. Those that were not trained
    /// before get fresh optimizer states. `updates` is the number of weight updates so far. No gradients may exist at
    /// this point.
    ///
    /// # Errors
    /// Fails on all ranks, without any change, if there is not enough space for a file. Also fails if a collective
    /// fails.
    pub fn set_trained(&self, trained: &[bool], updates: u64) -> Result<(), JointOperationFailure> {
        if self.params.iter().zip(trained).all(|(param, trained)| param.is_trained() == *trained) {
            return Ok(());
        }
        self.release_all()?;
        if let Some(offload) = &self.offload {
            offload.start_new_files();
        }
        let mut builder = {
            let (plan, offload) = (self.share_plan.clone(), self.offload.clone());
            let devices = plan.devices_of(self.model_location.clone(), BufferDevice::Host);
            SubGroupBuilder::new(plan, offload, self.ledger.clone(), devices)
        };
        for (id, param) in self.params.iter().enumerate() {
            let weights = match self.own_words(id)? {
                // The words are copied unchanged, because packing unpacked values again may give different codes.
                Some(words) => words,
                None => self.own_values(ParamStateKind::Weights, id, self.owned_range(id))?,
            };
            builder.push_share(id, param.cut(), weights.as_ref(), param.class(trained[id]))?;
        }
        let mut groups = builder.finish(&self.params)?;
        if let Some(offload) = &self.offload {
            offload.check_space(self.comm()).map_err(JointOperationFailure::InStep)?;
        }
        let new_param_slots = param_slots(&groups, self.params.len());
        let stays_trained = |id: &usize| self.params[*id].is_trained() && trained[*id];
        for id in (0..self.params.len()).filter(stays_trained) {
            let (group, slot) = new_param_slots[id];
            let group = &mut groups[group];
            for (number, moment) in group.moments.iter_mut().enumerate() {
                for piece in pieces(&self.owned_range(id)) {
                    let values = self.own_values(ParamStateKind::Moment(number), id, piece.clone())?;
                    moment.write(group.slots[slot].place(&piece), values.as_ref(), self.io())?;
                }
            }
            let names = group.class.role().map_or(&[][..], |role| self.share_plan.grouping.factored_names(role));
            for number in 0..names.len() {
                let range = self.factored_range(id, number);
                let values = self.own_values(ParamStateKind::Factored(number), id, 0..range.len())?;
                group.factored[slot].buffer_mut().write(range, values.as_ref())?;
            }
        }
        *lock(&self.groups) = groups;
        *unpoisoned(self.param_slots.write()) = new_param_slots;
        for (param, trained) in self.params.iter().zip(trained) {
            if *trained && !param.is_trained() {
                param.updates_before.store(updates, Ordering::Relaxed);
            }
            param.trained.store(*trained, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Returns elements `range` of a state in f32. The range must be part of the elements that this rank owns.
    pub(super) fn own_values(&self, state: ParamStateKind, param: usize, range: Range<usize>) -> Result<Flat> {
        let mut values = Flat::with_capacity(DType::F32, range.len());
        let append = |elements: FlatRef<'_>| values.extend_cast(elements);
        self.read_state(state, param, range, append)?;
        Ok(values)
    }

    /// Collective: returns an error on all ranks if they would train different parameters.
    pub fn agree_on_trained(&self, trained: &[bool]) -> Result<(), JointOperationFailure> {
        let bytes: Vec<u8> = trained.iter().map(|trained| u8::from(*trained)).collect();
        let all = gather_u64(self.comm(), &[fnv1a(&bytes)])?;
        let rank = self.comm().rank();
        match (0..all.len()).find(|other| all[*other] != all[rank]) {
            Some(other) => Err(JointOperationFailure::InStep(EngineError::TrainableDiffers { rank, other }.into())),
            // If another pair of ranks differs, one of the two also differs from this rank.
            None => Ok(()),
        }
    }
}
