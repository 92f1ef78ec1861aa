//! Values of a file with their places.

use super::Place;

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
    /// A whole number beyond `Int`, in its digits.
    Long(String),
    Float(f64),
    String(String),
    List(Vec<Node>),
    Object(Vec<Entry>),
}

impl Node {
    /// The same tree from a value that was never text.
    pub fn from_value(value: &serde_json::Value) -> Self {
        use serde_json::Value;
        let value = match value {
            Value::Null => Json::Null,
            Value::Bool(b) => Json::Bool(*b),
            Value::Number(n) => match (n.as_i64(), n.as_u64()) {
                (Some(i), _) => Json::Int(i),
                (None, Some(u)) => Json::Long(u.to_string()),
                // A serde_json number that is no integer is a f64.
                (None, None) => Json::Float(n.as_f64().unwrap_or(f64::NAN)),
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
            Json::Long(digits) => match digits.parse::<u64>() {
                Ok(u) => Value::from(u),
                Err(_) => Value::from(digits.parse::<f64>().unwrap_or(f64::NAN)),
            },
            Json::Float(x) => Value::from(*x),
            Json::String(s) => Value::String(s.clone()),
            Json::List(list) => Value::Array(list.iter().map(Self::to_value).collect()),
            Json::Object(entries) => {
                Value::Object(entries.iter().map(|e| (e.key.clone(), e.node.to_value())).collect())
            }
        }
    }
}
