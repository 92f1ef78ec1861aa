//! The schedule of a pipeline as a value: the operations that each rank runs, in order.
//!
//! ```text
//!   1F1B, 3 ranks, 4 micro batches                          a rank holds the activations of
//!   rank 0   F0 F1 F2 .. .. B0 F3 .. B1 .. B2 .. B3         3 micro batches at most
//!   rank 1   .. F0 F1 .. B0 F2 B1 F3 B2 .. B3               2
//!   rank 2   .. .. F0 B0 F1 B1 F2 B2 F3 B3                  1
//! ```
//!
//! A model is cut into stages. With one chunk per rank, stage s belongs to rank s. With several, rank r of p ranks
//! holds the stages r, r + p, r + 2p, ... (interleaved, arXiv 2104.04473), which shortens the wait for the first and
//! the last micro batch, or the stages r and 2p - 1 - r (V shape). Zero-bubble schedules (arXiv 2401.10241) divide a
//! backward pass into the gradient of the input, for which the previous stage waits, and the gradients of the weights,
//! which are computed in time that would otherwise be spent waiting.
//!
//! Every stage processes the micro batches in order, forward and backward, so its gradients are summed in the order in
//! which one rank with accumulation sums them. The lists of operations are those of
//! `torch.distributed.pipelining.schedules`.

use crate::util::counted;
use std::collections::BTreeMap;
use std::fmt;

/// The kind of a pipeline schedule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum PipelineScheduleKind {
    /// One forward, one backward: `Schedule1F1B` of torch, `TrainSchedule` of DeepSpeed.
    #[default]
    OneForwardOneBackward,
    /// 1F1B with several chunks of the model per rank: `ScheduleInterleaved1F1B`.
    Interleaved,
    /// 1F1B with divided backward passes and one or several chunks per rank: `ScheduleInterleavedZeroBubble`.
    ZeroBubble,
    /// Divided backward passes with two chunks per rank, in the shape of a V: `ScheduleZBVZeroBubble`.
    ZeroBubbleV,
}

impl PipelineScheduleKind {
    /// All kinds.
    pub const ALL: [Self; 4] = [Self::OneForwardOneBackward, Self::Interleaved, Self::ZeroBubble, Self::ZeroBubbleV];

    /// Returns the name in configurations.
    pub fn name(self) -> &'static str {
        match self {
            Self::OneForwardOneBackward => "1f1b",
            Self::Interleaved => "interleaved",
            Self::ZeroBubble => "zero_bubble",
            Self::ZeroBubbleV => "zbv",
        }
    }

    /// Returns whether backward passes are divided into the gradients of inputs and those of weights.
    pub fn divides_backward(self) -> bool {
        matches!(self, Self::ZeroBubble | Self::ZeroBubbleV)
    }
}

/// The work of one operation on one micro batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PipelinePass {
    /// The forward pass of the stage.
    Forward,
    /// The complete backward pass of the stage.
    Backward,
    /// The part of the backward pass that computes the gradient of the stage's input.
    BackwardInput,
    /// The part of the backward pass that computes the gradients of the stage's weights.
    BackwardWeight,
}

/// One operation of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PipelineOp {
    /// The stage, counted from 0.
    pub stage: usize,
    /// The work.
    pub pass: PipelinePass,
    /// The index of the micro batch in the step, counted from 0.
    pub micro_batch: usize,
}

impl fmt::Display for PipelineOp {
    /// Writes the operation as torch does: `2F0` is the forward pass of micro batch 0 in stage 2.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pass = match self.pass {
            PipelinePass::Forward => 'F',
            PipelinePass::Backward => 'B',
            PipelinePass::BackwardInput => 'I',
            PipelinePass::BackwardWeight => 'W',
        };
        write!(f, "{}{pass}{}", self.stage, self.micro_batch)
    }
}

/// The reason why a schedule does not exist.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ScheduleError {
    /// The number of ranks, chunks or micro batches is 0.
    Empty,
    /// The kind does not exist for this number of chunks per rank.
    Chunks {
        /// The kind.
        kind: PipelineScheduleKind,
        /// The number of chunks per rank.
        found: usize,
    },
    /// The micro batches cannot be divided into rounds of equal length.
    MicroBatches {
        /// The kind.
        kind: PipelineScheduleKind,
        /// The number of ranks along the pipeline.
        ranks: usize,
        /// The number of micro batches per step.
        found: usize,
    },
}

