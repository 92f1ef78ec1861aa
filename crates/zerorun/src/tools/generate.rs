//! `zerorun generate`: streams the answers of a model, with or without an adapter.

use super::resolve_model::{HELP, ResolvedModel};
use crate::error::{Error, FinetuneError, Result};
use crate::launch::console::{CommandLineError, EXIT_SETUP, eprint, print, refused};
use candle_core::{DType, Device};
use candle_zero::files;
use candle_zero::models::{Decoder, DecoderConfig};
use candle_zero::util::counted;
use candle_zero_finetune::hub::FileSelection;
use candle_zero_finetune::{
    Adapter, AdapterInitialValues, BaseModel, Conversation, Generator, Sampling, Template, Tokenizer,
};
use clap::{Parser, ValueEnum};
use std::ffi::OsString;
use std::io::{BufRead, IsTerminal, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Answer prompts and stream the tokens of each answer.
///
/// A prompt is a user message, rendered with the model's chat template. Without a template, or with --raw, the model
/// continues the text. Without --prompt and --messages, each non-blank line of standard input is a separate prompt.
///
/// Exit code: 0 if all prompts are answered, 1 if standard output could not be written, 2 if the model, the adapter, a
/// prompt or the command line is wrong.
#[derive(Debug, Parser)]
#[command(name = "generate", bin_name = "zerorun generate")]
struct GenerateArguments {
    #[arg(help = HELP)]
    model: PathBuf,

    /// Adapter: folder with adapter_config.json and adapter_model.safetensors
    #[arg(long, value_name = "DIR")]
    adapter: Option<PathBuf>,

    /// User message; repeatable
    #[arg(long, value_name = "TEXT")]
    prompt: Vec<String>,

    /// File with a JSON list of messages with role and content, to be answered
    #[arg(long, value_name = "FILE", conflicts_with_all = ["prompt", "system", "raw"])]
    messages: Option<PathBuf>,

    /// System message before the user's
    #[arg(long, value_name = "TEXT", conflicts_with = "raw")]
    system: Option<String>,

    /// Continue the text as it is, without the chat template
    #[arg(long)]
    raw: bool,

    /// Maximum number of tokens in an answer
    #[arg(long = "max_tokens", alias = "max-tokens", value_name = "N", default_value = "256")]
    max_tokens: usize,

    /// Sampling temperature; 0 is greedy decoding
    #[arg(long, value_name = "T", default_value = "0")]
    temperature: f64,

    /// Sample from the K likeliest tokens; 0 for all
    #[arg(long = "top_k", alias = "top-k", value_name = "K", default_value = "0")]
    top_k: usize,

    /// Sample from the likeliest tokens whose probabilities add up to this value
    #[arg(long = "top_p", alias = "top-p", value_name = "P", default_value = "1")]
    top_p: f64,

    /// Seed for sampling; each prompt starts from the same seed
    #[arg(long, value_name = "N", default_value = "0")]
    seed: u64,

    /// Precision of the stored weights and of the computation
    #[arg(long, value_enum, default_value = "f32")]
    dtype: GenerateDtype,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum GenerateDtype {
    F32,
    Bf16,
}

impl From<GenerateDtype> for DType {
    fn from(dtype: GenerateDtype) -> Self {
        match dtype {
            GenerateDtype::F32 => Self::F32,
            GenerateDtype::Bf16 => Self::BF16,
        }
    }
}

/// The maximum number of tokens in a line of standard input together with its answer. Position tables of this length
/// are built before the line is read.
const DEFAULT_CTX: usize = 1 << 15;
/// The maximum size of a conversation.
const MAX_CONVERSATION_BYTES: u64 = 1 << 28;

/// Returns the definition of the tool's command line.
pub(super) fn command() -> clap::Command {
    <GenerateArguments as clap::CommandFactory>::command()
}

/// Runs the tool.
pub(super) fn run(words: Vec<OsString>) -> Result<ExitCode, CommandLineError> {
    let arguments = GenerateArguments::try_parse_from(words).map_err(CommandLineError)?;
    Ok(arguments.run().unwrap_or_else(|error| refused(&error, EXIT_SETUP)))
}

impl GenerateArguments {
    fn run(self) -> Result<ExitCode> {
        let sampling = Sampling {
            max_tokens: self.max_tokens,
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            seed: self.seed,
        };
        sampling.check()?;
        let base = BaseModel::open(ResolvedModel::find(&self.model, FileSelection::All)?.path)?;
        let adapter = self.adapter.as_ref().map(Adapter::read).transpose()?;
        let tokenizer = Tokenizer::open(base.tokenizer_path())?;
        let template = if self.raw { None } else { self.template(&base, &tokenizer)? };
        let generator = Generator::new(&base, &tokenizer, template.as_ref())?;
        let prompts = self.command_line_prompts(&generator)?;
        let max_length = prompts.iter().map(|ids| ids.len().saturating_add(self.max_tokens)).max();
        let ctx = base.config().ctx.min(max_length.unwrap_or(DEFAULT_CTX));
        // The prompts are checked before the weights are read.
        prompts.iter().try_for_each(|ids| fits(ids, ctx))?;
        let model = open(&base, adapter, ctx, self.dtype.into())?;
        let answers = AnswerGenerator { generator: &generator, model: &model, sampling, ctx };
        let reads_lines = prompts.is_empty();
        for ids in prompts {
            if !answers.answer(&ids)? {
                return Ok(ExitCode::FAILURE);
            }
        }
        if reads_lines {
            for line in std::io::stdin().lock().lines() {
                let line =
                    line.map_err(|source| Error::Io { action: "read", path: "standard input".into(), source })?;
                if !line.trim().is_empty() && !answers.answer(&self.ids(&generator, &line)?)? {
                    return Ok(ExitCode::FAILURE);
                }
            }
        }
        Ok(ExitCode::SUCCESS)
    }

    /// Opens the template, if one exists or is required.
    fn template(&self, base: &BaseModel, tokenizer: &Tokenizer) -> Result<Option<Template>> {
        match Template::open(base.tokenizer_path(), tokenizer) {
            Err(error)
                if matches!(error.downcast_ref(), Some(FinetuneError::NoTemplate { .. }))
                    && self.messages.is_none()
                    && self.system.is_none() =>
            {
                eprint("zerorun: the model has no chat template: prompts are continued as they are");
                Ok(None)
            }
            opened => opened.map(Some),
        }
    }

    /// Returns the prompts given on the command line.
    fn command_line_prompts(&self, generator: &Generator<'_>) -> Result<Vec<Vec<u32>>> {
        if let Some(path) = &self.messages {
            return Ok(vec![generator.encode_conversation(&messages(path)?)?]);
        }
        self.prompt.iter().map(|prompt| self.ids(generator, prompt)).collect()
    }

    /// Tokenizes a prompt.
    fn ids(&self, generator: &Generator<'_>, prompt: &str) -> Result<Vec<u32>> {
        if !generator.has_template() {
            return generator.encode_text(prompt);
        }
        let system = self.system.iter().map(|system| ("system", system.as_str()));
        generator.encode_conversation(&Conversation::new(system.chain([("user", prompt)])))
    }
}

/// Reads the conversation in a file.
fn messages(path: &Path) -> Result<Conversation> {
    let text = files::read_text(path, MAX_CONVERSATION_BYTES);
    let text = text.map_err(|source| Error::Io { action: "read", path: path.to_owned(), source })?;
    Conversation::from_json(&text).map_err(|error| match error.downcast_ref() {
        Some(FinetuneError::Conversation { reason }) => {
            FinetuneError::Conversation { reason: format!("in {}, {reason}", path.display()) }.into()
        }
        _ => error,
    })
}

/// Fails if there is no room for an answer.
fn fits(ids: &[u32], ctx: usize) -> Result<()> {
    match ids.len() < ctx {
        true => Ok(()),
        false => Err(FinetuneError::LongPrompt { tokens: ids.len(), ctx }.into()),
    }
}

/// Opens the model, with tables for `ctx` positions.
fn open(base: &BaseModel, adapter: Option<Adapter>, ctx: usize, dtype: DType) -> Result<Decoder> {
    let lora = adapter.as_ref().map(|adapter| adapter.config.clone());
    let config = DecoderConfig { ctx, lora, ..base.config().clone() };
    let vb = match adapter {
        None => base.var_builder(dtype, &Device::Cpu),
        adapter => AdapterInitialValues::new(base, &config, adapter)?.var_builder(dtype, &Device::Cpu),
    };
    Ok(Decoder::new(&config, vb)?)
}

/// The model and settings that generate answers.
struct AnswerGenerator<'a> {
    generator: &'a Generator<'a>,
    model: &'a Decoder,
    sampling: Sampling,
    ctx: usize,
}

impl AnswerGenerator<'_> {
    /// Prints the answer to a prompt, and its speed. Returns whether standard output accepted it.
    fn answer(&self, prompt: &[u32]) -> Result<bool> {
        fits(prompt, self.ctx)?;
        let room = self.ctx - prompt.len();
        let sampling = Sampling { max_tokens: self.sampling.max_tokens.min(room), ..self.sampling.clone() };
        let is_terminal = std::io::stdout().is_terminal();
        let mut failed = None;
        let (mut times, start) = (Vec::new(), Instant::now());
        let extend = |session: &mut _, ids: &[u32]| {
            let logits = self.model.extend(session, ids)?;
            times.push(start.elapsed());
            Ok(logits)
        };
        let write_piece = |piece: &str| {
            let mut out = std::io::stdout().lock();
            let text = if is_terminal { strip_control_chars(piece) } else { piece.to_owned() };
            match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
                Ok(()) => ControlFlow::Continue(()),
                Err(error) => {
                    failed = Some(error);
                    ControlFlow::Break(())
                }
            }
        };
        let answer = self.generator.answer(prompt, &sampling, extend, write_piece)?;
        if let Some(error) = failed {
            // A reader that needs only the beginning, such as `head`, closes the pipe. This is not reported.
            if error.kind() != std::io::ErrorKind::BrokenPipe {
                eprint(&format!("zerorun: cannot write to standard output: {error}"));
            }
            return Ok(false);
        }
        if !print("") {
            return Ok(false);
        }
        eprint(&format!("zerorun: {}", GenerationSpeed { prompt: prompt.len(), times: &times }.text()));
        if !answer.ended {
            let why =
                if sampling.max_tokens < self.sampling.max_tokens { "the context length" } else { "--max_tokens" };
            eprint(&format!("zerorun: the answer was cut off at {} by {why}", counted(answer.ids.len(), "token")));
        }
        Ok(true)
    }
}

