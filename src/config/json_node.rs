//! The values of a file, with their positions.

use super::TextPosition;

/// A value and its position, which is absent if the source was not text.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct JsonNode {
    pub position: Option<TextPosition>,
    pub value: JsonValue,
}

/// A key, its position, and its value.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct JsonEntry {
    pub key: String,
    pub position: Option<TextPosition>,
    pub node: JsonNode,
}

/// Any JSON value. Objects keep their keys in the order of the text.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum JsonValue {
    Null,
    Bool(bool),
    Int(i64),
    /// An integer outside the range of `Int`, as its digits.
    Long(String),
    Float(f64),
    String(String),
    List(Vec<JsonNode>),
    Object(Vec<JsonEntry>),
}

impl JsonNode {
    /// Builds the tree of a value that was never text, without positions.
    pub fn from_value(value: &serde_json::Value) -> Self {
        use serde_json::Value;
        let value = match value {
            Value::Null => JsonValue::Null,
            Value::Bool(b) => JsonValue::Bool(*b),
            Value::Number(n) => match (n.as_i64(), n.as_u64()) {
                (Some(i), _) => JsonValue::Int(i),
                (None, Some(u)) => JsonValue::Long(u.to_string()),
                // A serde_json number that is not an integer is an f64.
                (None, None) => JsonValue::Float(n.as_f64().unwrap_or(f64::NAN)),
            },
            Value::String(s) => JsonValue::String(s.clone()),
            Value::Array(list) => JsonValue::List(list.iter().map(Self::from_value).collect()),
            Value::Object(map) => JsonValue::Object(
                map.iter()
                    .map(|(key, v)| JsonEntry { key: key.clone(), position: None, node: Self::from_value(v) })
                    .collect(),
            ),
        };
        Self { position: None, value }
    }

    /// Converts the tree to serde's type, without positions.
    pub fn to_value(&self) -> serde_json::Value {
        use serde_json::Value;
        match &self.value {
            JsonValue::Null => Value::Null,
            JsonValue::Bool(b) => Value::Bool(*b),
            JsonValue::Int(i) => Value::from(*i),
            JsonValue::Long(digits) => match digits.parse::<u64>() {
                Ok(u) => Value::from(u),
                Err(_) => Value::from(digits.parse::<f64>().unwrap_or(f64::NAN)),
            },
            JsonValue::Float(x) => Value::from(*x),
            JsonValue::String(s) => Value::String(s.clone()),
            JsonValue::List(list) => Value::Array(list.iter().map(Self::to_value).collect()),
            JsonValue::Object(entries) => {
                Value::Object(entries.iter().map(|e| (e.key.clone(), e.node.to_value())).collect())
            }
        }
    }
}
