//! Parses a record. Its keys determine its format.

use super::chat_messages::{ChatMessages, RecordProblem};
use super::column_mapping::{ColumnMapping, PREFERENCE_KEYS, PREFERRED_KEYS, SECOND_TEXT_KEYS, names};
use super::tracked_record::TrackedRecord;
use crate::chat::conversation::{Conversation, kind};
use crate::chat::jinja_compat::python_str;
use minijinja::value::{Value, ValueKind};
use std::fmt;

/// The names of the formats.
pub(super) const RECORD_FORMATS: &str = "messages; conversations; prompt, completion; instruction, input, output; text; text, label; \
                                prompt, chosen, rejected";

/// The format of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum RecordFormat {
    /// `messages` (or `conversations`) with role and content.
    Messages,
    /// `conversations` with from and value.
    ShareGpt,
    /// `prompt` and `completion`.
    Completion,
    /// `instruction` and `output`, with `input`, `system` and `history` if these exist.
    Alpaca,
    /// `text`.
    Text,
    /// `text` and `label`.
    Label,
    /// `prompt`, `chosen` and `rejected`.
    Preference,
}

impl fmt::Display for RecordFormat {
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

/// An example to learn from, parsed from a record.
#[derive(Debug)]
pub(super) enum TrainingExample {
    /// A conversation. The model is trained on the assistant's messages that are marked in `trained_on`.
    Chat { conversation: Conversation, trained_on: Vec<bool> },
    /// A completion.
    Completion { prompt: String, completion: String },
    /// A text, all of which the model is trained on.
    Text(String),
    /// The label of a text.
    Label { text: String, label: String },
    /// Two answers, of which the first is preferred.
    Preference(Box<[TrainingExample; 2]>),
}

/// A parser of records.
#[derive(Debug, Clone, Copy)]
pub(super) struct RecordParser<'a> {
    pub columns: &'a ColumnMapping,
    /// Whether there is a chat template. If there is, instructions become messages.
    pub has_template: bool,
    /// Whether the model is trained to predict labels.
    pub has_labels: bool,
}

/// A parsed record.
#[derive(Debug)]
pub(super) struct ParsedRecord {
    pub format: RecordFormat,
    pub example: TrainingExample,
    /// Whether the record's weight allows training on the record.
    pub is_trained_on: bool,
    /// The keys that were not read.
    pub unread_keys: Vec<String>,
    /// Other remarks on the record.
    pub remarks: Vec<String>,
}

