//! The record of a run: a folder with everything that is known about a training run, which `zerorun runs` reads.
//!
//! ```text
//!   RunSpec + section `run` + environment -> RecordPlan -> RunWriter (one per run, on rank 0) -> folder
//!   (record_plan.rs)                                       (writer.rs)
//!
//!   folder -> RunsFolder -> RecordedRun: RunInfo, RunSummary, RecordedState; rows, events, samples
//!             (folder.rs)   (recorded.rs)
//! ```
//!
//! A run is a folder of files. `run.json` describes the run and is written once. `metrics.jsonl`, `events.jsonl` and
//! `samples.jsonl` only grow: they are JSON lines, and an incomplete last line is ignored. `summary.json` is an
//! index: it summarizes the first bytes of `metrics.jsonl` and `events.jsonl` and contains the numbers of those bytes,
//! so listing many runs does not require reading their metrics. `ranks.json` is the last report of all ranks, and
//! `experts.json` contains the newest loads of the experts of a mixture. The launcher writes `launch.jsonl` and
//! `log.txt` (launch_writer.rs). Requests from the user are files, too (requests.rs). docs/runs.md describes the
//! format.

pub(crate) mod error;
mod expert_loads;
mod folder;
mod git;
mod info;
mod json_line_reader;
mod launch_writer;
mod line_appender;
mod machine;
mod metrics;
mod rank_report;
mod record_plan;
mod recorded;
mod redact_secrets;
mod requests;
mod summary;
mod tail;
mod writer;

pub use crate::monitor::RunEnding;
use crate::wall_clock;
pub(crate) use crate::wall_clock::now;
pub use crate::wall_clock::{parse_utc, utc};
pub use expert_loads::{BlockLoads, RecordedLoads};
pub use folder::{ListedRun, RunsFolder};
pub use git::GitRevision;
pub use info::{RunInfo, RunVersions};
pub use launch_writer::LaunchWriter;
pub use machine::RunMachine;
pub use metrics::{MetricsLine, MetricsRow, RunMetrics, json_number};
pub(crate) use rank_report::RankReport;
pub use record_plan::RunSpec;
pub(crate) use record_plan::{RecordPlan, run_name};
pub use recorded::{RecordedRun, RecordedState};
pub(crate) use redact_secrets::settings_without_secrets;
pub use requests::RunRequest;
pub use summary::{RunSummary, ValueAtStep};
pub use tail::{NewRunLines, RunTail};
pub(crate) use writer::{LoadedFrom, RunStart, RunWriter, check_folder, job, restart};

/// The variable with the folder of runs; `off` switches recording off.
pub const RUNS_DIR: &str = "CANDLE_ZERO_RUNS_DIR";
/// The variable with the name of the run, which switches recording on.
pub const RUN: &str = "CANDLE_ZERO_RUN";
/// The variable with the id of the job, which `zerorun` gives its ranks; it stays the same when the job restarts.
pub const JOB: &str = "CANDLE_ZERO_JOB";
/// The variable with which `zerorun --dashboard` switches recording on, under the name that the program gives.
pub const RECORD: &str = "CANDLE_ZERO_RECORD";
/// The variable with the file to which rank 0 appends the folder of each run that it records, for its launcher.
pub const RUN_FOLDERS: &str = "CANDLE_ZERO_RUN_FOLDERS";
/// The default folder of runs.
pub const DEFAULT_FOLDER: &str = "runs";

/// The version of the format that this library writes. The library reads this version and earlier ones.
const FORMAT: u64 = 1;

/// The files of a run.
const INFO: &str = "run.json";
const METRICS: &str = "metrics.jsonl";
const EVENTS: &str = "events.jsonl";
const SAMPLES: &str = "samples.jsonl";
const RANKS: &str = "ranks.json";
const EXPERTS: &str = "experts.json";
const LAUNCH: &str = "launch.jsonl";
const LOG: &str = "log.txt";
const EARLIER_LOG: &str = "log.1.txt";
const SUMMARY: &str = "summary.json";

/// The maximum number of bytes of `run.json`, `summary.json`, `ranks.json` or `experts.json`.
const MAX_FILE_BYTES: u64 = 16 << 20;

/// Returns an id for a new job: the time in UTC, and random digits.
pub fn new_job() -> String {
    let random = std::hash::BuildHasher::hash_one(&std::collections::hash_map::RandomState::new(), std::process::id());
    format!("{}-{:06x}", wall_clock::stamp(now()), random & 0xff_ffff)
}
