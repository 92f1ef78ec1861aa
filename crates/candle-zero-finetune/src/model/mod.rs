//! The model that is trained: its source and its results.
//!
//! | file | content |
//! |---|---|
//! | `base_model.rs`, `encoder_base.rs` | the model that training starts from |
//! | `trainable_model.rs` | the decoder or the encoder that is trained |
//! | `merged_model.rs`, `output_dir.rs` | the model with its adapter merged, as a Hugging Face folder |
//! | `generator.rs`, `classifier.rs` | answers and labels of a trained model |

pub(super) mod base_model;
pub(super) mod classifier;
pub(super) mod encoder_base;
pub(super) mod generator;
pub(super) mod merged_model;
pub(super) mod output_dir;
pub(super) mod trainable_model;
