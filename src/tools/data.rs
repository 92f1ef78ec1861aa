//! `zerorun data`: what fine-tuning makes of data files.

mod flags;

pub(super) use flags::{DataFlags, FileProgress};

use crate::error::{Error, FinetuneError, Result};
use crate::finetune::{Dataset, Source, Template, Tokenizer, show};
use crate::launch::console::{EXIT_SETUP, Refused, colours, print, refused};
use clap::{Args, Parser, Subcommand};
use std::ffi::OsString;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Shows what fine-tuning makes of data files.
#[derive(Debug, Parser)]
#[command(name = "data", bin_name = "zerorun data", disable_help_subcommand = true)]
struct Arguments {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    Show(Show),
}

/// Says what data files are recognized as and which of their lines cannot be used, and shows the first samples with what
/// is to be learned: in green on a terminal, else in brackets
///
/// The files are tokenized into the cache that `zerorun finetune` reads, where they are not there yet.
///
/// Exit code: 0 all is shown, 1 it could not be written, 2 the model's folder or a file cannot be used, or the command
/// line is wrong.
#[derive(Debug, Args)]
struct Show {
    /// The model's folder, with tokenizer.json and perhaps a chat template
    #[arg(value_name = "MODEL_DIR")]
    model: PathBuf,

    /// Data files (.jsonl, .json, .csv, .tsv, .txt, ...), each perhaps with a weight: FILE:2.5
    #[arg(value_name = "FILE", required = true)]
    files: Vec<String>,

    /// Samples to show of each file
    #[arg(long, value_name = "N", default_value_t = 3)]
    count: usize,

    #[command(flatten)]
    data: DataFlags,
}

/// The tool.
pub(super) fn run(words: Vec<OsString>) -> Result<ExitCode, Refused> {
    let What::Show(show) = Arguments::try_parse_from(words).map_err(Refused)?.what;
    Ok(match show.text() {
        Ok(text) if print(text.trim_end()) => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => refused(&error, EXIT_SETUP),
    })
}

impl Show {
    /// Of each file, what became of it and its first samples.
    fn text(&self) -> Result<String> {
        let (tokenizer, template) = open(&self.model)?;
        let (options, cache) = (self.data.options(), self.data.cache()?);
        let sources = self.files.iter().map(|file| Source::parse(file)).collect::<Result<Vec<_>>>()?;
        let mut progress = FileProgress::default();
        let mut tell = |at| progress.tell(at);
        let dataset = Dataset::prepare(&sources, &tokenizer, template.as_ref(), &options, &cache, &mut tell);
        progress.finish();
        let dataset = dataset?;
        let mut text = String::new();
        for (path, report) in dataset.reports() {
            _ = writeln!(text, "{}: {report}", path.display());
            report.notes().iter().for_each(|note| _ = writeln!(text, "  {note}"));
        }
        if !dataset.labels().is_empty() {
            _ = writeln!(text, "labels: {}", dataset.labels().join(", "));
        }
        text.push('\n');
        text.push_str(&show(&dataset, &tokenizer, self.count, colours())?);
        Ok(text)
    }
}

/// The tokenizer of a model's folder, and its chat template where it has one.
fn open(model: &Path) -> Result<(Tokenizer, Option<Template>)> {
    let tokenizer = Tokenizer::open(model)?;
    let template = match Template::open(model, &tokenizer) {
        Err(Error::Finetune(FinetuneError::NoTemplate { .. })) => None,
        template => Some(template?),
    };
    Ok((tokenizer, template))
}
