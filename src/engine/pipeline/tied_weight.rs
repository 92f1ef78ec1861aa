//! A weight that the first layer and the last one share: a token embedding that is also the output projection.
//!
//! ```text
//!   last stage    backward of micro batch i: the output's part of the gradient, kept until the lookup's part is known
//!   first stage   backward of micro batch i: the gradient of the looked-up rows ----> last stage: adds it, accumulates
//!   step          last stage: update ----> first stage: the new weight
//! ```
//!
//! On one rank, the gradient of a micro batch is that of the output plus that of the lookup, which is added row by row;
//! the sum is then accumulated. The last stage computes the same sum in the same order: it owns the weight, and
//! differentiates the lookup again for the gradient that the first stage sends. The first stage has a copy that it does
//! not train.

use super::p2p::BoundaryTensor;
use crate::comm::Communicator;
use crate::engine::Engine;
use crate::error::Result;
use crate::graph::Grad;
use crate::memory::MemoryLedgerEntry;
use crate::param::ParamId;
use crate::pipeline::PipelineSchedule;
use std::collections::VecDeque;

/// This rank's role in training a tied weight.
pub(super) struct TiedWeight {
    pub param: ParamId,
    /// The ranks of the job that hold the first stage and the last one.
    pub ends: [usize; 2],
    pub is_first: bool,
    pub is_last: bool,
    /// For each micro batch, the last operation of this rank on which the first stage's backward pass depends.
    pub lookup_dependencies: Vec<usize>,
    /// The output's parts of the gradient, by micro batch, oldest first.
    pub output_gradients: VecDeque<OutputGradient>,
    /// The gradients of looked-up rows that this rank, which holds both stages, has computed, oldest first.
    pub lookup_gradients: VecDeque<BoundaryTensor>,
}

/// The output's part of the gradient for a micro batch.
pub(super) struct OutputGradient {
    pub micro_batch: usize,
    pub gradient: Grad,
    #[allow(dead_code, reason = "held for its Drop")]
    pub memory: MemoryLedgerEntry,
}

impl TiedWeight {
    /// Collective along the pipeline: returns this rank's role in training the weight `name`, or `None` if the weight
    /// is frozen or this rank does not have it.
    pub fn agree<M>(
        engine: &Engine<M>,
        name: &str,
        pipeline_comm: &dyn Communicator,
        ends: [usize; 2],
        schedule: PipelineSchedule,
    ) -> Result<Option<Self>> {
        let rank = pipeline_comm.rank();
        let is_first = schedule.rank_of(0) == rank;
        let is_last = schedule.rank_of(schedule.stages() - 1) == rank;
        let local_param = engine.param_named(name);
        let trained = is_last && local_param.is_some_and(|(_, is_trained)| is_trained);
        let trained = pipeline_comm.gather_f64(vec![f64::from(u8::from(trained))]).wait()?;
        let param = local_param.filter(|_| trained.iter().any(|trained| trained[0] != 0.0));
        Ok(param.map(|(param, _)| Self {
            param,
            ends,
            is_first,
            is_last,
            lookup_dependencies: schedule.needed_by_first_stage(rank),
            output_gradients: VecDeque::new(),
            lookup_gradients: VecDeque::new(),
        }))
    }
}
