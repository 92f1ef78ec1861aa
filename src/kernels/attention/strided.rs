//! Views of rows that hold several heads side by side, possibly with other columns next to them (a fused projection).

use super::AttentionShape;
use super::rule::SequenceSpan;
use crate::kernels::parallel::DisjointParts;
use crate::util::{counted, is_or_are};
use std::marker::PhantomData;
use std::ops::Range;

/// Rows with their heads side by side. The first head is at each row's start.
#[derive(Debug, Clone, Copy)]
pub struct MultiHeadRows<'a, E> {
    data: &'a [E],
    row_stride: usize,
}

impl<'a, E> MultiHeadRows<'a, E> {
    /// Creates a view of rows that start `row_stride` elements apart. `data` starts at head 0 of row 0.
    pub fn new(data: &'a [E], row_stride: usize) -> Self {
        Self { data, row_stride }
    }

    /// Returns one head's vectors of one sequence.
    pub(super) fn head(&self, h: &AttentionShape, batch: usize, head: usize) -> HeadRows<'a, E> {
        self.head_rows(batch * h.time, head, h.head)
    }

    /// Returns one head's vectors of `width` elements, starting at row `first`, counted over all sequences.
    pub(super) fn head_rows(&self, first: usize, head: usize, width: usize) -> HeadRows<'a, E> {
        HeadRows {
            data: &self.data[first * self.row_stride + head * width..],
            row_stride: self.row_stride,
            head: width,
        }
    }
}

/// The vectors of one head at some positions, in order.
#[derive(Debug, Clone, Copy)]
pub(super) struct HeadRows<'a, E> {
    data: &'a [E],
    row_stride: usize,
    head: usize,
}

impl<'a, E> HeadRows<'a, E> {
    /// Returns the vector of position t.
    #[inline(always)]
    pub(super) fn row(&self, t: usize) -> &'a [E] {
        &self.data[t * self.row_stride..][..self.head]
    }

    /// Returns the number of elements from one position's vector to the next.
    #[inline(always)]
    pub(super) fn row_stride(&self) -> usize {
        self.row_stride
    }
}

/// Rows with heads side by side, for writing.
#[derive(Debug)]
pub struct MultiHeadRowsMut<'a, E> {
    data: *mut E,
    len: usize,
    row_stride: usize,
    /// The elements of each row that belong to this view.
    columns: Range<usize>,
    slice: PhantomData<&'a mut [E]>,
}

// SAFETY: this is a `&mut [E]` of the view's own columns.
unsafe impl<E: Send> Send for MultiHeadRowsMut<'_, E> {}

impl<'a, E> MultiHeadRowsMut<'a, E> {
    /// Creates a view of rows that start `row_stride` elements apart. `data` starts at head 0 of row 0.
    pub fn new(data: &'a mut [E], row_stride: usize) -> Self {
        let (len, columns) = (data.len(), 0..row_stride);
        Self { data: data.as_mut_ptr(), len, row_stride, columns, slice: PhantomData }
    }

    /// Creates views of disjoint column ranges of the same rows. The first head of each view is at the start of its
    /// range.
    ///
    /// Panics if ranges overlap or exceed the row.
    pub fn columns<const N: usize>(data: &'a mut [E], row_stride: usize, ranges: [Range<usize>; N]) -> [Self; N] {
        for (i, range) in ranges.iter().enumerate() {
            assert!(
                range.start <= range.end && range.end <= row_stride,
                "{range:?} exceeds {}",
                counted(row_stride, "column")
            );
            for other in &ranges[..i] {
                assert!(range.end <= other.start || other.end <= range.start, "{other:?} and {range:?} overlap");
            }
        }
        let (data, len) = (data.as_mut_ptr(), data.len());
        ranges.map(|columns| Self { data, len, row_stride, columns, slice: PhantomData })
    }

    /// Splits the rows by (batch, head) in order, for `heads` heads of `head` elements.
    ///
    /// Panics if a row of the view or the data has no room for them.
    pub(super) fn by_head(self, batch: usize, time: usize, heads: usize, head: usize) -> RowsByHeadMut<'a, E> {
        assert!(
            heads * head <= self.columns.len(),
            "{} of {head} {} not fit into columns {:?}",
            counted(heads, "head"),
            if heads == 1 { "does" } else { "do" },
            self.columns
        );
        let rows = batch * time;
        let end = rows.checked_sub(1).map_or(0, |last| last * self.row_stride + self.columns.start + heads * head);
        assert!(
            end <= self.len,
            "{} {} {}, but there {} only {}",
            counted(rows, "row"),
            if rows == 1 { "needs" } else { "need" },
            counted(end, "element"),
            is_or_are(self.len),
            self.len
        );
        RowsByHeadMut { rows: self, batch, time, heads, head }
    }
}

