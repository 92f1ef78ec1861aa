//! Training in a pipeline: each rank runs the operations of its stages in the order of the schedule.
//!
//! ```text
//!   forward    activation from the previous stage --> [layers of the stage] --> activation to the next stage
//!   backward   gradient to the previous stage  <-- [layers of the stage] <-- gradient from the next stage
//!   step       vote of all stages -> clip -> update, each stage its own parameters
//! ```
//!
//! | file | contents |
//! | --- | --- |
//! | `pipeline_engine.rs` | the engine: one optimizer step, operation by operation |
//! | `delegated_methods.rs` | ranks and times, checkpoints with options, the parameters of the complete model |
//! | `stage_calls.rs` | the forward and backward passes of one stage, as calls to the stage's engine |
//! | `inference.rs` | evaluation and inference: forward passes without a graph |
//! | `generation.rs` | a decoder's text, continued token by token |
//! | `p2p.rs` | activations and gradients as messages between stages |
//! | `tied_weight.rs` | an embedding that is also the output projection |
//! | `division.rs` | stages and parameters: which rank holds what |
//! | `layer_times.rs` | the time that each layer takes on each rank |
//! | `setup.rs` | the ranks of a pipeline, as communicators |

mod delegated_methods;
mod division;
mod generation;
mod inference;
mod layer_times;
mod p2p;
mod pipeline_engine;
mod setup;
mod stage_calls;
mod tied_weight;

pub(crate) use division::PipelineDivision;
pub use pipeline_engine::PipelineEngine;
pub(super) use setup::PipelineSetup;
