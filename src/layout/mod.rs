//! Who holds what: pure integer arithmetic, no tensors, no communication.

mod bucket;
mod division;
mod shard;
mod sharing;
mod stage;

pub use bucket::BucketRule;
pub(crate) use bucket::{PACKED_BELOW, chunk_offsets};
pub use division::Division;
pub use shard::{Cut, SubGroups, shard_len, shard_range};
pub(crate) use sharing::{Place, Sharing, groups_in_memory};
pub use stage::{Placement, Sharding, ZeroStage};
