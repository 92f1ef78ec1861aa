//! The ranks among which experts are divided (expert parallelism).
//!
//! ```text
//!   4 ranks, 2 along the expert axis; 6 experts per layer
//!
//!              experts 0-2   experts 3-5
//!   group 0    rank 0        rank 1          rows are exchanged within a group
//!   group 1    rank 2        rank 3
//!              holders: the ranks of a column, among which the experts of the column are data-parallel
//! ```
//!
//! All ranks train on different data. The parameters of an expert, their gradients and optimizer states are only on its
//! holders, which divide them as the ZeRO stage requires. All other parameters are on all ranks.

use crate::comm::Communicator;
use crate::error::{EngineError, Result};
use crate::layout::{MeshAxis, RankMesh};
use crate::util::counted;
use std::sync::Arc;

/// Returns the error for `ranks` ranks that cannot divide the `count` experts of `layer`.
pub(crate) fn indivisible(ranks: usize, count: usize, layer: &str) -> EngineError {
    let why = format!(
        "expert_parallel.autoep_size is {ranks}, which does not divide the {} of {layer}; use a divisor of {count}",
        counted(count, "expert")
    );
    EngineError::ExpertParallel { why }
}

/// The ranks with which this rank shares experts.
pub(crate) struct ExpertRanks {
    /// The ranks that together hold all experts, in the order of the experts. They exchange rows.
    pub group: Arc<dyn Communicator>,
    /// The ranks that hold the same experts as this one.
    pub holders: Arc<dyn Communicator>,
}

impl ExpertRanks {
    /// Collective: divides the ranks of `comm` into groups of `size`, each of which holds all experts. Returns `None`
    /// if `size` is 1.
    ///
    /// # Errors
    /// A size that does not divide the number of ranks; a communicator without groups.
    pub fn new(comm: &dyn Communicator, size: usize) -> Result<Option<Self>> {
        if size == 1 {
            return Ok(None);
        }
        let mesh = RankMesh::new(comm.size(), &[(MeshAxis::Expert, size)])
            .map_err(|error| EngineError::ExpertParallel { why: format!("expert_parallel.autoep_size: {error}") })?;
        let group = comm.group(&mesh.groups(&[MeshAxis::Expert]))?;
        let holders = comm.group(&mesh.groups(&[MeshAxis::Data]))?;
        Ok(Some(Self { group, holders }))
    }
}
