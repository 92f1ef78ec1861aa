//! Errors of data files and samples.

use std::path::PathBuf;

/// Errors of data files and samples.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// A single data file that is not text.
    #[error(
        "{} is not UTF-8 text (byte {offset}); a file of little-endian 16-bit tokens must end in .bin or .u16",
        path.display()
    )]
    NotText {
        /// The file.
        path: PathBuf,
        /// Where the text ends.
        offset: usize,
    },
    /// A data folder without a text file.
    #[error(
        "{} holds no text (files that are not UTF-8: {skipped}); hidden files and folders named target are not \
         read, and token files (.bin, .u16) are given by their own path",
        path.display()
    )]
    NoText {
        /// The folder.
        path: PathBuf,
        /// Files that are not text.
        skipped: usize,
    },
    /// A file of 16-bit tokens with half a token at its end.
    #[error(
        "{} has {bytes} bytes; 16-bit tokens need an even number: is it a token file, and complete?",
        path.display()
    )]
    OddTokenFile {
        /// The file.
        path: PathBuf,
        /// Its size.
        bytes: usize,
    },
    /// Fewer tokens than one sample has.
    #[error(
        "{data} has {tokens} tokens; a sample of context {ctx} needs {needed}: give more data or take a shorter context"
    )]
    TooShort {
        /// Name of the data.
        data: String,
        /// Its tokens.
        tokens: usize,
        /// Input tokens of a sample.
        ctx: usize,
        /// Tokens that the first sample needs.
        needed: usize,
    },
    /// A micro batch that no forward can take.
    #[error(
        "a micro batch of {samples} samples of {ctx} tokens is too large: at most {most} tokens; give a smaller \
         train_micro_batch_size_per_gpu, or more gradient_accumulation_steps"
    )]
    BatchTooLarge {
        /// Samples of a micro batch on one rank.
        samples: usize,
        /// Tokens of a sample.
        ctx: usize,
        /// The most tokens.
        most: usize,
    },
    /// A token that the model has no embedding for.
    #[error(
        "token {token} at position {position} of {data} is out of the model's vocabulary of {vocab}; allowed is \
         0 to {}: use data of that vocabulary, or a model with a vocabulary of {} or more", vocab - 1, token + 1
    )]
    TokenOutOfVocabulary {
        /// The token.
        token: u32,
        /// Its index in the data.
        position: usize,
        /// Size of the model's vocabulary.
        vocab: usize,
        /// Name of the data.
        data: String,
    },
}
