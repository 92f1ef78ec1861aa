//! Where the assistant speaks in the text that a chat template makes.
//!
//! Neither of the usual ways is right. The conversation up to a message does not always render as a prefix of the whole
//! (Qwen3 writes its thoughts for the last answer alone), and the text of a marker (`<|im_end|>`) may stand in what a user
//! says. So contents are traced: a second rendering has private characters in them, and where it is the same text but for
//! these, they tell where each content begins and ends. From there:
//!
//! - an answer begins after the first header of an answer since the message before it. What a header is, the template
//!   says itself: it is what `add_generation_prompt` adds, or what stands between a question and its answer in a probe;
//! - it ends with the first special token after its content, that of a probe's answer where it is there.

use super::conversation::{Conversation, field};
use super::error::FinetuneError;
use minijinja::value::{Value, ValueKind};
use std::ops::Range;

/// Before and after what generation markers enclose.
pub(super) const GENERATION: [char; 2] = ['\u{10FFFC}', '\u{10FFFD}'];

/// What writes the text of a conversation.
pub(super) trait Render {
    /// The text of `messages` in place of the conversation's, with marks where generation markers stand if `marked`.
    fn render_messages(
        &self,
        messages: &[Value],
        conversation: &Conversation,
        add_generation_prompt: bool,
        marked: bool,
    ) -> Result<String, FinetuneError>;
}

/// The text of a conversation, where there is one.
fn text_of(template: &impl Render, conversation: &Conversation, prompt: bool) -> Option<String> {
    template.render_messages(&conversation.messages, conversation, prompt, false).ok()
}

/// A conversation as its template writes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rendered {
    /// The text.
    pub text: String,
    /// The stretches of its bytes that the assistant is to learn: all that stands after the header of its turns, up to
    /// and with the token that ends them. In order, without overlap.
    pub targets: Vec<Range<usize>>,
}

/// How the turns of a template's text begin and end.
#[derive(Debug, Clone, Default)]
pub(super) struct Turns {
    /// What an answer stands after, the first that is found.
    headers: Vec<String>,
    /// The special token that ends an answer.
    end: Option<String>,
    /// The texts of all special tokens.
    special: Vec<String>,
}

