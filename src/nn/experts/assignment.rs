//! The rows of each expert, as ranges of slots.

use crate::kernels::expert_combine::RowSlots;
use crate::util::{counted, is_or_are};
use candle_core::{Result, bail};
use std::ops::Range;

/// The assignment of rows to experts, after a router has chosen `k` experts for each row.
///
/// A slot holds a copy of a row for one of the experts chosen for that row. Slots are sorted by expert and, within an
/// expert, by row:
///
/// ```text
///   choices, k = 2     row 0: 2, 0    row 1: 0, 1    row 2: 2, 1
///   slots of expert        0        1        2
///                      row 0, 1  row 1, 2  row 0, 2
///   slot                   0  1      2  3      4  5
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpertAssignment {
    /// The first slot of each expert, and the number of all slots.
    starts: Vec<usize>,
    /// The row of each slot.
    slot_rows: Vec<u32>,
    /// The position of each slot's choice among all choices.
    slot_choices: Vec<u32>,
    /// The slots of each row, row by row, in ascending order of the experts' numbers.
    slots: Vec<u32>,
    /// The start of each row in `slots`, and the end of the last one.
    row_starts: Vec<u32>,
}

impl ExpertAssignment {
    /// Sorts `choices`, `k` different experts for each row, by expert. There are `experts` experts.
    ///
    /// # Errors
    /// A `k` of 0, a number of choices that is not a multiple of `k` or is above 2^32 - 1, an expert that does not
    /// exist, or one that a row chooses twice.
    pub fn new(choices: &[u32], k: usize, experts: usize) -> Result<Self> {
        Self::of_range(choices, k, experts, 0..experts)
    }

    /// Does the same as [`ExpertAssignment::new`], but keeps only the experts in `range`, such as those of one rank.
    /// In the result, they are numbered from 0.
    ///
    /// # Errors
    /// The errors of [`ExpertAssignment::new`], except that an expert outside the range may be chosen twice; a range
    /// that ends after the last expert or before the range's own start.
    pub fn of_range(choices: &[u32], k: usize, experts: usize, range: Range<usize>) -> Result<Self> {
        if range.start > range.end || range.end > experts {
            bail!("experts: the range {range:?} is not within the {}", counted(experts, "expert"))
        }
        if k == 0 || !choices.len().is_multiple_of(k) || u32::try_from(choices.len()).is_err() {
            bail!(
                "experts: there {} {} for {} per row; the number of choices must be a multiple of \
                 the number of experts per row, and at most {}",
                is_or_are(choices.len()),
                counted(choices.len(), "choice"),
                counted(k, "expert"),
                u32::MAX
            )
        }
        let mut starts = vec![0; range.len() + 1];
        for (i, expert) in choices.iter().enumerate() {
            let expert = *expert as usize;
            if expert >= experts {
                bail!(
                    "experts: row {} chooses expert {expert}; there {} only {experts}, numbered from 0",
                    i / k,
                    is_or_are(experts)
                )
            }
            if range.contains(&expert) {
                starts[expert - range.start + 1] += 1;
            }
        }
        for expert in 0..range.len() {
            starts[expert + 1] += starts[expert];
        }
        let rows = choices.len() / k;
        let mut next = starts.clone();
        let n_slots = starts[range.len()];
        let (mut slot_rows, mut slot_choices) = (vec![0; n_slots], vec![0; n_slots]);
        let mut row_starts = vec![0; rows + 1];
        for (i, expert) in choices.iter().enumerate().filter(|(_, expert)| range.contains(&(**expert as usize))) {
            let (row, local) = (i / k, *expert as usize - range.start);
            let slot = next[local];
            if slot > starts[local] && slot_rows[slot - 1] == row as u32 {
                bail!("experts: row {row} chooses expert {expert} twice; the experts of a row must differ")
            }
            (slot_rows[slot], slot_choices[slot]) = (row as u32, i as u32);
            next[local] += 1;
            row_starts[row + 1] += 1;
        }
        for row in 0..rows {
            row_starts[row + 1] += row_starts[row];
        }
        let mut next = row_starts.clone();
        let mut slots = vec![0; n_slots];
        for (slot, row) in slot_rows.iter().enumerate() {
            slots[next[*row as usize] as usize] = slot as u32;
            next[*row as usize] += 1;
        }
        Ok(Self { starts, slot_rows, slot_choices, slots, row_starts })
    }

