//! The record of an engine's run as a state: waiting, being written, or off.

use crate::Error;
use crate::config::Config;
use crate::error::Result;
use crate::notice::{emit, warn};
use crate::runs::{RecordPlan, RunEnding, RunSpec, RunStart, RunWriter, check_folder, now};
use std::time::{Duration, Instant};

/// The record of a run, on the rank that writes it.
#[derive(Default)]
pub(super) enum RunRecorder {
    /// Nothing is recorded: on other ranks, without a request, or after the record has ended or failed.
    #[default]
    Off,
    /// The record begins with the first forward pass: only then is it known whether a checkpoint was loaded, and a
    /// program that only evaluates leaves no record.
    Waiting(Box<WaitingRecord>),
    /// The record is being written.
    Open(Box<OpenRecord>),
}

/// A record that has not begun.
pub(super) struct WaitingRecord {
    plan: RecordPlan,
    pub start: RunStart,
}

/// A record that is being written.
pub(super) struct OpenRecord {
    pub writer: RunWriter,
    /// The time of the last report of the ranks.
    last_report: Option<Instant>,
}

/// The minimum time between two reports of all ranks, and between two checks for requests.
const REPORT_INTERVAL: Duration = Duration::from_secs(1);

impl OpenRecord {
    /// Returns whether the ranks should report again, and, if so, begins the next interval.
    pub fn is_report_due(&mut self) -> bool {
        let is_due = self.last_report.is_none_or(|at| at.elapsed() >= REPORT_INTERVAL);
        if is_due {
            self.last_report = Some(Instant::now());
        }
        is_due
    }
}

impl RunRecorder {
    /// Decides whether the run is recorded, and checks that its folder can be written. `ranks` is the number of ranks
    /// of the job.
    ///
    /// # Errors
    /// A name that cannot be used; a folder that cannot be written, if the record is required.
    pub fn new(spec: Option<RunSpec>, config: &Config, ranks: usize) -> Result<Self> {
        let plan = RecordPlan::new(spec, config.monitoring.run.as_ref(), |name| std::env::var_os(name))?;
        let Some(plan) = plan else { return Ok(Self::Off) };
        match check_folder(&plan.folder) {
            Err(error) if plan.is_required => return Err(error),
            Err(error) => {
                emit(&format!("no record of this run is kept: {error}; give another folder with CANDLE_ZERO_RUNS_DIR"));
                return Ok(Self::Off);
            }
            Ok(()) => {}
        }
        let configuration = config.to_deepspeed_json();
        let start = RunStart { world_size: ranks, configuration, time: now(), loaded: None };
        Ok(Self::Waiting(Box::new(WaitingRecord { plan, start })))
    }

    /// Begins the record if it is waiting.
    pub fn begin(&mut self) {
        let Self::Waiting(waiting) = self else { return };
        let opened = RunWriter::open(&waiting.plan, &waiting.start);
        *self = match opened {
            Ok(writer) => Self::Open(Box::new(OpenRecord { writer, last_report: None })),
            Err(error) => Self::give_up(&error),
        };
    }

    /// Reports that the record cannot be written. Training matters more than its record.
    fn give_up(error: &Error) -> Self {
        warn(&format!("the record of this run ends here, and training continues without it: {error}"));
        Self::Off
    }

    /// Writes to the record, if there is one. A record that is waiting begins.
    pub fn write(&mut self, write: impl FnOnce(&mut OpenRecord) -> Result<()>) {
        self.begin();
        let Self::Open(open) = self else { return };
        if let Err(error) = write(open) {
            *self = Self::give_up(&error);
        }
    }

    /// Passes everything that has been recorded to the operating system, if the record has begun.
    pub fn flush(&mut self) {
        if let Self::Open(open) = self
            && let Err(error) = open.writer.flush()
        {
            *self = Self::give_up(&error);
        }
    }

    /// Ends the record, if it has begun.
    pub fn end(&mut self, step: u64, outcome: RunEnding, message: Option<&str>) {
        if let Self::Open(open) = std::mem::take(self)
            && let Err(error) = open.writer.end(step, outcome, message)
        {
            warn(&format!("the end of this run is not recorded: {error}"));
        }
    }
}
