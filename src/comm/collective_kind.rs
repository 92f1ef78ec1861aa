//! The kinds of collectives.

/// The kind of a collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize)]
#[serde(rename_all = "snake_case")]
#[repr(u32)]
#[non_exhaustive]
pub enum CollectiveKind {
    /// A sum over ranks, with the complete result on every rank.
    AllReduce = 1,
    /// A sum over ranks, with one part of the result on each rank.
    ReduceScatter = 2,
    /// The parts of all ranks, concatenated on every rank.
    AllGather = 3,
    /// A few numbers from every rank: votes, norms, metrics. An element is 8 bytes long.
    Control = 4,
    /// A wait until all ranks have arrived.
    Barrier = 5,
    /// A message to another rank.
    Send = 6,
    /// A message from another rank.
    Receive = 7,
}

impl CollectiveKind {
    /// All kinds.
    pub const ALL: [Self; 7] = [
        Self::AllReduce,
        Self::ReduceScatter,
        Self::AllGather,
        Self::Control,
        Self::Barrier,
        Self::Send,
        Self::Receive,
    ];

    /// Returns the number of elements of a control message: its 8-byte numbers.
    pub(super) fn control_elements(message: &[u8]) -> usize {
        message.len().div_ceil(8)
    }

    /// Returns the name used in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all_reduce",
            Self::ReduceScatter => "reduce_scatter",
            Self::AllGather => "all_gather",
            Self::Control => "control",
            Self::Barrier => "barrier",
            Self::Send => "send",
            Self::Receive => "receive",
        }
    }
}
