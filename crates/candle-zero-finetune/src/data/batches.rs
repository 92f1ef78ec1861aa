//! Packs samples into rows of the context length, and groups rows into batches.
//!
//! Rows are filled once, first-fit: in an order derived from the seed or, without shuffling, in the order of the data.
//! With shuffling, each epoch goes through the same rows in a different order. The rows of a step depend only on the
//! step's number, so a resumed run needs no other state. Every rank has the same number of batches.

use super::dataset::Dataset;
use candle_zero::data::BatchPartition;
use candle_zero::util::{mix, permute};
use std::hash::Hasher as _;
use std::sync::Arc;

/// The target of a position that predicts nothing. The loss ignores it.
pub const NO_TARGET: i64 = -100;

/// The packing of samples into rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum SequencePacking {
    /// As many samples as fit in a row of `ctx` tokens, each a separate sequence. This is possible only if samples
    /// do not belong together ([`Dataset::group`]) and have no labels to predict.
    Packed {
        /// The number of tokens in a row. A longer sample gets a separate row.
        ctx: usize,
    },
    /// One sample per row, padded to the longest row of the batch.
    Padded,
}

/// The rows of one rank's micro batch.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RowBatch {
    /// The number of rows.
    pub rows: usize,
    /// The number of tokens in a row.
    pub time: usize,
    /// The tokens, `[rows, time]`.
    pub ids: Vec<u32>,
    /// The token that each position predicts (the next one in its sequence) or [`NO_TARGET`], `[rows, time]`.
    pub targets: Vec<i64>,
    /// The start positions of the sequences in each row. Padding after the last sequence counts as a sequence.
    pub starts: Vec<Vec<usize>>,
    /// The label indices of all sequences except padding. Rows without a label come last.
    pub labels: Vec<u32>,
    /// The number of tokens without padding.
    pub tokens: usize,
    /// The number of tokens in each row, without padding.
    pub lengths: Vec<usize>,
}

impl RowBatch {
    /// Returns which positions are not padding, row after row.
    pub(crate) fn mask(&self) -> Vec<bool> {
        self.lengths.iter().flat_map(|length| (0..self.time).map(move |position| position < *length)).collect()
    }
}

/// The order of rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RowOrder {
    /// Shuffled with this seed, differently in each epoch.
    Shuffled(u64),
    /// The order of the data, epoch after epoch.
    Sequential,
    /// The order of the data, once.
    Once,
}

/// The batches of one rank.
#[derive(Debug, Clone)]
pub struct Batches {
    dataset: Arc<Dataset>,
    /// Groups of samples, row by row.
    members: Vec<u32>,
    /// The start of each row in `members`, and the end of the last row.
    rows: Vec<usize>,
    shape: BatchPartition,
    order: RowOrder,
    pad: u32,
}

impl Batches {
    /// Returns batches to train on. They never end: each epoch has an order derived from `seed`. Rows are padded
    /// with `pad`.
    ///
    /// # Panics
    ///
    /// Panics if the data set has no samples or more than `u32::MAX` groups of them, or if `shape` is invalid: no rows
    /// in a micro batch, no micro batches in a step, or a rank that does not exist.
    pub fn training(
        dataset: Arc<Dataset>,
        packing: SequencePacking,
        shape: BatchPartition,
        seed: u64,
        pad: u32,
    ) -> Self {
        Self::new(dataset, packing, shape, RowOrder::Shuffled(seed), pad)
    }

    /// Returns batches to train on in the order of the data, which is the same in each epoch.
    ///
    /// # Panics
    ///
    /// See [`training`](Self::training).
    pub fn in_order(dataset: Arc<Dataset>, packing: SequencePacking, shape: BatchPartition, pad: u32) -> Self {
        Self::new(dataset, packing, shape, RowOrder::Sequential, pad)
    }

    /// Returns batches to validate on: each row once, always in the same order. The last batches are padded with
    /// rows without targets.
    ///
    /// # Panics
    ///
    /// See [`training`](Self::training).
    pub fn validation(dataset: Arc<Dataset>, packing: SequencePacking, shape: BatchPartition, pad: u32) -> Self {
        Self::new(dataset, packing, shape, RowOrder::Once, pad)
    }

    fn new(
        dataset: Arc<Dataset>,
        packing: SequencePacking,
        shape: BatchPartition,
        row_order: RowOrder,
        pad: u32,
    ) -> Self {
        let groups = dataset.len() / dataset.group();
        assert!(groups > 0 && groups <= u32::MAX as usize, "{groups} groups of samples");
        assert!(shape.micro > 0 && shape.accumulation > 0 && shape.rank < shape.world, "{shape:?}");
        let (members, rows) = match packed_rows(&dataset, packing, row_order) {
            Some((order, row_of)) => by_row(&order, &row_of),
            None => ((0..groups as u32).collect(), (0..=groups).collect()),
        };
        Self { dataset, members, rows, shape, order: row_order, pad }
    }

