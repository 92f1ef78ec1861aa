//! Chat templates, rendered as transformers renders them.

use super::assistant_mask::{
    self, ChatRenderer, GENERATION_MARKERS, RenderedConversation, TracedConversation, TurnMarkers,
};
use super::conversation::{Conversation, field};
use super::jinja_compat::{tojson, write_value};
use super::python_string_methods::{trim, unknown_method};
use super::strftime::strftime;
use super::template_capabilities::TemplateCapabilities;
use super::tokenizer::{SpecialTokens, Tokenizer};
use super::tokenizer_files::{self, object};
use crate::error::FinetuneError;
use crate::error::{Error, Result};
use crate::gguf::weight_reader::GgufFile;
use candle_zero::files;
use candle_zero::untrusted_work::{SandboxSubject, run_sandboxed};
use candle_zero::util::lock;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Value, ValueKind};
use minijinja::{Environment, ErrorKind, State};
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{SystemTime, UNIX_EPOCH};

/// The maximum size of a template file in bytes.
const MAX_TEMPLATE_BYTES: u64 = 1 << 20;

/// The limits on the fuel of a rendering. Fuel pays for steps, and for texts and lists at 64 bytes per unit of fuel.
/// The second limit is for long conversations.
const FUEL_LIMITS: [u64; 2] = [2_000_000, 64_000_000];

/// The maximum length of a conversation for which the first limit suffices, in messages and in bytes.
const SHORT_CONVERSATION: (usize, usize) = (256, 256 << 10);

/// The number of endless renderings after which no further rendering is started.
const MAX_ENDLESS_RENDERINGS: usize = 3;

/// The name of the template in its environment.
const TEMPLATE_NAME: &str = "chat_template";

/// The name of a template for conversations with tools.
const TOOL_USE: &str = "tool_use";

/// The variable that requests marks around the text that generation markers enclose.
const MARK_VARIABLE: &str = "__generation_marked__";

/// A chat template.
#[derive(Debug, Clone)]
pub struct Template {
    /// The environments, one for each limit in [`FUEL_LIMITS`].
    environments: [Environment<'static>; 2],
    /// The name of the template in errors, such as `the chat template of FILE`.
    name: Arc<str>,
    subject: SandboxSubject,
    /// The number of renderings that did not end, and the line in which the last one was stopped.
    endless: Arc<Mutex<(usize, Option<usize>)>>,
    /// The variables of every rendering: the special tokens, and those that [`Template::set`] set.
    variables: Vec<(String, Value)>,
    /// Whether `{% generation %}` marks the assistant's text.
    has_markers: bool,
    turns: TurnMarkers,
    /// The hash of the source.
    source: u64,
    capabilities: TemplateCapabilities,
    /// All words of the source.
    words: BTreeSet<String>,
    /// The separate template for conversations with tools, if there is one.
    tool_use: Option<Box<Template>>,
}

impl Template {
    /// Parses a template. `tokens` are the special tokens that it writes (`bos_token`, ...). `special_texts` are the
    /// texts of all special tokens, one of which usually ends a turn.
    ///
    /// # Errors
    /// [`FinetuneError::TemplateSyntax`]; [`FinetuneError::TemplateWithoutEnd`].
    pub fn new(source: &str, tokens: &SpecialTokens, special_texts: Vec<String>) -> Result<Self> {
        Self::named("the chat template".into(), source, tokens, special_texts)
    }

