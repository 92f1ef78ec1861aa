//! Training data: tokens, their order as samples, and batches of them.
//!
//! Tokens pass through three types: [`TokenData`] (a file, a folder of text, or the corpus embedded in this library) ->
//! [`Sampler`] (where does sample i start?) -> [`Loader`] (tensors for one rank and one micro batch). Everything is
//! index arithmetic: the position of a sample in the data depends only on the sample's global index. Therefore, a
//! resumed run needs only the number of samples processed so far, and the global order of samples does not depend on
//! the number of ranks.

mod concatenated_bytes;
pub(crate) mod error;
mod loader;
mod sampler;
mod token_data;

pub use loader::{BatchPartition, Loader, TokenBatch};
pub use sampler::{SampleOrder, Sampler, batches_per_rank, samples_per_rank};
pub use token_data::TokenData;
