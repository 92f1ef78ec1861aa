//! Who holds what: pure integer arithmetic, no tensors, no communication.

mod stage;

pub use stage::{Placement, Sharding, ZeroStage};
