//! Names the parts of a model that ranks ran when their collectives differed.

use crate::comm::{CollectiveKind as Collective, content_of};
use crate::error::{CommError, EngineError, Error};
use crate::param::ParamId;
use crate::util::lock;
use crate::zero::rank_core::RankCore;

impl RankCore {
    /// Returns `error`, or, if ranks have run different parts of the model, an error that names these parts and the
    /// remedy.
    pub fn name_parts(&self, error: Error) -> Error {
        let Error::Comm(CommError::Diverged { rank, here, peer, there }) = &error else { return error };
        let parts = (self.describe_part(here), self.describe_part(there));
        let are_gradients = is_reduction(here) && is_reduction(there);
        if parts == (None, None) && !are_gradients {
            return error;
        }
        let (here, there) = (parts.0.unwrap_or_else(|| here.clone()), parts.1.unwrap_or_else(|| there.clone()));
        EngineError::UnitsDiverged { rank: *rank, here, peer: *peer, there }.into()
    }

    /// Describes a collective and the unit or the parameter that it carries. Returns `None` if neither is found.
    fn describe_part(&self, call: &str) -> Option<String> {
        let content = content_of(call)?;
        let carries = |params: &[ParamId]| self.tag(params) as u32 == content;
        let part = if collective_of(call).starts_with(Collective::AllGather.name()) {
            let unit = lock(&self.gather).unit_that(carries)?;
            format!("the gather of unit {}", self.unit_name(unit))
        } else if is_reduction(call) {
            let param = (0..self.params.len()).find(|param| carries(&[*param]))?;
            format!("the reduction of {}'s gradient", self.params[param].name)
        } else {
            return None;
        };
        Some(format!("{part}, {call}"))
    }
}

/// Returns the part of a text that describes the collective. The text may begin with the engine's call.
fn collective_of(call: &str) -> &str {
    let kinds = [Collective::AllReduce, Collective::ReduceScatter, Collective::AllGather];
    kinds.iter().filter_map(|kind| call.find(kind.name())).min().map_or(call, |at| &call[at..])
}

fn is_reduction(call: &str) -> bool {
    let kinds = [Collective::AllReduce, Collective::ReduceScatter];
    kinds.iter().any(|kind| collective_of(call).starts_with(kind.name()))
}
