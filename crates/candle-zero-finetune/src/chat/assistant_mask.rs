//! Finds the bytes that belong to the assistant in a rendered conversation.
//!
//! Neither of the usual methods, rendering prefixes of the conversation and searching for markers, is correct. The
//! conversation up to a message does not always render as a prefix of the full text: Qwen3 writes thoughts only in the
//! last answer. The text of a marker (`<|im_end|>`) can also appear in a user's message. Therefore, contents are traced:
//! in a second rendering, they contain Unicode private-use characters. If the two texts are otherwise equal, these
//! characters show where each content begins and ends. The answers follow from these positions:
//!
//! - An answer begins after the first answer header that follows the previous message. The template itself defines
//!   this header: it is the text that `add_generation_prompt` adds, or the text between a question and its
//!   answer in a probe, which is a short conversation rendered in advance.
//! - An answer ends with the first special token after its content, preferably the one that ends the probe's answer. If
//!   the template ends answers with ordinary text instead, an answer ends with that text.
//!
//! If the template has generation markers, they define the answers. The contents then show which message a marked range
//! belongs to. Both methods also find the texts of a message that the rendered text omits ([`super::omitted_texts`]).

use super::conversation::{ASSISTANT_TEXT_KEYS, Conversation, field};
use crate::error::FinetuneError;
use minijinja::value::{Value, ValueKind};
use std::ops::Range;

/// The characters before and after text that generation markers enclose.
pub(super) const GENERATION_MARKERS: [char; 2] = ['\u{10FFFC}', '\u{10FFFD}'];

/// A renderer of conversations as text.
pub(super) trait ChatRenderer {
    /// Renders the conversation with `messages` instead of its own messages. If `marked` is set, the text shows where
    /// the generation markers are.
    fn render_messages(
        &self,
        messages: &[Value],
        conversation: &Conversation,
        add_generation_prompt: bool,
        marked: bool,
    ) -> Result<String, FinetuneError>;
}

/// Returns the text of a conversation, if it can be rendered.
fn text_of(template: &impl ChatRenderer, conversation: &Conversation, prompt: bool) -> Option<String> {
    template.render_messages(&conversation.messages, conversation, prompt, false).ok()
}

/// A conversation as rendered by its template.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct RenderedConversation {
    /// The text.
    pub text: String,
    /// The byte ranges that the model is trained on: everything after the header of each of the assistant's turns, up
    /// to and including the token or text that ends the turn. The ranges are in order and do not overlap.
    pub targets: Vec<Range<usize>>,
}

/// The text and its targets, with facts about its messages.
#[derive(Debug)]
pub(crate) struct TracedConversation {
    pub rendered: RenderedConversation,
    /// The index of the message that each target belongs to, if known.
    pub owners: Vec<Option<usize>>,
    /// The indices of the assistant's messages whose end is not trained on.
    pub without_end: Vec<usize>,
    pub(super) trace: Option<MessageSpans>,
}

/// The positions of the messages' texts in the rendered text.
#[derive(Debug)]
pub(super) struct MessageSpans {
    points: Vec<MessageBoundary>,
    pub marked_texts: Vec<MarkedText>,
}

/// The texts that begin and end the turns of a template.
#[derive(Debug, Clone, Default)]
pub(super) struct TurnMarkers {
    /// The texts that precede an answer. The first one found is used.
    headers: Vec<String>,
    /// The special token or the text that ends an answer.
    end: Option<String>,
    /// The texts of all special tokens.
    special: Vec<String>,
}

