//! A fine-tuning run: options -> checked inputs -> plan -> steps -> result.
//!
//! | file | content |
//! |---|---|
//! | `options.rs` | the options of a run |
//! | `prepare.rs`, `result_folders.rs` | model, data and folders, checked before any weight is read |
//! | `plan.rs`, `engine_config.rs`, `batch_size.rs`, `learning_rate.rs` | engine configuration, batches and steps |
//! | `memory_fit.rs`, `auto_offload.rs` | the ZeRO stage and the offload that fit into memory |
//! | `traffic_estimate.rs` | how many bytes move between hosts, or between islands, with that choice |
//! | `pipeline_fit.rs` | settings that a pipeline excludes, and the division of the model that fits into memory |
//! | `fine_tune.rs`, `step_report.rs` | the steps, validations and checkpoints; the report of a step |
//! | `training_engine.rs` | the engine: of the complete model, or of a pipeline |
//! | `expert_loads.rs` | how evenly the routers of a mixture choose, and the experts that they no longer choose |
//! | `objective.rs`, `classification_batch.rs`, `classification_scores.rs` | losses and validation metrics |
//! | `run_identity.rs` | whether a checkpoint belongs to the same run |
//! | `export.rs`, `model_card.rs` | the files of the result |

mod auto_offload;
mod batch_size;
pub(super) mod classification_batch;
pub(super) mod classification_scores;
mod engine_config;
pub(super) mod expert_loads;
mod export;
pub(super) mod fine_tune;
mod learning_rate;
pub(super) mod memory_fit;
mod model_card;
pub(super) mod objective;
pub(super) mod options;
mod pipeline_fit;
mod plan;
pub(super) mod prepare;
mod result_folders;
mod run_identity;
pub(super) mod step_report;
mod traffic_estimate;
pub(super) mod training_engine;
