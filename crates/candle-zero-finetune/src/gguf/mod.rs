//! Reads and writes GGUF files, following llama.cpp's conventions.
//!
//! | file | content |
//! |---|---|
//! | `header.rs`, `tensor_types.rs` | the header, and the formats of tensors |
//! | `architectures.rs`, `export_compatibility.rs` | the architectures of llama.cpp, and what they assume about models |
//! | `tensor_names.rs` | the tensors that contain a parameter |
//! | `weight_reader.rs` | weights by their Hugging Face names, dequantized as they are read |
//! | `architecture_keys.rs` | the metadata of an architecture |
//! | `hf_config_import.rs`, `tokenizer_import.rs` | the metadata as `config.json`, `tokenizer.json` and `tokenizer_config.json` |
//! | `mixture_keys.rs` | the metadata of mixtures of experts |
//! | `writer.rs` | the file format |
//! | `export.rs`, `model_metadata_export.rs` | a merged model and its metadata as a file |
//! | `tokenizer_export.rs`, `sentence_piece_export.rs` | the tokenizer of a written model |

mod architecture_keys;
mod architectures;
pub(super) mod export;
mod export_compatibility;
mod header;
mod hf_config_import;
mod mixture_keys;
mod model_metadata_export;
mod sentence_piece_export;
mod tensor_names;
mod tensor_types;
mod tokenizer_export;
mod tokenizer_import;
pub(super) mod weight_reader;
mod writer;