impl TurnMarkers {
    /// Finds the markers by rendering short conversations with `template` and these variables.
    pub(super) fn of(template: &impl ChatRenderer, special: Vec<String>, variables: &[(String, Value)]) -> Self {
        let prompt = prompt(template, variables);
        let probe =
            [("user", "Aquestion"), ("assistant", "Ananswer"), ("user", "Bquestion"), ("assistant", "Bnanswer")];
        let text = text_of(template, &with_variables(Conversation::new(probe), variables), false);
        let between = |from: &str, to: &str| {
            let text = text.as_ref()?;
            let start = text.find(from)? + from.len();
            Some(text[start..start + text[start..].find(to)?].to_string())
        };
        let (before_answer, after_answer) = (between("Aquestion", "Ananswer"), between("Ananswer", "Bquestion"));
        let last = text.as_ref().and_then(|text| Some(&text[text.find("Bnanswer")? + "Bnanswer".len()..]));
        let end = after_answer.as_ref().and_then(|text| {
            let token = first_of(text, &special).map(|(_, token)| token.to_string());
            token.or_else(|| constant_end(text, last?))
        });
        let mut headers: Vec<String> = prompt.iter().cloned().collect();
        if let Some(before) = before_answer {
            // The text without the token that ends the question, if it begins with that token.
            let after_end = end.as_ref().and_then(|end| before.strip_prefix(end.as_str())).unwrap_or(&before);
            let shared_len = prompt.as_deref().map_or(0, |prompt| overlap(&before, prompt));
            headers.push(match shared_len {
                0 => after_end.trim_start().to_string(),
                shared_len => before[before.len() - shared_len..].to_string(),
            });
        }
        headers.retain(|header| !header.trim().is_empty());
        headers.dedup();
        Self { headers, end, special }
    }

    pub(super) fn special_texts(&self) -> Vec<String> {
        self.special.clone()
    }
}

/// Returns the text that ends an answer both within a conversation and at its end, without trailing white space: a
/// marker in brackets, or the complete common text.
fn constant_end(within: &str, last: &str) -> Option<String> {
    let common = within.char_indices().zip(last.chars()).take_while(|((_, a), b)| a == b);
    let common = &within[..common.map(|((at, c), _)| at + c.len_utf8()).last()?];
    let marker = common.trim_start();
    let close = match marker.chars().next()? {
        '<' => marker.find('>'),
        '[' => marker.find(']'),
        _ => None,
    };
    let end = close.map_or(common.trim_end(), |close| &common[..common.len() - marker.len() + close + 1]);
    Some(end.to_string())
}

/// Returns the conversation with these variables.
fn with_variables(conversation: Conversation, variables: &[(String, Value)]) -> Conversation {
    Conversation { variables: variables.to_vec(), ..conversation }
}

/// Returns the text that `add_generation_prompt` adds to a question.
fn prompt(template: &impl ChatRenderer, variables: &[(String, Value)]) -> Option<String> {
    let question = with_variables(Conversation::new([("user", "question")]), variables);
    let (without_prompt, with_prompt) = (text_of(template, &question, false)?, text_of(template, &question, true)?);
    with_prompt.strip_prefix(&without_prompt).filter(|added| !added.is_empty()).map(str::to_string)
}

/// Returns the length in bytes of the longest text that ends `a` and starts `b`.
fn overlap(a: &str, b: &str) -> usize {
    (1..=a.len().min(b.len())).rev().find(|n| b.is_char_boundary(*n) && a.ends_with(&b[..*n])).unwrap_or(0)
}

/// Returns the first of `words` in `text` and its position. If several begin there, returns the longest.
fn first_of<'a>(text: &str, words: &'a [String]) -> Option<(usize, &'a str)> {
    let found = words.iter().filter(|word| !word.is_empty()).filter_map(|word| Some((text.find(word.as_str())?, word)));
    found.min_by_key(|(at, word)| (*at, usize::MAX - word.len())).map(|(at, word)| (at, word.as_str()))
}

/// The placement of private-use characters in a message's content.
#[derive(Debug, Clone, Copy)]
enum MarkPlacement {
    /// Around the complete content.
    Around,
    /// Around the content without the white space at its ends, which templates strip.
    Inside,
    /// A single character in the middle, for templates that examine the ends.
    Middle,
    /// Around contents that are not empty and around the names of called tools, for templates that check whether the
    /// content is empty.
    NonEmpty,
}

const MARK_PLACEMENTS: [MarkPlacement; 4] =
    [MarkPlacement::Around, MarkPlacement::Inside, MarkPlacement::Middle, MarkPlacement::NonEmpty];

/// The keys whose texts templates compare but do not write.
const UNMARKED_KEYS: [&str; 5] = ["role", "type", "id", "name", "tool_call_id"];

