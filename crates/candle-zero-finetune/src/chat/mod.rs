//! Turns a conversation into tokens, and marks the assistant's tokens.
//!
//! | file | content |
//! |---|---|
//! | `conversation.rs` | messages and tools |
//! | `template.rs`, `template_files.rs`, `template_capabilities.rs` | a chat template: files, formats, rendering |
//! | `jinja_compat.rs`, `python_string_methods.rs`, `strftime.rs` | Python behaviour that templates expect |
//! | `assistant_mask.rs`, `omitted_texts.rs` | the bytes of the assistant's text, and the texts that are omitted |
//! | `tokenizer.rs`, `tokenizer_files.rs`, `encode_cache.rs` | a tokenizer: its files, and encoding in cached pieces |

pub(super) mod assistant_mask;
pub(super) mod conversation;
pub(super) mod encode_cache;
pub(super) mod jinja_compat;
pub(super) mod omitted_texts;
mod python_string_methods;
mod strftime;
pub(super) mod template;
mod template_capabilities;
pub(super) mod template_files;
pub(super) mod tokenizer;
pub(super) mod tokenizer_files;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tokenizer_fuzz;
