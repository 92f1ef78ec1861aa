//! What a record is: its form is told by its keys.

use super::conversation::{Conversation, field, kind, message};
use super::error::FinetuneError;
use super::python::python_str;
use minijinja::value::{Value, ValueKind};
use std::fmt;

/// The names that a record is told by; nothing else of it is looked at.
pub(super) const KEYS: [&str; 15] = [
    "messages",
    "conversations",
    "conversation",
    "prompt",
    "completion",
    "response",
    "instruction",
    "input",
    "output",
    "system",
    "text",
    "label",
    "chosen",
    "rejected",
    "tools",
];

/// The forms by their names.
pub(super) const FORMS: &str = "messages; conversations; prompt, completion; instruction, input, output; text; text, label; \
                                prompt, chosen, rejected";

/// The form of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Form {
    /// `messages` (or `conversations`) with role and content.
    Messages,
    /// `conversations` with from and value.
    ShareGpt,
    /// `prompt` and `completion`.
    Completion,
    /// `instruction`, `output`, and `input` where there is one.
    Alpaca,
    /// `text`.
    Text,
    /// `text` and `label`.
    Label,
    /// `prompt`, `chosen` and `rejected`.
    Preference,
}

impl fmt::Display for Form {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Messages => "chat messages",
            Self::ShareGpt => "ShareGPT conversations",
            Self::Completion => "prompt and completion",
            Self::Alpaca => "Alpaca instructions",
            Self::Text => "text",
            Self::Label => "text and label",
            Self::Preference => "chosen and rejected",
        })
    }
}

/// What is to be learned of a record.
#[derive(Debug)]
pub(super) enum Example {
    /// What the assistant says from message `from` on.
    Chat { conversation: Conversation, from: usize },
    /// A completion.
    Completion { prompt: String, completion: String },
    /// All of a text.
    Text(String),
    /// The label of a text.
    Label { text: String, label: String },
    /// The first rather than the second.
    Preference(Box<[Example; 2]>),
}

/// Why a record cannot be used.
type Broken = String;

/// The form of a record and what it holds. Instructions become messages where there is a chat template.
pub(super) fn example(record: &Value, has_template: bool) -> Result<(Form, Example), Broken> {
    if record.kind() == ValueKind::Seq {
        return Ok((Form::Messages, chat(record, record, 0)?));
    }
    let get = |name: &str| Some(field(record, name)).filter(|value| !value.is_undefined() && !value.is_none());
    let any = |names: &[&str]| names.iter().find_map(|name| get(name));
    let text = |value: &Value, name: &str| match value.as_str() {
        Some(text) => Ok(text.to_string()),
        None => Err(format!("{name} is {}, not a text", kind(value))),
    };
    if let (Some(chosen), Some(rejected)) = (get("chosen"), get("rejected")) {
        let prompt = get("prompt");
        return Ok((Form::Preference, preference(record, prompt.as_ref(), [&chosen, &rejected])?));
    }
    if let Some(messages) = any(&["messages", "conversations", "conversation"]) {
        let messages = list(&messages)?;
        let first = messages.try_iter().ok().and_then(|mut items| items.next()).unwrap_or_default();
        return match field(&first, "from").is_undefined() {
            true => Ok((Form::Messages, chat(&messages, record, 0)?)),
            false => Ok((Form::ShareGpt, chat(&share_gpt(&messages, get("system").as_ref())?, record, 0)?)),
        };
    }
    if let (Some(prompt), Some(completion)) = (get("prompt"), any(&["completion", "response"])) {
        return Ok((Form::Completion, completion_of(record, &prompt, &completion)?));
    }
    if let (Some(instruction), Some(output)) = (get("instruction"), any(&["output", "response"])) {
        let (instruction, output) = (text(&instruction, "instruction")?, text(&output, "output")?);
        let input = get("input").map(|input| text(&input, "input")).transpose()?.filter(|input| !input.is_empty());
        let system = get("system").map(|system| text(&system, "system")).transpose()?.filter(|text| !text.is_empty());
        return Ok((Form::Alpaca, alpaca(instruction, input, output, system, has_template)));
    }
    match (get("text"), get("label")) {
        (Some(found), Some(label)) => {
            Ok((Form::Label, Example::Label { text: text(&found, "text")?, label: label_name(&label)? }))
        }
        (Some(found), None) => Ok((Form::Text, Example::Text(text(&found, "text")?))),
        _ if record.kind() == ValueKind::Map => {
            let keys: Vec<String> = record.try_iter().into_iter().flatten().map(|key| key.to_string()).collect();
            Err(format!("its keys ({}) are of no known form: {FORMS}", crate::util::list(&keys)))
        }
        _ => Err(format!("it is {}, not an object", kind(record))),
    }
}

/// The name of a label: a text, a whole number or a truth value.
fn label_name(label: &Value) -> Result<String, Broken> {
    let whole = || f64::try_from(label.clone()).ok().filter(|number| number.fract() == 0.0 && number.abs() < 1e15);
    match label.kind() {
        ValueKind::String | ValueKind::Bool => Ok(python_str(label)),
        ValueKind::Number if label.is_integer() => Ok(python_str(label)),
        // As pandas writes whole numbers of a column that has gaps.
        ValueKind::Number => match whole() {
            Some(number) => Ok((number as i64).to_string()),
            None => Err(format!("its label is {label}, and a label is a name or a whole number")),
        },
        _ => Err(format!("its label is {}, and a label is a name or a whole number", kind(label))),
    }
}

