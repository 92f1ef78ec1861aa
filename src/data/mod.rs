//! Training data: tokens, which sample comes when, and batches of them.
//!
//! The way of a token: [`TokenData`] (a file, a folder of text, or the corpus embedded in this library) ->
//! [`Sampler`] (where does sample i start?) -> [`Loader`] (tensors for one rank and one micro batch).
//! Everything is index arithmetic: which tokens a step sees follows from its number alone, so a resumed run needs
//! nothing but that number, and the global order of samples does not depend on the number of ranks.

mod concatenated_text;
pub(crate) mod error;
mod loader;
mod sampler;
mod token_data;

pub use loader::{BatchShape, Loader, TokenBatch};
pub use sampler::{SampleOrder, Sampler, batches_per_rank, samples_per_rank};
pub use token_data::TokenData;