/// Returns the text of a conversation and its targets, found by tracing the contents of its messages.
pub(super) fn find(
    template: &impl ChatRenderer,
    turns: &TurnMarkers,
    conversation: &Conversation,
) -> Result<TracedConversation, FinetuneError> {
    let text = template.render_messages(&conversation.messages, conversation, false, false)?;
    let answers: Vec<usize> = (0..conversation.len()).filter(|i| conversation.is_assistant(*i)).collect();
    let trace = trace_messages(template, turns, conversation, &text)?;
    let (mut targets, mut without_end) = (vec![], vec![]);
    for answer in answers {
        let (target, has_end) = turns
            .target(&text, &trace.points, answer)
            .ok_or(FinetuneError::Spans { message: answer + 1, reason: "the template does not render its content" })?;
        targets.push((target, answer));
        if !has_end {
            without_end.push(answer);
        }
    }
    targets.sort_by_key(|(target, _)| target.start);
    if let Some(pair) = targets.windows(2).find(|pair| pair[0].0.end > pair[1].0.start) {
        let reason = "its text overlaps with that of another message";
        return Err(FinetuneError::Spans { message: pair[0].1 + 1, reason });
    }
    let (targets, owners) = targets.into_iter().map(|(target, answer)| (target, Some(answer))).unzip();
    Ok(TracedConversation { rendered: RenderedConversation { text, targets }, owners, without_end, trace: Some(trace) })
}

/// Does the same as [`find`] for a template with generation markers, which define the targets.
pub(super) fn find_by_markers(
    template: &impl ChatRenderer,
    turns: &TurnMarkers,
    conversation: &Conversation,
) -> Result<TracedConversation, FinetuneError> {
    let rendered = parse_markers(&template.render_messages(&conversation.messages, conversation, false, true)?)?;
    let trace = trace_messages(template, turns, conversation, &rendered.text).ok();
    let owners: Vec<Option<usize>> = match &trace {
        Some(trace) => rendered.targets.iter().map(|block| trace.owner(conversation, block)).collect(),
        None => owners_by_count(template, conversation, rendered.targets.len()),
    };
    let has_end = |trace: &MessageSpans, message: usize| {
        let own_targets = rendered.targets.iter().zip(&owners).filter(|(_, owner)| **owner == Some(message));
        let end = own_targets.map(|(block, _)| block.end).max();
        let last = trace.points.iter().filter(|point| point.message == message).map(|point| point.at).max();
        end.zip(last).is_none_or(|(end, last)| end > last)
    };
    let without_end = trace.iter().flat_map(|trace| {
        (0..conversation.len()).filter(|i| conversation.is_assistant(*i) && !has_end(trace, *i)).collect::<Vec<_>>()
    });
    let without_end = without_end.collect();
    Ok(TracedConversation { rendered, owners, without_end, trace })
}

/// Returns the message of each marked range, derived from the number of ranges that occur up to each answer.
fn owners_by_count(template: &impl ChatRenderer, conversation: &Conversation, ranges: usize) -> Vec<Option<usize>> {
    let mut owners = vec![];
    for answer in (0..conversation.len()).filter(|i| conversation.is_assistant(*i)) {
        let text = template.render_messages(&conversation.messages[..=answer], conversation, false, true);
        let Ok(rendered) = text.and_then(|text| parse_markers(&text)) else { break };
        owners.resize(rendered.targets.len().max(owners.len()), Some(answer));
    }
    if owners.len() == ranges { owners } else { vec![None; ranges] }
}

/// Finds the positions of all messages' texts in the rendered text.
fn trace_messages(
    template: &impl ChatRenderer,
    turns: &TurnMarkers,
    conversation: &Conversation,
    text: &str,
) -> Result<MessageSpans, FinetuneError> {
    let count = conversation.len();
    let Some(first) = (0..count).find(|i| conversation.is_assistant(*i)) else {
        return Ok(MessageSpans { points: vec![], marked_texts: vec![] });
    };
    let uncertain = |message: usize, reason| FinetuneError::Spans { message: message + 1, reason };
    let marks = MarkCharacters::for_text(text)
        .ok_or(uncertain(first, "the text contains characters of plane 16 and of planes 12 to 15"))?;
    let trace = |placements: &[Option<MarkPlacement>]| trace(template, conversation, text, marks, placements);
    let has = |trace: &MessageSpans, i: usize| {
        !conversation.is_assistant(i) || trace.points.iter().any(|point| point.message == i)
    };
    // Uses the first placement that leaves the text unchanged and traces a part of each answer.
    let all = MARK_PLACEMENTS.iter().filter_map(|placement| trace(&vec![Some(*placement); count]));
    if let Some(trace) = all.into_iter().find(|trace| (0..count).all(|i| has(trace, i))) {
        return Ok(trace);
    }
    // A placement is chosen for each message separately, preferably one that traces a part of the message.
    let trace_one = |message: usize, placement: MarkPlacement| {
        let mut placements = vec![None; count];
        placements[message] = Some(placement);
        trace(&placements).map(|trace| (placement, has(&trace, message)))
    };
    let placements = (0..count).map(|i| {
        let found: Vec<_> = MARK_PLACEMENTS.into_iter().filter_map(|placement| trace_one(i, placement)).collect();
        found.iter().find(|(_, has)| *has).or(found.first()).map(|(placement, _)| *placement)
    });
    let placements: Vec<Option<MarkPlacement>> = placements.collect();
    let untraced = (0..count).filter(|i| placements[*i].is_none());
    let matters = |i: &usize| conversation.is_assistant(*i) || turns.is_imitated_by(&conversation.messages[*i]);
    if let Some(untraced) = untraced.clone().find(matters) {
        return Err(uncertain(untraced, "the template changes its content"));
    }
    trace(&placements).ok_or(uncertain(first, "the template changes its content"))
}

