//! Converts the messages of a record, in any of the known formats, to the form that chat templates take.

use super::column_mapping::{IMAGE_KEYS, WEIGHT_KEYS};
use super::raw_record::json;
use crate::chat::conversation::{field, kind};
use minijinja::value::{Value, ValueKind};

/// The reason why messages cannot be used.
pub(super) type RecordProblem = String;

/// Messages with role and content, and for each of them whether the model is trained on it, if the message itself
/// specifies this.
#[derive(Debug, Default, Clone)]
pub(super) struct ChatMessages {
    pub list: Vec<Value>,
    pub trained_on: Vec<Option<bool>>,
    /// Whether the first message has `from` instead of `role`, as in ShareGPT.
    pub is_share_gpt: bool,
}

impl ChatMessages {
    /// Reads the messages of a list, or a single message: role and content (OpenAI), from and value (ShareGPT), content
    /// in parts, or input and output (xtuner). A text, as in tables, is parsed as JSON.
    pub(super) fn of(value: &Value) -> Result<Self, RecordProblem> {
        let value = match value.as_str() {
            Some(text) => json(text).map_err(|reason| format!("its messages: {reason}"))?,
            None => value.clone(),
        };
        let items = match value.kind() {
            ValueKind::Map => vec![value],
            ValueKind::Seq => value.try_iter().into_iter().flatten().collect(),
            _ => return Err(format!("its messages are {}, not a list", kind(&value))),
        };
        let mut messages = Self::default();
        let first = items.first().cloned().unwrap_or_default();
        messages.is_share_gpt = field(&first, "role").is_undefined() && !field(&first, "from").is_undefined();
        for (i, item) in items.iter().enumerate() {
            messages.push(item).map_err(|reason| format!("message {}: {reason}", i + 1))?;
        }
        match messages.list.is_empty() {
            true => Err("it has no messages".into()),
            false => Ok(messages),
        }
    }

    /// Returns a single message with a text.
    pub(super) fn text(role: &str, content: &str) -> Self {
        let list = vec![Value::from_pairs([("role", role), ("content", content)])];
        Self { list, trained_on: vec![None], is_share_gpt: false }
    }

    /// Appends messages.
    pub(super) fn append(mut self, others: Self) -> Self {
        self.list.extend(others.list);
        self.trained_on.extend(others.trained_on);
        self
    }

    /// Inserts a system text before all messages, unless it is already there.
    pub(super) fn with_system(self, system: &str) -> Result<Self, RecordProblem> {
        let first = self.list.first().cloned().unwrap_or_default();
        let (role, content) = (field(&first, "role"), field(&first, "content"));
        match role.as_str() {
            Some("system" | "developer") if content.as_str() == Some(system) => Ok(self),
            Some("system" | "developer") => {
                Err("it has a system text and a different one as its first message; keep one of them".into())
            }
            _ => Ok(Self::text("system", system).append(self)),
        }
    }

    fn push(&mut self, item: &Value) -> Result<(), RecordProblem> {
        if item.kind() != ValueKind::Map {
            return Err(format!("it is {}, not an object", kind(item)));
        }
        let has = |name: &str| Some(field(item, name)).filter(|value| !value.is_undefined() && !value.is_none());
        let text = |name: &str| has(name).and_then(|value| value.as_str().map(str::to_string));
        if has("role").is_none() && has("from").is_none() && has("input").is_some() && has("output").is_some() {
            return self.push_turn(item);
        }
        let role = match (text("role"), text("from")) {
            (Some(role), _) => role,
            (None, Some(from)) => share_gpt_role(&from)?.to_string(),
            (None, None) => {
                let name = if field(item, "role").is_undefined() { "from" } else { "role" };
                let name = if field(item, name).is_undefined() { "role" } else { name };
                let keys: Vec<String> = item.try_iter().into_iter().flatten().map(|key| key.to_string()).collect();
                return Err(format!(
                    "its {name} is {} (its keys: {})",
                    kind(&field(item, name)),
                    super::column_mapping::names(&keys)
                ));
            }
        };
        let is_call = role == "function_call";
        let role = match role.as_str() {
            "human" => "user",
            "gpt" | "chatgpt" | "bot" | "function_call" => "assistant",
            "function" | "observation" => "tool",
            role => role,
        };
        let trained_on = training_flag(item, role == "assistant" || role == "model")?;
        let mut fields: Vec<(Value, Value)> = vec![("role".into(), role.into())];
        for key in item.try_iter().into_iter().flatten() {
            let name = key.as_str().unwrap_or_default().to_string();
            let value = field(item, &name);
            let is_empty = value.is_undefined() || value.is_none() || value.len() == Some(0);
            match name.as_str() {
                "role" | "from" => {}
                name if WEIGHT_KEYS.contains(&name) => {}
                name if IMAGE_KEYS.contains(&name) && !is_empty => return Err(media_error(name)),
                name if UNSUPPORTED_MASK_KEYS.contains(&name) && value.is_true() => {
                    return Err(format!(
                        "it has {name}, which is not supported; set weight to 0 in messages that must not be trained on"
                    ));
                }
                "value" | "content" if name == "value" && has("content").is_some() => {}
                "content" if has("content").is_none() && has("value").is_some() => {}
                "value" | "content" => push_content(&value, &mut fields)?,
                "function_call" if !is_empty => {
                    if has("tool_calls").is_some_and(|calls| calls.is_true()) {
                        return Err("it has function_call and tool_calls; keep one of them".into());
                    }
                    push_calls(&value, &mut fields)?;
                }
                _ => fields.push((key, value)),
            }
        }
        if is_call {
            let at = fields.iter().position(|(key, _)| key.as_str() == Some("content"));
            let call = at.map(|at| fields.remove(at).1).unwrap_or_default();
            let parsed_call = call.as_str().map(json).transpose().map_err(|reason| format!("its call: {reason}"))?;
            fields.push(("content".into(), "".into()));
            push_calls(&parsed_call.unwrap_or(call), &mut fields)?;
        }
        self.list.push(Value::from_pairs(fields));
        self.trained_on.push(trained_on);
        Ok(())
    }

