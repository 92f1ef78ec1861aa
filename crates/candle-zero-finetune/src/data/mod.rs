//! Turns data files into samples: files -> records -> examples -> tokens -> batches.
//!
//! | file | content |
//! |---|---|
//! | `column_mapping.rs` | the names of columns, and their roles |
//! | `source.rs`, `record_reader.rs`, `parquet.rs`, `csv_reader.rs` | a file, record by record |
//! | `raw_record.rs` | a record before it is parsed |
//! | `record_parser.rs`, `tracked_record.rs`, `chat_messages.rs` | a parsed record: an example to learn from |
//! | `sample.rs` | the tokens of an example, and which of them are predicted |
//! | `sample_cache_builder.rs`, `data_options.rs`, `class_labels.rs` | the samples of a file: parsed and tokenized in parallel |
//! | `sample_cache.rs` | the samples of a file, written once and mapped |
//! | `dataset.rs` | the samples of several files, each repeated according to its file's weight |
//! | `data_report.rs`, `show_samples.rs` | what happened to the records, and samples for people to read |
//! | `batches.rs` | rows of samples, packed or padded |

pub(super) mod batches;
mod chat_messages;
pub(super) mod class_labels;
pub(super) mod column_mapping;
mod csv_reader;
pub(super) mod data_options;
pub(super) mod data_report;
pub(super) mod dataset;
mod parquet;
pub(super) mod raw_record;
pub(super) mod record_parser;
mod record_reader;
pub(super) mod sample;
pub(super) mod sample_cache;
mod sample_cache_builder;
pub(super) mod show_samples;
pub(super) mod source;
mod tracked_record;