/// A list, or the list that a text holds as JSON, as in tables.
fn list(value: &Value) -> Result<Value, Broken> {
    match value.as_str() {
        Some(text) => serde_json::from_str(text).map_err(|e| format!("its messages are not JSON ({e})")),
        None => Ok(value.clone()),
    }
}

/// A conversation of messages, with the tools of its record.
fn chat(messages: &Value, record: &Value, from: usize) -> Result<Example, Broken> {
    let wrong = |e: FinetuneError| match e {
        FinetuneError::Conversation { reason } => reason,
        e => e.to_string(),
    };
    let mut conversation = Conversation::from_value(messages).map_err(wrong)?;
    let tools = field(record, "tools");
    if !tools.is_undefined() && !tools.is_none() {
        conversation.tools = list(&tools)?;
    }
    Ok(Example::Chat { conversation, from })
}

/// Messages of ShareGPT's `from` and `value`.
fn share_gpt(messages: &Value, system: Option<&Value>) -> Result<Value, Broken> {
    let system = system.and_then(Value::as_str).filter(|text| !text.is_empty());
    let mut turns: Vec<Value> = system.map(|text| message("system", text)).into_iter().collect();
    for (i, turn) in messages.try_iter().into_iter().flatten().enumerate() {
        let (from, value) = (field(&turn, "from"), field(&turn, "value"));
        let role = match from.as_str() {
            Some("human" | "user") => "user",
            Some("gpt" | "assistant" | "chatgpt" | "model" | "bot") => "assistant",
            Some("system") => "system",
            Some("tool" | "observation" | "function") => "tool",
            Some(other) => {
                return Err(format!("turn {} is from {other:?}; known are system, human, gpt and tool", i + 1));
            }
            None => return Err(format!("the from of turn {} is {}", i + 1, kind(&from))),
        };
        let Some(value) = value.as_str() else {
            return Err(format!("the value of turn {} is {}", i + 1, kind(&value)));
        };
        turns.push(message(role, value));
    }
    Ok(turns.into_iter().collect())
}

/// Number of messages of a list.
fn count(messages: &Value) -> usize {
    messages.len().unwrap_or(0)
}

/// The messages of two lists.
fn joined(a: &Value, b: &Value) -> Value {
    let items = |list: &Value| list.try_iter().into_iter().flatten().collect::<Vec<Value>>();
    items(a).into_iter().chain(items(b)).collect()
}

/// A prompt and what follows it, both texts or both messages.
fn completion_of(record: &Value, prompt: &Value, completion: &Value) -> Result<Example, Broken> {
    match (prompt.as_str(), completion.as_str()) {
        (Some(prompt), Some(completion)) => {
            Ok(Example::Completion { prompt: prompt.into(), completion: completion.into() })
        }
        (None, None) => chat(&joined(prompt, completion), record, count(prompt)),
        _ => Err(format!("its prompt is {} and its completion {}", kind(prompt), kind(completion))),
    }
}

/// Two answers to one prompt: texts after a text, messages after messages, or conversations with one beginning.
fn preference(record: &Value, prompt: Option<&Value>, answers: [&Value; 2]) -> Result<Example, Broken> {
    let is_text = |value: &Value| value.as_str().is_some();
    let examples = match prompt {
        Some(prompt) if is_text(prompt) == is_text(answers[0]) => {
            answers.map(|answer| completion_of(record, prompt, answer))
        }
        None if is_text(answers[0]) => return Err("it has two texts and no prompt".into()),
        // The prompt, as a text, stands in the messages too.
        _ => {
            let items = answers.map(|answer| answer.try_iter().into_iter().flatten().collect::<Vec<Value>>());
            let same = items[0].iter().zip(&items[1]).take_while(|(a, b)| a == b).count();
            answers.map(|answer| chat(answer, record, same))
        }
    };
    let [chosen, rejected] = examples;
    Ok(Example::Preference(Box::new([chosen?, rejected?])))
}

/// An instruction as messages, or in the words of Stanford's Alpaca.
fn alpaca(
    instruction: String,
    input: Option<String>,
    output: String,
    system: Option<String>,
    has_template: bool,
) -> Example {
    if has_template {
        let asked = [Some(instruction), input].into_iter().flatten().collect::<Vec<_>>().join("\n\n");
        let turns = [system.map(|text| ("system", text)), Some(("user", asked)), Some(("assistant", output))];
        return Example::Chat { conversation: Conversation::new(turns.into_iter().flatten()), from: 0 };
    }
    let prompt = match input {
        Some(input) => format!(
            "Below is an instruction that describes a task, paired with an input that provides further context. Write a \
             response that appropriately completes the request.\n\n### Instruction:\n{instruction}\n\n### Input:\n{input}\
             \n\n### Response:\n"
        ),
        None => format!(
            "Below is an instruction that describes a task. Write a response that appropriately completes the \
             request.\n\n### Instruction:\n{instruction}\n\n### Response:\n"
        ),
    };
    Example::Completion { prompt, completion: output }
}
