//! Chat templates, rendered as transformers renders them.

use super::conversation::Conversation;
use super::error::FinetuneError;
use super::python::{tojson, write_value};
use super::python_methods::{trim, unknown_method};
use super::spans::{self, GENERATION, Render, Rendered, Turns};
use super::strftime::strftime;
use super::tokenizer::{SpecialTokens, Tokenizer, object};
use crate::error::{Error, Result};
use crate::files;
use crate::sandbox::{Subject, within};
use crate::util::lock;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Value, ValueKind};
use minijinja::{Environment, ErrorKind, State};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{SystemTime, UNIX_EPOCH};

/// The most bytes of a template's file.
const MOST_BYTES: u64 = 1 << 20;

/// What a rendering may do: steps, and 64 bytes of texts and lists each. The second is for long conversations.
const FUEL: [u64; 2] = [2_000_000, 64_000_000];

/// The longest conversation for which the first is enough, in messages and in bytes.
const USUAL: (usize, usize) = (256, 256 << 10);

/// Renderings without an end after which no further one is begun.
const ENDLESS: usize = 3;

/// The name of the template in its environment.
const NAME: &str = "chat_template";

/// The variable that asks for marks where generation markers stand.
const MARKED: &str = "__generation_marked__";

/// A chat template.
#[derive(Debug, Clone)]
pub struct Template {
    /// With the fuels of [`FUEL`].
    environments: [Environment<'static>; 2],
    /// What it is for errors: the chat template of a file.
    name: Arc<str>,
    subject: Subject,
    /// Renderings that had no end, and the line of the last one.
    endless: Arc<Mutex<(usize, Option<usize>)>>,
    /// Variables of every rendering: the special tokens, and what [`Template::set`] set.
    variables: Vec<(String, Value)>,
    /// Whether `{% generation %}` tells what the assistant says.
    has_markers: bool,
    turns: Turns,
    /// Of its source.
    source: u64,
}

impl Template {
    /// A template's source, the special tokens that it writes (`bos_token`, ...), and the texts of all special tokens, of
    /// which one ends a turn.
    ///
    /// # Errors
    /// [`FinetuneError::TemplateSyntax`]; [`FinetuneError::TemplateWithoutEnd`].
    pub fn new(source: &str, tokens: &SpecialTokens, special_texts: Vec<String>) -> Result<Self> {
        Self::named("the chat template".into(), source, tokens, special_texts)
    }

    /// The same, of a template with a name.
    fn named(name: Arc<str>, source: &str, tokens: &SpecialTokens, special_texts: Vec<String>) -> Result<Self> {
        let (with_filters, has_markers) = replace_markers(source);
        let syntax = |e: minijinja::Error| FinetuneError::TemplateSyntax { reason: reason(&e) };
        let mut environment = environment().map_err(syntax)?;
        let subject = Subject::new(&*name);
        let add = || environment.add_template_owned(NAME, with_filters);
        within(&subject, source.len(), add)
            .map_err(|reason| FinetuneError::TemplateSyntax { reason })?
            .map_err(syntax)?;
        let environments = FUEL.map(|fuel| {
            let mut environment = environment.clone();
            environment.set_fuel(Some(fuel));
            environment
        });
        let variables = tokens.iter().map(|(name, text)| (name.to_string(), Value::from(text))).collect();
        let source = twox_hash::XxHash3_64::oneshot(source.as_bytes());
        let (turns, endless) = (Turns::default(), Arc::default());
        let mut template = Self { environments, name, subject, endless, variables, has_markers, turns, source };
        template.look_at_turns(special_texts)?;
        Ok(template)
    }

    /// Finds out how turns begin and end.
    fn look_at_turns(&mut self, special_texts: Vec<String>) -> Result<()> {
        self.turns = Turns::of(self, special_texts);
        match *lock(&self.endless) {
            (0, _) => Ok(()),
            (_, line) => Err(self.without_end(line).into()),
        }
    }

    fn without_end(&self, line: Option<usize>) -> FinetuneError {
        FinetuneError::TemplateWithoutEnd { template: self.name.to_string(), line }
    }

