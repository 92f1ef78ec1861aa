//! Scattering of elements into a result, by overwriting or adding, in f32.
//!
//! Elements with the same target are written in the source's order, by whichever thread owns that part of the result.

use super::parallel::{ParallelChunks, for_each_part};

/// The target of an element that is not written.
pub const NO_TARGET: usize = usize::MAX;

/// The targets of the elements of a source.
#[derive(Debug, Clone)]
pub struct ScatterIndices {
    /// For each element of the source, in order, its flat index in the result, or [`NO_TARGET`] if it is not written.
    pub flat_indices: Vec<usize>,
}

/// The minimum number of elements of the result per task, unless the result has fewer.
const ELEMENTS_PER_TASK: usize = 1 << 14;

impl ScatterIndices {
    /// Calls `write` for each element of the source that has a target, with the index of this element and a reference
    /// to its target. Elements with the same target come in the source's order.
    fn for_each_target(&self, y: &mut [f32], write: impl Fn(usize, &mut f32) + Sync) {
        // Each task reads all targets, and uses those in its part of the result.
        let tasks = (y.len() / ELEMENTS_PER_TASK).clamp(1, rayon::current_num_threads());
        let chunk = y.len().div_ceil(tasks).max(1);
        for_each_part(tasks, ParallelChunks::new(y, chunk), |task, y| {
            let start = task * chunk;
            for (index, place) in self.flat_indices.iter().enumerate() {
                if let Some(offset) = place.checked_sub(start)
                    && let Some(value) = y.get_mut(offset)
                {
                    write(index, value);
                }
            }
        });
    }

    /// Overwrites elements of `y`. If several elements of the source have the same target, the last one wins.
    pub fn set(&self, source: &[f32], y: &mut [f32]) {
        self.for_each_target(y, |index, value| *value = source[index]);
    }

    /// Adds to elements of `y`.
    pub fn add(&self, source: &[f32], y: &mut [f32]) {
        self.for_each_target(y, |index, value| *value += source[index]);
    }

    /// Returns, for each element of the source, whether it remains in the result (of `results` elements) after
    /// [`ScatterIndices::set`]: it has a target, and no later element overwrites it.
    pub fn surviving(&self, results: usize) -> Vec<bool> {
        let mut overwritten = vec![false; results];
        let mut survives = vec![false; self.flat_indices.len()];
        for (index, place) in self.flat_indices.iter().enumerate().rev() {
            survives[index] = *place != NO_TARGET && !std::mem::replace(&mut overwritten[*place], true);
        }
        survives
    }

    /// Returns the elements of `dy` at the targets of the source's elements, and 0 for elements that are not written.
    pub fn gather(&self, dy: &[f32]) -> Vec<f32> {
        self.flat_indices.iter().map(|place| dy.get(*place).copied().unwrap_or(0.0)).collect()
    }
}
