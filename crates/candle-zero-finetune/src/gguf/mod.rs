//! Reads and writes GGUF files, following llama.cpp's conventions.
//!
//! | file | content |
//! |---|---|
//! | `weights.rs` | weights by their Hugging Face names, dequantized as they are read |
//! | `config.rs`, `tokenizer.rs` | the metadata as `config.json`, `tokenizer.json` and `tokenizer_config.json` |
//! | `mixture.rs` | the tensors and keys of mixtures of experts |
//! | `writer.rs` | the file format |
//! | `export.rs`, `tokenizer_export.rs` | a merged model and its tokenizer as a GGUF file |

mod config;
pub(super) mod export;
mod mixture;
mod tokenizer;
mod tokenizer_export;
pub(super) mod weights;
mod writer;
