//! A parser for Hjson that accepts the same files as DeepSpeed and records the position of every key and value for
//! messages.
//!
//! Hjson is JSON with `#`, `//` and `/* */` comments, strings in single quotes or `'''`, and unquoted strings that
//! extend to the end of their line. Outer braces, quotes around keys and commas at line ends are optional. An unquoted
//! string that contains something by mistake (a bracket that it does not open, the next key) is refused. DeepSpeed
//! accepts such a string, or reports an error far from it.

use super::TextPosition;
use super::json_node::{JsonEntry, JsonNode, JsonValue};
use super::note::printable;
use std::collections::HashMap;

/// The maximum nesting depth of objects and lists. DeepSpeed's deepest section has a depth of 5.
pub(crate) const MAX_DEPTH: usize = 64;
/// The largest accepted text, in bytes. Real configurations have a few thousand.
pub(crate) const MAX_BYTES: usize = 4 << 20;

/// The reason why a text cannot be read.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum HjsonError {
    Syntax { position: TextPosition, expected: String, found: String },
    Duplicate { path: String, first: TextPosition, second: TextPosition },
}

type Result<T> = std::result::Result<T, HjsonError>;

/// Reads a complete text whose outermost value is an object.
pub(crate) fn read_object(bytes: &[u8]) -> Result<JsonNode> {
    read(bytes, true)
}

/// Reads a complete text. A leading byte order mark is skipped.
fn read(bytes: &[u8], only_object: bool) -> Result<JsonNode> {
    let start = TextPosition { line: 1, column: 1 };
    let error =
        |position, expected: &str, found: String| HjsonError::Syntax { position, expected: expected.into(), found };
    if bytes.len() > MAX_BYTES {
        return Err(error(start, &format!("at most {MAX_BYTES} bytes"), format!("{} bytes", bytes.len())));
    }
    let text = match std::str::from_utf8(bytes) {
        Ok(text) => text.strip_prefix('\u{feff}').unwrap_or(text),
        Err(e) => {
            let valid_text = String::from_utf8_lossy(&bytes[..e.valid_up_to()]);
            let mut reader = HjsonReader::new(&valid_text);
            while reader.bump().is_some() {}
            return Err(error(reader.position, "UTF-8 text", format!("the byte 0x{:02x}", bytes[e.valid_up_to()])));
        }
    };
    let mut reader = HjsonReader::new(text);
    reader.skip_blank()?;
    let position = Some(reader.position);
    let node = match reader.peek() {
        Some('{') => reader.value(0, false)?,
        None | Some('[') if only_object => {
            return Err(reader.expected("an object `{...}` as the outermost value"));
        }
        _ if only_object => JsonNode { position, value: reader.members(None, 0)? },
        _ => reader.value(0, false)?,
    };
    reader.skip_blank()?;
    match reader.peek() {
        None => Ok(node),
        Some(_) => Err(reader.expected("the end of the text after the outermost value")),
    }
}

const AFTER_ITEM: &str = "`,` or `]` after an item of the list";

struct HjsonReader<'a> {
    rest: std::str::Chars<'a>,
    position: TextPosition,
    /// The keys from the root to the current position, for messages.
    path: Vec<String>,
}

impl<'a> HjsonReader<'a> {
    fn new(text: &'a str) -> Self {
        Self { rest: text.chars(), position: TextPosition { line: 1, column: 1 }, path: Vec::new() }
    }

    fn peek(&self) -> Option<char> {
        self.rest.clone().next()
    }

    fn bump(&mut self) -> Option<char> {
        let c = self.rest.next()?;
        if c == '\n' {
            self.position = TextPosition { line: self.position.line + 1, column: 1 };
        } else {
            self.position.column += 1;
        }
        Some(c)
    }

    fn take_if(&mut self, c: char) -> bool {
        let found = self.peek() == Some(c);
        if found {
            self.bump();
        }
        found
    }

    /// Returns the error for this position, where something else was expected.
    fn expected(&self, expected: impl Into<String>) -> HjsonError {
        let found = match self.peek() {
            None => "the end of the text".to_string(),
            Some('\n' | '\r') => "the end of the line".to_string(),
            Some(c) if is_word(c) => {
                const MAX_SHOWN_CHARS: usize = 40;
                format!("`{}`", self.rest.clone().take_while(|c| is_word(*c)).take(MAX_SHOWN_CHARS).collect::<String>())
            }
            Some(c) if c.is_control() => format!("the control character 0x{:02x}", u32::from(c)),
            Some(c) => format!("`{c}`"),
        };
        HjsonError::Syntax { position: self.position, expected: expected.into(), found }
    }

