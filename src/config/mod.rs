//! DeepSpeed's JSON configuration, read, checked and resolved.
//!
//! A file is processed in these steps: text -> values with their positions (`hjson`) -> a walk that checks them against
//! the table of keys (`keys`, `walk`) -> [`Config`], in which every default is filled in and every rule between keys
//! has been checked (`resolve`).

mod auto;
mod batch;
pub(crate) mod error;
mod expert_parallel;
mod hjson;
mod json_node;
mod keys;
mod local_steps;
mod monitoring;
mod note;
mod offload;
mod optim;
mod pipeline;
#[cfg(test)]
mod reference;
mod resolve;
mod resolved;
mod run_values;
mod scheduler;
mod schema;
mod source;
mod suggest;
mod to_deepspeed_json;
mod value_conversion;
mod walk;

#[doc(inline)]
pub use crate::notice::LogLevel;
pub use error::{ConfigProblem, ConfigRule, TextPosition};
pub(crate) use local_steps::ISLAND_SERVER;
pub use local_steps::{IslandWireDtype, LocalStepsConfig};
#[doc(hidden)]
pub use local_steps::{is_address, island_slots};
pub use monitoring::{CommsLoggerConfig, FlopsProfilerConfig, MonitorFolder, Monitoring, RunRecordConfig, WandbConfig};
pub use note::ConfigNote;
pub use pipeline::PipelineConfig;
pub use resolved::*;
pub use run_values::RunValues;
pub use schema::json_schema;
pub use source::ConfigSource;
#[doc(hidden)]
pub use source::{CheckOutcome, check, read_file, read_value};
