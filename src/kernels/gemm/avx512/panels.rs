//! Columns in panels, each as wide as a microkernel computes at once.

use super::kernel::{LANES, VECTORS};

/// Columns in panels of at most [`VECTORS`] vectors.
#[derive(Clone, Copy)]
pub(super) struct Panels {
    count: usize,
    /// Panels of [`VECTORS`] vectors; of those after them, each has `rest`.
    full: usize,
    rest: usize,
}

impl Panels {
    pub(super) fn new(cols: usize) -> Self {
        let vectors = cols.div_ceil(LANES);
        let count = vectors.div_ceil(VECTORS);
        // A lone vector would leave most of the kernel's registers idle: two panels of two are better than 3 + 1.
        let (full, rest) = match vectors % VECTORS {
            0 => (count, 0),
            1 if count > 1 => (count - 2, 2),
            rest => (count - 1, rest),
        };
        Self { count, full, rest }
    }

    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// The number of vectors of all panels.
    pub(super) fn vectors(&self) -> usize {
        self.full * VECTORS + (self.count - self.full) * self.rest
    }

    /// The first vector of a panel, and the number of its vectors.
    pub(super) fn get(&self, panel: usize) -> (usize, usize) {
        if panel < self.full {
            (panel * VECTORS, VECTORS)
        } else {
            (self.full * VECTORS + (panel - self.full) * self.rest, self.rest)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panels_cover_every_column_once_and_none_is_narrow_beside_others() {
        for cols in 1..500 {
            let panels = Panels::new(cols);
            let mut next = 0;
            for panel in 0..panels.count() {
                let (first, vectors) = panels.get(panel);
                assert_eq!(first, next);
                assert!(vectors <= VECTORS && (vectors > 1 || panels.count() == 1));
                next += vectors;
            }
            assert_eq!((next, panels.vectors()), (cols.div_ceil(LANES), next));
        }
    }
}
