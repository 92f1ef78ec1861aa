//! The names of columns that define a record's format or change what the model is trained on, and the user's own names
//! for columns.

use crate::error::FinetuneError;
use candle_zero::util::list;
use std::str::FromStr;

/// The names that define a record's format.
pub(super) const FORMAT_KEYS: [&str; 21] = [
    "messages",
    "conversations",
    "conversation",
    "prompt",
    "completion",
    "response",
    "instruction",
    "question",
    "input",
    "context",
    "output",
    "system",
    "system_prompt",
    "system_message",
    "history",
    "text",
    "label",
    "chosen",
    "rejected",
    "tools",
    "functions",
];

/// Other keys that define or change what the model is trained on.
pub(super) const PREFERRED_KEYS: [&str; 2] = ["preferred_output", "non_preferred_output"];
pub(super) const VARIABLE_KEYS: [&str; 2] = ["chat_template_kwargs", "documents"];
pub(super) const WEIGHT_KEYS: [&str; 6] = ["weight", "loss_weight", "sample_weight", "train", "training", "trainable"];
pub(super) const PREFERENCE_KEYS: [&str; 4] = ["label", "labels", "kto_tag", "desirable"];
pub(super) const SECOND_TEXT_KEYS: [&str; 9] =
    ["text_pair", "text_b", "text2", "sentence1", "sentence2", "premise", "hypothesis", "context", "question"];
pub(super) const IMAGE_KEYS: [&str; 14] = [
    "image",
    "images",
    "image_path",
    "image_paths",
    "image_url",
    "image_urls",
    "image_file",
    "pixel_values",
    "picture",
    "pictures",
    "video",
    "videos",
    "audio",
    "audios",
];
/// The keys of the scores of two answers: the chosen one and the rejected one.
pub(crate) const SCORE_KEYS: [[&str; 2]; 4] = [
    ["score_chosen", "score_rejected"],
    ["chosen_score", "rejected_score"],
    ["chosen_rating", "rejected_rating"],
    ["rating_chosen", "rating_rejected"],
];
/// The keys that state how good a record is.
pub(super) const QUALITY_KEYS: [&str; 8] =
    ["score", "scores", "rank", "ranking", "rating", "reward", "rewards", "quality"];

/// The roles that a user's column can have, besides `ignore`.
const COLUMN_ROLES: [&str; 15] = [
    "messages",
    "prompt",
    "completion",
    "instruction",
    "input",
    "output",
    "text",
    "label",
    "chosen",
    "rejected",
    "system",
    "tools",
    "history",
    "context",
    "weight",
];

/// The roles of data columns whose names differ from the known ones.
///
/// ```
/// use candle_zero_finetune::ColumnMapping;
///
/// let columns: ColumnMapping = "prompt=question,completion=answer,ignore=label".parse()?;
/// assert!("prompt".parse::<ColumnMapping>().is_err());
/// # Ok::<(), candle_zero::Error>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ColumnMapping {
    /// Each role with the name of its column.
    named: Vec<(&'static str, String)>,
    ignored: Vec<String>,
}

impl FromStr for ColumnMapping {
    type Err = candle_zero::Error;

    /// Parses `prompt=question,completion=answer`. `ignore=NAME` ignores a column.
    fn from_str(text: &str) -> Result<Self, candle_zero::Error> {
        let refused = |found: &str, allowed: String| {
            Err(FinetuneError::Option { flag: "--columns", found: found.into(), allowed }.into())
        };
        let mut columns = Self::default();
        for part in text.split(',') {
            let Some((role, name)) = part.split_once('=').filter(|(_, name)| !name.is_empty()) else {
                return refused(text, "pairs such as prompt=question,completion=answer".into());
            };
            if role == "ignore" {
                columns.ignored.push(name.into());
                continue;
            }
            let Some(role) = COLUMN_ROLES.into_iter().find(|known| *known == role) else {
                return refused(
                    part,
                    format!("NAME=COLUMN, where NAME is one of {} or ignore", COLUMN_ROLES.join(", ")),
                );
            };
            if let Some((_, first)) = columns.named.iter().find(|(other, _)| *other == role) {
                return refused(
                    text,
                    format!("pairs with different names; {role} is given twice, as {first} and as {name}"),
                );
            }
            columns.named.push((role, name.into()));
        }
        match columns.named.iter().find(|(_, name)| columns.ignored.contains(name)) {
            Some((role, name)) => refused(
                text,
                format!("pairs that either name a column or ignore it; {name} is both ignored and named {role}"),
            ),
            None => Ok(columns),
        }
    }
}

