//! Pipeline parallelism: ranks hold consecutive blocks of the model and pass activations on.
//!
//! | file | content |
//! | --- | --- |
//! | `message_order.rs` | the messages between two ranks, in the order of sending |
//! | `module.rs` | a model as a list of layers |
//! | `schedule.rs` | the operations of each rank, in order: 1F1B, interleaved, zero bubble |
//! | `simulation.rs` | when each operation runs, for given costs: the step's time, the bubble, the activations held |
//! | `stage_cuts.rs` | the division of a model's layers among stages |

mod message_order;
mod module;
mod schedule;
mod simulation;
mod stage_cuts;

pub(crate) use message_order::PipelineMessage;
pub use module::{InferenceState, PartitionMethod, PipelineLayer, PipelineModule};
pub use schedule::{PipelineOp, PipelinePass, PipelineSchedule, PipelineScheduleKind, ScheduleError};
pub use simulation::{SimulatedPipelineTimes, StageCost};
pub use stage_cuts::{StageCuts, TooManyStages, balanced_cuts, kind_cuts, timed_cuts, uniform_cuts};