impl RecordParser<'_> {
    /// Finds the format of a record and parses its content.
    pub(super) fn parse(&self, record: &Value, unread: &[String]) -> Result<ParsedRecord, RecordProblem> {
        let fields = TrackedRecord::of(record, unread, self.columns);
        let mut remarks = vec![];
        let (format, example) = match record.kind() {
            ValueKind::Seq => (RecordFormat::Messages, chat(ChatMessages::of(record)?, None, &fields)?),
            ValueKind::Map => self.example(&fields, &mut remarks)?,
            _ => return Err(format!("it is {}, not an object", kind(record))),
        };
        let is_trained_on = record.kind() == ValueKind::Seq || fields.is_trained_on()?;
        if record.kind() == ValueKind::Map {
            fields.refuse_pictures()?;
            match format {
                RecordFormat::Text | RecordFormat::Label if !self.has_labels => {}
                RecordFormat::Text | RecordFormat::Label => {
                    fields.refuse(&SECOND_TEXT_KEYS, "pairs of texts are not supported; join them in one column")?;
                }
                RecordFormat::Preference => {
                    fields.refuse(&MISPLACED_KEYS, MISPLACED_KEY_REASON)?;
                    if let TrainingExample::Preference(pair) = &example {
                        self.remark_without_template(&pair[0], &mut remarks);
                    }
                    if fields.prefers_rejected() {
                        remarks.push("have a better score for the rejected answer than for the chosen one".into());
                    }
                }
                _ => {
                    fields.refuse(&MISPLACED_KEYS, MISPLACED_KEY_REASON)?;
                    fields.refuse(
                        &PREFERENCE_KEYS,
                        "it looks like a rating of a single answer (KTO), which is not supported, and if it were \
                         ignored, bad answers would be trained on like good ones; omit the bad ones and the column, \
                         or form pairs of chosen and rejected answers",
                    )?;
                    if let Some(rank) = fields.rank() {
                        remarks.push(format!(
                            "have a {rank}, which is ignored: good and bad answers are trained on alike"
                        ));
                    }
                }
            }
        }
        let unread_keys = if record.kind() == ValueKind::Map { fields.unread_keys() } else { vec![] };
        Ok(ParsedRecord { format, example, is_trained_on, unread_keys, remarks })
    }

    fn example(
        &self,
        fields: &TrackedRecord<'_>,
        remarks: &mut Vec<String>,
    ) -> Result<(RecordFormat, TrainingExample), RecordProblem> {
        if let (Some(chosen), Some(rejected)) = (fields.get("chosen"), fields.get("rejected")) {
            return Ok((RecordFormat::Preference, self.preference(fields, [chosen, rejected])?));
        }
        if let [Some(chosen), Some(rejected)] = PREFERRED_KEYS.map(|name| fields.get(name)) {
            return Ok((RecordFormat::Preference, openai_preference(fields, [&chosen, &rejected])?));
        }
        if let Some(name) = fields.any(&MESSAGES_KEYS) {
            let messages = ChatMessages::of(&fields.get(name).unwrap_or_default())?;
            let format = if messages.is_share_gpt { RecordFormat::ShareGpt } else { RecordFormat::Messages };
            return Ok((format, chat(messages, None, fields)?));
        }
        if fields.peek("prompt").is_some()
            && let Some(answer_key) = fields.any(&["completion", "response"])
        {
            let (prompt, completion) = (fields.get("prompt"), fields.get(answer_key));
            let example = completion_of(fields, &prompt.unwrap_or_default(), &completion.unwrap_or_default())?;
            self.remark_without_template(&example, remarks);
            return Ok((RecordFormat::Completion, example));
        }
        if fields.peek("instruction").is_some()
            && let Some(answer_key) = fields.any(&["output", "response", "completion"])
        {
            let prompt = self.parse_instruction(fields, "instruction")?;
            return Ok((RecordFormat::Alpaca, prompt.with_answer(fields.required_text(answer_key)?)?));
        }
        match (fields.peek("text"), fields.peek("label")) {
            (Some(_), Some(label)) => {
                let label = match self.has_labels {
                    true => label_name(&fields.get("label").unwrap_or_default())?,
                    false => label.to_string(),
                };
                Ok((RecordFormat::Label, TrainingExample::Label { text: fields.required_text("text")?, label }))
            }
            (Some(_), None) => Ok((RecordFormat::Text, TrainingExample::Text(fields.required_text("text")?))),
            _ => Err(self.unknown(fields)),
        }
    }

    /// Returns why a record has no known format.
    fn unknown(&self, fields: &TrackedRecord<'_>) -> RecordProblem {
        let keys = fields.keys();
        if self.has_labels {
            return format!(
                "its keys ({}) do not include text and label; map them with --columns text=COLUMN,label=COLUMN",
                names(&keys)
            );
        }
        let is_list = |key: &&String| {
            let first = fields.peek(key).filter(|value| value.kind() == ValueKind::Seq);
            first.and_then(|value| value.try_iter().ok()?.next()).is_some_and(|item| item.kind() == ValueKind::Map)
        };
        if let [only] = &keys.iter().filter(is_list).collect::<Vec<_>>()[..] {
            return format!(
                "its keys ({}) match no known format, and {only} is a list of objects; if these are the records, write \
                 them one per line, as jq -c '.{only}[]' does",
                names(&keys)
            );
        }
        format!("its keys ({}) match no known format: {RECORD_FORMATS}; {}", names(&keys), ColumnMapping::hint(&keys))
    }

    /// Adds a remark if texts are used without the model's chat template.
    fn remark_without_template(&self, example: &TrainingExample, remarks: &mut Vec<String>) {
        if self.has_template && matches!(example, TrainingExample::Completion { .. }) {
            remarks.push(
                "are used verbatim, without the model's chat template; for an instruct model, give messages, or \
                 --columns instruction=prompt,output=completion"
                    .into(),
            );
        }
    }

    /// Returns the instruction under `name` and its other fields.
    fn parse_instruction(&self, fields: &TrackedRecord<'_>, name: &str) -> Result<InstructionPrompt, RecordProblem> {
        let input = match (fields.text("input")?, fields.text("context")?) {
            (Some(_), Some(_)) => return Err("it has input and context; keep one of them".into()),
            (input, context) => input.or(context),
        };
        Ok(InstructionPrompt {
            instruction: fields.required_text(name)?,
            input,
            system: fields.system()?,
            history: history(fields)?,
            tools: fields.tools(true)?,
            variables: fields.variables()?,
            has_template: self.has_template,
        })
    }

    /// Parses two answers to one prompt: texts or messages after messages, texts after a text or an instruction, or two
    /// conversations or texts with the same beginning.
    fn preference(&self, fields: &TrackedRecord<'_>, answers: [Value; 2]) -> Result<TrainingExample, RecordProblem> {
        let pair = |examples: [Result<TrainingExample, RecordProblem>; 2]| {
            let [chosen, rejected] = examples;
            Ok(TrainingExample::Preference(Box::new([chosen?, rejected?])))
        };
        let is_list = answers[0].kind() == ValueKind::Seq;
        let prompt = fields.peek("prompt");
        match prompt {
            Some(prompt) if is_list == (prompt.kind() == ValueKind::Seq) || prompt.kind() == ValueKind::Seq => {
                fields.get("prompt");
                return pair([0, 1].map(|i| completion_of(fields, &prompt, &answers[i])));
            }
            _ => {}
        }
        if is_list {
            // The messages also contain the prompt's text.
            fields.get("prompt");
            let messages = answers.map(|answer| ChatMessages::of(&answer));
            let [Ok(chosen), Ok(rejected)] = &messages else {
                return pair(messages.map(|messages| messages.map(|_| TrainingExample::Text(String::new()))));
            };
            let common = chosen.list.iter().zip(&rejected.list).take_while(|(a, b)| a == b).count();
            // If one conversation is a prefix of the other, the answers begin with the last message of the shorter one.
            let common = common.min(chosen.list.len().min(rejected.list.len()) - 1);
            return pair(messages.map(|messages| chat(messages?, Some(common), fields)));
        }
        if let Some(name) = fields.any(&MESSAGES_KEYS) {
            let prompt = ChatMessages::of(&fields.get(name).unwrap_or_default())?;
            let from = prompt.list.len();
            return pair(answers.map(|answer| chat(prompt.clone().append(answer_of(&answer)?), Some(from), fields)));
        }
        if let Some(name) = fields.any(&["instruction", "question"]) {
            let prompt = self.parse_instruction(fields, name)?;
            let text = |answer: &Value| {
                answer
                    .as_str()
                    .map(str::to_string)
                    .ok_or_else(|| format!("an answer is {}, not a string", kind(answer)))
            };
            return pair(answers.map(|answer| prompt.clone().with_answer(text(&answer)?)));
        }
        let [Some(chosen), Some(rejected)] = answers.each_ref().map(|answer| answer.as_str()) else {
            return Err(format!(
                "its `chosen` is {} and its `rejected` is {}, but both must be strings or lists of messages",
                kind(&answers[0]),
                kind(&answers[1])
            ));
        };
        let at =
            common_beginning(chosen, rejected).ok_or("it has two texts without a common beginning, and no prompt")?;
        let completion =
            |text: &str| TrainingExample::Completion { prompt: text[..at].into(), completion: text[at..].into() };
        pair([chosen, rejected].map(|text| Ok(completion(text))))
    }
}