    /// Appends a turn of xtuner: a question and its answer, optionally with a system text.
    fn push_turn(&mut self, turn: &Value) -> Result<(), RecordProblem> {
        for (name, role) in [("system", "system"), ("input", "user"), ("output", "assistant")] {
            let value = field(turn, name);
            match value.as_str() {
                Some("") if name == "system" => {}
                None if value.is_undefined() || value.is_none() => {}
                Some(text) => {
                    self.list.push(Value::from_pairs([("role", role), ("content", text)]));
                    self.trained_on.push(if role == "assistant" { training_flag(turn, true)? } else { None });
                }
                None => return Err(format!("its {name} is {}, not a string", kind(&value))),
            }
        }
        let known = ["system", "input", "output", "need_eos_token", "sep"];
        let mut keys = turn.try_iter().into_iter().flatten().map(|key| key.to_string());
        match keys.find(|key| !known.contains(&key.as_str()) && !WEIGHT_KEYS.contains(&key.as_str())) {
            Some(other) => {
                Err(format!("it has {other} in addition to input and output; write messages with role and content"))
            }
            None => Ok(()),
        }
    }
}

/// The keys, besides [`WEIGHT_KEYS`], that exclude text from training; they are not supported.
const UNSUPPORTED_MASK_KEYS: [&str; 7] =
    ["train_detail", "training_detail", "mask", "masked", "no_loss", "ignore_loss", "loss_mask"];

/// Returns the error for images, videos or audio, which names their key.
pub(super) fn media_error(name: &str) -> RecordProblem {
    format!(
        "it has {name}, but images, videos and audio are not supported: without them, its texts would teach the model \
         to make things up; omit such records, or remove the key"
    )
}

/// Returns whether the model is trained on a message, if the message itself specifies this.
fn training_flag(message: &Value, is_assistant: bool) -> Result<Option<bool>, RecordProblem> {
    let mut trained_on = None;
    for name in WEIGHT_KEYS {
        let value = field(message, name);
        let Some(enabled) = weight(name, &value)? else { continue };
        // The key `weight` has no effect on a message that is not the assistant's. Any other key that enables training
        // on such a message is an error.
        if enabled && !is_assistant && name != "weight" {
            return Err(format!(
                "it has {name}, but only the assistant's messages are trained on; remove the key from other messages"
            ));
        }
        trained_on = Some(enabled && trained_on.unwrap_or(true));
    }
    Ok(trained_on)
}

