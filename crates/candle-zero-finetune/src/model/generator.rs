//! Generates a model's answers: from a prompt to text, token by token, up to the end of the turn.

use crate::BaseModel;
use crate::chat::conversation::Conversation;
use crate::chat::template::Template;
use crate::chat::tokenizer::Tokenizer;
use crate::chat::tokenizer_files::object;
use crate::data::sample::Sample;
use crate::error::FinetuneError;
use crate::error::Result;
use candle_zero::models::{Session, TokenRng, keep_likeliest, next_token};
use serde_json::{Map, Value};
use std::ops::ControlFlow;

/// The method for choosing the tokens of an answer.
#[derive(Debug, Clone, PartialEq)]
pub struct Sampling {
    /// The maximum number of tokens of an answer, including the one that ends it.
    pub max_tokens: usize,
    /// The temperature. 0 is greedy decoding. Above 0, tokens are sampled from the logits divided by the temperature.
    pub temperature: f64,
    /// The number of most likely tokens to sample from. 0 means all.
    pub top_k: usize,
    /// The total probability of the most likely tokens to sample from. 1 means all.
    pub top_p: f64,
    /// The seed for sampling.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Self { max_tokens: 256, temperature: 0.0, top_k: 0, top_p: 1.0, seed: 0 }
    }
}

impl Sampling {
    /// Checks the parameters.
    ///
    /// # Errors
    /// [`FinetuneError::Sampling`].
    pub fn check(&self) -> Result<()> {
        let wrong = |name, found: String, allowed| Err(FinetuneError::Sampling { name, found, allowed }.into());
        if self.max_tokens == 0 {
            return wrong("max_tokens", "0".into(), "at least 1");
        }
        if !(self.temperature >= 0.0 && self.temperature.is_finite()) {
            return wrong("temperature", self.temperature.to_string(), "0 or a positive finite number");
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return wrong("top_p", self.top_p.to_string(), "above 0 and at most 1");
        }
        Ok(())
    }
}

/// The text that a model generated.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct GeneratedText {
    /// The tokens, without the one that ends the answer.
    pub ids: Vec<u32>,
    /// The text of the tokens, without special tokens.
    pub text: String,
    /// Whether the model itself ended the answer.
    pub ended: bool,
}

/// A converter of prompts to ids, and of the model's output to text.
///
/// ```no_run
/// use candle_zero_finetune::{BaseModel, Conversation, Generator, Sampling, Template, Tokenizer};
/// use candle_zero::models::Decoder;
/// use std::ops::ControlFlow;
///
/// let base = BaseModel::open("SmolLM2-135M-Instruct")?;
/// let model = Decoder::new(base.config(), base.var_builder(candle_core::DType::F32, &candle_core::Device::Cpu))?;
/// let tokenizer = Tokenizer::open(base.tokenizer_path())?;
/// let template = Template::open(base.tokenizer_path(), &tokenizer)?;
/// let generator = Generator::new(&base, &tokenizer, Some(&template))?;
/// let prompt = generator.encode_conversation(&Conversation::new([("user", "What is 2+2?")]))?;
/// let answer = generator.answer(
///     &prompt,
///     &Sampling::default(),
///     |session, ids| Ok(model.extend(session, ids)?),
///     |piece| {
///         print!("{piece}");
///         ControlFlow::Continue(())
///     },
/// )?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct Generator<'a> {
    tokenizer: &'a Tokenizer,
    template: Option<&'a Template>,
    base: &'a BaseModel,
    stop_token_ids: Vec<u32>,
}

impl<'a> Generator<'a> {
    /// Creates a generator for `base` or a model trained from it. An answer ends with a token that
    /// `generation_config.json`, `config.json` or the tokenizer defines as the end of a text, or with the token that
    /// ends an answer in the template.
    ///
    /// # Errors
    /// A tokenizer with more ids than the embedding has rows ([`BaseModel::check_tokens`]); a `generation_config.json`
    /// that cannot be read or is not a JSON object.
    pub fn new(base: &'a BaseModel, tokenizer: &'a Tokenizer, template: Option<&'a Template>) -> Result<Self> {
        base.check_tokens(tokenizer.vocab_size())?;
        let settings = object(&base.folder().join("generation_config.json"))?;
        let mut stop_token_ids = end_token_ids(&settings);
        let config = base.config_json().as_object();
        let text = config.and_then(|config| config.get("text_config")?.as_object());
        config.into_iter().chain(text).for_each(|config| stop_token_ids.extend(end_token_ids(config)));
        stop_token_ids.extend(tokenizer.special_id("eos_token"));
        stop_token_ids.extend(template.and_then(|template| end_of_turn(tokenizer, template)));
        stop_token_ids.sort_unstable();
        stop_token_ids.dedup();
        Ok(Self { tokenizer, template, base, stop_token_ids })
    }

    /// Returns the tokens that end an answer.
    pub fn stop_token_ids(&self) -> &[u32] {
        &self.stop_token_ids
    }

    /// Returns whether there is a chat template.
    pub fn has_template(&self) -> bool {
        self.template.is_some()
    }

