//! The texts of a conversation that a chat template omits.

use super::assistant_mask::{MarkedText, TracedConversation, texts};
use super::conversation::{Conversation, field};
use minijinja::value::ValueKind;

/// The parts of a conversation that a template omits.
#[derive(Debug, Default)]
pub(crate) struct OmittedTexts {
    /// Answers that are not written at all, with the keys of their texts.
    pub omitted_answers: Vec<(usize, String)>,
    /// Other remarks, each the predicate of a sentence about records, beginning with a verb in the plural.
    pub remarks: Vec<String>,
}

/// The extent to which a text is written.
#[derive(Debug, Clone, Copy, PartialEq)]
enum RenderedExtent {
    All,
    Some,
    None,
}

/// The tags around thoughts.
const THINKING_TAGS: [&str; 4] = ["<think>", "</think>", "<thinking>", "</thinking>"];

impl OmittedTexts {
    /// Compares the texts of all messages with the rendered text.
    pub(crate) fn of(conversation: &Conversation, traced: &TracedConversation) -> Self {
        let mut found = Self::default();
        for message in 0..conversation.len() {
            match conversation.is_assistant(message) {
                true => found.check_answer(conversation, traced, message),
                false => found.check_untrained(conversation, traced, message),
            }
        }
        found
    }

    fn add_remark(&mut self, remark: impl Into<String>) {
        let remark = remark.into();
        if !self.remarks.contains(&remark) {
            self.remarks.push(remark);
        }
    }

    fn check_answer(&mut self, conversation: &Conversation, traced: &TracedConversation, message: usize) {
        let TracedConversation { rendered, owners, .. } = traced;
        let own_targets = rendered.targets.iter().zip(owners).filter(|(_, owner)| **owner == Some(message));
        let own_targets: Vec<_> = own_targets.map(|(target, _)| target.clone()).collect();
        let is_certain = owners.iter().all(Option::is_some);
        let trained_text = match is_certain {
            true => own_targets.iter().map(|target| &rendered.text[target.clone()]).collect::<String>(),
            false => rendered.text.clone(),
        };
        let calls = field(&conversation.messages[message], "tool_calls");
        let names = calls.try_iter().into_iter().flatten().filter_map(|call| {
            let function = field(&call, "function");
            Some(field(if function.is_undefined() { &call } else { &function }, "name").as_str()?.to_string())
        });
        let mut parts: Vec<(String, String, RenderedExtent)> = names
            .map(|name| {
                (
                    "tool_calls".to_string(),
                    name.clone(),
                    if trained_text.contains(&name) { RenderedExtent::All } else { RenderedExtent::None },
                )
            })
            .collect();
        for (key, text, marked_text) in texts_of(conversation, traced, message) {
            let extent = extent(&text, marked_text, traced, &trained_text);
            let is_trained_on = |marked_text: &MarkedText| {
                let Some(range) = marked_text.rendered_range() else { return true };
                own_targets
                    .iter()
                    .any(|target| target.start < range.end.max(range.start + 1) && range.start < target.end)
            };
            if is_certain
                && extent != RenderedExtent::None
                && !own_targets.is_empty()
                && !marked_text.is_none_or(is_trained_on)
            {
                self.add_remark(format!("have {key} that is written but not trained on"));
            }
            parts.push((key, text, extent));
        }
        if parts.is_empty() {
            return;
        }
        if own_targets.is_empty() && is_certain {
            self.add_remark("have an answer that no {% generation %} block encloses");
            return;
        }
        if parts.iter().all(|(_, _, extent)| *extent == RenderedExtent::None) {
            let mut keys: Vec<String> = parts.into_iter().map(|(key, _, _)| key).collect();
            keys.dedup();
            self.omitted_answers.push((message, keys.join(" and ")));
            return;
        }
        for (key, text, extent) in parts {
            match extent {
                RenderedExtent::All => {}
                RenderedExtent::Some if key == "content" && THINKING_TAGS.iter().any(|tag| text.contains(tag)) => {
                    self.add_remark("have thoughts, up to </think>, that the template does not render");
                }
                RenderedExtent::Some => {
                    self.add_remark(format!("have {key} that the template does not render completely"))
                }
                RenderedExtent::None => self.add_remark(format!("have {key} that the template does not render")),
            }
        }
    }

    /// Records the omissions of a message that the model is not trained on.
    fn check_untrained(&mut self, conversation: &Conversation, traced: &TracedConversation, message: usize) {
        let text = &traced.rendered.text;
        let role = field(&conversation.messages[message], "role");
        let role = role.as_str().unwrap_or_default();
        for (_, message_text, marked_text) in texts_of(conversation, traced, message) {
            if extent(&message_text, marked_text, traced, text) != RenderedExtent::All {
                self.add_remark(format!("have a {role} message that the template does not render completely"));
            }
        }
        let content = field(&conversation.messages[message], "content");
        if content.kind() == ValueKind::Map && text.contains(&super::jinja_compat::python_str(&content)) {
            self.add_remark(format!(
                "have a {role} message whose content is an object: the object is written as Python prints it, not as \
                 JSON"
            ));
        }
    }
}

/// Returns the texts of a message that are not blank, with their keys and marks.
fn texts_of<'a>(
    conversation: &Conversation,
    traced: &'a TracedConversation,
    message: usize,
) -> Vec<(String, String, Option<&'a MarkedText>)> {
    let marked_texts =
        traced.trace.iter().flat_map(|trace| &trace.marked_texts).filter(|marked_text| marked_text.message == message);
    let mut all: Vec<_> = marked_texts
        .map(|marked_text| (marked_text.key.clone(), marked_text.text.clone(), Some(marked_text)))
        .collect();
    if all.is_empty() {
        let own = texts(&conversation.messages[message], conversation.is_assistant(message));
        all = own.into_iter().map(|(key, text)| (key, text, None)).collect();
    }
    all.retain(|(_, text, _)| !text.trim().is_empty());
    all
}

/// Returns how much of a text is rendered: all of it if it appears in its place, and otherwise as much as `within`
/// contains.
fn extent(text: &str, marked_text: Option<&MarkedText>, traced: &TracedConversation, within: &str) -> RenderedExtent {
    let text = text.trim();
    if let Some(range) = marked_text.and_then(MarkedText::rendered_range)
        && let Some(written) = traced.rendered.text.get(range)
    {
        let escaped = || serde_json::from_str::<String>(&format!("\"{written}\"")).ok();
        if written.trim() == text || escaped().is_some_and(|plain| plain.trim() == text) {
            return RenderedExtent::All;
        }
    }
    let mut pieces = vec![text];
    for tag in THINKING_TAGS {
        pieces = pieces.into_iter().flat_map(|piece| piece.split(tag)).collect();
    }
    pieces.retain(|piece| !piece.trim().is_empty());
    let is_rendered = |piece: &&str| {
        let piece = piece.trim();
        let json = || serde_json::to_string(piece).unwrap_or_default();
        within.contains(piece) || within.contains(json().trim_matches('"'))
    };
    match pieces.iter().filter(|piece| is_rendered(piece)).count() {
        count if count == pieces.len() => RenderedExtent::All,
        0 if !marked_text.is_some_and(MarkedText::is_rendered) => RenderedExtent::None,
        _ => RenderedExtent::Some,
    }
}
