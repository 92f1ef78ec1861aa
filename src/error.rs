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

    // ---- parameters and weights --------------------------------------------------------------

    // ---- training ----------------------------------------------------------------------------

    // ---- optimizer and schedule --------------------------------------------------------------

    // ---- communication -----------------------------------------------------------------------

    // ---- launcher ----------------------------------------------------------------------------

    // ---- below us ----------------------------------------------------------------------------
    /// Candle refused an operation.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}