    /// Skips blanks and comments.
    fn skip_blank(&mut self) -> Result<()> {
        loop {
            let second = self.rest.clone().nth(1);
            match (self.peek(), second) {
                (Some(' ' | '\t' | '\n' | '\r'), _) => {
                    self.bump();
                }
                (Some('#'), _) | (Some('/'), Some('/')) => while !matches!(self.bump(), None | Some('\n' | '\r')) {},
                (Some('/'), Some('*')) => {
                    let start = self.position;
                    self.bump();
                    self.bump();
                    let mut last = ' ';
                    loop {
                        match self.bump() {
                            None => return Err(self.expected(format!("`*/` for the comment that starts at {start}"))),
                            Some('/') if last == '*' => break,
                            Some(c) => last = c,
                        }
                    }
                }
                _ => return Ok(()),
            }
        }
    }

    fn value(&mut self, depth: usize, in_list: bool) -> Result<JsonNode> {
        let position = self.position;
        let value = match self.peek() {
            Some('{' | '[') if depth == MAX_DEPTH => {
                return Err(self.expected(format!("at most {MAX_DEPTH} nested objects and lists")));
            }
            Some('{') => self.object(depth)?,
            Some('[') => self.list(depth)?,
            Some('"') => JsonValue::String(self.string('"')?),
            Some('\'') if self.rest.as_str().starts_with("'''") => JsonValue::String(self.long_string()?),
            Some('\'') => JsonValue::String(self.string('\'')?),
            _ => self.plain(in_list)?,
        };
        Ok(JsonNode { position: Some(position), value })
    }

    fn object(&mut self, depth: usize) -> Result<JsonValue> {
        let open = self.position;
        self.bump();
        self.members(Some(open), depth)
    }

    /// Reads keys and values up to the `}` of the object that begins at `open`; `None` means up to the end of the text.
    fn members(&mut self, open: Option<TextPosition>, depth: usize) -> Result<JsonValue> {
        let mut entries: Vec<JsonEntry> = Vec::new();
        let mut seen: HashMap<String, TextPosition> = HashMap::new();
        loop {
            self.skip_blank()?;
            match (open, self.peek()) {
                (Some(_), Some('}')) => {
                    self.bump();
                    return Ok(JsonValue::Object(entries));
                }
                (None, None) => return Ok(JsonValue::Object(entries)),
                (Some(open), None) => {
                    return Err(self.expected(format!("`}}` for the object that starts at {open}")));
                }
                _ => {}
            }
            let position = self.position;
            let key = self.key(open.is_some())?;
            self.path.push(key.clone());
            if let Some(first) = seen.insert(key.clone(), position) {
                let path = self.path.iter().map(|key| printable(key)).collect::<Vec<_>>().join(".");
                return Err(HjsonError::Duplicate { path, first, second: position });
            }
            self.skip_blank()?;
            if !self.take_if(':') {
                let pair = if open.is_none() && entries.is_empty() {
                    "an object `{...}` as the outermost value, or"
                } else {
                    ""
                };
                let key = printable(&key);
                return Err(self.expected(format!("{pair} `:` after the key `{key}`").trim_start()));
            }
            self.skip_blank()?;
            let node = self.value(depth + 1, false)?;
            self.path.pop();
            self.skip_blank()?;
            let more = self.take_if(',');
            if !more && matches!(self.peek(), Some(':' | '[' | ']' | '{')) {
                let end = if open.is_some() { " or `}`" } else { "" };
                return Err(self.expected(format!("`,`{end} after the value of `{}`", printable(&key))));
            }
            entries.push(JsonEntry { key, position: Some(position), node });
        }
    }

    /// Reads a key: quoted text, or text up to the `:` without blanks and without any of `{}[],`.
    fn key(&mut self, in_braces: bool) -> Result<String> {
        if let Some(quote @ ('"' | '\'')) = self.peek() {
            return self.string(quote);
        }
        let ends = |c: char| is_blank(c) || is_punctuator(c) || c.is_control();
        let key: String = self.rest.clone().take_while(|c| !ends(*c)).collect();
        if key.is_empty() {
            return Err(self.expected(if in_braces { "a key or `}`" } else { "a key" }));
        }
        key.chars().for_each(|_| {
            self.bump();
        });
        Ok(key)
    }

    fn list(&mut self, depth: usize) -> Result<JsonValue> {
        let open = self.position;
        self.bump();
        let mut items = Vec::new();
        loop {
            self.skip_blank()?;
            if self.take_if(']') {
                return Ok(JsonValue::List(items));
            }
            if self.peek().is_none() {
                return Err(self.expected(format!("`]` for the list that starts at {open}")));
            }
            items.push(self.value(depth + 1, true)?);
            self.skip_blank()?;
            if !self.take_if(',') && matches!(self.peek(), Some(':' | '}')) {
                return Err(self.expected(AFTER_ITEM));
            }
        }
    }

