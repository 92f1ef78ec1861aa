//! `zerorun classify`: predicts the labels of texts with a model trained by `zerorun finetune --task classify`.

use crate::error::{Error, Result};
use crate::launch::console::{CommandLineError, EXIT_SETUP, eprint, print, refused};
use candle_zero_finetune::{ClassificationOutput, Classifier};
use clap::Parser;
use serde_json::{Map, Value, json};
use std::ffi::OsString;
use std::io::{self, BufRead as _, Read as _};
use std::path::PathBuf;
use std::process::ExitCode;

/// Predict the labels of texts with a model from `zerorun finetune --task classify`, or another encoder or language
/// model for sequence classification.
///
/// Prints one line per text: its label, the label's probability, and the text. Without TEXT, each non-blank
/// line of standard input is a text.
///
/// Exit code: 0 if all texts are labelled, 1 if standard output could not be written, 2 if the model, a text or the
/// command line is wrong.
#[derive(Debug, Parser)]
#[command(name = "classify", bin_name = "zerorun classify")]
struct ClassifyArguments {
    /// Folder of the trained model or, with --adapter, of the model that the adapter was trained on
    model: PathBuf,

    /// Texts to classify
    text: Vec<String>,

    /// Folder of a classifier's adapter, in PEFT's format
    #[arg(long, value_name = "DIR")]
    adapter: Option<PathBuf>,

    /// Print one JSON object per text, with the probabilities of all labels
    #[arg(long)]
    json: bool,
}

/// The maximum length of a line of standard input, in bytes.
const MAX_LINE_BYTES: u64 = 64 << 20;

/// Returns the definition of the tool's command line.
pub(super) fn command() -> clap::Command {
    <ClassifyArguments as clap::CommandFactory>::command()
}

/// Runs the tool.
pub(super) fn run(words: Vec<OsString>) -> Result<ExitCode, CommandLineError> {
    let arguments = ClassifyArguments::try_parse_from(words).map_err(CommandLineError)?;
    Ok(arguments.run().unwrap_or_else(|error| refused(&error, EXIT_SETUP)))
}

impl ClassifyArguments {
    fn run(self) -> Result<ExitCode> {
        let classifier = match &self.adapter {
            Some(adapter) => Classifier::open_with_adapter(&self.model, adapter)?,
            None => Classifier::open(&self.model)?,
        };
        for text in &self.text {
            if !self.show(&classifier, text)? {
                return Ok(ExitCode::FAILURE);
            }
        }
        if self.text.is_empty() {
            let mut input = io::stdin().lock();
            while let Some(line) = read_line(&mut input)? {
                if !line.trim().is_empty() && !self.show(&classifier, &line)? {
                    return Ok(ExitCode::FAILURE);
                }
            }
        }
        Ok(ExitCode::SUCCESS)
    }

    /// Prints the label of a text. Returns whether standard output accepted it.
    fn show(&self, classifier: &Classifier, text: &str) -> Result<bool> {
        let ClassificationOutput { labels, tokens, truncated_tokens, .. } = classifier.classify(text)?;
        if truncated_tokens > 0 && !self.json {
            eprint(&format!(
                "zerorun: the next text has {} tokens, {truncated_tokens} more than the model's context; the excess is \
                 cut off",
                tokens + truncated_tokens
            ));
        }
        let Some((label, probability)) = labels.first() else { return Ok(true) };
        if !self.json {
            return Ok(print(format!("{label}\t{probability:.4}\t{}", text.replace(['\n', '\r', '\t'], " "))));
        }
        let all: Map<String, Value> = labels.iter().map(|(label, p)| (label.clone(), json!(p))).collect();
        let mut line = json!({ "text": text, "label": label, "probability": probability, "labels": all });
        if truncated_tokens > 0 {
            line["cut_tokens"] = json!(truncated_tokens);
        }
        Ok(print(line))
    }
}

/// Reads the next line of standard input, without its line break.
fn read_line(input: &mut impl io::BufRead) -> Result<Option<String>> {
    let read_error = |source| Error::Io { action: "read", path: "standard input".into(), source };
    let mut line = String::new();
    let bytes = input.take(MAX_LINE_BYTES).read_line(&mut line).map_err(read_error)?;
    if bytes as u64 == MAX_LINE_BYTES {
        let text = format!("a line is longer than {} MiB", MAX_LINE_BYTES >> 20);
        return Err(read_error(io::Error::new(io::ErrorKind::InvalidData, text)));
    }
    line.truncate(line.trim_end_matches(['\n', '\r']).len());
    Ok((bytes > 0).then_some(line))
}
