//! Reports of all ranks for the record of the run, and the user's requests that arrive through the record.
//!
//! ```text
//!   rank 0      about once a second: a report is due, and requests are read; the vote of the step contains both
//!   all ranks   after the vote: agree on whether this step ends with a report, and whether a checkpoint is requested
//!   all ranks   at the end of such a step: gather the reports on rank 0, which replaces `ranks.json`
//! ```
//!
//! A step without a report sends the same messages as an engine without a record.

use super::Engine;
use super::run_recorder::RunRecorder;
use crate::error::Result;
use crate::runs::{RankReport, RunRequest};
use crate::zero::step::rank_zero_requests::RankZeroRequests;
use std::sync::atomic::Ordering;

impl<M> Engine<M> {
    /// Returns whether the user has asked for a checkpoint in `zerorun dash` since the last call. The result is the
    /// same on all ranks after the same step. The call costs nothing, so a training loop can make it after every step,
    /// between accumulations. Without a record of the run, and on islands, it returns false.
    ///
    /// ```no_run
    /// # fn run(engine: &mut candle_zero::Engine<candle_nn::Linear>) -> candle_zero::Result<()> {
    /// // forward, backward, step ...
    /// if engine.save_requested() {
    ///     engine.save_checkpoint("checkpoints", None, serde_json::Value::Null)?;
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn save_requested(&self) -> bool {
        self.reporter.supported_requests.save.store(true, Ordering::Relaxed);
        self.reporter.save_requested.swap(false, Ordering::Relaxed)
    }

    /// Returns the requests that this rank makes to all ranks in the vote of this step. Only the rank that writes the
    /// record makes requests, at most once a second.
    pub(super) fn due_requests(&mut self) -> RankZeroRequests {
        let step = self.global_steps;
        let RunRecorder::Open(open) = &mut self.reporter.run else { return RankZeroRequests::default() };
        if !open.is_report_due() {
            return RankZeroRequests::default();
        }
        let mut requests = Vec::new();
        self.reporter.run.write(|open| {
            requests = open.writer.take_requests(step)?;
            Ok(())
        });
        self.reporter.stop_in_record |= requests.contains(&RunRequest::Stop);
        // Islands of one job save together, but the vote is within one island, so a request for a checkpoint is ignored
        // if there are islands.
        let save = requests.contains(&RunRequest::Save) && self.islands.is_none();
        RankZeroRequests { report: true, save }
    }

    /// Keeps the requests that were made in the vote.
    pub(super) fn note_requests(&mut self, requests: RankZeroRequests) {
        self.reporter.requests = requests;
        self.reporter.save_requested.fetch_or(requests.save, Ordering::Relaxed);
    }

    /// Gathers the reports of the ranks if they were requested in the vote. Collective in such a step.
    pub(super) fn report_ranks(&mut self) -> Result<()> {
        if !std::mem::take(&mut self.reporter.requests).report {
            return Ok(());
        }
        let report = RankReport::of(&self.memory_report(), self.clock.last);
        let all = self.core.job().gather_f64(report.to_numbers()).wait()?;
        let supported = &self.reporter.supported_requests;
        let is_supported = |request: &RunRequest| match request {
            RunRequest::Save => supported.save.load(Ordering::Relaxed) && self.islands.is_none(),
            RunRequest::Stop => supported.stop.load(Ordering::Relaxed),
        };
        let supported: Vec<RunRequest> = RunRequest::ALL.into_iter().filter(is_supported).collect();
        let (step, reports) = (self.global_steps, all.iter().map(|numbers| RankReport::of_numbers(numbers)));
        let reports: Vec<RankReport> = reports.collect();
        self.reporter.run.write(|open| open.writer.ranks(step, &supported, &reports));
        Ok(())
    }
}
