//! The timing of a schedule: when each operation runs if operations and messages take given times.
//!
//! An operation begins when its rank has finished the previous operation in the rank's list and the operation's input
//! has arrived: a forward pass needs the result of the previous stage, and a backward pass that of the next stage.

use super::schedule::{PipelineOp, PipelinePass, PipelineSchedule};
use std::collections::{BTreeMap, BTreeSet};

/// The seconds that one micro batch takes in a stage.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StageCost {
    /// The forward pass.
    pub forward: f64,
    /// The part of the backward pass for the gradient of the input.
    pub backward_input: f64,
    /// The part of the backward pass for the gradients of the weights.
    pub backward_weight: f64,
}

impl StageCost {
    fn cost_of(&self, pass: PipelinePass) -> f64 {
        match pass {
            PipelinePass::Forward => self.forward,
            PipelinePass::Backward => self.backward_input + self.backward_weight,
            PipelinePass::BackwardInput => self.backward_input,
            PipelinePass::BackwardWeight => self.backward_weight,
        }
    }
}

/// The timing of one step.
#[derive(Debug, Clone, PartialEq)]
pub struct SimulatedPipelineTimes {
    /// The seconds from the start of the first operation to the end of the last one.
    pub seconds: f64,
    /// The seconds during which each rank computes.
    pub busy: Vec<f64>,
}

impl SimulatedPipelineTimes {
    /// Returns the share of the step in which ranks wait, on average: (p - 1) / (m + p - 1) for 1F1B with m micro
    /// batches on p equal ranks.
    pub fn bubble(&self) -> f64 {
        if self.seconds == 0.0 {
            return 0.0;
        }
        1.0 - self.busy.iter().sum::<f64>() / (self.seconds * self.busy.len() as f64)
    }
}

impl PipelineSchedule {
    /// Computes the timing of one step: `costs` has one entry per stage, and a message between ranks takes `message`
    /// seconds.
    ///
    /// # Panics
    /// Panics if `costs` does not have exactly one entry per stage.
    pub fn simulate(self, costs: &[StageCost], message: f64) -> SimulatedPipelineTimes {
        assert_eq!(costs.len(), self.stages(), "each stage needs a cost");
        let lists: Vec<Vec<PipelineOp>> = (0..self.ranks()).map(|rank| self.operations(rank)).collect();
        let mut next = vec![0; self.ranks()];
        let (mut free_at, mut busy) = (vec![0f64; self.ranks()], vec![0f64; self.ranks()]);
        let mut end_times: BTreeMap<PipelineOp, f64> = BTreeMap::new();
        loop {
            let mut progressed = false;
            for rank in 0..self.ranks() {
                while let Some(op) = lists[rank].get(next[rank]) {
                    let input_time = match self.dependency_of(*op) {
                        None => Some(0.0),
                        Some(needed) => end_times
                            .get(&needed)
                            .map(|end| end + if self.rank_of(needed.stage) == rank { 0.0 } else { message }),
                    };
                    let Some(arrived) = input_time else { break };
                    let cost = costs[op.stage].cost_of(op.pass);
                    free_at[rank] = free_at[rank].max(arrived) + cost;
                    busy[rank] += cost;
                    end_times.insert(*op, free_at[rank]);
                    next[rank] += 1;
                    progressed = true;
                }
            }
            if !progressed {
                break;
            }
        }
        assert!(lists.iter().zip(&next).all(|(list, next)| list.len() == *next), "ranks wait for each other");
        SimulatedPipelineTimes { seconds: free_at.into_iter().fold(0.0, f64::max), busy }
    }

    /// Returns the maximum number of activations that a rank holds at the same time, counted per micro batch and stage:
    /// those whose forward pass has run and whose backward pass is not complete.
    pub fn held_activations(self, rank: usize) -> usize {
        let (mut held, mut peak) = (0usize, 0);
        for op in self.operations(rank) {
            match op.pass {
                PipelinePass::Forward => held += 1,
                PipelinePass::Backward | PipelinePass::BackwardWeight => held -= 1,
                PipelinePass::BackwardInput => {}
            }
            peak = peak.max(held);
        }
        peak
    }

    /// Returns, for each micro batch, the last operation of `rank` (as its position in the rank's list) on which the
    /// first stage's backward pass of that micro batch depends.
    pub(crate) fn needed_by_first_stage(self, rank: usize) -> Vec<usize> {
        let lists: Vec<Vec<PipelineOp>> = (0..self.ranks()).map(|rank| self.operations(rank)).collect();
        let mut needed = vec![0; self.micro_batches()];
        // This is the progress of each rank if `rank` stops after the operation at position `position`.
        let mut next = vec![0; self.ranks()];
        let mut finished = BTreeSet::new();
        for position in 0..lists[rank].len() {
            loop {
                let mut progressed = false;
                for (other_rank, list) in lists.iter().enumerate() {
                    let end = if other_rank == rank { position + 1 } else { list.len() };
                    while let Some(op) = list[..end].get(next[other_rank]).copied() {
                        if self.dependency_of(op).is_some_and(|needed| !finished.contains(&needed)) {
                            break;
                        }
                        if op.stage == 0 && self.computes_input_gradient(op.pass) {
                            needed[op.micro_batch] = position;
                        }
                        finished.insert(op);
                        next[other_rank] += 1;
                        progressed = true;
                    }
                }
                if !progressed {
                    break;
                }
            }
        }
        needed
    }