impl ColumnMapping {
    /// Returns the column that is read as `role`, or `None` if the user's names exclude it.
    pub(crate) fn of<'a>(&'a self, role: &'a str) -> Option<&'a str> {
        if let Some(name) = self.named_as(role) {
            return Some(name);
        }
        let is_taken = self.named.iter().any(|(_, name)| name == role) || self.is_ignored(role);
        (!is_taken && !self.hides(role)).then_some(role)
    }

    /// Returns the user's name for the column that is read as `role`.
    pub(super) fn named_as(&self, role: &str) -> Option<&str> {
        self.named.iter().find(|(known, _)| *known == role).map(|(_, name)| name.as_str())
    }

    /// Returns whether the user ignores a column.
    pub(super) fn is_ignored(&self, name: &str) -> bool {
        self.ignored.iter().any(|ignored| ignored == name)
    }

    /// Returns whether `role` belongs to a format other than the one that the user's names define.
    fn hides(&self, role: &str) -> bool {
        let names = |roles: &[&str]| roles.iter().any(|role| self.named_as(role).is_some());
        match role {
            "messages" | "conversations" | "conversation" => {
                names(&["prompt", "completion", "instruction", "output", "text"])
            }
            "chosen" | "rejected" => names(&["messages", "completion", "output", "text"]),
            "prompt" => names(&["messages", "instruction", "text"]),
            "completion" | "response" => names(&["messages", "completion", "output", "text", "chosen"]),
            "instruction" | "question" => names(&["messages", "prompt", "instruction", "text"]),
            "output" => names(&["messages", "completion", "text", "chosen"]),
            "text" => names(&["messages", "prompt", "completion", "instruction", "output"]),
            "system_prompt" | "system_message" => names(&["system"]),
            _ => false,
        }
    }

    /// Returns whether a column of this name defines a format.
    pub(super) fn is_key(&self, name: &str) -> bool {
        self.named.iter().any(|(_, named)| named == name) || FORMAT_KEYS.contains(&name) && !self.is_ignored(name)
    }

    /// Returns whether a column of this name is examined.
    pub(super) fn is_known(&self, name: &str) -> bool {
        let others: [&[&str]; 7] = [
            &PREFERRED_KEYS,
            &VARIABLE_KEYS,
            &WEIGHT_KEYS,
            &PREFERENCE_KEYS,
            &SECOND_TEXT_KEYS,
            &IMAGE_KEYS,
            SCORE_KEYS.as_flattened(),
        ];
        self.is_key(name) || others.iter().any(|names| names.contains(&name)) && !self.is_ignored(name)
    }

    /// Returns advice for error messages: the option that maps columns with other names.
    pub(super) fn hint(keys: &[String]) -> String {
        let has =
            |names: &[&str]| names.iter().find(|name| keys.iter().any(|key| key == *name)).map(ToString::to_string);
        let prompt_key = has(&["question", "query", "instruction", "prompt", "user", "ask", "problem", "input"]);
        let completion_key = has(&["answer", "response", "output", "solution", "assistant", "reply", "target"]);
        let (prompt, completion) = (prompt_key.unwrap_or("COLUMN".into()), completion_key.unwrap_or("COLUMN".into()));
        format!("map them with --columns prompt={prompt},completion={completion}")
    }
}

/// Returns the names of a record's keys, formatted for error messages.
pub(crate) fn names(keys: &[String]) -> String {
    let named: Vec<&str> = keys.iter().map(|key| if key.is_empty() { "(unnamed)" } else { key }).collect();
    list(&named)
}
