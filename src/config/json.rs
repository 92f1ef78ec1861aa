//! A JSON reader that keeps the place of every key and value for messages.
//!
//! JSON plus what DeepSpeed's Hjson reading commonly meets: `#`, `//` and `/* */` comments and trailing commas.

use super::Place;
use std::collections::HashMap;

/// Objects and lists in one another, at most. DeepSpeed's deepest section has 5.
pub(crate) const MAX_DEPTH: usize = 64;
/// The largest text read, in bytes. Real configurations have a few thousand.
pub(crate) const MAX_BYTES: usize = 4 << 20;

/// A value and its place; no place where the source was no text.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Node {
    pub place: Option<Place>,
    pub value: Json,
}

/// A key, its place, and its value.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Entry {
    pub key: String,
    pub place: Option<Place>,
    pub node: Node,
}

/// Any JSON value; objects keep the order of the text.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Json {
    Null,
    Bool(bool),
    Int(i64),
    Float(f64),
    String(String),
    List(Vec<Node>),
    Object(Vec<Entry>),
}

/// Why a text cannot be read.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum ReadError {
    Syntax { place: Place, expected: String, found: String },
    Duplicate { path: String, first: Place, second: Place },
}

type Result<T> = std::result::Result<T, ReadError>;

/// Reads a whole text whose outermost value is an object.
pub(crate) fn read_object(bytes: &[u8]) -> Result<Node> {
    read(bytes, true)
}

/// Reads a whole text. A byte order mark before it is skipped.
fn read(bytes: &[u8], only_object: bool) -> Result<Node> {
    let start = Place { line: 1, column: 1 };
    let error = |place, expected: &str, found: String| ReadError::Syntax { place, expected: expected.into(), found };
    if bytes.len() > MAX_BYTES {
        return Err(error(start, &format!("at most {MAX_BYTES} bytes"), format!("{} bytes", bytes.len())));
    }
    let text = match std::str::from_utf8(bytes) {
        Ok(text) => text.strip_prefix('\u{feff}').unwrap_or(text),
        Err(e) => {
            let good = String::from_utf8_lossy(&bytes[..e.valid_up_to()]);
            let mut reader = Reader::new(&good);
            while reader.bump().is_some() {}
            return Err(error(reader.place, "UTF-8 text", format!("the byte 0x{:02x}", bytes[e.valid_up_to()])));
        }
    };
    let mut reader = Reader::new(text);
    reader.skip_blank()?;
    if only_object && reader.peek() != Some('{') {
        return Err(reader.expected("an object `{...}` as the outermost value"));
    }
    let node = reader.value(0)?;
    reader.skip_blank()?;
    match reader.peek() {
        None => Ok(node),
        Some(_) => Err(reader.expected("the end of the text after the outermost value")),
    }
}

impl Node {
    /// The same tree from a value that was never text.
    pub fn from_value(value: &serde_json::Value) -> Self {
        use serde_json::Value;
        let value = match value {
            Value::Null => Json::Null,
            Value::Bool(b) => Json::Bool(*b),
            Value::Number(n) => match n.as_i64() {
                Some(i) => Json::Int(i),
                // A serde_json number that is no i64 is a u64 or a f64: both convert.
                None => Json::Float(n.as_f64().unwrap_or(f64::NAN)),
            },
            Value::String(s) => Json::String(s.clone()),
            Value::Array(list) => Json::List(list.iter().map(Self::from_value).collect()),
            Value::Object(map) => Json::Object(
                map.iter().map(|(key, v)| Entry { key: key.clone(), place: None, node: Self::from_value(v) }).collect(),
            ),
        };
        Self { place: None, value }
    }

    /// The tree as serde's type, without places.
    pub fn to_value(&self) -> serde_json::Value {
        use serde_json::Value;
        match &self.value {
            Json::Null => Value::Null,
            Json::Bool(b) => Value::Bool(*b),
            Json::Int(i) => Value::from(*i),
            Json::Float(x) => Value::from(*x),
            Json::String(s) => Value::String(s.clone()),
            Json::List(list) => Value::Array(list.iter().map(Self::to_value).collect()),
            Json::Object(entries) => {
                Value::Object(entries.iter().map(|e| (e.key.clone(), e.node.to_value())).collect())
            }
        }
    }
}

