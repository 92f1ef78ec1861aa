//! Panels of columns, each of a width that a microkernel computes in one call.

/// Vectors of columns, split into panels of at most `max_vectors` vectors.
#[derive(Clone, Copy)]
pub(super) struct ColumnPanels {
    count: usize,
    max_vectors: usize,
    /// The number of panels with `max_vectors` vectors. The panels after them have `rest_vectors` vectors each.
    full: usize,
    rest_vectors: usize,
}

impl ColumnPanels {
    pub(super) fn new(vectors: usize, max_vectors: usize) -> Self {
        let count = vectors.div_ceil(max_vectors);
        // A single vector would leave most of the kernel's registers idle: two panels of two are better than 3 + 1.
        let (full, rest_vectors) = match vectors % max_vectors {
            0 => (count, 0),
            1 if count > 1 && max_vectors > 2 => (count - 2, 2),
            rest_vectors => (count - 1, rest_vectors),
        };
        Self { count, max_vectors, full, rest_vectors }
    }

    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// Returns the number of vectors of all panels.
    pub(super) fn vectors(&self) -> usize {
        self.full * self.max_vectors + (self.count - self.full) * self.rest_vectors
    }

    /// Returns the first vector of a panel and the number of its vectors.
    pub(super) fn get(&self, panel: usize) -> (usize, usize) {
        if panel < self.full {
            (panel * self.max_vectors, self.max_vectors)
        } else {
            (self.full * self.max_vectors + (panel - self.full) * self.rest_vectors, self.rest_vectors)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panels_cover_every_column_once_and_none_is_narrow_beside_others() {
        for (vectors, max) in (1..100).flat_map(|vectors| (1..=3).map(move |max| (vectors, max))) {
            let panels = ColumnPanels::new(vectors, max);
            let mut next = 0;
            for panel in 0..panels.count() {
                let (first, width) = panels.get(panel);
                assert_eq!(first, next);
                assert!(width <= max && (width > 1 || max < 3 || panels.count() == 1));
                next += width;
            }
            assert_eq!((next, panels.vectors()), (vectors, next));
        }
    }
}