/// The rows of [`MultiHeadRowsMut`], split by (batch, head).
pub(super) struct RowsByHeadMut<'a, E> {
    rows: MultiHeadRowsMut<'a, E>,
    batch: usize,
    time: usize,
    heads: usize,
    head: usize,
}

// SAFETY: the threads get parts that do not overlap, as if each had been sent a `&mut [E]`.
unsafe impl<E: Send> Sync for RowsByHeadMut<'_, E> {}

// SAFETY: a part is the rows of one sequence and the columns of one head.
unsafe impl<'a, E: Send> DisjointParts for RowsByHeadMut<'a, E> {
    type Part = HeadRowsMut<'a, E>;

    unsafe fn take(&self, index: usize) -> HeadRowsMut<'a, E> {
        let (batch, head) = (index / self.heads, index % self.heads);
        // SAFETY: the caller takes the head once.
        unsafe { self.take_heads(SequenceSpan { first: batch * self.time, len: self.time }, head, 1) }
    }
}

impl<'a, E> RowsByHeadMut<'a, E> {
    /// Returns the vectors of `n` heads, starting at `head`, at the positions of a span, as if they were one head.
    ///
    /// # Safety
    /// Each position of a head may be taken only once.
    pub(super) unsafe fn take_heads(&self, span: SequenceSpan, head: usize, n: usize) -> HeadRowsMut<'a, E> {
        let positions = self.batch * self.time;
        assert!(
            span.first + span.len <= positions && head + n <= self.heads,
            "{span:?} or head {head} is outside {} of {}",
            counted(self.heads, "head"),
            counted(positions, "position")
        );
        let start = span.first * self.rows.row_stride + self.rows.columns.start + head * self.head;
        // SAFETY: `by_head` checked that every head of every row is within the data.
        let data = unsafe { self.rows.data.add(start) };
        HeadRowsMut { data, row_stride: self.rows.row_stride, time: span.len, head: n * self.head, slice: PhantomData }
    }
}

/// Panics because position `t` is not one of a view's `time` positions.
#[cold]
#[inline(never)]
fn position_outside(t: usize, time: usize) -> ! {
    panic!("position {t} is outside the {}", counted(time, "position"))
}

/// The vectors of one head at some positions, for writing.
pub(super) struct HeadRowsMut<'a, E> {
    data: *mut E,
    row_stride: usize,
    time: usize,
    head: usize,
    slice: PhantomData<&'a mut [E]>,
}

impl<E> HeadRowsMut<'_, E> {
    /// Returns the vector of position t.
    #[inline(always)]
    pub(super) fn row(&mut self, t: usize) -> &mut [E] {
        let time = self.time;
        self.row_if(t).unwrap_or_else(|| position_outside(t, time))
    }

    /// Returns the vector of position t if it exists.
    #[inline(always)]
    pub(super) fn row_if(&mut self, t: usize) -> Option<&mut [E]> {
        // SAFETY: row t of this head is within the data, and nothing else reads or writes it: views of the same rows
        // have disjoint columns, and a view's heads are taken once.
        (t < self.time)
            .then(|| unsafe { std::slice::from_raw_parts_mut(self.data.add(t * self.row_stride), self.head) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn views_of_columns_write_their_own_elements_only() {
        let mut data = vec![0u32; 4 * 10];
        let [a, b] = MultiHeadRowsMut::columns(&mut data, 10, [1..5, 6..10]);
        let (a, b) = (a.by_head(2, 2, 2, 2), b.by_head(2, 2, 1, 3));
        // SAFETY: every part is taken once.
        unsafe {
            for i in 0..4 {
                (0..2).for_each(|t| a.take(i).row(t).fill(i as u32 + 1));
            }
            for i in 0..2 {
                (0..2).for_each(|t| b.take(i).row(t).fill(i as u32 + 5));
            }
        }
        let row = |a, b, c| [0, a, a, b, b, 0, c, c, c, 0];
        assert_eq!(data, [row(1, 2, 5), row(1, 2, 5), row(3, 4, 6), row(3, 4, 6)].concat());
    }

    #[test]
    #[should_panic(expected = "overlap")]
    fn overlapping_columns_are_refused() {
        MultiHeadRowsMut::columns(&mut [0u8; 8], 8, [0..4, 5..8, 3..5]);
    }

    #[test]
    #[should_panic(expected = "need 12 elements")]
    fn too_short_data_is_refused() {
        MultiHeadRowsMut::new(&mut [0u8; 11], 4).by_head(1, 3, 2, 2);
    }
}
