//! The one error type. Every message names what was found, where, what is allowed, and the mend.

use std::path::PathBuf;

/// Result with [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything a user can meet, in groups. Broken invariants are assertions, not values of this type.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    // ---- files -------------------------------------------------------------------------------
    /// A file or folder could not be read, written or created.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was attempted, as a verb ("read", "create", ...).
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },

    // ---- configuration -----------------------------------------------------------------------

    // ---- data --------------------------------------------------------------------------------
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
    #[error("{} has {bytes} bytes; 16-bit tokens need an even number: is it a token file, and complete?", path.display())]
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
    DataTooShort {
        /// Name of the data.
        data: String,
        /// Its tokens.
        tokens: usize,
        /// Input tokens of a sample.
        ctx: usize,
        /// Tokens that the first sample needs.
        needed: usize,
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

    // ---- parameters and weights --------------------------------------------------------------

    // ---- training ----------------------------------------------------------------------------

    // ---- optimizer and schedule --------------------------------------------------------------
    /// A parameter of the learning-rate schedule that no schedule can have.
    #[error("{key} is {found}; allowed is {allowed}: {mend}")]
    ScheduleParameter {
        /// Path of the key.
        key: &'static str,
        /// Its value.
        found: String,
        /// What it may be.
        allowed: &'static str,
        /// What to do.
        mend: &'static str,
    },
    /// Gradients overflow although the dynamic loss scale is as small as it may be.
    #[error(
        "a gradient is not finite at optimizer step {step}, and the loss scale cannot fall below {scale} \
         (fp16.min_loss_scale): training diverges; lower the learning rate, look for NaN in data and loss, \
         train in bf16, or lower fp16.min_loss_scale"
    )]
    LossScaleAtMinimum {
        /// The scale, equal to its minimum.
        scale: f64,
        /// Optimizer steps so far, skipped ones and this one included.
        step: u64,
    },

    // ---- communication -----------------------------------------------------------------------

    // ---- launcher ----------------------------------------------------------------------------

    // ---- below us ----------------------------------------------------------------------------
    /// Candle refused an operation.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}