    /// Reads an unquoted value: a number, `true`, `false`, `null`, or a string that extends to the end of its line.
    fn plain(&mut self, in_list: bool) -> Result<JsonValue> {
        let position = self.position;
        let rest = self.rest.as_str();
        if rest.is_empty() || rest.starts_with(is_punctuator) {
            return Err(self.no_value(""));
        }
        let ends = |(at, c): &(usize, char)| match c {
            ',' | '}' | ']' | '#' | '\n' | '\r' => true,
            '/' => rest[at + 1..].starts_with(['/', '*']),
            _ => false,
        };
        let end = rest.char_indices().find(ends).map_or(rest.len(), |(at, _)| at);
        if let Some(value) = scalar(rest[..end].trim_end()).map_err(|(expected, found)| HjsonError::Syntax {
            position,
            expected: expected.into(),
            found,
        })? {
            self.skip(end);
            return Ok(value);
        }
        let text = rest.split(['\n', '\r']).next().unwrap_or_default().trim_end();
        self.refuse_swallowed(text, in_list)?;
        self.skip(text.len());
        Ok(JsonValue::String(text.into()))
    }

    /// Fails if an unquoted string contains text that was not meant to be part of it.
    fn refuse_swallowed(&mut self, text: &str, in_list: bool) -> Result<()> {
        let mut open = 0_i64;
        let unopened = text.chars().any(|c| {
            open += match c {
                '{' | '[' => 1,
                '}' | ']' => -1,
                _ => 0,
            };
            open < 0
        });
        let first = text.split(|c| is_blank(c) || is_punctuator(c)).next().unwrap_or_default();
        let remainder = text[first.len()..].trim_start_matches(is_blank);
        let is_value = matches!(scalar(first), Ok(Some(_)));
        // `8 "bf16": ...` or `8 bf16: ...`: a comma is missing.
        let next_key = is_value && {
            let word = remainder.trim_start_matches(is_word);
            remainder.starts_with(['"', '\'']) || (word.len() < remainder.len() && word.trim_start().starts_with(':'))
        };
        if is_value && (next_key || (unopened && !remainder.starts_with(is_punctuator))) {
            self.skip(text.len() - remainder.len());
            return Err(self.expected(match self.path.last() {
                _ if in_list => AFTER_ITEM.to_string(),
                Some(key) => format!("`,` or `}}` after the value of `{}`", printable(key)),
                None => "the end of the text after the outermost value".to_string(),
            }));
        }
        if unopened {
            if !is_value && let Err((expected, found)) = broken_number(first) {
                return Err(HjsonError::Syntax { position: self.position, expected: expected.into(), found });
            }
            return Err(
                self.no_value("; an unquoted string extends to the end of its line, and this line contains a bracket")
            );
        }
        Ok(())
    }

    fn no_value(&self, why: &str) -> HjsonError {
        let key = self.path.last().map(|key| format!(" for `{}`", printable(key))).unwrap_or_default();
        self.expected(format!("a JSON value{key} (text must be in double quotes{why})"))
    }

    /// Advances by `bytes` bytes.
    fn skip(&mut self, bytes: usize) {
        let remaining_bytes = self.rest.as_str().len().saturating_sub(bytes);
        while self.rest.as_str().len() > remaining_bytes && self.bump().is_some() {}
    }

    /// Reads a string between these quotes, on one line.
    fn string(&mut self, quote: char) -> Result<String> {
        let start = self.position;
        self.bump();
        let mut text = String::new();
        loop {
            match self.peek() {
                Some(c) if c == quote => {
                    self.bump();
                    return Ok(text);
                }
                Some('\\') => {
                    self.bump();
                    text.push(self.escape()?);
                }
                Some(c) if c >= ' ' || c == '\t' => {
                    self.bump();
                    text.push(c);
                }
                _ => return Err(self.expected(format!("`{quote}` for the string that starts at {start}"))),
            }
        }
    }

    /// Reads a string of any number of lines between `'''`. Each line loses the blanks before the column of the first
    /// quotes.
    fn long_string(&mut self) -> Result<String> {
        const QUOTES: &str = "'''";
        let start = self.position;
        self.skip(QUOTES.len());
        let Some(end) = self.rest.as_str().find(QUOTES) else {
            while self.bump().is_some() {}
            return Err(self.expected(format!("`{QUOTES}` for the string that starts at {start}")));
        };
        let content = self.rest.as_str()[..end].replace('\r', "");
        self.skip(end + QUOTES.len());
        let mut lines = content.split('\n');
        let first = lines.next().unwrap_or_default().trim_start_matches([' ', '\t']);
        let indent = start.column - 1;
        let rest = lines.map(|line| {
            let blank = line.chars().take(indent).take_while(|c| matches!(c, ' ' | '\t')).count();
            &line[blank..]
        });
        let mut text = std::iter::once(first).chain(rest).collect::<Vec<_>>().join("\n");
        if first.is_empty() && text.starts_with('\n') {
            text.remove(0);
        }
        if text.ends_with('\n') {
            text.pop();
        }
        Ok(text)
    }