impl MessageSpans {
    /// Returns the answer that a marked range belongs to: the one whose content is in the range, or the adjacent one.
    fn owner(&self, conversation: &Conversation, block: &Range<usize>) -> Option<usize> {
        let is_answer = |point: &&MessageBoundary| conversation.is_assistant(point.message);
        let inside = |point: &&MessageBoundary| block.start <= point.at && point.at <= block.end;
        let within = self.points.iter().filter(is_answer).filter(inside).min_by_key(|point| {
            // An answer with a boundary inside the range takes precedence over one that only touches it.
            (point.at == block.start || point.at == block.end, point.message)
        });
        let before =
            || self.points.iter().filter(|point| point.at <= block.start).max_by_key(|point| (point.at, point.message));
        let after =
            || self.points.iter().filter(|point| point.at >= block.end).min_by_key(|point| (point.at, point.message));
        let adjacent = || before().filter(is_answer).or_else(|| after().filter(is_answer));
        within.or_else(adjacent).map(|point| point.message)
    }
}

/// The position in the rendered text at which a message's content, or a part of it, begins or ends.
#[derive(Debug, Clone, Copy)]
struct MessageBoundary {
    message: usize,
    at: usize,
}

impl TurnMarkers {
    /// Returns whether a message contains the text of a header.
    fn is_imitated_by(&self, message: &Value) -> bool {
        let text = message.to_string();
        self.headers.iter().any(|header| text.contains(header.trim()))
    }

    /// Returns the byte range of an answer in the text, and whether the range includes the answer's end. `points` are
    /// the boundaries of all messages.
    fn target(&self, text: &str, points: &[MessageBoundary], answer: usize) -> Option<(Range<usize>, bool)> {
        let own_positions = || points.iter().filter(|point| point.message == answer).map(|point| point.at);
        let other_positions = || points.iter().filter(|point| point.message != answer).map(|point| point.at);
        let (first, last) = (own_positions().min()?, own_positions().max()?);
        let before = other_positions().filter(|at| *at <= first).max().unwrap_or(0);
        let after = other_positions().filter(|at| *at > last).min().unwrap_or(text.len());
        let end_of_header = |header: &String| Some(before + text[before..first].find(header.as_str())? + header.len());
        let start = self.headers.iter().find_map(end_of_header).unwrap_or(first);
        let tail = &text[last..after];
        let usual_end = self.end.as_ref().and_then(|end| Some(tail.find(end.as_str())? + end.len()));
        let special_end = || first_of(tail, &self.special).map(|(at, token)| at + token.len());
        let end = usual_end.or_else(special_end).filter(|end| *end > 0);
        Some((start..last + end.unwrap_or(0), end.is_some()))
    }
}

/// Private-use characters that a text does not contain.
#[derive(Debug, Clone, Copy)]
struct MarkCharacters {
    /// The first of the characters. A plane has 65,534 of them.
    base: u32,
    /// The first byte of their UTF-8 encoding.
    lead: u8,
}

impl MarkCharacters {
    /// Returns characters of plane 16 or, if the text contains any of those, of plane 15. Returns `None` if the text
    /// also contains characters of planes 12 to 15, whose encodings all begin with the same byte.
    fn for_text(text: &str) -> Option<Self> {
        let planes = [Self { base: 0x10_0000, lead: 0xF4 }, Self { base: 0xF_0000, lead: 0xF3 }];
        planes.into_iter().find(|plane| !text.as_bytes().contains(&plane.lead))
    }