    /// Returns whether `pass` computes the gradient of its stage's input.
    fn computes_input_gradient(self, pass: PipelinePass) -> bool {
        matches!(pass, PipelinePass::Backward | PipelinePass::BackwardInput)
    }

    /// Returns the operation of another stage that computes the input of `op`, if there is one.
    fn dependency_of(self, op: PipelineOp) -> Option<PipelineOp> {
        match op.pass {
            PipelinePass::Forward => Some(PipelineOp { stage: op.stage.checked_sub(1)?, ..op }),
            PipelinePass::Backward | PipelinePass::BackwardInput => {
                Some(PipelineOp { stage: op.stage + 1, ..op }).filter(|needed| needed.stage < self.stages())
            }
            PipelinePass::BackwardWeight => None,
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::schedule::PipelineScheduleKind;
    use super::*;
    use proptest::prelude::*;

    const EQUAL: StageCost = StageCost { forward: 1.0, backward_input: 1.0, backward_weight: 1.0 };

    fn bubble(kind: PipelineScheduleKind, ranks: usize, chunks: usize, micro_batches: usize) -> f64 {
        let schedule = PipelineSchedule::new(kind, ranks, chunks, micro_batches).unwrap();
        schedule.simulate(&vec![EQUAL; ranks * chunks], 0.0).bubble()
    }

    #[test]
    fn bubbles_are_those_of_the_formulas() {
        for (ranks, micro_batches) in [(2, 4), (4, 8), (4, 16), (8, 16)] {
            let (p, m) = (ranks as f64, micro_batches as f64);
            let near = |found: f64, expected: f64| assert!((found - expected).abs() < 1e-9, "{found} {expected}");
            near(
                bubble(PipelineScheduleKind::OneForwardOneBackward, ranks, 1, micro_batches),
                (p - 1.0) / (m + p - 1.0),
            );
            near(bubble(PipelineScheduleKind::Interleaved, ranks, 2, micro_batches), (p - 1.0) / (2.0 * m + p - 1.0));
            // The zero-bubble schedule waits a third as long as 1F1B; the V schedule does not wait in its steady state.
            near(bubble(PipelineScheduleKind::ZeroBubble, ranks, 1, micro_batches), (p - 1.0) / (3.0 * m + p - 1.0));
            near(bubble(PipelineScheduleKind::ZeroBubbleV, ranks, 2, micro_batches), (p - 1.0) / (6.0 * m + p - 1.0));
        }
    }

    #[test]
    fn activations_in_flight_are_those_of_the_rules() {
        for ranks in 1..9 {
            for micro_batches in 1..17 {
                for rank in 0..ranks {
                    let of = |kind, chunks| {
                        let schedule = PipelineSchedule::new(kind, ranks, chunks, micro_batches).ok()?;
                        Some(schedule.held_activations(rank))
                    };
                    let rule = (ranks - rank).min(micro_batches);
                    assert_eq!(of(PipelineScheduleKind::OneForwardOneBackward, 1), Some(rule));
                    // With one chunk, a rank needs at most the memory that 1F1B needs on the first rank.
                    assert!(
                        of(PipelineScheduleKind::ZeroBubble, 1).is_none_or(|held| held <= ranks.min(micro_batches))
                    );
                    // There are two chunks, each with half of a rank's layers.
                    assert!(of(PipelineScheduleKind::ZeroBubbleV, 2).is_none_or(|held| held <= 2 * ranks));
                }
            }
        }
    }

    proptest! {
        #[test]
        fn every_schedule_comes_to_its_end_whatever_stages_cost(
            kind in 0usize..4, ranks in 1usize..7, chunks in 1usize..4, micro_batches in 1usize..17,
            seconds in proptest::collection::vec(0.1f64..3.0, 54), message in 0.0f64..1.0,
        ) {
            let kind = PipelineScheduleKind::ALL[kind];
            let Ok(schedule) = PipelineSchedule::new(kind, ranks, chunks, micro_batches) else { return Ok(()) };
            let costs: Vec<StageCost> = seconds.chunks_exact(3).take(schedule.stages())
                .map(|c| StageCost { forward: c[0], backward_input: c[1], backward_weight: c[2] }).collect();
            let simulated = schedule.simulate(&costs, message);
            let all: f64 = costs.iter()
                .map(|c| c.cost_of(PipelinePass::Forward) + c.cost_of(PipelinePass::Backward)).sum();
            prop_assert!((simulated.busy.iter().sum::<f64>() - all * micro_batches as f64).abs() < 1e-6);
            prop_assert!(simulated.seconds + 1e-9 >= simulated.busy.iter().copied().fold(0.0, f64::max));
            prop_assert!((0.0..1.0).contains(&simulated.bubble()));
        }
    }
}
