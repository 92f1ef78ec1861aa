//! A value of a pickle together with its path, so that messages can name it.

use super::pickle::{Pickle, PickleNode, PickleNodeId, PickleProblem};
use serde_json::Value as Json;

/// The maximum number of values that one conversion to JSON may visit, and their maximum depth: values of a pickle can
/// share parts, so a few bytes can expand without limit.
const MAX_JSON_VALUES: usize = 100_000;
const MAX_JSON_DEPTH: usize = 60;
/// The number of bytes of text that count as one value.
const TEXT_BYTES_PER_VALUE: usize = 64;
/// The maximum length of a key in a message.
const MAX_KEY_BYTES: usize = 200;

/// A value and its path, such as `optimizer_state_dict.zero_stage`.
#[derive(Debug, Clone)]
pub(super) struct PickleValue<'a> {
    pickle: &'a Pickle,
    id: PickleNodeId,
    path: String,
}

impl<'a> PickleValue<'a> {
    pub fn root(pickle: &'a Pickle) -> Self {
        Self { pickle, id: pickle.root, path: String::new() }
    }

    pub fn path(&self) -> &str {
        &self.path
    }

    fn node(&self) -> &'a PickleNode {
        self.pickle.node(self.id)
    }

    fn inner(&self, id: PickleNodeId, key: &str) -> Self {
        // A key can have any length, and many entries can share one.
        let key = if key.len() > MAX_KEY_BYTES { "(a long name)" } else { key };
        let path = if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) };
        Self { pickle: self.pickle, id, path }
    }

    /// Returns the message that this value is not of the kind `needed`.
    pub fn wrong_kind(&self, needed: &str) -> PickleProblem {
        let path = if self.path.is_empty() { "the outermost value" } else { &self.path };
        format!("{path} is {}, but {needed} is needed", self.kind())
    }

    fn kind(&self) -> String {
        match self.node() {
            PickleNode::None => "None".into(),
            PickleNode::Bool(value) => format!("the boolean {value}"),
            PickleNode::Int(number) => format!("the number {number}"),
            PickleNode::Float(number) => format!("the number {number}"),
            PickleNode::Text(_) => "a string".into(),
            PickleNode::Tuple(items) => format!("a tuple of length {}", items.len()),
            PickleNode::List(items) => format!("a list of length {}", items.len()),
            PickleNode::Dict(entries) => format!("a dictionary of size {}", entries.len()),
            PickleNode::Global(name) => format!("the name {name}"),
            PickleNode::Object { class, .. } => match self.pickle.node(*class) {
                PickleNode::Global(name) => format!("an object of {name}"),
                _ => "an object".into(),
            },
            PickleNode::Persistent(_) => "a storage".into(),
            PickleNode::Opaque => "of an unsupported kind".into(),
        }
    }

    // ---- dictionaries and lists ----------------------------------------------------------------

    /// Returns the value of a key, or `None` if the key is missing, its value is Python's None, or `self` is not a
    /// dictionary.
    pub fn find(&self, key: &str) -> Option<Self> {
        let PickleNode::Dict(entries) = self.node() else { return None };
        let has_key = |id: PickleNodeId| matches!(self.pickle.node(id), PickleNode::Text(text) if text == key);
        let (_, value) = entries.iter().rev().find(|(k, _)| has_key(*k))?;
        Some(self.inner(*value, key)).filter(|value| !matches!(value.node(), PickleNode::None))
    }

    /// Returns the value of a key.
    pub fn get(&self, key: &str) -> Result<Self, PickleProblem> {
        match self.node() {
            PickleNode::Dict(_) => self.find(key).ok_or_else(|| self.inner(self.id, key).missing()),
            _ => Err(self.wrong_kind("a dictionary")),
        }
    }

    fn missing(&self) -> PickleProblem {
        format!("{} is missing", self.path)
    }

    /// Returns, in order, the entries of a dictionary whose keys are strings; other entries are left out.
    pub fn entries(&self) -> Result<Vec<(&'a str, Self)>, PickleProblem> {
        let PickleNode::Dict(entries) = self.node() else { return Err(self.wrong_kind("a dictionary")) };
        let text = |(key, value): &(PickleNodeId, PickleNodeId)| match self.pickle.node(*key) {
            PickleNode::Text(key) => Some((key.as_str(), self.inner(*value, key))),
            _ => None,
        };
        Ok(entries.iter().filter_map(text).collect())
    }

    /// Returns the items of a list or tuple.
    pub fn items(&self) -> Result<Vec<Self>, PickleProblem> {
        let (PickleNode::List(items) | PickleNode::Tuple(items)) = self.node() else {
            return Err(self.wrong_kind("a list"));
        };
        Ok(items.iter().enumerate().map(|(i, id)| self.inner(*id, &i.to_string())).collect())
    }

    /// Returns item `index` of a list or tuple, or the value of the integer key `index` in a dictionary.
    pub fn item(&self, index: usize) -> Result<Self, PickleProblem> {
        let id = match self.node() {
            PickleNode::List(items) | PickleNode::Tuple(items) => items.get(index),
            PickleNode::Dict(entries) => {
                let has_key = |id: PickleNodeId| matches!(self.pickle.node(id), PickleNode::Int(n) if usize::try_from(*n) == Ok(index));
                entries.iter().rev().find(|(key, _)| has_key(*key)).map(|(_, value)| value)
            }
            _ => return Err(self.wrong_kind("a list or a dictionary")),
        };
        let key = index.to_string();
        match id {
            Some(id) => Ok(self.inner(*id, &key)),
            None => Err(self.inner(self.id, &key).missing()),
        }
    }

    // ---- objects -------------------------------------------------------------------------------

    /// Returns the name of a class or function.
    pub fn name(&self) -> Option<&'a str> {
        match self.node() {
            PickleNode::Global(name) => Some(name),
            _ => None,
        }
    }

    /// Returns the name and the arguments of the call that would create this object.
    pub fn call(&self) -> Option<(&'a str, Self)> {
        let PickleNode::Object { class, arguments, .. } = self.node() else { return None };
        let PickleNode::Global(name) = self.pickle.node(*class) else { return None };
        Some((name, Self { id: *arguments, ..self.clone() }))
    }

    /// Returns the attributes of an object.
    pub fn attributes(&self) -> Option<Self> {
        match self.node() {
            PickleNode::Object { state: Some(state), .. } => Some(Self { id: *state, ..self.clone() }),
            _ => None,
        }
    }

    /// Returns the tuple that describes a storage: the word `storage`, and the storage's class, key, device and number
    /// of elements.
    pub fn storage(&self) -> Option<Self> {
        match self.node() {
            PickleNode::Persistent(id) => Some(Self { id: *id, ..self.clone() }),
            _ => None,
        }
    }

    // ---- numbers and text ----------------------------------------------------------------------

    /// Returns an integer; for an enumeration such as ZeroStageEnum, its number.
    pub fn integer(&self) -> Result<i64, PickleProblem> {
        let number = match self.call() {
            Some((_, arguments)) if matches!(arguments.node(), PickleNode::Tuple(items) if items.len() == 1) => {
                arguments.item(0)?
            }
            _ => self.clone(),
        };
        match number.node() {
            PickleNode::Int(number) => Ok(*number),
            _ => Err(self.wrong_kind("a whole number")),
        }
    }

    /// Returns a non-negative integer.
    pub fn count<T: TryFrom<i64>>(&self) -> Result<T, PickleProblem> {
        T::try_from(self.integer()?).map_err(|_| self.wrong_kind("a count"))
    }

    pub fn number(&self) -> Result<f64, PickleProblem> {
        match self.node() {
            PickleNode::Float(number) => Ok(*number),
            PickleNode::Int(number) => Ok(*number as f64),
            _ => Err(self.wrong_kind("a number")),
        }
    }

    pub fn truth(&self) -> Result<bool, PickleProblem> {
        match self.node() {
            PickleNode::Bool(value) => Ok(*value),
            _ => Err(self.wrong_kind("True or False")),
        }
    }

    pub fn text(&self) -> Result<&'a str, PickleProblem> {
        match self.node() {
            PickleNode::Text(text) => Ok(text),
            _ => Err(self.wrong_kind("a string")),
        }
    }

    // ---- JSON ----------------------------------------------------------------------------------

    /// Returns the value in JSON. Tuples become lists, and classes and functions become their names; numbers that are
    /// not finite, and other values that JSON cannot express, become null. Dictionary entries whose keys are neither
    /// strings nor integers are left out.
    pub fn json(&self) -> Result<Json, PickleProblem> {
        let mut budget = MAX_JSON_VALUES;
        self.json_within(&mut budget, MAX_JSON_DEPTH).ok_or_else(|| format!("{} is too large or too deep", self.path))
    }

    fn json_within(&self, budget: &mut usize, depth: usize) -> Option<Json> {
        *budget = budget.checked_sub(1)?;
        let depth = depth.checked_sub(1)?;
        let child = |id: PickleNodeId| Self { pickle: self.pickle, id, path: String::new() };
        Some(match self.node() {
            PickleNode::Bool(value) => (*value).into(),
            PickleNode::Int(number) => (*number).into(),
            PickleNode::Float(number) => (*number).into(),
            PickleNode::Text(text) => {
                *budget = budget.checked_sub(text.len() / TEXT_BYTES_PER_VALUE)?;
                text.as_str().into()
            }
            PickleNode::Global(name) => name.as_str().into(),
            PickleNode::List(items) | PickleNode::Tuple(items) => {
                items.iter().map(|id| child(*id).json_within(budget, depth)).collect::<Option<Vec<_>>>()?.into()
            }
            PickleNode::Dict(entries) => {
                let mut object = serde_json::Map::new();
                for (key, value) in entries {
                    let key = match self.pickle.node(*key) {
                        PickleNode::Text(key) => key.clone(),
                        PickleNode::Int(number) => number.to_string(),
                        _ => continue,
                    };
                    *budget = budget.checked_sub(key.len() / TEXT_BYTES_PER_VALUE)?;
                    object.insert(key, child(*value).json_within(budget, depth)?);
                }
                object.into()
            }
            PickleNode::None | PickleNode::Object { .. } | PickleNode::Persistent(_) | PickleNode::Opaque => Json::Null,
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_list_in_itself_is_refused_and_not_followed() {
        let pickle = Pickle::parse(b"\x80\x02]q\x00h\x00a.").unwrap();
        assert!(PickleValue::root(&pickle).json().unwrap_err().contains("too deep"));
    }

    #[test]
    fn shared_lists_that_unfold_without_end_are_refused() {
        // Each list contains the previous one ten times.
        let mut bytes = b"\x80\x02]q\x00".to_vec();
        for level in 1..30u8 {
            bytes.extend([b"](".as_slice(), &[b'h', level - 1].repeat(10), b"eq", &[level]].concat());
        }
        bytes.push(b'.');
        let pickle = Pickle::parse(&bytes).unwrap();
        assert!(PickleValue::root(&pickle).json().unwrap_err().contains("too large"));
    }

    #[test]
    fn messages_name_the_place_and_both_kinds() {
        let pickle = Pickle::parse(b"\x80\x02}X\x01\x00\x00\x00aX\x01\x00\x00\x00bs.").unwrap();
        let root = PickleValue::root(&pickle);
        assert_eq!(root.get("a").unwrap().integer().unwrap_err(), "a is a string, but a whole number is needed");
        assert_eq!(root.get("c").unwrap_err(), "c is missing");
        assert_eq!(root.items().unwrap_err(), "the outermost value is a dictionary of size 1, but a list is needed");
    }
}