impl fmt::Display for ScheduleError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty => f.write_str("a pipeline needs at least 1 rank, 1 chunk per rank and 1 micro batch"),
            Self::Chunks { kind, found } => {
                let allowed = match kind {
                    PipelineScheduleKind::OneForwardOneBackward => "1 chunk per rank; use interleaved for more",
                    PipelineScheduleKind::ZeroBubbleV => "2 chunks per rank",
                    _ => "2 or more chunks per rank; use 1f1b for 1",
                };
                write!(f, "pipeline.chunks is {found}, but pipeline.schedule {} needs {allowed}", kind.name())
            }
            Self::MicroBatches { kind, ranks, found } => write!(
                f,
                "there {} per step (gradient_accumulation_steps), which pipeline.schedule {} on {ranks} ranks cannot \
                 divide into {} of equal length; use a multiple of {ranks}",
                if *found == 1 { "is 1 micro batch".into() } else { format!("are {found} micro batches") },
                kind.name(),
                counted(found / ranks, "round")
            ),
        }
    }
}

impl std::error::Error for ScheduleError {}

/// The schedule of one optimizer step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PipelineSchedule {
    kind: PipelineScheduleKind,
    ranks: usize,
    chunks: usize,
    micro_batches: usize,
}

impl PipelineSchedule {
    /// Returns the schedule for `micro_batches` micro batches per step on `ranks` ranks, each with `chunks` chunks of
    /// the model.
    ///
    /// # Errors
    /// [`ScheduleError`]: a number is 0, or the kind does not exist for these numbers.
    ///
    /// ```
    /// use candle_zero::pipeline::{PipelineSchedule, PipelineScheduleKind};
    ///
    /// let schedule = PipelineSchedule::new(PipelineScheduleKind::OneForwardOneBackward, 2, 1, 3)?;
    /// let ops: Vec<String> = schedule.operations(0).iter().map(ToString::to_string).collect();
    /// assert_eq!(ops, ["0F0", "0F1", "0B0", "0F2", "0B1", "0B2"]);
    /// # Ok::<(), candle_zero::pipeline::ScheduleError>(())
    /// ```
    pub fn new(
        kind: PipelineScheduleKind,
        ranks: usize,
        chunks: usize,
        micro_batches: usize,
    ) -> Result<Self, ScheduleError> {
        if ranks == 0 || chunks == 0 || micro_batches == 0 {
            return Err(ScheduleError::Empty);
        }
        let exists = match kind {
            PipelineScheduleKind::OneForwardOneBackward => chunks == 1,
            PipelineScheduleKind::Interleaved => chunks > 1,
            PipelineScheduleKind::ZeroBubble => true,
            PipelineScheduleKind::ZeroBubbleV => chunks == 2,
        };
        if !exists {
            return Err(ScheduleError::Chunks { kind, found: chunks });
        }
        let schedule = Self { kind, ranks, chunks, micro_batches };
        let in_rounds = matches!(kind, PipelineScheduleKind::Interleaved | PipelineScheduleKind::ZeroBubble);
        if in_rounds && !micro_batches.is_multiple_of(schedule.rounds()) {
            return Err(ScheduleError::MicroBatches { kind, ranks, found: micro_batches });
        }
        Ok(schedule)
    }

    /// Returns the kind.
    pub fn kind(self) -> PipelineScheduleKind {
        self.kind
    }

    /// Returns the number of ranks along the pipeline.
    pub fn ranks(self) -> usize {
        self.ranks
    }

    /// Returns the total number of stages of all ranks.
    pub fn stages(self) -> usize {
        self.ranks * self.chunks
    }

    /// Returns the number of micro batches per step.
    pub fn micro_batches(self) -> usize {
        self.micro_batches
    }

    /// Returns the rank that holds a stage.
    pub fn rank_of(self, stage: usize) -> usize {
        assert!(stage < self.stages(), "there is no stage {stage} of {}", self.stages());
        match self.kind {
            PipelineScheduleKind::ZeroBubbleV if stage >= self.ranks => self.stages() - 1 - stage,
            _ => stage % self.ranks,
        }
    }

    /// Returns the stages of a rank, in ascending order.
    pub fn stages_of(self, rank: usize) -> Vec<usize> {
        (0..self.stages()).filter(|stage| self.rank_of(*stage) == rank).collect()
    }

    /// Returns the operations of a rank, in order.
    pub fn operations(self, rank: usize) -> Vec<PipelineOp> {
        assert!(rank < self.ranks, "there is no rank {rank} of {}", self.ranks);
        match self.kind {
            PipelineScheduleKind::OneForwardOneBackward => self.alternating(rank, 1, None),
            PipelineScheduleKind::Interleaved => self.alternating(rank, 2, None),
            // The gradients of weights lag behind those of inputs by `rank` operations, and fill the wait at the end.
            PipelineScheduleKind::ZeroBubble => self.alternating(rank, 1, Some(rank)),
            PipelineScheduleKind::ZeroBubbleV => self.v_shaped(rank),
        }
    }

