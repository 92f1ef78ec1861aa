//! Finds the message formats that a chat template can read, and converts messages to them.

use super::assistant_mask::ChatRenderer;
use super::conversation::{Conversation, field};
use super::jinja_compat::json_text;
use crate::data::raw_record::json;
use minijinja::value::{Value, ValueKind};

/// The message formats that a template can read, found by rendering short conversations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct TemplateCapabilities {
    /// Whether the template reads contents that are lists of parts.
    parts: bool,
    /// The form in which the template reads the arguments of a call.
    arguments: ToolArgumentsFormat,
}

/// The form in which the arguments of a call must be passed so that they are written as JSON.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum ToolArgumentsFormat {
    /// Unchanged: the template renders both forms as JSON, or neither.
    #[default]
    Any,
    /// An object, which the template renders as JSON. The template would encode a JSON text a second time.
    Object,
    /// A JSON text, which the template renders unchanged.
    Text,
}

impl TemplateCapabilities {
    pub(super) fn of(template: &impl ChatRenderer) -> Self {
        Self { parts: reads_parts(template), arguments: arguments_of(template) }
    }

    /// Returns the messages in the form that the template reads.
    pub(super) fn adapt(self, messages: &[Value]) -> Vec<Value> {
        messages.iter().map(|message| self.adapt_message(message)).collect()
    }

    fn adapt_message(self, message: &Value) -> Value {
        let content = field(message, "content");
        let joined = (!self.parts && content.kind() == ValueKind::Seq).then(|| join(&content)).flatten();
        let calls = field(message, "tool_calls");
        let calls = (calls.kind() == ValueKind::Seq && self.arguments != ToolArgumentsFormat::Any).then_some(calls);
        if joined.is_none() && calls.is_none() {
            return message.clone();
        }
        map_fields(message, |name, value| match (name, &joined, &calls) {
            ("content", Some(text), _) => text.as_str().into(),
            ("tool_calls", _, Some(calls)) => {
                calls.try_iter().into_iter().flatten().map(|call| self.adapt_call(&call)).collect()
            }
            _ => value,
        })
    }

    fn adapt_call(self, call: &Value) -> Value {
        let inner = field(call, "function");
        if inner.kind() == ValueKind::Map {
            return map_fields(call, |name, value| if name == "function" { self.adapt_call(&inner) } else { value });
        }
        map_fields(call, |name, value| match (name, self.arguments, value.as_str()) {
            ("arguments", ToolArgumentsFormat::Object, Some(text)) => {
                json(text).ok().filter(|object| object.kind() == ValueKind::Map).unwrap_or(value)
            }
            ("arguments", ToolArgumentsFormat::Text, None) if value.kind() == ValueKind::Map => {
                json_text(&value).map_or(value, Value::from)
            }
            _ => value,
        })
    }

    /// Returns whether a call's arguments are a string that is not a JSON object and therefore stays a string, although
    /// the template expects an object.
    pub(super) fn double_encodes_arguments(self, message: &Value) -> bool {
        let calls = field(message, "tool_calls");
        let is_text = |call: Value| {
            let inner = field(&call, "function");
            let call = if inner.is_undefined() { call } else { inner };
            let arguments = field(&call, "arguments");
            arguments.as_str().is_some_and(|text| json(text).map_or(true, |value| value.kind() != ValueKind::Map))
        };
        self.arguments == ToolArgumentsFormat::Object && calls.try_iter().into_iter().flatten().any(is_text)
    }
}

/// Returns a copy of an object in which `change` has replaced the values.
fn map_fields(object: &Value, change: impl Fn(&str, Value) -> Value) -> Value {
    let keys = object.try_iter().into_iter().flatten();
    Value::from_pairs(keys.map(|key| {
        let name = key.as_str().unwrap_or_default().to_string();
        let value = change(&name, field(object, &name));
        (key, value)
    }))
}

/// Joins the texts of parts. Returns `None` if a part is not a text.
fn join(parts: &Value) -> Option<String> {
    let text = |part: Value| part.as_str().map(str::to_string).or_else(|| Some(field(&part, "text").as_str()?.into()));
    parts.try_iter().ok()?.map(text).collect()
}

const PROBE: &str = "Zprobe";

/// Returns whether the template renders a list of parts as the text of these parts, for the user and the assistant.
fn reads_parts(template: &impl ChatRenderer) -> bool {
    let part = Value::from_pairs([("type", "text"), ("text", PROBE)]);
    let content: Value = [part].into_iter().collect();
    let message = |role: &str, content: Value| Value::from_pairs([("role", Value::from(role)), ("content", content)]);
    let text = |probed_role: &str| {
        let content_of = |role: &str| if role == probed_role { content.clone() } else { Value::from("Z") };
        let messages = ["user", "assistant"].map(|role| message(role, content_of(role)));
        template.render_messages(&messages, &Conversation::empty(), false, false).ok()
    };
    let is_plain = |text: &String| text.find(PROBE).is_some_and(|at| !text[..at].trim_end().ends_with(['\'', '"']));
    ["user", "assistant"].iter().all(|role| text(role).as_ref().is_some_and(is_plain))
}

/// Determines how a template renders the arguments of a call.
fn arguments_of(template: &impl ChatRenderer) -> ToolArgumentsFormat {
    let text = r#"{"zkey": "zvalue"}"#;
    let rendered = |arguments: Value| {
        let function = Value::from_pairs([("name", Value::from("zname")), ("arguments", arguments)]);
        let call = Value::from_pairs([("type", "function".into()), ("id", "call_1".into()), ("function", function)]);
        let calls: Value = [call].into_iter().collect();
        let message = |pairs: Vec<(&str, Value)>| Value::from_pairs(pairs);
        let messages = [
            message(vec![("role", "user".into()), ("content", "Z".into())]),
            message(vec![("role", "assistant".into()), ("content", "".into()), ("tool_calls", calls)]),
        ];
        template.render_messages(&messages, &Conversation::empty(), false, false).ok()
    };
    let object = json(text).ok().and_then(rendered);
    let text = rendered(text.into());
    // Only the quotes of the key matter: with other quotes, the text is JSON within JSON, or Python syntax.
    let is_json = |rendered: &Option<String>| {
        let Some(rendered) = rendered else { return false };
        rendered.find("zkey").is_some_and(|at| rendered[..at].ends_with('"') && !rendered[..at].ends_with("\\\""))
    };
    match (is_json(&object), is_json(&text)) {
        (true, false) => ToolArgumentsFormat::Object,
        (false, true) => ToolArgumentsFormat::Text,
        _ => ToolArgumentsFormat::Any,
    }
}
