//! The mesh of ranks: which ranks train on different data, or hold different blocks, experts, or parts of sequences
//! or tensors.
//!
//! ```text
//!   8 ranks, data 2 x pipeline 2 x tensor 2                coordinates of rank 5: data 1, pipeline 0, tensor 1
//!
//!               pipeline 0    pipeline 1
//!   data 0      0 1           2 3                          its group along tensor      4 5
//!   data 1      4 5           6 7                          its group along pipeline    5 7
//!                                                          its group along data        1 5
//! ```
//!
//! Every rank has one coordinate per axis. Ranks are numbered in the order of their coordinates; the coordinate along
//! the last axis changes fastest. Ranks that differ only in their coordinate along an axis form a group along that
//! axis. A collective along an axis runs among the ranks of each group.
//!
//! The mesh determines which rank computes what. [`ShardMesh`](super::ShardMesh) determines how the shards of a
//! parameter are distributed among the ranks of one group along the data axis.

use crate::util::counted;
use std::fmt;

/// The relation of the ranks along one axis of the mesh.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum MeshAxis {
    /// The ranks train their own copies of the model, and exchange the changes in their weights only after many steps
    /// (local steps).
    Island,
    /// The ranks train on different micro batches: data parallelism, under any ZeRO stage.
    Data,
    /// The ranks hold consecutive blocks of the model, and pass activations on: pipeline parallelism.
    Pipeline,
    /// The ranks hold parts of the same sequences.
    Sequence,
    /// The ranks hold different experts of a mixture.
    Expert,
    /// The ranks hold parts of the same weight matrices: tensor parallelism.
    Tensor,
}

impl MeshAxis {
    /// All axes in their usual order, the outermost first.
    pub const ALL: [Self; 6] = [Self::Island, Self::Data, Self::Pipeline, Self::Sequence, Self::Expert, Self::Tensor];

    /// Returns the axis's name, as used in messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Island => "island",
            Self::Data => "data",
            Self::Pipeline => "pipeline",
            Self::Sequence => "sequence",
            Self::Expert => "expert",
            Self::Tensor => "tensor",
        }
    }
}

impl fmt::Display for MeshAxis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The reason why ranks cannot form a mesh.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum MeshError {
    /// The length of an axis is 0.
    EmptyAxis(MeshAxis),
    /// An axis is given twice.
    RepeatedAxis(MeshAxis),
    /// The product of the lengths of the given axes does not divide the number of ranks or, if the data axis is among
    /// them, does not equal it; or there are no ranks.
    Indivisible {
        /// The number of ranks.
        world_size: usize,
        /// The product of the lengths; `None` if it exceeds `usize::MAX`.
        ranks: Option<usize>,
        /// Whether the data axis is among the axes.
        with_data: bool,
        /// The axes, in the form `pipeline 2 x tensor 3`.
        axes: String,
    },
}

impl fmt::Display for MeshError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::EmptyAxis(axis) => write!(f, "the {axis} axis has length 0; it must be at least 1"),
            Self::RepeatedAxis(axis) => write!(f, "the {axis} axis is given twice; give each axis once"),
            Self::Indivisible { world_size, ranks, with_data, axes } => {
                let needed = match (ranks, with_data) {
                    (None, _) => "more ranks than can be counted".to_string(),
                    (Some(ranks), true) => format!("exactly {}", counted(*ranks, "rank")),
                    (Some(ranks), false) => format!("a multiple of {}", counted(*ranks, "rank")),
                };
                let axes = if axes.is_empty() { "none" } else { axes };
                write!(
                    f,
                    "{} cannot be divided into groups of the configured sizes ({axes}), which need {needed}; start a \
                     different number of ranks, or change these sizes",
                    counted(*world_size, "rank"),
                )
            }
        }
    }
}

impl std::error::Error for MeshError {}

/// The arrangement of all ranks along six axes, most of which usually have length 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RankMesh {
    /// The axes from the outermost to the innermost.
    order: [MeshAxis; 6],
    /// The number of ranks along each axis, in the order of `MeshAxis::ALL`.
    lengths: [usize; 6],
}