    /// Returns the number of rounds into which the micro batches are divided. Each chunk of a rank has one turn per
    /// round.
    fn rounds(self) -> usize {
        (self.micro_batches / self.ranks).max(1)
    }

    /// Returns the list of operations: first forward passes (`per_hop` more than on the next rank), then forward and
    /// backward passes in turn, then the remaining backward passes. If backward passes are divided, the gradients of
    /// weights lag behind those of inputs by `lag` operations.
    fn alternating(self, rank: usize, per_hop: usize, lag: Option<usize>) -> Vec<PipelineOp> {
        let Self { ranks, chunks, micro_batches, .. } = self;
        let per_round = micro_batches / self.rounds();
        let total = chunks * micro_batches;
        let first = ((chunks - 1) * per_round + per_hop * (ranks - 1 - rank)).min(total);
        // The chunk of the i-th forward pass; backward passes visit the chunks in the opposite order.
        let chunk = |i: usize| i / per_round % chunks;
        let forward_stage = |i: usize| chunk(i) * ranks + rank;
        let backward_stage = |i: usize| (chunks - 1 - chunk(i)) * ranks + rank;
        let backward = if lag.is_some() { PipelinePass::BackwardInput } else { PipelinePass::Backward };
        let mut ops = OpList::default();
        let mut weights = 0;
        (0..first).for_each(|i| ops.push(forward_stage(i), PipelinePass::Forward));
        for i in 0..total {
            if first + i < total {
                ops.push(forward_stage(first + i), PipelinePass::Forward);
            }
            ops.push(backward_stage(i), backward);
            if lag.is_some_and(|lag| i >= lag) {
                ops.push(backward_stage(weights), PipelinePass::BackwardWeight);
                weights += 1;
            }
        }
        if lag.is_some() {
            (weights..total).for_each(|i| ops.push(backward_stage(i), PipelinePass::BackwardWeight));
        }
        ops.list
    }

    /// Returns the operations of the schedule in the shape of a V: a micro batch goes through the first chunks down to
    /// the last rank, and through the second chunks back up to the first (arXiv 2401.10241, section 6).
    fn v_shaped(self, rank: usize) -> Vec<PipelineOp> {
        use PipelinePass::{BackwardInput, BackwardWeight, Forward};
        let Self { ranks, micro_batches, .. } = self;
        let (down, up) = (rank, self.stages() - 1 - rank);
        let to_last = ranks - rank;
        // The pattern needs this many micro batches; those that do not exist are left out at the end.
        let all = micro_batches.max(2 * ranks - 1);
        let mut ops = OpList::default();
        // Forward passes until the first micro batch has returned to this rank.
        (0..2 * to_last - 1).for_each(|_| ops.push(down, Forward));
        (0..rank).for_each(|_| [up, down].into_iter().for_each(|stage| ops.push(stage, Forward)));
        (0..to_last).for_each(|_| [Forward, BackwardInput, BackwardWeight].into_iter().for_each(|p| ops.push(up, p)));
        // Steady state: for each micro batch that enters a chunk, another one leaves it.
        while ops.count(up, Forward) < ops.count(down, Forward) || ops.count(down, Forward) < all {
            if ops.count(down, Forward) < all {
                ops.push(down, Forward);
            }
            [BackwardInput, BackwardWeight].into_iter().for_each(|pass| ops.push(down, pass));
            [Forward, BackwardInput, BackwardWeight].into_iter().for_each(|pass| ops.push(up, pass));
        }
        // The last backward passes, with gradients of weights where the rank would otherwise wait.
        (0..rank).for_each(|_| [down, up].into_iter().for_each(|stage| ops.push(stage, BackwardInput)));
        (0..to_last).for_each(|_| [BackwardInput, BackwardWeight].into_iter().for_each(|pass| ops.push(down, pass)));
        for stage in [up, down] {
            while ops.count(stage, BackwardWeight) < ops.count(stage, BackwardInput) {
                ops.push(stage, BackwardWeight);
            }
        }
        ops.list.retain(|op| op.micro_batch < micro_batches);
        ops.list
    }
}

/// Operations in order: each pass of a stage takes the next micro batch.
#[derive(Default)]
struct OpList {
    list: Vec<PipelineOp>,
    counts: BTreeMap<(usize, PipelinePass), usize>,
}

