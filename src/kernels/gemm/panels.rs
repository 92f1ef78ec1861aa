//! Panels of columns, each of a width that a microkernel computes in one call.

/// Vectors of columns, split into panels of at most `most` vectors.
#[derive(Clone, Copy)]
pub(super) struct ColumnPanels {
    count: usize,
    most: usize,
    /// The number of panels with `most` vectors. The panels after them have `rest` vectors each.
    full: usize,
    rest: usize,
}

impl ColumnPanels {
    pub(super) fn new(vectors: usize, most: usize) -> Self {
        let count = vectors.div_ceil(most);
        // A single vector would leave most of the kernel's registers idle: two panels of two are better than 3 + 1.
        let (full, rest) = match vectors % most {
            0 => (count, 0),
            1 if count > 1 && most > 2 => (count - 2, 2),
            rest => (count - 1, rest),
        };
        Self { count, most, full, rest }
    }

    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// Returns the number of vectors of all panels.
    pub(super) fn vectors(&self) -> usize {
        self.full * self.most + (self.count - self.full) * self.rest
    }

    /// Returns the first vector of a panel and the number of its vectors.
    pub(super) fn get(&self, panel: usize) -> (usize, usize) {
        if panel < self.full {
            (panel * self.most, self.most)
        } else {
            (self.full * self.most + (panel - self.full) * self.rest, self.rest)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panels_cover_every_column_once_and_none_is_narrow_beside_others() {
        for (vectors, most) in (1..100).flat_map(|vectors| (1..=3).map(move |most| (vectors, most))) {
            let panels = ColumnPanels::new(vectors, most);
            let mut next = 0;
            for panel in 0..panels.count() {
                let (first, width) = panels.get(panel);
                assert_eq!(first, next);
                assert!(width <= most && (width > 1 || most < 3 || panels.count() == 1));
                next += width;
            }
            assert_eq!((next, panels.vectors()), (vectors, next));
        }
    }
}