    /// Returns the number of experts.
    pub fn experts(&self) -> usize {
        self.starts.len() - 1
    }

    /// Returns the number of rows.
    pub fn rows(&self) -> usize {
        self.row_starts.len() - 1
    }

    /// Returns the number of slots.
    pub fn slots(&self) -> usize {
        self.slot_rows.len()
    }

    /// Returns the slots of an expert.
    ///
    /// # Panics
    /// Panics if there is no such expert.
    pub fn slots_of(&self, expert: usize) -> Range<usize> {
        self.starts[expert]..self.starts[expert + 1]
    }

    /// Returns the slots of consecutive experts.
    pub(super) fn slots_of_range(&self, experts: &Range<usize>) -> Range<usize> {
        if experts.is_empty() { 0..0 } else { self.starts[experts.start]..self.starts[experts.end] }
    }

    /// Returns the part that concerns consecutive experts. All experts keep their numbers, but the others have no
    /// slots, and slots are numbered from 0. Rows and choices are still those of the full batch.
    pub(super) fn narrow(&self, experts: Range<usize>) -> Self {
        let slots = self.slots_of_range(&experts);
        let starts = self.starts.iter().map(|start| start.clamp(&slots.start, &slots.end) - slots.start).collect();
        let (slot_rows, slot_choices) =
            (self.slot_rows[slots.clone()].to_vec(), self.slot_choices[slots.clone()].to_vec());
        let mut row_starts = vec![0; self.row_starts.len()];
        slot_rows.iter().for_each(|row| row_starts[*row as usize + 1] += 1);
        for row in 1..row_starts.len() {
            row_starts[row] += row_starts[row - 1];
        }
        let local_slots = self.slots.iter().map(|slot| *slot as usize).filter(|slot| slots.contains(slot));
        let local_slots = local_slots.map(|slot| (slot - slots.start) as u32).collect();
        Self { starts, slot_rows, slot_choices, slots: local_slots, row_starts }
    }

    /// Returns the row of each slot.
    pub fn row_of_slots(&self) -> &[u32] {
        &self.slot_rows
    }

    /// Returns, for each slot, the position of its choice among the choices of all rows.
    pub fn choice_of_slots(&self) -> &[u32] {
        &self.slot_choices
    }

    /// Returns the number of rows that were routed to each expert.
    pub fn counts(&self) -> Vec<usize> {
        self.starts.windows(2).map(|pair| pair[1] - pair[0]).collect()
    }