/// The times from which the speeds of the prompt and of the generated tokens are computed.
struct GenerationSpeed<'a> {
    prompt: usize,
    /// The times from the start of the generation to the end of each evaluation: that of the prompt, and that of each
    /// token after it.
    times: &'a [Duration],
}

impl GenerationSpeed<'_> {
    fn text(&self) -> String {
        let rate = |tokens: usize, time: Duration| tokens as f64 / time.as_secs_f64().max(1e-9);
        let first = self.times.first().copied().unwrap_or_default();
        let mut text = format!("{} at {:.1} tokens/s", counted(self.prompt, "prompt token"), rate(self.prompt, first));
        let generated_count = self.times.len().saturating_sub(1);
        if let Some(last) = self.times.last().filter(|_| generated_count > 0) {
            let generated = counted(generated_count, "generated token");
            text += &format!(", {generated} after the first at {:.1} tokens/s", rate(generated_count, *last - first));
        }
        text
    }
}

/// Replaces all characters in a text that would control a terminal.
fn strip_control_chars(text: &str) -> String {
    text.replace(|c: char| c.is_control() && c != '\n' && c != '\t', "\u{fffd}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_prompt_and_the_tokens_after_it_have_a_speed_each() {
        let times = [500, 600, 700].map(Duration::from_millis);
        let text = |times| GenerationSpeed { prompt: 20, times }.text();
        assert_eq!(
            text(&times),
            "20 prompt tokens at 40.0 tokens/s, 2 generated tokens after the first at 10.0 tokens/s"
        );
        assert_eq!(text(&times[..1]), "20 prompt tokens at 40.0 tokens/s");
    }

    #[test]
    fn what_a_terminal_gets_moves_no_cursor() {
        assert_eq!(strip_control_chars("a\u{1b}[2J\tb\nc\u{7}"), "a\u{fffd}[2J\tb\nc\u{fffd}");
    }
}
