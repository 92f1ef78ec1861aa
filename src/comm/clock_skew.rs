//! The difference between the clocks of hosts.

/// The tolerated difference between a host's clock and the first host's, in seconds.
const MAX_SKEW_SECS: u64 = 30;

/// Returns the time of this host's clock, in seconds since the start of 1970.
#[doc(hidden)]
pub fn seconds() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Returns a warning about a host whose clock is `ahead` seconds ahead of the first host's (if negative, behind it), if
/// the difference is too large.
#[doc(hidden)]
pub fn warning(host: &str, ahead: i64) -> Option<String> {
    let side = if ahead < 0 { "behind" } else { "ahead of" };
    (ahead.unsigned_abs() > MAX_SKEW_SECS).then(|| {
        format!(
            "warning: the clock of host {host} is {} s {side} the first host's: the times of logs and checkpoints \
             cannot be compared; synchronize both clocks with a time server",
            ahead.unsigned_abs()
        )
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn clocks_that_are_far_apart_are_told() {
        insta::assert_snapshot!(warning("b", -125).unwrap(), @"warning: the clock of host b is 125 s behind the first host's: the times of logs and checkpoints cannot be compared; synchronize both clocks with a time server");
        assert!(warning("b", 31).unwrap().contains("31 s ahead of"));
        assert_eq!((warning("b", 30), warning("b", -30)), (None, None));
    }
}
