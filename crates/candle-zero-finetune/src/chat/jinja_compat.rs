//! Python behaviour that chat templates expect: `tojson` as transformers defines it, and values as `str` writes them.

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Error, ErrorKind, Output, State};
use std::fmt::Write as _;

/// The maximum depth of nested lists and objects. A list that contains itself is infinitely deep.
const MAX_DEPTH: usize = 256;

/// The maximum length in bytes of a value as text. Without this limit, a small value that contains the same part again
/// and again could become arbitrarily long.
const MAX_TEXT_BYTES: usize = 16 << 20;

/// Returns an error if a value exceeds [`MAX_DEPTH`] or [`MAX_TEXT_BYTES`].
fn check(depth: usize, text: &str) -> Result<(), Error> {
    if depth > MAX_DEPTH {
        let reason = format!("a value with more than {MAX_DEPTH} nested lists or objects");
        return Err(Error::new(ErrorKind::InvalidOperation, reason));
    }
    if text.len() > MAX_TEXT_BYTES {
        return Err(Error::new(
            ErrorKind::OutOfFuel,
            format!("a value with more than {} MiB of text", MAX_TEXT_BYTES >> 20),
        ));
    }
    Ok(())
}

/// The arguments of `json.dumps`.
struct JsonDumpFormat {
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
    ensure_ascii: bool,
    sort_keys: bool,
}

/// Implements the `tojson` filter of transformers: `json.dumps(x, ensure_ascii=False)`, with its arguments.
pub(super) fn tojson(value: &Value, arguments: Kwargs) -> Result<String, Error> {
    let indent: Option<Value> = arguments.get("indent")?;
    let indent = indent.filter(|indent| !indent.is_none()).map(|indent| match indent.as_str() {
        Some(text) => text.to_string(),
        None => " ".repeat(usize::try_from(indent).unwrap_or(0).min(100)),
    });
    let separators: Option<Value> = arguments.get("separators")?;
    let separator =
        |n: usize| -> Option<String> { Some(separators.as_ref()?.get_item_by_index(n).ok()?.as_str()?.to_string()) };
    let json = JsonDumpFormat {
        item_separator: separator(0).unwrap_or_else(|| if indent.is_some() { "," } else { ", " }.into()),
        key_separator: separator(1).unwrap_or_else(|| ": ".into()),
        indent,
        ensure_ascii: arguments.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sort_keys: arguments.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
    };
    arguments.assert_all_used()?;
    let mut text = String::new();
    json.write(value, 0, &mut text)?;
    Ok(text)
}

/// Returns a value as `json.dumps(x, ensure_ascii=False)` writes it.
pub(super) fn json_text(value: &Value) -> Result<String, Error> {
    tojson(value, Kwargs::from_iter(std::iter::empty::<(String, Value)>()))
}

impl JsonDumpFormat {
    fn write(&self, value: &Value, depth: usize, text: &mut String) -> Result<(), Error> {
        check(depth, text)?;
        match value.kind() {
            ValueKind::None => text.push_str("null"),
            ValueKind::Bool => text.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => text.push_str(&number(value, ["Infinity", "-Infinity", "NaN"])),
            ValueKind::String => self.write_string(value.as_str().unwrap_or_default(), text),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                let write = |item: &Value, text: &mut String| self.write(item, depth + 1, text);
                self.write_all(&items, ['[', ']'], depth, text, write)?;
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sort_keys {
                    keys.sort_by_key(ToString::to_string);
                }
                let write = |key: &Value, text: &mut String| {
                    self.write_string(&checked_str(key)?, text);
                    text.push_str(&self.key_separator);
                    self.write(&value.get_item(key)?, depth + 1, text)
                };
                self.write_all(&keys, ['{', '}'], depth, text, write)?;
            }
            kind => {
                let reason = format!("{kind} is not JSON serializable");
                return Err(Error::new(ErrorKind::InvalidOperation, reason));
            }
        }
        Ok(())
    }

    fn write_all(
        &self,
        items: &[Value],
        brackets: [char; 2],
        depth: usize,
        text: &mut String,
        write: impl Fn(&Value, &mut String) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let line = |depth: usize, text: &mut String| {
            if let Some(indent) = &self.indent {
                text.push('\n');
                text.push_str(&indent.repeat(depth));
            }
        };
        text.push(brackets[0]);
        for (i, item) in items.iter().enumerate() {
            text.push_str(if i > 0 { &self.item_separator } else { "" });
            line(depth + 1, text);
            write(item, text)?;
        }
        if !items.is_empty() {
            line(depth, text);
        }
        text.push(brackets[1]);
        Ok(())
    }

    fn write_string(&self, string: &str, text: &mut String) {
        text.push('"');
        for c in string.chars() {
            match c {
                '"' => text.push_str("\\\""),
                '\\' => text.push_str("\\\\"),
                '\n' => text.push_str("\\n"),
                '\r' => text.push_str("\\r"),
                '\t' => text.push_str("\\t"),
                '\u{8}' => text.push_str("\\b"),
                '\u{c}' => text.push_str("\\f"),
                c if c < ' ' || self.ensure_ascii && !(' '..='\u{7e}').contains(&c) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        _ = write!(text, "\\u{unit:04x}");
                    }
                }
                c => text.push(c),
            }
        }
        text.push('"');
    }
}

