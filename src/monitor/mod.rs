//! The output of a run during training: metrics for programs, and progress for people.
//!
//! The engine writes its [`MonitorEvent`]s to the [`Monitor`]s that the configuration enables (`tensorboard`,
//! `csv_monitor`, `wandb`) and to those that were passed to its builder, and notifies them of the run's milestones.

mod crc32c;
mod csv;
pub(crate) mod error;
mod events;
mod hyperparameters;
mod json_lines;
mod metrics_writer;
mod monitors;
mod process_memory;
mod progress;
mod prometheus;
mod protobuf;
mod tensorboard;
mod tensorboard_hparams;
mod throughput;
mod wandb;

pub use csv::CsvMonitor;
pub use events::{Monitor, MonitorEvent, RunDescription, RunEnding, RunMilestone};
pub use json_lines::JsonLines;
pub use metrics_writer::MetricsWriter;
pub(crate) use metrics_writer::end_last_line;
pub(crate) use monitors::{MonitorOpener, Monitors};
pub use process_memory::{available_memory, process_limit, rss_bytes, rss_peak_bytes};
pub use progress::Progress;
#[doc(hidden)]
pub use prometheus::{PORT as PROMETHEUS_PORT, Prometheus};
pub use tensorboard::TensorBoard;
pub(crate) use throughput::ThroughputTimer;
use wandb::WandbMonitor;