impl RankMesh {
    /// Arranges all ranks along the data axis.
    ///
    /// # Panics
    /// Panics if `world_size` is 0.
    pub fn data(world_size: usize) -> Self {
        assert!(world_size > 0, "a job has at least one rank");
        let mut lengths = [1; 6];
        lengths[MeshAxis::Data as usize] = world_size;
        Self { order: MeshAxis::ALL, lengths }
    }

    /// Arranges `world_size` ranks along the given axes. The data axis takes the remaining ranks, unless its length is
    /// given too. The axes keep their usual order: islands outermost, tensor innermost.
    ///
    /// # Errors
    /// [`MeshError`] if an axis has length 0 or is given twice, or if the lengths do not match the number of ranks.
    ///
    /// ```
    /// use candle_zero::layout::{MeshAxis, RankMesh};
    ///
    /// let mesh = RankMesh::new(8, &[(MeshAxis::Pipeline, 2), (MeshAxis::Tensor, 2)])?;
    /// assert_eq!(mesh.len(MeshAxis::Data), 2);
    /// assert_eq!(mesh.group(5, &[MeshAxis::Pipeline]), [5, 7]);
    /// # Ok::<(), candle_zero::layout::MeshError>(())
    /// ```
    pub fn new(world_size: usize, axes: &[(MeshAxis, usize)]) -> Result<Self, MeshError> {
        let mut lengths = [0; 6];
        for (axis, len) in axes {
            match (len, lengths[*axis as usize]) {
                (0, _) => return Err(MeshError::EmptyAxis(*axis)),
                (len, 0) => lengths[*axis as usize] = *len,
                _ => return Err(MeshError::RepeatedAxis(*axis)),
            }
        }
        let product = axes.iter().try_fold(1usize, |product, (_, len)| product.checked_mul(*len));
        let data_is_given = lengths[MeshAxis::Data as usize] > 0;
        let fits = |ranks: usize| if data_is_given { ranks == world_size } else { world_size.is_multiple_of(ranks) };
        match product.filter(|ranks| world_size > 0 && fits(*ranks)) {
            None => {
                let text: Vec<String> = axes.iter().map(|(axis, len)| format!("{axis} {len}")).collect();
                let (ranks, axes) = (product, text.join(" x "));
                Err(MeshError::Indivisible { world_size, ranks, with_data: data_is_given, axes })
            }
            Some(ranks) => {
                lengths = lengths.map(|len| len.max(1));
                if !data_is_given {
                    lengths[MeshAxis::Data as usize] = world_size / ranks;
                }
                Ok(Self { order: MeshAxis::ALL, lengths })
            }
        }
    }

    /// Returns the same mesh with this axis outermost, so that its groups have the largest distance between ranks: the
    /// ranks of a host are consecutive, and the outermost axis is the one that extends from host to host.
    #[must_use]
    pub fn with_outermost(self, axis: MeshAxis) -> Self {
        let mut order = self.order;
        let index = order.iter().position(|other| *other == axis).expect("the order contains every axis");
        order[..=index].rotate_right(1);
        Self { order, ..self }
    }

    /// Returns the total number of ranks.
    pub fn world_size(self) -> usize {
        self.lengths.iter().product()
    }

    /// Returns the number of ranks along an axis.
    #[allow(clippy::len_without_is_empty, reason = "no axis is empty")]
    pub fn len(self, axis: MeshAxis) -> usize {
        self.lengths[axis as usize]
    }

    /// Returns the coordinate of a rank along an axis.
    pub fn coordinate(self, rank: usize, axis: MeshAxis) -> usize {
        rank / self.stride(axis) % self.len(axis)
    }

