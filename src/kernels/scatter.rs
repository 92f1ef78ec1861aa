//! Writing elements to places of a result, or adding them to what is there, in f32.
//!
//! What comes to one place comes in the source's order, whichever thread looks after that place.

use super::parallel::{ParallelChunks, for_each_part};

/// The place of an element that is not written.
pub const NOWHERE: usize = usize::MAX;

/// Where the elements of a source go.
#[derive(Debug, Clone)]
pub struct ScatterTargets {
    /// The flat place in the result of each element of the source, in its order; [`NOWHERE`] for one that goes nowhere.
    pub places: Vec<usize>,
}

/// Elements of the result that one task looks after.
const ELEMENTS_PER_TASK: usize = 1 << 14;

impl ScatterTargets {
    /// Calls `write` for each element of the source in order, with its number and the element of the result.
    fn each(&self, y: &mut [f32], write: impl Fn(usize, &mut f32) + Sync) {
        // Each task looks at all places, for those in its part of the result.
        let tasks = (y.len() / ELEMENTS_PER_TASK).clamp(1, rayon::current_num_threads());
        let chunk = y.len().div_ceil(tasks).max(1);
        for_each_part(tasks, ParallelChunks::new(y, chunk), |task, y| {
            let start = task * chunk;
            for (number, place) in self.places.iter().enumerate() {
                if let Some(at) = place.checked_sub(start)
                    && let Some(value) = y.get_mut(at)
                {
                    write(number, value);
                }
            }
        });
    }

    /// Overwrites elements of `y`; of several for one place the last stays.
    pub fn set(&self, source: &[f32], y: &mut [f32]) {
        self.each(y, |number, value| *value = source[number]);
    }

    /// Adds to elements of `y`.
    pub fn add(&self, source: &[f32], y: &mut [f32]) {
        self.each(y, |number, value| *value += source[number]);
    }

    /// For each element of the source whether it stays after [`ScatterTargets::set`] in so many results: none overwrites it.
    pub fn stays(&self, results: usize) -> Vec<bool> {
        let mut taken = vec![false; results];
        let mut stays = vec![false; self.places.len()];
        for (number, place) in self.places.iter().enumerate().rev() {
            stays[number] = *place != NOWHERE && !std::mem::replace(&mut taken[*place], true);
        }
        stays
    }

    /// The elements of `dy` at the places of the source's elements; 0 for those that went nowhere.
    pub fn taken(&self, dy: &[f32]) -> Vec<f32> {
        self.places.iter().map(|place| dy.get(*place).copied().unwrap_or(0.0)).collect()
    }
}
