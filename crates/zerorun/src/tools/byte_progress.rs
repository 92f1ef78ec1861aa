//! The progress of a tool that works through files.

use candle_zero::monitor::Progress;

/// A progress line that counts MiB. It appears with the first report.
#[derive(Default)]
pub(super) struct ByteProgress(Option<(Progress, u64)>);

impl ByteProgress {
    /// Reports that `done` of `total` bytes have been processed. Nothing is shown if `total` is 1 MiB or less.
    pub(super) fn report(&mut self, done: u64, total: u64) {
        if total <= 1 << 20 {
            return;
        }
        let (done, total) = (done.div_ceil(1 << 20), total.div_ceil(1 << 20));
        let (progress, shown) = self.0.get_or_insert_with(|| (Progress::new(total, None).counting("MiB"), 0));
        // The line is redrawn at most once per MiB.
        if done > *shown {
            *shown = done;
            progress.step(done, String::new);
        }
    }

    /// Ends the progress line.
    pub(super) fn finish(self) {
        if let Some((progress, _)) = self.0 {
            progress.finish();
        }
    }
}