    /// Returns the rank that has coordinate `to` along `axis`, and the other coordinates of `rank`.
    ///
    /// # Panics
    /// Panics if `to` is not less than the length of the axis.
    pub fn with_coordinate(self, rank: usize, axis: MeshAxis, to: usize) -> usize {
        assert!(
            to < self.len(axis),
            "coordinate {to} is out of range: the length of the {axis} axis is {}",
            self.len(axis)
        );
        let stride = self.stride(axis);
        rank - self.coordinate(rank, axis) * stride + to * stride
    }

    /// Returns `rank` and the ranks that differ from it only in their coordinates along `axes`, in ascending order.
    pub fn group(self, rank: usize, axes: &[MeshAxis]) -> Vec<usize> {
        let others = || MeshAxis::ALL.into_iter().filter(|axis| !axes.contains(axis));
        let same = |other: usize| others().all(|axis| self.coordinate(other, axis) == self.coordinate(rank, axis));
        (0..self.world_size()).filter(|other| same(*other)).collect()
    }

    /// Returns all groups along `axes`, in the order of their first ranks. Every rank is in exactly one of them.
    pub fn groups(self, axes: &[MeshAxis]) -> Vec<Vec<usize>> {
        let groups = (0..self.world_size()).map(|rank| self.group(rank, axes));
        groups.enumerate().filter(|(rank, group)| group[0] == *rank).map(|(_, group)| group).collect()
    }

    /// Returns the distance between ranks that are neighbours along an axis.
    fn stride(self, axis: MeshAxis) -> usize {
        self.order.iter().rev().take_while(|inner| **inner != axis).map(|inner| self.len(*inner)).product()
    }
}

impl fmt::Display for RankMesh {
    /// Writes the axes that have more than one rank, the outermost first: `data 2 x pipeline 4`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let longer_axes: Vec<_> = self.order.iter().filter(|axis| self.len(**axis) > 1).collect();
        if longer_axes.is_empty() {
            return f.write_str("1 rank");
        }
        let text: Vec<String> = longer_axes.into_iter().map(|axis| format!("{axis} {}", self.len(*axis))).collect();
        f.write_str(&text.join(" x "))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use MeshAxis::{Data, Expert, Island, Pipeline, Sequence, Tensor};
    use proptest::prelude::*;

    #[test]
    fn eight_ranks_have_the_coordinates_and_groups_of_the_picture() {
        let mesh = RankMesh::new(8, &[(Pipeline, 2), (Tensor, 2)]).unwrap();
        assert_eq!([Data, Pipeline, Tensor, Expert].map(|axis| mesh.coordinate(5, axis)), [1, 0, 1, 0]);
        assert_eq!(mesh.group(5, &[Tensor]), [4, 5]);
        assert_eq!(mesh.group(5, &[Pipeline]), [5, 7]);
        assert_eq!(mesh.group(5, &[Data]), [1, 5]);
        assert_eq!(mesh.groups(&[Data, Tensor]), [vec![0, 1, 4, 5], vec![2, 3, 6, 7]]);
        assert_eq!(mesh.to_string(), "data 2 x pipeline 2 x tensor 2");
    }

    #[test]
    fn an_axis_that_goes_from_host_to_host_is_outermost() {
        let mesh = RankMesh::new(4, &[(Pipeline, 2)]).unwrap();
        assert_eq!(mesh.groups(&[Pipeline]), [[0, 1], [2, 3]]);
        let between_hosts = mesh.with_outermost(Pipeline);
        assert_eq!(between_hosts.groups(&[Pipeline]), [[0, 2], [1, 3]]);
        assert_eq!(between_hosts.groups(&[Data]), [[0, 1], [2, 3]]);
        assert_eq!(between_hosts.to_string(), "pipeline 2 x data 2");
        assert_eq!(between_hosts.with_outermost(Data).with_outermost(Island), mesh);
    }

