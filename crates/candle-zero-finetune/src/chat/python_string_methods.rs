//! Python string methods that chat templates call and that differ from minijinja's: in the characters that count as
//! white space, in the line endings that they recognize, and in the limits on their cost.

use minijinja::value::{Kwargs, Value, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State};
use minijinja_contrib::pycompat;

/// The maximum number of digits of a number in a format, such as a width or a precision.
const MAX_DIGITS: usize = 5;

/// Returns whether Python's `str.isspace` holds for a character: Unicode white space, and the separators U+001C to
/// U+001F.
pub(super) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// Returns whether Python's `str.splitlines` ends a line at a character.
fn ends_line(c: char) -> bool {
    matches!(c, '\n'..='\r' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}')
}

/// Implements the filter `trim` as Python's `str.strip`.
pub(crate) fn trim(state: &State<'_, '_>, value: &Value, chars: Option<&str>) -> Result<String, Error> {
    let text = match value.as_str() {
        Some(text) => text.into(),
        None if value.is_undefined() => String::new(),
        None => super::jinja_compat::checked_str(value)?,
    };
    charge(state, text.len())?;
    Ok(strip(&text, chars, [true, true]).into())
}

/// Calls a method that minijinja itself does not have.
pub(super) fn unknown_method(
    state: &mut State<'_, '_>,
    value: &Value,
    method: &str,
    arguments: &[Value],
) -> Result<Value, Error> {
    let Some(text) = value.as_str() else {
        if value.kind() == ValueKind::Seq {
            charge(state, value.len().unwrap_or(0).saturating_mul(32))?;
        }
        return pycompat::unknown_method_callback(state, value, method, arguments);
    };
    charge(state, text.len())?;
    match method {
        "strip" | "lstrip" | "rstrip" => {
            let (chars,): (Option<&str>,) = from_args(arguments)?;
            Ok(Value::from(strip(text, chars, [method != "rstrip", method != "lstrip"])))
        }
        "isspace" => {
            let () = from_args(arguments)?;
            Ok(Value::from(!text.is_empty() && text.chars().all(is_space)))
        }
        "split" | "rsplit" => {
            let (positional, named): (&[Value], Kwargs) = from_args(arguments)?;
            let argument = |n: usize, name: &str| match positional.get(n) {
                Some(value) => Ok(Some(value.clone())),
                None => named.get::<Option<Value>>(name),
            };
            let separator = argument(0, "sep")?.filter(|value| !value.is_none());
            let max_splits = argument(1, "maxsplit")?.map(i64::try_from).transpose()?;
            named.assert_all_used()?;
            let max_splits = max_splits.and_then(|count| usize::try_from(count).ok()).unwrap_or(usize::MAX);
            let separator = separator.as_ref().map(|value| {
                value
                    .as_str()
                    .ok_or_else(|| invalid(format!("the separator of {method} is {}, not a string", value.kind())))
            });
            split(state, text, separator.transpose()?, max_splits, method == "rsplit")
        }
        "splitlines" => {
            let (keepends,): (Option<bool>,) = from_args(arguments)?;
            lines(state, text, keepends.unwrap_or(false))
        }
        "replace" => {
            let (old, new, count): (&str, &str, Option<i64>) = from_args(arguments)?;
            let max_count = count.and_then(|count| usize::try_from(count).ok()).unwrap_or(usize::MAX);
            let found = text.matches(old).count().min(max_count);
            charge(state, text.len().saturating_add(found.saturating_mul(new.len())))?;
            Ok(Value::from(text.replacen(old, new, max_count)))
        }
        "join" => {
            let (values,): (&Value,) = from_args(arguments)?;
            let mut joined = String::new();
            for (i, value) in values.try_iter()?.enumerate() {
                let item =
                    value.as_str().map_or_else(|| super::jinja_compat::checked_str(&value), |text| Ok(text.into()))?;
                charge(state, item.len().saturating_add(text.len()).saturating_add(32))?;
                joined.push_str(if i > 0 { text } else { "" });
                joined.push_str(&item);
            }
            Ok(Value::from(joined))
        }
        "format" => {
            check_format(text)?;
            charge(state, arguments.iter().map(|value| value.len().unwrap_or(0)).sum())?;
            pycompat::unknown_method_callback(state, value, method, arguments)
        }
        _ => pycompat::unknown_method_callback(state, value, method, arguments),
    }
}