    /// Parses a template with a name.
    fn named(name: Arc<str>, source: &str, tokens: &SpecialTokens, special_texts: Vec<String>) -> Result<Self> {
        let (with_filters, has_markers) = replace_markers(source);
        let syntax = |e: minijinja::Error| FinetuneError::TemplateSyntax { reason: reason(&e) };
        let mut environment = environment().map_err(syntax)?;
        let subject = SandboxSubject::new(&*name);
        let add = || environment.add_template_owned(TEMPLATE_NAME, with_filters);
        run_sandboxed(&subject, source.len(), add)
            .map_err(|reason| FinetuneError::TemplateSyntax { reason })?
            .map_err(syntax)?;
        let environments = FUEL_LIMITS.map(|fuel| {
            let mut environment = environment.clone();
            environment.set_fuel(Some(fuel));
            environment
        });
        let variables = tokens.iter().map(|(name, text)| (name.to_string(), Value::from(text))).collect();
        let words = source.split(|c: char| !(c.is_alphanumeric() || c == '_')).filter(|word| !word.is_empty());
        let words = words.map(str::to_string).collect();
        let source = twox_hash::XxHash3_64::oneshot(source.as_bytes());
        let (turns, capabilities, tool_use, endless) =
            (TurnMarkers::default(), TemplateCapabilities::default(), None, Arc::default());
        let mut template = Self {
            environments,
            name,
            subject,
            endless,
            variables,
            has_markers,
            turns,
            source,
            capabilities,
            words,
            tool_use,
        };
        template.detect_turns(special_texts)?;
        Ok(template)
    }

    /// Determines how turns begin and end, and which message formats the template can read.
    fn detect_turns(&mut self, special_texts: Vec<String>) -> Result<()> {
        self.turns = TurnMarkers::of(self, special_texts, &[]);
        self.capabilities = TemplateCapabilities::of(self);
        match *lock(&self.endless) {
            (0, _) => Ok(()),
            (_, line) => Err(self.without_end(line).into()),
        }
    }

    fn without_end(&self, line: Option<usize>) -> FinetuneError {
        FinetuneError::TemplateWithoutEnd { template: self.name.to_string(), line }
    }

    /// Reads the template in a model's folder: chat_template.jinja or, without that file, `chat_template` in
    /// tokenizer_config.json (a text, or a list or object with an entry named `default`). A template named `tool_use`,
    /// in the same list or object or in additional_chat_templates/tool_use.jinja, is used for conversations with tools.
    /// If the tokenizer comes from a GGUF file and the folder has no chat_template.jinja, the templates also come from
    /// the GGUF file.
    ///
    /// # Errors
    /// [`FinetuneError::NoTemplate`]; [`FinetuneError::TemplateSyntax`]; [`FinetuneError::TemplateWithoutEnd`];
    /// [`FinetuneError::TokenizerFile`] for a tokenizer_config.json that cannot be used; errors of GGUF files;
    /// [`Error::Io`].
    pub fn open(folder: impl AsRef<Path>, tokenizer: &Tokenizer) -> Result<Self> {
        let folder = folder.as_ref();
        if let Some(file) = tokenizer_files::gguf_with_tokenizer(folder)?
            && !folder.join("chat_template.jinja").is_file()
        {
            return Self::open_gguf(&file, tokenizer);
        }
        let read = |path: std::path::PathBuf| match files::read_text(&path, MAX_TEMPLATE_BYTES) {
            Ok(source) => Ok(Some(source)),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(Error::Io { action: "read", path, source }),
        };
        let (default_file, tool_use_file) =
            ("chat_template.jinja", format!("additional_chat_templates/{TOOL_USE}.jinja"));
        let (default, tool_use) = (read(folder.join(default_file))?, read(folder.join(&tool_use_file))?);
        // Template files take precedence over all templates in the configuration.
        let configured = if default.is_none() { configured_templates(folder)? } else { ConfiguredTemplates::default() };
        let settings = "tokenizer_config.json";
        let either = |file: Option<String>, name: &str, configured: Option<String>| {
            let file = file.map(|source| (source, name.to_owned()));
            file.or_else(|| configured.map(|source| (source, settings.to_owned())))
        };
        let new = |(source, file): (String, String)| {
            let name = format!("the chat template of {}", folder.join(file).display());
            Self::named(name.into(), &source, tokenizer.special_tokens(), tokenizer.special_texts())
        };
        let Some(default) = either(default, default_file, configured.default) else {
            return Err(FinetuneError::NoTemplate { folder: folder.into() }.into());
        };
        let mut template = new(default)?;
        if let Some(tool_use) = either(tool_use, &tool_use_file, configured.tool_use) {
            template.tool_use = Some(Box::new(new(tool_use)?));
        }
        Ok(template)
    }

