//! The vote of a rank of a pipeline: its own stages first, then all stages together.
//!
//! ```text
//!   rank of each stage   sums of squares by parameter, loss ----> all ranks along the pipeline
//!   all of them          sums in the order of the complete model's parameters: the same sum as on one rank
//! ```

use super::rank_zero_requests::RankZeroRequests;
use crate::comm::Communicator;
use crate::error::Result;
use crate::layout::RankMesh;
use crate::param::ParamId;
use std::collections::BTreeSet;
use std::sync::Arc;

/// The contribution of one rank of a pipeline to the vote, or of all of them together.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct PipelineVote {
    /// The sum of squares of each trained parameter's gradient, in this rank's piece, in the order of registration.
    pub squares: Vec<(ParamId, f64)>,
    /// The loss, which only the last stage computes.
    pub loss: f64,
    pub loss_is_finite: bool,
    /// The requests from rank 0 to all ranks.
    pub requests: RankZeroRequests,
}

/// The pipeline of this rank: its communicators, and the parameters and buffers of the complete model.
pub(crate) struct PipelineContext {
    /// The ranks along the pipeline.
    pub comm: Arc<dyn Communicator>,
    /// All ranks of the job, and their arrangement.
    pub job: Arc<dyn Communicator>,
    pub mesh: RankMesh,
    /// The index of each of this rank's parameters in the complete model.
    pub in_model: Vec<usize>,
    /// Whether this rank holds the last stage, which computes the loss.
    pub is_last: bool,
    /// A hash of the complete model's parameters and their division among stages.
    pub fingerprint: u64,
    /// The names of all parameters of the complete model, in order.
    pub all_names: Vec<String>,
    /// The parameter whose owner is another rank: a copy of a tied weight.
    pub copied: Option<ParamId>,
    /// The names of all buffers of the complete model.
    pub all_buffers: BTreeSet<String>,
}

impl PipelineContext {
    /// Collective along the pipeline: returns the vote of all stages together. `stage` is this rank's contribution.
    pub(crate) fn vote(&self, stage: PipelineVote) -> Result<PipelineVote> {
        const WORDS: usize = 3;
        let counts = self.comm.gather_f64(vec![stage.squares.len() as f64]).wait()?;
        let longest = counts.iter().map(|count| count[0] as usize).max().unwrap_or(0);
        let mut numbers =
            vec![f64::from(u8::from(self.is_last)), stage.loss, stage.requests.with_flag(stage.loss_is_finite)];
        numbers.extend(stage.squares.iter().flat_map(|(param, squares)| [self.in_model[*param] as f64, *squares]));
        numbers.resize(WORDS + 2 * longest, 0.0);
        let all = self.comm.gather_f64(numbers).wait()?;
        let mut vote = PipelineVote {
            squares: Vec::new(),
            loss: 0.0,
            loss_is_finite: true,
            requests: RankZeroRequests::default(),
        };
        for (numbers, count) in all.iter().zip(&counts) {
            let (head, squares) = numbers.split_at(WORDS);
            let (loss_is_finite, requests) = RankZeroRequests::of_number(head[2]);
            if head[0] != 0.0 {
                (vote.loss, vote.loss_is_finite) = (head[1], loss_is_finite);
            }
            vote.requests = vote.requests.or(requests);
            let squares = squares.chunks_exact(2).take(count[0] as usize);
            vote.squares.extend(squares.map(|pair| (pair[0] as usize, pair[1])));
        }
        vote.squares.sort_by_key(|(param, _)| *param);
        Ok(vote)
    }
}