struct Reader<'a> {
    rest: std::str::Chars<'a>,
    place: Place,
    /// Keys from the root to here, for messages.
    path: Vec<String>,
}

impl<'a> Reader<'a> {
    fn new(text: &'a str) -> Self {
        Self { rest: text.chars(), place: Place { line: 1, column: 1 }, path: Vec::new() }
    }

    fn peek(&self) -> Option<char> {
        self.rest.clone().next()
    }

    fn bump(&mut self) -> Option<char> {
        let c = self.rest.next()?;
        if c == '\n' {
            self.place = Place { line: self.place.line + 1, column: 1 };
        } else {
            self.place.column += 1;
        }
        Some(c)
    }

    fn take_if(&mut self, wanted: char) -> bool {
        let found = self.peek() == Some(wanted);
        if found {
            self.bump();
        }
        found
    }

    /// The error that something else was expected at this place.
    fn expected(&self, expected: impl Into<String>) -> ReadError {
        let found = match self.peek() {
            None => "the end of the text".to_string(),
            Some('\n' | '\r') => "the end of the line".to_string(),
            Some(c) if is_word(c) => {
                const LONGEST: usize = 40;
                format!("`{}`", self.rest.clone().take_while(|c| is_word(*c)).take(LONGEST).collect::<String>())
            }
            Some(c) if c.is_control() => format!("the control character 0x{:02x}", u32::from(c)),
            Some(c) => format!("`{c}`"),
        };
        ReadError::Syntax { place: self.place, expected: expected.into(), found }
    }

    /// Skips blanks and comments.
    fn skip_blank(&mut self) -> Result<()> {
        loop {
            let second = self.rest.clone().nth(1);
            match (self.peek(), second) {
                (Some(' ' | '\t' | '\n' | '\r'), _) => {
                    self.bump();
                }
                (Some('#'), _) | (Some('/'), Some('/')) => while !matches!(self.bump(), None | Some('\n')) {},
                (Some('/'), Some('*')) => {
                    let start = self.place;
                    self.bump();
                    self.bump();
                    let mut last = ' ';
                    loop {
                        match self.bump() {
                            None => return Err(self.expected(format!("`*/` for the comment that begins at {start}"))),
                            Some('/') if last == '*' => break,
                            Some(c) => last = c,
                        }
                    }
                }
                _ => return Ok(()),
            }
        }
    }

    fn value(&mut self, depth: usize) -> Result<Node> {
        let place = self.place;
        let value = match self.peek() {
            Some('{' | '[') if depth == MAX_DEPTH => {
                return Err(self.expected(format!("at most {MAX_DEPTH} objects and lists in one another")));
            }
            Some('{') => self.object(depth)?,
            Some('[') => self.list(depth)?,
            Some('"') => Json::String(self.string()?),
            Some('-' | '0'..='9') => self.number()?,
            _ => self.word()?,
        };
        Ok(Node { place: Some(place), value })
    }

    /// `true`, `false` or `null`.
    fn word(&mut self) -> Result<Json> {
        const WORDS: [(&str, Json); 3] =
            [("true", Json::Bool(true)), ("false", Json::Bool(false)), ("null", Json::Null)];
        for (word, value) in WORDS {
            if self.rest.clone().take_while(|c| is_word(*c)).eq(word.chars()) {
                word.chars().for_each(|_| {
                    self.bump();
                });
                return Ok(value);
            }
        }
        let of = self.path.last().map(|key| format!(" of `{key}`")).unwrap_or_default();
        Err(self.expected(format!("a JSON value{of} (text goes in double quotes)")))
    }