    /// Reads the templates in a GGUF file.
    fn open_gguf(file: &Path, tokenizer: &Tokenizer) -> Result<Self> {
        let gguf = GgufFile::open(file)?;
        let new = |source: &str| {
            let name = format!("the chat template of {}", file.display());
            Self::named(name.into(), source, tokenizer.special_tokens(), tokenizer.special_texts())
        };
        let Some(default) = gguf.chat_template("")? else {
            return Err(FinetuneError::NoTemplate { folder: file.into() }.into());
        };
        let mut template = new(default)?;
        if let Some(tool_use) = gguf.chat_template(&format!(".{TOOL_USE}"))? {
            template.tool_use = Some(Box::new(new(tool_use)?));
        }
        Ok(template)
    }

    /// Sets a variable of the template, such as `enable_thinking` of Qwen3, to a JSON value (`false`, `"high"`, ...).
    ///
    /// # Errors
    /// [`FinetuneError::Conversation`] for text that is not JSON; [`FinetuneError::TemplateWithoutEnd`].
    pub fn set(&mut self, name: &str, json: &str) -> Result<()> {
        let wrong = |e| FinetuneError::Conversation { reason: format!("the variable {name} is not JSON ({e})") };
        let value = serde_json::from_str::<Value>(json).map_err(wrong)?;
        self.variables.retain(|(other, _)| other != name);
        self.variables.push((name.into(), value));
        self.detect_turns(self.turns.special_texts())?;
        match &mut self.tool_use {
            Some(other) => other.set(name, json),
            None => Ok(()),
        }
    }

    /// Returns the template for a conversation.
    fn for_conversation(&self, conversation: &Conversation) -> &Self {
        let has_tools = conversation.tools.len().is_some_and(|tools| tools > 0);
        self.tool_use.as_deref().filter(|_| has_tools).unwrap_or(self)
    }

    /// Returns the text of a conversation, followed by the header of an answer if `add_generation_prompt` is set.
    ///
    /// # Errors
    /// [`FinetuneError::TemplateRefuses`]; [`FinetuneError::TemplateWithoutEnd`].
    pub fn render(&self, conversation: &Conversation, add_generation_prompt: bool) -> Result<String> {
        let template = self.for_conversation(conversation);
        let render = |conversation: &Conversation| {
            template.render_messages(&conversation.messages, conversation, add_generation_prompt, false)
        };
        Ok(template.render_adapted(conversation, &render)?)
    }

    /// Returns the text of a conversation and the ranges of the assistant's text: everything after the header of an
    /// assistant's turn, up to and including the token or text that ends it.
    ///
    /// # Errors
    /// [`FinetuneError::TemplateRefuses`]; [`FinetuneError::TemplateWithoutEnd`]; [`FinetuneError::Spans`] or
    /// [`FinetuneError::GenerationMarkers`] if these ranges are uncertain.
    pub fn render_with_targets(&self, conversation: &Conversation) -> Result<RenderedConversation> {
        Ok(self.trace(conversation)?.rendered)
    }

    /// Does the same as [`render_with_targets`](Self::render_with_targets) and also returns facts about the messages.
    pub(crate) fn trace(&self, conversation: &Conversation) -> Result<TracedConversation, FinetuneError> {
        let template = self.for_conversation(conversation);
        let own_turns;
        let turns = match conversation.variables.is_empty() {
            true => &template.turns,
            false => {
                own_turns = TurnMarkers::of(template, template.turns.special_texts(), &conversation.variables);
                &own_turns
            }
        };
        template.render_adapted(conversation, &|conversation| match template.has_markers {
            true => assistant_mask::find_by_markers(template, turns, conversation),
            false => assistant_mask::find(template, turns, conversation),
        })
    }