    fn escape(&mut self) -> Result<char> {
        let plain = match self.peek() {
            Some(c @ ('"' | '\'' | '\\' | '/')) => c,
            Some('b') => '\u{8}',
            Some('f') => '\u{c}',
            Some('n') => '\n',
            Some('r') => '\r',
            Some('t') => '\t',
            Some('u') => {
                self.bump();
                let high = self.hex4()?;
                let code = if (0xd800..0xdc00).contains(&high) {
                    if !(self.take_if('\\') && self.take_if('u')) {
                        return Err(self.expected("`\\u` and the second half of a surrogate pair"));
                    }
                    match self.hex4()? {
                        low @ 0xdc00..0xe000 => 0x1_0000 + ((high - 0xd800) << 10) + (low - 0xdc00),
                        _ => return Err(self.expected("the second half of a surrogate pair before this position")),
                    }
                } else {
                    high
                };
                return char::from_u32(code).ok_or_else(|| self.expected("an escape of a Unicode character"));
            }
            _ => return Err(self.expected("one of \" ' \\ / b f n r t u after a backslash")),
        };
        self.bump();
        Ok(plain)
    }

    fn hex4(&mut self) -> Result<u32> {
        let mut code = 0;
        for _ in 0..4 {
            let digit = self.peek().and_then(|c| c.to_digit(16)).ok_or_else(|| self.expected("four hex digits"))?;
            self.bump();
            code = code * 16 + digit;
        }
        Ok(code)
    }
}

/// The reason why a number is refused: the expected and the found text.
type BadNumber = (&'static str, String);

/// Returns the value of a word, or `None` if it is a string.
fn scalar(word: &str) -> std::result::Result<Option<JsonValue>, BadNumber> {
    match word {
        "true" => return Ok(Some(JsonValue::Bool(true))),
        "false" => return Ok(Some(JsonValue::Bool(false))),
        "null" => return Ok(Some(JsonValue::Null)),
        _ => {}
    }
    if number_length(word) != Some(word.len()) {
        return Ok(None);
    }
    if let Ok(i) = word.parse() {
        return Ok(Some(JsonValue::Int(i)));
    }
    match word.parse::<f64>() {
        Ok(x) if !x.is_finite() => Err(("a number between -1.8e308 and 1.8e308", format!("`{}`", printable(word)))),
        Ok(_) if word.trim_start_matches('-').bytes().all(|c| c.is_ascii_digit()) => {
            Ok(Some(JsonValue::Long(word.into())))
        }
        Ok(x) => Ok(Some(JsonValue::Float(x))),
        Err(_) => Ok(None),
    }
}

/// Returns the length of the JSON number at the start of `text`, if there is one.
fn number_length(text: &str) -> Option<usize> {
    let bytes = text.as_bytes();
    let digits = |from: usize| bytes[from..].iter().take_while(|c| c.is_ascii_digit()).count();
    let mut at = usize::from(bytes.first() == Some(&b'-'));
    match digits(at) {
        0 => return None,
        _ if bytes[at] == b'0' => at += 1,
        n => at += n,
    }
    if bytes.get(at) == Some(&b'.') && digits(at + 1) > 0 {
        at += 1 + digits(at + 1);
    }
    if matches!(bytes.get(at), Some(b'e' | b'E')) {
        let sign = usize::from(matches!(bytes.get(at + 1), Some(b'+' | b'-')));
        if at + 1 + sign < bytes.len() && digits(at + 1 + sign) > 0 {
            at += 1 + sign + digits(at + 1 + sign);
        }
    }
    Some(at)
}

/// Fails if a word that is not a number looks like one: it begins with a digit, after any minus signs, and consists
/// only of characters that occur in numbers.
fn broken_number(word: &str) -> std::result::Result<(), BadNumber> {
    let is_number = |c: char| c.is_ascii_digit() || matches!(c, '.' | '-' | '+' | 'e' | 'E');
    let digits = word.trim_start_matches('-');
    if !digits.starts_with(|c: char| c.is_ascii_digit()) || !word.chars().all(is_number) {
        return Ok(());
    }
    let leading_zero = digits.starts_with('0') && digits[1..].starts_with(|c: char| c.is_ascii_digit());
    let expected = if leading_zero { "a number without leading zeros" } else { "a number" };
    Err((expected, format!("`{}`", printable(word))))
}

fn is_blank(c: char) -> bool {
    matches!(c, ' ' | '\t' | '\n' | '\r')
}

fn is_punctuator(c: char) -> bool {
    matches!(c, '{' | '}' | '[' | ']' | ',' | ':')
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

#[cfg(test)]
mod tests;