    fn object(&mut self, depth: usize) -> Result<Json> {
        self.bump();
        let mut entries: Vec<Entry> = Vec::new();
        let mut seen: HashMap<String, Place> = HashMap::new();
        loop {
            self.skip_blank()?;
            if self.take_if('}') {
                return Ok(Json::Object(entries));
            }
            let place = self.place;
            if self.peek() != Some('"') {
                return Err(self.expected("a key in double quotes or `}`"));
            }
            let key = self.string()?;
            self.path.push(key.clone());
            if let Some(first) = seen.insert(key.clone(), place) {
                return Err(ReadError::Duplicate { path: self.path.join("."), first, second: place });
            }
            self.skip_blank()?;
            if !self.take_if(':') {
                return Err(self.expected(format!("`:` after the key `{key}`")));
            }
            self.skip_blank()?;
            let node = self.value(depth + 1)?;
            self.path.pop();
            self.skip_blank()?;
            let more = self.take_if(',');
            if !more && self.peek() != Some('}') {
                return Err(self.expected(format!("`,` or `}}` after the value of `{key}`")));
            }
            entries.push(Entry { key, place: Some(place), node });
        }
    }

    fn list(&mut self, depth: usize) -> Result<Json> {
        self.bump();
        let mut items = Vec::new();
        loop {
            self.skip_blank()?;
            if self.take_if(']') {
                return Ok(Json::List(items));
            }
            items.push(self.value(depth + 1)?);
            self.skip_blank()?;
            if !self.take_if(',') && self.peek() != Some(']') {
                return Err(self.expected("`,` or `]` after an item of the list"));
            }
        }
    }

    fn string(&mut self) -> Result<String> {
        let start = self.place;
        self.bump();
        let mut text = String::new();
        loop {
            match self.peek() {
                Some('"') => {
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
                _ => return Err(self.expected(format!("`\"` for the string that begins at {start}"))),
            }
        }
    }

    fn escape(&mut self) -> Result<char> {
        let plain = match self.peek() {
            Some(c @ ('"' | '\\' | '/')) => c,
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
                        return Err(self.expected("`\\u` with the second half of a surrogate pair"));
                    }
                    match self.hex4()? {
                        low @ 0xdc00..0xe000 => 0x1_0000 + ((high - 0xd800) << 10) + (low - 0xdc00),
                        _ => return Err(self.expected("the second half of a surrogate pair before this place")),
                    }
                } else {
                    high
                };
                return char::from_u32(code).ok_or_else(|| self.expected("an escape that is a Unicode character"));
            }
            _ => return Err(self.expected("one of \" \\ / b f n r t u after a backslash")),
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

    fn number(&mut self) -> Result<Json> {
        let start = self.place;
        let mut text = String::new();
        let mut whole = true;
        if self.take_if('-') {
            text.push('-');
        }
        let leading_zero = self.peek() == Some('0');
        let digits = self.digits(&mut text)?;
        if leading_zero && digits > 1 {
            return Err(ReadError::Syntax {
                place: start,
                expected: "a number without leading zeros".into(),
                found: format!("`{text}`"),
            });
        }
        if self.take_if('.') {
            whole = false;
            text.push('.');
            self.digits(&mut text)?;
        }
        if matches!(self.peek(), Some('e' | 'E')) {
            whole = false;
            self.bump();
            text.push('e');
            if let Some(sign @ ('+' | '-')) = self.peek() {
                self.bump();
                text.push(sign);
            }
            self.digits(&mut text)?;
        }
        if whole && let Ok(i) = text.parse() {
            return Ok(Json::Int(i));
        }
        match text.parse::<f64>() {
            Ok(x) if x.is_finite() => Ok(Json::Float(x)),
            _ => Err(ReadError::Syntax {
                place: start,
                expected: "a number below 1.8e308".into(),
                found: format!("`{}`", text.chars().take(40).collect::<String>()),
            }),
        }
    }

    fn digits(&mut self, text: &mut String) -> Result<usize> {
        let before = text.len();
        while let Some(digit) = self.peek().filter(char::is_ascii_digit) {
            self.bump();
            text.push(digit);
        }
        match text.len() - before {
            0 => Err(self.expected("a digit")),
            n => Ok(n),
        }
    }
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

#[cfg(test)]
mod tests;
