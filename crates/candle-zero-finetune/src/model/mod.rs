//! The model that is trained: its source and its results.
//!
//! | file | content |
//! |---|---|
//! | `base_model.rs`, `classifier_base.rs`, `classifier_config.rs` | the model that training starts from |
//! | `trainable_model.rs` | the language model or the classifier that is trained |
//! | `merged_model.rs`, `output_dir.rs` | the model with its adapter merged, as a Hugging Face folder |
//! | `generator.rs`, `classifier.rs` | answers and labels of a trained model |
//! | `mxfp4.rs` | experts in MXFP4, the format in which gpt-oss is published |

pub(super) mod base_model;
pub(super) mod classifier;
pub(super) mod classifier_base;
pub(super) mod classifier_config;
pub(super) mod generator;
pub(super) mod merged_model;
pub(super) mod mxfp4;
pub(super) mod output_dir;
pub(super) mod trainable_model;