/// Charges fuel for this number of bytes.
fn charge(state: &State<'_, '_>, bytes: usize) -> Result<(), Error> {
    state.consume_fuel(bytes as u64 / 64)
}

fn invalid(reason: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, reason.into())
}

/// Returns `text` without these characters, or without white space, at its start, its end, or both.
fn strip<'a>(text: &'a str, chars: Option<&str>, [start, end]: [bool; 2]) -> &'a str {
    let is_stripped = |c: char| chars.map_or_else(|| is_space(c), |chars| chars.contains(c));
    let text = if start { text.trim_start_matches(is_stripped) } else { text };
    if end { text.trim_end_matches(is_stripped) } else { text }
}

/// Implements Python's `str.split` and `str.rsplit`.
fn split(
    state: &State<'_, '_>,
    text: &str,
    separator: Option<&str>,
    max_splits: usize,
    from_end: bool,
) -> Result<Value, Error> {
    let mut parts: Vec<&str> = vec![];
    let push = |parts: &mut Vec<_>, part| {
        parts.push(part);
        charge(state, 64)
    };
    match (separator, from_end) {
        (Some(""), _) => return Err(invalid("empty separator")),
        (Some(separator), false) => {
            for part in text.splitn(max_splits.saturating_add(1), separator) {
                push(&mut parts, part)?;
            }
        }
        (Some(separator), true) => {
            for part in text.rsplitn(max_splits.saturating_add(1), separator) {
                push(&mut parts, part)?;
            }
        }
        (None, false) => {
            let mut rest = text.trim_start_matches(is_space);
            while !rest.is_empty() {
                let end = if parts.len() == max_splits { None } else { rest.find(is_space) };
                push(&mut parts, &rest[..end.unwrap_or(rest.len())])?;
                rest = end.map_or("", |end| rest[end..].trim_start_matches(is_space));
            }
        }
        (None, true) => {
            let mut rest = text.trim_end_matches(is_space);
            while !rest.is_empty() {
                let last =
                    if parts.len() == max_splits { None } else { rest.char_indices().rfind(|(_, c)| is_space(*c)) };
                push(&mut parts, &rest[last.map_or(0, |(at, c)| at + c.len_utf8())..])?;
                rest = last.map_or("", |(at, _)| rest[..at].trim_end_matches(is_space));
            }
        }
    }
    if from_end {
        parts.reverse();
    }
    Ok(parts.into_iter().map(Value::from).collect())
}

/// Implements Python's `str.splitlines`.
fn lines(state: &State<'_, '_>, text: &str, keepends: bool) -> Result<Value, Error> {
    let (mut lines, mut rest) = (vec![], text);
    while !rest.is_empty() {
        let at = rest.find(ends_line).unwrap_or(rest.len());
        let end = rest[at..].chars().next().map_or(0, char::len_utf8);
        let end = at + if rest[at..].starts_with("\r\n") { 2 } else { end };
        lines.push(Value::from(&rest[..if keepends { end } else { at }]));
        charge(state, 64)?;
        rest = &rest[end..];
    }
    Ok(Value::from(lines))
}

