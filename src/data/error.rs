//! Errors of data files and samples.

use crate::util::counted;
use std::path::PathBuf;

/// Errors of data files and samples.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// A single data file is not text.
    #[error(
        "{} is not UTF-8 text (byte {offset}); a file of little-endian 16-bit tokens must end in .bin or .u16",
        path.display()
    )]
    NotText {
        /// The file.
        path: PathBuf,
        /// The offset of the first byte that is not UTF-8.
        offset: usize,
    },
    /// A data folder contains no text file.
    #[error(
        "{} contains no text (files that are not UTF-8: {skipped}); hidden files and folders named target are not \
         read, and token files (.bin, .u16) must be given by their own path",
        path.display()
    )]
    NoText {
        /// The folder.
        path: PathBuf,
        /// The number of files that are not text.
        skipped: usize,
    },
    /// A file of 16-bit tokens ends in half a token.
    #[error(
        "{} has {}; 16-bit tokens need an even number of bytes: is it a complete token file?",
        path.display(),
        counted(*bytes, "byte")
    )]
    OddTokenFile {
        /// The file.
        path: PathBuf,
        /// The size of the file in bytes.
        bytes: usize,
    },
    /// The data has fewer tokens than one sample needs.
    #[error(
        "{data} has {}, but a sample with a context length of {ctx} needs {needed}; use more data or a \
         shorter context",
        counted(*tokens, "token")
    )]
    TooShort {
        /// The name of the data.
        data: String,
        /// The number of tokens in the data.
        tokens: usize,
        /// The number of input tokens per sample.
        ctx: usize,
        /// The number of tokens that the data must have: those of one sample and, in sequential order, one more.
        needed: usize,
    },
    /// A micro batch is too large for any forward pass.
    #[error(
        "a micro batch of {} of {} is too large: the maximum is {max_tokens} tokens; use a smaller \
         train_micro_batch_size_per_gpu, or more gradient_accumulation_steps",
        counted(*samples, "sample"),
        counted(*ctx, "token")
    )]
    BatchTooLarge {
        /// The number of samples in a micro batch on one rank.
        samples: usize,
        /// The number of tokens per sample.
        ctx: usize,
        /// The maximum number of tokens.
        max_tokens: usize,
    },
    /// The model has no embedding for a token of the data.
    #[error(
        "token {token} at position {position} of {data} is outside the model's vocabulary of {vocab} (allowed: 0 to \
         {}); use data with that vocabulary, or a model with a vocabulary of {} or more", vocab - 1, token + 1
    )]
    TokenOutOfVocabulary {
        /// The token.
        token: u32,
        /// The index of the token in the data.
        position: usize,
        /// The size of the model's vocabulary.
        vocab: usize,
        /// The name of the data.
        data: String,
    },
}