/// Returns whether a weight or a flag enables training, or `None` if it is not set. The value is 0, 1 or a boolean,
/// possibly as text.
pub(crate) fn weight(name: &str, value: &Value) -> Result<Option<bool>, RecordProblem> {
    let text = value.as_str().map(str::trim);
    let number = match (value.kind(), text) {
        (ValueKind::Undefined | ValueKind::None, _) | (_, Some("")) => return Ok(None),
        (ValueKind::Bool, _) => return Ok(Some(value.is_true())),
        (_, Some(text)) if text.eq_ignore_ascii_case("true") => return Ok(Some(true)),
        (_, Some(text)) if text.eq_ignore_ascii_case("false") => return Ok(Some(false)),
        (_, Some(text)) => text.parse::<f64>().ok(),
        _ => f64::try_from(value.clone()).ok(),
    };
    match number {
        Some(0.0) => Ok(Some(false)),
        Some(1.0) => Ok(Some(true)),
        _ => Err(format!(
            "its {name} is {value}, but must be 0 (not trained on) or 1; repeat records that should count more, or give \
             their file a weight (data.jsonl:2.5)"
        )),
    }
}

/// Returns the role for ShareGPT's `from`.
fn share_gpt_role(from: &str) -> Result<&str, RecordProblem> {
    Ok(match from {
        "human" | "user" => "user",
        "gpt" | "assistant" | "chatgpt" | "model" | "bot" => "assistant",
        "system" => "system",
        "tool" | "observation" | "function" => "tool",
        "function_call" => from,
        other => {
            return Err(format!(
                "its `from` is {other:?}, but must be system, human, gpt, function_call, observation or tool"
            ));
        }
    })
}

/// Appends the content of a message: a text, a list of parts, or another value that a template may take.
fn push_content(value: &Value, fields: &mut Vec<(Value, Value)>) -> Result<(), RecordProblem> {
    if value.kind() != ValueKind::Seq {
        fields.push(("content".into(), value.clone()));
        return Ok(());
    }
    let mut parts = vec![];
    for part in value.try_iter().into_iter().flatten() {
        if let Some(text) = part.as_str() {
            parts.push(text_part(text));
            continue;
        }
        let (part_type, inner) = (field(&part, "type"), ["text", "value"].map(|name| field(&part, name)));
        let inner = inner.iter().find_map(|inner| inner.as_str());
        match (part_type.as_str(), inner) {
            (Some("text" | "input_text" | "output_text") | None, Some(text)) => parts.push(text_part(text)),
            (Some(thinking @ ("reasoning" | "thinking")), inner) => {
                let thought =
                    inner.map(str::to_string).or_else(|| Some(field(&part, "thinking").as_str()?.to_string()));
                let thought = thought.ok_or_else(|| missing_text(thinking))?;
                fields.push(("reasoning_content".into(), thought.into()));
            }
            (Some("tool_call"), Some(call)) => push_calls(&json(call)?, fields)?,
            (Some(other), _) if is_picture(other) => return Err(media_error(&format!("content of type {other:?}"))),
            (Some(known @ ("text" | "input_text" | "output_text" | "tool_call")), None) => {
                return Err(missing_text(known));
            }
            (Some(other), _) => {
                return Err(format!(
                    "a part of its content has type {other:?}, which is not supported; use type \"text\""
                ));
            }
            (None, None) => return Err(format!("a part of its content is {} with neither type nor text", kind(&part))),
        }
    }
    fields.push(("content".into(), parts.into_iter().collect()));
    Ok(())
}

fn missing_text(of_type: &str) -> RecordProblem {
    format!("a part of its content has type {of_type:?} but no text")
}

fn text_part(text: &str) -> Value {
    Value::from_pairs([("type", "text"), ("text", text)])
}

/// Returns whether parts of this type are pictures, videos, sounds or files.
fn is_picture(part_type: &str) -> bool {
    ["image", "video", "audio", "file"].iter().any(|word| part_type.contains(word))
}

/// Appends one or several calls as `tool_calls`.
fn push_calls(value: &Value, fields: &mut Vec<(Value, Value)>) -> Result<(), RecordProblem> {
    let calls: Vec<Value> = match value.kind() {
        ValueKind::Seq => value.try_iter().into_iter().flatten().collect(),
        _ => vec![value.clone()],
    };
    let mut all = vec![];
    for call in calls {
        let call = if field(&call, "function").kind() == ValueKind::Map { field(&call, "function") } else { call };
        if field(&call, "name").as_str().is_none() {
            return Err("its call has no name; write {\"name\": ..., \"arguments\": ...}".into());
        }
        all.push(Value::from_pairs([("type", Value::from("function")), ("function", call)]));
    }
    let at = fields.iter().position(|(key, _)| key.as_str() == Some("tool_calls"));
    if let Some(at) = at {
        let before = fields.remove(at).1;
        all.splice(0..0, before.try_iter().into_iter().flatten());
    }
    fields.push(("tool_calls".into(), all.into_iter().collect()));
    Ok(())
}