/// The keys that contain messages.
const MESSAGES_KEYS: [&str; 3] = ["messages", "conversations", "conversation"];

/// The keys that are not allowed in some formats.
const MISPLACED_KEYS: [&str; 8] =
    ["system", "system_prompt", "system_message", "history", "context", "tools", "functions", "chat_template_kwargs"];
const MISPLACED_KEY_REASON: &str = "this format has no place for it; write messages, or map an instruction's columns as in \
                             --columns instruction=prompt,output=completion";

/// Returns the name of a label: a text, an integer or a boolean.
fn label_name(label: &Value) -> Result<String, RecordProblem> {
    let whole_number =
        || f64::try_from(label.clone()).ok().filter(|number| number.fract() == 0.0 && number.abs() < 1e15);
    match label.kind() {
        ValueKind::String if label.as_str().is_some_and(|text| text.trim().is_empty()) => {
            Err("its label is empty; add one, or omit the record".into())
        }
        ValueKind::String | ValueKind::Bool => Ok(python_str(label)),
        ValueKind::Number if label.is_integer() => Ok(python_str(label)),
        // In a column with missing values, pandas writes integers as floating-point numbers.
        ValueKind::Number => match whole_number() {
            Some(number) => Ok((number as i64).to_string()),
            None => Err(format!("its label is {label}, but must be a name or a whole number")),
        },
        _ => Err(format!("its label is {}, but must be a name or a whole number", kind(label))),
    }
}