/// Returns a number as Python writes it. `special` contains the texts for infinity, minus infinity and NaN.
fn number(value: &Value, special: [&str; 3]) -> String {
    if value.is_integer() {
        return value.to_string();
    }
    let Ok(x) = f64::try_from(value.clone()) else { return value.to_string() };
    match x {
        x if x.is_nan() => special[2].into(),
        f64::INFINITY => special[0].into(),
        f64::NEG_INFINITY => special[1].into(),
        x => float(x),
    }
}

/// Returns `repr` of a finite Python float: the shortest digits that represent it exactly, with an exponent if its
/// magnitude is at least 1e16, or is below 1e-4 and not 0.
fn float(x: f64) -> String {
    let scientific = format!("{x:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    match exponent.parse::<i32>().unwrap_or(0) {
        -4..16 => format!("{x:?}"),
        exponent => format!("{digits}e{}{:02}", if exponent < 0 { '-' } else { '+' }, exponent.abs()),
    }
}

/// Returns Python's `str(value)`, or an empty text for a value that exceeds the limits.
pub(crate) fn python_str(value: &Value) -> String {
    // Only a value that exceeds the limits causes an error.
    checked_str(value).unwrap_or_default()
}

/// Returns Python's `str(value)`, or an error for a value that exceeds the limits.
pub(super) fn checked_str(value: &Value) -> Result<String, Error> {
    match value.as_str() {
        Some(text) => Ok(text.into()),
        None => {
            let mut text = String::new();
            repr(value, 0, &mut text)?;
            Ok(text)
        }
    }
}

/// Appends Python's `repr(value)` to `text`.
fn repr(value: &Value, depth: usize, text: &mut String) -> Result<(), Error> {
    check(depth, text)?;
    type WriteItem<'a> = &'a dyn Fn(&Value, &mut String) -> Result<(), Error>;
    let sequence = |text: &mut String, brackets: [char; 2], write: WriteItem<'_>| {
        text.push(brackets[0]);
        for (i, item) in value.try_iter().into_iter().flatten().enumerate() {
            text.push_str(if i > 0 { ", " } else { "" });
            write(&item, text)?;
        }
        text.push(brackets[1]);
        Ok(())
    };
    match value.kind() {
        ValueKind::Undefined => {}
        ValueKind::None => text.push_str("None"),
        ValueKind::Bool => text.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number => text.push_str(&number(value, ["inf", "-inf", "nan"])),
        ValueKind::String => repr_string(value.as_str().unwrap_or_default(), text),
        ValueKind::Seq | ValueKind::Iterable => {
            return sequence(text, ['[', ']'], &|item, text| repr(item, depth + 1, text));
        }
        ValueKind::Map => {
            return sequence(text, ['{', '}'], &|key, text| {
                repr(key, depth + 1, text)?;
                text.push_str(": ");
                repr(&value.get_item(key).unwrap_or_default(), depth + 1, text)
            });
        }
        _ => _ = write!(text, "{value}"),
    }
    Ok(())
}

/// Appends `repr` of a string: in single quotes, unless it contains single quotes and no double quotes.
fn repr_string(string: &str, text: &mut String) {
    let quote = if string.contains('\'') && !string.contains('"') { '"' } else { '\'' };
    text.push(quote);
    for c in string.chars() {
        match c {
            '\\' => text.push_str("\\\\"),
            '\n' => text.push_str("\\n"),
            '\r' => text.push_str("\\r"),
            '\t' => text.push_str("\\t"),
            c if c == quote => text.extend(['\\', c]),
            c if c.is_control() => _ = write!(text, "\\x{:02x}", u32::from(c)),
            c => text.push(c),
        }
    }
    text.push(quote);
}

/// Writes `{{ value }}` as Python's Jinja does: nothing for undefined values, and `None`, `True`, `1e-05`.
pub(super) fn write_value(out: &mut Output<'_>, _: &mut State<'_, '_>, value: &Value) -> Result<(), Error> {
    match value.as_str() {
        Some(text) => out.write_str(text)?,
        None => out.write_str(&checked_str(value)?)?,
    }
    Ok(())
}
