//! `strftime_now` of chat templates: the date in UTC, with the directives that templates use.

/// The date and time of a moment in UTC.
struct DateTime {
    year: i64,
    month: usize,
    day: i64,
    /// The day of the year, counted from 1.
    day_of_year: i64,
    /// The day of the week, counted from 0 (Sunday).
    weekday: usize,
    hour: u64,
    minute: u64,
    second: u64,
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

impl DateTime {
    /// Converts seconds since 1970 (H. Hinnant, "chrono-compatible low-level date algorithms").
    fn new(seconds: u64) -> Self {
        let (days, second_of_day) = ((seconds / 86_400) as i64, seconds % 86_400);
        let shifted = days + 719_468;
        let era = shifted.div_euclid(146_097);
        let day_of_era = shifted.rem_euclid(146_097);
        let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        // In this algorithm, years begin in March.
        let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let from_march = (5 * day_of_year + 2) / 153;
        let day = day_of_year - (153 * from_march + 2) / 5 + 1;
        let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
        let year = year_of_era + era * 400 + i64::from(month <= 2);
        let leap = i64::from(year % 4 == 0 && (year % 100 != 0 || year % 400 == 0));
        let day_of_year = if month <= 2 { day_of_year - 305 } else { day_of_year + 60 + leap };
        Self {
            year,
            month: month as usize,
            day,
            day_of_year,
            weekday: ((days + 4) % 7) as usize,
            hour: second_of_day / 3600,
            minute: second_of_day / 60 % 60,
            second: second_of_day % 60,
        }
    }

    /// Returns the text of directive `%c`, or `None` if it is unknown.
    fn directive(&self, c: char) -> Option<String> {
        let twelve_hour = |hour: u64| if hour.is_multiple_of(12) { 12 } else { hour % 12 };
        Some(match c {
            'Y' => format!("{}", self.year),
            'y' => format!("{:02}", self.year.rem_euclid(100)),
            'm' => format!("{:02}", self.month),
            'd' => format!("{:02}", self.day),
            'e' => format!("{:2}", self.day),
            'j' => format!("{:03}", self.day_of_year),
            'B' => MONTHS[self.month - 1].into(),
            'b' | 'h' => MONTHS[self.month - 1][..3].into(),
            'A' => DAYS[self.weekday].into(),
            'a' => DAYS[self.weekday][..3].into(),
            'H' => format!("{:02}", self.hour),
            'I' => format!("{:02}", twelve_hour(self.hour)),
            'M' => format!("{:02}", self.minute),
            'S' => format!("{:02}", self.second),
            'p' => if self.hour < 12 { "AM" } else { "PM" }.into(),
            'F' => format!("{}-{:02}-{:02}", self.year, self.month, self.day),
            'T' => format!("{:02}:{:02}:{:02}", self.hour, self.minute, self.second),
            '%' => "%".into(),
            _ => return None,
        })
    }
}

/// Formats the time `seconds` after the start of 1970 in UTC as Python's strftime does. `%-d` is `%d` without leading
/// zeros or blanks. Unknown directives are left unchanged.
pub(super) fn strftime(format: &str, seconds: u64) -> String {
    let time = DateTime::new(seconds);
    let (mut text, mut rest) = (String::new(), format.chars());
    while let Some(c) = rest.next() {
        if c != '%' {
            text.push(c);
            continue;
        }
        let after = rest.as_str();
        let (unpadded, name) = match after.strip_prefix('-') {
            Some(after) => (true, after.chars().next()),
            None => (false, after.chars().next()),
        };
        match name.and_then(|name| time.directive(name)) {
            None => text.push('%'),
            Some(value) => {
                let trimmed = value.trim_start_matches(['0', ' ']);
                text.push_str(if unpadded && !trimmed.is_empty() { trimmed } else { &value });
                rest.nth(usize::from(unpadded));
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_python() {
        // datetime.fromtimestamp(seconds, UTC).strftime(format)
        let all = "%Y-%m-%d %y %e %j %B %b %A %a %H %I %M %S %p %% %-d %Q";
        assert_eq!(strftime(all, 0), "1970-01-01 70  1 001 January Jan Thursday Thu 00 12 00 00 AM % 1 %Q");
        assert_eq!(
            strftime(all, 1_709_164_799),
            "2024-02-28 24 28 059 February Feb Wednesday Wed 23 11 59 59 PM % 28 %Q"
        );
        assert_eq!(strftime("%d %b %Y, day %j", 1_709_164_800), "29 Feb 2024, day 060");
        assert_eq!(strftime("%d %b %Y, day %j", 1_735_689_599), "31 Dec 2024, day 366");
        assert_eq!(strftime("%d %b %Y, day %j", 4_107_542_400), "01 Mar 2100, day 060");
        assert_eq!(strftime("ends in %", 0), "ends in %");
    }
}
