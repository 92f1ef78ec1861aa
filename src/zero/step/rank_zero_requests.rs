//! Requests from rank 0 to all ranks in a vote, in the same message as the flag for overflow.

/// The requests from rank 0 in a step. After the vote, they are the same on all ranks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct RankZeroRequests {
    /// Whether, after the step, all ranks report their memory and times for the record of the run.
    pub report: bool,
    /// Whether the user has asked for a checkpoint.
    pub save: bool,
}

impl RankZeroRequests {
    const REPORT: u8 = 1;
    const SAVE: u8 = 2;

    /// Returns the requests as the bits of a small number.
    pub(super) fn to_bits(self) -> u8 {
        (u8::from(self.report) * Self::REPORT) | (u8::from(self.save) * Self::SAVE)
    }

    /// Returns the requests from the bits of a small number.
    pub(super) fn from_bits(bits: u8) -> Self {
        Self { report: bits & Self::REPORT != 0, save: bits & Self::SAVE != 0 }
    }

    /// Returns the requests that are in `self` or in `other`.
    #[must_use]
    pub(super) fn or(self, other: Self) -> Self {
        Self::from_bits(self.to_bits() | other.to_bits())
    }

    /// Returns a flag and the requests as one number of a message.
    pub(super) fn with_flag(self, flag: bool) -> f64 {
        f64::from(u8::from(flag) | (self.to_bits() << 1))
    }

    /// Returns the flag and the requests that [`with_flag`](Self::with_flag) has combined.
    pub(super) fn of_number(number: f64) -> (bool, Self) {
        let bits = number as u8;
        (bits & 1 != 0, Self::from_bits(bits >> 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flag_and_requests_survive_in_one_number() {
        for bits in 0..4 {
            let requests = RankZeroRequests::from_bits(bits);
            assert_eq!(requests.to_bits(), bits);
            for flag in [false, true] {
                assert_eq!(RankZeroRequests::of_number(requests.with_flag(flag)), (flag, requests));
            }
        }
        let both = RankZeroRequests { report: true, save: true };
        assert_eq!(RankZeroRequests { save: false, ..both }.or(RankZeroRequests { report: false, ..both }), both);
        assert_eq!(RankZeroRequests::default().with_flag(true), 1.0);
    }
}
