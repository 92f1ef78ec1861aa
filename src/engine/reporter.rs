//! The monitors and logs that an engine reports to, and values for the next report.

use super::run_recorder::RunRecorder;
use crate::comm::{CommLog, Communicator};
use crate::config::Monitoring;
use crate::files::{check_replaceable, folder_of};
use crate::monitor::{MonitorOpener, Monitors, ThroughputTimer};
use crate::profiler::FlopsProfile;
use crate::zero::step::rank_zero_requests::RankZeroRequests;
use crate::{Error, Result};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

/// The kinds of the user's requests for which the program has checked, and to which it therefore responds.
#[derive(Debug, Default)]
pub(super) struct SupportedRequests {
    pub stop: AtomicBool,
    pub save: AtomicBool,
}

/// The monitors and logs that an engine reports to.
#[derive(Default)]
pub(super) struct EngineReporter {
    pub monitors: Monitors,
    pub throughput: ThroughputTimer,
    /// The time at which this micro step's forward pass began.
    pub micro_step: Option<Instant>,
    /// The mean loss of the last optimizer step, over ranks and micro steps.
    pub loss: f64,
    /// The number of reported micro steps in which the order of units had changed.
    pub order_changes: u64,
    /// The result of `flops_profiler`, after the profiled step.
    pub profile: Option<FlopsProfile>,
    /// The log of `comms_logger`.
    pub comm_log: Option<Arc<CommLog>>,
    /// The record of the run.
    pub run: RunRecorder,
    /// The checkpoint that is being saved.
    pub saving: Option<SavingCheckpoint>,
    /// The learning rate and the loss scale of the last optimizer step.
    pub rates: (f64, f64),
    /// Whether the job was asked to end.
    pub stop_requested: AtomicBool,
    /// Whether the record of the run contains a request to end, on rank 0.
    pub stop_in_record: bool,
    /// The requests of rank 0 in the last vote.
    pub requests: RankZeroRequests,
    /// Whether a checkpoint was requested, and the program has not yet checked for the request.
    pub save_requested: AtomicBool,
    /// The kinds of requests for which the program has checked.
    pub supported_requests: SupportedRequests,
}

/// A checkpoint that is being saved.
pub(super) struct SavingCheckpoint {
    pub step: u64,
    pub folder: PathBuf,
    pub path: PathBuf,
}

impl EngineReporter {
    /// Opens the monitors on the rank that `reports`, and the log of collectives.
    pub fn open(
        config: &Monitoring,
        comm: &dyn Communicator,
        reports: bool,
        extra_monitors: Vec<MonitorOpener>,
    ) -> Result<Self> {
        let (rank, world_size) = (comm.rank(), comm.size());
        if let (true, Some(file)) =
            (reports, config.flops_profiler.as_ref().and_then(|config| config.output_file.as_ref()))
        {
            let folder = folder_of(file);
            let probe = tempfile::tempfile_in(folder);
            probe.map_err(|source| Error::Io { action: "write to", path: folder.into(), source })?;
            let write_error = |source| Error::Io { action: "write", path: file.into(), source };
            check_replaceable(file, FlopsProfile::REPORT_PREFIX, "profile").map_err(write_error)?;
        }
        let monitors = if reports { Monitors::open(config, extra_monitors)? } else { Monitors::default() };
        let comm_log = config.comms_logger.as_ref().map(|config| Arc::new(CommLog::new(config, rank, world_size)));
        if let Some(log) = &comm_log {
            comm.log_into(Some(log.clone()));
        }
        Ok(Self { monitors, comm_log, ..Self::default() })
    }
}
