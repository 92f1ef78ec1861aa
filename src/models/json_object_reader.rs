//! Reads typed values from a JSON object, with errors that name the file, the key and the value.

use crate::error::{Error, ModelError, Result};
use serde_json::{Map, Value};
use std::fmt::Display;
use std::path::Path;

/// A reader of a JSON object in a file.
#[derive(Debug, Clone, Copy)]
pub(super) struct JsonObjectReader<'a> {
    file: &'a Path,
    /// The prefix of the keys in messages.
    prefix: &'a str,
    map: &'a Map<String, Value>,
}

impl<'a> JsonObjectReader<'a> {
    pub fn new(file: &'a Path, prefix: &'a str, map: &'a Map<String, Value>) -> Self {
        Self { file, prefix, map }
    }

    /// Returns the value of `key`, or `None` if it is null or absent.
    pub fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    /// Returns whether `key` is present and null.
    pub fn is_null(&self, key: &str) -> bool {
        self.map.get(key).is_some_and(Value::is_null)
    }

    pub fn keys(&self) -> impl Iterator<Item = &'a str> {
        self.map.keys().map(String::as_str)
    }

    /// Returns the error for the value of `key`.
    pub fn refuse(&self, key: &str, allowed: impl Display) -> Error {
        let found = self.map.get(key).map_or_else(|| "absent".to_owned(), shortened);
        self.refuse_as(key, found, allowed)
    }

    /// Returns the error for a value derived from that of `key`.
    pub fn refuse_as(&self, key: &str, found: impl Display, allowed: impl Display) -> Error {
        let (file, key) = (self.file.to_owned(), format!("{}{key}", self.prefix));
        ModelError::HuggingFace { file, key, found: found.to_string(), allowed: allowed.to_string() }.into()
    }

    /// Returns the object at `key`.
    pub fn object(&self, key: &str, prefix: &'a str) -> Result<Option<JsonObjectReader<'a>>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(JsonObjectReader { prefix, map, ..*self })),
            Some(_) => Err(self.refuse(key, "an object")),
        }
    }

    /// Returns the integer at `key`, which must be at least 1.
    pub fn size(&self, key: &str) -> Result<Option<usize>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_u64().and_then(|size| u32::try_from(size).ok()) {
            Some(size) if size > 0 => Ok(Some(size as usize)),
            _ => Err(self.refuse(key, format!("a whole number from 1 to {}", u32::MAX))),
        }
    }

    /// Returns the number at `key`, which must be positive and finite.
    pub fn positive(&self, key: &str) -> Result<Option<f64>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_f64().filter(|number| *number > 0.0 && number.is_finite()) {
            Some(number) => Ok(Some(number)),
            None => Err(self.refuse(key, "a positive number")),
        }
    }

    /// Returns the number at `key`, which must be finite.
    pub fn number(&self, key: &str) -> Result<Option<f64>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_f64().filter(|number| number.is_finite()) {
            Some(number) => Ok(Some(number)),
            None => Err(self.refuse(key, "a number")),
        }
    }

    /// Returns the boolean at `key`, or `default` if it is null or absent.
    pub fn flag(&self, key: &str, default: bool) -> Result<bool> {
        match self.get(key) {
            None => Ok(default),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(_) => Err(self.refuse(key, "true or false")),
        }
    }

    pub fn text(&self, key: &str) -> Result<Option<&'a str>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(_) => Err(self.refuse(key, "a string")),
        }
    }

    /// Returns an error unless `key` is absent, null or `value`.
    pub fn only(&self, key: &str, value: bool, why: &str) -> Result<()> {
        match self.flag(key, value)? == value {
            true => Ok(()),
            false => Err(self.refuse(key, format!("{value}: {why}"))),
        }
    }
}

/// Formats a value for a message.
#[doc(hidden)]
pub fn shortened(value: &Value) -> String {
    const MAX_SHOWN_CHARS: usize = 60;
    let text = value.to_string();
    match text.char_indices().nth(MAX_SHOWN_CHARS) {
        None => text,
        Some((end, _)) => format!("{}...", &text[..end]),
    }
}