    /// Returns mark `n`. All marks beyond the plane's size share the plane's last character.
    fn char(self, n: usize) -> char {
        char::from_u32(self.base + n.min(0xFFFD) as u32).unwrap_or(char::MAX)
    }

    /// Returns the text without marks, and the position and number of each mark.
    fn take_out(self, marked: &str) -> (String, Vec<(usize, usize)>) {
        let (mut text, mut found) = (String::with_capacity(marked.len()), vec![]);
        let mut rest = marked;
        while let Some(at) = rest.bytes().position(|byte| byte == self.lead) {
            text.push_str(&rest[..at]);
            let c = rest[at..].chars().next().unwrap_or_default();
            match u32::from(c).checked_sub(self.base).filter(|n| *n <= 0xFFFD) {
                Some(n) => found.push((text.len(), n as usize)),
                None => text.push(c),
            }
            rest = &rest[at + c.len_utf8()..];
        }
        text.push_str(rest);
        (text, found)
    }
}

/// A text in a message and the positions of its marks.
#[derive(Debug)]
pub(super) struct MarkedText {
    pub message: usize,
    /// The key in the message under which the text was found.
    pub key: String,
    pub text: String,
    /// The texts before and after a mark in the middle.
    halves: Option<(String, String)>,
    /// The positions of the text's marks in the rendered text.
    mark_positions: [Option<usize>; 2],
}

impl MarkedText {
    /// Returns the text's range in the rendered text, if both ends are in it.
    pub(super) fn rendered_range(&self) -> Option<Range<usize>> {
        match (&self.halves, self.mark_positions) {
            (Some((head, tail)), [Some(at), _]) => Some(at.saturating_sub(head.len())..at + tail.len()),
            (None, [Some(start), Some(end)]) if start <= end => Some(start..end),
            _ => None,
        }
    }

    /// Returns whether either end of the text is in the rendered text.
    pub(super) fn is_rendered(&self) -> bool {
        self.mark_positions.iter().any(Option::is_some)
    }
}

/// Returns the texts of a message that a template may write, each as a pair of its key and the text.
pub(crate) fn texts(message: &Value, is_assistant: bool) -> Vec<(String, String)> {
    let mut all = vec![];
    mark_message(message, is_assistant, MarkPlacement::Around, &mut |key, text| {
        all.push((key.to_string(), text.to_string()));
        String::new()
    });
    all
}

/// Renders with marks in the messages that have a placement, and returns the positions of the marks. Returns `None` if
/// there are too many texts to mark, if the rendering fails, if its text is otherwise different, or if a mark cannot be
/// assigned to its text.
fn trace(
    template: &impl ChatRenderer,
    conversation: &Conversation,
    text: &str,
    marks: MarkCharacters,
    placements: &[Option<MarkPlacement>],
) -> Option<MessageSpans> {
    let mut marked_texts: Vec<MarkedText> = vec![];
    let mut marked = Vec::with_capacity(placements.len());
    for (i, (message, placement)) in conversation.messages.iter().zip(placements).enumerate() {
        marked.push(match placement {
            None => message.clone(),
            Some(placement) => mark_message(message, conversation.is_assistant(i), *placement, &mut |key, text| {
                let pair = [0, 1].map(|end| marks.char(2 * marked_texts.len() + end));
                let (content, halves) = mark_text(text, *placement, pair);
                marked_texts.push(MarkedText {
                    message: i,
                    key: key.into(),
                    text: text.into(),
                    halves,
                    mark_positions: [None; 2],
                });
                content
            }),
        });
    }
    // There are not enough private-use characters to mark this many texts.
    if marked_texts.len() > 0x7000 {
        return None;
    }
    let (unmarked, found) = marks.take_out(&template.render_messages(&marked, conversation, false, false).ok()?);
    if unmarked != text {
        return None;
    }
    let mut points = vec![];
    for (at, n) in found {
        let marked_text = marked_texts.get_mut(n / 2)?;
        marked_text.mark_positions[n % 2].get_or_insert(at);
        let MarkedText { message, halves, .. } = marked_text;
        let mut push = |at| points.push(MessageBoundary { message: *message, at });
        match halves {
            None => push(at),
            Some((head, tail)) => {
                let (before, after) = (&text[..at], &text[at..]);
                let head = [head.as_str(), head.trim_start()].into_iter().find(|head| before.ends_with(head))?;
                let tail = [tail.as_str(), tail.trim_end()].into_iter().find(|tail| after.starts_with(tail))?;
                push(at - head.len());
                push(at + tail.len());
            }
        }
    }
    Some(MessageSpans { points, marked_texts })
}