/// Returns an error for a format that contains a number with more than [`MAX_DIGITS`] digits: such a width or precision
/// would produce an enormous text.
pub(super) fn check_format(format: &str) -> Result<(), Error> {
    let runs = format.split(|c: char| !c.is_ascii_digit()).map(str::len);
    match runs.max().unwrap_or(0) > MAX_DIGITS {
        true => Err(invalid(format!("a number with more than {MAX_DIGITS} digits in a format"))),
        false => Ok(()),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use minijinja::Environment;

    /// Returns a list with the value of an expression as its only item, as Python's `repr` writes it, or the error.
    fn repr(expression: &str) -> String {
        let mut environment = Environment::new();
        environment.set_unknown_method_callback(unknown_method);
        environment.add_filter("trim", trim);
        match environment.compile_expression(expression).unwrap().eval(()) {
            Ok(value) => [value].into_iter().collect::<Value>().to_string(),
            Err(error) => error.to_string(),
        }
    }

    /// All characters for which Python 3's `str.isspace` holds.
    const SPACES: &str = "\t\n\u{b}\u{c}\r\u{1c}\u{1d}\u{1e}\u{1f} \u{85}\u{a0}\u{1680}\u{2000}\u{2001}\u{2002}\u{2003}\
                          \u{2004}\u{2005}\u{2006}\u{2007}\u{2008}\u{2009}\u{200a}\u{2028}\u{2029}\u{202f}\u{205f}\u{3000}";

    #[test]
    fn white_space_is_what_it_is_in_python() {
        let found: String = (0..=0x10FFFF).filter_map(char::from_u32).filter(|c| is_space(*c)).collect();
        assert_eq!(found, SPACES);
        assert_eq!(repr("'\\u001c a\\u001f'.strip()"), "['a']");
        assert_eq!(repr("('\\u001c a\\u001f'.lstrip() ~ '|')[:2]"), "['a\\x1f']");
        assert_eq!(repr("'\\u001fa\\u001f'.rstrip()|length"), "[2]");
        assert_eq!(repr("'\\u001da\\u001e'|trim"), "['a']");
        assert_eq!(repr("'xxaxx'.strip('x') ~ 'xxaxx'|trim('x')"), "['aa']");
        assert_eq!(repr("'\\u001c\\u001d\\u001e\\u001f '.isspace()"), "[True]");
        assert_eq!(repr("[''.isspace(), '\\u200b'.isspace()]"), "[[False, False]]");
    }

    #[test]
    fn texts_are_split_as_in_python() {
        assert_eq!(repr("'  a\\u001cb \\u3000c  '.split()"), "[['a', 'b', 'c']]");
        assert_eq!(repr("'  a b c  '.split(none, 1)"), "[['a', 'b c  ']]");
        assert_eq!(repr("'  a b c  '.split(maxsplit=0)"), "[['a b c  ']]");
        assert_eq!(repr("'  a b c  '.rsplit(none, 1)"), "[['  a b', 'c']]");
        assert_eq!(repr("'a '.split(none, 1)"), "[['a']]");
        assert_eq!(repr("['   '.split(), ''.split(), ''.split('x')]"), "[[[], [], ['']]]");
        assert_eq!(repr("'a--b--c'.split('--', 1)"), "[['a', 'b--c']]");
        assert_eq!(repr("'a--b--c'.rsplit('--', 1)"), "[['a--b', 'c']]");
        assert_eq!(repr("'a--b--c'.split(sep='--', maxsplit=-1)"), "[['a', 'b', 'c']]");
        assert_eq!(repr("'abc'.split('')"), "invalid operation: empty separator (in <expression>:1)");
        assert_eq!(repr("'a\\nb\\r\\nc\\u001cd\\u2028e\\n'.splitlines()"), "[['a', 'b', 'c', 'd', 'e']]");
        assert_eq!(repr("'a\\r\\n\\nb\\r'.splitlines(true)"), "[['a\\r\\n', '\\n', 'b\\r']]");
        assert_eq!(repr("''.splitlines()"), "[[]]");
    }

    #[test]
    fn other_methods_are_as_before() {
        assert_eq!(repr("'abab'.replace('a', 'x', 1) ~ '-'.join([1, 'b', none])"), "['xbab1-b-None']");
        assert_eq!(repr("'ab'.replace('', '-')"), "['-a-b-']");
        assert_eq!(repr("'{} {:>4}'.format('a', 'b')"), "['a    b']");
        assert!(
            repr("'{:>1000000000}'.format('b')").starts_with("invalid operation: a number with more than 5 digits")
        );
        assert_eq!(repr("'Ab'.upper() ~ [1, 2, 1].count(1)"), "['AB2']");
    }
}