    /// Returns the batches of rank `rank` instead of this rank's.
    #[must_use]
    pub(crate) fn of_rank(self, rank: usize) -> Self {
        assert!(rank < self.shape.world, "rank {rank} of {}", self.shape.world);
        Self { shape: BatchPartition { rank, ..self.shape }, ..self }
    }

    /// Returns the number of rows that batches of the data set would have.
    pub(crate) fn count_rows(dataset: &Dataset, packing: SequencePacking, order: RowOrder) -> usize {
        match packed_rows(dataset, packing, order) {
            Some((_, row_of)) => row_of.iter().max().map_or(0, |last| *last as usize + 1),
            None => dataset.len() / dataset.group(),
        }
    }

    /// Returns the number of rows in an epoch, or of groups if samples belong together.
    pub fn rows_per_epoch(&self) -> usize {
        self.rows.len() - 1
    }

    /// Returns the number of tokens in the longest row.
    pub(crate) fn longest_row(&self) -> usize {
        let row = |row: &[usize]| self.members[row[0]..row[1]].iter().flat_map(|group| self.samples(*group));
        self.rows.windows(2).map(|ends| row(ends).map(|sample| sample.len()).sum()).max().unwrap_or(0)
    }

    /// Returns the number of steps needed to go through all rows. The last step may contain rows of the next epoch or
    /// empty rows.
    pub fn steps_per_epoch(&self) -> u64 {
        self.rows_per_epoch().div_ceil(self.rows_per_step()) as u64
    }

    /// Returns the number of steps in this number of epochs, at least 1.
    pub fn steps(&self, epochs: f64) -> u64 {
        ((self.rows_per_epoch() as f64 * epochs / self.rows_per_step() as f64).ceil() as u64).max(1)
    }

    fn rows_per_step(&self) -> usize {
        self.shape.micro * self.shape.world * self.shape.accumulation
    }

    /// Returns the groups of row `row` of the complete run. A row beyond the end of the validation data has none.
    fn row(&self, row: u64) -> &[u32] {
        let count = self.rows_per_epoch() as u64;
        let row = match self.order {
            RowOrder::Shuffled(seed) => permute(row % count, count, mix(seed ^ mix(row / count))),
            RowOrder::Sequential => row % count,
            RowOrder::Once if row < count => row,
            RowOrder::Once => return &[],
        } as usize;
        &self.members[self.rows[row]..self.rows[row + 1]]
    }

    /// Returns the samples of a group.
    fn samples(&self, group: u32) -> impl Iterator<Item = crate::SampleRef<'_>> {
        let count = self.dataset.group();
        (0..count).map(move |i| self.dataset.sample(group as usize * count + i))
    }

    /// Returns this rank's micro batch `accumulation_index` of optimizer step `step`, both counted from 0.
    pub fn batch(&self, step: u64, accumulation_index: usize) -> RowBatch {
        let rows = (0..self.shape.micro).map(|j| self.row(self.shape.global_sample(step, accumulation_index, j)));
        // Samples that belong together are placed in separate rows.
        let are_separate = self.dataset.group() > 1;
        let mut filled: Vec<Vec<crate::SampleRef<'_>>> = vec![];
        for row in rows {
            let samples = row.iter().flat_map(|group| self.samples(*group));
            match are_separate {
                true if !row.is_empty() => filled.extend(samples.map(|sample| vec![sample])),
                true => filled.extend((0..self.dataset.group()).map(|_| vec![])),
                false => filled.push(samples.collect()),
            }
        }
        let length = |row: &Vec<crate::SampleRef<'_>>| row.iter().map(|sample| sample.len()).sum::<usize>();
        let time = filled.iter().map(length).max().unwrap_or(0).max(1);
        let mut batch = RowBatch { rows: filled.len(), time, ..RowBatch::default() };
        for row in filled {
            let (mut starts, mut at) = (vec![], 0);
            for sample in row {
                starts.push(at);
                at += sample.len();
                batch.ids.extend(sample.ids());
                let next = sample.ids().enumerate().skip(1);
                let target = |(i, id)| if sample.is_target(i) { i64::from(id) } else { NO_TARGET };
                batch.targets.extend(next.map(target).chain([NO_TARGET]));
                batch.labels.push(sample.label);
            }
            batch.tokens += at;
            batch.lengths.push(at);
            if at < time {
                starts.push(at);
            }
            batch.ids.extend((at..time).map(|_| self.pad));
            batch.targets.extend((at..time).map(|_| NO_TARGET));
            batch.starts.push(starts);
        }
        batch
    }

    /// Returns a number that changes with the samples of the rows and with their order.
    pub fn fingerprint(&self) -> u64 {
        let mut hasher = twox_hash::XxHash3_64::new();
        hasher.write(&self.dataset.fingerprint().to_le_bytes());
        self.members.iter().for_each(|group| hasher.write(&group.to_le_bytes()));
        self.rows.iter().for_each(|row| hasher.write(&(*row as u64).to_le_bytes()));
        hasher.write(format!("{:?} {}", self.order, self.rows_per_step()).as_bytes());
        hasher.finish()
    }

    /// Returns the number of targets in a step over all ranks and micro batches, or the number of labels if labels are
    /// predicted. The sum of the losses is divided by this number. Every rank computes it independently.
    pub fn targets_of_step(&self, step: u64) -> u64 {
        let first = step * self.rows_per_step() as u64;
        let rows = (first..first + self.rows_per_step() as u64).flat_map(|row| self.row(row));
        let are_labelled = !self.dataset.labels().is_empty();
        let of_sample = |sample: crate::SampleRef<'_>| if are_labelled { 1 } else { sample.target_count() as u64 };
        rows.flat_map(|group| self.samples(*group)).map(of_sample).sum()
    }
}