impl OpList {
    fn push(&mut self, stage: usize, pass: PipelinePass) {
        let micro_batch = self.counts.entry((stage, pass)).or_default();
        self.list.push(PipelineOp { stage, pass, micro_batch: *micro_batch });
        *micro_batch += 1;
    }

    fn count(&self, stage: usize, pass: PipelinePass) -> usize {
        self.counts.get(&(stage, pass)).copied().unwrap_or_default()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_operations_are_those_that_torch_lists() {
        let recorded = include_str!("../../tests/fixtures/pipeline/schedules.txt");
        for line in recorded.lines() {
            let (case, expected) = line.split_once(": ").unwrap();
            let [kind, ranks, chunks, micro_batches, rank] = case.split(' ').collect::<Vec<_>>().try_into().unwrap();
            let number = |text: &str| text.parse::<usize>().unwrap();
            let kind = PipelineScheduleKind::ALL.into_iter().find(|known| known.name() == kind).unwrap();
            let schedule = PipelineSchedule::new(kind, number(ranks), number(chunks), number(micro_batches)).unwrap();
            let ops: Vec<String> = schedule.operations(number(rank)).iter().map(ToString::to_string).collect();
            assert_eq!(ops.join(" "), expected, "{case}");
        }
        assert!(recorded.lines().count() > 1000);
    }

    #[test]
    fn what_no_schedule_has_is_refused() {
        let refused = |kind, ranks, chunks, micro_batches| {
            PipelineSchedule::new(kind, ranks, chunks, micro_batches).unwrap_err().to_string()
        };
        use PipelineScheduleKind::{Interleaved, OneForwardOneBackward, ZeroBubble, ZeroBubbleV};
        insta::assert_snapshot!(refused(OneForwardOneBackward, 2, 2, 4), @"pipeline.chunks is 2, but pipeline.schedule 1f1b needs 1 chunk per rank; use interleaved for more");
        insta::assert_snapshot!(refused(Interleaved, 2, 1, 4), @"pipeline.chunks is 1, but pipeline.schedule interleaved needs 2 or more chunks per rank; use 1f1b for 1");
        insta::assert_snapshot!(refused(ZeroBubbleV, 2, 3, 4), @"pipeline.chunks is 3, but pipeline.schedule zbv needs 2 chunks per rank");
        insta::assert_snapshot!(refused(ZeroBubble, 2, 1, 5), @"there are 5 micro batches per step (gradient_accumulation_steps), which pipeline.schedule zero_bubble on 2 ranks cannot divide into 2 rounds of equal length; use a multiple of 2");
        insta::assert_snapshot!(refused(OneForwardOneBackward, 0, 1, 4), @"a pipeline needs at least 1 rank, 1 chunk per rank and 1 micro batch");
    }

    proptest! {
        #[test]
        fn every_pass_of_every_micro_batch_runs_once_and_in_order(
            kind in 0usize..4, ranks in 1usize..9, chunks in 1usize..4, micro_batches in 1usize..20,
        ) {
            let kind = PipelineScheduleKind::ALL[kind];
            let Ok(schedule) = PipelineSchedule::new(kind, ranks, chunks, micro_batches) else { return Ok(()) };
            let mut stages = Vec::new();
            for rank in 0..ranks {
                let ops = schedule.operations(rank);
                for stage in schedule.stages_of(rank) {
                    stages.push(stage);
                    prop_assert_eq!(schedule.rank_of(stage), rank);
                    let passes: &[PipelinePass] = match kind.divides_backward() {
                        true => &[PipelinePass::Forward, PipelinePass::BackwardInput, PipelinePass::BackwardWeight],
                        false => &[PipelinePass::Forward, PipelinePass::Backward],
                    };
                    for pass in passes {
                        let of_pass = ops.iter().filter(|op| op.stage == stage && op.pass == *pass);
                        let order: Vec<usize> = of_pass.map(|op| op.micro_batch).collect();
                        prop_assert_eq!(order, (0..micro_batches).collect::<Vec<_>>());
                    }
                    for micro_batch in 0..micro_batches {
                        let at = |pass: &PipelinePass| {
                            ops.iter().position(|op| *op == PipelineOp { stage, pass: *pass, micro_batch })
                        };
                        prop_assert!(passes.iter().map(at).is_sorted());
                    }
                }
            }
            stages.sort_unstable();
            prop_assert_eq!(stages, (0..schedule.stages()).collect::<Vec<_>>());
        }
    }
}
