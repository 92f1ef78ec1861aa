//! The loads of the experts of a mixture: how evenly routers choose, and which experts they no longer choose.

use candle_zero::models::ExpertLoad;
use serde::Serialize;

/// The distribution of the routers' choices among their experts in a step. A share is the part of the choices of a
/// block's router that went to one expert: 1 / N for each of N experts that are chosen equally often.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[non_exhaustive]
pub struct ExpertShares {
    /// The largest share of an expert, in any block.
    pub largest_expert_share: f64,
    /// The smallest share of an expert, in any block.
    pub smallest_expert_share: f64,
    /// The number of experts, over all blocks, that no token chose.
    pub unused_experts: u64,
}

impl ExpertShares {
    /// Returns the shares of a step, or `None` if there were no choices.
    pub(super) fn of(loads: &[ExpertLoad]) -> Option<Self> {
        let shares = loads.iter().flat_map(|load| {
            let all = load.choices.iter().sum::<u64>();
            let share = move |choices: &u64| *choices as f64 / all as f64;
            load.choices.iter().filter(move |_| all > 0).map(share)
        });
        let mut found: Option<Self> = None;
        for share in shares {
            let before =
                found.unwrap_or(Self { largest_expert_share: share, smallest_expert_share: share, unused_experts: 0 });
            found = Some(Self {
                largest_expert_share: before.largest_expert_share.max(share),
                smallest_expert_share: before.smallest_expert_share.min(share),
                unused_experts: before.unused_experts + u64::from(share == 0.0),
            });
        }
        found
    }
}

/// A detector of dead experts: no token chooses them, although many would if all experts were chosen equally often.
#[derive(Debug, Default)]
pub(super) struct DeadExpertDetector {
    blocks: Vec<TokensSinceRouted>,
}

/// The tokens that the experts of a block have missed.
#[derive(Debug)]
struct TokensSinceRouted {
    block: usize,
    /// For each expert, the number of tokens that would have chosen it since a token last chose it, if all experts had
    /// been chosen equally often. `None` after the expert has been reported.
    missed: Vec<Option<f64>>,
}

/// The number of tokens that an expert has missed when it is reported as dead.
const DEAD_AFTER: f64 = 100.0;

/// The largest number of experts that a message names. The record of the run shows how often each was chosen.
const MAX_NAMED: usize = 20;

impl DeadExpertDetector {
    /// Takes the loads of a step, and returns a message that names the experts found dead for the first time, if any.
    pub fn observe(&mut self, loads: &[ExpertLoad]) -> Option<String> {
        if self.blocks.is_empty() {
            let new_block = |load: &ExpertLoad| TokensSinceRouted {
                block: load.block,
                missed: vec![Some(0.0); load.choices.len()],
            };
            self.blocks = loads.iter().map(new_block).collect();
        }
        let blocks = self.blocks.iter_mut().zip(loads);
        let dead: Vec<(usize, Vec<usize>)> = blocks.map(|(block, load)| (block.block, block.observe(load))).collect();
        let count = dead.iter().map(|(_, experts)| experts.len()).sum::<usize>();
        if count == 0 {
            return None;
        }
        let total = loads.iter().map(|load| load.choices.len()).sum::<usize>();
        let mut named = 0;
        let mut names = Vec::new();
        for (block, experts) in dead.iter().filter(|(_, experts)| !experts.is_empty()) {
            let shown = experts.len().min(MAX_NAMED - named);
            if shown == 0 {
                break;
            }
            named += shown;
            let word = if shown == 1 { "expert" } else { "experts" };
            let list: Vec<String> = experts[..shown].iter().map(usize::to_string).collect();
            names.push(format!("layer {block}: {word} {}", list.join(", ")));
        }
        let others = if count > named { format!("; and {} more", count - named) } else { String::new() };
        Some(format!(
            "warning: no token chose {count} of {total} experts in recent steps ({}{others}); a load-balancing loss \
             (--router_aux_loss_coef 0.01) makes the choices more even",
            names.join("; ")
        ))
    }
}

impl TokensSinceRouted {
    /// Takes the loads of a step, and returns the experts found dead for the first time.
    fn observe(&mut self, load: &ExpertLoad) -> Vec<usize> {
        let even = load.choices.iter().sum::<u64>() as f64 / load.choices.len().max(1) as f64;
        let mut dead = Vec::new();
        for (expert, (missed, choices)) in self.missed.iter_mut().zip(&load.choices).enumerate() {
            *missed = missed.map(|missed| if *choices == 0 { missed + even } else { 0.0 });
            if missed.is_some_and(|missed| missed >= DEAD_AFTER) {
                *missed = None;
                dead.push(expert);
            }
        }
        dead
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn load(block: usize, choices: &[u64]) -> ExpertLoad {
        ExpertLoad { block, choices: choices.to_vec() }
    }

    #[test]
    fn shares_are_parts_of_the_choices_of_a_block() {
        let shares = ExpertShares::of(&[load(0, &[4, 4, 0]), load(2, &[1, 2, 1])]).unwrap();
        assert_eq!((shares.largest_expert_share, shares.smallest_expert_share, shares.unused_experts), (0.5, 0.0, 1));
        assert_eq!(ExpertShares::of(&[]), None);
        assert_eq!(ExpertShares::of(&[load(1, &[0, 0])]), None);
    }

    #[test]
    fn an_expert_is_reported_once_after_it_has_missed_many_tokens() {
        let mut detector = DeadExpertDetector::default();
        // A balanced router would choose each expert 30 times in each step.
        for step in 0..10 {
            let message = detector.observe(&[load(1, &[50, 40, 0]), load(3, &[30, 30 + step % 3, 30])]);
            assert_eq!(message.is_some(), step == 3, "step {step}");
            if let Some(message) = message {
                insta::assert_snapshot!(message, @"warning: no token chose 1 of 6 experts in recent steps (layer 1: expert 2); a load-balancing loss (--router_aux_loss_coef 0.01) makes the choices more even");
            }
        }
        // An expert that is chosen from time to time is not dead.
        let mut detector = DeadExpertDetector::default();
        for step in 0..50 {
            assert!(detector.observe(&[load(0, &[60, u64::from(step % 3 == 0)])]).is_none());
        }
    }

    #[test]
    fn a_message_names_the_first_twenty_dead_experts() {
        let collapsed: Vec<u64> = (0..12).map(|expert| if expert == 4 { 1_200 } else { 0 }).collect();
        let blocks = [load(0, &collapsed), load(1, &[300, 300, 300, 0]), load(2, &collapsed)];
        let message = DeadExpertDetector::default().observe(&blocks).unwrap();
        insta::assert_snapshot!(message, @"warning: no token chose 23 of 28 experts in recent steps (layer 0: experts 0, 1, 2, 3, 5, 6, 7, 8, 9, 10, 11; layer 1: expert 3; layer 2: experts 0, 1, 2, 3, 5, 6, 7, 8; and 3 more); a load-balancing loss (--router_aux_loss_coef 0.01) makes the choices more even");
    }
}
