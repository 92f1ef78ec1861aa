//! The messages of a step between two ranks, in the order of sending.

use super::schedule::{PipelineOp, PipelinePass, PipelineSchedule};

/// A message between two stages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct PipelineMessage {
    /// Whether the message is the gradient of an activation, for the previous stage, rather than an activation, for the
    /// next one.
    pub is_gradient: bool,
    /// The later of the two stages.
    pub boundary: usize,
    /// The index of the micro batch in the step.
    pub micro_batch: usize,
}

impl PipelineSchedule {
    /// Returns the messages from rank `from` to rank `to`, in the order of sending. With several chunks per rank, `to`
    /// may need them in a different order, because several pairs of stages then share the link between the two ranks.
    pub(crate) fn messages(self, from: usize, to: usize) -> Vec<PipelineMessage> {
        if from == to {
            return Vec::new();
        }
        let sent = |PipelineOp { stage, pass, micro_batch }| {
            let (is_gradient, receiver) = match pass {
                PipelinePass::Forward => (false, Some(stage + 1).filter(|stage| *stage < self.stages())?),
                PipelinePass::Backward | PipelinePass::BackwardInput => (true, stage.checked_sub(1)?),
                PipelinePass::BackwardWeight => return None,
            };
            let message = PipelineMessage { is_gradient, boundary: stage.max(receiver), micro_batch };
            (self.rank_of(receiver) == to).then_some(message)
        };
        self.operations(from).into_iter().filter_map(sent).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::schedule::PipelineScheduleKind;
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn each_activation_and_each_gradient_crosses_each_boundary_between_ranks_once() {
        let shapes = (1..7).flat_map(|ranks| (1..4).map(move |chunks| (ranks, chunks)));
        let cases = shapes.flat_map(|(ranks, chunks)| (1..17).map(move |count| (ranks, chunks, count)));
        for (kind, (ranks, chunks, count)) in
            cases.flat_map(|shape| PipelineScheduleKind::ALL.map(|kind| (kind, shape)))
        {
            let Ok(schedule) = PipelineSchedule::new(kind, ranks, chunks, count) else { continue };
            let pairs = (0..ranks).flat_map(|from| (0..ranks).map(move |to| (from, to)));
            let found: Vec<PipelineMessage> = pairs.flat_map(|(from, to)| schedule.messages(from, to)).collect();
            let crossings =
                (1..schedule.stages()).filter(|stage| schedule.rank_of(stage - 1) != schedule.rank_of(*stage));
            let expected = crossings.flat_map(|boundary| {
                [false, true].into_iter().flat_map(move |is_gradient| {
                    (0..count).map(move |micro_batch| PipelineMessage { is_gradient, boundary, micro_batch })
                })
            });
            assert_eq!(found.len(), found.iter().collect::<BTreeSet<_>>().len());
            assert_eq!(
                found.into_iter().collect::<BTreeSet<_>>(),
                expected.collect(),
                "{kind:?} {ranks} {chunks} {count}"
            );
        }
    }
}
