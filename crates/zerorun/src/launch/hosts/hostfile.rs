//! Parses the hostfile: one line `NAME slots=N` per host.
//!
//! Empty lines and lines that begin with `#` are ignored. Text after the number is also ignored, because MPI hostfiles
//! may contain more (`max_slots=8`). The order of lines is the order of hosts, and therefore of ranks.

use super::HostSlots;
use super::error::{HostsError, one_line};
use std::path::Path;

/// Parses the text of a hostfile. `path` is for messages.
pub(crate) fn parse(text: &str, path: &Path) -> Result<Vec<HostSlots>, HostsError> {
    let mut hosts: Vec<HostSlots> = Vec::new();
    // The line of each host.
    let mut lines = Vec::new();
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    for (at, content) in text.lines().map(str::trim).enumerate() {
        let line = at + 1;
        if content.is_empty() || content.starts_with('#') {
            continue;
        }
        let (name, count) =
            entry(content).ok_or_else(|| HostsError::BadEntry { path: path.into(), line, text: one_line(content) })?;
        if name.starts_with('-') {
            return Err(HostsError::OptionAsHost { path: path.into(), line, host: one_line(name) });
        }
        if let Some(earlier) = hosts.iter().position(|host| host.name == name) {
            let first = lines[earlier];
            return Err(HostsError::DuplicateHost { path: path.into(), line, host: one_line(name), first });
        }
        let slots = count.parse().ok().filter(|slots| *slots <= super::error::MAX_SLOTS).ok_or_else(|| {
            HostsError::TooManySlots { path: path.into(), line, host: one_line(name), slots: one_line(count) }
        })?;
        hosts.push(HostSlots::with_slots(name, slots));
        lines.push(line);
    }
    if hosts.is_empty() { Err(HostsError::NoEntry { path: path.into() }) } else { Ok(hosts) }
}

/// Returns the name at the beginning of a line, and the digits after `slots=`.
fn entry(line: &str) -> Option<(&str, &str)> {
    let (name, rest) = line.split_once(char::is_whitespace)?;
    let rest = rest.trim_start().strip_prefix("slots=")?;
    let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
    (end > 0).then(|| (name, &rest[..end]))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::recorded_cases;
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    fn read(text: &str) -> Result<Vec<HostSlots>, HostsError> {
        parse(text, Path::new("hosts.txt"))
    }

    fn refusal(text: &str) -> String {
        read(text).unwrap_err().to_string()
    }

    #[test]
    fn the_recorded_cases_hold() {
        let cases = recorded_cases::of_area("launcher-hostfile");
        for case in &cases {
            let hosts = read(case["input"]["text"].as_str().unwrap());
            let found = hosts.map(|hosts| {
                let pairs: Vec<Value> = hosts.iter().map(|host| json!([host.name, host.slots.len()])).collect();
                json!({"ok": true, "slots": pairs})
            });
            recorded_cases::check(case, found);
        }
        assert_eq!(cases.len(), 6);
    }

    #[test]
    fn what_follows_the_number_and_lines_without_an_entry_are_passed_over() {
        let text = "\u{feff}# ours\r\n\r\n\tb-1 \t slots=2 max_slots=8 # two\r\n   \n  # a-1 slots=9\n\
                    a-1 slots=0004\nc slots=0";
        let expected =
            [HostSlots::with_slots("b-1", 2), HostSlots::with_slots("a-1", 4), HostSlots::with_slots("c", 0)];
        assert_eq!(read(text).unwrap(), expected);
        // Names that a filter cannot express are still valid.
        assert_eq!(read("me@a slots=1\nfe80::1 slots=1").unwrap().len(), 2);
    }

    #[test]
    fn what_is_no_entry_is_refused() {
        for line in
            ["worker-0", "slots=2 worker-0", "worker-0 slots=x", "worker-0 slot=4", "worker-0slots=4", "a slots 4"]
        {
            assert!(matches!(read(line), Err(HostsError::BadEntry { line: 1, .. })), "{line}");
        }
    }

    #[test]
    fn errors_name_the_line() {
        insta::assert_snapshot!(refusal("# ours\na slots=2\nb slots=\n"), @"hosts.txt:3: `b slots=` is not a hostfile entry; write NAME slots=N, for example `worker-0 slots=4`");
        insta::assert_snapshot!(refusal("a slots=2\n\na slots=2"), @"hosts.txt:3: host `a` already has an entry on line 1; give each host one line with all its slots");
        insta::assert_snapshot!(refusal("-oProxyCommand=x slots=2"), @"hosts.txt:1: `-oProxyCommand=x` cannot be a host: programs would read it as an option; give the host's name without the dash");
        insta::assert_snapshot!(refusal("a slots=70000"), @"hosts.txt:1: host `a` has slots=70000; at most 65536 are allowed, usually one for each GPU");
        insta::assert_snapshot!(refusal("a slots=99999999999999999999999999999999999999999999999"), @"hosts.txt:1: host `a` has slots=9999999999999999999999999999999999999999...; at most 65536 are allowed, usually one for each GPU");
        insta::assert_snapshot!(refusal("\n# nothing\n"), @"hosts.txt lists no hosts; write a line NAME slots=N for each host, for example `worker-0 slots=4`");
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in "([a-c -]|slots=|[0-9#\n\t=é]){0,40}") {
            if let Ok(hosts) = read(&text) {
                prop_assert!(!hosts.is_empty());
            }
        }
    }
}