/// Builds a conversation from messages and the record's system text and tools. The model is trained on the assistant's
/// messages starting at index `from`, unless their weight excludes them.
fn chat(
    messages: ChatMessages,
    from: Option<usize>,
    fields: &TrackedRecord<'_>,
) -> Result<TrainingExample, RecordProblem> {
    let (count, is_share_gpt) = (messages.list.len(), messages.is_share_gpt);
    let messages = match fields.system()? {
        Some(system) => messages.with_system(&system)?,
        None => messages,
    };
    let from = from.unwrap_or(0) + messages.list.len() - count;
    let flags = messages.trained_on.iter().enumerate();
    let trained_on = flags.map(|(i, flag)| i >= from && flag.unwrap_or(true)).collect();
    let mut conversation = Conversation::from_value(&messages.list.into_iter().collect()).map_err(|e| match e {
        crate::error::FinetuneError::Conversation { reason } => reason,
        e => e.to_string(),
    })?;
    conversation.tools = fields.tools(is_share_gpt)?;
    conversation.variables = fields.variables()?;
    Ok(TrainingExample::Chat { conversation, trained_on })
}

/// Returns an answer, which is a text, a message or several messages, as messages.
fn answer_of(answer: &Value) -> Result<ChatMessages, RecordProblem> {
    match answer.as_str() {
        Some(text) => Ok(ChatMessages::text("assistant", text)),
        None => ChatMessages::of(answer),
    }
}

/// Parses a prompt and its continuation: two texts, or messages followed by messages or a text.
fn completion_of(
    fields: &TrackedRecord<'_>,
    prompt: &Value,
    completion: &Value,
) -> Result<TrainingExample, RecordProblem> {
    match (prompt.as_str(), completion.as_str()) {
        (Some(prompt), Some(completion)) => {
            Ok(TrainingExample::Completion { prompt: prompt.into(), completion: completion.into() })
        }
        (None, _) if prompt.kind() == ValueKind::Seq => {
            let prompt = ChatMessages::of(prompt)?;
            let from = prompt.list.len();
            chat(prompt.append(answer_of(completion)?), Some(from), fields)
        }
        _ => Err(format!(
            "its prompt is {} and its completion is {}, but both must be strings, or the prompt a list of messages",
            kind(prompt),
            kind(completion)
        )),
    }
}

/// Parses OpenAI's preference format: messages and tools within `input`, and two lists of messages.
fn openai_preference(fields: &TrackedRecord<'_>, answers: [&Value; 2]) -> Result<TrainingExample, RecordProblem> {
    let input = fields.get("input").unwrap_or_default();
    let columns = ColumnMapping::default();
    let inner = TrackedRecord::of(&input, &[], &columns);
    let prompt = ChatMessages::of(&inner.get("messages").ok_or("its input has no messages")?)?;
    let from = prompt.list.len();
    let [chosen, rejected] = answers.map(|answer| chat(prompt.clone().append(answer_of(answer)?), Some(from), &inner));
    Ok(TrainingExample::Preference(Box::new([chosen?, rejected?])))
}

