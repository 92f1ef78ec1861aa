//! Times of records and file names: seconds since 1970, and their text in UTC.

use std::time::{SystemTime, UNIX_EPOCH};

const DAY: u64 = 86_400;

/// Returns the current time in seconds since 1970, rounded down to a whole number of milliseconds.
pub(crate) fn now() -> f64 {
    let elapsed = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    elapsed.as_millis() as f64 / 1e3
}

/// Returns the year, month, day, hour, minute and second of a time in UTC.
fn parts(seconds: f64) -> [u64; 6] {
    // Times after the year 9999 are set to its last second, because a damaged record may contain any number.
    let seconds = seconds.clamp(0.0, 253_402_300_799.0) as u64;
    let (days, rest) = (seconds / DAY, seconds % DAY);
    // This is the algorithm of Howard Hinnant's `civil_from_days`, with years that begin in March.
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    [year, month, day, rest / 3600, rest % 3600 / 60, rest % 60]
}

/// Returns a time, in seconds since 1970, as `2026-01-31 23:59:59`, in UTC.
pub fn utc(seconds: f64) -> String {
    let [year, month, day, hour, minute, second] = parts(seconds);
    format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02}")
}

/// Returns a time as `20260131-235959`, in UTC, for names of folders.
pub(crate) fn stamp(seconds: f64) -> String {
    let [year, month, day, hour, minute, second] = parts(seconds);
    format!("{year:04}{month:02}{day:02}-{hour:02}{minute:02}{second:02}")
}

/// Parses `2026-01-31`, `2026-01-31 23:59`, or `2026-01-31T23:59:59Z` as a time in UTC, in seconds since 1970.
pub fn parse_utc(text: &str) -> Option<f64> {
    let text = text.strip_suffix('Z').unwrap_or(text);
    let (date, time) = text.split_once(['T', ' ']).unwrap_or((text, "00:00"));
    let numbers = |text: &str, by: char| -> Option<Vec<u64>> {
        let digits = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit()).then(|| part.parse().ok()).flatten();
        text.split(by).map(digits).collect()
    };
    let [year, month, day] = numbers(date, '-')?[..] else { return None };
    let (hour, minute, second) = match numbers(time, ':')?[..] {
        [hour, minute] => (hour, minute, 0),
        [hour, minute, second] => (hour, minute, second),
        _ => return None,
    };
    if !(1970..=9999).contains(&year) || hour > 23 || minute > 59 || second > 59 {
        return None;
    }
    let is_leap = |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let february = if is_leap(year) { 29 } else { 28 };
    let months = [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let days_in_month = months.get(usize::try_from(month.checked_sub(1)?).ok()?)?;
    if day < 1 || day > *days_in_month {
        return None;
    }
    let days: u64 = (1970..year).map(|year| if is_leap(year) { 366 } else { 365 }).sum::<u64>()
        + months.iter().take(month as usize - 1).sum::<u64>()
        + day
        - 1;
    Some((days * DAY + hour * 3600 + minute * 60 + second) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_written_and_read_back() {
        for (seconds, text) in [
            (0.0, "1970-01-01 00:00:00"),
            (951_782_400.0, "2000-02-29 00:00:00"),
            (1_764_197_418.5, "2025-11-26 22:50:18"),
            (4_107_542_399.0, "2100-02-28 23:59:59"),
        ] {
            assert_eq!(utc(seconds), text);
            assert_eq!(parse_utc(text), Some(seconds.floor()));
        }
        for day in (0..60_000).step_by(13) {
            let seconds = f64::from(day) * DAY as f64;
            assert_eq!(parse_utc(&utc(seconds)[..10]), Some(seconds));
        }
        assert_eq!(stamp(951_782_461.0), "20000229-000101");
        assert_eq!(utc(f64::MAX), "9999-12-31 23:59:59");
        assert_eq!(utc(f64::NAN), "1970-01-01 00:00:00");
    }

    #[test]
    fn text_that_is_no_time_is_not_read() {
        for text in ["", "2026", "2026-13-01", "2026-02-29", "2026-01-00", "2026-01-01T24:00", "2026-01-01 1", "+1-1-1"]
        {
            assert_eq!(parse_utc(text), None, "{text}");
        }
        assert_eq!(parse_utc("2026-01-02T03:04:05Z"), Some(1_767_323_045.0));
    }
}
