//! The keys of a record, marked as they are read.

use super::chat_messages::{media_error, weight};
use super::column_mapping::{ColumnMapping, IMAGE_KEYS, QUALITY_KEYS, SCORE_KEYS, VARIABLE_KEYS, WEIGHT_KEYS};
use super::raw_record::json;
use crate::chat::conversation::{field, kind};
use minijinja::value::{Value, ValueKind};
use std::cell::RefCell;

/// A record, and which of its keys were read.
pub(super) struct TrackedRecord<'a> {
    record: &'a Value,
    /// The names of columns that exist and were not read from the file.
    unread: &'a [String],
    columns: &'a ColumnMapping,
    read: RefCell<Vec<String>>,
}

impl<'a> TrackedRecord<'a> {
    pub(super) fn of(record: &'a Value, unread: &'a [String], columns: &'a ColumnMapping) -> Self {
        Self { record, unread, columns, read: RefCell::default() }
    }

    /// Returns the value of the key with the role `name`, if there is one.
    pub(super) fn peek(&self, name: &str) -> Option<Value> {
        let value = field(self.record, self.columns.of(name)?);
        (!value.is_undefined() && !value.is_none()).then_some(value)
    }

    /// Returns the value of the key with the role `name`, if there is one, and marks the key as read.
    pub(super) fn get(&self, name: &str) -> Option<Value> {
        let value = self.peek(name)?;
        self.read.borrow_mut().extend(self.columns.of(name).map(str::to_string));
        Some(value)
    }

