//! The working memory of a thread.

use std::cell::RefCell;

thread_local! {
    /// The working memory of a thread. It is kept because allocating its pages takes longer than computing a small
    /// head.
    pub(super) static SCRATCH: RefCell<AttentionScratch> = const { RefCell::new(AttentionScratch::new()) };
}

/// Working memory, handed out in pieces that start on cache lines.
pub(super) struct AttentionScratch(Vec<f32>);

impl AttentionScratch {
    pub(super) const fn new() -> Self {
        Self(Vec::new())
    }

    /// Returns pieces of these lengths, each a multiple of a cache line (16 elements). Their contents are arbitrary.
    pub(super) fn pieces<const N: usize>(&mut self, lengths: [usize; N]) -> [&mut [f32]; N] {
        const LINE: usize = 16;
        let total = lengths.iter().sum::<usize>() + LINE;
        if self.0.len() < total {
            self.0.resize(total, 0.0);
        }
        let skip = self.0.as_ptr().align_offset(LINE * size_of::<f32>()).min(LINE);
        let mut rest = &mut self.0[skip..];
        lengths.map(|length| {
            debug_assert!(length.is_multiple_of(LINE));
            let (piece, remaining) = std::mem::take(&mut rest).split_at_mut(length);
            rest = remaining;
            piece
        })
    }
}
