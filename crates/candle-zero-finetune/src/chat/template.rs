//! Chat templates, rendered as transformers renders them.

use super::assistant_mask::{self, ChatRenderer, GENERATION, RenderedConversation, TracedConversation, TurnMarkers};
use super::conversation::{Conversation, field};
use super::jinja_compat::{tojson, write_value};
use super::python_string_methods::{trim, unknown_method};
use super::strftime::strftime;
use super::template_capabilities::TemplateCapabilities;
use super::tokenizer::{SpecialTokens, Tokenizer};
use super::tokenizer_files::{self, object};
use crate::error::FinetuneError;
use crate::error::{Error, Result};
use crate::gguf::weights::GgufFile;
use candle_zero::files;
use candle_zero::sandbox::{SandboxSubject, within};
use candle_zero::util::lock;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Value, ValueKind};
use minijinja::{Environment, ErrorKind, State};
use std::collections::BTreeSet;
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

/// The name of a template for conversations with tools.
const TOOL_USE: &str = "tool_use";

/// The variable that asks for marks where generation markers stand.
const MARKED: &str = "__generation_marked__";

/// A chat template.
#[derive(Debug, Clone)]
pub struct Template {
    /// With the fuels of [`FUEL`].
    environments: [Environment<'static>; 2],
    /// What it is for errors: the chat template of a file.
    name: Arc<str>,
    subject: SandboxSubject,
    /// Renderings that had no end, and the line of the last one.
    endless: Arc<Mutex<(usize, Option<usize>)>>,
    /// Variables of every rendering: the special tokens, and what [`Template::set`] set.
    variables: Vec<(String, Value)>,
    /// Whether `{% generation %}` tells what the assistant says.
    has_markers: bool,
    turns: TurnMarkers,
    /// Of its source.
    source: u64,
    capabilities: TemplateCapabilities,
    /// All words of its source.
    words: BTreeSet<String>,
    /// The one for conversations with tools, where that is another.
    tool_use: Option<Box<Template>>,
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
        let subject = SandboxSubject::new(&*name);
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
        template.look_at_turns(special_texts)?;
        Ok(template)
    }