/// Returns a message with its texts changed by `mark`, which receives the key that each text belongs to.
fn mark_message(
    message: &Value,
    is_assistant: bool,
    placement: MarkPlacement,
    mark: &mut dyn FnMut(&str, &str) -> String,
) -> Value {
    let keys = message.try_iter().into_iter().flatten();
    let is_text = |key: &Value| {
        key.as_str().is_some_and(|key| key == "content" || is_assistant && ASSISTANT_TEXT_KEYS.contains(&key))
    };
    let fields = keys.map(|key| {
        let name = key.as_str().unwrap_or_default();
        let value = field(message, name);
        let value = if is_text(&key) { mark_value(&value, placement, &mut |text| mark(name, text)) } else { value };
        (key, value)
    });
    Value::from_pairs(fields)
}

/// Returns a value with its texts changed by `mark`.
fn mark_value(value: &Value, placement: MarkPlacement, mark: &mut dyn FnMut(&str) -> String) -> Value {
    match value.kind() {
        ValueKind::String => Value::from(mark(value.as_str().unwrap_or_default())),
        ValueKind::Seq => {
            value.try_iter().into_iter().flatten().map(|item| mark_value(&item, placement, mark)).collect()
        }
        ValueKind::Map => {
            let fields = value.try_iter().into_iter().flatten().map(|key| {
                let name = key.as_str().unwrap_or_default();
                let inner = value.get_item(&key).unwrap_or_default();
                let is_called = name == "name" && matches!(placement, MarkPlacement::NonEmpty);
                let is_unmarked = UNMARKED_KEYS.contains(&name) && !is_called;
                let inner = if is_unmarked { inner } else { mark_value(&inner, placement, mark) };
                (key, inner)
            });
            Value::from_pairs(fields)
        }
        _ => value.clone(),
    }
}

/// Returns a message's content with marks in it, and its two halves if the mark is in the middle.
fn mark_text(content: &str, placement: MarkPlacement, [open, close]: [char; 2]) -> (String, Option<(String, String)>) {
    let core = content.trim();
    match placement {
        MarkPlacement::NonEmpty if content.is_empty() => (String::new(), None),
        MarkPlacement::Around | MarkPlacement::NonEmpty => (format!("{open}{content}{close}"), None),
        MarkPlacement::Inside if core.is_empty() => (format!("{content}{open}{close}"), None),
        MarkPlacement::Inside => {
            let start = content.len() - content.trim_start().len();
            let (head, tail) = (&content[..start], &content[start + core.len()..]);
            (format!("{head}{open}{core}{close}{tail}"), None)
        }
        MarkPlacement::Middle => {
            let middle = (0..=content.len() / 2).rev().find(|at| content.is_char_boundary(*at)).unwrap_or(0);
            let (head, tail) = content.split_at(middle);
            (format!("{head}{open}{tail}"), Some((head.into(), tail.into())))
        }
    }
}

/// Returns the text and the targets of a rendering in which generation markers left their characters.
fn parse_markers(marked: &str) -> Result<RenderedConversation, FinetuneError> {
    let (mut text, mut targets, mut open_start) = (String::with_capacity(marked.len()), vec![], None);
    let mut rest = marked;
    while let Some(at) = rest.find(GENERATION_MARKERS) {
        text.push_str(&rest[..at]);
        let c = rest[at..].chars().next().unwrap_or_default();
        match (c == GENERATION_MARKERS[0], open_start.take()) {
            (true, None) => open_start = Some(text.len()),
            (false, Some(start)) => targets.push(start..text.len()),
            _ => return Err(FinetuneError::GenerationMarkers),
        }
        rest = &rest[at + c.len_utf8()..];
    }
    text.push_str(rest);
    match open_start {
        None => Ok(RenderedConversation { text, targets }),
        Some(_) => Err(FinetuneError::GenerationMarkers),
    }
}
