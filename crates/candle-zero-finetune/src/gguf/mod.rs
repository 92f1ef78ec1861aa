//! Reads and writes GGUF files, following llama.cpp's conventions.
//!
//! | file | content |
//! |---|---|
//! | `header.rs`, `formats.rs` | the header, and the formats of tensors |
//! | `architectures.rs`, `assumptions.rs` | the architectures of llama.cpp, and what they assume about models |
//! | `tensor_names.rs` | the tensors that contain a parameter |
//! | `weights.rs` | weights by their Hugging Face names, dequantized as they are read |
//! | `architecture_keys.rs` | the metadata of an architecture |
//! | `config.rs`, `tokenizer.rs` | the metadata as `config.json`, `tokenizer.json` and `tokenizer_config.json` |
//! | `mixture_keys.rs` | the metadata of mixtures of experts |
//! | `writer.rs` | the file format |
//! | `export.rs`, `model_keys.rs` | a merged model and its metadata as a file |
//! | `tokenizer_export.rs`, `sentence_piece_export.rs` | the tokenizer of a written model |

mod architecture_keys;
mod architectures;
mod assumptions;
mod config;
pub(super) mod export;
mod formats;
mod header;
mod mixture_keys;
mod model_keys;
mod sentence_piece_export;
mod tensor_names;
mod tokenizer;
mod tokenizer_export;
pub(super) mod weights;
mod writer;