    /// Returns the result of `render` for the conversation with its messages adapted to the template. If a message
    /// calls tools and has no content, but the template needs content, the message gets empty content.
    fn render_adapted<T>(
        &self,
        conversation: &Conversation,
        render: &dyn Fn(&Conversation) -> Result<T, FinetuneError>,
    ) -> Result<T, FinetuneError> {
        let mut adapted =
            Conversation { messages: self.capabilities.adapt(&conversation.messages), ..conversation.clone() };
        let refusal = match render(&adapted) {
            Err(FinetuneError::TemplateRefuses { reason }) => reason,
            other => return other,
        };
        let lacks_content = |message: &Value| {
            let content = field(message, "content");
            content.is_undefined() || content.is_none()
        };
        let calls_tools = |message: &Value| field(message, "tool_calls").is_true();
        let Some(first) = adapted.messages.iter().position(lacks_content) else {
            return Err(FinetuneError::TemplateRefuses { reason: refusal });
        };
        let reason = format!("message {} has no content, which the template needs ({refusal})", first + 1);
        let wrong = FinetuneError::TemplateRefuses { reason };
        if adapted.messages.iter().any(|message| lacks_content(message) && !calls_tools(message)) {
            return Err(wrong);
        }
        for message in adapted.messages.iter_mut().filter(|message| lacks_content(message)) {
            let keys = message.try_iter().into_iter().flatten().filter(|key| key.as_str() != Some("content"));
            let other_fields = keys.map(|key| (key.clone(), message.get_item(&key).unwrap_or_default()));
            *message = Value::from_pairs(other_fields.chain([("content".into(), "".into())]));
        }
        render(&adapted).map_err(|_| wrong)
    }

    /// Returns whether the source contains a word. A template does not read keys whose names are not in its source.
    pub(crate) fn mentions(&self, word: &str) -> bool {
        self.words.contains(word) || self.tool_use.as_ref().is_some_and(|other| other.mentions(word))
    }

    /// Returns whether the message has a call whose arguments are a text that the template encodes as JSON a second
    /// time.
    pub(crate) fn double_encodes_arguments(&self, message: &Value) -> bool {
        self.tool_use.as_deref().unwrap_or(self).capabilities.double_encodes_arguments(message)
    }

