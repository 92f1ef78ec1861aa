//! The distribution of elements among ranks: pure integer arithmetic, without tensors or communication.

mod bucket_layout;
mod fragment_schedule;
mod rank_mesh;
mod shard;
mod shard_mesh;
mod share_layout;
mod zero_stage;

pub use bucket_layout::BucketFill;
pub(crate) use bucket_layout::{PACKED_BELOW, chunk_offsets};
pub(crate) use fragment_schedule::{FragmentSchedule, exchanged_len, fragments_of};
pub use rank_mesh::{MeshAxis, MeshError, RankMesh};
pub use shard::{ExpertPlacement, ShardCut, SubGroupFill, shard_len, shard_range};
pub use shard_mesh::ShardMesh;
pub(crate) use share_layout::{ShareLayout, SharePosition, groups_in_memory};
pub use zero_stage::{Placement, Sharding, ZeroStage};