    /// The template of a model's folder: chat_template.jinja, else `chat_template` of tokenizer_config.json (a text, or a
    /// list of which the one named `default` is taken).
    ///
    /// # Errors
    /// [`FinetuneError::NoTemplate`]; [`FinetuneError::TemplateSyntax`]; [`Error::Io`].
    pub fn open(folder: impl AsRef<Path>, tokenizer: &Tokenizer) -> Result<Self> {
        let folder = folder.as_ref();
        let path = folder.join("chat_template.jinja");
        let (source, file) = match files::read_text(&path, MOST_BYTES) {
            Ok(source) => (Some(source), "chat_template.jinja"),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => (configured(folder)?, "tokenizer_config.json"),
            Err(source) => return Err(Error::Io { action: "read", path, source }),
        };
        let name = format!("the chat template of {}", folder.join(file).display());
        match source {
            None => Err(FinetuneError::NoTemplate { folder: folder.into() }.into()),
            Some(source) => Self::named(name.into(), &source, tokenizer.special_tokens(), tokenizer.special_texts()),
        }
    }

    /// Sets a variable of the template, as `enable_thinking` of Qwen3, to what JSON text says (`false`, `"high"`, ...).
    ///
    /// # Errors
    /// [`FinetuneError::Conversation`] for text that is not JSON.
    pub fn set(&mut self, name: &str, json: &str) -> Result<()> {
        let wrong = |e| FinetuneError::Conversation { reason: format!("the variable {name} is not JSON ({e})") };
        let value = serde_json::from_str::<Value>(json).map_err(wrong)?;
        self.variables.retain(|(other, _)| other != name);
        self.variables.push((name.into(), value));
        self.look_at_turns(self.turns.special_texts())
    }

    /// The text of a conversation, with the header of an answer at its end where `add_generation_prompt` is set.
    ///
    /// # Errors
    /// [`FinetuneError::TemplateRefuses`].
    pub fn render(&self, conversation: &Conversation, add_generation_prompt: bool) -> Result<String> {
        Ok(self.render_messages(&conversation.messages, conversation, add_generation_prompt, false)?)
    }

    /// The text of a conversation, and where the assistant speaks: what the template writes after the header of an
    /// assistant's turn, up to and with the token that ends it.
    ///
    /// # Errors
    /// [`FinetuneError::TemplateRefuses`]; [`FinetuneError::Spans`] or [`FinetuneError::GenerationMarkers`] where it is
    /// not certain where that is.
    pub fn render_with_targets(&self, conversation: &Conversation) -> Result<Rendered> {
        Ok(match self.has_markers {
            true => spans::of_markers(&self.render_messages(&conversation.messages, conversation, false, true)?)?,
            false => spans::find(self, &self.turns, conversation)?,
        })
    }