    #[test]
    fn a_mesh_that_does_not_fit_the_ranks_is_refused() {
        let refused = |world_size, axes: &[_]| RankMesh::new(world_size, axes).unwrap_err().to_string();
        insta::assert_snapshot!(refused(6, &[(Pipeline, 4)]), @"6 ranks cannot be divided into groups of the configured sizes (pipeline 4), which need a multiple of 4 ranks; start a different number of ranks, or change these sizes");
        insta::assert_snapshot!(refused(8, &[(Data, 2), (Tensor, 2)]), @"8 ranks cannot be divided into groups of the configured sizes (data 2 x tensor 2), which need exactly 4 ranks; start a different number of ranks, or change these sizes");
        insta::assert_snapshot!(refused(8, &[(Pipeline, 0)]), @"the pipeline axis has length 0; it must be at least 1");
        insta::assert_snapshot!(refused(8, &[(Pipeline, 2), (Pipeline, 2)]), @"the pipeline axis is given twice; give each axis once");
        assert!(RankMesh::new(8, &[(Pipeline, usize::MAX), (Tensor, 3)]).is_err());
        assert!(RankMesh::new(0, &[]).is_err());
    }

    fn meshes() -> impl Strategy<Value = RankMesh> {
        let lengths = (1usize..3, 1usize..4, 1usize..4, 1usize..3, 1usize..3, 1usize..4);
        (lengths, 0usize..6, any::<bool>()).prop_map(
            |((island, data, pipeline, sequence, expert, tensor), axis, moved)| {
                let axes =
                    [(Island, island), (Pipeline, pipeline), (Sequence, sequence), (Expert, expert), (Tensor, tensor)];
                let mesh = RankMesh::new(island * data * pipeline * sequence * expert * tensor, &axes).unwrap();
                if moved { mesh.with_outermost(MeshAxis::ALL[axis]) } else { mesh }
            },
        )
    }

    proptest! {
        #[test]
        fn coordinates_tell_ranks_apart_and_lead_back_to_them(mesh in meshes()) {
            let mut seen = std::collections::BTreeSet::new();
            for rank in 0..mesh.world_size() {
                let coordinates = MeshAxis::ALL.map(|axis| mesh.coordinate(rank, axis));
                prop_assert!(seen.insert(coordinates));
                let back = MeshAxis::ALL.into_iter().fold(0, |rank_so_far, axis| {
                    mesh.with_coordinate(rank_so_far, axis, coordinates[axis as usize])
                });
                prop_assert_eq!(back, rank);
            }
        }

        #[test]
        fn groups_along_some_axes_divide_the_ranks_and_meet_groups_along_the_others_once(
            mesh in meshes(), chosen in proptest::collection::vec(any::<bool>(), 6),
        ) {
            let (chosen_axes, other_axes): (Vec<_>, Vec<_>) =
                MeshAxis::ALL.into_iter().partition(|axis| chosen[*axis as usize]);
            let groups = mesh.groups(&chosen_axes);
            let size: usize = chosen_axes.iter().map(|axis| mesh.len(*axis)).product();
            prop_assert!(groups.iter().all(|group| group.len() == size && group.is_sorted()));
            let mut all = groups.concat();
            all.sort_unstable();
            prop_assert_eq!(all, (0..mesh.world_size()).collect::<Vec<_>>());
            for rank in 0..mesh.world_size() {
                let other = mesh.group(rank, &other_axes);
                let group = mesh.group(rank, &chosen_axes);
                let common: Vec<_> = group.iter().filter(|member| other.contains(member)).copied().collect();
                prop_assert_eq!(common, [rank]);
            }
        }

        #[test]
        fn the_innermost_axis_has_neighboring_ranks_and_the_outermost_the_most_distant(mesh in meshes()) {
            let along = |axis: MeshAxis| mesh.group(0, &[axis]);
            prop_assert_eq!(along(mesh.order[5]), (0..mesh.len(mesh.order[5])).collect::<Vec<_>>());
            let outermost = along(mesh.order[0]);
            let stride = mesh.world_size() / outermost.len();
            prop_assert_eq!(outermost, (0..mesh.len(mesh.order[0])).map(|i| i * stride).collect::<Vec<_>>());
        }
    }
}