    /// Returns the experts to which at least one row was routed, in ascending order.
    pub fn active_experts(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.experts()).filter(|expert| !self.slots_of(*expert).is_empty())
    }

    /// Returns the slots of each row, in ascending order of the experts' numbers.
    pub(crate) fn by_row(&self) -> RowSlots<'_> {
        RowSlots { slots: &self.slots, starts: &self.row_starts }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::error::without_backtrace;
    use proptest::prelude::*;

    #[test]
    fn the_example_of_the_documentation() {
        let assignment = ExpertAssignment::new(&[2, 0, 0, 1, 2, 1], 2, 3).unwrap();
        assert_eq!(assignment.row_of_slots(), [0, 1, 1, 2, 0, 2]);
        assert_eq!(assignment.choice_of_slots(), [1, 2, 3, 5, 0, 4]);
        assert_eq!(assignment.by_row().slots, [0, 4, 1, 2, 3, 5]);
        assert_eq!(assignment.counts(), [2, 2, 2]);
    }

    /// Returns a number of experts, a k, and different experts for each row.
    fn choices() -> impl Strategy<Value = (usize, usize, Vec<u32>)> {
        (1usize..9, 0usize..40).prop_flat_map(|(experts, rows)| {
            (1..=experts, Just(experts), Just(rows)).prop_flat_map(|(k, experts, rows)| {
                let all: Vec<u32> = (0..experts as u32).collect();
                // If there are few rows, some experts are chosen by none of them.
                let row = Just(all).prop_shuffle().prop_map(move |order| order[..k].to_vec());
                proptest::collection::vec(row, rows).prop_map(move |rows| (experts, k, rows.concat()))
            })
        })
    }

    proptest! {
        #[test]
        fn every_choice_has_one_slot_sorted_by_expert_and_then_by_row((experts, k, choices) in choices()) {
            let assignment = ExpertAssignment::new(&choices, k, experts).unwrap();
            prop_assert_eq!((assignment.experts(), assignment.rows(), assignment.slots()), (experts, choices.len() / k, choices.len()));
            let mut want: Vec<(u32, u32, u32)> =
                choices.iter().enumerate().map(|(i, expert)| (*expert, (i / k) as u32, i as u32)).collect();
            want.sort_unstable();
            let mut found = Vec::new();
            for expert in 0..experts {
                for slot in assignment.slots_of(expert) {
                    found.push((expert as u32, assignment.row_of_slots()[slot], assignment.choice_of_slots()[slot]));
                }
            }
            prop_assert_eq!(&found, &want);
            let active_experts: Vec<usize> = assignment.active_experts().collect();
            let counted: Vec<usize> = (0..experts).filter(|expert| assignment.counts()[*expert] > 0).collect();
            prop_assert_eq!(active_experts, counted);
        }

        #[test]
        fn a_row_has_its_slots_by_rising_expert((experts, k, choices) in choices()) {
            let assignment = ExpertAssignment::new(&choices, k, experts).unwrap();
            let by_row = assignment.by_row();
            for row in 0..assignment.rows() {
                let slots = &by_row.slots[by_row.starts[row] as usize..by_row.starts[row + 1] as usize];
                let found: Vec<u32> = slots.iter().map(|slot| choices[assignment.choice_of_slots()[*slot as usize] as usize]).collect();
                let mut want = choices[row * k..(row + 1) * k].to_vec();
                want.sort_unstable();
                prop_assert_eq!(found, want);
            }
        }

        #[test]
        fn ranges_of_experts_divide_the_slots((experts, k, choices) in choices(), split in 0usize..9) {
            let split = split.min(experts);
            let full = ExpertAssignment::new(&choices, k, experts).unwrap();
            let parts = [0..split, split..experts]
                .map(|range| ExpertAssignment::of_range(&choices, k, experts, range).unwrap());
            prop_assert_eq!(parts.iter().flat_map(ExpertAssignment::counts).collect::<Vec<_>>(), full.counts());
            let slots: Vec<u32> = parts.iter().flat_map(|part| part.choice_of_slots().to_vec()).collect();
            prop_assert_eq!(&slots[..], full.choice_of_slots());
            prop_assert!(parts.iter().all(|part| part.rows() == full.rows()));
        }
    }

    #[test]
    fn choices_that_cannot_be_are_refused() {
        let refusal = |choices: &[u32], k, experts, range| {
            let error = ExpertAssignment::of_range(choices, k, experts, range).unwrap_err().to_string();
            without_backtrace(&error).to_string()
        };
        insta::assert_snapshot!(refusal(&[0, 1, 1, 4], 2, 4, 0..4), @"experts: row 1 chooses expert 4; there are only 4, numbered from 0");
        insta::assert_snapshot!(refusal(&[0, 1, 3, 3], 2, 4, 0..4), @"experts: row 1 chooses expert 3 twice; the experts of a row must differ");
        insta::assert_snapshot!(refusal(&[0, 1, 2], 2, 4, 0..4), @"experts: there are 3 choices for 2 experts per row; the number of choices must be a multiple of the number of experts per row, and at most 4294967295");
        insta::assert_snapshot!(refusal(&[0, 1], 2, 4, 2..5), @"experts: the range 2..5 is not within the 4 experts");
    }

    #[test]
    fn a_part_is_the_assignment_of_its_experts_with_the_numbers_of_the_whole() {
        let choices = [2, 0, 0, 1, 2, 1, 4, 2];
        let full = ExpertAssignment::new(&choices, 2, 5).unwrap();
        for range in [0..5, 0..0, 1..3, 2..5, 3..4, 5..5] {
            let (part, renumbered) =
                (full.narrow(range.clone()), ExpertAssignment::of_range(&choices, 2, 5, range.clone()).unwrap());
            assert_eq!((part.experts(), part.rows()), (5, 4));
            assert_eq!(part.row_of_slots(), renumbered.row_of_slots());
            assert_eq!(part.choice_of_slots(), renumbered.choice_of_slots());
            assert_eq!(part.by_row().slots, renumbered.by_row().slots);
            assert_eq!(part.by_row().starts, renumbered.by_row().starts);
            for expert in range.clone() {
                assert_eq!(part.slots_of(expert), renumbered.slots_of(expert - range.start));
            }
            assert_eq!(part.slots(), full.slots_of_range(&range).len());
            assert!(part.active_experts().all(|expert| range.contains(&expert)));
        }
    }
}