    /// A number that changes with the template, its variables, the special tokens among them, and the tokens that may end a
    /// turn.
    pub fn fingerprint(&self) -> u64 {
        let (variables, ends) = (&self.variables, self.turns.special_texts());
        twox_hash::XxHash3_64::oneshot(format!("{:x} {variables:?} {ends:?}", self.source).as_bytes())
    }
}

impl Render for Template {
    fn render_messages(
        &self,
        messages: &[Value],
        conversation: &Conversation,
        add_generation_prompt: bool,
        marked: bool,
    ) -> Result<String, FinetuneError> {
        if let (ENDLESS.., line) = *lock(&self.endless) {
            return Err(self.without_end(line));
        }
        let refused = |e: minijinja::Error| match is_out_of_fuel(&e) {
            true => {
                let mut endless = lock(&self.endless);
                *endless = (endless.0 + 1, e.line());
                self.without_end(e.line())
            }
            false => FinetuneError::TemplateRefuses { reason: reason(&e) },
        };
        let bytes = messages.iter().map(bytes_of).sum::<usize>() + bytes_of(&conversation.tools);
        let is_usual = messages.len() <= USUAL.0 && bytes <= USUAL.1;
        let environment = &self.environments[usize::from(!is_usual)];
        let template = environment.get_template(NAME).map_err(refused)?;
        let given = [
            ("messages", messages.iter().cloned().collect()),
            ("tools", conversation.tools.clone()),
            ("documents", Value::from(())),
            ("add_generation_prompt", Value::from(add_generation_prompt)),
            (MARKED, Value::from(marked)),
        ];
        let variables = self.variables.iter().map(|(name, value)| (name.as_str(), value.clone()));
        let values = Value::from_pairs(variables.chain(given));
        let rendered = within(&self.subject, bytes, || template.render(values));
        rendered.map_err(|reason| FinetuneError::TemplateRefuses { reason })?.map_err(refused)
    }
}

/// Bytes of the texts in a value, more or less.
fn bytes_of(value: &Value) -> usize {
    let items = || value.try_iter().into_iter().flatten();
    match value.kind() {
        ValueKind::String => value.as_str().map_or(0, str::len),
        ValueKind::Seq => items().map(|item| bytes_of(&item)).sum(),
        ValueKind::Map => {
            items().map(|key| bytes_of(&key) + value.get_item(&key).map_or(0, |item| bytes_of(&item))).sum()
        }
        _ => size_of::<Value>(),
    }
}

/// Whether a rendering took all that it may.
fn is_out_of_fuel(error: &minijinja::Error) -> bool {
    let cause = std::error::Error::source(error).and_then(|cause| cause.downcast_ref());
    error.kind() == ErrorKind::OutOfFuel || cause.is_some_and(is_out_of_fuel)
}

/// `chat_template` of tokenizer_config.json.
fn configured(folder: &Path) -> Result<Option<String>> {
    let path = folder.join("tokenizer_config.json");
    let config = object(&path)?;
    let Some(found) = config.get("chat_template") else { return Ok(None) };
    let text = |value: &serde_json::Value| value.as_str().map(str::to_string);
    let named = |name: &str| {
        let entry = found.as_array()?.iter().find(|entry| entry.get("name").is_some_and(|found| found == name))?;
        text(entry.get("template")?)
    };
    let found = text(found).or_else(|| named("default"));
    match found.as_ref().is_some_and(|found| found.len() as u64 > MOST_BYTES) {
        true => {
            let reason = format!("its chat template is larger than {MOST_BYTES} bytes");
            Err(FinetuneError::TokenizerFile { path, reason }.into())
        }
        false => Ok(found),
    }
}

/// Jinja as transformers sets it up.
fn environment() -> Result<Environment<'static>, minijinja::Error> {
    let mut environment = Environment::new();
    environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    environment.set_unknown_method_callback(unknown_method);
    environment.add_filter("trim", trim);
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_formatter(write_value);
    environment.add_filter("tojson", |value: &Value, arguments| tojson(value, arguments));
    environment.add_filter("__generation__", mark_generation);
    environment.add_function("raise_exception", |message: String| -> Result<Value, minijinja::Error> {
        Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
    });
    environment.add_function("strftime_now", |format: &str| {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        strftime(format, now.as_secs())
    });
    Ok(environment)
}

/// What generation markers enclose, marked where that is asked for.
fn mark_generation(state: &State<'_, '_>, text: &str) -> String {
    match state.lookup(MARKED).is_some_and(|marked| marked.is_true()) {
        true => format!("{}{text}{}", GENERATION[0], GENERATION[1]),
        false => text.into(),
    }
}

/// The template with filter blocks in place of generation markers, which Jinja treats alike, and whether it has any.
fn replace_markers(source: &str) -> (String, bool) {
    let (mut text, mut rest, mut any) = (String::with_capacity(source.len()), source, false);
    while let Some(at) = rest.find("{%") {
        let Some(end) = rest[at..].find("%}").map(|end| at + end) else { break };
        let inside = &rest[at + 2..end];
        let word = inside.trim_matches(|c: char| c.is_whitespace() || matches!(c, '-' | '+'));
        let in_its_place = match word {
            "generation" => Some("filter __generation__"),
            "endgeneration" => Some("endfilter"),
            _ => None,
        };
        text.push_str(&rest[..at + 2]);
        match in_its_place {
            Some(other) => text.push_str(&inside.replace(word, other)),
            None => text.push_str(inside),
        }
        text.push_str("%}");
        any |= in_its_place.is_some();
        rest = &rest[end + 2..];
    }
    text.push_str(rest);
    (text, any)
}

/// The renderer's message: its own text, the line, and what raised it.
fn reason(error: &minijinja::Error) -> String {
    match (error.kind(), error.detail(), error.line()) {
        // What a template says itself needs no more.
        (ErrorKind::InvalidOperation, Some(detail), _) if error.line().is_some() => detail.trim_end_matches('.').into(),
        (kind, detail, line) => {
            let detail = detail.map(|detail| format!(": {detail}")).unwrap_or_default();
            let line = line.map(|line| format!(" (line {line} of the template)")).unwrap_or_default();
            format!("{kind}{detail}{line}")
        }
    }
}
