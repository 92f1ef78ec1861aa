//! The fragments of a model that islands exchange in turn, and the steps at which they do so.
//!
//! ```text
//!   H = 6, 2 fragments, delay 1        step     1  2  3  4  5  6  7  8  9 10 11 12
//!                                      send           0        1        0        1
//!                                      arrive            0        1        0
//! ```
//!
//! Each fragment is exchanged once every H steps (Streaming DiLoCo, arXiv 2501.18512). It is sent after a step, and
//! takes effect after the step that is `delay` steps later.

use crate::util::{counted, is_or_are};

/// The steps at which fragments are sent and take effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FragmentSchedule {
    steps: u64,
    fragments: u64,
    delay: u64,
}

impl FragmentSchedule {
    /// Creates the schedule of `fragments` fragments, each of which is exchanged once every `steps` steps.
    ///
    /// # Panics
    /// Panics if there are no fragments, if two fragments would be sent after the same step, or if a fragment would be
    /// sent before its previous exchange has taken effect.
    pub fn new(steps: u64, fragments: u64, delay: u64) -> Self {
        assert!(
            0 < fragments && fragments <= steps && delay < steps,
            "{} {} too few for {} and a delay of {delay}",
            counted(steps, "step"),
            is_or_are(steps),
            counted(fragments, "fragment")
        );
        Self { steps, fragments, delay }
    }

    /// Returns the number of fragments.
    pub fn fragments(self) -> usize {
        usize::try_from(self.fragments).unwrap_or(usize::MAX)
    }

    /// Returns the largest number of fragments that are in flight during a step: sent, but not yet in effect.
    pub fn max_in_flight(self) -> usize {
        let sent = (u128::from(self.delay) * u128::from(self.fragments)).div_ceil(u128::from(self.steps));
        usize::try_from(sent).unwrap_or(usize::MAX).min(self.fragments())
    }

    /// Returns the fragment that is sent after step `step` (counted from 1), if there is one.
    pub fn sent_after(self, step: u64) -> Option<usize> {
        let step_in_window = step.checked_sub(1)? % self.steps + 1;
        // A window is `steps` steps, in which each fragment is sent once. This is the first fragment that is sent after
        // this step of the window or a later one.
        let fragment = (u128::from(step_in_window) * u128::from(self.fragments)).div_ceil(u128::from(self.steps)) - 1;
        let turn = (fragment + 1) * u128::from(self.steps) / u128::from(self.fragments);
        (turn == u128::from(step_in_window)).then(|| usize::try_from(fragment).unwrap_or(usize::MAX))
    }

    /// Returns the fragment that takes effect after step `step` (counted from 1), if there is one.
    pub fn arrives_after(self, step: u64) -> Option<usize> {
        self.sent_after(step.checked_sub(self.delay)?)
    }
}

/// Divides parameters with these numbers of elements into fragments of about equal size, and returns the fragment of
/// each parameter. A fragment consists of consecutive parameters.
pub(crate) fn fragments_of(elements: &[usize], fragments: usize) -> Vec<usize> {
    let total: u128 = elements.iter().map(|elements| *elements as u128).sum();
    let mut preceding = 0u128;
    let mut fragment = |elements: &usize| {
        let middle = 2 * preceding + *elements as u128;
        preceding += *elements as u128;
        let fragment = (middle * fragments as u128).checked_div(2 * total).unwrap_or(0);
        usize::try_from(fragment).unwrap_or(usize::MAX).min(fragments - 1)
    };
    elements.iter().map(&mut fragment).collect()
}

/// Returns the padded length of `len` elements in an exchange between `islands` islands: each island sums one part of
/// them, and the length of a part is a multiple of `alignment`.
pub(crate) fn exchanged_len(len: usize, islands: usize, alignment: usize) -> usize {
    len.div_ceil(islands).next_multiple_of(alignment) * islands
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn two_fragments_take_turns_as_in_the_picture() {
        let schedule = FragmentSchedule::new(6, 2, 1);
        let sent: Vec<_> = (1..=12).filter_map(|step| schedule.sent_after(step).map(|f| (step, f))).collect();
        let arrived: Vec<_> = (1..=12).filter_map(|step| schedule.arrives_after(step).map(|f| (step, f))).collect();
        assert_eq!(sent, [(3, 0), (6, 1), (9, 0), (12, 1)]);
        assert_eq!(arrived, [(4, 0), (7, 1), (10, 0)]);
    }

    proptest! {
        #[test]
        fn every_fragment_is_sent_once_in_every_window_and_arrives_before_it_is_sent_again(
            steps in 1u64..40, fragments in 1u64..40, delay in 0u64..40,
        ) {
            prop_assume!(fragments <= steps && delay < steps);
            let schedule = FragmentSchedule::new(steps, fragments, delay);
            for window in 0..3 {
                let sent: Vec<usize> =
                    (1..=steps).filter_map(|step| schedule.sent_after(window * steps + step)).collect();
                prop_assert_eq!(sent, (0..schedule.fragments()).collect::<Vec<_>>());
            }
            let (mut in_flight, mut max) = (std::collections::BTreeSet::new(), 0);
            for step in 1..=4 * steps {
                if let Some(fragment) = schedule.sent_after(step) {
                    prop_assert!(in_flight.insert(fragment));
                }
                if let Some(fragment) = schedule.arrives_after(step) {
                    prop_assert!(in_flight.remove(&fragment));
                }
                max = max.max(in_flight.len());
            }
            prop_assert_eq!(max, schedule.max_in_flight());
        }

        #[test]
        fn fragments_are_consecutive_parameters_of_about_equal_size(
            elements in proptest::collection::vec(0usize..1000, 0..60), fragments in 1usize..8,
        ) {
            let assigned = fragments_of(&elements, fragments);
            prop_assert!(assigned.is_sorted() && assigned.iter().all(|fragment| *fragment < fragments));
            let (total, largest) = (elements.iter().sum::<usize>(), elements.iter().max().copied().unwrap_or(0));
            for fragment in 0..fragments {
                let size: usize = assigned.iter().zip(&elements).filter(|(f, _)| **f == fragment).map(|(_, n)| n).sum();
                prop_assert!(size <= total / fragments + 1 + largest);
            }
        }
    }
}