/// Returns the order in which samples are packed, and the row of each sample, if rows contain several samples.
fn packed_rows(dataset: &Dataset, packing: SequencePacking, order: RowOrder) -> Option<(Vec<u32>, Vec<u32>)> {
    let SequencePacking::Packed { ctx } = packing else { return None };
    if dataset.group() > 1 {
        return None;
    }
    let groups = dataset.len();
    let sample_at = |i: usize| match order {
        RowOrder::Shuffled(seed) => permute(i as u64, groups as u64, mix(seed)) as u32,
        RowOrder::Sequential | RowOrder::Once => i as u32,
    };
    let order: Vec<u32> = (0..groups).map(sample_at).collect();
    let row_of = first_fit(order.iter().map(|i| dataset.length(*i as usize)), ctx);
    Some((order, row_of))
}

/// Returns the row of each sample: the first row that has room for it. A sample that is longer than a row takes up a
/// complete row.
fn first_fit(lengths: impl Iterator<Item = usize>, ctx: usize) -> Vec<u32> {
    let mut room = FreeSpaceTree { leaves: 1, max_free: vec![0; 2], rows: 0 };
    // Even the shortest sample takes up room, so a row without any room left accepts no sample.
    lengths.map(|length| room.take(length.clamp(1, ctx.max(1)), ctx.max(1))).collect()
}

/// The free space of rows, as a tree of maxima whose leaves are the rows.
struct FreeSpaceTree {
    /// The number of leaves, a power of two.
    leaves: usize,
    /// The maximum free space below each node. Node i has the children 2i and 2i + 1. The root is node 1.
    max_free: Vec<usize>,
    rows: usize,
}

impl FreeSpaceTree {
    /// Takes up room in the first row that has enough, or in a new one, and returns the row.
    fn take(&mut self, length: usize, ctx: usize) -> u32 {
        if self.rows == 0 || self.max_free[1] < length {
            if self.rows == self.leaves {
                self.grow();
            }
            self.rows += 1;
            return self.set(self.rows - 1, ctx - length);
        }
        let mut node = 1;
        while node < self.leaves {
            node = 2 * node + usize::from(self.max_free[2 * node] < length);
        }
        self.set(node - self.leaves, self.max_free[node] - length)
    }

    fn set(&mut self, row: usize, room: usize) -> u32 {
        let mut node = row + self.leaves;
        self.max_free[node] = room;
        while node > 1 {
            node /= 2;
            self.max_free[node] = self.max_free[2 * node].max(self.max_free[2 * node + 1]);
        }
        row as u32
    }

    fn grow(&mut self) {
        let rows = self.max_free[self.leaves..].to_vec();
        self.leaves *= 2;
        self.max_free = vec![0; 2 * self.leaves];
        self.max_free[self.leaves..self.leaves + rows.len()].copy_from_slice(&rows);
        for node in (1..self.leaves).rev() {
            self.max_free[node] = self.max_free[2 * node].max(self.max_free[2 * node + 1]);
        }
    }
}

/// Returns the samples row by row, in their order within each row, and the start of each row.
fn by_row(order: &[u32], row_of: &[u32]) -> (Vec<u32>, Vec<usize>) {
    let count = row_of.iter().max().map_or(0, |last| *last as usize + 1);
    let mut rows = vec![0; count + 1];
    row_of.iter().for_each(|row| rows[*row as usize + 1] += 1);
    (0..count).for_each(|row| rows[row + 1] += rows[row]);
    let (mut at, mut members) = (rows.clone(), vec![0; order.len()]);
    for (sample, row) in order.iter().zip(row_of) {
        let position = &mut at[*row as usize];
        members[*position] = *sample;
        *position += 1;
    }
    (members, rows)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_sample_goes_into_the_first_row_that_has_room(lengths in prop::collection::vec(1_usize..=80, 0..300)) {
            let found = first_fit(lengths.iter().copied(), 64);
            let mut rooms: Vec<usize> = vec![];
            for (length, row) in lengths.iter().zip(found) {
                let length = &(*length).min(64);
                let first = rooms.iter().position(|room| room >= length).unwrap_or(rooms.len());
                prop_assert_eq!(row as usize, first);
                if first == rooms.len() {
                    rooms.push(64);
                }
                rooms[first] -= length;
            }
        }
    }
}