    /// Returns a number that changes with the template, its variables (including the special tokens) and the tokens
    /// that may end a turn.
    pub fn fingerprint(&self) -> u64 {
        let (variables, ends) = (&self.variables, self.turns.special_texts());
        let other = self.tool_use.as_ref().map(|other| other.fingerprint());
        twox_hash::XxHash3_64::oneshot(format!("{:x} {variables:?} {ends:?} {other:?}", self.source).as_bytes())
    }
}

impl ChatRenderer for Template {
    fn render_messages(
        &self,
        messages: &[Value],
        conversation: &Conversation,
        add_generation_prompt: bool,
        marked: bool,
    ) -> Result<String, FinetuneError> {
        if let (MAX_ENDLESS_RENDERINGS.., line) = *lock(&self.endless) {
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
        let variable_bytes = conversation.variables.iter().map(|(_, value)| bytes_of(value)).sum::<usize>();
        let bytes = messages.iter().map(bytes_of).sum::<usize>() + bytes_of(&conversation.tools) + variable_bytes;
        let is_short = messages.len() <= SHORT_CONVERSATION.0 && bytes <= SHORT_CONVERSATION.1;
        let environment = &self.environments[usize::from(!is_short)];
        let template = environment.get_template(TEMPLATE_NAME).map_err(refused)?;
        let arguments = [
            ("messages", messages.iter().cloned().collect()),
            ("tools", conversation.tools.clone()),
            ("add_generation_prompt", Value::from(add_generation_prompt)),
            (MARK_VARIABLE, Value::from(marked)),
        ];
        let defaults = [("documents", Value::from(()))];
        let variables = self.variables.iter().chain(&conversation.variables);
        let variables = variables.map(|(name, value)| (name.as_str(), value.clone()));
        let values = Value::from_pairs(defaults.into_iter().chain(variables).chain(arguments));
        let rendered = run_sandboxed(&self.subject, bytes, || template.render(values));
        rendered.map_err(|reason| FinetuneError::TemplateRefuses { reason })?.map_err(refused)
    }
}

/// Returns the approximate number of bytes of the texts in a value.
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

/// Returns whether a rendering has exhausted its fuel.
fn is_out_of_fuel(error: &minijinja::Error) -> bool {
    let cause = std::error::Error::source(error).and_then(|cause| cause.downcast_ref());
    error.kind() == ErrorKind::OutOfFuel || cause.is_some_and(is_out_of_fuel)
}

/// The templates in tokenizer_config.json.
#[derive(Default)]
struct ConfiguredTemplates {
    default: Option<String>,
    tool_use: Option<String>,
}

fn configured_templates(folder: &Path) -> Result<ConfiguredTemplates> {
    let path = folder.join("tokenizer_config.json");
    let config = object(&path)?;
    let Some(found) = config.get("chat_template") else { return Ok(ConfiguredTemplates::default()) };
    let text = |value: &serde_json::Value| value.as_str().map(str::to_string);
    let named = |name: &str| match found {
        serde_json::Value::Array(list) => {
            text(list.iter().find(|entry| entry.get("name").is_some_and(|found| found == name))?.get("template")?)
        }
        serde_json::Value::Object(all) => text(all.get(name)?),
        _ => None,
    };
    let found = ConfiguredTemplates { default: text(found).or_else(|| named("default")), tool_use: named(TOOL_USE) };
    let sources = [&found.default, &found.tool_use];
    let is_large = sources.into_iter().flatten().any(|source| source.len() as u64 > MAX_TEMPLATE_BYTES);
    match is_large {
        true => {
            let reason = format!("its chat template is larger than {MAX_TEMPLATE_BYTES} bytes");
            Err(FinetuneError::TokenizerFile { path, reason }.into())
        }
        false => Ok(found),
    }
}

/// Sets up Jinja as transformers does.
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

/// Marks the text that generation markers enclose if marks are requested.
fn mark_generation(state: &State<'_, '_>, text: &str) -> String {
    match state.lookup(MARK_VARIABLE).is_some_and(|marked| marked.is_true()) {
        true => format!("{}{text}{}", GENERATION_MARKERS[0], GENERATION_MARKERS[1]),
        false => text.into(),
    }
}

/// Returns the template with generation markers replaced by filter blocks, which Jinja treats in the same way, and
/// whether it has any markers.
fn replace_markers(source: &str) -> (String, bool) {
    let (mut text, mut rest, mut has_markers) = (String::with_capacity(source.len()), source, false);
    while let Some(at) = rest.find("{%") {
        let Some(end) = rest[at + 2..].find("%}").map(|end| at + 2 + end) else { break };
        let content = &rest[at + 2..end];
        let word = content.trim_matches(|c: char| c.is_whitespace() || matches!(c, '-' | '+'));
        let replacement = match word {
            "generation" => Some("filter __generation__"),
            "endgeneration" => Some("endfilter"),
            _ => None,
        };
        text.push_str(&rest[..at + 2]);
        match replacement {
            Some(other) => text.push_str(&content.replace(word, other)),
            None => text.push_str(content),
        }
        text.push_str("%}");
        has_markers |= replacement.is_some();
        rest = &rest[end + 2..];
    }
    text.push_str(rest);
    (text, has_markers)
}

/// Returns the message of an error in parsing or rendering a template: its kind, its detail and the line, or only the
/// detail if the template itself raised the error.
fn reason(error: &minijinja::Error) -> String {
    match (error.kind(), error.detail(), error.line()) {
        // A message that the template itself raises is complete.
        (ErrorKind::InvalidOperation, Some(detail), _) if error.line().is_some() => detail.trim_end_matches('.').into(),
        (kind, detail, line) => {
            let detail = detail.map(|detail| format!(": {detail}")).unwrap_or_default();
            let line = line.map(|line| format!(" (line {line} of the template)")).unwrap_or_default();
            format!("{kind}{detail}{line}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_that_ends_in_its_first_character_is_an_error_of_the_template() {
        for source in ["{%}", "{%}%}", "a{%}{% generation %}b{% endgeneration %}", "{%"] {
            let refused = Template::new(source, &SpecialTokens::default(), vec![]);
            assert!(matches!(refused, Err(Error::Other(_))), "{source}: {refused:?}");
        }
        assert_eq!(replace_markers("{%}%}{%- generation %}"), ("{%}%}{%- filter __generation__ %}".into(), true));
    }
}