    /// Finds out how turns begin and end.
    fn look_at_turns(&mut self, special_texts: Vec<String>) -> Result<()> {
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

    /// The template of a model's folder: chat_template.jinja, else `chat_template` of tokenizer_config.json (a text, or a
    /// list with one named `default`). The one named `tool_use`, in that list or as
    /// additional_chat_templates/tool_use.jinja, is taken for conversations with tools. Where the
    /// tokenizer is that of a GGUF file, so are the templates.
    ///
    /// # Errors
    /// [`FinetuneError::NoTemplate`]; [`FinetuneError::TemplateSyntax`]; [`Error::Io`].
    pub fn open(folder: impl AsRef<Path>, tokenizer: &Tokenizer) -> Result<Self> {
        let folder = folder.as_ref();
        if let Some(file) = tokenizer_files::gguf_with_tokenizer(folder)?
            && !folder.join("chat_template.jinja").is_file()
        {
            return Self::inside(&file, tokenizer);
        }
        let read = |path: std::path::PathBuf| match files::read_text(&path, MOST_BYTES) {
            Ok(source) => Ok(Some(source)),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(Error::Io { action: "read", path, source }),
        };
        let (own, beside) = ("chat_template.jinja", format!("additional_chat_templates/{TOOL_USE}.jinja"));
        let (default, tool_use) = (read(folder.join(own))?, read(folder.join(&beside))?);
        // Files go before what is configured, all of it.
        let configured = if default.is_none() { configured(folder)? } else { ConfiguredTemplates::default() };
        let settings = "tokenizer_config.json";
        let either = |file: Option<String>, name: &str, configured: Option<String>| {
            let file = file.map(|source| (source, name.to_owned()));
            file.or_else(|| configured.map(|source| (source, settings.to_owned())))
        };
        let new = |(source, file): (String, String)| {
            let name = format!("the chat template of {}", folder.join(file).display());
            Self::named(name.into(), &source, tokenizer.special_tokens(), tokenizer.special_texts())
        };
        let Some(default) = either(default, own, configured.default) else {
            return Err(FinetuneError::NoTemplate { folder: folder.into() }.into());
        };
        let mut template = new(default)?;
        if let Some(other) = either(tool_use, &beside, configured.tool_use) {
            template.tool_use = Some(Box::new(new(other)?));
        }
        Ok(template)
    }

    /// The templates of a GGUF file.
    fn inside(file: &Path, tokenizer: &Tokenizer) -> Result<Self> {
        let gguf = GgufFile::open(file)?;
        let new = |source: &str| {
            let name = format!("the chat template of {}", file.display());
            Self::named(name.into(), source, tokenizer.special_tokens(), tokenizer.special_texts())
        };
        let Some(default) = gguf.chat_template("")? else {
            return Err(FinetuneError::NoTemplate { folder: file.into() }.into());
        };
        let mut template = new(default)?;
        if let Some(other) = gguf.chat_template(&format!(".{TOOL_USE}"))? {
            template.tool_use = Some(Box::new(new(other)?));
        }
        Ok(template)
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
        self.look_at_turns(self.turns.special_texts())?;
        match &mut self.tool_use {
            Some(other) => other.set(name, json),
            None => Ok(()),
        }
    }

    /// The template for a conversation.
    fn of(&self, conversation: &Conversation) -> &Self {
        let has_tools = conversation.tools.len().is_some_and(|tools| tools > 0);
        self.tool_use.as_deref().filter(|_| has_tools).unwrap_or(self)
    }

    /// The text of a conversation, with the header of an answer at its end where `add_generation_prompt` is set.
    ///
    /// # Errors
    /// [`FinetuneError::TemplateRefuses`].
    pub fn render(&self, conversation: &Conversation, add_generation_prompt: bool) -> Result<String> {
        let template = self.of(conversation);
        let render = |conversation: &Conversation| {
            template.render_messages(&conversation.messages, conversation, add_generation_prompt, false)
        };
        Ok(template.adapted(conversation, &render)?)
    }

    /// The text of a conversation, and where the assistant speaks: what the template writes after the header of an
    /// assistant's turn, up to and with the token that ends it.
    ///
    /// # Errors
    /// [`FinetuneError::TemplateRefuses`]; [`FinetuneError::Spans`] or [`FinetuneError::GenerationMarkers`] where it is
    /// not certain where that is.
    pub fn render_with_targets(&self, conversation: &Conversation) -> Result<RenderedConversation> {
        Ok(self.trace(conversation)?.rendered)
    }

    /// The same, with what is known of the messages in it.
    pub(crate) fn trace(&self, conversation: &Conversation) -> Result<TracedConversation, FinetuneError> {
        let template = self.of(conversation);
        let own;
        let turns = match conversation.variables.is_empty() {
            true => &template.turns,
            false => {
                own = TurnMarkers::of(template, template.turns.special_texts(), &conversation.variables);
                &own
            }
        };
        template.adapted(conversation, &|conversation| match template.has_markers {
            true => assistant_mask::of_markers(template, turns, conversation),
            false => assistant_mask::find(template, turns, conversation),
        })
    }

    /// What `render` makes of a conversation whose messages are as the template takes them. Where a message calls tools and
    /// has no content, which the template needs, it has an empty one.
    fn adapted<T>(
        &self,
        conversation: &Conversation,
        render: &dyn Fn(&Conversation) -> Result<T, FinetuneError>,
    ) -> Result<T, FinetuneError> {
        let mut adapted =
            Conversation { messages: self.capabilities.adapt(&conversation.messages), ..conversation.clone() };
        let refused = match render(&adapted) {
            Err(FinetuneError::TemplateRefuses { reason }) => reason,
            other => return other,
        };
        let lacks = |message: &Value| {
            let content = field(message, "content");
            content.is_undefined() || content.is_none()
        };
        let calls = |message: &Value| field(message, "tool_calls").is_true();
        let Some(first) = adapted.messages.iter().position(lacks) else {
            return Err(FinetuneError::TemplateRefuses { reason: refused });
        };
        let reason = format!("message {} has no content, and the template needs one ({refused})", first + 1);
        let wrong = FinetuneError::TemplateRefuses { reason };
        if adapted.messages.iter().any(|message| lacks(message) && !calls(message)) {
            return Err(wrong);
        }
        for message in adapted.messages.iter_mut().filter(|message| lacks(message)) {
            let keys = message.try_iter().into_iter().flatten().filter(|key| key.as_str() != Some("content"));
            let others = keys.map(|key| (key.clone(), message.get_item(&key).unwrap_or_default()));
            *message = Value::from_pairs(others.chain([("content".into(), "".into())]));
        }
        render(&adapted).map_err(|_| wrong)
    }

    /// Whether its source has a word: what it has not, it does not read.
    pub(crate) fn mentions(&self, word: &str) -> bool {
        self.words.contains(word) || self.tool_use.as_ref().is_some_and(|other| other.mentions(word))
    }

    /// Whether arguments of a call in the message are texts that are written as JSON once more.
    pub(crate) fn keeps_text(&self, message: &Value) -> bool {
        self.tool_use.as_deref().unwrap_or(self).capabilities.keeps_text(message)
    }

    /// A number that changes with the template, its variables, the special tokens among them, and the tokens that may end a
    /// turn.
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
        let given = conversation.variables.iter().map(|(_, value)| bytes_of(value)).sum::<usize>();
        let bytes = messages.iter().map(bytes_of).sum::<usize>() + bytes_of(&conversation.tools) + given;
        let is_usual = messages.len() <= USUAL.0 && bytes <= USUAL.1;
        let environment = &self.environments[usize::from(!is_usual)];
        let template = environment.get_template(NAME).map_err(refused)?;
        let given = [
            ("messages", messages.iter().cloned().collect()),
            ("tools", conversation.tools.clone()),
            ("add_generation_prompt", Value::from(add_generation_prompt)),
            (MARKED, Value::from(marked)),
        ];
        let none = [("documents", Value::from(()))];
        let variables = self.variables.iter().chain(&conversation.variables);
        let variables = variables.map(|(name, value)| (name.as_str(), value.clone()));
        let values = Value::from_pairs(none.into_iter().chain(variables).chain(given));
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

/// The templates of tokenizer_config.json.
#[derive(Default)]
struct ConfiguredTemplates {
    default: Option<String>,
    tool_use: Option<String>,
}

fn configured(folder: &Path) -> Result<ConfiguredTemplates> {
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
    let is_large = sources.into_iter().flatten().any(|source| source.len() as u64 > MOST_BYTES);
    match is_large {
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