/// Returns the earlier turns of an instruction, as pairs of question and answer.
fn history(fields: &TrackedRecord<'_>) -> Result<Vec<[String; 2]>, RecordProblem> {
    let wrong =
        || "its history is not a list of pairs of strings, such as [[\"question\", \"answer\"], ...]".to_string();
    let Some(found) = fields.get("history") else { return Ok(vec![]) };
    let found = match found.as_str() {
        Some("") => return Ok(vec![]),
        Some(text) => super::raw_record::json(text).map_err(|_| wrong())?,
        None => found,
    };
    if found.kind() != ValueKind::Seq {
        return Err(wrong());
    }
    let pair = |turn: Value| {
        let texts: Vec<Value> = turn.try_iter().ok()?.collect();
        match &texts[..] {
            [question, answer] => Some([question.as_str()?.to_string(), answer.as_str()?.to_string()]),
            _ => None,
        }
    };
    found.try_iter().into_iter().flatten().map(|turn| pair(turn).ok_or_else(wrong)).collect()
}

/// Returns the position at which the common beginning of two texts ends: after the last answer header that they share
/// or, without one, before the last white space that they share, so that no word is cut. Returns `None` if they share
/// neither.
fn common_beginning(chosen: &str, rejected: &str) -> Option<usize> {
    const HEADERS: [&str; 7] = [
        "\n\nAssistant:",
        "Assistant:",
        "<|im_start|>assistant\n",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "<|assistant|>\n",
        "### Response:\n",
        "[/INST]",
    ];
    let pairs = chosen.char_indices().zip(rejected.chars());
    let common_len = pairs.take_while(|((_, a), b)| a == b).map(|((at, a), _)| at + a.len_utf8()).last().unwrap_or(0);
    let common = &chosen[..common_len];
    let end_of_header = |header: &&str| common.rfind(*header).map(|at| at + header.len());
    let at = HEADERS.iter().filter_map(end_of_header).max();
    at.or_else(|| common.rfind(char::is_whitespace)).filter(|at| *at > 0)
}

/// An instruction with its other fields.
#[derive(Clone)]
struct InstructionPrompt {
    instruction: String,
    input: Option<String>,
    system: Option<String>,
    history: Vec<[String; 2]>,
    tools: Value,
    variables: Vec<(String, Value)>,
    has_template: bool,
}

impl InstructionPrompt {
    /// Adds the answer to the instruction: as messages, or in the wording of Stanford's Alpaca.
    fn with_answer(self, output: String) -> Result<TrainingExample, RecordProblem> {
        let Self { instruction, input, system, history, tools, variables, has_template } = self;
        if has_template {
            let question = [Some(instruction), input].into_iter().flatten().filter(|text| !text.is_empty());
            let question = question.collect::<Vec<_>>().join("\n\n");
            let earlier =
                history.into_iter().flat_map(|[question, answer]| [("user", question), ("assistant", answer)]);
            let system = system.map(|text| ("system", text));
            let turns = system.into_iter().chain(earlier).chain([("user", question), ("assistant", output)]);
            let mut conversation = Conversation::new(turns);
            (conversation.tools, conversation.variables) = (tools, variables);
            let trained_on = vec![true; conversation.len()];
            return Ok(TrainingExample::Chat { conversation, trained_on });
        }
        if !history.is_empty() || !tools.is_none() {
            return Err("its history or tools need a chat template, but the model has none".into());
        }
        let introduction = match (&system, &input) {
            (Some(system), _) => system.as_str(),
            (None, Some(_)) => {
                "Below is an instruction that describes a task, paired with an input that provides further context. Write a \
                 response that appropriately completes the request."
            }
            (None, None) => {
                "Below is an instruction that describes a task. Write a response that appropriately completes the request."
            }
        };
        let input = input.map(|input| format!("### Input:\n{input}\n\n")).unwrap_or_default();
        let prompt = format!("{introduction}\n\n### Instruction:\n{instruction}\n\n{input}### Response:\n");
        Ok(TrainingExample::Completion { prompt, completion: output })
    }
}
