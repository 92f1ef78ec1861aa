//! Messages between a user and the assistant.

use crate::error::FinetuneError;
use crate::error::Result;
use minijinja::value::{Value, ValueKind};

/// Messages of the system, the user, the assistant and tools, and the tools that may be called, in the form that chat
/// templates take.
#[derive(Debug, Clone)]
pub struct Conversation {
    /// Objects with a role, in order. They have no other fixed keys.
    pub(crate) messages: Vec<Value>,
    /// A list of descriptions of tools, or none.
    pub(crate) tools: Value,
    /// Variables that the conversation sets for the template.
    pub(crate) variables: Vec<(String, Value)>,
}

impl Conversation {
    /// Creates a conversation from roles (`system`, `user`, `assistant`) and contents.
    ///
    /// ```
    /// use candle_zero_finetune::Conversation;
    ///
    /// let conversation = Conversation::new([("user", "What is 2+2?"), ("assistant", "4")]);
    /// assert_eq!(conversation.len(), 2);
    /// ```
    pub fn new<R: AsRef<str>, C: AsRef<str>>(turns: impl IntoIterator<Item = (R, C)>) -> Self {
        let messages = turns.into_iter().map(|(role, content)| message(role.as_ref(), content.as_ref())).collect();
        Self { messages, tools: Value::from(()), variables: vec![] }
    }

    /// Returns a conversation without messages, for templates that are rendered with other messages.
    pub(super) fn empty() -> Self {
        Self { messages: vec![], tools: Value::from(()), variables: vec![] }
    }

    /// Reads a JSON list of messages in the chat format of OpenAI or Hugging Face.
    ///
    /// # Errors
    /// [`FinetuneError::Conversation`] if the text is not a JSON list, the list is empty, or an item is not an object
    /// with a role.
    pub fn from_json(json: &str) -> Result<Self> {
        let value: Value = serde_json::from_str(json)
            .map_err(|e| FinetuneError::Conversation { reason: format!("it is not JSON ({e})") })?;
        Ok(Self::from_value(&value)?)
    }

    /// Reads the messages of a JSON value, as [`from_json`](Self::from_json) does.
    pub(crate) fn from_value(value: &Value) -> Result<Self, FinetuneError> {
        let wrong = |reason: String| Err(FinetuneError::Conversation { reason });
        if value.kind() != ValueKind::Seq {
            return wrong(format!("found {} instead of a list", kind(value)));
        }
        let messages: Vec<Value> = value.try_iter().into_iter().flatten().collect();
        for (i, message) in messages.iter().enumerate() {
            if message.kind() != ValueKind::Map {
                return wrong(format!("message {} is {}", i + 1, kind(message)));
            }
            let role = field(message, "role");
            if role.as_str().is_none() {
                return wrong(format!("the role of message {} is {}", i + 1, kind(&role)));
            }
        }
        match messages.is_empty() {
            true => wrong("it is empty".into()),
            false => Ok(Self { messages, tools: Value::from(()), variables: vec![] }),
        }
    }

    /// Returns the number of messages.
    pub fn len(&self) -> usize {
        self.messages.len()
    }

    /// Returns whether the conversation has no messages.
    pub fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    /// Returns whether message `i` is the assistant's.
    pub(crate) fn is_assistant(&self, i: usize) -> bool {
        field(&self.messages[i], "role").as_str().is_some_and(|role| role == "assistant" || role == "model")
    }

    /// Returns whether message `i` is an empty answer of the assistant.
    pub(crate) fn is_empty_answer(&self, i: usize) -> bool {
        let has = |key: &str| has_content(&field(&self.messages[i], key));
        self.is_assistant(i) && !ASSISTANT_TEXT_KEYS.iter().any(|key| has(key))
    }
}

/// The keys whose values the assistant produces.
pub(crate) const ASSISTANT_TEXT_KEYS: [&str; 5] =
    ["content", "reasoning_content", "reasoning", "thinking", "tool_calls"];

/// Returns whether a value contains a text that is not blank, or anything other than text.
fn has_content(value: &Value) -> bool {
    match value.kind() {
        ValueKind::Undefined | ValueKind::None => false,
        ValueKind::String => value.as_str().is_some_and(|text| !text.trim().is_empty()),
        ValueKind::Seq => value.try_iter().into_iter().flatten().any(|item| match field(&item, "text") {
            text if text.is_undefined() => has_content(&item),
            text => has_content(&text),
        }),
        _ => true,
    }
}

/// Returns a message with this role and content.
fn message(role: &str, content: &str) -> Value {
    Value::from_pairs([("role", role), ("content", content)])
}

/// Returns a field of an object, or undefined if the object does not have it.
pub(crate) fn field(object: &Value, name: &str) -> Value {
    object.get_attr(name).unwrap_or_default()
}

/// Returns a name for a value's type.
pub(crate) fn kind(value: &Value) -> String {
    match value.kind() {
        ValueKind::Undefined => "missing".into(),
        ValueKind::None => "null".into(),
        ValueKind::Seq => "a list".into(),
        ValueKind::Map => "an object".into(),
        kind => format!("a {kind}"),
    }
}