impl Turns {
    /// Asks `template` for the text of short conversations.
    pub(super) fn of(template: &impl Render, special: Vec<String>) -> Self {
        let prompt = prompt(template);
        let probe =
            [("user", "Aquestion"), ("assistant", "Ananswer"), ("user", "Bquestion"), ("assistant", "Bnanswer")];
        let text = text_of(template, &Conversation::new(probe), false);
        let between = |from: &str, to: &str| {
            let text = text.as_ref()?;
            let start = text.find(from)? + from.len();
            Some(text[start..start + text[start..].find(to)?].to_string())
        };
        let (before_answer, after_answer) = (between("Aquestion", "Ananswer"), between("Ananswer", "Bquestion"));
        let end = after_answer.as_ref().and_then(|text| Some(first_of(text, &special)?.1.to_string()));
        let mut headers: Vec<String> = prompt.iter().cloned().collect();
        if let Some(before) = before_answer {
            // Without a token that ends the question.
            let ended = end.as_ref().and_then(|end| before.strip_prefix(end.as_str())).unwrap_or(&before);
            let own = ended.trim_start();
            let shared = prompt.as_deref().map_or(0, |prompt| overlap(&before, prompt));
            headers.push(match shared {
                0 => own.to_string(),
                shared => before[before.len() - shared..].to_string(),
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

/// What `add_generation_prompt` adds to a question.
fn prompt(template: &impl Render) -> Option<String> {
    let question = Conversation::new([("user", "question")]);
    let (without, with) = (text_of(template, &question, false)?, text_of(template, &question, true)?);
    with.strip_prefix(&without).filter(|added| !added.is_empty()).map(str::to_string)
}

/// The most bytes that stand at the end of `a` and the start of `b`.
fn overlap(a: &str, b: &str) -> usize {
    (1..=a.len().min(b.len())).rev().find(|n| b.is_char_boundary(*n) && a.ends_with(&b[..*n])).unwrap_or(0)
}

/// The first of `words` in `text`, the longest of those that begin there, and where it begins.
fn first_of<'a>(text: &str, words: &'a [String]) -> Option<(usize, &'a str)> {
    let found = words.iter().filter(|word| !word.is_empty()).filter_map(|word| Some((text.find(word.as_str())?, word)));
    found.min_by_key(|(at, word)| (*at, usize::MAX - word.len())).map(|(at, word)| (at, word.as_str()))
}

/// Where private characters are put into a content.
#[derive(Debug, Clone, Copy)]
enum Place {
    /// Around all of it.
    Around,
    /// Around all but the white space at its ends, which templates take away.
    Inside,
    /// One in its middle, for templates that look at its ends.
    Middle,
}

const PLACES: [Place; 3] = [Place::Around, Place::Inside, Place::Middle];

/// Keys of messages whose texts templates compare, and do not write.
const NOT_MARKED: [&str; 5] = ["role", "type", "id", "name", "tool_call_id"];

/// Keys of what an assistant says.
const SAID: [&str; 5] = ["content", "reasoning_content", "reasoning", "thinking", "tool_calls"];

/// The text of a conversation and its targets, by tracing the contents of its messages.
pub(super) fn find(
    template: &impl Render,
    turns: &Turns,
    conversation: &Conversation,
) -> Result<Rendered, FinetuneError> {
    let text = template.render_messages(&conversation.messages, conversation, false, false)?;
    let answers: Vec<usize> = (0..conversation.len()).filter(|i| conversation.is_assistant(*i)).collect();
    let Some(first) = answers.first().copied() else { return Ok(Rendered { text, targets: vec![] }) };
    let uncertain = |message: usize, reason| FinetuneError::Spans { message: message + 1, reason };
    let marks = Marks::for_text(&text).ok_or(uncertain(first, "it holds private characters of planes 15 and 16"))?;
    let trace = |places: &[Option<Place>]| trace(template, conversation, &text, marks, places);
    let count = conversation.len();
    let points = match PLACES.iter().find_map(|place| trace(&vec![Some(*place); count])) {
        Some(points) => points,
        None => {
            // Each message by itself: which places leave the text as it is.
            let alone = |message: usize, place: Place| {
                let mut places = vec![None; count];
                places[message] = Some(place);
                trace(&places).is_some()
            };
            let places: Vec<Option<Place>> =
                (0..count).map(|i| PLACES.into_iter().find(|place| alone(i, *place))).collect();
            let lost = (0..count).filter(|i| places[*i].is_none());
            let matters = |i: &usize| conversation.is_assistant(*i) || turns.is_imitated_by(&conversation.messages[*i]);
            if let Some(lost) = lost.clone().find(matters) {
                return Err(uncertain(lost, "the template changes its content"));
            }
            trace(&places).ok_or(uncertain(first, "the template changes its content"))?
        }
    };
    let mut targets: Vec<Range<usize>> = vec![];
    for answer in answers {
        let target = turns.target(&text, &points, answer);
        targets.push(target.ok_or(uncertain(answer, "the template does not write its content"))?);
    }
    targets.sort_by_key(|target| target.start);
    if targets.windows(2).any(|pair| pair[0].end > pair[1].start) {
        return Err(uncertain(first, "its text and that of another message lie in each other"));
    }
    Ok(Rendered { text, targets })
}

/// An end of a message's content, or a part of it, in the text.
#[derive(Debug, Clone, Copy)]
struct Point {
    message: usize,
    at: usize,
}

impl Turns {
    /// Whether a message has the text of a header in it.
    fn is_imitated_by(&self, message: &Value) -> bool {
        let text = message.to_string();
        self.headers.iter().any(|header| text.contains(header.trim()))
    }

    /// The bytes of an answer in the text, from the points of all messages.
    fn target(&self, text: &str, points: &[Point], answer: usize) -> Option<Range<usize>> {
        let own = || points.iter().filter(|point| point.message == answer).map(|point| point.at);
        let others = || points.iter().filter(|point| point.message != answer).map(|point| point.at);
        let (first, last) = (own().min()?, own().max()?);
        let before = others().filter(|at| *at <= first).max().unwrap_or(0);
        let after = others().filter(|at| *at > last).min().unwrap_or(text.len());
        let headed = |header: &String| Some(before + text[before..first].find(header.as_str())? + header.len());
        let start = self.headers.iter().find_map(headed).unwrap_or(first);
        let tail = &text[last..after];
        let usual = self.end.as_ref().and_then(|end| Some(tail.find(end.as_str())? + end.len()));
        let any = || first_of(tail, &self.special).map(|(at, token)| at + token.len());
        Some(start..last + usual.or_else(any).unwrap_or(0))
    }
}

/// Private characters that a text does not have.
#[derive(Debug, Clone, Copy)]
struct Marks {
    /// The first of them; a plane has 65,534.
    base: u32,
    /// The byte that their UTF-8 begins with.
    lead: u8,
}

impl Marks {
    /// Of plane 16, else of plane 15.
    fn for_text(text: &str) -> Option<Self> {
        let planes = [Self { base: 0x10_0000, lead: 0xF4 }, Self { base: 0xF_0000, lead: 0xF3 }];
        planes.into_iter().find(|plane| !text.as_bytes().contains(&plane.lead))
    }

    /// Mark `n`; more than a plane holds are all its last one.
    fn char(self, n: usize) -> char {
        char::from_u32(self.base + n.min(0xFFFD) as u32).unwrap_or(char::MAX)
    }

    /// The text without marks, and the place and number of each.
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

/// A stretch of text in a message, and where it was marked.
struct Leaf {
    message: usize,
    /// What stands before and after a mark in the middle.
    halves: Option<(String, String)>,
}

/// Renders with marks in the messages that have a place, and gives where these stand; nothing where the text is another.
fn trace(
    template: &impl Render,
    conversation: &Conversation,
    text: &str,
    marks: Marks,
    places: &[Option<Place>],
) -> Option<Vec<Point>> {
    let mut leaves = vec![];
    let mut marked = Vec::with_capacity(places.len());
    for (i, (message, place)) in conversation.messages.iter().zip(places).enumerate() {
        marked.push(match place {
            None => message.clone(),
            Some(place) => mark_message(message, conversation.is_assistant(i), &mut |content| {
                let pair = [0, 1].map(|end| marks.char(2 * leaves.len() + end));
                let (content, halves) = mark_text(content, *place, pair);
                leaves.push(Leaf { message: i, halves });
                content
            }),
        });
    }
    // More than there are marks.
    if leaves.len() > 0x7000 {
        return None;
    }
    let (without, found) = marks.take_out(&template.render_messages(&marked, conversation, false, false).ok()?);
    if without != text {
        return None;
    }
    let mut points = vec![];
    for (at, n) in found {
        let Leaf { message, halves } = leaves.get(n / 2)?;
        let mut push = |at| points.push(Point { message: *message, at });
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
    Some(points)
}

/// A message with its texts changed by `mark`.
fn mark_message(message: &Value, is_assistant: bool, mark: &mut dyn FnMut(&str) -> String) -> Value {
    let keys = message.try_iter().into_iter().flatten();
    let said = |key: &Value| key.as_str().is_some_and(|key| key == "content" || is_assistant && SAID.contains(&key));
    let fields = keys.map(|key| {
        let value = field(message, key.as_str().unwrap_or_default());
        let value = if said(&key) { mark_value(&value, mark) } else { value };
        (key, value)
    });
    Value::from_pairs(fields)
}

/// A value with the texts in it changed by `mark`.
fn mark_value(value: &Value, mark: &mut dyn FnMut(&str) -> String) -> Value {
    match value.kind() {
        ValueKind::String => Value::from(mark(value.as_str().unwrap_or_default())),
        ValueKind::Seq => value.try_iter().into_iter().flatten().map(|item| mark_value(&item, mark)).collect(),
        ValueKind::Map => {
            let fields = value.try_iter().into_iter().flatten().map(|key| {
                let name = key.as_str().unwrap_or_default();
                let inner = value.get_item(&key).unwrap_or_default();
                let inner = if NOT_MARKED.contains(&name) { inner } else { mark_value(&inner, mark) };
                (key, inner)
            });
            Value::from_pairs(fields)
        }
        _ => value.clone(),
    }
}

/// A content with marks in it, and its halves where there is one in the middle.
fn mark_text(content: &str, place: Place, [open, close]: [char; 2]) -> (String, Option<(String, String)>) {
    let core = content.trim();
    match place {
        Place::Around => (format!("{open}{content}{close}"), None),
        Place::Inside if core.is_empty() => (format!("{content}{open}{close}"), None),
        Place::Inside => {
            let start = content.len() - content.trim_start().len();
            let (head, tail) = (&content[..start], &content[start + core.len()..]);
            (format!("{head}{open}{core}{close}{tail}"), None)
        }
        Place::Middle => {
            let middle = (0..=content.len() / 2).rev().find(|at| content.is_char_boundary(*at)).unwrap_or(0);
            let (head, tail) = content.split_at(middle);
            (format!("{head}{open}{tail}"), Some((head.into(), tail.into())))
        }
    }
}

/// The text and the targets of a rendering in which generation markers left their characters.
pub(super) fn of_markers(marked: &str) -> Result<Rendered, FinetuneError> {
    let (mut text, mut targets, mut begun) = (String::with_capacity(marked.len()), vec![], None);
    let mut rest = marked;
    while let Some(at) = rest.find(GENERATION) {
        text.push_str(&rest[..at]);
        let c = rest[at..].chars().next().unwrap_or_default();
        match (c == GENERATION[0], begun.take()) {
            (true, None) => begun = Some(text.len()),
            (false, Some(start)) => targets.push(start..text.len()),
            _ => return Err(FinetuneError::GenerationMarkers),
        }
        rest = &rest[at + c.len_utf8()..];
    }
    text.push_str(rest);
    match begun {
        None => Ok(Rendered { text, targets }),
        Some(_) => Err(FinetuneError::GenerationMarkers),
    }
}
