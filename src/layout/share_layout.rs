//! The positions of a rank's shares of parameters: the sub-group, the first element, and the reserved space.
//!
//! The engine lays out its buffers and files accordingly, and `zerorun estimate` counts on the same basis.

use super::shard::SubGroupFill;

/// A layout of shares in sub-groups, in order of registration.
#[derive(Debug, Clone)]
pub struct ShareLayout {
    /// Whether a rank owns only its shard of a parameter.
    sharded: bool,
    /// The reserved space is a multiple of this number of elements.
    step: usize,
    /// The maximum number of elements of weights that stay in memory, if the others are in a file.
    weights_in_memory: Option<usize>,
    sub_group_size: usize,
    /// The open sub-group of each class.
    rules: Vec<SubGroupFill>,
    /// The number of elements of weights in memory so far; `None` after the first share that is in a file.
    elements_kept: Option<usize>,
}

/// The position of one parameter's share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SharePosition {
    /// The number of elements of the share, including the padding of the last ranks.
    pub share: usize,
    /// The number of elements that it occupies in its sub-group.
    pub reserved_len: usize,
    /// Whether it is the first share whose weights are in a file. It then begins a new sub-group, and the open
    /// sub-groups of all classes end.
    pub is_first_in_file: bool,
    /// Whether it is the last share of its sub-group.
    pub closes: bool,
    /// Whether its weights are in a file, if any weights are.
    pub is_in_file: bool,
}

impl ShareLayout {
    /// Creates a layout with sub-groups of about `sub_group_size` elements of shards. Shares are full parameters unless
    /// `sharded`.
    pub fn new(sharded: bool, sub_group_size: usize) -> Self {
        Self { sharded, step: 1, weights_in_memory: None, sub_group_size, rules: Vec::new(), elements_kept: Some(0) }
    }

    /// Returns the layout for state in files, in which each share begins at a multiple of `step` elements.
    /// `weights_in_memory` (`max_in_cpu`) is the maximum number of elements of weights that stay in memory, if weights
    /// are in a file.
    #[must_use]
    pub fn in_files(self, step: usize, weights_in_memory: Option<usize>) -> Self {
        Self { step, weights_in_memory, ..self }
    }

    /// Places a parameter's share, which has `shard` elements if shares are shards, and `full` elements otherwise. The
    /// share's reserved space is a number of complete blocks of `block` elements. Parameters of different classes
    /// (numbers from 0) are in different sub-groups, because they have different states.
    pub fn push(&mut self, shard: usize, full: usize, class: usize, block: usize) -> SharePosition {
        let share = if self.sharded { shard } else { full };
        let reserved_len = share.next_multiple_of(block).next_multiple_of(self.step);
        let is_first_in_file = self.is_first_in_file(reserved_len);
        if is_first_in_file {
            // The weights of a sub-group are either all in memory or all in files.
            self.rules.clear();
        }
        if self.rules.len() <= class {
            self.rules.resize(class + 1, SubGroupFill::new(self.sub_group_size));
        }
        // The rule counts shards at every stage, so that sub-groups are the same at every stage.
        let closes = self.rules[class].push(shard);
        SharePosition { share, reserved_len, is_first_in_file, closes, is_in_file: self.elements_kept.is_none() }
    }

    /// Returns whether this share is the first that is in a file. The first weights stay in memory.
    fn is_first_in_file(&mut self, reserved_len: usize) -> bool {
        let (Some(limit), Some(elements_kept)) = (self.weights_in_memory, self.elements_kept) else { return false };
        self.elements_kept = elements_kept.checked_add(reserved_len).filter(|total| *total <= limit);
        self.elements_kept.is_none()
    }
}

/// Returns the number of sub-groups, out of `groups`, that keep their optimizer states in memory; they are the first
/// ones. This is DeepSpeed's rule for `ratio`, the fraction of sub-groups that is offloaded.
pub fn groups_in_memory(groups: usize, ratio: f64) -> usize {
    ((1.0 - ratio) * groups as f64) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_beyond_the_limit_begin_a_sub_group_in_the_file() {
        let mut layout = ShareLayout::new(true, 100).in_files(8, Some(24));
        let positions: Vec<SharePosition> =
            [20, 21, 10, 300, 2].into_iter().map(|numel: usize| layout.push(numel.div_ceil(2), numel, 0, 1)).collect();
        let lens: Vec<_> = positions.iter().map(|l| (l.share, l.reserved_len)).collect();
        assert_eq!(lens, [(10, 16), (11, 16), (5, 8), (150, 152), (1, 8)]);
        // 16 elements stay in memory; 32 would be too many. Later shares are in the file too.
        assert_eq!(positions.iter().map(|l| l.is_in_file).collect::<Vec<_>>(), [false, true, true, true, true]);
        let first_in_file: Vec<_> = positions.iter().map(|l| l.is_first_in_file).collect();
        assert_eq!(first_in_file, [false, true, false, false, false]);
        assert_eq!(positions.iter().map(|l| l.closes).collect::<Vec<_>>(), [false, false, false, true, false]);
    }

    #[test]
    fn without_files_every_share_lies_next_to_the_one_before() {
        let mut layout = ShareLayout::new(false, 3);
        let positions = layout.push(3, 10, 0, 1);
        let expected =
            SharePosition { share: 10, reserved_len: 10, is_first_in_file: false, closes: true, is_in_file: false };
        assert_eq!(positions, expected);
    }

    #[test]
    fn classes_fill_sub_groups_of_their_own_until_the_weights_spill() {
        let mut layout = ShareLayout::new(true, 10).in_files(1, Some(16));
        let positions: Vec<SharePosition> =
            [(6, 0), (6, 1), (4, 0), (1, 1), (9, 1)].map(|(n, class)| layout.push(n, n, class, 1)).into();
        assert_eq!(positions.iter().map(|l| l.closes).collect::<Vec<_>>(), [false, false, true, false, true]);
        let first_in_file: Vec<_> = positions.iter().map(|l| l.is_first_in_file).collect();
        assert_eq!(first_in_file, [false, false, false, true, false]);
    }

    #[test]
    fn the_ratio_rounds_down_what_stays() {
        assert_eq!([0.0, 0.3, 0.5, 1.0].map(|ratio| groups_in_memory(5, ratio)), [5, 3, 2, 0]);
    }
}
