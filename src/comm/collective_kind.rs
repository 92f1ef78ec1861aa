//! The kinds of collectives.

/// Kind of collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize)]
#[serde(rename_all = "snake_case")]
#[repr(u32)]
pub enum CollectiveKind {
    /// Sum over ranks, whole result on every rank.
    AllReduce = 1,
    /// Sum over ranks, one part of the result per rank.
    ReduceScatter = 2,
    /// Parts of all ranks, joined on every rank.
    AllGather = 3,
    /// A few numbers of every rank: votes, norms, metrics. Counted in elements of 8 bytes.
    Control = 4,
    /// Nothing but waiting for each other.
    Barrier = 5,
}

impl CollectiveKind {
    /// Every kind.
    pub const ALL: [Self; 5] = [Self::AllReduce, Self::ReduceScatter, Self::AllGather, Self::Control, Self::Barrier];

    /// Elements of a control message: its numbers of 8 bytes.
    pub(super) fn words(message: &[u8]) -> usize {
        message.len().div_ceil(8)
    }

    /// Name as in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all_reduce",
            Self::ReduceScatter => "reduce_scatter",
            Self::AllGather => "all_gather",
            Self::Control => "control",
            Self::Barrier => "barrier",
        }
    }
}