    /// Returns the first of several roles whose key has a value.
    pub(super) fn any<'n>(&self, names: &[&'n str]) -> Option<&'n str> {
        names.iter().find(|name| self.peek(name).is_some()).copied()
    }

    /// Returns a text of the record, or `None` if it is missing or empty.
    pub(super) fn text(&self, name: &str) -> Result<Option<String>, String> {
        match self.get(name) {
            None => Ok(None),
            Some(value) => match value.as_str() {
                Some("") => Ok(None),
                Some(text) => Ok(Some(text.into())),
                None => Err(format!("{} is {}, not a string", self.name(name), kind(&value))),
            },
        }
    }

    /// Returns a required text, which may be empty.
    pub(super) fn required_text(&self, name: &str) -> Result<String, String> {
        let value = self.get(name).unwrap_or_default();
        match value.as_str() {
            Some(text) => Ok(text.into()),
            None => Err(format!("{} is {}, not a string", self.name(name), kind(&value))),
        }
    }

    /// Returns the system text, under any of its names.
    pub(super) fn system(&self) -> Result<Option<String>, String> {
        let mut found: Option<String> = None;
        for name in ["system", "system_prompt", "system_message"] {
            match (self.text(name)?, &found) {
                (Some(text), None) => found = Some(text),
                (Some(text), Some(other)) if text != *other => {
                    return Err(format!("it has {name} and another system text; keep one of them"));
                }
                _ => {}
            }
        }
        Ok(found)
    }

    /// Returns the tools that may be called, or null. The items of `functions` (OpenAI's older format) are converted to
    /// descriptions of functions. If `are_bare` is set (for ShareGPT conversations and for instructions), the items of
    /// `tools` are also converted.
    pub(super) fn tools(&self, are_bare: bool) -> Result<Value, String> {
        let read = |name: &str| -> Result<Option<Value>, String> {
            let Some(value) = self.get(name) else { return Ok(None) };
            let value = match value.as_str() {
                Some(text) if text.trim().is_empty() => return Ok(None),
                Some(text) => json(text).map_err(|reason| format!("its {name}: {reason}"))?,
                None => value,
            };
            match value.kind() {
                ValueKind::Seq if value.len() == Some(0) => Ok(None),
                ValueKind::None => Ok(None),
                ValueKind::Seq => Ok(Some(value)),
                _ => Err(format!("its {name} are {}, not a list", kind(&value))),
            }
        };
        let described = |tools: Value| -> Value {
            let tool =
                |tool: Value| match field(&tool, "function").is_undefined() && !field(&tool, "name").is_undefined() {
                    true => Value::from_pairs([("type", Value::from("function")), ("function", tool)]),
                    false => tool,
                };
            tools.try_iter().into_iter().flatten().map(tool).collect()
        };
        match (read("tools")?, read("functions")?) {
            (Some(_), Some(_)) => Err("it has tools and functions; keep one of them".into()),
            (Some(tools), None) => Ok(if are_bare { described(tools) } else { tools }),
            (None, Some(functions)) => Ok(described(functions)),
            (None, None) => Ok(().into()),
        }
    }

    /// Returns the variables that the record sets for the chat template.
    pub(super) fn variables(&self) -> Result<Vec<(String, Value)>, String> {
        let mut variables = vec![];
        if let Some(kwargs) = self.get(VARIABLE_KEYS[0]) {
            let kwargs = match kwargs.as_str() {
                Some(text) => json(text).map_err(|reason| format!("its {}: {reason}", VARIABLE_KEYS[0]))?,
                None => kwargs,
            };
            if kwargs.kind() != ValueKind::Map {
                return Err(format!("its {} is {}, not an object", VARIABLE_KEYS[0], kind(&kwargs)));
            }
            for key in kwargs.try_iter().into_iter().flatten() {
                variables.push((key.to_string(), kwargs.get_item(&key).unwrap_or_default()));
            }
        }
        if let Some(documents) = self.get(VARIABLE_KEYS[1]).filter(|value| value.kind() == ValueKind::Seq) {
            variables.push((VARIABLE_KEYS[1].into(), documents));
        }
        Ok(variables)
    }

    /// Returns whether the model is trained on the record at all, according to its weight.
    pub(super) fn is_trained_on(&self) -> Result<bool, String> {
        let mut is_trained_on = true;
        for name in WEIGHT_KEYS {
            let value = self.get(name).unwrap_or_default();
            is_trained_on &= weight(self.name(name), &value)? != Some(false);
        }
        Ok(is_trained_on)
    }

    /// Returns whether the scores of the two answers favour the rejected one.
    pub(super) fn prefers_rejected(&self) -> bool {
        let number = |name: &str| {
            let value = self.peek(name)?;
            value.as_str().map_or_else(|| f64::try_from(value.clone()).ok(), |text| text.trim().parse().ok())
        };
        SCORE_KEYS.iter().any(|[chosen, rejected]| {
            matches!((number(chosen), number(rejected)), (Some(chosen), Some(rejected)) if chosen < rejected)
        })
    }

    /// Refuses values under these names if they were not read: such values change what the model is trained on.
    pub(super) fn refuse(&self, names: &[&str], reason: &str) -> Result<(), String> {
        let is_refused = |key: &String| names.contains(&key.as_str()) && !self.columns.is_ignored(key);
        match self.unread_keys().into_iter().find(is_refused) {
            Some(key) => Err(format!("it has {key}: {reason}; skip it with --columns ignore={key}")),
            None => Ok(()),
        }
    }

    /// Refuses pictures, videos and audio.
    pub(super) fn refuse_pictures(&self) -> Result<(), String> {
        let is_refused = |key: &String| IMAGE_KEYS.contains(&key.as_str()) && !self.columns.is_ignored(key);
        match self.unread_keys().into_iter().find(is_refused) {
            Some(key) => Err(format!("{} with --columns ignore={key}", media_error(&key))),
            None => Ok(()),
        }
    }

    /// Returns the first key that states how good the record is. Its value has no effect.
    pub(super) fn rank(&self) -> Option<&'static str> {
        QUALITY_KEYS.into_iter().find(|name| self.peek(name).is_some())
    }

    /// Returns the keys with values that were not read.
    pub(super) fn unread_keys(&self) -> Vec<String> {
        let read = self.read.borrow();
        let keys = self.record.try_iter().into_iter().flatten().map(|key| key.to_string());
        let is_unread = |key: &String| {
            let value = field(self.record, key);
            let is_empty = value.is_undefined() || value.is_none() || value.len() == Some(0);
            !is_empty && !read.contains(key)
        };
        keys.filter(is_unread).chain(self.unread.iter().cloned()).collect()
    }

    /// Returns all keys.
    pub(super) fn keys(&self) -> Vec<String> {
        self.record.try_iter().into_iter().flatten().map(|key| key.to_string()).collect()
    }

    /// Returns the record's own name for the key with the role `name`.
    fn name<'n>(&'n self, name: &'n str) -> &'n str {
        self.columns.of(name).unwrap_or(name)
    }
}
