//! Generates docs/config.md from the table of keys. A test compares the file with the table, or regenerates the file.

use super::keys::{ConfigKey, ConfigSection, ConfigValueKind, KeyStatus, NO_DEFAULT, sections};
use super::value_conversion;
use std::fmt::Write;

const HEAD: &str = "\
# Configuration keys

Generated from the table of keys in the code; `UPDATE_DOCS=1 cargo test --release --lib config::reference` regenerates it.

A configuration is a DeepSpeed JSON file (0.19.8), read as Hjson: comments (`#`, `//`, `/* */`), unquoted keys and
strings, line breaks instead of commas, and a file without its outer braces are allowed.
In any section whose contents are checked, an unknown key is an error that shows its line, its column and the nearest known key.
At the top level, a key that starts with `_`, `//` or `comment` is a comment. All sections accept 1 for true. *Lenient* marks the
sections that DeepSpeed reads with pydantic, which converts some values; where the contents of such a section are checked, the
same conversions apply here (`\"true\"` is accepted for true, and `\"3\"` for 3). `\"auto\"` is replaced by a value from the run,
by a batch size derived from the other batch keys, or by the default; the value is printed once. The values from the run
(`RunValues`) are the micro batch, accumulation, lr and warm-up (1, 1, 5e-5 and one step unless the script sets them), the number of
steps of the schedule, and bucket sizes and a threshold that follow from the hidden size, if the script sets it.

| status | meaning |
| --- | --- |
| honoured | has the same effect as in DeepSpeed, or is specific to candle-zero |
| noted | a value other than the default is accepted and noted once; it has no effect, or only the stated one |
| refused | a value other than the default (or above the stated number) is an error, because ignoring it would change training; in a section that is switched off, it is accepted |
| removed | its presence is an error, as in DeepSpeed 0.19.8 |
| removed unless off | its presence is an error, but `enabled` false is accepted and noted once |
| translated | a deprecated key, treated as its successor, and noted once |
";

/// Returns the reference of all keys as Markdown, the contents of docs/config.md.
fn reference_markdown() -> String {
    let mut text = HEAD.to_string();
    let count_of = |word: &str| words().filter(|status_word| *status_word == word).count();
    // Writing to a String cannot fail.
    let _ = writeln!(
        text,
        "\n{} keys are honoured, {} are noted (the reason is given with the key or with its section), {} are \
         refused, {} are removed and {} are translated.",
        count_of("honoured"),
        count_of("noted"),
        count_of("refused"),
        count_of("removed") + count_of("removed unless off"),
        count_of("translated"),
    );
    for section in sections() {
        heading(&mut text, section);
        text.push_str("\n| key | type | default | meaning | status |\n| --- | --- | --- | --- | --- |\n");
        for key in section.keys {
            row(&mut text, section, key);
        }
    }
    text
}

/// Returns the status word of each key, but skips keys whose value is a section without its own status.
fn words() -> impl Iterator<Item = &'static str> {
    let keys = sections().flat_map(|section| section.keys.iter().map(move |key| (section, key)));
    keys.filter(|(_, key)| key.kind != ConfigValueKind::Section || key.status != KeyStatus::Inherited)
        .map(|(section, key)| of_key(section, key).0)
}

/// Returns the status word of a key, and the reason.
fn of_key(section: &ConfigSection, key: &ConfigKey) -> (&'static str, Option<String>) {
    match key.status {
        KeyStatus::Inherited if key.kind == ConfigValueKind::Section => ("see its section", None),
        KeyStatus::Inherited => (status(section.status).0, None),
        key_status => status(key_status),
    }
}

fn heading(text: &mut String, section: &ConfigSection) {
    let name = if section.path.is_empty() { "Top level".to_string() } else { format!("`{}`", section.path) };
    let types = if section.types.is_empty() { String::new() } else { format!(" of {}", section.types.join(", ")) };
    // Writing to a String cannot fail.
    let _ = write!(text, "\n## {name}{types}\n");
    let mut facts = Vec::new();
    if section.lenient {
        facts.push("Lenient.".to_string());
    }
    if !section.checked {
        facts.push("The section's contents are not checked, because they cannot change training.".to_string());
    }
    if section.status != KeyStatus::Honoured {
        let when = section.switch.map(|switch| format!(" if `{switch}` is true")).unwrap_or_default();
        let (word, why) = status(section.status);
        facts.push(format!("The section is {word}{when}{}.", why.map(|why| format!(": {why}")).unwrap_or_default()));
    }
    if !facts.is_empty() {
        let _ = write!(text, "\n{}\n", facts.join(" "));
    }
}

fn row(text: &mut String, section: &ConfigSection, key: &ConfigKey) {
    let mut name = format!("`{}`", key.name);
    for alias in key.aliases {
        let _ = write!(name, " or `{alias}`");
    }
    let kind = if key.kind == ConfigValueKind::Section {
        "object".to_string()
    } else {
        value_conversion::describe_kind(key.kind)
    };
    let default = match key.default {
        NO_DEFAULT => "none".to_string(),
        // The class paths are too long for a table.
        long if long.len() > 60 => "DeepSpeed's list".to_string(),
        short => format!("`{short}`"),
    };
    let (word, why) = of_key(section, key);
    let why = why.map(|why| format!(": {why}")).unwrap_or_default();
    let kind = kind.replace('|', "\\|");
    let _ = writeln!(text, "| {name} | {kind} | {default} | {} | {word}{why} |", key.meaning);
}

/// Returns the word for a status, and the reason.
fn status(status: KeyStatus) -> (&'static str, Option<String>) {
    match status {
        KeyStatus::Honoured => ("honoured", None),
        // The section's switch is refused, or another key of the section decides.
        KeyStatus::Inherited => ("noted", None),
        KeyStatus::InRefusedSection => ("refused", Some("its section is refused".into())),
        KeyStatus::ImpliesEveryUnit(why) => ("noted", Some(format!("treated as every_unit; {why}"))),
        KeyStatus::NoEffect(why) => ("noted", Some(why.into())),
        KeyStatus::Refused(why) => ("refused", Some(why.into())),
        KeyStatus::RefusedAbove1(why) => ("refused", Some(format!("a value above 1, because {why}"))),
        KeyStatus::Removed(why) => ("removed", Some(why.into())),
        KeyStatus::RemovedUnlessOff(why) => ("removed unless off", Some(why.into())),
        KeyStatus::Moved(to) => ("translated", Some(format!("to {to}"))),
    }
}

#[test]
#[allow(clippy::unwrap_used)]
fn the_reference_of_keys_is_the_table_of_keys() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/config.md");
    let expected = reference_markdown();
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(path, &expected).unwrap();
    }
    let found = std::fs::read_to_string(path).unwrap_or_default();
    assert!(
        found == expected,
        "docs/config.md is out of date; run UPDATE_DOCS=1 cargo test --release --lib config::reference"
    );
}
