//! Reads and writes GGUF files, following llama.cpp's conventions.
//!
//! | file | content |
//! |---|---|
//! | `weights.rs` | weights by their Hugging Face names, dequantized as they are read |
//! | `architecture_keys.rs` | the metadata of an architecture |
//! | `config.rs`, `tokenizer.rs` | the metadata as `config.json`, `tokenizer.json` and `tokenizer_config.json` |
//! | `mixture.rs`, `mixture_architecture.rs` | the tensors and the metadata of mixtures of experts |
//! | `writer.rs` | the file format |
//! | `export.rs`, `tokenizer_export.rs` | a merged model and its tokenizer as a GGUF file |

mod architecture_keys;
mod config;
pub(super) mod export;
mod mixture;
mod mixture_architecture;
mod tokenizer;
mod tokenizer_export;
pub(super) mod weights;
mod writer;