    /// Returns the ids of a conversation, up to the header of the next answer.
    ///
    /// # Errors
    /// [`FinetuneError::NoTemplate`]; errors of [`Template::render`] and [`Tokenizer::encode`].
    pub fn encode_conversation(&self, conversation: &Conversation) -> Result<Vec<u32>> {
        let no_template = || FinetuneError::NoTemplate { folder: self.base.folder().to_owned() };
        let text = self.template.ok_or_else(no_template)?.render(conversation, true)?;
        Ok(self.tokenizer.encode(&text)?.ids)
    }

    /// Returns the ids of a text to be continued, preceded by the tokens that the tokenizer adds before a text.
    ///
    /// # Errors
    /// Errors of [`Tokenizer::encode`].
    pub fn encode_text(&self, text: &str) -> Result<Vec<u32>> {
        let ids = self.tokenizer.encode(text)?.ids;
        Ok([self.tokenizer.prefix_and_suffix().0, &ids].concat())
    }

    /// Generates the answer to `prompt`. `extend` adds ids to a session and returns the logits `[vocab]` of the next
    /// token ([`LanguageModel::extend`](candle_zero::models::LanguageModel::extend)). `on_text` receives each piece of
    /// text and can end the answer.
    ///
    /// With an engine at stage 3, each call of `extend` is collective: all ranks must answer the same prompt with the
    /// same sampling parameters, and no rank may end an answer independently.
    ///
    /// ```no_run
    /// # use candle_core::{Device, Tensor};
    /// # use candle_zero::{Engine, Result, models::Decoder};
    /// # use candle_zero_finetune::{GeneratedText, Generator, Sampling};
    /// # use std::ops::ControlFlow;
    /// # fn answer(engine: &mut Engine<Decoder>, generator: &Generator<'_>, prompt: &[u32]) -> Result<GeneratedText> {
    /// generator.answer(
    ///     prompt,
    ///     &Sampling::default(),
    ///     |session, ids| {
    ///         let logits = engine.eval(|model| Tensor::new(model.extend(session, ids)?, &Device::Cpu))?;
    ///         Ok(logits.to_vec1()?)
    ///     },
    ///     |_| ControlFlow::Continue(()),
    /// )
    /// # }
    /// ```
    ///
    /// # Errors
    /// An empty prompt; invalid parameters ([`Sampling::check`]); a logit that is NaN or positive infinity; errors of
    /// `extend`; [`FinetuneError::Decode`].
    pub fn answer(
        &self,
        prompt: &[u32],
        sampling: &Sampling,
        mut extend: impl FnMut(&mut Session, &[u32]) -> Result<Vec<f32>>,
        mut on_text: impl FnMut(&str) -> ControlFlow<()>,
    ) -> Result<GeneratedText> {
        sampling.check()?;
        if prompt.is_empty() {
            return Err(FinetuneError::EmptyPrompt.into());
        }
        let (mut rng, mut session) = (TokenRng::new(sampling.seed), Session::new());
        session.reserve(prompt.len().saturating_add(sampling.max_tokens));
        let mut stream = self.tokenizer.stream(true);
        let mut answer = GeneratedText::default();
        for _ in 0..sampling.max_tokens {
            let mut logits = extend(&mut session, answer.ids.last().map_or(prompt, std::slice::from_ref))?;
            // A logit of minus infinity is allowed: it marks a token that the model never produces.
            if logits.iter().any(|logit| logit.is_nan() || *logit == f32::INFINITY) {
                return Err(FinetuneError::LogitsNotFinite.into());
            }
            keep_likeliest(&mut logits, sampling.top_k, sampling.top_p, sampling.temperature);
            let id = next_token(&logits, sampling.temperature, &mut rng);
            if self.stop_token_ids.contains(&id) {
                answer.ended = true;
                break;
            }
            answer.ids.push(id);
            let piece = stream.push(id)?;
            answer.text.push_str(&piece);
            if !piece.is_empty() && on_text(&piece).is_break() {
                return Ok(answer);
            }
        }
        let rest = stream.finish()?;
        answer.text.push_str(&rest);
        if !rest.is_empty() {
            // The answer ends regardless of the return value.
            let _ = on_text(&rest);
        }
        Ok(answer)
    }
}

/// Reads `eos_token_id`, which is one id or several.
fn end_token_ids(config: &Map<String, Value>) -> Vec<u32> {
    let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
    match config.get("eos_token_id") {
        Some(Value::Array(several)) => several.iter().filter_map(id).collect(),
        Some(one) => id(one).into_iter().collect(),
        None => vec![],
    }
}

/// Returns the special token that ends an answer in a template.
fn end_of_turn(tokenizer: &Tokenizer, template: &Template) -> Option<u32> {
    let conversation = Conversation::new([("user", "a"), ("assistant", "b")]);
    let sample = Sample::of_conversation(tokenizer, template, &conversation).ok()?;
    let last = sample.targets.iter().rposition(|target| *target)?;
    let id = sample.ids[last];
    tokenizer.special_texts().iter().any(|text| tokenizer.id(text) == Some(id)).then_some(id)
}
